"""Entities of whole works, tagged by models that were fine-tuned on pieces of 256 tokens: the study of plan.md.

    python research/finetuning/tagging.py --data DATA                  # hours; the same command goes on where it stopped
    python research/finetuning/tagging.py --data DATA --remaining      # what is still to be run, and nothing else
    python research/finetuning/tagging.py --data DATA --arms control --folds 0    # one arm on one fold: 10 minutes of a core

DATA holds litbank/*.tsv. A run is a line of runs.jsonl: of a rate, with its F1 on fold 0's works of development, or of a fold, with what was right, wrong
and missed in each of its works. Processes may share the work by arms; each run takes one thread. Conversions are folders in outputs/finetuning, made where they
are not there.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from litbank import FOLDS, TAGS, Encoded, Entity, counts, decode, fold, pieces_to_learn, read_works
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    get_linear_schedule_with_warmup,
    set_seed,
)

from hf_posenc import convert
from hf_posenc.conversion import extend
from hf_posenc.conversion.distillation import has_bfloat16
from hf_posenc.files import write_whole
from hf_posenc.training import tables_and_biases


ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / name) for name in ("examples", "benchmarks", "research", "research/long_documents")]

from long_texts import read_articles  # noqa: E402
from minilm import packaged_minilm  # noqa: E402
from recorded import Line, Runs  # noqa: E402
from report import circumstances  # noqa: E402
from windows import Piece, most_context, whole, windows  # noqa: E402


PIECE, LONGEST = 256, 4096
WINDOWS, WINDOWS_512, WHOLE = "windows of 256", "windows of 512", "whole"
CUTS: dict[str, Callable[[list[int]], list[Piece]]] = {
    WINDOWS: partial(windows, size=256, shared=127),
    WINDOWS_512: partial(windows, size=512, shared=255),
    WHOLE: whole,
}
# Beyond these, a rate at the end of its range is followed one step further.
RATES, POSITION_RATES = (1e-4, 2e-4, 4e-4), (0.003, 0.01, 0.03)
FIRST_POSITION_RATE = 0.01


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
    """

    scheme: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    table: bool = False
    times: float = 1.0
    rates_of: str | None = None


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
    "control, longer": Arm(table=True, times=2.0, rates_of="control"),
}
OF_MPNET = {"control": Arm(), "deberta": Arm("deberta"), "rope": Arm("rope")}


@dataclass(frozen=True)
class Study:
    """A checkpoint and how it is fine-tuned.

    Attributes:
        trained_length: number of tokens that its authors trained it with.
        seeds: by fold.
    """

    name: str
    arms: dict[str, Arm]
    seeds: dict[int, tuple[int, ...]]
    epochs: int
    trained_length: int
    batch: int = 8
    rate_epochs: int = 2

    @property
    def settings(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("epochs", "batch", "rate_epochs", "trained_length")}
        return {**own, "piece": PIECE, "rates": RATES, "position_rates": POSITION_RATES, "dropout": 0.1}


STUDIES = {
    "minilm": Study("minilm", ARMS, {number: (number,) for number in range(FOLDS)}, 6, 256),
    "mpnet": Study("mpnet", OF_MPNET, {0: (0, 1)}, 4, 384, rate_epochs=1),
}


def groups(model: PreTrainedModel, rate: float, position_rate: float | None) -> list[dict[str, Any]]:
    """As `PositionTrainer` groups them."""
    named = dict(model.named_parameters())
    positions = [named.pop(name) for name in tables_and_biases(model)]
    return [
        {"params": [one for one in named.values() if one.ndim > 1], "lr": rate, "weight_decay": 0.01},
        {"params": [one for one in named.values() if one.ndim <= 1], "lr": rate, "weight_decay": 0.0},
        {"params": positions, "lr": rate if position_rate is None else position_rate, "weight_decay": 0.0},
    ]


def padded(rows: list[list[int]], value: int) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16(torch.device("cpu")))


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
            texts = self.work_dir / "texts"
            articles = read_articles(self.data / "wikitext2" / "valid.txt", self.tokenizer.unk_token)
            write_whole({texts / f"{number:04}.txt": "\n".join(one) + "\n" for number, one in enumerate(articles)})
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
        self, name: str, works: list[Encoded], seed: int, rate: float, position_rate: float | None, epochs: float
    ) -> tuple[PreTrainedModel, list[float]]:
        """A fine-tuned model, and its mean loss of each epoch."""
        set_seed(seed)
        model = self.model(name).train()
        pieces = [piece for work in works for piece in pieces_to_learn(work, PIECE)]
        batch = self.study.batch
        per_epoch = math.ceil(len(pieces) / batch)
        steps = round(per_epoch * epochs)
        optimizer = torch.optim.AdamW(groups(model, rate, position_rate), fused=True)
        schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
        generator, losses = torch.Generator().manual_seed(seed), []
        order: list[int] = []
        for _ in range(steps):
            order = order or torch.randperm(len(pieces), generator=generator).tolist()
            chosen, order = [pieces[index] for index in order[:batch]], order[batch:]
            ids = padded([ids for ids, _ in chosen], self.tokenizer.pad_token_id)
            mask = padded([[1] * len(ids) for ids, _ in chosen], 0)
            with autocast():
                labels = padded([labels for _, labels in chosen], -100)
                loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        means = [sum(part) / len(part) for at in range(0, steps, per_epoch) if (part := losses[at : at + per_epoch])]
        return model.eval(), means

    def f1_of_pieces(self, model: PreTrainedModel, works: list[Encoded]) -> float:
        """Of pieces that do not overlap, as they are trained on."""
        cut = partial(windows, size=PIECE, shared=0)
        right, wrong, missed = (
            sum(column) for column in zip(*(row for work in works for row in counts(work, tagged(model, work, cut))))
        )
        return 2 * right / max(2 * right + wrong + missed, 1)

    def readings(self, name: str) -> list[str]:
        return (
            [WINDOWS, WINDOWS_512, WHOLE]
            if name.startswith("control") and self.study.name == "minilm"
            else [WINDOWS, WHOLE]
        )

    def test(self, name: str, model: PreTrainedModel, works: list[Encoded]) -> dict[str, Any]:
        """By reading: right, wrong and missed entities of each work, by bins of 512 tokens; of names; and seconds."""
        longer = extend(model, LONGEST, self.study.trained_length) if self.study.arms[name].table else model
        found = {}
        for reading in self.readings(name):
            reader = longer.eval() if reading == WHOLE else model
            began = time.process_time()
            entities = [tagged(reader, work, CUTS[reading]) for work in works]
            found[reading] = {
                "core_seconds": time.process_time() - began,
                "works": {work.work.name: counts(work, own) for work, own in zip(works, entities)},
                "names": {work.work.name: counts(work, own, names=True) for work, own in zip(works, entities)},
            }
        return found


@torch.no_grad()
def tagged(model: PreTrainedModel, work: Encoded, cut: Callable[[list[int]], list[Piece]]) -> list[Entity]:
    """The entities that a model finds: each word's tag is that of its first token, from the window in which that lies most central."""
    pieces = cut(work.ids)
    logits = []
    with autocast():
        for start in range(0, len(pieces), 8):
            rows = pieces[start : start + 8]
            mask = padded([[1] * len(row.ids) for row in rows], 0)
            logits += [*model(input_ids=padded([row.ids for row in rows], 0), attention_mask=mask).logits]
    where = most_context(pieces)
    return decode([TAGS[int(logits[piece][token].argmax())] for piece, token in map(where.get, work.starts)])


class Plan:
    """Which runs there are to make, and which are made."""

    def __init__(self, tagging: Tagging, runs: Runs):
        self.tagging, self.study, self.runs = tagging, tagging.study, runs

    def rates_to_try(self, name: str) -> Iterator[tuple[float, float | None]]:
        """Rates of fold 0 that have no run yet, one after the other: rates of the model at the first rate of positions, then of positions.

        What comes next depends on what was found: a rate at the end of its range is followed one step further.
        """
        has_tables = self.has_tables(name)
        position = FIRST_POSITION_RATE if has_tables else None
        yield from self._line(
            name, [(rate, position) for rate in RATES], lambda pair, by: (pair[0] * by, pair[1]), 2.0
        )
        if has_tables:
            rate = self.best(name)[0]
            middle = [(rate, position) for position in POSITION_RATES]
            yield from self._line(name, middle, lambda pair, by: (pair[0], pair[1] * by), 10 / 3)

    def _line(self, name: str, pairs: list, further: Callable, factor: float) -> Iterator[tuple[float, float | None]]:
        tried = self.tried(name)
        for pair in pairs:
            if pair not in tried:
                yield pair
        tried = self.tried(name)
        best = max(pairs, key=tried.__getitem__)
        if best in (pairs[0], pairs[-1]):
            beyond = further(best, factor if best == pairs[-1] else 1 / factor)
            beyond = tuple(float(f"{one:.3g}") if one else None for one in beyond)
            if beyond not in tried:
                yield beyond

    def tried(self, name: str) -> dict[tuple[float, float | None], float]:
        return {
            (run["rate"], run["position_rate"]): run["f1"]
            for run in self.runs.read()
            if run["study"] == self.study.name and run["arm"] == name and "f1" in run
        }

    def best(self, name: str) -> tuple[float, float | None]:
        tried = self.tried(name)
        return max(tried, key=tried.__getitem__)

    def has_tables(self, name: str) -> bool:
        return bool(tables_and_biases(self.tagging.model(name)))

    def to_run(self, name: str, folds: list[int]) -> list[tuple[int, int]]:
        """Folds and seeds that have no run yet."""
        made = {
            (run["fold"], run["seed"])
            for run in self.runs.read()
            if run["study"] == self.study.name and run["arm"] == name and "readings" in run
        }
        return [
            (number, seed)
            for number, seeds in self.study.seeds.items()
            if number in folds
            for seed in seeds
            if (number, seed) not in made
        ]

    def run(self, names: list[str], folds: list[int]) -> None:
        """Rates first, then folds, one after the other for all arms."""
        for name in names:
            if not self.study.arms[name].rates_of:
                for rate, position_rate in self.rates_to_try(name):
                    self.record(name, 0, 0, rate, position_rate)
        for number in folds:
            for name in names:
                for _, seed in self.to_run(name, [number]):
                    self.record(name, number, seed, *self.best(self.study.arms[name].rates_of or name), tests=True)

    def record(
        self, name: str, number: int, seed: int, rate: float, position_rate: float | None, tests: bool = False
    ) -> None:
        """Fine-tune, measure, and add a line."""
        tagging, study = self.tagging, self.study
        works = dict(zip(("trained", "developed", "tested"), fold(tagging.works, number)))
        if study.arms[name].steps is not None:
            tagging.converted(name)  # its time is in its report
        epochs = study.epochs * study.arms[name].times if tests else study.rate_epochs
        began = time.process_time()
        model, losses = tagging.train(name, works["trained"], seed, rate, position_rate, epochs)
        line: Line = {"study": study.name, "arm": name, "fold": number, "seed": seed, "rate": rate}
        line |= {"position_rate": position_rate, "losses": losses, "core_seconds": time.process_time() - began}
        developed = tagging.f1_of_pieces(model, works["developed"])
        if tests:
            line |= {"developed": developed, "readings": tagging.test(name, model, works["tested"])}
        else:
            line |= {"f1": developed}
        line["bfloat16"] = has_bfloat16(torch.device("cpu"))
        self.runs.add(line)
        print(
            f"{name}, fold {number}, seed {seed}, {rate}, {position_rate}: F1 of development {developed:.4f}",
            flush=True,
        )


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
            print(f"{name}: {len(plan.tried(name))} rates tried, {len(left)} runs left")
        return
    plan.run(names, options.folds)


if __name__ == "__main__":
    main()
