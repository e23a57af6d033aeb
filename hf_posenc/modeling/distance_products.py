"""Products with vectors that belong to distances, read per pair of positions through strided views: no index tensors, no
gathering.
"""

import functools
import math
from collections.abc import Callable

import torch


# float32 numbers in a line of the cache. Products of matrices whose rows start with one are up to twice as fast.
LINE = 16


def aligned(width: int) -> int:
    """The next multiple of a line."""
    return -(-width // LINE) * LINE


def looked_up(terms: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The sum of tables' rows per distance, with the last one repeated: products may read on to the end of a line.

    Args:
        terms: tables, (heads or 1, rows, ...), and the rows that they are asked for, (distances,).
    """
    parts = [table.index_select(1, torch.cat([rows, rows[-1:].expand(LINE - 1)])) for table, rows in terms]
    return functools.reduce(torch.add, parts)


class Skewed:
    """Memory seen per distance and per pair.

    Attributes:
        by_distance: (heads, rows, width), `width` rows + columns - 1 or somewhat more; entry c of row i belongs to the
            distance c - (rows - 1).
        by_pair: (heads, rows, columns), the same numbers: entry (i, j) is that of the distance j - i.
    """

    def __init__(self, by_distance: torch.Tensor, rows: int, columns: int):
        self.by_distance = by_distance
        width = by_distance.shape[-1]
        self.by_pair = by_distance.as_strided(
            (by_distance.shape[0], rows, columns),
            (rows * width, width - 1, 1),
            by_distance.storage_offset() + rows - 1,
        )


class Scratch:
    """Memory for blocks, by name, used again from block to block."""

    def __init__(self, like: torch.Tensor):
        self.like = like
        self.memory: dict[str, torch.Tensor] = {}
        # Views of it, by name and shape: most blocks have the same.
        self.views: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
        self.blocks: dict[str, Skewed] = {}

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """A contiguous tensor with any content."""
        views = self.views.setdefault(name, {})
        if shape not in views:
            size = math.prod(shape)
            if name not in self.memory or self.memory[name].numel() < size:
                self.memory[name] = self.like.new_empty(size)
                views.clear()
                self.blocks.pop(name, None)
            views[shape] = self.memory[name][:size].view(shape)
        return views[shape]

    def skewed(self, name: str, heads: int, rows: int, columns: int, zero: bool = False) -> Skewed:
        """A block; with `zero`, what is written through `by_pair` alone stays 0 where there are no pairs."""
        block = self.blocks.get(name)
        if block is None or block.by_pair.shape != (heads, rows, columns):
            block = Skewed(self.get(name, heads, rows, aligned(rows + columns - 1)), rows, columns)
            if zero:
                block.by_distance.zero_()
            self.blocks[name] = block
        return block


def add_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, keep: bool = True) -> None:
    """out = out + left · right, or without `keep` just the product, for batches of matrices."""
    if out.is_contiguous():
        out.baddbmm_(left, right, beta=float(keep))
    elif keep:
        # One product of the whole batch and a sum are faster than what PyTorch does here: a product for each matrix.
        out.add_(torch.bmm(left, right))
    else:
        out.copy_(torch.bmm(left, right))


class Table:
    """Vectors per distance, and products with them.

    Args:
        terms: tables (heads or 1, rows, head_dim), whose sum it is, and their rows per distance, (distances,).
        heads: how many there are.
        before: how many distances are smaller than the first one here. Others are counted from the smallest of all.
    """

    def __init__(self, terms: list[tuple[torch.Tensor, torch.Tensor]], heads: int, before: int):
        self.terms, self.heads, self.before = terms, heads, before
        self.distances = len(terms[0][1])
        self.is_shared = all(table.shape[0] == 1 for table, _ in terms)
        self._laid_out: dict[str, tuple[slice, torch.Tensor]] = {}
        self._gradient: torch.Tensor | None = None

    def rows(self, heads: slice) -> torch.Tensor:
        """Of some heads, or of one where all share the vectors: (heads, distances and the rest of a line, head_dim)."""
        return self._lay_out("rows", heads, self._rows_of)

    def columns(self, heads: slice) -> torch.Tensor:
        """The rows transposed; products with them are faster than with a transposed view."""
        return self._lay_out("columns", heads, self._columns_of)

    def _lay_out(self, name: str, heads: slice, make: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Kept until other heads are asked for: blocks of the same heads follow each other."""
        heads = slice(0, 1) if self.is_shared else heads
        if name not in self._laid_out or self._laid_out[name][0] != heads:
            self._laid_out.pop(name, None)
            self._laid_out[name] = heads, make(heads)
        return self._laid_out[name][1]

    def _rows_of(self, heads: slice) -> torch.Tensor:
        return looked_up([(table[heads] if table.shape[0] > 1 else table, rows) for table, rows in self.terms])

    def _columns_of(self, heads: slice) -> torch.Tensor:
        rows = self._rows_of(heads)
        columns = rows.new_empty(rows.shape[0], rows.shape[2], aligned(rows.shape[1]))[..., : rows.shape[1]]
        return columns.copy_(rows.transpose(1, 2))

    @property
    def gradient(self) -> torch.Tensor:
        """What was learned, (heads, distances, head_dim)."""
        return self._gradient_of(slice(None))[:, : self.distances]

    def shared(self, heads: slice, end: int) -> torch.Tensor:
        """The vectors of the first distance (`end` 0) or of the last (-1), (heads, head_dim)."""
        return self.columns(heads)[:, :, end].expand(heads.stop - heads.start, -1)

    def _slice(self, start: int, width: int) -> slice:
        return slice(start - self.before, start - self.before + width)

    def times(self, vectors: torch.Tensor, heads: slice, start: int, out: torch.Tensor, keep: bool = False) -> None:
        """out = vectors · table, added to `out` with `keep`: (heads, rows, head_dim) -> (heads, rows, width)."""
        columns = self.columns(heads)[:, :, self._slice(start, out.shape[-1])]
        add_product(out, vectors, columns.expand(vectors.shape[0], -1, -1), keep)

    def combine(self, weights: torch.Tensor, heads: slice, start: int, out: torch.Tensor) -> None:
        """Add weights · table to `out`: (heads, rows, width) -> (heads, rows, head_dim)."""
        rows = self.rows(heads)[:, self._slice(start, weights.shape[-1])]
        add_product(out, weights, rows.expand(weights.shape[0], -1, -1))

    def learn(self, weights: torch.Tensor, vectors: torch.Tensor, heads: slice, start: int) -> None:
        """Add weightsᵀ · vectors to the gradient: (heads, rows, width), (heads, rows, head_dim)."""
        rows = self._slice(start, weights.shape[-1])
        self._gradient_of(heads)[:, rows].add_(torch.bmm(weights.transpose(1, 2), vectors))

    def learn_shared(self, weights: torch.Tensor, vectors: torch.Tensor, heads: slice, end: int) -> None:
        """The same with the vectors of [`shared`]: (heads, rows), (heads, rows, head_dim)."""
        row = self.distances - 1 if end else 0
        self._gradient_of(heads)[:, row].add_(torch.bmm(weights[:, None], vectors)[:, 0])

    def _gradient_of(self, heads: slice) -> torch.Tensor:
        if self._gradient is None:
            like = self.terms[0][0]
            self._gradient = like.new_zeros(self.heads, self.distances + LINE - 1, like.shape[-1])
        return self._gradient[heads]


def shared_ends(rows: torch.Tensor) -> tuple[int, int]:
    """How many distances at either end of (distances,) look up the same row."""
    other_than_first, other_than_last = (rows != rows[0]).nonzero(), (rows != rows[-1]).nonzero()
    if not len(other_than_first):
        return len(rows), 0
    return int(other_than_first[0]), len(rows) - 1 - int(other_than_last[-1])
