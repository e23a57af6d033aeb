"""Meetings of 10,000 words found by what was said in them: QMSum, whole and in units, with BM25, chunks, longer tables and conversions.

    python research/long_documents/qmsum.py --data DATA                      # all parts; the same command goes on where it stopped
    python research/long_documents/qmsum.py --data DATA --parts units-1024   # one
    python research/long_documents/qmsum.py --data DATA --table              # the tables, of what is there

DATA holds qmsum/documents.jsonl.gz and queries.jsonl. Whole meetings, found by the answers to questions about them, are LongEmbed's task of this name (Zhu et al. 2024,
arXiv:2404.12096), whose published figures stand beside. Units are turns in their order, as many as fit; a unit is right for a query where it
has one of the turns that annotators named (`relevant_turns`; queries without any are left out).

What a method can choose (size and overlap of chunks, the length that is cut at, how the table is made longer) is chosen by the queries of the 35 meetings of `val`, and
the score is that of the 162 of `train`: nothing here is trained on either. Intervals are over meetings. Vectors are kept in the work folder; scores of each
meeting are in results/qmsum.
"""

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import chunk_pooling
import numpy as np
import torch
from long_documents import Encoder, chunks, truncated
from long_vectors import difference_cell
from safetensors.torch import load_file, save_file
from sklearn.feature_extraction.text import CountVectorizer
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from hf_posenc._utils import as_markdown
from hf_posenc.conversion import lengthen
from hf_posenc.files import whole_file, write_whole


sys.path += [str(Path(__file__).parents[2] / name) for name in ("examples", "benchmarks", "research")]

from intervals import of_groups  # noqa: E402
from minilm import packaged_minilm  # noqa: E402
from report import circumstances  # noqa: E402


RESULTS = Path(__file__).parent / "results" / "qmsum"
WORK = Path(__file__).parents[2] / "outputs" / "qmsum"
UNITS = (256, 512, 1024)
PARTS = ("whole", *(f"units-{size}" for size in UNITS))
ASKED = ("answers", "questions")
# Where the package's MiniLM cuts.
CUT = 256
CUTS = (128, 256, 512)
CHUNKS = ((64, False), (64, True), (128, False), (128, True), (256, False), (256, True))
# Of what is behind a stored vector.
OF_THE_REST = ((128, False), (128, True), (256, False))
POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean of chunks": chunk_pooling.mean,
    "DICE, maximum": chunk_pooling.maximum,
    "DICE, top by norm": chunk_pooling.norm_top_mean,
    "DICE, softmax of norms": chunk_pooling.norm_softmax_mean,
}
BEST = "best chunk"
UPGRADED = "stored vector, and chunks of the rest"
UNTRAINED = ("tile", "mean")
CUT_OFF = 10
# LongEmbed's table: nDCG@10 over all queries of whole meetings by answers.
PUBLISHED = {
    "contriever, 512 tokens": 0.255,
    "e5-base-v2, 512": 0.238,
    "bge-base, 512": 0.224,
    "e5-base-v2, extended to 4,096": 0.356,
    "bge-m3, 8,192": 0.355,
    "jina-v2, 8,192": 0.389,
    "e5-mistral-7B, 32,768": 0.510,
}


@dataclass(frozen=True)
class Query:
    """What is asked of a meeting.

    Attributes:
        turns: indices of turns that answer; empty where nobody named them.
    """

    meeting: int
    question: str
    answer: str
    turns: frozenset[int]


@dataclass(frozen=True)
class Document:
    """A meeting or a part of it: its tokens without special tokens, its text, its turns."""

    meeting: int
    ids: tuple[int, ...]
    text: str
    turns: range


class Meetings:
    """All meetings with their queries."""

    def __init__(self, data: Path, tokenizer: Any, number: int | None = None):
        with gzip.open(data / "qmsum" / "documents.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file][:number]
        self.tokenizer = tokenizer
        self.names = [row["id"] for row in rows]
        self.is_val = np.array([row["split"] == "val" for row in rows])
        self.turns = [[f"{speaker}: {text}" for speaker, text in row["turns"]] for row in rows]
        lines = (data / "qmsum" / "queries.jsonl").read_text(encoding="utf-8").splitlines()
        place = {name: index for index, name in enumerate(self.names)}
        self.queries = [
            Query(place[row["document"]], row["query"], row["answer"], spread(row["relevant_turns"] or ()))
            for row in map(json.loads, lines)
            if row["document"] in place
        ]

    @cached_property
    def ids(self) -> list[list[list[int]]]:
        """Tokens of each turn."""
        encode = self.tokenizer
        return [encode(turns, add_special_tokens=False, verbose=False)["input_ids"] for turns in self.turns]

    def documents(self, part: str) -> list[Document]:
        """Whole meetings, or units of turns: as many as fit into so many tokens, special tokens counted; a longer turn is a unit."""
        size = None if part == "whole" else int(part.removeprefix("units-")) - 2
        found = []
        for meeting, own in enumerate(self.ids):
            begin, used = 0, 0
            for turn, ids in enumerate([*own, None]):
                if ids is None or (size is not None and used and used + len(ids) > size):
                    joined = tuple(token for part in own[begin:turn] for token in part)
                    text = "\n".join(self.turns[meeting][begin:turn])
                    found.append(Document(meeting, joined, text, range(begin, turn)))
                    begin, used = turn, 0
                used += len(ids or ())
        return found

    def relevant(self, documents: Sequence[Document], asked: str) -> list[tuple[Query, list[int]]]:
        """Queries, and which documents are right for each."""
        of_meeting: dict[int, list[int]] = {}
        for number, document in enumerate(documents):
            of_meeting.setdefault(document.meeting, []).append(number)
        found = []
        for query in self.queries:
            own = of_meeting[query.meeting]
            if len(own) > 1 or asked == "questions":
                own = [number for number in own if query.turns & {*documents[number].turns}]
            if own:
                found.append((query, own))
        return found


def spread(spans: Sequence[Sequence[str]]) -> frozenset[int]:
    """Turns of spans, the last of each counted in."""
    return frozenset(turn for first, last in spans for turn in range(int(first), int(last) + 1))


@dataclass(frozen=True)
class Kept:
    """Vectors of all pieces (pieces, width), how many each text has (texts,), and seconds of a core."""

    vectors: torch.Tensor
    numbers: torch.Tensor
    seconds: torch.Tensor

    def by_text(self) -> list[torch.Tensor]:
        return [*self.vectors.float().split(self.numbers.tolist())]


class Vectors:
    """Means of last states, one model's; kept in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def kept(self, name: str, model: Callable[[], PreTrainedModel], rows: Callable[[], list[list[list[int]]]]) -> Kept:
        """The vectors of each text's pieces, computed where they are not there."""
        file = self.folder / f"{name}.safetensors"
        if not file.is_file():
            made = rows()
            flat = [piece for own in made for piece in own]
            began = time.process_time()
            vectors = torch.stack(Encoder(model()).computed(flat))
            seconds = torch.tensor([time.process_time() - began])
            numbers = torch.tensor([len(own) for own in made])
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(file) as place:
                save_file({"vectors": vectors.half(), "numbers": numbers, "seconds": seconds}, place)
            print(
                f"{name}: {len(flat)} passes of {sum(map(len, flat)):,} tokens in {float(seconds):.0f} seconds",
                flush=True,
            )
        return Kept(**load_file(file))


@dataclass(frozen=True)
class Method:
    """How a document is found.

    Attributes:
        name: with its settings.
        family: what settings are chosen within.
        similarities: (queries, documents).
        vectors: of a document, on average.
        milliseconds: of a core for a document.
    """

    name: str
    family: str
    similarities: np.ndarray
    vectors: float
    milliseconds: float


def bm25(documents: Sequence[str], queries: Sequence[str], k1: float = 1.2, b: float = 0.75) -> np.ndarray:
    """Robertson and Zaragoza 2009, with idf = log(1 + (N - n + 0.5) / (n + 0.5)): (queries, documents).

    Words are runs of letters and digits in lower case, of one or more.
    """
    counter = CountVectorizer(token_pattern=r"(?u)\b\w+\b")
    counts = counter.fit_transform(documents).astype(np.float64).tocsr()
    lengths = np.asarray(counts.sum(axis=1)).ravel()
    of_words = np.bincount(counts.indices, minlength=counts.shape[1])
    idf = np.log(1 + (len(documents) - of_words + 0.5) / (of_words + 0.5))
    weights = counts.copy()
    rows = np.repeat(np.arange(len(documents)), np.diff(counts.indptr))
    denominator = counts.data + k1 * (1 - b + b * lengths[rows] / lengths.mean())
    weights.data = counts.data * (k1 + 1) / denominator * idf[counts.indices]
    return np.asarray((counter.transform(queries) @ weights.T).todense())


def fused(first: np.ndarray, second: np.ndarray, k: int = 60) -> np.ndarray:
    """Reciprocal rank fusion (Cormack et al. 2009): Σ 1 / (k + rank)."""
    return sum(1 / (k + 1 + np.argsort(np.argsort(-one, axis=1, kind="stable"), axis=1)) for one in (first, second))


def ndcg(similarities: np.ndarray, relevant: Sequence[Sequence[int]], cut_off: int = CUT_OFF) -> np.ndarray:
    """Of each query, of which several documents may be right; those that are as similar stand in the order of documents."""
    order = np.argsort(-similarities, axis=1, kind="stable")[:, :cut_off]
    gains = 1 / np.log2(np.arange(2, cut_off + 2))
    found = [np.isin(row, own) @ gains[: len(row)] for row, own in zip(order, relevant)]
    return np.array(found) / np.array([gains[: min(len(own), cut_off)].sum() for own in relevant])


class Bench:
    """A checkpoint's vectors of the documents of a part."""

    def __init__(self, meetings: Meetings, part: str, source: str, name: str, work: Path, models: dict[str, Path]):
        self.meetings, self.part, self.source, self.models = meetings, part, source, models
        self.documents = meetings.documents(part)
        self.vectors, self.of_queries = (Vectors(work / f"{name}-{what}") for what in (part, "queries"))

    @cached_property
    def original(self) -> PreTrainedModel:
        return AutoModel.from_pretrained(self.source)

    def tokens(self, inner: Sequence[int]) -> list[int]:
        """With special tokens."""
        return [self.meetings.tokenizer.cls_token_id, *inner, self.meetings.tokenizer.sep_token_id]

    def first(self, name: str, model: Callable[[], PreTrainedModel], length: int) -> Kept:
        """The first `length` tokens of each document, read by a model."""
        return self.vectors.kept(
            name, model, lambda: [truncated(self.tokens(document.ids), length) for document in self.documents]
        )

    def cut(self, length: int) -> Kept:
        return self.first(f"cut at {length}", lambda: self.original, length)

    def chunks(self, size: int, overlap: bool) -> Kept:
        return self.vectors.kept(
            f"chunks of {size}{', overlapping' * overlap}",
            lambda: self.original,
            lambda: [chunks(self.tokens(document.ids), size, overlap) for document in self.documents],
        )

    def rest(self, size: int, overlap: bool) -> Kept:
        """Chunks of what the checkpoint cuts off; a document that it reads as a whole has none."""
        return self.vectors.kept(
            f"rest in chunks of {size}{', overlapping' * overlap}",
            lambda: self.original,
            lambda: [
                chunks(self.tokens(rest), size, overlap) if rest else []
                for rest in (document.ids[CUT - 2 :] for document in self.documents)
            ],
        )

    def upgraded(self, size: int, overlap: bool) -> tuple[torch.Tensor, Kept]:
        """A stored vector, of length 1, and the mean of the rest's chunks, each by its tokens' share."""
        stored, rest = normalize(self.cut(CUT).vectors.float(), dim=-1), self.rest(size, overlap)
        merged = []
        for document, first, own in zip(self.documents, stored, rest.by_text(), strict=True):
            read = min(len(document.ids), CUT - 2)
            left = len(document.ids) - read
            merged.append(first if not left else read * first + left * normalize(own.mean(dim=0), dim=-1))
        return torch.stack(merged), rest

    def texts(self, asked: str) -> list[str]:
        return [getattr(query, asked.removesuffix("s")) for query in self.meetings.queries]

    def queries(self, asked: str) -> torch.Tensor:
        """Vectors of all queries, cut where the checkpoint cuts."""
        return self.of_queries.kept(asked, lambda: self.original, lambda: self.encoded(asked)).vectors.float()

    def encoded(self, asked: str) -> list[list[list[int]]]:
        encoded = self.meetings.tokenizer(self.texts(asked), add_special_tokens=False, verbose=False)["input_ids"]
        return [truncated(self.tokens(ids), CUT) for ids in encoded]

    def methods(self, asked: str) -> Iterator[Method]:
        queries = normalize(self.queries(asked), dim=-1)
        number = len(self.documents)

        def dense(name: str, family: str, vectors: torch.Tensor, kept: Kept) -> Method:
            similarities = (queries @ normalize(vectors, dim=-1).T).numpy()
            return Method(name, family, similarities, 1.0, 1000 * float(kept.seconds) / number)

        words = bm25([document.text for document in self.documents], self.texts(asked))
        yield Method("BM25", "BM25", words, 0.0, 0.0)
        for length in CUTS:
            kept = self.cut(length)
            yield dense(f"cut at {length}", "cut", kept.vectors.float(), kept)
        for size, overlap in CHUNKS:
            kept = self.chunks(size, overlap)
            own, label = kept.by_text(), f"of {size}{', overlapping' * overlap}"
            for pooled, function in POOLED.items():
                one = dense(f"{pooled} {label}", pooled, torch.stack([function(pieces) for pieces in own]), kept)
                yield one
                if pooled == "mean of chunks":
                    yield Method(
                        f"BM25 and {one.name}",
                        f"BM25 and {pooled}",
                        fused(words, one.similarities),
                        1.0,
                        one.milliseconds,
                    )
            flat = normalize(kept.vectors.float(), dim=-1)
            starts = np.concatenate([[0], np.cumsum(kept.numbers.numpy())[:-1]])
            best = np.maximum.reduceat((queries @ flat.T).numpy(), starts, axis=1)
            seconds = 1000 * float(kept.seconds) / number
            if (size, overlap) in OF_THE_REST and any(len(document.ids) > CUT - 2 for document in self.documents):
                yield dense(f"{UPGRADED} {label}", UPGRADED, *self.upgraded(size, overlap))
            yield Method(f"{BEST} {label}", BEST, best, len(flat) / number, seconds)
            yield Method(
                f"BM25 and {BEST} {label}", f"BM25 and {BEST}", fused(words, best), len(flat) / number, seconds
            )
        if self.part == "units-1024":
            for method in UNTRAINED:
                name, longer = f"longer table, {method}", partial(lengthen, self.original, 1024, CUT, method)
                kept = self.first(f"{name}, 1024", longer, 1024)
                yield dense(f"{name}, untrained", "longer table, untrained", kept.vectors.float(), kept)
        if self.part in ("whole", "units-1024"):
            for name, folder in self.models.items():
                length = min(8192, AutoTokenizer.from_pretrained(folder).model_max_length)
                kept = self.first(f"{name}, {length}", partial(AutoModel.from_pretrained, folder), length)
                yield dense(name, name, kept.vectors.float(), kept)


def scores_of(bench: Bench, asked: str) -> dict[str, Any]:
    """nDCG of each method, summed over the queries of each meeting, and what it costs."""
    relevant = bench.meetings.relevant(bench.documents, asked)
    places = [bench.meetings.queries.index(query) for query, _ in relevant]
    right = [own for _, own in relevant]
    meetings = np.array([query.meeting for query, _ in relevant])
    methods = {}
    for method in bench.methods(asked):
        found = np.bincount(meetings, ndcg(method.similarities[places], right), len(bench.meetings.names))
        methods[method.name] = {
            "family": method.family,
            "vectors": round(method.vectors, 1),
            "milliseconds": round(method.milliseconds, 1),
            "ndcg": [round(float(one), 4) for one in found],
        }
    return {
        "val": bench.meetings.is_val.tolist(),
        "queries": np.bincount(meetings, minlength=len(bench.meetings.names)).tolist(),
        "documents": len(bench.documents),
        "methods": methods,
        "circumstances": circumstances(),
    }


REFERENCE = "mean of chunks"
# What there is today, and what `hf_posenc.extend` makes of it: shown, whatever was chosen.
FIXED = (f"cut at {CUT}", f"mean of chunks of {CUT}")


def mean(sums: np.ndarray, queries: np.ndarray) -> float:
    """Over queries."""
    return float(sums.sum() / queries.sum())


def chosen(result: dict[str, Any]) -> dict[str, str]:
    """By family, the method that is best on the queries of `val`."""
    val, queries = np.array(result["val"]), np.array(result["queries"])
    best: dict[str, tuple[float, str]] = {}
    for name, method in result["methods"].items():
        score = mean(np.array(method["ndcg"])[val], queries[val])
        if method["family"] not in best or score > best[method["family"]][0]:
            best[method["family"]] = score, name
    return {family: name for family, (_, name) in best.items()}


def table(result: dict[str, Any], published: bool = False) -> str:
    """A row for each family, and for [`FIXED`]: what was chosen, its score on the other meetings, the difference to the mean of chunks, and the score over all queries."""
    test, queries = ~np.array(result["val"]), np.array(result["queries"])
    picked = chosen(result)
    reference = np.array(result["methods"][picked[REFERENCE]]["ndcg"])
    rows = []
    fixed = [name for name in FIXED if name in result["methods"] and name not in picked.values()]
    for name in [*picked.values(), *fixed]:
        method = result["methods"][name]
        own = np.array(method["ndcg"])
        less = (own - reference)[test], queries[test]
        measured = {"mean": mean(*less), "interval": of_groups(*less)}
        cell = "" if name == picked[REFERENCE] else difference_cell(measured)
        cells = [f"{method['vectors']:.0f}", f"{method['milliseconds']:.0f}", f"{mean(own[test], queries[test]):.3f}"]
        rows.append([f"{name} (not chosen)" if name in fixed else name, *cells, cell, f"{mean(own, queries):.3f}"])
    if published:
        rows += [[f"*{name}*", "1", "", "", "", f"{score:.3f}"] for name, score in PUBLISHED.items()]
    header = ["chosen on `val`", "vectors", "core ms", "nDCG@10", "less the mean of chunks", "all queries"]
    return as_markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--asked", nargs="+", choices=ASKED, default=[*ASKED])
    parser.add_argument("--model", help="folder of the checkpoint; default: the packaged MiniLM")
    parser.add_argument("--name", default="minilm", help="what its results are called")
    parser.add_argument(
        "--converted", nargs="*", default=[], metavar="NAME=FOLDER", help="models that read documents as a whole"
    )
    parser.add_argument("--meetings", type=int, help="only so many, to try it out")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    parser.add_argument("--work_dir", type=Path, default=WORK)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        if options.data is None:
            parser.error("--data is missing")
        torch.set_num_threads(1)
        source = options.model or packaged_minilm()
        meetings = Meetings(options.data, AutoTokenizer.from_pretrained(source), options.meetings)
        models = {name: Path(folder) for name, _, folder in (one.partition("=") for one in options.converted)}
        for part in options.parts:
            bench = Bench(meetings, part, source, options.name, options.work_dir, models)
            for asked in options.asked:
                file = options.output_dir / f"{options.name}-{part}-{asked}.json"
                write_whole({file: json.dumps(scores_of(bench, asked)) + "\n"})
    for file in sorted(options.output_dir.glob(f"{options.name}-*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        print(f"\n{file.stem}\n\n{table(result, file.stem.endswith('whole-answers'))}")


if __name__ == "__main__":
    main()
