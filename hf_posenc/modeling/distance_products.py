"""Products with vectors that belong to distances, read per pair of positions through strided views: no index tensors, no
gathering.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import nn


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
        return self._lay_out("columns", heads, lambda heads: self._rows_of(heads).transpose(1, 2).contiguous())

    def _lay_out(self, name: str, heads: slice, make: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Kept until other heads are asked for: blocks of the same heads follow each other."""
        heads = slice(0, 1) if self.is_shared else heads
        if name not in self._laid_out or self._laid_out[name][0] != heads:
            self._laid_out.pop(name, None)
            self._laid_out[name] = heads, make(heads)
        return self._laid_out[name][1]

    def _rows_of(self, heads: slice) -> torch.Tensor:
        return looked_up([(table[heads] if table.shape[0] > 1 else table, rows) for table, rows in self.terms])

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
        add_product(out, vectors, columns.expand(len(vectors), -1, -1), keep)

    def combine(self, weights: torch.Tensor, heads: slice, start: int, out: torch.Tensor) -> None:
        """Add weights · table to `out`: (heads, rows, width) -> (heads, rows, head_dim)."""
        rows = self.rows(heads)[:, self._slice(start, weights.shape[-1])]
        add_product(out, weights, rows.expand(len(weights), -1, -1))

    def learn(self, weights: torch.Tensor, vectors: torch.Tensor, heads: slice, start: int) -> None:
        """Add weightsᵀ · vectors to the gradient: (heads, rows, width), (heads, rows, head_dim)."""
        rows = self._slice(start, weights.shape[-1])
        self._gradient_of(heads)[:, rows].add_(torch.bmm(weights.transpose(1, 2), vectors))

    def learn_shared(self, weights: torch.Tensor, vectors: torch.Tensor, heads: slice, end: int) -> None:
        """The same with the vectors of [`shared`]: (heads, rows), (heads, rows, head_dim)."""
        row = self.distances - 1 if end else 0
        self._gradient_of(heads)[:, row].add_(torch.bmm(weights[:, None], vectors)[:, 0])

    def learn_windows(self, gradients: torch.Tensor, heads: slice, start: int, step: int) -> None:
        """Add the gradients of windows, (windows, heads, width, head_dim), each `step` rows after the one before."""
        for number, gradient in enumerate(gradients):
            first = start - self.before + number * step
            rows = self._gradient_of(heads)[:, first : first + gradient.shape[1]]
            rows.add_(gradient[:, : rows.shape[1]])

    def _gradient_of(self, heads: slice) -> torch.Tensor:
        if self._gradient is None:
            like = self.terms[0][0]
            self._gradient = like.new_zeros(self.heads, self.distances + LINE - 1, like.shape[-1])
        return self._gradient[heads]


def _matrices(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """A contiguous tensor (..., width) as so many matrices of equal size, one after the other."""
    return tensor.view(number, -1, tensor.shape[-1])


class KeyBlocks:
    """Some heads' keys in blocks of equal length, each with the rows of a table that it meets: one product for them all.

    A block of keys meets a window of the table that depends on how far it is from the queries. The windows are laid out
    once, the next nearer the end of the table first, and all queries of all sequences use them again.

    Args:
        keys: (batch, heads, key, head_dim).
        table: by the opposite distance, query - key.
        heads: which.
        rows: queries of a block, a multiple of `size` unless all are in one block.
        size: keys of a block.
        query_length: of all queries.
    """

    def __init__(self, keys: torch.Tensor, table: Table, heads: slice, rows: int, size: int, query_length: int):
        assert rows % size == 0 or rows >= query_length
        self.table, self.heads, self.size = table, heads, size
        self.number, self.rest = divmod(keys.shape[2], size)
        self.last_query = (query_length - 1) // rows * rows
        whole = keys[:, heads, : self.number * size].unflatten(2, (self.number, size))
        # (batch, number, heads, size, head_dim)
        self.keys = whole.transpose(1, 2).contiguous()
        # Where all share the vectors, the first of these heads stands for them.
        self.table_heads = slice(heads.start, heads.start + 1) if table.is_shared else heads
        # Windows beside all of the table's distances are left out.
        self.skipped = -(-max(table.before - self.rest, 0) // size)
        self.start = self.rest + self.skipped * size
        met = table.columns(heads)[:, :, self.start - table.before :]
        # The last queries may be fewer, and then their windows end before these do.
        met = nn.functional.pad(met, (0, self.last_query + rows - query_length))
        width = aligned(rows + size - 1)
        number = min(self.number + self.last_query // size - self.skipped, (met.shape[2] - width) // size + 1)
        windows = [met[..., first : first + width] for first in range(0, number * size, size)]
        # (windows, heads or 1, head_dim, width)
        self.windows = torch.stack(windows[::-1])
        self.key_gradient = self.window_gradient = None

    def whole(self, keys: slice) -> slice:
        """The blocks that lie within some keys."""
        first = -(-keys.start // self.size)
        return slice(first, max(first, min(keys.stop // self.size, self.number)))

    def keys_of(self, blocks: slice) -> slice:
        """The keys in some blocks."""
        return slice(blocks.start * self.size, blocks.stop * self.size)

    def _windows_of(self, windows: torch.Tensor, blocks: slice, queries: slice) -> torch.Tensor:
        """(matrices, head_dim, width), a matrix for each block and for each head with vectors of its own."""
        nearer = len(windows) - self.number + self.skipped - queries.start // self.size
        width = aligned(queries.stop - queries.start + self.size - 1)
        return windows[blocks.start + nearer : blocks.stop + nearer].flatten(0, 1)[..., :width]

    def times(self, sequence: int, blocks: slice, queries: slice, out: torch.Tensor) -> None:
        """out = keys · windows, (blocks · heads, size, width)."""
        windows = self._windows_of(self.windows, blocks, queries)
        matrices = len(windows)
        # Where heads share vectors, the keys of all of them are the rows of one matrix.
        keys = _matrices(self.keys[sequence, blocks], matrices)
        _matrices(out, matrices).baddbmm_(keys, windows, beta=0.0)

    def learn(self, weights: torch.Tensor, sequence: int, blocks: slice, queries: slice, table_too: bool) -> None:
        """Add the gradients of the keys and with `table_too` of the windows, given that of a product."""
        if self.key_gradient is None:
            self.key_gradient = torch.zeros_like(self.keys)
            self.window_gradient = torch.zeros_like(self.windows) if table_too else None
        windows = self._windows_of(self.windows, blocks, queries)
        weights, keys, key_gradient = (
            _matrices(tensor, len(windows))
            for tensor in (weights, self.keys[sequence, blocks], self.key_gradient[sequence, blocks])
        )
        key_gradient.baddbmm_(weights, windows.transpose(1, 2))
        if table_too:
            gradient = self._windows_of(self.window_gradient, blocks, queries)
            add_product(gradient, keys.transpose(1, 2), weights)

    def finish(self, key_gradient: torch.Tensor) -> None:
        """Add what was learned to the gradients of all keys and of the table."""
        if self.key_gradient is None:
            return
        whole = self.keys_of(slice(0, self.number))
        key_gradient[:, self.heads, whole].unflatten(2, (self.number, self.size)).add_(
            self.key_gradient.transpose(1, 2)
        )
        if self.window_gradient is not None:
            gradients = self.window_gradient.flip(0).transpose(2, 3)
            self.table.learn_windows(gradients, self.table_heads, self.start, self.size)


def shared_ends(rows: torch.Tensor) -> tuple[int, int]:
    """How many distances at either end of (distances,) look up the same row."""
    other_than_first, other_than_last = (rows != rows[0]).nonzero(), (rows != rows[-1]).nonzero()
    if not len(other_than_first):
        return len(rows), 0
    return int(other_than_first[0]), len(rows) - 1 - int(other_than_last[-1])
