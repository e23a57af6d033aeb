"""The tables and the plot of docs/long-documents.md, from the files in results/.

`docs/generate.py` puts all tables that there are between the page's two marks; the plot is results/long_documents/results.png.
"""

from report import RESULTS, replace_marked


BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"
HEADINGS = {"long_documents": "Finding", "long_classification": "A task with a head"}


def block() -> str:
    """What stands between the marks: a heading and the tables of each comparison that was run."""
    parts = []
    for name, heading in HEADINGS.items():
        file = RESULTS / name / "results.md"
        if file.is_file():
            parts += [f"## {heading}", file.read_text(encoding="utf-8").strip()]
            parts += ["![nDCG by length](pictures/long-documents.png)"] * (file.with_name("results.png").is_file())
    return "".join(f"\n{part}\n" for part in parts) + "\n"


def with_tables(page: str) -> str:
    """The page with the tables of today between its marks."""
    return replace_marked(page, BEGIN, END, f"{BEGIN}{block()}{END}")
