"""A separate learning rate for the parameters of schemes: which ones get it, and a warning if it is missing."""

import math
from numbers import Real
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..modeling.schemes.parameters import PositionFrequencies, SmallPositionLinear
from ..parameters import position_parameters


logger = logging.get_logger(__name__)

# A number in a table or bias is added to a score. What moves it by less than this, in nats, leaves attention weights as they
# were to within 5 %.
VISIBLE = 0.05
# The highest learning rate of learned frequencies.
FREQUENCY_RATE = 1e-3


def check_rate(rate: Any, name: str = "position_learning_rate") -> None:
    """Raise TypeError or ValueError for an invalid learning rate. None is allowed, and means no separate rate.

    With NaN, training would run without an error, and the first step would make the parameters NaN.
    """
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, Real):
        raise TypeError(f"{name} must be a number, got {rate!r} of type {type(rate).__name__}")
    if not math.isfinite(rate):
        raise ValueError(f"{name} must be a finite number, got {rate}")
    if rate < 0:
        raise ValueError(f"{name} must not be negative, got {rate}")


def tables_and_biases(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The position parameters of a model, except wide weight matrices and norms (for example of transformer_xl and tupe).

    These parameters can have a high learning rate, because each of their values changes few scores. A matrix sums over hundreds of features.
    With a high learning rate, its term would exceed the content scores after a step or two, so it needs the learning rate of the model's
    other matrices. (This is the rule of μP, Yang et al. 2022: the learning rates of matrices shrink with their width, those of other
    parameters do not.) The matrices of small networks are included, because they sum over few features (`fire`, and every
    [`SmallPositionLinear`]). The learned frequencies of `rope` are not included: see [`frequencies`].

    Returns:
        A dict from full names to parameters.
    """
    others = _of_kind(model, torch.nn.Linear | torch.nn.LayerNorm | PositionFrequencies)
    small = _of_kind(model, SmallPositionLinear)
    return {
        name: parameter
        for name, parameter in position_parameters(model).items()
        if id(parameter) not in others - small
    }


def _of_kind(model: torch.nn.Module, kind: Any) -> set[int]:
    """The ids of the parameters that modules of a class have themselves."""
    modules = (module for module in model.modules() if isinstance(module, kind))
    return {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}


def frequencies(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The learned frequencies of a model (`rope` with `position_learn_frequencies`).

    The effect of a step grows with the distance: at a learning rate of 0.1, one step of Adam rotates a pair of features by 12.8 radians at
    distance 128. So these parameters need a low learning rate.

    Returns:
        A dict from full names to parameters.
    """
    own = _of_kind(model, PositionFrequencies)
    return {name: parameter for name, parameter in position_parameters(model).items() if id(parameter) in own}


def move_to_own_groups(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], learning_rate: float
) -> None:
    """Move parameters from an optimizer's groups into separate groups, without weight decay.

    Each group that contains some of them is split in two. The new group has the other settings of the old one.

    Raises:
        TypeError: the rate is not a number.
        ValueError: the rate is negative, infinite or NaN; or the optimizer lacks one of the parameters that require gradients.
    """
    check_rate(learning_rate)
    wanted = {id(parameter) for parameter in parameters.values() if parameter.requires_grad}
    for group in list(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if id(parameter) in wanted]
        if own:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in wanted]
            optimizer.add_param_group({**group, "params": own, "lr": learning_rate, "weight_decay": 0.0})
            wanted -= {id(parameter) for parameter in own}
    if wanted:
        raise ValueError(
            f"position_learning_rate: the optimizer does not hold {len(wanted)} of the {len(parameters)} position "
            "parameters; with FSDP 1, set fsdp_config's use_orig_params to true"
        )


def warn_of_tables_that_stay(model: torch.nn.Module, optimizer: Any, learning_rate: float, steps: int) -> None:
    """Log a warning once if zero-initialized tables and biases will stay near zero.

    They stay near zero if they are frozen, or if they have the learning rate of the other parameters and training is short. Adam changes a
    value by about the learning rate per step, and by half of that on average if the schedule decays to 0. If a parameter has a learning rate
    that the other parameters do not have, it counts as intended, and there is no warning.

    Every `Trainer` calls this function, on one process only. Of sharded parameters it reads only the local part.

    Args:
        model: the model that will be trained.
        optimizer: its optimizer. An optimizer without parameter groups is ignored.
        learning_rate: the learning rate of the other parameters, if the optimizer contains only tables and biases.
        steps: number of training steps.
    """
    tables = tables_and_biases(model)
    zero = {name: parameter for name, parameter in tables.items() if is_zero(parameter)}
    groups = getattr(optimizer, "param_groups", ())
    rates = {id(p): float(group.get("initial_lr", group["lr"])) for group in groups for p in group["params"]}
    own = {id(parameter) for parameter in tables.values()}
    shared = {rate for key, rate in rates.items() if key not in own} or {learning_rate}
    if frozen := [name for name, parameter in zero.items() if not parameter.requires_grad]:
        logger.warning_once(
            f"{len(frozen)} position parameters start at 0 and are frozen, such as {frozen[0]}, so they stay at 0: train "
            "them, or with a PEFT adapter call hf_posenc.train_positions(model)"
        )
    near = {name: rates[id(p)] for name, p in zero.items() if rates.get(id(p)) in shared}
    if stay := {name: rate for name, rate in near.items() if rate * steps / 2 < VISIBLE}:
        name, rate = next(iter(stay.items()))
        logger.warning_once(
            f"{len(stay)} position parameters start at 0, such as {name}, and {steps} steps at a learning rate of {rate:g} move "
            f"a value in them by at most about {rate * steps / 2:.2g}: give them a higher learning rate, "
            f"{suited_rates(model)}, with position_learning_rate of hf_posenc.training.PositionTrainer or with a parameter group "
            "of the optimizer (docs/fine-tuning.md)"
        )


def suited_rates(model: torch.nn.Module) -> str:
    """Suitable learning rates for the tables and biases of a model, or of the models in it (for example in an encoder-decoder)."""
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    schemes = [part.config.schemes.values() for part in models if hasattr(part, "position_classes")]
    is_added = any(scheme.uses_table for found in schemes for scheme in found)
    return "with absolute, from 0.001 (deberta) to 0.01 (t5)" if is_added else "from 0.01 (deberta) to 0.1 (t5)"


def is_zero(parameter: torch.nn.Parameter) -> bool:
    """Whether all values of a parameter are 0; of a sharded one, the local values. False if it has none."""
    here = parameter.detach()
    # Not by its class, DTensor, which a torch without torch.distributed lacks.
    here = here.to_local() if hasattr(here, "to_local") else here
    return here.numel() > 0 and not here.any()
