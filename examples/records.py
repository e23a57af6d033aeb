"""Files that are there whole or not at all, and the settings that the results in a folder were made with."""

import json
import tempfile
from pathlib import Path
from typing import Any

from hf_posenc.files import write_whole


def check_writable(folder: str | Path) -> None:
    """Raise OSError, naming `--output_dir`, where no files can be made in a folder, or the folder itself cannot."""
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OSError(f"--output_dir {folder}: nothing can be written to {there} ({error.strerror})") from error


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_whole({file: json.dumps(content, indent=2) + "\n"})


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """What recorded settings and those of today have different, a phrase each; a setting that one lacks is None there."""
    return [
        f"{name} is {there.get(name)!r} there and {here.get(name)!r} here"
        for name in here | there
        if there.get(name) != here.get(name)
    ]


def same_settings(file: Path, settings: dict[str, Any]) -> bool:
    """Whether settings are recorded in a file; they are those then.

    Raises:
        ValueError: other settings are recorded there.
    """
    if not file.exists():
        return False
    recorded = json.loads(file.read_text(encoding="utf-8"))
    current = json.loads(json.dumps(settings, default=str))
    if differ := differences(recorded, current):
        raise ValueError(
            f"{file.parent} holds results of other settings ({'; '.join(differ)}): name another --output_dir"
        )
    return True


def keep_settings(file: Path, settings: dict[str, Any]) -> None:
    """Record settings in a file, in which there are no others.

    Raises:
        ValueError: other settings are recorded there.
    """
    same_settings(file, settings)
    write_json(file, settings)
