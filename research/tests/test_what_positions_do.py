"""what_positions_do.py: its commands and pictures are those of the page, and its numbers are those of a report."""

import json
import re

import numpy as np
import pytest
import what_positions_do
from fresh_process import ROOT


PAGE = (ROOT / "docs" / "what-positions-do.md").read_text(encoding="utf-8")
FOUND = json.loads(what_positions_do.NUMBERS.read_text(encoding="utf-8"))


def test_the_commands_are_those_that_were_run():
    commands = what_positions_do.commands("path/to/all-MiniLM-L6-v2")
    for command in commands:
        assert " ".join(part for part in command if part != "--resume") in PAGE
    assert FOUND["max_steps"] == what_positions_do.STEPS and f"--max-steps {what_positions_do.STEPS}" in PAGE


def test_its_pictures_are_there_and_no_others():
    shown = {f"{figure}-{model}.png" for model, figures in what_positions_do.SHOWN.items() for figure in figures}
    assert shown == {*re.findall(r"\]\(pictures/([^)]+)\)", PAGE)}
    assert all((ROOT / "docs" / "pictures" / name).is_file() for name in shown)


@pytest.mark.slow
def test_numbers_are_taken_out_of_a_report_as_they_are(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "analysis")
    from reading import documents, subject

    from hf_posenc.analysis import report

    models = subject("absolute", max_position_embeddings=640), subject("t5")
    made = report(*models, texts=documents(30, length=300), progress=False)
    records = {name: [finding.record for finding in row] for name, row in made.findings.items()}
    figures = json.loads(json.dumps(made.to_dict()))["figures"]
    own, other = (what_positions_do.numbers_of(figures, model.name) for model in models)
    assert {*own} == {*what_positions_do.READERS} and {*own} - {*other} == {
        "similarity",
        "dimensions",
        "table-properties",
    }

    median = records["similarity"][0].median
    assert own["similarity"]["lowest"] == median.min() and median[own["similarity"]["lowest_at"]] == median.min()
    assert median[own["similarity"]["half_at"]] < 0.5 <= median[: own["similarity"]["half_at"]].min()
    for numbers, found in zip((own, other), records["distance"]):
        swings = np.ptp(found.curves[0].mean, axis=1)
        assert numbers["distance"]["largest"] == pytest.approx(swings.max())
        assert numbers["distance"]["largest_head"] == 1 + swings.argmax()
    for numbers, found in zip((own, other), records["terms"]):
        assert numbers["terms"]["position_heads"] == [1 + head for head in found.position_heads]
        assert numbers["terms"]["largest"] == found.layers[0].position_share.max()
    words_ask, positions_ask, constant = (
        records["terms"][0].layers[0].shares[:, records["terms"][0].layers[0].terms.index(term)]
        for term in ("word-position", "position-word", "constant-word")
    )
    cross = np.maximum(words_ask, positions_ask)
    assert (
        own["terms"]["cross_largest_head"] == 1 + cross.argmax() and own["terms"]["cross_next"] == np.sort(cross)[-2]
    )
    assert own["terms"]["heads_with_more_cross_than_constant"] == [1 + i for i in np.flatnonzero(cross >= constant)]
    for numbers, found in zip((own, other), records["order"]):
        assert numbers["order"]["shuffled"] == found.reordered["words shuffled"].text
        for kind, sentences in found.sentences.items():
            assert numbers["order"]["sentences"][kind]["text"] == sentences.change.text
            assert numbers["order"]["sentences"][kind]["count"] == 60
        assert numbers["order"]["far_apart"] == found.distances[-1]
    for numbers, found in zip((own, other), records["phase-shift"]):
        for change, shift in zip(found.all, found.shifts):
            if shift in (1, 256):
                assert numbers["phase-shift"][f"by_{shift}"] == change.text
                assert numbers["phase-shift"][f"by_{shift}_interval"] == list(change.text_interval)
    for numbers, found in zip((own, other), records["attention-properties"]):
        assert numbers["attention-properties"]["earlier"] == pytest.approx(1 - found.mean.later)
        best = numbers["attention-properties"]["best_head"] - 1
        assert found.heads[best].translation_invariance == max(head.translation_invariance for head in found.heads)
    assert own["position-term"]["median"] == pytest.approx(np.median(records["position-term"][0].toeplitz))
    assert own["dimensions"]["own"]["moving_over_64"] == records["dimensions"][0].tables[1].moving[0]
    assert own["probes"]["signed"] == records["probes"][0].r2["signed distance"]["model"].tolist()
    assert own["probes"]["intervals"]["signed"] == records["probes"][0].interval["signed distance"]["model"].tolist()
    assert own["probes"]["position"] == records["probes"][0].r2["position"]["model"].tolist()


def test_numbers_are_written_so_that_they_are_read_as_they_were():
    found = {"a": [1.5, None, [2, 3]], "b": {"c": {"d": "e, [f]", "g": []}, "h": [{"i": 1}]}}
    text = what_positions_do._written(found)
    assert json.loads(text) == found and len(text.splitlines()) < len(json.dumps(found, indent=1).splitlines())
