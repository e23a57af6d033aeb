"""The code that is saved with a model, so that it loads without hf_posenc: which files, what is in them, and where they are written.

In the package the files lie in rooms below `modeling/`. transformers loads the files of a checkpoint's folder, and imports of one level: the files are
laid side by side there under their own names, which are unique, and their relative imports are changed to fit. Nothing else is, and nothing but
this module knows of it.

A checkpoint gets the files that its family's file imports, what these import, and so on. Of the schemes it gets those that it has and those that
its family was trained with: `built_in.py` is written anew, with these alone. What makes models fast (`modeling/kernels/`) is imported by none of them.

Saved again where hf_posenc is not installed, a model has its code copied by transformers: two files end in what transformers needs for that.
"""

import ast
import functools
import inspect
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME, cached_file, has_file

from . import modeling
from .files import write_whole
from .modeling.models import configuration_posenc
from .modeling.models.configuration_posenc import CLASS_PREFIX, PositionConfigMixin
from .modeling.models.family import Family
from .modeling.schemes import built_in
from .modeling.schemes.absolute import NoPositions
from .modeling.schemes.base import PositionScheme
from .modeling.schemes.table import SCHEMES, Source, scheme_names, sources_of


PACKAGE = Path(__file__).parent
MODELING = Path(inspect.getfile(modeling)).parent
# File in a checkpoint's folder -> where it is in the package.
HOMES: dict[str, Path] = {path.name: path for path in sorted(MODELING.rglob("*.py")) if path.name != "__init__.py"}
CONFIGURATION = Path(inspect.getfile(configuration_posenc)).name
BUILT_IN = Path(inspect.getfile(built_in))
# What the files of registered schemes import from: it is saved with them alone.
SCHEME = PACKAGE / "scheme.py"
# In there: schemes are checked when they are registered here, and in a checkpoint's folder taken as they are.
REGISTERS = "from .custom_schemes import register_scheme", "from .table import register as register_scheme"

RELATIVE_IMPORT = re.compile(r"^(\s*from )(\.+)((?:\w+\.)*)(\w+)(?= import)", re.MULTILINE)

# What every environment has in which a checkpoint with the file of a scheme can be loaded; transformers requires numpy.
TRAVELS = {"torch", "numpy", "transformers", *sys.stdlib_module_names}
# Modules that have or had other names in checkpoints.
_AT_HOME = {
    "scheme": "hf_posenc.scheme",
    "schemes": "hf_posenc.modeling.schemes.table",
    "relative_positions": "hf_posenc.modeling.schemes.positions",
}


def code_files(config: PositionConfigMixin) -> dict[str, str]:
    """The code that is saved with a config, name -> text: its family's file, what that imports, its schemes, and registered ones."""
    registered = sources_of(config.schemes)
    needed = {*config.schemes, *scheme_names(config.family.native_scheme), NoPositions.name}
    schemes = tuple(scheme for scheme in built_in.BUILT_IN if scheme.name in needed)
    imported = [name for source in registered.values() for name in RELATIVE_IMPORT.findall(source.text)]
    texts = {**_code_of(config.family, schemes, frozenset(name[-1] for name in imported))}
    if registered:
        texts[SCHEME.name] = flat(SCHEME.read_text(encoding="utf-8").replace(*REGISTERS))
        texts |= {f"{source.module}.py": source.text for source in registered.values()}
    texts[config.modeling_file] += _end_of_modeling(config.family, sorted({*texts} - {config.modeling_file}))
    texts[CONFIGURATION] += _end_of_configuration(registered)
    return {name: texts[name] for name in sorted(texts)}


@functools.cache
def _code_of(
    family: Family, schemes: tuple[type[PositionScheme], ...], others: frozenset[str] = frozenset()
) -> dict[str, str]:
    """The code of a family with some of the schemes.

    Args:
        others: names of modules that files of registered schemes import.
    """
    own = [Path(inspect.getfile(scheme)) for scheme in schemes]
    own += [HOMES[f"{name}.py"] for name in others if f"{name}.py" in HOMES]
    files = reached(HOMES[family.modeling_file], *own)
    texts = {path.name: flat(path.read_text(encoding="utf-8")) for path in files}
    texts[BUILT_IN.name] = _built_in(schemes)
    return texts


def _built_in(schemes: tuple[type[PositionScheme], ...]) -> str:
    """The text of `built_in.py` with some of the schemes."""
    by_module: dict[str, list[str]] = {}
    for scheme in schemes:
        by_module.setdefault(scheme.__module__.rpartition(".")[2], []).append(scheme.__name__)
    return "\n".join(
        [
            '"""The schemes that this checkpoint needs."""',
            "",
            *(f"from .{module} import {', '.join(sorted(names))}" for module, names in sorted(by_module.items())),
            "",
            f"BUILT_IN = ({', '.join(scheme.__name__ for scheme in schemes)},)",
            'OTHERS = "others are in hf_posenc: install it, and import it before the model is loaded"',
            "",
        ]
    )


def reached(*files: Path) -> set[Path]:
    """Files below `modeling/`, what they import, what that imports, and so on; of the schemes in the table none by that."""
    found, open_ends = set(), {*files}
    while open_ends:
        found |= open_ends
        open_ends = {other for path in open_ends - {BUILT_IN} for other in _imported(path)} - found
    return found


def _imported(file: Path) -> Iterable[Path]:
    for _, dots, rooms, name in RELATIVE_IMPORT.findall(file.read_text(encoding="utf-8")):
        yield file.parents[len(dots) - 1].joinpath(*rooms.split(".")[:-1], f"{name}.py")


def flat(text: str) -> str:
    """The text of a file with what it imports from other rooms as its neighbours."""
    return RELATIVE_IMPORT.sub(r"\1.\4", text)


def _end_of_configuration(registered: dict[str, Source]) -> str:
    """What transformers looks for in a config's class, and the schemes that are not of the package."""
    lines = ["", "", f"{PositionConfigMixin.__name__}._auto_class = 'AutoConfig'"]
    if registered:
        # Of two files, classes may have the same name.
        classes = {
            f"scheme_{number}": (source.module, SCHEMES[name].__qualname__)
            for number, (name, source) in enumerate(registered.items())
        }
        lines += ["", "# Schemes that are not hf_posenc's own."]
        lines += [f"from .{module} import {name} as {own}" for own, (module, name) in classes.items()]
        lines += ["from .table import register", ""]
        lines += [f"register({own})" for own in classes]
    return "\n".join([*lines, ""])


def _end_of_modeling(family: Family, others: list[str]) -> str:
    """Which Auto class loads each class: transformers copies the code of classes that say so. And what that code is.

    Args:
        others: all files but the family's own.
    """
    first = {name: auto for auto, name in reversed(family.auto_classes.items())}
    lines = [
        "",
        "",
        "# Saved again without hf_posenc, classes with these have their code copied by transformers.",
        *(f"{name}._auto_class = '{auto}'" for name, auto in sorted(first.items())),
        "# It copies what these lines name, before 5.10 nothing else. None of them runs.",
        "if False:",
        *(f"    from .{name.removesuffix('.py')} import __name__" for name in others),
        "",
    ]
    return "\n".join(lines)


def write(config: PositionConfigMixin, folder: str | os.PathLike) -> None:
    """Write the code of a config into the folder that it is saved in, all of it or none.

    Raises:
        FileExistsError: the folder holds somebody else's file under the name of one of these.
        OSError: a file cannot be written.
    """
    check_folder(config, folder)
    if not os.path.isfile(folder):  # transformers says what is wrong
        write_whole({Path(folder, name): text for name, text in code_files(config).items()})


def check_folder(config: PositionConfigMixin, folder: str | os.PathLike) -> None:
    """Look for somebody else's code under the names of code that is saved with a config, before any of it is replaced.

    Raises:
        FileExistsError: the folder holds such a file.
    """
    replaced = _code_in(Path(folder))
    for name, text in code_files(config).items():
        file = Path(folder, name)
        # A part of this code is from a save that was broken off, or that another process is at.
        if (
            name not in replaced
            and file.is_file()
            and not text.startswith(file.read_text(encoding="utf-8", errors="ignore"))
        ):
            raise FileExistsError(
                f"{file} is there already and is not from hf_posenc; saved here, the model's code would replace it: name "
                "another folder"
            )


def _code_in(folder: Path) -> set[str]:
    """The files of the code of a checkpoint that is in a folder, by whatever version it was saved: what its config names, and what that imports."""
    config = _text(folder / CONFIG_NAME)
    found: set[str] = set()
    open_ends = {f"{module}.py" for module in re.findall(rf"(\w+)\.{CLASS_PREFIX}", config)}
    while open_ends:
        found |= open_ends
        imports = [each for name in open_ends for each in RELATIVE_IMPORT.findall(_text(folder / name))]
        open_ends = {f"{names[-1]}.py" for names in imports} - found
    return found


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="ignore") if file.is_file() else ""


PositionConfigMixin.write_code = staticmethod(write)


def has_code(model: str, entries: dict[str, Any], revision: str | None = None) -> bool:
    """Whether a folder or a repository on the Hub has the code that its config names, and what that imports; by whatever version it was saved."""
    references = (entries.get("auto_map") or {}).values()  # lists are those of tokenizers
    named = {f"{reference.partition('.')[0]}.py" for reference in references if isinstance(reference, str)}
    files = [
        cached_file(model, name, revision=revision, _raise_exceptions_for_missing_entries=False) for name in named
    ]
    if not files or None in files:
        return False
    texts = [Path(file).read_text(encoding="utf-8") for file in files]
    others = {f"{found[-1]}.py" for text in texts for found in RELATIVE_IMPORT.findall(text)} - named
    return all(has_file(model, name, revision=revision) for name in others)


def travelling(text: str, path: Path) -> str:
    """The text of a registered scheme's file with its imports of hf_posenc as imports of the files in a checkpoint's folder.

    Raises:
        ValueError: it imports what neither lies there nor is in every environment that has transformers.
    """
    lines = text.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    whole = text.encode()
    # From the last one on, so that the places of those before it stay.
    for node in sorted(_imports(ast.parse(text, str(path))), key=lambda node: (-node.lineno, -node.col_offset)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [_module(node)]
        if isinstance(node, ast.Import) or names[0].partition(".")[0] != "hf_posenc":
            for name in names:
                _check_travels(name, path, node.lineno)
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        old = re.compile(rb"from\s+" + re.escape(names[0].encode()))
        new = f"from .{_sibling(node, path)}".encode()
        whole = whole[:begin] + old.sub(new, whole[begin:], count=1)
    return whole.decode()


def _imports(tree: ast.Module) -> Iterable[ast.Import | ast.ImportFrom]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))


def _module(node: ast.ImportFrom) -> str:
    return "." * node.level + (node.module or "")


def _sibling(node: ast.ImportFrom, path: Path) -> str:
    """The name in a checkpoint's folder of the module of hf_posenc that a scheme's file imports from."""
    file = f"{node.module.rpartition('.')[2]}.py"
    if node.module.startswith("hf_posenc.modeling.") and file in HOMES:
        return file.removesuffix(".py")
    for alias in node.names:
        if node.module == "hf_posenc" and alias.name != "register_scheme":
            _check_travels(f"{alias.name} from hf_posenc", path, node.lineno)
        elif node.module not in ("hf_posenc", "hf_posenc.scheme"):
            _check_travels(node.module, path, node.lineno)
    return SCHEME.stem


def _check_travels(module: str, path: Path, line: int) -> None:
    if module.partition(".")[0] not in TRAVELS:
        raise ValueError(
            f"{path}:{line} imports {module}, which would not be saved with a checkpoint: the file of a scheme may import "
            "names from hf_posenc.scheme, torch, numpy, transformers and the standard library"
        )


def at_home(text: str) -> str:
    """The text of a scheme's file from a checkpoint's folder, with its neighbours there as modules of the package."""

    def absolute(found: re.Match) -> str:
        name = found[4]
        home = _AT_HOME.get(name)
        if home is None and f"{name}.py" in HOMES:
            home = ".".join(("hf_posenc", *HOMES[f"{name}.py"].relative_to(PACKAGE).with_suffix("").parts))
        return f"{found[1]}{home or f'.{name}'}"

    return RELATIVE_IMPORT.sub(absolute, text)
