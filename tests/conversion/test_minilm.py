"""A real pretrained model keeps what it knows: MiniLM, measured on text that it was not converted with.

Budgets are small: whole ones reach more.
"""

import os
from pathlib import Path

import pytest
import torch
from fresh_process import ROOT
from transformers import AutoModel

from hf_posenc import convert


# The folder of data sets beside the checkout, unless another is named.
TEXT = Path(os.environ.get("HF_POSENC_TEST_DATA", ROOT.parent / "shared" / "data"), "wikitext2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (TEXT / "test.txt").is_file(), reason=f"WikiText-2 is not in {TEXT}"),
]


def converted(checkpoint, scheme, **arguments):
    text = {"text": [TEXT / "valid.txt"], "held_out": [TEXT / "test.txt"], "trained_length": 128}
    return convert(checkpoint, scheme, **text, **arguments)


def test_t5_is_calibrated_and_distilled(minilm):
    _, report = converted(minilm, "t5", max_steps=60)
    started, calibrated, distilled = (row["token_cosine"] for row in report.rows)
    assert started < 0.85 and calibrated > 0.94 and distilled > 0.96
    assert report.final()[0]["sentence_cosine"] > 0.96 and report.final()[0]["spearman"] > 0.95


def test_beyond_leaves_128_tokens_exactly_and_reads_2048(minilm):
    model, report = converted(minilm, "absolute+t5", max_length=2048, train="beyond", max_steps=10)
    original = AutoModel.from_pretrained(minilm).eval()
    ids = torch.randint(1000, 20000, (2, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = model(ids).last_hidden_state - original(ids).last_hidden_state
    assert difference.abs().max() < 1e-5
    tiled = {row["length"]: row["token_cosine"] for row in report.rows if row["stage"] == "start"}
    distilled = {row["length"]: row["token_cosine"] for row in report.final()}
    assert distilled[128] > 0.99999
    assert distilled[2048] > tiled[2048]
