"""ALiBi: a penalty that grows with the distance, with another slope in every attention head."""

from typing import Any

import torch

from .base import AttentionContext, AttentionScheme
from .positions import Positions
from .terms import PairTerm, RelativeTerm


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8h/heads) for h = 1 .. heads.

    Where `heads` is no power of two (BLOOM's rule): the slopes of the largest power of two below it, followed by the
    1st, 3rd, 5th, ... slope of twice that power.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return slopes + [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]


class Alibi(AttentionScheme):
    """score(i, j) = q_i·k_j/√d - m_h |i - j|, symmetric as encoders need it; m are [`alibi_slopes`], no parameters.

    Source: Press et al. 2022 (https://arxiv.org/abs/2108.12409); slopes checked against `build_alibi_tensor` of
    transformers' BLOOM and `build_mpt_alibi_tensor` of its MPT.
    """

    name = "alibi"
    formula = "q_i·k_j/√d − m_h·|i−j|"
    paper = "Press et al. 2022, arXiv:2108.12409"
    extrapolates = "yes: any length"
    reads_content = False
    silent = False
    orders_heads = True

    def read(self, config) -> None:
        self.slopes = alibi_slopes(config.sizes.num_attention_heads)

    def initialize_from(self, start: Any) -> None:
        if start.heads_are_free:
            start.order_heads(self.slopes)

    def prepare(self, positions: Positions, dtype: torch.dtype) -> RelativeTerm | PairTerm:
        # A product in half precision would be off by more than one near the far end.
        precise = torch.promote_types(dtype, torch.float32)
        slopes = torch.tensor(self.slopes, dtype=precise, device=positions.query.device)
        return positions.bias(lambda distance: (-slopes[:, None] * distance.abs()[..., None, :]).to(dtype))

    def terms(self, context: AttentionContext) -> list[RelativeTerm | PairTerm]:
        return [context.prepared]
