"""Existing cards: what others wrote into them stays, and what hf_posenc wrote is replaced.

The text of hf_posenc is between two comments. The first one also names the metadata of hf_posenc, so that the next card
can tell them from what a person, or another library, wrote or changed since:

    <!-- hf_posenc: from here to the end mark, written anew with the card. Metadata: {"license": "mit", "tags": ["bert"]} -->
"""

import hashlib
import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import yaml_dump

from ..files import write_whole


BEGIN = "<!-- hf_posenc: from here to the end mark, written anew with the card. Metadata: "
END = "<!-- hf_posenc: end -->"
SECTION = re.compile(rf"{re.escape(BEGIN)}(?P<record>\{{[^\n]*\}}) -->\n(?P<text>.*?){re.escape(END)}", re.DOTALL)
FRONT_MATTER = re.compile(r"\s*---[ \t]*\n(?P<yaml>.*?\n|)---[ \t]*(?:\n|\Z)", re.DOTALL)
# Entries of which there may be several, from several authors; of all others, one stays.
LISTS = ("tags", "datasets", "metrics")
RESULTS = "model-index"


def begin_mark(metadata: dict[str, Any]) -> str:
    """The comment before the text of a card that has these metadata, all of them from here."""
    _, record = merged_metadata({}, metadata, {})
    return _mark(record)


def save_card(card: ModelCard, path: str | os.PathLike, given: Collection[str] = (), force: bool = False) -> Path:
    """Write a card atomically; what others wrote into an existing card stays.

    Args:
        given: names of metadata that override even what others wrote.
        force: write it anew, whatever is there.

    Raises:
        OSError: it cannot be written.
        ValueError: what is there cannot be read as a card; it is left as it is.
    """
    path = Path(path)
    content = card.content
    if path.is_file() and not force:
        there = read_card(path)
        content = _explained(path, merged_card, there.replace("\r\n", "\n"), content, given)
        if "\r\n" in there:
            content = content.replace("\n", "\r\n")
    write_whole({path: content})
    return path


def check_card(path: Path) -> None:
    """Raise ValueError if there is a file which [`save_card`] could not read."""
    if path.is_file():
        _explained(path, _Sections.of, read_card(path).replace("\r\n", "\n"))


def read_card(path: Path) -> str:
    """A card as it is, with its own ends of lines."""
    return _explained(path, path.read_bytes().decode, "utf-8-sig")


def merged_card(there: str, new: str, given: Collection[str] = ()) -> str:
    """A new card with what others wrote into the one that is there; twice the same gives the same.

    - The text from here replaces the last one from here. Everything before and after stays as it is; where there is
      none from here yet, it comes last.
    - Metadata that others wrote, or changed, stay; those from here are replaced. Of `LISTS` and results, both are kept.

    Args:
        there, new: whole cards, with lines that end in a line feed.
        given: names of metadata that override even what others wrote.

    Raises:
        ValueError: the card that is there has metadata that are no YAML mapping, or one mark without the other.
    """
    if not there.strip():
        return new
    theirs, ours = _Sections.of(there), _Sections.of(new)
    metadata, record = merged_metadata(theirs.metadata, ours.metadata, theirs.record, given)
    text = ours.text
    if (theirs.before + theirs.after).strip():
        text = re.sub(r"\A\s*# .*\n", "", text)  # they have a title of their own
    front = _front_matter(theirs.front_matter, theirs.metadata, metadata)
    return f"---\n{front}---\n{theirs.before}{_mark(record)}\n{text}{END}{theirs.after}"


def merged_metadata(
    theirs: dict[str, Any], ours: dict[str, Any], record: dict[str, Any], given: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata of a card and new ones from here, as one, and the record of what is from here in them.

    Args:
        theirs: of the card that is there.
        ours: the new ones.
        record: what was from here in `theirs`: values, and of results their digests.
        given: names of metadata that override even what others wrote.
    """
    merged: dict[str, Any] = {}
    new_record: dict[str, Any] = {}
    for key in dict.fromkeys([*theirs, *ours]):
        if key == RESULTS:
            values, added = _merged_results(theirs.get(key) or [], ours.get(key) or [], record.get(key, []))
        elif key in LISTS:
            own = [value for value in _as_list(theirs.get(key)) if value not in record.get(key, [])]
            added = [value for value in _as_list(ours.get(key)) if value not in own]
            values = own + added
        elif key in theirs and theirs[key] != record.get(key) and not (key in given and key in ours):
            values, added = theirs[key], None
        else:  # from here; what is known no longer is gone
            values = added = ours.get(key)
        if values or (key in theirs and key not in record):
            merged[key] = values
        if added:
            new_record[key] = added
    return merged, new_record


def _merged_results(theirs: list[dict], ours: list[dict], digests: list[str]) -> tuple[list[dict], list[str]]:
    """Models with their results: those of others, and new ones from here, whose digests come second."""
    merged = []
    for model in theirs:
        own = [result for result in model["results"] if _digest(result) not in digests]
        if own or not model["results"]:
            merged.append({**model, "results": own})
    added = []
    for model in ours:
        same = next((other for other in merged if other["name"] == model["name"]), None)
        if same is None:
            merged.append(same := {**model, "results": []})
        new = [result for result in model["results"] if result not in same["results"]]
        same["results"] += new
        added += [_digest(result) for result in new]
    return merged, added


@dataclass(frozen=True)
class _Sections:
    """A card in its parts: metadata as text and read, the text around what is from here, its record, and itself."""

    front_matter: str
    metadata: dict[str, Any]
    before: str
    after: str
    record: dict[str, Any] = field(default_factory=dict)
    text: str = ""

    @classmethod
    def of(cls, card: str) -> "_Sections":
        front = FRONT_MATTER.match(card)
        metadata = (yaml.safe_load(front["yaml"]) if front else None) or {}
        if not isinstance(metadata, dict):
            raise ValueError("its metadata must be a mapping")
        _check_results(metadata.get(RESULTS) or [])
        front_matter, body = (front["yaml"], card[front.end() :]) if front else ("", f"\n{card.lstrip()}")
        sections = [*SECTION.finditer(body)]
        if not len(sections) == body.count(BEGIN) == body.count(END) <= 1:
            raise ValueError("one of the two comments that mark the text of hf_posenc is missing or changed")
        if not sections:
            return cls(front_matter, metadata, before=f"{body.rstrip()}\n\n" if body.strip() else "\n", after="")
        [section] = sections
        record = json.loads(section["record"])
        return cls(front_matter, metadata, body[: section.start()], body[section.end() :], record, section["text"])


def _front_matter(text: str, values: dict[str, Any], merged: dict[str, Any]) -> str:
    """Metadata as YAML; entries that did not change stay as they were written, with comments and quotes."""
    head, *entries = re.split(r"^(?=[^\s#-])", text, flags=re.MULTILINE)
    written: dict[str, str] = {}
    try:
        for entry in entries:
            [(key, value)] = yaml.safe_load(entry).items()
            if key in values and values[key] == value:
                written[key] = entry
    except (yaml.YAMLError, AttributeError, ValueError):  # anchors, or quotes over several lines
        head, written = "", {}
    return head + "".join(
        written[key] if key in written and values[key] == value else yaml_dump({key: value}, sort_keys=False)
        for key, value in merged.items()
    )


def _mark(record: dict[str, Any]) -> str:
    # A ">" could end the comment.
    entries = json.dumps(record, ensure_ascii=False, default=str).replace(">", r"\u003e")
    return f"{BEGIN}{entries} -->"


def _check_results(index: Any) -> None:
    if not isinstance(index, list) or not all(
        isinstance(model, dict) and isinstance(model.get("results"), list) and "name" in model for model in index
    ):
        raise ValueError(f"its {RESULTS!r} must be a list of models with 'name' and 'results'")


def _digest(result: Any) -> str:
    return hashlib.sha256(json.dumps(result, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _as_list(value: Any) -> list:
    return [] if value is None else value if isinstance(value, list) else [value]


def _explained(path: Path, read: Any, *arguments: Any) -> Any:
    """Call a function that reads a card; its errors name the file and say what to do."""
    try:
        return read(*arguments)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} exists and cannot be read as a card ({reason}): fix or remove it, write another file (hf-posenc card "
            "--out), or replace it (--force)"
        ) from error
