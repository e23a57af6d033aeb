"""The fast paths of a model with positions, and which of them is taken: blocks, views, or whole matrices. See [`Extras`]."""

from typing import Any

import torch
from torch import nn

from ..attention.backends import additive_mask, dense_mask, leaves_causal_mask_to_kernel
from ..attention.window import Window
from ..extras import EXTRAS
from ..schemes.terms import RelativeTerm, Term
from ..torch_state import is_exporting, is_traced, is_transformed, may_carry_tangents
from .blocks import aligned
from .blockwise import blockwise_attention
from .caching import cached, caches_on
from .distance_products import RelativeShift, Table, reversed_rows
from .flex import flex_position_attention
from .packing import computes_padding_that_is_read, packing_of


# Scores of a sequence below which whole matrices are faster than blocks (about 50 tokens and 12 heads), and scores of a batch up
# to which they are where they are read through views (128 tokens and 12 heads).
FEWEST_SCORES, FEWEST_SCORES_WITH_VIEWS = 1 << 15, 3 << 16


def reads_through_views(query: torch.Tensor) -> bool:
    """Whether products with vectors per distance are read per pair through views, which have no gradient, and not gathered."""
    return query.device.type == "cpu" and not (
        torch.is_grad_enabled() or is_traced() or is_transformed() or may_carry_tangents()
    )


def parts_through_views(query: torch.Tensor, key: torch.Tensor, term: RelativeTerm) -> list[torch.Tensor] | None:
    """The parts of a term with vectors per distance, each (batch, heads, query, key), a view; None where there can be no views.

    Args:
        query: (batch, heads, query, head_dim).
        key: (batch, heads, key, head_dim).
    """
    if term.rows.dim() != 1 or term.bias is not None or key.shape[2] == 0 or not reads_through_views(query):
        return None
    parts = []
    if term.query_table is not None:
        vectors = Table([(term.query_table, term.rows)], query.shape[1], 0)
        parts.append(_products_by_pair(term.biased_query(query), vectors, key.shape[2]))
    if term.key_table is not None:
        # The roles are exchanged, and distances counted from the other end.
        vectors = Table([(term.key_table, reversed_rows(term.rows))], query.shape[1], 0)
        parts.append(_products_by_pair(key, vectors, query.shape[2]).mT)
    return parts


def _products_by_pair(states: torch.Tensor, vectors: Table, columns: int) -> torch.Tensor:
    """state_i · vector of the distance j - i: (batch, heads, rows, head_dim) -> (batch, heads, rows, columns), a view."""
    rows = states.shape[2]
    by_distance = states @ vectors.columns(slice(0, states.shape[1]))[..., : aligned(rows + columns - 1)]
    return RelativeShift(by_distance, rows, columns).by_pair


def suits_blocks(query: torch.Tensor, key: torch.Tensor, terms: list[Term], mask: torch.Tensor | None) -> bool:
    """Whether [`blockwise_attention`] can compute this attention, and is the best way to."""
    if query.device.type != "cpu" or is_traced() or may_carry_tangents() or (mask is not None and mask.requires_grad):
        return False
    tables = [term for term in terms if isinstance(term, RelativeTerm)]
    if key.shape[2] == 0 or any(table.rows.dim() != 1 for table in tables):
        return False
    # Whole matrices of weights would have to come from another function.
    if any(table.value_table is not None for table in tables):
        return True
    scores = query.shape[1] * query.shape[2] * key.shape[2]
    if tables and reads_through_views(query) and all(table.bias is None for table in tables):
        return query.shape[0] * scores > FEWEST_SCORES_WITH_VIEWS
    return scores >= FEWEST_SCORES


def attend(
    module: nn.Module,
    content_query: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: list[Term],
    mask: Any,
    window: Window | None,
    scaling: float,
    dropout: float,
) -> torch.Tensor | None:
    """The self-attention of a module in blocks, (batch, query, heads, head_dim); None where another way is better, or this one is none."""
    if not suits_blocks(query, key, terms, mask):
        return None
    is_causal = leaves_causal_mask_to_kernel(mask, module, query)
    mask = None if is_causal else dense_mask(mask, module, query, key)
    return blockwise_attention(content_query, query, key, value, terms, mask, scaling, dropout, is_causal, window)


def whole_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """[`whole_position_attention`]: by PyTorch's kernel, or, where that is faster, written out."""
    shape = query.shape[:2]
    is_whole = bias.shape[:2] == shape and query.dtype == bias.dtype == torch.float32
    if is_whole and mask is None and not dropout and reads_through_views(query):
        query, key, value, bias = (tensor.flatten(0, 1) for tensor in (query, key, value, bias))
        weights = torch.baddbmm(bias, query, key.mT, alpha=scaling).softmax(-1)
        output = torch.bmm(weights, value).unflatten(0, shape)
    else:
        query, bias = additive_mask(query, bias.to(key.dtype), mask)
        # inductor makes one loop of it and of what the bias is gathered from; a kernel would need the whole bias first.
        is_joined = bias.shape[:2] == shape and query.device.type == "cpu" and is_compiled()
        attend = _attention_written_out if is_joined else nn.functional.scaled_dot_product_attention
        output = attend(query, key, value, attn_mask=bias, dropout_p=dropout, scale=scaling)
    return output.transpose(1, 2).contiguous()


def _attention_written_out(query, key, value, attn_mask: torch.Tensor, dropout_p: float, scale: float) -> torch.Tensor:
    """`scaled_dot_product_attention` in single steps."""
    scores = query @ key.transpose(-1, -2) * scale + attn_mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return nn.functional.dropout(weights, dropout_p) @ value


def is_compiled() -> bool:
    """Whether this is traced for `torch.compile`, and not for an export."""
    return torch.compiler.is_compiling() and not is_exporting()


def split_heads(projected: torch.Tensor, heads: int) -> torch.Tensor:
    """(..., length, heads · head_dim) -> (..., heads, length, head_dim)."""
    # `unflatten` would have TorchScript's exporter to ONNX write the length of its example down for all.
    return projected.view(*projected.shape[:-1], heads, -1).transpose(-2, -3)


EXTRAS.cached, EXTRAS.caches_on = cached, caches_on
EXTRAS.reads_through_views, EXTRAS.score_parts = reads_through_views, parts_through_views
EXTRAS.attend, EXTRAS.whole_attention = attend, whole_attention
EXTRAS.flex_attention = flex_position_attention
EXTRAS.packing_of, EXTRAS.computes_padding_that_is_read = packing_of, computes_padding_that_is_read
