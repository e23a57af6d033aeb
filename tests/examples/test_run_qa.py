"""run_qa.py from the command line: its files, its windows, how answers are chosen, and what it refuses."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import run_qa
from datasets import Dataset
from run_qa import Answers, QuestionAnsweringArguments, best_spans, cut_questions, encode, find_tokens, read_questions
from scripts import results, run_here, save_checkpoint, tokens_kept
from transformers import AutoConfig, AutoTokenizer


NAMES = ["john", "mary", "bill", "eve"]
WORDS = ["the", "cat", "sees", "a", "river", "and", "dog"]


def question(index: int, generator: random.Random, has_answer: bool = True) -> dict:
    """Who is named behind "name is", somewhere in a text that also has other names."""
    words = generator.choices([*WORDS, *NAMES], k=generator.randint(12, 40))
    place, name = generator.randrange(len(words)), generator.choice(NAMES)
    if has_answer:
        words[place:place] = ["name", "is", name]
    context = " ".join(words)
    answers = {"text": [name], "answer_start": [context.index("name is") + 8]} if has_answer else {}
    none = {"text": [], "answer_start": []}
    return {"id": f"q{index}", "question": "  who is it?", "context": context, "answers": answers or none}


def as_distributed(rows: list[dict], version: str) -> dict:
    """SQuAD's own form: articles of paragraphs of questions."""
    paragraphs = []
    for row in rows:
        pairs = zip(row["answers"]["text"], row["answers"]["answer_start"])
        answers = [{"text": text, "answer_start": start} for text, start in pairs]
        asked = {"id": row["id"], "question": row["question"], "answers": answers}
        if version == "v2.0":
            asked |= {"is_impossible": not answers, "plausible_answers": []}
        paragraphs.append({"context": row["context"], "qas": [asked]})
    return {
        "version": version,
        "data": [{"title": "one", "paragraphs": paragraphs[:3]}, {"paragraphs": paragraphs[3:]}],
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), " ".join([*WORDS, *NAMES, "name is who it ?"]))


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def questions() -> dict[str, list[dict]]:
    generator = random.Random(0)
    return {
        "train": [question(index, generator) for index in range(40)],
        "dev": [question(index, generator) for index in range(16)],
        "dev2": [question(index, generator, has_answer=index % 3 > 0) for index in range(16)],
    }


SHORT = ("--max_seq_length", "32", "--doc_stride", "8", "--max_query_length", "8")


@pytest.fixture(scope="module")
def finished(checkpoint, questions, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    for split in ("train", "dev"):
        (folder / f"{split}.json").write_text(json.dumps(as_distributed(questions[split], "1.1")))
    arguments = ["--train_file", folder / "train.json", "--validation_file", folder / "dev.json", *SHORT]
    arguments += ["--test_file", folder / "dev.json", "--model_name_or_path", checkpoint, "--num_train_epochs", "4"]
    arguments += ["--position_scheme", "relative", "--position_max_distance", "4", "--learning_rate", "3e-3"]
    arguments += ["--position_learning_rate", "0.05", "--output_dir", folder / "run"]
    run_here(run_qa, *arguments, "--do_train", "--do_eval", "--do_predict")
    return folder / "run"


@pytest.mark.slow
def test_a_run_trains_evaluates_predicts_and_saves_the_variant(finished, questions):
    scores = results(finished)
    assert scores["eval_samples"] > len(questions["dev"]), "some contexts should take several windows"
    for name in ("exact_match", "f1"):
        assert scores[f"eval_{name}"] == pytest.approx(scores[f"predict_{name}"])
    config = AutoConfig.from_pretrained(finished)
    assert (config.position_scheme, config.position_max_distance) == ("relative", 4)
    state = json.loads((finished / "trainer_state.json").read_text())
    assert state["best_metric"] == pytest.approx(scores["eval_f1"])


@pytest.mark.slow
def test_predictions_are_answers_from_the_context_and_score_what_is_reported(finished, questions):
    predictions = json.loads((finished / "predict_predictions.json").read_text())
    assert predictions == json.loads((finished / "eval_predictions.json").read_text())
    assert list(predictions) == [row["id"] for row in questions["dev"]]
    assert all(predictions[row["id"]] in row["context"] and predictions[row["id"]] for row in questions["dev"])
    right = [predictions[row["id"]] == row["answers"]["text"][0] for row in questions["dev"]]
    assert results(finished)["predict_exact_match"] == pytest.approx(100 * np.mean(right))
    assert np.mean(right) > 0.4, "four epochs should teach it something"
    best = json.loads((finished / "predict_nbest_predictions.json").read_text())
    for row in questions["dev"]:
        ranked = best[row["id"]]
        assert ranked[0]["text"] == predictions[row["id"]] and len(ranked) <= 20
        assert sum(answer["probability"] for answer in ranked) == pytest.approx(1)
        assert [answer["score"] for answer in ranked] == sorted((answer["score"] for answer in ranked), reverse=True)


@pytest.mark.slow
def test_unanswerable_questions_are_measured_by_themselves(finished, questions, tmp_path, run_main):
    file = tmp_path / "dev.json"
    file.write_text(json.dumps(as_distributed(questions["dev2"], "v2.0")))
    arguments = ["--model_name_or_path", finished, "--validation_file", file, *SHORT, "--version_2_with_negative"]
    arguments += ["--do_eval", "--use_cpu", "true"]
    unanswerable = [not row["answers"]["text"] for row in questions["dev2"]]
    for threshold, answered in (("-1000000", 0), ("1000000", 1)):
        folder = tmp_path / threshold
        run_main(run_qa, *arguments, "--null_score_diff_threshold", threshold, "--output_dir", folder)
        scores = results(folder)
        predictions = json.loads((folder / "eval_predictions.json").read_text())
        assert {bool(text) for text in predictions.values()} == {bool(answered)}
        assert scores["eval_unanswerable_exact_match"] == 100 * (1 - answered)
        share = np.mean(unanswerable)
        for name in ("exact_match", "f1"):
            of_answers = scores[f"eval_answerable_{name}"]
            assert scores[f"eval_{name}"] == pytest.approx(share * 100 * (1 - answered) + (1 - share) * of_answers)
            assert (of_answers > 0) == bool(answered)


@pytest.mark.slow
def test_the_tokenizer_reads_windows_as_long_as_in_training(checkpoint, questions, tmp_path, run_main):
    (tmp_path / "train.json").write_text(json.dumps(questions["train"][:4]))
    arguments = ["--train_file", tmp_path / "train.json", "--model_name_or_path", checkpoint, "--max_steps", "1"]
    arguments += ["--position_scheme", "relative_key", "--max_seq_length", "400", "--output_dir", tmp_path / "run"]
    run_main(run_qa, *arguments, "--do_train", "--use_cpu", "true", "--disable_tqdm", "true")
    assert tokens_kept(tmp_path / "run") == {400}


def test_all_files_hold_the_same_questions(questions, tmp_path):
    rows = questions["dev2"]
    forms = {
        "distributed.json": json.dumps(as_distributed(rows, "v2.0")),
        "data.json": json.dumps({"version": "x", "data": rows}),
        "list.json": json.dumps(rows),
        "lines.jsonl": "\n".join(map(json.dumps, rows)),
    }
    for name, content in forms.items():
        (tmp_path / name).write_text(content)
        assert read_questions(str(tmp_path / name)).to_list() == rows, name


@pytest.mark.parametrize("length, stride", [(20, 4), (32, 8), (64, 40)])
def test_windows_cover_the_context_and_mark_the_answer_where_it_is_whole(length, stride, tokenizer, questions):
    rows = Dataset.from_list(questions["train"])
    windows = encode(rows.to_dict(), tokenizer, length, stride, 8)
    by_question: dict[str, list[int]] = {}
    for index, name in enumerate(windows["id"]):
        by_question.setdefault(name, []).append(index)
    found = 0
    for row in rows:
        covered, answer = set(), row["answers"]["text"][0]
        start = row["answers"]["answer_start"][0]
        for index in by_question[row["id"]]:
            offsets, input_ids = windows["offsets"][index], windows["input_ids"][index]
            assert len(offsets) == len(input_ids) <= length
            spans = [span for span in offsets if span[0] >= 0]
            covered.update(spans)
            for token, (first, last) in zip(input_ids, offsets):
                if first >= 0:
                    assert tokenizer.convert_ids_to_tokens(token) == row["context"][first:last]
            first, last = windows["start_positions"][index], windows["end_positions"][index]
            if spans[0][0] <= start and start + len(answer) <= spans[-1][1]:
                found += 1
                assert row["context"][offsets[first][0] : offsets[last][1]] == answer
                assert offsets[first][0] == start
            else:
                assert (first, last) == (0, 0) and input_ids[0] == tokenizer.cls_token_id
        assert " ".join(row["context"][first:last] for first, last in sorted(covered)) == row["context"]
    assert found >= len(rows)


def test_an_answer_of_several_tokens_is_found_by_its_characters():
    offsets = [(-1, -1), (-1, -1), (0, 4), (4, 6), (7, 9), (10, 15), (-1, -1)]
    for start, text, tokens in (
        (0, "johnny", (2, 3)),
        (2, "hn", (2, 2)),
        (7, "is there", (4, 5)),
        (4, "ny is", (3, 4)),
    ):
        assert find_tokens({"text": [text, "x"], "answer_start": [start, 10]}, offsets) == tokens
    assert find_tokens({"text": ["there!"], "answer_start": [10]}, offsets) == (0, 0)
    assert find_tokens({"text": [], "answer_start": []}, offsets) == (0, 0)


def test_long_questions_are_cut_between_tokens(tokenizer):
    assert cut_questions(["  who is it?", "who is", "?", " "], tokenizer, 3) == ["who is it", "who is", "?", ""]


@pytest.mark.parametrize("seed", range(2))
def test_the_best_spans_are_those_of_trying_all(seed):
    generator = np.random.default_rng(seed)
    offsets = [[-1, -1]] * 3 + [[3 * token, 3 * token + 2] for token in range(12)] + [[-1, -1]]
    # Padding behind, as of windows that are shorter than others of their batch.
    starts, ends = generator.normal(size=(2, 20))
    starts[16:], ends[16:] = 9, 9
    arguments = QuestionAnsweringArguments(n_best_size=12, max_answer_length=3)
    every = sorted(
        (
            (starts[first] + ends[last], offsets[first][0], offsets[last][1])
            for first in range(3, 15)
            for last in range(first, min(first + 3, 15))
        ),
        reverse=True,
    )
    found = list(best_spans(starts, ends, offsets, arguments))
    assert [(start, end) for start, end, _ in found] == [(start, end) for _, start, end in every[:12]]
    assert [score for *_, score in found] == pytest.approx([score for score, *_ in every[:12]])


def chosen(logits: dict[str, list[tuple[float, float]]], windows: list[str], **settings) -> Answers:
    """Answers to questions about "a b c", from logits (start, end) of [CLS] and the three words in each window."""
    names = list(dict.fromkeys(windows))
    rows = [{"id": name, "context": "a b c", "answers": {"text": ["a"], "answer_start": [0]}} for name in names]
    offsets = [[-1, -1], [0, 1], [2, 3], [4, 5]]
    made = Dataset.from_list([{"id": name, "offsets": offsets} for name in windows])
    answers = Answers(Dataset.from_list(rows), made, QuestionAnsweringArguments(**settings))
    remaining = {name: iter(values) for name, values in logits.items()}
    both = np.array([next(remaining[name]) for name in windows], dtype=float)
    answers.choose(both[..., 0], both[..., 1])
    return answers


A, C, NONE = ([(0, 0), (5, 5), (0, 0), (0, 0)], [(0, 0), (0, 0), (0, 0), (6, 6)], [(7, 7), (1, 1), (0, 0), (0, 0)])


def test_the_best_of_all_windows_is_chosen():
    assert chosen({"q": [A, C], "r": [A]}, ["q", "r", "q"]).predicted == {"q": "c", "r": "a"}
    assert chosen({"q": [NONE]}, ["q"]).predicted == {"q": "a"}, "without unanswerable questions there is an answer"


def test_no_answer_is_predicted_where_every_window_says_so():
    settings = {"version_2_with_negative": True}
    assert chosen({"q": [NONE, NONE]}, ["q", "q"], **settings).predicted == {"q": ""}
    # The least sure window: 0 against the best answer's 10.
    assert chosen({"q": [NONE, A]}, ["q", "q"], **settings).predicted == {"q": "a"}
    answers = chosen({"q": [NONE]}, ["q"], **settings)
    assert answers.best["q"][0] == {"text": "", "score": 14.0, "probability": pytest.approx(1, abs=1e-4)}
    # 14 against 2.
    for threshold, text in ((11.9, ""), (12.1, "a")):
        assert chosen({"q": [NONE]}, ["q"], **settings, null_score_diff_threshold=threshold).predicted == {"q": text}


def test_a_window_without_context_gives_no_answer():
    answers = Answers(
        Dataset.from_list([{"id": "q", "context": "", "answers": {"text": ["name"], "answer_start": [0]}}]),
        Dataset.from_list([{"id": "q", "offsets": [[-1, -1], [-1, -1]]}]),
        QuestionAnsweringArguments(),
    )
    answers.choose(np.zeros((1, 2)), np.zeros((1, 2)))
    assert answers.predicted == {"q": ""} and answers.score() == {"exact_match": 0.0, "f1": 0.0}


@pytest.mark.slow
def test_questions_without_gold_answers_are_answered_too(finished, questions, tmp_path, run_main):
    rows = [{name: row[name] for name in ("id", "question", "context")} for row in questions["dev"]]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--model_name_or_path", finished, "--test_file", tmp_path / "test.jsonl", *SHORT]
    run_main(run_qa, *arguments, "--do_predict", "--output_dir", tmp_path, "--use_cpu", "true")
    expected = json.loads((finished / "predict_predictions.json").read_text())
    assert json.loads((tmp_path / "predict_predictions.json").read_text()) == expected
    assert results(tmp_path).keys() == {"predict_samples"}


ROW = {"id": "1", "question": "who?", "context": "a name", "answers": {"text": ["name"], "answer_start": [2]}}
WRONG_FILES = {
    "right.json": [ROW],
    "none.json": [{**ROW, "answers": {"text": [], "answer_start": []}}],
    "elsewhere.json": [{**ROW, "answers": {"text": ["name"], "answer_start": [3]}}],
    "twice.json": [ROW, ROW],
    "column.json": [{"id": "1", "text": "a name"}],
    "empty.json": {"data": []},
    "article.json": {"data": [{"paragraphs": [{"context": "a name"}]}]},
}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--train_file nowhere.json", "nowhere.json does not exist"),
        ("--train_file train.csv", "must end in one of .json, .jsonl"),
        ("--train_file none.json", "question 1 of the train data has no answer: give --version_2_with_negative"),
        ("--train_file elsewhere.json", "question 1 of the train data: 'name' is not at 3 of its context"),
        ("--train_file twice.json", "the train data have an id more than once"),
        ("--train_file column.json", "no column 'question'; their columns are id, text"),
        ("--train_file empty.json", "empty.json has no list of questions"),
        ("--train_file article.json", "SQuAD's articles, paragraphs and questions must have 'qas'"),
        ("--train_file broken.json", "broken.json cannot be read as json"),
        ("--train_file right.json", "leaves 0 tokens for a context"),
        ("--train_file right.json --max_query_length 8 --doc_stride 60", "it takes more than doc_stride=60"),
        ("--train_file right.json --max_seq_length 99", "ends at 64 tokens"),
        ("--train_file right.json --n_best_size 0", "n_best_size must be at least 1, got 0"),
        ("--train_file right.json --label_smoothing_factor 0.1", "leave out label_smoothing_factor"),
        ("--train_file right.json --position_scheme relativ", "did you mean 'relative'"),
    ],
)
def test_mistakes_end_in_one_line_before_weights_are_read(arguments, message, checkpoint, mistake_in_training):
    files = {name: json.dumps(content) for name, content in WRONG_FILES.items()}
    assert message in mistake_in_training(run_qa, checkpoint, files | {"broken.json": '{"data": ['}, arguments)
