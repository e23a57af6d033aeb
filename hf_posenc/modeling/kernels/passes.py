"""A forward or a backward pass of an attention with terms: what is done with the scores of a block, block by block."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..masks import Window
from .block_masks import AttentionMask, Dropout, keys_near, query_parts
from .block_sums import Distances, Scores, Values
from .block_terms import Inputs, Part, Setting, bias_as_matrix, block_terms
from .blocks import LINE, AttentionShape, Block, aligned, slices, whole_lines
from .distance_products import Buffer
from .strategies import Kernel, Strategy


# Biases of a head that differ by so much may, with the content, leave weights whose products with small gradients are below
# the numbers that processors compute in hardware (exp(-87)).
STEEP = 40


@dataclass(frozen=True)
class Plan:
    """What both passes know in addition to tensors that may have a gradient.

    Attributes:
        ranges, is_causal, window: of the [`AttentionMask`].
        scaling: of the content score.
    """

    sizes: AttentionShape
    strategy: Strategy
    ranges: list[tuple[int, int] | None]
    is_causal: bool
    dropout: Dropout
    scaling: float
    window: Window | None = None


@dataclass(frozen=True)
class ClippedKeys:
    """What queries make of all keys whose distances are clipped to the same one: together they count as one key.

    Attributes:
        score: (heads, queries), the logarithm of the sum of the exponentials of their scores.
        value: (heads, queries, head_dim), the mean of their values, weighted as attention weights them.
    """

    score: torch.Tensor
    value: torch.Tensor

    def of(self, queries: slice) -> "ClippedKeys":
        """What some of the queries make of them."""
        return ClippedKeys(self.score[:, queries], self.value[:, queries])


class Pass:
    """What the two passes share: the weights of a block.

    Attributes:
        kept: (batch, heads, query, key), where the forward pass leaves weights for the backward pass; None if it does not.
    """

    def __init__(
        self,
        plan: Plan,
        mask: torch.Tensor | None,
        inputs: Inputs,
        parts: list[Part],
        kept: torch.Tensor | None,
        gradients: Inputs | None = None,
    ):
        self.plan, self.inputs, self.kept = plan, inputs, kept
        self.mask = AttentionMask(plan.ranges, mask, plan.is_causal, plan.window)
        setting = Setting(plan.sizes, plan.strategy.clipping, plan.strategy.keys, inputs, gradients)
        self.terms = block_terms(setting, parts)
        self.distances = Distances(setting)
        self.scores = Scores(setting, self.terms, self.distances, plan.scaling)
        self.values = Values(setting, self.terms, self.distances)
        self._scores, self._dropout = Buffer(inputs.key), Buffer(inputs.key)

    def blocks(self, heads: int, rows: int, sequences: Iterable[int]) -> Iterator[Block]:
        """All heads and queries of sequences, some at a time; queries are innermost."""
        sizes = self.plan.sizes
        for some_heads in slices(sizes.heads, heads):
            for sequence in sequences:
                for queries, keys in self.parts_of(sequence, rows):
                    yield Block(sequence, some_heads, queries, whole_lines(keys.start, keys.stop, sizes.key_length))

    def small_blocks(self) -> Iterator[Block]:
        """Those whose scores fit into a cache."""
        strategy = self.plan.strategy
        return self.blocks(strategy.heads, strategy.rows, range(self.plan.sizes.batch))

    def parts_of(self, sequence: int, rows: int) -> Iterator[tuple[slice, slice]]:
        """The queries of a sequence, some at a time, and the keys that they see."""
        window, sizes, keys = self.plan.window, self.plan.sizes, self.range_of(sequence)
        if window is None:
            yield from ((queries, keys) for queries in slices(sizes.query_length, rows))
        elif self.mask.ranges[sequence] is not None:
            for queries in query_parts(window, sizes.query_length, rows, keys.start, keys.stop):
                yield queries, keys_near(window, queries, keys.start, keys.stop)
        else:
            for queries in slices(sizes.query_length, rows):
                yield queries, self.mask.keys_seen(sequence, queries)

    def range_of(self, sequence: int) -> slice:
        """The keys that a sequence attends to, or all where these are no range."""
        return slice(*(self.mask.ranges[sequence] or (0, self.plan.sizes.key_length)))

    def keys_of(self, sequence: int) -> slice:
        """All that a sequence attends to, and the rest of a line."""
        keys = self.range_of(sequence)
        return whole_lines(keys.start, keys.stop, self.plan.sizes.key_length)

    def weights(self, block: Block, clipped: Sequence[ClippedKeys] = ()) -> torch.Tensor:
        """Attention weights of a block, (heads, queries, keys). If there are clipped keys, theirs follow, and the rest
        of a line."""
        heads, rows, columns = block.shape
        every = self._scores.of_shape(heads, rows, aligned(columns) + LINE if clipped else columns)
        scores = every
        if clipped:
            scores, others = every.tensor_split([columns], -1)
            others.fill_(-math.inf)
            for index, keys in enumerate(clipped):
                others[..., index] = keys.score
        self.scores.put(block, scores)
        self.mask.apply(scores, block)
        weights = torch.softmax(every, dim=-1, out=every)
        if self._has_steep_bias:
            # A steep bias (ALiBi's) leaves weights so small that their products with gradients are below what processors
            # compute in hardware, and take many times as long. All such weights of a query together are far below what
            # rounding does to its sum of weights, which is 1.
            nn.functional.threshold_(weights, torch.finfo(weights.dtype).eps ** 2, 0.0)
        return weights

    def _kept_of(self, block: Block) -> torch.Tensor:
        return self.kept[block.query_place][..., block.keys]

    @functools.cached_property
    def _has_steep_bias(self) -> bool:
        """Whether it alone can bring a weight near the smallest numbers."""
        return any(term.value_range() > STEEP for term in self.terms)

    def dropout_mask(self, block: Block) -> torch.Tensor:
        """1.0 where a weight of a block is kept, 0.0 where it is dropped."""
        return self.plan.dropout.mask(block, self._dropout)


class ForwardPass(Pass):
    """From inputs to the output."""

    def run(self, output: torch.Tensor) -> None:
        """Write the output, (batch, heads, query, head_dim)."""
        match self.plan.strategy.kernel:
            case Kernel.BIAS_BY_DISTANCE:
                self._run_kernel_with_bias_by_distance(output)
            case Kernel.BIAS:
                self._run_kernel_with_bias(output)
            case Kernel.BLOCKS:
                self._run_blocks(output)

    def _run_blocks(self, output: torch.Tensor) -> None:
        dropout = self.plan.dropout
        for block, clipped in self._blocks_and_clipped_keys():
            weights, others = self.weights(block, clipped), None
            if self.kept is not None:
                self._kept_of(block).copy_(weights)
            if clipped:
                weights, others = weights.tensor_split([block.shape[-1]], -1)
            if dropout:
                weights.mul_(self.dropout_mask(block))
            part = self.values.output(block, weights)
            for index, keys in enumerate(clipped):
                part.addcmul_(others[..., index, None], keys.value)
            if dropout:
                part.div_(dropout.keep_probability)
            output[block.query_place] = part

    def _blocks_and_clipped_keys(self) -> Iterator[tuple[Block, Sequence[ClippedKeys]]]:
        """All small blocks, and what is known of keys that are not in them."""
        strategy, sizes = self.plan.strategy, self.plan.sizes
        if not strategy.clipped_keys_by_kernel:
            yield from ((block, ()) for block in self.small_blocks())
            return
        for wide in self.blocks(sizes.heads, strategy.kernel_rows, range(sizes.batch)):
            wide = wide.with_keys(self.range_of(wide.sequence))
            near, far = self.distances.split(wide)
            clipped = [self._attend_to_clipped_keys(block, distance) for block, distance in far]
            keys = wide.keys if near is None else near.keys
            for rows in slices(wide.shape[1], strategy.rows):
                queries = slice(wide.queries.start + rows.start, wide.queries.start + rows.stop)
                yield Block(wide.sequence, wide.heads, queries, keys), [of_all.of(rows) for of_all in clipped]

    def _attend_to_clipped_keys(self, block: Block, distance: int) -> ClippedKeys:
        """What all keys of a block are as one, whose distances are clipped to one."""
        query, added = self.scores.clipped_query(block, distance)
        key, value = self.inputs.key[block.key_place], self.inputs.value[block.key_place]
        # The kernel under scaled_dot_product_attention, which returns the logarithm of the sum too.
        mean, score = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], key[None], value[None], scale=1.0
        )
        score, mean = score[0], mean[0]
        if added is not None:
            score = score + added[..., 0]
        vector = self.values.at(block, distance)
        return ClippedKeys(score, mean if vector is None else mean + vector)

    def _run_kernel_with_bias(self, output: torch.Tensor) -> None:
        """Lay out what is added to the content score, once for all sequences if it is the same, for PyTorch's kernel."""
        strategy, sizes = self.plan.strategy, self.plan.sizes
        for heads in slices(sizes.heads, strategy.kernel_heads):
            for queries in slices(sizes.query_length, strategy.kernel_rows):
                shared = None
                if self._terms_are_shared:
                    shared = self.scores.added(Block(0, heads, queries, slice(0, sizes.key_length)))
                for sequences in self._like_sequences():
                    keys = self.keys_of(sequences.start) if shared is None else slice(0, sizes.key_length)
                    block = Block(sequences.start, heads, queries, keys)
                    added = self.scores.added(block) if shared is None else shared
                    if self.mask.ranges[block.sequence] is None:
                        added = added if shared is None else shared.clone()
                        self.mask.apply(added, block)
                    attended = self.range_of(block.sequence)
                    self._call_kernel(output, sequences, block, attended, added[..., block.columns(attended)])

    def _run_kernel_with_bias_by_distance(self, output: torch.Tensor) -> None:
        """PyTorch's kernel where a bias per distance is all there is: it reads the bias in place, the last query first."""
        sizes, window = self.plan.sizes, self.plan.window
        every = near = self._bias_by_distance()
        if window is not None:
            near = every.masked_fill(self._is_far(every.shape[-1]), torch.finfo(every.dtype).min)
        for sequences in self._like_sequences():
            attended = self.range_of(sequences.start)
            for queries, keys in self.parts_of(sequences.start, self.plan.strategy.kernel_rows):
                is_local = window is not None and window.sees_some(queries.start, attended.start, attended.stop)
                block = Block(sequences.start, slice(0, sizes.heads), queries, keys)
                added = bias_as_matrix(near if is_local else every, block, sizes.query_length)
                self._call_kernel(output, sequences, block, keys, added, is_reversed=True)

    def _bias_by_distance(self) -> torch.Tensor:
        """What the terms add to the content scores, (batch or 1, heads, distances): 0 where there is none."""
        if self.scores.bias is not None:
            return self.scores.bias.bias
        return self.inputs.key.new_zeros(1, 1, self.plan.sizes.distances).expand(-1, self.plan.sizes.heads, -1)

    def _is_far(self, distances: int) -> torch.Tensor:
        """Which distances the window leaves out, (distances,)."""
        return ~self.plan.window.rule(None, None, self.plan.sizes.query_length - 1, torch.arange(distances))

    def _call_kernel(
        self, output: torch.Tensor, sequences: slice, block: Block, keys: slice, added: torch.Tensor, is_reversed=False
    ) -> None:
        """Write the output of a block's heads and queries in some sequences, given what is added to content scores."""
        content_query = self.inputs.content_query[sequences, block.heads, block.queries]
        result = nn.functional.scaled_dot_product_attention(
            content_query.flip(2) if is_reversed else content_query,
            self.inputs.key[sequences, block.heads, keys],
            self.inputs.value[sequences, block.heads, keys],
            attn_mask=added.expand(sequences.stop - sequences.start, -1, -1, -1),
            scale=self.plan.scaling,
        )
        output[sequences, block.heads, block.queries] = result.flip(2) if is_reversed else result

    def _like_sequences(self) -> list[slice]:
        """All sequences in one if they have the same terms and the same range of keys, else each by itself."""
        ranges = self.mask.ranges
        if self._terms_are_shared and len({*ranges}) == 1 and ranges[0] is not None:
            return [slice(0, self.plan.sizes.batch)]
        return list(slices(self.plan.sizes.batch, 1))

    @property
    def _terms_are_shared(self) -> bool:
        return all(term.is_shared(part.tensors) for term in self.terms for part in term.parts)


class BackwardPass(Pass):
    """From the gradient of the output to those of everything; weights that were not kept are computed again.

    Attributes:
        gradients: of the inputs, once [`run`] has been called.
    """

    def __init__(
        self, plan: Plan, mask: torch.Tensor | None, inputs: Inputs, parts: list[Part], kept: torch.Tensor | None
    ):
        self.gradients = inputs.zeros()
        super().__init__(plan, mask, inputs, parts, kept, self.gradients)

    def run(self, output_gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """Add to the gradients of the inputs.

        Args:
            output_gradient: (batch, heads, query, head_dim).

        Returns:
            The gradients of the parts' tensors, in the order of `terms` and their parts.
        """
        for block in self.small_blocks():
            gradient = output_gradient[block.query_place]
            if self.plan.dropout:
                gradient = gradient / self.plan.dropout.keep_probability
            self.scores.accumulate_gradient(block, self._score_gradient(block, gradient))
        return [gradient for term in self.terms for gradient in term.gradients()]

    def _score_gradient(self, block: Block, output_gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of a block's scores, (heads, queries, keys); those of the values are added to on the way."""
        weights = self.weights(block) if self.kept is None else self._kept_of(block)
        dropout_mask = self.dropout_mask(block) if self.plan.dropout else None
        used = weights if dropout_mask is None else weights * dropout_mask
        gradient = self.values.accumulate_gradient(block, used, output_gradient)
        if dropout_mask is not None:
            gradient.mul_(dropout_mask)
        gradient = torch._softmax_backward_data(gradient, weights, -1, weights.dtype)
        forbidden = self.mask.forbidden(block)
        if forbidden is not None:
            # Where every key is masked, weights are not zero, and yet nothing depends on the scores.
            gradient.masked_fill_(forbidden, 0.0)
        return gradient
