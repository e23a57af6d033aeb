"""Which kernel computes an attention with terms, and with which block size: chosen here alone, from numbers."""

import enum
from dataclasses import dataclass

from .block_terms import BlockTerm, DistanceBias, KeyTable, PairwiseTerm, PositionProduct, QueryTable, ValueTable
from .blocks import AttentionShape, Clipping, clipping_of, equal_parts


# Scores in a block: few enough to stay in a cache between the steps. At least so many heads, though, or the cores wait for
# Python, which calls the steps.
BLOCK_SIZE, FEWEST_HEADS = 1 << 20, 4
# Queries of a block, and keys of it that are multiplied with their own rows of a table at a time.
ROWS, KEYS = 128, 64
# Weights of sequences with so many pairs or fewer are kept for the backward pass: with heads of 64 numbers they take about half of
# what a layer's other activations take at 512 tokens, and less time to write and read than to compute again.
KEPT_PAIRS = 512 * 512
# From so many keys on, PyTorch's kernel takes what it can, and where keys have a table and every distance vectors of its own,
# blocks have four times as many queries, and two times as many such keys: they meet fewer distances per pair.
MANY_KEYS = 2048
# Where PyTorch's own kernel does the work, only the bias is laid out; with 768 queries the kernel takes its largest blocks.
KERNEL_BLOCK_SIZE, KERNEL_FEWEST_HEADS, KERNEL_ROWS = 1 << 23, 2, 768
# With a window it gets fewer queries at a time: in addition to those that each of them sees, they meet as many keys.
LOCAL_KERNEL_ROWS = 64


class Kernel(enum.Enum):
    """What computes the forward pass."""

    BLOCKS = "products of matrices, block by block"
    BIAS = "PyTorch's kernel, given all that is added to the content score"
    BIAS_BY_DISTANCE = "PyTorch's kernel, given one row of biases in the form of a matrix"


@dataclass(frozen=True)
class Strategy:
    """How an attention is computed. The backward pass is always blockwise.

    Attributes:
        kernel: of the forward pass.
        heads, rows: heads and queries of a block.
        keys: keys of a block that are multiplied with their own rows of a table at a time.
        kernel_heads, kernel_rows: heads and queries that PyTorch's kernel is given at a time.
        clipping: distances at either end that share all vectors, where this is made use of.
        clipped_keys_by_kernel: whether PyTorch's kernel attends, in the forward pass, to the keys at these distances.
        keeps_weights: whether the backward pass is given the weights of the forward pass.
    """

    kernel: Kernel
    heads: int
    rows: int
    keys: int
    kernel_heads: int
    kernel_rows: int
    clipping: Clipping
    clipped_keys_by_kernel: bool
    keeps_weights: bool


def may_clip(sizes: AttentionShape, kinds: frozenset[type[BlockTerm]]) -> bool:
    """Whether [`choose_strategy`] could make use of distances that share all vectors: counting them takes time."""
    by_distance = not any(issubclass(kind, PairwiseTerm) for kind in kinds)
    return by_distance and 4 * min(ROWS, sizes.query_length) < 3 * sizes.key_length


def choose_strategy(
    sizes: AttentionShape,
    kinds: frozenset[type[BlockTerm]],
    clipped: tuple[int, int],
    *,
    dropout: bool,
    has_ranges: bool,
    is_shared: bool,
    is_dense: bool,
    has_backward: bool,
    reach: int | None = None,
) -> Strategy:
    """The strategy for an attention.

    Args:
        kinds: of its terms.
        clipped: how many distances share all that they look up, at the beginning and at the end.
        dropout: whether there is some, which PyTorch's kernel has none of.
        has_ranges: whether each sequence attends to a range of keys, and the mask says nothing else.
        is_shared: whether the terms add the same in all sequences.
        is_dense: whether the numbers of a vector lie side by side in all inputs, as PyTorch's kernel needs them.
        has_backward: whether a backward pass may follow.
        reach: how many keys a query sees on either side of it; None for all. `clipped` is (0, 0) then.
    """
    seen = sizes.key_length if reach is None else min(sizes.key_length, ROWS + 2 * reach)
    many_keys = seen >= MANY_KEYS
    # The distances that are left, for the queries of a block.
    own = sizes.distances - sum(clipped) + min(ROWS, sizes.query_length)
    is_clipped = sum(clipped) > 0 and may_clip(sizes, kinds) and 4 * own < 3 * sizes.key_length
    is_wide = KeyTable in kinds and many_keys and not is_clipped
    rows, keys = min(4 * ROWS if is_wide else ROWS, sizes.query_length), 2 * KEYS if is_wide else KEYS
    kernel_rows = min(KERNEL_ROWS if reach is None else LOCAL_KERNEL_ROWS, sizes.query_length)
    clipping = clipping_of(*(clipped if is_clipped else (0, 0)), sizes, rows, keys)
    kernel = _kernel(sizes, kinds, dropout=dropout, is_shared=is_shared, leaves_queries=many_keys and not is_clipped)
    if kernel is Kernel.BIAS and kinds <= {DistanceBias} and has_ranges:
        kernel = Kernel.BIAS_BY_DISTANCE
    elif reach is not None:
        kernel = Kernel.BLOCKS
    clipped_keys_by_kernel = is_clipped and many_keys and not dropout and has_ranges and is_dense
    is_short = sizes.query_length * sizes.key_length <= KEPT_PAIRS
    return Strategy(
        kernel,
        _heads(BLOCK_SIZE, FEWEST_HEADS, rows, sizes.heads, seen),
        rows,
        keys,
        _heads(KERNEL_BLOCK_SIZE, KERNEL_FEWEST_HEADS, kernel_rows, sizes.heads, seen),
        kernel_rows,
        clipping,
        clipped_keys_by_kernel=clipped_keys_by_kernel,
        # PyTorch's kernel does not tell its weights.
        keeps_weights=has_backward and is_short and kernel is Kernel.BLOCKS and not clipped_keys_by_kernel,
    )


def _kernel(sizes: AttentionShape, kinds, *, dropout: bool, is_shared: bool, leaves_queries: bool) -> Kernel:
    """Whether PyTorch's own kernel does the rest: it takes what is added to the content score, and no dropout.

    Products that each sequence computes for itself are better done in blocks, but for those with a table where keys are
    many and meet vectors of their own (`leaves_queries`).
    """
    if dropout or KeyTable in kinds or ValueTable in kinds:
        return Kernel.BLOCKS
    has_products = PositionProduct in kinds
    if QueryTable in kinds:
        return Kernel.BIAS if leaves_queries and not has_products else Kernel.BLOCKS
    return Kernel.BLOCKS if has_products and not (sizes.batch > 1 and is_shared) else Kernel.BIAS


def _heads(size: int, fewest: int, rows: int, heads: int, keys: int) -> int:
    """Heads of a block with about `size` scores: equal parts of all."""
    return equal_parts(heads, max(fewest, size // (rows * (keys + rows))))
