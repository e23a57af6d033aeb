"""A run with newer packages than were tested says which, and which tests failed."""

import newest_versions
from newest_versions import CORE, PACKAGES, ROOT, newer, report
from packaging.version import Version

from hf_posenc.modeling.stock_interface import TESTED


PAGE = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")


def test_the_page_names_what_was_tested():
    known = newest_versions.tested(PAGE)
    assert {*PACKAGES} <= {*known} and known["transformers"] == Version(TESTED[-1])
    assert f"| transformers | {TESTED[0]} | {TESTED[-1]} |" in PAGE
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {name: Version(pins[name]) for name in PACKAGES} == {name: known[name] for name in PACKAGES}


def test_only_newer_versions_are_news():
    known = {"transformers": Version("5.24.0"), "peft": Version("0.21.2")}
    assert newer({"transformers": Version("5.24.0"), "peft": Version("0.20.0")}, known) == []
    found = {"transformers": Version("5.25.0"), "peft": Version("0.21.2")}
    assert newer(found, known) == ["transformers"]
    output = "FAILED tests/test_a.py::test_b[c] - TypeError: x\nERROR tests/test_c.py\n2 failed"
    told = "NEW transformers 5.25.0: 2 failed\n  tests/test_a.py::test_b[c]\n  tests/test_c.py\n"
    assert report(["transformers"], found, output) == told
    assert report(["transformers"], found, "9 passed") == "NEW transformers 5.25.0: 0 failed\n"


def test_the_core_tests_are_there():
    assert [name for name in CORE if not (ROOT / name).is_file()] == []
