"""The tables of the studies on the pages are those of what was measured, and every run is there once."""

import json

import comparison
import generate
import long_tables


def test_tables_are_those_of_the_results():
    assert {*generate.changed(generate.of_research())} == set()


def test_every_run_is_there_once():
    lines = comparison.read_lines(comparison.RUNS)
    assert len({comparison.file_of(line) for line in lines}) == len(lines)
    parts = json.loads(comparison.SETTINGS.read_text(encoding="utf-8"))
    assert (
        {line["part"] for line in lines}
        == parts.keys()
        == {comparison.folder_of(name).name for name in comparison.PARTS}
    )


def test_results_have_the_settings_of_their_runs():
    for name in ("long_documents", "far_context"):
        first, *runs = comparison.read_lines(long_tables.RESULTS / name / "runs.jsonl")
        assert first["settings"] == long_tables.results(name)["settings"] and runs
