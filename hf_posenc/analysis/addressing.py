"""Which positions can an attention head select? Encodings, compared with the index and the index divided by the length.

A head's score of a key is bilinear in the vectors of two positions, s(i, j) = a(p_i)ᵀ b(p_j) with affine a and b. With the index itself,
p_j = j, it is a straight line in j for every query: the largest score is at an end of the text, whatever was learned. With the index
over the length it is a line too, and the same distance is another number in texts of another length. With the square as well,
-(i - k - j)² is such a score, but squares are as large as the length squared. Sinusoids are never larger than 1 and make a shift
by k a rotation, whatever the place, so that one map finds "k before" everywhere (Vaswani et al. 2017, section 3.5).

Here the best such map is fitted by least squares to point at the position k before, and counted is how often the largest score is there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ..modeling.schemes.sinusoidal import sinusoids
from .records import Record


RIDGE = 1e-9
Encoding = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Addressing(Record):
    """How often an attention score of positions selects the position `back` before the query. The result of [`addressing.addressing`].

    Attributes:
        encoding: name of the encoding.
        back: number of positions.
        fitted: share of queries for which it does, at the length that the score was fitted to.
        halved: the same at half of this length, with the same score.
        doubled: the same at twice this length. None if the encoding has no vectors for it.
        length: the length that the score was fitted to, in tokens.
    """

    encoding: str
    back: int
    fitted: float
    halved: float | None
    doubled: float | None
    length: int


def index(length: int) -> torch.Tensor:
    """(length, 1), 0, 1, 2, ..."""
    return torch.arange(length, dtype=torch.float64)[:, None]


def normalised_index(length: int) -> torch.Tensor:
    """(length, 1), from 0 to 1."""
    return index(length) / (length - 1)


def sinusoids_of(width: int) -> Encoding:
    """Sinusoids of a width, as a function of the length."""
    return lambda length: sinusoids(torch.arange(length), width, 10000.0, "interleaved", torch.float64)


def table_of(vectors: torch.Tensor) -> Encoding:
    """Rows of a table (positions, width), as a function of the length.

    Raises (when called):
        ValueError: the table has fewer rows.
    """

    def rows(length: int) -> torch.Tensor:
        if length > len(vectors):
            raise ValueError(f"the table has {len(vectors)} positions, got length {length}")
        return vectors[:length].double()

    return rows


def addressing(name: str, encoding: Encoding, length: int = 128, back: int = 1) -> Addressing:
    """Test whether an attention head can select the position `back` before the query, from an encoding of positions.

    The score of two positions is bilinear in their vectors, as in an attention head. It is fitted by least squares to be largest at the
    position `back` before the query.

    Args:
        name: a name for the encoding.
        encoding: a function from a length to position vectors, (length, width).
        length: number of positions to fit the score to.
        back: number of positions, from 1 to a quarter of `length`.

    Raises:
        ValueError: `back` is out of range.
    """
    if not 1 <= back <= length // 4:
        raise ValueError(f"back must be from 1 to a quarter of the length, {length // 4}, got {back}")
    vectors = encoding(length)
    mean, scale = vectors.mean(0), vectors.std(0).clamp(min=1e-12)

    def features(length: int) -> torch.Tensor:
        vectors = (encoding(length) - mean) / scale
        return torch.cat([vectors, torch.ones(length, 1, dtype=torch.float64)], dim=1)

    inverse = _pseudo_inverse(features(length))
    scores = inverse @ torch.eye(length, dtype=torch.float64).roll(back, dims=0).tril() @ inverse.T

    def found(length: int) -> float:
        own = features(length)
        guesses = (own[back:] @ scores @ own.T).argmax(1)
        return float((guesses == torch.arange(length - back)).double().mean())

    try:
        doubled = found(2 * length)
    except ValueError:
        doubled = None
    return Addressing(name, back, found(length), found(length // 2), doubled, length)


def _pseudo_inverse(features: torch.Tensor) -> torch.Tensor:
    """(width, length), by least squares with next to no ridge, for encodings whose dimensions are nearly the same."""
    gram = features.T @ features / len(features)
    penalty = RIDGE * torch.eye(len(gram), dtype=torch.float64)
    return torch.linalg.solve(gram + penalty, features.T / len(features))


def rotated_sinusoids(positions: torch.Tensor, keys: torch.Tensor, width: int) -> torch.Tensor:
    """Scores (queries, keys) of sinusoids, the queries' turned to be those of `positions`: largest where a key is there."""
    query, key = (sinusoids(at, width, 10000.0, "interleaved", torch.float64) for at in (positions, keys))
    return query @ key.T


def parabola(positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores (queries, keys) of index and square: -(i - j)² as the product of (-i², 2i, -1) and (1, j, j²)."""
    i, j = positions.double(), keys.double()
    query = torch.stack([-i.square(), 2 * i, -torch.ones_like(i)], dim=1)
    return query @ torch.stack([torch.ones_like(j), j, j.square()], dim=0)


def addressing_in_closed_form(
    name: str, score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], length: int = 128, back: int = 1
) -> Addressing:
    """The same for a score that nothing was fitted for, of the positions that are wanted and of the keys'."""

    def found(length: int) -> float:
        keys = torch.arange(length)
        return float((score(keys - back, keys).argmax(1) == keys - back)[back:].double().mean())

    return Addressing(name, back, found(length), found(length // 2), found(2 * length), length)


def addressing_of_all(
    table: torch.Tensor, width: int, length: int = 128, back: tuple[int, ...] = (1, 8)
) -> list[Addressing]:
    """Run [`addressing.addressing`] for several encodings: the index, the index divided by the length, sinusoids, and a learned matrix.

    For comparison, two scores are not fitted but known: a parabola of the index, and rotated sinusoids.

    Args:
        table: a position embedding matrix, (positions, width).
        width: number of features of the sinusoids.
        length: number of positions to fit the scores to.
        back: numbers of positions.

    Returns:
        A result for each encoding and each number in `back`.
    """
    encodings = {
        "index": index,
        "normalised index": normalised_index,
        "sinusoids": sinusoids_of(width),
        "learned table": table_of(table),
    }
    found = [addressing(name, encoding, length, own) for name, encoding in encodings.items() for own in back]
    known = {
        "index and its square, in closed form": parabola,
        "sinusoids, in closed form": partial(rotated_sinusoids, width=width),
    }
    return found + [
        addressing_in_closed_form(name, score, length, own) for name, score in known.items() for own in back
    ]
