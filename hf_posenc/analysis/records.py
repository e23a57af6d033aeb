"""What the functions of this package return, and how a figure is described to those who list and draw them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


class Record:
    """Base of the dataclasses that hold what was measured: plain values, arrays, other records, and lists and dicts of them."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them: arrays become lists, and numbers that are not finite None."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value


# What a figure needs to be computed from, from the least to the most.
SCHEME, MODEL, TEXT = "scheme", "model", "text"


@dataclass(frozen=True)
class Figure:
    """One figure: a question, the function that measures, the one that draws, and the one that says what it shows.

    Attributes:
        name: what it is asked for by, on the command line too.
        question: what it answers, for a heading.
        needs: SCHEME: a [`Subject`] of any kind, also one made of a scheme's name; MODEL: a checkpoint's; TEXT: a checkpoint's
            with its tokenizer.
        measure: from a subject to a [`Record`]; raises ValueError, in one line, where it does not apply to a subject.
        plot: from that record to a matplotlib figure.
        describe: from that record to one sentence that says what it shows.
    """

    name: str
    question: str
    needs: str
    measure: Callable[..., Record]
    plot: Callable[..., "Drawing"]
    describe: Callable[[Any], str]
