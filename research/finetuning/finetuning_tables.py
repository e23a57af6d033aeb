"""The tables of the study of fine-tuning, from minilm.jsonl: an arm that has not all of its runs is left out.

python research/finetuning/finetuning_tables.py [FOLDER]    # prints them
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from fine_tuning import Line
from intervals import Interval, f1
from litbank import BIN
from recorded import read_lines
from tagging import STUDIES, WHOLE, WINDOWS, WINDOWS_512

from hf_posenc._utils import as_markdown


HERE = Path(__file__).parent
DRAWS = 10_000
CONTROL = ("control", WINDOWS)
# On par: the interval of the difference lies within this.
MARGIN = 0.02
# Ten arms are compared with one.
CORRECTED = 1 - 0.05 / 10


@cache
def runs_of(study: str, folder: Path = HERE) -> list[Line]:
    return read_lines(folder / f"{study}.jsonl")[1:]


@dataclass(frozen=True)
class Counts:
    """Of an arm as it was read: right, wrong and missed (runs, works, bins, 3), and seconds for each work."""

    values: np.ndarray
    core_seconds: float

    def part(self, first: int, end: int | None = None) -> np.ndarray:
        """Sums over bins, (runs, works, 3)."""
        return self.values[:, :, first:end].sum(axis=2)


def recall(counts: np.ndarray) -> np.ndarray:
    """(..., works, 3) -> (...), micro over works."""
    right, _, missed = np.moveaxis(counts.sum(axis=-2), -1, 0)
    return right / np.maximum(right + missed, 1)


@cache
def counts_of(study: str, arm: str, reading: str, which: str = "works", folder: Path = HERE) -> Counts | None:
    """None where a run is missing; runs are in the order of folds and seeds."""
    wanted = [(fold, seed) for fold, seeds in STUDIES[study].seeds.items() for seed in seeds]
    found = {
        (run["fold"], run["seed"]): run["readings"]
        for run in runs_of(study, folder)
        if run["arm"] == arm and "readings" in run
    }
    if any(one not in found or reading not in found[one] for one in wanted):
        return None
    works = [[*found[one][reading][which].values()] for one in wanted]
    bins = max(len(rows) for run in works for rows in run)
    values = np.array([[rows + [[0, 0, 0]] * (bins - len(rows)) for rows in run] for run in works])
    seconds = sum(found[one][reading]["core_seconds"] for one in wanted) / sum(map(len, works))
    return Counts(values, seconds)


@cache
def draws(runs: int, works: int) -> tuple[np.ndarray, np.ndarray]:
    """Runs, and how often each of their works is counted; both vary, works within runs."""
    generator = np.random.default_rng(0)
    chosen = generator.integers(runs, size=(DRAWS, runs))
    return chosen, generator.multinomial(works, [1 / works] * works, size=(DRAWS, runs))


def difference(
    own: np.ndarray, other: np.ndarray | None, measure: Callable[[np.ndarray], np.ndarray], confidence: float = 0.95
) -> Interval:
    """Mean over runs of a measure, or of its difference, on the same works in the same draws; percentile interval.

    Args:
        own, other: (runs, works, 3).
    """
    chosen, weights = draws(*own.shape[:2])
    sides = [own] if other is None else [own, other]
    drawn = [measure(side[chosen] * weights[..., None]).mean(axis=-1) for side in sides]
    means = [measure(side).mean() for side in sides]
    low, high = np.quantile(
        drawn[0] - (drawn[1] if other is not None else 0.0), [(1 - confidence) / 2, (1 + confidence) / 2]
    )
    return Interval(float(means[0] - (means[1] if other is not None else 0.0)), float(low), float(high))


# Arm, reading -> what the table calls it.
ROWS = {
    ("control", WINDOWS): "own positions, windows of 256 (control)",
    ("control", WINDOWS_512): "own positions, windows of 512",
    ("control, longer", WINDOWS): "own positions, twice the steps, windows of 256",
    ("control", WHOLE): "own positions, longer table, whole works",
    ("none", WHOLE): "`none`, whole works",
    ("absolute+t5", WINDOWS): "`absolute+t5`, windows of 256",
    ("absolute+t5", WHOLE): "`absolute+t5`, longer table, whole works",
    ("sinusoidal", WHOLE): "`sinusoidal`, whole works",
    ("concat", WHOLE): "`sinusoidal` concatenated, whole works",
    ("relative", WHOLE): "`relative`, whole works",
    ("t5 converted", WHOLE): "converted to `t5`, whole works",
    ("deberta converted", WHOLE): "converted to `deberta`, whole works",
    ("rope converted", WHOLE): "converted to `rope`, whole works",
}
IN_WINDOWS = ("none", "sinusoidal", "concat", "relative", "t5 converted", "deberta converted", "rope converted")


def verdict(less: Interval) -> str:
    """What may be said of a difference."""
    if less.low > 0 or less.high < 0:
        return "higher" if less.low > 0 else "lower"
    return "on par" if -MARGIN < less.low and less.high < MARGIN else "undecided"


def main_table(folder: Path = HERE) -> str:
    """Recall beyond the 512th token, and its difference from the control."""
    reference = counts_of("minilm", *CONTROL, folder=folder)
    rows = []
    for (arm, reading), label in ROWS.items():
        own = counts_of("minilm", arm, reading, folder=folder)
        if own is None or reference is None:
            continue
        beyond = own.part(1)
        cells = [f"{recall(beyond).mean():.3f}"]
        if (arm, reading) == CONTROL:
            cells += ["", "", ""]
        else:
            less = partial(difference, beyond, reference.part(1), recall)
            cells += [less().written(), less(confidence=CORRECTED).written(), verdict(less())]
        names = counts_of("minilm", arm, reading, "names", folder)
        cells += [
            f"{f1(beyond.sum(axis=1)).mean():.3f}",
            f"{recall(own.part(0, 1)).mean():.3f}",
            f"{recall(names.part(1)).mean():.3f}",
        ]
        rows.append([label, *cells, f"{own.core_seconds:.1f}"])
    header = [
        "fine-tuned on pieces of 256",
        "recall beyond 512",
        "less the control (95 %)",
        "(99.5 %)",
        "",
        "F1 beyond",
    ]
    return as_markdown([*header, "recall up to 512", "names' recall beyond", "core seconds a work"], rows)


def windows_table(folder: Path = HERE) -> str:
    """The same models read in windows of 256: what was lost in training, and what by reading whole works."""
    reference = counts_of("minilm", *CONTROL, folder=folder)
    rows = []
    for arm in IN_WINDOWS:
        own = counts_of("minilm", arm, WINDOWS, folder=folder)
        if own is not None and reference is not None:
            less = difference(own.part(1), reference.part(1), recall)
            rows.append([f"`{arm}`", f"{recall(own.part(1)).mean():.3f}", less.written(), verdict(less)])
    return as_markdown(["read in windows of 256", "recall beyond 512", "less the control (95 %)", ""], rows)


def bins_table(folder: Path = HERE) -> str:
    """Recall by where an entity begins."""
    rows, bins = [], 5
    for (arm, reading), label in ROWS.items():
        own = counts_of("minilm", arm, reading, folder=folder)
        if own is not None:
            parts = [own.part(number, number + 1) for number in range(bins - 1)] + [own.part(bins - 1)]
            rows.append([label, *(f"{recall(part).mean():.3f}" for part in parts)])
    names = [f"{BIN * number}–{BIN * (number + 1)}" for number in range(bins - 1)] + [f"{BIN * (bins - 1)} and more"]
    return as_markdown(["recall by the entity's first token", *names], rows)


def rates_table(study: str, folder: Path = HERE) -> str:
    """What was tried for each arm, on development data alone."""
    rows = []
    for arm in STUDIES[study].arms:
        tried = [run for run in runs_of(study, folder) if run["arm"] == arm and "searched" in run]
        if not tried:
            continue
        best = max(tried, key=lambda run: run["searched"])
        listed = ", ".join(
            f"{_rates(run)}: {run['searched']:.3f}"
            for run in sorted(tried, key=lambda run: (run["rate"], run["position_rate"] or 0))
        )
        rows.append([f"`{arm}`", f"**{_rates(best)}**", listed])
    return as_markdown(["arm", "chosen", "F1 on development works after the search's epochs"], rows, words=3)


def _rates(run: Line) -> str:
    return f"{run['rate']:g}" + ("" if run["position_rate"] is None else f" / {run['position_rate']:g}")


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    made = [main_table(folder), windows_table(folder), bins_table(folder), rates_table("minilm", folder)]
    print("\n\n".join(made))
