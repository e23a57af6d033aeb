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
    for which in ("", "_VECTORS", "_WINDOWS", "_FAR"):
        marks = f"BEGIN{which}", f"END{which}"
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
    assert len(table.splitlines()) == 2 + 12
    assert len(re.findall(r"\]\(pictures/", text)) == 1
    assert len(text.replace(table, "").split()) <= 900


def test_what_the_page_says_is_sure_excludes_0_and_what_is_level_or_open_does_not(script):
    found = script["vectors"]()["methods"]

    def sure(name, task, other=script["MEAN"]):
        low, high = found[name]["less"][other][task]["interval"]
        return (low > 0) - (high < 0)

    untrained = [
        name for name, own in found.items() if own["vectors"] == 1 and not re.match("t5|absolute|deberta", name)
    ]
    more = [name for name in untrained if name != script["MEAN"] and sure(name, "passkey") > 0]
    assert "DICE, maximum" in more
    assert all(min(sure(name, "needle"), sure(name, "articles")) < 0 for name in more)
    assert sure("best chunk of 64 overlapping", "articles") > 0
    late = "t5, best late chunk of 128 overlapping", "best chunk of 128 overlapping"
    assert [sure(late[0], task, late[1]) for task in ("passkey", "needle", "articles")] == [0, -1, 0]
    assert [sure("t5", task) for task in ("passkey", "needle", "articles")] == [1, 0, 0]
    centred = f"{script['LOCAL']}, centred", "mean of chunks, centred"
    assert [sure(centred[0], task, centred[1]) for task in ("passkey", "needle", "articles")] == [1, 1, 0]
    assert [sure(centred[0], task, "t5, centred") for task in ("passkey", "needle")] == [0, 0], "as without a window"
    # Level: the interval is within 0.02, of nDCG.
    for name, other in (("t5", script["MEAN"]), centred):
        assert max(map(abs, found[name]["less"][other]["articles"]["interval"])) < 0.02
    tags = script["far_context"]()["t5"]["bands"]
    assert tags["beyond the window"]["less"]["windows"]["interval"][0] > 0
    assert (
        tags["below 256"]["less"]["windows"]["interval"][0] < 0 < tags["below 256"]["less"]["windows"]["interval"][1]
    )
