"""The backends that compute a self-attention with score terms."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from ..schemes.positions import allowed
from ..schemes.relative_positions import expand_to_pairs
from ..schemes.terms import PairTerm, ProductTerm, RelativeTerm, SumTerm
from ..torch_state import is_exporting, is_traced, is_transformed, may_carry_tangents
from .blocks import aligned
from .blockwise import Term
from .distance_products import RelativeShift, Table, reversed_rows
from .masks import windowed
from .window import Window


logger = logging.get_logger(__name__)


# Scores of a sequence below which whole matrices are faster than blocks (about 50 tokens and 12 heads), and scores of a batch up
# to which they are where they are read through views (128 tokens and 12 heads).
FEWEST_SCORES, FEWEST_SCORES_WITH_VIEWS = 1 << 15, 3 << 16


def carrying_tangents(attend: Callable) -> Callable:
    """An attention function that forward-mode AD and `torch.func` go through: PyTorch's fused kernels for CPUs and GPUs have no
    forward derivatives, and none of a mask; the one that is written out has."""

    @functools.wraps(attend)
    def attend_with_tangents(*args, **kwargs):
        if not may_carry_tangents() and not is_transformed():
            return attend(*args, **kwargs)
        with sdpa_kernel(SDPBackend.MATH):
            return attend(*args, **kwargs)

    return attend_with_tangents


def pair_rows(term: RelativeTerm, query_length: int, key_length: int) -> torch.Tensor:
    """Rows of the term's tables per pair, (batch or 1, query, key)."""
    if term.rows.dim() == 1:
        return expand_to_pairs(term.rows, query_length, key_length)[None]
    return term.rows


def by_distance(term: Term) -> Term:
    """The term with a row per distance instead of a row per table entry, where there are fewer distances than entries.

    Short sequences reach a small part of a table, and products with the rest are wasted. Left alone under torch.compile
    and export, where lengths are symbols that must not be compared.
    """
    if not isinstance(term, RelativeTerm) or term.rows.dim() != 1 or torch.compiler.is_compiling():
        return term
    tables = {"query_table": -2, "key_table": -2, "bias": -1, "value_table": -2}  # the dimension of their rows
    given = {name: dim for name, dim in tables.items() if getattr(term, name) is not None}
    if any(term.rows.shape[0] >= getattr(term, name).shape[dim] for name, dim in given.items()):
        return term
    reached = {
        name: (table := getattr(term, name)).index_select(dim, term.rows.to(table.device))
        for name, dim in given.items()
    }
    return replace(term, rows=torch.arange(term.rows.shape[0], device=term.rows.device), **reached)


def reads_through_views(query: torch.Tensor) -> bool:
    """Whether products with vectors per distance are read per pair through views, which have no gradient, and not gathered."""
    return query.device.type == "cpu" and not (
        torch.is_grad_enabled() or is_traced() or is_transformed() or may_carry_tangents()
    )


def score_bias(query: torch.Tensor, key: torch.Tensor, terms: list[Term]) -> torch.Tensor | None:
    """What the score terms add to the content score, (batch or 1, heads or 1, query, key), or None.

    Args:
        query: (batch, heads, query, head_dim).
        key: (batch, heads, key, head_dim).
    """
    batch, heads, query_length, _ = query.shape
    key_length = key.shape[2]
    total = None
    for term in terms:
        if isinstance(term, PairTerm):
            parts = [term.bias.to(query.device)]
        elif isinstance(term, ProductTerm):
            parts = [term.query.to(query.device) @ term.key.to(query.device).transpose(-1, -2)]
        elif isinstance(term, SumTerm):
            most = torch.finfo(query.dtype).max / 2
            parts = [term.pairs().to(query.device).clamp(-most, most).to(query.dtype)]
        else:
            parts = _relative_parts(query, key, term, (batch, heads, query_length, key_length))
        for part in parts:
            total = part if total is None else total + part
    return total


def _relative_parts(
    query: torch.Tensor, key: torch.Tensor, term: RelativeTerm, shape: tuple[int, int, int, int]
) -> list[torch.Tensor]:
    """The parts of a table term, each (batch or 1, heads or 1, query, key)."""
    batch, heads, query_length, key_length = shape
    if term.rows.dim() == 1 and term.bias is None and key_length > 0 and reads_through_views(query):
        return _parts_through_views(query, key, term)
    parts = []
    rows = pair_rows(term, query_length, key_length).to(query.device)
    if term.differs_by_sequence:
        by_row = term.bias.to(query.device).index_select(-1, term.rows.to(query.device))
        parts.append(expand_to_pairs(by_row, query_length, key_length))
    elif term.bias is not None:
        # (heads, rows) looked up with (batch, query, key) -> (heads, batch, query, key)
        parts.append(term.bias.to(query.device)[:, rows].transpose(0, 1))
    if term.query_table is not None:
        # (batch, heads, query, rows)
        by_row = term.biased_query(query) @ term.query_table.to(query.device).transpose(-1, -2)
        parts.append(by_row.gather(-1, rows[:, None].expand(shape)))
    if term.key_table is not None:
        by_row = key @ term.key_table.to(query.device).transpose(-1, -2)  # (batch, heads, key, rows)
        of_key = rows.transpose(1, 2)[:, None].expand(batch, heads, key_length, query_length)
        parts.append(by_row.gather(-1, of_key).transpose(-1, -2))
    return parts


def _parts_through_views(query: torch.Tensor, key: torch.Tensor, term: RelativeTerm) -> list[torch.Tensor]:
    """The parts of a term with vectors per distance, each (batch, heads, query, key), a view."""
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


def value_side(weights: torch.Tensor, term: RelativeTerm) -> torch.Tensor:
    """Σ_j weights_ij · value_table[rows_ij]: (batch, heads, query, key) -> (batch, heads, query, head_dim)."""
    rows = pair_rows(term, *weights.shape[-2:]).to(weights.device)[:, None].expand(weights.shape)
    table = term.value_table.to(weights.device)
    by_row = weights.new_zeros(*weights.shape[:-1], table.shape[0]).scatter_add(-1, rows, weights)
    return by_row @ table


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


def with_window(
    mask: Any, window: Window, implementation: str, module: nn.Module, query: torch.Tensor, key: torch.Tensor
) -> Any:
    """The mask of any backend with a window: flex_attention's in its own form, others as a tensor."""
    lengths = query.shape[2], key.shape[2]
    if implementation == "flex_attention" and not isinstance(mask, torch.Tensor):
        from torch.nn.attention.flex_attention import and_masks, create_block_mask

        # Padding that sees nothing gets zeros, as FlexAttention has it.
        rule = window.rule if mask is None else and_masks(mask.mask_mod, window.rule)
        return create_block_mask(rule, query.shape[0], None, *lengths, device=query.device)
    return windowed(dense_mask(mask, module, query, key), window, *lengths, query.device)


def leaves_causal_mask_to_kernel(mask, module: nn.Module, query: torch.Tensor) -> bool:
    """Whether nothing is given where a causal mask is meant, as to sdpa; a single query may see the whole cache."""
    return mask is None and module.is_causal and query.shape[2] > 1


def dense_mask(mask, module: nn.Module, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The mask of any backend as a boolean or additive tensor (batch or 1, 1, query, key), None where all may attend."""
    query_length, key_length = query.shape[2], key.shape[2]
    if mask is None:
        if not leaves_causal_mask_to_kernel(mask, module, query):
            return None
        return torch.ones(query_length, key_length, dtype=torch.bool, device=query.device).tril()[None, None]
    if not isinstance(mask, torch.Tensor):  # flex_attention's BlockMask
        from torch.nn.attention.flex_attention import create_mask

        return create_mask(mask.mask_mod, query.shape[0], None, query_length, key_length, device=query.device)
    return mask[..., :key_length]


def additive_mask(
    query: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Terms and mask as one additive mask for a kernel, and the query that goes with it.

    Where everything is masked, both are zero: each key gets the same weight and no score a gradient, as in eager. The lowest
    number everywhere would do that forward; but kernels keep the logarithm of a sum of exponentials for their backward
    pass, which that number swallows, and then take each weight for 1.

    Args:
        query: (batch, heads, query, head_dim).
        bias: (batch or 1, heads or 1, query, key).
        mask: boolean or additive, (batch or 1, heads or 1, query or 1, key), or None.
    """
    if mask is None:
        return query, bias
    attended = allowed(mask)
    if mask.dtype != torch.bool:
        bias = bias + mask.to(bias.dtype)
    nowhere = ~attended.any(-1, keepdim=True)
    bias = torch.where(attended, bias, torch.finfo(bias.dtype).min).masked_fill(nowhere, 0.0)
    return query.masked_fill(nowhere, 0.0), bias


def whole_position_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention with whole matrices of what is added to the scores: by PyTorch's kernel, or, where that is faster, written out.

    Args:
        query, key, value: (batch, heads, query or key, head_dim).
        bias: (batch or 1, heads or 1, query, key), added to the content score.
        mask: boolean or additive, (batch or 1, heads or 1, query or 1, key), or None.

    Returns:
        (batch, query, heads, head_dim).
    """
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


def eager_position_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask,
    scaling: float,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    value_terms: tuple[RelativeTerm, ...] = (),
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with score and value-side terms, written out; stock's eager function knows neither.

    Masked scores are overwritten after the terms are added: summed, they overflow in float16.

    Returns:
        output (batch, query, heads, head_dim), weights (batch, heads, query, key).
    """
    scores = query @ key.transpose(2, 3) * scaling
    if position_bias is not None:
        scores = scores + position_bias
    mask = dense_mask(attention_mask, module, query, key)
    if mask is not None:
        if mask.dtype != torch.bool:
            scores = scores + mask.to(scores.dtype)
        scores = scores.masked_fill(~allowed(mask), torch.finfo(scores.dtype).min)
    weights = nn.functional.softmax(scores, dim=-1)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    output = weights @ value
    for term in value_terms:
        output = output + value_side(weights, term)
    return output.transpose(1, 2).contiguous(), weights


@functools.cache
def _compiled_flex_attention(dynamic: bool | None):
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=dynamic)


def score_modification(query: torch.Tensor, key: torch.Tensor, terms: list[Term]) -> Callable:
    """The terms as FlexAttention takes them: a function of a score and its indices, that looks them up.

    It holds products with the rows of a table, (batch, heads, length, rows), and not with those of every pair, except where
    a term is known per pair only.
    """
    query_length = query.shape[2]
    lookups = []
    for term in terms:
        if isinstance(term, RelativeTerm):
            rows = term.rows.to(query.device)
            if term.query_table is not None:
                by_row = term.biased_query(query) @ term.query_table.to(query.device).transpose(-1, -2)
                lookups.append(("query", by_row, rows))
            if term.key_table is not None:
                by_row = key @ term.key_table.to(query.device).transpose(-1, -2)
                lookups.append(("key", by_row, rows))
            if term.bias is not None:
                bias = term.bias.to(query.device)
                # (batch, heads, rows)
                lookups.append(("bias", bias.expand(*query.shape[:2], bias.shape[-1]), rows))
        elif isinstance(term, SumTerm):
            numbers = (part.to(query.device).expand(query.shape[0], -1, -1) for part in (term.scale, *term.of_both))
            lookups.append(("sum" if term.side is None else "one side", tuple(numbers), None))
        else:
            pairs = score_bias(query, key, [term])
            lookups.append(("pair", pairs.expand(*query.shape[:3], key.shape[2]), None))

    def modify(score, batch, head, query_index, key_index):
        for kind, values, rows in lookups:
            if kind == "pair":
                score = score + values[batch, head, query_index, key_index]
                continue
            if kind in ("sum", "one side"):
                scale, queries, keys = values
                difference = queries[batch, head, query_index] - keys[batch, head, key_index]
                length = difference.abs() if kind == "sum" else difference.clamp(min=0)
                score = score - (scale[batch, head, query_index] * length).to(score.dtype)
                continue
            if rows.dim() == 1:
                row = rows[key_index - query_index + (query_length - 1)]
            else:
                row = rows[batch if rows.shape[0] > 1 else 0, query_index, key_index]
            if kind == "query":
                score = score + values[batch, head, query_index, row]
            elif kind == "key":
                score = score + values[batch, head, key_index, row]
            else:
                score = score + values[batch, head, row]
        return score

    return modify


def flex_position_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask,
    scaling: float,
    dropout: float = 0.0,
    *,
    term_query: torch.Tensor,
    terms: list[Term],
    kernel_options: dict | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """FlexAttention with the score terms as its score modification.

    Args:
        query: (batch, heads, query, head_dim), of the content score.
        term_query, terms: what the terms ask with, and the terms.

    Returns:
        output (batch, query, heads, head_dim), None.

    Raises:
        ValueError: attention dropout, which FlexAttention does not have.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if dropout > 0:
        raise ValueError(
            "flex_attention has no dropout: use it in eval mode, or set attention_probs_dropout_prob=0 in the config"
        )
    modify = score_modification(term_query, key, terms)
    block_mask = attention_mask
    if isinstance(attention_mask, torch.Tensor):
        block_mask = None
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        mask = attention_mask[..., : key.shape[2]].expand(shape)
        lowest = torch.finfo(query.dtype).min
        attended = allowed(mask)
        without_mask = modify

        def modify(score, batch, head, query_index, key_index):
            score = without_mask(score, batch, head, query_index, key_index)
            place = batch, head, query_index, key_index
            if mask.dtype != torch.bool:
                score = score + mask[place].to(score.dtype)
            return torch.where(attended[place], score, lowest)

    if torch.compiler.is_compiling():
        attend = flex_attention
    else:
        # With symbolic shapes, the code that inductor writes for CPUs does not always compile (torch 2.13).
        attend = _compiled_flex_attention(False if query.device.type == "cpu" else None)
    output = attend(
        query, key, value, score_mod=modify, block_mask=block_mask, scale=scaling, kernel_options=kernel_options
    )
    return output.transpose(1, 2).contiguous(), None


def is_compiled() -> bool:
    """Whether this is traced for `torch.compile`, and not for an export."""
    return torch.compiler.is_compiling() and not is_exporting()


def split_heads(projected: torch.Tensor, heads: int) -> torch.Tensor:
    """(..., length, heads · head_dim) -> (..., heads, length, head_dim)."""
    # `unflatten` would have TorchScript's exporter to ONNX write the length of its example down for all.
    return projected.view(*projected.shape[:-1], heads, -1).transpose(-2, -3)


def attend_without_terms(
    module: nn.Module,
    implementation: str,
    stock_eager: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function of transformers that a backend's name stands for; a boolean mask goes with each."""
    if implementation == "eager" and isinstance(attention_mask, torch.Tensor) and attention_mask.dtype == torch.bool:
        # Stock's function would add it as numbers.
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, stock_eager)
    return attend(module, query, key, value, attention_mask, **settings)
