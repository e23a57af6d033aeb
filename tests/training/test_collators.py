"""Random positions: ascending, without repetition, of tokens alone, for any scheme and family."""

import pytest
import tiny
import torch
from transformers import DataCollatorWithFlattening

from hf_posenc.training import RandomizedPositions


def batch_of(padding: str | None = "right", family: str = "bert") -> dict[str, torch.Tensor]:
    return tiny.inputs(padding=padding, family=family)


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("padding", ["right", "left", None])
def test_each_text_has_positions_of_its_own_in_order(family, padding):
    first = tiny.build("t5", family=family).config.first_position
    collate = RandomizedPositions(lambda features: batch_of(padding, family), 50, first)
    batch, again = collate([]), collate([])
    tokens = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    for row, kept in zip(batch["position_ids"], tokens):
        drawn = row[kept]
        assert (drawn.diff() > 0).all() and drawn.min() >= first and drawn.max() < first + 50
        assert (row[~kept] == max(first - 1, 0)).all()
    assert not torch.equal(batch["position_ids"], again["position_ids"])
    seen = torch.cat([collate([])["position_ids"][tokens] for _ in range(200)]).unique()
    assert len(seen) == 50


def test_as_many_positions_as_tokens_are_the_usual_ones():
    batch = RandomizedPositions(lambda features: batch_of(None), batch_of(None)["input_ids"].shape[1])([])
    assert torch.equal(batch["position_ids"], torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]))


@pytest.mark.parametrize("scheme", ["absolute", "sinusoidal", "t5", "deberta", "rope", "fire"])
def test_a_model_is_told_of_them(scheme):
    model = tiny.build(scheme)
    batch = RandomizedPositions(lambda features: batch_of(), 60)([])
    read = batch["attention_mask"].bool()
    told, usual = model(**batch)[0][read], model(**batch_of())[0][read]
    assert told.isfinite().all() and (told - usual).abs().max() > 1e-3


def test_a_text_with_more_tokens_is_an_error():
    with pytest.raises(ValueError, match="needs more than the 3 positions"):
        RandomizedPositions(lambda features: batch_of(), 3)([])


@pytest.mark.parametrize("is_additive", [False, True])
def test_packed_texts_are_refused(is_additive):
    ids = torch.randint(5, 50, (2, 6))
    mask = torch.ones(2, 1, 6, 6).tril().bool()
    mask = torch.where(mask, 0.0, float("-inf")) if is_additive else mask
    with pytest.raises(ValueError, match=r"of the shape of input_ids, \(2, 6\), got \(2, 1, 6, 6\)"):
        RandomizedPositions(lambda features: {"input_ids": ids, "attention_mask": mask}, 50)([])
    with pytest.raises(ValueError, match="has position_ids already"):
        RandomizedPositions(DataCollatorWithFlattening(), 50)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
