"""What is generated from the code: writes it anew, or with --check says what is not as it would be written.

python docs/generate.py [--check]
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from hf_posenc import inspection
from hf_posenc.modeling.flags import Boolean, Dictionary, Integer, Number, Subset
from hf_posenc.modeling.schemes import kind_of


ROOT = Path(__file__).parents[1]
KINDS = {Boolean: "boolean", Integer: "integer", Number: "number", Subset: "list", Dictionary: "object"}


def flags() -> str:
    """The flags that `hf-posenc convert` takes, so that its help need not import the schemes."""
    table = {}
    for flag, values, meaning in inspection.flag_rows():
        kind = kind_of(flag)
        table[flag] = {"kind": KINDS.get(type(kind), "word"), "help": f"{values}. {meaning}"}
        if isinstance(kind, Dictionary):
            table[flag]["example"] = kind.example
    return json.dumps(table, indent=2, ensure_ascii=False) + "\n"


GENERATED: dict[str, Callable[[], str]] = {"hf_posenc_cli/flags.json": flags}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where something is old")
    check = parser.parse_args().check
    old = []
    for name, make in GENERATED.items():
        file, text = ROOT / name, make()
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            old.append(name)
            if not check:
                file.write_text(text, encoding="utf-8")
    if old:
        print(
            "\n".join(
                f"{name} is not as python docs/generate.py writes it" if check else f"wrote {name}" for name in old
            )
        )
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
