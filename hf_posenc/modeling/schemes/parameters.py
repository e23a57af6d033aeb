"""The modules that schemes keep their parameters in, how they start, and how they are called."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import initialization as init


# They go through transformers' own functions, which leave alone what was loaded from a checkpoint.
Initial = Callable[[torch.Tensor], Any]
"""An initialization: a function that fills a tensor in place. Use those below, which do not overwrite what was loaded from a checkpoint."""


def zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with 0."""
    return init.zeros_(tensor)


def ones(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with 1."""
    return init.ones_(tensor)


def xavier(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a matrix from Xavier's uniform distribution, as `torch.nn.init.xavier_uniform_` does."""
    return init.xavier_uniform_(tensor)


@dataclass(frozen=True)
class Normal:
    """Fills a tensor from a normal distribution with mean 0.

    Attributes:
        std: standard deviation.
    """

    std: float

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return init.normal_(tensor, mean=0.0, std=self.std)


@dataclass(frozen=True)
class Uniform:
    """Fills a tensor from a uniform distribution.

    Attributes:
        low: smallest value.
        high: largest value.
    """

    low: float
    high: float

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return init.uniform_(tensor, self.low, self.high)


@dataclass(frozen=True)
class Constant:
    """Fills a tensor with one value.

    Attributes:
        value: the value.
    """

    value: float

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return init.constant_(tensor, self.value)


@dataclass(frozen=True)
class Identity:
    """Fills a matrix (out, in) with identity matrices side by side, in // out of them.

    Attributes:
        scale: factor of the identity.
    """

    scale: float = 1.0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        out_features, in_features = tensor.shape
        eye = torch.eye(out_features, dtype=tensor.dtype, device=tensor.device)
        return init.copy_(tensor, self.scale * eye.repeat(1, in_features // out_features))


class PositionTable(nn.Embedding):
    """An `nn.Embedding` with the initialization that its scheme gives.

    Args:
        rows: number of rows.
        width: number of features of a row.
        initial: initialization of the weight, (rows, width).
    """

    def __init__(self, rows: int, width: int, initial: Initial):
        super().__init__(rows, width)
        self.position_initial = {"weight": initial}


class PositionLinear(nn.Linear):
    """An `nn.Linear` with the initialization that its scheme gives.

    Args:
        in_features: as in `nn.Linear`.
        out_features: as in `nn.Linear`.
        initial: initialization of the weight, (out_features, in_features).
        bias: whether there is a bias.
        initial_bias: initialization of the bias, (out_features,).
    """

    def __init__(
        self, in_features: int, out_features: int, initial: Initial, bias: bool = True, initial_bias: Initial = zeros
    ):
        super().__init__(in_features, out_features, bias=bias)
        self.position_initial = {"weight": initial, **({"bias": initial_bias} if bias else {})}


class SmallPositionLinear(PositionLinear, NonDynamicallyQuantizableLinear):
    """A [`PositionLinear`] with at most 32 input features, for example in a small network that computes a bias from a distance.

    It is trained at the position learning rate, as position embedding matrices and biases are, because it sums over few features. torchao
    does not quantize it: it skips subclasses of `NonDynamicallyQuantizableLinear`, and would fail at a matrix with a single column.

    Args:
        in_features: at most 32.
        out_features: as in `nn.Linear`.
        initial: initialization of the weight, (out_features, in_features).
        settings: `bias` and `initial_bias` of [`PositionLinear`].

    Raises:
        ValueError: `in_features` is more than 32.
    """

    MOST_FEATURES = 32

    def __init__(self, in_features: int, out_features: int, initial: Initial, **settings: Any):
        if in_features > self.MOST_FEATURES:
            raise ValueError(
                f"SmallPositionLinear takes at most {self.MOST_FEATURES} input features, got {in_features}: use PositionLinear"
            )
        super().__init__(in_features, out_features, initial, **settings)


class PositionLayerNorm(nn.LayerNorm):
    """An `nn.LayerNorm` with the initialization that its scheme gives. The bias starts at 0.

    Args:
        width: number of features.
        eps: as in `nn.LayerNorm`.
        initial: initialization of the weight, (width,).
    """

    def __init__(self, width: int, eps: float, initial: Initial):
        super().__init__(width, eps=eps)
        self.position_initial = {"weight": initial, "bias": zeros}


class PositionParameter(nn.Module):
    """A module with one parameter, `weight`. Calling the module returns it.

    A scheme calls the module and never reads `weight`, so that it also works where the module is replaced or wrapped: by PEFT's
    `modules_to_save`, offloading or FSDP.

    Args:
        shape: that of the parameter. A single number must have the shape (1,), because FSDP2 takes no parameters without dimensions.
        initial: initialization of the parameter.
    """

    def __init__(self, shape: tuple[int, ...], initial: Initial):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.position_initial = {"weight": initial}

    def forward(self) -> torch.Tensor:
        # A copy: where the module is a unit of FSDP (PEFT's wrapping makes it one), its parameter is given up by the time
        # that the tensor is used.
        return self.weight.clone()


class PositionFrequencies(PositionParameter):
    """A [`PositionParameter`] that stays in float32 where a model is moved to half precision.

    Positions are multiplied with it: eight bits of bfloat16 are four radians off at position 1,000.
    """

    def __init__(self, shape: tuple[int, ...], initial: Initial):
        super().__init__(shape, initial)
        precise = torch.promote_types(self.weight.dtype, torch.float32)
        self.weight = nn.Parameter(self.weight.detach().to(precise))

    def _apply(self, fn: Callable, recurse: bool = True):
        def in_full(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            is_half = moved.dtype in (torch.float16, torch.bfloat16)
            return tensor.to(moved.device, torch.float32) if is_half else moved

        return super()._apply(in_full, recurse)


class PositionConstant(PositionParameter):
    """A module with one buffer, `weight`, which is saved and not trained. Calling the module returns it.

    The tensor has the same name in checkpoints as with [`PositionParameter`].

    Args:
        shape: that of the buffer.
        initial: initialization of the buffer.
    """

    def __init__(self, shape: tuple[int, ...], initial: Initial):
        super().__init__(shape, initial)
        value = self.weight.detach()
        del self.weight
        self.register_buffer("weight", value)


def whole_table(table: nn.Module, rows: int, device: torch.device) -> torch.Tensor:
    """Call an embedding module for all its rows.

    Reading `table.weight` instead would miss LoRA, and fail with offloading, where the weight is loaded when the module is called.

    Args:
        table: an embedding module, or what replaces it.
        rows: its number of rows.
        device: device of the row numbers.

    Returns:
        (rows, width).
    """
    return table(torch.arange(rows, device=device))


# By how much rows are enlarged where numbers have few digits; powers of two, small enough for the range of the type.
ENLARGED = {torch.bfloat16: 2.0**12, torch.float16: 2.0**8}


def without_bias(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Project vectors with a linear module, without its bias: (module(s·rows) - module(0)) / s.

    Reading `module.weight` instead would miss LoRA, and fail for quantized layers. s is 1 in float32 and a power of two in half precision,
    where small results would otherwise be rounded away when the bias is added.

    Args:
        module: a linear module, or what replaces it.
        rows: (rows, in_features).

    Returns:
        (rows, out_features).
    """
    bias = module(torch.zeros_like(rows[:1]))
    scale = ENLARGED.get(bias.dtype, 1.0)
    return (module(rows * scale) - bias) / scale
