"""Rotary positions: queries and keys turned by an angle that grows with their position."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..torch_state import is_traced
from .base import AttentionContext, AttentionScheme
from .flags import Dictionary, Flag, base, layout
from .positions import Positions
from .sinusoidal import inverse_frequencies


# Scalings whose frequencies change with the length of the text.
LENGTH_DEPENDENT = ("dynamic", "longrope")


def _halves(states: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and of the second features of all pairs."""
    return states.chunk(2, dim=-1) if layout == "halves" else (states[..., 0::2], states[..., 1::2])


class Rotation(torch.autograd.Function):
    """[`rotate_pairs`] without the tensors in between; the gradient is turned back."""

    @staticmethod
    def forward(ctx, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)
        ctx.layout = layout
        turned = torch.empty_like(states)
        (first, second), (turned_first, turned_second) = _halves(states, layout), _halves(turned, layout)
        torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=turned_second).addcmul_(first, sin)
        return turned

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        cos, sin = ctx.saved_tensors
        # By the function itself, so that it has derivatives too.
        return Rotation.apply(gradient, cos, -sin, ctx.layout), None, None, None

    @staticmethod
    def jvp(ctx, tangent: torch.Tensor, *of_constants: None) -> torch.Tensor:
        cos, sin = ctx.saved_tensors
        return rotate_pairs(tangent, cos, sin, ctx.layout)


def rotate_pairs(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    """Turn each pair of features (x, y) to (x cos - y sin, y cos + x sin).

    Args:
        states: (batch, heads, length, head_dim).
        cos, sin: (batch or 1, 1, length, head_dim / 2), one angle per pair.
        layout: "halves" pairs feature k with k + head_dim/2, "interleaved" pairs 2k with 2k + 1.
    """
    first, second = _halves(states, layout)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat(turned, dim=-1) if layout == "halves" else torch.stack(turned, dim=-1).flatten(-2)


@dataclass
class RopeSettings:
    """As much of a config as transformers' RoPE scalings read."""

    rope_parameters: dict[str, Any]
    head_dim: int
    max_position_embeddings: int
    num_attention_heads: int = 1

    @property
    def hidden_size(self) -> int:
        return self.head_dim

    def standardize_rope_params(self) -> None:
        """Nothing is left to do."""


class Rope(AttentionScheme):
    """q_i and k_j rotated by their positions: pair k by the angle position · base^(-2k/d); no parameters.

    `position_rope_scaling` is one of transformers' RoPE scalings ({"rope_type": "linear", "factor": 2.0}, "yarn", ...),
    computed by its own functions for the usable number of positions. In composites, score terms see the rotated
    queries and keys.

    Source: Su et al. 2021 (https://arxiv.org/abs/2104.09864); layout `halves` checked against `EsmModel`,
    `interleaved` against `RoFormerModel`.
    """

    name = "rope"
    flags = (
        base(),
        layout("halves", "which features make a pair: k and k + d/2, or 2k and 2k + 1"),
        Flag(
            "position_rope_scaling",
            Dictionary("{'rope_type': 'linear', 'factor': 2.0}"),
            None,
            "transformers' RoPE scaling",
            default_help="none",
        ),
    )
    formula = "(R_i q_i)·(R_j k_j)/√d, R_i rotates pair k by i·base^(−2k/d)"
    paper = "Su et al. 2021, arXiv:2104.09864"
    extrapolates = "yes: any length (position_rope_scaling helps)"
    silent = False
    distillation_rate = 3e-4  # positions act by projections alone, which have to move further
    reads_key_positions = False  # keys are rotated before they are cached
    backends = ("sdpa", "flex_attention", "flash_attention_2", "eager")
    adds_scores = False
    # Of the flags.
    base: float
    layout: str
    rope_scaling: Any  # a dictionary as transformers has it, or None

    def read(self, config) -> None:
        self.head_dim = config.sizes.head_dim
        self.rope_type = "default"
        if self.rope_scaling is not None:
            self.usable_positions = config.sizes.max_position_embeddings - config.sizes.first_position
            self.rope_type = self.rope_scaling.get("rope_type", self.rope_scaling.get("type", "default"))
            self.base = self.rope_scaling.get("rope_theta", self.base)

    def check(self, config) -> None:
        if self.head_dim % 2:
            raise ValueError(
                f"position_scheme='rope' needs an even head size, got hidden_size / num_attention_heads = {self.head_dim}"
            )
        if self.rope_scaling is not None:
            self._check_scaling(config)
        if self.base <= 1:
            raise ValueError(f"position_base must be greater than 1 for rope, got {self.base}")

    def _check_scaling(self, config) -> None:
        known = sorted({"default", *ROPE_INIT_FUNCTIONS})
        if self.rope_type not in known:
            raise ValueError(
                f"position_rope_scaling: rope_type must be one of {', '.join(known)}, got {self.rope_type!r}"
            )
        useless = sorted({*self.rope_scaling} - {"rope_type", "type", "rope_theta"})
        if self.rope_type == "default" and useless:
            raise ValueError(
                f"position_rope_scaling: {', '.join(useless)} without a rope_type that uses it; rope_type may be one of "
                f"{', '.join(known)}"
            )
        if self.rope_type in LENGTH_DEPENDENT and config.sizes.is_decoder:
            raise ValueError(
                f"position_rope_scaling: {self.rope_type!r} is refused in decoders: its frequencies change with the "
                "length, and the keys in the cache would disagree"
            )
        if config.position_base not in (None, self.base):
            raise ValueError(
                f"position_rope_scaling has rope_theta={self.base!r} and position_base is {config.position_base!r}: give one"
            )
        try:
            # Some scalings have other numbers for long sequences.
            original = self.rope_scaling.get("original_max_position_embeddings", 1)
            for length in (1, 2 * max(original, self.usable_positions)):
                with torch.device("cpu"):  # not on the meta device, where from_pretrained builds models
                    frequencies, _ = self._inverse_frequencies(torch.device("cpu"), length)
                if frequencies.shape != (self.head_dim // 2,):
                    raise ValueError(f"{frequencies.numel()} frequencies for {self.head_dim // 2} pairs of features")
                if not (frequencies.is_floating_point() and frequencies.isfinite().all()):
                    raise ValueError(f"the frequencies are {frequencies.tolist()}")
        except (KeyError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise ValueError(
                f"position_rope_scaling={self.rope_scaling!r} is not usable: {type(error).__name__}: {error}"
            ) from error

    def _inverse_frequencies(self, device: torch.device, length: int | torch.Tensor) -> tuple[torch.Tensor, float]:
        """Angles per position, (head_dim / 2,), and the factor on cos and sin that some scalings bring.

        Args:
            length: the largest position and one more, which [`LENGTH_DEPENDENT`] scalings go by.
        """
        if self.rope_type == "default":
            return inverse_frequencies(self.head_dim, self.base, device), 1.0
        parameters = {"rope_theta": float(self.base), **self.rope_scaling, "rope_type": self.rope_type}
        parameters.setdefault("original_max_position_embeddings", self.usable_positions)
        stand_in = RopeSettings(parameters, self.head_dim, self.usable_positions)
        compute = functools.partial(ROPE_INIT_FUNCTIONS[self.rope_type], stand_in, device=device)
        if self.rope_type == "longrope" and isinstance(length, torch.Tensor):  # its own function compares numbers
            original = parameters["original_max_position_embeddings"]
            (short, factor), (long, _) = compute(seq_len=original), compute(seq_len=original + 1)
            return torch.where(length > original, long, short), factor
        return compute(seq_len=length)

    def prepare(self, positions: Positions, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        # Angles only depend on differences, so RoBERTa's offset is of no matter; taking it off keeps them small.
        places = positions.query - positions.first
        length = positions.key.shape[1]
        if self.rope_type in LENGTH_DEPENDENT and places.numel():
            # As in transformers, the largest position tells. Its value is not looked at: that would stall GPUs and traces.
            length = (places.max() + 1).to(torch.float32)
        inverse_frequencies, factor = self._inverse_frequencies(places.device, length)
        # (batch or 1, 1, query, head_dim / 2)
        angles = (places.to(inverse_frequencies.dtype)[..., None] * inverse_frequencies)[:, None]
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def initialize_from(self, start: Any) -> None:
        if start.bases_are_free:
            start.balance_heads(self.layout)

    def rotate(self, context: AttentionContext) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, (cos, sin) = context.query, context.key, context.prepared
        # Under autocast the hidden states, and so cos and sin, are wider than what is rotated.
        turn = Rotation.apply if cos.dtype == query.dtype and not is_traced() else rotate_pairs
        query, key = (turn(states, cos, sin, self.layout).to(states.dtype) for states in (query, key))
        return query, key
