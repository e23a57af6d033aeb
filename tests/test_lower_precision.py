"""Promise 7 in lower precision: in bfloat16, and with torchao's int8 linear layers, models compute what their rounded weights say.

What rounding the weights does is not looked at here: they are rounded in the models that others are compared with too.
"""

import contextlib
import copy
import warnings

import pytest
import stock_models
import tiny
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import BertModel

import hf_posenc
from hf_posenc.modeling.kernels.packing import Packing
from hf_posenc.modeling.schemes.table import SCHEMES


# Schemes by themselves, and some that share projections, terms or a table with others.
ALL = [*SCHEMES, "absolute+deberta", "t5+rope"]
WITHOUT_POSITIONS = "none"
# Tokens: as whole matrices and as blocks (attention.FEWEST_SCORES).
SHORT, LONG = 24, 96
LENGTHS = {"short": SHORT, "long": LONG}
STOCK = ("bert", *stock_models.KINDS)
KINDS = ("weights", "dynamic")
# Shares of the norm of hidden states: what rounding in between makes, and what positions make at least. torchao rounds half of the
# largest states of tokens up or down by chance (127.5 steps), which two ways to compute the same do not share.
BFLOAT16, INT8 = 0.01, {"weights": 1e-4, "dynamic": 0.01}
POSITIONS = 0.02
# What rounding weights and states does, with one scale for the states of a batch.
BY_TORCH = 0.06


def build(scheme: str) -> nn.Module:
    """Positions have a part in the scores that can be seen, and does not swamp them."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128, "initializer_range": 0.1}
    model = tiny.build(scheme, **sizes)
    return model if scheme in ("tupe", "cable") else tiny.fill_positions(model, std=1.2)


def positions_matter(model: nn.Module, inputs: dict, expected: torch.Tensor) -> bool:
    """Whether the same model without its positions computes something else."""
    plain = build(WITHOUT_POSITIONS)
    plain.load_state_dict({name: model.state_dict()[name] for name in plain.state_dict()})
    return difference(states(plain, inputs), expected, inputs) > POSITIONS


def build_stock(case: str) -> nn.Module:
    """BERT, or a stock model with this package's attention."""
    if case == "bert":
        model = BertModel(tiny.stock_config(max_position_embeddings=128))
        return stock_models.fill(model).eval()
    return stock_models.build(case, attn_implementation="sdpa")


def batch(length: int) -> dict[str, torch.Tensor]:
    return stock_models.batch(length, "right", number=4)


@torch.no_grad()
def states(model: nn.Module, inputs: dict, **more) -> torch.Tensor:
    return model(**inputs, **more).last_hidden_state


def difference(found: torch.Tensor, expected: torch.Tensor, inputs: dict) -> float:
    """Norm of the difference over the tokens that are not padding, as a share of the norm."""
    kept = inputs["attention_mask"].bool()
    found, expected = found[kept].double(), expected[kept].double()
    return float((found - expected).norm() / expected.norm())


def written_out(model: nn.Module) -> nn.Module:
    """A copy that computes padding, and attention eagerly."""
    model = copy.deepcopy(model).float()
    model.set_attn_implementation("eager")
    model.config.unpad = False
    with contextlib.suppress(ValueError):  # of variants, which have the config's switch
        hf_posenc.unpad(model, False)
    return model


def round_tokens(linear: nn.Linear, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """What int8 leaves of states, with a scale for each token."""
    scale = args[0].abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps) / 127.5
    return ((args[0] * (1 / scale)).round().clamp(-128, 127) * scale,)


def quantize(model: nn.Module, kind: str) -> nn.Module:
    """Quantize a model in place, and return one in float32 that computes what it should.

    Args:
        kind: "weights" alone, or "dynamic", the states that they are multiplied with too.
    """
    torchao = pytest.importorskip("torchao.quantization")
    configs = {"weights": torchao.Int8WeightOnlyConfig, "dynamic": torchao.Int8DynamicActivationInt8WeightConfig}
    exact = written_out(model)
    torchao.quantize_(model, configs[kind]())
    for name, linear in exact.named_modules():
        if isinstance(linear, nn.Linear) and not isinstance(linear, NonDynamicallyQuantizableLinear):
            linear.weight = nn.Parameter(model.get_submodule(name).weight.dequantize())
            if kind == "dynamic":
                linear.register_forward_pre_hook(round_tokens)
    return exact


@pytest.fixture
def packed(monkeypatch) -> list[int]:
    """Lengths of the batches of which padding was left out."""
    seen, unpad_input = [], Packing.unpad_input

    def noted(self, hidden_states):
        seen.append(hidden_states.shape[1])
        return unpad_input(self, hidden_states)

    monkeypatch.setattr(Packing, "unpad_input", noted)
    return seen


@tiny.cross(scheme=ALL, length=LENGTHS, unpad=[True, False], strength=1)
def test_a_variant_in_bfloat16_follows_float32(scheme, length, unpad, packed):
    inputs, half = batch(LENGTHS[length]), build(scheme).bfloat16()
    exact = written_out(half)
    expected = states(exact, inputs)
    half.config.unpad = unpad
    for _ in range(2):  # the second time with tables that are kept
        found = states(half, inputs)
        assert found.dtype == torch.bfloat16
        assert difference(found, expected, inputs) < BFLOAT16
    assert bool(packed) == unpad
    assert scheme == WITHOUT_POSITIONS or positions_matter(exact, inputs, expected)


@tiny.cross(case=STOCK, length=LENGTHS, unpad=[True, False])
def test_stock_in_bfloat16_follows_float32(case, length, unpad, packed):
    inputs, half = batch(LENGTHS[length]), build_stock(case).bfloat16()
    expected = states(written_out(half), inputs)
    if unpad:
        hf_posenc.unpad(half)
    for _ in range(2):
        assert difference(states(half, inputs), expected, inputs) < BFLOAT16
    assert bool(packed) == unpad


@tiny.cross(scheme=ALL, length=LENGTHS, unpad=[True, False], kind=KINDS, strength=1)
def test_a_variant_with_int8_layers_computes_what_they_say(scheme, length, unpad, kind, packed):
    inputs, model = batch(LENGTHS[length]), build(scheme)
    model.config.unpad = unpad
    before = states(model, inputs)  # with tables that are kept of weights that are not quantized yet
    exact = quantize(model, kind)
    expected = states(exact, inputs)
    for _ in range(2):
        assert difference(states(model, inputs), expected, inputs) < INT8[kind]
    assert difference(before, expected, inputs) > 50 * INT8["weights"]
    assert bool(packed) == unpad
    assert scheme == WITHOUT_POSITIONS or positions_matter(exact, inputs, expected)


@tiny.cross(case=STOCK, length=LENGTHS, unpad=[True, False], kind=KINDS)
def test_stock_with_int8_layers_computes_what_they_say(case, length, unpad, kind, packed):
    inputs, model = batch(LENGTHS[length]), build_stock(case)
    if unpad:
        hf_posenc.unpad(model)
    before = states(model, inputs)
    expected = states(quantize(model, kind), inputs)
    for _ in range(2):
        assert difference(states(model, inputs), expected, inputs) < INT8[kind]
    assert difference(before, expected, inputs) > 50 * INT8["weights"]
    assert bool(packed) == unpad


def test_int8_layers_of_deberta_get_no_rows_of_the_table_beside_the_states(monkeypatch):
    """Where one scale is for all rows, each would be rounded by the largest of both."""
    inputs, model, seen = batch(SHORT), build_stock("v3"), []
    quantize(model, "dynamic")
    forward = nn.Linear.forward

    def noted(linear, states):
        seen.append(tuple(states.shape[:-1]))
        return forward(linear, states)

    monkeypatch.setattr(nn.Linear, "forward", noted)
    with hf_posenc.cache_projections(False):
        states(model, inputs)
    assert {*seen} == {(4, SHORT), (1, 2 * SHORT - 1)}


def quantize_by_torch(model: nn.Module, *kinds: type[nn.Module]) -> nn.Module:
    """By PyTorch's own quantization, which puts other layers and tables in the place of these; their `weight` is a method."""
    from torch.ao import quantization

    configs = {
        nn.Linear: quantization.default_dynamic_qconfig,
        nn.Embedding: quantization.float_qparams_weight_only_qconfig,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return quantization.quantize_dynamic(model, {kind: configs[kind] for kind in kinds})


@tiny.cross(scheme=["bert", *ALL, "tupe+t5"], length=LENGTHS, unpad=[True, False], strength=1)
def test_pytorchs_own_int8_layers_and_tables_are_called(scheme, length, unpad, packed):
    inputs = batch(LENGTHS[length])
    # Stock BERT wants token types: by default it looks them up with a view, which these tables refuse.
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    model = build_stock("bert") if scheme == "bert" else build(scheme)
    model.config.unpad = unpad
    before = states(model, inputs)
    assert difference(states(quantize_by_torch(model, nn.Linear, nn.Embedding), inputs), before, inputs) < BY_TORCH

    with_tables = quantize_by_torch(model, nn.Embedding)
    exact, quantized = written_out(model), 0
    for name, table in exact.named_modules():
        if type(table) is nn.Embedding:
            table.weight = nn.Parameter(with_tables.get_submodule(name).weight().dequantize())
            quantized += 1
    reads_table = scheme == "bert" or {"absolute", "tupe"} & {*scheme.split("+")}
    assert quantized == (3 if reads_table else 2)
    expected = states(exact, inputs)
    for _ in range(2):
        assert difference(states(with_tables, inputs), expected, inputs) < 1e-4
    assert difference(before, expected, inputs) > 1e-3
    assert bool(packed) == (unpad and scheme != "bert")


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("scheme", ["t5", "deberta"])
def test_int8_layers_compile(scheme):
    inputs, model = batch(SHORT), build(scheme)
    exact = quantize(model, "dynamic")
    compiled = torch.compile(model)
    assert difference(states(compiled, inputs), states(exact, inputs), inputs) < INT8["dynamic"]


@pytest.mark.slow
@pytest.mark.compiled
def test_bfloat16_compiles():
    inputs, half = batch(SHORT), build("deberta").bfloat16()
    assert difference(states(torch.compile(half), inputs), states(written_out(half), inputs), inputs) < BFLOAT16
