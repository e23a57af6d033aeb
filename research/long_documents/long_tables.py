"""The tables of docs/long-documents-results.md, from the files in results/."""

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
from long_vectors import difference_cell

from hf_posenc._utils import as_markdown


sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import local_attention  # noqa: E402
from report import read, replace_marked  # noqa: E402


RESULTS = Path(__file__).parent / "results"
PAGE = "docs/long-documents-results.md"


@cache
def results(name: str) -> dict[str, Any]:
    """What a script here measured."""
    return json.loads((RESULTS / name / "results.json").read_text(encoding="utf-8"))


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


def lengths_tables() -> str:
    """All tables of long_documents.py."""
    return long_documents.page(results("long_documents"))


def head_table() -> str:
    """That of long_classification.py."""
    runs = [long_classification.Run(**run) for run in results("long_classification")["runs"]]
    return long_classification.table(runs).strip()


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
                parts.append(f"{title}, found by {asked} ({result['documents']:,} documents):")
                parts.append(in_words(qmsum.table(result, published)))
    return "\n\n".join(parts)


def in_words(table: str) -> str:
    """A table with the page's name for what results call a longer table."""
    return table.replace("longer table", "longer matrix")


# By the mark before them, what stands in the page.
MARKED = {
    "qmsum": qmsum_tables,
    "vectors": lambda: long_vectors.table(results("long_vectors")["methods"]),
    "windows": window_tables,
    "lengths": lengths_tables,
    "head": head_table,
    "far": lambda: in_words(far_context.tables(results("far_context")["tasks"])),
}


def with_tables(page: str) -> str:
    """The page with the tables of today between its marks."""
    for mark, make in MARKED.items():
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
        page = replace_marked(page, begin, end, f"{begin}\n{make()}\n\n{end}")
    return page


def generated() -> Iterator[tuple[str, Callable[[str], str]]]:
    """File, and what makes its text as it should be of what it is."""
    yield PAGE, with_tables
