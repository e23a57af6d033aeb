"""The runs of a study in one file, a line of JSON for each, which several processes may add to."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from hf_posenc.files import write_whole


sys.path.append(str(Path(__file__).parents[1] / "examples"))

from records import differences  # noqa: E402


Line = dict[str, Any]


def read_lines(file: Path) -> list[Line]:
    """All lines; none where there is no file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def change_lines(file: Path, change: Callable[[list[Line]], list[Line]]) -> None:
    """Write what is made of the lines in a file, whole or not at all, while no other process does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        lines = change(read_lines(file))
        write_whole({file: "".join(f"{json.dumps(line)}\n" for line in lines)})


class Runs:
    """Runs that were made with the same settings, which the first line of their file has.

    Args:
        settings: what all runs here depend on.

    Raises:
        ValueError: the file has runs of other settings.
    """

    def __init__(self, file: Path, settings: dict[str, Any]):
        self.file = file
        first = {"settings": json.loads(json.dumps(settings, default=str))}
        change_lines(file, lambda lines: lines or [first])
        there = read_lines(file)[0]["settings"]
        if differ := differences(there, first["settings"]):
            raise ValueError(f"{file} has runs of other settings ({'; '.join(differ)}): name another --output_dir")

    def read(self) -> list[Line]:
        return read_lines(self.file)[1:]

    def add(self, run: Line) -> None:
        change_lines(self.file, lambda lines: [*lines, run])
