"""Transformer-XL's attention: sinusoids of the distance, projected, and two learned biases instead of the query's position."""

import torch
from torch import nn

from ..extras import EXTRAS
from .base import AttentionContext, AttentionScheme
from .flags import base, init
from .parameters import Normal, PositionLinear, PositionParameter, zeros
from .positions import Positions
from .sinusoidal import inverse_frequencies, sines_and_cosines
from .terms import RelativeTerm


class TransformerXL(AttentionScheme):
    """score(i, j) = [(q_i + u)·k_j + (q_i + v)·(W_R f(i - j))]/√d, in both directions.

    f(r) are the sines, then the cosines of r·base^(-2k/hidden_size). In each `encoder.layer.N.attention.self`:
    W_R is `linear_pos.weight` (hidden_size, hidden_size), u and v are `pos_bias_u.weight`, `pos_bias_v.weight` (heads,
    head_dim).

    Source: Dai et al. 2019 (https://arxiv.org/abs/1901.02860); checked against `XLNetRelativeAttention` of
    transformers.
    """

    name = "transformer_xl"
    flags = (init(), base())
    formula = "[(q_i + u)·k_j + (q_i + v)·(W_R f(i−j))]/√d, f(r) = [sin, cos](r/base^(2k/E))"
    paper = "Dai et al. 2019, arXiv:1901.02860"
    extrapolates = "yes: any length"
    # Of the options.
    base: float
    init: str

    def check(self, config) -> None:
        if config.sizes.hidden_size % 2:
            raise ValueError(
                f"position_scheme='transformer_xl' needs an even hidden_size, got {config.sizes.hidden_size}"
            )
        if self.base <= 1:
            raise ValueError(f"position_base must be greater than 1 for transformer_xl, got {self.base}")

    def read(self, config) -> None:
        self.width = config.sizes.hidden_size

    def add_layer_parameters(self, attention: nn.Module, config) -> None:
        initial = zeros if self.init == "silent" else Normal(config.sizes.initializer_range)
        attention.linear_pos = PositionLinear(self.width, self.width, initial, bias=False)
        shape = (attention.num_heads, attention.head_dim)
        attention.pos_bias_u = PositionParameter(shape, initial)
        attention.pos_bias_v = PositionParameter(shape, initial)

    def prepare(self, positions: Positions, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
        distances, rows = positions.by_row()
        distances = -distances  # the formula counts query - key
        # Where projections are kept, they are all that is needed.
        return rows, distances, None if EXTRAS.caches_on(distances.device) else self._sinusoids(distances, dtype)

    def _sinusoids(self, distances: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(distances, hidden_size)."""
        frequencies = inverse_frequencies(self.width, self.base, distances.device)
        return torch.cat(sines_and_cosines(distances, frequencies, dtype), dim=-1)

    def content_query(self, attention: nn.Module, query: torch.Tensor) -> torch.Tensor:
        return query + attention.pos_bias_u()[:, None, :]

    def terms(self, context: AttentionContext) -> list[RelativeTerm]:
        attention, (rows, distances, sinusoids) = context.attention, context.prepared
        linear, query_bias = attention.linear_pos, attention.pos_bias_v()

        def project() -> torch.Tensor:
            if sinusoids is None:  # made for this projection alone, so that they can be scaled in place
                projected = linear(self._sinusoids(distances, query_bias.dtype).mul_(attention.scaling))
            else:
                projected = linear(sinusoids) * attention.scaling
            # (rows, hidden_size) -> (heads, rows, head_dim)
            return projected.view(-1, *query_bias.shape).transpose(0, 1)

        table = EXTRAS.cached(attention, (linear,), (distances,), (attention.scaling, self.base), project)
        return [RelativeTerm(rows=rows, query_table=table, query_bias=query_bias)]
