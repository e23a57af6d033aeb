"""Backends of packed states, (1, heads, tokens, head_dim): sequence by sequence in one kernel, or group by group.

PyTorch's `varlen_attn` (FlashAttention for sequences of any lengths, on CUDA) knows neither score terms nor dropout. Where there is one
of these, and on CPUs, sequences of similar length are padded to the longest of them, and go to the backend that computes padded ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import nn

from ..attention.backends import Attention, Output, attend
from ..masks import Mask
from ..torch_state import is_transformed, may_carry_tangents


def in_turn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scaling: float
) -> torch.Tensor:
    """What [`by_kernel`] computes, one sequence after the other: its reference, on any device and in any dtype.

    Args:
        query, key, value: (tokens, heads, head_dim), sequence after sequence.
        starts: int32 (sequences + 1,), the first token of each sequence, and the number of tokens.
        longest: tokens of the longest sequence.

    Returns:
        (tokens, heads, head_dim).
    """
    lengths = starts.diff().tolist()
    parts = [
        nn.functional.scaled_dot_product_attention(*(states.transpose(0, 1)[None] for states in own), scale=scaling)
        for own in zip(*(states.split(lengths) for states in (query, key, value)))
    ]
    return torch.cat([part[0].transpose(0, 1) for part in parts])


def by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scaling: float
) -> torch.Tensor:
    """PyTorch's `varlen_attn`. Arguments and result are those of [`in_turn`]."""
    from torch.nn.attention.varlen import varlen_attn

    # `scale` is younger than the function, whose own is this one.
    own = query.shape[-1] ** -0.5
    query = query if scaling == own else query * (scaling / own)
    return varlen_attn(query, key, value, starts, starts, longest, longest)


# What computes sequences of any lengths on a device. On CPUs the reference is no faster than groups, and only tests choose it.
KERNELS: dict[str, Callable] = {"cuda": by_kernel, "cpu": in_turn}


# Numbers that PyTorch's kernel takes.
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Sizes:
    """What the choice of a backend of packed states depends on.

    Attributes:
        device, dtype: of queries, keys and values; None for a dtype that they do not share.
        head_dim: of all three; None where they differ.
        is_whole: every packed token is attended to by those of its sequence.
        is_plain: softmax(scaling · query · key) · value under "sdpa": neither terms, window, causal mask nor dropout.
    """

    device: torch.device
    dtype: torch.dtype | None
    head_dim: int | None
    is_whole: bool
    is_plain: bool

    @classmethod
    def of(cls, attention: Attention) -> "Sizes":
        states, mask = (attention.content_query, attention.key, attention.value), attention.mask
        is_masked = mask.is_causal or mask.window is not None
        return cls(
            device=attention.key.device,
            dtype=attention.key.dtype if len({one.dtype for one in states}) == 1 else None,
            head_dim=attention.key.shape[-1] if len({one.shape for one in states}) == 1 else None,
            is_whole=mask.packing.lengths is not None,
            is_plain=attention.implementation == "sdpa"
            and not (attention.terms or is_masked or attention.dropout)
            and not (is_transformed() or may_carry_tangents()),
        )


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether PyTorch has the kernel, and the device runs it: Ampere or newer."""
    there = find_spec("torch.nn.attention.varlen") is not None
    return there and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def suits_kernel(sizes: Sizes) -> bool:
    """Whether PyTorch's kernel computes an attention of packed states."""
    takes = sizes.dtype in DTYPES and sizes.head_dim is not None
    takes = takes and sizes.head_dim % 8 == 0 and sizes.head_dim <= 256
    return takes and sizes.is_whole and sizes.is_plain and has_kernel(sizes.device)


def backend_of_packed(attention: Attention) -> str:
    """The name of the backend that computes an attention of packed states."""
    return "varlen" if suits_kernel(Sizes.of(attention)) else "groups"


def varlen(attention: Attention) -> Output:
    """All sequences in one call."""
    packing = attention.mask.packing
    states = attention.content_query, attention.key, attention.value
    query, key, value = (tensor[0].transpose(0, 1) for tensor in states)
    output = KERNELS[query.device.type](query, key, value, packing.starts, max(packing.lengths), attention.scaling)
    return output[None], None


def groups(attention: Attention) -> Output:
    """Group by group of sequences of similar length, each by the backend that computes padded sequences."""
    packing, whole = attention.mask.packing, attention.mask

    def attend_to(content_query, query, key, value, terms, mask) -> torch.Tensor:
        mask = Mask.of(mask, query, key, whole.is_causal, whole.window)
        states = {"content_query": content_query, "query": query, "key": key, "value": value}
        return attend(replace(attention, **states, terms=terms, mask=mask))[0]

    states = attention.content_query, attention.query, attention.key, attention.value
    output = packing.attend(attend_to, states, attention.terms)
    return output.unflatten(-1, (attention.value.shape[1], -1)), None
