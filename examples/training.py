"""What the scripts do with a `Trainer`: learning rates for positions, the best model, and runs that survive a kill.

A run lives in its `--output_dir`. The command that started it goes on with it after any interruption, from the newest
checkpoint that is whole, to the same model. Another command in the same folder is an error.
"""

import atexit
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, ClassVar

import evaluate
import torch
from arguments import DataArguments, ModelArguments, cut_nothing_by_itself
from checkpoints import STATE, check_checkpoint, is_checkpoint, newest_whole_checkpoint, read_json
from datasets import Dataset
from records import check_writable, differences, write_json
from torch import distributed
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, Trainer, TrainerCallback, TrainerState, TrainingArguments

from hf_posenc.modeling.models.configuration_posenc import FLAGS
from hf_posenc.modeling.schemes.table import Source, sources_of
from hf_posenc.training import PositionTrainer, check_rate


METRICS = Path(__file__).with_name("metrics")
# How the names of metrics end that are the better the lower they are; transformers knows of losses only.
LOWER_IS_BETTER = ("loss", "mse", "perplexity")


@atexit.register
def end_process_group() -> None:
    """Leave the group of processes before Python ends: gloo's threads abort a process that ends within it, now and then."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@dataclass
class PositionTrainingArguments(TrainingArguments):
    """`TrainingArguments` with a learning rate for positions, and with defaults that keep the best model.

    Where there is something to evaluate on, evaluation follows saving and saving follows evaluation, whichever was
    asked for; by default both happen every epoch, or every `save_steps` if `max_steps` says how long to train.
    """

    _argument_group_name: ClassVar[str] = "training"

    position_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of tables and biases that position schemes add. Default: that of all others."
        },
    )
    eval_strategy: str | None = field(
        default=None, metadata={"help": "no, steps or epoch. Default: as save_strategy with --do_train --do_eval."}
    )
    save_strategy: str | None = field(
        default=None, metadata={"help": "no, steps, epoch or best. Default: as eval_strategy, or epoch."}
    )
    load_best_model_at_end: bool | None = field(
        default=None, metadata={"help": "Keep the checkpoint that evaluates best. Default: where that can be known."}
    )
    save_total_limit: int | None = field(
        default=2, metadata={"help": "Checkpoints to keep; the best and the newest are never deleted."}
    )
    # Asked for where there is nothing to pin it for, it is a warning.
    dataloader_pin_memory: bool = field(
        default=torch.accelerator.is_available(), metadata={"help": "Pin memory in data loaders."}
    )

    def __post_init__(self):
        check_rate(self.position_learning_rate)
        if self.prediction_loss_only or self.batch_eval_metrics or not self.eval_do_concat_batches:
            raise ValueError(
                "metrics are computed of all predictions together: leave out prediction_loss_only, batch_eval_metrics and "
                "eval_do_concat_batches"
            )
        if self.save_strategy is None:
            self._save_after_evaluation()
        if self.eval_strategy is None:
            self._evaluate_before_saving()
        if self.load_best_model_at_end is None:
            self.load_best_model_at_end = self.eval_strategy != "no" and self.save_strategy in (
                self.eval_strategy,
                "best",
            )
        self._best_is_asked_for = self.metric_for_best_model is not None
        self._greater_is_asked_for = self.greater_is_better is not None
        super().__post_init__()
        check_writable(self.output_dir)

    def _save_after_evaluation(self) -> None:
        if self.eval_strategy in (None, "no"):
            self.save_strategy = "steps" if self.max_steps > 0 else "epoch"
        else:
            self.save_strategy = self.eval_strategy
            self.save_steps = self.eval_steps or self.save_steps

    def _evaluate_before_saving(self) -> None:
        if not (self.do_train and self.do_eval) or self.save_strategy == "no":
            self.eval_strategy = "no"
        else:
            self.eval_strategy = "epoch" if self.save_strategy == "best" else self.save_strategy
            self.eval_steps = self.eval_steps or self.save_steps

    @property
    def pad_to_multiple_of(self) -> int | None:
        """What collators pad to a multiple of: half precision is for tensor cores, and these take tokens by eights."""
        return 8 if self.fp16 or self.bf16 else None

    def choose_best_by(self, metric: str) -> None:
        """Choose the best checkpoint by a metric, unless another was asked for."""
        if not self._best_is_asked_for:
            self.metric_for_best_model = metric
        if not self._greater_is_asked_for:
            self.greater_is_better = not self.metric_for_best_model.endswith(LOWER_IS_BETTER)


class ScriptTrainer(PositionTrainer):
    """[`PositionTrainer`] that finds the best checkpoint of a folder that was moved, and saves tokenizers without a state.

    It evaluates and predicts all rows in their order: predictions are written by the numbers of rows.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.add_callback(FindBestAgain())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """As in `Trainer`, of all rows in their order."""
        with all_rows_in_order(self.args):
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """As in `Trainer`, of all rows in their order."""
        with all_rows_in_order(self.args):
            return super().get_test_dataloader(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As in `Trainer`; a tokenizer's own file, saved with the model, cuts and pads nothing by itself."""
        if self.processing_class is not None:
            cut_nothing_by_itself(self.processing_class)
        super().save_model(*args, **kwargs)


@contextmanager
def all_rows_in_order(training: TrainingArguments) -> Iterator[None]:
    """Without what `Trainer` does to other data as to those of training: it groups rows by length, and drops the last batch."""
    asked_for = training.train_sampling_strategy, training.dataloader_drop_last
    training.train_sampling_strategy, training.dataloader_drop_last = "random", False
    try:
        yield
    finally:
        training.train_sampling_strategy, training.dataloader_drop_last = asked_for


class FindBestAgain(TrainerCallback):
    """Finds the best checkpoint of an output folder that was moved or copied: Trainer's state holds its old path."""

    def on_train_begin(self, args, state, control, **kwargs):
        best = Path(args.output_dir) / f"checkpoint-{state.best_global_step}"
        if best.is_dir():
            state.best_model_checkpoint = str(best)


# What neither changes the model that comes out nor which checkpoint is the best: it may differ when a run goes on.
UNRECORDED = (
    {
        "output_dir",
        "do_train",
        "do_eval",
        "do_predict",
        "resume_from_checkpoint",
        "save_total_limit",
        "save_on_each_node",
    }
    | {"log_level", "log_level_replica", "log_on_each_node", "logging_first_step", "logging_nan_inf_filter"}
    | {"logging_steps", "logging_strategy", "report_to", "run_name", "project", "disable_tqdm", "debug"}
    | {
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
    }
    | {"dataloader_in_order", "dataloader_multiprocessing_context", "per_device_eval_batch_size"}
    | {"eval_accumulation_steps", "eval_use_gather_object"}
    | {"include_for_metrics", "include_num_input_tokens_seen", "skip_memory_metrics", "torch_empty_cache_steps"}
    | {"push_to_hub", "local_rank", "ddp_backend", "ddp_timeout", "enable_jit_checkpoint"}
    | {"test_file", "max_predict_samples", "preprocessing_num_workers", "cache_dir", "trust_remote_code"}
)
UNRECORDED_PREFIXES = ("hub_", "trackio_")
# What a run starts from: config, weights, tokenizer and code. Not: cards, reports and earlier checkpoints.
OF_A_MODEL = (
    "config.json",
    "*.safetensors",
    "pytorch_model*.bin",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.py",
)


class Run:
    """A training in its output folder: the settings that it was started with, and how far it has come.

    Args:
        training: what `Trainer` is given; `output_dir` is the run's folder.
        config: the model's config, with its position flags.
        others: the dataclasses of all other settings that the result depends on.

    Raises:
        OSError: the record cannot be read.
        ValueError: the folder holds a run with other settings, or one that recorded none; or the checkpoint to resume
            from, where one was named, is not whole.
    """

    def __init__(self, training: PositionTrainingArguments, config: PreTrainedConfig, *others: Any):
        self.training = training
        self.folder = Path(training.output_dir)
        self.record = self.folder / "run_settings.json"
        self.finished = False
        if training.do_train:
            self.settings = recorded_settings(training, config, *others)
            self.finished = self._compare() and training.resume_from_checkpoint is None
            # The main process renames what is broken before the others look.
            with training.main_process_first(local=False, desc="looking for a checkpoint"):
                self.checkpoint = None if self.finished else self._checkpoint()

    def _compare(self) -> bool:
        """Whether the run is finished; ValueError where the folder holds another one."""
        if not self.record.exists():
            if self.training.resume_from_checkpoint is None and any(
                map(is_checkpoint, self.folder.glob("checkpoint-*"))
            ):
                raise ValueError(
                    f"{self.folder} holds checkpoints but no {self.record.name}, so what they were trained with is "
                    "unknown: name one with --resume_from_checkpoint, or another --output_dir"
                )
            return False
        recorded = read_json(self.record)
        known = recorded["settings"].keys() & self.settings.keys()
        there, here = (
            {name: each[name] for name in self.settings if name in known}
            for each in (recorded["settings"], self.settings)
        )
        if differ := differences(there, here):
            raise ValueError(
                f"{self.folder} holds a run with other settings ({'; '.join(differ)}): name another --output_dir, or "
                "delete that one"
            )
        return recorded["finished"]

    def _checkpoint(self) -> str | None:
        named = self.training.resume_from_checkpoint
        if named is None or str(named).lower() == "true":
            found = newest_whole_checkpoint(self.folder, self.training.world_size)
            return None if found is None else str(found)
        try:
            check_checkpoint(Path(named), self.training.world_size)
        except ValueError as error:
            raise ValueError(f"--resume_from_checkpoint {named}: {error}") from error
        return named

    @property
    def finished_model(self) -> str | None:
        """Where the trained model is, if the run is finished."""
        return str(self.folder) if self.finished else None

    def train(self, trainer: Trainer) -> None:
        """Train, go on training, or nothing if the run is finished; save the model, its tokenizer and the metrics.

        Metrics of time and loss (`train_...`) are of what was trained in this call.
        """
        if self.finished:
            self._say(f"{self.folder} holds this run, finished: nothing to train")
            trainer.state = TrainerState.load_from_json(str(self.folder / STATE))
            return
        self._write(finished=False)
        if self.checkpoint is not None:
            self._say(f"going on from {self.checkpoint}")
        metrics = trainer.train(resume_from_checkpoint=self.checkpoint).metrics
        trainer.save_model()
        trainer.save_state()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.accelerator.wait_for_everyone()
        self._write(finished=True)

    def _write(self, finished: bool) -> None:
        """Record the settings, all or nothing: a kill between two bytes leaves what was there before."""
        if self.training.should_save:
            write_json(self.record, {"settings": self.settings, "finished": finished})

    def _say(self, line: str) -> None:
        if self.training.should_log:
            print(line, flush=True)


def recorded_settings(training: TrainingArguments, config: PreTrainedConfig, *others: Any) -> dict[str, Any]:
    """Everything that the result of a run on `Trainer` depends on, as [`settings_of`] has it."""
    names = {entry.name for entry in fields(training)}
    own = {name: value for name, value in training.to_dict().items() if name in names}
    return settings_of(config, *others, processes=training.world_size * max(1, training.n_gpu), **own)


def settings_of(config: PreTrainedConfig, *dataclasses: Any, **others: Any) -> dict[str, Any]:
    """Everything that a result depends on, as JSON has it: files by what is in them, flags as the model has them."""
    settings: dict[str, Any] = {"script": Path(sys.argv[0]).name}
    for name, source in sources_of(config.schemes).items():
        settings[f"file of {name}"] = describe_scheme(source)
    for arguments in dataclasses:
        settings |= asdict(arguments)
        if isinstance(arguments, DataArguments):
            settings |= {f"{split}_file": describe_file(file) for split, file in arguments.files.items()}
            settings |= describe_folder("what is in dataset_name", arguments.dataset_name)
        if isinstance(arguments, ModelArguments):
            settings |= describe_folder("what is in model_name_or_path", arguments.model_name_or_path, OF_A_MODEL)
            settings |= describe_folder("what is in tokenizer_name", arguments.tokenizer_name, OF_A_MODEL)
    settings |= {**others, **{flag: getattr(config, flag) for flag in FLAGS}}
    kept = {
        name: value
        for name, value in settings.items()
        if name not in UNRECORDED and not name.startswith(UNRECORDED_PREFIXES)
    }
    return json.loads(json.dumps(kept, default=str))


def describe_file(file: str | Path) -> str:
    """A file by its name and what is in it."""
    with open(file, "rb") as opened:
        return f"{Path(file).name}, SHA-256 {file_digest(opened, 'sha256').hexdigest()[:16]}"


def describe_folder(name: str, folder: str | None, patterns: tuple[str, ...] = ("**/*",)) -> dict[str, str]:
    """An entry for the files of a local folder, by their names and what is in them; nothing for what is no folder."""
    if folder is None or not Path(folder).is_dir():
        return {}
    digest = sha256()
    for file in sorted({file for pattern in patterns for file in Path(folder).glob(pattern) if file.is_file()}):
        digest.update(f"{file.relative_to(folder)}: {describe_file(file)}\n".encode())
    return {name: f"SHA-256 {digest.hexdigest()[:16]}"}


def describe_scheme(source: Source) -> str:
    """The file of a registered scheme, as [`describe_file`] describes files."""
    return f"{source.module}.py, SHA-256 {sha256(source.text.encode()).hexdigest()[:16]}"


def evaluate_and_save(trainer: Trainer, rows: Dataset, prefix: str = "eval") -> None:
    """Evaluate, and write the metrics to `<prefix>_results.json` and all_results.json."""
    log_and_save(trainer, rows, prefix, trainer.evaluate(eval_dataset=rows, metric_key_prefix=prefix))


def predict_and_save(trainer: Trainer, rows: Dataset, prefix: str = "predict") -> Any:
    """What the model predicts, as `Trainer.predict` returns it; metrics are written as by [`evaluate_and_save`]."""
    output = trainer.predict(rows, metric_key_prefix=prefix)
    log_and_save(trainer, rows, prefix, output.metrics)
    return output


def log_and_save(trainer: Trainer, rows: Dataset, prefix: str, metrics: dict[str, float]) -> None:
    """Metrics of some rows, and how many these are, in the log and in the files of [`evaluate_and_save`]."""
    metrics = {**metrics, f"{prefix}_samples": len(rows)}
    trainer.log_metrics(prefix, metrics)
    trainer.save_metrics(prefix, metrics)


def load_metric(name: str) -> evaluate.Metric:
    """One of the metrics next to the scripts; each process computes it for itself, in memory."""
    return evaluate.load(str(METRICS / name), keep_in_memory=True)
