"""Learned vectors per clipped distance, shared by the heads: Shaw's, and the two kinds that transformers 4 had."""

import torch
from torch import nn

from .base import AttentionContext, AttentionScheme
from .flags import Boolean, Flag, init, max_distance
from .parameters import Normal, PositionTable, whole_table, xavier, zeros
from .positions import Positions, clip_distance
from .terms import RelativeTerm


class Relative(AttentionScheme):
    """score(i, j) = q_i·(k_j + a^K[c(j - i)])/√d, and the output of token i is Σ_j weight_ij (v_j + a^V[c(j - i)]).

    c(r) = clip(r, -position_max_distance, position_max_distance) + position_max_distance. a^K and a^V are
    `encoder.layer.N.attention.self.relative_key_embeddings.weight` and `relative_value_embeddings.weight`, both
    (2·position_max_distance + 1, head_dim); without `position_on_values` there is no a^V.

    Source: Shaw et al. 2018 (https://arxiv.org/abs/1803.02155), equations 3 to 5.
    """

    name = "relative"
    flags = (
        init(),
        max_distance(64, "largest distance with its own vector; larger distances share it"),
        Flag("position_on_values", Boolean(), True, "also add learned vectors to the values"),
    )
    formula = "q_i·(k_j + a^K[c(j−i)])/√d, output Σ_j α_ij (v_j + a^V[c(j−i)])"
    paper = "Shaw et al. 2018, arXiv:1803.02155"
    extrapolates = "yes: distances beyond position_max_distance share a vector"
    # Of the options.
    init: str
    max_distance: int
    on_values: bool

    def add_layer_parameters(self, attention: nn.Module, config) -> None:
        initial = zeros if self.init == "silent" else xavier
        rows, width = 2 * self.max_distance + 1, attention.head_dim
        attention.relative_key_embeddings = PositionTable(rows, width, initial)
        if self.on_values:
            attention.relative_value_embeddings = PositionTable(rows, width, initial)

    def prepare(self, positions: Positions, dtype: torch.dtype) -> torch.Tensor:
        return clip_distance(positions.relative, self.max_distance)

    def terms(self, context: AttentionContext) -> list[RelativeTerm]:
        attention, rows = context.attention, context.prepared
        # (rows, head_dim) -> (1, rows, head_dim): the heads share it
        size, device = 2 * self.max_distance + 1, rows.device
        query_table = whole_table(attention.relative_key_embeddings, size, device)[None] * attention.scaling
        value_table = whole_table(attention.relative_value_embeddings, size, device) if self.on_values else None
        return [RelativeTerm(rows=rows, query_table=query_table, value_table=value_table)]


class RelativeKey(AttentionScheme):
    """score(i, j) = (q_i·k_j + q_i·a[i - j])/√d.

    a is `encoder.layer.N.attention.self.distance_embedding.weight` (2·max_position_embeddings - 1, head_dim); the
    distance i - j is in row i - j + max_position_embeddings - 1, and distances beyond the table share its ends.

    Source: Huang et al. 2020 (https://arxiv.org/abs/2009.13658) (the key side of Shaw et al. 2018, with a vector for
    every distance); checked against `position_embedding_type` "relative_key" of transformers 4.57 without a cache.
    With one, that gave every query of a prompt the last position.
    """

    name = "relative_key"
    flags = (init(),)
    formula = "(q_i·k_j + q_i·a[i−j])/√d"
    paper = "Huang et al. 2020, arXiv:2009.13658"
    extrapolates = "yes: distances beyond max_position_embeddings share a vector"
    # Of the options.
    init: str

    def read(self, config) -> None:
        self.max_distance = config.sizes.max_position_embeddings - 1

    def add_layer_parameters(self, attention: nn.Module, config) -> None:
        initial = zeros if self.init == "silent" else Normal(config.sizes.initializer_range)
        rows, width = 2 * self.max_distance + 1, attention.head_dim
        attention.distance_embedding = PositionTable(rows, width, initial)

    def prepare(self, positions: Positions, dtype: torch.dtype) -> torch.Tensor:
        # The table counts query - key.
        return clip_distance(-positions.relative, self.max_distance)

    def terms(self, context: AttentionContext) -> list[RelativeTerm]:
        rows = context.prepared
        return [RelativeTerm(rows=rows, query_table=self._table(context.attention, rows.device))]

    def _table(self, attention: nn.Module, device: torch.device) -> torch.Tensor:
        """(1, rows, head_dim), scaled as the content score is; the heads share it."""
        table = whole_table(attention.distance_embedding, 2 * self.max_distance + 1, device)
        return table[None] * attention.scaling


class RelativeKeyQuery(RelativeKey):
    """score(i, j) = (q_i·k_j + q_i·a[i - j] + k_j·a[i - j])/√d, with the table of [`RelativeKey`].

    Source: Huang et al. 2020 (https://arxiv.org/abs/2009.13658), method 4; checked against `position_embedding_type`
    "relative_key_query" of transformers 4.57 without a cache.
    """

    name = "relative_key_query"
    formula = "(q_i·k_j + q_i·a[i−j] + k_j·a[i−j])/√d"

    def terms(self, context: AttentionContext) -> list[RelativeTerm]:
        rows = context.prepared
        table = self._table(context.attention, rows.device)
        return [RelativeTerm(rows=rows, query_table=table, key_table=table)]
