"""Products with vectors that belong to distances, read per pair of positions through strided views: no index tensors, no
gathering.
"""

import functools
import math

import torch

from .blocks import LINE, aligned
from .constants import KEPT, is_constant


# Of so many distances at most, the layout of a constant table is kept with it: where more are, products take the time.
KEPT_DISTANCES = 1024


def reversed_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows per distance, (distances,), counted from the other end; those of a constant are kept with it."""
    if not is_constant(rows):
        return rows.flip(0)
    if KEPT[rows] is None:
        KEPT[rows] = rows.flip(0)
    return KEPT[rows]


class RelativeShift:
    """One memory seen per distance and per pair: the relative shift of Transformer-XL, as a view.

    Attributes:
        by_distance: (..., rows, width), contiguous, `width` rows + columns - 1 or somewhat more; entry c of row i belongs to the
            distance c - (rows - 1).
        by_pair: (..., rows, columns), the same numbers: entry (i, j) is that of the distance j - i.
    """

    def __init__(self, by_distance: torch.Tensor, rows: int, columns: int):
        self.by_distance = by_distance
        *outer, _, width = by_distance.shape
        self.by_pair = by_distance.as_strided(
            (*outer, rows, columns),
            (*by_distance.stride()[:-2], width - 1, 1),
            by_distance.storage_offset() + rows - 1,
        )


class Buffer:
    """Memory that is used again from block to block.

    Args:
        like: a tensor of the same type on the same device.
    """

    def __init__(self, like: torch.Tensor):
        self._like = like
        self._memory: torch.Tensor | None = None
        # Views of it by shape: most blocks have the same.
        self._views: dict[tuple[int, ...], torch.Tensor] = {}

    def of_shape(self, *shape: int) -> torch.Tensor:
        """A contiguous tensor with any content."""
        if shape not in self._views:
            size = math.prod(shape)
            if self._memory is None or self._memory.numel() < size:
                self._memory = self._like.new_empty(size)
                self._views.clear()
            self._views[shape] = self._memory[:size].view(shape)
        return self._views[shape]


class ShiftBuffer:
    """A [`Buffer`] with the relative shift.

    Args:
        starts_at_zero: whether what is written through `by_pair` alone leaves 0 where there are no pairs.
    """

    def __init__(self, like: torch.Tensor, starts_at_zero: bool = False):
        self._buffer, self._starts_at_zero = Buffer(like), starts_at_zero
        self._last: RelativeShift | None = None

    def of_shape(self, heads: int, rows: int, columns: int) -> RelativeShift:
        if self._last is None or self._last.by_pair.shape != (heads, rows, columns):
            by_distance = self._buffer.of_shape(heads, rows, aligned(rows + columns - 1))
            self._last = RelativeShift(by_distance, rows, columns)
            if self._starts_at_zero:
                by_distance.zero_()
        return self._last


def add_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, keep: bool = True) -> None:
    """out = out + left · right, or without `keep` just the product, for batches of matrices."""
    if out.is_contiguous():
        out.baddbmm_(left, right, beta=float(keep))
    elif keep:
        # One product of the whole batch and a sum are faster than what PyTorch does here: a product for each matrix.
        out.add_(torch.bmm(left, right))
    else:
        out.copy_(torch.bmm(left, right))


def looked_up(terms: list[tuple[torch.Tensor, torch.Tensor]], dim: int = 1) -> torch.Tensor:
    """The sum of tables' rows per distance, with the last one repeated: products may read on to the end of a line.

    Args:
        terms: tables, (heads or 1, rows, ...), and the rows that are read, (distances,).
        dim: that of the tables' rows.
    """
    parts = [table.index_select(dim, torch.cat([rows, rows[-1:].expand(LINE - 1)])) for table, rows in terms]
    return functools.reduce(torch.add, parts)


def _transposed(rows: torch.Tensor) -> torch.Tensor:
    """(heads, distances, head_dim) -> (heads, head_dim, distances), each row of it at the start of a line."""
    columns = rows.new_empty(rows.shape[0], rows.shape[2], aligned(rows.shape[1]))[..., : rows.shape[1]]
    return columns.copy_(rows.transpose(1, 2))


def clipped_ends(rows: torch.Tensor) -> tuple[int, int]:
    """How many distances at either end of (distances,) look up the same row."""
    other_than_first, other_than_last = (rows != rows[0]).nonzero(), (rows != rows[-1]).nonzero()
    if not len(other_than_first):
        return len(rows), 0
    return int(other_than_first[0]), len(rows) - 1 - int(other_than_last[-1])


class Table:
    """Vectors per distance, and products with them, forward and backward.

    Args:
        terms: tables (heads or 1, rows, head_dim), whose sum it is, and their rows per distance, (distances,).
        heads: how many there are.
        first: index of the first distance here; all methods count distances by this index.
    """

    def __init__(self, terms: list[tuple[torch.Tensor, torch.Tensor]], heads: int, first: int):
        self.terms, self.heads, self.first = terms, heads, first
        self.distances = len(terms[0][1])
        self.is_shared = all(table.shape[0] == 1 for table, _ in terms)
        # Kept until other heads are asked for: blocks of the same heads follow each other.
        self._rows: tuple[slice, torch.Tensor] | None = None
        self._columns: tuple[slice, torch.Tensor] | None = None
        self._gradient: torch.Tensor | None = None

    def rows(self, heads: slice) -> torch.Tensor:
        """Of some heads, or of one where all share the vectors: (heads, distances and the rest of a line, head_dim)."""
        heads = self._own(heads)
        if self._rows is None or self._rows[0] != heads:
            self._rows = None  # its memory first
            self._rows = heads, self._lay_out(heads)
        return self._rows[1]

    def columns(self, heads: slice) -> torch.Tensor:
        """The rows transposed; products with them are faster than with a transposed view."""
        heads = self._own(heads)
        if self._columns is None or self._columns[0] != heads:
            self._columns = None
            self._columns = heads, self._columns_of(heads)
        return self._columns[1]

    def _columns_of(self, heads: slice) -> torch.Tensor:
        table, rows = self.terms[0]
        if len(self.terms) > 1 or len(rows) > KEPT_DISTANCES or not is_constant(table):
            return _transposed(self._lay_out(heads))
        # Those of a longer sequence serve a shorter one, whose distances lie in the middle of its own.
        kept = KEPT[table]
        if kept is not None:
            if kept[0] is rows:
                return kept[1][heads]
            before, is_odd = divmod(len(kept[0]) - len(rows), 2)
            if before >= 0 and not is_odd and torch.equal(kept[0][before : before + len(rows)], rows):
                return kept[1][heads, :, before : before + len(rows) + LINE - 1]
        columns = _transposed(looked_up(self.terms))
        KEPT[table] = rows, columns
        return columns[heads]

    def _own(self, heads: slice) -> slice:
        return slice(0, 1) if self.is_shared else heads

    def _lay_out(self, heads: slice) -> torch.Tensor:
        return looked_up([(table[heads] if table.shape[0] > 1 else table, rows) for table, rows in self.terms])

    def vector(self, heads: slice, distance: int) -> torch.Tensor:
        """That of a single distance, (heads or 1, head_dim)."""
        return self.columns(heads)[:, :, distance - self.first]

    def products(self, vectors: torch.Tensor, heads: slice, start: int, out: torch.Tensor, keep: bool = False) -> None:
        """out = vectors · tableᵀ, added to `out` with `keep`.

        Args:
            vectors: (heads, rows, head_dim).
            heads: whose these are.
            start: the first distance of `out`.
            out: (heads, rows, distances).
        """
        columns = self.columns(heads)[:, :, self._slice(start, out)]
        add_product(out, vectors, columns.expand(vectors.shape[0], -1, -1), keep)

    def add_sums(self, weights: torch.Tensor, heads: slice, start: int, out: torch.Tensor) -> None:
        """out += weights · table, sums of vectors: (heads, rows, distances) -> (heads, rows, head_dim)."""
        rows = self.rows(heads)[:, self._slice(start, weights)]
        add_product(out, weights, rows.expand(weights.shape[0], -1, -1))

    def accumulate_gradient(self, weights: torch.Tensor, vectors: torch.Tensor, heads: slice, start: int) -> None:
        """gradient += weightsᵀ · vectors: what a table gets from [`products`] whose gradient is `weights`, and from
        [`add_sums`] whose gradient is `vectors`.

        Args:
            weights: (heads, rows, distances).
            vectors: (heads, rows, head_dim).
        """
        if self._gradient is None:
            like = self.terms[0][0]
            self._gradient = like.new_zeros(self.heads, self.distances + LINE - 1, like.shape[-1])
        part = self._gradient[heads, self._slice(start, weights)]
        part.add_(torch.bmm(weights.transpose(1, 2), vectors))

    def gradients(self) -> list[torch.Tensor]:
        """Those of the tables, each of its shape."""
        return [scattered(self._gradient, table, rows) for table, rows in self.terms]

    def _slice(self, start: int, by_distance: torch.Tensor) -> slice:
        return slice(start - self.first, start - self.first + by_distance.shape[-1])


def scattered(by_distance: torch.Tensor | None, table: torch.Tensor, rows: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """The gradient of a table, given that of what [`looked_up`] read of it; None stands for zeros.

    Args:
        by_distance: (heads, distances and the rest of a line, ...).
        table: (heads or 1, rows, ...).
        rows: (distances,).
        dim: that of the tables' rows.
    """
    gradient = torch.zeros_like(table)
    if by_distance is None:
        return gradient
    by_distance = by_distance.narrow(dim, 0, len(rows))
    # What is shared between heads, or between sequences, gets the sum of theirs.
    shape = [*table.shape]
    shape[dim] = len(rows)
    return gradient.index_add_(dim, rows, by_distance.sum_to_size(shape))
