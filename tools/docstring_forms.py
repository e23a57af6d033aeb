"""For griffe, which reads docstrings for the API pages: entries of several names, "query, key: ...", become one for each name."""

import re
from typing import Any

import griffe


SEVERAL = re.compile(r"^    (\w+(?:, \w+)+):(.*(?:\n {8}.*)*)", re.MULTILINE)


def one_for_each(docstring: str) -> str:
    """The docstring with a separate entry for each name in Args, Attributes and Raises."""
    return SEVERAL.sub(lambda entry: "\n".join(f"    {name}:{entry[2]}" for name in entry[1].split(", ")), docstring)


class DocstringForms(griffe.Extension):
    """Changes docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = one_for_each(obj.docstring.value)
