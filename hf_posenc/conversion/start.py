"""Start: what algebra alone keeps of the positions that a checkpoint was trained with."""

import torch
from torch import nn

from hf_posenc.modeling.family import Family
from hf_posenc.modeling.schemes import scheme_names


def table_rows(model: nn.Module, family: Family, trained_length: int | None = None) -> torch.Tensor:
    """The rows of a model's table of absolute positions that belong to the first positions, (positions, width)."""
    table = getattr(family.embeddings_of(model.base_model), family.table).weight.detach()
    rows = table[family.first_position(model.config) :]
    return rows if trained_length is None else rows[:trained_length]


def fold(student: nn.Module, family: Family, vector: torch.Tensor) -> None:
    """Add a vector (width,) to the embedding of every token: to all token types, or to all words."""
    embeddings = family.embeddings_of(student.base_model)
    table = getattr(embeddings, family.token_types or family.words)
    table.weight += vector.to(table.weight)


@torch.no_grad()
def start(student: nn.Module, teacher: nn.Module, trained_length: int | None = None) -> None:
    family: Family = student.config.family
    names = scheme_names(student.config.position_scheme)
    if "absolute" in names:
        return
    fold(student, family, table_rows(teacher, family, trained_length).mean(0))
