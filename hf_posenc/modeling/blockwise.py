"""Exact attention with position terms in blocks that fit into a CPU's cache, forward and backward.

What a term adds to the score of query i and key j depends on j - i. So a block of queries is multiplied with the rows of
a table *per distance*, one product of matrices, and the result is read per pair through a strided view of the same
memory ([`Skewed`]): nothing has the size (batch, heads, query, key). The backward pass computes each block again, writes the
gradient of its scores through such a view, and reduces it to the tables by products of matrices too.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .distance_products import LINE, Scratch, Table, add_product, aligned, looked_up, shared_ends
from .scheme import PairTerm, ProductTerm, RelativeTerm


Term = RelativeTerm | PairTerm | ProductTerm
# Scores in a block: few enough to stay in a cache between the steps. At least so many heads, though, or the cores wait for
# Python, which calls the steps.
BLOCK_SIZE, FEWEST_HEADS = 1 << 20, 4
# Queries of a block, and keys of it that are multiplied with their own rows of a table at a time.
ROWS, KEYS = 128, 64
# From so many keys on, PyTorch's kernel takes what it can, and where keys have a table and every distance vectors of its own,
# blocks have four times as many queries, and two times as many such keys: they meet fewer distances beside their pairs.
MANY_KEYS = 2048
# Biases of a head that differ by so much may, with the content, leave weights whose products with small gradients are below
# the numbers that processors compute in hardware (exp(-87)).
STEEP = 40
# Where PyTorch's own kernel does the work, only the bias is laid out; with 768 queries the kernel takes its largest blocks.
KERNEL_BLOCK_SIZE, KERNEL_FEWEST_HEADS, KERNEL_ROWS = 1 << 23, 2, 768


@dataclass
class Plan:
    """What the computation needs to know beside tensors that may have a gradient.

    Attributes:
        rows: of each table term, (distances,); None for others.
        places: for each differentiable tensor of the terms, the index of its term, and which part of that it is.
        mask: bool or additive, (batch or 1, heads or 1, query or 1, key), or None.
        is_causal: whether a query attends to no later key; there is no mask then.
        scaling: of the content score.
        dropout: probability.
        seed: of the dropout.
        ranges: see [`key_ranges`]; the mask is read for sequences that have none.
    """

    rows: list[torch.Tensor | None]
    places: list[tuple[int, str]]
    mask: torch.Tensor | None
    is_causal: bool
    scaling: float
    dropout: float
    seed: int | None = None
    ranges: list[tuple[int, int] | None] = field(default_factory=list)

    @property
    def dropped_of_65536(self) -> int:
        """The probability in the steps that sixteen bits have."""
        return round(self.dropout * 65536)

    @property
    def share_kept(self) -> float:
        """The probability that a weight is kept, as it is drawn; where none is, 1 (nothing is left to scale)."""
        return 1 - self.dropped_of_65536 / 65536 or 1.0


@dataclass
class Block:
    """Some heads and some queries of a sequence, and keys among which are all that they may attend to.

    Attributes:
        query_place, key_place: where they are in (batch, heads, length, head_dim).
        shape: (heads, rows, columns) of its scores.
    """

    sequence: int
    heads: slice
    queries: slice
    keys: slice

    def __post_init__(self):
        self.query_place = self.sequence, self.heads, self.queries
        self.key_place = self.sequence, self.heads, self.keys
        self.shape = tuple(part.stop - part.start for part in (self.heads, self.queries, self.keys))

    def columns(self, keys: slice) -> slice:
        """Where some keys are among its own."""
        return slice(keys.start - self.keys.start, keys.stop - self.keys.start)


@dataclass
class End:
    """What queries make of keys whose distances share all vectors: as one key, it has this score and this value.

    Attributes:
        score: (heads, rows), the logarithm of the sum of the exponentials of their scores.
        value: (heads, rows, head_dim), the mean of their values, with their weights.
    """

    score: torch.Tensor
    value: torch.Tensor

    def of(self, rows: slice) -> "End":
        """What some of the queries make of them."""
        return End(self.score[:, rows], self.value[:, rows])


def key_ranges(mask: torch.Tensor | None, batch: int, key_length: int) -> list[tuple[int, int] | None]:
    """Per sequence, from which key to which all queries attend; None where the mask says something else."""
    if mask is None:
        return [(0, key_length)] * batch
    if mask.dtype != torch.bool or mask.shape[1] != 1:
        return [None] * batch
    if mask.shape[2] > 1 and mask.stride(2):
        # Eight at a time where they lie so.
        rows = mask.view(torch.int64) if _holds_eights(mask) else mask
        if not torch.equal(rows, rows[:, :, :1].expand_as(rows)):
            return [None] * batch
    kept = mask[:, 0, 0].expand(batch, key_length)
    counts = kept.sum(-1)
    first = kept.to(torch.uint8).argmax(-1)
    last = key_length - kept.flip(-1).to(torch.uint8).argmax(-1)
    whole = (counts > 0) & (last - first == counts)
    return [(start, end) if ok else None for start, end, ok in zip(first.tolist(), last.tolist(), whole.tolist())]


def _holds_eights(mask: torch.Tensor) -> bool:
    return mask.is_contiguous() and mask.shape[-1] % 8 == 0 and mask.storage_offset() % 8 == 0


def allowed(mask: torch.Tensor) -> torch.Tensor:
    """Where a boolean or additive mask lets a query attend."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


class Computation:
    """One forward or backward pass: the tensors per distance, and the scores of a block."""

    def __init__(self, plan: Plan, content_query, query, key, value, tensors):
        self.plan = plan
        self.content_query, self.query, self.key, self.value = content_query, query, key, value
        self.batch, self.heads, self.query_length, _ = content_query.shape
        self.key_length = key.shape[2]
        self.scratch = Scratch(content_query)
        self.query_table = self.key_table = self.value_table = self.bias = None
        self.pairs: list[torch.Tensor] = []
        self.products: dict[int, dict[str, torch.Tensor]] = {}
        by_kind: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for (index, name), tensor in zip(plan.places, tensors):
            if name == "pair":
                self.pairs.append(tensor)
            elif name in ("product_query", "product_key"):
                self.products.setdefault(index, {})[name] = tensor
            else:
                by_kind.setdefault(name, []).append((tensor, plan.rows[index]))
        self.first, self.last = self._shared_ends()
        self.reach = self._reach()
        for name, terms in by_kind.items():
            reach = slice(None) if name == "bias" else self.reach
            terms = [(tensor, rows[reach]) for tensor, rows in terms]
            if name == "key_table":  # read by the opposite distance, query - key
                terms = [(tensor, rows.flip(0)) for tensor, rows in terms]
            if name == "bias":
                self.bias = looked_up(terms).expand(self.heads, -1)
            else:
                before = self.distances - self.reach.stop if name == "key_table" else self.reach.start
                setattr(self, name, Table(terms, self.heads, before))
        self.generator = None
        if plan.dropout:
            self.generator = torch.Generator(content_query.device)
            self.generator.manual_seed(plan.seed)

    @property
    def distances(self) -> int:
        """How many there are between all queries and keys."""
        return self.query_length + self.key_length - 1

    def _shared_ends(self) -> tuple[int, int]:
        """How many distances at either end share all they look up; 0 where it is not worth making a difference."""
        rows = [rows for rows in self.plan.rows if rows is not None]
        if not rows or self.pairs or self.products:
            return 0, 0
        first, last = map(min, zip(*map(shared_ends, rows)))
        near = self.distances - first - last + min(ROWS, self.query_length)
        return (first, last) if 4 * near < 3 * self.key_length else (0, 0)

    def _reach(self) -> slice:
        """The distances of the pairs in near blocks (see [`near_and_far`]), and perhaps some more."""
        beside = self.block_rows + KEYS
        start = max(self.first - beside, 0)
        return slice(start, max(start, min(self.distances - self.last + beside, self.distances)))

    @property
    def suits_kernel(self) -> bool:
        """Whether PyTorch's own kernel does the rest: it takes what is added to the content score, and no dropout.

        Products that each sequence computes for itself are better done in blocks, but for those with a table where keys are
        many and meet vectors of their own.
        """
        if self.plan.dropout or self.key_table is not None or self.value_table is not None:
            return False
        if self.query_table is not None:
            return self.key_length >= MANY_KEYS and not self.products and not self.has_shared_ends
        return not self.products or (self.batch > 1 and self.terms_are_shared)

    @property
    def has_shared_ends(self) -> bool:
        return self.first + self.last > 0

    @property
    def leaves_ends_to_kernel(self) -> bool:
        """Whether PyTorch's own kernel attends to the keys whose distances share all vectors, which has no dropout for it."""
        if self.plan.dropout or None in self.plan.ranges or self.key_length < MANY_KEYS:
            return False
        inputs = self.content_query, self.key, self.value
        return self.has_shared_ends and all(tensor.stride(-1) == 1 for tensor in inputs)

    @property
    def block_rows(self) -> int:
        """Queries of a block."""
        return min(4 * ROWS if self.has_wide_blocks else ROWS, self.query_length)

    @property
    def few_keys(self) -> int:
        """Keys that are multiplied with a table at a time."""
        return 2 * KEYS if self.has_wide_blocks else KEYS

    @property
    def has_wide_blocks(self) -> bool:
        has_key_table = any(name == "key_table" for _, name in self.plan.places)
        return has_key_table and self.key_length >= MANY_KEYS and not self.has_shared_ends

    def blocks(self, size: int, fewest_heads: int, rows: int, sequences: Iterable[int]) -> Iterator[Block]:
        """All heads and queries of sequences, in blocks of `rows` queries and about `size` scores; queries are innermost."""
        rows = min(rows, self.query_length)
        heads = max(fewest_heads, size // (rows * (self.key_length + rows)))
        heads = math.ceil(self.heads / math.ceil(self.heads / heads))  # equal parts
        for some_heads in _slices(self.heads, heads):
            for sequence in sequences:
                for queries in _slices(self.query_length, rows):
                    yield Block(sequence, some_heads, queries, self.keys_of(sequence))

    def keys_of(self, sequence: int) -> slice:
        """All that a sequence attends to, and the rest of a line."""
        start, stop = self.plan.ranges[sequence] or (0, self.key_length)
        return slice(start // LINE * LINE, min(aligned(stop), self.key_length))

    def small_blocks(self) -> Iterator[Block]:
        """Those whose scores fit into a cache. They come in the same order forward and backward."""
        return self.blocks(BLOCK_SIZE, FEWEST_HEADS, self.block_rows, range(self.batch))

    def first_distance(self, block: Block) -> int:
        """Index among all distances of a block's smallest one."""
        return block.keys.start - block.queries.stop + self.query_length

    def added_by_distance(self, block: Block) -> torch.Tensor | None:
        """What biases and queries give the scores of a block, (heads, rows, keys), a view; None if that is nothing."""
        if self.bias is None and self.query_table is None:
            return None
        added = self.scratch.skewed("by distance", *block.shape)
        start = self.first_distance(block)
        if self.bias is not None:
            bias = self.bias[block.heads, None, start : start + added.by_distance.shape[-1]]
            added.by_distance.copy_(bias.expand(-1, block.shape[1], -1))
        if self.query_table is not None:
            keep = self.bias is not None
            self.query_table.times(self.query[block.query_place], block.heads, start, added.by_distance, keep)
        return added.by_pair

    def add_by_pair(self, out: torch.Tensor, block: Block, keep: bool) -> bool:
        """Add the terms that are known per pair to `out`, or put them there without `keep`; whether something is there."""
        for product in self.products.values():
            query = _of(product["product_query"], block.sequence)[block.heads, block.queries]
            key = _of(product["product_key"], block.sequence)[block.heads, block.keys]
            add_product(out, query, key.transpose(1, 2), keep)
            keep = True
        for pair in self.pairs:
            part = _part(pair, block)
            out.add_(part) if keep else out.copy_(part.expand_as(out))
            keep = True
        return keep

    @functools.cached_property
    def has_steep_bias(self) -> bool:
        """Whether it alone can bring a weight near the smallest numbers."""
        if self.bias is None:
            return False
        return bool((self.bias.amax(-1) - self.bias.amin(-1)).amax() > STEEP)

    def near_and_far(self, block: Block) -> tuple[Block, list[tuple[slice, int]]]:
        """A block's keys, divided by what their distances look up.

        Returns:
            The part of the block, perhaps empty, whose distances may have vectors of their own. And the keys all of whose
            distances share them, with the index of such a distance: 0, or -1 for the last.
        """
        keys = block.keys
        start = (self.first - self.query_length + 1 + block.queries.start) // KEYS * KEYS
        stop = -(-(self.key_length - 1 - self.last + block.queries.stop) // KEYS) * KEYS
        start = min(max(start, keys.start), keys.stop)
        stop = min(max(stop, start), keys.stop)
        far = [(slice(keys.start, start), 0), (slice(stop, keys.stop), -1)]
        near = Block(block.sequence, block.heads, block.queries, slice(start, stop))
        return near, [part for part in far if part[0].start < part[0].stop]

    def key_parts(self, block: Block, *scores: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, ...]]:
        """A few keys of a block at a time.

        Args:
            scores: (heads, rows, keys) of the block.

        Yields:
            The index in the key table of the smallest distance that these keys meet, their vectors, and their scores.
        """
        start = self.key_length - block.keys.start + block.queries.start
        parts = (tensor.split(self.few_keys, -1) for tensor in scores)
        for keys, *own in zip(self.key[block.key_place].split(self.few_keys, 1), *parts):
            start -= keys.shape[1]
            yield start, keys, *own

    def scores(self, block: Block, ends: Sequence[End]) -> torch.Tensor:
        """Masked scores of a block, (heads, rows, keys). If there are ends, theirs follow, and the rest of a line."""
        heads, rows, columns = block.shape
        every = self.scratch.get("scores", heads, rows, aligned(columns) + LINE if ends else columns)
        scores, others = every.tensor_split([columns], -1)
        others.fill_(-math.inf)
        for index, end in enumerate(ends):
            others[..., index] = end.score
        near, far = self.near_and_far(block)
        if near.shape[-1]:
            self._put_near(scores[..., block.columns(near.keys)], near)
        for keys, end in far:
            self._put_far(scores[..., block.columns(keys)], block, keys, end)
        self.apply_mask(scores, block)
        return every

    def _put_near(self, out: torch.Tensor, near: Block) -> None:
        """out = the scores of pairs whose distances may have vectors of their own."""
        added = self.added_by_distance(near)
        if self.key_table is not None:
            self._put_key_table(out, added, near)
        elif added is not None:
            out.copy_(added)
        keep = self.add_by_pair(out, near, added is not None or self.key_table is not None)
        content, key = self.content_query[near.query_place], self.key[near.key_place]
        out.baddbmm_(content, key.transpose(1, 2), beta=float(keep), alpha=self.plan.scaling)

    def _put_far(self, out: torch.Tensor, block: Block, keys: slice, end: int) -> None:
        """out = the scores of pairs whose distances share all vectors: one product, and a number for each query."""
        query, added = self._far_query(block, end)
        out.baddbmm_(query, self.key[block.sequence, block.heads, keys].transpose(1, 2), beta=0.0)
        if added is not None:
            out.add_(added)

    def _far_query(self, block: Block, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What keys are multiplied with whose distances share all vectors, and what is added, (heads, rows or 1, 1)."""
        query = self.content_query[block.query_place] * self.plan.scaling
        if self.key_table is not None:
            query += self.key_table.shared(block.heads, -1 - end)[:, None]
        added = []
        if self.query_table is not None:
            added.append(self.query[block.query_place] @ self.query_table.shared(block.heads, end)[..., None])
        if self.bias is not None:
            added.append(self.bias[block.heads, end, None, None])
        return query, functools.reduce(torch.add, added) if added else None

    def _put_key_table(self, scores: torch.Tensor, added: torch.Tensor | None, block: Block) -> None:
        """scores = products of keys and table, and what is added to them.

        The products of a few keys are summed up while they are in a cache.
        """
        heads, rows, _ = block.shape
        known = [] if added is None else [added]
        for start, keys, out, *added in self.key_parts(block, scores, *known):
            asked = self.scratch.skewed("by key", heads, keys.shape[1], rows)
            self.key_table.times(keys, block.heads, start, asked.by_distance)
            if added:
                torch.add(asked.by_pair.mT, *added, out=out)
            else:
                out.copy_(asked.by_pair.mT)

    def weights(self, block: Block, ends: Sequence[End] = ()) -> torch.Tensor:
        """Attention weights of a block, laid out as [`scores`] are."""
        scores = self.scores(block, ends)
        weights = torch.softmax(scores, dim=-1, out=scores)
        if self.has_steep_bias:
            # A steep bias (ALiBi's) leaves weights so small that their products with gradients are below what processors
            # compute in hardware, and take many times as long. All such weights of a query together are far below what
            # rounding does to its sum of weights, which is 1.
            nn.functional.threshold_(weights, torch.finfo(weights.dtype).eps ** 2, 0.0)
        return weights

    def masked(self, block: Block) -> torch.Tensor | None:
        """Where the mask forbids a pair of a block, (heads or 1, rows or 1, keys); None where it is a range of keys."""
        if self.plan.ranges[block.sequence] is not None:
            return None
        if self.plan.is_causal:
            keys, queries = (
                torch.arange(part.start, part.stop, device=self.key.device) for part in (block.keys, block.queries)
            )
            return (keys > queries[:, None])[None]
        return ~allowed(_part(self.plan.mask, block))

    def apply_mask(self, scores: torch.Tensor, block: Block) -> None:
        """Overwrite masked scores (summed, they overflow in float16) and add what an additive mask has for the others.

        Keys beside the sequence's range are masked too.
        """
        lowest = torch.finfo(scores.dtype).min
        masked = self.masked(block)
        if masked is not None:
            if self.plan.mask is not None and self.plan.mask.dtype != torch.bool:
                scores.add_(_part(self.plan.mask, block))
            scores.masked_fill_(masked, lowest)
        else:
            start, stop = self.plan.ranges[block.sequence]
            for beside in (slice(block.keys.start, start), slice(stop, block.keys.stop)):
                if beside.start < beside.stop:
                    scores[..., block.columns(beside)] = lowest

    def kept(self, weights: torch.Tensor) -> torch.Tensor:
        """The next block's dropout, 1.0 where a weight is kept."""
        if self.plan.dropped_of_65536 == 65536:
            return torch.zeros_like(weights)
        # Sixteen random bits for each weight: drawing 64 at a time is several times faster than `bernoulli_`.
        bits = self.scratch.like.new_empty(-(-weights.numel() // 4), dtype=torch.int64)
        bits.random_(-(1 << 63), None, generator=self.generator)
        bits = bits.view(torch.int16)[: weights.numel()].view(weights.shape)
        return torch.ge(bits, self.plan.dropped_of_65536 - 32768, out=self.scratch.get("kept", *weights.shape))

    def forward(self, output: torch.Tensor) -> None:
        """Write the output, (batch, heads, query, head_dim)."""
        if self.suits_kernel:
            is_bias_alone = self.query_table is None and not self.pairs and not self.products
            if is_bias_alone and None not in self.plan.ranges:
                self._forward_by_bias(output)
            else:
                self._forward_by_kernel(output)
            return
        for block, ends in self._blocks_and_ends():
            weights, others = self.weights(block, ends).tensor_split([block.shape[-1]], -1)
            if self.plan.dropout:
                weights.mul_(self.kept(weights))
            part = torch.bmm(weights, self.value[block.key_place])
            if self.value_table is not None:
                self._add_value_table(part, weights, block)
            for index, end in enumerate(ends):
                part.addcmul_(others[..., index, None], end.value)
            if self.plan.dropout:
                part.div_(self.plan.share_kept)
            output[block.query_place] = part

    def _blocks_and_ends(self) -> Iterator[tuple[Block, Sequence[End]]]:
        """All small blocks, and what is known of other keys."""
        if not self.leaves_ends_to_kernel:
            yield from ((block, ()) for block in self.small_blocks())
            return
        for wide in self.blocks(BLOCK_SIZE, self.heads, KERNEL_ROWS, range(self.batch)):
            wide = replace(wide, keys=slice(*self.plan.ranges[wide.sequence]))
            near, far = self.near_and_far(wide)
            ends = [self._attended_end(wide, keys, end) for keys, end in far]
            for rows in _slices(wide.shape[1], self.block_rows):
                queries = slice(wide.queries.start + rows.start, wide.queries.start + rows.stop)
                yield replace(near, queries=queries), [end.of(rows) for end in ends]

    def _attended_end(self, block: Block, keys: slice, end: int) -> End:
        """What all keys of an end are as one; `keys` and `end` as [`near_and_far`] gives them."""
        query, added = self._far_query(block, end)
        key, value = (tensor[block.sequence, block.heads, keys] for tensor in (self.key, self.value))
        # The kernel under scaled_dot_product_attention, which returns the logarithm of the sum too.
        mean, score = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], key[None], value[None], scale=1.0
        )
        score, mean = score[0], mean[0]
        if added is not None:
            score = score + added[..., 0]
        if self.value_table is not None:
            mean = mean + self.value_table.shared(block.heads, end)[:, None]
        return End(score, mean)

    def _add_value_table(self, part: torch.Tensor, weights: torch.Tensor, block: Block) -> None:
        near, far = self.near_and_far(block)
        if near.shape[-1]:
            by_distance = self._by_distance(weights[..., block.columns(near.keys)])
            self.value_table.combine(by_distance, block.heads, self.first_distance(near), part)
        for keys, end in far:
            total = weights[..., block.columns(keys)].sum(-1, keepdim=True)
            part.add_(total * self.value_table.shared(block.heads, end)[:, None])

    def _by_distance(self, weights: torch.Tensor) -> torch.Tensor:
        """Values per pair laid out per distance, 0 where the block has no pair."""
        skewed = self.scratch.skewed("weights by distance", *weights.shape, zero=True)
        skewed.by_pair.copy_(weights)
        return skewed.by_distance

    def _forward_by_kernel(self, output: torch.Tensor) -> None:
        """Lay out what is added to the content score, once for all sequences if it is the same, for PyTorch's kernel."""
        for part in self.blocks(KERNEL_BLOCK_SIZE, KERNEL_FEWEST_HEADS, KERNEL_ROWS, range(1)):
            for sequences in self.like_sequences():
                every = slice(0, self.key_length) if self.terms_are_shared else self.keys_of(sequences.start)
                block = Block(sequences.start, part.heads, part.queries, every)
                if block.sequence == 0 or not self.terms_are_shared:
                    bias = self.added_by_distance(block)
                    keep = bias is not None
                    if not keep:
                        bias = self.scratch.get("by pair", *block.shape)
                    self.add_by_pair(bias, block, keep)
                added = bias
                if self.plan.ranges[block.sequence] is None:
                    added = bias.clone() if self.terms_are_shared else bias
                    self.apply_mask(added, block)
                keys = slice(*(self.plan.ranges[block.sequence] or (0, self.key_length)))
                added = added[..., block.columns(keys)].expand(sequences.stop - sequences.start, -1, -1, -1)
                output[sequences, block.heads, block.queries] = nn.functional.scaled_dot_product_attention(
                    self.content_query[sequences, block.heads, block.queries],
                    self.key[sequences, block.heads, keys],
                    self.value[sequences, block.heads, keys],
                    attn_mask=added,
                    scale=self.plan.scaling,
                )

    def _forward_by_bias(self, output: torch.Tensor) -> None:
        """The same where a bias per distance is all there is: nothing is laid out.

        With the last query first, the distance of a pair grows with both its indices, and one row of biases is in memory
        what a whole matrix of them looks like.
        """
        every = slice(None)
        for sequences in self.like_sequences():
            keys = slice(*self.plan.ranges[sequences.start])
            for queries in _slices(self.query_length, KERNEL_ROWS):
                block = Block(sequences.start, slice(0, self.heads), queries, keys)
                place = self.bias.storage_offset() + self.first_distance(block)
                bias = self.bias.as_strided(block.shape, (self.bias.stride(0), 1, 1), place)
                reversed_output = nn.functional.scaled_dot_product_attention(
                    self.content_query[sequences, every, queries].flip(2),
                    self.key[sequences, every, keys],
                    self.value[sequences, every, keys],
                    attn_mask=bias.expand(sequences.stop - sequences.start, -1, -1, -1),
                    scale=self.plan.scaling,
                )
                output[sequences, every, queries] = reversed_output.flip(2)

    def like_sequences(self) -> list[slice]:
        """All sequences in one if they have the same terms per pair and the same range of keys, else each by itself."""
        if self.terms_are_shared and len({*self.plan.ranges}) == 1 and self.plan.ranges[0] is not None:
            return [slice(0, self.batch)]
        return [slice(sequence, sequence + 1) for sequence in range(self.batch)]

    @property
    def terms_are_shared(self) -> bool:
        """Whether what is added to the content score is the same in all sequences."""
        if self.query_table is not None or self.key_table is not None:
            return False
        known = self.pairs + [tensor for product in self.products.values() for tensor in product.values()]
        return all(tensor.shape[0] == 1 for tensor in known)

    def backward(self, output_gradient: torch.Tensor, wanted: set[str]) -> dict[str, Any]:
        """Gradients by name: of tables and biases per distance, of pairs and products as lists.

        Args:
            output_gradient: (batch, heads, query, head_dim).
            wanted: names of the terms' parts that need a gradient.
        """
        gradients: dict[str, Any] = {
            name: torch.zeros_like(getattr(self, name)) for name in ("content_query", "key", "value")
        }
        if self.query_table is not None:
            gradients["query"] = torch.zeros_like(self.query)
        if "bias" in wanted:
            gradients["bias"] = torch.zeros_like(self.bias, memory_format=torch.contiguous_format)
        gradients["pairs"] = [torch.zeros_like(pair) for pair in self.pairs] if "pair" in wanted else []
        gradients["products"] = {
            index: {name: torch.zeros_like(tensor) for name, tensor in product.items()}
            for index, product in self.products.items()
        }
        if self.plan.dropout:
            output_gradient = output_gradient / self.plan.share_kept
        for block in self.small_blocks():
            score_gradient = self._score_gradient(block, output_gradient[block.query_place], gradients, wanted)
            self._learn_content(block, score_gradient, gradients)
            near, far = self.near_and_far(block)
            if near.shape[-1]:
                part = score_gradient[..., block.columns(near.keys)]
                self._learn_by_distance(near, part, gradients, wanted)
                self._learn_key_table(near, part, gradients, wanted)
            for keys, end in far:
                self._learn_far(block, keys, end, score_gradient[..., block.columns(keys)], gradients, wanted)
            self._learn_by_pair(block, score_gradient, gradients)

        if "bias" in wanted:
            gradients["bias"] = gradients["bias"][:, : 1 - LINE]
        for name in wanted & {"query_table", "key_table", "value_table"}:
            gradients[name] = getattr(self, name).gradient
        if "key_table" in wanted:
            gradients["key_table"] = gradients["key_table"].flip(1)
        return gradients

    def _score_gradient(self, block, asked, gradients, wanted) -> torch.Tensor:
        """The gradient of a block's scores; learns the values on the way."""
        weights = self.weights(block)
        kept = self.kept(weights) if self.plan.dropout else None
        used = weights if kept is None else weights * kept
        add_product(gradients["value"][block.key_place], used.transpose(1, 2), asked)
        gradient = self.scratch.get("gradient", *block.shape)
        gradient.baddbmm_(asked, self.value[block.key_place].transpose(1, 2), beta=0.0)
        if self.value_table is not None:
            self._learn_value_table(block, asked, used, gradient, "value_table" in wanted)
        if kept is not None:
            gradient.mul_(kept)
        gradient = torch._softmax_backward_data(gradient, weights, -1, weights.dtype)
        masked = self.masked(block)
        if masked is not None:
            # Where every key is masked, weights are not zero, and yet nothing depends on the scores.
            gradient.masked_fill_(masked, 0.0)
        return gradient

    def _learn_content(self, block, score_gradient, gradients) -> None:
        scaled = self.key[block.key_place] * self.plan.scaling
        gradients["content_query"][block.query_place] = torch.bmm(score_gradient, scaled)
        scaled = self.content_query[block.query_place] * self.plan.scaling
        add_product(gradients["key"][block.key_place], score_gradient.transpose(1, 2), scaled)

    def _learn_value_table(self, block, asked, used, gradient, is_wanted) -> None:
        """Add to the weights' gradient what the table's vectors give."""
        near, far = self.near_and_far(block)
        if near.shape[-1]:
            columns, start = block.columns(near.keys), self.first_distance(near)
            if is_wanted:
                self.value_table.learn(self._by_distance(used[..., columns]), asked, block.heads, start)
            by_distance = self.scratch.skewed("value bias", *near.shape)
            self.value_table.times(asked, block.heads, start, by_distance.by_distance)
            gradient[..., columns].add_(by_distance.by_pair)
        for keys, end in far:
            columns = block.columns(keys)
            gradient[..., columns].add_(asked @ self.value_table.shared(block.heads, end)[..., None])
            if is_wanted:
                self.value_table.learn_shared(used[..., columns].sum(-1), asked, block.heads, end)

    def _learn_by_distance(self, block, score_gradient, gradients, wanted) -> None:
        if self.query_table is None and "bias" not in wanted:
            return
        by_distance = self._by_distance(score_gradient)
        start = self.first_distance(block)
        if "bias" in wanted:
            rows = slice(start, start + by_distance.shape[-1])
            gradients["bias"][block.heads, rows] += by_distance.sum(1)
        if self.query_table is not None:
            self.query_table.combine(by_distance, block.heads, start, gradients["query"][block.query_place])
            if "query_table" in wanted:
                self.query_table.learn(by_distance, self.query[block.query_place], block.heads, start)

    def _learn_key_table(self, block, score_gradient, gradients, wanted) -> None:
        if self.key_table is None:
            return
        heads, rows, _ = block.shape
        own_gradients = gradients["key"][block.key_place].split(self.few_keys, 1)
        for (start, keys, part), own in zip(self.key_parts(block, score_gradient), own_gradients):
            turned = self.scratch.skewed("by key gradient", heads, keys.shape[1], rows, zero=True)
            turned.by_pair.copy_(part.mT)
            self.key_table.combine(turned.by_distance, block.heads, start, own)
            if "key_table" in wanted:
                self.key_table.learn(turned.by_distance, keys, block.heads, start)

    def _learn_far(self, block, keys: slice, end: int, score_gradient, gradients, wanted) -> None:
        """What [`_put_far`] adds to the content score."""
        if self.query_table is not None or "bias" in wanted:
            of_query = score_gradient.sum(-1)  # (heads, rows)
            if "bias" in wanted:
                gradients["bias"][block.heads, self.distances - 1 if end else 0] += of_query.sum(-1)
            if self.query_table is not None:
                vector = self.query_table.shared(block.heads, end)[:, None]
                gradients["query"][block.query_place].add_(of_query[..., None] * vector)
                if "query_table" in wanted:
                    self.query_table.learn_shared(of_query, self.query[block.query_place], block.heads, end)
        if self.key_table is not None:
            of_key = score_gradient.sum(1)  # (heads, keys)
            place = block.sequence, block.heads, keys
            vector = self.key_table.shared(block.heads, -1 - end)[:, None]
            gradients["key"][place].add_(of_key[..., None] * vector)
            if "key_table" in wanted:
                self.key_table.learn_shared(of_key, self.key[place], block.heads, -1 - end)

    def _learn_by_pair(self, block, score_gradient, gradients) -> None:
        for gradient in gradients["pairs"]:
            part = _part(gradient, block)
            part += score_gradient.sum_to_size(part.shape)
        for index, learned in gradients["products"].items():
            query, key, query_gradient, key_gradient = (
                _of(tensors[name], block.sequence)[block.heads, places]
                for tensors in (self.products[index], learned)
                for name, places in (("product_query", block.queries), ("product_key", block.keys))
            )
            add_product(query_gradient, score_gradient, key)
            add_product(key_gradient, score_gradient.transpose(1, 2), query)


def _slices(length: int, size: int) -> Iterator[slice]:
    """Parts of a length, of one size but for the last."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _of(tensor: torch.Tensor, sequence: int) -> torch.Tensor:
    """A sequence's part of (batch or 1, ...)."""
    return tensor[sequence if tensor.shape[0] > 1 else 0]


def _part(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """A block's part of (batch or 1, heads or 1, query or 1, key)."""
    own = _of(tensor, block.sequence)
    heads = block.heads if own.shape[0] > 1 else slice(0, 1)
    queries = block.queries if own.shape[1] > 1 else slice(0, 1)
    return own[heads, queries, block.keys]


def _like_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of shape (batch, heads, length, head_dim), with the heads of a token side by side."""
    batch, heads, length, head_dim = tensor.shape
    return tensor.new_empty(batch, length, heads, head_dim).transpose(1, 2)


class Blockwise(torch.autograd.Function):
    """Attention with terms, block by block; nothing but its inputs is kept for the backward pass."""

    @staticmethod
    def forward(ctx, plan: Plan, content_query, query, key, value, *tensors):
        """`query` is None where it is the content query. Returns (batch, heads, query, head_dim)."""
        output = _like_heads(content_query)
        with torch.autocast(output.device.type, enabled=False):
            computation = Computation(plan, *_widened(content_query, query, key, value, tensors))
            wide = output if output.dtype == computation.key.dtype else _like_heads(computation.content_query)
            computation.forward(wide)
        if wide is not output:
            output.copy_(wide)
        # Saved as a tensor, the mask is missed if somebody overwrites it before the backward pass.
        ctx.plan = replace(plan, mask=None)
        ctx.save_for_backward(plan.mask, content_query, query, key, value, *tensors)
        return output

    @staticmethod
    def backward(ctx, output_gradient):
        if torch.is_grad_enabled():
            # Under create_graph. `once_differentiable` would let it pass where only the inputs are followed further.
            raise RuntimeError(
                "position attention in blocks has no second derivative: use attn_implementation='eager' for it"
            )
        mask, content_query, query, key, value, *tensors = ctx.saved_tensors
        plan = replace(ctx.plan, mask=mask)
        needed = ctx.needs_input_grad[5:]
        wanted = {name for (_, name), is_needed in zip(plan.places, needed) if is_needed}
        with torch.autocast(key.device.type, enabled=False):
            computation = Computation(plan, *_widened(content_query, query, key, value, tensors))
            dtype = computation.key.dtype
            found = computation.backward(output_gradient.to(dtype), wanted)
        if query is None and "query" in found:
            found["content_query"] += found.pop("query")
        given = [found["content_query"], found.get("query"), found["key"], found["value"]]
        pairs = iter(found["pairs"])
        for (index, name), tensor, is_needed in zip(plan.places, tensors, needed):
            if name == "pair":
                gradient = next(pairs, None)
            elif not is_needed:
                gradient = None
            elif name in ("product_query", "product_key"):
                gradient = found["products"][index][name]
            else:
                by_distance = found[name].sum(0, keepdim=True) if tensor.shape[0] == 1 else found[name]
                rows = plan.rows[index] if name == "bias" else plan.rows[index][computation.reach]
                gradient = torch.zeros_like(tensor, dtype=dtype).index_add_(1, rows, by_distance)
            given.append(gradient if is_needed else None)
        inputs = (content_query, query, key, value, *tensors)
        return None, *(g if g is None else g.to(given_to.dtype) for g, given_to in zip(given, inputs))


def _widened(content_query, query, key, value, tensors) -> tuple:
    """The tensors in float32 at least: sums in half precision would be off by more than the kernels are."""
    dtype = torch.promote_types(content_query.dtype, torch.float32)
    content_query, key, value = (tensor.to(dtype) for tensor in (content_query, key, value))
    query = content_query if query is None else query.to(dtype)
    return content_query, query, key, value, [tensor.to(dtype) for tensor in tensors]


def blockwise_attention(
    content_query: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: list[Term],
    mask: torch.Tensor | None,
    scaling: float,
    dropout: float,
    is_causal: bool = False,
) -> torch.Tensor:
    """Self-attention with position terms; distances must be contiguous.

    Args:
        content_query, query: (batch, heads, query, head_dim), of the content score and of the terms.
        key, value: (batch, heads, key, head_dim).
        terms: table terms must have their rows per distance.
        mask: bool (True where a query may attend) or additive, (batch or 1, heads or 1, query or 1, key), or None.
        scaling: of the content score.
        dropout: probability with which a weight is dropped.
        is_causal: no query attends to a later key; in place of a mask.

    Returns:
        (batch, query, heads, head_dim).
    """
    with_query_table = [term for term in terms if isinstance(term, RelativeTerm) and term.query_table is not None]
    if len(with_query_table) == 1:
        # Added to the queries, their bias costs nothing per pair.
        query = with_query_table[0].biased_query(query)
    else:
        terms = [term.without_query_bias() if isinstance(term, RelativeTerm) else term for term in terms]
    plan = Plan([], [], mask, is_causal, scaling, dropout)
    tensors = []
    for index, term in enumerate(terms):
        plan.rows.append(term.rows if isinstance(term, RelativeTerm) else None)
        if isinstance(term, PairTerm):
            parts = {"pair": term.bias}
        elif isinstance(term, ProductTerm):
            parts = {"product_query": term.query, "product_key": term.key}
        else:
            names = ("query_table", "key_table", "bias", "value_table")
            parts = {name: getattr(term, name) for name in names if getattr(term, name) is not None}
            if "value_table" in parts:
                parts["value_table"] = parts["value_table"][None]
        plan.places += [(index, name) for name in parts]
        tensors += parts.values()
    batch, _, key_length, _ = key.shape
    plan.ranges = [None] * batch if is_causal else key_ranges(mask, batch, key_length)
    if None not in plan.ranges:
        plan.mask = None  # they say all
    if dropout:
        plan.seed = int(torch.randint(1 << 62, ()))
    other_query = None if query is content_query else query
    return Blockwise.apply(plan, content_query, other_query, key, value, *tensors).transpose(1, 2)
