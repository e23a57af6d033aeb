"""The tables and the plot of docs/long-documents.md, from the files in results/.

    python benchmarks/long_tables.py

Puts all tables that there are between the page's two marks, and the plot into docs/pictures/.
"""

import argparse
import shutil
from pathlib import Path

from report import RESULTS, replace_marked


PAGE = Path(__file__).parents[1] / "docs" / "long-documents.md"
PICTURE = PAGE.parent / "pictures" / "long-documents.png"
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


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(replace_marked(text, BEGIN, END, f"{BEGIN}{block()}{END}"), encoding="utf-8")
    plot = RESULTS / "long_documents" / "results.png"
    if plot.is_file():
        shutil.copyfile(plot, PICTURE)


if __name__ == "__main__":
    main()
