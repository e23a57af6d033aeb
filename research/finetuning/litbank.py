"""LitBank: entities in works of fiction, as tags of words; how works are divided, and what is counted."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


CLASSES = ("PER", "FAC", "GPE", "LOC", "VEH", "ORG")
TAGS = ("O", *(f"{part}-{name}" for name in CLASSES for part in "BI"))
FOLDS, TESTED, DEVELOPED = 5, 20, 10
# Of a work on average, by MiniLM's tokenizer; each is in the test of one fold.
TOKENS = 2321.43
# Words of a name that begin with a small letter.
SMALL = re.compile(r"(?:the|a|an|of|de|la|le|du|van|von|in|on|at|to|for|and|by|'s|[-.,’'])$", re.IGNORECASE)
BIN = 512
# Distances in tokens from the first mention of a name: that mention itself, then up to each of these, then beyond.
MENTIONS = (256, 1024)


class Entity(NamedTuple):
    """A span of words with its class; the last word is counted in."""

    first: int
    last: int
    label: str


@dataclass(frozen=True)
class Work:
    name: str
    words: list[str]
    entities: list[Entity]

    @property
    def tags(self) -> list[int]:
        """A number into [`TAGS`] for each word."""
        found = ["O"] * len(self.words)
        for first, last, label in self.entities:
            found[first : last + 1] = [f"B-{label}", *[f"I-{label}"] * (last - first)]
        return [*map(TAGS.index, found)]

    def is_name(self, entity: Entity) -> bool:
        """Every word begins with a capital letter, but for articles and the like; one word at least does."""
        words = self.words[entity.first : entity.last + 1]
        return any(word[0].isupper() for word in words) and all(
            word[0].isupper() or SMALL.match(word) for word in words
        )

    def name_of(self, entity: Entity) -> tuple[str, ...]:
        """What two mentions of one name have in common: the words without articles and the like, in small letters."""
        words = self.words[entity.first : entity.last + 1]
        return tuple(word.lower() for word in words if not SMALL.match(word))


def decode(tags: Sequence[str]) -> list[Entity]:
    """The spans of tags: a span begins at B, at another class, and at I where there is none to go on with (as in conlleval)."""
    found: list[Entity] = []
    first = 0
    for number, tag in enumerate([*tags, "O"]):
        before = tags[number - 1] if number else "O"
        if before != "O" and tag == f"I-{before[2:]}":
            continue
        if before != "O":
            found.append(Entity(first, number - 1, before[2:]))
        first = number
    return found


def outermost(entities: set[Entity]) -> list[Entity]:
    """Those that lie in no other one; of two with the same words, the class that comes first in [`CLASSES`]."""
    found: list[Entity] = []
    for one in sorted(entities, key=lambda one: (one.first, -one.last, CLASSES.index(one.label))):
        if not found or one.first > found[-1].last:
            found.append(one)
    return found


def read_work(file: Path) -> Work:
    """A file has a word and its tags in each line, in columns that are not levels in order: entities are taken from all of them."""
    rows = [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    columns = [*zip(*(row[1:5] for row in rows), strict=True)]
    entities = {entity for column in columns for entity in decode(column)}
    return Work(file.stem.removesuffix("_brat"), [row[0] for row in rows], outermost(entities))


def read_works(data: Path) -> list[Work]:
    return [read_work(file) for file in sorted((data / "litbank").glob("*.tsv"))]


def fold(works: list[Work], number: int) -> tuple[list[Work], list[Work], list[Work]]:
    """Works to train on, to develop with and to test on, of a fixed permutation."""
    order = [works[index] for index in np.random.default_rng(0).permutation(len(works))]
    tested = order[number * TESTED : (number + 1) * TESTED]
    rest = order[: number * TESTED] + order[(number + 1) * TESTED :]
    return rest[DEVELOPED:], rest[:DEVELOPED], tested


@dataclass(frozen=True)
class Encoded:
    """A work in word pieces.

    Attributes:
        ids: with special tokens.
        starts: index of each word's first piece.
    """

    work: Work
    ids: list[int]
    starts: list[int]

    @classmethod
    def of(cls, work: Work, tokenizer: Any) -> "Encoded":
        encoding = tokenizer(work.words, is_split_into_words=True, truncation=False, verbose=False)
        starts = [span.start for number in range(len(work.words)) if (span := encoding.word_to_tokens(number))]
        if len(starts) != len(work.words):
            raise ValueError(f"{work.name} has words without a token")
        return cls(work, encoding["input_ids"], starts)


def pieces_to_learn(encoded: Encoded, size: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of pieces of at most `size` tokens, cut at words; -100 is not learned.

    Only a word's first token has a label. An entity that a cut divides is not learned on either side.
    """
    work, tags = encoded.work, encoded.work.tags
    ends = [*encoded.starts[1:], len(encoded.ids) - 1]
    found, begin = [], 0
    while begin < len(work.words):
        base = encoded.starts[begin]
        end = begin + 1
        while end < len(work.words) and ends[end] - base <= size - 2:
            end += 1
        ids = [encoded.ids[0], *encoded.ids[base : ends[end - 1]], encoded.ids[-1]]
        labels = [-100] * len(ids)
        divided = [one for one in work.entities if any(one.first < cut <= one.last for cut in (begin, end))]
        for word in range(begin, end):
            if not any(one.first <= word <= one.last for one in divided):
                labels[1 + encoded.starts[word] - base] = tags[word]
        found.append((ids[:size], labels[:size]))
        begin = end
    return found


def counts(encoded: Encoded, found: list[Entity], names: bool = False) -> list[list[int]]:
    """Right, wrong and missed entities by the bin of 512 tokens in which their first word begins.

    Args:
        names: only those that are names.
    """
    keep = encoded.work.is_name if names else lambda entity: True
    gold, own = ({one for one in side if keep(one)} for side in (encoded.work.entities, found))
    table = [[0, 0, 0] for _ in range(len(encoded.ids) // BIN + 1)]
    for number, side in enumerate((gold & own, own - gold, gold - own)):
        for entity in side:
            table[encoded.starts[entity.first] // BIN][number] += 1
    return table


def counts_by_mention(encoded: Encoded, found: list[Entity]) -> list[list[int]]:
    """Right and missed names: first mentions, and later ones by their distance from the first mention of the same name."""
    first: dict[tuple[str, ...], int] = {}
    table = [[0, 0] for _ in range(len(MENTIONS) + 2)]
    own = {*found}
    for entity in sorted(filter(encoded.work.is_name, encoded.work.entities)):
        place = encoded.starts[entity.first]
        distance = place - first.setdefault(encoded.work.name_of(entity), place)
        number = 0 if distance == 0 else 1 + sum(distance > limit for limit in MENTIONS)
        table[number][entity not in own] += 1
    return table
