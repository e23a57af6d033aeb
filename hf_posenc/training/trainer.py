"""Training with a separate learning rate for position parameters.

trainer = PositionTrainer(model=model, args=TrainingArguments("out"), train_dataset=data, position_learning_rate=0.05)
"""

from typing import Any

import torch
from transformers import Trainer

from .learning_rates import FREQUENCY_RATE, check_rate, frequencies, move_to_own_groups, tables_and_biases


class PositionTrainer(Trainer):
    """[`Trainer`] with a separate learning rate for the tables and biases of position schemes.

    These are few and start at zero, so the learning rate of a pretrained model would hardly move them. Their parameter groups have no
    weight decay. The learning-rate schedule applies to them as to all other parameters.

    Args:
        position_learning_rate: their learning rate. Default: `args.position_learning_rate` if there is one, else the same rate as for all other
            parameters, with a warning if that would leave zero-initialized tables near zero.
        args, kwargs: the arguments of `Trainer`.

    Raises:
        TypeError: the rate is not a number.
        ValueError: the rate is negative, infinite or NaN.
    """

    def __init__(self, *args: Any, position_learning_rate: float | None = None, **kwargs: Any):
        check_rate(position_learning_rate)
        super().__init__(*args, **kwargs)
        if position_learning_rate is None:
            position_learning_rate = getattr(self.args, "position_learning_rate", None)
            check_rate(position_learning_rate)
        self.position_learning_rate = position_learning_rate

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """As in `Trainer`, with the position tables and biases in separate parameter groups.

        This happens here because the optimizer is new and holds the parameters that will be trained: those of a
        sharded model, and in the same order when a run is resumed.

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
