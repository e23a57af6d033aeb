"""Any Trainer: one that resumes a run reads the tables in its checkpoint as the config saved with them says.

And one that trains zero-initialized tables at the rate of all other parameters logs a warning.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME

from ..modeling.models.configuration_posenc import reads_buckets, table_version
from ..modeling.models.modeling_posenc import PosencPreTrainedModel, read_table_as
from ..training.learning_rates import warn_of_tables_that_stay
from .changes import AtImport, Changes, hook_method


TRAINER = "transformers.trainer"


def _load_from_checkpoint(original: Callable, trainer: Any, resume_from_checkpoint: str, model: Any = None) -> None:
    """`Trainer._load_from_checkpoint`: a run that began with 0.3.0 or earlier goes on as it was (see [`Deberta`])."""
    original(resume_from_checkpoint, model)
    config = Path(resume_from_checkpoint, CONFIG_NAME)
    entries = PreTrainedConfig._dict_from_json_file(config) if config.is_file() else {}
    if not reads_buckets(entries):
        return
    for part in (trainer.model if model is None else model).modules():
        if isinstance(part, PosencPreTrainedModel) and part.base_model is part:
            read_table_as(part, table_version(entries))


def _create_scheduler(original: Callable, trainer: Any, num_training_steps: int, optimizer: Any = None) -> Any:
    """`Trainer.create_scheduler`: here the optimizer is as it will train, and the number of steps is known."""
    if trainer.is_world_process_zero() and getattr(trainer, "position_learning_rate", None) is None:
        used = trainer.optimizer if optimizer is None else optimizer
        warn_of_tables_that_stay(trainer.model, used, trainer.args.learning_rate, num_training_steps)
    return original(num_training_steps, optimizer)


def _hook(changes: Changes) -> None:
    hook_method(changes, sys.modules[TRAINER].Trainer, "_load_from_checkpoint", _load_from_checkpoint)
    hook_method(changes, sys.modules[TRAINER].Trainer, "create_scheduler", _create_scheduler)


def install(changes: Changes) -> None:
    """Hook the Trainer, which takes seconds to import, now or when it is imported."""
    if TRAINER in sys.modules:
        _hook(changes)
    else:
        AtImport(TRAINER, lambda: _hook(changes)).wait(changes)
