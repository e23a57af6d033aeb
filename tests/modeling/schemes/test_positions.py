"""What a scheme is told of a batch: how many tokens there are to attend to, whatever form the mask has."""

import pytest
import tiny
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache, StaticCache

from hf_posenc.modeling.schemes.positions import Positions


def positions(mask=None, queries: int = 6, keys: int = 6, offset: int = 0, is_causal: bool = False) -> Positions:
    query, key = torch.arange(queries)[None] + offset, torch.arange(keys)[None]
    return Positions(query, key, offset, contiguous=True, first=0, mask=mask, is_causal=is_causal)


def test_without_a_mask_everything_is_counted_or_what_is_before_a_query():
    assert positions().context_lengths.tolist() == [[6]]
    assert positions(is_causal=True).context_lengths.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert positions(queries=2, offset=4, is_causal=True).context_lengths.tolist() == [[5, 6]]
    assert positions(queries=2, offset=torch.tensor(3), is_causal=True).context_lengths.tolist() == [[4, 5]]


def test_padding_is_not_counted_on_either_side_and_inside():
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 0, 1]])
    assert positions(mask).context_lengths.tolist() == [[6], [3], [4], [3]]
    assert positions(mask, is_causal=True).context_lengths[1:].tolist() == [
        [1, 2, 3, 3, 3, 3],
        [0, 0, 1, 2, 3, 4],
        [1, 1, 2, 2, 2, 3],
    ]
    assert positions(mask, queries=1, offset=5, is_causal=True).context_lengths.tolist() == [[6], [3], [4], [3]]


def documents() -> torch.Tensor:
    return torch.block_diag(torch.ones(2, 2), torch.ones(3, 3), torch.ones(1, 1)).bool()[None, None]


def test_packed_documents_are_counted_by_themselves():
    pairs = documents()
    expected = [[2, 2, 3, 3, 3, 1]]
    assert positions(pairs).context_lengths.tolist() == expected
    assert positions(pairs[:, 0]).context_lengths.tolist() == expected
    lowest = torch.finfo(torch.float32).min
    additive = torch.zeros(pairs.shape).masked_fill(~pairs, lowest)
    assert positions(additive).context_lengths.tolist() == expected
    assert positions(pairs.tril(), is_causal=True).context_lengths.tolist() == [[1, 2, 1, 2, 3, 1]]
    numbers = torch.tensor([0, 0, 1, 1, 1, 2])
    block = create_block_mask(lambda b, h, q, k: numbers[q] == numbers[k], 2, None, 6, 6, device="cpu")
    assert positions(block).context_lengths.tolist() == expected * 2


@pytest.mark.parametrize(
    "number", [-10_000.0, torch.finfo(torch.float16).min, torch.finfo(torch.bfloat16).min, -torch.inf]
)
def test_a_key_is_hidden_by_every_number_that_masks_are_made_of(number):
    pairs = documents()
    pairs[..., 4] = False
    for dtype in (torch.float32, torch.bfloat16):
        found = positions(torch.zeros(pairs.shape, dtype=dtype).masked_fill(~pairs, number))
        assert found.are_tokens.tolist() == [[True, True, True, True, False, True]]
        assert found.context_lengths.tolist() == positions(pairs).context_lengths.tolist()


def test_tokens_are_what_somebody_may_attend_to():
    assert positions().are_tokens is None and positions().are_first_of_documents is None
    mask = torch.tensor([[1, 0, 1, 1, 0, 0]])
    assert positions(mask).are_tokens.tolist() == mask.bool().tolist()
    assert positions(mask, queries=2, offset=3, is_causal=True).are_tokens.tolist() == [[True, False]]
    pairs = documents()
    pairs[..., 4] = False
    for given in (pairs, pairs.tril()):
        assert positions(given).are_tokens.tolist() == [[True, True, True, True, False, True]]


def test_documents_begin_where_neighbours_do_not_see_each_other():
    expected = [[True, False, True, False, False, True]]
    for given in (documents(), documents().tril(), documents()[:, 0]):
        assert positions(given).are_first_of_documents.tolist() == expected
    assert positions(documents()[..., 4:, :], queries=2, offset=4).are_first_of_documents is None


def test_tokens_that_may_attend_to_each_other_are_of_one_document_whatever_stands_between():
    first, second, padding = 0, 1, 2
    numbers = torch.tensor([[padding, first, padding, first, second, first], [0, 0, 0, 1, 1, padding]])
    pairs = (numbers[:, :, None] == numbers[:, None])[:, None]
    expected = [[0, 1, 0, 1, 4, 1], [0, 0, 0, 3, 3, 5]]
    for given in (pairs, pairs.tril(), create_block_mask(lambda b, h, q, k: pairs[b, 0, q, k], 2, None, 6, 6, "cpu")):
        assert positions(given).documents.tolist() == expected
    # Padding that nobody attends to is of no document, whatever it attends to itself.
    hidden = pairs & (numbers != padding)[:, None, None] | (numbers == padding)[:, None, :, None]
    hidden &= (numbers != padding)[:, None, None]
    assert positions(hidden).are_first_of_documents.tolist() == [
        [i in (1, 4) for i in range(6)],
        [i in (0, 3) for i in range(6)],
    ]
    places = torch.arange(6)
    near = ((places[:, None] - places).abs() <= 1)[None, None]
    for given in (near, near.tril(), torch.ones(1, 1, 6, 6, dtype=torch.bool)):
        assert positions(given).documents.tolist() == [[0] * 6]
    assert positions(torch.ones(1, 6)).documents is None and positions().documents is None


def test_a_mask_for_all_queries_is_one_of_the_sequence():
    mask = torch.tensor([[True, True, False, False, False, False]])[:, None, None]
    assert positions(mask).context_lengths.tolist() == [[2]]


def test_a_mask_shorter_than_a_static_cache_hides_its_empty_slots():
    mask = torch.tensor([[0, 1, 1, 1]])
    assert positions(mask, queries=2, keys=8, offset=2, is_causal=True).context_lengths.tolist() == [[2, 3]]
    assert positions(mask, queries=2, keys=8, offset=4, is_causal=True).context_lengths.tolist() == [[3, 3]]
    assert positions(mask, keys=3).context_lengths.tolist() == [[2]]


@pytest.fixture
def seen(monkeypatch) -> list[Positions]:
    """The positions that the scheme t5 is asked to prepare with."""
    from hf_posenc.modeling.schemes.t5 import T5

    found, prepare = [], T5.prepare
    monkeypatch.setattr(T5, "prepare", lambda *given: found.append(given[1]) or prepare(*given))
    return found


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_the_model_tells_its_schemes_of_padding(family, backend, seen):
    model, batch = tiny.build("t5", family, attn_implementation=backend), tiny.inputs(family=family)
    model(**batch)
    assert seen.pop().context_lengths.tolist() == batch["attention_mask"].sum(1, keepdim=True).tolist()
    model(input_ids=batch["input_ids"])
    assert seen.pop().context_lengths.tolist() == [[12]]


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_an_encoder_that_is_called_by_itself_goes_by_its_own_mask(backend, seen):
    model, batch = tiny.build("t5", attn_implementation=backend), tiny.inputs()
    states, pairs = torch.randn(3, 12, 32), batch["attention_mask"].bool()[:, None, None].expand(-1, -1, 12, -1)
    model.encoder(states, pairs)
    assert (seen.pop().context_lengths == batch["attention_mask"].sum(1, keepdim=True)).all()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_a_decoder_counts_through_its_cache(kind, seen):
    model, batch = tiny.build("t5", is_decoder=True), tiny.inputs(padding="left")
    cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=16)
    mask = batch["attention_mask"]
    for start, stop in ((0, 7), (7, 11), (11, 12)):
        model(batch["input_ids"][:, start:stop], mask[:, :stop], past_key_values=cache, use_cache=True)
        assert torch.equal(seen.pop().context_lengths, mask.cumsum(1)[:, start:stop])
