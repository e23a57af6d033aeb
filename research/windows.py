"""Documents in windows, and which window answers for a token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Piece:
    """What is read at once: tokens, and for each its place in the document, -1 for tokens that are there to be read only."""

    ids: list[int]
    places: list[int]


def whole(ids: list[int]) -> list[Piece]:
    return [Piece(ids, [*range(len(ids))])]


def windows(ids: list[int], size: int, shared: int, beginning: int = 0) -> list[Piece]:
    """Windows of `size` tokens, special tokens counted.

    Args:
        shared: tokens that neighbouring windows share.
        beginning: the document's first tokens that are before each window but the first, which has them anyway.
    """
    first, last, inner = ids[0], ids[-1], len(ids) - 2
    found, start, end = [], 0, 0
    while end < inner:
        before = min(beginning, start)
        end = min(start + size - 2 - before, inner)
        places = [-1] * (1 + before) + [*range(1 + start, 1 + end)] + [-1]
        found.append(Piece([first, *ids[1 : 1 + before], *ids[1 + start : 1 + end], last], places))
        start = end - shared
    return found


def most_context(pieces: list[Piece]) -> dict[int, tuple[int, int]]:
    """By place in the document, the piece and the token of it that have most context on the side that has less."""
    best: dict[int, tuple[int, int, int]] = {}
    for number, piece in enumerate(pieces):
        for token, place in enumerate(piece.places):
            context = min(token, len(piece.ids) - 1 - token)
            if place >= 0 and context > best.get(place, (-1,))[0]:
                best[place] = context, number, token
    return {place: (number, token) for place, (_, number, token) in best.items()}


def padded(rows: Sequence[Sequence[int]], value: int = 0) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
