"""The tables of docs/long-documents.md are those of the results, all of them and no others."""

import re
import runpy

from fresh_process import ROOT


def test_the_tables_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = runpy.run_path(str(ROOT / "benchmarks" / "long_tables.py"))
    page = (ROOT / "docs" / "long-documents.md").read_text(encoding="utf-8")
    before, found, after = re.fullmatch(f"(.*){script['BEGIN']}(.*){script['END']}(.*)", page, re.DOTALL).groups()
    assert found == script["block"]()
    assert "\n|" not in before + after, "a table that is not from the results"
    for picture in re.findall(r"\]\((pictures/[^)]+)\)", page):
        assert (ROOT / "docs" / picture).is_file()
