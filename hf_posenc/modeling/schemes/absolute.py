"""The original table of learned absolute positions, and its absence."""

from typing import Any

import torch
from torch import nn

from .base import EmbeddingScheme
from .flags import Flag, Integer


class Absolute(EmbeddingScheme):
    """w + p_(s·i), p the original table `embeddings.position_embeddings.weight` (max_position_embeddings, width).

    The only scheme that cannot read beyond its table. The stride s is 1 unless `position_stride` says otherwise, in a table
    that was stretched by so much: for each sequence it is the largest integer up to that with which the table is long
    enough. Short sequences then use the rows that were trained, and long ones those between them too.

    Source: Devlin et al. 2019 (https://arxiv.org/abs/1810.04805); it computes what transformers' original embeddings
    compute. The stride: Zhu et al. 2024 (https://arxiv.org/abs/2404.12096), whose E5-Base-4k has its position ids
    multiplied for inputs that are short enough.
    """

    name = "absolute"
    flags = (
        *EmbeddingScheme.flags,
        Flag(
            "position_stride",
            Integer(1),
            1,
            "step in the position embedding matrix from one position to the next; smaller for a sequence that would not fit",
        ),
    )
    formula = "w + p_i, p learned"
    paper = "Devlin et al. 2019, arXiv:1810.04805"
    extrapolates = "no: the position embedding matrix ends"
    ends_with_table = True
    uses_table = True
    # Of the options.
    stride: int

    def check(self, config) -> None:
        super().check(config)
        if self.stride == 1:
            return
        if config.sizes.is_decoder:
            raise ValueError(
                "position_stride cannot be used in a decoder: how long a text gets is not known while it is read"
            )
        if self.every_layer:
            raise ValueError(
                "position_stride cannot be used with position_every_layer: only the token embeddings get strided positions"
            )
        readers = [name for name, scheme in config.schemes.items() if scheme.reads_table]
        if readers:
            raise ValueError(
                f"position_stride cannot be used with {readers[0]!r}, which reads the position embedding matrix at every position"
            )
        if config.sizes.max_position_embeddings - config.sizes.first_position < self.stride:
            raise ValueError(
                f"position_stride={self.stride} is more than the rows of the position embedding matrix "
                f"({config.sizes.max_position_embeddings})"
            )

    def vectors(self, embeddings: nn.Module, position_ids: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
        if position_ids is None:
            position_ids = slots + embeddings.first_position
        return embeddings.table(position_ids)

    def initialize_from(self, start: Any) -> None:
        start.copy_rows()

    def strided(
        self,
        embeddings: nn.Module,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """The rows of the table, (batch or 1, length), at which the positions of sequences are.

        A sequence ends with its last token that is not padding's. Given positions count up to the greatest of a sequence; packed
        texts have the stride of the longest of them.

        Args:
            input_ids: int64 (batch, length). Without them, `position_ids` do not count padding.
            position_ids, slots: as for [`vectors`].
        """
        first = embeddings.first_position
        places = slots if position_ids is None else position_ids.to(slots.device) - first
        padding = embeddings.padding_token
        counted = places if input_ids is None or padding is None else places.masked_fill(input_ids == padding, 0)
        length = counted.amax(dim=-1, keepdim=True) + 1
        # A tensor over a tensor: exporters to ONNX cannot divide a number by one.
        stride = (torch.full_like(length, embeddings.table_length()) // length).clamp(1, self.stride)
        # Padding stays where it is: its own row may lie before the first position, and its index beyond the sequence's end.
        return torch.where(counted > 0, counted * stride, places) + first


class NoPositions(EmbeddingScheme):
    """No positions at all: the model commutes with every permutation of its input."""

    name = "none"
    flags = ()
    formula = "w"
    paper = "–"
    extrapolates = "yes: there is nothing to extrapolate"
    adds_vectors = False
    reads_positions = False
