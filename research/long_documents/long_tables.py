"""The tables of docs/long-documents.md and of its appendix, from the files in results/."""

import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import far_context
import long_classification
import long_documents
import long_vectors
import qmsum
from long_vectors import LOCAL, MEAN, difference_cell, reference_of

from hf_posenc._utils import as_markdown


sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import local_attention  # noqa: E402
from report import read, replace_marked, replace_table  # noqa: E402


RESULTS = Path(__file__).parent / "results"
PAGE, APPENDIX = "docs/long-documents.md", "docs/long-documents-appendix.md"
# Rows of the page's table: a method, and what it is called there.
ROWS = {
    "truncated": "cut off at 256 tokens",
    MEAN: "mean of chunks",
    "mean of chunks, the smallest, no overlap": "mean of chunks of 64 that do not overlap",
    "DICE, maximum": "DICE: maximum",
    "mean of chunks, centred": "mean of chunks, less the corpus mean",
    "strided": "read as a whole, extended table, untrained",
    "t5": "read as a whole, **converted to `t5`**",
    LOCAL: "the same, with local attention",
    f"{LOCAL}, centred": "the same, with local attention, less the corpus mean",
    "best chunk of 64 overlapping": "best chunk of 64 tokens, overlapping",
    "best chunk of 128 overlapping": "best chunk of 128, overlapping",
    "t5, best late chunk of 128 overlapping": "best late chunk of 128, overlapping, **converted to `t5`**",
}


@cache
def results(name: str) -> dict[str, Any]:
    """What a script here measured."""
    return json.loads((RESULTS / name / "results.json").read_text(encoding="utf-8"))


def page_table() -> str:
    """The page's table: nDCG, and how much more that is than [`reference_of`] a method has."""
    found = results("long_vectors")["methods"]
    rows = []
    for name, label in ROWS.items():
        own = found[name]
        reference = reference_of(name, own["less"])
        cells = [f"{one['ndcg']:.2f}" for one in own["tasks"].values()]
        if reference:
            cells = [
                f"{cell} {difference_cell(less, digits=2)}"
                for cell, less in zip(cells, own["less"][reference].values())
            ]
        rows.append([label, f"{own['vectors']:.0f}", f"{own['milliseconds']:.0f}", *cells])
    return as_markdown(["a document is found by its", "vectors", "ms", "pass keys", "facts", "articles"], rows)


def window_tables() -> str:
    """What a window costs, and what is found with it: beside the mean of chunks, and beside the same scheme without one."""
    found = results("long_vectors")["methods"]
    names = [name for name in found if name.startswith("t5 window")]
    less = [
        [
            name,
            *map(difference_cell, found[name]["less"]["t5, centred" if name.endswith("centred") else "t5"].values()),
        ]
        for name in names
    ]
    costs = read("local_attention")
    tables = (
        local_attention.cost_table(costs["times"], costs["memory"]),
        local_attention.profile_table(costs["profile"]),
        as_markdown(["minus `t5` without a window", *found["t5"]["tasks"]], less),
    )
    return "\n\n".join(tables)


def comparisons() -> str:
    """All tables of long_documents.py and of long_classification.py."""
    runs = [long_classification.Run(**run) for run in results("long_classification")["runs"]]
    parts = ["## Finding", long_documents.page(results("long_documents"))]
    parts += ["![nDCG by length](pictures/long-documents-lengths.png)"]
    return "\n\n".join([*parts, "## A task with a head", long_classification.table(runs).strip()])


def qmsum_tables() -> str:
    """Of each part that was run, found by answers and by questions."""
    titles = {"whole": "Whole meetings"} | {f"units-{size}": f"Units of up to {size:,} tokens" for size in qmsum.UNITS}
    parts = []
    for part, title in titles.items():
        for asked in qmsum.ASKED:
            file = qmsum.RESULTS / f"minilm-{part}-{asked}.json"
            if file.is_file():
                result = json.loads(file.read_text(encoding="utf-8"))
                published = (part, asked) == ("whole", "answers")
                parts.append(f"**{title}, found by {asked}** ({result['documents']:,} documents)")
                parts.append(qmsum.table(result, published))
    return "\n\n".join(parts)


# By the mark before them, what stands in the appendix.
MARKED = {
    "vectors": lambda: long_vectors.table(results("long_vectors")["methods"]),
    "windows": window_tables,
    "far": lambda: far_context.tables(results("far_context")["tasks"]),
    "tables": comparisons,
    "qmsum": qmsum_tables,
}


def with_tables(page: str) -> str:
    """The appendix with the tables of today between its marks."""
    for mark, make in MARKED.items():
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
        page = replace_marked(page, begin, end, f"{begin}\n{make()}\n\n{end}")
    return page


def generated() -> Iterator[tuple[str, Callable[[str], str]]]:
    """File, and what makes its text as it should be of what it is."""
    yield PAGE, lambda page: replace_table(page, page_table())
    yield APPENDIX, with_tables
