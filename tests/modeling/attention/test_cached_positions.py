"""Positions of cached tokens: with a cache a decoder computes what it computes of whole sequences, whatever the positions."""

import copy

import pytest
import torch
from tiny import CACHE, SIZES, build, cross, inputs
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.integrations.executorch import register_dynamic_cache_export_support

from hf_posenc.modeling.attention.cached_positions import PositionCacheLayer
from hf_posenc.modeling.schemes.table import SCHEMES


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")


COMPOSITES = ["absolute+relative", "alibi+rope", "tupe+t5", "absolute+tupe", "sinusoidal+tupe"]
TOLERANCE = 2e-5  # on logits of standard deviation 1
LENGTH = 12

EVERY_SCHEME = [*SCHEMES, *COMPOSITES]
FAMILIES = ["bert", "roberta"]
every_scheme = pytest.mark.parametrize("scheme", EVERY_SCHEME)


def decoder(scheme: str, family: str = "bert", **overrides) -> torch.nn.Module:
    head = "LMHeadModel" if family == "bert" else "ForCausalLM"
    return build(scheme, family, head, is_decoder=True, **overrides)


def first_position(family: str) -> int:
    return 2 if family == "roberta" else 0


def uneven(model: torch.nn.Module, batch: int = 3) -> torch.Tensor:
    """Position ids with steps of one to three, others in each row."""
    steps = torch.randint(1, 4, (batch, LENGTH), generator=torch.Generator().manual_seed(3))
    return steps.cumsum(1) - 1 + model.config.first_position


@torch.no_grad()
def in_pieces(model, batch: dict, position_ids, cache, lengths: list[int]) -> torch.Tensor:
    """Logits of a batch that is read piece by piece; None among the positions of pieces stands for none given."""
    logits, start = [], cache.get_seq_length() if isinstance(cache, DynamicCache) else 0
    for length in lengths:
        end = start + length
        output = model(
            batch["input_ids"][:, start:end],
            attention_mask=batch["attention_mask"][:, :end],
            position_ids=None if position_ids is None else position_ids[:, start:end],
            **{CACHE: cache},
            use_cache=True,
        )
        logits.append(output.logits)
        start = end
    return torch.cat(logits, dim=1)


@torch.no_grad()
def at_once(model, batch: dict, position_ids) -> torch.Tensor:
    return model(**batch, position_ids=position_ids, use_cache=False).logits


def assert_ids_matter(model, batch: dict, position_ids) -> None:
    if any(SCHEMES[name].reads_positions for name in model.config.position_scheme.split("+")):
        difference = at_once(model, batch, position_ids) - at_once(model, batch, None)
        assert difference.abs().max() > 100 * TOLERANCE


@cross(
    scheme=EVERY_SCHEME,
    family=FAMILIES,
    lengths=[[1] * LENGTH, [5, 1, 4, 2]],
    kind=["dynamic", "lazy", "static"],
    rest=pytest.mark.slow,
)
def test_position_ids_are_obeyed_through_a_cache(scheme, family, lengths, kind):
    model, batch = decoder(scheme, family), inputs(padding=None, family=family)
    position_ids = uneven(model)
    assert_ids_matter(model, batch, position_ids)
    cache = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "lazy": DynamicCache,
        "static": lambda: StaticCache(model.config, max_cache_len=20),
    }[kind]()
    found = in_pieces(model, batch, position_ids, cache, lengths)
    torch.testing.assert_close(found, at_once(model, batch, position_ids), atol=TOLERANCE, rtol=0)


@cross(scheme=EVERY_SCHEME, kind=["dynamic", "static"], family=FAMILIES, strength=1)
def test_pieces_with_and_without_position_ids_may_follow_each_other(scheme, kind, family):
    model, batch = decoder(scheme, family), inputs(padding=None, family=family)
    cache = DynamicCache() if kind == "dynamic" else StaticCache(model.config, max_cache_len=20)
    position_ids = torch.arange(LENGTH).repeat(3, 1) + first_position(family)
    position_ids[:, 4:8] = position_ids[:, 4:8] * 3 + 1
    expected = at_once(model, batch, position_ids)
    with torch.no_grad():
        found = []
        for start in (0, 4, 8):
            piece = slice(start, start + 4)
            given = position_ids[:, piece] if start == 4 else None
            output = model(batch["input_ids"][:, piece], position_ids=given, **{CACHE: cache}, use_cache=True)
            found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=TOLERANCE, rtol=0)


@cross(scheme=EVERY_SCHEME, family=FAMILIES, strength=1)
def test_packed_documents_train_alike_with_the_cache_that_stock_makes(scheme, family):
    """A decoder makes a cache unless it is told not to, in training too."""
    model = decoder(scheme, family).train()
    batch, first = inputs(batch=1, padding=None, family=family), first_position(family)
    position_ids = torch.cat([torch.arange(7), torch.arange(5)])[None] + first
    mask = torch.block_diag(torch.ones(7, 7), torch.ones(5, 5)).tril().bool()[None, None]
    packed = model(batch["input_ids"], attention_mask=mask, position_ids=position_ids).logits
    alone = [
        model(batch["input_ids"][:, part], attention_mask=torch.ones(1, part.stop - part.start)).logits
        for part in (slice(0, 7), slice(7, 12))
    ]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@every_scheme
def test_generating_with_holes_in_the_mask_is_the_same_with_and_without_a_cache(scheme):
    model, batch = decoder(scheme), inputs(padding=None)
    batch["attention_mask"][0, 3:5] = 0
    batch["attention_mask"][1, 7] = 0
    batch["attention_mask"][2, :2] = 0
    batch["attention_mask"][2, 5:9] = 0
    settings = {
        "max_new_tokens": 5,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    plain = model.generate(**batch, **settings, use_cache=False)
    for cached in (
        model.generate(**batch, **settings),
        model.generate(**batch, **settings, cache_implementation="static"),
    ):
        assert cached.sequences.tolist() == plain.sequences.tolist()
        torch.testing.assert_close(torch.stack(cached.logits), torch.stack(plain.logits), atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@every_scheme
def test_beam_search_with_holes_in_the_mask_is_the_same_with_and_without_a_cache(scheme):
    model, batch = decoder(scheme), inputs(padding=None)
    batch["attention_mask"][0, 3:5] = 0
    batch["attention_mask"][1, 2:8] = 0
    settings = {
        "max_new_tokens": 5,
        "num_beams": 3,
        "num_return_sequences": 2,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    cached, plain = (model.generate(**batch, **settings, use_cache=use_cache) for use_cache in (True, False))
    assert cached.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(cached.sequences_scores, plain.sequences_scores, atol=TOLERANCE, rtol=0)


def crop_to(cache: DynamicCache, length: int) -> None:
    """`crop` takes the number of tokens to remove, as a negative number."""
    cache.crop(length - cache.get_seq_length())


@cross(scheme=["t5", "tupe", "deberta", "alibi", "relative", "transformer_xl"], family=FAMILIES, strength=1)
def test_positions_follow_what_is_done_to_a_cache(scheme, family):
    model, batch = decoder(scheme, family), inputs(padding=None, family=family)
    position_ids = uneven(model)
    expected = at_once(model, batch, position_ids)

    def read(cache, rows, start):
        part = {name: tensor[rows] for name, tensor in batch.items()}
        return in_pieces(model, part, position_ids[rows], cache, [LENGTH - start])

    def filled() -> DynamicCache:
        cache = DynamicCache()
        in_pieces(model, batch, position_ids, cache, [8])
        return cache

    cache = filled()
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    torch.testing.assert_close(read(cache, order, 8), expected[order, 8:], atol=TOLERANCE, rtol=0)

    cache = filled()
    crop_to(cache, 5)
    torch.testing.assert_close(read(cache, slice(None), 5), expected[:, 5:], atol=TOLERANCE, rtol=0)

    cache = filled()
    cache.batch_repeat_interleave(2)
    rows = torch.arange(3).repeat_interleave(2)
    torch.testing.assert_close(read(cache, rows, 8), expected[rows, 8:], atol=TOLERANCE, rtol=0)

    cache = filled()
    cache.batch_select_indices(torch.tensor([1]))
    torch.testing.assert_close(read(cache, slice(1, 2), 8), expected[1:2, 8:], atol=TOLERANCE, rtol=0)

    original = filled()
    cache = copy.deepcopy(original)
    read(original, slice(None), 8)
    torch.testing.assert_close(read(cache, slice(None), 8), expected[:, 8:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_that_is_reset_forgets_positions(kind):
    model, batch = decoder("t5"), inputs(padding=None)
    cache = DynamicCache() if kind == "dynamic" else StaticCache(model.config, max_cache_len=LENGTH)
    in_pieces(model, batch, uneven(model), cache, [LENGTH])
    cache.reset()
    if cache.get_seq_length():
        pytest.skip("the reset of this transformers keeps a dynamic cache's length")
    with torch.no_grad():
        found = model(batch["input_ids"], **{CACHE: cache}, use_cache=True).logits
    torch.testing.assert_close(found, at_once(model, batch, None), atol=TOLERANCE, rtol=0)


def test_what_is_not_known_of_a_cache_is_refused():
    model, batch = decoder("t5"), inputs(padding=None)
    cache = DynamicCache()
    in_pieces(model, batch, uneven(model), cache, [6])
    for layer in cache.layers:
        layer.keys, layer.values = (torch.cat([states, states], dim=2) for states in (layer.keys, layer.values))
    with pytest.raises(ValueError, match="the cache has 12 tokens, and positions of 6"):
        model(batch["input_ids"], position_ids=uneven(model), **{CACHE: cache})


def test_without_position_ids_a_cache_is_what_stock_makes():
    model, batch = decoder("t5"), inputs(padding=None)
    cache = getattr(model(**batch, use_cache=True), CACHE)
    assert not any(isinstance(layer, PositionCacheLayer) for layer in cache.layers)
    assert len(cache) == SIZES["num_hidden_layers"]
    cache = getattr(model(**batch, position_ids=uneven(model), use_cache=True), CACHE)
    assert len(cache) == SIZES["num_hidden_layers"]
    assert all(keys.shape == (3, 4, LENGTH, 8) for keys, *_ in cache)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("scheme", ["t5", "tupe+t5"])
def test_a_compiled_decoder_obeys_position_ids(scheme):
    model, batch = decoder(scheme), inputs(padding=None)
    position_ids = uneven(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        found = compiled(**batch, position_ids=position_ids).logits
    torch.testing.assert_close(found, at_once(model, batch, position_ids), atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["t5", "tupe", "rope", "deberta+rope"])
def test_a_decoder_is_exported_with_position_ids_and_the_cache_that_it_makes(scheme):
    model, batch = decoder(scheme), inputs(padding=None)
    position_ids = uneven(model)
    register_dynamic_cache_export_support()
    exported = torch.export.export(model, (), {**batch, "position_ids": position_ids}, strict=False)
    found = exported.module()(**batch, position_ids=position_ids).logits
    torch.testing.assert_close(found, at_once(model, batch, position_ids), atol=TOLERANCE, rtol=0)


def test_positions_of_cached_tokens_are_not_exported_in_silence():
    model, batch = decoder("t5"), inputs(padding=None)
    cache = DynamicCache()
    register_dynamic_cache_export_support()
    in_pieces(model, batch, None, cache, [6])
    keywords = {"input_ids": batch["input_ids"][:, 6:], "position_ids": uneven(model)[:, 6:], CACHE: cache}
    with pytest.raises(ValueError, match="positions of cached tokens cannot be exported"):
        torch.export.export(model, (), keywords, strict=False)


@pytest.mark.parametrize("scheme", ["t5", "rope", "tupe"])
def test_position_ids_of_another_integer_type(scheme):
    model, batch = decoder(scheme), inputs(padding=None)
    position_ids = uneven(model)
    cache = StaticCache(model.config, max_cache_len=20)
    found = in_pieces(model, batch, position_ids.int(), cache, [5, 7])
    torch.testing.assert_close(found, at_once(model, batch, position_ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
@pytest.mark.parametrize("scheme", ["absolute", "tupe", "tupe+t5"])
def test_a_static_cache_does_not_lead_past_the_table_either(scheme, family):
    head = "LMHeadModel" if family == "bert" else "ForCausalLM"
    model = build(scheme, family, head, is_decoder=True)
    cache, batch = StaticCache(model.config, max_cache_len=100), inputs(length=60, family=family, padding=None)
    with torch.no_grad():
        model(**batch, **{CACHE: cache}, use_cache=True)
        with pytest.raises(ValueError, match="longer than the position embedding matrix"):
            model(batch["input_ids"][:, :8], **{CACHE: cache}, use_cache=True)


def test_rotated_keys_need_no_positions_in_the_cache():
    model, batch = decoder("rope"), inputs(padding=None)
    cache = getattr(model(**batch, position_ids=uneven(model), use_cache=True), CACHE)
    assert not any(isinstance(layer, PositionCacheLayer) for layer in cache.layers)


@pytest.mark.parametrize("scheme", ["t5", "deberta", "relative", "kerple", "fire"])
def test_a_cache_that_forgets_its_first_tokens_is_refused(scheme):
    model = decoder(scheme)
    cache = DynamicCache()
    cache.layers = [DynamicSlidingWindowLayer(sliding_window=8) for _ in range(SIZES["num_hidden_layers"])]
    with pytest.raises(ValueError, match="drops its first tokens"):
        model(input_ids=torch.tensor([[5]]), **{CACHE: cache}, use_cache=True)


@torch.no_grad()
def test_where_keys_have_no_positions_such_a_cache_is_read():
    model, ids = decoder("rope").double(), torch.arange(5, 17)[None]
    cache = DynamicCache()
    cache.layers = [DynamicSlidingWindowLayer(sliding_window=4) for _ in range(SIZES["num_hidden_layers"])]
    steps = [
        model(input_ids=ids[:, place : place + 1], **{CACHE: cache}, use_cache=True).logits for place in range(12)
    ]
    distances = torch.arange(12)[:, None] - torch.arange(12)
    band = ((distances >= 0) & (distances < 4))[None, None]
    wanted = model(input_ids=ids, attention_mask=band, use_cache=False).logits
    torch.testing.assert_close(torch.cat(steps, dim=1), wanted, rtol=0, atol=1e-9)
