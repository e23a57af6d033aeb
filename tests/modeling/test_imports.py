"""What travels with a checkpoint imports little and does less: read off the syntax trees of the files."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import hf_posenc
from hf_posenc.integrations import hooks as plugin


PACKAGE = Path(hf_posenc.__file__).parent
MODELING = PACKAGE / "modeling"
SCHEMES, ATTENTION, KERNELS, MODELS = (MODELING / room for room in ("schemes", "attention", "kernels", "models"))
# The rooms, and those that each may import beside itself.
ROOMS = {
    MODELING: (),
    SCHEMES: (MODELING,),
    ATTENTION: (MODELING, SCHEMES),
    KERNELS: (MODELING, SCHEMES, ATTENTION),
    MODELS: (MODELING, SCHEMES, ATTENTION),
}
MODULES = [path for path in sorted(MODELING.rglob("*.py")) if path.name != "__init__.py"]
# What may lie beside a checkpoint.
FILES = [path for path in MODULES if path.parent != KERNELS]
# All of the standard library that is needed; nothing here reaches a network, a process, or code in a string.
STANDARD_LIBRARY = {
    *(
        "collections",
        "contextlib",
        "copy",
        "dataclasses",
        "difflib",
        "functools",
        "inspect",
        "json",
        "re",
        "math",
        "os",
        "pathlib",
        "shutil",
        "types",
        "weakref",
    ),
    "typing",
}
# Of those that can do harm, all that is used: to put the code beside a variant that is saved.
USED = {
    "os": {"PathLike", "makedirs", "path"},
    "shutil": {"copyfile"},
    "json": {"dumps"},
    "inspect": {"Parameter", "currentframe", "getfile", "signature", "unwrap"},
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "open", "input", "__import__", "breakpoint", "globals", "locals"}
# Parts of torch and transformers that load code or pickles, or that download.
FORBIDDEN_NAMES = {"hub", "load", "save", "cpp_extension", "load_library", "package", "cached_file", "hf_hub_download"}
FORBIDDEN_NAMES |= {"snapshot_download", "get_class_from_dynamic_module", "custom_object_save", "http_get", "hf_api"}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(node: ast.AST, guarded: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import, wherever it stands, and whether an ImportError there is caught."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, guarded
        elif isinstance(child, ast.Try):
            caught = any(
                isinstance(h.type, ast.Name) and h.type.id == "ImportError" and h.body for h in child.handlers
            )
            for part in child.body:
                yield from imports(ast.Module([part], []), guarded or caught)
            for part in (*child.handlers, *child.orelse, *child.finalbody):
                yield from imports(part, guarded)
        else:
            yield from imports(child, guarded)


def imported(node: ast.ImportFrom, folder: Path) -> Path:
    """The file that a relative import in a file of a folder names."""
    return [folder, *folder.parents][node.level - 1].joinpath(*(node.module or "").split(".")).with_suffix(".py")


def neighbours(path: Path) -> set[Path]:
    """The files that a file imports from by relative imports."""
    nodes = [node for node, _ in imports(tree(path)) if isinstance(node, ast.ImportFrom) and node.level]
    return {imported(node, path.parent) for node in nodes}


def closure(path: Path) -> set[Path]:
    """A file, what it imports from beside it, what that imports, and so on."""
    found, open_ends = set(), {path}
    while open_ends:
        found |= open_ends
        open_ends = set().union(*map(neighbours, open_ends)) - found
    return found


def wrong_imports(module: ast.Module, folder: Path) -> list[str]:
    """The imports of a file that must not travel."""
    wrong = []
    for node, guarded in imports(module):
        if isinstance(node, ast.ImportFrom) and node.level:
            file = imported(node, folder)
            ok = node.module and file.is_file() and file.parent in ROOMS
            names = []
        else:
            ok = True
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        for name in names:
            top = name.split(".")[0]
            ok = ok and (top in {"torch", "transformers", *STANDARD_LIBRARY} or (top == "triton" and guarded))
        if not ok:
            wrong.append(ast.unparse(node))
    return wrong


def wrong_doings(module: ast.Module) -> list[str]:
    """What a file calls or reaches that could run other code, read what it should not, or talk to a network."""
    wrong = []
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            wrong.append(ast.unparse(node))
        if isinstance(node, ast.Attribute):
            root = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr not in USED.get(root, {node.attr}) or node.attr in FORBIDDEN_NAMES:
                wrong.append(ast.unparse(node))
            elif root in {"builtins", "sys", "importlib", "subprocess", "ctypes", "pickle"}:
                wrong.append(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and not node.level:
            top, names = node.module.split(".")[0], {alias.name for alias in node.names}
            if (
                names & FORBIDDEN_NAMES
                or {*node.module.split(".")} & FORBIDDEN_NAMES
                or not names <= USED.get(top, names)
            ):
                wrong.append(ast.unparse(node))
    return wrong


def test_there_are_files():
    assert {"modeling_bert.py", "configuration_posenc.py", "backends.py", "t5.py"} <= {path.name for path in FILES}
    assert {path.parent for path in MODULES} == {*ROOMS}


def test_no_arrow_runs_up():
    """A file imports from its own room and from those below, and what travels from none that stays."""
    arrows = [(path, other) for path in MODULES for other in neighbours(path)]
    assert len(arrows) > 100
    assert [(a, b) for a, b in arrows if b.parent not in (a.parent, *ROOMS[a.parent])] == []


def test_there_is_no_circle():
    left = {path: neighbours(path) for path in MODULES}
    while done := [path for path, others in left.items() if not others & left.keys()]:
        for path in done:
            del left[path]
    assert not left


def test_rooms_of_the_package_import_in_one_direction():
    """No room of the package is imported by one that it imports, not even in a function or for type checkers."""
    left: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        for node, _ in imports(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.level and room != "__init__.py":
                parent = path.parents[node.level - 1]
                names = [node.module.replace(".", "/")] if node.module else [alias.name for alias in node.names]
                places = {parent / f"{name}{end}" for name in names for end in (".py", "/__init__.py")}
                rooms = {place.relative_to(PACKAGE).parts[0] for place in places if place.is_file()}
                left.setdefault(room, set()).update(rooms - {room, "__init__.py"})
    assert {"modeling", "hub", "conversion", "variants.py"} <= {*left}
    while done := [room for room, others in left.items() if not others & left.keys()]:
        for room in done:
            del left[room]
    assert not left


def in_files(wrong) -> dict[str, list[str]]:
    """What is wrong in each file that has something wrong."""
    found = {path.name: wrong(tree(path), path.parent) for path in FILES}
    return {name: lines for name, lines in found.items() if lines}


def test_what_travels_imports_only_torch_transformers_the_standard_library_and_neighbours():
    assert in_files(wrong_imports) == {}


def test_what_travels_runs_no_other_code_and_reaches_no_network():
    assert in_files(lambda module, _: wrong_doings(module)) == {}


MUST_NOT_TRAVEL = [
    "import numpy",
    "def f():\n    import requests",
    "import subprocess",
    "from urllib.request import urlopen",
    "import hf_posenc.modeling",
    "from .. import plugin",
    "from ..plugin import install",
    "from . import t5",
    "from .absent import Thing",
    "from ...plugin import install",
    "from ..schemes import t5",
    "import triton",
    "try:\n    import triton\nexcept ValueError:\n    pass",
    "try:\n    pass\nexcept ImportError:\n    import triton",
]


def test_imports_that_must_not_travel_are_found():
    assert [code for code in MUST_NOT_TRAVEL if not wrong_imports(ast.parse(code), MODELING / "models")] == []


def test_triton_may_be_tried():
    code = "try:\n    import triton\nexcept ImportError:\n    triton = None"
    assert wrong_imports(ast.parse(code), MODELING / "models") == []


MUST_NOT_BE_DONE = [
    "eval('1')",
    "exec(text)",
    "open('file')",
    "__import__('socket')",
    "os.system('ls')",
    "os.environ['HF_TOKEN']",
    "from os import system",
    "shutil.rmtree('/')",
    "torch.load('weights.bin')",
    "torch.hub.load('repo', 'model')",
    "import torch\ntorch.ops.load_library('x.so')",
    "from torch.utils.cpp_extension import load_inline",
    "from transformers.utils import cached_file",
    "from transformers.dynamic_module_utils import get_class_from_dynamic_module",
]


def test_doings_that_must_not_travel_are_found():
    assert [code for code in MUST_NOT_BE_DONE if not wrong_doings(ast.parse(code))] == []


def test_every_file_travels_with_some_family():
    travelling = set().union(*(closure(MODELING / "models" / config.modeling_file) for config in plugin.CONFIGS))
    assert travelling == {*FILES}


def test_importing_the_plugin_imports_no_command_line_no_cards_and_no_plots():
    found, open_ends = set(), {PACKAGE / "__init__.py", PACKAGE / "integrations/hooks.py"}
    while open_ends:
        found |= open_ends
        modules = set()
        for path in open_ends:
            # Imports in functions wait until they are called, and some are for type checkers alone.
            now = [
                node
                for node in tree(path).body
                if not isinstance(node, ast.FunctionDef)
                and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
            ]
            outside = ast.Module(now, [])
            for node, _ in imports(outside):
                if isinstance(node, ast.ImportFrom) and node.level:
                    names = [node.module.replace(".", "/")] if node.module else [alias.name for alias in node.names]
                    names += [f"{node.module}/{alias.name}".replace(".", "/") for alias in node.names if node.module]
                    parent = path.parents[node.level - 1]
                    modules |= {parent / f"{name}{end}" for name in names for end in (".py", "/__init__.py")}
                else:
                    names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                    heavy = {"typer", "jinja2", "matplotlib", "datasets", "peft", "huggingface_hub", "rich", "pandas"}
                    assert not heavy & {name.split(".")[0] for name in names}, (path, ast.unparse(node))
        open_ends = {path for path in modules if path.is_file()} - found
    assert {"peft.py", "parameters.py", "configuration_posenc.py", "t5.py", "mpnet.py"} <= {
        path.name for path in found
    }
    assert not {"cli.py", "pushing.py", "cards.py"} & {path.name for path in found}
    assert not any(path.parent.name == "inspection" for path in found)
