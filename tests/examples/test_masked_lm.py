"""Masked language modelling at several lengths: the same tokens are hidden at each, and losses are what they should be."""

import math
import re

import masked_lm
import pytest
import torch
from transformers import EvalPrediction


TEXT = ["The cat sleeps in the house.", "A dog runs to the river, and the cat sleeps."] * 30


@pytest.fixture(scope="module")
def tokenizer():
    return masked_lm.train_tokenizer(TEXT, vocabulary=120)


def test_the_tokenizer_reads_the_text_it_was_trained_on(tokenizer):
    ids = tokenizer(TEXT[1])["input_ids"]
    assert ids[0] == tokenizer.cls_token_id and ids[-1] == tokenizer.sep_token_id
    assert tokenizer.unk_token_id not in ids
    letters = re.sub(r"\W", "", tokenizer.decode(ids, skip_special_tokens=True))
    assert letters == re.sub(r"\W", "", TEXT[1].lower())


def test_lines_longer_than_a_model_reads_are_no_reason_to_warn(tokenizer, transformers_said, monkeypatch):
    monkeypatch.setattr(tokenizer, "model_max_length", 4)
    assert len(masked_lm.token_stream(TEXT[:2], tokenizer)) > 8 and transformers_said == []


@pytest.mark.parametrize("share", [0.15, 0.5])
def test_the_same_tokens_are_hidden_at_every_length(tokenizer, share):
    stream = masked_lm.token_stream(TEXT, tokenizer, limit=300)
    assert len(stream) == 300
    masked, labels = masked_lm.mask_stream(stream, tokenizer, share, seed=0)
    hidden = [index for index, label in enumerate(labels) if label != masked_lm.IGNORED]
    assert abs(len(hidden) - 300 * share) < 4 * math.sqrt(300 * share)
    for length in (12, 27, 52):
        windows = masked_lm.cut(masked, tokenizer, length, labels)
        assert {len(window["input_ids"]) for window in windows} == {length}
        inner = [label for window in windows for label in window["labels"][1:-1]]
        ids = [token for window in windows for token in window["input_ids"][1:-1]]
        assert len(inner) == 300 // (length - 2) * (length - 2)
        for index, (label, token) in enumerate(zip(inner, ids)):
            if index in hidden:
                assert label == stream[index] and token == tokenizer.mask_token_id
            else:
                assert label == masked_lm.IGNORED and token == stream[index]


def test_a_text_that_is_too_short_and_a_file_without_text_are_errors(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="5 tokens, fewer than one window of 64 takes"):
        masked_lm.cut([1] * 5, tokenizer, 64)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="has no text"):
        masked_lm.read_lines(tmp_path / "empty.txt")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        masked_lm.read_lines(tmp_path / "bytes.txt")


def test_loss_and_accuracy_are_means_over_the_masked_tokens_alone():
    logits = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.full((3, 5), masked_lm.IGNORED)
    expected, hits = [], []
    for row, column, label in ((0, 1, 3), (0, 4, 2), (2, 2, 6)):
        labels[row, column] = label
        scores = logits[row, column].double()
        expected.append(-(scores[label] - torch.log(torch.exp(scores).sum())).item())
        hits.append(scores.argmax().item() == label)
    kept = masked_lm.losses_and_hits(logits, labels)
    measured = masked_lm.loss_and_accuracy(EvalPrediction(kept.numpy(), labels.numpy()))
    assert measured["masked_loss"] == pytest.approx(sum(expected) / 3, abs=1e-6)
    assert measured["masked_accuracy"] == pytest.approx(sum(hits) / 3)
