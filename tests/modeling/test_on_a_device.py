"""Models on a device that is not the CPU compute what they compute there, and leave nothing on the CPU."""

from collections import Counter

import pretended
import pytest
import stock_models
import tiny
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from transformers import BertModel

import hf_posenc
from hf_posenc.modeling.schemes import sinusoidal
from hf_posenc.modeling.schemes.table import SCHEMES


pytestmark = pretended.needed


def check(build, inputs: dict[str, torch.Tensor]) -> Counter:
    """Outputs and gradients of where there is no padding are those of the CPU; how often the host waited for the forward pass."""

    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(int(inputs["attention_mask"].sum()), 32, generator=generator, dtype=torch.float64)

    def computed(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden = model(**inputs).last_hidden_state
        waited.update(pretended.waits)
        attended = inputs["attention_mask"].bool()
        (hidden[attended] * weights.to(hidden.device)).sum().backward()
        with torch.no_grad():
            again = model(**inputs).last_hidden_state
        gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return {"hidden": hidden[attended], "without gradients": again[attended], **gradients}

    waited: Counter = Counter()
    pretended.waits.clear()
    expected = computed(build().double(), inputs)
    with pretended.there():
        model = build().double().to(pretended.DEVICE)
        found = computed(model, pretended.moved(inputs))
        assert {one.device for one in found.values()} == {pretended.DEVICE}
        found = {name: one.detach().cpu() for name, one in found.items()}
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(
            found[name], one, rtol=1e-9, atol=1e-9, msg=lambda told, name=name: f"{name}: {told}"
        )
    return waited


def stock() -> nn.Module:
    torch.manual_seed(0)
    return BertModel(tiny.stock_config()).eval()


def stock_by_sdpa(case: str) -> nn.Module:
    model = stock_models.build(case)
    hf_posenc.set_attn_implementation(model, "sdpa")
    return model


def half_padding() -> dict[str, torch.Tensor]:
    inputs = tiny.inputs(batch=4, length=14)
    inputs["attention_mask"][2:, 5:] = 0
    return inputs


def spread(model: nn.Module) -> nn.Module:
    """The last layer is on the second device, as `device_map` has it; what layers share is on the first."""
    layers = model.encoder.layer
    model.to(pretended.DEVICE)
    layers[-1].to(pretended.SECOND)
    elsewhere = {*layers[-1].modules()}
    for module in [*model.modules()]:
        place = pretended.SECOND if module in elsewhere else pretended.DEVICE
        add_hook_to_module(module, AlignDevicesHook(execution_device=place, io_same_device=module is model))
    return model


@torch.no_grad()
def check_spread(build, inputs: dict[str, torch.Tensor]) -> None:
    attended = inputs["attention_mask"].bool()
    expected = build().double()(**inputs).last_hidden_state[attended]
    with pretended.there():
        found = spread(build().double())(**pretended.moved(inputs)).last_hidden_state
        assert found.device == pretended.DEVICE
        torch.testing.assert_close(found.cpu()[attended], expected, rtol=1e-9, atol=1e-9)


def test_tensors_of_two_devices_are_an_error_as_arrays_are():
    with pretended.there():
        tensor = torch.ones(3, device=pretended.DEVICE)
        with pytest.raises(RuntimeError, match="same device"):
            tensor + torch.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            tensor + torch.ones(3, device=pretended.SECOND)
        assert tensor.to(pretended.SECOND).device == pretended.SECOND
        with pytest.raises(RuntimeError, match="numpy"):
            tensor.numpy()
        assert (tensor + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0] and tensor.sum().item() == 3
        assert pretended.waits == {"aten._local_scalar_dense.default": 1}


@tiny.cross(scheme=SCHEMES, backend=["sdpa", "eager"], path=tiny.PATHS, indirect=("path",), rest=pytest.mark.slow)
def test_schemes(scheme, backend, path):
    def build() -> nn.Module:
        model = tiny.build(scheme)
        model.set_attn_implementation(backend)
        return model

    waited = check(build, half_padding())
    # Transformers itself looks at the mask once.
    assert waited == check(stock, half_padding())


@tiny.cross(family=tiny.FAMILIES, scheme=["absolute+deberta", "sinusoidal+t5", "rope"], strength=1)
def test_families(family, scheme):
    check(lambda: tiny.build(scheme, family), tiny.inputs(family=family))


OPTIONS = [(name, {flag.name: tiny.another_value(flag)}) for name, scheme in SCHEMES.items() for flag in scheme.flags]
TOGETHER = [
    ("sinusoidal", {"position_combine": "concat"}),
    ("absolute+t5", {"position_combine": "gate"}),
    ("t5", {"position_window": 3, "position_global_every": 2, "position_global_scheme": "none"}),
    ("deberta", {"position_window": 3}),
    ("sinusoidal", {"position_every_layer": True}),
    ("rope", {"position_learn_frequencies": "shared"}),
    *((scheme, {}) for scheme in ("t5", "tupe", "cable", "fire")),
]


@pytest.mark.parametrize(
    ("scheme", "options"), [pytest.param(*case, marks=pytest.mark.slow) for case in OPTIONS] + TOGETHER, ids=str
)
def test_options(scheme, options):
    try:
        tiny.build(scheme, **options)
    except ValueError as error:
        pytest.skip(str(error))
    check(lambda: tiny.build(scheme, **options), half_padding())
    check_spread(lambda: tiny.build(scheme, **options), half_padding())


@pytest.mark.parametrize("case", stock_models.KINDS)
def test_attention_of_transformers_own_models(case):
    check(lambda: stock_by_sdpa(case), stock_models.batch(9, "right"))
    check_spread(lambda: stock_by_sdpa(case), stock_models.batch(9, "right"))


@pytest.fixture
def no_float64(monkeypatch):
    """As on MPS."""
    monkeypatch.setattr(pretended, "missing", {torch.float64})
    monkeypatch.setattr(sinusoidal, "WITHOUT_FLOAT64", {*sinusoidal.WITHOUT_FLOAT64, pretended.NAME})


@pytest.mark.parametrize("name", [*SCHEMES, *stock_models.KINDS])
def test_devices_without_float64(name, no_float64):
    def build() -> nn.Module:
        return tiny.build(name) if name in SCHEMES else stock_by_sdpa(name)

    inputs = half_padding()
    attended = inputs["attention_mask"].bool()
    expected = build()(**inputs).last_hidden_state[attended]
    with pretended.there():
        found = build().to(pretended.DEVICE)(**pretended.moved(inputs)).last_hidden_state
        found.sum().backward()
        torch.testing.assert_close(found.detach().cpu()[attended], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scheme", ["absolute", "t5", "deberta", "rope", "cable", None])
def test_without_padding(scheme, monkeypatch):
    pretended.skip_padding_there(monkeypatch)

    def build() -> nn.Module:
        model = tiny.build(scheme) if scheme else stock()
        hf_posenc.unpad(model)
        return model

    check(build, half_padding())
    check_spread(build, half_padding())


@pytest.mark.parametrize("scheme", ["absolute", "t5", "deberta", "rope", "alibi"])
def test_generation(scheme):
    options = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2}
    inputs = tiny.inputs(batch=2, length=6, padding="left")

    def build() -> nn.Module:
        return tiny.build(scheme, head="LMHeadModel", is_decoder=True)

    expected = build().generate(**inputs, **options)
    with pretended.there():
        found = build().to(pretended.DEVICE).generate(**pretended.moved(inputs), **options)
        assert torch.equal(found.cpu(), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "deberta", "rope", "sinusoidal", *stock_models.KINDS])
def test_models_are_moved_from_device_to_device(name):
    """What was kept of one device is not used on another."""
    model = tiny.build(name) if name in SCHEMES else stock_by_sdpa(name)
    hf_posenc.cache_projections(model)
    inputs = half_padding()
    attended = inputs["attention_mask"].bool()
    expected = model(**inputs).last_hidden_state[attended]
    with pretended.there():
        for place in (pretended.DEVICE, pretended.SECOND, torch.device("cpu")):
            found = model.to(place)(**{name: one.to(place) for name, one in inputs.items()}).last_hidden_state
            assert found.device == place
            torch.testing.assert_close(found.cpu()[attended], expected, rtol=0, atol=1e-4)
