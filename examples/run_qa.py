"""Fine-tune a BERT-family checkpoint with any position scheme to find the answers to questions in a text.

    python examples/run_qa.py --model_name_or_path google-bert/bert-base-uncased --position_scheme absolute+deberta \\
        --train_file train-v1.1.json --validation_file dev-v1.1.json --do_train --do_eval --output_dir outputs/squad
    python examples/run_qa.py --model_name_or_path google-bert/bert-base-uncased --position_scheme t5 \\
        --max_seq_length 1024 --train_file train-v2.0.json --validation_file dev-v2.0.json --version_2_with_negative \\
        --do_train --do_eval --output_dir outputs/squad2

Questions come from files as SQuAD is distributed (articles, paragraphs, questions), from json and jsonl files with columns id,
question, context and answers, or from a dataset (`--dataset_name`). Text that is longer than `--max_seq_length` is read in
windows that overlap by `--doc_stride` tokens. All flags of `TrainingArguments` and all `position_*` flags are accepted. The
same command goes on with a run that was interrupted. With `--do_predict`, the answers are written to
predict_predictions.json in the output folder, and the best few of each question to predict_nbest_predictions.json; with
`--do_eval`, to eval_....
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from arguments import (
    DataArguments,
    ModelArguments,
    PositionArguments,
    fit_tokenizer,
    mistakes_in_one_line,
    parse_arguments,
    sequence_length,
)
from data_files import (
    check_columns,
    check_file,
    limit_rows,
    load_splits,
    needed_splits,
    preprocess,
    read_table,
    read_text,
)
from datasets import Dataset, DatasetDict, Value
from training import (
    PositionTrainingArguments,
    Run,
    ScriptTrainer,
    evaluate_and_save,
    load_metric,
    predict_and_save,
)
from transformers import (
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_posenc.files import write_whole


COLUMNS = ("id", "question", "context")
OUTSIDE = -1  # offset of a token that is not of the context


@dataclass
class QuestionAnsweringArguments(DataArguments):
    """Which questions, and how answers are chosen."""

    version_2_with_negative: bool = field(
        default=False, metadata={"help": "Some questions have no answer, as in SQuAD 2.0."}
    )
    doc_stride: int = field(default=128, metadata={"help": "Tokens that neighbouring windows of a context share."})
    max_query_length: int = field(default=64, metadata={"help": "Tokens of a question; longer ones are cut."})
    max_answer_length: int = field(default=30, metadata={"help": "Tokens of an answer that is predicted."})
    n_best_size: int = field(default=20, metadata={"help": "Answers to choose from, in a window and in the end."})
    null_score_diff_threshold: float = field(
        default=0.0,
        metadata={"help": "No answer is predicted if its score is higher by this much than that of the best answer."},
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("doc_stride", "max_query_length", "max_answer_length", "n_best_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def load_questions(arguments: QuestionAnsweringArguments, needed: list[str]) -> DatasetDict:
    """The splits that are needed: columns id, question, context and, but for tests, answers.

    Raises:
        OSError: a file is missing.
        ValueError: a split or a column is missing, a file cannot be understood, a question has no answer and
            `version_2_with_negative` is not given, an answer is not where it is said to be, or an id occurs twice.
    """
    splits = load_splits(arguments, needed, read_questions)
    check_columns(splits, COLUMNS)
    check_columns({split: rows for split, rows in splits.items() if split != "test"}, ["answers"])
    for split, rows in splits.items():
        if rows.features["id"] != Value("string"):
            splits[split] = rows = rows.cast_column("id", Value("string"))
        if len({*rows["id"]}) < len(rows):
            raise ValueError(f"the {split} data have an id more than once")
        if "answers" not in rows.column_names:
            continue
        check_form(rows, split)
        if split == "test" and not any(answers["text"] for answers in rows["answers"]):
            splits[split] = rows.remove_columns("answers")
        else:
            check_answers(rows, arguments.version_2_with_negative, split)
    return splits


def check_form(rows: Dataset, split: str) -> None:
    """Raise ValueError unless answers are as SQuAD has them: texts, none of them empty, and where they begin."""
    for row in rows:
        answers = row["answers"] if isinstance(row["answers"], dict) else {}
        texts, starts = answers.get("text"), answers.get("answer_start")
        if (
            not isinstance(texts, list)
            or not isinstance(starts, list)
            or len(texts) != len(starts)
            or not all(isinstance(text, str) and text for text in texts)
            or not all(isinstance(start, int) for start in starts)
        ):
            raise ValueError(
                f"question {row['id']} of the {split} data: answers must be an object with a list of texts, 'text', and as many numbers, "
                f"'answer_start'; got {row['answers']!r}"
            )


def check_answers(rows: Dataset, may_be_missing: bool, split: str) -> None:
    """Raise ValueError unless answers are where they are said to be in their context."""
    for row in rows:
        answers = row["answers"]
        if not answers["text"] and not may_be_missing:
            raise ValueError(
                f"question {row['id']} of the {split} data has no answer: give --version_2_with_negative if that is so"
            )
        for text, start in zip(answers["text"], answers["answer_start"]):
            if row["context"][start : start + len(text)] != text:
                raise ValueError(
                    f"question {row['id']} of the {split} data: {text!r} is not at {start} of its context"
                )


def read_questions(file: str) -> Dataset:
    """The questions of a file, one in a row; OSError or ValueError if it is missing or cannot be understood."""
    path = check_file(file, (".json", ".jsonl"))
    if path.suffix == ".jsonl":
        return read_table(file)
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} cannot be read as json: {error}") from error
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
        raise ValueError(f"{file} has no list of questions, neither by itself nor as 'data'")
    return Dataset.from_list(flatten(rows) if "paragraphs" in rows[0] else rows)


def flatten(articles: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each question, from SQuAD's articles of paragraphs of questions; ValueError if they are none."""
    try:
        return [
            {
                "id": str(question["id"]),
                "question": question["question"],
                "context": paragraph["context"],
                "answers": {
                    "text": [answer["text"] for answer in question.get("answers", [])],
                    "answer_start": [answer["answer_start"] for answer in question.get("answers", [])],
                },
            }
            for article in articles
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]
    except KeyError as error:
        raise ValueError(f"SQuAD's articles, paragraphs and questions must have {error}") from error


def cut_questions(questions: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> list[str]:
    """Questions without what is beyond `length` tokens, and without space before them, which some have in SQuAD."""
    questions = [question.lstrip() for question in questions]
    encoded = tokenizer(
        questions, add_special_tokens=False, truncation=True, max_length=length, return_offsets_mapping=True
    )
    return [
        question[: max((end for _, end in offsets), default=0)]
        for question, offsets in zip(questions, encoded["offset_mapping"])
    ]


def encode(
    rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, length: int, doc_stride: int, max_query_length: int
) -> dict[str, list]:
    """Windows of at most `length` tokens, a question and a part of its context each; for `Dataset.map`.

    `id` is that of the question, `offsets` are the characters of the context that a token stands for ([-1, -1] for other
    tokens), and `start_positions` and `end_positions` the tokens of the first answer, or the first token of all, which
    stands for no answer, in a window that does not have it whole.
    """
    encoded = tokenizer(
        cut_questions(rows["question"], tokenizer, max_query_length),
        rows["context"],
        truncation="only_second",
        max_length=length,
        stride=doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    sources = encoded.pop("overflow_to_sample_mapping")
    offsets = [
        [span if sequence == 1 else (OUTSIDE, OUTSIDE) for span, sequence in zip(spans, encoded.sequence_ids(window))]
        for window, spans in enumerate(encoded.pop("offset_mapping"))
    ]
    made = {**encoded, "id": [rows["id"][source] for source in sources], "offsets": offsets}
    if "answers" in rows:
        tokens = [find_tokens(rows["answers"][source], spans) for source, spans in zip(sources, offsets)]
        made["start_positions"], made["end_positions"] = map(list, zip(*tokens))
    return made


def find_tokens(answers: dict[str, list], offsets: list[tuple[int, int]]) -> tuple[int, int]:
    """First and last token of the first answer in a window, (0, 0) if it is not there whole."""
    inside = [token for token, (start, _) in enumerate(offsets) if start != OUTSIDE]
    if not answers["text"] or not inside:
        return 0, 0
    start = answers["answer_start"][0]
    end = start + len(answers["text"][0])
    if start < offsets[inside[0]][0] or end > offsets[inside[-1]][1]:
        return 0, 0
    first = next(token for token in inside if offsets[token][1] > start)
    last = next(token for token in reversed(inside) if offsets[token][0] < end)
    return first, last


def best_spans(
    starts: np.ndarray, ends: np.ndarray, offsets: list[list[int]], arguments: QuestionAnsweringArguments
) -> Iterator[tuple[int, int, float]]:
    """The likeliest answers of a window: their first character, the one after their last, and the sum of two logits.

    Args:
        starts: logits of the first token, (tokens,), perhaps with padding behind.
        ends: logits of the last token.
        offsets: of each token, as [`encode`] makes them.
        arguments: how many, and how long at most.
    """
    inside = np.array([token for token, (start, _) in enumerate(offsets) if start != OUTSIDE], dtype=int)
    number = arguments.n_best_size
    first = inside[np.argsort(-starts[inside], kind="stable")[:number], None]
    last = inside[np.argsort(-ends[inside], kind="stable")[:number]][None, :]
    scores = np.where(
        (last >= first) & (last - first < arguments.max_answer_length), starts[first] + ends[last], -np.inf
    )
    for index in np.argsort(-scores, axis=None, kind="stable")[:number]:
        row, column = np.unravel_index(index, scores.shape)
        if scores[row, column] > -np.inf:
            yield offsets[first[row, 0]][0], offsets[last[0, column]][1], float(scores[row, column])


class Answers:
    """Answers to questions from the logits of their windows, and how good they are; for `Trainer(compute_metrics=...)`.

    Args:
        questions: with columns id, context and, to be scored, answers.
        windows: what [`encode`] made of them.
        arguments: how to choose.
    """

    def __init__(self, questions: Dataset, windows: Dataset, arguments: QuestionAnsweringArguments):
        self.questions = questions
        self.windows = windows.select_columns(["id", "offsets"])
        self.arguments = arguments
        self.metric = load_metric("squad")
        # By the id of the question: what was predicted last, and the best few with their scores and probabilities.
        self.predicted: dict[str, str] = {}
        self.best: dict[str, list[dict[str, Any]]] = {}

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        """Exact match and F1 of the answers that logits give."""
        self.choose(*prediction.predictions)
        return self.score()

    def choose(self, start_logits: np.ndarray, end_logits: np.ndarray) -> None:
        """Choose an answer to every question, from logits of shape (windows, tokens)."""
        contexts = dict(zip(self.questions["id"], self.questions["context"]))
        scores: dict[str, dict[str, float]] = {question: {} for question in contexts}
        null_scores = dict.fromkeys(contexts, math.inf)
        for window, starts, ends in zip(self.windows, start_logits, end_logits):
            question = window["id"]
            # There is no answer if no window has one.
            null_scores[question] = min(null_scores[question], float(starts[0] + ends[0]))
            for start, end, score in best_spans(starts, ends, window["offsets"], self.arguments):
                text = contexts[question][start:end]
                scores[question][text] = max(score, scores[question].get(text, -math.inf))
        for question, answers in scores.items():
            self._decide(question, answers, null_scores[question])

    def _decide(self, question: str, answers: dict[str, float], null_score: float) -> None:
        """Settle on one of the answers, a text with its score each, or on none."""
        best = max(answers, key=answers.get, default="")
        if self.arguments.version_2_with_negative:
            if best and null_score - answers[best] > self.arguments.null_score_diff_threshold:
                best = ""
            answers = {**answers, "": null_score}
        ranked = sorted(answers, key=answers.get, reverse=True)[: self.arguments.n_best_size]
        odds = np.exp([answers[text] - answers[ranked[0]] for text in ranked])
        self.predicted[question] = best
        self.best[question] = [
            {"text": text, "score": answers[text], "probability": float(share)}
            for text, share in zip(ranked, odds / odds.sum())
        ]

    def score(self) -> dict[str, float]:
        """Exact match and F1 in percent; with unanswerable questions, also of the two kinds by themselves.

        SQuAD 2.0 counts a question without an answer as right, by both measures, if none is predicted.
        """
        gold = dict(zip(self.questions["id"], self.questions["answers"]))
        answerable = [question for question, answers in gold.items() if answers["text"]]
        scores = {"exact_match": 0.0, "f1": 0.0}
        if answerable:
            scores = self.metric.compute(
                predictions=[{"id": question, "prediction_text": self.predicted[question]} for question in answerable],
                references=[{"id": question, "answers": gold[question]} for question in answerable],
            )
        others = gold.keys() - {*answerable}
        if not others:
            return scores
        right = 100 * sum(not self.predicted[question] for question in others) / len(others)
        share = len(others) / len(gold)
        by_kind = {f"answerable_{name}": value for name, value in scores.items()} if answerable else {}
        overall = {name: share * right + (1 - share) * value for name, value in scores.items()}
        return {**overall, **by_kind, "unanswerable_exact_match": right}

    def write(self, folder: Path, prefix: str) -> None:
        """Write what was predicted last, and the best few answers."""
        for name, content in (("predictions", self.predicted), ("nbest_predictions", self.best)):
            text = json.dumps(content, indent=2, ensure_ascii=False)
            write_whole({folder / f"{prefix}_{name}.json": text + "\n"})


def main() -> None:
    with mistakes_in_one_line():
        arguments, checkpoint, positions, training = parse_arguments(
            QuestionAnsweringArguments, ModelArguments, PositionArguments, PositionTrainingArguments
        )
        if training.label_smoothing_factor:
            raise ValueError("Trainer does not smooth the positions of answers: leave out label_smoothing_factor")
        questions = limit_rows(load_questions(arguments, needed_splits(training)), arguments)
        config = checkpoint.load_config(positions)
        length = sequence_length(arguments.max_seq_length, 384, config)
        tokenizer = checkpoint.load_tokenizer(padding_side="right")
        fit_tokenizer(tokenizer, length, config)
        room = length - arguments.max_query_length - tokenizer.num_special_tokens_to_add(pair=True)
        if room <= arguments.doc_stride:
            raise ValueError(
                f"max_seq_length={length} leaves {max(room, 0)} tokens for a context, with a question of "
                f"max_query_length={arguments.max_query_length}: it takes more than doc_stride={arguments.doc_stride}"
            )
        training.choose_best_by("f1")
        run = Run(training, config, checkpoint, arguments)
        set_seed(training.seed)
        model = checkpoint.load_model(AutoModelForQuestionAnswering, config, run.finished_model)

    options = {"tokenizer": tokenizer, "length": length, "doc_stride": arguments.doc_stride}
    windows = preprocess(
        questions, encode, arguments, training, **options, max_query_length=arguments.max_query_length
    )
    answers = {split: Answers(questions[split], windows[split], arguments) for split in windows if split != "train"}
    trainer = ScriptTrainer(
        model=model,
        args=training,
        train_dataset=windows.get("train"),
        eval_dataset=windows.get("validation"),
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=training.pad_to_multiple_of),
        processing_class=tokenizer,
        compute_metrics=answers.get("validation"),
    )
    if training.do_train:
        run.train(trainer)
    if training.do_eval:
        evaluate_and_save(trainer, windows["validation"])
        if trainer.is_world_process_zero():
            answers["validation"].write(Path(training.output_dir), "eval")
    if training.do_predict:
        # Called where there are gold answers; otherwise the answers are yet to be chosen.
        trainer.compute_metrics = answers["test"]
        logits = predict_and_save(trainer, windows["test"]).predictions
        answers["test"].choose(*logits)
        if trainer.is_world_process_zero():
            answers["test"].write(Path(training.output_dir), "predict")


if __name__ == "__main__":
    main()
