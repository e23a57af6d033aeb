"""The README's tables of what was measured, from the files in results/.

    python benchmarks/readme_tables.py

Prints them and puts them into README.md in place of those that are there.
"""

import argparse
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

from contestants import STOCK
from report import RESULTS, mean_and_deviation


README = Path(__file__).parents[1] / "README.md"
CURVE_STEPS = (20, 40, 80, 120, 160, 200, 240)

# The columns of the tables of speed; see `ratio_table`.
SHORT = [
    ("forward", "model_forward", "forward", "ratio"),
    ("training", "model_training", "training", "ratio"),
    ("training without dropout", "model_training_without_dropout", "training without dropout", "ratio"),
]
LONG = [
    ("time, forward", "model_forward_4096", "forward", "ratio"),
    ("memory, forward", "model_memory_4096", "forward", "memory_ratio"),
    ("memory, training without dropout", "model_memory_4096", "training without dropout", "memory_ratio"),
]
UNPADDED = [
    ("8 × 512: time, forward", "model_forward_unpadded", "forward", "ratio"),
    ("1 × 4,096: time, forward", "model_forward_4096_unpadded", "forward", "ratio"),
    ("memory, forward", "model_memory_4096_unpadded", "forward", "memory_ratio"),
    ("memory, training without dropout", "model_memory_4096_unpadded", "training without dropout", "memory_ratio"),
]

Runs = dict[str, list[dict[str, Any]]]


def read_runs(folder: Path) -> Runs:
    """The runs of a comparison by their scheme; nothing where there is no such folder."""
    runs: Runs = {}
    for file in sorted((folder / "runs").glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        runs.setdefault(run["scheme"], []).append(run)
    return runs


def values(runs: list[dict[str, Any]], length: str, metric: str) -> list[float]:
    return [run["metrics"][length][metric] for run in runs]


def written(numbers: list[float]) -> str:
    """Mean and sample standard deviation over the seeds, with their number where it is not three."""
    if not numbers:
        return ""
    return mean_and_deviation(numbers) + f" ({len(numbers)})" * (len(numbers) != 3)


def deviations_above(own: list[float], baseline: list[float]) -> float:
    """Difference of the means over the pooled standard deviation of two samples of equal size."""
    pooled = math.sqrt((statistics.variance(own) + statistics.variance(baseline)) / 2)
    return (statistics.fmean(own) - statistics.fmean(baseline)) / pooled


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown; all columns but the first are numbers."""
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(header) - 1), *lines[1:]])


def quality_table(punctuation: Runs, wikitext: Runs) -> str:
    """A row per scheme: F1 on punctuation, how far above `none`, and the loss on WikiText at each length."""
    baseline = values(punctuation["none"], "64", "f1")
    lengths = list(next(iter(wikitext.values()))[0]["metrics"]) if wikitext else []
    rows = []
    for scheme, runs in punctuation.items():
        f1 = values(runs, "64", "f1")
        above = "" if scheme == "none" else f"{deviations_above(f1, baseline):.1f}"
        losses = [written(values(wikitext.get(scheme, []), length, "masked_loss")) for length in lengths]
        rows.append((statistics.fmean(f1), [scheme, written(f1), above, *losses]))
    ranked = [row for _, row in sorted(rows, key=lambda row: -row[0])]
    heads = ["WikiText-2: loss" * (i == 0) + f" at {length}" for i, length in enumerate(lengths)]
    return table(["scheme", "punctuation: F1", "above none", *map(str.strip, heads)], ranked)


def curve_table(punctuation: Runs) -> str:
    """Training loss over the steps, mean of the seeds, of `none`, of what is not clearly above it, and of `t5`."""
    baseline = values(punctuation["none"], "64", "f1")
    others = [name for name in punctuation if name != "none"]
    stuck = [name for name in others if deviations_above(values(punctuation[name], "64", "f1"), baseline) <= 2]
    rows = []
    for scheme in ["none", *stuck, "t5"]:
        curves = [dict(run["learning_curve"]) for run in punctuation[scheme]]
        means = [f"{statistics.fmean(curve[step] for curve in curves):.3f}" for step in CURVE_STEPS]
        rows.append([scheme, *means])
    return table(["training loss at step", *map(str, CURVE_STEPS)], rows)


def ratio_table(corner: str, columns: list[tuple[str, str, str, str]]) -> str:
    """Multiples of what stock BERT takes, a row per model.

    Args:
        corner: heading of the models.
        columns: of each its heading, the results of model.py that it is from, the mode there, and the name of the number.
    """
    rows: dict[str, list[str]] = {}
    for number, (_, name, mode, key) in enumerate(columns):
        for entry in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"]:
            if entry["mode"] == mode and entry["model"] != STOCK:
                cells = rows.setdefault(entry["model"], [""] * len(columns))
                cells[number] = f"{entry[key]:.2f}" if key in entry else entry["memory"]
    return table([corner, *(heading for heading, *_ in columns)], [[model, *cells] for model, cells in rows.items()])


def tables() -> list[str]:
    """All tables, as Markdown."""
    punctuation = read_runs(RESULTS / "punctuation")
    cola = (RESULTS / "cola" / "results.md").read_text(encoding="utf-8")
    return [
        quality_table(punctuation, read_runs(RESULTS / "wikitext")),
        curve_table(punctuation),
        re.search(r"^\|.*(\n\|.*)*", cola, flags=re.MULTILINE)[0],
        ratio_table("time", SHORT),
        ratio_table("1 × 4,096", LONG),
        ratio_table("no padding", UNPADDED),
    ]


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


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    text = README.read_text(encoding="utf-8")
    for table in tables():
        print(f"{table}\n")
        text = replace_table(text, table)
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
