"""Promise 3: code beside a checkpoint computes by whole matrices what hf_posenc computes in blocks, packed, and with what it keeps."""

import importlib
import sys

import pytest
import tiny
import torch
from tiny import CACHE
from torch import nn

from hf_posenc.modeling.kernels import fast, packing
from hf_posenc.modeling.schemes.table import SCHEMES


ALL = [*SCHEMES, "absolute+t5", "tupe+t5", "sinusoidal+deberta", "alibi+rope", "fire+cable"]
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 12 + [2] * 5, [0] * 15 + [1] * 9, [0] * 24])


@pytest.fixture(autouse=True)
def everything_fast(monkeypatch):
    """Tiny inputs go in blocks and packed, as long ones do."""
    for limit in ("FEWEST_SCORES", "FEWEST_SCORES_WITH_VIEWS"):
        monkeypatch.setattr(fast, limit, 0)
    for limit in ("FEWEST_PLACES", "SMALLEST_SHARE", "FEWEST_SAVED"):
        monkeypatch.setattr(packing, limit, 0)


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """From a model, the same one by the code that is saved with it."""
    monkeypatch.syspath_prepend(tmp_path)

    def made(model: nn.Module) -> nn.Module:
        config, family = model.config, model.config.family
        model.save_pretrained(tmp_path / "beside")
        module = importlib.import_module(f"beside.{family.modeling_file.removesuffix('.py')}")
        assert vars(importlib.import_module("beside.extras").EXTRAS) != vars(fast.EXTRAS)
        own = getattr(module, type(model).__name__)
        assert type(model) not in own.__mro__
        again = own(own.config_class.from_dict(config.to_dict()))
        again.load_state_dict(model.state_dict())
        again.set_attn_implementation(config._attn_implementation)
        return again.to(model.dtype).train(model.training)

    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == "beside"]:
        del sys.modules[name]


def batch(kind: str, family: str) -> dict:
    length = DOCUMENTS.shape[1]
    given = tiny.inputs(len(DOCUMENTS), length, family, kind if kind in ("left", "right") else None)
    if kind == "documents":
        given["attention_mask"] = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])[:, None]
        places = torch.arange(length) - (DOCUMENTS[:, :, None] != DOCUMENTS[:, None]).tril().sum(-1)
        given["position_ids"] = places + tiny.FAMILIES[family]().first_position
    return given


def compare(model: nn.Module, again: nn.Module, given: dict, tolerance: float) -> None:
    """Outputs where nothing is padding, and every gradient."""
    mask = given["attention_mask"]
    seen = mask.bool() if mask.dim() == 2 else torch.ones(mask.shape[0], mask.shape[-1], dtype=torch.bool)
    found = []
    for one in (model, again):
        states = one(**given).last_hidden_state[seen]
        generator = torch.Generator().manual_seed(1)
        (states.float() * torch.randn(states.shape, generator=generator)).mean().backward()
        found.append(states.detach())
    scale = tolerance * found[0].abs().max()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=float(scale))
    others = dict(again.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (others[name].grad is None), name
        if parameter.grad is not None:
            scale = tolerance * max(parameter.grad.abs().max(), 1e-3)
            torch.testing.assert_close(others[name].grad, parameter.grad, rtol=0, atol=float(scale), msg=name)


@tiny.cross(
    scheme=ALL,
    family=[*tiny.FAMILIES],
    kind=["left", "right", "none", "documents"],
    window=[None, 6],
    backend=["sdpa", "eager"],
    strength=1,
)
def test_outputs_and_gradients(scheme, family, kind, window, backend, beside):
    if kind == "documents" and backend == "eager":
        kind = "right"  # transformers' eager attention takes additive masks of pairs alone
    model = tiny.build(scheme, family, position_window=window, attn_implementation=backend).double().eval()
    again = beside(model)
    compare(model, again, batch(kind, family), 1e-9)
    with torch.no_grad():
        given = batch(kind, family)
        for _ in range(2):  # the second time with what is kept
            states = [one(**given).last_hidden_state for one in (model, again)]
            seen = given["attention_mask"].bool() if given["attention_mask"].dim() == 2 else ...
            torch.testing.assert_close(states[1][seen], states[0][seen], rtol=0, atol=1e-9)


@tiny.cross(scheme=["t5", "deberta", "relative", "rope", "tupe"], dtype=[torch.float32, torch.bfloat16], strength=1)
def test_in_single_and_half_precision(scheme, dtype, beside):
    model = tiny.build(scheme, attn_implementation="sdpa").to(dtype)
    compare(model, beside(model), batch("right", "bert"), 1e-4 if dtype == torch.float32 else 0.1)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["absolute+t5", "deberta", "relative", "rope", "cable", "fire"])
def test_a_decoder_with_a_cache(scheme, beside):
    model = tiny.build(scheme, "bert", "LMHeadModel", is_decoder=True, position_window=8).double()
    again, ids = beside(model), tiny.inputs(2, 20, padding=None)["input_ids"]
    whole = model(ids).logits
    first = again(ids[:, :13], use_cache=True)
    rest = again(ids[:, 13:], **{CACHE: first.past_key_values if hasattr(first, "past_key_values") else first.cache})
    found = torch.cat([first.logits, rest.logits], 1)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("scheme", ["t5", "deberta", "rope"])
def test_flex_attention_with_score_terms_needs_hf_posenc(scheme, beside):
    again = beside(tiny.build(scheme))
    if scheme == "rope":
        again.set_attn_implementation("flex_attention")
    else:
        with pytest.raises(ValueError, match=f"flex_attention.*{scheme}.*sdpa, eager; with hf_posenc installed"):
            again.set_attn_implementation("flex_attention")


def test_other_schemes_need_hf_posenc(beside):
    again = beside(tiny.build("t5"))
    with pytest.raises(ValueError, match="unknown scheme 'rope'.*Known: absolute, none, t5.*others are in hf_posenc"):
        type(again.config)(position_scheme="rope")
