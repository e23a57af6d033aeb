"""Longer tables of absolute positions, made of the rows that were trained."""

import copy
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from ..variants import family_of, scheme_of
from .checkpoints import make_student


def _tile(rows: torch.Tensor, length: int) -> torch.Tensor:
    """All rows, then all but the first again and again: the first is [CLS]'s, which a text has once."""
    others = torch.arange(max(length - 1, 0)) % (len(rows) - 1) + 1
    return rows[torch.cat([torch.zeros(1, dtype=torch.long), others])]


def stride_of(length: int, trained_length: int) -> int:
    """By how much a table is stretched so that it has at least `length` rows."""
    return -(-length // trained_length)


def _interpolate(rows: torch.Tensor, length: int) -> torch.Tensor:
    """The rows at a stride, (rows · stride, width): new ones lie on straight lines between two old ones.

    Behind the last one it is repeated: where every stride is as long as the first, there are as many rows as the table needs.
    """
    stride = stride_of(length, len(rows))
    between = torch.arange(stride, device=rows.device, dtype=rows.dtype)[:, None] / stride
    following = torch.cat([rows[1:], rows[-1:]])
    return torch.lerp(rows[:, None], following[:, None], between).flatten(0, 1)


def _mean(rows: torch.Tensor, length: int) -> torch.Tensor:
    """All rows, then their mean."""
    return torch.cat([rows, rows.mean(dim=0).expand(length - len(rows), -1)])


METHODS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "tile": _tile,
    "interpolate": _interpolate,
    "mean": _mean,
}


def lengthen(model: PreTrainedModel, length: int, trained_length: int, method: str = "tile") -> PreTrainedModel:
    """Copy a model, and give the copy a position embedding matrix for `length` tokens, made from the first `trained_length` rows.

    Rows beyond the training length are replaced. Sequences within it keep their outputs.

    With "interpolate", new rows lie between the trained ones, and the copy has the config option `position_stride`, so it is a model with a
    position scheme. Its matrix has the next multiple of `trained_length` rows. If a model has no such matrix, only its
    `max_position_embeddings` changes.

    Args:
        model: Transformers' own or with a position scheme, with or without a task head.
        length: the new number of positions. If it is smaller than the matrix, the matrix becomes shorter.
        trained_length: number of positions that were trained.
        method: "tile" (repeat the trained rows except the first), "interpolate" or "mean" (repeat the mean of the trained rows).

    Returns:
        The copy.

    Raises:
        ValueError: the method is unknown, the lengths do not fit, or the model cannot have a stride.
    """
    if method not in METHODS:
        raise ValueError(f"extend must be one of {', '.join(METHODS)}, got {method!r}")
    model = copy.deepcopy(model)
    family = family_of(model.config)
    first = family.first_position(model.config)
    embeddings = family.embeddings_of(model.base_model)
    table = getattr(embeddings, family.table, None)
    stride = 1
    if table is not None:
        available = len(table.weight) - first
        if not 2 <= trained_length <= available:
            raise ValueError(f"trained_length must be between 2 and {available}, got {trained_length}")
        rows = table.weight.detach()[first : first + trained_length]
        new = rows[:length] if length <= trained_length else METHODS[method](rows, length)
        if method == "interpolate" and length > trained_length:
            stride, length = stride_of(length, trained_length), len(new)
        table.weight = nn.Parameter(torch.cat([table.weight.detach()[:first], new]))
        table.num_embeddings = first + length
    # Original embeddings have these for default inputs.
    for name, buffer in [*embeddings.named_buffers(recurse=False)]:
        if buffer.shape[-1:] == (model.config.max_position_embeddings,):
            values = torch.arange(first + length, dtype=buffer.dtype) if name == "position_ids" else 0
            embeddings.register_buffer(
                name, torch.zeros(1, first + length, dtype=buffer.dtype) + values, persistent=False
            )
    model.config.max_position_embeddings = first + length
    return model if stride == 1 else make_student(model, scheme_of(model.config), {"position_stride": stride})
