"""The tables about long documents in docs/, and all of them in RESULTS.md, from the files in results/."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import far_context
import long_classification
import long_documents
import long_vectors
import qmsum
import text_targets
from long_documents import TITLES
from long_vectors import difference_cell

from hf_posenc._utils import as_markdown


sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import local_attention  # noqa: E402
from report import mean_and_deviation, read, with_marked_tables  # noqa: E402


RESULTS = Path(__file__).parent / "results"
SEARCH, LABELS = "docs/long-documents-results.md", "docs/long-labels-results.md"
EVERYTHING = "research/long_documents/RESULTS.md"


@cache
def results(name: str) -> dict[str, Any]:
    """What a script here measured."""
    return json.loads((RESULTS / name / "results.json").read_text(encoding="utf-8"))


def vectors_table(kind: str) -> str:
    """That of long_vectors.py for methods of a kind, `kind_of` them."""
    found = {name: own for name, own in results("long_vectors")["methods"].items() if kind_of(name) == kind}
    return in_words(long_vectors.table(found))


def kind_of(name: str) -> str:
    """What a method of long_vectors.py is: one vector of a document in a way that needs training or none, or several vectors."""
    if " chunk of " in name:
        return "late chunks" if " late " in name else "chunks"
    if " window of " in name:
        return "windows"
    return "converted" if name.removesuffix(", centred") in CONVERTED else "untrained"


def vectors_differences(pairs: Iterable[tuple[str, str]]) -> str:
    """How much more a method of long_vectors.py finds than another, a row for each pair of them."""
    methods = results("long_vectors")["methods"]
    rows = [
        [f"{name}, minus {other}", *map(difference_cell, methods[name]["less"][other].values())]
        for name, other in pairs
    ]
    return in_words(as_markdown(["difference in nDCG", *TITLES.values()], rows))


def with_and_without_windows() -> list[tuple[str, str]]:
    """Each method with a window, and the same without one."""
    named = [name for name in results("long_vectors")["methods"] if kind_of(name) == "windows"]
    return [(name, "t5, centred" if name.endswith("centred") else "t5") for name in named]


def vectors_tables() -> str:
    """Of long_vectors.py, the methods that decide what to do; and what conversions add for near-duplicates."""
    methods = results("long_vectors")["methods"]
    shown = in_words(long_vectors.table({label: methods[name] for name, label in SHOWN.items()}))
    pairs = [(f"{name}, centred", "mean of chunks, centred") for name in ("t5", long_vectors.LOCAL)]
    return f"{shown}\n\n{vectors_differences(pairs)}"


def lengths_tables(task: str) -> str:
    """Those of long_documents.py for a task: by length, and at one length by depth."""
    scores = [one for one in results("long_documents")["scores"] if one["task"] == task]
    return "\n\n".join(long_documents.tables(scores))


def differences_tables() -> str:
    """For each task, how far the conversion is above other methods."""
    return "\n\n".join(long_documents.difference_tables(results("long_documents")["differences"]))


def less_than_chunks_table() -> str:
    """How far the conversion is above chunks: a row for each task and way to score chunks, by length."""
    measured = results("long_documents")["differences"]
    lengths = sorted({one["length"] for one in measured})
    rows = []
    for task, title in TITLES.items():
        for other, words in {"chunk mean": "mean of chunks", "best chunk": "best chunk"}.items():
            found = {one["length"]: one for one in measured if (one["task"], one["other"]) == (task, other)}
            cells = [long_documents.difference_cell(found.get(length)) for length in lengths]
            rows.append([f"{title}: `t5` minus {words}", *cells])
    return as_markdown(["tokens of a document", *(f"{length:,}" for length in lengths)], rows)


def head_runs() -> list[long_classification.Run]:
    return [long_classification.Run(**run) for run in results("long_classification")["runs"]]


def head_table() -> str:
    """That of long_classification.py."""
    return long_classification.table(head_runs()).strip()


def precision_table() -> str:
    """Of it, the score alone, by the length of the documents that a model was trained on."""
    by_length: dict[tuple[str, int], list[float]] = {}
    for run in head_runs():
        by_length.setdefault((run.model, run.length), []).append(run.precision)
    lengths = sorted({length for _, length in by_length})
    rows = [
        [label, *(mean_and_deviation(by_length[model, n]) if (model, n) in by_length else "" for n in lengths)]
        for model, label in HEADS.items()
    ]
    return as_markdown(["model, trained on documents of", *(f"{length:,} tokens" for length in lengths)], rows)


def of_meetings(part: str, asked: str, model: str = "minilm") -> dict[str, Any]:
    """What qmsum.py measured; nothing where this part was not run."""
    file = qmsum.RESULTS / f"{model}-{part}-{asked}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def qmsum_tables(*parts: str, model: str = "minilm") -> str:
    """Of each of these parts that was run, found by answers and by questions."""
    written = []
    for part in parts:
        for asked in qmsum.ASKED:
            if result := of_meetings(part, asked, model):
                published = (part, asked) == ("whole", "answers")
                title = "Whole meetings" if part == "whole" else f"Units of up to {int(part.split('-')[1]):,} tokens"
                written.append(f"{title}, found by {asked} ({result['documents']:,} documents):")
                written.append(in_words(qmsum.table(result, published)))
    return "\n\n".join(written)


def meetings_tables() -> str:
    """The scores of some methods, and what is between them: a column for each part, by answers and by questions."""
    found = {
        f"{words}, by {asked}": of_meetings(part, asked)
        for part, words in {"whole": "whole meetings", "units-1024": "parts of meetings"}.items()
        for asked in qmsum.ASKED
    }
    scores, differences = [], []
    for method, label in MEETINGS.items():
        named = [(result, method_of(result, method)) for result in found.values()]
        scores.append([label, *(f"{qmsum.score(result, name):.3f}" if name else "" for result, name in named)])
    for method, other in MEETINGS_COMPARED:
        named = [(result, method_of(result, method), method_of(result, other)) for result in found.values()]
        cells = [difference_cell(qmsum.difference(*one)) if all(one) else "" for one in named]
        differences.append([f"{MEETINGS[method]}, minus {MEETINGS[other]}", *cells])
    return "\n\n".join(
        as_markdown([title, *found], rows)
        for title, rows in (("nDCG@10", scores), ("difference in nDCG@10", differences))
    )


def method_of(result: dict[str, Any], name: str) -> str | None:
    """The method of this name, or what was chosen of a family of this name."""
    return name if name in result["methods"] else qmsum.chosen(result).get(name)


def in_words(table: str) -> str:
    """A table with the page's names for what results call otherwise."""
    for name, word in NAMES.items():
        table = table.replace(name, word)
    return re.sub(r"t5 window of (\d+) ", r"t5, window of \1, ", table)


def far_table(task: str, bands: dict[str, str] | None = None) -> str:
    """That of far_context.py for a task: of all distances, or of these by the names for them."""
    found = results("far_context")["tasks"][task]
    if bands:
        found = {name: own | {"bands": of_bands(own["bands"], bands)} for name, own in found.items()}
    return in_words(far_context.table(task, found))


def of_bands(measured: dict[str, Any], bands: dict[str, str]) -> dict[str, Any]:
    return {title: measured[band] for band, title in bands.items()}


def far_differences(bands: dict[str, str] | None = None) -> str:
    """Tags: what is between models that read the whole document."""
    found = results("far_context")["tasks"]["tags"]
    bands = bands or {band: band for band in found["t5"]["bands"]}
    rows = [
        [f"`{name}` minus {words}", *(difference_cell(found[name]["bands"][band]["less"][other], 2) for band in bands)]
        for name, other, words in (("t5", "longer table", "longer matrix"), ("deberta", "t5", "`t5`"))
    ]
    return as_markdown(["tags, difference in F1", *bands.values()], rows)


# By their names in results, what the pages call methods.
SHOWN = {
    "truncated": "first 256 tokens",
    "strided": "longer matrix, interpolated, untrained",
    "mean of chunks": "mean of chunks",
    "mean of chunks, centred": "mean of chunks, centred",
    "t5": "t5",
    "t5, centred": "t5, centred",
    long_vectors.LOCAL: long_vectors.LOCAL,
    f"{long_vectors.LOCAL}, centred": f"{long_vectors.LOCAL}, centred",
    "best chunk of 64": "best chunk of 64",
    "best chunk of 64 overlapping": "best chunk of 64, overlapping",
    "best chunk of 128 overlapping": "best chunk of 128, overlapping",
}
MEETINGS = {
    "BM25": "BM25",
    "BM25 and best chunk": "BM25 and best chunk, fused",
    "best chunk": "best chunk",
    "best chunk of 128, overlapping": "best chunk of 128, overlapping",
    "best chunk of 128": "best chunk of 128",
    "t5, best late chunk of 128": "best late chunk of 128, converted to `t5`",
    "t5, window of 128, best late chunk of 128": "best late chunk of 128, `t5` with local attention",
    "rope, best late chunk of 128": "best late chunk of 128, converted to `rope`",
    "mean of chunks": "mean of chunks",
    "stored vector, and chunks of the rest": "vector of the first 256 tokens, completed",
    "t5": "converted to `t5`",
    "t5, window of 128": "converted to `t5` with local attention",
    "rope": "converted to `rope`",
    "cut at 512": "first 512 tokens",
    "cut at 256": "first 256 tokens",
    "longer table, trained": "longer matrix, trained",
    "longer table, untrained": "longer matrix, untrained",
}
MEETINGS_COMPARED = (
    ("BM25", "best chunk"),
    ("BM25 and best chunk", "BM25"),
    ("best chunk", "mean of chunks"),
    ("t5, best late chunk of 128", "best chunk of 128, overlapping"),
    ("t5, best late chunk of 128", "best chunk of 128"),
    ("t5, window of 128, best late chunk of 128", "best chunk of 128"),
    ("rope, best late chunk of 128", "best chunk of 128"),
    ("stored vector, and chunks of the rest", "mean of chunks"),
    ("t5", "mean of chunks"),
    ("t5, window of 128", "mean of chunks"),
    ("rope", "mean of chunks"),
    ("longer table, trained", "mean of chunks"),
    ("longer table, trained", "cut at 512"),
    ("longer table, trained", "cut at 256"),
    ("longer table, untrained", "mean of chunks"),
    ("longer table, untrained", "cut at 512"),
    ("longer table, untrained", "cut at 256"),
)
HEADS = {
    "truncated": "beginning of the document",
    "chunk mean": "mean of chunks",
    "absolute": "longer matrix, repeated rows",
    "t5": "`t5`, not converted",
    "absolute+t5": "`absolute+t5`, not converted",
    "t5 converted": "converted to `t5`",
    "absolute+t5 converted": "converted to `absolute+t5`",
}
TAGS = {
    "in the definition": "in the definition",
    "below 256": "below 256 tokens after it",
    "256–512": "256–512",
    "beyond the window": "512–2,048",
    "all": "all after it",
}
QUESTIONS = {"one place": "one sentence", "all": "two sentences"}
# What results call otherwise than the page.
NAMES = {
    "longer table": "longer matrix",
    "windows behind the beginning": "beginning and windows",
    "one place": "one sentence",
    "*asked*": "*number tested*",
}
CONVERTED = ("t5", "deberta")
PARTS_OF_MEETINGS = [f"units-{size}" for size in qmsum.UNITS]
# By page, and by the mark before them, what stands there.
MARKED = {
    SEARCH: {
        "meetings": meetings_tables,
        "vectors": vectors_tables,
        "windows or whole": lambda: vectors_differences(one for one in with_and_without_windows() if one[1] == "t5"),
        "costs": lambda: local_attention.cost_table(*map(read("local_attention").get, ("times", "memory"))),
        "lengths": less_than_chunks_table,
    },
    LABELS: {
        "head": precision_table,
        "tags": lambda: f"{far_table('tags', TAGS)}\n\n{far_differences(TAGS)}",
        "questions": partial(far_table, "questions", QUESTIONS),
    },
    EVERYTHING: {
        "whole meetings": partial(qmsum_tables, "whole"),
        "units": partial(qmsum_tables, *PARTS_OF_MEETINGS),
        "rates of longer matrices": lambda: in_words(text_targets.table(results("text_targets"))),
        "units, all-mpnet-base-v2": partial(qmsum_tables, *PARTS_OF_MEETINGS, model="mpnet"),
        **{
            kind: partial(vectors_table, kind)
            for kind in ("untrained", "converted", "chunks", "late chunks", "windows")
        },
        "windows or whole": lambda: vectors_differences(with_and_without_windows()),
        "profile": lambda: local_attention.profile_table(read("local_attention")["profile"]),
        **{f"lengths, {title}": partial(lengths_tables, task) for task, title in TITLES.items()},
        "lengths, differences": differences_tables,
        "sizes of chunks": lambda: long_documents.development_table(results("long_documents")["development"]),
        "head": head_table,
        "tags": lambda: f"{far_table('tags')}\n\n{far_differences()}",
        "questions": partial(far_table, "questions"),
    },
}


def generated() -> Iterator[tuple[str, Callable[[str], str]]]:
    """File, and what makes its text as it should be of what it is."""
    for name, tables in MARKED.items():
        yield name, partial(with_marked_tables, tables=tables)
