"""Meetings of 10,000 words found by what was said in them: QMSum, whole and in units, with BM25, chunks, longer tables and conversions.

    python research/long_documents/qmsum.py --data DATA                      # all parts; what has a score is not scored again
    python research/long_documents/qmsum.py --data DATA --parts units-1024   # one
    python research/long_documents/qmsum.py --data DATA --converted rope     # another model, made where it is not there
    python research/long_documents/qmsum.py --data DATA --table              # the tables, of what is there
    python research/long_documents/qmsum.py --data DATA --model FOLDER --name mpnet --cut 384 --val_alone --parts units-1024

DATA holds qmsum/documents.jsonl.gz and queries.jsonl. Whole meetings, found by the answers to questions about them, are LongEmbed's task of this name (Zhu et al. 2024,
arXiv:2404.12096), whose published figures stand beside. Units are turns in their order, as many as fit; a unit is right for a query where it
has one of the turns that annotators named (`relevant_turns`; queries without any are left out).

What a method can choose (size and overlap of chunks, the length that is cut at, how the table is made longer) is chosen by the queries of the 35 meetings of `val`, and
the score is that of the 162 of `train`: nothing here is trained on either. With `--val_alone` nothing is chosen: all that was run is shown, with its score on these 35. Intervals are over meetings. Vectors are kept in the work folder; scores of each
meeting are in results/qmsum.
"""

import argparse
import gzip
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import chunk_pooling
import numpy as np
import torch
from long_documents import Encoder, chunks, file_name, truncated
from long_texts import wikitext_files
from long_vectors import difference_cell, late_chunks, states_of
from safetensors.torch import load_file, save_file
from sklearn.feature_extraction.text import CountVectorizer
from text_targets import LENGTH, TRAINED, Trials
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from hf_posenc import convert
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
# As `split` says.
VAL = "val"
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
UNTRAINED = ("tile", "mean", "interpolate")
# Of models that read documents as a whole.
LATE_SIZE = 128
LATE = f"best late chunk of {LATE_SIZE}"
CUT_OFF = 10
# Name -> scheme and flags; each is converted in so many steps to read documents of up to this many tokens.
CONVERSIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", {}),
    "rope": ("rope", {}),
    "t5, window of 128": ("t5", {"position_window": 128, "position_global_every": 0}),
}
STEPS, LONGEST = 400, 8192
# Rounds of timing, and documents in each: units, and whole meetings.
ROUNDS, TIMED = 3, (40, 3)
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
    """All meetings with their queries, or the first of them, or those of `val`."""

    def __init__(self, data: Path, tokenizer: Any, number: int | None = None, val_alone: bool = False):
        with gzip.open(data / "qmsum" / "documents.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = [row for row in map(json.loads, file) if row["split"] == VAL or not val_alone][:number]
        self.tokenizer = tokenizer
        self.names = [row["id"] for row in rows]
        self.is_val = np.array([row["split"] == VAL for row in rows])
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
    """Vectors of texts, one model's; kept in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def kept(self, name: str, compute: Callable[[], list[torch.Tensor]]) -> Kept:
        """The vectors of each text (vectors, width), computed where they are not there."""
        file = self.folder / f"{name}.safetensors"
        if not file.is_file():
            began = time.process_time()
            made = compute()
            seconds = torch.tensor([time.process_time() - began])
            numbers = torch.tensor([len(own) for own in made])
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(file) as place:
                save_file({"vectors": torch.cat(made).half(), "numbers": numbers, "seconds": seconds}, place)
            print(f"{name}: {int(numbers.sum()):,} vectors in {float(seconds):.0f} seconds", flush=True)
        return Kept(**load_file(file))


def means(model: PreTrainedModel, texts: Sequence[list[list[int]]]) -> list[torch.Tensor]:
    """The mean of the last states of each piece of each text, (pieces, width)."""
    flat = [piece for own in texts for piece in own]
    return [*torch.stack(Encoder(model).computed(flat)).split([len(own) for own in texts])]


def whole_and_late(model: PreTrainedModel, texts: Sequence[list[list[int]]]) -> list[torch.Tensor]:
    """Of each text, a piece: the mean of its last states, and then its late chunks, (1 + chunks, width)."""
    read = (states_of(model.eval(), ids) for [ids] in texts)
    return [torch.cat([states.mean(dim=0, keepdim=True), late_chunks(states, LATE_SIZE)]) for states in read]


@dataclass(frozen=True)
class Found:
    """What a method finds.

    Attributes:
        similarities: (queries, documents).
        vectors: of a document, on average.
    """

    similarities: np.ndarray
    vectors: float


@dataclass(frozen=True)
class Method:
    """How a document is found.

    Attributes:
        name: with its settings.
        family: what settings are chosen within.
        find: by what is asked.
        kept: computes what is read of all documents, or has it; none where no model reads them.
    """

    name: str
    family: str
    find: Callable[[str], Found]
    kept: Callable[[], Kept] | None = None


def converted(name: str, source: str, data: Path, tokenizer: Any, work: Path) -> Path:
    """Folder of one of [`CONVERSIONS`], of WikiText-2's validation text; made where it is not there."""
    scheme, flags = CONVERSIONS[name]
    output = work / "conversions" / f"{file_name(name)}-{STEPS}-{LONGEST}"
    if not output.is_dir():
        texts = wikitext_files(data, tokenizer, work / "texts")
        limits = {"trained_length": CUT, "max_length": LONGEST, "max_steps": STEPS}
        convert(source, scheme, text=[texts], output=output, resume=True, **limits, **flags)
    return output


def made(name: str, source: str, data: Path, tokenizer: Any, work: Path) -> Path:
    """Folder of one of [`CONVERSIONS`] or [`TRAINED`]; made where it is not there."""
    if name in CONVERSIONS:
        return converted(name, source, data, tokenizer, work)
    output = work / "conversions" / f"{file_name(name)}-{LENGTH}"
    if not output.is_dir():
        Trials(source, data, work).write(name, output)
    return output


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

    def __init__(
        self,
        meetings: Meetings,
        part: str,
        source: str,
        name: str,
        work: Path,
        models: dict[str, Path],
        every: int = 1,
        cut: int = CUT,
    ):
        self.meetings, self.part, self.source, self.models, self.limit = meetings, part, source, models, cut
        self.documents = meetings.documents(part)[::every]
        self.by_words = cache(self._by_words)
        self.vectors, self.of_queries = (Vectors(work / f"{name}-{what}") for what in (part, "queries"))

    @cached_property
    def original(self) -> PreTrainedModel:
        return AutoModel.from_pretrained(self.source)

    def tokens(self, inner: Sequence[int]) -> list[int]:
        """With special tokens."""
        return [self.meetings.tokenizer.cls_token_id, *inner, self.meetings.tokenizer.sep_token_id]

    def firsts(self, length: int) -> list[list[list[int]]]:
        """The first tokens of each document, as its only piece."""
        return [truncated(self.tokens(document.ids), length) for document in self.documents]

    def cut(self, length: int) -> Kept:
        return self.vectors.kept(f"cut at {length}", lambda: means(self.original, self.firsts(length)))

    def chunks(self, size: int, overlap: bool) -> Kept:
        def compute() -> list[torch.Tensor]:
            return means(
                self.original, [chunks(self.tokens(document.ids), size, overlap) for document in self.documents]
            )

        return self.vectors.kept(f"chunks {of_size(size, overlap)}", compute)

    def rest(self, size: int, overlap: bool) -> Kept:
        """Chunks of what the checkpoint cuts off; a document that it reads as a whole has none."""

        def compute() -> list[torch.Tensor]:
            rests = [document.ids[self.limit - 2 :] for document in self.documents]
            return means(self.original, [chunks(self.tokens(rest), size, overlap) if rest else [] for rest in rests])

        return self.vectors.kept(f"rest in chunks {of_size(size, overlap)}", compute)

    def longer(self, method: str) -> Kept:
        """Documents of up to 1,024 tokens, read with a longer table."""
        return self.vectors.kept(
            f"longer table, {method}, 1024",
            lambda: means(lengthen(self.original, 1024, self.limit, method), self.firsts(1024)),
        )

    def whole(self, name: str) -> Kept:
        """The mean and the late chunks of what another model reads of each document."""
        folder = self.models[name]
        length = min(LONGEST, AutoTokenizer.from_pretrained(folder).model_max_length)
        return self.vectors.kept(
            f"{name}, {length}, whole and late",
            lambda: whole_and_late(AutoModel.from_pretrained(folder), self.firsts(length)),
        )

    def upgraded(self, size: int, overlap: bool) -> torch.Tensor:
        """A stored vector, of length 1, and the mean of the rest's chunks, each by its tokens' share."""
        stored, rest = normalize(self.cut(self.limit).vectors.float(), dim=-1), self.rest(size, overlap)
        merged = []
        for document, first, own in zip(self.documents, stored, rest.by_text(), strict=True):
            read = min(len(document.ids), self.limit - 2)
            left = len(document.ids) - read
            merged.append(first if not left else read * first + left * normalize(own.mean(dim=0), dim=-1))
        return torch.stack(merged)

    def texts(self, asked: str) -> list[str]:
        return [getattr(query, asked.removesuffix("s")) for query in self.meetings.queries]

    def queries(self, asked: str) -> torch.Tensor:
        """Vectors of all queries, of length 1; they are cut where the checkpoint cuts."""

        def compute() -> list[torch.Tensor]:
            encoded = self.meetings.tokenizer(self.texts(asked), add_special_tokens=False, verbose=False)["input_ids"]
            return means(self.original, [truncated(self.tokens(ids), self.limit) for ids in encoded])

        return normalize(self.of_queries.kept(asked, compute).vectors.float(), dim=-1)

    def _by_words(self, asked: str) -> Found:
        return Found(bm25([document.text for document in self.documents], self.texts(asked)), 0.0)

    def with_words(self, find: Callable[[str], Found], asked: str) -> Found:
        found = find(asked)
        return replace(found, similarities=fused(self.by_words(asked).similarities, found.similarities))

    def by_mean(self, kept: Callable[[], Kept], pool: Callable[[Kept], torch.Tensor], asked: str) -> Found:
        """A vector for each document, pooled from what is kept."""
        own = kept()
        similarities = (self.queries(asked) @ normalize(pool(own), dim=-1).T).numpy()
        return Found(similarities, 1.0)

    def by_best(self, kept: Callable[[], Kept], first: int, asked: str) -> Found:
        """The best of each document's vectors, from the one of this number on."""
        own = kept()
        flat = normalize(torch.cat([vectors[first:] for vectors in own.by_text()]), dim=-1)
        numbers = own.numbers.numpy() - first
        starts = np.concatenate([[0], np.cumsum(numbers)[:-1]])
        best = np.maximum.reduceat((self.queries(asked) @ flat.T).numpy(), starts, axis=1)
        return Found(best, float(numbers.mean()))

    def methods(self) -> Iterator[Method]:
        yield Method("BM25", "BM25", self.by_words)
        for length in sorted({*CUTS, self.limit}):
            kept = partial(self.cut, length)
            yield Method(f"cut at {length}", "cut", partial(self.by_mean, kept, only), kept)
        for size, overlap in sorted({*CHUNKS, (self.limit, False)}):
            kept, label = partial(self.chunks, size, overlap), of_size(size, overlap)
            for pooled, function in POOLED.items():
                find = partial(self.by_mean, kept, partial(by_document, function))
                yield Method(f"{pooled} {label}", pooled, find, kept)
                if pooled == "mean of chunks":
                    both = partial(self.with_words, find)
                    yield Method(f"BM25 and {pooled} {label}", f"BM25 and {pooled}", both, kept)
            if (size, overlap) in OF_THE_REST and any(
                len(document.ids) > self.limit - 2 for document in self.documents
            ):
                rest = partial(self.rest, size, overlap)
                merged = partial(self.by_mean, rest, lambda _, of=(size, overlap): self.upgraded(*of))
                yield Method(f"{UPGRADED} {label}", UPGRADED, merged, rest)
            best = partial(self.by_best, kept, 0)
            yield Method(f"{BEST} {label}", BEST, best, kept)
            yield Method(f"BM25 and {BEST} {label}", f"BM25 and {BEST}", partial(self.with_words, best), kept)
        if self.part == "units-1024":
            for method in UNTRAINED:
                kept = partial(self.longer, method)
                find = partial(self.by_mean, kept, only)
                yield Method(f"longer table, {method}, untrained", "longer table, untrained", find, kept)
        for name in self.models:
            kept = partial(self.whole, name)
            yield Method(name, name, partial(self.by_mean, kept, first_of_each), kept)
            yield Method(f"{name}, {LATE}", f"{name}, {LATE}", partial(self.by_best, kept, 1), kept)


def of_size(size: int, overlap: bool) -> str:
    return f"of {size}{', overlapping' * overlap}"


def only(kept: Kept) -> torch.Tensor:
    """Where each text has one vector."""
    return kept.vectors.float()


def first_of_each(kept: Kept) -> torch.Tensor:
    return torch.stack([own[0] for own in kept.by_text()])


def by_document(pool: Callable[[torch.Tensor], torch.Tensor], kept: Kept) -> torch.Tensor:
    return torch.stack([pool(own) for own in kept.by_text()])


def scores_of(bench: Bench, asked: str, before: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """nDCG of each method, summed over the queries of each meeting, and what it costs.

    Args:
        before: earlier scores of the same part, or nothing. Their methods are taken over.
        names: of methods; none for all.
    """
    relevant = bench.meetings.relevant(bench.documents, asked)
    places = [bench.meetings.queries.index(query) for query, _ in relevant]
    right = [own for _, own in relevant]
    meetings = np.array([query.meeting for query, _ in relevant])
    queries = np.bincount(meetings, minlength=len(bench.meetings.names)).tolist()
    if before and (before["queries"], before["documents"]) != (queries, len(bench.documents)):
        raise SystemExit(f"the scores of {bench.part}, {asked}, that are there are of other queries or documents")
    methods = before.get("methods", {})
    for method in bench.methods():
        if method.name in methods or (names and method.name not in names):
            continue
        found = method.find(asked)
        scores = np.bincount(meetings, ndcg(found.similarities[places], right), len(bench.meetings.names))
        methods[method.name] = {
            "family": method.family,
            "vectors": round(found.vectors, 1),
            "ndcg": [round(float(one), 4) for one in scores],
        }
    return {
        "val": bench.meetings.is_val.tolist(),
        "queries": queries,
        "documents": len(bench.documents),
        "methods": methods,
        "circumstances": circumstances(),
    }


def with_times(result: dict[str, Any], times: dict[str, float]) -> dict[str, Any]:
    """Scores with the times that were measured in one go, and no others."""
    for name, method in result["methods"].items():
        method.pop("milliseconds", None)
        if name in times:
            method["milliseconds"] = times[name]
    return result


def times_of(bench: Callable[[Path], Bench]) -> dict[str, float]:
    """Milliseconds of a core in which each method reads a document: medians of rounds in which all take turns.

    Args:
        bench: of the documents that are read, for a folder that has no vectors yet.
    """
    rounds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        with TemporaryDirectory() as folder:
            fresh = bench(Path(folder))
            for method in fresh.methods():
                if method.kept is not None:
                    seconds = float(method.kept().seconds)
                    rounds.setdefault(method.name, []).append(1000 * seconds / len(fresh.documents))
    return {name: round(statistics.median(times), 1) for name, times in rounds.items()}


REFERENCE = "mean of chunks"
# What there is today, and what `hf_posenc.extend` makes of it: shown, whatever was chosen.
FIXED = (f"cut at {CUT}", f"mean of chunks of {CUT}", *(f"longer table, {method}, untrained" for method in UNTRAINED))


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


def reported(result: dict[str, Any]) -> np.ndarray:
    """The meetings whose scores are shown: those that nothing was chosen on; where only `val` was run, and nothing chosen, these."""
    val = np.array(result["val"])
    return val if val.all() else ~val


def score(result: dict[str, Any], name: str) -> float:
    """nDCG of a method on the queries of the meetings that nothing was chosen on."""
    shown, queries = reported(result), np.array(result["queries"])
    return mean(np.array(result["methods"][name]["ndcg"])[shown], queries[shown])


def difference(result: dict[str, Any], name: str, other: str) -> dict[str, Any]:
    """How much higher a method scores than another on the same queries, with the interval over meetings."""
    shown, queries = reported(result), np.array(result["queries"])
    own, others = (np.array(result["methods"][one]["ndcg"]) for one in (name, other))
    less = (own - others)[shown], queries[shown]
    return {"mean": mean(*less), "interval": of_groups(*less)}


def table(result: dict[str, Any], published: bool = False) -> str:
    """A row for each family, and for [`FIXED`]: what was chosen (of `val` alone: a row for each method), its score on the other meetings, the difference to the mean of chunks, and the score over all queries where these are more."""
    val_alone = all(result["val"])
    picked = {name: name for name in result["methods"]} if val_alone else chosen(result)
    reference = next((name for name in picked.values() if result["methods"][name]["family"] == REFERENCE), None)
    rows = []
    fixed = [name for name in FIXED if name in result["methods"] and name not in picked.values()]
    for name in [*picked.values(), *fixed]:
        method = result["methods"][name]
        less = "" if reference in (name, None) else difference_cell(difference(result, name, reference))
        everywhere = mean(np.array(method["ndcg"]), np.array(result["queries"]))
        milliseconds = f"{method['milliseconds']:.0f}" if "milliseconds" in method else ""
        cells = [f"{method['vectors']:.0f}", milliseconds, f"{score(result, name):.3f}", less]
        rows.append([f"{name} (not chosen)" if name in fixed else name, *cells, f"{everywhere:.3f}"])
    if published:
        rows += [[f"*{name}*", "1", "", "", "", f"{reached:.3f}"] for name, reached in PUBLISHED.items()]
    costs = ["vectors per document", "core ms per document"]
    header = ["method", *costs, "nDCG@10", "minus the mean of chunks", "nDCG@10, all queries"]
    if val_alone:
        header, rows = header[:-1], [row[:-1] for row in rows]
    return as_markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--asked", nargs="+", choices=ASKED, default=[*ASKED])
    parser.add_argument(
        "--methods",
        nargs="+",
        default=[],
        help="only these, by the names in the tables; default: all that are missing",
    )
    parser.add_argument(
        "--time", action="store_true", help="also time all methods, on some documents; the machine must be idle"
    )
    parser.add_argument("--model", help="folder of the checkpoint; default: the packaged MiniLM")
    parser.add_argument("--name", default="minilm", help="what its results are called")
    parser.add_argument(
        "--converted",
        nargs="*",
        default=[],
        metavar="NAME[=FOLDER]",
        help=f"models that read documents as a whole; without a folder, one of {'; '.join(CONVERSIONS | TRAINED)} is made",
    )
    parser.add_argument("--cut", type=int, default=CUT, help="tokens after which the checkpoint's library cuts texts")
    parser.add_argument("--val_alone", action="store_true", help="only the meetings of val; all settings are shown")
    parser.add_argument("--meetings", type=int, help="only so many, to try it out")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    parser.add_argument("--work_dir", type=Path, default=WORK)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        if options.data is None:
            parser.error("--data is missing")
        given = dict(one.partition("=")[::2] for one in options.converted)
        if unknown := [name for name, folder in given.items() if not folder and name not in (CONVERSIONS | TRAINED)]:
            parser.error(f"--converted: {', '.join(unknown)} needs a folder")
        torch.set_num_threads(1)
        source = options.model or packaged_minilm()
        meetings = Meetings(options.data, AutoTokenizer.from_pretrained(source), options.meetings, options.val_alone)
        models = {
            name: Path(folder or made(name, source, options.data, meetings.tokenizer, options.work_dir))
            for name, folder in given.items()
        }
        for part in options.parts:
            bench = Bench(meetings, part, source, options.name, options.work_dir, models, cut=options.cut)
            for asked in options.asked:
                file = options.output_dir / f"{options.name}-{part}-{asked}.json"
                before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
                scores = scores_of(bench, asked, before, options.methods)
                write_whole({file: json.dumps(scores) + "\n"})
            if options.time:
                every = max(1, len(bench.documents) // TIMED[part == "whole"])
                timed = partial(
                    Bench, meetings, part, source, options.name, models=models, every=every, cut=options.cut
                )
                times = times_of(lambda folder, timed=timed: timed(work=folder))
                for asked in options.asked:
                    file = options.output_dir / f"{options.name}-{part}-{asked}.json"
                    write_whole(
                        {file: json.dumps(with_times(json.loads(file.read_text(encoding="utf-8")), times)) + "\n"}
                    )
    for file in sorted(options.output_dir.glob(f"{options.name}-*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        print(f"\n{file.stem}\n\n{table(result, file.stem.endswith('whole-answers'))}")


if __name__ == "__main__":
    main()
