"""The mistakes of tests/mutations/mutations.toml can still be made, by tests/mutations/run.py, where they say."""

import tomllib
from collections import Counter
from pathlib import Path


ROOT = Path(__file__).parents[1]
MUTATIONS = tomllib.loads((ROOT / "tests/mutations/mutations.toml").read_text())["mutation"]


def test_there_are_enough_and_each_has_a_name_of_its_own():
    names = Counter(mutation["name"] for mutation in MUTATIONS)
    assert len(names) >= 64
    assert names.most_common(1)[0][1] == 1


def test_each_changes_a_line_that_is_there_once():
    wrong = [
        mutation["name"]
        for mutation in MUTATIONS
        if (ROOT / mutation["file"]).read_text().count(mutation["old"]) != 1 or mutation["new"] == mutation["old"]
    ]
    assert wrong == []


def test_the_tests_that_each_names_are_there():
    missing = {
        test for mutation in MUTATIONS for test in mutation["tests"] if not (ROOT / test.split("::")[0]).is_file()
    }
    assert missing == set()
    assert all(mutation["tests"] for mutation in MUTATIONS)
