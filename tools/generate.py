"""What is generated in docs, research and the package: from the code, and from what was measured in benchmarks/ and research/.

    python tools/generate.py [--check]

Writes it anew; with --check, writes nothing and says what is old. Where there is no research/, as in the sdist, its tables stay as they are.
"""

import argparse
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import BertConfig, BertModel

import hf_posenc
from hf_posenc import inspection
from hf_posenc._utils import as_markdown
from hf_posenc.checkpoint_code import code_files
from hf_posenc.conversion import ConversionArguments
from hf_posenc.integrations.hooks import CONFIGS
from hf_posenc.modeling.schemes import table as schemes
from hf_posenc.modeling.schemes.base import PositionScheme
from hf_posenc.modeling.schemes.flags import UNPAD


ROOT = Path(__file__).parents[1]
RESEARCH = ROOT / "research"
STUDIES = {
    "comparison": "comparison_tables",
    "conversion_fit": "fit_tables",
    "finetuning": "finetuning_tables",
    "long_documents": "long_tables",
    "what_positions_do": "what_positions_do",
}
sys.path[:0] = [str(ROOT / "benchmarks"), *(str(RESEARCH / study) for study in STUDIES)]

import speed_tables  # noqa: E402
from report import replace_table  # noqa: E402


def options_of_the_command_line(_: str) -> str:
    """What `hf-posenc convert` takes, so that its help need not import the schemes: settings of a conversion, and flags."""
    options = {"convert": settings_of_a_conversion(), "flags": inspection.flags_by_name()}
    return json.dumps(options, indent=2, ensure_ascii=False) + "\n"


def settings_of_a_conversion() -> dict[str, dict[str, Any]]:
    """By name: kind, default, and what its docstring says; but for the output, which has an option of another name."""
    _, _, entries = inspect.getdoc(ConversionArguments).partition("Args:\n")
    helps = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", entries.partition("\n\nRaises:")[0], flags=re.MULTILINE))
    kinds = {int: "integer", float: "number", bool: "boolean", str: "string"}
    return {
        entry.name: {
            "kind": kinds.get((get_args(entry.type) or [entry.type])[0], "list"),
            "default": entry.default,
            "help": re.sub(r"\s+", " ", helps[entry.name]),
        }
        for entry in fields(ConversionArguments)
        if entry.name != "output"
    }


def flags(page: str) -> str:
    """The table of config options, by scheme: those of all first, then those of each scheme and of the schemes that share them with it."""
    order = [schemes.ALL, *schemes.SCHEMES]
    options = {**schemes.FLAGS, UNPAD.name: {schemes.ALL: UNPAD}}
    said: dict[tuple[str, str, str, str], list[str]] = {}
    for name in order:
        for flag, users in options.items():
            if name in users:
                own = users[name]
                said.setdefault((flag, own.kind.values, own.help, own.described_default()), []).append(name)
    rows = [[", ".join(who), f"`{flag}`", *rest] for (flag, *rest), who in said.items()]
    first = [schemes.ALL, "`position_scheme`", "see above", "which schemes", "absolute"]
    return replace_table(
        page, as_markdown(["schemes", "config option", "values", "meaning", "default"], [first, *rows], words=5)
    )


def files_that_trust_runs(page: str) -> str:
    """The list of the files that are saved with models: those of every model, and those that some need."""
    saved = [{*code_files(config(position_scheme=scheme))} for config in CONFIGS for scheme in schemes.SCHEMES]
    always = set.intersection(*saved)
    some = {name for name in set.union(*saved) - always if not name.startswith("modeling_")}
    lists = [
        f"- In every model: {as_names(always)}.",
        f"- In models that need them: the family's `modeling_*.py`, {as_names(some)}.",
    ]
    wrapped = [textwrap.fill(line, width=140, subsequent_indent="  ", break_on_hyphens=False) for line in lists]
    begin, end = "<!-- saved code -->\n", "\n<!-- end of saved code -->"
    text = "\n".join(["The files are:", "", *wrapped])
    return page[: page.index(begin)] + begin + "\n" + text + "\n" + page[page.index(end) :]


def as_names(files: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(files))


def files_beside_a_card(folder: Path, card: str) -> str:
    """The list of the files that a published model carries, by the config beside its card."""
    entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = hf_posenc.PosencBertConfig(position_scheme=entries["position_scheme"])
    files = as_names({*code_files(config)})
    return re.sub(r"^The code: .*\.$", lambda _: f"The code: {files}.", card, flags=re.MULTILINE)


def rows_of_schemes(page: str, header: str, row: Callable[[type[PositionScheme]], list[str]]) -> str:
    """The table of schemes with a row for each: those that it has, and for a new one what its class says."""
    begin = page.index(f"\n{header}") + 1
    title, rule, *rows = page[begin : page.index("\n\n", begin)].splitlines()
    by_name = {line.split("`")[1]: line for line in rows}
    missing = {
        name: "| " + " | ".join(cell.replace("|", "\\|") for cell in row(scheme)) + " |"
        for name, scheme in schemes.SCHEMES.items()
        if name not in by_name
    }
    table = [title, rule, *((by_name | missing)[name] for name in schemes.SCHEMES)]
    return page[:begin] + "\n".join(table) + page[page.index("\n\n", begin) :]


def row_of_formulas(scheme: type[PositionScheme]) -> list[str]:
    with torch.device("meta"):
        model = BertModel(BertConfig(position_scheme=scheme.name))
    count = sum(parameter.numel() for parameter in hf_posenc.position_parameters(model).values())
    aliases = ", ".join(f"`{alias}`" for alias, name in schemes.ALIASES.items() if name == scheme.name)
    return [f"`{scheme.name}`", scheme.formula, f"{count:,}", "yes" if scheme.silent else "no", aliases]


def row_of_ideas(scheme: type[PositionScheme]) -> list[str]:
    """What the first line of its file says after a colon, and what it does beyond the training length."""
    idea = inspect.getdoc(inspect.getmodule(scheme)).splitlines()[0].partition(": ")[2].rstrip(".")
    return [f"`{scheme.name}`", idea, scheme.extrapolates.removeprefix("yes: "), scheme.paper]


Made = Iterator[tuple[str, Callable[[str], str]]]


def of_the_code() -> Made:
    """File, and what makes its text as it should be of what it is."""
    yield "hf_posenc_cli/options.json", options_of_the_command_line
    yield "docs/schemes.md", flags
    yield "docs/schemes.md", lambda page: rows_of_schemes(page, "| name | what is computed |", row_of_formulas)
    yield "docs/schemes.md", lambda page: rows_of_schemes(page, "| name | idea |", row_of_ideas)
    yield "docs/security.md", files_that_trust_runs
    for card in sorted((ROOT / "model_cards").glob("*/README.md")):
        yield str(card.relative_to(ROOT)), partial(files_beside_a_card, card.parent)


def of_research() -> Made:
    """The tables of each study."""
    if RESEARCH.is_dir():
        for module in STUDIES.values():
            yield from importlib.import_module(module).generated()


def changed(made: Made) -> dict[str, str]:
    """The files that are not as they should be, and what they should be."""
    now: dict[str, str] = {}
    for name, make in made:
        file = ROOT / name
        now[name] = make(now.get(name) or (file.read_text(encoding="utf-8") if file.is_file() else ""))
    return {name: text for name, text in now.items() if (ROOT / name).read_text(encoding="utf-8") != text}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where something is old")
    check = parser.parse_args().check
    old = changed(chain(of_the_code(), speed_tables.generated(), of_research()))
    for name, text in old.items():
        print(f"{name} is old: python tools/generate.py" if check else f"wrote {name}")
        if not check:
            (ROOT / name).write_text(text, encoding="utf-8")
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
