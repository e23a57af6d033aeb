"""Self-attention with score terms by whole matrices: eager, or PyTorch's kernel."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..extras import EXTRAS
from ..schemes.positions import allowed, expand_to_pairs
from ..schemes.terms import PairTerm, ProductTerm, RelativeTerm, SumTerm, Term
from ..torch_state import is_transformed, may_carry_tangents
from .window import Window, windowed


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
    found = EXTRAS.score_parts(query, key, term)
    if found is not None:
        return found
    batch, heads, query_length, key_length = shape
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


def value_side(weights: torch.Tensor, term: RelativeTerm) -> torch.Tensor:
    """Σ_j weights_ij · value_table[rows_ij]: (batch, heads, query, key) -> (batch, heads, query, head_dim)."""
    rows = pair_rows(term, *weights.shape[-2:]).to(weights.device)[:, None].expand(weights.shape)
    table = term.value_table.to(weights.device)
    by_row = weights.new_zeros(*weights.shape[:-1], table.shape[0]).scatter_add(-1, rows, weights)
    return by_row @ table


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
    """Attention by PyTorch's kernel, with whole matrices of what is added to the scores.

    Args:
        query, key, value: (batch, heads, query or key, head_dim).
        bias: (batch or 1, heads or 1, query, key), added to the content score.
        mask: boolean or additive, (batch or 1, heads or 1, query or 1, key), or None.

    Returns:
        (batch, query, heads, head_dim).
    """
    if EXTRAS.whole_attention is not None:
        return EXTRAS.whole_attention(query, key, value, bias, mask, scaling, dropout)
    query, bias = additive_mask(query, bias.to(key.dtype), mask)
    attend = nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask=bias, dropout_p=dropout, scale=scaling).transpose(1, 2).contiguous()


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
