"""The tables, figures and plots of docs/long-documents.md and of its appendix, from the files in results/.

`docs/generate.py` puts them there: in the appendix, all tables between marks.
"""

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from report import RESULTS, replace_marked

from hf_posenc.tables import as_markdown


PAGE, APPENDIX = "docs/long-documents.md", "docs/long-documents-appendix.md"
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"
BEGIN_VECTORS, END_VECTORS = "<!-- vectors -->\n", "<!-- end of vectors -->\n"
BEGIN_WINDOWS, END_WINDOWS = "<!-- windows -->\n", "<!-- end of windows -->\n"
BEGIN_FAR, END_FAR = "<!-- far -->\n", "<!-- end of far -->\n"
HEADINGS = {"long_documents": "Finding", "long_classification": "A task with a head"}
# What other ways to have one vector of a document are compared with.
MEAN = "mean of chunks"
# The conversion that computes as little as chunks.
LOCAL = "t5 window of 128 no layer global"
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
def vectors() -> dict[str, Any]:
    """What long_vectors.py measured."""
    return json.loads((RESULTS / "long_vectors" / "results.json").read_text(encoding="utf-8"))


@cache
def far_context() -> dict[str, Any]:
    """What far_context.py measured of tags."""
    found = json.loads((RESULTS / "far_context" / "results.json").read_text(encoding="utf-8"))
    return found["tasks"]["tags"]


def reference_of(name: str, known: Iterable[str]) -> str | None:
    """What tables give a method's difference to: the mean of chunks; for late chunks, chunks of the same size that are read alone."""
    if name == MEAN:
        return None
    return next(iter(known)) if ", best late chunk of " in name else MEAN


def page_table() -> str:
    """The page's table: nDCG, and how much more that is than [`reference_of`] a method has."""
    found = vectors()["methods"]
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


def difference_cell(one: dict[str, Any], digits: int = 3) -> str:
    """A difference with its interval; bold where that excludes 0."""
    low, high = one["interval"]
    written = f"{one['mean']:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
    return f"**{written}**" if low > 0 or high < 0 else written


def window_tables() -> str:
    """What a window costs, and what is found with it: beside the mean of chunks, and beside the same scheme without one."""
    found = vectors()["methods"]
    names = [name for name in found if name.startswith("t5 window")]
    costs = (RESULTS / "local_attention.md").read_text(encoding="utf-8").strip()
    less = [
        [
            name,
            *map(difference_cell, found[name]["less"]["t5, centred" if name.endswith("centred") else "t5"].values()),
        ]
        for name in names
    ]
    tables = costs, as_markdown(["minus `t5` without a window", *found["t5"]["tasks"]], less)
    return "".join(f"\n{table}\n" for table in tables) + "\n"


def block() -> str:
    """What stands between the appendix's marks: a heading and the tables of each comparison that was run."""
    parts = []
    for name, heading in HEADINGS.items():
        file = RESULTS / name / "results.md"
        if file.is_file():
            parts += [f"## {heading}", file.read_text(encoding="utf-8").strip()]
            parts += ["![nDCG by length](pictures/long-documents-lengths.png)"] * (
                file.with_name("results.png").is_file()
            )
    return "".join(f"\n{part}\n" for part in parts) + "\n"


def with_tables(page: str) -> str:
    """The appendix with the tables of today between its marks."""
    all_vectors = (RESULTS / "long_vectors" / "results.md").read_text(encoding="utf-8").strip()
    page = replace_marked(page, BEGIN_VECTORS, END_VECTORS, f"{BEGIN_VECTORS}\n{all_vectors}\n\n{END_VECTORS}")
    page = replace_marked(page, BEGIN_WINDOWS, END_WINDOWS, f"{BEGIN_WINDOWS}{window_tables()}{END_WINDOWS}")
    far = (RESULTS / "far_context" / "results.md").read_text(encoding="utf-8").strip()
    page = replace_marked(page, BEGIN_FAR, END_FAR, f"{BEGIN_FAR}\n{far}\n\n{END_FAR}")
    return replace_marked(page, BEGIN, END, f"{BEGIN}{block()}{END}")
