"""The attention that all these models share: projected queries, keys and values, position terms, and a mask."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ...modeling.attention.backends import carrying_tangents, score_bias, whole_position_attention
from ...modeling.kernels.blockwise import blockwise_attention
from ...modeling.kernels.fast import is_compiled, suits_blocks
from ...modeling.kernels.flex import flex_position_attention
from ...modeling.schemes.terms import PairTerm, Term
from ...modeling.torch_state import is_traced
from ..unpadding import packing_of_states


if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Backends that are computed here; "eager" is stock's own.
IMPLEMENTATIONS = ("sdpa", "flex_attention")


class TokenMask(NamedTuple):
    """A mask of tokens, in place of the mask of pairs that stock makes of it: a pair is attended to if both are words.

    A query that is padding attends to nothing then, so softmax gives every key of its sequence the same weight.

    Attributes:
        given: (batch, length) as the model was given it.
        words: bool (batch, length); None where it is known that nothing is padding.
    """

    given: torch.Tensor
    words: torch.Tensor | None

    @classmethod
    def of(cls, mask: torch.Tensor) -> "TokenMask":
        words = mask.bool()
        # Looking at values costs next to nothing on CPUs, waits for the device elsewhere, and is impossible when traced.
        has_no_padding = words.device.type == "cpu" and not is_traced() and bool(words.all())
        return cls(mask, None if has_no_padding else words)


def self_attend(
    implementation: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: list[Term],
    mask,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """[`attend`] of a self-attention, or of packed states where the model leaves padding out: (batch, length, heads · head_dim)."""
    if (packing := packing_of_states()) is None:
        return attend(implementation, module, query, key, value, terms, mask, scaling, dropout).flatten(2)

    def attend_group(query, key, value, terms, mask):
        return attend(implementation, module, query, key, value, terms, mask, scaling, dropout)

    return packing.attend(attend_group, (query, key, value), terms)


@carrying_tangents
def attend(
    implementation: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: list[Term],
    mask,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """softmax(scaling · query · key + terms) · value.

    Args:
        implementation: "sdpa" or "flex_attention".
        module: the self-attention.
        query, key, value: (batch, heads, length, head_dim).
        terms: in blocks, unless all that they add is laid out for every pair already.
        mask: None, a [`TokenMask`], a boolean mask (batch or 1, heads or 1, length or 1, length), True where a query
            attends, or FlexAttention's BlockMask.
        dropout: probability with which a weight is dropped.

    Returns:
        (batch, length, heads, head_dim).

    Raises:
        ValueError: the mask does not fit the sequences, or FlexAttention is asked for dropout.
    """
    words = None
    if isinstance(mask, TokenMask):
        words = mask.words
        mask = None if words is None else words[:, None, None, :]
        if words is not None and implementation == "sdpa" and is_compiled():
            # As a mask of pairs, as stock has it, so that padding needs no second matrix of weights.
            mask, words = mask & words[:, None, :, None], None
    elif mask is not None and not isinstance(mask, torch.Tensor):
        words = _attends(mask)
    if isinstance(mask, torch.Tensor):
        check_mask(mask, query)
    if implementation == "flex_attention":
        settings = {"term_query": query, "terms": terms}
        output, _ = flex_position_attention(module, query, key, value, mask, scaling, dropout, **settings)
    elif any(not isinstance(term, PairTerm) for term in terms) and suits_blocks(query, key, terms, mask):
        output = blockwise_attention(query, query, key, value, terms, mask, scaling, dropout)
    else:
        output = _attend_whole(query, key, value, terms, mask, scaling, dropout)
    if words is not None:
        output = torch.where(words[..., None, None], output, _of_padding(value, words, dropout))
    return output


def _attend_whole(query, key, value, terms, mask, scaling: float, dropout: float) -> torch.Tensor:
    """By PyTorch's kernel, with whole matrices of what is added to the scores: (batch, length, heads, head_dim)."""
    bias = score_bias(query, key, terms)
    if bias is None and mask is not None:
        bias = query.new_zeros(1, 1, 1, 1)
    if bias is not None:
        return whole_position_attention(query, key, value, bias, mask, scaling, dropout)
    output = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling)
    return output.transpose(1, 2)


def _attends(mask: "BlockMask") -> torch.Tensor:
    """(batch or 1, 1), whether a sequence attends to anything: FlexAttention gives zeros where nothing is attended to."""
    counts = mask.kv_num_blocks if mask.full_kv_num_blocks is None else mask.kv_num_blocks + mask.full_kv_num_blocks
    return (counts > 0).flatten(1).any(1, keepdim=True)


def _of_padding(value: torch.Tensor, words: torch.Tensor, dropout: float) -> torch.Tensor:
    """What queries get that attend to nothing: every weight is 1 / length, some of them dropped.

    Returns:
        (batch, length or 1, heads, head_dim).
    """
    batch, heads, length, _ = value.shape
    if not dropout:
        # float64: what a sum in float32 rounds differs from processor to processor.
        return value.mean(2, keepdim=True, dtype=torch.float64).to(value.dtype).transpose(1, 2)
    numbers = (~words).cumsum(-1)  # of the queries that are padding, from 1
    most = length if is_traced() else int(numbers[:, -1].max())
    weights = nn.functional.dropout(value.new_full((batch, heads, max(most, 1), length), 1 / length), dropout)
    mixed = (weights @ value).transpose(1, 2)
    return mixed[torch.arange(batch, device=value.device)[:, None], (numbers - 1).clamp(min=0)]


def check_mask(mask: torch.Tensor, query: torch.Tensor) -> None:
    """Raise ValueError for a mask that does not fit (batch, heads, length, head_dim)."""
    batch, heads, length, _ = query.shape
    fits = mask.dim() == 4 and all(
        size in (1, whole) for size, whole in zip(mask.shape, (batch, heads, length), strict=False)
    )
    if not fits or mask.shape[-1] != length:
        raise ValueError(
            f"the attention mask has shape {tuple(mask.shape)} for {batch} sequences of {length} tokens: give "
            f"({batch}, {length}), a mask of tokens, or ({batch}, {length}, {length}), a mask of pairs"
        )
