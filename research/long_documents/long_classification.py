"""A task with a head that needs length: which articles is a document made of?

    python research/long_documents/long_classification.py --text_file wikitext2/test.txt --converted outputs/long_documents/conversions

Every 256 tokens of a document are paragraphs of another Wikipedia article, and each of its articles is a label: a classifier
tells them from the mean of the last states. What a model does not read, it cannot label. The head starts as prototypes (Snell
et al. 2017), the encoder's vectors of a few paragraphs of each article, and is trained with the encoder for equal minutes on
documents of 256, 512 and 1,024 tokens. All are tested on the same documents of the greatest length, whose paragraphs are of
the same articles but were never trained on. The score is R-precision: of as many labels as are true, the most probable ones,
the share that is true.

Every finished run is a line of `runs.jsonl` in the output folder: the same command goes on where it was stopped. Then comes
`results.json`.
"""

import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from long_documents import chunks, file_name, truncated, whole
from long_texts import ids_of, read_articles
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, set_seed

from hf_posenc import position_parameters
from hf_posenc._utils import as_markdown
from hf_posenc.conversion import lengthen
from hf_posenc.conversion.distillation import has_bfloat16
from hf_posenc.inspection import longest_sequence


# What the example scripts are made of.
sys.path += [str(Path(__file__).parents[2] / name) for name in ("examples", "research")]

from arguments import ScriptParser  # noqa: E402
from minilm import packaged_minilm  # noqa: E402
from recorded import Runs  # noqa: E402
from records import check_writable, write_json  # noqa: E402


# Tokens of a paragraph, and the fewest paragraphs of an article: half of them are tested.
SHORTEST, LONGEST = 24, 128
PARAGRAPHS = 6
# Tokens of a document that are of one article.
SECTION = 256
# Paragraphs of an article that its prototype is made of, and the logit that a prototype gives its own article in the mean.
EXAMPLES, SHARPNESS = 2, 10.0
BATCH_TOKENS = 2048
QUARTERS = 4
# The longest texts that the checkpoint reads well: chunks are as long, and longer tables are made of as many rows.
TRAINED_LENGTH = 128
CONVERTED = " converted"
MODELS = ("truncated", "chunk mean", "absolute", "t5", "absolute+t5", "t5 converted", "absolute+t5 converted")


@dataclass
class ClassificationArguments:
    """What is learned, by what."""

    text_file: str = field(metadata={"help": "WikiText file, to train and to test on."})
    converted: str | None = field(
        default=None, metadata={"help": "Folder of converted models, as long_documents.py leaves it."}
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint. Default: the packaged MiniLM."}
    )
    output_dir: str = field(default="outputs/long_classification", metadata={"help": "Folder for all results."})
    models: list[str] = field(default_factory=lambda: [*MODELS], metadata={"help": f"Of {'; '.join(MODELS)}."})
    lengths: list[int] = field(default_factory=lambda: [256, 512, 1024], metadata={"help": "Tokens to train on."})
    seeds: list[int] = field(default_factory=lambda: [42, 43, 44], metadata={"help": "A run for each."})
    minutes: float = field(default=0.5, metadata={"help": "Training of each run."})
    max_steps: int | None = field(default=None, metadata={"help": "Training of each run, in place of minutes."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Highest learning rate; it falls to 0."})
    head_learning_rate: float = field(default=0.001, metadata={"help": "The same, of the head."})
    position_learning_rate: float = field(
        default=0.01, metadata={"help": "The same, of position parameters that start at zero."}
    )
    tested: int = field(default=48, metadata={"help": "Number of documents to test on."})

    def __post_init__(self):
        if unknown := [one for one in self.models if one not in MODELS]:
            raise ValueError(f"unknown models {', '.join(unknown)}; there are {'; '.join(MODELS)}")
        if self.converted is None and any(one.endswith(CONVERTED) for one in self.models):
            raise ValueError("name the folder of converted models with --converted, or other --models")
        if min(self.lengths) < SECTION:
            raise ValueError(f"lengths must be at least {SECTION} tokens, got {min(self.lengths)}")
        steps = 1 if self.max_steps is None else self.max_steps
        if min(self.tested, steps) < 1 or not self.minutes > 0 or min(self.seeds) < 0:
            raise ValueError("minutes, max_steps and tested must be greater than 0, and seeds not negative")


@dataclass
class Document:
    """Token ids with [CLS] and [SEP], and for each token the article that it is from; `None` at the ends."""

    ids: list[int]
    articles: list[int | None]

    def shares(self, number: int) -> torch.Tensor:
        """(number,): of each article, its share of the tokens."""
        inner = torch.tensor(self.articles[1:-1])
        return torch.bincount(inner, minlength=number) / len(inner)


def paragraphs_of(articles: list[list[str]], tokenizer) -> list[list[list[int]]]:
    """The tokens of each article's paragraphs that are long enough, at most `LONGEST` of each; of articles with enough of them."""
    found = [
        [ids[:LONGEST] for ids in (ids_of(tokenizer, text) for text in article) if len(ids) >= SHORTEST]
        for article in articles
    ]
    return [article for article in found if len(article) >= PARAGRAPHS]


def mixed(articles: list[list[list[int]]], length: int, tokenizer, drawn: random.Random) -> Document:
    """A document of `length` tokens: as many articles as there are sections in it, one after the other, each in paragraphs at random."""
    ids, sources = [tokenizer.cls_token_id], [None]
    chosen = drawn.sample(range(len(articles)), length // SECTION)
    for number, article in enumerate(chosen, start=1):
        end = length - 1 if number == len(chosen) else number * SECTION
        paragraphs = _shuffled(articles[article], drawn)
        while len(ids) < end:
            paragraph = next(paragraphs)[: end - len(ids)]
            ids += paragraph
            sources += [article] * len(paragraph)
    return Document([*ids, tokenizer.sep_token_id], [*sources, None])


def _shuffled(paragraphs: list[list[int]], drawn: random.Random) -> Iterator[list[int]]:
    """Paragraphs in random order, all of them before any comes again."""
    while True:
        yield from drawn.sample(paragraphs, len(paragraphs))


class Classifier(nn.Module):
    """A linear head on the mean of the last states; of a document in pieces, on the mean of theirs.

    Args:
        labels: number of articles.
        cut: a document's pieces, each with [CLS] and [SEP].
    """

    def __init__(self, encoder: PreTrainedModel, labels: int, cut=whole):
        super().__init__()
        self.encoder, self.cut = encoder, cut
        self.head = nn.Linear(encoder.config.hidden_size, labels)

    @torch.no_grad()
    def start_with(self, examples: list[list[list[int]]]) -> None:
        """Set the head to prototypes: what tells the mean vector of each article's examples from the mean of all articles.

        Args:
            examples: documents of each article.
        """
        self.eval()
        means = torch.stack([self.vectors(own).mean(dim=0) for own in examples])
        centre = means.mean(dim=0)
        weight = SHARPNESS * normalize(means - centre, dim=-1) / (means - centre).norm(dim=-1).mean()
        self.head.weight.copy_(weight)
        self.head.bias.copy_(-weight @ centre)

    def forward(self, documents: list[list[int]]) -> torch.Tensor:
        """Logits, (documents, labels)."""
        return self.head(self.vectors(documents))

    def vectors(self, documents: list[list[int]]) -> torch.Tensor:
        """The mean of the last states, (documents, width)."""
        pieces = [self.cut(document) for document in documents]
        rows = [torch.tensor(piece) for own in pieces for piece in own]
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        ids = pad_sequence(rows, batch_first=True, padding_value=self.encoder.config.pad_token_id or 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16(self.encoder.device)):
            states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        of_documents = states[mask.bool()].split([sum(map(len, own)) for own in pieces])
        return torch.stack([tokens.mean(dim=0) for tokens in of_documents])


@dataclass
class Run:
    """A model, trained at a length, with a seed.

    Attributes:
        precision: R-precision, mean over the test's documents.
        by_depth: of the labels that begin in each quarter of a document, the share that is among the most probable; None where
            none begins.
    """

    model: str
    length: int
    seed: int
    steps: int
    seconds: float
    precision: float
    by_depth: list[float | None]


class Task:
    """The text, and the models that are fine-tuned on it."""

    def __init__(self, arguments: ClassificationArguments):
        self.arguments = arguments
        self.source = arguments.model_name_or_path or packaged_minilm()
        self.tokenizer = AutoTokenizer.from_pretrained(self.source)
        found = paragraphs_of(read_articles(arguments.text_file, self.tokenizer.unk_token), self.tokenizer)
        self.labels, self.longest = len(found), max(arguments.lengths)
        if self.labels <= self.longest // SECTION:
            raise ValueError(
                f"{arguments.text_file} has {self.labels} articles of {PARAGRAPHS} paragraphs of {SHORTEST} tokens; documents of "
                f"{self.longest} tokens take more than {self.longest // SECTION}"
            )
        self.learned, held_out = [one[::2] for one in found], [one[1::2] for one in found]
        drawn = random.Random(0)
        self.tested = [mixed(held_out, self.longest, self.tokenizer, drawn) for _ in range(arguments.tested)]
        self.table = longest_sequence(AutoConfig.from_pretrained(self.source))
        for name in (one for one in arguments.models if one.endswith(CONVERTED)):
            reach = longest_sequence(AutoConfig.from_pretrained(self.folder(name)))
            if reach and reach < self.longest:
                raise ValueError(f"{self.folder(name)} reads {reach} tokens, and documents have {self.longest}")

    def folder(self, name: str) -> Path:
        """Where a converted model is.

        Raises:
            FileNotFoundError: it is not there.
        """
        folder = Path(self.arguments.converted) / file_name(name.removesuffix(CONVERTED))
        if not folder.is_dir():
            raise FileNotFoundError(f"--converted {self.arguments.converted} has no folder {folder.name}")
        return folder

    def is_run(self, model: str, length: int) -> bool:
        """Whether a model is trained at a length: what is truncated, only as long as its table is."""
        return model != "truncated" or not self.table or length <= self.table

    def model(self, name: str, length: int) -> Classifier:
        """A model to be trained at a length, without dropout of attention weights, for which kernels are slow on CPUs."""
        cuts = {
            "truncated": partial(truncated, length=length),
            "chunk mean": partial(chunks, size=TRAINED_LENGTH),
        }
        source, flags = self.source, {}
        if name.endswith(CONVERTED):
            source = self.folder(name)
        elif "t5" in name:
            flags = {"position_scheme": name, "position_per_layer": True}
        encoder = AutoModel.from_pretrained(source, attention_probs_dropout_prob=0.0, **flags)
        if name in ("absolute", "absolute+t5"):
            encoder = lengthen(encoder, self.longest, TRAINED_LENGTH)
        return Classifier(encoder, self.labels, cuts.get(name, whole))

    def run(self, name: str, length: int, seed: int) -> Run:
        """Fine-tune and test."""
        set_seed(seed)
        model = self.model(name, length)
        ends = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        model.start_with([[[ends[0], *one, ends[1]] for one in own[:EXAMPLES]] for own in self.learned])
        model.train()
        seconds, steps = self.train(model, length, seed, starts_at_zero=not name.endswith(CONVERTED))
        return Run(name, length, seed, steps, seconds, *self.test(model.eval()))

    def train(self, model: Classifier, length: int, seed: int, starts_at_zero: bool) -> tuple[float, int]:
        """AdamW, rates that fall to 0 with the budget; the same documents for all models. Seconds and steps.

        The loss is the cross entropy with each article's share of the tokens.

        Args:
            starts_at_zero: position parameters do, and have a rate of their own.
        """
        arguments, drawn = self.arguments, random.Random(seed)
        positions = {*position_parameters(model).values()} if starts_at_zero else set()
        head = {*model.head.parameters()}
        others = [one for one in model.parameters() if one not in positions | head]
        groups = [
            {"params": others, "highest": arguments.learning_rate},
            {"params": [*head], "highest": arguments.head_learning_rate},
            {"params": [*positions], "highest": arguments.position_learning_rate},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=arguments.learning_rate, fused=True
        )
        began, step = time.monotonic(), 0
        while True:
            seconds = time.monotonic() - began
            spent = step / arguments.max_steps if arguments.max_steps else seconds / (60 * arguments.minutes)
            if spent >= 1:
                return seconds, step
            for group in optimizer.param_groups:
                group["lr"] = group["highest"] * (1 - spent) * min(1, (step + 1) / 5)
            rows = max(1, BATCH_TOKENS // length)
            batch = [mixed(self.learned, length, self.tokenizer, drawn) for _ in range(rows)]
            wanted = torch.stack([document.shares(self.labels) for document in batch])
            cross_entropy(model([document.ids for document in batch]), wanted).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1

    @torch.no_grad()
    def test(self, model: Classifier) -> tuple[float, list[float | None]]:
        """R-precision, and the share of labels found in each quarter."""
        precisions: list[float] = []
        found: list[list[bool]] = [[] for _ in range(QUARTERS)]
        for document in self.tested:
            begins = {article: document.articles.index(article) for article in {*document.articles} - {None}}
            probable = {*model([document.ids])[0].topk(len(begins)).indices.tolist()}
            precisions.append(len(probable & begins.keys()) / len(begins))
            for article, place in begins.items():
                found[place * QUARTERS // len(document.ids)].append(article in probable)
        return statistics.fmean(precisions), [statistics.fmean(own) if own else None for own in found]


def table(runs: list[Run]) -> str:
    """Markdown: mean and standard deviation over the seeds, a row for each model and length."""
    depths = ["first quarter", "second", "third", "last"]
    rows = []
    for name, length in sorted(
        {(run.model, run.length) for run in runs}, key=lambda one: (one[1], MODELS.index(one[0]))
    ):
        own = [run for run in runs if (run.model, run.length) == (name, length)]
        precisions = [run.precision for run in own]
        spread = f" ± {statistics.stdev(precisions):.3f}" if len(own) > 1 else ""
        parts = zip(*(run.by_depth for run in own))
        cells = ["" if part[0] is None else f"{statistics.fmean(part):.2f}" for part in parts]
        steps = f"{statistics.fmean(run.steps for run in own):.0f}"
        rows.append([name, f"{length:,}", f"{statistics.fmean(precisions):.3f}{spread}", str(len(own)), *cells, steps])
    return as_markdown(["model", "trained on, tokens", "R-precision", "seeds", *depths, "steps"], rows) + "\n"


def settings_of(arguments: ClassificationArguments) -> dict[str, Any]:
    """What a run depends on, apart from model, length and seed."""
    kept = asdict(arguments)
    for name in ("models", "seeds", "output_dir", "converted", "lengths"):
        del kept[name]
    return kept | {"text_file": Path(kept["text_file"]).name, "longest": max(arguments.lengths)}


def main() -> None:
    try:
        [arguments] = ScriptParser((ClassificationArguments,)).parse()
        folder = Path(arguments.output_dir)
        check_writable(folder)
        task = Task(arguments)
        settings = settings_of(arguments)
        recorded = Runs(folder / "runs.jsonl", settings)
    except (OSError, ValueError, TypeError, ImportError) as error:
        sys.exit(f"error: {error}")
    for seed in arguments.seeds:
        for length in arguments.lengths:
            for name in arguments.models:
                done = {(run["model"], run["length"], run["seed"]) for run in recorded.read()}
                if (name, length, seed) in done or not task.is_run(name, length):
                    continue
                run = task.run(name, length, seed)
                recorded.add(asdict(run))
                print(f"{name}, {length} tokens, seed {seed}: {run.precision:.3f} after {run.steps} steps", flush=True)
    runs = [Run(**run) for run in recorded.read()]
    packages = ("hf_posenc", "transformers", "torch")
    versions = {"python": platform.python_version(), **{package: version(package) for package in packages}}
    results = {
        "settings": settings,
        "versions": versions,
        "threads": torch.get_num_threads(),
        "articles": task.labels,
        "runs": [asdict(run) for run in runs],
    }
    write_json(folder / "results.json", results)
    print(f"\n{table(runs)}\nwritten to {folder}")


if __name__ == "__main__":
    main()
