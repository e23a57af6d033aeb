"""TUPE: positions attend to positions by their own projections, and [CLS] is untied from them."""

import math
from typing import Any

import torch
from torch import nn

from ..extras import EXTRAS
from .base import AttentionContext, AttentionScheme
from .flags import form, init
from .parameters import Normal, PositionLayerNorm, PositionLinear, PositionParameter, ones, zeros
from .positions import Positions
from .terms import ProductTerm


class Tupe(AttentionScheme):
    """score(i, j) = q_i·k_j/√d + (U_q LN(p_i))·(U_k LN(p_j))/√d, and [CLS] untied.

    p is the original table of absolute positions, which is added to the token embeddings only with `absolute`. U_q, U_k and LN are
    `encoder.pos_q_linear`, `encoder.pos_k_linear` (hidden_size, table width) with bias, and `encoder.pos_ln`: one for
    the model. [CLS] is the token at the family's first position. In place of the position term its column gets
    `encoder.others_to_cls.weight` and its row `encoder.cls_to_others.weight` (heads,); the row wins where they meet, as
    published. A whole row at one value is nothing to softmax: `cls_to_others` is there for the formula and its
    checkpoints.

    Form `paper`: content and position both over √(2d). With `t5` (TUPE-R) the bias of `t5` is 0 for [CLS].

    Source: Ke et al. 2021 (https://arxiv.org/abs/2006.15595), equations 7 and 8; checked by explicit loops.
    """

    name = "tupe"
    flags = (init(), form("keep the content score of a checkpoint, or divide both scores by √(2d) as published"))
    formula = "q_i·k_j/√d + (U_q LN(p_i))·(U_k LN(p_j))/√d, [CLS] untied"
    paper = "Ke et al. 2021, arXiv:2006.15595"
    extrapolates = "no: the position embedding matrix ends"
    reads_content = False
    ends_with_table = True
    reads_table = True
    unties_cls = True
    pure_relative = False
    distillation_rate = 3e-4  # positions act by projections, which have to move further
    orders_heads = True
    # Of the options.
    form: str
    init: str

    def starts_silent(self) -> bool:
        return super().starts_silent() and self.form != "paper"

    def starts_silent_beside(self, trained: set[str]) -> bool:
        # It takes the bias of t5 away from [CLS], which is nothing only while that is 0.
        return self.starts_silent() and "t5" not in trained

    def scaling(self, scaling: float) -> float:
        return scaling / math.sqrt(2) if self.form == "paper" else scaling

    def add_encoder_parameters(self, encoder: nn.Module, config) -> None:
        normal = Normal(config.sizes.initializer_range)
        zero_or_normal = zeros if self.init == "silent" else normal
        width = config.sizes.table_width
        encoder.pos_ln = PositionLayerNorm(width, config.sizes.layer_norm_eps, ones)
        encoder.pos_q_linear = PositionLinear(width, config.sizes.hidden_size, zero_or_normal)
        encoder.pos_k_linear = PositionLinear(width, config.sizes.hidden_size, normal)
        encoder.cls_to_others = PositionParameter((config.sizes.num_attention_heads,), zero_or_normal)
        encoder.others_to_cls = PositionParameter((config.sizes.num_attention_heads,), zero_or_normal)

    def initialize_from(self, start: Any) -> None:
        if "absolute" not in start.names:
            encoder = start.encoder
            start.standardize_rows()
            start.project_positions(encoder.pos_ln, encoder.pos_q_linear, encoder.pos_k_linear, encoder.others_to_cls)

    def prepare(self, positions: Positions, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        query, key = positions.query, positions.key
        return query, key, query == positions.first, key == positions.first

    def terms(self, context: AttentionContext) -> list[ProductTerm]:
        attention, encoder, table = context.attention, context.encoder, context.embeddings.table  # type: ignore[union-attr]
        projections = encoder.pos_ln, encoder.pos_q_linear, encoder.pos_k_linear
        modules = table, *projections, encoder.cls_to_others, encoder.others_to_cls
        constants = attention.scaling, attention.head_dim
        # Kept with a projection, so that it is done once for all layers.
        query, key = EXTRAS.cached(
            encoder.pos_q_linear,
            modules,
            context.prepared,
            constants,
            lambda: self._vectors(encoder, table, *constants, *context.prepared),
        )
        return [ProductTerm(query, key)]

    def _vectors(
        self,
        encoder: nn.Module,
        table: nn.Module,
        scaling: float,
        head_dim: int,
        query_ids: torch.Tensor,
        key_ids: torch.Tensor,
        query_is_cls: torch.Tensor,
        key_is_cls: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of positions, each (batch or 1, heads, length, head_dim + 2)."""
        row, column = encoder.cls_to_others(), encoder.others_to_cls()
        # A model spread over devices may have its table on one, and the encoder's own parameters on another.
        query_ids, key_ids, query_is_cls, key_is_cls = (
            places.to(row.device) for places in (query_ids, key_ids, query_is_cls, key_is_cls)
        )
        query = self._project(encoder, table, encoder.pos_q_linear, head_dim, query_ids) * scaling
        key = self._project(encoder, table, encoder.pos_k_linear, head_dim, key_ids)
        # [CLS] untied is a product too, with two more features: one for its column, one for its row, which wins.
        query_is_cls, key_is_cls = query_is_cls[:, None, :, None], key_is_cls[:, None, :, None]
        column, row = column[:, None, None], row[:, None, None]
        shape = (-1, query.shape[1], -1, -1)
        query = torch.cat(
            [
                query.masked_fill(query_is_cls, 0.0),
                (~query_is_cls).to(query.dtype).expand(shape),
                (query_is_cls * row).to(query.dtype),
            ],
            dim=-1,
        )
        key = torch.cat(
            [
                key.masked_fill(key_is_cls, 0.0),
                (key_is_cls * column).to(key.dtype),
                torch.ones_like(key[..., :1]),
            ],
            dim=-1,
        )
        return query, key

    def _project(
        self, encoder: nn.Module, table: nn.Module, linear: nn.Module, head_dim: int, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Normalised and projected rows of the table, (batch or 1, heads, length, head_dim)."""
        rows = table(position_ids).to(position_ids.device)
        projected = linear(encoder.pos_ln(rows))
        return projected.view(*projected.shape[:-1], -1, head_dim).transpose(1, 2)
