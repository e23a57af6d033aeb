"""Custom schemes: how their files are read and checked, and how they are loaded from checkpoints.

A registered scheme is in the table of modeling/schemes/table.py, like the package's own schemes. The table also keeps the text of the scheme's file
as it is saved with checkpoints: there, imports of hf_posenc are imports of the other saved files.
"""

import hashlib
import importlib.util
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers.utils import cached_file, logging

from .checkpoint_code import HOMES, SCHEME, at_home, travelling
from .modeling.extras import EXTRAS
from .modeling.models.configuration_posenc import SCHEME_FILES
from .modeling.schemes import table as schemes
from .modeling.schemes.base import AttentionScheme, EmbeddingScheme, PositionScheme
from .modeling.schemes.flags import Flag, Kind
from .modeling.schemes.table import ALIASES, ALL, FLAGS, SCHEMES, SOURCES, Source
from .modeling.schemes.terms import Term


logger = logging.get_logger(__name__)

ENTRY_POINTS = "hf_posenc.schemes"
# The names of modules that were run from checkpoints, without their digests.
FROM_CHECKPOINT = "hf_posenc_from_checkpoint_"
# What no flag may be called, and why.
TAKEN = {
    "position_scheme": "it names the schemes",
    "position_embedding_type": "Transformers 4 used this name for relative positions, and old checkpoints have it",
    "position_ids": "models take it as an argument",
    "position_learning_rate": "scripts and the trainer take it as an argument",
    "position_table_version": "it says how checkpoints of `deberta` are read",
}
# Keywords of `from_pretrained` that say where files are.
PLACE = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder")

# Whether the Auto class that reads a config was told to run the code saved with it.
_trusts_code: ContextVar[bool] = ContextVar("trusts_code", default=False)


def register_scheme(scheme: type[PositionScheme]) -> type[PositionScheme]:
    """Register a custom position scheme for this process, so that `position_scheme="absolute+mine"` works.

    The file of the class is saved with every checkpoint that has the scheme. `hf_posenc.testing.check_scheme` checks what it computes.

    Args:
        scheme: a subclass of `AttentionScheme` or `EmbeddingScheme` at the top level of a file, with `name`, `formula`, `paper`
            and `extrapolates`. Registering the same class again does nothing. After its file was edited and imported again, the new class
            replaces the old one.

    Returns:
        The class, so that this function can be used as a decorator.

    Raises:
        TypeError: `scheme` is not such a subclass.
        ValueError: something is missing or wrong (the message names it), the class has no file, the file was changed after it
            was imported, it imports what cannot be saved with a checkpoint, or another scheme has the name.
    """
    _check(scheme)
    if scheme.__module__.startswith(FROM_CHECKPOINT):
        return scheme  # the checkpoint whose config names it registers it, by the text that lies there
    return schemes.register(scheme, _source(scheme))


def register_files(paths: Iterable[str | Path]) -> list[type[PositionScheme]]:
    """Run the files of schemes and register each scheme that they define.

    Args:
        paths: Python files, each with one scheme or several.

    Raises:
        OSError: a file cannot be read.
        ValueError: it has no scheme, cannot be run, or as for [`register_scheme`].
        TypeError: as for [`register_scheme`].
    """
    return [scheme for path in paths for scheme in _register_file(Path(path).absolute())]


def _register_file(path: Path) -> list[type[PositionScheme]]:
    content = path.read_bytes()
    # Two files of one name are two modules; the text tells a file that was changed.
    module = _run(path, content, f"hf_posenc_scheme_{_digest(str(path).encode() + content)}_{path.stem}")
    found = _schemes_in(module)
    if not found:
        raise ValueError(f"{path} defines no position scheme: no subclass of AttentionScheme or EmbeddingScheme")
    for scheme in found:
        register_scheme(scheme)
    return found


def _schemes_in(module: ModuleType) -> list[type[PositionScheme]]:
    """The schemes that a module defines, but for base classes of its own, which have no name."""
    classes = [
        value for value in vars(module).values() if isinstance(value, type) and issubclass(value, PositionScheme)
    ]
    return [cls for cls in classes if cls.__module__ == module.__name__ and "name" in vars(cls)]


def _run(path: Path, content: bytes, name: str) -> ModuleType:
    """A file as a module of a name; what was run under it is not run again.

    Its content is compiled as it is: what Python has compiled before (`__pycache__`) may be of another one of the same second.
    """
    if name in sys.modules:
        return sys.modules[name]
    if path.suffix != ".py":
        raise ValueError(f"{path} is not a Python file")
    specification = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        exec(specification.loader.source_to_code(content, path), vars(module))
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, (ValueError, TypeError)):
            raise
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _text(path: Path, content: bytes) -> str:
    """The text of a Python file, without a byte order mark and with its lines ended as here.

    Raises:
        ValueError: it is no text in UTF-8, which it has to be in a checkpoint.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    except SyntaxError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if encoding not in ("utf-8", "utf-8-sig"):
        raise ValueError(f"{path} declares the encoding {encoding}: save it as UTF-8, without a declaration")
    return io.TextIOWrapper(io.BytesIO(content), encoding).read()


def register_entry_points() -> None:
    """Register the schemes that installed packages name in the entry point group `hf_posenc.schemes`; a broken one is logged."""
    for entry in entry_points(group=ENTRY_POINTS):
        module = sys.modules.get(entry.module)
        if module is not None and not hasattr(module, entry.attr):
            continue  # it is being imported, and is why hf_posenc is: its decorator registers the scheme
        try:
            register_scheme(entry.load())
        except Exception as error:  # whatever a package does wrong, hf_posenc is imported
            logger.warning(f"the position scheme {entry.value} of an installed package was not registered: {error}")


def _check(scheme: type[PositionScheme]) -> None:
    """Raise what [`register_scheme`] raises for a class."""
    if not (isinstance(scheme, type) and issubclass(scheme, (AttentionScheme, EmbeddingScheme))):
        raise TypeError(f"a scheme must be a subclass of AttentionScheme or EmbeddingScheme, got {scheme!r}")
    who = scheme.__qualname__
    if not scheme.__qualname__.isidentifier():
        raise ValueError(f"{who} must be defined at the top level of its file, so that it can be imported")
    for attribute in ("name", "formula", "paper", "extrapolates"):
        value = getattr(scheme, attribute, None)
        if not (isinstance(value, str) and value.strip()) or "\n" in value:
            raise ValueError(
                f"{who} needs the attribute {attribute!r}, a string of one line; see docs/custom-schemes.md"
            )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", scheme.name):
        raise ValueError(f"{who}.name must consist of lowercase letters, digits and underscores, got {scheme.name!r}")
    if scheme.name == ALL:
        raise ValueError(f"{who}.name: {ALL!r} means all schemes; choose another name")
    if scheme.name in ALIASES:
        raise ValueError(f"{who}.name: {scheme.name!r} is an alias of {ALIASES[scheme.name]!r}; choose another name")
    if issubclass(scheme, AttentionScheme):
        unknown = {*scheme.backends} - {*AttentionScheme.backends}
        if unknown or not scheme.backends:
            possible = ", ".join(AttentionScheme.backends)
            raise ValueError(f"{who}.backends must name some of {possible}, got {scheme.backends!r}")
    if not isinstance(scheme.flags, tuple):
        raise TypeError(
            f"{who}.flags must be a tuple of Flag, got {scheme.flags!r}; with one flag, write (Flag(...),)"
        )
    for flag in scheme.flags:
        _check_flag(scheme, flag)
    names = [flag.name for flag in scheme.flags]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{who}.flags: {name!r} occurs twice")


def _check_flag(scheme: type[PositionScheme], flag: Flag) -> None:
    who = f"{scheme.__qualname__}.flags"
    if not isinstance(flag, Flag):
        raise TypeError(f"{who} must be a tuple of Flag, got {flag!r}")
    if not re.fullmatch(r"position_[a-z0-9_]+", flag.name):
        raise ValueError(
            f"{who}: the name of a flag must be 'position_' followed by lowercase letters, digits and underscores, got {flag.name!r}"
        )
    if flag.name in TAKEN:
        raise ValueError(f"{who}: {flag.name!r} has another meaning: {TAKEN[flag.name]}; choose another name")
    if not isinstance(flag.kind, Kind):
        raise TypeError(
            f"{who}: the kind of {flag.name!r} must be an instance of a kind in hf_posenc.scheme, such as Integer(1), got {flag.kind!r}"
        )
    if ALL in FLAGS.get(flag.name, {}):
        raise ValueError(f"{who}: {flag.name!r} is a config option of all schemes: choose another name")
    # The flags of all embedding schemes have values in the class too, for those that leave some out.
    if hasattr(scheme, flag.attribute) and flag not in EmbeddingScheme.flags:
        raise ValueError(
            f"{who}: {flag.name!r} would be the attribute {flag.attribute!r} of the scheme, which already exists; choose another name"
        )
    for name, other in FLAGS.get(flag.name, {}).items():
        if name != scheme.name and other.kind != flag.kind:
            raise ValueError(
                f"{who}: {flag.name!r} must have the same kind as for {name} ({other.kind}), or another name; got {flag.kind}"
            )
    if flag.default is not None:
        flag.kind.check(flag.name, flag.default)


def _source(scheme: type[PositionScheme]) -> Source:
    """The file of a scheme as it is saved with checkpoints.

    Raises:
        ValueError: there is none, or it imports what a checkpoint cannot bring.
    """
    path = None
    if scheme.__module__ != "__main__":
        try:
            path = Path(inspect.getfile(scheme)).absolute()
        except (OSError, TypeError):  # typed into an interpreter
            pass
    if path is None or path.suffix != ".py" or not path.is_file():
        raise ValueError(
            f"{scheme.__qualname__} must be defined in a Python file and imported from there, because the file is saved with checkpoints; a "
            "script, a notebook or an interpreter cannot be imported by others"
        )
    if not path.stem.isidentifier():
        raise ValueError(f"{path}: the file name must be an identifier, so that Python can import it")
    if path.name in (*HOMES, SCHEME.name):
        raise ValueError(f"{path} has the name of a file of hf_posenc that is saved with every checkpoint: rename it")
    content = path.read_bytes()
    _check_unchanged(scheme, path, content)
    return Source(path, travelling(_text(path, content), path))


def _check_unchanged(scheme: type[PositionScheme], path: Path, content: bytes) -> None:
    """Raise ValueError unless a scheme's class was defined by its file's current text: otherwise checkpoints would get code that never ran."""
    code, module = scheme._code_of_file, scheme.__module__
    if code is None:
        raise ValueError(f"{scheme.__qualname__} must be defined while {path} is imported, but was defined later")
    to_code = getattr(getattr(sys.modules.get(module), "__loader__", None), "source_to_code", None)
    if to_code is None:
        return  # as pytest's, which rewrites what it imports
    try:
        same = to_code(content, path) == code
    except (SyntaxError, ValueError):
        same = False
    if not same:
        raise ValueError(
            f"{path} was changed after {scheme.__qualname__} was defined, so checkpoints would get code that never ran: import it again, "
            f"with importlib.reload({module}) or in a new process, and register the new class (if Python does not see the change, delete "
            "__pycache__ in the same folder)"
        )


@contextmanager
def trusting_code(trusts: bool) -> Iterator[None]:
    """While a config is read: whether code of the checkpoint may be run."""
    token = _trusts_code.set(trusts)
    try:
        yield
    finally:
        _trusts_code.reset(token)


def provide_schemes(entries: dict[str, Any], place: str, keywords: dict[str, Any]) -> None:
    """Register the custom schemes of a checkpoint.

    Args:
        entries: of its config.json.
        place: where that was read, a folder or a name on the Hub.
        keywords: of `from_pretrained`.

    Raises:
        ValueError: one is not registered and the code of the checkpoint is not trusted, or another scheme of the package or of another
            checkpoint has the name of one.
    """
    files = entries.get(SCHEME_FILES)
    for name, reference in files.items() if isinstance(files, dict) else ():
        module, _, cls = str(reference).rpartition(".")
        if not (module.isidentifier() and cls.isidentifier()):
            raise ValueError(f"{place}: {SCHEME_FILES} of its config must be 'module.Class', got {reference!r}")
        if name in SCHEMES and name not in SOURCES:
            raise ValueError(
                f"{place} has a custom position_scheme {name!r}, in {module}.py, and hf_posenc has another scheme with this name: load it "
                "without hf_posenc, in a process that does not import it, with trust_remote_code=True"
            )
        if name not in SCHEMES and not _trusts_code.get():
            raise ValueError(
                f"{place} has the custom position_scheme {name!r}, defined in its {module}.py. Import that file from its author "
                f"and register it first, with hf_posenc.register_scheme({cls}), or --scheme_file on the command line. Or "
                "read the file in the checkpoint, and load the checkpoint with an Auto class and trust_remote_code=True"
            )
        where = {keyword: keywords[keyword] for keyword in PLACE if keywords.get(keyword) is not None}
        file = cached_file(
            place,
            f"{module}.py",
            **where,
            _raise_exceptions_for_gated_repo=name not in SCHEMES,
            _raise_exceptions_for_missing_entries=name not in SCHEMES,
            _raise_exceptions_for_connection_errors=name not in SCHEMES,
        )
        if name not in SCHEMES:
            _register_beside(Path(file), name, cls)
            continue
        # Files of the package had other names in checkpoints before.
        if file is None or at_home(_text(Path(file), Path(file).read_bytes())) == at_home(SOURCES[name].text):
            continue
        if SCHEMES[name].__module__.startswith(FROM_CHECKPOINT):
            raise ValueError(
                f"{place} has a position_scheme {name!r} in {module}.py whose code differs from {SOURCES[name].path}, which is already "
                "loaded: a process can have only one of them; load the other in another process"
            )
        logger.warning_once(
            f"{place} has a position_scheme {name!r} in {module}.py whose code differs from {SOURCES[name].path}, which is "
            "registered and used: if they compute different things, the outputs differ from those of the author."
        )


def _register_beside(file: Path, name: str, cls: str) -> None:
    """Register a scheme from a file of a checkpoint; its imports of other saved files become imports of this package."""
    content = file.read_bytes()
    text = _text(file, content)
    module = _run(file, at_home(text).encode(), f"{FROM_CHECKPOINT}{_digest(content)}")
    scheme = getattr(module, cls, None)
    _check(scheme)
    if scheme.name != name:
        raise ValueError(f"{file} defines position_scheme {scheme.name!r}, but the config names {name!r}")
    schemes.register(scheme, Source(file.absolute(), text))


def checked_terms(scheme: "AttentionScheme", terms: Any) -> list[Term]:
    """What `terms` of a scheme returned, if it is a list of score terms whose tensors have the right number of dimensions.

    Raises:
        TypeError: it is something else.
        ValueError: a tensor has another number of dimensions.
    """
    who = f"`terms` of position_scheme {scheme.name!r}"
    if not isinstance(terms, list):
        raise TypeError(f"{who} must return a list of score terms, got {type(terms).__name__}")
    for term in terms:
        if not isinstance(term, Term):
            kinds = ", ".join(kind.__name__ for kind in Term.__subclasses__())
            raise TypeError(f"{who} must return a list of {kinds}, got {type(term).__name__} in it")
        for name, possible in term.dimensions.items():
            value = getattr(term, name)
            if value is not None and value.dim() not in possible:
                wanted = " or ".join(map(str, possible))
                raise ValueError(
                    f"{who} returned a {type(term).__name__} whose {name} must have {wanted} dimensions, got {tuple(value.shape)}"
                )
    return terms


def checked_rotation(
    scheme: "AttentionScheme", rotated: Any, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rotate` of a scheme returned, if it is a query and a key of the shapes that it was given.

    Raises:
        TypeError: it is something else.
        ValueError: a shape is another.
    """
    who = f"`rotate` of position_scheme {scheme.name!r}"
    if not isinstance(rotated, tuple) or len(rotated) != 2 or not all(map(torch.is_tensor, rotated)):
        raise TypeError(f"{who} must return a tuple of query and key, got {type(rotated).__name__}")
    for name, own, given in zip(("query", "key"), rotated, (query, key)):
        if own.shape != given.shape:
            raise ValueError(f"{who} must return a {name} of {tuple(given.shape)}, got {tuple(own.shape)}")
    return rotated


@contextmanager
def nothing_replaced(scheme: "PositionScheme", module: nn.Module) -> Iterator[None]:
    """While a scheme registers its parameters on a module.

    Raises:
        ValueError: under a name that something of the module has already, of transformers or of another scheme.
    """
    before = _attributes(module)
    yield
    now = _attributes(module)
    taken = [name for name, value in now.items() if before.get(name, value) is not value]
    taken += [name for name in now.keys() - before.keys() if hasattr(type(module), name)]
    if taken:
        names = " and ".join(repr(name) for name in sorted(taken))
        raise ValueError(
            f"position_scheme {scheme.name!r} registers {names} on {type(module).__name__}, where Transformers or another scheme already uses "
            "this name: choose another, such as one with the scheme's name"
        )


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **module._parameters, **module._buffers, **module._modules}


EXTRAS.checked_terms, EXTRAS.checked_rotation, EXTRAS.nothing_replaced = (
    checked_terms,
    checked_rotation,
    nothing_replaced,
)
