"""Rotary positions: queries and keys turned by an angle that grows with their position."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..torch_state import is_traced, may_carry_tangents
from .base import AttentionContext, AttentionScheme
from .flags import LARGEST, Choice, Dictionary, Flag, Number, base, init, layout
from .parameters import PositionFrequencies, ones, zeros
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
    """q_i and k_j rotated by their positions: pair k by the angle position · base^(-2k/d).

    With `position_learn_frequencies` the angle is position · a_k · base^(-2k/d), and a is learned: `encoder.rotary_frequencies.weight`
    (d / 2,) for all layers ("shared"), or one (heads, d / 2) in each `encoder.layer.N.attention.self` ("layer"). At a = 0, the initial value
    unless `position_init` is "paper" (a = 1), nothing is rotated, and the gradient is not zero: ∂s_ij/∂w = (i - j)(q_1 k_2 - q_2 k_1)/√d
    for a pair of features and its angle w from one position to the next. It grows with the distance, so frequencies have a learning
    rate of their own in `PositionTrainer`. They stay in float32, and so do the angles. Kin: LieRE (https://arxiv.org/abs/2406.10322), ComRoPE
    (https://arxiv.org/abs/2506.03737), RoPE-Mixed (https://arxiv.org/abs/2403.13298).

    With `position_rotary_fraction` only the first features of an attention head are rotated, d being their number, as in GPT-NeoX.

    `position_rope_scaling` is one of transformers' RoPE scalings ({"rope_type": "linear", "factor": 2.0}, "yarn", ...),
    computed by its own functions for the usable number of positions. In composites, score terms see the rotated
    queries and keys.

    Source: Su et al. 2021 (https://arxiv.org/abs/2104.09864); layout `halves` checked against `EsmModel`,
    `interleaved` against `RoFormerModel`, the fraction against `GPTNeoXModel`.
    """

    name = "rope"
    flags = (
        base(),
        init(),
        Flag(
            "position_learn_frequencies",
            Choice(("shared", "layer")),
            None,
            "learn the frequencies: one for each pair of features, for all layers or for each layer and attention head",
            default_help="no",
        ),
        Flag(
            "position_rotary_fraction",
            Number(0),
            1.0,
            "share of an attention head's features that are rotated, the first ones",
        ),
        layout("halves", "which features form a pair: k and k + d/2 (halves), or 2k and 2k + 1 (interleaved)"),
        Flag(
            "position_rope_scaling",
            Dictionary("{'rope_type': 'linear', 'factor': 2.0}"),
            None,
            "Transformers' RoPE scaling",
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
    # Of the options.
    base: float
    layout: str
    init: str
    learn_frequencies: str | None
    rope_scaling: Any  # a dictionary as transformers has it, or None
    rotary_fraction: float

    def read(self, config) -> None:
        self.head_dim = config.sizes.head_dim
        # As many features of a head as are rotated.
        self.width = 2 * round(self.rotary_fraction * self.head_dim / 2)
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
        if self.rotary_fraction > 1 or self.width == 0:
            raise ValueError(
                f"position_rotary_fraction must be at most 1 and leave a pair of the {self.head_dim} features of an attention head, "
                f"got {self.rotary_fraction}"
            )
        others = (scheme for name, scheme in config.schemes.items() if name != self.name)
        if (
            self.init == "paper"
            and not self.learn_frequencies
            and not any(each.reads_option("position_init") for each in others)
        ):
            raise ValueError(
                "position_init='paper' has no use with rope alone: it belongs to position_learn_frequencies"
            )
        if self.rope_scaling is not None and self.learn_frequencies:
            raise ValueError(
                "position_rope_scaling has no use with position_learn_frequencies, which learns what it sets"
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
                    frequencies, factor = self._inverse_frequencies(torch.device("cpu"), length)
                if frequencies.shape != (self.width // 2,):
                    raise ValueError(f"{frequencies.numel()} frequencies for {self.width // 2} pairs of features")
                if not (frequencies.is_floating_point() and frequencies.isfinite().all()):
                    raise ValueError(f"the frequencies are {frequencies.tolist()}")
                if not 0 < factor <= LARGEST**0.5:  # NaN, too; queries times keys have it twice
                    raise ValueError(f"the factor of queries and keys is {factor}")
        except (KeyError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise ValueError(
                f"position_rope_scaling={self.rope_scaling!r} is not usable: {type(error).__name__}: {error}"
            ) from error

    def _inverse_frequencies(self, device: torch.device, length: int | torch.Tensor) -> tuple[torch.Tensor, float]:
        """Angles per position, (width / 2,), and the factor on cos and sin that some scalings bring.

        Args:
            length: the largest position and one more, which [`LENGTH_DEPENDENT`] scalings go by.
        """
        if self.rope_type == "default":
            return inverse_frequencies(self.width, self.base, device), 1.0
        parameters = {"rope_theta": float(self.base), **self.rope_scaling, "rope_type": self.rope_type}
        parameters.setdefault("original_max_position_embeddings", self.usable_positions)
        stand_in = RopeSettings(parameters, self.width, self.usable_positions)
        compute = functools.partial(ROPE_INIT_FUNCTIONS[self.rope_type], stand_in, device=device)
        if self.rope_type == "longrope" and isinstance(length, torch.Tensor):  # its own function compares numbers
            original = parameters["original_max_position_embeddings"]
            (short, factor), (long, _) = compute(seq_len=original), compute(seq_len=original + 1)
            return torch.where(length > original, long, short), factor
        return compute(seq_len=length)

    def starts_silent(self) -> bool:
        return self.learn_frequencies is not None and self.init == "silent"

    def _add_frequencies(self, owner: nn.Module, shape: tuple[int, ...]) -> None:
        owner.rotary_frequencies = PositionFrequencies(shape, zeros if self.init == "silent" else ones)

    def add_encoder_parameters(self, encoder: nn.Module, config) -> None:
        if self.learn_frequencies == "shared":
            self._add_frequencies(encoder, (self.width // 2,))

    def add_layer_parameters(self, attention: nn.Module, config) -> None:
        if self.learn_frequencies == "layer":
            self._add_frequencies(attention, (config.sizes.num_attention_heads, self.width // 2))

    def prepare(self, positions: Positions, dtype: torch.dtype) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, (batch or 1, 1, query, width / 2); with learned frequencies the positions, int64 (batch or 1, query)."""
        # Angles only depend on differences, so RoBERTa's offset is of no matter; taking it off keeps them small.
        places = positions.query - positions.first
        if self.learn_frequencies:  # integers: FSDP2 rounds what layers are given as floats to bfloat16
            return places
        length = positions.key.shape[1]
        if self.rope_type in LENGTH_DEPENDENT and places.numel():
            # As in transformers, the largest position tells. Its value is not looked at: that would stall GPUs and traces.
            length = (places.max() + 1).to(torch.float32)
        inverse_frequencies, factor = self._inverse_frequencies(places.device, length)
        angles = (places.to(inverse_frequencies.dtype)[..., None] * inverse_frequencies)[:, None]
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    @classmethod
    def conversion_options(cls, aims: Any) -> dict[str, Any]:
        """Learned frequencies start where `rope` has them, so that its own start is theirs."""
        learned = aims.given.get("position_learn_frequencies") is not None
        return {"position_init": "paper"} if learned and "position_init" not in aims.given else {}

    def initialize_from(self, start: Any) -> None:
        if start.bases_are_free and self.width == self.head_dim and not self.starts_silent():
            start.balance_heads(self.layout)

    def rotate(self, context: AttentionContext) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, learns = context.query, context.key, False
        if self.learn_frequencies:
            owner = context.attention if self.learn_frequencies == "layer" else context.encoder
            cos, sin = self._learned(context.prepared, owner.rotary_frequencies(), query.dtype)
            learns = torch.is_grad_enabled() or may_carry_tangents()
        else:
            cos, sin = context.prepared
        if self.width < self.head_dim:
            (query, *of_query), (key, *of_key) = (states.tensor_split([self.width], -1) for states in (query, key))
        # Under autocast the hidden states, and so cos and sin, are wider than what is rotated. A `Rotation` has no gradient to its angles.
        turn = Rotation.apply if cos.dtype == query.dtype and not (learns or is_traced()) else rotate_pairs
        query, key = (turn(states, cos, sin, self.layout).to(states.dtype) for states in (query, key))
        if self.width < self.head_dim:
            query, key = torch.cat([query, *of_query], -1), torch.cat([key, *of_key], -1)
        return query, key

    def _learned(
        self, places: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, (batch or 1, heads or 1, query, width / 2), of learned frequencies.

        Args:
            places: (batch or 1, query).
            scale: of the frequencies, (width / 2,) or (heads, width / 2).

        Raises:
            ValueError: `scale` was rounded to half precision.
        """
        if scale.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"the learned frequencies of rope were cast to {scale.dtype}, where angles are wrong by radians at position 1,000. With FSDP2, "
                "first call fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)) on each module that is named "
                "rotary_frequencies"
            )
        scale = scale.to(places.device)
        frequencies = scale * inverse_frequencies(self.width, self.base, scale.device).to(scale)
        frequencies = frequencies[:, None] if frequencies.dim() == 2 else frequencies
        angles = places[:, None, :, None].to(torch.promote_types(dtype, torch.float32)) * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)
