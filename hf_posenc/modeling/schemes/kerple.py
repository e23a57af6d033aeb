"""KERPLE: a penalty that grows with the logarithm or a power of the distance, as each head learns."""

import torch
from torch import nn

from .base import AttentionContext, AttentionScheme
from .flags import Choice, Flag, init
from .parameters import PositionParameter, Uniform, zeros
from .terms import PairTerm, RelativeTerm


# The smallest r2, as in the official code.
SMALLEST = 0.01


def projected(parameter: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """A parameter, projected to [low, high]; its gradient passes as it is, and so do tangents.

    The gradient of `clamp` is 0 outside, and a parameter that has once left the interval would stay there for good. One that
    depends on its own sign would not be the sum of its parts, as gradients of several processes are.
    """
    return parameter.detach().clamp(low, high) + (parameter - parameter.detach())


class Kerple(AttentionScheme):
    """score(i, j) = q_i·k_j/√d - r1_h log(1 + r2_h |i - j|), or with kernel `power` - r1_h |i - j|^r2_h.

    r1 >= 0 and r2 >= 0.01 (at most 2 for `power`), the parameters projected to that: in each
    `encoder.layer.N.attention.self`, `kerple_r1.weight` and `kerple_r2.weight` (heads,). It is output-preserving with r1 = 0, where r1
    has a gradient. |i - j| cannot tell left from right: combined with it, only a scheme that can makes "a b" another text than "b a".

    Source: Chi et al. 2022 (https://arxiv.org/abs/2205.09921), equation 4; checked by explicit loops. The official
    code keeps r1 at 0.01 at least.
    """

    name = "kerple"
    flags = (
        init(),
        Flag(
            "position_kernel",
            Choice(("log", "power")),
            "log",
            "whether the penalty grows with the logarithm or a power of the distance",
        ),
    )
    formula = "q_i·k_j/√d − r1_h·log(1 + r2_h·|i−j|)"
    paper = "Chi et al. 2022, arXiv:2205.09921"
    extrapolates = "yes: any length"
    reads_content = False
    # Of the options.
    init: str
    kernel: str

    def read(self, config) -> None:
        self.largest = 2.0 if self.kernel == "power" else float("inf")

    def add_layer_parameters(self, attention: nn.Module, config) -> None:
        high_r1, high_r2 = (1.0, 2.0) if self.kernel == "power" else (2.0, 1.0)
        shape = (attention.num_heads,)
        attention.kerple_r1 = PositionParameter(shape, zeros if self.init == "silent" else Uniform(0.0, high_r1))
        attention.kerple_r2 = PositionParameter(shape, Uniform(0.0, high_r2))

    def terms(self, context: AttentionContext) -> list[RelativeTerm | PairTerm]:
        dtype = context.query.dtype
        # In half precision a far distance, or its power, would be off by more than one.
        precise = torch.promote_types(dtype, torch.float32)
        r1 = projected(context.attention.kerple_r1().to(precise), 0.0, float("inf"))[:, None]
        r2 = projected(context.attention.kerple_r2().to(precise), SMALLEST, self.largest)[:, None]

        def of_distance(relative: torch.Tensor) -> torch.Tensor:
            distance = relative.to(r1.device).abs()[..., None, :].to(precise)
            if self.kernel == "log":
                grown = torch.log1p(r2 * distance)
            else:
                # 0 has no logarithm, which the gradient of a power needs; there it is 0.
                grown = torch.where(distance > 0, distance.clamp(min=1) ** r2, 0.0)
            return (-r1 * grown).clamp(min=torch.finfo(dtype).min / 2).to(dtype)

        return [context.positions.bias(of_distance)]
