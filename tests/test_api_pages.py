"""Every public name is on a page of docs/api, made from its docstring."""

import re
import tomllib
from importlib import import_module
from importlib.util import find_spec

import pytest
from fresh_process import ROOT


PAGES = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")}
DESCRIBED = [path for page in PAGES.values() for path in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)]
PUBLIC = (
    "hf_posenc",
    "hf_posenc.analysis",
    "hf_posenc.conversion",
    "hf_posenc.export.stock",
    "hf_posenc.hub",
    "hf_posenc.inspection",
    "hf_posenc.pipelines",
    "hf_posenc.scheme",
    "hf_posenc.sentence",
    "hf_posenc.training",
)
# griffe does not read an assignment to several names.
IN_PROSE = {"hf_posenc.analysis": ("MODEL", "SCHEME", "TEXT")}


def is_module(path: str) -> bool:
    file = ROOT / path.replace(".", "/")
    return file.is_dir() or file.with_suffix(".py").is_file()


def object_of(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_on_a_page(module):
    public = import_module(module)
    for name in public.__all__:
        if name in IN_PROSE.get(module, ()):
            assert f"`{name}`" in PAGES["analysis.md"]
        elif f"{module}.{name}" not in DESCRIBED:
            others = [path for path in DESCRIBED if path.endswith(f".{name}")]
            assert any(object_of(path) is getattr(public, name) for path in others), f"{module}.{name}"


def test_what_is_described_is_there_once():
    assert len({*DESCRIBED}) == len(DESCRIBED)
    for path in DESCRIBED:
        assert not is_module(path), f"::: {path} is the module of this name; give the full path of the object"
        if not path.startswith("hf_posenc.sentence.") or find_spec("sentence_transformers"):
            object_of(path)


def test_pages_have_no_code():
    """tests/test_code_blocks.py does not read them."""
    assert [name for name, page in PAGES.items() if "```" in page] == []


def test_ci_installs_the_packages_of_the_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = {re.split("[><=]", package)[0] for package in project["optional-dependencies"]["docs"]}
    [command] = re.findall(
        r"^ +install (.*mkdocs.*)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {*command.replace('"', "").split()[2:]} == packages
