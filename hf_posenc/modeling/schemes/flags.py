"""What a `position_*` option is: its name, what it may be, its default, and what it is for, in the file of its scheme."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal


# Tokens of the longest text that an option may speak of. More would fit no integer, or no memory where a table has rows for it.
MOST_TOKENS = 2**20
# What float32 holds, with room to multiply.
LARGEST = 1e30

# Entry of a config that says how the table of `deberta` with buckets is read, and what new ones have. What was saved before there was
# such an entry has version 1.
TABLE_VERSION = "position_table_version"
NEWEST_TABLE = 2


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """The end of a message about an unknown name: the nearest one that is known, if one is near enough."""
    nearest = difflib.get_close_matches(name, [*known], n=1, cutoff=cutoff)
    return f"; did you mean {nearest[0]!r}?" if nearest else otherwise


def require(flag: str, value: Any, of_type: bool, in_range: bool, possible: str) -> None:
    """Raise TypeError or ValueError that name the option and say what it may be."""
    if not of_type:
        raise TypeError(f"{flag} must be {possible}, got {value!r} of type {type(value).__name__}")
    if not in_range:
        raise ValueError(f"{flag} must be {possible}, got {value!r}")


class Kind:
    """The values that an option may have.

    Attributes:
        annotation: their type.
        values: the same for people.
    """

    annotation: Any
    values: str

    def check(self, flag: str, value: Any) -> None:
        """Raise TypeError or ValueError, naming the option, for a value that it cannot have by itself."""
        raise NotImplementedError


@dataclass(frozen=True)
class Choice(Kind):
    """One of several words."""

    choices: tuple[str, ...]

    @property
    def annotation(self) -> Any:
        return Literal[self.choices]

    @property
    def values(self) -> str:  # type: ignore[override]
        return ", ".join(self.choices)

    def check(self, flag: str, value: Any) -> None:
        possible = "one of " + ", ".join(repr(choice) for choice in self.choices)
        if isinstance(value, str) and value not in self.choices:
            hint = did_you_mean(value, self.choices).removeprefix("; ")
            possible += f" ({hint})" if hint else ""
        require(flag, value, isinstance(value, str), value in self.choices, possible)


@dataclass(frozen=True)
class Boolean(Kind):
    """True or False."""

    annotation = bool
    values = "bool"

    def check(self, flag: str, value: Any) -> None:
        require(flag, value, isinstance(value, bool), True, "True or False")


@dataclass(frozen=True)
class Number(Kind):
    """A number of at least `low`, and at most [`LARGEST`]."""

    low: float
    annotation = float | int
    values = "number"

    def check(self, flag: str, value: Any) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        possible = f"a finite number of at least {self.low:g} and at most {LARGEST:g}"
        require(flag, value, is_number, is_number and self.low <= value <= LARGEST, possible)


@dataclass(frozen=True)
class Integer(Kind):
    """An integer of at least `low`, and at most [`MOST_TOKENS`]."""

    low: int
    annotation = int
    values = "integer"

    def check(self, flag: str, value: Any) -> None:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        possible = f"an integer of at least {self.low} and at most {MOST_TOKENS:,}"
        require(flag, value, is_integer, is_integer and self.low <= value <= MOST_TOKENS, possible)


@dataclass(frozen=True)
class Dictionary(Kind):
    """A dictionary; `example` shows one."""

    example: str
    annotation = dict[str, Any]
    values = "dict"

    def check(self, flag: str, value: Any) -> None:
        require(flag, value, isinstance(value, dict), True, f"a dictionary such as {self.example}")


@dataclass(frozen=True)
class Subset(Kind):
    """A list of some of `choices` without repetition, at least one of them among the first `needed`."""

    choices: tuple[str, ...]
    needed: int
    annotation = list[str] | tuple[str, ...]

    @property
    def values(self) -> str:  # type: ignore[override]
        return "list of " + ", ".join(self.choices)

    def check(self, flag: str, value: Any) -> None:
        choices = ", ".join(repr(choice) for choice in self.choices)
        possible = f"a list of {choices} without repetition and with at least one of the first {self.needed}"
        is_list = isinstance(value, (list, tuple))
        fits = is_list and all(item in self.choices for item in value) and len({*value}) == len(value)
        fits = fits and any(item in value for item in self.choices[: self.needed])
        require(flag, value, is_list, fits, possible)


@dataclass(frozen=True)
class Flag:
    """A config option (`position_*`) of one scheme. Schemes that share an option have it with the same kind, each with its own default.

    Attributes:
        name: in configs and as a keyword argument.
        kind: the type and range of its values.
        default: the value if the option is None (not given).
        help: one line that says what it does.
        default_help: the default in words, if it is computed.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    default_help: str | None = None

    @property
    def attribute(self) -> str:
        """Its name on a scheme object."""
        return self.name.removeprefix("position_")

    def described_default(self) -> str:
        """The default for people."""
        if self.default_help is not None:
            return self.default_help
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return ", ".join(self.default) if isinstance(self.default, tuple) else str(self.default)


# Of all models with a position scheme: it is no scheme's, and changes no output but what stands at padding.
UNPAD = Flag("unpad", Boolean(), True, "padding-free layers on CPUs, where that is faster")


def init() -> Flag:
    """`position_init`."""
    help = "initialization: output-preserving, or as in the paper"
    return Flag("position_init", Choice(("silent", "paper")), "silent", help)


def form(help: str) -> Flag:
    """`position_form`."""
    return Flag("position_form", Choice(("checkpoint", "paper")), "checkpoint", help)


def base() -> Flag:
    """`position_base`."""
    return Flag("position_base", Number(1), 10000.0, "base of the wavelengths")


def layout(default: str, help: str) -> Flag:
    """`position_layout`."""
    return Flag("position_layout", Choice(("interleaved", "halves")), default, help)


def buckets(default: int, help: str) -> Flag:
    """`position_buckets`."""
    return Flag("position_buckets", Integer(0), default, help)


def max_distance(default: int, help: str) -> Flag:
    """`position_max_distance`."""
    return Flag("position_max_distance", Integer(1), default, help)


# They belong to no scheme: the window is the attention's, whatever its positions are.
WINDOW = Flag(
    "position_window",
    Integer(0),
    0,
    "number of tokens that a query attends to, half of them on either side, in all layers but the global ones; 0: all",
)
GLOBAL_EVERY = Flag(
    "position_global_every",
    Integer(0),
    3,
    "with position_window: every so many layers, starting with the first, one is global and attends to all tokens; 0: none",
)
WINDOW_FLAGS = (WINDOW, GLOBAL_EVERY)
