"""Training with a separate learning rate for position parameters.

trainer = PositionTrainer(model=model, args=TrainingArguments("out"), train_dataset=data, position_learning_rate=0.05)
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .learning_rates import FREQUENCY_RATE, check_rate, frequencies, move_to_own_groups, tables_and_biases
from .token_batches import TokenBatchSampler


# A field that the arguments of a script may have.
RATE = "position_learning_rate"


class PositionTrainer(Trainer):
    """[`Trainer`] with a separate learning rate for the tables and biases of position schemes.

    A table has a vector or a number for each distance, bucket or position. Most tables start at zero, so the learning rate of a pretrained
    model would hardly change them. Their parameter groups have no weight decay. The learning-rate schedule applies to them as to all other parameters.

    Args:
        position_learning_rate: their learning rate. Default: `args.position_learning_rate` if there is one, else the same rate as for all other
            parameters, with a warning if that would leave zero-initialized tables near zero.
        max_tokens_per_batch: largest number of tokens of a training batch in each process, padding included. It replaces
            `per_device_train_batch_size`; see [`TokenBatchSampler`]. A text's length is that of its `input_ids`, or in the column
            `args.length_column_name` of a `datasets.Dataset`.
        args, kwargs: the arguments of `Trainer`.

    Raises:
        TypeError: the rate is not a number.
        ValueError: the rate is negative, infinite or NaN, or comes with an optimizer (`optimizers`); or there is a limit of tokens for data
            without a length, or with a `train_sampling_strategy` that orders texts otherwise.
    """

    def __init__(
        self,
        *args: Any,
        position_learning_rate: float | None = None,
        max_tokens_per_batch: int | None = None,
        **kwargs: Any,
    ):
        check_rate(position_learning_rate)
        super().__init__(*args, **kwargs)
        self.max_tokens_per_batch = max_tokens_per_batch
        if max_tokens_per_batch is not None and not hasattr(self.train_dataset, "__len__"):
            raise ValueError("max_tokens_per_batch needs a train_dataset with a length")
        strategy = getattr(self.args, "train_sampling_strategy", "random")
        if max_tokens_per_batch is not None and strategy not in {"random", "group_by_length"}:
            raise ValueError(
                f"max_tokens_per_batch shuffles texts and groups them by length: train_sampling_strategy={strategy!r} does not fit"
            )
        if position_learning_rate is None:
            position_learning_rate = getattr(self.args, RATE, None)
            check_rate(position_learning_rate)
        if position_learning_rate is not None and self.optimizer is not None:
            raise ValueError(
                f"{RATE}={position_learning_rate} has no use with an optimizer of your own, which has the rates of its groups: leave one of "
                "them out, or give it a group with hf_posenc.training.move_to_own_groups"
            )
        self.position_learning_rate = position_learning_rate

    def get_train_dataloader(self) -> DataLoader:
        """As in `Trainer`. With `max_tokens_per_batch`, the batches are those of [`TokenBatchSampler`]."""
        loader = super().get_train_dataloader()
        if self.max_tokens_per_batch is None:
            return loader
        sampler = TokenBatchSampler(
            self._train_lengths(),
            self.max_tokens_per_batch,
            multiple_of=self.accelerator.num_processes,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )
        kept = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "persistent_workers", "prefetch_factor")
        settings = {name: getattr(loader, name) for name in (*kept, "multiprocessing_context")}
        self.pop_callback(_Epochs)
        self.add_callback(_Epochs(sampler))
        # The sampler's batches are even already. accelerate before 1.14 refuses to make batches even that have no size.
        even_batches, self.accelerator.even_batches = self.accelerator.even_batches, False
        try:
            return self.accelerator.prepare(DataLoader(loader.dataset, batch_sampler=sampler, **settings))
        finally:
            self.accelerator.even_batches = even_batches

    def _train_lengths(self) -> list[int]:
        data, column = self.train_dataset, self.args.length_column_name
        if column in getattr(data, "column_names", ()):
            return list(data[column])
        return [_length(data[index]["input_ids"]) for index in range(len(data))]

    def _hp_search_setup(self, trial: Any) -> None:
        """As in `Trainer`. If a search sets `position_learning_rate`, a field of its arguments, this rate is used."""
        if not hasattr(self.args, RATE):
            return super()._hp_search_setup(trial)
        before = getattr(self.args, RATE)
        setattr(self.args, RATE, math.nan)
        super()._hp_search_setup(trial)
        if math.isnan(getattr(self.args, RATE)):
            setattr(self.args, RATE, before)
        else:
            self.position_learning_rate = getattr(self.args, RATE)
            check_rate(self.position_learning_rate)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """As in `Trainer`, with the position tables and biases in separate parameter groups.

        The groups are made here, when the optimizer already has the parameters that will be trained: those of a sharded model, and in the
        same order when a run is resumed.

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


def _length(input_ids: Any) -> int:
    """The number of tokens of a text; of several, as for multiple choice, padding of the shorter ones included."""
    are_several = len(input_ids) and (isinstance(input_ids[0], Sequence) or getattr(input_ids[0], "ndim", 0))
    return len(input_ids) * max(map(len, input_ids)) if are_several else len(input_ids)


class _Epochs(TrainerCallback):
    """Tells a sampler the epoch. accelerate does not, where several processes skip the batches before a checkpoint."""

    def __init__(self, sampler: TokenBatchSampler):
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.sampler.set_epoch(int(state.epoch))
