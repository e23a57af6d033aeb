"""A task with a head that needs length: which paragraphs of a document are foreign to it?

    python examples/long_classification.py --train_file wikitext2/valid.txt --test_file wikitext2/test.txt \\
        --converted outputs/long_documents/conversions/absolute+t5

A document begins with a paragraph of a Wikipedia article; of those that follow, half are of that article and half of another,
in random order. Every token is labelled with whether its paragraph is foreign, which only the beginning tells: a chunk
without it, or a text that was cut off, cannot. Models are fine-tuned for equal minutes on documents of 256, 512
and 1,024 tokens, and all are tested on the same documents of the greatest length; what a model does not read counts as a guess.

Every finished run is a file of its own in the output folder: the same command goes on where it was stopped. Then come
`results.json` and `results.md`.
"""

import json
import platform
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from arguments import ScriptParser
from long_texts import ids_of, read_articles
from minilm import packaged_minilm
from records import as_markdown, check_writable, same_settings, write_json, write_whole
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    set_seed,
)

from hf_posenc import position_parameters
from hf_posenc.conversion import extend
from hf_posenc.conversion.healing import has_bfloat16
from hf_posenc.inspection import longest_sequence


# Tokens of a paragraph; labels that the loss leaves out.
SHORTEST, LONGEST = 24, 96
IGNORED = -100
BATCH_TOKENS = 2048
# The longest texts that the checkpoint reads well, of whose rows longer tables are made.
TRAINED_LENGTH = 128
MODELS = ("stock", "absolute", "t5", "absolute+t5", "absolute+t5 converted")


@dataclass
class ClassificationArguments:
    """What is learned, by what."""

    train_file: str = field(metadata={"help": "WikiText file to train on."})
    test_file: str = field(metadata={"help": "WikiText file to test on."})
    converted: str | None = field(default=None, metadata={"help": "Folder of the model that was converted first."})
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint. Default: the packaged MiniLM."}
    )
    output_dir: str = field(default="outputs/long_classification", metadata={"help": "Folder for all results."})
    models: list[str] = field(default_factory=lambda: [*MODELS], metadata={"help": f"Of {', '.join(MODELS)}."})
    lengths: list[int] = field(default_factory=lambda: [256, 512, 1024], metadata={"help": "Tokens to train on."})
    seeds: list[int] = field(default_factory=lambda: [42, 43, 44], metadata={"help": "A run for each."})
    minutes: float = field(default=1.0, metadata={"help": "Training of each run."})
    max_steps: int | None = field(default=None, metadata={"help": "Training of each run, in place of minutes."})
    learning_rate: float = field(default=2e-4, metadata={"help": "Highest learning rate; it falls to 0."})
    position_learning_rate: float = field(default=0.01, metadata={"help": "The same, of position parameters."})
    tested: int = field(default=64, metadata={"help": "Number of documents to test on."})

    def __post_init__(self):
        if unknown := [one for one in self.models if one not in MODELS]:
            raise ValueError(f"unknown models {', '.join(unknown)}; there are {', '.join(MODELS)}")
        if "absolute+t5 converted" in self.models and self.converted is None:
            raise ValueError("name the folder of the model that was converted with --converted, or other --models")
        if min(self.lengths) < 2 * LONGEST:
            raise ValueError(f"lengths must be at least {2 * LONGEST} tokens, got {min(self.lengths)}")
        if max(self.lengths) < 5 * LONGEST:  # so that there are labels in each quarter
            raise ValueError(f"the greatest length must be at least {5 * LONGEST} tokens, got {max(self.lengths)}")
        if min(self.tested, *self.seeds, *self.lengths) < 1 or not self.minutes > 0:
            raise ValueError("minutes, tested, seeds and lengths must be greater than 0")


@dataclass
class Document:
    """Token ids with [CLS] and [SEP], and a label for each: 1 in foreign paragraphs, `IGNORED` in the first and at the ends."""

    ids: list[int]
    labels: list[int]


def paragraphs_of(articles: list[list[str]], tokenizer) -> list[list[list[int]]]:
    """The tokens of each article's paragraphs that are long enough, at most `LONGEST` of each; of articles with two at least."""
    found = [
        [ids[:LONGEST] for ids in (ids_of(tokenizer, text) for text in article) if len(ids) >= SHORTEST]
        for article in articles
    ]
    return [article for article in found if len(article) > 1]


def mixed(articles: list[list[list[int]]], length: int, tokenizer, drawn: random.Random) -> Document:
    """A document of `length` tokens: the first paragraph of an article, then others of it and of another one."""
    own, other = drawn.sample(articles, 2)
    first, own = own[0], own[1:]
    ids, labels = [tokenizer.cls_token_id, *first], [IGNORED] * (1 + len(first))
    sources = {0: _without_end(own, drawn), 1: _without_end(other, drawn)}
    while len(ids) < length - 1:
        label = drawn.randrange(2)
        paragraph = next(sources[label])
        ids += paragraph
        labels += [label] * len(paragraph)
    return Document([*ids[: length - 1], tokenizer.sep_token_id], [*labels[: length - 1], IGNORED])


def _without_end(paragraphs: list[list[int]], drawn: random.Random):
    """Paragraphs in random order, all of them before any comes again."""
    while True:
        yield from drawn.sample(paragraphs, len(paragraphs))


def as_batch(documents: list[Document]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, (documents, length) each."""
    return torch.tensor([one.ids for one in documents]), torch.tensor([one.labels for one in documents])


@dataclass
class Run:
    """A model, trained at a length, with a seed.

    Attributes:
        accuracy: on the labelled tokens of the test's documents.
        by_depth: the same in each quarter of a document.
        read: how many tokens of a document it reads.
    """

    model: str
    length: int
    seed: int
    steps: int
    seconds: float
    accuracy: float
    by_depth: list[float]
    read: int


class Task:
    """The text, and the models that are fine-tuned on it."""

    def __init__(self, arguments: ClassificationArguments):
        self.arguments = arguments
        self.source = arguments.model_name_or_path or packaged_minilm()
        self.tokenizer = AutoTokenizer.from_pretrained(self.source)
        unknown = self.tokenizer.unk_token
        self.learned, tested = (
            paragraphs_of(read_articles(file, unknown), self.tokenizer)
            for file in (arguments.train_file, arguments.test_file)
        )
        for file, articles in ((arguments.train_file, self.learned), (arguments.test_file, tested)):
            if len(articles) < 2:
                raise ValueError(
                    f"{file} has {len(articles)} articles of two paragraphs of {SHORTEST} tokens; it takes two"
                )
        self.longest, drawn = max(arguments.lengths), random.Random(0)
        self.tested = [mixed(tested, self.longest, self.tokenizer, drawn) for _ in range(arguments.tested)]
        self.config = AutoConfig.from_pretrained(self.source)
        if arguments.converted:
            reach = longest_sequence(AutoConfig.from_pretrained(arguments.converted))
            if reach and reach < self.longest:
                raise ValueError(f"{arguments.converted} reads {reach} tokens, and documents have {self.longest}")

    def is_run(self, model: str, length: int) -> bool:
        """Whether a model is trained at a length: stock as long as its table is, the others where they differ from it."""
        table = longest_sequence(self.config)
        return not table or (length <= table if model == "stock" else True)

    def model(self, name: str) -> PreTrainedModel:
        if name == "absolute+t5 converted":
            return AutoModelForTokenClassification.from_pretrained(self.arguments.converted, num_labels=2)
        flags = {} if name in ("stock", "absolute") else {"position_scheme": name, "position_per_layer": True}
        if name not in ("absolute", "absolute+t5"):
            return AutoModelForTokenClassification.from_pretrained(self.source, num_labels=2, **flags)
        longer = extend(AutoModel.from_pretrained(self.source), self.longest, TRAINED_LENGTH)
        config = AutoConfig.from_pretrained(
            self.source, num_labels=2, max_position_embeddings=longer.config.max_position_embeddings, **flags
        )
        found = AutoModelForTokenClassification.from_config(config)
        found.base_model.load_state_dict(longer.state_dict(), strict=False)
        return found

    def run(self, name: str, length: int, seed: int) -> Run:
        """Fine-tune and test."""
        set_seed(seed)
        model = self.model(name).train()
        seconds, steps = self.train(model, length, seed)
        read = min(length, self.longest) if name == "stock" else self.longest
        accuracy, by_depth = self.test(model.eval(), read)
        return Run(name, length, seed, steps, seconds, accuracy, by_depth, read)

    def train(self, model: PreTrainedModel, length: int, seed: int) -> tuple[float, int]:
        """AdamW, rates that fall to 0 with the budget; the same documents for all models. Seconds and steps."""
        arguments, drawn = self.arguments, random.Random(seed)
        positions = {*position_parameters(model).values()}
        others = [one for one in model.parameters() if one not in positions]
        groups = [{"params": others, "highest": arguments.learning_rate}]
        if positions:
            groups.append({"params": [*positions], "highest": arguments.position_learning_rate})
        optimizer = torch.optim.AdamW(groups, lr=arguments.learning_rate)
        began, step = time.monotonic(), 0
        while True:
            seconds = time.monotonic() - began
            spent = step / arguments.max_steps if arguments.max_steps else seconds / (60 * arguments.minutes)
            if spent >= 1:
                return seconds, step
            for group in optimizer.param_groups:
                group["lr"] = group["highest"] * (1 - spent) * min(1, (step + 1) / 10)
            rows = max(1, BATCH_TOKENS // length)
            ids, labels = as_batch([mixed(self.learned, length, self.tokenizer, drawn) for _ in range(rows)])
            with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16(model.device)):
                logits = model(input_ids=ids).logits
            cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1

    @torch.no_grad()
    def test(self, model: PreTrainedModel, read: int) -> tuple[float, list[float]]:
        """Accuracy over all labelled tokens, and in each quarter; a token that is not read counts as half right."""
        right, labelled = [], []
        for document in self.tested:
            ids, labels = as_batch([document])
            with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16(model.device)):
                guesses = model(input_ids=ids[:, :read]).logits[0].argmax(-1)
            hits = torch.full((self.longest,), 0.5)
            hits[: len(guesses)] = (guesses == labels[0, : len(guesses)]).float()
            right.append(hits)
            labelled.append(labels[0] != IGNORED)
        hits, counts = torch.stack(right), torch.stack(labelled)
        quarters = zip(hits.chunk(4, dim=1), counts.chunk(4, dim=1))
        return hits[counts].mean().item(), [own[there].mean().item() for own, there in quarters]


def table(runs: list[Run]) -> str:
    """Markdown: mean and standard deviation over the seeds, a row for each model and length."""
    depths = ["first quarter", "second", "third", "last"]
    rows = []
    for name, length in sorted(
        {(run.model, run.length) for run in runs}, key=lambda one: (one[1], MODELS.index(one[0]))
    ):
        own = [run for run in runs if (run.model, run.length) == (name, length)]
        accuracies = [run.accuracy for run in own]
        spread = f" ± {statistics.stdev(accuracies):.3f}" if len(own) > 1 else ""
        cells = [f"{statistics.fmean(run.by_depth[part] for run in own):.3f}" for part in range(4)]
        steps = f"{statistics.fmean(run.steps for run in own):.0f}"
        mean = f"{statistics.fmean(accuracies):.3f}{spread}"
        rows.append([name, f"{length:,}", mean, str(len(own)), *cells, steps])
    return as_markdown(["model", "trained at", "accuracy", "seeds", *depths, "steps"], rows) + "\n"


def settings_of(arguments: ClassificationArguments) -> dict[str, Any]:
    """What a run depends on, apart from model, length and seed."""
    kept = asdict(arguments)
    for name in ("models", "seeds", "output_dir", "converted", "lengths"):
        del kept[name]
    files = {name: Path(kept[name]).name for name in ("train_file", "test_file")}
    return kept | files | {"longest": max(arguments.lengths)}


def main() -> None:
    try:
        [arguments] = ScriptParser((ClassificationArguments,)).parse()
        folder = Path(arguments.output_dir)
        check_writable(folder)
        task = Task(arguments)
        settings = settings_of(arguments)
        same_settings(folder / "settings.json", settings)
        write_json(folder / "settings.json", settings)
    except (OSError, ValueError, TypeError, ImportError) as error:
        sys.exit(f"error: {error}")
    for seed in arguments.seeds:
        for length in arguments.lengths:
            for name in arguments.models:
                file = folder / "runs" / f"{name.replace(' ', '_')}-{length}-seed{seed}.json"
                if file.exists() or not task.is_run(name, length):
                    continue
                run = task.run(name, length, seed)
                write_json(file, asdict(run))
                print(f"{name}, {length} tokens, seed {seed}: {run.accuracy:.3f} after {run.steps} steps", flush=True)
    runs = [Run(**json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob("runs/*.json"))]
    packages = ("hf_posenc", "transformers", "torch")
    versions = {"python": platform.python_version(), **{package: version(package) for package in packages}}
    write_json(
        folder / "results.json", {"settings": settings, "versions": versions, "runs": [asdict(run) for run in runs]}
    )
    write_whole(folder / "results.md", table(runs))
    print(f"\n{table(runs)}\nwritten to {folder}")


if __name__ == "__main__":
    main()
