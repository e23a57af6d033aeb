"""Blockwise attention, exact, with position terms: blocks fit into a CPU's cache, forward and backward.

What a term adds to the score of query i and key j depends on j - i. So a block of queries is multiplied with the rows of
a table *per distance*, one product of matrices, and the result is read per pair through a strided view of the same
memory ([`distance_products.RelativeShift`]): nothing has the size (batch, heads, query, key). The backward pass computes each
block again, writes the gradient of its scores through such a view, and reduces it to the tables by products of matrices too.

From here down: [`strategies`] says which kernel and which blocks, [`passes`] goes over them, [`block_sums`] sums what
[`block_terms`] add, and [`blocks`], [`masks`] and [`distance_products`] are what these are made of.
"""

from dataclasses import replace

import torch

from ..masks import Window
from ..schemes.terms import Term
from .block_masks import Dropout, key_ranges
from .block_terms import KINDS, BlockTerm, Inputs, Part
from .blocks import AttentionShape
from .distance_products import clipped_ends
from .passes import BackwardPass, ForwardPass, Plan
from .strategies import Strategy, choose_strategy, may_clip


# What the passes know of parts in addition to their tensors: their class, and their rows.
Kinds = list[tuple[type[BlockTerm], torch.Tensor | None]]


KIND_OF = {kind.__name__: kind for kind in KINDS}


def parts_of(terms: list[Term]) -> list[Part]:
    """What the classes of [`block_terms`] compute of the terms, in the order in which a pass has them."""
    parts = [Part(KIND_OF[kind], tensors, rows) for term in terms for kind, tensors, rows in term.block_parts()]
    return sorted(parts, key=lambda part: KINDS.index(part.kind))


def strategy_of(
    inputs: tuple[torch.Tensor, ...],
    sizes: AttentionShape,
    parts: list[Part],
    has_ranges: bool,
    has_dropout: bool,
    reach: int | None = None,
) -> Strategy:
    """The strategy for an attention, given its tensors; print it to see what is done.

    Args:
        inputs: content query, key and value.
        has_ranges: whether each sequence attends to a range of keys, and the mask says nothing else.
        reach: of a window.
    """
    kinds = frozenset(part.kind for part in parts)
    tensors = (*inputs, *(tensor for part in parts for tensor in part.tensors))
    clipped = (0, 0)
    rows = [part.rows for part in parts if part.rows is not None]
    if rows and reach is None and may_clip(sizes, kinds):
        clipped = tuple(map(min, zip(*map(clipped_ends, rows))))
    return choose_strategy(
        sizes,
        kinds,
        clipped,
        dropout=has_dropout,
        has_ranges=has_ranges,
        is_shared=all(part.kind.is_shared(part.tensors) for part in parts),
        is_dense=all(tensor.stride(-1) == 1 for tensor in inputs),
        has_backward=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        reach=reach,
    )


class BlockwiseAttention(torch.autograd.Function):
    """Attention with terms, block by block; its inputs are kept for the backward pass, and the weights of short sequences."""

    @staticmethod
    def forward(ctx, plan: Plan, kinds: Kinds, mask, content_query, query, key, value, *tensors):
        """`query` is None where it is the content query. `tensors` are those of the parts, one part after the other.

        Returns (batch, heads, query, head_dim).
        """
        output, weights = _like_heads(content_query), None
        with torch.autocast(output.device.type, enabled=False):
            inputs, parts = _widened(kinds, content_query, query, key, value, tensors)
            wide = output if output.dtype == inputs.key.dtype else _like_heads(inputs.content_query)
            if plan.strategy.keeps_weights:
                weights = inputs.key.new_empty(*content_query.shape[:3], key.shape[2])
            ForwardPass(plan, mask, inputs, parts, weights).run(wide)
        if wide is not output:
            output.copy_(wide)
        # Saved as a tensor, the mask is missed if somebody overwrites it before the backward pass.
        ctx.plan, ctx.kinds = plan, kinds
        ctx.save_for_backward(weights, mask, content_query, query, key, value, *tensors)
        return output

    @staticmethod
    def backward(ctx, output_gradient):
        if torch.is_grad_enabled():
            # Under create_graph. `once_differentiable` would let it pass where only the inputs are followed further.
            raise RuntimeError("blockwise attention has no second derivative: use attn_implementation='eager' for it")
        weights, mask, content_query, query, key, value, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[7:]
        with torch.autocast(key.device.type, enabled=False):
            inputs, parts = _widened(ctx.kinds, content_query, query, key, value, tensors, needed)
            backward = BackwardPass(ctx.plan, mask, inputs, parts, weights)
            found = backward.run(output_gradient.to(inputs.key.dtype))
        own = backward.gradients
        gradients = [own.content_query, None if query is None else own.query, own.key, own.value, *found]
        given = (content_query, query, key, value, *tensors)
        returned = [
            gradient.to(tensor.dtype) if is_needed and gradient is not None else None
            for gradient, tensor, is_needed in zip(gradients, given, ctx.needs_input_grad[3:])
        ]
        return None, None, None, *returned


def _like_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of shape (batch, heads, length, head_dim), with the heads of a token side by side."""
    batch, heads, length, head_dim = tensor.shape
    return tensor.new_empty(batch, length, heads, head_dim).transpose(1, 2)


def _widened(kinds: Kinds, content_query, query, key, value, tensors, needed=()) -> tuple[Inputs, list[Part]]:
    """All tensors in float32 at least: sums in half precision would be off by more than the kernels are.

    Args:
        needed: for each of `tensors`, whether it needs a gradient.
    """
    dtype = torch.promote_types(content_query.dtype, torch.float32)
    content_query, key, value = (tensor.to(dtype) for tensor in (content_query, key, value))
    inputs = Inputs(content_query, content_query if query is None else query.to(dtype), key, value)
    parts, stop = [], 0
    for kind, rows in kinds:
        own = slice(stop, stop := stop + kind.tensor_count)
        parts.append(Part(kind, tuple(tensor.to(dtype) for tensor in tensors[own]), rows, needed[own]))
    return inputs, parts


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
    window: Window | None = None,
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
        window: what queries see of what the mask lets them see; None for all of it.

    Returns:
        (batch, query, heads, head_dim).
    """
    with_query_table = [term for term in terms if term.query_table is not None]
    if len(with_query_table) == 1:
        # Added to the queries, their bias costs nothing per pair.
        query = with_query_table[0].biased_query(query)
    else:
        terms = [term.without_query_bias() for term in terms]
    parts = parts_of(terms)
    sizes = AttentionShape(*content_query.shape[:3], key.shape[2])
    ranges = [None] * sizes.batch if is_causal else key_ranges(mask, sizes.batch, sizes.key_length)
    has_ranges = None not in ranges
    if window is not None:
        window = replace(window, offset=int(window.offset))
        if not has_ranges:
            lengths = sizes.query_length, sizes.key_length
            mask = torch.ones(lengths, dtype=torch.bool).tril()[None, None] if is_causal else mask
            mask, is_causal = window.within(mask, *lengths, key.device), False
    reach = None if window is None else window.reach
    strategy = strategy_of((content_query, key, value), sizes, parts, has_ranges, dropout > 0, reach)
    seed = int(torch.randint(1 << 62, ())) if dropout else 0
    plan = Plan(sizes, strategy, ranges, is_causal, Dropout(dropout, seed), scaling, window)
    kinds = [(part.kind, part.rows) for part in parts]
    # No mask where ranges say all, no other query where there is one.
    given = None if has_ranges else mask, content_query, None if query is content_query else query, key, value
    tensors = (tensor for part in parts for tensor in part.tensors)
    return BlockwiseAttention.apply(plan, kinds, *given, *tensors).transpose(1, 2)
