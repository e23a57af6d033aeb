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
    """Base class for the kinds of config options: which values an option may have.

    Attributes:
        annotation: the type of the values.
        values: the values in words, for tables.
    """

    annotation: Any
    values: str

    def check(self, flag: str, value: Any) -> None:
        """Check a value, whatever the other options are.

        Args:
            flag: the option's name, for the message.
            value: the value.

        Raises:
            TypeError: the value has the wrong type.
            ValueError: the value is out of range.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Choice(Kind):
    """An option whose value is one of several strings.

    Attributes:
        choices: the strings.
    """

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
    """An option that is True or False."""

    annotation = bool
    values = "bool"

    def check(self, flag: str, value: Any) -> None:
        require(flag, value, isinstance(value, bool), True, "True or False")


@dataclass(frozen=True)
class Number(Kind):
    """An option whose value is an int or a float.

    Attributes:
        low: the smallest value. The largest is 1e30.
    """

    low: float
    annotation = float | int
    values = "number"

    def check(self, flag: str, value: Any) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        possible = f"a finite number of at least {self.low:g} and at most {LARGEST:g}"
        require(flag, value, is_number, is_number and self.low <= value <= LARGEST, possible)


@dataclass(frozen=True)
class Integer(Kind):
    """An option whose value is an int.

    Attributes:
        low: the smallest value. The largest is 2**20.
    """

    low: int
    annotation = int
    values = "integer"

    def check(self, flag: str, value: Any) -> None:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        possible = f"an integer of at least {self.low} and at most {MOST_TOKENS:,}"
        require(flag, value, is_integer, is_integer and self.low <= value <= MOST_TOKENS, possible)


@dataclass(frozen=True)
class Names(Kind):
    """Names of schemes, joined by "+"; which there are, the table of schemes knows."""

    annotation = str
    values = "names of schemes"

    def check(self, flag: str, value: Any) -> None:
        require(flag, value, isinstance(value, str), True, "a string, names of schemes joined by '+'")


@dataclass(frozen=True)
class Dictionary(Kind):
    """An option whose value is a dictionary.

    Attributes:
        example: a dictionary as text, for messages.
    """

    example: str
    annotation = dict[str, Any]
    values = "dict"

    def check(self, flag: str, value: Any) -> None:
        require(flag, value, isinstance(value, dict), True, f"a dictionary such as {self.example}")


@dataclass(frozen=True)
class Subset(Kind):
    """An option whose value is a list of several strings, each at most once.

    Attributes:
        choices: the strings that are possible.
        needed: the list must have at least one of this many first choices.
    """

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
    """A config option of a scheme.

    Several schemes can have the same option. It must then have the same kind of values; default and help may differ.

    Attributes:
        name: its name in configs and as a keyword argument. It begins with `position_`.
        kind: which values it may have.
        default: the value in the scheme if the option is None, that is, not given.
        help: what it does, in one line.
        default_help: the default in words, if it is computed. None: `default` is printed.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    default_help: str | None = None

    @property
    def attribute(self) -> str:
        """The name of its attribute on a scheme object: `name` without `position_`."""
        return self.name.removeprefix("position_")

    def described_default(self) -> str:
        """The default in words, for tables."""
        if self.default_help is not None:
            return self.default_help
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return ", ".join(self.default) if isinstance(self.default, tuple) else str(self.default)


# Of all models with a position scheme: it is no scheme's, and changes no output but what stands at padding.
UNPAD = Flag("unpad", Boolean(), True, "padding-free layers on CPUs, where that is faster")


def init() -> Flag:
    """Make the option `position_init`: "silent" (output-preserving, the default) or "paper" (the published initialization)."""
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
    "width of the window of local layers: a query attends to keys up to half of it away; 0: no local layers",
)
GLOBAL_EVERY = Flag(
    "position_global_every",
    Integer(0),
    3,
    "with position_window: layers 0, n, 2n, ... are global and attend to all tokens; 0: none",
)
GLOBAL_SCHEME = Flag(
    "position_global_scheme",
    Names(),
    None,
    "with position_window: the schemes inside the attention of global layers, or none",
    default_help="those of position_scheme",
)
# Of the schemes that have `position_base`.
GLOBAL_BASE = Flag(
    "position_global_base",
    Number(1),
    None,
    "with position_window: position_base of global layers",
    default_help="position_base",
)
WINDOW_FLAGS = (WINDOW, GLOBAL_EVERY, GLOBAL_SCHEME, GLOBAL_BASE)
