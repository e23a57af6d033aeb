"""The stock table of learned absolute positions, and its absence."""

import torch
from torch import nn

from .scheme import EmbeddingScheme


class Absolute(EmbeddingScheme):
    """w + p_i, p the stock table `embeddings.position_embeddings.weight` (max_position_embeddings, width).

    The only scheme that cannot read beyond its table.

    Source: Devlin et al. 2019 (https://arxiv.org/abs/1810.04805); it computes what transformers' stock embeddings
    compute.
    """

    name = "absolute"
    formula = "w + p_i, p learned"
    paper = "Devlin et al. 2019, arXiv:1810.04805"
    extrapolates = "no: the table ends"
    ends_with_table = True

    def vectors(self, embeddings: nn.Module, position_ids: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
        if position_ids is None:
            position_ids = slots + embeddings.first_position
        return embeddings.table(position_ids)


class NoPositions(EmbeddingScheme):
    """No positions at all: the model commutes with every permutation of its input."""

    name = "none"
    flags = ()
    formula = "w"
    paper = "–"
    extrapolates = "yes: there is nothing to extrapolate"
    # Nothing is added, so beside another scheme there is nothing to start with either.
    silent = True
