"""Fixed sines and cosines of the position, times an amplitude."""

import math
from typing import Any

import torch
from torch import nn

from .base import EmbeddingScheme
from .flags import Boolean, Flag, Number, base, layout
from .parameters import Constant, PositionConstant, PositionParameter


WITHOUT_FLOAT64 = {"mps"}


def precise_dtype(device: torch.device) -> torch.dtype:
    """The dtype of angles and long sums: float64, where a device has it."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def inverse_frequencies(width: int, base: float, device: torch.device) -> torch.Tensor:
    """base^(-2k/width) for 0 <= 2k < width: angles per position, the most precise that the device has."""
    exponents = torch.arange(0, width, 2, dtype=precise_dtype(device), device=device) / width
    return torch.pow(base, -exponents)


def sines_and_cosines(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sines and cosines of position · frequency, each (..., frequencies), for integer positions (...).

    Angles have the dtype of the frequencies, results are cast to `dtype` once: float32 angles are off by 5e-4 at
    position 8,192.
    """
    angles = positions.to(frequencies.dtype)[..., None] * frequencies
    return angles.sin().to(dtype), angles.cos().to(dtype)


def sinusoids(
    positions: torch.Tensor, width: int, base: float, layout: str, dtype: torch.dtype, frequency: float = 1.0
) -> torch.Tensor:
    """Sines and cosines of positions.

    `interleaved`: out[2k] = sin(frequency · pos / base^(2k/width)), out[2k+1] = cos (Vaswani et al. 2017, section 3.5).
    `halves`: all sines, then all cosines, wavelengths spaced by log(base) / (width/2 - 1) (tensor2tensor's
    `get_timing_signal_1d`); an odd width ends in a 0.

    Args:
        positions: integer tensor (...).
        width: number of features.
        base: how many times slower than the first the last sinusoids are, about.
        layout: "interleaved" or "halves".
        dtype: of the result.
        frequency: of the first sinusoids, in radians from one position to the next.

    Returns:
        (..., width), unscaled.
    """
    if layout == "halves":
        half = width // 2
        spacing = torch.arange(half, dtype=precise_dtype(positions.device), device=positions.device) / max(half - 1, 1)
        frequencies = torch.exp(spacing * -math.log(base))
    else:
        frequencies = inverse_frequencies(width, base, positions.device)
    sines, cosines = sines_and_cosines(positions, frequency * frequencies, dtype)
    if layout == "halves":
        return nn.functional.pad(torch.cat([sines, cosines], dim=-1), (0, width % 2))
    return torch.stack([sines, cosines], dim=-1).flatten(-2)[..., :width]


class Sinusoidal(EmbeddingScheme):
    """w + s · sin/cos(ω · position), s a number, `embeddings.position_scale.weight` of shape (1,).

    The frequencies ω fall from `position_frequency`, 1 as published, to 1/`position_base` of that. Integer positions tell
    frequencies up to π apart: those of a learned table between 1 and π are out of reach with the published 1.

    Unit sinusoids (RMS 0.71) drown the word embeddings of a pretrained model (RMS 0.056 in MiniLM), so s is
    `position_amplitude`, by default the one whose RMS is `initializer_range`, about that of learned tables. It is a constant,
    a buffer: learned, an optimizer takes it to zero before the model has learned to read positions, and at zero nothing learns to.
    `position_learn_amplitude` makes it a parameter, by default where it is 0. With `position_combine="concat"` it cannot be
    one: the projection scales positions anyway, and a step of an optimizer that changes s by a part would change everything that
    the projection makes of positions by that part at once. The position is the token's index in the sequence or the given
    `position_ids` (minus padding_idx + 1 in RoBERTa-like families).

    Source: Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762); layout `halves` as tensor2tensor's
    `get_timing_signal_1d`.
    """

    name = "sinusoidal"
    flags = (
        *EmbeddingScheme.flags,
        base(),
        layout("interleaved", "order of sines and cosines"),
        Flag(
            "position_amplitude",
            Number(0),
            None,
            "amplitude, or its initial value if it is learned",
            default_help="such that the RMS is initializer_range",
        ),
        Flag(
            "position_learn_amplitude",
            Boolean(),
            None,
            "train the amplitude",
            default_help="only if position_amplitude is 0",
        ),
        Flag(
            "position_frequency",
            Number(0),
            1,
            "frequency of the fastest sinusoids, in radians per position, at most π",
        ),
    )
    formula = "w + s·f(i), f(r) = [sin, cos](ω·r/base^(2k/E)), s a constant unless position_learn_amplitude"
    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    extrapolates = "yes: any length"
    silent = False
    # Of the options.
    amplitude: float | None
    base: float
    frequency: float
    layout: str
    learn_amplitude: bool | None

    def read(self, config) -> None:
        if self.learn_amplitude is None:
            self.learn_amplitude = self.amplitude == 0 and self.combine != "concat"

    def check(self, config) -> None:
        super().check(config)
        if self.base <= 1:
            raise ValueError(f"position_base must be greater than 1 for sinusoidal, got {self.base}")
        if not 0 < self.frequency <= math.pi:
            raise ValueError(f"position_frequency must be greater than 0 and at most π, got {self.frequency}")
        if self.combine == "concat" and self.learn_amplitude:
            raise ValueError(
                "position_combine='concat' scales positions by its projection: position_learn_amplitude has no use with it"
            )
        if self.amplitude == 0 and not self.learn_amplitude:
            why = "position_combine='concat'" if self.combine == "concat" else "position_learn_amplitude=False"
            raise ValueError(
                f"{why} does not train the amplitude, and with position_amplitude=0 no position would ever be added: leave one of "
                "them out"
            )

    @classmethod
    def conversion_options(cls, aims: Any) -> dict[str, Any]:
        projected = aims.given.get("position_combine") == "concat" and not aims.given.get("position_width")
        others = (scheme for name, scheme in aims.schemes.items() if name != cls.name)
        is_shared = any(scheme.reads_option("position_base") for scheme in others)
        if not projected or is_shared or {"position_base", "position_frequency"} & {*aims.given}:
            return {}
        return aims.best_sinusoids(aims.given.get("position_layout", "interleaved"))

    def initialize_from(self, start: Any) -> None:
        start.fit_sinusoids(self)

    def starts_silent(self) -> bool:
        return self.amplitude == 0 and not self.every_layer_weight

    def settings(self) -> dict[str, Any]:
        """The amplitude is kept with the weights, whether it is learned or not."""
        return {name: value for name, value in super().settings().items() if name != "learn_amplitude"}

    def add_parameters(self, embeddings: nn.Module, config) -> None:
        amplitude = self.amplitude if self.amplitude is not None else config.sizes.initializer_range * math.sqrt(2)
        kind = PositionParameter if self.learn_amplitude else PositionConstant
        embeddings.position_scale = kind((1,), Constant(float(amplitude)))

    def vectors(self, embeddings: nn.Module, position_ids: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
        positions = slots if position_ids is None else position_ids - embeddings.first_position
        scale = embeddings.position_scale()
        width = self.width or embeddings.table_width
        return scale * self.unscaled(positions.to(scale.device), width, scale.dtype)

    def unscaled(self, positions: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The sinusoids themselves, (..., width), of positions (...) that count from 0."""
        return sinusoids(positions, width, self.base, self.layout, dtype, self.frequency)
