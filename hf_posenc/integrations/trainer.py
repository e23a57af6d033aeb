"""Any Trainer: one that resumes a run reads the tables in its checkpoint as the config saved with them says.

And one that trains zero-initialized tables at the rate of all other parameters logs a warning.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME

from ..modeling.kernels.packing import loss_reads_padding, padding_is_read
from ..modeling.models.configuration_posenc import reads_buckets, table_version
from ..modeling.models.modeling_posenc import PosencPreTrainedModel, read_table_as
from ..modeling.stock_interface import ModelInputs
from ..training.learning_rates import warn_of_tables_that_stay
from ..variants import CONFIGS
from .changes import AtImport, Changes, hook_method


TRAINER = "transformers.trainer"
CAUSAL_MODELS = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


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


def _compute_loss(original: Callable, trainer: Any, model: Any, inputs: Mapping[str, Any], *args, **kwargs) -> Any:
    """`Trainer.compute_loss`: where it computes the loss itself, the model does not see labels, which may stand at padding."""
    computes = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    if not computes or not loss_reads_padding(
        ModelInputs({**inputs}, inputs.get("attention_mask")), is_requested=True
    ):
        return original(model, inputs, *args, **kwargs)
    token = padding_is_read.set(True)
    try:
        return original(model, inputs, *args, **kwargs)
    finally:
        padding_is_read.reset(token)


def _names_of_causal_models(names: Mapping[str, str]) -> dict[str, str]:
    """By the classes that are named here, `Trainer` knows that label smoothing has to shift labels."""
    auto = "AutoModelForCausalLM"
    own = {one.model_type: one.auto_classes[auto] for one in CONFIGS if auto in one.auto_classes}
    return {**names, **own}


def _hook(changes: Changes) -> None:
    trainer = sys.modules[TRAINER]
    changes.set_attribute(trainer, CAUSAL_MODELS, _names_of_causal_models(getattr(trainer, CAUSAL_MODELS)))
    hook_method(changes, sys.modules[TRAINER].Trainer, "_load_from_checkpoint", _load_from_checkpoint)
    hook_method(changes, sys.modules[TRAINER].Trainer, "create_scheduler", _create_scheduler)
    hook_method(changes, sys.modules[TRAINER].Trainer, "compute_loss", _compute_loss)


def install(changes: Changes) -> None:
    """Hook the Trainer, which takes seconds to import, now or when it is imported."""
    if TRAINER in sys.modules:
        _hook(changes)
    else:
        AtImport(TRAINER, lambda: _hook(changes)).wait(changes)
