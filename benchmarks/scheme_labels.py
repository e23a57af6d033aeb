"""Labels of what is compared: a scheme, and after a colon its flags, as in `deberta:position_buckets=64`; and where a run of it is recorded."""

import json
from pathlib import Path
from typing import Any


# Flags of `rope` that learn its frequencies -> what tables call it.
FREQUENCIES = {
    ":position_learn_frequencies=shared": "frequencies learned",
    ":position_learn_frequencies=layer": "frequencies learned in each layer and head",
}


def flags_of(label: str) -> dict[str, Any]:
    """Keywords of a config from `name` or `name:flag=value,flag=value`; values are JSON, or else strings."""
    scheme, _, written = label.partition(":")
    return {"position_scheme": scheme, **parse_overrides(written)}


def parse_overrides(written: str) -> dict[str, Any]:
    """`key=value,key=value` as a dictionary; values are JSON, with commas of its own, or else strings without any.

    Raises:
        ValueError: an item has no `=`, or begins as a list, an object or a quoted string of JSON and is none.
    """
    overrides = {}
    while written := written.lstrip(", "):
        key, equals, written = written.partition("=")
        if not equals or "," in key:
            raise ValueError(f"{key.partition(',')[0]!r} should have the form key=value")
        overrides[key.strip()], written = first_value(written.lstrip())
    return overrides


def first_value(written: str) -> tuple[Any, str]:
    """The value that a text begins with, and what follows it from the next comma on."""
    try:
        value, end = json.JSONDecoder().raw_decode(written)
        if not written[end:].strip() or written[end:].lstrip().startswith(","):
            return value, written[end:]
    except json.JSONDecodeError:
        pass
    if written.startswith(("[", "{", '"')):
        raise ValueError(f"{written!r} does not begin with a value of JSON: strings inside of it need double quotes")
    word, comma, rest = written.partition(",")
    return word.strip(), comma + rest


def file_name(label: str) -> str:
    """A label as a part of a path."""
    return "".join(letter if letter.isalnum() or letter in "_-+.=" else "_" for letter in label)


def run_file(folder: Path, label: str, seed: int, conversion: int | None = None) -> Path:
    """Where a run is recorded.

    Args:
        conversion: the conversion that it starts from; the first has the name that a run without any has.
    """
    return folder / "runs" / f"{file_name(label)}{f'-conversion{conversion}' * bool(conversion)}-seed{seed}.json"
