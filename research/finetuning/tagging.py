"""Entities of whole works, tagged by models that were fine-tuned on pieces of 256 tokens: the study of plan.md.

    python research/finetuning/tagging.py --data DATA                  # hours; the same command goes on where it stopped
    python research/finetuning/tagging.py --data DATA --remaining      # what is still to be run, and nothing else
    python research/finetuning/tagging.py --data DATA --arms control --folds 0    # one arm on one fold: 10 minutes of a core

DATA holds litbank/*.tsv. A run is a line of minilm.jsonl or mpnet.jsonl: of a rate, with its F1 on fold 0's works of development, or of a fold, with what was right, wrong
and missed in each of its works. Processes may share the work by arms; each run takes one thread. Conversions are folders in outputs/finetuning, made where they
are not there.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fine_tuning import (
    DROPOUT,
    POSITION_RATES,
    RATES,
    ROOT,
    Batch,
    Rates,
    RateSearch,
    autocast,
    fine_tune,
    is_of,
    position_rates,
)
from intervals import f1
from litbank import FOLDS, TAGS, Encoded, Entity, counts, counts_by_mention, decode, fold, pieces_to_learn, read_works
from long_texts import wikitext_files
from minilm import packaged_minilm
from recorded import Line, Runs
from report import circumstances
from transformers import AutoModelForTokenClassification, AutoTokenizer, PreTrainedModel, set_seed
from windows import Piece, most_context, padded, whole, windows

from hf_posenc import convert
from hf_posenc.conversion import lengthen
from hf_posenc.conversion.distillation import has_bfloat16


PIECE, LONGEST = 256, 4096
WINDOWS, WINDOWS_512, WHOLE = "windows of 256", "windows of 512", "whole"
# Other ways to join windows of 256, of the control alone: what docs/tagging.md compares.
APART, FIRST, LONGEST_SPAN, CUT = "no overlap", "the first window", "the longest entity", "cut off at 512"
MEAN = "the mean of windows"
CUTS: dict[str, Callable[[list[int]], list[Piece]]] = {
    WINDOWS: partial(windows, size=256, shared=127),
    WINDOWS_512: partial(windows, size=512, shared=255),
    WHOLE: whole,
    APART: partial(windows, size=256, shared=0),
    CUT: lambda ids: [Piece([*ids[:511], ids[-1]], [*range(511), -1])],
}


@dataclass(frozen=True)
class Arm:
    """What is fine-tuned.

    Attributes:
        scheme: the positions of the model; none for the checkpoint's own.
        flags: of the scheme.
        steps: of distillation before; none where the checkpoint is taken as it is, 0 for a conversion's start alone.
        table: read as a whole with a longer table.
        times: how many times as long it is fine-tuned as others.
        rates_of: the arm whose rates it takes.
        rate: taken instead of a search.
    """

    scheme: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    table: bool = False
    times: float = 1.0
    rates_of: str | None = None
    rate: float | None = None


CONVERSION_STEPS = 400
ARMS = {
    "control": Arm(table=True),
    "none": Arm("none"),
    "absolute+t5": Arm("absolute+t5", table=True),
    "sinusoidal": Arm("sinusoidal"),
    "concat": Arm("sinusoidal", {"position_combine": "concat"}, steps=0),
    "relative": Arm("relative"),
    "t5 converted": Arm("t5", steps=CONVERSION_STEPS),
    "deberta converted": Arm("deberta", steps=CONVERSION_STEPS),
    "rope converted": Arm("rope", steps=CONVERSION_STEPS),
    "absolute+learned rope": Arm("absolute+rope", {"position_learn_frequencies": "shared"}, table=True),
    "control, longer": Arm(table=True, times=2.0, rates_of="control"),
}
# The control's search was over half an epoch, and chose 4e-4, which learns nothing in two.
OF_MPNET = {"control": Arm(rate=1e-4), "deberta": Arm("deberta"), "rope": Arm("rope")}


@dataclass(frozen=True)
class Study:
    """A checkpoint and how it is fine-tuned.

    Attributes:
        trained_length: number of tokens that its authors trained it with.
        seeds: by fold.
        rates: of the model, where they are searched.
    """

    name: str
    arms: dict[str, Arm]
    seeds: dict[int, tuple[int, ...]]
    epochs: int
    trained_length: int
    batch: int = 8
    rate_epochs: float = 2
    rates: tuple[float, ...] = RATES

    @property
    def settings(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("epochs", "batch", "rate_epochs", "trained_length")}
        return {**own, "piece": PIECE, "rates": self.rates, "position_rates": POSITION_RATES, "dropout": DROPOUT}


STUDIES = {
    "minilm": Study("minilm", ARMS, {number: (number,) for number in range(FOLDS)}, 4, 256, rate_epochs=1),
    "mpnet": Study("mpnet", OF_MPNET, {0: (0, 1)}, 2, 384, rates=(1e-4, 2e-4)),
}


class Tagging:
    """The works, and the models that are fine-tuned on them."""

    def __init__(self, study: Study, data: Path, source: str, work_dir: Path):
        self.study, self.source, self.work_dir = study, source, work_dir
        self.data = data
        self.tokenizer = AutoTokenizer.from_pretrained(source)
        self.works = [Encoded.of(work, self.tokenizer) for work in read_works(data)]

    def converted(self, name: str) -> Path:
        """Folder of an arm's conversion, of WikiText-2: the works that are tagged are not read before."""
        arm = self.study.arms[name]
        output = self.work_dir / "conversions" / f"{self.study.name}-{arm.scheme}-{arm.steps}"
        if not output.is_dir():
            texts = wikitext_files(self.data, self.tokenizer, self.work_dir / "texts")
            convert(
                self.source,
                arm.scheme,
                text=[texts],
                trained_length=self.study.trained_length,
                max_length=LONGEST,
                train="all" if arm.steps else "none",
                max_steps=arm.steps or None,
                output=output,
                resume=bool(arm.steps),
                **arm.flags,
            )
        return output

    def model(self, name: str) -> PreTrainedModel:
        """Dropout of attention is left out: kernels that have none take less than half of the time."""
        arm = self.study.arms[name]
        changed = {"num_labels": len(TAGS), "attention_probs_dropout_prob": 0.0}
        if arm.steps is not None:
            return AutoModelForTokenClassification.from_pretrained(self.converted(name), **changed)
        flags = {"position_scheme": arm.scheme, **arm.flags} if arm.scheme else {}
        return AutoModelForTokenClassification.from_pretrained(self.source, **changed, **flags)

    def train(
        self, name: str, works: list[Encoded], seed: int, rates: Rates, epochs: float
    ) -> tuple[PreTrainedModel, list[float]]:
        """A fine-tuned model, and its mean loss of each epoch."""
        set_seed(seed)
        model = self.model(name)
        pieces = [piece for work in works for piece in pieces_to_learn(work, PIECE)]
        batch = self.study.batch
        return model, fine_tune(model, pieces, self.collate, batch=batch, epochs=epochs, rates=rates, seed=seed)

    def collate(self, pieces: list[tuple[list[int], list[int]]]) -> Batch:
        return {
            "input_ids": padded([ids for ids, _ in pieces], self.tokenizer.pad_token_id),
            "attention_mask": padded([[1] * len(ids) for ids, _ in pieces], 0),
            "labels": padded([labels for _, labels in pieces], -100),
        }

    def f1_of_pieces(self, model: PreTrainedModel, works: list[Encoded]) -> float:
        """Of pieces that do not overlap, as they are trained on."""
        cut = partial(windows, size=PIECE, shared=0)
        return float(f1(np.concatenate([counts(work, tagged(model, work, cut)) for work in works]).sum(axis=0)))

    def readings(self, name: str) -> list[str]:
        if name != "control":
            return [WINDOWS, WHOLE]
        if self.study.name == "mpnet":
            return [WINDOWS, APART, FIRST, LONGEST_SPAN, CUT, MEAN]
        return [WINDOWS, WINDOWS_512, WHOLE, APART, FIRST, LONGEST_SPAN, CUT]

    def test(self, name: str, model: PreTrainedModel, works: list[Encoded]) -> dict[str, Any]:
        """By reading: right, wrong and missed entities of each work, by bins of 512 tokens; of names; of names by distance from the first mention; seconds."""
        longer = lengthen(model, LONGEST, self.study.trained_length) if self.study.arms[name].table else model
        found, once = {}, ReadOnce(model)
        for reading in self.readings(name):
            reader = longer.eval() if reading == WHOLE else once
            began = once.clock()
            if reading in (FIRST, LONGEST_SPAN):
                entities = [joined(reader, work, longest=reading == LONGEST_SPAN) for work in works]
            elif reading == MEAN:
                entities = [averaged(reader, work) for work in works]
            else:
                entities = [tagged(reader, work, CUTS[reading]) for work in works]
            found[reading] = {
                "core_seconds": once.clock() - began,
                "works": {work.work.name: counts(work, own) for work, own in zip(works, entities)},
                "names": {work.work.name: counts(work, own, names=True) for work, own in zip(works, entities)},
                "mentions": {work.work.name: counts_by_mention(work, own) for work, own in zip(works, entities)},
            }
        return found


class ReadOnce:
    """A model that computes the same batch once."""

    def __init__(self, model: Callable[..., Any]):
        self.model, self.saved = model, 0.0
        self.outputs: dict[tuple[Any, ...], tuple[Any, float]] = {}

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        key = tuple(map(tuple, input_ids.tolist())), tuple(map(tuple, attention_mask.tolist()))
        if key in self.outputs:
            self.saved += self.outputs[key][1]
        else:
            began = time.process_time()
            output = self.model(input_ids=input_ids, attention_mask=attention_mask)
            self.outputs[key] = output, time.process_time() - began
        return self.outputs[key][0]

    def clock(self) -> float:
        """Seconds of a core, as if every batch had been computed."""
        return time.process_time() + self.saved


@torch.no_grad()
def logits_of(model: Callable[..., Any], pieces: list[Piece]) -> list[torch.Tensor]:
    """Of each piece, (tokens, tags), padding behind them."""
    found: list[torch.Tensor] = []
    with autocast():
        for start in range(0, len(pieces), 8):
            rows = pieces[start : start + 8]
            mask = padded([[1] * len(row.ids) for row in rows], 0)
            found += [*model(input_ids=padded([row.ids for row in rows], 0), attention_mask=mask).logits.float()]
    return found


def tagged(model: Callable[..., Any], work: Encoded, cut: Callable[[list[int]], list[Piece]]) -> list[Entity]:
    """The entities that a model finds: each word's tag is that of its first token, from the window in which that lies most central.

    Words that no window has are "O".
    """
    pieces = cut(work.ids)
    logits, where = logits_of(model, pieces), most_context(pieces)
    places = [where.get(start) for start in work.starts]
    return decode(["O" if place is None else TAGS[int(logits[place[0]][place[1]].argmax())] for place in places])


def joined(model: Callable[..., Any], work: Encoded, longest: bool) -> list[Entity]:
    """The entities of windows that overlap, of which one remains where several lie across each other.

    Args:
        longest: the longest, of equal length the one with the highest mean score, as `TokenClassificationPipeline` does with `stride`; otherwise
            the one of the first window.
    """
    pieces = CUTS[WINDOWS](work.ids)
    found: list[tuple[Entity, float]] = []
    for piece, logits in zip(pieces, logits_of(model, pieces), strict=True):
        token = {place: number for number, place in enumerate(piece.places) if place >= 0}
        words = [word for word, start in enumerate(work.starts) if start in token]
        best = [logits[token[work.starts[word]]].softmax(-1).max(-1) for word in words]
        for first, last, label in decode([TAGS[int(one.indices)] for one in best]):
            score = sum(float(one.values) for one in best[first : last + 1]) / (last - first + 1)
            found.append((Entity(words[first], words[last], label), score))
    kept: list[tuple[Entity, float]] = []
    for entity, score in sorted(found, key=lambda one: one[0].first):  # sorting keeps the order of windows
        before = kept[-1] if kept else None
        if before is None or entity.first > before[0].last:
            kept.append((entity, score))
        elif longest and (entity.last - entity.first, score) > (before[0].last - before[0].first, before[1]):
            kept[-1] = entity, score
    return [entity for entity, _ in kept]


def averaged(model: Callable[..., Any], work: Encoded) -> list[Entity]:
    """The entities of overlapping windows: a word's probabilities are the mean over those that have it, by its first token."""
    pieces = CUTS[WINDOWS](work.ids)
    sums = torch.zeros(len(work.ids), len(TAGS))
    for piece, logits in zip(pieces, logits_of(model, pieces), strict=True):
        own = torch.tensor(piece.places)
        sums.index_add_(0, own[own >= 0], logits[: len(own)][own >= 0].softmax(-1))
    return decode([TAGS[tag] for tag in sums[work.starts].argmax(-1).tolist()])


class Plan:
    """Which runs there are to make, and which are made."""

    def __init__(self, tagging: Tagging, runs: Runs):
        self.tagging, self.study, self.runs = tagging, tagging.study, runs

    def search(self, name: str) -> RateSearch:
        return RateSearch(self.runs, {"arm": name}, self.study.rates)

    def to_run(self, name: str, folds: list[int]) -> list[tuple[int, int]]:
        """Folds and seeds that have no run yet."""
        rate = self.study.arms[name].rate
        made = {
            (run["fold"], run["seed"])
            for run in self.runs.read()
            if "readings" in run and is_of(run, {"arm": name}) and run["rate"] == (rate or run["rate"])
        }
        planned = [(number, seed) for number in folds for seed in self.study.seeds.get(number, ())]
        return [one for one in planned if one not in made]

    def run(self, names: list[str], folds: list[int]) -> None:
        """Rates first, then folds, one after the other for all arms."""
        for name in names:
            arm = self.study.arms[name]
            if not (arm.rates_of or arm.rate):
                for rates in self.search(name).to_try(position_rates(self.tagging.model(name))):
                    self.record(name, 0, 0, rates)
        for number in folds:
            for name in names:
                for _, seed in self.to_run(name, [number]):
                    arm = self.study.arms[name]
                    rates = (arm.rate, None) if arm.rate else self.search(arm.rates_of or name).best()
                    self.record(name, number, seed, rates, tests=True)

    def record(self, name: str, number: int, seed: int, rates: Rates, tests: bool = False) -> None:
        """Fine-tune, measure, and add a line."""
        tagging, study = self.tagging, self.study
        trained, developed, tested = fold(tagging.works, number)
        epochs = study.epochs * study.arms[name].times if tests else study.rate_epochs
        began = time.process_time()
        model, losses = tagging.train(name, trained, seed, rates, epochs)
        line: Line = {"arm": name, "fold": number, "seed": seed, "rate": rates[0], "position_rate": rates[1]}
        line |= {"losses": losses, "core_seconds": time.process_time() - began}
        score = tagging.f1_of_pieces(model, developed)
        if tests:
            line |= {"developed": score, "readings": tagging.test(name, model, tested)}
        else:
            line |= {"searched": score}
        self.runs.add({**line, "bfloat16": has_bfloat16(torch.device("cpu"))})
        print(f"{name}, fold {number}, seed {seed}, rates {rates}: F1 of development {score:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--study", choices=STUDIES, default="minilm")
    parser.add_argument("--model", help="folder of the checkpoint; default: the packaged MiniLM")
    parser.add_argument("--arms", nargs="+", help="default: all")
    parser.add_argument("--folds", nargs="+", type=int, default=[*range(FOLDS)])
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent)
    parser.add_argument("--work_dir", type=Path, default=ROOT / "outputs" / "finetuning")
    parser.add_argument("--remaining", action="store_true")
    options = parser.parse_args()
    study = STUDIES[options.study]
    names = options.arms or [*study.arms]
    if unknown := {*names} - {*study.arms}:
        parser.error(f"no arms {', '.join(unknown)}; there are {', '.join(study.arms)}")
    if options.study != "minilm" and not options.model:
        parser.error(f"--study {options.study} needs --model")
    torch.set_num_threads(1)
    runs = Runs(options.output_dir / f"{study.name}.jsonl", {**study.settings, **circumstances()["versions"]})
    tagging = Tagging(study, options.data, options.model or packaged_minilm(), options.work_dir)
    plan = Plan(tagging, runs)
    if options.remaining:
        for name in names:
            left = plan.to_run(name, options.folds)
            print(f"{name}: {len(plan.search(name).tried())} rates tried, {len(left)} runs left")
        return
    plan.run(names, options.folds)


if __name__ == "__main__":
    main()
