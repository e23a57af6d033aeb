"""Pieces of text of equal length, for what is measured over many of them: nothing is padded."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .access import Subject, chapters


# What separates paragraphs.
BLANK_LINES = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class CutTexts:
    """Pieces of equal length of documents.

    Attributes:
        input_ids: int64 (windows, length), each with the tokenizer's special tokens.
        document: int64 (windows,), the number of the document that each is from.
        words: by window and token the number of its word, None for special tokens.
    """

    input_ids: torch.Tensor
    document: torch.Tensor
    words: list[list[int | None]]

    @property
    def places(self) -> torch.Tensor:
        """int64 (places,), where in a window its words are; special tokens are at the same places in all."""
        return torch.tensor([place for place, word in enumerate(self.words[0]) if word is not None])


def cut(
    subject: Subject, texts: Iterable[str] | None, length: int, count: int, generator: torch.Generator
) -> CutTexts:
    """At most `count` windows of texts, dealt out evenly over the documents.

    A paragraph that an earlier document has is left out, so that no document holds text of another. Documents are read from
    a random place on: where a word stands in its window then has nothing to do with where it stands in its document.

    Args:
        texts: documents, of strings; a single string is one. By default Python's language reference.
        length: tokens of a window, special ones counted; at most as many as the model reads.

    Raises:
        ValueError: no document is as long as a window, or there is no tokenizer.
    """
    tokenizer = subject.tokenizer
    if tokenizer is None:
        raise ValueError(f"{subject.name} has no tokenizer to read a text with: pass one with tokenizer=")
    length, special = min(length, subject.longest or length), tokenizer.num_special_tokens_to_add()
    if length < special + 2:
        raise ValueError(f"length must be at least {special + 2}, got {length}")
    seen: set[str] = set()
    windows = []  # (turn of the window among those of its document, document, ids, words)
    for number, text in enumerate([texts] if isinstance(texts, str) else texts or chapters()):
        paragraphs = [part for part in BLANK_LINES.split(text) if part.strip() and part not in seen]
        seen.update(paragraphs)
        words = " ".join(paragraphs).split()
        start = int(torch.randint(0, length, (1,), generator=generator)) if len(words) > 2 * length else 0
        text = " ".join(words[start:])
        encoded = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)
        for turn, ids in enumerate(encoded["input_ids"]):
            if len(ids) == length:
                windows.append((turn, number, ids, encoded.word_ids(turn)))
    if not windows:
        raise ValueError(f"the text is too short: no document has the {length - special} tokens of a window")
    _, numbers, rows, words = zip(*sorted(windows, key=lambda window: window[:2])[:count])
    return CutTexts(torch.tensor(rows), torch.tensor(numbers), [*words])
