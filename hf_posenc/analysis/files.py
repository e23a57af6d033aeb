"""Figures as files, which are written whole or not at all."""

import io
import os
import tempfile
from pathlib import Path

from . import style
from .access import study
from .records import Figure, Record


FORMATS = ("png", "svg")


@style.styled
def drawn(figure: Figure, record: Record, format: str = "png") -> bytes:
    """A record's figure as a PNG or SVG file. The same record gives the same bytes."""
    buffer = io.BytesIO()
    # Neither a date nor a version in it.
    metadata = {"Date": None, "Creator": None} if format == "svg" else {"Software": None}
    figure.plot(record).savefig(buffer, format=format, metadata=metadata)
    return buffer.getvalue()


def format_of(path: str | Path) -> str:
    """The format that a file's name asks for.

    Raises:
        ValueError: it is none of those that figures are written in.
    """
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise ValueError(f"{path}: a figure is written as .png or .svg")
    return suffix


def write_whole(contents: dict[Path, bytes]) -> None:
    """Write files, each whole; none is touched where one of them cannot be written.

    Raises:
        OSError: one cannot be written.
    """
    for path in contents:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
    written: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            written[Path(temporary)] = path
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o666 & ~_umask())
        for temporary, path in written.items():
            os.replace(temporary, path)
    finally:
        for temporary in written:
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    """What new files are masked by, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def plot_to_file(what: str, model: str, path: str | Path) -> str:
    """Draw a figure into a file, which is written whole or not at all.

    Args:
        what: a name in [`FIGURES`].
        model: what [`study`] takes.
        path: ends in .png or .svg.

    Returns:
        The sentence that says what the figure shows.

    Raises:
        OSError: no such model, or the file cannot be written.
        ValueError: no such figure or format, or the figure does not apply to the model.
    """
    from . import figure_named

    figure, format = figure_named(what), format_of(path)
    record = figure.measure(study(model))
    write_whole({Path(path): drawn(figure, record, format)})
    return figure.describe(record)
