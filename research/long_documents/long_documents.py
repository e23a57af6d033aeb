"""Are long documents found? Cut off, cut into chunks, or read as a whole by extended tables and by conversions.

    python research/long_documents/long_documents.py --train_file wikitext2/valid.txt --test_file wikitext2/test.txt

Three tasks on documents of 256 to 2,048 tokens (see long_texts.py): `passkey` and `needle` in LongEmbed's form, scored by
nDCG@1, and `articles`, where a sentence that was taken out of an article asks for it among all others, by nDCG@10: that measures
the topic as well as how far a model reads. Conversions learn from two thirds of the articles of `--train_file`; with the others,
the size and overlap of chunks are chosen, and scores are those of `--test_file`.

Each score of a method on a task at a length is a line of `runs.jsonl` in the output folder: the same command goes on where it was
stopped, and several processes may share the work if each is given methods of its own. Then come `results.json` (all, with
bootstrap intervals over documents) and `results.png`.
"""

import gc
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from long_texts import Retrieval, articles, needle, passkey, read_articles, sentences, write_articles
from torch.nn.functional import normalize
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc import convert
from hf_posenc._utils import as_markdown
from hf_posenc.conversion import lengthen
from hf_posenc.conversion.checkpoints import Checkpoint, load_checkpoint
from hf_posenc.conversion.distillation import has_bfloat16
from hf_posenc.files import write_whole
from hf_posenc.inspection import longest_sequence


# What the example scripts are made of.
sys.path += [str(Path(__file__).parents[2] / name) for name in ("examples", "research")]

from arguments import ScriptParser  # noqa: E402
from intervals import of_groups  # noqa: E402
from minilm import packaged_minilm  # noqa: E402
from recorded import Runs  # noqa: E402
from records import check_writable, write_json  # noqa: E402


TASKS = ("passkey", "needle", "articles")
# What tables and pictures call them.
TITLES = {"passkey": "pass keys", "needle": "facts", "articles": "articles"}
# Shorter ones are no long articles.
SHORTEST_ARTICLE = 1024
# Of the articles to learn from, one in so many is left out, to choose chunks with.
DEVELOPMENT_EVERY = 3
DEVELOPMENT_LENGTHS = (512, 1024, 2048)
DEVELOPMENT_CANDIDATES = 30
CHUNKS = [(size, overlap) for size in (64, 128, 256, 512) for overlap in (False, True)]
# Another choice of names, facts and sentences than that of the scores.
DEVELOPMENT_SEED = 1
TABLES = {"tiled": "tile", "strided": "interpolate", "mean row": "mean"}
# Tokens of a batch; documents timed for the cost; resamples of the bootstrap; parts of the depth.
BATCH_TOKENS = 4096
TIMED = 3
RESAMPLES = 2000
DEPTHS = 5


@dataclass(frozen=True)
class Converted:
    """A conversion to compare, by the arguments of `hf_posenc.convert`."""

    scheme: str
    arguments: dict[str, Any] = field(default_factory=dict)


CONVERSIONS = {
    "absolute+t5": Converted("absolute+t5"),
    "t5": Converted("t5"),
    # Never distilled beyond the trained length, only read there.
    "t5, short texts only": Converted("t5", {"max_length": None}),
    "rope": Converted("rope"),
    "deberta": Converted("deberta"),
}
# What all others are compared with, query by query.
COMPARED = "t5"
BASELINES = ("truncated", "truncated late", "chunk mean", "best chunk")
METHODS = (*BASELINES, *TABLES, *CONVERSIONS)


@dataclass
class LongArguments:
    """What to find, with what."""

    train_file: str = field(metadata={"help": "WikiText file to convert on, and to choose chunks with."})
    test_file: str = field(metadata={"help": "WikiText file that the documents are made of."})
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint that pools by the mean. Default: the packaged MiniLM."}
    )
    output_dir: str = field(default="outputs/long_documents", metadata={"help": "Folder for all that is computed."})
    methods: list[str] = field(
        default_factory=lambda: [*METHODS], metadata={"help": f"Which to score, of {'; '.join(METHODS)}."}
    )
    tasks: list[str] = field(default_factory=lambda: [*TASKS], metadata={"help": f"Of {', '.join(TASKS)}."})
    lengths: list[int] = field(
        default_factory=lambda: [256, 512, 1024, 2048],
        metadata={"help": "Tokens of a document, special tokens counted; articles have 1,024 at least."},
    )
    longest: int = field(default=4096, metadata={"help": "Tokens that longer tables and conversions can read."})
    candidates: int = field(default=100, metadata={"help": "passkey and needle: number of documents."})
    queries: int = field(default=100, metadata={"help": "passkey and needle: number of queries."})
    article_queries: int = field(default=5, metadata={"help": "articles: sentences taken out of each."})
    trained_length: int | None = field(
        default=None, metadata={"help": "As for `hf-posenc convert`. Default: 128 for the packaged MiniLM."}
    )
    max_steps: int = field(default=160, metadata={"help": "Steps of distillation of a conversion."})
    distilled_length: int = field(
        default=2048, metadata={"help": "Longest texts that conversions are distilled with."}
    )
    seed: int = field(default=0, metadata={"help": "Of documents, conversions and resampling."})

    def __post_init__(self):
        for name, known in (("methods", METHODS), ("tasks", TASKS)):
            if unknown := [one for one in getattr(self, name) if one not in known]:
                raise ValueError(f"unknown {name} {', '.join(unknown)}; there are {'; '.join(known)}")
        if min(self.lengths) < 64:
            raise ValueError(f"lengths must be at least 64 tokens, got {min(self.lengths)}")
        if max(self.lengths) > self.longest:
            raise ValueError(f"lengths must be at most --longest, {self.longest} tokens, got {max(self.lengths)}")
        if not 1 <= self.queries <= self.candidates or self.candidates < 2:
            raise ValueError(
                f"there must be two candidates at least, and no more queries than them, got {self.queries} queries and "
                f"{self.candidates} candidates"
            )
        if self.article_queries < 1:
            raise ValueError(f"article_queries must be at least 1, got {self.article_queries}")
        self.lengths = sorted({*self.lengths})


class Encoder:
    """Vectors of token ids: the mean of the last states, not normalised. Each sequence is computed once.

    In bfloat16 where the processor has it.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model.eval()
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def vectors(self, sequences: list[list[int]]) -> torch.Tensor:
        """(sequences, width), float32."""
        keys = [*map(tuple, sequences)]
        new = [*({*keys} - self.known.keys())]
        self.known |= dict(zip(new, self.computed(new)))
        return torch.stack([self.known[key] for key in keys])

    @torch.no_grad()
    def computed(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """A vector for each sequence, equal ones computed again, in batches of one length."""
        found: dict[int, torch.Tensor] = {}
        left = sorted(range(len(sequences)), key=lambda place: len(sequences[place]))
        while left:
            length = len(sequences[left[0]])
            batch = [place for place in left[: max(1, BATCH_TOKENS // length)] if len(sequences[place]) == length]
            left = left[len(batch) :]
            with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16(self.model.device)):
                states = self.model(input_ids=torch.tensor([sequences[place] for place in batch])).last_hidden_state
            found |= dict(zip(batch, states.float().mean(dim=1)))
        return [found[place] for place in range(len(sequences))]

    def milliseconds(self, pieces: list[list[list[int]]]) -> float:
        """Median time of documents on the processor (over all its cores), each given as its pieces, all of them computed."""
        times = []
        for own in [pieces[0], *pieces[:TIMED]]:  # the first once more, as it warms up
            began = time.process_time()
            self.computed(own)
            times.append(1000 * (time.process_time() - began))
        return statistics.median(times[1:])


def whole(document: list[int]) -> list[list[int]]:
    """A document as its only piece."""
    return [document]


def truncated(document: list[int], length: int) -> list[list[int]]:
    """The first `length` tokens, [SEP] among them."""
    return [document if len(document) <= length else [*document[: length - 1], document[-1]]]


def chunks(document: list[int], size: int, overlap: bool = False) -> list[list[int]]:
    """As few pieces of at most `size` tokens, [CLS] and [SEP] of each counted, as there can be, and as equal.

    Args:
        overlap: each piece begins in the middle of the one before.
    """
    first, *inner, last = document
    joined = 2 if overlap else 1  # parts of a piece
    parts = max(math.ceil(joined * len(inner) / (size - 2)), joined)
    edges = [len(inner) * part // parts for part in range(parts + 1)]
    return [[first, *inner[start:end], last] for start, end in zip(edges, edges[joined:])]


@dataclass(frozen=True)
class Reading:
    """How documents become vectors.

    Attributes:
        cut: a document's pieces.
        best: a document is as similar to a query as the best of its pieces, each of which is a vector; otherwise the mean of
            the pieces' vectors is its vector.
    """

    cut: Callable[[list[int]], list[list[int]]]
    best: bool = False

    def similarities(self, encoder: Encoder, asked: list[list[int]], documents: list[list[int]]) -> torch.Tensor:
        """Cosines (queries, documents)."""
        queries = normalize(encoder.vectors(asked), dim=-1)
        pieces = [self.cut(document) for document in documents]
        vectors = encoder.vectors([piece for own in pieces for piece in own]).split([*map(len, pieces)])
        if self.best:
            return torch.stack([(queries @ normalize(own, dim=-1).T).amax(dim=1) for own in vectors], dim=1)
        return queries @ normalize(torch.stack([own.mean(dim=0) for own in vectors]), dim=-1).T


def ndcg(similarities: torch.Tensor, relevant: list[int], cut_off: int) -> torch.Tensor:
    """nDCG of each query, of which one document is relevant: 1 / log2(1 + its rank), 0 behind `cut_off`.

    Documents that are as similar as the relevant one count as before it.

    Args:
        similarities: (queries, documents).
    """
    own = similarities.gather(1, torch.tensor(relevant)[:, None])
    rank = (similarities >= own).sum(dim=1)
    return (1 / torch.log2(1 + rank.double())).where(rank <= cut_off, 0.0)


def interval(scores: list[float], groups: list[int], seed: int, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The middle 95 % of the mean's bootstrap distribution; what is drawn again is groups of queries, whole.

    Args:
        scores, groups: by query.
    """
    _, places = np.unique(groups, return_inverse=True)
    sums, numbers = np.bincount(places, weights=scores), np.bincount(places)
    return of_groups(sums, numbers, resamples, seed=seed)


@dataclass
class Score:
    """A method on a task at a length.

    Attributes:
        ndcg, depths, groups: by query: its score, where the answer is in its document, and what is drawn again together.
        vectors, milliseconds: of a document.
    """

    method: str
    task: str
    length: int
    ndcg: list[float]
    depths: list[float]
    groups: list[int]
    documents: int
    vectors: float
    milliseconds: float
    reading: str = ""

    def summary(self, seed: int) -> dict[str, Any]:
        """The mean with its interval, and the mean by depth (None where nothing lies)."""
        low, high = interval(self.ndcg, self.groups, seed)
        parts = [[] for _ in range(DEPTHS)]
        for score, depth in zip(self.ndcg, self.depths):
            parts[min(int(depth * DEPTHS), DEPTHS - 1)].append(score)
        return {
            "method": self.method,
            "task": self.task,
            "length": self.length,
            "documents": self.documents,
            "queries": len(self.ndcg),
            "ndcg": statistics.fmean(self.ndcg),
            "low": low,
            "high": high,
            "by_depth": [statistics.fmean(part) if part else None for part in parts],
            "vectors": self.vectors,
            "milliseconds": self.milliseconds,
            "reading": self.reading,
        }


class Comparison:
    """All methods on all tasks, what is done read from the output folder."""

    def __init__(self, arguments: LongArguments):
        self.arguments = arguments
        self.folder = Path(arguments.output_dir)
        self.source = arguments.model_name_or_path or packaged_minilm()
        trained = arguments.trained_length or (None if arguments.model_name_or_path else 128)
        self.checkpoint: Checkpoint = load_checkpoint(self.source, trained_length=trained)
        if self.checkpoint.pooling != "mean":
            raise ValueError(f"{self.source} takes the first token's vector for a text's; the mean is needed")
        self.tokenizer: PreTrainedTokenizerBase = self.checkpoint.tokenizer
        # What sentence-transformers would cut at, and what there are rows of positions for.
        self.limit = load_checkpoint(self.source, self.tokenizer).trained_length
        self.rows = longest_sequence(self.checkpoint.config) or self.limit
        self.chunks = [(size, overlap) for size, overlap in CHUNKS if size <= self.rows]
        unknown = self.tokenizer.unk_token
        learned, self.tested = (read_articles(file, unknown) for file in (arguments.train_file, arguments.test_file))
        self.development = learned[::DEVELOPMENT_EVERY]
        self.learned = [article for number, article in enumerate(learned) if number % DEVELOPMENT_EVERY]

    def run(self) -> str:
        """Compute what is missing, write the results and return the table."""
        for method in self.arguments.methods:
            done = {(score["task"], score["length"]) for score in self.recorded.read() if score["method"] == method}
            missing = [place for place in self.places() if place not in done]
            if missing:
                encoder = Encoder(self.model(method))
                for task, length in missing:
                    score = self.score(method, encoder, task, length)
                    self.recorded.add(asdict(score))
                    print(f"{method}, {task}, {length} tokens: {statistics.fmean(score.ndcg):.3f}", flush=True)
                del encoder
                gc.collect()
        return self.report()

    def places(self) -> Iterable[tuple[str, int]]:
        """Tasks and lengths."""
        for task in self.arguments.tasks:
            for length in self.arguments.lengths:
                if task != "articles" or length >= min(SHORTEST_ARTICLE, self.arguments.lengths[-1]):
                    yield task, length

    @cached_property
    def recorded(self) -> Runs:
        """Scores that are there."""
        return Runs(self.folder / "runs.jsonl", self.settings())

    def retrieval(self, task: str, length: int, texts: list[list[str]], seed: int) -> Retrieval:
        """The documents and queries of a task."""
        most = DEVELOPMENT_CANDIDATES if texts is self.development else self.arguments.candidates
        many = {name: min(getattr(self.arguments, name), most) for name in ("candidates", "queries")} | {"seed": seed}
        if task == "passkey":
            return passkey(self.tokenizer, length, **many)
        if task == "needle":
            haystack = [one for article in texts for paragraph in article for one in sentences(paragraph)]
            return needle(self.tokenizer, length, **many, haystack=haystack)
        return articles(self.tokenizer, texts, length, self.arguments.article_queries, seed)

    def asked(self, queries: list[str]) -> list[list[int]]:
        return self.tokenizer(queries, truncation=True, max_length=self.limit, padding=False)["input_ids"]

    def score(self, method: str, encoder: Encoder, task: str, length: int) -> Score:
        found = self.retrieval(task, length, self.tested, self.arguments.seed)
        reading, name = self.reading(method, task)
        similarities = reading.similarities(encoder, self.asked(found.queries), found.documents)
        pieces = [reading.cut(document) for document in found.documents]
        return Score(
            method,
            task,
            length,
            ndcg(similarities, found.relevant, found.cut_off).tolist(),
            found.depths,
            found.groups,
            len(found.documents),
            statistics.fmean(map(len, pieces)) if reading.best else 1,
            encoder.milliseconds(pieces),
            name,
        )

    def reading(self, method: str, task: str) -> tuple[Reading, str]:
        """How a method reads documents of a task, and what is said of it."""
        if method in ("truncated", "truncated late"):
            limit = self.limit if method == "truncated" else self.rows
            return Reading(partial(truncated, length=limit)), f"the first {limit} tokens"
        if method in ("chunk mean", "best chunk"):
            size, overlap = self.chosen_chunks[method][task]
            name = f"chunks of {size}, {'overlapping by half' if overlap else 'no overlap'}"
            return Reading(partial(chunks, size=size, overlap=overlap), best=method == "best chunk"), name
        return Reading(whole), ""

    @cached_property
    def chosen_chunks(self) -> dict[str, dict[str, tuple[int, bool]]]:
        """By method and task, the size and overlap of chunks with the highest mean on the development part."""
        scores = self.development_scores()
        return {
            method: {task: max(self.chunks, key=lambda one: own[chunk_name(*one)]) for task, own in of_tasks.items()}
            for method, of_tasks in scores.items()
        }

    def development_scores(self) -> dict[str, dict[str, dict[str, float]]]:
        """By method, task and chunks, the mean over lengths on the development part; from the folder where it is there."""
        file = self.folder / "development.json"
        scores = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        methods = ("chunk mean", "best chunk")
        missing = [task for task in self.arguments.tasks if task not in scores.get(methods[0], {})]
        if missing:
            encoder = Encoder(self.checkpoint.model)
            lengths = [
                one for one in DEVELOPMENT_LENGTHS if one <= self.arguments.lengths[-1]
            ] or self.arguments.lengths
            for task in missing:
                usual = [one for one in lengths if task != "articles" or one >= SHORTEST_ARTICLE] or lengths[-1:]
                found = [self.retrieval(task, length, self.development, DEVELOPMENT_SEED) for length in usual]
                for method in methods:
                    scores.setdefault(method, {})[task] = {
                        chunk_name(size, overlap): statistics.fmean(
                            self.mean_score(encoder, one, size, overlap, method == "best chunk") for one in found
                        )
                        for size, overlap in self.chunks
                    }
                write_json(file, scores)
        return scores

    def mean_score(self, encoder: Encoder, found: Retrieval, size: int, overlap: bool, best: bool) -> float:
        reading = Reading(partial(chunks, size=size, overlap=overlap), best)
        similarities = reading.similarities(encoder, self.asked(found.queries), found.documents)
        return ndcg(similarities, found.relevant, found.cut_off).mean().item()

    def model(self, method: str) -> PreTrainedModel:
        """What a method reads with."""
        longest = self.arguments.longest
        if method in TABLES:
            return self.converted("absolute", max_length=longest, extend=TABLES[method], train="none")
        if method not in CONVERSIONS:
            return self.checkpoint.model.base_model
        output = self.folder / "conversions" / file_name(method)
        if not output.is_dir():
            conversion, steps = CONVERSIONS[method], self.arguments.max_steps
            usual = {"max_length": min(longest, self.arguments.distilled_length), "max_steps": steps}
            self.converted(conversion.scheme, **usual | conversion.arguments, output=output, resume=True)
        model = AutoModel.from_pretrained(output)
        reach = longest_sequence(model.config)
        return lengthen(model, longest, reach) if reach and reach < longest else model

    def converted(self, scheme: str, **arguments: Any) -> PreTrainedModel:
        """A conversion on the articles to learn from, its report measured on a little of the others."""
        usual = {
            "text": [self.written("learned", self.learned)],
            "held_out": [self.written("held_out", self.development[:2])],
            "trained_length": self.checkpoint.trained_length,
            "seed": self.arguments.seed,
        }
        model, _ = convert(self.source, scheme, **usual | arguments)
        return model.base_model

    def written(self, name: str, texts: list[list[str]]) -> Path:
        """A folder of articles, a file each."""
        return write_articles(self.folder / name, texts)

    def settings(self) -> dict[str, Any]:
        """What a score depends on, apart from method, task and length."""
        kept = asdict(self.arguments)
        for name in ("methods", "tasks", "lengths", "output_dir"):
            del kept[name]
        files = {name: Path(kept[name]).name for name in ("train_file", "test_file")}
        return kept | files | {"trained_length": self.checkpoint.trained_length, "truncated_to": self.limit}

    def report(self) -> str:
        """Write all that is known into the output folder, and return the tables."""
        scores = [Score(**score) for score in self.recorded.read()]
        order = {method: number for number, method in enumerate(METHODS)}
        scores.sort(key=lambda one: (TASKS.index(one.task), order[one.method], one.length))
        summaries = [score.summary(self.arguments.seed) for score in scores]
        differences = [
            difference(score, other, self.arguments.seed)
            for score in scores
            for other in scores
            if score.method == COMPARED != other.method and (score.task, score.length) == (other.task, other.length)
        ]
        file = self.folder / "development.json"
        development = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        packages = ("hf_posenc", "transformers", "torch")
        entries = {
            "settings": self.settings(),
            "versions": {"python": platform.python_version(), **{package: version(package) for package in packages}},
            "development": development,
            "scores": summaries,
            "differences": differences,
        }
        write_json(self.folder / "results.json", entries)
        write_whole({self.folder / "results.png": plot(summaries)})
        return page(entries)


def page(found: dict[str, Any]) -> str:
    """All tables of what is in results.json."""
    parts = [*tables(found["scores"]), *difference_tables(found["differences"])]
    return "\n\n".join(parts + ([development_table(found["development"])] if found["development"] else []))


def difference(score: Score, other: Score, seed: int) -> dict[str, Any]:
    """How much higher a method scores than another on the same queries, with the interval of that."""
    differences = [a - b for a, b in zip(score.ndcg, other.ndcg, strict=True)]
    low, high = interval(differences, score.groups, seed)
    mean = statistics.fmean(differences)
    return {"other": other.method, "task": score.task, "length": score.length, "mean": mean, "low": low, "high": high}


def file_name(method: str) -> str:
    return method.replace(" ", "_").replace(",", "")


def chunk_name(size: int, overlap: bool) -> str:
    return f"{size}{' overlapping' if overlap else ''}"


def tables(summaries: list[dict[str, Any]]) -> list[str]:
    """Markdown: for each task the scores by length and, at one length, by depth, with the cost of a document."""
    found = []
    for task in dict.fromkeys(one["task"] for one in summaries):
        own = [one for one in summaries if one["task"] == task]
        lengths = sorted({one["length"] for one in own})
        found.append(length_table(task, own, lengths))
        found.append(depth_table(task, own, 2048 if 2048 in lengths else lengths[-1]))
    return found


def length_table(task: str, summaries: list[dict[str, Any]], lengths: list[int]) -> str:
    rows = []
    for method in dict.fromkeys(one["method"] for one in summaries):
        by_length = {one["length"]: one for one in summaries if one["method"] == method}
        cells = [score_cell(by_length[length]) if length in by_length else "" for length in lengths]
        rows.append([method, *cells])
    return as_markdown([TITLES[task], *(f"{length:,}" for length in lengths)], rows)


def development_table(scores: dict[str, dict[str, dict[str, float]]]) -> str:
    """What chunks reached on the development part, a row for each size with and without overlap."""
    columns = [(method, task) for method, tasks in scores.items() for task in tasks]
    rows = [
        [size, *(f"{scores[method][task][size]:.2f}" for method, task in columns)]
        for size in scores[columns[0][0]][columns[0][1]]
    ]
    return as_markdown(
        ["tokens of a chunk, development part", *(f"{method}: {TITLES[task]}" for method, task in columns)], rows
    )


def difference_tables(differences: list[dict[str, Any]]) -> list[str]:
    """For each task, by length, how much higher [`COMPARED`] scores than every other method; bold where that is sure."""
    found = []
    for task in dict.fromkeys(one["task"] for one in differences):
        by_place = {(one["other"], one["length"]): one for one in differences if one["task"] == task}
        lengths = sorted({length for _, length in by_place})
        rows = []
        for other in dict.fromkeys(other for other, _ in by_place):
            cells = [difference_cell(by_place.get((other, length))) for length in lengths]
            rows.append([other, *cells])
        found.append(
            as_markdown([f"{TITLES[task]}: `{COMPARED}` minus", *(f"{length:,}" for length in lengths)], rows)
        )
    return found


def difference_cell(one: dict[str, Any] | None) -> str:
    if one is None:
        return ""
    written = f"{one['mean']:+.2f} ({one['low']:+.2f} to {one['high']:+.2f})"
    return f"**{written}**" if one["low"] > 0 or one["high"] < 0 else written


def score_cell(one: dict[str, Any]) -> str:
    return f"{one['ndcg']:.2f} ({one['low']:.2f}–{one['high']:.2f})"


def depth_table(task: str, summaries: list[dict[str, Any]], length: int) -> str:
    edges = [f"{100 * part // DEPTHS}–{100 * (part + 1) // DEPTHS} %" for part in range(DEPTHS)]
    rows = []
    for one in summaries:
        if one["length"] == length:
            parts = ["" if part is None else f"{part:.2f}" for part in one["by_depth"]]
            rows.append([one["method"], *parts, f"{one['vectors']:.0f}", f"{one['milliseconds']:.0f}"])
    return as_markdown([f"{TITLES[task]}, {length:,} tokens, by depth", *edges, "vectors per document", "ms"], rows)


def plot(summaries: list[dict[str, Any]]) -> bytes:
    """A PNG: a panel for each task, nDCG by length, a line for each method, bars for its interval; untrained tables in grey."""
    import io

    import matplotlib.pyplot as plt

    tasks = [*dict.fromkeys(one["task"] for one in summaries)]
    methods = [method for method in METHODS if any(one["method"] == method for one in summaries)]
    greys = iter(["0.3", "0.5", "0.7"])
    colours = iter(["C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9"])  # C7 is grey
    colour = {method: next(greys if method in TABLES else colours) for method in METHODS}
    figure, axes = plt.subplots(1, len(tasks), figsize=(4.5 * len(tasks) + 2, 4.5), squeeze=False, sharey=True)
    for axis, task in zip(axes[0], tasks):
        for number, method in enumerate(methods):
            own = [one for one in summaries if (one["task"], one["method"]) == (task, method)]
            lengths, middle = np.array([one["length"] for one in own]), np.array([one["ndcg"] for one in own])
            around = np.abs(np.array([[one["low"], one["high"]] for one in own]).T - middle)
            shift = 2 ** (0.02 * (number - len(methods) / 2))  # so that bars do not hide each other
            style = "--" if method in BASELINES else ":" if method in TABLES else "-"
            shown = {"label": method, "color": colour[method], "linestyle": style, "marker": "o", "markersize": 3}
            axis.errorbar(lengths * shift, middle, around, capsize=2, **shown)
        axis.set_xscale("log", base=2)
        ticks = sorted({one["length"] for one in summaries if one["task"] == task})
        axis.set_xticks(ticks, [f"{length:,}" for length in ticks])
        cut_off = 10 if task == "articles" else 1
        axis.set(xlabel="tokens of a document", title=f"{TITLES[task]}, nDCG@{cut_off}")
        axis.grid(alpha=0.3)
    axes[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    plt.close(figure)
    return content.getvalue()


def main() -> None:
    try:
        [arguments] = ScriptParser((LongArguments,)).parse()
        if find_spec("matplotlib") is None:  # not after an hour
            raise ImportError('the plot needs matplotlib: pip install -c constraints.txt -e ".[analysis]"')
        check_writable(arguments.output_dir)
        comparison = Comparison(arguments)
        for task, length in comparison.places():  # mistakes of lengths, before weights are read
            comparison.retrieval(task, length, comparison.tested, arguments.seed)
        _ = comparison.recorded  # settings of other scores, too
    except (OSError, ValueError, TypeError, ImportError) as error:
        sys.exit(f"error: {error}")
    print(f"\n{comparison.run()}\n\nwritten to {comparison.folder}")


if __name__ == "__main__":
    main()
