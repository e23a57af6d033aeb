"""Training with a learning rate of its own for position parameters.

trainer = PositionTrainer(model=model, args=TrainingArguments("out"), train_dataset=data, position_learning_rate=0.05)
"""

import math
from numbers import Real
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer
from transformers.utils import logging

from .modeling.schemes.parameters import SmallPositionLinear
from .parameters import position_parameters


logger = logging.get_logger(__name__)

# A number in a table or bias is added to a score. What moves it by less than this, in nats, leaves attention weights as they
# were to within 5 %.
VISIBLE = 0.05


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


class PositionTrainer(Trainer):
    """The standard `Trainer`; tables and biases of position schemes have a learning rate of their own.

    They start at zero and are few, so that a rate that suits a pretrained model would leave them where they are. They
    have no weight decay then; the trainer's schedule applies to them as to everything else.

    Args:
        position_learning_rate: their rate; by default `args.position_learning_rate` where there is one, and otherwise that of
            all others, with a warning where it would leave tables that start at zero near zero.
        args, kwargs: as `Trainer` takes them.

    Raises:
        TypeError: the rate is no number.
        ValueError: it is negative, infinite or NaN.
    """

    def __init__(self, *args: Any, position_learning_rate: float | None = None, **kwargs: Any):
        check_rate(position_learning_rate)
        super().__init__(*args, **kwargs)
        if position_learning_rate is None:
            position_learning_rate = getattr(self.args, "position_learning_rate", None)
            check_rate(position_learning_rate)
        self.position_learning_rate = position_learning_rate

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """As in `Trainer`, with positions' tables and biases moved to parameter groups of their own.

        It happens here because here the optimizer is new and holds the parameters as they will be trained: those of a
        sharded model, and in the same order whenever a run is resumed.

        Raises:
            ValueError: a learning rate is given, but the optimizer does not hold the model's position parameters, as
                under FSDP with flattened parameters.
        """
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and self.position_learning_rate is not None:
            parameters = tables_and_biases(self.model if model is None else model)
            move_to_own_groups(optimizer, parameters, self.position_learning_rate)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        """As in `Trainer`; the number of steps is known here, and with it how far a table can get."""
        is_first = self.lr_scheduler is None and self.is_world_process_zero()
        if is_first and self.position_learning_rate is None:
            warn_of_tables_that_stay(self.model, self.args.learning_rate, num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)


def tables_and_biases(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The position parameters of a model but for wide weight matrices and norms (of transformer_xl and tupe, for example).

    Each number in a table or a bias adds to a score by itself and may move far. A matrix that sums over hundreds of features would
    at a rate that suits the others drown the content scores in a step or two, so it learns as the model's own matrices do. (This is
    the rule of μP, Yang et al. 2022: rates of matrices shrink with their width, others' do not.) The matrices of a small network
    (`fire`: [`SmallPositionLinear`], of at most 32 features) sum over few, and are among the tables here.
    """
    wide = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm) and not isinstance(module, SmallPositionLinear)
        for parameter in module.parameters(recurse=False)
    }
    return {name: parameter for name, parameter in position_parameters(model).items() if id(parameter) not in wide}


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


def warn_of_tables_that_stay(model: torch.nn.Module, learning_rate: float, steps: int) -> None:
    """Say so where tables and biases that are zero will stay near zero: Adam moves a number by about the rate a step.

    Args:
        steps: of training; a schedule that falls to 0 leaves half of the way.
    """
    started = [name for name, parameter in tables_and_biases(model).items() if not parameter.detach().any()]
    farthest = learning_rate * steps / 2
    if started and farthest < VISIBLE:
        # The model may hold variants: a module of the user's own, an encoder-decoder.
        models = (part for part in model.modules() if isinstance(part, PreTrainedModel))
        variants = [part for part in models if hasattr(part, "position_classes")]
        is_added = any(scheme.uses_table for part in variants for scheme in part.config.schemes.values())
        suited = (
            "beside absolute, from 0.001 (deberta) to 0.01 (t5)" if is_added else "from 0.01 (deberta) to 0.1 (t5)"
        )
        logger.warning(
            f"position parameters start at 0 ({len(started)}, such as {started[0]}), and {steps} steps at a learning rate of "
            f"{learning_rate:g} move a number in them by about {farthest:.2g} at most: give them a rate of their own, "
            f"position_learning_rate, {suited}"
        )
