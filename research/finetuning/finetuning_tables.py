"""The tables of the study of fine-tuning, from its .jsonl files: of folds that all arms have.

python research/finetuning/finetuning_tables.py [--folder FOLDER]    # prints them
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from fine_tuning import Line, is_of
from intervals import Interval, f1
from litbank import BIN, MENTIONS, TESTED, TOKENS
from recorded import read_lines
from report import with_marked_tables
from tagging import APART, CUT, FIRST, LONGEST_SPAN, MEAN, STUDIES, WHOLE, WINDOWS, WINDOWS_512
from tasks import ARMS as TASK_ARMS
from tasks import SEEDS, TASKS, Task

from hf_posenc._utils import as_markdown


HERE = Path(__file__).parent
DRAWS = 10_000
# Of tasks, whose ranks are computed anew in each draw.
TASK_DRAWS = 2_000
# Lines of tasks.jsonl that no training made, and what tables call them.
UNTRAINED = {"chance": "chance", "cosine": "cosine similarity of the original's embeddings"}
CONTROL = ("control", WINDOWS)
FINE_TUNED = "fine-tuned on pieces of 256 tokens"
TIME = "core ms per 1,000 tokens"
# On par: the interval of the difference lies within this.
MARGIN = 0.02
# The level of the plan, for ten arms that are compared with one.
CORRECTED = 1 - 0.05 / 10


@cache
def runs_of(study: str, folder: Path = HERE) -> list[Line]:
    return read_lines(folder / f"{study}.jsonl")[1:]


@dataclass(frozen=True)
class Counts:
    """Of an arm as it was read: right, wrong and missed (runs, works, bins, 3), and milliseconds of a core for 1,000 tokens."""

    values: np.ndarray
    milliseconds: float

    def part(self, first: int, end: int | None = None) -> np.ndarray:
        """Sums over bins, (runs, works, 3)."""
        return self.values[:, :, first:end].sum(axis=2)


def recall(counts: np.ndarray) -> np.ndarray:
    """(..., works, 3) -> (...), micro over works."""
    right, _, missed = np.moveaxis(counts.sum(axis=-2), -1, 0)
    return right / np.maximum(right + missed, 1)


def micro_f1(counts: np.ndarray) -> np.ndarray:
    """(..., works, 3) -> (...)."""
    return f1(counts.sum(axis=-2))


# The arms that come first, fold by fold. Tables have the folds and seeds that all of them have.
FIRST_GROUP = {
    "minilm": ("control", "none", "absolute+t5", "t5 converted", "deberta converted", "rope converted"),
    "mpnet": ("control",),
}


@cache
def readings_of(study: str, arm: str, folder: Path = HERE) -> dict[tuple[int, int], Line]:
    """By fold and seed."""
    return {
        (run["fold"], run["seed"]): run["readings"]
        for run in runs_of(study, folder)
        if run["arm"] == arm and "readings" in run
    }


def shown(study: str, folder: Path = HERE) -> list[tuple[int, int]]:
    """Folds and seeds that all arms of the first group have."""
    arms = FIRST_GROUP[study]
    planned = [(fold, seed) for fold, seeds in STUDIES[study].seeds.items() for seed in seeds]
    return [one for one in planned if all(one in readings_of(study, arm, folder) for arm in arms)]


@cache
def counts_of(study: str, arm: str, reading: str, which: str = "works", folder: Path = HERE) -> Counts | None:
    """Of the runs that are shown, in their order; None where the arm has not all of these."""
    wanted, found = shown(study, folder), readings_of(study, arm, folder)
    if not wanted or any(one not in found or reading not in found[one] for one in wanted):
        return None
    works = [[*found[one][reading][which].values()] for one in wanted]
    bins = max(len(rows) for run in works for rows in run)
    values = np.array([[rows + [[0] * len(rows[0])] * (bins - len(rows)) for rows in run] for run in works])
    if which == "mentions":  # nothing is wrong there, only right or missed
        values = np.insert(values, 1, 0, axis=-1)
    seconds = sum(found[one][reading]["core_seconds"] for one in wanted) / sum(map(len, works))
    return Counts(values, 1e6 * seconds / TOKENS)


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
    ("control", WINDOWS): "original positions, windows of 256 (control)",
    ("control", WINDOWS_512): "original positions, windows of 512",
    ("control, longer", WINDOWS): "original positions, twice the steps, windows of 256",
    ("control", WHOLE): "original positions, longer matrix, whole works",
    ("none", WHOLE): "`none`, whole works",
    ("absolute+t5", WINDOWS): "`absolute+t5`, windows of 256",
    ("absolute+t5", WHOLE): "`absolute+t5`, longer matrix, whole works",
    ("absolute+learned rope", WINDOWS): "`absolute` and learned rotary frequencies, windows of 256",
    ("absolute+learned rope", WHOLE): "`absolute` and learned rotary frequencies, longer matrix, whole works",
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


def with_difference(own: np.ndarray, other: np.ndarray, measure: Callable[[np.ndarray], np.ndarray]) -> str:
    """A score and its difference from another."""
    return f"{measure(own).mean():.3f} {marked(difference(own, other, measure))}"


def marked(less: Interval) -> str:
    """A difference with its sign, in bold where the interval leaves 0 out."""
    written = ("+" if less.mean > 0 else "") + less.written()
    return f"**{written}**" if less.low > 0 or less.high < 0 else written


def main_table(folder: Path = HERE) -> str:
    """Recall beyond the 512th token, and its difference from the control."""
    reference = counts_of("minilm", *CONTROL, folder=folder)
    rows = []
    for (arm, reading), label in ROWS.items():
        own = counts_of("minilm", arm, reading, folder=folder)
        if own is None or reference is None:
            continue
        beyond = own.part(1)
        less = difference(beyond, reference.part(1), recall)
        compared = ["", ""] if (arm, reading) == CONTROL else [less.written(), verdict(less)]
        scores = [f"{recall(beyond).mean():.3f}", *compared, f"{micro_f1(beyond).mean():.3f}"]
        rows.append([label, *scores, f"{own.milliseconds:.0f}"])
    header = [FINE_TUNED, "recall beyond 512", "minus the control", "", "F1 beyond 512"]
    return as_markdown([*header, TIME], rows)


# Of all-mpnet-base-v2, where position encodings replace its own.
LARGER_ROWS = {
    CONTROL: ROWS[CONTROL],
    **{
        (arm, reading): f"`{arm}`, {label}"
        for arm in ("deberta", "rope")
        for reading, label in ((WINDOWS, "windows of 256"), (WHOLE, "whole works"))
    },
}


def larger_table(folder: Path = HERE) -> str:
    """Of all-mpnet-base-v2, run by run: two give no interval."""
    rows = []
    for (arm, reading), label in LARGER_ROWS.items():
        own = counts_of("mpnet", arm, reading, folder=folder)
        if own is None:
            continue
        beyond, up_to = own.part(1), own.part(0, 1)
        scores = [recall(beyond), micro_f1(beyond), recall(up_to), micro_f1(up_to)]
        rows.append([label, *(", ".join(f"{score:.3f}" for score in of_runs) for of_runs in scores)])
    return as_markdown([FINE_TUNED, "recall beyond 512", "F1 beyond 512", "recall up to 512", "F1 up to 512"], rows)


def windows_table(folder: Path = HERE) -> str:
    """The same models read in windows of 256: what was lost in training, and what by reading whole works."""
    reference = counts_of("minilm", *CONTROL, folder=folder)
    rows = []
    for arm in IN_WINDOWS:
        own = counts_of("minilm", arm, WINDOWS, folder=folder)
        if own is not None and reference is not None:
            less = difference(own.part(1), reference.part(1), recall)
            label = ROWS[arm, WHOLE].removesuffix(", whole works")
            rows.append([label, f"{recall(own.part(1)).mean():.3f}", less.written(), verdict(less)])
    return as_markdown(["read in windows of 256", "recall beyond 512", "minus the control (95 %)", ""], rows)


def bins_table(folder: Path = HERE) -> str:
    """Recall by where an entity begins, that of names, and the interval of the plan for many comparisons."""
    reference = counts_of("minilm", *CONTROL, folder=folder)
    rows, bins = [], 5
    for (arm, reading), label in ROWS.items():
        own, names = (counts_of("minilm", arm, reading, which, folder) for which in ("works", "names"))
        if own is None or names is None or reference is None:
            continue
        less = difference(own.part(1), reference.part(1), recall, CORRECTED)
        parts = [own.part(number, number + 1) for number in range(bins - 1)] + [own.part(bins - 1), names.part(1)]
        scores = [f"{recall(part).mean():.3f}" for part in parts]
        rows.append([label, *scores, "" if (arm, reading) == CONTROL else less.written()])
    names_of_bins = [f"{BIN * number}–{BIN * (number + 1)}" for number in range(bins - 1)]
    header = ["recall by the entity's first token", *names_of_bins, f"{BIN * (bins - 1)} and more"]
    return as_markdown([*header, "names beyond 512", "beyond 512, minus the control (99.5 %)"], rows)


# Reading of the control -> what docs/tagging.md calls it.
WAYS = {
    WINDOWS: "overlapping windows, each word from its most central window",
    LONGEST_SPAN: "overlapping windows, the longest entity remains (as with `stride`)",
    MEAN: "overlapping windows, the mean of each word's probabilities",
    FIRST: "overlapping windows, the entity of the first window remains",
    APART: "windows that do not overlap",
    CUT: "cut off at 512 tokens",
}


def ways_table(study: str, folder: Path = HERE) -> str:
    """How the windows of one tagger are joined: scores beyond the 512th token and up to it, and how much time it takes."""
    reference = counts_of(study, *CONTROL, folder=folder)
    rows = []
    for reading, label in WAYS.items():
        own, names = (counts_of(study, "control", reading, which, folder) for which in ("works", "names"))
        if own is None or names is None or reference is None:
            continue
        beyond, central = own.part(1), reference.part(1)
        if reading == WINDOWS:
            cells = [f"{recall(beyond).mean():.3f}", f"{micro_f1(beyond).mean():.3f}"]
        else:
            cells = [with_difference(beyond, central, measure) for measure in (recall, micro_f1)]
        up_to = own.part(0, 1)
        cells += [
            f"{recall(up_to).mean():.3f}",
            f"{micro_f1(up_to).mean():.3f}",
            f"{recall(names.part(1)).mean():.3f}",
        ]
        rows.append([label, *cells, f"{own.milliseconds:.0f}"])
    header = ["windows of 256 tokens", "recall beyond 512", "F1 beyond 512", "recall up to 512", "F1 up to 512"]
    return as_markdown([*header, "names' recall beyond 512", TIME], rows)


def mentions_table(folder: Path = HERE) -> str:
    """Recall of names by how far the first mention of the same name is, and its difference from windows."""
    reference = counts_of("minilm", *CONTROL, "mentions", folder)
    rows, number = [], len(MENTIONS) + 2
    for arm, reading in (CONTROL, *((arm, WHOLE) for arm in ("t5 converted", "deberta converted", "rope converted"))):
        own = counts_of("minilm", arm, reading, "mentions", folder)
        if own is None or reference is None:
            continue
        if not rows:
            sums = own.values.sum(axis=(0, 1, 3))
            rows.append(["*number of mentions*", *(f"{count:,}" for count in sums)])
        cells = []
        for place in range(number):
            part, other = (counts.part(place, place + 1) for counts in (own, reference))
            is_control = (arm, reading) == CONTROL
            cells.append(f"{recall(part).mean():.3f}" if is_control else with_difference(part, other, recall))
        rows.append([ROWS[arm, reading], *cells])
    limits = ["first mention", *(f"up to {limit:,} tokens" for limit in MENTIONS), f"more than {MENTIONS[-1]:,}"]
    return as_markdown(["recall of names by the distance from the first mention", *limits], rows)


def tasks_table(folder: Path = HERE) -> str:
    """Of each task of which all runs are made: the mean over seeds, and differences from the control."""
    rows = []
    for name, task in TASKS.items():
        tested = {
            arm: {
                run["seed"]: run["units"]
                for run in runs_of("tasks", folder)
                if "units" in run and is_of(run, {"task": name, "arm": arm})
            }
            for arm in TASK_ARMS
        }
        if any({*SEEDS} - {*found} for found in tested.values()):
            continue
        control, *others = (np.array([found[seed] for seed in SEEDS]) for found in tested.values())
        drawn = _scores_of_draws(task, control)
        cells = [f"{drawn[0]:.3f}"]
        for units in others:
            less = _scores_of_draws(task, units) - drawn
            cells.append(marked(Interval(float(less[0]), *map(float, np.quantile(less[1:], [0.025, 0.975])))))
        rows.append([task.measured + _untrained(name, folder), *cells])
    return as_markdown(["task", "original positions", *(f"`{arm}`" for arm in TASK_ARMS[1:])], rows)


def _untrained(name: str, folder: Path) -> str:
    """What a task's ranks have without training, where that was measured."""
    found = {run["arm"]: run["tested"] for run in runs_of("tasks", folder) if run["task"] == name and "tested" in run}
    if not {*UNTRAINED} <= {*found}:
        return ""
    return f" ({', '.join(f'{words} {found[arm]:.3f}' for arm, words in UNTRAINED.items())})"


@cache
def _draws_of_tasks(seeds: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Seeds, and how often each unit is counted, first of all once, and then as they are drawn again."""
    generator = np.random.default_rng(0)
    chosen = np.vstack([np.arange(seeds), generator.integers(seeds, size=(TASK_DRAWS, seeds))])
    return chosen, np.vstack(
        [np.ones(number, int), generator.multinomial(number, [1 / number] * number, size=TASK_DRAWS)]
    )


def _scores_of_draws(task: Task, units: np.ndarray) -> np.ndarray:
    """Means over seeds, (1 + draws,): of all, and where seeds and units are drawn again, the same for all arms.

    Args:
        units: (seeds, 2, units).
    """
    chosen, counted = _draws_of_tasks(len(units), units.shape[-1])
    scores = np.array([task.measure(*of_seed, counted) for of_seed in units])
    return np.take_along_axis(scores.T, chosen, axis=1).mean(axis=1)


def rates_table(study: str, folder: Path = HERE) -> str:
    """What was tried for each arm, on development data alone."""
    rows = []
    for arm, settings in STUDIES[study].arms.items():
        tried = [run for run in runs_of(study, folder) if run["arm"] == arm and "searched" in run]
        if settings.rate or not tried:
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


def number_of_works(folder: Path = HERE) -> str:
    """What the tables rest on."""
    number = len(shown("minilm", folder))
    return f"{number} of {len(STUDIES['minilm'].seeds)} folds, each with a run of its own and {TESTED} works."


MARKED = {
    "number of works": number_of_works,
    "taggers": main_table,
    "taggers in windows": windows_table,
    "taggers by bins": bins_table,
    "ways to join windows": partial(ways_table, "minilm"),
    "ways to join windows, all-mpnet-base-v2": partial(ways_table, "mpnet"),
    "names by mentions": mentions_table,
    "rates of taggers": partial(rates_table, "minilm"),
    "taggers, all-mpnet-base-v2": larger_table,
    "rates of taggers, all-mpnet-base-v2": partial(rates_table, "mpnet"),
    "other tasks": tasks_table,
}


def generated() -> Iterator[tuple[str, Callable[[str], str]]]:
    """File, and what makes its text as it should be of what it is."""
    yield "docs/fine-tuning-results.md", partial(with_marked_tables, tables=MARKED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=HERE, help="where its .jsonl files are (default: this folder)")
    folder = parser.parse_args().folder
    made = [table(folder=folder) for table in MARKED.values()]
    print("\n\n".join(made))
