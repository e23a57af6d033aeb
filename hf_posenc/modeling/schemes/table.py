"""The table of schemes, how others are added to it, and how a name such as "absolute+t5" becomes scheme objects."""

import copy
import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .base import AttentionScheme, EmbeddingScheme, PositionScheme
from .built_in import BUILT_IN, OTHERS
from .flags import GLOBAL_BASE, GLOBAL_SCHEME, WINDOW_FLAGS, Flag, Kind, base, did_you_mean


SCHEMES: dict[str, type[PositionScheme]] = {scheme.name: scheme for scheme in BUILT_IN}
# In place of a scheme's name: an option that all have.
ALL = "all"
# Option -> what each scheme that has it says of it, by the scheme's name.
FLAGS: dict[str, dict[str, Flag]] = {"position_scheme": {}}
ALIASES: dict[str, str] = {"disentangled": "deberta", "rotary": "rope", "shaw": "relative"}
# Pairs that exclude each other, and why.
EXCLUSIVE: dict[tuple[str, str], str] = {
    ("relative_key", "relative_key_query"): "their vectors have the same checkpoint key, `distance_embedding`",
}


def has_base(scheme: type[PositionScheme]) -> bool:
    """Whether a scheme may have another base in global layers."""
    return issubclass(scheme, AttentionScheme) and scheme.reads_option(base().name)


def _add_flags(scheme: type[PositionScheme]) -> None:
    for flag in scheme.flags:
        FLAGS.setdefault(flag.name, {})[scheme.name] = flag
    if has_base(scheme):
        FLAGS.setdefault(GLOBAL_BASE.name, {})[scheme.name] = GLOBAL_BASE


for _scheme in SCHEMES.values():
    _add_flags(_scheme)
for _flag in WINDOW_FLAGS:
    if _flag is not GLOBAL_BASE:
        FLAGS[_flag.name] = {ALL: _flag}


@dataclass(frozen=True)
class Source:
    """The file of a registered scheme, which is saved with checkpoints.

    Attributes:
        path: where it was read.
        text: what it holds next to a checkpoint, where it imports the files of this package as its siblings.
    """

    path: Path
    text: str

    @property
    def module(self) -> str:
        """The name of its module."""
        return self.path.stem


# Scheme's name -> its file, of all that were registered.
SOURCES: dict[str, Source] = {}


def register(scheme: type[PositionScheme], source: Source | None = None) -> type[PositionScheme]:
    """Add a scheme to the table; one that is there already, from a file with the same text, is left as it is.

    A scheme replaces one of the same name and file, for a file that was changed and read again.

    Args:
        scheme: its class.
        source: its file; by default as it is where the class was defined, for files next to a checkpoint.

    Returns:
        The class, so that this can decorate it.

    Raises:
        ValueError: another scheme has the name.
    """
    path = Path(inspect.getfile(scheme)).absolute()  # the Hub's cache has links
    source = source or Source(path, path.read_text(encoding="utf-8"))
    old = SOURCES.get(scheme.name)
    if old is not None and old.text == source.text and SCHEMES[scheme.name].__qualname__ == scheme.__qualname__:
        return scheme
    if scheme.name in SCHEMES and (old is None or old.path != source.path):
        first = SCHEMES[scheme.name]
        where = "hf_posenc" if old is None else old.path
        raise ValueError(
            f"position_scheme {scheme.name!r} is registered already: {first.__qualname__} of {where}; {scheme.__qualname__} of "
            f"{source.path} needs another name"
        )
    for flag, users in [*FLAGS.items()]:
        if users.pop(scheme.name, None) is not None and not users:
            del FLAGS[flag]
    SCHEMES[scheme.name], SOURCES[scheme.name] = scheme, source
    _add_flags(scheme)
    _parsed.cache_clear()
    return scheme


def sources_of(names: Iterable[str]) -> dict[str, Source]:
    """The files of the registered schemes among some, by their names."""
    return {name: SOURCES[name] for name in names if name in SOURCES}


def kind_of(flag: str) -> Kind:
    """What an option may be, in which all schemes that have it agree."""
    return next(iter(FLAGS[flag].values())).kind


def scheme_names(position_scheme: str, flag: str = "position_scheme") -> tuple[str, ...]:
    """The names joined in `position_scheme`, aliases resolved.

    Args:
        flag: what messages call it.

    Raises:
        TypeError: not a string.
        ValueError: an unknown name (with the nearest right one), a scheme twice, two embedding-level schemes, two that
            exclude each other or come in different files of one name.
    """
    if not isinstance(position_scheme, str):
        raise TypeError(f"{flag} must be a string, got {type(position_scheme).__name__}")
    return _parsed(position_scheme, flag)


def global_names(position_scheme: str, position_global_scheme: str | None) -> tuple[str, ...]:
    """The names of the schemes inside the attention of global layers.

    Raises:
        TypeError, ValueError: as [`scheme_names`], or one of them adds vectors to the token embeddings, which all layers get.
    """
    if position_global_scheme is None:
        return tuple(name for name in scheme_names(position_scheme) if issubclass(SCHEMES[name], AttentionScheme))
    names = []
    for name in scheme_names(position_global_scheme, GLOBAL_SCHEME.name):
        scheme = SCHEMES[name]
        if issubclass(scheme, EmbeddingScheme) and scheme.adds_vectors:
            raise ValueError(
                f"{GLOBAL_SCHEME.name}={position_global_scheme!r}: {name} is added to the token embeddings, so all layers have it: "
                "it belongs to position_scheme. Name schemes inside the attention, or none"
            )
        if issubclass(scheme, AttentionScheme):
            names.append(name)
    return tuple(names)


def all_names(position_scheme: str, position_global_scheme: str | None) -> tuple[str, ...]:
    """The names of a model's schemes: those in `position_scheme`, and what global layers have besides.

    Raises:
        TypeError, ValueError: as [`global_names`].
    """
    names = scheme_names(position_scheme)
    more = [name for name in global_names(position_scheme, position_global_scheme) if name not in names]
    return scheme_names("+".join([*names, *more]), "position_scheme with that of global layers") if more else names


def _known() -> list[str]:
    return [*SCHEMES, *(alias for alias, name in ALIASES.items() if name in SCHEMES)]


@functools.cache
def _parsed(position_scheme: str, flag: str) -> tuple[str, ...]:
    names = tuple(ALIASES.get(name.strip(), name.strip()) for name in position_scheme.split("+"))
    if "" in names:
        raise ValueError(f"{flag} must be names of schemes joined by '+', got {position_scheme!r}")
    for name in names:
        if name not in SCHEMES:
            hint = did_you_mean(name, _known(), ".", cutoff=0.5)
            raise ValueError(
                f"{flag}: unknown scheme {name!r}{hint} Known: {', '.join(_known())}, "
                f"or several of them joined by '+'; {OTHERS}"
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{flag}={position_scheme!r} names {' and '.join(twice)} twice")
    embedding_level = [name for name in names if issubclass(SCHEMES[name], EmbeddingScheme)]
    if len(embedding_level) > 1:
        raise ValueError(
            f"{flag}={position_scheme!r} has {len(embedding_level)} embedding-level schemes "
            f"({', '.join(embedding_level)}); at most one can be added to the token embeddings"
        )
    for pair, reason in EXCLUSIVE.items():
        if {*pair} <= {*names}:
            raise ValueError(f"{flag}={position_scheme!r} cannot have both {' and '.join(pair)}: {reason}")
    files: dict[str, str] = {}  # module -> the first scheme of it
    for name in names:
        first = files.setdefault(SOURCES[name].module, name) if name in SOURCES else name
        if first != name and SOURCES[first].text != SOURCES[name].text:
            raise ValueError(
                f"{flag}={position_scheme!r} cannot have both {first} and {name}: a checkpoint would contain both of their files, "
                f"which have the same name ({SOURCES[first].path}, {SOURCES[name].path}); rename one of them"
            )
    return names


def build_schemes(config) -> tuple[EmbeddingScheme | None, tuple[AttentionScheme, ...]]:
    """The scheme objects of `position_scheme`: the embedding-level one (None if positions do not enter there) and the others.

    Raises what [`scheme_names`] and the schemes' own checks raise.
    """
    schemes = [SCHEMES[name](config) for name in scheme_names(config.position_scheme)]
    embedding = [scheme for scheme in schemes if isinstance(scheme, EmbeddingScheme)]
    attention = tuple(scheme for scheme in schemes if isinstance(scheme, AttentionScheme))
    return next((scheme for scheme in embedding if scheme.adds_vectors), None), attention


def build_global_schemes(config, schemes: tuple[AttentionScheme, ...]) -> tuple[AttentionScheme, ...]:
    """The scheme objects inside the attention of global layers, of which those that compute the same as one of `schemes` are that one.

    Args:
        schemes: of the other layers, as [`build_schemes`] returns them.

    Raises:
        ValueError: as [`global_names`] and the schemes' own checks.
    """
    global_base = getattr(config, GLOBAL_BASE.name, None)  # next to a checkpoint, there may be no scheme that has it
    if config.position_global_scheme is None and global_base is None:
        return schemes
    names = global_names(config.position_scheme, config.position_global_scheme)
    of_local = [scheme.name for scheme in schemes]
    added = [name for name in scheme_names(config.position_scheme) if name not in of_local]
    # To a scheme, those of its own layers are the model's, which has the others too.
    changed = copy.copy(config)
    vars(changed).update(position_scheme="+".join([*added, *names]) or "none")
    vars(changed).update(position_global_scheme="+".join(of_local) or "none")
    if global_base is not None:
        vars(changed).update({base().name: global_base})
    try:
        own = [SCHEMES[name](changed) for name in names]
    except ValueError as error:
        raise ValueError(f"in global layers: {error}") from error
    return tuple(_shared_or_global(scheme, schemes) for scheme in own if isinstance(scheme, AttentionScheme))


def _shared_or_global(scheme: AttentionScheme, schemes: tuple[AttentionScheme, ...]) -> AttentionScheme:
    """The scheme object of the same name and settings among `schemes`, or `scheme` itself."""
    namesake = next((other for other in schemes if other.name == scheme.name), None)
    if namesake is None or namesake.settings() == scheme.settings():
        return namesake or scheme
    scheme.is_global = True
    return scheme
