"""Which queries and keys are in a block, and which distances they meet: integers alone.

A distance is known by its index among all that queries and keys have, from the smallest on: the pair (i, j) has
`j - i + query_length - 1`, as in [`positions.relative_distances`]. Where the roles are exchanged, keys with
their own rows of a table, the same functions take keys for queries, and the index counts from the other end.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass


# float32 numbers in a line of the cache. Products of matrices whose rows start with one are up to twice as fast.
LINE = 16


@dataclass(frozen=True)
class AttentionShape:
    """How many sequences, heads, queries and keys an attention has."""

    batch: int
    heads: int
    query_length: int
    key_length: int

    @property
    def distances(self) -> int:
        """How many there are between all queries and keys."""
        return self.query_length + self.key_length - 1


@dataclass
class Block:
    """Some heads and some queries of a sequence, and keys among which are all that they may attend to.

    Attributes:
        query_place, key_place: where they are in (batch, heads, length, head_dim).
        shape: (heads, queries, keys) of its scores.
    """

    sequence: int
    heads: slice
    queries: slice
    keys: slice

    def __post_init__(self):
        self.query_place = self.sequence, self.heads, self.queries
        self.key_place = self.sequence, self.heads, self.keys
        self.shape = tuple(part.stop - part.start for part in (self.heads, self.queries, self.keys))

    def with_keys(self, keys: slice) -> "Block":
        """A block of these heads and queries, with other keys."""
        return Block(self.sequence, self.heads, self.queries, keys)

    def columns(self, keys: slice) -> slice:
        """Where some keys are among its own."""
        return slice(keys.start - self.keys.start, keys.stop - self.keys.start)


@dataclass(frozen=True)
class Clipping:
    """How many distances at either end look up the same vectors, as those beyond a clipping distance do.

    Attributes:
        first, last: how many do so at the beginning and at the end; 0 and 0 where no difference is made.
        laid_out: the distances whose vectors are needed one by one. Where there is clipping at an end, the outermost of
            these is clipped, and stands for all that are.
    """

    first: int
    last: int
    laid_out: slice

    def __bool__(self) -> bool:
        return self.first + self.last > 0


def aligned(length: int) -> int:
    """The next multiple of a line."""
    return -(-length // LINE) * LINE


def slices(length: int, size: int) -> Iterator[slice]:
    """Parts of a length, of one size but for the last."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def equal_parts(length: int, most: int) -> int:
    """The size of as few parts as possible, none of them greater than `most`, and about equal."""
    return math.ceil(length / math.ceil(length / most))


def whole_lines(start: int, stop: int, length: int) -> slice:
    """Some of `length` keys, and the rest of their lines."""
    return slice(start // LINE * LINE, min(aligned(stop), length))


def first_distance(queries: slice, keys: slice, query_length: int) -> int:
    """Index of the smallest distance between some queries and some keys."""
    return keys.start - queries.stop + query_length


def clipping_of(first: int, last: int, sizes: AttentionShape, rows: int, step: int) -> Clipping:
    """What is laid out, given how many distances share their vectors at either end.

    Args:
        rows: queries of a block.
        step: what the borders of keys are rounded to; see [`split_at_clipping`].
    """
    beside = rows + step
    start = max(first - beside, 0)
    return Clipping(first, last, slice(start, max(start, min(sizes.distances - last + beside, sizes.distances))))


def split_at_clipping(
    queries: slice, keys: slice, clipping: Clipping, sizes: AttentionShape, step: int
) -> tuple[slice, slice, slice]:
    """Keys before, between and behind the clipping distances, for all of the queries at once. Each part may be empty.

    Those before and behind have distances to these queries that are clipped, every one. The borders, counted from the
    first key of all, are multiples of `step`.
    """
    start = (clipping.first - sizes.query_length + 1 + queries.start) // step * step
    stop = -(-(sizes.key_length - 1 - clipping.last + queries.stop) // step) * step
    start = min(max(start, keys.start), keys.stop)
    stop = min(max(stop, start), keys.stop)
    return slice(keys.start, start), slice(start, stop), slice(stop, keys.stop)


def block_seed(seed: int, block: Block) -> int:
    """A seed for the random numbers of a block: of 64 bits, all of which depend on all that goes in (SplitMix64)."""
    mixed = 0
    for number in (seed, block.sequence, block.heads.start, block.queries.start, block.keys.start):
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed
