"""FlexAttention with score terms."""

import functools
from collections.abc import Callable

import torch
from torch import nn

from ..attention.backends import score_bias
from ..schemes.positions import allowed
from ..schemes.terms import RelativeTerm, SumTerm, Term


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
