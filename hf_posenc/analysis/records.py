"""What the functions of this package return, and how a figure is described to those who list and draw them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


class Record:
    """Base class of the results of all measurements. A record is a dataclass of numbers, strings, arrays and other records."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary that JSON can represent. Arrays become lists, and numbers that are not finite become None."""
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
    """A figure of the report: a question, and the functions that measure, draw and describe the answer.

    Attributes:
        name: its name, also on the command line.
        question: the question that it answers.
        needs: what it can be measured on. `SCHEME`: any model, also one made from the name of a scheme. `MODEL`: a checkpoint. `TEXT`: a
            checkpoint with a tokenizer.
        measure: a function from a [`Subject`] to a [`Record`]. It raises ValueError if the figure does not apply to the model.
        plot: a function from this record to a matplotlib figure. The first line of its docstring is part of the image's alternative text.
        describe: a function from this record to a sentence.
    """

    name: str
    question: str
    needs: str
    measure: Callable[..., Record]
    plot: Callable[..., "Drawing"]
    describe: Callable[[Any], str]
