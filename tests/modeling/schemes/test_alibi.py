"""alibi: the slopes of BLOOM and MPT, the formula in loops, relative throughout, and nothing to learn."""

import pytest
import tiny
import torch
from torch import nn
from transformers import BertModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.utils import logging

from hf_posenc import position_parameters
from hf_posenc.modeling.attention.backends import score_bias
from hf_posenc.modeling.schemes.alibi import alibi_slopes


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")


TOLERANCE = 1e-5
HEADS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 31, 33, 40]


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_are_blooms_and_mpts(heads):
    slopes = torch.tensor(alibi_slopes(heads))
    # Both give what the last query sees; at distance 1 from it that is the slope.
    bloom = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)[:, 0, 1]
    mpt = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    torch.testing.assert_close(slopes, bloom, rtol=1e-6, atol=0)
    torch.testing.assert_close(slopes, mpt, rtol=1e-6, atol=0)


def alibi_bias(heads: int, length: int, position_ids: torch.Tensor | None = None) -> torch.Tensor:
    """The bias (batch or 1, heads, query, key) of a tiny model's first self-attention."""
    model = tiny.build("alibi", num_attention_heads=heads, hidden_size=8 * heads)
    attention, seen = model.encoder.layer[0].attention.self, []
    terms = attention.position_schemes[0].terms
    attention.position_schemes[0].terms = lambda *args: seen.append(terms(*args)) or seen[0]
    with torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long), position_ids=position_ids)
    query = torch.zeros(1, heads, length, 8)
    return score_bias(query, query, seen[0])


@pytest.mark.parametrize("given", [False, True], ids=["slots", "position_ids"])
@pytest.mark.parametrize("heads", [3, 4, 12])
def test_bias_is_blooms_made_symmetric(heads, given):
    length = 40
    bias = alibi_bias(heads, length, torch.arange(length)[None] if given else None)
    bloom = build_alibi_tensor(torch.ones(1, length, dtype=torch.long), heads, torch.float32)[:, 0]
    distance = (torch.arange(length)[:, None] - torch.arange(length)[None, :]).abs()
    assert bias.shape == (1, heads, length, length)
    # BLOOM's is slope · key; softmax does not see that it is not slope · (key - query).
    torch.testing.assert_close(bias[0], -bloom[:, distance], rtol=1e-6, atol=0)


@torch.no_grad()
def loops(attention: nn.Module, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The formula, pair by pair, with slopes 2^-2, 2^-4, 2^-6, 2^-8 for 4 heads: output (batch, length, hidden)."""
    batch, length, _ = hidden_states.shape
    heads, head_dim = attention.num_attention_heads, attention.attention_head_size
    query, key, value = (
        linear(hidden_states).view(batch, length, heads, head_dim)
        for linear in (attention.query, attention.key, attention.value)
    )
    output = torch.zeros_like(value)
    for b in range(batch):
        for h in range(heads):
            scores = torch.zeros(length, length, dtype=torch.float64)
            for i in range(length):
                for j in range(length):
                    penalty = 0.25 ** (h + 1) * abs(int(positions[b, i] - positions[b, j]))
                    scores[i, j] = query[b, i, h] @ key[b, j, h] / head_dim**0.5 - penalty
            output[b, :, h] = scores.softmax(-1) @ value[b, :, h]
    return output.flatten(-2)


@pytest.mark.parametrize("position_ids", [None, [[0, 1, 2, 0, 1], [3, 3, 90, 7, -4]]], ids=["slots", "packed and odd"])
def test_scores_equal_the_formula_in_loops(position_ids, path):
    model = tiny.build("alibi").double()
    inputs = tiny.inputs(batch=2, length=5, padding=None)
    positions = torch.arange(5).expand(2, 5)
    if position_ids is not None:
        positions = inputs["position_ids"] = torch.tensor(position_ids)
    attention, seen = model.encoder.layer[0].attention.self, []
    attention.register_forward_hook(lambda module, args, output: seen.extend((args[0], output[0])))
    with torch.no_grad():
        model(**inputs)
    hidden_states, ours = seen
    torch.testing.assert_close(ours, loops(attention, hidden_states, positions), rtol=0, atol=1e-12)
    without = loops(attention, hidden_states, torch.zeros_like(positions))
    assert (ours - without).abs().max() > 0.01


def stock_twin(model: nn.Module) -> nn.Module:
    """The stock model with a variant's weights and its positions at zero: what is left without the scheme."""
    stock = BertModel(tiny.stock_config()).eval()
    stock.load_state_dict(model.state_dict(), strict=False)
    nn.init.zeros_(stock.embeddings.position_embeddings.weight)
    return stock


@pytest.mark.parametrize("given", [False, True], ids=["slots", "position_ids"])
def test_backends_agree(given, path):
    model = tiny.build("alibi")
    inputs = tiny.inputs(length=9, padding="left")
    if given:
        inputs["position_ids"] = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(1))
    outputs = {}
    for backend in ("eager", "sdpa", "flex_attention"):
        model.set_attn_implementation(backend)
        # flex_attention's own reference code: compiling the kernel is another test's business, and slow.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            outputs[backend] = model(**inputs).last_hidden_state
    for backend in ("sdpa", "flex_attention"):
        difference = tiny.difference_where_attended(outputs["eager"], outputs[backend], inputs["attention_mask"])
        assert difference < TOLERANCE, backend
    with torch.no_grad():
        without = stock_twin(model)(**inputs).last_hidden_state
    assert tiny.difference_where_attended(outputs["eager"], without, inputs["attention_mask"]) > 100 * TOLERANCE


@pytest.mark.parametrize("given", [False, True], ids=["slots", "position_ids"])
def test_gradients_pass_through_the_term(given):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 5}
    model = tiny.build("alibi", **sizes, attn_implementation="eager").double()
    inputs = tiny.inputs(batch=2, length=4)
    if given:
        inputs["position_ids"] = torch.tensor([[0, 1, 0, 1], [3, 9, 2, 2]])
    weight = model.encoder.layer[0].attention.self.query.weight

    def output(value):
        name = "encoder.layer.0.attention.self.query.weight"
        return torch.func.functional_call(model, {name: value}, kwargs=inputs).last_hidden_state

    torch.autograd.gradcheck(output, (weight,))


def test_has_no_parameters_and_says_that_it_cannot_start_silent(tmp_path, caplog):
    stock = BertModel(tiny.stock_config())
    stock.save_pretrained(tmp_path)
    logging.warning_once.cache_clear()
    logger = logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model = BertModel.from_pretrained(tmp_path, position_scheme="absolute+alibi")
    finally:
        logger.removeHandler(caplog.handler)
    assert not position_parameters(model)
    assert set(model.state_dict()) == set(stock.state_dict())
    assert "alibi cannot start output-preserving" in caplog.text


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_padding_on_the_left_and_shifted_positions_change_nothing(family):
    model = tiny.build("alibi", family)
    inputs = tiny.inputs(batch=1, length=7, family=family, padding=None)
    padded = {
        "input_ids": nn.functional.pad(inputs["input_ids"], (5, 0), value=model.config.pad_token_id),
        "attention_mask": nn.functional.pad(inputs["attention_mask"], (5, 0)),
    }
    with torch.no_grad():
        plain = model(**inputs).last_hidden_state
        assert (model(**padded).last_hidden_state[:, 5:] - plain).abs().max() < TOLERANCE
        for shift in (0, 1000):
            shifted = model(**inputs, position_ids=torch.arange(7)[None] + shift).last_hidden_state
            assert (shifted - plain).abs().max() < TOLERANCE
        stretched = model(**inputs, position_ids=torch.arange(7)[None] * 2).last_hidden_state
    assert (stretched - plain).abs().max() > 100 * TOLERANCE


def test_one_token_at_a_time_gives_what_the_whole_sequence_gives():
    model = tiny.build("alibi", head="LMHeadModel", is_decoder=True)
    input_ids = tiny.inputs(batch=2, length=8, padding=None)["input_ids"]
    with torch.no_grad():
        whole = model(input_ids, use_cache=False).logits
        cache, pieces = None, []
        for piece in (input_ids[:, :3], *input_ids[:, 3:].split(1, dim=1)):
            output = model(piece, **{tiny.CACHE: cache}, use_cache=True)
            cache = getattr(output, tiny.CACHE)
            pieces.append(output.logits)
        other_distances = model(input_ids, position_ids=torch.zeros_like(input_ids), use_cache=False).logits
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=TOLERANCE)
    assert (whole - other_distances).abs().max() > 100 * TOLERANCE


def test_bias_in_half_precision_is_rounded_once():
    model = tiny.build("alibi", num_attention_heads=3, hidden_size=24).to(torch.bfloat16)
    scheme = model.encoder.position_schemes[0]
    seen = []
    prepare = scheme.prepare
    scheme.prepare = lambda *args: seen.append(prepare(*args)) or seen[0]
    with torch.no_grad():
        model(torch.zeros(1, 700, dtype=torch.long))
    exact = -torch.tensor(alibi_slopes(3), dtype=torch.float64)[:, None] * torch.arange(-699, 700).abs()
    assert torch.equal(seen[0].bias, exact.to(torch.bfloat16))
