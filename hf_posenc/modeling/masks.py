"""What queries may attend to: the masks that models are given and make, and the one object that attention reads them from."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn


# An additive mask hides a key with a number below this: the lowest of its dtype or of a smaller one, -inf, or -10,000 (-9,984 in bfloat16),
# as models did for years. A softmax makes 0 of each.
HIDDEN = -9_000.0


def is_tensor(mask: Any) -> bool:
    """Whether a mask is a tensor, and not None, FlexAttention's BlockMask or a dictionary of masks."""
    return isinstance(mask, torch.Tensor)


def allowed(mask: torch.Tensor) -> torch.Tensor:
    """Where a boolean or additive mask lets a query attend."""
    return mask if mask.dtype == torch.bool else mask > HIDDEN


def check_pairs(mask: torch.Tensor) -> None:
    """Raise TypeError for a mask of pairs in numbers that are neither boolean nor added to scores."""
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise TypeError(f"an attention mask of pairs must be boolean or additive floating point, got {mask.dtype}")


def additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask as numbers that are added to the scores; one that is so already is left as it is."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _of_blocks(mask, batch: int, query_length: int, key_length: int, device: torch.device) -> torch.Tensor:
    """FlexAttention's BlockMask as a boolean mask (batch, heads or 1, query, key)."""
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(mask.mask_mod, batch, mask.shape[1], query_length, key_length, device=device)


def visible(mask: Any, query_length: int, key_length: int, device: torch.device) -> torch.Tensor | None:
    """Where a mask of any kind has something to attend to, bool: (batch, key) by token, (batch or 1, query, key) by pair; None for everywhere."""
    if mask is None:
        return None
    if not is_tensor(mask):
        return _of_blocks(mask, mask.shape[0], query_length, key_length, device).any(1)
    mask = mask.to(device)
    if mask.dim() == 2:
        # Shorter than the keys, it hides the last ones, as in transformers: empty slots of a static cache.
        return nn.functional.pad(mask.bool(), (0, max(key_length - mask.shape[1], 0)))[:, :key_length]
    check_pairs(mask)
    seen = allowed(mask)[..., :key_length]
    return seen if mask.dim() == 3 else seen.any(1)


def as_pairs(mask: Any) -> Any:
    """A [`Mask`] in which some queries attend to nothing as bool (batch, 1, query, key); other masks as they are."""
    if not isinstance(mask, Mask):
        return mask
    attending = mask.attending
    if attending is None:
        return torch.ones(mask.batch, 1, mask.query_length, mask.key_length, dtype=torch.bool, device=mask.device)
    return attending[:, None, None, :] & attending[:, None, :, None]


@dataclass(frozen=True)
class Window:
    """What the queries of a local layer see: of what the mask lets them see, the keys at most `reach` indices away.

    Indices are those of tokens in their row, padding and the tokens of a cache counted, whatever `position_ids` say: in packed
    documents and next to padding they are as far apart as positions. A query that would see nothing, which is padding far from any
    token, sees what the mask alone lets it see.

    Source: Beltagy et al. 2020 (https://arxiv.org/abs/2004.05150); width and global layers as in ModernBERT (Warner et al. 2024,
    https://arxiv.org/abs/2412.13663), checked against the masks of transformers' `ModernBertModel`.

    Attributes:
        reach: in indices.
        offset: number of tokens in the cache: query i has the index i + offset, key j the index j.
    """

    reach: int
    offset: int | torch.Tensor = 0

    def sees_all(self, key_length: int) -> bool:
        """Whether no key can be too far away."""
        return key_length <= self.reach + 1

    def rule(self, batch, head, query, key) -> torch.Tensor:
        """Whether a query sees a key, by their indices, as FlexAttention takes such rules."""
        return (key - query - self.offset).abs() <= self.reach

    def pairs(self, query_length: int, key_length: int, device: torch.device | None = None) -> torch.Tensor:
        """Which keys are near, bool (query, key)."""
        query, key = (torch.arange(length, device=device) for length in (query_length, key_length))
        return self.rule(None, None, query[:, None], key)

    def sees_some(self, query: int, start: int, stop: int) -> bool:
        """Whether a query sees one of the keys from `start` to `stop`."""
        return start - self.reach <= query + self.offset < stop + self.reach

    def within(
        self, mask: torch.Tensor | None, query_length: int, key_length: int, device: torch.device
    ) -> torch.Tensor:
        """A mask with the window, of the dtype that it had.

        Args:
            mask: bool or additive, (batch or 1, heads or 1, query or 1, key), or None.
        """
        near = self.pairs(query_length, key_length, device)
        if mask is None:
            return near[None, None]
        attended = allowed(mask)
        seen = attended & near
        # Padding far from any token sees what it would see without a window. (ONNX Runtime has `where` for numbers alone.)
        seen = seen | (attended & ~seen.any(-1, keepdim=True))
        return seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


@dataclass(frozen=True)
class Mask:
    """What the queries of a self-attention may attend to, in each form that an attention function takes.

    Attributes:
        given: what transformers made for the config's attention function: None for everything, a boolean or additive tensor
            (batch or 1, heads or 1, query or 1, key or more), or FlexAttention's BlockMask.
        batch, query_length, key_length, device: of the queries and keys.
        is_causal: no query attends to a later key; `given` is None then, as sdpa has it.
        window: of the queries; None for all.
        attending: bool (batch, query or 1), the queries that attend to something, where the others are to give every key the same weight;
            None where none is left to itself so.
        packing: a `Packing` of hf_posenc where queries and keys are packed, (1, heads, tokens, head_dim): each attends to its own sequence.
    """

    given: Any
    batch: int
    query_length: int
    key_length: int
    device: torch.device
    is_causal: bool = False
    window: Window | None = None
    attending: torch.Tensor | None = None
    packing: Any = None

    @classmethod
    def of(
        cls,
        given: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        is_causal: bool = False,
        window: Window | None = None,
        packing: Any = None,
    ) -> "Mask":
        """The mask of a self-attention.

        Args:
            given: see above; a [`Mask`] is left as it is.
            query, key: (batch, heads, query or key, head_dim).
            is_causal: of the module: no query attends to a later key where nothing is given. A single query may see the whole cache.
            packing: of packed queries and keys, which knows what was given.
        """
        if isinstance(given, Mask):
            return given
        if packing is not None:
            given = None
        return cls(
            given,
            query.shape[0],
            query.shape[2],
            key.shape[2],
            query.device,
            is_causal and given is None and query.shape[2] > 1,
            window,
            packing=packing,
        )

    @property
    def tensor(self) -> torch.Tensor | None:
        """What was given, if it is a tensor; it has as many keys as there are."""
        return self.given[..., : self.key_length] if is_tensor(self.given) else None

    @property
    def is_of_blocks(self) -> bool:
        """Whether FlexAttention's BlockMask was given."""
        return self.given is not None and not is_tensor(self.given)

    @property
    def is_everything(self) -> bool:
        """Whether each query may attend to each key."""
        return self.given is None and self.window is None and self.packing is None and not self.is_causal

    def check(self) -> None:
        """Raise TypeError for numbers that are neither boolean nor added to scores."""
        if is_tensor(self.given):
            check_pairs(self.given)

    def to(self, device: torch.device | int | str, non_blocking: bool = False) -> "Mask":
        """On another device. Accelerate calls this for layers that are not where the mask was made."""
        moved = {
            name: value.to(device, non_blocking=non_blocking)
            for name in ("given", "attending")
            if is_tensor(value := getattr(self, name))
        }
        return replace(self, device=torch.device(device), **moved)

    def without_window(self) -> "Mask":
        return replace(self, window=None)

    def dense(self) -> torch.Tensor | None:
        """Boolean or additive, (batch or 1, heads or 1, query or 1, key); None for everything."""
        lengths = self.query_length, self.key_length
        if self.given is None:
            pairs = torch.ones(lengths, dtype=torch.bool, device=self.device) if self.is_causal else None
            mask = None if pairs is None else pairs.tril()[None, None]
        elif is_tensor(self.given):
            mask = self.given[..., : self.key_length]
        else:
            mask = _of_blocks(self.given, self.batch, *lengths, self.device)
        return mask if self.window is None else self.window.within(mask, *lengths, self.device)

    def for_flex_attention(self) -> Any:
        """A BlockMask, or a tensor where one was given; None for everything."""
        if self.window is None:
            return self.given
        if is_tensor(self.given):
            return self.dense()
        from torch.nn.attention.flex_attention import and_masks, create_block_mask

        # Padding that sees nothing gets zeros, as FlexAttention has it.
        rule = self.window.rule if self.given is None else and_masks(self.given.mask_mod, self.window.rule)
        heads = 1 if self.given is None else self.given.shape[1]
        return create_block_mask(rule, self.batch, heads, self.query_length, self.key_length, device=self.device)

    def for_transformers(self, implementation: str, dtype: torch.dtype) -> Any:
        """As transformers' attention function of a name takes it; a boolean tensor goes with each."""
        if implementation == "flex_attention":
            return self.for_flex_attention()
        mask = self.given if self.window is None else self.dense()
        # transformers' eager function would add booleans as numbers.
        return additive(mask, dtype) if implementation == "eager" and is_tensor(mask) else mask
