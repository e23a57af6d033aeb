"""Which parameters of a model belong to its position schemes."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ._utils import module_inside


class Parameters(dict[str, nn.Parameter]):
    """Parameters by their full name; shown as names and shapes, without their values."""

    def __repr__(self) -> str:
        numbers = sum(parameter.numel() for parameter in self.values())
        lines = (f"\n  {name} {tuple(parameter.shape)}" for name, parameter in self.items())
        return f"{numbers:,} position parameters" + "".join(lines)


def position_parameters(model: Any) -> Parameters:
    """The parameters that position schemes added to a model, by full name.

    The checkpoint's own position embeddings are not included. Use this for learning-rate groups, for training positions only, or to look
    at what was learned.

    If a PEFT adapter has copies (`modules_to_save`, [`train_positions`]), the copies are returned instead of the originals.

    Args:
        model: any module that contains models with position schemes, also a PEFT model; or a pipeline.

    Returns:
        A dict from names to parameters, which prints names and shapes.
    """
    model = module_inside(model)
    wrappers = [
        module for module in model.modules() if {"original_module", "modules_to_save"} <= module._modules.keys()
    ]
    originals = {original for wrapper in wrappers for original in wrapper.original_module.modules()}
    return Parameters(
        (f"{prefix}.{name}" if prefix else name, parameter)
        for prefix, module in model.named_modules()
        if module not in originals
        # Not by getattr: wrappers, PEFT's for example, pass on what the module inside has.
        for own in vars(module).get("position_initial", {})
        for name, parameter in _parameters_of(module, own)
    )


def _parameters_of(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Parameter]]:
    """A parameter of a module, or what `torch.nn.utils.parametrize` makes it of; nothing for a constant."""
    if name in module._parameters:
        yield name, module._parameters[name]
    elif is_parametrized(module, name):
        for original, parameter in module.parametrizations[name].named_parameters(recurse=False):
            yield f"parametrizations.{name}.{original}", parameter


def freeze_all_but_positions(model: Any) -> int:
    """Freeze all parameters except the position parameters.

    A new task head is frozen too; `model.classifier.requires_grad_(True)` unfreezes it. So are the checkpoint's own position embeddings, which
    do not count as position parameters here.

    Args:
        model: any module that contains models with position schemes; or a pipeline.

    Returns:
        The number of position parameters (scalar values), which are all that is trained now.

    Raises:
        ValueError: the model has no position parameters.
    """
    model = module_inside(model)
    parameters = position_parameters(model).values()
    if not parameters:
        raise ValueError(
            "the model has no position parameters to train: it was loaded without position_scheme, or with a scheme that adds "
            "none (absolute, none, rope, alibi, sinusoidal without position_learn_amplitude)"
        )
    model.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    return sum(parameter.numel() for parameter in parameters)
