"""What is generated in README and docs, from the code and from the files in benchmarks/results.

    python docs/generate.py [--check]

Writes it anew, and names sentences that do not say what was measured; with --check, writes nothing and says what is old.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from hf_posenc import inspection
from hf_posenc.tables import as_markdown


ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "benchmarks")]

import long_tables  # noqa: E402
import questions  # noqa: E402
import readme_tables  # noqa: E402
import what_positions_do  # noqa: E402


def flags_of_the_command_line(_: str) -> str:
    """The flags that `hf-posenc convert` takes, so that its help need not import the schemes."""
    return json.dumps(inspection.flags_by_name(), indent=2, ensure_ascii=False) + "\n"


def flags(page: str) -> str:
    """The table of flags."""
    first = ["`position_scheme`", "see above", "which schemes (default absolute)"]
    rows = [[f"`{flag}`", *rest] for flag, *rest in (*inspection.flag_rows(), inspection.unpad_row())]
    return readme_tables.replace_table(page, as_markdown(["flag", "values", "for (default)"], [first, *rows], words=3))


def numbers_of_positions(page: str) -> str:
    found = json.loads(what_positions_do.NUMBERS.read_text(encoding="utf-8"))
    return what_positions_do.replace_table(page, what_positions_do.table(found))


def answers(_: str) -> str:
    return questions.page(json.loads(what_positions_do.NUMBERS.read_text(encoding="utf-8")))


def generated() -> Iterator[tuple[str, Callable[[str], str]]]:
    """File, and what makes its text as it should be of what it is."""
    yield "hf_posenc_cli/flags.json", flags_of_the_command_line
    yield "docs/schemes.md", flags
    yield "docs/what-positions-do.md", numbers_of_positions
    yield "docs/questions.md", answers
    yield "docs/long-documents.md", long_tables.with_tables
    yield readme_tables.CONVERSION, readme_tables.replace_conversions
    for page, tables in readme_tables.tables().items():
        for table in tables:
            yield page, lambda text, table=table: readme_tables.replace_table(text, table)


def sentences() -> Iterator[str]:
    """What pages should say of what was measured, and do not."""
    for page, figures in readme_tables.figures().items():
        text = readme_tables.one_line((ROOT / page).read_text(encoding="utf-8"))
        yield from (f"{page} should say: {figure}" for figure in figures if figure not in text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where something is old")
    check = parser.parse_args().check
    now: dict[str, str] = {}
    for name, make in generated():
        file = ROOT / name
        now[name] = make(now.get(name) or (file.read_text(encoding="utf-8") if file.is_file() else ""))
    old = [name for name, text in now.items() if (ROOT / name).read_text(encoding="utf-8") != text]
    for name in old:
        print(f"{name} is old: python docs/generate.py" if check else f"wrote {name}")
        if not check:
            (ROOT / name).write_text(now[name], encoding="utf-8")
    missing = [*sentences()]
    print("\n".join(missing), end="\n" if missing else "")
    return 1 if check and (old or missing) else 0


if __name__ == "__main__":
    sys.exit(main())
