"""For mkdocs: the repository's files that pages link to become part of the site, and links lead to them there.

README.md is the first page, CONTRIBUTING.md and CHANGELOG.md are pages too; of all other files outside docs/ those that
some page links to. A link to a file that is not there stays as it is, and mkdocs warns of it. Notes in GitHub's form are
written in mkdocs' form.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<!\\)\]\(([^):#\s]+)")
# As GitHub writes them: "> [!NOTE]", and lines that begin with ">".
NOTE = re.compile(r"^> \[!(\w+)\]\n((?:>.*\n)+)", re.MULTILINE)


def site_path(path: str) -> str:
    """Where a file of the repository is on the site; both relative to their roots."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def in_repository(page: str) -> str:
    """Where a page of the site is in the repository."""
    names = {site: path for path, site in PAGES.items()}
    return names.get(page) or (page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}")


def linked(text: str, path: str) -> list[str]:
    """The files that a page links to, relative to the root of the repository."""
    return [posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in LINK.findall(text)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    waiting = [*PAGES, *(in_repository(page.src_uri) for page in files.documentation_pages())]
    seen = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not (ROOT / path).is_file():
            continue
        seen.add(path)
        if not path.startswith("docs/"):
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            waiting += linked((ROOT / path).read_text(encoding="utf-8"), path)
    return files


def on_page_markdown(markdown: str, page: Page, **_) -> str:
    path = in_repository(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match) -> str:
        [target] = linked(link[0], path)
        return f"]({posixpath.relpath(site_path(target), folder or '.')}" if (ROOT / target).is_file() else link[0]

    return NOTE.sub(as_admonition, LINK.sub(moved, markdown))


def as_admonition(note: re.Match) -> str:
    lines = re.sub(r"^> ?", "    ", note[2], flags=re.MULTILINE)
    return f"!!! {note[1].lower()}\n\n{lines}"
