"""Training with a learning rate of its own for position parameters.

trainer = PositionTrainer(model=model, args=TrainingArguments("out"), train_dataset=data, position_learning_rate=0.05)
"""

from typing import Any

import torch
from transformers import Trainer

from .learning_rates import FREQUENCY_RATE, check_rate, frequencies, move_to_own_groups, tables_and_biases


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
            model = self.model if model is None else model
            move_to_own_groups(optimizer, tables_and_biases(model), self.position_learning_rate)
            rate = min(self.position_learning_rate, FREQUENCY_RATE)
            move_to_own_groups(optimizer, frequencies(model), rate)
        return optimizer
