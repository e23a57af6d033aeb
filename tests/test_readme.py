"""What the README says about schemes, flags and commands is so."""

import re
import runpy

import pytest
import torch
from fresh_process import ROOT
from transformers import BertConfig, BertForSequenceClassification, BertModel

from hf_posenc import freeze_all_but_positions, position_parameters
from hf_posenc.inspection import code_files, flag_rows, unpad_row
from hf_posenc.modeling.configuration_posenc import FLAGS
from hf_posenc.modeling.schemes import ALIASES, SCHEMES
from hf_posenc.plugin import CONFIGS


README = (ROOT / "README.md").read_text(encoding="utf-8")
# A scheme's row begins with its name, a flag's with one or several.
ROWS = re.findall(r"^\| `.*\|$", README, flags=re.MULTILINE)
CELLS = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in ROWS]
SCHEME_ROWS = {cells[0].strip("`"): cells for cells in CELLS if cells[0].strip("`") in SCHEMES}


def test_every_scheme_and_every_flag_has_a_row():
    assert list(SCHEME_ROWS) == list(SCHEMES)
    assert [cells[0] for cells in CELLS if "position_" in cells[0]] == [f"`{flag}`" for flag in FLAGS]
    for flag, values, meaning in [*flag_rows(), unpad_row()]:
        assert f"| `{flag}` | {values} | {meaning} |" in README
    assert all(f"`{alias}`" in README for alias in ALIASES)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_number_of_new_parameters_in_bert_base_is_right(scheme):
    with torch.device("meta"):
        model = BertModel(BertConfig(position_scheme=scheme))
    number = sum(parameter.numel() for parameter in position_parameters(model).values())
    cell = SCHEME_ROWS[scheme][2]
    assert re.match(r"[\d,]+", cell).group() == f"{number:,}"
    assert ("keeps" in cell) == ("embeddings.position_embeddings.weight" in model.state_dict())


def test_the_recipe_for_positions_only_trains_as_many_parameters_as_it_says():
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(position_scheme="absolute+deberta"))
    count = freeze_all_but_positions(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert f"freeze_all_but_positions(model)  # {count:,} parameters are left, of {total / 1e6:.0f} million" in README


@pytest.mark.parametrize("scheme", SCHEMES)
def test_papers_and_the_end_of_the_table_are_the_schemes_own(scheme):
    _, _, _, beyond, _, paper, _ = SCHEME_ROWS[scheme]
    assert paper == SCHEMES[scheme].paper
    assert beyond.startswith("no") == SCHEMES[scheme].ends_with_table


def test_the_tables_of_measured_schemes_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = runpy.run_path(str(ROOT / "benchmarks" / "readme_tables.py"))["tables"]()
    assert [table.splitlines()[0] for table in tables if f"\n\n{table}\n\n" not in README] == []


def test_the_files_that_trust_runs_are_all_named():
    [section] = re.findall(r"^## Security\n(.*?)^## ", README, flags=re.MULTILINE | re.DOTALL)
    named = {*re.findall(r"`(\w+\.py)`", section)}
    carried = {file.name for config in CONFIGS for file in code_files(config())}
    assert named == {name for name in carried if name == "modeling_posenc.py" or not name.startswith("modeling_")}


def test_files_that_it_links_to_are_there():
    links = re.findall(r"(?<!\\)\]\(([^)#:]+)\)", README)
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_ci_runs_the_command_that_the_readme_gives():
    commands = re.findall(r"^pip install .*$", README, flags=re.MULTILINE)
    assert commands == [
        'pip install -c constraints.txt -e ".[demo]" && python examples/quickstart.py',
        'pip install -c constraints.txt -e ".[test]" && pytest',
    ]
    assert commands[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
