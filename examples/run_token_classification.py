"""Fine-tune a BERT-family checkpoint with any position scheme to tag words: names, chunks, parts of speech.

    python examples/run_token_classification.py --model_name_or_path google-bert/bert-base-cased --position_scheme deberta \\
        --train_file train.conll --validation_file dev.conll --test_file test.conll \\
        --do_train --do_eval --do_predict --output_dir outputs/ner
    python examples/run_token_classification.py --model_name_or_path google-bert/bert-base-cased \\
        --dataset_name path/or/name --label_column pos_tags --metric accuracy --do_train --do_eval --output_dir outputs/pos

    {"tokens": ["Anna", "lives", "in", "Rome", "."], "ner_tags": ["B-PER", "O", "O", "B-LOC", "O"]}  # a line of jsonl

Sentences come from json and jsonl files with a list of words and a list of tags in each row, from csv and tsv files where
the words of a cell, and its tags, are separated by spaces, or from CoNLL's format: a word in each line, its tag in the
last column, blank lines between sentences. All flags of `TrainingArguments` and all `position_*` flags are accepted. The
same command goes on with a run that was interrupted. Predictions are written to predict_results.txt in the output
folder, a line of tags for each sentence.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal

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
from data_files import (
    DIALECTS,
    TABLES,
    check_columns,
    check_file,
    check_width,
    limit_rows,
    load_splits,
    needed_splits,
    preprocess,
    read_table,
    read_text,
)
from datasets import Dataset, DatasetDict
from labels import Classes, find_classes
from training import (
    PositionTrainingArguments,
    Run,
    ScriptTrainer,
    evaluate_and_save,
    load_metric,
    predict_and_save,
)
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_posenc.files import write_whole


logger = logging.getLogger(__name__)

CONLL = (".conll", ".conll2003", ".bio", ".iob", ".iob2", ".txt")
LABEL_COLUMNS = ("ner_tags", "tags")
BIO = re.compile(r"O|[BI]-.+")
IGNORED = -100  # the label that the loss leaves out


@dataclass
class TokenClassificationArguments(TableArguments):
    """Which data, which of their columns, and what to measure."""

    text_column: str = field(default="tokens", metadata={"help": "Column of the words."})
    label_column: str | None = field(
        default=None, metadata={"help": "Column of their tags. Default: ner_tags, or tags if there is no such column."}
    )
    label_all_tokens: bool = field(
        default=False,
        metadata={"help": "Train on all tokens of a word instead of its first one; after B- then follows I-."},
    )
    metric: Literal["span_f1", "accuracy"] = field(
        default="span_f1", metadata={"help": "F1 of the spans that BIO tags mark, or the share of right tags."}
    )

    @property
    def chosen_by(self) -> str:
        """The score that the best model has most of."""
        return "f1" if self.metric == "span_f1" else "accuracy"


def load_data(arguments: TokenClassificationArguments, needed: list[str]) -> DatasetDict:
    """The splits that are needed, each row with a list of words and, but for tests, a list of as many tags.

    Raises:
        OSError: a file is missing.
        ValueError: a split or a column is missing, a file cannot be understood, or words and tags are not as many.
    """
    splits = load_splits(arguments, needed, partial(read_sentences, arguments=arguments))
    if arguments.label_column is None:
        there = next(iter(splits.values())).column_names
        arguments.label_column = next((name for name in LABEL_COLUMNS if name in there), LABEL_COLUMNS[0])
    check_columns(splits, [arguments.text_column], "--text_column")
    labelled = {split: rows for split, rows in splits.items() if split != "test"}
    check_columns(labelled, [arguments.label_column], "--label_column")
    for split, rows in splits.items():
        check_sentences(rows, arguments.text_column, arguments.label_column, split)
    return splits


def check_sentences(rows: Dataset, text_column: str, label_column: str, split: str) -> None:
    """Raise ValueError unless every row has a list of words and, where there are tags, a list of as many."""
    tagged = rows[label_column if label_column in rows.column_names else text_column]
    for number, (tokens, tags) in enumerate(zip(rows[text_column], tagged), start=1):
        if not isinstance(tokens, list) or not isinstance(tags, list):
            raise ValueError(f"words and tags must be lists, in row {number} of the {split} data")
        if not all(isinstance(word, str) for word in tokens) or any(
            isinstance(tag, (list, dict, type(None))) for tag in tags
        ):
            raise ValueError(f"words must be strings, and each must have a tag, in row {number} of the {split} data")
        if len(tokens) != len(tags):
            raise ValueError(f"row {number} of the {split} data has {len(tokens)} words, but {len(tags)} tags")


def read_sentences(file: str, arguments: TokenClassificationArguments) -> Dataset:
    """The sentences of a file; OSError or ValueError if it is missing or cannot be understood."""
    path = check_file(file, (*CONLL, *TABLES))
    if path.suffix in CONLL:
        return read_conll(path, arguments)
    rows = read_table(file, arguments.column_names, arguments.has_header)
    if path.suffix in DIALECTS:
        wanted = {arguments.text_column, arguments.label_column, *LABEL_COLUMNS}.intersection(rows.column_names)
        rows = rows.map(lambda cells: {name: [cell.split() for cell in cells[name]] for name in wanted}, batched=True)
    return rows


def read_conll(path: Path, arguments: TokenClassificationArguments) -> Dataset:
    """The sentences of a file in CoNLL's format; if its columns have no names, words come first and tags last."""
    lines = [line.split() for line in read_text(path).split("\n")]
    sentences = [
        [*group]
        for is_word, group in groupby(lines, lambda cells: bool(cells) and cells[0] != "-DOCSTART-")
        if is_word
    ]
    if not sentences:
        raise ValueError(f"{path} has no rows")
    width = len(sentences[0][0])
    for number, cells in enumerate(lines, start=1):
        if cells and cells[0] != "-DOCSTART-" and len(cells) != width:
            raise ValueError(f"{path}, line {number}: {len(cells)} columns, where the first line has {width}")
    between = [f"column {index}" for index in range(2, width)]
    names = [arguments.text_column, *between, arguments.label_column or LABEL_COLUMNS[0]][:width]
    names = check_width(arguments.column_names or names, width, path)
    columns = {
        name: [[cells[index] for cells in sentence] for sentence in sentences] for index, name in enumerate(names)
    }
    return Dataset.from_dict(columns)


def find_tags(
    splits: DatasetDict, arguments: TokenClassificationArguments, stored: PreTrainedConfig, is_trained: bool
) -> Classes:
    """The tags; ValueError if a split has unknown ones, or if spans are to be measured and they mark none."""
    column = arguments.label_column
    tagged = {split: rows for split, rows in splits.items() if column in rows.column_names}
    seen = {split: {tag for tags in rows[column] for tag in tags} for split, rows in tagged.items()}
    feature = next((rows.features[column].feature for rows in tagged.values()), None)
    classes = find_classes(seen, feature, stored, is_trained)
    others = [name for name in classes.names if not BIO.fullmatch(name)]
    if others and arguments.metric == "span_f1":
        raise ValueError(
            f"span_f1 reads the tags O, B-... and I-..., and the data have {', '.join(others[:5])}: give --metric accuracy"
        )
    return classes


def tokenize(
    rows: dict[str, list],
    text_column: str,
    label_column: str,
    tokenizer: PreTrainedTokenizerBase,
    classes: Classes,
    length: int,
    label_all_tokens: bool,
) -> dict[str, list]:
    """Token ids of sentences, cut to `length` tokens; for `Dataset.map`.

    `starts` has the first token of each word, or -1 where the word has none or was cut off. `labels` have the tag of a word on
    its first token or on all of them, and are left out where there are no tags.
    """
    encoded = tokenizer(rows[text_column], is_split_into_words=True, truncation=True, max_length=length)
    words_of_tokens = [encoded.word_ids(index) for index in range(len(encoded["input_ids"]))]
    made = {**encoded, "starts": []}
    for words, tokens in zip(words_of_tokens, rows[text_column]):
        made["starts"].append([words.index(word) if word in words else -1 for word in range(len(tokens))])
    if label_column in rows:
        made["labels"] = [
            label_tokens(words, [classes.encode(tag) for tag in tags], classes.names, label_all_tokens)
            for words, tags in zip(words_of_tokens, rows[label_column])
        ]
    return made


def label_tokens(words: list[int | None], tags: list[int], names: list[str], label_all_tokens: bool) -> list[int]:
    """The label of each token from the tags of words, given the word that each token belongs to."""
    labels, before = [], None
    for word in words:
        if word is None or (word == before and not label_all_tokens):
            labels.append(IGNORED)
        elif word == before:
            inside = re.sub("^B-", "I-", names[tags[word]])
            labels.append(names.index(inside) if inside in names else tags[word])
        else:
            labels.append(tags[word])
        before = word
    return labels


def measure_tags(metric_name: str, names: list[str]) -> Callable[[EvalPrediction], dict[str, float]]:
    """Precision, recall and F1 of spans over all types, and accuracy of tags; or accuracy alone."""
    metric = load_metric(metric_name)
    tags = np.array(names)

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        scored = prediction.label_ids != IGNORED
        sides = prediction.predictions, prediction.label_ids
        if metric_name == "accuracy":
            return metric.compute(predictions=sides[0][scored], references=sides[1][scored])
        predictions, references = ([tags[row[keep]].tolist() for row, keep in zip(side, scored)] for side in sides)
        scores = metric.compute(predictions=predictions, references=references)
        return {name: scores[f"overall_{name}"] for name in ("precision", "recall", "f1", "accuracy")}

    return compute


def warn_of_cut(data: dict[str, Dataset], length: int) -> None:
    """Say how many sentences lose words that way: they are neither trained on nor evaluated."""
    for split, rows in data.items():
        cut = sum(-1 in starts for starts in rows["starts"])
        if cut:
            logger.warning(f"warning: {cut} sentences of the {split} data lose words at {length} tokens")


def write_predictions(file: Path, predictions: np.ndarray, rows: Dataset, names: list[str]) -> None:
    """A line of tags for each sentence; a word that was cut off has O, or _ where there is no such tag."""
    missing = "O" if "O" in names else "_"
    lines = [
        " ".join(names[tokens[start]] if start >= 0 else missing for start in starts)
        for tokens, starts in zip(predictions, rows["starts"])
    ]
    write_whole({file: "\n".join(lines) + "\n"})


def main() -> None:
    with mistakes_in_one_line():
        arguments, checkpoint, positions, training = parse_arguments(
            TokenClassificationArguments, ModelArguments, PositionArguments, PositionTrainingArguments
        )
        splits = load_data(arguments, needed_splits(training))
        classes = find_tags(splits, arguments, checkpoint.load_config(positions), training.do_train)
        config = checkpoint.load_config(positions, **classes.config_entries)
        length = sequence_length(arguments.max_seq_length, 128, config)
        training.choose_best_by(arguments.chosen_by)
        run = Run(training, config, checkpoint, arguments)
        # A byte-level tokenizer knows where words begin by the space before them.
        options = {"add_prefix_space": True} if config.model_type in ("roberta", "posenc_roberta") else {}
        tokenizer = checkpoint.load_tokenizer(**options)
        fit_tokenizer(tokenizer, length, config)
        set_seed(training.seed)
        model = checkpoint.load_model(AutoModelForTokenClassification, config, run.finished_model)

    options = {
        "text_column": arguments.text_column,
        "label_column": arguments.label_column,
        "tokenizer": tokenizer,
        "classes": classes,
        "length": length,
    }
    data = {}
    for split, rows in limit_rows(splits, arguments).items():
        every = arguments.label_all_tokens and split == "train"
        data |= preprocess({split: rows}, tokenize, arguments, training, **options, label_all_tokens=every)
    warn_of_cut(data, length)
    trainer = ScriptTrainer(
        model=model,
        args=training,
        train_dataset=data.get("train"),
        eval_dataset=data.get("validation"),
        data_collator=DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=training.pad_to_multiple_of),
        processing_class=tokenizer,
        compute_metrics=measure_tags(arguments.metric, classes.names),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    if training.do_train:
        run.train(trainer)
    if training.do_eval:
        evaluate_and_save(trainer, data["validation"])
    if training.do_predict:
        predictions = predict_and_save(trainer, data["test"]).predictions
        if trainer.is_world_process_zero():
            write_predictions(
                Path(training.output_dir) / "predict_results.txt", predictions, data["test"], classes.names
            )


if __name__ == "__main__":
    main()
