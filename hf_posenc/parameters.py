"""Which parameters of a model belong to its position schemes."""

from torch import nn


def position_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the position schemes added to a model, by their full name.

    The stock table of absolute positions is not among them where it belongs to the checkpoint. Useful for learning-rate
    groups, for training positions only, and for looking at what was learned.

    Args:
        model: any module that contains variants, a PEFT model too.
    """
    return {
        f"{prefix}.{name}" if prefix else name: getattr(module, name)
        for prefix, module in model.named_modules()
        for name in getattr(module, "position_initial", {})
    }
