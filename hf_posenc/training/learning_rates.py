"""A learning rate of its own for what schemes added: which parameters have it, and where it is missed."""

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
    """Raise TypeError or ValueError for what is no learning rate; None is none and may be.

    NaN would train without an error, and make every parameter that it applies to NaN in the first step.
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
    """The position parameters of a model but for wide weight matrices and norms (of transformer_xl and tupe, for example).

    Each number in a table or a bias adds to a score by itself and may move far. A matrix that sums over hundreds of features would
    at a rate that suits the others drown the content scores in a step or two, so it learns as the model's own matrices do. (This is
    the rule of μP, Yang et al. 2022: rates of matrices shrink with their width, others' do not.) The matrices of a small network
    (`fire`: [`SmallPositionLinear`], of at most 32 features) sum over few, and are among the tables here. Learned frequencies of `rope` are
    not: see [`frequencies`].
    """
    others = torch.nn.Linear | torch.nn.LayerNorm | PositionFrequencies
    wide = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, others) and not isinstance(module, SmallPositionLinear)
        for parameter in module.parameters(recurse=False)
    }
    return {name: parameter for name, parameter in position_parameters(model).items() if id(parameter) not in wide}


def frequencies(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The learned frequencies of a model (`rope` with `position_learn_frequencies`).

    What a step changes grows with the distance: at a rate of 0.1, one step of Adam turns a pair of features by 12.8 radians at distance 128.
    """
    own = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, PositionFrequencies)
        for parameter in module.parameters(recurse=False)
    }
    return {name: parameter for name, parameter in position_parameters(model).items() if id(parameter) in own}


def move_to_own_groups(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], learning_rate: float
) -> None:
    """Move parameters out of an optimizer's groups into groups of their own, without weight decay.

    Each group that holds some of them is split in two, so that whatever else Trainer grouped by stays apart.

    Raises:
        TypeError: the rate is no number.
        ValueError: the rate is negative, infinite or NaN; or the optimizer lacks a parameter that is to be trained.
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
    """Log a warning, once, where tables and biases that are zero will stay near zero.

    That is so where they are frozen, or have the learning rate of other parameters and few steps: Adam moves a number by about the
    rate a step, and a schedule that falls to 0 leaves half of the way. Another rate is somebody's decision.

    Every `Trainer` calls this (integrations/trainer.py), on one process alone. What is sharded is looked at by its part there, since
    its whole would wait for the other processes.

    Args:
        optimizer: as it will train; one without groups of parameters is passed over.
        learning_rate: the trainer's, which is compared where the optimizer holds nothing but tables and biases.
        steps: of training.
    """
    tables = tables_and_biases(model)
    zero = {name: parameter for name, parameter in tables.items() if is_zero(parameter)}
    groups = getattr(optimizer, "param_groups", ())
    rates = {id(p): float(group.get("initial_lr", group["lr"])) for group in groups for p in group["params"]}
    own = {id(parameter) for parameter in tables.values()}
    shared = {rate for key, rate in rates.items() if key not in own} or {learning_rate}
    if frozen := [name for name, parameter in zero.items() if not parameter.requires_grad]:
        logger.warning_once(
            f"position parameters start at 0 ({len(frozen)}, such as {frozen[0]}) and are frozen, so that they stay at 0: train "
            "them, with adapters of PEFT by hf_posenc.train_positions(model)"
        )
    near = {name: rates[id(p)] for name, p in zero.items() if rates.get(id(p)) in shared}
    if stay := {name: rate for name, rate in near.items() if rate * steps / 2 < VISIBLE}:
        name, rate = next(iter(stay.items()))
        logger.warning_once(
            f"position parameters start at 0 ({len(stay)}, such as {name}), and {steps} steps at a learning rate of {rate:g} move "
            f"a number in them by about {rate * steps / 2:.2g} at most: give them a learning rate of their own, "
            f"{suited_rates(model)}, by position_learning_rate of hf_posenc.training.PositionTrainer or by a parameter group "
            "of the optimizer (docs/fine-tuning.md)"
        )


def suited_rates(model: torch.nn.Module) -> str:
    """The learning rates that suit tables and biases of a model, or of the models that it holds: an encoder-decoder, for example."""
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    schemes = [part.config.schemes.values() for part in models if hasattr(part, "position_classes")]
    is_added = any(scheme.uses_table for found in schemes for scheme in found)
    return "with absolute, from 0.001 (deberta) to 0.01 (t5)" if is_added else "from 0.01 (deberta) to 0.1 (t5)"


def is_zero(parameter: torch.nn.Parameter) -> bool:
    """Whether all numbers of a parameter are 0, of a sharded one those that are here; not where none are."""
    here = parameter.detach()
    # Not by its class, DTensor, which a torch without torch.distributed lacks.
    here = here.to_local() if hasattr(here, "to_local") else here
    return here.numel() > 0 and not here.any()
