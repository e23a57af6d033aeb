"""The modules that schemes keep their parameters in, how they start, and how they are called."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import initialization as init


# Initial values. They go through transformers' own functions, which leave alone what was loaded from a checkpoint.
Initial = Callable[[torch.Tensor], Any]


def zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Zero everywhere."""
    return init.zeros_(tensor)


def ones(tensor: torch.Tensor) -> torch.Tensor:
    """One everywhere."""
    return init.ones_(tensor)


def xavier(tensor: torch.Tensor) -> torch.Tensor:
    """Xavier's uniform distribution."""
    return init.xavier_uniform_(tensor)


@dataclass(frozen=True)
class Normal:
    """Normal distribution of mean 0."""

    std: float

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return init.normal_(tensor, mean=0.0, std=self.std)


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution from `low` to `high`."""

    low: float
    high: float

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return init.uniform_(tensor, self.low, self.high)


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return init.constant_(tensor, self.value)


@dataclass(frozen=True)
class Identity:
    """`scale` times the identity, side by side as often as the (out, in) shape holds it."""

    scale: float = 1.0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        out_features, in_features = tensor.shape
        eye = torch.eye(out_features, dtype=tensor.dtype, device=tensor.device)
        return init.copy_(tensor, self.scale * eye.repeat(1, in_features // out_features))


class PositionTable(nn.Embedding):
    """A table whose initial value belongs to its scheme."""

    def __init__(self, rows: int, width: int, initial: Initial):
        super().__init__(rows, width)
        self.position_initial = {"weight": initial}


class PositionLinear(nn.Linear):
    """A linear layer whose initial values belong to its scheme; biases start at 0 unless it says how."""

    def __init__(
        self, in_features: int, out_features: int, initial: Initial, bias: bool = True, initial_bias: Initial = zeros
    ):
        super().__init__(in_features, out_features, bias=bias)
        self.position_initial = {"weight": initial, **({"bias": initial_bias} if bias else {})}


class SmallPositionLinear(PositionLinear, NonDynamicallyQuantizableLinear):
    """A [`PositionLinear`] of at most 32 input features, as in a network that computes a bias of a few numbers.

    It has the learning rate of tables and biases, since it sums over few features. Quantization leaves it as it is, since there is
    nothing to save: torchao leaves out subclasses of `NonDynamicallyQuantizableLinear`, and fails at matrices of a single column.

    Raises:
        ValueError: more features.
    """

    MOST_FEATURES = 32

    def __init__(self, in_features: int, out_features: int, initial: Initial, **settings: Any):
        if in_features > self.MOST_FEATURES:
            raise ValueError(
                f"SmallPositionLinear takes at most {self.MOST_FEATURES} input features, got {in_features}: use PositionLinear"
            )
        super().__init__(in_features, out_features, initial, **settings)


class PositionLayerNorm(nn.LayerNorm):
    """A LayerNorm whose initial weight belongs to its scheme; the bias starts at 0."""

    def __init__(self, width: int, eps: float, initial: Initial):
        super().__init__(width, eps=eps)
        self.position_initial = {"weight": initial, "bias": zeros}


class PositionParameter(nn.Module):
    """A single tensor of a scheme, `weight`, whose initial value belongs to the scheme. Calling it gives the tensor.

    A module, so that whatever replaces it is used: PEFT's `modules_to_save`, offloading, a unit of FSDP. Schemes
    call it and never read `weight`. Learned scalars have shape (1,): FSDP2 takes no 0-dim parameters.
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
    """A tensor like [`PositionParameter`], under the same key of checkpoints, that is a buffer and is never trained."""

    def __init__(self, shape: tuple[int, ...], initial: Initial):
        super().__init__(shape, initial)
        value = self.weight.detach()
        del self.weight
        self.register_buffer("weight", value)


def whole_table(table: nn.Module, rows: int, device: torch.device) -> torch.Tensor:
    """All rows of an embedding, (rows, width), as the module gives them.

    Reading `table.weight` instead would miss what LoRA adds to it, and fail where the weight arrives with the call
    (offloading).
    """
    return table(torch.arange(rows, device=device))


# By how much rows are enlarged where numbers have few digits; powers of two, small enough for the range of the type.
ENLARGED = {torch.bfloat16: 2.0**12, torch.float16: 2.0**8}


def without_bias(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """(module(s·rows) - module(0)) / s: the linear part of a projection, whatever the module is made of.

    Reading `module.weight` instead would miss what LoRA adds to it, and fail for quantised layers. In half precision, with
    s = 1, the bias would round away what small rows give before it is taken off.
    """
    bias = module(torch.zeros_like(rows[:1]))
    scale = ENLARGED.get(bias.dtype, 1.0)
    return (module(rows * scale) - bias) / scale
