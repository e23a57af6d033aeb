"""Scores and outputs of a block as sums over all terms, forward and backward.

Keys whose distances to all queries of the block are clipped need no vectors one by one: in these sums they have a single
distance, and the terms are given a single column for them.
"""

from collections.abc import Iterator

import torch

from .block_terms import BlockTerm, Content, DistanceBias, DistanceTerm, KeyTable, PairwiseTerm, Setting, ValueTable
from .blocks import Block, first_distance, split_at_clipping
from .distance_products import Buffer, ShiftBuffer, add_product


class Distances:
    """Which distances the pairs of a block have, and sums over the pairs that have the same."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self._by_distance = ShiftBuffer(setting.inputs.key, starts_at_zero=True)

    def split(self, block: Block) -> tuple[Block | None, list[tuple[Block, int]]]:
        """The keys of a block that have distances of their own, if any; the others, with the index of their distance."""
        setting = self.setting
        if not setting.clipping:
            return block, []
        before, near, behind = split_at_clipping(
            block.queries, block.keys, setting.clipping, setting.sizes, setting.keys
        )
        laid_out = setting.clipping.laid_out
        clipped = [(before, laid_out.start), (behind, laid_out.stop - 1)]
        return (
            block.with_keys(near) if near.start < near.stop else None,
            [(block.with_keys(keys), distance) for keys, distance in clipped if keys.start < keys.stop],
        )

    def first(self, block: Block) -> int:
        """The smallest distance of a block."""
        return first_distance(block.queries, block.keys, self.setting.sizes.query_length)

    def sums(self, block: Block, pairs: torch.Tensor) -> Iterator[tuple[Block, int, torch.Tensor]]:
        """What is known per pair, (heads, queries, keys), as (heads, queries, distances).

        Yields:
            Keys of the block, their smallest distance, and the sums: what was there, 0 where there is no pair, or one
            column for keys whose distances are clipped. The memory is used again in the next step.
        """
        near, clipped = self.split(block)
        if near is not None:
            shift = self._by_distance.of_shape(*near.shape)
            shift.by_pair.copy_(pairs[..., block.columns(near.keys)])
            yield near, self.first(near), shift.by_distance
        for part, distance in clipped:
            yield part, distance, pairs[..., block.columns(part.keys)].sum(-1, keepdim=True)


class Scores:
    """The scores of a block: those of the content, and what all terms add."""

    def __init__(self, setting: Setting, terms: list[BlockTerm], distances: Distances, scaling: float):
        self.setting, self.distances = setting, distances
        self.content = Content(setting, scaling)
        self.by_distance = [term for term in terms if isinstance(term, DistanceTerm)]
        self.by_pair = [term for term in terms if isinstance(term, PairwiseTerm)]
        self.key_table = next((term for term in terms if isinstance(term, KeyTable)), None)
        self.bias = next((term for term in terms if isinstance(term, DistanceBias)), None)
        self._shift, self._pairs = ShiftBuffer(setting.inputs.key), Buffer(setting.inputs.key)

    def put(self, block: Block, out: torch.Tensor) -> None:
        """out = the scores of a block, (heads, queries, keys), without a mask."""
        near, clipped = self.distances.split(block)
        if near is not None:
            self._put_near(near, out[..., block.columns(near.keys)])
        for part, distance in clipped:
            query, added = self.clipped_query(part, distance)
            own = out[..., block.columns(part.keys)]
            own.baddbmm_(query, self.setting.inputs.key[part.key_place].transpose(1, 2), beta=0.0)
            if added is not None:
                own.add_(added)

    def _put_near(self, block: Block, out: torch.Tensor) -> None:
        added = self._added_by_distance(block)
        if self.key_table is not None:
            self.key_table.put_scores(block, out, added)
        elif added is not None:
            out.copy_(added)
        keep = added is not None or self.key_table is not None
        for term in (*self.by_pair, self.content):
            term.add_scores(block, out, keep)
            keep = True

    def _added_by_distance(self, block: Block) -> torch.Tensor | None:
        """What the terms by distance add, (heads, queries, keys), a view; None if there are none."""
        if not self.by_distance:
            return None
        shift, start = self._shift.of_shape(*block.shape), self.distances.first(block)
        for index, term in enumerate(self.by_distance):
            term.add_scores(block, start, shift.by_distance, keep=index > 0)
        return shift.by_pair

    def clipped_query(self, block: Block, distance: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the keys of a block are multiplied with, and what is added, where all distances are clipped to one.

        Returns:
            (heads, queries, head_dim) and (heads, queries, 1), or None if nothing is added.
        """
        query = self.setting.inputs.content_query[block.query_place] * self.content.scaling
        if self.key_table is not None:
            query += self.key_table.vector(block, distance)
        if not self.by_distance:
            return query, None
        added = query.new_empty(*query.shape[:2], 1)
        for index, term in enumerate(self.by_distance):
            term.add_scores(block, distance, added, keep=index > 0)
        return query, added

    def added(self, block: Block) -> torch.Tensor:
        """What the terms add to the content scores of a block, (heads, queries, keys), if no key has a table."""
        out = self._added_by_distance(block)
        keep = out is not None
        if not keep:
            out = self._pairs.of_shape(*block.shape)
        for term in self.by_pair:
            term.add_scores(block, out, keep)
            keep = True
        return out if keep else out.zero_()

    def accumulate_gradient(self, block: Block, score_gradient: torch.Tensor) -> None:
        """Add to all gradients, given that of a block's scores."""
        for term in (self.content, *self.by_pair):
            term.accumulate_gradient(block, score_gradient)
        by_distance = [term for term in self.by_distance if term.reads_gradient]
        if by_distance:
            for part, start, gradient in self.distances.sums(block, score_gradient):
                for term in by_distance:
                    term.accumulate_gradient(part, start, gradient)
        if self.key_table is not None:
            near, clipped = self.distances.split(block)
            if near is not None:
                self.key_table.accumulate_gradient(near, score_gradient[..., block.columns(near.keys)])
            for part, distance in clipped:
                own = score_gradient[..., block.columns(part.keys)]
                self.key_table.accumulate_clipped_gradient(part, distance, own)


class Values:
    """The output of a block: sums of values, and of vectors per distance if there are some."""

    def __init__(self, setting: Setting, terms: list[BlockTerm], distances: Distances):
        self.setting, self.distances = setting, distances
        self.table = next((term for term in terms if isinstance(term, ValueTable)), None)
        self._shift, self._gradient = ShiftBuffer(setting.inputs.key), Buffer(setting.inputs.key)

    def output(self, block: Block, weights: torch.Tensor) -> torch.Tensor:
        """(heads, queries, head_dim), given the weights of a block, (heads, queries, keys)."""
        output = torch.bmm(weights, self.setting.inputs.value[block.key_place])
        if self.table is not None:
            for part, start, sums in self.distances.sums(block, weights):
                self.table.add_output(part, start, sums, output)
        return output

    def accumulate_gradient(self, block: Block, weights: torch.Tensor, output_gradient: torch.Tensor) -> torch.Tensor:
        """Add to the gradients of values and vectors. Returns the gradient of the weights, (heads, queries, keys)."""
        value, value_gradient = self.setting.inputs.value, self.setting.gradients.value
        add_product(value_gradient[block.key_place], weights.transpose(1, 2), output_gradient)
        gradient = self._gradient.of_shape(*block.shape)
        gradient.baddbmm_(output_gradient, value[block.key_place].transpose(1, 2), beta=0.0)
        if self.table is not None:
            self._accumulate_table(block, weights, output_gradient, gradient)
        return gradient

    def _accumulate_table(self, block: Block, weights, output_gradient, weight_gradient) -> None:
        if self.table.needs_gradient:
            for part, start, sums in self.distances.sums(block, weights):
                self.table.accumulate_gradient(part, start, sums, output_gradient)
        near, clipped = self.distances.split(block)
        if near is not None:
            shift = self._shift.of_shape(*near.shape)
            self.table.weight_gradient(near, self.distances.first(near), output_gradient, shift.by_distance)
            weight_gradient[..., block.columns(near.keys)].add_(shift.by_pair)
        for part, distance in clipped:
            column = weight_gradient.new_empty(*block.shape[:2], 1)
            self.table.weight_gradient(part, distance, output_gradient, column)
            weight_gradient[..., block.columns(part.keys)].add_(column)

    def at(self, block: Block, distance: int) -> torch.Tensor | None:
        """What is added to the values of keys whose distances are clipped to one, (heads or 1, 1, head_dim)."""
        return None if self.table is None else self.table.table.vector(block.heads, distance)[:, None]
