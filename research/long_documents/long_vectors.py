"""Convert or chunk? Vectors of documents of 2,048 tokens, with and without training, on all articles of two WikiText files.

    python research/long_documents/long_vectors.py --text_files wikitext2/valid.txt wikitext2/test.txt

The three tasks of long_texts.py. Everything is cross-fitted: the articles of each file are measured by a conversion that learned
from the other file, and what a method can choose (size of chunks, overlap) is what was best, over all tasks, on the other file.
Compared are

- one vector without training: truncation, the mean of chunks, the modes of DICE (chunk_pooling.py), the mean of chunks that are unlike
  their document, and means less the mean of all documents (Mu and Viswanath 2018, arXiv:1702.01417, with no components removed);
- one vector of a model that reads the whole document, with an untrained longer table and converted;
- a vector for each chunk: chunks that are read alone, and late chunks (Günther et al. 2024, arXiv:2409.04701), the means of the
  chunks' states in a pass over the whole document.

Each model reads each document once, and all vectors are kept in the output folder: the same command goes on where it was stopped.
"""

import json
import math
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import chunk_pooling
import numpy as np
import torch
from long_documents import TITLES, Encoder, chunk_name, chunks, file_name, interval, ndcg, truncated
from long_texts import Retrieval, articles, needle, passkey, read_articles, sentences, write_articles
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize
from transformers import AutoModel, PreTrainedModel

from hf_posenc import convert
from hf_posenc._utils import as_markdown
from hf_posenc.conversion import lengthen
from hf_posenc.conversion.checkpoints import Checkpoint, load_checkpoint
from hf_posenc.conversion.distillation import has_bfloat16
from hf_posenc.files import whole_file, write_whole


# What the example scripts are made of.
sys.path += [str(Path(__file__).parents[2] / name) for name in ("examples")]

from arguments import ScriptParser  # noqa: E402
from minilm import packaged_minilm  # noqa: E402
from records import check_writable, keep_settings, write_json  # noqa: E402


TASKS = ("passkey", "needle", "articles")
# What other ways to have one vector of a document are compared with.
MEAN = "mean of chunks"
# The conversion that computes as little as chunks.
LOCAL = "t5 window of 128 no layer global"
# Tokens of a chunk, and whether each begins in the middle of the one before.
CHUNKS = [(64, False), (64, True), (128, False), (128, True), (256, False), (512, False)]
SIZES = [size for size, overlap in CHUNKS if not overlap]
# Articles of a file that its conversion's report is measured on.
HELD_OUT = 2
ORIGINAL = "original"
UNTRAINED = {"strided": "interpolate", "tiled": "tile"}
SCHEMES = ("t5", "absolute+t5", "deberta")
# Conversions to a scheme with a window, by their names.
WINDOWS = {
    f"t5 window of {width} {which} global": ("t5", {"position_window": width, "position_global_every": every})
    for width, which, every in (
        (128, "every third layer", 3),
        (128, "the first layer", 6),
        (128, "no layer", 0),
        (256, "no layer", 0),
        (384, "no layer", 0),
    )
}
# Another conversion, as in "t5 seed 1"; scores are the mean over all of them.
AGAIN = re.compile(rf"({'|'.join(map(re.escape, (*SCHEMES, *WINDOWS)))}) seed (\d+)")
# Whose late chunks are in the picture.
PICTURED = ("strided", "t5")
# Documents that cost is measured with.
TIMED = 5
# Names of methods with a vector for each chunk of a size.
BEST, LATE = "best chunk of {}", "{}, best late chunk of {}"


def thrice(name: str) -> list[str]:
    return [name, f"{name} seed 1", f"{name} seed 2"]


@dataclass
class VectorArguments:
    """What is read, by what."""

    text_files: list[str] = field(
        metadata={"help": "Two WikiText files: what learns from one is measured on the other."}
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint that pools by the mean. Default: the packaged MiniLM."}
    )
    output_dir: str = field(default="outputs/long_vectors", metadata={"help": "Folder for all that is computed."})
    models: list[str] = field(
        default_factory=lambda: [ORIGINAL, "strided", *thrice("t5"), *thrice(LOCAL)],
        metadata={
            "help": f"Of {', '.join((ORIGINAL, *UNTRAINED, *SCHEMES, *WINDOWS))}; 't5 seed 1' is another conversion, averaged with it."
        },
    )
    length: int = field(default=2048, metadata={"help": "Tokens of a document, special tokens counted."})
    candidates: int = field(
        default=100, metadata={"help": "passkey and needle: documents for each file, all asked for."}
    )
    article_queries: int = field(default=5, metadata={"help": "articles: sentences taken out of each document."})
    trained_length: int | None = field(
        default=None, metadata={"help": "As for `hf-posenc convert`. Default: 128 for the packaged MiniLM."}
    )
    max_steps: int = field(default=160, metadata={"help": "Steps of distillation of a conversion."})
    seed: int = field(default=0, metadata={"help": "Of documents, conversions and resampling."})

    def __post_init__(self):
        known = (ORIGINAL, *UNTRAINED, *SCHEMES, *WINDOWS)
        if unknown := [one for one in self.models if one not in known and not AGAIN.fullmatch(one)]:
            raise ValueError(f"unknown models {', '.join(unknown)}; there are {', '.join(known)}, and 't5 seed 1'")
        if alone := [one for one in self.models if (again := AGAIN.fullmatch(one)) and again[1] not in self.models]:
            raise ValueError(f"{alone[0]} is another conversion of a scheme that is not among the models")
        if len(self.text_files) != 2:
            raise ValueError(f"text_files must be two, got {len(self.text_files)}")
        if len({Path(file).stem for file in self.text_files}) != 2:
            raise ValueError("the two text_files must have different names")
        if self.length < 64:
            raise ValueError(f"length must be at least 64 tokens, got {self.length}")
        if self.candidates < 2 or self.article_queries < 1:
            raise ValueError("there must be two candidates and one query of an article at least")


def spans(length: int, size: int) -> list[tuple[int, int]]:
    """Where the chunks of [`long_documents.chunks`] without overlap begin and end in a document, special tokens left out."""
    inner = length - 2
    parts = max(math.ceil(inner / (size - 2)), 1)
    edges = [1 + inner * part // parts for part in range(parts + 1)]
    return [*pairwise(edges)]


def late_chunks(states: torch.Tensor, size: int) -> torch.Tensor:
    """The mean of the states of each chunk of a document (Günther et al. 2024), (..., chunks, width) of (..., tokens, width)."""
    return torch.stack(
        [states[..., start:end, :].mean(dim=-2) for start, end in spans(states.shape[-2], size)], dim=-2
    )


@torch.no_grad()
def states_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Last states of one document, (tokens, width), float32; computed in bfloat16 where the processor has it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16(model.device)):
        return model(input_ids=torch.tensor([ids])).last_hidden_state[0].float()


def cosines(queries: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """The best cosine of each query with a document's vectors, (queries, documents) of (documents, vectors, width)."""
    return torch.einsum("qw,dvw->qdv", normalize(queries, dim=-1), normalize(vectors, dim=-1)).amax(dim=-1)


@dataclass(frozen=True)
class Method:
    """How a document is found.

    Attributes:
        model: which model reads.
        settings: the names of the kept vectors that it can choose from.
        pool: of (documents, vectors, width) those that are indexed.
        centred: what is taken away from vectors: nothing, or the mean of all documents' vectors from theirs, and perhaps from
            queries, whichever is better on the other file.
    """

    model: str
    settings: tuple[str, ...]
    pool: Callable[[torch.Tensor], torch.Tensor]
    centred: tuple[str, ...] = ("",)

    def similarities(self, kept: dict[str, torch.Tensor], setting: str, centred: str) -> torch.Tensor:
        queries, documents = kept["queries"], self.pool(kept[setting])
        if centred:
            centre = documents.mean(dim=(0, 1))
            documents = documents - centre
            queries = queries - centre if centred == "documents and queries" else queries
        return cosines(queries, documents)

    def choices(self) -> Iterator[tuple[str, str]]:
        return ((setting, centred) for setting in self.settings for centred in self.centred)


def one(pool: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A pooling that leaves the axis of vectors, of one."""
    return lambda vectors: pool(vectors)[:, None]


def every(vectors: torch.Tensor) -> torch.Tensor:
    """All vectors of a document."""
    return vectors


def neighbours(vectors: torch.Tensor) -> torch.Tensor:
    """Late chunks of twice the size, each of which begins in the middle of the one before: means of two that follow each other."""
    return (vectors[:, :-1] + vectors[:, 1:]) / 2 if vectors.shape[1] > 1 else vectors


CENTRED = ("documents", "documents and queries")
ALL_CHUNKS = tuple(f"chunks {chunk_name(*own)}" for own in CHUNKS)


def methods(models: list[str]) -> dict[str, Method]:
    """What is compared, by name: one vector first."""
    found = {
        "truncated": Method(ORIGINAL, ("truncated",), every),
        MEAN: Method(ORIGINAL, ALL_CHUNKS, one(chunk_pooling.mean)),
        f"{MEAN}, the smallest, no overlap": Method(ORIGINAL, ALL_CHUNKS[:1], one(chunk_pooling.mean)),
        "DICE, maximum": Method(ORIGINAL, ALL_CHUNKS, one(chunk_pooling.maximum)),
        "DICE, three largest norms": Method(ORIGINAL, ALL_CHUNKS, one(chunk_pooling.norm_top_mean)),
        "DICE, softmax of norms": Method(ORIGINAL, ALL_CHUNKS, one(chunk_pooling.norm_softmax_mean)),
        "salience mean of chunks": Method(ORIGINAL, ALL_CHUNKS, one(chunk_pooling.salience_mean)),
        "mean of chunks, centred": Method(ORIGINAL, ALL_CHUNKS, one(chunk_pooling.mean), CENTRED),
        "salience mean, centred": Method(ORIGINAL, ALL_CHUNKS, one(chunk_pooling.salience_mean), CENTRED),
    }
    readers = [model for model in models if model != ORIGINAL and not AGAIN.fullmatch(model)]
    for model in readers:
        found[model] = Method(model, ("whole",), every)
        found[f"{model}, centred"] = Method(model, ("whole",), every, CENTRED)
    for size, overlap in CHUNKS:
        name = chunk_name(size, overlap)
        found[BEST.format(name)] = Method(ORIGINAL, (f"chunks {name}",), every)
    for model in readers:
        if model in WINDOWS:
            continue  # a window is for the cost of one vector
        for size in SIZES:
            found[LATE.format(model, size)] = Method(model, (f"late {size}",), every)
        if 2 * SIZES[0] in SIZES:
            name = chunk_name(2 * SIZES[0], True)
            found[LATE.format(model, name)] = Method(model, (f"late {SIZES[0]}",), neighbours)
    return found


class Comparison:
    """Both files, and what all models make of them."""

    def __init__(self, arguments: VectorArguments):
        self.arguments = arguments
        self.folder = Path(arguments.output_dir)
        self.source = arguments.model_name_or_path or packaged_minilm()
        trained = arguments.trained_length or (None if arguments.model_name_or_path else 128)
        self.checkpoint: Checkpoint = load_checkpoint(self.source, trained_length=trained)
        if self.checkpoint.pooling != "mean":
            raise ValueError(f"{self.source} takes the first token's vector for a text's; the mean is needed")
        self.tokenizer = self.checkpoint.tokenizer
        # What sentence-transformers would cut at.
        self.limit = load_checkpoint(self.source, self.tokenizer).trained_length
        self.texts = {Path(file).stem: read_articles(file, self.tokenizer.unk_token) for file in arguments.text_files}
        self.files = [*self.texts]
        self.methods = methods(arguments.models)

    def other(self, file: str) -> str:
        return next(name for name in self.files if name != file)

    @cached_property
    def retrievals(self) -> dict[tuple[str, str], Retrieval]:
        """By file and task. Queries of one person, fact or article are drawn again together."""
        found = {}
        for number, (file, texts) in enumerate(self.texts.items()):
            seed, length, many = self.arguments.seed + number, self.arguments.length, [self.arguments.candidates] * 2
            haystack = [sentence for article in texts for paragraph in article for sentence in sentences(paragraph)]
            found |= {
                (file, "passkey"): passkey(self.tokenizer, length, *many, seed),
                (file, "needle"): needle(self.tokenizer, length, *many, seed, haystack),
                (file, "articles"): articles(
                    self.tokenizer, texts, length, self.arguments.article_queries, seed, joined=True
                ),
            }
        return found

    def groups(self, file: str, task: str) -> list[str]:
        """What a query is drawn again with: all of its article's, or those of the same words."""
        found = self.retrievals[file, task]
        return [f"{file} {group}" for group in found.groups] if task == "articles" else found.queries

    def run(self) -> str:
        """Compute what is missing, write the results and return the table."""
        for task in reversed(TASKS):
            for model in self.arguments.models:
                for file in self.files:
                    self.compute(model, file, task)
        return self.report()

    def vectors_file(self, model: str, file: str, task: str) -> Path:
        return self.folder / "vectors" / f"{file_name(model)}-{file}-{task}.safetensors"

    def compute(self, model: str, file: str, task: str) -> None:
        """Keep all vectors that a model makes of the documents and queries of a file."""
        kept = self.vectors_file(model, file, task)
        if kept.exists():
            return
        began = time.process_time()
        found, reader = self.retrievals[file, task], self.reader(model, file)
        encoder = Encoder(reader)
        asked = self.tokenizer(found.queries, truncation=True, max_length=self.limit, padding=False)["input_ids"]
        vectors = {"queries": encoder.vectors(asked)}
        if model == ORIGINAL:
            cuts = {f"chunks {chunk_name(*own)}": [chunks(ids, *own) for ids in found.documents] for own in CHUNKS}
            cuts["truncated"] = [truncated(ids, self.limit) for ids in found.documents]
            for name, pieces in cuts.items():
                flat = encoder.vectors([piece for own in pieces for piece in own])
                vectors[name] = flat.unflatten(0, (len(pieces), -1))
        else:
            read = [self.whole_and_late(reader, ids) for ids in found.documents]
            vectors |= {name: torch.stack([own[name] for own in read]) for name in read[0]}
        with whole_file(kept) as written:
            save_file({name: tensor.contiguous() for name, tensor in vectors.items()}, written)
        print(f"{model}, {file}, {task}: {time.process_time() - began:.0f} s", flush=True)

    def whole_and_late(self, reader: PreTrainedModel, ids: list[int]) -> dict[str, torch.Tensor]:
        states = states_of(reader, ids)
        return {"whole": states.mean(dim=0, keepdim=True)} | {
            f"late {size}": late_chunks(states, size) for size in SIZES
        }

    def reader(self, model: str, file: str) -> PreTrainedModel:
        """A model that never saw the articles of a file."""
        original, length, trained = (
            self.checkpoint.model.base_model,
            self.arguments.length,
            self.checkpoint.trained_length,
        )
        if model == ORIGINAL:
            return original.eval()
        if method := UNTRAINED.get(model):
            longer = lengthen(original, length, trained, method) if method != "interpolate" else self.strided()
            return longer.eval()
        learned = self.other(file)
        again = AGAIN.fullmatch(model)
        name, seed = (again[1], int(again[2])) if again else (model, self.arguments.seed)
        scheme, flags = WINDOWS.get(name, (name, {}))
        output = self.folder / "conversions" / f"{file_name(model)}-{learned}"
        if not output.is_dir():
            held_out, text = self.texts[learned][:HELD_OUT], self.texts[learned][HELD_OUT:]
            convert(
                self.source,
                scheme,
                text=[self.written(learned, "learned", text)],
                held_out=[self.written(learned, "held_out", held_out)],
                trained_length=trained,
                max_length=length,
                max_steps=self.arguments.max_steps,
                seed=seed,
                output=output,
                resume=True,
                **flags,
            )
        longer = AutoModel.from_pretrained(output)
        return longer.eval()

    def strided(self) -> PreTrainedModel:
        """The original with its rows at a stride, for which it has to be a variant."""
        text = [self.written(self.files[0], "learned", self.texts[self.files[0]][HELD_OUT:])]
        held_out = [self.written(self.files[0], "held_out", self.texts[self.files[0]][:HELD_OUT])]
        usual = {"text": text, "held_out": held_out, "trained_length": self.checkpoint.trained_length}
        model, _ = convert(
            self.source, "absolute", max_length=self.arguments.length, extend="interpolate", train="none", **usual
        )
        return model.base_model

    def written(self, file: str, name: str, texts: list[list[str]]) -> Path:
        """A folder of articles, a file each."""
        return write_articles(self.folder / "texts" / file / name, texts)

    @cached_property
    def kept(self) -> dict[tuple[str, str, str], dict[str, torch.Tensor]]:
        """All vectors that are there, by model, file and task."""
        places = [(model, file, task) for model in self.arguments.models for file in self.files for task in TASKS]
        return {place: load_file(self.vectors_file(*place)) for place in places}

    def found(self, method: Method, file: str, task: str, choice: tuple[str, str]) -> list[float]:
        """nDCG of each query, the mean over conversions."""
        return [*map(statistics.fmean, zip(*self.by_conversion(method, file, task, choice)))]

    def by_conversion(self, method: Method, file: str, task: str, choice: tuple[str, str]) -> list[list[float]]:
        """nDCG of each query with each conversion of a method's scheme; of another model, with that one."""
        retrieval = self.retrievals[file, task]
        models = [
            one for one in self.arguments.models if one == method.model or one.startswith(f"{method.model} seed ")
        ]
        similarities = [method.similarities(self.kept[model, file, task], *choice) for model in models]
        return [ndcg(own, retrieval.relevant, retrieval.cut_off).tolist() for own in similarities]

    def chosen(self, method: Method, file: str) -> tuple[str, str]:
        """What a method uses on a file: the best on the other one, over all tasks."""
        choices = [*method.choices()]
        if len(choices) == 1:
            return choices[0]
        other = self.other(file)
        return max(
            choices,
            key=lambda one: statistics.fmean(statistics.fmean(self.found(method, other, task, one)) for task in TASKS),
        )

    def scores(self) -> dict[str, dict[str, list[float]]]:
        """By method and task, nDCG of the queries of both files."""
        return {
            name: {
                task: [
                    score for file in self.files for score in self.found(method, file, task, self.chosen(method, file))
                ]
                for task in TASKS
            }
            for name, method in self.methods.items()
        }

    def means_by_conversion(self, method: Method, task: str) -> list[float]:
        """Mean nDCG of the queries of both files with each conversion; a single one of what is not converted."""
        by_file = [self.by_conversion(method, file, task, self.chosen(method, file)) for file in self.files]
        return [statistics.fmean(score for own in of_files for score in own) for of_files in zip(*by_file)]

    def costs(self) -> dict[str, dict[str, float]]:
        """Milliseconds of a document by model and what it reads: median of the processor's time, on one thread."""
        file = self.folder / "costs.json"
        costs = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        documents = self.retrievals[self.files[0], "articles"].documents[:TIMED]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for model in self.arguments.models:
            if model in costs or AGAIN.fullmatch(model):
                continue
            encoder = Encoder(self.reader(model, self.files[0]))
            cuts = {"whole": lambda ids: [ids]}
            if model == ORIGINAL:
                cuts = {f"chunks {chunk_name(*own)}": partial(chunk_of, own) for own in CHUNKS}
                cuts["truncated"] = lambda ids: truncated(ids, self.limit)
            costs[model] = {name: encoder.milliseconds([cut(ids) for ids in documents]) for name, cut in cuts.items()}
        torch.set_num_threads(threads)
        write_json(file, costs)
        return costs

    def report(self) -> str:
        """Write everything that is known into the output folder, and return the table."""
        scores, costs, seed = self.scores(), self.costs(), self.arguments.seed
        groups = {task: [group for file in self.files for group in self.groups(file, task)] for task in TASKS}
        found = {}
        for name, method in self.methods.items():
            choices = {file: self.chosen(method, file) for file in self.files}
            read = ["whole" if setting.startswith("late") else setting for setting, _ in choices.values()]
            pooled = [
                method.pool(self.kept[method.model, file, "articles"][setting]).shape[1]
                for file, (setting, _) in choices.items()
            ]
            found[name] = {
                "choices": {file: ", ".join(filter(None, choice)) for file, choice in choices.items()},
                "vectors": statistics.fmean(pooled),
                "milliseconds": statistics.fmean(costs[method.model][one] for one in read),
                "tasks": {
                    task: {
                        "ndcg": statistics.fmean(own),
                        "interval": interval(own, groups[task], seed),
                        "conversions": self.means_by_conversion(method, task),
                    }
                    for task, own in scores[name].items()
                },
                "less": {
                    other: {
                        task: difference(scores[name][task], scores[other][task], groups[task], seed) for task in TASKS
                    }
                    for other in references(name, scores)
                },
            }
        packages = ("hf_posenc", "transformers", "torch")
        entries = {
            "settings": self.settings(),
            "versions": {"python": platform.python_version(), **{package: version(package) for package in packages}},
            "sizes": {
                task: {
                    "documents": sum(len(self.retrievals[file, task].documents) for file in self.files),
                    "queries": len(groups[task]),
                    "groups": len({*groups[task]}),
                }
                for task in TASKS
            },
            "methods": found,
        }
        write_json(self.folder / "results.json", entries)
        by_query = {
            name: {task: [round(one, 4) for one in own] for task, own in of.items()} for name, of in scores.items()
        }
        write_whole({self.folder / "scores.json": json.dumps({"groups": groups, "scores": by_query}) + "\n"})
        write_whole({self.folder / "results.png": plot(found)})
        return table(found)

    def settings(self) -> dict[str, Any]:
        """What a score depends on, apart from the method."""
        kept = asdict(self.arguments)
        for name in ("models", "output_dir"):
            del kept[name]
        return kept | {
            "text_files": self.files,
            "trained_length": self.checkpoint.trained_length,
            "truncated_to": self.limit,
        }


def chunk_of(own: tuple[int, bool], ids: list[int]) -> list[list[int]]:
    return chunks(ids, *own)


def references(name: str, known: dict[str, Any]) -> list[str]:
    """What a method is compared with: of one vector with the other ways to have one; late chunks with chunks as large."""
    if ", best late chunk of " in name:
        return [BEST.format(name.partition(" chunk of ")[2])]
    if " chunk of " in name:
        return [MEAN]
    return [other for other in known if " chunk of " not in other and other != name]


def reference_of(name: str, known: Iterable[str]) -> str | None:
    """What tables give a method's difference to: the mean of chunks; for late chunks, chunks of the same size that are read alone."""
    if name == MEAN:
        return None
    return next(iter(known)) if ", best late chunk of " in name else MEAN


def difference_cell(one: dict[str, Any], digits: int = 3) -> str:
    """A difference with its interval; bold where that excludes 0."""
    low, high = one["interval"]
    written = f"{one['mean']:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
    return f"**{written}**" if low > 0 or high < 0 else written


def difference(own: list[float], other: list[float], groups: list[str], seed: int) -> dict[str, Any]:
    """How much higher a method scores on the same queries, with the interval of that."""
    differences = [a - b for a, b in zip(own, other, strict=True)]
    return {"mean": statistics.fmean(differences), "interval": interval(differences, groups, seed)}


def table(found: dict[str, Any]) -> str:
    """Markdown: nDCG, and how much more that is than [`reference_of`] a method has; bold where it is sure."""
    rows = []
    for name, own in found.items():
        reference = reference_of(name, references(name, found))
        cells = [
            f"{one['ndcg']:.3f}" + (f" {difference_cell(own['less'][reference][task])}" if reference else "")
            for task, one in own["tasks"].items()
        ]
        rows.append([name, f"{own['vectors']:.0f}", f"{own['milliseconds']:.0f}", *cells])
    costs = ["vectors per document", "ms per document"]
    scores = [f"{TITLES[task]}, nDCG@{10 if task == 'articles' else 1}" for task in TASKS]
    return as_markdown(["method", *costs, *scores], rows)


def plot(found: dict[str, Any]) -> bytes:
    """A PNG: a panel for each task, nDCG by vectors of a document with intervals; chunks that are read alone, and late ones."""
    import io

    import matplotlib.pyplot as plt

    late = [model for model in PICTURED if model in found]
    lines = {"chunks, each read alone": [MEAN, *(BEST.format(size) for size in SIZES)]}
    lines |= {
        f"read as a whole, {model}": [model, *(f"{model}, best late chunk of {size}" for size in SIZES)]
        for model in late
    }
    figure, axes = plt.subplots(1, len(TASKS), figsize=(11, 3.6), sharey=True)
    for axis, task in zip(axes, TASKS):
        for number, (label, names) in enumerate(lines.items()):
            own = sorted((found[name]["vectors"], found[name]["tasks"][task]) for name in names)
            middle = np.array([one["ndcg"] for _, one in own])
            around = np.abs(np.array([one["interval"] for _, one in own]).T - middle)
            places = np.array([vectors for vectors, _ in own]) * 2 ** (
                0.06 * number
            )  # so that bars do not hide each other
            style = ":" if any(one in label for one in UNTRAINED) else "-" if number else "--"
            axis.errorbar(places, middle, around, capsize=2, label=label, linestyle=style, marker="o", markersize=3)
        ticks = sorted({round(found[name]["vectors"]) for name in lines["chunks, each read alone"]})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set(xlabel="vectors of a document", title=f"{TITLES[task]}, nDCG@{10 if task == 'articles' else 1}")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    plt.close(figure)
    return content.getvalue()


def main() -> None:
    try:
        [arguments] = ScriptParser((VectorArguments,)).parse()
        if find_spec("matplotlib") is None:  # not after an hour
            raise ImportError('the plot needs matplotlib: pip install -c constraints.txt -e ".[analysis]"')
        check_writable(arguments.output_dir)
        comparison = Comparison(arguments)
        _ = comparison.retrievals  # mistakes of lengths, before weights are read
        keep_settings(comparison.folder / "settings.json", comparison.settings())
    except (OSError, ValueError, TypeError, ImportError) as error:
        sys.exit(f"error: {error}")
    print(f"\n{comparison.run()}\n\nwritten to {comparison.folder}")


if __name__ == "__main__":
    main()
