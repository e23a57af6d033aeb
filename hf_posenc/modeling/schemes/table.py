"""The table of schemes, how others are added to it, and how a name such as "absolute+t5" becomes scheme objects."""

import functools
import inspect
from dataclasses import dataclass
from pathlib import Path

from .base import AttentionScheme, EmbeddingScheme, PositionScheme
from .built_in import BUILT_IN, OTHERS
from .flags import WINDOW_FLAGS, Flag, Kind, did_you_mean


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


def _add_flags(scheme: type[PositionScheme]) -> None:
    for flag in scheme.flags:
        FLAGS.setdefault(flag.name, {})[scheme.name] = flag


for _scheme in SCHEMES.values():
    _add_flags(_scheme)
for _flag in WINDOW_FLAGS:
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


def sources_of(position_scheme: str) -> dict[str, Source]:
    """The files of the registered schemes among those that are joined in `position_scheme`, by scheme."""
    return {name: SOURCES[name] for name in scheme_names(position_scheme) if name in SOURCES}


def kind_of(flag: str) -> Kind:
    """What an option may be, in which all schemes that have it agree."""
    return next(iter(FLAGS[flag].values())).kind


def scheme_names(position_scheme: str) -> tuple[str, ...]:
    """The names joined in `position_scheme`, aliases resolved.

    Raises:
        TypeError: not a string.
        ValueError: an unknown name (with the nearest right one), a scheme twice, two embedding-level schemes, two that
            exclude each other or come in different files of one name.
    """
    if not isinstance(position_scheme, str):
        raise TypeError(f"position_scheme must be a string, got {type(position_scheme).__name__}")
    return _parsed(position_scheme)


def _known() -> list[str]:
    return [*SCHEMES, *(alias for alias, name in ALIASES.items() if name in SCHEMES)]


@functools.cache
def _parsed(position_scheme: str) -> tuple[str, ...]:
    names = tuple(ALIASES.get(name.strip(), name.strip()) for name in position_scheme.split("+"))
    if "" in names:
        raise ValueError(f"position_scheme must be names of schemes joined by '+', got {position_scheme!r}")
    for name in names:
        if name not in SCHEMES:
            hint = did_you_mean(name, _known(), ".", cutoff=0.5)
            raise ValueError(
                f"position_scheme: unknown scheme {name!r}{hint} Known: {', '.join(_known())}, "
                f"or several of them joined by '+'; {OTHERS}"
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"position_scheme={position_scheme!r} names {' and '.join(twice)} twice")
    embedding_level = [name for name in names if issubclass(SCHEMES[name], EmbeddingScheme)]
    if len(embedding_level) > 1:
        raise ValueError(
            f"position_scheme={position_scheme!r} has {len(embedding_level)} embedding-level schemes "
            f"({', '.join(embedding_level)}); at most one can be added to the token embeddings"
        )
    for pair, reason in EXCLUSIVE.items():
        if {*pair} <= {*names}:
            raise ValueError(f"position_scheme={position_scheme!r} cannot have both {' and '.join(pair)}: {reason}")
    files: dict[str, str] = {}  # module -> the first scheme of it
    for name in names:
        first = files.setdefault(SOURCES[name].module, name) if name in SOURCES else name
        if first != name and SOURCES[first].text != SOURCES[name].text:
            raise ValueError(
                f"position_scheme={position_scheme!r} cannot have both {first} and {name}: a checkpoint would contain both of their "
                f"files, which have the same name ({SOURCES[first].path}, {SOURCES[name].path}); rename one of them"
            )
    return names


def build_schemes(config) -> tuple[EmbeddingScheme | None, tuple[AttentionScheme, ...]]:
    """The scheme objects of a config: the embedding-level one (None if positions do not enter there) and the others.

    Raises what [`scheme_names`] and the schemes' own checks raise.
    """
    schemes = [scheme(config) for scheme in config.schemes.values()]
    embedding = [scheme for scheme in schemes if isinstance(scheme, EmbeddingScheme)]
    attention = tuple(scheme for scheme in schemes if isinstance(scheme, AttentionScheme))
    return next((scheme for scheme in embedding if scheme.adds_vectors), None), attention
