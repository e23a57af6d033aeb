"""FIRE: a bias that a small network computes from the distance, as a share of how much there is to attend to."""

import torch
from torch import nn

from ..torch_state import is_traced
from .base import AttentionContext, AttentionScheme
from .flags import Boolean, Flag, init
from .parameters import Constant, PositionParameter, SmallPositionLinear, Uniform, ones, zeros
from .positions import Positions
from .terms import PairTerm, RelativeTerm


# Width of the network, where c and L start, and what keeps a denominator from 0, as in public code.
WIDTH = 32
INITIAL_C, INITIAL_LENGTH = 0.1, 512.0
SMALLEST = 1e-6


class Fire(AttentionScheme):
    """score(i, j) = q_i·k_j/√d + f_h(±ψ(|i - j|)/ψ(max(L, n_i - 1))), ψ(x) = log(1 + |c|·x).

    n_i is the number of tokens that query i may attend to. In a decoder that is i + 1, and this is the paper's
    f(ψ(i - j)/ψ(max(L, i))). For encoders the paper has no form; this one is the project's own: n_i is the length of the sequence
    without its padding, or of the document where several are packed in a row, and the input is positive for keys on the left of
    the query, as in decoders, and negative for keys on the right. Nothing depends on how far a batch is padded.

    f is a network with one hidden layer of 32 ReLUs, `fire_hidden.weight` (32, 1), `fire_hidden.bias` (32,) and
    `fire_output.weight` (heads, 32); an output bias, which public code has, adds the same to all scores of a query, and softmax
    does not see it. |c| is `fire_c.weight` (1,) and L = 512·|`fire_length.weight`| (1,). All of them are in each
    `encoder.layer.N.attention.self`, or without `position_per_layer` once in the `encoder`. It starts
    output-preserving with the output at 0, which has a gradient there; the others have one after a step.

    Source: Li et al. 2024 (https://arxiv.org/abs/2310.04418); checked by explicit loops, and against the public code of
    mcleish7/arithmetic (class `FIRE`), whose hidden layer, initial c and L, multiplier and 10^-6 these are.
    """

    name = "fire"
    flags = (
        init(),
        Flag("position_per_layer", Boolean(), True, "one network per layer instead of one for all layers"),
    )
    formula = "q_i·k_j/√d + f_h(±ψ(|i−j|)/ψ(max(L, n_i−1)))"
    paper = "Li et al. 2024, arXiv:2310.04418"
    extrapolates = "yes: distances are shares of the length"
    reads_content = False
    # Of the options.
    init: str
    per_layer: bool
    # How `Positions` counts: compared with the config when a model is saved.
    is_causal: bool

    def read(self, config) -> None:
        self.is_causal = config.sizes.is_decoder

    def _add_parameters(self, owner: nn.Module, heads: int) -> None:
        # As PyTorch starts linear layers, which public code leaves as they are.
        of_input, of_hidden = Uniform(-1.0, 1.0), Uniform(-(WIDTH**-0.5), WIDTH**-0.5)
        owner.fire_hidden = SmallPositionLinear(1, WIDTH, of_input, initial_bias=of_input)
        initial = zeros if self.init == "silent" else of_hidden
        owner.fire_output = SmallPositionLinear(WIDTH, heads, initial, bias=False)
        owner.fire_c = PositionParameter((1,), Constant(INITIAL_C))
        owner.fire_length = PositionParameter((1,), ones)

    def add_encoder_parameters(self, encoder: nn.Module, config) -> None:
        if not self.per_layer:
            self._add_parameters(encoder, config.sizes.num_attention_heads)

    def add_layer_parameters(self, attention: nn.Module, config) -> None:
        if self.per_layer:
            self._add_parameters(attention, attention.num_heads)

    def prepare(self, positions: Positions, dtype: torch.dtype) -> tuple:
        """Distances, which of them each row or pair has, and lengths; the greatest length, where it is looked at."""
        lengths = positions.context_lengths
        if is_traced() or lengths.is_meta:
            return positions.relative, None, lengths, None
        distances, index = positions.by_row()
        # A GPU would wait for the value, and a row of biases for each sequence costs it little.
        is_by_sequence = positions.contiguous and lengths.shape[1] == 1
        longest = None if is_by_sequence and lengths.device.type != "cpu" else int(lengths.max())
        return distances, index, lengths, longest

    def terms(self, context: AttentionContext) -> list[RelativeTerm | PairTerm]:
        owner = context.attention if self.per_layer else context.encoder
        distances, index, lengths, longest = context.prepared
        dtype, device = context.query.dtype, context.query.device
        precise = torch.promote_types(dtype, torch.float32)
        c, limit = (
            owner.fire_c().to(device, precise).abs(),
            INITIAL_LENGTH * owner.fire_length().to(device, precise).abs(),
        )
        if longest is not None and longest - 1 < limit.item():
            lengths = lengths.new_ones(1, 1)  # which is the same for them all

        def biases(distances: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            """(..., heads), given distances and lengths that broadcast to (...)."""
            distances = distances.to(device)
            grown = torch.log1p(c * distances.abs().to(precise)) * -distances.sign().to(precise)
            whole = torch.log1p(c * torch.maximum(limit, lengths.to(device, precise) - 1))
            # Rounded to the network's precision here, and not before: far distances have small differences.
            shares = (grown / (whole + SMALLEST)).to(owner.fire_c().dtype)
            return owner.fire_output(torch.relu(owner.fire_hidden(shares[..., None]))).to(dtype)

        if context.positions.contiguous and lengths.shape[1] == 1:
            # (batch or 1, distances, heads) -> (batch or 1, heads, distances)
            bias = biases(distances, lengths).transpose(1, 2)
            rows = torch.arange(distances.shape[0], device=distances.device)
            return [RelativeTerm(rows, bias=bias if bias.shape[0] > 1 else bias[0])]
        if longest is None:
            pairs = context.positions.per_pair(distances)
            return [PairTerm(biases(pairs, lengths[..., None]).permute(0, 3, 1, 2))]
        # A row for each length that there is and each distance.
        lengths, which = torch.unique(lengths, return_inverse=True)
        bias = biases(distances, lengths[:, None]).flatten(0, 1).t()  # (heads, lengths · distances)
        return [RelativeTerm(which[..., None] * distances.shape[0] + context.positions.per_pair(index), bias=bias)]
