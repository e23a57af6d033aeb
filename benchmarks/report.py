"""What every benchmark here writes: results as JSON with the circumstances of the run; and how tables come into pages."""

import json
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


sys.path.append(str(Path(__file__).parents[1] / "examples"))

from records import differences, write_json  # noqa: E402


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("hf_posenc", "torch", "transformers", "accelerate", "numpy")


def _without_folders(argument: str) -> str:
    """An argument; of an absolute path, also one that has a name (NAME=PATH), the last part."""
    name, equals, path = argument.rpartition("=")
    return name + equals + (Path(path).name if Path(path).is_absolute() else path)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # hf_posenc may be run from its folder
        return "not installed"


def circumstances() -> dict[str, Any]:
    """The machine, the versions and the command of this run, without anything that names the machine."""
    script = Path(sys.argv[0]).resolve()
    named = script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) else script.name
    machine = f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} CPU cores"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    return {
        "machine": machine,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        "command": shlex.join(["python", named, *map(_without_folders, sys.argv[1:])]),
    }


def resident(entry: str) -> int:
    """VmRSS or VmHWM (the highest so far, see [`forget_peak`]) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(entry):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {entry}")


def forget_peak() -> None:
    """Let VmHWM start anew."""
    Path("/proc/self/clear_refs").write_text("5")


def mean_and_deviation(values: list[float]) -> str:
    """Mean and sample standard deviation for people; the mean alone where there is a single value."""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def read(name: str) -> dict[str, Any]:
    """What is in results/<name>.json; of "file/run", the run of this name in results/<file>.json. Nothing where it is not there."""
    file, _, run = name.partition("/")
    path = RESULTS / f"{file}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found.get(run, {}) if run else found


def write(name: str, results: dict[str, Any]) -> None:
    """Write results where [`read`] finds them; other runs in the same file stay."""
    file, _, run = name.partition("/")
    content = {**circumstances(), **results}
    write_json(RESULTS / f"{file}.json", read(file) | {run: content} if run else content)
    print(f"wrote {name} to {RESULTS / file}.json")


def records_of(name: str) -> list[dict[str, Any]]:
    """The records of a benchmark that measures one thing after the other; none where nothing is there."""
    return read(name).get("results", [])


def keep_record(name: str, record: dict[str, Any], order: Iterable[str]) -> None:
    """Write a record among the others, in the place of one of the same name, in the order of their names."""
    places = {each: place for place, each in enumerate(order)}
    records = [there for there in records_of(name) if there["name"] != record["name"]] + [record]
    write(name, {"results": sorted(records, key=lambda there: places[there["name"]])})


def stopped_at(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The results of a run that was stopped, to go on with; nothing where there is none.

    Raises:
        SystemExit: it had other settings.
    """
    there = read(name)
    if there and (differ := differences(there["settings"], settings)):
        sys.exit(f"error: {name} was measured with other settings ({'; '.join(differ)}): run without --resume")
    return there


def replace_marked(text: str, begin: str, end: str, new: str) -> str:
    """A text with `new` in place of two marks and what is between them.

    Raises:
        ValueError: the marks are not there, or there are several.
    """
    text, count = re.subn(f"{begin}.*{end}", lambda _: new, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"expected {begin.strip()} and {end.strip()} once, found them {count} times")
    return text


def with_marked_tables(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """A text with tables as they are today, each between its marks `<!-- NAME -->` and `<!-- end of NAME -->`."""
    for name, make in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        text = replace_marked(text, begin, end, f"{begin}\n{make()}\n\n{end}")
    return text


def with_tables_of(pages: dict[str, list[str]]) -> Iterator[tuple[str, Callable[[str], str]]]:
    """File, and what puts each of its tables in place of the one that is there."""
    for page, tables in pages.items():
        for table in tables:
            yield page, partial(replace_table, table=table)


def replace_table(text: str, table: str) -> str:
    """The text with a table in place of the one whose first two columns have the same names.

    Raises:
        ValueError: there is none, or there are several.
    """
    start = " | ".join(table.split(" | ")[:2])
    text, count = re.subn(rf"^{re.escape(start)}.*(\n\|.*)*", lambda _: table, text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"expected one table that starts with {start!r}, found {count}")
    return text
