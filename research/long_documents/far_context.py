"""Windows or the whole document, where what a place needs is hundreds of tokens before it?

    python research/long_documents/far_context.py --data DATA

DATA holds wikitext2/valid.txt and test.txt. Documents of 2,048 tokens (far_texts.py): articles with sentences between theirs, of which
some say what a name stands for, and later ones have the name and no hint of that. Two tasks:

- tags: what does the name at this place stand for?
- questions, by the functions of examples/run_qa.py: "Where was the frigate last seen?" needs a sentence that says which name is a
  frigate and another one that says where that name was seen; "Where was Becker last seen?" needs one sentence.

Checkpoints are fine-tuned for equal times of a core on documents of the first file, and tested on those of the second, which nothing was
trained on or converted with: in windows with a stride, in windows that each have the document's first tokens before them, with a longer table, and
converted, reading the whole document. F1 by distance, with intervals of differences over seeds and documents.

Every finished run is a line of runs.jsonl in results/far_context: the same command goes on where it was stopped.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from far_texts import KINDS, LEARNED, TESTED, Articles, Tagged, asked, tagged
from long_documents import file_name
from long_texts import read_articles, write_articles
from long_vectors import difference_cell
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoModelForQuestionAnswering, AutoTokenizer, PreTrainedModel, set_seed

from hf_posenc import convert, position_parameters
from hf_posenc._utils import as_markdown
from hf_posenc.conversion import lengthen
from hf_posenc.conversion.checkpoints import load_checkpoint
from hf_posenc.conversion.distillation import has_bfloat16


# What the example scripts are made of.
sys.path += [str(Path(__file__).parents[2] / name) for name in ("examples", "benchmarks", "research")]

from arguments import ScriptParser  # noqa: E402
from datasets import Dataset  # noqa: E402
from intervals import f1, resampled  # noqa: E402
from minilm import packaged_minilm  # noqa: E402
from recorded import Runs  # noqa: E402
from records import check_writable, write_json  # noqa: E402
from report import circumstances  # noqa: E402
from run_qa import Answers, QuestionAnsweringArguments, encode  # noqa: E402
from windows import Piece, most_context, padded, whole, windows  # noqa: E402


FILES = {"learned": "valid", "tested": "test"}
# Articles of the first file that a conversion's report is measured on, as in long_vectors.py.
HELD_OUT = 2
WINDOWS, BEHIND, LONGER = "windows", "windows behind the beginning", "longer table"
CONVERTED = ("t5", "deberta")
READ_WHOLE = (LONGER, *CONVERTED)
CONTESTANTS = {"tags": (WINDOWS, BEHIND, *READ_WHOLE), "questions": (WINDOWS, "t5")}
# Tokens from what is defined to where it is needed: from 0, of what is needed there alone.
BANDS = ((0, 1), (1, 256), (256, 512), (512, 1024), (1024, 2048))
IGNORED = -100
# Questions are learned in stages: until which share of the time, in documents of how many tokens. In the first stage an answer needs
# one place: what needs two is not learned before that.
QUESTION_STAGES = ((0.5, 64), (0.75, 256))


@dataclass
class FarArguments:
    """What is learned, by what."""

    data: str = field(metadata={"help": "Folder with wikitext2/valid.txt and test.txt."})
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint. Default: the packaged MiniLM."}
    )
    output_dir: str = field(
        default=str(Path(__file__).parent / "results" / "far_context"), metadata={"help": "Folder for results."}
    )
    work_dir: str = field(default="outputs/far_context", metadata={"help": "Folder for conversions."})
    tasks: list[str] = field(default_factory=lambda: [*CONTESTANTS], metadata={"help": "Of tags, questions."})
    contestants: list[str] = field(
        default_factory=lambda: [*CONTESTANTS["tags"]],
        metadata={
            "help": f"Of {'; '.join(CONTESTANTS['tags'])}; questions are asked of {' and '.join(CONTESTANTS['questions'])}."
        },
    )
    seeds: list[int] = field(default_factory=lambda: [42, 43, 44], metadata={"help": "A run for each."})
    length: int = field(default=2048, metadata={"help": "Tokens of a document at most, special tokens counted."})
    window: int = field(
        default=512, metadata={"help": "tags: tokens of a window; each begins in the middle of the one before."}
    )
    beginning: int = field(
        default=128, metadata={"help": "tags: tokens of a document's beginning before each window."}
    )
    question_window: int = field(
        default=384, metadata={"help": "questions: tokens of a window, the question counted."}
    )
    doc_stride: int = field(default=128, metadata={"help": "questions: tokens that neighbouring windows share."})
    names: int = field(default=6, metadata={"help": "tags: names that a document defines."})
    mentions: int = field(default=6, metadata={"help": "tags: sentences with each name, behind its definition."})
    learned_length: int = field(default=1024, metadata={"help": "Tokens of a document that is trained on at most."})
    short: int = field(default=128, metadata={"help": "tags: training begins with documents of so many tokens."})
    short_share: float = field(default=0.6, metadata={"help": "tags: share of the time on those."})
    minutes: float = field(default=2.0, metadata={"help": "tags: fine-tuning of each run, minutes of a core."})
    question_minutes: float = field(default=6.0, metadata={"help": "questions: the same."})
    max_steps: int | None = field(default=None, metadata={"help": "The same in steps, in place of minutes."})
    learning_rate: float = field(default=3e-4, metadata={"help": "Highest learning rate; it falls to 0."})
    head_learning_rate: float = field(default=1e-3, metadata={"help": "The same, of the head and of positions."})
    trained_length: int | None = field(
        default=None, metadata={"help": "As for `hf-posenc convert`. Default: 128 for the packaged MiniLM."}
    )
    conversion_steps: int = field(default=160, metadata={"help": "Steps of distillation of a conversion."})
    tested: int | None = field(default=None, metadata={"help": "Documents to test on. Default: all articles."})

    def __post_init__(self):
        if unknown := [one for one in self.tasks if one not in CONTESTANTS]:
            raise ValueError(f"unknown tasks {', '.join(unknown)}; there are {', '.join(CONTESTANTS)}")
        if unknown := [one for one in self.contestants if one not in CONTESTANTS["tags"]]:
            raise ValueError(f"unknown contestants {', '.join(unknown)}; there are {', '.join(CONTESTANTS['tags'])}")
        if self.window - self.beginning < 8 or min(self.length, self.learned_length) <= self.window:
            raise ValueError("a document must have more tokens than a window, and a window more than the beginning")
        steps = 1 if self.max_steps is None else self.max_steps
        if (
            min(steps, self.names, self.mentions) < 1
            or not min(self.minutes, self.question_minutes) > 0
            or min(self.seeds) < 0
        ):
            raise ValueError("minutes, max_steps, names and mentions must be greater than 0, and seeds not negative")


class Tagger(nn.Module):
    """A linear head on the last states."""

    def __init__(self, encoder: PreTrainedModel, tags: int):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.config.hidden_size, tags)

    def forward(self, rows: list[list[int]]) -> torch.Tensor:
        """Logits (rows, tokens, tags)."""
        mask = padded([[1] * len(row) for row in rows])
        ids = padded(rows, self.encoder.config.pad_token_id or 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16(self.encoder.device)):
            states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return self.head(states.float())


def band_of(distance: int) -> int:
    return next(number for number, (low, high) in enumerate(BANDS) if low <= distance < high)


@dataclass
class Run:
    """A contestant, fine-tuned with a seed and tested.

    Attributes:
        counts: right and asked of each document of the test, by band; of questions the first band is those that need one place.
        losses: mean loss of each tenth of the steps.
    """

    task: str
    contestant: str
    seed: int
    steps: int
    core_seconds: float
    losses: list[float]
    counts: list[list[list[int]]]


class Contest:
    """The text, and the models that are fine-tuned on it."""

    def __init__(self, arguments: FarArguments):
        self.arguments = arguments
        self.source = arguments.model_name_or_path or packaged_minilm()
        self.tokenizer = AutoTokenizer.from_pretrained(self.source)
        trained = arguments.trained_length or (None if arguments.model_name_or_path else 128)
        self.trained_length = load_checkpoint(self.source, self.tokenizer, trained_length=trained).trained_length
        self.files = {part: Path(arguments.data) / "wikitext2" / f"{name}.txt" for part, name in FILES.items()}
        self.learned, self.tested = (
            Articles(self.files[part], self.tokenizer, arguments.length) for part in ("learned", "tested")
        )
        self.documents = len(self.tested) if arguments.tested is None else min(arguments.tested, len(self.tested))

    def converted(self, scheme: str) -> Path:
        """Folder of a conversion, made if it is not there, of articles of the first file."""
        arguments, folder = self.arguments, Path(self.arguments.work_dir)
        output = folder / "conversions" / file_name(scheme)
        if not output.is_dir():
            texts = read_articles(self.files["learned"], self.tokenizer.unk_token)
            parts = {"held_out": texts[:HELD_OUT], "learned": texts[HELD_OUT:]}
            for name, own in parts.items():
                write_articles(folder / "texts" / name, own)
            convert(
                self.source,
                scheme,
                text=[folder / "texts" / "learned"],
                held_out=[folder / "texts" / "held_out"],
                trained_length=self.trained_length,
                max_length=arguments.length,
                max_steps=arguments.conversion_steps,
                seed=0,
                output=output,
                resume=True,
            )
        return output

    def model(self, contestant: str, kind: type) -> PreTrainedModel:
        """A checkpoint with a new head or none, without dropout, for which kernels of attention are slow on CPUs."""
        source = self.converted(contestant) if contestant in CONVERTED else self.source
        model = kind.from_pretrained(source, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
        return lengthen(model, self.arguments.length, self.trained_length) if contestant == LONGER else model

    def told(self, task: str, article: list, length: int, wording, drawn: random.Random, articles: Articles) -> list:
        """A document of at most `length` tokens, special tokens and those of a question not counted."""
        share = length / self.arguments.length
        names, mentions = (
            max(min(whole, least), round(whole * min(1.0, 2 * share)))
            for whole, least in ((self.arguments.names, 4), (self.arguments.mentions, 2))
        )
        if task == "questions":
            names, mentions = min(names, len(KINDS)), 1
        return articles.told(article, length, names, mentions, wording, drawn, places=task == "questions")

    def train(
        self, model: nn.Module, loss_of: Callable[[float], torch.Tensor], minutes: float
    ) -> tuple[int, float, list[float]]:
        """AdamW without dropout, rates that rise for five steps and fall to 0: steps, seconds of a core, mean losses of tenths."""
        arguments = self.arguments
        positions = {*position_parameters(model).values()}
        fast = [
            one
            for name, one in model.named_parameters()
            if one in positions or name.startswith(("head.", "qa_outputs."))
        ]
        others = [one for one in model.parameters() if not any(one is other for other in fast)]
        groups = [
            {"params": others, "highest": arguments.learning_rate},
            {"params": fast, "highest": arguments.head_learning_rate},
        ]
        optimizer = torch.optim.AdamW(groups, lr=arguments.learning_rate, fused=True)
        began, losses = time.process_time(), []
        model.train()
        while True:
            seconds = time.process_time() - began
            spent = len(losses) / arguments.max_steps if arguments.max_steps else seconds / (60 * minutes)
            if spent >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = group["highest"] * min(1.0, 1.5 * (1 - spent), (len(losses) + 1) / 5)
            loss = loss_of(spent)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        tenths = [*map(float, map(np.mean, np.array_split(losses, min(10, len(losses)))))]
        return len(losses), seconds, tenths

    def lengths(self, task: str, spent: float) -> tuple[int, int]:
        """Tokens of a document that is trained on, and documents (of questions, rows) of a step; at last one of `learned_length`."""
        arguments = self.arguments
        stages = {"tags": ((arguments.short_share, arguments.short),), "questions": QUESTION_STAGES}[task]
        length = next((tokens for until, tokens in stages if spent < until), arguments.learned_length)
        return length, max(arguments.learned_length // length, 1)

    def run(self, task: str, contestant: str, seed: int) -> Run:
        """Fine-tune and test."""
        set_seed(seed)
        one = {"tags": self.tags, "questions": self.questions}[task]
        return Run(task, contestant, seed, *one(contestant, random.Random(seed)))

    def cut(self, contestant: str, overlap: bool) -> Callable[[list[int]], list[Piece]]:
        """What is read at once; windows that overlap begin in the middle of the one before, the document's beginning not counted."""
        size, beginning = self.arguments.window, self.arguments.beginning
        return {
            WINDOWS: partial(windows, size=size, shared=overlap * size // 2),
            BEHIND: partial(windows, size=size, shared=overlap * (size - beginning) // 2, beginning=beginning),
        }.get(contestant, whole)

    def tags(self, contestant: str, drawn: random.Random) -> tuple[int, float, list[float], list]:
        model = Tagger(self.model(contestant, AutoModel), len(KINDS))
        cut = self.cut(contestant, overlap=False)

        def loss_of(spent: float) -> torch.Tensor:
            length, number = self.lengths("tags", spent)
            rows, wanted = [], []
            for _ in range(number):
                told = self.told(
                    "tags", self.learned.anywhere(length, drawn), length - 2, LEARNED, drawn, self.learned
                )
                document = tagged(told, self.learned)
                for piece in cut(document.ids):
                    rows.append(piece.ids)
                    wanted.append([document.kinds.get(place, IGNORED) for place in piece.places])
            logits = model(rows)
            return cross_entropy(logits.flatten(0, 1), padded(wanted, IGNORED).flatten(), ignore_index=IGNORED)

        trained, cut = self.train(model, loss_of, self.arguments.minutes), self.cut(contestant, overlap=True)
        return *trained, [self.test_tags(model, cut, document) for document in self.tested_tags]

    @cached_property
    def tested_tags(self) -> list[Tagged]:
        """A document of each article of the test."""
        drawn, length = random.Random(0), self.arguments.length
        return [
            tagged(
                self.told("tags", self.tested.beginning(number, length), length - 2, TESTED, drawn, self.tested),
                self.tested,
            )
            for number in range(self.documents)
        ]

    @torch.no_grad()
    def test_tags(self, model: Tagger, cut: Callable, document: Tagged) -> list[list[int]]:
        """Right and asked, by band."""
        pieces = cut(document.ids)
        logits = [model([piece.ids])[0] for piece in pieces]
        where = most_context(pieces)
        counts = [[0, 0] for _ in BANDS]
        for place, kind in document.kinds.items():
            piece, token = where[place]
            band = counts[band_of(document.distances[place])]
            band[0] += int(logits[piece][token].argmax()) == kind
            band[1] += 1
        return counts

    def questions(self, contestant: str, drawn: random.Random) -> tuple[int, float, list[float], list]:
        arguments, length = self.arguments, self.arguments.length
        model = self.model(contestant, AutoModelForQuestionAnswering)
        size = length if contestant in READ_WHOLE else arguments.question_window
        encoded = partial(
            encode, tokenizer=self.tokenizer, length=size, doc_stride=arguments.doc_stride, max_query_length=32
        )

        def loss_of(spent: float) -> torch.Tensor:
            length, number = self.lengths("questions", spent)
            places = 1 if spent < QUESTION_STAGES[0][0] else 2
            rows: list[dict[str, Any]] = []
            while len(rows) < number:
                told = self.told(
                    "questions", self.learned.anywhere(length, drawn), length - 32, LEARNED, drawn, self.learned
                )
                found = [row for row in asked(told, self.learned, "") if row["places"] <= places]
                rows += drawn.sample(found, min(len(found), number - len(rows), 4))
            made = encoded(columns(rows))
            starts, ends = self.logits(model, made)
            wanted = torch.tensor(made["start_positions"]), torch.tensor(made["end_positions"])
            return (cross_entropy(starts, wanted[0]) + cross_entropy(ends, wanted[1])) / 2

        trained = self.train(model, loss_of, arguments.question_minutes)
        return *trained, self.test_questions(model, encoded)

    def logits(self, model: PreTrainedModel, made: dict[str, list]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the first and of the last token, (windows, tokens)."""
        inputs = {name: padded(made[name]) for name in ("input_ids", "attention_mask", "token_type_ids")}
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16(model.device)):
            output = model(**inputs)
        hidden = inputs["attention_mask"] == 0
        return tuple(one.float().masked_fill(hidden, -1e4) for one in (output.start_logits, output.end_logits))

    @cached_property
    def tested_questions(self) -> list[list[dict[str, Any]]]:
        """Of a document of each article, a question of one place and one of two, of the same name."""
        drawn, length = random.Random(0), self.arguments.length
        found = []
        for number in range(self.documents):
            told = self.told(
                "questions", self.tested.beginning(number, length), length - 32, TESTED, drawn, self.tested
            )
            found.append(asked(told, self.tested, str(number)))
        return found

    @torch.no_grad()
    def test_questions(self, model: PreTrainedModel, encoded: Callable) -> list[list[list[int]]]:
        """Exactly right and asked, by band, of each document."""
        found = []
        for rows in self.tested_questions:
            made = encoded(columns(rows))
            parts = [
                self.logits(model, {name: made[name][at : at + 8] for name in made})
                for at in range(0, len(made["id"]), 8)
            ]
            width = max(one.shape[1] for one, _ in parts)
            starts, ends = (
                np.concatenate(
                    [
                        nn.functional.pad(part[side], (0, width - part[side].shape[1]), value=-1e4).numpy()
                        for part in parts
                    ]
                )
                for side in (0, 1)
            )
            answers = Answers(Dataset.from_list(rows), Dataset.from_dict(made), QuestionAnsweringArguments())
            answers.choose(starts, ends)
            counts = [[0, 0] for _ in BANDS]
            for row in rows:
                band = counts[band_of(row["distance"])]
                band[0] += answers.predicted[row["id"]] == row["answers"]["text"][0]
                band[1] += 1
            found.append(counts)
        return found


def columns(rows: list[dict[str, Any]]) -> dict[str, list]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def band_names(task: str) -> list[str]:
    near = {"tags": "in the definition", "questions": "one place"}[task]
    return [near, *(f"{low:,}–{high:,}" if low > 1 else f"below {high:,}" for low, high in BANDS[1:])]


def beyond(window: int) -> list[int]:
    """Bands that no window reaches over."""
    return [number for number, (low, _) in enumerate(BANDS) if low >= window]


def counted(runs: list[Run], bands: list[int]) -> np.ndarray:
    """(seeds, documents, 3): found, wrong and missed, as intervals.py takes them; what is not found is both wrong and missed."""
    pairs = np.array([run.counts for run in runs])[:, :, bands].sum(axis=2)
    missed = pairs[..., 1] - pairs[..., 0]
    return np.stack([pairs[..., 0], missed, missed], axis=-1)


def summary(runs: list[Run], arguments: FarArguments) -> dict[str, Any]:
    """By task and contestant: F1 by band, and how much more that is than that of windows."""
    found: dict[str, Any] = {}
    for task in CONTESTANTS:
        by_contestant = {
            name: sorted(own, key=lambda one: one.seed)
            for name in CONTESTANTS[task]
            if (own := [run for run in runs if (run.task, run.contestant) == (task, name)])
        }
        if WINDOWS not in by_contestant:
            continue
        window = arguments.window if task == "tags" else arguments.question_window
        parts = {name: [number] for number, name in enumerate(band_names(task))}
        parts |= {"beyond the window": beyond(window), "all": [*range(1, len(BANDS))]}
        found[task] = {}
        for name, own in by_contestant.items():
            entry: dict[str, Any] = {
                "seeds": [run.seed for run in own],
                "steps": statistics.fmean(run.steps for run in own),
                "core_seconds": statistics.fmean(run.core_seconds for run in own),
                "bands": {},
            }
            for part, bands in parts.items():
                counts = counted(own, bands)
                entry["bands"][part] = {
                    "asked": int(counts[0, :, :2].sum()),
                    "f1": [float(one) for one in f1(counts.sum(axis=1))],
                    "less": {
                        other: difference(
                            *(counted([run for run in one if run.seed in seeds], bands) for one in (own, theirs))
                        )
                        for other, theirs in by_contestant.items()
                        if other != name and (seeds := {run.seed for run in own} & {run.seed for run in theirs})
                    },
                }
            found[task][name] = entry
    return found


def difference(own: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """How much higher the mean F1 over seeds is, with the interval of that; seeds and documents resampled together."""
    found = resampled(own, other, draws=2000)
    return {"mean": found.mean, "interval": [found.low, found.high]}


def table(task: str, found: dict[str, Any]) -> str:
    """Markdown: mean F1 over seeds, and in brackets how much more that is than that of windows, with its interval."""
    rows = []
    for name, own in found.items():
        cells = []
        for one in own["bands"].values():
            less = one["less"].get(WINDOWS)
            cells.append(
                f"{statistics.fmean(one['f1']):.2f}" + (f" {difference_cell(less, digits=2)}" if less else "")
            )
        rows.append([name if name not in CONVERTED else f"converted to `{name}`", f"{own['steps']:.0f}", *cells])
    asked = [f"{one['asked']:,}" for one in next(iter(found.values()))["bands"].values()]
    heading = [f"{task}, F1", "steps", *next(iter(found.values()))["bands"]]
    return as_markdown(heading, [["*asked*", "", *asked], *rows])


def tables(found: dict[str, Any]) -> str:
    """A table for each task."""
    return "\n\n".join(table(task, own) for task, own in found.items())


def settings_of(arguments: FarArguments, contest: Contest) -> dict[str, Any]:
    """What a run depends on, apart from task, contestant and seed."""
    kept = asdict(arguments)
    for name in ("data", "output_dir", "work_dir", "tasks", "contestants", "seeds"):
        del kept[name]
    return kept | {"tested": contest.documents}


def main() -> None:
    try:
        [arguments] = ScriptParser((FarArguments,)).parse()
        folder = Path(arguments.output_dir)
        check_writable(folder)
        contest = Contest(arguments)
        settings = settings_of(arguments, contest)
        recorded = Runs(folder / "runs.jsonl", settings)
    except (OSError, ValueError, TypeError, ImportError) as error:
        sys.exit(f"error: {error}")
    for seed in arguments.seeds:
        for task in arguments.tasks:
            for contestant in CONTESTANTS[task]:
                done = {(run["task"], run["contestant"], run["seed"]) for run in recorded.read()}
                if (task, contestant, seed) in done or contestant not in arguments.contestants:
                    continue
                run = contest.run(task, contestant, seed)
                recorded.add(asdict(run))
                print(f"{task}, {contestant}, seed {seed}: {run.steps} steps, loss {run.losses[-1]:.3f}", flush=True)
    runs = [Run(**run) for run in recorded.read()]
    found = summary(runs, arguments)
    conversions = {
        scheme: json.loads(file.read_text(encoding="utf-8"))["seconds"]
        for scheme in CONVERTED
        if (file := Path(arguments.work_dir) / "conversions" / scheme / "conversion.json").is_file()
    }
    write_json(
        folder / "results.json",
        {**circumstances(), "settings": settings, "conversion_seconds": conversions, "tasks": found},
    )
    print(f"\n{tables(found)}\n\nwritten to {folder}")


if __name__ == "__main__":
    main()
