"""Local attention: layers in which a query sees only the keys near it, between layers in which it sees all."""

from dataclasses import dataclass

import torch

from ..schemes.flags import GLOBAL_EVERY, WINDOW, WINDOW_FLAGS
from ..schemes.positions import allowed


# Attention implementations that carry a window.
BACKENDS = ("sdpa", "flex_attention", "eager")


def window_settings(config) -> dict[str, int]:
    """The two flags of a config, with their defaults: what two models must have alike to compute the same."""
    return {
        flag.name: flag.default if (value := getattr(config, flag.name, None)) is None else value
        for flag in WINDOW_FLAGS
    }


def check_window(config) -> None:
    """Raise ValueError where the flags of a config do not fit each other."""
    if getattr(config, GLOBAL_EVERY.name, None) is not None and getattr(config, WINDOW.name, None) is None:
        raise ValueError(
            f"{GLOBAL_EVERY.name}={getattr(config, GLOBAL_EVERY.name)} has no use without {WINDOW.name}: no layer is local"
        )


def reach_of(config, layer: int) -> int | None:
    """How many places away a layer's queries see keys, `position_window // 2`; None for a global layer.

    Layers 0, n, 2n, ... are global, n being `position_global_every`.
    """
    settings = window_settings(config)
    width, every = settings[WINDOW.name], settings[GLOBAL_EVERY.name]
    if not width or (every and layer % every == 0):
        return None
    return width // 2


@dataclass(frozen=True)
class Window:
    """What the queries of a local layer see: of what the mask lets them see, the keys at most `reach` places away.

    Places are those of tokens in their row, padding and the tokens of a cache counted, whatever `position_ids` say: in packed
    documents and beside padding they are as far apart as positions. A query that would see nothing, which is padding far from any
    token, sees what the mask alone lets it see.

    Source: Beltagy et al. 2020 (https://arxiv.org/abs/2004.05150); width and global layers as in ModernBERT (Warner et al. 2024,
    https://arxiv.org/abs/2412.13663), checked against the masks of transformers' `ModernBertModel`.

    Attributes:
        reach: in places.
        offset: number of tokens in the cache: query i is at the place i + offset, key j at the place j.
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


def windowed(
    mask: torch.Tensor | None, window: Window, query_length: int, key_length: int, device: torch.device
) -> torch.Tensor:
    """A mask with a window, of the kind that it was.

    Args:
        mask: bool or additive, (batch or 1, heads or 1, query or 1, key), or None.
    """
    near = window.pairs(query_length, key_length, device)
    if mask is None:
        return near[None, None]
    attended = allowed(mask)
    seen = attended & near
    # Padding far from any token sees what it would see without a window. (ONNX Runtime has `where` for numbers alone.)
    seen = seen | (attended & ~seen.any(-1, keepdim=True))
    return seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
