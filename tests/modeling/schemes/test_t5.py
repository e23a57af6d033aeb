"""t5: the buckets and the bias of transformers' T5Attention, and nothing else in the score."""

import pytest
import tiny
import torch
from transformers import BertModel, T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc import position_parameters
from hf_posenc.modeling.attention.backends import score_bias
from hf_posenc.modeling.schemes.base import AttentionContext
from hf_posenc.modeling.schemes.positions import Positions, t5_bucket
from hf_posenc.modeling.schemes.table import build_schemes


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")


SMALL = {"position_buckets": 8, "position_max_distance": 20}
HEADS = tiny.SIZES["num_attention_heads"]


def t5_attention(table: torch.Tensor, max_distance: int, is_decoder: bool) -> T5Attention:
    """transformers' T5Attention with a given table (buckets, heads)."""
    buckets, heads = table.shape
    config = T5Config(
        d_model=32,
        d_kv=8,
        num_heads=heads,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance,
        is_decoder=is_decoder,
    )
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    attention.relative_attention_bias.weight.data.copy_(table)
    return attention


def bias_of_layer(model, layer: int, positions: Positions) -> torch.Tensor:
    """What the scheme adds to the content score in a layer, (batch, heads, query, key)."""
    _, (scheme,) = build_schemes(model.config)
    base = model.base_model
    attention = base.encoder.layer[layer].attention.self
    prepared = scheme.prepare(positions, torch.float32)
    terms = scheme.terms(AttentionContext(attention, base.encoder, None, None, None, None, positions, prepared))
    query = torch.zeros(1, HEADS, positions.query.shape[1], 8)
    key = torch.zeros(1, HEADS, positions.key.shape[1], 8)
    return score_bias(query, key, terms)


def in_a_row(query_length: int, key_length: int, offset: int = 0) -> Positions:
    query = torch.arange(query_length)[None] + offset
    return Positions(query, torch.arange(key_length)[None], offset, contiguous=True, first=0)


@pytest.mark.parametrize("bidirectional", [True, False], ids=["encoder", "decoder"])
@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (8, 20), (4, 3), (64, 2000), (32, 17)])
def test_buckets_are_those_of_transformers(buckets, max_distance, bidirectional):
    distance = torch.arange(-3000, 3001)
    theirs = T5Attention._relative_position_bucket(distance, bidirectional, buckets, max_distance)
    ours = t5_bucket(distance, buckets, max_distance, bidirectional)
    assert torch.equal(ours, theirs)
    assert ours.min() == 0 and ours.max() == buckets - 1


@pytest.mark.parametrize("is_decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("flags", [{}, SMALL], ids=["default", "small"])
def test_bias_is_that_of_transformers(flags, is_decoder):
    head = "LMHeadModel" if is_decoder else "Model"
    model = tiny.build("t5", head=head, is_decoder=is_decoder, **flags)
    table = model.base_model.encoder.relative_attention_bias.weight.detach()
    reference = t5_attention(table, flags.get("position_max_distance", 128), is_decoder)
    for query_length, key_length, offset in [(5, 5, 0), (33, 33, 0), (150, 150, 0), (1, 40, 39), (3, 40, 37)]:
        with torch.no_grad():
            theirs = reference.compute_bias(query_length, key_length, past_seen_tokens=offset)
            for layer in range(2):
                ours = bias_of_layer(model, layer, in_a_row(query_length, key_length, offset))
                assert torch.equal(ours, theirs)
    assert theirs.std() > 0.1


def test_a_table_per_layer_is_each_layer_s_own():
    model = tiny.build("t5", position_per_layer=True, **SMALL)
    tables = [layer.attention.self.relative_attention_bias.weight.detach() for layer in model.encoder.layer]
    assert not torch.equal(*tables)
    for layer, table in enumerate(tables):
        theirs = t5_attention(table, SMALL["position_max_distance"], False).compute_bias(12, 12)
        assert torch.equal(bias_of_layer(model, layer, in_a_row(12, 12)), theirs)


def test_given_positions_are_looked_up_pair_by_pair():
    model = tiny.build("t5", **SMALL)
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 30, 7], [50, 3, 9, 9, 8, 0, 1]])
    ours = bias_of_layer(model, 0, Positions(position_ids, position_ids, 0, contiguous=False, first=0))
    table = model.encoder.relative_attention_bias.weight
    for row, ids in enumerate(position_ids):
        distance = ids[None, :] - ids[:, None]  # key - query
        buckets = T5Attention._relative_position_bucket(distance, True, *SMALL.values())
        assert torch.equal(ours[row], table[buckets].permute(2, 0, 1))


@tiny.cross(given=[False, True], backend=["eager", "sdpa"], path=tiny.PATHS, indirect=("path",))
def test_attention_is_softmax_of_content_plus_bias(backend, given, path):
    model = tiny.build("t5", attn_implementation=backend, **SMALL)
    seen = {}

    def keep(module, args, kwargs, output):
        seen["hidden"], seen["output"] = args[0] if args else kwargs["hidden_states"], output[0]

    attention = model.encoder.layer[0].attention.self
    attention.register_forward_hook(keep, with_kwargs=True)
    inputs = tiny.inputs(length=24)
    position_ids = torch.arange(24)[None] * (3 if given else 1)
    with torch.no_grad():
        model(**inputs, **({"position_ids": position_ids} if given else {}))
        distance = position_ids[0][None, :] - position_ids[0][:, None]
        buckets = T5Attention._relative_position_bucket(distance, True, *SMALL.values())
        bias = model.encoder.relative_attention_bias.weight[buckets].permute(2, 0, 1)

        def heads(projection):
            return projection(seen["hidden"]).view(3, 24, HEADS, -1).transpose(1, 2)

        content = heads(attention.query) @ heads(attention.key).transpose(2, 3) / attention.attention_head_size**0.5
        masked = inputs["attention_mask"][:, None, None, :] == 0

        def attend(scores):
            weights = scores.masked_fill(masked, -torch.inf).softmax(-1)
            return (weights @ heads(attention.value)).transpose(1, 2).flatten(2)

        mask = inputs["attention_mask"]
        assert tiny.difference_where_attended(seen["output"], attend(content + bias), mask) < 1e-5
        assert tiny.difference_where_attended(seen["output"], attend(content), mask) > 1e-3


@pytest.mark.parametrize("flags", [{}, {"position_per_layer": True}], ids=["shared", "per_layer"])
def test_it_starts_silent_and_learns_from_the_first_step(tmp_path, flags):
    torch.manual_seed(0)
    stock = BertModel(tiny.stock_config()).eval()
    stock.save_pretrained(tmp_path)
    model = BertModel.from_pretrained(tmp_path, position_scheme="absolute+t5", **SMALL, **flags).eval()
    inputs = tiny.inputs()
    output = model(**inputs).last_hidden_state
    assert (output - stock(**inputs).last_hidden_state).abs().max() < 5e-6
    output[inputs["attention_mask"].bool()].square().sum().backward()
    own = position_parameters(model)
    expected = {f"encoder.layer.{n}.attention.self.relative_attention_bias.weight" for n in range(2)}
    assert set(own) == (expected if flags else {"encoder.relative_attention_bias.weight"})
    for parameter in own.values():
        assert not parameter.any() and parameter.shape == (8, HEADS)
        # Buckets 0 to 3 and 5 to 7: no distance falls into 4, the first bucket of "after the query".
        reached = parameter.grad.abs().sum(-1) > 0
        assert reached[[0, 1, 2, 3, 5, 6, 7]].all()
