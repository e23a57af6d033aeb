"""The tables of docs/long-documents.md and its appendix are those of the results, all of them and no others."""

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
    for which in ("", "_VECTORS", "_WINDOWS", "_FAR"):
        marks = f"BEGIN{which}", f"END{which}"
        begin, end = (script[name] for name in marks)
        text = re.sub(f"{begin}.*?{end}", "", text, flags=re.DOTALL)
    assert "\n|" not in text, "a table that is not from the results"


def test_pictures_are_there(page):
    for picture in re.findall(r"\]\((pictures/[^)]+)\)", page):
        assert (ROOT / "docs" / picture).is_file()


def test_the_table_of_the_page_is_that_of_the_results(script):
    text = (ROOT / script["PAGE"]).read_text(encoding="utf-8")
    assert f"\n\n{script['page_table']()}\n\n" in text
