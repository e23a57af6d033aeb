"""Promise 3: what is saved can be loaded without hf_posenc. Here, the files that are saved for that."""

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest
import tiny
from fresh_process import run_fresh
from tiny import FAMILIES, build
from transformers.dynamic_module_utils import get_relative_import_files, get_relative_imports

import hf_posenc
from hf_posenc import checkpoint_code
from hf_posenc.checkpoint_code import HOMES, MODELING, code_files, flat, reached
from hf_posenc.modeling.schemes.table import SCHEMES, SOURCES


every_family = pytest.mark.parametrize("family", FAMILIES)


def relative_imports(text: str) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.level]


def test_names_of_files_are_unique_over_the_rooms():
    files = [path.name for path in MODELING.rglob("*.py") if path.name != "__init__.py"]
    assert len({*files}) == len(files) == len(HOMES)
    assert checkpoint_code.SCHEME.name not in HOMES


def test_relative_imports_alone_are_changed():
    text = '''"""Says from .. what."""
from torch import nn
from . import x
from .near import a, b as c
from ..far.away import (
    d,
)
if x:
    from ...further import e
    from ..upstairs import from_there
'''
    assert (
        flat(text)
        == '''"""Says from .. what."""
from torch import nn
from . import x
from .near import a, b as c
from .away import (
    d,
)
if x:
    from .further import e
    from .upstairs import from_there
'''
    )


def files_of(scheme: str) -> set[str]:
    """Names of the files of schemes that are joined by '+'."""
    return {f"{SCHEMES[name].__module__.rpartition('.')[2]}.py" for name in scheme.split("+")}


@tiny.cross(family=[*FAMILIES], scheme=[*SCHEMES, "tupe+t5", "sinusoidal+deberta"], strength=1)
def test_a_file_beside_a_checkpoint_is_that_of_the_package_but_for_its_imports(family, scheme):
    config = FAMILIES[family](position_scheme=scheme)
    files = code_files(config)
    assert {path.name for path in reached(HOMES[config.modeling_file])} <= {*files}
    others = {other.modeling_file for other in FAMILIES.values() if other.modeling_file != config.modeling_file}
    assert not others & {*files}
    # The schemes that are in use, those of the family's checkpoints, and what these import.
    needed = files_of(f"{scheme}+{config.family.native_scheme}")
    other_schemes = (
        files_of("+".join(name for name in SCHEMES if name not in SOURCES))
        - needed
        - ({"sinusoidal.py"} if {"rope", "transformer_xl"} & {*scheme.split("+")} else set())
    )
    assert needed <= {*files} and not other_schemes & {*files}
    assert not {path.name for path in (MODELING / "kernels").iterdir()} & {*files}
    for name, text in files.items():
        own = HOMES[name].read_text(encoding="utf-8")
        if name == "built_in.py":
            names = [found for node in relative_imports(text) for found in (alias.name for alias in node.names)]
            assert {scheme.__name__ for scheme in SCHEMES.values() if scheme.__name__ in names} == {*names}
            assert sum(text.count(f"{found},") for found in names) >= len(names)
            continue
        if name in ("configuration_posenc.py", config.modeling_file):
            assert text.startswith(flat(own))
        else:
            assert text == flat(own)
        for node in relative_imports(text):
            assert node.level == 1 and f"{node.module}.py" in files, (name, ast.unparse(node))


@every_family
def test_the_file_that_transformers_loads_names_all_others(family, tmp_path):
    """Before 5.10 it copies, of a checkpoint in a folder, this one and what it imports itself."""
    config = FAMILIES[family]()
    config.save_pretrained(tmp_path)
    others = {*code_files(config)} - {config.modeling_file}
    first = tmp_path / config.modeling_file
    assert {reference.split(".")[0] for reference in config.to_dict()["auto_map"].values()} == {first.stem}
    assert {f"{name}.py" for name in get_relative_imports(first)} == others
    assert {Path(file).name for file in get_relative_import_files(first)} >= others


@every_family
def test_classes_beside_a_checkpoint_say_which_auto_class_loads_them(family, tmp_path, monkeypatch):
    FAMILIES[family]().save_pretrained(tmp_path / "beside_it")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"beside_it.{FAMILIES[family].modeling_file.removesuffix('.py')}")
    try:
        assert getattr(module, FAMILIES[family].__name__)._auto_class == "AutoConfig"
        served = {}
        for auto, name in FAMILIES[family].auto_classes.items():
            served.setdefault(name, auto)
        for name, auto in served.items():
            assert getattr(module, name)._auto_class == auto
            assert getattr(hf_posenc, name)._auto_class is None  # saved with hf_posenc, transformers copies nothing
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "beside_it"]:
            del sys.modules[name]


SAVE_AGAIN = """
import json, torch
from pathlib import Path
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM
folder, again = Path({folder!r}), Path({again!r})
trusted = dict(trust_remote_code=True)
AutoConfig.from_pretrained(folder, **trusted).save_pretrained(again / "config")
AutoModel.from_pretrained(folder, **trusted).save_pretrained(again / "base")
model = AutoModelForMaskedLM.from_pretrained(folder, **trusted)
model.save_pretrained(again / "head")
type(model)(model.config).save_pretrained(again / "made")
AutoModelForMaskedLM.from_config(model.config, **trusted).save_pretrained(again / "from_config")
# What was saved again is loaded again, and saved once more.
AutoModelForMaskedLM.from_pretrained(again / "head", **trusted).save_pretrained(again / "twice")
tokens = torch.arange(5, 25).view(2, 10)
print("SAME", torch.equal(AutoModelForMaskedLM.from_pretrained(again / "twice", **trusted)(tokens)[0], model(tokens)[0]))
"""


@pytest.mark.parametrize("family", ["bert", pytest.param("mpnet", marks=pytest.mark.slow)])
def test_without_hf_posenc_a_variant_is_saved_again_with_all_its_code(family, tmp_path):
    """A model, and a config by itself, whichever Auto class loaded it."""
    model = build("absolute+t5", family, "ForMaskedLM")
    model.save_pretrained(tmp_path / "saved")
    code = SAVE_AGAIN.format(folder=str(tmp_path / "saved"), again=str(tmp_path / "again"))
    assert "SAME True" in run_fresh(code, tmp_path / "modules", plugin=False)
    auto_map = json.loads((tmp_path / "saved/config.json").read_text())["auto_map"]
    for folder in (tmp_path / "again").iterdir():
        files = {file.name: file.read_text(encoding="utf-8") for file in folder.glob("*.py")}
        assert files == code_files(model.config), folder.name
        assert json.loads((folder / "config.json").read_text())["auto_map"] == auto_map, folder.name


def test_a_class_of_somebody_else_s_gets_the_code_of_its_family(tmp_path):
    class Mine(hf_posenc.PosencBertModel):
        pass

    Mine(build("t5").config).save_pretrained(tmp_path)
    assert {file.name: file.read_text(encoding="utf-8") for file in tmp_path.glob("*.py")} == code_files(
        build("t5").config
    )


def test_what_was_saved_after_uninstalling_has_its_code(tmp_path):
    code = """
import hf_posenc
model = hf_posenc.PosencBertModel(hf_posenc.PosencBertConfig(position_scheme="t5", hidden_size=8, num_attention_heads=2,
    num_hidden_layers=1, intermediate_size=8))
hf_posenc.uninstall()
model.save_pretrained({!r})
"""
    run_fresh(code.format(str(tmp_path / "saved")), tmp_path / "modules", plugin=True)
    assert (tmp_path / "saved" / "modeling_bert.py").is_file() and (tmp_path / "saved" / "base.py").is_file()
