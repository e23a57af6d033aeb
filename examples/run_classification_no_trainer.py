"""Classify sentences or pairs of them as run_classification.py does, with a training loop of our own on bare accelerate.

    python examples/run_classification_no_trainer.py --task_name mrpc --model_name_or_path google-bert/bert-base-uncased \\
        --position_scheme absolute+t5 --position_learning_rate 0.1 --output_dir outputs/mrpc
    accelerate launch --config_file examples/accelerate_ddp_cpu.yaml examples/run_classification_no_trainer.py --cpu \\
        --train_file train.csv --validation_file dev.csv --model_name_or_path path/to/checkpoint --output_dir outputs/two

The loop is short on purpose: copy it and change it. The same command goes on with a run that was interrupted, wherever
that was, and comes to the same numbers: a checkpoint is written under another name and renamed when it is complete, and the
dropout of a step depends on the seed, the step and the process alone.
"""

import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from arguments import (
    ModelArguments,
    PositionArguments,
    cut_nothing_by_itself,
    fit_tokenizer,
    mistakes_in_one_line,
    parse_arguments,
    sequence_length,
)
from data_files import limit_rows, mapped
from datasets import Dataset
from records import check_writable, same_settings, write_json
from run_classification import (
    ClassificationArguments,
    find_labels,
    load_data,
    measure_classes,
    measure_numbers,
    tokenize,
)
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from training import settings_of
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
)

from hf_posenc.training import check_rate, move_to_own_groups, tables_and_biases, warn_of_tables_that_stay


@dataclass
class LoopArguments:
    """How to train, and where to write."""

    output_dir: str = field(metadata={"help": "Folder of the run: its checkpoints, the best model, the metrics."})
    num_train_epochs: int = field(default=3, metadata={"help": "Passes through the training data."})
    max_train_steps: int | None = field(default=None, metadata={"help": "Steps to train, instead of epochs."})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Examples of a process in a step."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Examples of a process in evaluation."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Batches that make a step."})
    learning_rate: float = field(default=5e-5, metadata={"help": "Learning rate after warming up."})
    position_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of tables and biases that position schemes add. Default: that of all others."
        },
    )
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of matrices."})
    warmup_share: float = field(default=0.1, metadata={"help": "Share of the steps in which the rate grows from 0."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are clipped to this norm."})
    checkpointing_steps: int | None = field(
        default=None, metadata={"help": "Steps between checkpoints. Default: one after each epoch."}
    )
    seed: int = field(default=42, metadata={"help": "Of the order of the data, new weights and dropout."})
    mixed_precision: Literal["no", "fp16", "bf16"] = field(default="no", metadata={"help": "As accelerate has it."})
    cpu: bool = field(default=False, metadata={"help": "Train on the CPU even where there is an accelerator."})
    report_to: str | None = field(
        default=None, metadata={"help": "A tracker that accelerate knows: tensorboard, wandb, mlflow, ... or all."}
    )

    def __post_init__(self):
        check_writable(self.output_dir)
        whole = ("num_train_epochs", "max_train_steps", "per_device_train_batch_size", "gradient_accumulation_steps")
        for name in whole:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "position_learning_rate", "weight_decay", "warmup_share"):
            check_rate(getattr(self, name), name)
        if self.warmup_share > 1:
            raise ValueError(f"warmup_share must be at most 1, got {self.warmup_share}")


@dataclass
class Progress:
    """How far a run has come; accelerate saves it with its checkpoints.

    Attributes:
        step: optimizer steps so far, and `losses`, the loss of each.
        best: the highest score of an epoch so far, and `best_epoch`, the number of that epoch.
        scores: of each epoch, every metric.
    """

    step: int = 0
    losses: list[float] = field(default_factory=list)
    best: float = -math.inf
    best_epoch: int | None = None
    scores: list[dict[str, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def make_optimizer(model: PreTrainedModel, loop: LoopArguments) -> torch.optim.Optimizer:
    """AdamW: weight decay for matrices, and a separate learning rate for position embedding matrices and biases."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": loop.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=loop.learning_rate)
    if loop.position_learning_rate is not None:
        move_to_own_groups(optimizer, tables_and_biases(model), loop.position_learning_rate)
    return optimizer


class Checkpoints:
    """The checkpoints of a run: at most one, the newest, and it is whole."""

    def __init__(self, accelerator: Accelerator, folder: Path):
        self.accelerator = accelerator
        self.newest = folder / "checkpoint"
        self.unfinished = folder / "checkpoint.unfinished"

    def save(self) -> None:
        """Write a checkpoint next to the last one, which it replaces when every process has written its part."""
        self.accelerator.save_state(str(self.unfinished))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            # A kill between these two leaves the new one, finished, under the other name: `load` knows.
            (self.unfinished / "whole").touch()
            shutil.rmtree(self.newest, ignore_errors=True)
            self.unfinished.rename(self.newest)
        self.accelerator.wait_for_everyone()

    def load(self) -> bool:
        """Go back to the newest checkpoint, if there is one."""
        if self.accelerator.is_main_process:
            if (self.unfinished / "whole").exists():
                shutil.rmtree(self.newest, ignore_errors=True)
                self.unfinished.rename(self.newest)
            elif self.unfinished.exists():
                self.accelerator.print(f"warning: {self.unfinished} was not finished; it is passed over")
                shutil.rmtree(self.unfinished)
        self.accelerator.wait_for_everyone()
        if not self.newest.exists():
            return False
        self.accelerator.print(f"going on from {self.newest}")
        self.accelerator.load_state(str(self.newest))
        return True


def make_loaders(
    data: dict[str, Dataset], tokenizer: PreTrainedTokenizerBase, loop: LoopArguments
) -> tuple[DataLoader, DataLoader]:
    """Loaders of the training data, shuffled, and of the validation data."""
    collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if loop.mixed_precision != "no" else None)
    return (
        DataLoader(data["train"], loop.per_device_train_batch_size, shuffle=True, collate_fn=collate),
        DataLoader(data["validation"], loop.per_device_eval_batch_size, collate_fn=collate),
    )


class Loop:
    """Training and evaluation: everything that accelerate has prepared, and what the run has come to."""

    def __init__(self, model, loaders, compute_metrics, chosen_by: str, accelerator: Accelerator, loop: LoopArguments):
        self.accelerator, self.loop = accelerator, loop
        self.compute_metrics, self.chosen_by = compute_metrics, chosen_by
        self.folder = Path(loop.output_dir)
        optimizer = make_optimizer(model, loop)
        self.model, self.optimizer, self.train_loader, self.eval_loader = accelerator.prepare(
            model, optimizer, *loaders
        )
        self.steps_per_epoch = math.ceil(len(self.train_loader) / loop.gradient_accumulation_steps)
        self.steps = loop.max_train_steps or self.steps_per_epoch * loop.num_train_epochs
        self.epochs = math.ceil(self.steps / self.steps_per_epoch)
        if loop.position_learning_rate is None and accelerator.is_main_process:
            warn_of_tables_that_stay(model, optimizer, loop.learning_rate, self.steps)
        # Not prepared: accelerate would let it step once for every process.
        self.scheduler = get_linear_schedule_with_warmup(optimizer, round(loop.warmup_share * self.steps), self.steps)
        self.progress = Progress()
        accelerator.register_for_checkpointing(self.progress, self.scheduler)
        self.checkpoints = Checkpoints(accelerator, self.folder)

    def run(self) -> dict[str, float]:
        """Train to the end, from where the last checkpoint left off; the metrics of the best epoch."""
        self.checkpoints.load()
        bar = tqdm(
            total=self.steps,
            initial=self.progress.step,
            disable=not self.accelerator.is_local_main_process,
        )
        for epoch in range(len(self.progress.scores), self.epochs):
            for loss in self.train_epoch(epoch):
                bar.update()
                rate = self.scheduler.get_last_lr()[0]
                self.accelerator.log({"train_loss": loss, "learning_rate": rate}, step=self.progress.step)
            self.finish_epoch(epoch)
        bar.close()
        if self.progress.best_epoch is None:
            sys.exit(
                f"error: {self.chosen_by} was no finite number after any epoch, and no model was saved: lower the learning rate"
            )
        return self.progress.scores[self.progress.best_epoch]

    def train_epoch(self, epoch: int) -> Iterator[float]:
        """One pass through the data, or the rest of it; yields the loss of each step, averaged over the processes.

        The last one ends with the last step.
        """
        self.model.train()
        done = (self.progress.step - epoch * self.steps_per_epoch) * self.loop.gradient_accumulation_steps
        loader = self.accelerator.skip_first_batches(self.train_loader, done)
        loader.set_epoch(epoch)  # the order of the data
        losses = []
        for index, batch in enumerate(loader, start=done):
            self.seed_batch(epoch, index)
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                losses.append(loss.detach())
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.loop.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                if not self.accelerator.optimizer_step_was_skipped:
                    self.scheduler.step()
                self.progress.step += 1
                self.progress.losses.append(self.accelerator.gather(torch.stack(losses)).mean().item())
                losses = []
                yield self.progress.losses[-1]
                if self.progress.step == self.steps:
                    return
                every = self.loop.checkpointing_steps
                if every and self.progress.step % every == 0 and self.progress.step % self.steps_per_epoch:
                    self.checkpoints.save()

    def seed_batch(self, epoch: int, index: int) -> None:
        """Seed the dropout of a batch, so that it is the same whether or not the run was interrupted before it."""
        set_seed(hash((self.loop.seed, epoch, index, self.accelerator.process_index)) % 2**32)

    def finish_epoch(self, epoch: int) -> None:
        """Evaluate, keep the model if it is the best so far, and write a checkpoint."""
        scores = self.evaluate()
        self.accelerator.print(f"epoch {epoch + 1}: " + ", ".join(f"{name} {x:.4f}" for name, x in scores.items()))
        self.accelerator.log({f"eval_{name}": score for name, score in scores.items()}, step=self.progress.step)
        self.progress.scores.append(scores)
        if scores[self.chosen_by] > self.progress.best:
            self.progress.best, self.progress.best_epoch = scores[self.chosen_by], epoch
            self.save_model()
        self.checkpoints.save()

    def save_model(self) -> None:
        """The model as `from_pretrained` loads it, in the run's folder."""
        self.accelerator.wait_for_everyone()
        self.accelerator.unwrap_model(self.model).save_pretrained(
            self.folder,
            is_main_process=self.accelerator.is_main_process,
            save_function=self.accelerator.save,
            state_dict=self.accelerator.get_state_dict(self.model),
        )

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The metrics on the validation data, gathered from all processes."""
        self.model.eval()
        logits, labels = [], []
        for batch in self.eval_loader:
            output = self.model(**batch).logits
            gathered = self.accelerator.gather_for_metrics((output.float(), batch["labels"]))
            logits.append(gathered[0].cpu())
            labels.append(gathered[1].cpu())
        return self.compute_metrics(EvalPrediction(torch.cat(logits).numpy(), torch.cat(labels).numpy()))


def main() -> None:
    with mistakes_in_one_line():
        arguments, checkpoint, positions, loop = parse_arguments(
            ClassificationArguments, ModelArguments, PositionArguments, LoopArguments
        )
        if arguments.test_file is not None or arguments.max_predict_samples is not None:
            raise ValueError("nothing is predicted here: leave out test_file and max_predict_samples")
        accelerator = Accelerator(
            cpu=loop.cpu,
            mixed_precision=loop.mixed_precision,
            gradient_accumulation_steps=loop.gradient_accumulation_steps,
            log_with=loop.report_to,
            project_dir=loop.output_dir,
            # The order of the data depends on the seed and the epoch, not on how many processes there are.
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=loop.seed),
        )
        splits = load_data(arguments, ["train", "validation"])
        labels = find_labels(splits, arguments, checkpoint.load_config(positions), is_trained=True)
        config = checkpoint.load_config(positions, problem_type=arguments.problem_type, **labels.config_entries)
        length = sequence_length(arguments.max_seq_length, 128, config)
        settings = settings_of(config, checkpoint, arguments, loop, processes=accelerator.num_processes)
        record = Path(loop.output_dir) / "run_settings.json"
        same_settings(record, settings)
        tokenizer = checkpoint.load_tokenizer()
        fit_tokenizer(tokenizer, length, config)
        set_seed(loop.seed)
        model = checkpoint.load_model(AutoModelForSequenceClassification, config)

    options = {"text_column": arguments.text_column, "label_column": arguments.label_column}
    options |= {"tokenizer": tokenizer, "labels": labels, "length": length}
    with accelerator.main_process_first():
        data = mapped(limit_rows(splits, arguments), tokenize, arguments, **options)
    compute_metrics = measure_classes(arguments.metric, config.num_labels) if arguments.metric else measure_numbers
    if accelerator.is_main_process:
        write_json(record, settings)
        cut_nothing_by_itself(tokenizer)
        tokenizer.save_pretrained(loop.output_dir)
    if loop.report_to:
        accelerator.init_trackers(Path(loop.output_dir).name)
    loaders = make_loaders(data, tokenizer, loop)
    run = Loop(model, loaders, compute_metrics, arguments.chosen_by, accelerator, loop)
    best = run.run()
    if accelerator.is_main_process:
        write_json(Path(loop.output_dir) / "history.json", run.progress.state_dict())
        write_json(Path(loop.output_dir) / "all_results.json", {f"eval_{name}": score for name, score in best.items()})
        print(json.dumps(best))
    # The group of processes ends last: a wrapped model that outlives it would wait, with Python's lock, for a thread that needs the lock.
    del model, run
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
