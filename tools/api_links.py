"""For mkdocs: names in docstrings, written [`name`], become links to where the API pages describe them.

A name that no page describes, of Transformers or private, stays as code. Of two objects of one name, that of the same page is meant.
"""

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page


DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
NAME = re.compile(r"\[<code>([\w.]+)</code>\]")
# By page of the API: full names of what it describes.
described: dict[str, list[str]] = {}


def on_files(files: Files, config: MkDocsConfig) -> None:
    described.clear()
    for page in files.documentation_pages():
        if page.src_uri.startswith("api/"):
            described[page.src_uri] = DIRECTIVE.findall(page.content_string)


def full_name(name: str, page: str) -> str | None:
    """What a name in a docstring means, on a page; None where that is not described, or not clear."""
    everywhere = [path for paths in described.values() for path in paths]
    first, _, rest = name.partition(".")
    for wanted, member in ((name, ""), (first, rest), (name.rpartition(".")[2], "")):
        for paths in (described[page], everywhere):
            found = [path for path in paths if f".{path}".endswith(f".{wanted}")]
            if len(found) == 1:
                return f"{found[0]}.{member}".rstrip(".")
    return None


def on_page_content(html: str, page: Page, **_) -> str:
    if page.file.src_uri not in described:
        return html

    def link(match: re.Match) -> str:
        name = full_name(match[1], page.file.src_uri)
        code = f"<code>{match[1]}</code>"
        return f'<autoref optional identifier="{name}">{code}</autoref>' if name else code

    return NAME.sub(link, html)
