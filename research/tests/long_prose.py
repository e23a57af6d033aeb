"""Sentences that differ, for long documents, and a checkpoint that knows their words."""

from pathlib import Path

import long_texts
from scripts import save_checkpoint


PEOPLE = ["the cat", "a small dog", "my old friend", "the tall tree", "every child", "one bird", "her brother"]
PLACES = ["in the house", "on a hill", "near the river", "behind that wall", "under the bridge", "at sea"]


def prose(number: int) -> str:
    """Sentences of one article, none of which another has."""
    return " ".join(
        f"{who.capitalize()} saw {what} {where} in the year {1000 * number + 10 * i + j}, and nobody knew."
        for i, where in enumerate(PLACES)
        for j, (who, what) in enumerate(zip(PEOPLE, PEOPLE[1:]))
    )


def write_articles(folder: Path, *names: str, number: int) -> Path:
    """Files of so many articles each, in WikiText's form, none of which another has; their folder."""
    for index, name in enumerate(names):
        articles = (f" \n = Title {n} = \n \n {prose(n)} \n" for n in range(index * number, (index + 1) * number))
        (folder / name).write_text("".join(articles), encoding="utf-8")
    return folder


def save_reader(folder: Path, text: Path) -> Path:
    """A checkpoint that knows the words of a file, digits, and those of facts and pass keys."""
    known = " ".join([long_texts.FILLER, *sum(long_texts.facts(), ()), "pass key remember what is the for"])
    digits = [f"{mark}{digit}" for digit in range(10) for mark in ("", "##")]
    return save_checkpoint(folder, f"{text.read_text()} {known}", *digits, dropout=0.0)
