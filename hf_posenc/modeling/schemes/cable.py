"""CABLE: a penalty that grows with what the tokens between query and key add up to, as each of them says."""

import torch
from torch import nn

from .base import AttentionContext, AttentionScheme
from .flags import Boolean, Flag, init
from .parameters import Normal, PositionLinear, PositionParameter, ones, zeros
from .positions import Positions
from .terms import SumTerm


class Cable(AttentionScheme):
    """score(i, j) = q_i·k_j/√d - a_h·g_i·|S_i - S_j|, S_i = Σ_{t≤i} c_t, c_t = ReLU(x_t·w_c), g_i = softplus(x_i·w_s).

    x is the layer's input, and w_c, w_s and a are those of a head: in each `encoder.layer.N.attention.self`, `cable_step.weight` and
    `cable_scale.weight` (heads, hidden_size), and `cable_amplitude.weight` (heads,). c is 0 at padding, and where a mask of pairs tells
    documents apart, each has its own sums. S is in float32 at least. A cache keeps c with its keys. Where positions are given, they
    are not read: what stands between two tokens does.

    It is output-preserving with a = 0, which has a gradient there; w_c and w_s are random, since a zero w_c would stay 0 under ReLU.

    |S_i - S_j| hardly tells left from right. With `position_two_sums`, keys on the left have the sums of one w_c, g and a, and keys on the
    right those of another: (2·heads, ...) parameters, the left first.

    This form is the project's own: linear in the sums, with an amplitude. The paper's abstract reports a BERT, for which the authors'
    public code has -g_i·log(|S_i - S_j|² + 1) without a (class `Kernel_CABLE6`; it sums -c, so that distance is a penalty).

    Source: Veisi et al. 2025 (https://arxiv.org/abs/2503.08067). c, S and g are checked against `Kernel_CABLE6` of github.com/axiomlab/Cable,
    and the whole by explicit loops. The first version of that code (src/Cable.py, 2025) has softplus in place of ReLU and no g.
    """

    name = "cable"
    flags = (
        init(),
        Flag("position_two_sums", Boolean(), False, "separate sums for keys before and after the query"),
    )
    formula = "q_i·k_j/√d − a_h·g_i·|S_i−S_j|, S_i = Σ_{t≤i} ReLU(x_t·w_c), g_i = softplus(x_i·w_s)"
    paper = "Veisi et al. 2025, arXiv:2503.08067"
    extrapolates = "yes: any length"
    reads_content = False
    reads_positions = False
    # Of the options.
    init: str
    two_sums: bool

    def read(self, config) -> None:
        self.width, self.std = config.sizes.hidden_size, config.sizes.initializer_range

    def add_layer_parameters(self, attention: nn.Module, config) -> None:
        count = attention.num_heads * (2 if self.two_sums else 1)
        attention.cable_step = PositionLinear(self.width, count, Normal(self.std), bias=False)
        attention.cable_scale = PositionLinear(self.width, count, Normal(self.std), bias=False)
        attention.cable_amplitude = PositionParameter((count,), zeros if self.init == "silent" else ones)

    def prepare(self, positions: Positions, dtype: torch.dtype) -> tuple:
        """Which are tokens, and of which document; and all indices, one document after the other."""
        documents, order = positions.documents, None
        if documents is not None:
            places = torch.arange(documents.shape[1], device=documents.device)
            order = (documents * len(places) + places).argsort(-1)
        return positions.are_tokens, documents, order

    @staticmethod
    def _by_head(context: AttentionContext, states: torch.Tensor) -> torch.Tensor:
        """(batch or 1, tokens, heads) as (batch, heads, query), in float32 at least."""
        precise = torch.promote_types(states.dtype, torch.float32)
        return context.padded(states.to(precise)).transpose(1, 2).contiguous()

    def keep(self, context: AttentionContext) -> torch.Tensor:
        """c, (batch, heads, query)."""
        steps = self._by_head(context, torch.relu(context.attention.cable_step(context.hidden_states)))
        are_tokens, *_ = context.prepared
        return steps if are_tokens is None else steps * are_tokens[:, None].to(steps)

    @staticmethod
    def _sums(steps: torch.Tensor, documents: torch.Tensor | None, order: torch.Tensor | None) -> torch.Tensor:
        """S of c, (batch, heads, key), starting anew with each document."""
        if documents is None or order is None:
            return steps.cumsum(-1)
        documents, order = documents[:, None].to(steps.device), order[:, None].to(steps.device)
        sums = steps.take_along_dim(order, -1).cumsum(-1).take_along_dim(order.argsort(-1), -1)
        # What was there before the document, which is the same for all that is seen: with it, sums would lack digits.
        return sums - (sums - steps).take_along_dim(documents, -1).detach()

    def terms(self, context: AttentionContext) -> list[SumTerm]:
        attention, (_, documents, order) = context.attention, context.prepared
        keys = self._sums(context.kept, documents, order)
        gates = nn.functional.softplus(self._by_head(context, attention.cable_scale(context.hidden_states)))
        scale = attention.cable_amplitude().to(gates)[:, None] * gates
        slots = torch.arange(scale.shape[-1], device=keys.device) + context.positions.offset
        queries = keys.index_select(-1, slots)
        if not self.two_sums:
            return [SumTerm(scale, queries, keys)]
        parts = zip(*(tensor.chunk(2, dim=1) for tensor in (scale, queries, keys)))
        return [SumTerm(scale, query, key, side=side) for (scale, query, key), side in zip(parts, ("left", "right"))]
