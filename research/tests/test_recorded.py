"""Runs in one file: none is lost or done again, whoever writes at the same time; and the tables on the pages are those of the results."""

import json
import subprocess
import sys

import comparison
import generate
import long_tables
import pytest
from fresh_process import ROOT
from recorded import Runs, read_lines


ADD = """
import sys
from pathlib import Path

sys.path[:0] = [sys.argv[1]]

from recorded import Runs

runs = Runs(Path(sys.argv[2]), {"steps": 3})
for number in range(20):
    runs.add({"process": sys.argv[3], "number": number})
"""


def test_processes_at_once_lose_nothing(tmp_path):
    file = tmp_path / "new" / "runs.jsonl"
    command = [sys.executable, "-c", ADD, str(ROOT / "research"), str(file)]
    processes = [subprocess.Popen([*command, name]) for name in "abc"]
    assert [process.wait() for process in processes] == [0, 0, 0]
    found = {(run["process"], run["number"]) for run in Runs(file, {"steps": 3}).read()}
    assert found == {(name, number) for name in "abc" for number in range(20)} and len(read_lines(file)) == 1 + 60


def test_runs_of_other_settings_are_refused_and_stay(tmp_path):
    Runs(tmp_path / "runs.jsonl", {"steps": 3, "rate": None}).add({"seed": 1})
    with pytest.raises(ValueError, match="steps is 3 there and 4 here"):
        Runs(tmp_path / "runs.jsonl", {"steps": 4, "rate": None})
    assert Runs(tmp_path / "runs.jsonl", {"steps": 3, "rate": None}).read() == [{"seed": 1}]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The comparison in a folder of its own: an empty archive, and no outputs."""
    for name, file in {"RUNS": "runs.jsonl", "SETTINGS": "parts.json", "OUTPUTS": "outputs"}.items():
        monkeypatch.setattr(comparison, name, tmp_path / file)
    (tmp_path / "parts.json").write_text("{}")
    return tmp_path


def test_what_is_recorded_of_a_comparison_is_not_done_again(elsewhere):
    """The archive is unpacked where compare_schemes.py looks, and packed again from there it is what it was."""
    lines = read_lines(ROOT / "research" / "comparison" / "runs.jsonl")
    settings = (ROOT / "research" / "comparison" / "parts.json").read_text()
    (elsewhere / "runs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (elsewhere / "parts.json").write_text(settings)
    folders = sorted({comparison.folder_of(name) for name in comparison.PARTS})
    assert not all(one.exists for one in comparison.planned("pairs"))
    for folder in folders:
        comparison.exchange(folder)
    assert all(one.exists for part in comparison.PARTS for one in comparison.planned(part))
    assert comparison.hours_remaining("punctuation") == (0, 0)
    kept = json.loads((folders[0] / "settings.json").read_text())
    assert kept == json.loads(settings)[folders[0].name]["settings"]

    (elsewhere / "runs.jsonl").unlink()
    for folder in folders:
        comparison.exchange(folder)
    key = comparison.file_of
    assert sorted(read_lines(elsewhere / "runs.jsonl"), key=key) == sorted(lines, key=key)


def test_a_run_that_was_made_anew_takes_the_place_of_the_old_one(elsewhere):
    folder = comparison.folder_of("pairs")
    run = {"scheme": "absolute+t5", "seed": 42, "conversion": 2, "metrics": {}}
    comparison.write_json(comparison.run_file(folder, "absolute+t5", 42, 2), run)
    comparison.write_json(
        folder / "results.json", {"settings": {"a": 1}, "versions": {}, "relative_cost": {}, "runs": []}
    )
    comparison.exchange(folder)
    comparison.write_json(comparison.run_file(folder, "absolute+t5", 42, 2), run | {"seconds": 1.0})
    comparison.exchange(folder)
    assert read_lines(comparison.RUNS) == [{"part": "pairs", **run, "seconds": 1.0}]
    assert json.loads(comparison.SETTINGS.read_text()) == {"pairs": {"settings": {"a": 1}}}


def test_tables_are_those_of_the_results():
    assert {*generate.changed(generate.of_research())} == set()


def test_every_run_is_there_once():
    lines = read_lines(comparison.RUNS)
    assert len({comparison.file_of(line) for line in lines}) == len(lines)
    parts = json.loads(comparison.SETTINGS.read_text(encoding="utf-8"))
    assert (
        {line["part"] for line in lines}
        == parts.keys()
        == {comparison.folder_of(name).name for name in comparison.PARTS}
    )


def test_results_have_the_settings_of_their_runs():
    for name in ("long_documents", "far_context"):
        first, *runs = read_lines(long_tables.RESULTS / name / "runs.jsonl")
        assert first["settings"] == long_tables.results(name)["settings"] and runs
