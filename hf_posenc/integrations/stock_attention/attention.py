"""The attention that all these models share: projected queries, keys and values, position terms, and a mask."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...modeling.attention.backends import Attention, attend, takes_all
from ...modeling.kernels.fast import is_compiled
from ...modeling.masks import Mask, as_pairs
from ...modeling.schemes.sinusoidal import precise_dtype
from ...modeling.schemes.terms import Term
from ...modeling.torch_state import is_exporting, is_traced
from ..unpadding import current_packing


if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Backends that are computed here; "eager" is Transformers' own.
IMPLEMENTATIONS = ("sdpa", "flex_attention")


def computes(implementation: str) -> bool:
    """Whether a backend, by its name in the config, is computed here; "eager" is transformers' own."""
    return implementation in IMPLEMENTATIONS or takes_all(implementation)


def mask_of_tokens(mask: torch.Tensor) -> Mask:
    """DeBERTa's mask, in which a pair is attended to if neither is padding, without a matrix of pairs.

    A query that is padding attends to nothing then, so softmax gives every key of its sequence the same weight.

    Args:
        mask: (batch, length) as the model was given it.
    """
    words: torch.Tensor | None = mask.bool()
    # Looking at values costs next to nothing on CPUs, waits for the device elsewhere, and is impossible when traced.
    if mask.device.type == "cpu" and not is_traced() and bool(words.all()):
        words = None
    (batch, length), given = mask.shape, None if words is None else words[:, None, None, :]
    return Mask(given, batch, length, length, mask.device, attending=words)


def self_attend(
    implementation: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: list[Term],
    mask: Any,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """softmax(scaling · query · key + terms) · value of a self-attention, or of packed states where the model leaves padding out.

    Args:
        implementation: a backend that [`computes`].
        module: the self-attention.
        query, key, value: (batch, heads, length, head_dim), or packed (1, heads, tokens, head_dim).
        terms: blockwise, unless all that they add is laid out for every pair already.
        mask: None, [`mask_of_tokens`], a boolean or additive mask (batch or 1, heads or 1, length or 1, length), or FlexAttention's BlockMask.
        dropout: probability with which a weight is dropped.

    Returns:
        (batch, length, heads · head_dim).

    Raises:
        ValueError: the mask does not fit the sequences, or FlexAttention would need dropout.
    """
    packing = current_packing()
    mask = _prepared(Mask.of(mask if packing is None else None, query, key, packing=packing), implementation)
    if mask.tensor is not None:
        check_mask(mask.given, query)
    in_blocks = not all(term.is_laid_out for term in terms)
    output, _ = attend(
        Attention(module, implementation, query, query, key, value, terms, mask, scaling, dropout, in_blocks)
    )
    if mask.attending is not None:
        output = torch.where(mask.attending[..., None, None], output, _of_padding(value, mask.attending, dropout))
    return output.flatten(2)


def _prepared(mask: Mask, implementation: str) -> Mask:
    """A mask as the backend is to have it; `attending` tells which queries attend to nothing."""
    if mask.is_of_blocks:
        return replace(mask, attending=_attends(mask.given))
    if mask.attending is not None and implementation == "sdpa" and is_compiled():
        # As a mask of pairs, as transformers has it, so that padding needs no second matrix of weights.
        return replace(mask, given=as_pairs(mask), attending=None)
    return mask


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
        # float64: what a sum in float32 rounds differs from processor to processor. What is exported runs on one that is not known.
        dtype = value.dtype if is_exporting() else precise_dtype(value.device)
        return value.mean(2, keepdim=True, dtype=dtype).to(value.dtype).transpose(1, 2)
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
