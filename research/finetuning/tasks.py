"""Tasks with labels where little is expected of positions: sentences, and turns of meetings for a query; the second half of plan.md.

    python research/finetuning/tasks.py --data DATA               # hours; the same command goes on where it stopped
    python research/finetuning/tasks.py --data DATA --tasks cola --arms control

DATA holds qmsum, sst2, cola and stsb. A run is a line of tasks.jsonl: of a rate, with its score on a tenth of the training data, or of a seed, with the label
and the score of each row of the test, or the number of queries and the sum of their scores of each meeting. Each run takes one thread.
"""

import argparse
import csv
import gzip
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fine_tuning import (
    DROPOUT,
    POSITION_RATES,
    RATES,
    Batch,
    Rates,
    RateSearch,
    autocast,
    fine_tune,
    is_of,
    position_rates,
)
from minilm import packaged_minilm
from recorded import Line, Runs
from report import circumstances
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, set_seed

from hf_posenc import unpad


sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from embedding_quality import mean_vectors  # noqa: E402


ARMS = ("control", "absolute+t5", "absolute+deberta")
SEEDS = (0, 1, 2)
LENGTH = 256
# Turns of the same meeting for a query: that answer, and that do not, at most; and how many of each are learned.
TURNS, LEARNED = (10, 90), 2
# Scores at random of which the mean is chance.
DRAWS = 100


class Row(NamedTuple):
    """A text or a pair and its label; where rows are ranked, for which query, of which meeting, and how many of its label are before it."""

    texts: tuple[str, ...]
    label: float
    group: int = 0
    meeting: str = ""
    before: int = 0


def tsv(file: Path) -> list[list[str]]:
    return [*csv.reader(file.read_text(encoding="utf-8").splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)]


def sst2(data: Path, number: int) -> tuple[list[Row], list[Row]]:
    train, test = (
        [Row((text,), float(label)) for label, text in tsv(data / "sst2" / f"{name}.tsv")[1:]]
        for name in ("train", "dev")
    )
    return random.Random(0).sample(train, number), test


def cola(data: Path) -> tuple[list[Row], list[Row]]:
    """Development data are a tenth of the training data here as elsewhere; val.tsv is not read."""
    return tuple(
        [Row((row[3],), float(row[1])) for row in tsv(data / "cola" / f"{name}.tsv")] for name in ("train", "dev")
    )


def stsb(data: Path) -> tuple[list[Row], list[Row]]:
    """There is no training file: dev.csv is learned, test.csv is tested. Labels from 0 to 1."""
    files = [data / "stsb" / f"stsb-en-{name}.csv" for name in ("dev", "test")]
    return tuple(
        [
            Row((first, second), float(label) / 5)
            for first, second, label in csv.reader(file.open(encoding="utf-8", newline=""))
        ]
        for file in files
    )


def qmsum(data: Path) -> tuple[list[Row], list[Row]]:
    """Turns for queries, of which it is known which turns answer; meetings of `train` are learned, those of `val` tested."""
    with gzip.open(data / "qmsum" / "documents.jsonl.gz", "rt", encoding="utf-8") as file:
        meetings = {meeting["id"]: meeting for meeting in map(json.loads, file)}
    sides: dict[str, list[Row]] = {"train": [], "val": []}
    queries = (data / "qmsum" / "queries.jsonl").read_text(encoding="utf-8").splitlines()
    for number, query in enumerate(map(json.loads, queries)):
        meeting, spans = meetings[query["document"]], query["relevant_turns"] or ()
        right = {turn for first, last in spans for turn in range(int(first), int(last) + 1)}
        texts = [": ".join(turn) for turn in meeting["turns"]]
        # Turns of a word or two answer nothing, whatever they stand between.
        long = [turn for turn, text in enumerate(texts) if len(text.split()) >= 8]
        right, wrong = [one for one in long if one in right], [one for one in long if one not in right]
        draw = random.Random(number)
        if not right or not wrong:
            continue
        for label, turns, most in zip((1.0, 0.0), (right, wrong), TURNS):
            sides[meeting["split"]] += [
                Row((query["query"], texts[turn]), label, number, meeting["id"], before)
                for before, turn in enumerate(draw.sample(turns, min(most, len(turns))))
            ]
    return sides["train"], sides["val"]


# Of each unit, which is what is drawn again for an interval: the label and the score of a row, or the queries of a meeting and the sum of
# their scores.
Units = tuple[np.ndarray, np.ndarray]
# Units, and how often each is counted, (draws, units): (draws,).
Measure = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def rows_apart(rows: Sequence[Row], scores: np.ndarray) -> Units:
    return np.array([row.label for row in rows]), scores


def ranks_by_meeting(rows: Sequence[Row], scores: np.ndarray) -> Units:
    """The score of a query is 1 / the rank of the first turn that answers; of equal scores, turns that do not answer come first."""
    found: dict[str, list[float]] = {}
    for _, own in groupby(zip(rows, scores, strict=True), key=lambda one: one[0].group):
        turns = [*own]
        best = max(score for row, score in turns if row.label == 1)
        before = sum(not score < best for row, score in turns if row.label == 0)
        found.setdefault(turns[0][0].meeting, []).append(1 / (1 + before))
    return np.array([*map(len, found.values())]), np.array([*map(sum, found.values())])


def mean_reciprocal_rank(numbers: np.ndarray, sums: np.ndarray, counted: np.ndarray) -> np.ndarray:
    return counted @ sums / (counted @ numbers)


def accuracy(labels: np.ndarray, scores: np.ndarray, counted: np.ndarray) -> np.ndarray:
    return counted @ ((scores > 0) == labels) / counted.sum(axis=1)


def matthews(labels: np.ndarray, scores: np.ndarray, counted: np.ndarray) -> np.ndarray:
    found, right = scores > 0, labels == 1
    both, wrong, missed, neither = (
        counted @ cell.astype(float) for cell in (found & right, found & ~right, ~found & right, ~found & ~right)
    )
    sides = (both + wrong) * (both + missed) * (neither + wrong) * (neither + missed)
    return (both * neither - wrong * missed) / np.sqrt(np.maximum(sides, 1))


def rank_correlation(labels: np.ndarray, scores: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Spearman's, of all draws at once."""
    ranks = [mean_ranks(values, counted) for values in (labels, scores)]
    first, second = (
        values - (values * counted).sum(axis=1, keepdims=True) / counted.sum(axis=1, keepdims=True) for values in ranks
    )
    product, *squares = (
        (one * other * counted).sum(axis=1) for one, other in ((first, second), (first, first), (second, second))
    )
    return product / np.sqrt(squares[0] * squares[1])


def mean_ranks(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Of each value, (draws, values), where equal values share the mean of their ranks."""
    _, which, numbers = np.unique(values, return_inverse=True, return_counts=True)
    equal = np.add.reduceat(counted[:, which.argsort()], np.cumsum(numbers) - numbers, axis=1)
    return (np.cumsum(equal, axis=1) - (equal - 1) / 2)[:, which]


@dataclass(frozen=True)
class Task:
    """Rows to learn and to test, and what is measured.

    Attributes:
        measured: what tables call it.
        classes: 2, learned by cross entropy and scored by the difference of their logits; or 1, a number, learned by squares.
        rates, position_rates: that the search begins with; the second of those of positions comes first.
    """

    rows: Callable[[Path], tuple[list[Row], list[Row]]]
    measure: Measure
    epochs: int
    measured: str
    classes: int = 2
    units: Callable[[Sequence[Row], np.ndarray], Units] = rows_apart
    rates: tuple[float, ...] = RATES
    position_rates: tuple[float, ...] = POSITION_RATES

    def score(self, rows: Sequence[Row], scores: np.ndarray) -> float:
        labels, scores = self.units(rows, scores)
        return float(self.measure(labels, scores, np.ones((1, len(scores)), int))[0])


TASKS = {
    "sst2, 1,000": Task(lambda data: sst2(data, 1000), accuracy, 4, "SST-2 with 1,000 phrases, accuracy"),
    "stsb": Task(stsb, rank_correlation, 4, "STS-B, Spearman", classes=1),
    "cola": Task(cola, matthews, 2, "CoLA, Matthews"),
    "sst2, 10,000": Task(lambda data: sst2(data, 10_000), accuracy, 1, "SST-2 with 10,000 phrases, accuracy"),
    "qmsum": Task(
        qmsum,
        mean_reciprocal_rank,
        4,
        "QMSum, mean reciprocal rank",
        units=ranks_by_meeting,
        rates=(2.5e-5, 5e-5, 1e-4),
        position_rates=(0.001, 0.003, 0.01),
    ),
}


def apart(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """The training data and a tenth of it to choose rates on; rows of a query stay together."""
    groups = sorted({row.group for row in rows})
    if len(groups) > 1:
        chosen = set(random.Random(1).sample(groups, len(groups) // 10))
        is_chosen = [row.group in chosen for row in rows]
    else:
        numbers = set(random.Random(1).sample(range(len(rows)), len(rows) // 10))
        is_chosen = [number in numbers for number in range(len(rows))]
    sides = ([row for row, own in zip(rows, is_chosen) if own == side] for side in (False, True))
    return tuple(sides)


class Study:
    """The models that are fine-tuned on a task."""

    def __init__(self, data: Path, source: str):
        self.data, self.source = data, source
        self.tokenizer = AutoTokenizer.from_pretrained(source, model_max_length=LENGTH)

    def model(self, arm: str, task: Task) -> PreTrainedModel:
        flags: dict[str, Any] = {} if arm == "control" else {"position_scheme": arm}
        entries = {"num_labels": task.classes, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": DROPOUT}
        model = AutoModelForSequenceClassification.from_pretrained(self.source, **entries, **flags)
        unpad(model)  # The original too; models with a scheme do it anyway.
        return model

    def encode(self, rows: Sequence[Row]) -> Batch:
        return self.tokenizer(
            *map(list, zip(*(row.texts for row in rows))), truncation=True, padding=True, return_tensors="pt"
        )

    def cosines(self, rows: Sequence[Row]) -> np.ndarray:
        """Of the embeddings of pairs, as the checkpoint is: the means of their tokens."""
        model = AutoModel.from_pretrained(self.source).eval()
        unpad(model)
        texts = [*{text: None for row in rows for text in row.texts}]
        found = dict(zip(texts, mean_vectors(model, self.tokenizer, texts, LENGTH)))
        sides = (torch.stack([found[row.texts[side]] for row in rows]) for side in (0, 1))
        return cosine_similarity(*sides).numpy()

    @torch.no_grad()
    def scores(self, model: PreTrainedModel, rows: Sequence[Row]) -> np.ndarray:
        order = sorted(range(len(rows)), key=lambda number: sum(map(len, rows[number].texts)))
        found = np.zeros(len(rows))
        for start in range(0, len(order), 32):
            own = order[start : start + 32]
            with autocast():
                states = model.base_model(**self.encode([rows[number] for number in own])).last_hidden_state
            # In bfloat16, many logits would be equal.
            logits = model.classifier(model.base_model.pooler(states.float()))
            found[own] = (logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0)).numpy()
        return found

    def train(
        self, arm: str, task: Task, rows: list[Row], rates: Rates, seed: int
    ) -> tuple[PreTrainedModel, list[float]]:
        """A fine-tuned model, and its mean loss of each epoch."""
        set_seed(seed)
        model = self.model(arm, task)

        def collate(chosen: Sequence[Row]) -> Batch:
            wanted = torch.tensor([row.label for row in chosen])
            return {**self.encode(chosen), "labels": wanted if task.classes == 1 else wanted.long()}

        return model, fine_tune(model, rows, collate, batch=16, epochs=task.epochs, rates=rates, seed=seed)


def without_training(study: Study, runs: Runs, name: str) -> None:
    """What ranks have by chance, and by the cosine similarity of embeddings."""
    task, made = TASKS[name], {line["arm"] for line in runs.read() if line["task"] == name}
    _, tested = task.rows(study.data)
    if "chance" not in made:
        draw = np.random.default_rng(0)
        found = [task.score(tested, draw.normal(size=len(tested))) for _ in range(DRAWS)]
        runs.add({"task": name, "arm": "chance", "tested": float(np.mean(found))})
    if "cosine" not in made:
        runs.add({"task": name, "arm": "cosine", "tested": task.score(tested, study.cosines(tested))})


def run(study: Study, runs: Runs, name: str, arm: str) -> None:
    """Rates first, then seeds."""
    task, keys = TASKS[name], {"task": name, "arm": arm}
    learned, tested = task.rows(study.data)
    rest, developed = apart(learned)
    rest = [row for row in rest if row.before < LEARNED]

    def record(rows: list[Row], rates: Rates, seed: int, measure: Callable[[PreTrainedModel], Line]) -> None:
        began = time.process_time()
        model, losses = study.train(arm, task, rows, rates, seed)
        line: Line = {**keys, "seed": seed, "rate": rates[0], "position_rate": rates[1], "losses": losses}
        line |= {"core_seconds": time.process_time() - began, **measure(model)}
        runs.add(line)
        print(f"{name}, {arm}, seed {seed}, rates {rates}: {line.get('searched', line.get('tested')):.4f}", flush=True)

    def searched(model: PreTrainedModel) -> Line:
        return {"searched": task.score(developed, study.scores(model, developed))}

    def test(model: PreTrainedModel) -> Line:
        scores = study.scores(model, tested)
        units = [[float(f"{value:.4g}") for value in values] for values in task.units(tested, scores)]
        return {"tested": task.score(tested, scores), "units": units}

    search = RateSearch(runs, keys, task.rates)
    for rates in search.to_try(position_rates(study.model(arm, task), task.position_rates)):
        record(rest, rates, 0, searched)
    made = {found["seed"] for found in runs.read() if "tested" in found and is_of(found, keys)}
    for seed in SEEDS:
        if seed not in made:
            record(rest, search.best(), seed, test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--model", help="folder of the checkpoint; default: the packaged MiniLM")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"epochs": {name: task.epochs for name, task in TASKS.items()}, "batch": 16, "length": LENGTH}
    settings |= {"rates": RATES, "position_rates": POSITION_RATES, "dropout": DROPOUT, **circumstances()["versions"]}
    runs = Runs(options.output_dir / "tasks.jsonl", settings)
    study = Study(options.data, options.model or packaged_minilm())
    for name in options.tasks:
        if TASKS[name].measure is mean_reciprocal_rank:
            without_training(study, runs, name)
        for arm in options.arms:
            run(study, runs, name, arm)


if __name__ == "__main__":
    main()
