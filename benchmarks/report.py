"""What every benchmark here writes: results as JSON with the circumstances of the run, and a readable page beside it."""

import json
import os
import platform
import re
import shlex
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


sys.path.append(str(Path(__file__).parents[1] / "examples"))

from records import differences, write_json  # noqa: E402

from hf_posenc.files import write_whole  # noqa: E402


RESULTS = Path(__file__).parent / "results"
PACKAGES = ("hf_posenc", "torch", "transformers", "accelerate", "numpy")


def _without_folders(argument: str) -> str:
    """An argument; of an absolute path its last name."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def circumstances() -> dict[str, Any]:
    """The machine, the versions and the command of this run, without anything that names the machine."""
    machine = f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} CPU cores"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    return {
        "machine": machine,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "command": shlex.join(
            ["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_without_folders, sys.argv[1:])]
        ),
    }


def mean_and_deviation(values: list[float]) -> str:
    """Mean and sample standard deviation for people; the mean alone where there is a single value."""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def stopped_at(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The results of a run that was stopped, to go on with; nothing where there is none.

    Raises:
        SystemExit: it had other settings.
    """
    file = RESULTS / f"{name}.json"
    there = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if there and (differ := differences(there["settings"], settings)):
        sys.exit(f"error: {file} was measured with other settings ({'; '.join(differ)}): run without --resume")
    return there


def write(name: str, results: dict[str, Any], markdown: str | None = None) -> None:
    """Write results/<name>.json, and results/<name>.md where there is something to read."""
    write_json(RESULTS / f"{name}.json", {**circumstances(), **results})
    if markdown is not None:
        write_whole({RESULTS / f"{name}.md": markdown})
    print(f"wrote {RESULTS / name}.json")


def replace_marked(text: str, begin: str, end: str, new: str) -> str:
    """A text with `new` in place of two marks and what is between them.

    Raises:
        ValueError: the marks are not there, or there are several.
    """
    text, count = re.subn(f"{begin}.*{end}", lambda _: new, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"expected {begin.strip()} and {end.strip()} once, found them {count} times")
    return text
