"""Figures as files."""

import io
from pathlib import Path

from ..files import check_file, write_whole
from . import style
from .access import study
from .figures import figure_named
from .records import Figure, Record


FORMATS = ("png", "svg")


@style.styled
def drawn(figure: Figure, record: Record, format: str = "png") -> bytes:
    """Draw a record as an image. The same record gives the same bytes.

    Args:
        figure: the figure that measured the record.
        record: the record.
        format: "png" or "svg".

    Returns:
        The content of the image file.
    """
    buffer = io.BytesIO()
    # Neither a date nor a version in it.
    metadata = {"Date": None, "Creator": None} if format == "svg" else {"Software": None}
    figure.plot(record).savefig(buffer, format=format, metadata=metadata)
    return buffer.getvalue()


def format_of(path: str | Path) -> str:
    """The format that a file's name ends with.

    Raises:
        ValueError: it is none of those that figures are written in.
    """
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise ValueError(f"{path}: the name of a figure must end in .png or .svg")
    return suffix


def plot_to_file(what: str, model: str, path: str | Path) -> str:
    """Measure a figure for a model, and write its drawing to a file, atomically.

    Args:
        what: a name in [`FIGURES`].
        model: what [`study`] takes.
        path: the file. It ends in .png or .svg.

    Returns:
        A sentence that says what the figure shows.

    Raises:
        OSError: there is no such model, or the file cannot be written.
        ValueError: there is no such figure or format, or the figure does not apply to the model.
    """
    figure, format = figure_named(what), format_of(path)
    check_file(Path(path))
    record = figure.measure(study(model))
    write_whole({Path(path): drawn(figure, record, format)})
    return figure.describe(record)
