"""What README and docs say about schemes, flags, commands and measurements is so."""

import re
import tomllib
from itertools import chain

import generate
import pytest
import speed_tables
import torch
import yaml
from fresh_process import ROOT
from transformers import BertConfig, BertForSequenceClassification, BertModel

from hf_posenc import freeze_all_but_positions, position_parameters
from hf_posenc.checkpoint_code import code_files
from hf_posenc.integrations.hooks import CONFIGS
from hf_posenc.modeling.models.configuration_posenc import FLAGS
from hf_posenc.modeling.schemes.flags import UNPAD
from hf_posenc.modeling.schemes.table import ALIASES, ALL, SCHEMES


PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
README, SCHEMES_PAGE = PAGES["README.md"], PAGES["docs/schemes.md"]


def rows(page: str) -> list[list[str]]:
    """The cells of all rows that begin with something in backticks."""
    found = re.findall(r"^\| `.*\|$", page, flags=re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in found]


def scheme_rows(page: str) -> dict[str, list[str]]:
    return {cells[0].strip("`"): cells for cells in rows(page) if cells[0].strip("`") in SCHEMES}


def test_every_scheme_and_every_flag_has_a_row():
    assert list(scheme_rows(SCHEMES_PAGE)) == list(SCHEMES)
    assert [scheme for scheme in SCHEMES if f"`{scheme}`" not in README.partition("## Supported")[2]] == []
    options = re.findall(r"^\| ([^|`]+) \| `(\w+)` \| (.+) \|$", SCHEMES_PAGE, flags=re.MULTILINE)
    assert {option for _, option, _ in options} == {*FLAGS, UNPAD.name}
    for option, users in {**FLAGS, UNPAD.name: {ALL: UNPAD}}.items():
        for name, flag in users.items():
            said = [rest for who, other, rest in options if other == option and name in who.split(", ")]
            assert said == [f"{flag.kind.values} | {flag.help} | {flag.described_default()}"], (option, name)
    named = {cells[4].strip("`"): scheme for scheme, cells in scheme_rows(SCHEMES_PAGE).items() if cells[4]}
    assert named == ALIASES


def test_the_number_of_new_parameters_in_bert_base_is_right():
    for scheme in SCHEMES:
        with torch.device("meta"):
            model = BertModel(BertConfig(position_scheme=scheme))
        number = sum(parameter.numel() for parameter in position_parameters(model).values())
        cell = scheme_rows(SCHEMES_PAGE)[scheme][2]
        assert re.match(r"[\d,]+", cell).group() == f"{number:,}", scheme
        assert ("keeps" in cell) == ("embeddings.position_embeddings.weight" in model.state_dict()), scheme


def test_the_recipe_for_positions_only_trains_as_many_parameters_as_it_says():
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(position_scheme="absolute+deberta"))
    count = freeze_all_but_positions(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    said = f"freeze_all_but_positions(model)  # {count:,} parameters are left, of {total / 1e6:.0f} million"
    assert said in PAGES["docs/peft.md"]


def test_what_is_generated_is_as_it_should_be():
    assert {*generate.changed(chain(generate.of_the_code(), speed_tables.generated()))} == set()


def test_a_table_of_other_numbers_is_noticed(tmp_path, monkeypatch):
    """A page with another digit in a table is made anew, and nothing else in it changes."""
    for name, _ in speed_tables.generated():
        text = (ROOT / name).read_text(encoding="utf-8")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        begin = text.index("\n|---")
        (tmp_path / name).write_text(text[:begin] + re.sub(r"\d\.\d\d", "7.77", text[begin:]), encoding="utf-8")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert "docs/speed.md" in generate.changed(speed_tables.generated())


def test_the_files_that_trust_runs_are_all_named():
    named = {*re.findall(r"`(\w+\.py)`", PAGES["docs/security.md"])}
    carried = {name for config in CONFIGS for scheme in SCHEMES for name in code_files(config(position_scheme=scheme))}
    assert named == {name for name in carried if name == "modeling_posenc.py" or not name.startswith("modeling_")}


@pytest.mark.parametrize("page", PAGES)
def test_files_and_sections_that_it_links_to_are_there(page):
    for link in re.findall(r"(?<!\\)\]\(([^):]+)\)", PAGES[page]):
        file, _, section = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.is_file(), f"{page} links to {link}"
        if section:
            text = target.read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
            described = re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)  # on pages of docs/api
            sections = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
            assert section in [*sections, *described], f"{page} links to {link}"


def test_every_page_is_in_the_navigation():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = {page for section in site["nav"] for entry in section.values() for page in as_list(entry)}
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert named == pages | {"index.md", "contributing.md", "changelog.md"}


def as_list(entry: str | list[dict[str, str]]) -> list[str]:
    return [entry] if isinstance(entry, str) else [page for titled in entry for page in titled.values()]


def test_ci_runs_the_command_that_the_readme_gives():
    commands = re.findall(r"^pip install .*$", README, flags=re.MULTILINE)
    assert commands == [
        'pip install -c constraints.txt -e ".[demo]" && python examples/quickstart.py',
        'pip install -c constraints.txt -e ".[test]" && pytest',
    ]
    assert commands[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_all_extras_are_explained():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [table] = re.findall(r"^\| extra .*(?:\n\|.*)*", PAGES["docs/getting-started.md"], flags=re.MULTILINE)
    assert {cells[0].strip("`") for cells in rows(table)} == project["optional-dependencies"].keys()
