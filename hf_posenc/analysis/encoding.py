"""What does an encoding look like?"""

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from . import style
from .access import Subject, study
from .records import Record


@dataclass(frozen=True)
class Encoding(Record):
    """The vectors of positions.

    Attributes:
        model: its name.
        values: (positions, width).
    """

    model: str
    values: np.ndarray


def encoding(model: Subject | str) -> Encoding:
    """The vectors of all positions of a model; `model` is what [`study`] takes."""
    subject = study(model)
    return Encoding(subject.name, subject.position_vectors().numpy())


def plot_encoding(data: Encoding) -> Figure:
    """A heatmap of positions by dimensions."""
    figure, [[axes]] = style.panels()
    style.heatmap(axes, data.values)
    axes.set(xlabel="dimension", ylabel="position", title=data.model)
    return figure


def describe_encoding(data: Encoding) -> str:
    positions, width = data.values.shape
    rms = float(np.sqrt((data.values**2).mean()))
    return f"{data.model} has {positions} positions of {width} numbers each, with a root mean square of {rms:.3f}."
