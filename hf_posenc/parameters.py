"""Which parameters of a model belong to its position schemes."""

from typing import Any

from torch import nn

from ._utils import module_inside


class Parameters(dict[str, nn.Parameter]):
    """Parameters by their full name; shown as names and shapes, without their values."""

    def __repr__(self) -> str:
        numbers = sum(parameter.numel() for parameter in self.values())
        lines = (f"\n  {name} {tuple(parameter.shape)}" for name, parameter in self.items())
        return f"{numbers:,} position parameters" + "".join(lines)


def position_parameters(model: Any) -> Parameters:
    """The parameters that the position schemes added to a model, by their full name.

    The stock table of absolute positions is not among them where it belongs to the checkpoint. Useful for learning-rate
    groups, for training positions only, and for looking at what was learned.

    Where adapters of PEFT have copies of their own (`modules_to_save`, [`train_positions`]), these are meant, and not the
    original beside them.

    Args:
        model: any module that contains variants, a PEFT model too; or a pipeline, whose model is meant.
    """
    model = module_inside(model)
    wrappers = [
        module for module in model.modules() if {"original_module", "modules_to_save"} <= module._modules.keys()
    ]
    originals = {original for wrapper in wrappers for original in wrapper.original_module.modules()}
    return Parameters(
        (f"{prefix}.{name}" if prefix else name, getattr(module, name))
        for prefix, module in model.named_modules()
        if module not in originals
        # Not by getattr: wrappers, PEFT's for example, pass on what the module inside has.
        for name in vars(module).get("position_initial", {})
        if name in module._parameters  # and no constant
    )


def freeze_all_but_positions(model: Any) -> int:
    """Leave nothing to train but the position parameters.

    A new head is frozen too: `model.classifier.requires_grad_(True)` thaws it. Parameters of stock, the table of absolute
    positions among them, are no position parameters here.

    Args:
        model: any module that contains variants; or a pipeline.

    Returns:
        Number of position parameters, which are all that is trained now.

    Raises:
        ValueError: there are none.
    """
    model = module_inside(model)
    parameters = position_parameters(model).values()
    if not parameters:
        raise ValueError(
            "the model has no position parameters to train: it was loaded without position_scheme, or with one that has "
            "none (absolute, none, rope, alibi, sinusoidal without position_learn_amplitude)"
        )
    model.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    return sum(parameter.numel() for parameter in parameters)
