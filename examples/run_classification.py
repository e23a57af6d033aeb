"""Fine-tune a BERT-family checkpoint with any position scheme to classify sentences or pairs of them, or to score them.

    python examples/run_classification.py --task_name cola --model_name_or_path google-bert/bert-base-uncased \\
        --position_scheme absolute+t5 --position_learning_rate 0.1 --do_train --do_eval --output_dir outputs/cola
    python examples/run_classification.py --train_file train.tsv --validation_file dev.tsv --test_file test.tsv \\
        --column_names source label mark sentence --metric matthews_correlation --model_name_or_path path/to/checkpoint \\
        --position_scheme deberta --do_train --do_eval --do_predict --output_dir outputs/deberta
    torchrun --nproc_per_node 2 examples/run_classification.py arguments.json

Data are a GLUE task by its name, another dataset (`--dataset_name`), or csv, tsv, json and jsonl files. All flags of
`TrainingArguments` and all `position_*` flags are accepted. The same command goes on with a run that was interrupted.
Predictions are written to predict_results.txt in the output folder.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Any, Literal

import numpy as np
from arguments import (
    ModelArguments,
    PositionArguments,
    TableArguments,
    fit_tokenizer,
    mistakes_in_one_line,
    parse_arguments,
    sequence_length,
)
from data_files import check_columns, check_single, limit_rows, load_splits, needed_splits, preprocess, read_table
from datasets import DatasetDict, load_dataset
from labels import Labels, check_labels, find_classes
from scipy.stats import rankdata
from training import (
    PositionTrainingArguments,
    Run,
    ScriptTrainer,
    evaluate_and_save,
    load_metric,
    predict_and_save,
)
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_posenc.files import write_whole


@dataclass
class GlueTask:
    """Columns of a task's text, and what it is measured by; where there is no metric, a number is predicted."""

    text_column: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)


GLUE = {
    "cola": GlueTask(("sentence",), ("matthews_correlation",)),
    "mnli": GlueTask(("premise", "hypothesis")),
    "mrpc": GlueTask(("sentence1", "sentence2"), ("accuracy", "f1")),
    "qnli": GlueTask(("question", "sentence")),
    "qqp": GlueTask(("question1", "question2"), ("accuracy", "f1")),
    "rte": GlueTask(("sentence1", "sentence2")),
    "sst2": GlueTask(("sentence",)),
    "stsb": GlueTask(("sentence1", "sentence2"), ()),
    "wnli": GlueTask(("sentence1", "sentence2")),
}
# Where no text columns are named: the first of these that the data have.
USUAL_COLUMNS = [*dict.fromkeys(task.text_column for task in GLUE.values() if len(task.text_column) == 2)]
USUAL_COLUMNS += [("sentence",), ("text",)]


@dataclass
class ClassificationArguments(TableArguments):
    """Which data, which of their columns, and what to measure."""

    task_name: str | None = field(
        default=None, metadata={"choices": [*GLUE], "help": "A GLUE task, read from the Hub."}
    )
    text_column: list[str] | None = field(
        default=None, metadata={"help": "Column of the text, or two columns of a pair. Default: the usual names."}
    )
    label_column: str = field(default="label", metadata={"help": "Column of the class, or of the number."})
    problem_type: Literal["single_label_classification", "regression"] = field(
        default="single_label_classification", metadata={"help": "Whether labels are classes or numbers."}
    )
    metric: list[str] | None = field(
        default=None,
        metadata={
            "choices": ["accuracy", "f1", "matthews_correlation"],
            "help": "What classes are measured by; of several, the mean chooses the best model. Default: accuracy, or "
            "the task's own.",
        },
    )

    def __post_init__(self):
        super().__post_init__()
        if self.text_column is not None and len(self.text_column) > 2:
            raise ValueError(f"text_column must name one column or two, got {', '.join(self.text_column)}")
        if self.task_name is not None:
            if self.files or self.dataset_name:
                raise ValueError("task_name names the data already: leave out files and dataset_name")
            task = GLUE[self.task_name]
            self.text_column, self.label_column = [*task.text_column], "label"
            self.problem_type = "single_label_classification" if task.metrics else "regression"
            self.metric = self.metric or [*task.metrics]
        if self.problem_type != "regression":
            self.metric = self.metric or ["accuracy"]
        elif self.metric:
            raise ValueError("metric is for classes; regression is measured by correlations and the squared error")

    @property
    def chosen_by(self) -> str:
        """The score that the best model has most of."""
        return self.metric[0] if self.metric and len(self.metric) == 1 else "combined_score"


class Numbers:
    """A number, for `--problem_type regression`; the interface is that of `labels.Labels`."""

    config_entries = {"num_labels": 1}

    def encode(self, value: Any) -> float:
        if not isfinite(number := float(value)):
            raise ValueError(f"{value} is no number")
        return number

    def decode(self, logits: np.ndarray) -> list[str]:
        return [f"{number:.3f}" for number in logits[:, 0]]


def load_data(arguments: ClassificationArguments, needed: list[str]) -> DatasetDict:
    """The splits that were named; of MNLI, `validation_mm` and `test_mm` are the mismatched ones.

    Raises:
        OSError: a file is missing.
        ValueError: a split or a column is missing, or a file cannot be understood.
    """
    if arguments.task_name is not None:
        glue = load_dataset("nyu-mll/glue", arguments.task_name)
        named = {split.replace("_mismatched", "_mm").replace("_matched", ""): rows for split, rows in glue.items()}
        splits = DatasetDict({split: rows for split, rows in named.items() if split.removesuffix("_mm") in needed})
        for split in {"test", "test_mm"} & splits.keys():
            splits[split] = splits[split].remove_columns("label")  # GLUE's are secret, and all -1
    else:
        read = partial(read_table, column_names=arguments.column_names, has_header=arguments.has_header)
        splits = load_splits(arguments, needed, read)
    if arguments.text_column is None:
        there = {*next(iter(splits.values())).column_names}
        arguments.text_column = [*next((usual for usual in USUAL_COLUMNS if there.issuperset(usual)), ("sentence",))]
    check_columns(splits, arguments.text_column, "--text_column")
    labelled = {split: splits[split] for split in splits if not split.startswith("test")}
    check_columns(labelled, [arguments.label_column], "--label_column")
    check_single(splits, [*arguments.text_column, arguments.label_column])
    return splits


def find_labels(
    splits: DatasetDict, arguments: ClassificationArguments, stored: PreTrainedConfig, is_trained: bool
) -> Labels:
    """What is predicted; ValueError if a split has labels that cannot be."""
    column = arguments.label_column
    labelled = {split: rows for split, rows in splits.items() if column in rows.column_names}
    seen = {split: {*rows.unique(column)} for split, rows in labelled.items()}
    if arguments.problem_type == "regression":
        check_labels(seen, numbers := Numbers(), "in regression, a label is a number")
        return numbers
    feature = next((rows.features[column] for rows in labelled.values()), None)
    return find_classes(seen, feature, stored, is_trained)


def tokenize(
    rows: dict[str, list],
    text_column: list[str],
    label_column: str,
    tokenizer: PreTrainedTokenizerBase,
    labels: Labels,
    length: int,
) -> dict[str, list]:
    """Token ids of texts or pairs, cut to `length` tokens, with labels where there are some; for `Dataset.map`."""
    texts = [[str(text) for text in rows[column]] for column in text_column]
    encoded = {**tokenizer(*texts, truncation=True, max_length=length)}
    if label_column in rows:
        encoded["labels"] = [labels.encode(value) for value in rows[label_column]]
    return encoded


def measure_classes(names: list[str], num_labels: int) -> Callable[[EvalPrediction], dict[str, float]]:
    """Metrics of examples/metrics by their names; F1 is that of class 1 of two, or the mean over more.

    They are NaN where a logit is NaN or infinite.
    """
    metrics = {name: load_metric(name) for name in names}
    options = {"f1": {"average": "binary" if num_labels == 2 else "macro"}}

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        predicted = prediction.predictions.argmax(-1)
        scores = {}
        for name, metric in metrics.items():
            scores |= metric.compute(predictions=predicted, references=prediction.label_ids, **options.get(name, {}))
        if not np.isfinite(prediction.predictions).all():
            scores = dict.fromkeys(scores, nan)
        return with_mean(scores)

    return compute


def measure_numbers(prediction: EvalPrediction) -> dict[str, float]:
    """Correlations of the numbers and of their ranks, and the mean squared error."""
    predicted, true = prediction.predictions[:, 0], prediction.label_ids
    scores = {
        "pearson": correlation(predicted, true),
        "spearmanr": correlation(rankdata(predicted), rankdata(true)),
    }
    return {**with_mean(scores), "mse": float(((predicted - true) ** 2).mean())}


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's correlation, 0 where one of the two does not vary, and NaN where a number is."""
    first, second = first - first.mean(dtype=np.float64), second - second.mean(dtype=np.float64)
    norm = np.sqrt((first @ first) * (second @ second))
    return 0.0 if norm == 0 else float(first @ second / norm)


def with_mean(scores: dict[str, float]) -> dict[str, float]:
    """Scores, and their mean if they are several."""
    return {**scores, "combined_score": sum(scores.values()) / len(scores)} if len(scores) > 1 else scores


def main() -> None:
    with mistakes_in_one_line():
        arguments, checkpoint, positions, training = parse_arguments(
            ClassificationArguments, ModelArguments, PositionArguments, PositionTrainingArguments
        )
        splits = load_data(arguments, needed_splits(training))
        labels = find_labels(splits, arguments, checkpoint.load_config(positions), training.do_train)
        config = checkpoint.load_config(positions, problem_type=arguments.problem_type, **labels.config_entries)
        length = sequence_length(arguments.max_seq_length, 128, config)
        training.choose_best_by(arguments.chosen_by)
        run = Run(training, config, checkpoint, arguments)
        tokenizer = checkpoint.load_tokenizer()
        fit_tokenizer(tokenizer, length, config)
        set_seed(training.seed)
        model = checkpoint.load_model(AutoModelForSequenceClassification, config, run.finished_model)

    data = preprocess(
        limit_rows(splits, arguments),
        tokenize,
        arguments,
        training,
        text_column=arguments.text_column,
        label_column=arguments.label_column,
        tokenizer=tokenizer,
        labels=labels,
        length=length,
    )
    trainer = ScriptTrainer(
        model=model,
        args=training,
        train_dataset=data.get("train"),
        eval_dataset=data.get("validation"),
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=training.pad_to_multiple_of),
        processing_class=tokenizer,
        compute_metrics=measure_classes(arguments.metric, config.num_labels) if arguments.metric else measure_numbers,
    )
    if training.do_train:
        run.train(trainer)
    for suffix in ("", "_mm"):
        if training.do_eval and f"validation{suffix}" in data:
            evaluate_and_save(trainer, data[f"validation{suffix}"], f"eval{suffix}")
        if training.do_predict and f"test{suffix}" in data:
            logits = predict_and_save(trainer, data[f"test{suffix}"], f"predict{suffix}").predictions
            if trainer.is_world_process_zero():
                write_predictions(Path(training.output_dir) / f"predict{suffix}_results.txt", labels.decode(logits))


def write_predictions(file: Path, predictions: list[str]) -> None:
    """A line for each example, of its number from 0 and what is predicted."""
    lines = ["index\tprediction", *(f"{index}\t{prediction}" for index, prediction in enumerate(predictions))]
    write_whole({file: "\n".join(lines) + "\n"})


if __name__ == "__main__":
    main()
