"""The tables of docs/long-documents-appendix.md are those of the results, all of them and no others; the page before it is short."""

import re
import runpy

import pytest
from fresh_process import ROOT


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return runpy.run_path(str(ROOT / "benchmarks" / "long_tables.py"))


@pytest.fixture(scope="module", params=["long-documents", "long-documents-appendix"])
def page(request):
    return (ROOT / "docs" / f"{request.param}.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_results(script):
    text = (ROOT / script["APPENDIX"]).read_text(encoding="utf-8")
    assert script["with_tables"](text) == text
    for marks in (("BEGIN", "END"), ("BEGIN_VECTORS", "END_VECTORS")):
        begin, end = (script[name] for name in marks)
        text = re.sub(f"{begin}.*?{end}", "", text, flags=re.DOTALL)
    assert "\n|" not in text, "a table that is not from the results"


def test_pictures_are_there(page):
    for picture in re.findall(r"\]\((pictures/[^)]+)\)", page):
        assert (ROOT / "docs" / picture).is_file()


def test_the_page_is_read_in_minutes_and_has_one_table_and_one_picture(script):
    text = (ROOT / script["PAGE"]).read_text(encoding="utf-8")
    [table] = re.findall(r"^\|.*(?:\n\|.*)*", text, flags=re.MULTILINE)
    assert table == script["page_table"]()
    assert len(re.findall(r"\]\(pictures/", text)) == 1
    assert len(text.replace(table, "").split()) <= 900
