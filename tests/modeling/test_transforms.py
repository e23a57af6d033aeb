"""Promise 7 under PyTorch's transformations: forward-mode AD and `torch.func`; and tensors without values."""

import pytest
import stock_models
import tiny
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import BertModel

import hf_posenc
from hf_posenc.modeling.kernels.packing import loss_reads_padding
from hf_posenc.modeling.schemes.table import SCHEMES
from hf_posenc.modeling.stock_interface import ModelInputs
from hf_posenc.modeling.torch_state import may_carry_tangents


pytestmark = [pytest.mark.usefixtures("blocks_for_all_lengths"), pytest.mark.slow]


every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_stock_model = pytest.mark.parametrize("case", stock_models.KINDS)


def half_padding() -> dict[str, torch.Tensor]:
    """So much that it is left out."""
    inputs = tiny.inputs(batch=6, length=16)
    inputs["attention_mask"][3:, 5:] = 0
    return inputs


def variant(scheme: str, backend: str = "sdpa", **flags) -> nn.Module:
    model = tiny.build(scheme, **flags).double()
    model.set_attn_implementation(backend)
    return model


def stock(case: str) -> nn.Module:
    model = stock_models.build(case).double()
    assert hf_posenc.set_attn_implementation(model, "sdpa") == 1
    return model


def directions(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}


def call(model: nn.Module, parameters: dict[str, torch.Tensor], inputs: dict) -> torch.Tensor:
    return torch.func.functional_call(model, parameters, kwargs=inputs).last_hidden_state


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def finite_differences(model: nn.Module, inputs: dict, step: float = 1e-6) -> torch.Tensor:
    values, moving = values_of(model), directions(model)
    with torch.no_grad():
        high, low = (call(model, {n: v + by * moving[n] for n, v in values.items()}, inputs) for by in (step, -step))
    return (high - low) / (2 * step)


def with_tangents(model: nn.Module, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    values, moving = values_of(model), directions(model)
    assert not may_carry_tangents()
    with forward_ad.dual_level():
        assert may_carry_tangents()
        found = call(model, {n: forward_ad.make_dual(v, moving[n]) for n, v in values.items()}, inputs)
        return forward_ad.unpack_dual(found)


def check_tangents(model: nn.Module, inputs: dict, expected: torch.Tensor) -> None:
    """Those of forward-mode AD are the expected ones, beside the output that there is without, and `torch.func.jvp` agrees."""
    with torch.no_grad():
        output = model(**inputs).last_hidden_state
    primal, tangent = with_tangents(model, inputs)
    torch.testing.assert_close(primal, output, rtol=0, atol=1e-6)
    assert expected.norm() > 1
    assert (tangent - expected).norm() < 1e-5 * expected.norm()
    attended = inputs["attention_mask"].bool()
    arguments = (values_of(model),), (directions(model),)
    primal, tangent = torch.func.jvp(lambda given: call(model, given, inputs), *arguments)
    torch.testing.assert_close(primal[attended], output[attended], rtol=0, atol=1e-6)
    assert (tangent - expected)[attended].norm() < 1e-5 * expected.norm()


@tiny.cross(scheme=SCHEMES, backend=["sdpa", "eager"], rest=pytest.mark.slow)
def test_forward_mode_derivatives_are_those_of_the_output(scheme, backend):
    model, inputs = variant(scheme, backend), half_padding()
    for name, parameter in model.named_parameters():
        if "kerple" in name:  # clipped, they have the derivative of what is not clipped
            parameter.data.abs_().add_(0.1)
    check_tangents(model, inputs, finite_differences(model, inputs))


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_rotations_carry_tangents(layout):
    model, inputs = variant("rope", position_layout=layout), tiny.inputs(padding=None)
    check_tangents(model, inputs, finite_differences(model, inputs))


@every_stock_model
@pytest.mark.parametrize("padding", [None, "left"])
def test_stock_models_have_forward_mode_derivatives_with_every_backend(case, padding):
    model, inputs = stock(case), stock_models.batch(9, padding)
    hf_posenc.set_attn_implementation(model, "eager")  # v1 normalises in float32, too coarse for differences
    _, expected = with_tangents(model, inputs)
    hf_posenc.set_attn_implementation(model, "sdpa")
    check_tangents(model, inputs, expected)


def test_unpadded_stock_models_have_forward_mode_derivatives():
    torch.manual_seed(0)
    model = BertModel(tiny.stock_config("bert", attn_implementation="eager")).double().eval()
    hf_posenc.unpad(model)
    check_tangents(model, half_padding(), finite_differences(model, half_padding()))


@every_scheme
def test_a_single_tangent_reaches_the_output(scheme):
    """Whichever parameter it begins at: nothing is kept or fused that does not carry it."""
    model, inputs = variant(scheme), half_padding()
    parameters = values_of(model)
    names = [*hf_posenc.position_parameters(model)] + [n for n in parameters if "layer.1.attention" in n]
    with torch.no_grad():
        model(**inputs)
    for name in names:
        with torch.no_grad(), forward_ad.dual_level():
            moved = forward_ad.make_dual(parameters[name], torch.randn_like(parameters[name]))
            tangent = forward_ad.unpack_dual(call(model, {name: moved}, inputs)).tangent
        assert tangent is not None, name


@every_scheme
def test_gradients_of_torch_func_are_those_of_autograd(scheme):
    model, inputs = variant(scheme), half_padding()
    parameters = values_of(model)
    attended = inputs["attention_mask"][..., None]

    def loss(given) -> torch.Tensor:
        return (call(model, given, inputs) * attended).sin().sum()

    found = torch.func.grad(loss)(parameters)
    loss(dict(model.named_parameters())).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert expected.keys() >= hf_posenc.position_parameters(model).keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scheme", ["deberta", "kerple", "rope", "t5"])
def test_vmap_over_models(scheme):
    model, inputs = variant(scheme), tiny.inputs()
    parameters = values_of(model)
    moved = {name: p + 0.1 * torch.randn_like(p) for name, p in parameters.items()}
    stacked = {name: torch.stack([p, moved[name]]) for name, p in parameters.items()}
    attended = inputs["attention_mask"].bool()
    with torch.no_grad():
        found = torch.func.vmap(lambda given: call(model, given, inputs))(stacked)
        for one, given in zip(found, (parameters, moved)):
            torch.testing.assert_close(one[attended], call(model, given, inputs)[attended], rtol=0, atol=1e-9)


def fake_call(model: nn.Module, mode: FakeTensorMode, inputs: dict) -> torch.Tensor:
    return model(**{name: mode.from_tensor(value) for name, value in inputs.items()})[0]


def check_fake(build, inputs: dict) -> None:
    shape = build()(**inputs)[0].shape
    with FakeTensorMode() as mode:
        found = fake_call(build(), mode, inputs)
        found.sum().backward()
    assert found.shape == shape
    model = build()
    with torch.no_grad():
        before = model(**inputs)[0]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake_call(model, mode, inputs)
        # Nothing without values was kept.
        assert torch.equal(model(**inputs)[0], before)


@pytest.mark.slow
@every_scheme
def test_fake_tensors_go_through_variants(scheme):
    check_fake(lambda: tiny.build(scheme, head="ForTokenClassification"), half_padding())


@pytest.mark.slow
@every_stock_model
def test_fake_tensors_go_through_stock_models_with_every_backend(case):
    def build() -> nn.Module:
        model = stock_models.build(case)
        model.set_attn_implementation("sdpa")
        return model

    check_fake(build, stock_models.batch(9, "right"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["v3", "v1"])  # stock MPNet cannot be recorded
def test_make_fx_records_stock_models_with_every_backend(case):
    model, inputs = stock(case), stock_models.batch(9, "left")
    with torch.no_grad():
        graph = make_fx(lambda ids, mask: model(input_ids=ids, attention_mask=mask)[0])(*inputs.values())
        other = stock_models.batch(9, "right")
        torch.testing.assert_close(graph(*other.values()), model(**other)[0], rtol=0, atol=1e-6)


@pytest.mark.slow
@every_scheme
def test_models_without_values_are_called_as_stock_is(scheme):
    """Stock reads the values of a mask of tokens; of one of pairs it does not."""
    model = tiny.build(scheme, head="ForTokenClassification").to("meta")
    ids = torch.ones(6, 16, dtype=torch.long, device="meta")
    for mask in (None, torch.ones(6, 1, 16, 16, dtype=torch.bool, device="meta")):
        output = model(input_ids=ids, attention_mask=mask, labels=ids)
        output.loss.backward()
        assert output.logits.shape == (6, 16, 2) and output.logits.is_meta


def test_labels_without_values_are_not_looked_at():
    mask = torch.ones(6, 16, dtype=torch.long, device="meta")
    for is_requested in (True, False):
        assert not loss_reads_padding(ModelInputs({"labels": mask}, mask), is_requested)


@pytest.mark.parametrize("scheme", ["t5", "deberta", "absolute+tupe"])
def test_functions_of_some_parameters_are_differentiated_while_others_want_gradients(scheme):
    gradients = []
    for backend in ("sdpa", "eager"):
        model = tiny.build(scheme, attn_implementation=backend)
        given = tiny.inputs(batch=2, length=30)
        some = {name: p.detach() for name, p in model.named_parameters() if name.endswith("output.dense.weight")}
        assert any(p.requires_grad for p in hf_posenc.position_parameters(model).values())

        def total(values, model=model, given=given):
            return torch.func.functional_call(model, values, kwargs=given).last_hidden_state.sum()

        gradients.append(torch.func.grad(total)(some))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-3, rtol=1e-3)
