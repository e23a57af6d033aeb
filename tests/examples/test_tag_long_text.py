"""tag_long_text.py: files are tagged to their ends."""

import json
import random
from pathlib import Path

import tag_long_text
import tiny_checkpoints
import torch
from transformers import pipeline

from hf_posenc.pipelines import LongTokenClassificationPipeline


def test_every_entity_is_a_line_with_its_place(tmp_path, run_main, capsys):
    labels = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
    torch.manual_seed(0)
    entries = {"num_labels": 5, "id2label": labels, "label2id": {name: number for number, name in labels.items()}}
    tagger = tiny_checkpoints.save(tmp_path / "tagger", head="ForTokenClassification", **entries)
    draw = random.Random(0)
    texts = {
        name: " ".join(draw.choices(tiny_checkpoints.WORDS, k=number))
        for name, number in (("one.txt", 300), ("two.txt", 20))
    }
    for name, one in texts.items():
        (tmp_path / name).write_text(one)
    files = [tmp_path / name for name in texts]
    run_main(tag_long_text, "--model", tagger, "--file", *files, "--output", tmp_path / "entities.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "entities.jsonl").read_text().splitlines()]
    assert len(lines) > 30 and max(line["start"] for line in lines) > 700
    for line in lines:
        assert texts[Path(line["file"]).name][line["start"] : line["end"]] == line["text"] and line["label"] in (
            "PER",
            "LOC",
        )
    long = pipeline(
        "token-classification",
        str(tagger),
        pipeline_class=LongTokenClassificationPipeline,
        aggregation_strategy="simple",
    )
    expected = long(texts["one.txt"])
    own = [line for line in lines if line["file"].endswith("one.txt")]
    assert [(line["start"], line["end"]) for line in own] == [(one["start"], one["end"]) for one in expected]
    assert len(Path(tag_long_text.__file__).read_text().splitlines()) <= 60
    assert "one.txt: " in capsys.readouterr().out
