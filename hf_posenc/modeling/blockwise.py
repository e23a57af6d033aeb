"""Exact attention with position terms in blocks that fit into a CPU's cache, forward and backward.

What a term adds to the score of query i and key j depends on j - i. So a block of queries is multiplied with the rows of
a table *per distance*, one product of matrices, and the result is read per pair through a strided view of the same
memory ([`Skewed`]): no index tensors, no gathering, nothing of size (batch, heads, query, key). The backward pass computes
each block again, writes the gradient of its scores through such a view, and reduces it to the tables by products of
matrices too.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .scheme import PairTerm, ProductTerm, RelativeTerm


Term = RelativeTerm | PairTerm | ProductTerm
# Numbers in a block: few enough to stay in a cache between the steps. At least so many heads, though, or the cores wait for
# Python, which calls the steps.
BLOCK_SIZE, FEWEST_HEADS = 1 << 19, 4
# Queries of a block, and keys of it that are multiplied with a table at a time: a sixteenth of the keys, in these limits.
FEWEST_ROWS, MOST_ROWS = 128, 256
FEWEST_KEYS, MOST_KEYS = 64, 128
# Where PyTorch's own kernel does the work, only the bias is laid out; with 768 queries the kernel takes its largest blocks.
KERNEL_BLOCK_SIZE, KERNEL_ROWS = 1 << 23, 768


class Skewed:
    """Memory seen per distance and per pair.

    Attributes:
        by_distance: (heads, rows, rows + columns - 1); entry c of row i belongs to the distance c - (rows - 1).
        by_pair: (heads, rows, columns), the same numbers: entry (i, j) is that of the distance j - i.
    """

    def __init__(self, by_distance: torch.Tensor, rows: int, columns: int):
        self.by_distance = by_distance
        width = rows + columns - 1
        self.by_pair = by_distance.as_strided(
            (by_distance.shape[0], rows, columns),
            (rows * width, width - 1, 1),
            by_distance.storage_offset() + rows - 1,
        )


class Scratch:
    """Memory for blocks, by name, used again from block to block."""

    def __init__(self, like: torch.Tensor):
        self.like = like
        self.kept: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}

    def get(self, name: str, *shape: int, zero: bool = False) -> torch.Tensor:
        """A contiguous tensor with any content, or with `zero` what was written since its shape last changed, else 0."""
        size = math.prod(shape)
        memory, last_shape = self.kept.get(name, (None, None))
        if memory is None or memory.numel() < size:
            memory, last_shape = self.like.new_empty(size), None
        tensor = memory[:size].view(shape)
        if zero and shape != last_shape:
            tensor.zero_()
        self.kept[name] = memory, shape
        return tensor

    def skewed(self, name: str, heads: int, rows: int, columns: int) -> Skewed:
        """A block; what is written through `by_pair` alone stays 0 where there are no pairs."""
        return Skewed(self.get(name, heads, rows, rows + columns - 1, zero=True), rows, columns)


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
        rows: (heads, distances, head_dim).
        first, last: how many distances at either end share one vector.
    """

    def __init__(self, rows: torch.Tensor, first: int, last: int):
        self.rows, self.first, self.last = rows, first, last
        self.gradient: torch.Tensor | None = None

    def flipped(self) -> "Table":
        """The same vectors by the opposite distance."""
        return Table(self.rows.flip(1), self.last, self.first)

    def _ends(self, start: int, width: int) -> tuple[int, int]:
        """How many of the distances from `start` on share the first vector, and from which on they share the last."""
        first = min(max(self.first - start, 0), width)
        last = min(max(self.rows.shape[1] - self.last - start, first), width)
        # Cutting a product into pieces has a price.
        return (first, last) if 4 * (last - first) < 3 * width else (0, width)

    def times(self, vectors: torch.Tensor, heads: slice, start: int, out: torch.Tensor, keep: bool = False) -> None:
        """out = vectors · table, added to `out` with `keep`: (heads, rows, head_dim) -> (heads, rows, width)."""
        width = out.shape[-1]
        first, last = self._ends(start, width)
        for ends, row in ((out[..., :first], 0), (out[..., last:], -1)):
            if ends.shape[-1]:
                product = torch.bmm(vectors, self.rows[heads, row, :, None])
                ends.add_(product) if keep else ends.copy_(product.expand_as(ends))
        if first < last:
            rows = self.rows[heads, start + first : start + last].transpose(1, 2)
            add_product(out[..., first:last], vectors, rows, keep)

    def combine(self, weights: torch.Tensor, heads: slice, start: int, out: torch.Tensor) -> None:
        """Add weights · table to `out`: (heads, rows, width) -> (heads, rows, head_dim)."""
        first, last = self._ends(start, weights.shape[-1])
        if first < last:
            add_product(out, weights[..., first:last], self.rows[heads, start + first : start + last])
        for ends, row in ((weights[..., :first], 0), (weights[..., last:], -1)):
            if ends.shape[-1]:
                out.add_(ends.sum(-1, keepdim=True) * self.rows[heads, None, row])

    def learn(self, weights: torch.Tensor, vectors: torch.Tensor, heads: slice, start: int) -> None:
        """Add weightsᵀ · vectors to the gradient: (heads, rows, width), (heads, rows, head_dim)."""
        first, last = self._ends(start, weights.shape[-1])
        if first < last:
            self.learn_rows(
                weights[..., first:last].transpose(1, 2), vectors, heads, slice(start + first, start + last)
            )
        for ends, row in ((weights[..., :first], 0), (weights[..., last:], self.rows.shape[1] - 1)):
            if ends.shape[-1]:
                self.learn_rows(ends.sum(-1)[:, None], vectors, heads, slice(row, row + 1))

    def learn_rows(self, left: torch.Tensor, right: torch.Tensor, heads: slice, rows: slice) -> None:
        """Add a product to the gradient of some rows."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.rows, memory_format=torch.contiguous_format)
        self.gradient[heads, rows].add_(torch.bmm(left, right))


def shared_ends(rows: torch.Tensor) -> tuple[int, int]:
    """How many distances at either end of (distances,) look up the same row."""
    other_than_first, other_than_last = (rows != rows[0]).nonzero(), (rows != rows[-1]).nonzero()
    if not len(other_than_first):
        return len(rows), 0
    return int(other_than_first[0]), len(rows) - 1 - int(other_than_last[-1])


@dataclass
class Plan:
    """What the computation needs to know beside tensors that may have a gradient.

    Attributes:
        rows: of each table term, (distances,).
        places: for each differentiable tensor of the terms, the index of its term among those of its kind and its name.
        mask: bool or additive, (batch or 1, heads or 1, query or 1, key), or None.
        scaling: of the content score.
        dropout: probability.
        seed: of the dropout.
        ranges: see [`key_ranges`].
    """

    rows: list[torch.Tensor]
    places: list[tuple[int, str]]
    mask: torch.Tensor | None
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
    """Some heads, some queries."""

    heads: slice
    queries: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.heads.stop - self.heads.start, self.queries.stop - self.queries.start


def key_ranges(mask: torch.Tensor | None, batch: int, key_length: int) -> list[tuple[int, int] | None]:
    """Per sequence, from which key to which all queries attend; None where the mask says something else."""
    if mask is None:
        return [(0, key_length)] * batch
    if mask.dtype != torch.bool or mask.shape[1] != 1:
        return [None] * batch
    if mask.shape[2] > 1 and mask.stride(2) and not torch.equal(mask, mask[:, :, :1].expand_as(mask)):
        return [None] * batch
    kept = mask[:, 0, 0].expand(batch, key_length)
    counts = kept.sum(-1)
    first = kept.to(torch.uint8).argmax(-1)
    last = key_length - kept.flip(-1).to(torch.uint8).argmax(-1)
    whole = (counts > 0) & (last - first == counts)
    return [(start, end) if ok else None for start, end, ok in zip(first.tolist(), last.tolist(), whole.tolist())]


class Computation:
    """One forward or backward pass: the tensors per distance, and the scores of a block."""

    def __init__(self, plan: Plan, content_query, query, key, value, tensors):
        self.plan = plan
        self.content_query, self.query, self.key, self.value = content_query, query, key, value
        self.batch, self.heads, self.query_length, self.head_dim = content_query.shape
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
        for name, terms in by_kind.items():
            total = functools.reduce(torch.add, [tensor[:, rows] for tensor, rows in terms])
            total = total.expand(self.heads, *total.shape[1:])
            if name == "bias":
                self.bias = total
            else:
                ends = [shared_ends(rows) for _, rows in terms]
                setattr(self, name, Table(total, *map(min, zip(*ends))))
        if self.key_table is not None:
            self.key_table = self.key_table.flipped()
        self.generator = None
        if plan.dropout:
            self.generator = torch.Generator(content_query.device)
            self.generator.manual_seed(plan.seed)

    @property
    def suits_kernel(self) -> bool:
        """Whether PyTorch's own kernel can do the rest: it takes what is added to the content score, and no dropout."""
        tables = (self.query_table, self.key_table, self.value_table)
        return all(table is None for table in tables) and not self.plan.dropout

    def sixteenth(self, fewest: int, most: int) -> int:
        """Of the number of keys, between limits."""
        return max(fewest, min(self.key_length // 16, most))

    def blocks(self, size: int, rows: int) -> Iterator[tuple[Block, int]]:
        """All heads, sequences and queries, in blocks of `rows` queries and about `size` scores; queries are innermost."""
        rows = min(rows, self.query_length)
        heads = max(FEWEST_HEADS, size // (rows * (self.key_length + rows)))
        heads = math.ceil(self.heads / math.ceil(self.heads / heads))  # equal parts
        for first_head in range(0, self.heads, heads):
            some_heads = slice(first_head, min(first_head + heads, self.heads))
            for sequence in range(self.batch):
                for first_query in range(0, self.query_length, rows):
                    yield Block(some_heads, slice(first_query, min(first_query + rows, self.query_length))), sequence

    def keys_of(self, sequence: int) -> slice:
        """The keys that some query of a sequence may attend to."""
        start, end = self.plan.ranges[sequence] or (0, self.key_length)
        return slice(start, end)

    def first_distance(self, block: Block, keys: slice) -> int:
        """Index among all distances of a block's smallest one."""
        return keys.start - block.queries.stop + self.query_length

    def bias_of(self, block: Block, sequence: int, keys: slice) -> torch.Tensor | None:
        """What is added to the content score, (heads, rows, keys), but for the key tables; None if that is nothing."""
        heads, rows = block.shape
        columns = keys.stop - keys.start
        added = Skewed(self.scratch.get("bias", heads, rows, rows + columns - 1), rows, columns)
        start = self.first_distance(block, keys)
        width = added.by_distance.shape[-1]
        started = False
        if self.bias is not None:
            added.by_distance.copy_(self.bias[block.heads, None, start : start + width].expand(-1, rows, -1))
            started = True
        if self.query_table is not None:
            query = self.query[sequence, block.heads, block.queries]
            self.query_table.times(query, block.heads, start, added.by_distance, started)
            started = True
        for product in self.products.values():
            query = _of(product["product_query"], sequence)[block.heads, block.queries]
            key = _of(product["product_key"], sequence)[block.heads, keys]
            add_product(added.by_pair, query, key.transpose(1, 2), started)
            started = True
        for pair in self.pairs:
            part = _part(pair, sequence, block, keys)
            added.by_pair.add_(part) if started else added.by_pair.copy_(part.expand_as(added.by_pair))
            started = True
        return added.by_pair if started else None

    def near_keys(self, block: Block, keys: slice) -> slice:
        """The keys at distances with vectors of their own; all before share the flipped table's last, all after its first."""
        table = self.key_table
        first = block.queries.start - self.query_length + table.last + 1
        last = block.queries.stop + self.key_length - 1 - table.first
        first = min(max(first, keys.start), keys.stop)
        return slice(first, min(max(last, first), keys.stop))

    def key_blocks(self, block: Block, keys: slice) -> Iterator[tuple[slice, slice, int]]:
        """Near keys a few at a time: which, where they are among `keys`, and their first distance in the flipped table."""
        near = self.near_keys(block, keys)
        number = self.sixteenth(FEWEST_KEYS, MOST_KEYS)
        for first in range(near.start, near.stop, number):
            few = slice(first, min(first + number, near.stop))
            columns = slice(few.start - keys.start, few.stop - keys.start)
            yield few, columns, self.key_length - few.stop + block.queries.start

    def far_keys(self, block: Block, keys: slice) -> Iterator[tuple[slice, slice, int]]:
        """Keys whose distances share a vector: which, where they are among `keys`, and the vector's row."""
        near = self.near_keys(block, keys)
        last = self.key_table.rows.shape[1] - 1
        for far, row in ((slice(keys.start, near.start), last), (slice(near.stop, keys.stop), 0)):
            if far.start < far.stop:
                yield far, slice(far.start - keys.start, far.stop - keys.start), row

    def scores(self, block: Block, sequence: int, keys: slice) -> torch.Tensor:
        """Masked scores (heads, rows, keys) of a block."""
        heads, rows = block.shape
        scores = self.scratch.get("scores", heads, rows, keys.stop - keys.start)
        key = self.key[sequence, block.heads, keys]
        content = self.content_query[sequence, block.heads, block.queries]
        scores.baddbmm_(content, key.transpose(1, 2), beta=0.0, alpha=self.plan.scaling)
        added = self.bias_of(block, sequence, keys)
        if added is not None:
            scores.add_(added)
        if self.key_table is not None:
            for few, columns, start in self.key_blocks(block, keys):
                asked = self.scratch.skewed("by key", heads, few.stop - few.start, rows)
                self.key_table.times(self.key[sequence, block.heads, few], block.heads, start, asked.by_distance)
                scores[..., columns].add_(asked.by_pair.transpose(1, 2))
            for far, columns, row in self.far_keys(block, keys):
                vector = self.key_table.rows[block.heads, row, None]
                scores[..., columns].add_(vector @ self.key[sequence, block.heads, far].transpose(1, 2))
        self.apply_mask(scores, block, sequence)
        return scores

    def weights(self, block: Block, sequence: int, keys: slice) -> torch.Tensor:
        """Attention weights (heads, rows, keys) of a block."""
        scores = self.scores(block, sequence, keys)
        return torch.softmax(scores, dim=-1, out=self.scratch.get("weights", *scores.shape))

    def apply_mask(self, scores: torch.Tensor, block: Block, sequence: int) -> None:
        """Overwrite masked scores (summed, they overflow in float16) and add what an additive mask has for the others."""
        if self.plan.ranges[sequence] is not None:
            return
        mask = _part(self.plan.mask, sequence, block, slice(0, self.key_length))
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
        else:
            scores.add_(mask).masked_fill_(_is_lowest(mask, self.plan.mask.dtype), torch.finfo(scores.dtype).min)

    def kept(self, weights: torch.Tensor) -> torch.Tensor:
        """The next block's dropout, 1.0 where a weight is kept. Blocks come in the same order forward and backward."""
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
            self._forward_by_kernel(output)
            return
        for block, sequence in self.blocks(BLOCK_SIZE, self.sixteenth(FEWEST_ROWS, MOST_ROWS)):
            keys = self.keys_of(sequence)
            weights = self.weights(block, sequence, keys)
            if self.plan.dropout:
                weights.mul_(self.kept(weights))
            part = torch.bmm(weights, self.value[sequence, block.heads, keys])
            if self.value_table is not None:
                start = self.first_distance(block, keys)
                self.value_table.combine(self._by_distance(weights), block.heads, start, part)
            if self.plan.dropout:
                part.div_(self.plan.share_kept)
            output[sequence, block.heads, block.queries] = part

    def _by_distance(self, weights: torch.Tensor) -> torch.Tensor:
        """Values per pair laid out per distance, 0 where the block has no pair."""
        skewed = self.scratch.skewed("by distance", *weights.shape)
        skewed.by_pair.copy_(weights)
        return skewed.by_distance

    def _forward_by_kernel(self, output: torch.Tensor) -> None:
        """Lay out what is added to the content score, once for all sequences if it is the same, for PyTorch's kernel."""
        every = slice(0, self.key_length)
        groups = [slice(sequence, sequence + 1) for sequence in range(self.batch)]
        if self.terms_are_shared and len({*self.plan.ranges}) == 1 and self.plan.ranges[0] is not None:
            groups = [slice(0, self.batch)]
        for block, first_sequence in self.blocks(KERNEL_BLOCK_SIZE, KERNEL_ROWS):
            if first_sequence:
                continue
            for sequences in groups:
                first = sequences.start
                if first == 0 or not self.terms_are_shared:
                    bias = self.bias_of(block, first, every)
                added = bias
                if self.plan.ranges[first] is None:
                    added = bias.clone() if self.terms_are_shared else bias
                    self.apply_mask(added, block, first)
                keys = self.keys_of(first)
                output[sequences, block.heads, block.queries] = nn.functional.scaled_dot_product_attention(
                    self.content_query[sequences, block.heads, block.queries],
                    self.key[sequences, block.heads, keys],
                    self.value[sequences, block.heads, keys],
                    attn_mask=added[None, ..., keys].expand(sequences.stop - first, -1, -1, -1),
                    scale=self.plan.scaling,
                )

    @property
    def terms_are_shared(self) -> bool:
        """Whether the terms that are known per pair are the same in all sequences."""
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
        by_distance_wanted = self.query_table is not None or "bias" in wanted

        for block, sequence in self.blocks(BLOCK_SIZE, self.sixteenth(FEWEST_ROWS, MOST_ROWS)):
            keys = self.keys_of(sequence)
            asked = output_gradient[sequence, block.heads, block.queries]
            score_gradient = self._score_gradient(block, sequence, keys, asked, gradients, wanted)
            self._learn_content(block, sequence, keys, score_gradient, gradients)
            if by_distance_wanted:
                self._learn_by_distance(block, sequence, keys, score_gradient, gradients, wanted)
            if self.key_table is not None:
                self._learn_key_table(block, sequence, keys, score_gradient, gradients, wanted)
            self._learn_by_pair(block, sequence, keys, score_gradient, gradients)

        for name in ("query_table", "value_table"):
            if name in wanted:
                gradients[name] = getattr(self, name).gradient
        if "key_table" in wanted:
            gradients["key_table"] = self.key_table.gradient.flip(1)
        return gradients

    def _score_gradient(self, block, sequence, keys, asked, gradients, wanted) -> torch.Tensor:
        """The gradient of a block's scores; learns the values on the way."""
        weights = self.weights(block, sequence, keys)
        start = self.first_distance(block, keys)
        value = self.value[sequence, block.heads, keys]
        kept = self.kept(weights) if self.plan.dropout else None
        used = weights if kept is None else weights * kept
        add_product(gradients["value"][sequence, block.heads, keys], used.transpose(1, 2), asked)
        # The scores themselves are done with.
        gradient = self.scratch.get("scores", *weights.shape)
        gradient.baddbmm_(asked, value.transpose(1, 2), beta=0.0)
        if self.value_table is not None:
            if "value_table" in wanted:
                self.value_table.learn(self._by_distance(used), asked, block.heads, start)
            by_distance = self.scratch.skewed("value bias", *weights.shape)
            self.value_table.times(asked, block.heads, start, by_distance.by_distance)
            gradient.add_(by_distance.by_pair)
        if kept is not None:
            gradient.mul_(kept)
        gradient = torch._softmax_backward_data(gradient, weights, -1, weights.dtype)
        if self.plan.ranges[sequence] is None:
            # Where every key is masked, weights are not zero, and yet nothing depends on the scores.
            mask = _part(self.plan.mask, sequence, block, slice(0, self.key_length))
            masked = ~mask if mask.dtype == torch.bool else _is_lowest(mask, self.plan.mask.dtype)
            gradient.masked_fill_(masked, 0.0)
        return gradient

    def _learn_content(self, block, sequence, keys, score_gradient, gradients) -> None:
        place, key_place = (sequence, block.heads, block.queries), (sequence, block.heads, keys)
        scaled = self.key[key_place] * self.plan.scaling
        gradients["content_query"][place] = torch.bmm(score_gradient, scaled)
        scaled = self.content_query[place] * self.plan.scaling
        add_product(gradients["key"][key_place], score_gradient.transpose(1, 2), scaled)

    def _learn_by_distance(self, block, sequence, keys, score_gradient, gradients, wanted) -> None:
        by_distance = self._by_distance(score_gradient)
        start = self.first_distance(block, keys)
        if "bias" in wanted:
            rows = slice(start, start + by_distance.shape[-1])
            gradients["bias"][block.heads, rows] += by_distance.sum(1)
        if self.query_table is not None:
            place = sequence, block.heads, block.queries
            self.query_table.combine(by_distance, block.heads, start, gradients["query"][place])
            if "query_table" in wanted:
                self.query_table.learn(by_distance, self.query[place], block.heads, start)

    def _learn_key_table(self, block, sequence, keys, score_gradient, gradients, wanted) -> None:
        heads, rows = block.shape
        for few, columns, start in self.key_blocks(block, keys):
            turned = self.scratch.skewed("by key gradient", heads, few.stop - few.start, rows)
            turned.by_pair.copy_(score_gradient[..., columns].transpose(1, 2))
            place = sequence, block.heads, few
            self.key_table.combine(turned.by_distance, block.heads, start, gradients["key"][place])
            if "key_table" in wanted:
                self.key_table.learn(turned.by_distance, self.key[place], block.heads, start)
        for far, columns, row in self.far_keys(block, keys):
            place = sequence, block.heads, far
            total = score_gradient[..., columns].sum(1, keepdim=True)  # (heads, 1, keys)
            vector = self.key_table.rows[block.heads, row, None]
            gradients["key"][place].add_(total.transpose(1, 2) * vector)
            if "key_table" in wanted:
                self.key_table.learn_rows(total, self.key[place], block.heads, slice(row, row + 1))

    def _learn_by_pair(self, block, sequence, keys, score_gradient, gradients) -> None:
        for gradient in gradients["pairs"]:
            part = _part(gradient, sequence, block, keys)
            part += score_gradient.sum_to_size(part.shape)
        for index, learned in gradients["products"].items():
            query, key = (_of(self.products[index][name], sequence) for name in ("product_query", "product_key"))
            query_gradient, key_gradient = (_of(learned[name], sequence) for name in ("product_query", "product_key"))
            add_product(query_gradient[block.heads, block.queries], score_gradient, key[block.heads, keys])
            add_product(
                key_gradient[block.heads, keys], score_gradient.transpose(1, 2), query[block.heads, block.queries]
            )


def _of(tensor: torch.Tensor, sequence: int) -> torch.Tensor:
    """A sequence's part of (batch or 1, ...)."""
    return tensor[sequence if tensor.shape[0] > 1 else 0]


def _part(tensor: torch.Tensor, sequence: int, block: Block, keys: slice) -> torch.Tensor:
    """A block's part of (batch or 1, heads or 1, query or 1, key)."""
    own = _of(tensor, sequence)
    heads = block.heads if own.shape[0] > 1 else slice(0, 1)
    queries = block.queries if own.shape[1] > 1 else slice(0, 1)
    return own[heads, queries, keys]


def _is_lowest(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where an additive mask forbids; `dtype` is the one it was made in."""
    return mask <= torch.finfo(dtype).min


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
        ctx.plan = plan
        ctx.save_for_backward(content_query, query, key, value, *tensors)
        return output

    @staticmethod
    def backward(ctx, output_gradient):
        if torch.is_grad_enabled():
            # Under create_graph. `once_differentiable` would let it pass where only the inputs are followed further.
            raise RuntimeError(
                "position attention in blocks has no second derivative: use attn_implementation='eager' for it"
            )
        plan = ctx.plan
        content_query, query, key, value, *tensors = ctx.saved_tensors
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
                gradient = torch.zeros_like(tensor, dtype=dtype).index_add_(1, plan.rows[index], by_distance)
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
) -> torch.Tensor:
    """Self-attention with position terms; distances must be contiguous.

    Args:
        content_query, query: (batch, heads, query, head_dim), of the content score and of the terms.
        key, value: (batch, heads, key, head_dim).
        terms: table terms must have their rows per distance.
        mask: bool (True where a query may attend) or additive, (batch or 1, heads or 1, query or 1, key), or None.
        scaling: of the content score.
        dropout: probability with which a weight is dropped.

    Returns:
        (batch, query, heads, head_dim).
    """
    plan = Plan([], [], mask, scaling, dropout)
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
    plan.ranges = key_ranges(mask, *key.shape[0:3:2])
    if dropout:
        plan.seed = int(torch.randint(1 << 62, ()))
    other_query = None if query is content_query else query
    return Blockwise.apply(plan, content_query, other_query, key, value, *tensors).transpose(1, 2)
