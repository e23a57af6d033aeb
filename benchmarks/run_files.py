"""Where the runs of a comparison are recorded: a file for each scheme, seed and conversion."""

from pathlib import Path


def file_name(label: str) -> str:
    """A label as a part of a path."""
    return "".join(letter if letter.isalnum() or letter in "_-+.=" else "_" for letter in label)


def run_file(folder: Path, label: str, seed: int, conversion: int | None = None) -> Path:
    """Where a run is recorded.

    Args:
        conversion: the conversion that it starts from; the first has the name that a run without any has.
    """
    return folder / "runs" / f"{file_name(label)}{f'-conversion{conversion}' * bool(conversion)}-seed{seed}.json"
