"""Tensors that nobody writes to, with which what is computed of them may be kept."""

import torch
from torch.utils.weak import WeakTensorKeyDictionary


# Tensors that nobody writes to as long as they live; with each what was last made of it, if anything: of a table rows per distance
# and columns, of rows their reverse.
KEPT: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()


def declare_constant(tensor: torch.Tensor) -> None:
    """Say that nobody writes to a tensor as long as it lives: what is computed from it may be kept with it."""
    KEPT[tensor] = None


def is_constant(tensor: torch.Tensor) -> bool:
    """Whether [`declare_constant`] was told so."""
    return tensor in KEPT
