"""run_classification.py from the command line: what it reads, what it refuses, and that a kill costs nothing."""

import json
import math
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
import run_classification
import run_classification_no_trainer
import tiny
from arguments import ModelArguments, PositionArguments
from run_classification import GLUE, ClassificationArguments, measure_classes, measure_numbers
from scripts import command, environment, results, run_here, save_checkpoint, tokens_kept
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, EvalPrediction, pipeline


NOUNS = ["cat", "dog", "child", "river", "tree", "friend"]
VERBS = ["sees", "likes", "hears", "follows"]


def sentence(generator: random.Random) -> tuple[str, int]:
    """A sentence whose words are in order (1), or not (0): without positions nobody knows."""
    words = ["the", generator.choice(NOUNS), generator.choice(VERBS), "a", generator.choice(NOUNS)]
    label = generator.randrange(2)
    if not label:
        words.reverse()
    return " ".join(words), label


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """CoLA-like tsv files without a header: source, label, mark, sentence, with a quotation mark that nothing closes."""
    folder = tmp_path_factory.mktemp("files")
    generator = random.Random(0)
    for name, number in (("train", 48), ("dev", 24), ("test", 12)):
        rows = [sentence(generator) for _ in range(number)]
        lines = [f"s{i}\t{label}\t{'' if label else '*'}\t{text}" for i, (text, label) in enumerate(rows)]
        lines[1] = f's1\t0\t*\t"{rows[1][0]}'
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), " ".join(["the a null", *NOUNS, *VERBS]))


def of_files(files: Path, checkpoint: Path) -> list[str]:
    arguments = ["--model_name_or_path", checkpoint, "--column_names", "source", "label", "mark", "sentence"]
    for split, name in (("train", "train"), ("validation", "dev"), ("test", "test")):
        arguments += [f"--{split}_file", files / f"{name}.tsv"]
    return [str(argument) for argument in arguments]


TRAINING = ("--learning_rate", "3e-3", "--position_learning_rate", "0.05", "--per_device_train_batch_size", "8")


@pytest.fixture(scope="module")
def finished(files, checkpoint, tmp_path_factory) -> tuple[Path, list]:
    """The folder of a run to its end, and its command line."""
    folder = tmp_path_factory.mktemp("finished")
    arguments = [*of_files(files, checkpoint), *TRAINING, "--position_scheme", "absolute+deberta"]
    arguments += [
        "--position_buckets",
        "8",
        "--position_max_distance",
        "16",
        "--do_train",
        "--do_eval",
        "--do_predict",
    ]
    arguments += [
        "--metric",
        "matthews_correlation",
        "accuracy",
        "--num_train_epochs",
        "3",
        "--output_dir",
        folder / "run",
    ]
    run_here(run_classification, *arguments)
    return folder / "run", arguments


def test_a_run_trains_evaluates_predicts_and_saves_the_variant(finished, files):
    folder, _ = finished
    scores = results(folder)
    assert scores["eval_samples"] == 24 and scores["predict_samples"] == 12
    for prefix in ("eval", "predict"):
        mean = (scores[f"{prefix}_matthews_correlation"] + scores[f"{prefix}_accuracy"]) / 2
        assert scores[f"{prefix}_combined_score"] == pytest.approx(mean)
    for name in ("train", "eval", "predict"):
        written = json.loads((folder / f"{name}_results.json").read_text())
        assert written.items() <= json.loads((folder / "all_results.json").read_text()).items()
    config = AutoConfig.from_pretrained(folder)
    assert (config.position_scheme, config.position_buckets, config.id2label) == (
        "absolute+deberta",
        8,
        {0: "0", 1: "1"},
    )


def test_predictions_are_those_of_the_saved_model(finished, files):
    folder, _ = finished
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [line.split("\t") for line in (files / "test.tsv").read_text().splitlines()]
    logits = model.eval()(**tokenizer([row[3] for row in rows], padding=True, return_tensors="pt")).logits
    expected = logits.argmax(-1).tolist()
    lines = (folder / "predict_results.txt").read_text().splitlines()
    assert lines == ["index\tprediction", *(f"{index}\t{label}" for index, label in enumerate(expected))]
    assert '"' in rows[1][3], "the quotation mark that nothing closes should have been read as text"
    right = [label == int(row[1]) for label, row in zip(expected, rows)]
    assert results(folder)["predict_accuracy"] == pytest.approx(np.mean(right))


@pytest.mark.parametrize("option", ["--train_sampling_strategy group_by_length", "--dataloader_drop_last true"])
def test_how_training_data_are_batched_does_not_change_what_is_predicted(option, finished, files, tmp_path, run_main):
    folder, _ = finished
    arguments = ["--model_name_or_path", folder, "--column_names", "source", "label", "mark", "sentence"]
    rows = (files / "test.tsv").read_text().splitlines()
    for index in range(0, len(rows), 2):  # of other lengths: what has the same length stays in its order
        rows[index] += " the" * (index + 1)
    for name in ("all.tsv", "dev.tsv"):
        (tmp_path / name).write_text("\n".join(rows) + "\n")
    arguments += ["--test_file", tmp_path / "all.tsv", "--validation_file", tmp_path / "dev.tsv", "--do_predict"]
    arguments += ["--do_eval", "--use_cpu", "true", "--per_device_eval_batch_size", "5", "--metric", "accuracy"]
    for name, given in (("plain", ""), ("asked", option)):
        run_main(run_classification, *arguments, *given.split(), "--output_dir", tmp_path / name)
    plain, asked = ((tmp_path / name / "predict_results.txt").read_text() for name in ("plain", "asked"))
    assert asked == plain and len({*plain.split()[3::2]}) == 2
    assert results(tmp_path / "asked") == pytest.approx(results(tmp_path / "plain"))


def test_the_model_that_is_kept_is_the_best_one(finished):
    folder, _ = finished
    state = json.loads((folder / "trainer_state.json").read_text())
    scores = [entry["eval_combined_score"] for entry in state["log_history"] if "eval_combined_score" in entry]
    assert len(scores) >= 3 and state["best_metric"] == max(scores)
    assert results(folder)["eval_combined_score"] == pytest.approx(max(scores))


def test_a_finished_run_called_again_only_evaluates(finished, run_main, capsys):
    folder, arguments = finished
    before = results(folder, ("eval_", "predict_", "train_", "epoch"))
    weights = (folder / "model.safetensors").stat().st_mtime_ns
    run_main(run_classification, *arguments, "--disable_tqdm", "true", "--use_cpu", "true")
    assert "finished: nothing to train" in capsys.readouterr().out
    assert results(folder, ("eval_", "predict_", "train_", "epoch")) == pytest.approx(before, abs=1e-6)
    assert (folder / "model.safetensors").stat().st_mtime_ns == weights


def test_other_settings_in_the_same_folder_are_refused(finished, mistake):
    folder, arguments = finished
    said = mistake(
        run_classification, *arguments, "--use_cpu", "true", "--learning_rate", "1e-3", "--max_train_samples", "9"
    )
    assert f"{folder} holds a run with other settings" in said
    assert "max_train_samples is None there and 9 here; learning_rate is 0.003 there and 0.001 here" in said


@pytest.mark.slow
def test_pipelines_read_what_was_trained_and_no_less(files, checkpoint, tmp_path, run_main, transformers_said):
    """The checkpoint's tokenizer cuts at 64 tokens, where its table of positions ends."""
    arguments = [*of_files(files, checkpoint), *TRAINING, "--do_train", "--disable_tqdm", "true", "--use_cpu", "true"]
    longer = "--position_scheme t5 --max_seq_length 1024 --max_steps 2 --save_steps 1 --output_dir".split()
    run_main(run_classification, *arguments, *longer, tmp_path / "longer")
    assert tokens_kept(tmp_path / "longer") == {1024}
    assert len([*(tmp_path / "longer").glob("checkpoint-*/tokenizer_config.json")]) == 2

    transformers_said.clear()
    read = []
    classify = pipeline("text-classification", model=str(tmp_path / "longer"), device="cpu")
    classify.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for words in (900, 2000):
        classify("the " * words, truncation=True)
    classify("the " * 900)
    assert read == [902, 1024, 902] and transformers_said == []

    # Going on from there with shorter text takes nothing away.
    shorter = ["--model_name_or_path", tmp_path / "longer", "--max_seq_length", "16", "--max_steps", "1"]
    run_main(run_classification, *arguments, *shorter, "--output_dir", tmp_path / "shorter")
    assert tokens_kept(tmp_path / "shorter") == {1024}


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


def kill_when_it_writes(step: int, folder: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while not (folder / f"checkpoint-{step}").exists():
        assert process.poll() is None, "the run was over before it could be killed"
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_very_same_result(files, checkpoint, tmp_path, run_main):
    arguments = [*of_files(files, checkpoint), *TRAINING, "--position_scheme", "t5", "--position_buckets", "8"]
    arguments += ["--do_train", "--do_eval", "--do_predict", "--save_strategy", "steps", "--save_steps", "4"]
    arguments += ["--num_train_epochs", "4", "--save_total_limit", "9", "--weight_decay", "0.1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_main(run_classification, *arguments, "--output_dir", whole, "--disable_tqdm", "true", "--use_cpu", "true")

    again = command("run_classification.py", *arguments, "--output_dir", killed)
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(again, env=environment(tmp_path), stdout=output, stderr=output)
        kill_when_it_writes(12, killed, process)
    assert not (killed / "all_results.json").exists()
    # Whatever the kill left, the newest but one is damaged too.
    newest = steps(killed)[-1]
    assert newest in (12, 16)
    for step in range(8, newest + 1, 4):
        weights = killed / f"checkpoint-{step}" / "optimizer.pt"
        if weights.exists():
            os.truncate(weights, weights.stat().st_size // 2)

    process = subprocess.run(again, env=environment(tmp_path), capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert f"going on from {killed / 'checkpoint-4'}" in process.stdout
    for step in range(8, newest + 1, 4):
        assert f"checkpoint-{step} is passed over" in process.stderr
    assert steps(killed) == steps(whole) == [4, 8, 12, 16, 20, 24]
    assert results(killed) == results(whole)
    assert (killed / "predict_results.txt").read_text() == (whole / "predict_results.txt").read_text()
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()

    losses = [
        entry["eval_loss"]
        for entry in json.loads((whole / "trainer_state.json").read_text())["log_history"]
        if "eval_loss" in entry
    ]
    assert len({*losses}) == len(losses) > 4, "what is learned should show"


@pytest.mark.slow
def test_a_saved_variant_keeps_its_scheme_and_its_classes_when_it_is_evaluated(finished, files, tmp_path, run_main):
    folder, _ = finished
    arguments = ["--model_name_or_path", folder, "--column_names", "source", "label", "mark", "sentence"]
    arguments += ["--validation_file", files / "dev.tsv", "--metric", "matthews_correlation", "accuracy"]
    run_main(run_classification, *arguments, "--do_eval", "--output_dir", tmp_path, "--use_cpu", "true")
    expected = {name: value for name, value in results(folder).items() if name.startswith("eval_")}
    assert results(tmp_path) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "kind",
    [
        "pairs in json",
        "numbers in csv",
        pytest.param("a header in tsv", marks=pytest.mark.slow),
        pytest.param("a folder as a data set", marks=pytest.mark.slow),
    ],
)
def test_other_forms_of_data(kind, checkpoint, tmp_path, run_main):
    generator = random.Random(1)
    rows = [sentence(generator) for _ in range(16)]
    more = ["--max_steps", "2", "--max_train_samples", "12", "--position_scheme", "rope"]
    file = tmp_path / "train.csv"
    if kind == "pairs in json":
        file = tmp_path / "train.jsonl"
        lines = [{"premise": text, "hypothesis": rows[0][0], "label": f"class {label}"} for text, label in rows]
        file.write_text("\n".join(map(json.dumps, lines)))
    elif kind == "numbers in csv":
        file.write_text("\n".join(["score,text", *(f'{label - 0.25},"{text}, null"' for text, label in rows)]))
        more += ["--problem_type", "regression", "--label_column", "score"]
    elif kind == "a header in tsv":
        file = tmp_path / "train.tsv"
        file.write_text("\n".join(["label\tcontent", *(f"{label}\t{text}" for text, label in rows)]))
        more += ["--column_names", "label", "sentence", "--has_header", "true"]
    else:
        folder = tmp_path / "data"
        folder.mkdir()
        for split in ("train", "validation"):
            (folder / f"{split}.csv").write_text(
                "\n".join(["sentence,label", *(f"{text},{label}" for text, label in rows)])
            )
        more += ["--dataset_name", str(folder)]
    if kind != "a folder as a data set":
        more += ["--train_file", str(file), "--validation_file", str(file)]
    arguments = ["--model_name_or_path", checkpoint, "--output_dir", tmp_path / "run", "--use_cpu", "true", *more]
    run_main(run_classification, *arguments, "--do_train", "--do_eval")
    scores = results(tmp_path / "run")
    assert scores["eval_samples"] == 16
    assert ("eval_pearson" in scores) == (kind == "numbers in csv") != ("eval_accuracy" in scores)
    config = AutoConfig.from_pretrained(tmp_path / "run")
    assert config.num_labels == (1 if kind == "numbers in csv" else 2)
    assert (config.id2label[0] == "class 0") == (kind == "pairs in json")


# The rest differ in names alone: their columns, classes and metrics.
@pytest.mark.parametrize(
    "task", [pytest.param(name, marks=() if name == "mrpc" else pytest.mark.slow) for name in GLUE]
)
@pytest.mark.slow
def test_glue_tasks_are_measured_as_glue_measures_them(task, checkpoint, tmp_path, monkeypatch, run_main):
    of_task = GLUE[task]
    generator = random.Random(2)
    names = ["entailment", "neutral", "contradiction"] if task == "mnli" else ["no", "yes"]
    label = datasets.Value("float32") if task == "stsb" else datasets.ClassLabel(names=names)

    def rows(is_secret: bool) -> datasets.Dataset:
        columns = {column: [sentence(generator)[0] for _ in range(9)] for column in of_task.text_column}
        columns["label"] = [-1 if is_secret else generator.randrange(len(names)) for _ in range(9)]
        features = {column: datasets.Value("string") for column in of_task.text_column} | {"label": label}
        return datasets.Dataset.from_dict(columns, features=datasets.Features(features))

    kinds = ["_matched", "_mismatched"] if task == "mnli" else [""]
    splits = {"train": rows(False)}
    splits |= {f"{split}{kind}": rows(split == "test") for split in ("validation", "test") for kind in kinds}

    def from_hub(name, configuration):
        assert (name, configuration) == ("nyu-mll/glue", task)
        return datasets.DatasetDict(splits)

    monkeypatch.setattr(run_classification, "load_dataset", from_hub)
    stages = ["--do_train", "--do_eval", "--do_predict", "--max_steps", "1"]
    arguments = ["--task_name", task, "--model_name_or_path", checkpoint, "--position_scheme", "none", *stages]
    run_main(run_classification, *arguments, "--output_dir", tmp_path, "--use_cpu", "true")
    scores = results(tmp_path)
    measured = {
        "cola": {"matthews_correlation"},
        "stsb": {"pearson", "spearmanr", "mse", "combined_score"},
        "mrpc": {"accuracy", "f1", "combined_score"},
        "qqp": {"accuracy", "f1", "combined_score"},
    }.get(task, {"accuracy"})
    suffixes = ["", "_mm"] if task == "mnli" else [""]
    expected = {f"eval{suffix}_{name}" for suffix in suffixes for name in {*measured, "loss", "samples"}}
    assert expected | {f"predict{suffix}_samples" for suffix in suffixes} == scores.keys()
    allowed = {*names} if task != "stsb" else None
    for suffix in suffixes:
        lines = (tmp_path / f"predict{suffix}_results.txt").read_text().splitlines()[1:]
        assert len(lines) == 9 and (allowed is None or {line.split("\t")[1] for line in lines} <= allowed)
    saved = AutoConfig.from_pretrained(tmp_path).id2label
    assert [saved[index] for index in range(len(saved))] == (["LABEL_0"] if task == "stsb" else names)


def test_scores_are_those_of_scikit_learn_and_scipy():
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import f1_score, matthews_corrcoef

    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(60, 3)), generator.integers(3, size=60)
    scores = measure_classes(["f1", "matthews_correlation"], 3)(EvalPrediction(logits, labels))
    predicted = logits.argmax(-1)
    assert scores["f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert scores["matthews_correlation"] == pytest.approx(matthews_corrcoef(labels, predicted))
    two = measure_classes(["f1"], 2)(EvalPrediction(logits[:, :2], labels % 2))
    assert two == {"f1": pytest.approx(f1_score(labels % 2, logits[:, :2].argmax(-1)))}

    numbers = labels + 0.5 * logits[:, 0]
    scores = measure_numbers(EvalPrediction(logits[:, :1], numbers))
    assert scores["pearson"] == pytest.approx(pearsonr(logits[:, 0], numbers)[0])
    assert scores["spearmanr"] == pytest.approx(spearmanr(logits[:, 0], numbers)[0])
    assert scores["mse"] == pytest.approx(np.mean((logits[:, 0] - numbers) ** 2))
    assert measure_numbers(EvalPrediction(np.ones((4, 1)), np.arange(4.0)))["pearson"] == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_of_a_model_that_diverged_are_nan(value):
    """Neither 0, which may be the best so far, nor those of the first class."""
    predictions = np.array([[1.0, 2.0], [value, 0.5], [0.0, 1.0]])
    scores = measure_classes(["accuracy", "f1"], 2)(EvalPrediction(predictions, np.array([0, 0, 1])))
    assert [*scores] == ["accuracy", "f1", "combined_score"] and all(map(math.isnan, scores.values()))
    numbers = measure_numbers(EvalPrediction(predictions[:, :1], np.array([0.0, 0.5, 1.0])))
    assert math.isnan(numbers["pearson"]) and math.isnan(numbers["combined_score"])


def test_a_stock_checkpoint_gets_the_default_scheme_and_a_variant_keeps_its_own(checkpoint, finished):
    nothing = PositionArguments(position_scheme=None)
    assert ModelArguments(str(checkpoint)).load_config(nothing).position_scheme == PositionArguments.position_scheme
    assert ModelArguments(str(finished[0])).load_config(nothing).position_scheme == "absolute+deberta"
    assert ModelArguments(str(finished[0])).load_config(PositionArguments("t5")).position_scheme == "t5"


def test_arguments_can_come_from_a_json_file(files, checkpoint, tmp_path, run_main):
    entries = {"model_name_or_path": str(checkpoint), "validation_file": str(files / "dev.tsv"), "do_eval": True}
    entries |= {
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "position_scheme": "rope",
        "position_rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "max_eval_samples": "5",
        "metric": "f1",
        "do_train": "false",
    }
    entries |= {"column_names": ["source", "label", "mark", "sentence"]}
    (tmp_path / "arguments.json").write_text(json.dumps(entries))
    run_main(run_classification, tmp_path / "arguments.json")
    assert results(tmp_path / "run")["eval_samples"] == 5 and "eval_f1" in results(tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists(), "nothing was to be trained"


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"task_name": "colla"}, "--task_name colla: must be one of cola, mnli"),
        ({"metric": ["f1", "f2"]}, "--metric f2: must be one of accuracy, f1"),
        ({"problem_type": "regresion"}, "did you mean regression?"),
        ({"max_steps": "many"}, "invalid int value: 'many'"),
        ([], "'list' object is not a mapping"),
    ],
)
def test_a_mistake_in_a_json_file_is_told_in_one_line(entry, message, checkpoint, tmp_path, mistake):
    right = {"model_name_or_path": str(checkpoint), "output_dir": str(tmp_path / "run"), "do_train": True}
    (tmp_path / "arguments.json").write_text(json.dumps({**right, **entry} if entry else entry))
    assert message in mistake(run_classification, tmp_path / "arguments.json")


WRONG_FILES = {
    "empty.csv": "",
    "header.csv": "sentence,label\n",
    "one.csv": "sentence,label\nthe cat,1\nthe dog,1\n",
    "train.csv": "sentence,label\nthe cat,1\nthe dog,0\n",
    "other.csv": "sentence,label\nthe cat,1\nthe dog,maybe\n",
    "ragged.csv": "sentence,label\nthe cat,1\nthe, dog,0\nthe, child,0\n",
    "wide.csv": "sentence,label\nthe cat, the dog,1\nthe dog,0\n",
    "blank.csv": "sentence,label\n\n\n",
    "broken.json": '{"sentence": "the cat", "label": ',
    "missing.jsonl": '{"sentence": "the cat", "label": 1}\n{"sentence": null, "label": 0}\n',
    "twice.csv": "label,label\n1,1\n",
    "text.docx": "sentence,label\n",
    "bare.csv": "the cat sat,1\nthe dog,0\n",
}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--train_file nowhere.csv", "nowhere.csv does not exist"),
        ("--train_file text.docx", "text.docx: the name of a data file must end in one of .csv, .tsv, .json, .jsonl"),
        ("--train_file empty.csv", "empty.csv is empty"),
        ("--train_file header.csv", "header.csv has no rows"),
        ("--train_file one.csv", "it takes two classes to tell apart, and there is only 1"),
        ("--train_file ragged.csv", "ragged.csv cannot be read as csv"),
        ("--train_file wide.csv", "wide.csv has 2 columns, and its first row 3: the cat, the dog, 1"),
        ("--train_file wide.csv --column_names sentence label --has_header true", "its first row 3"),
        ("--train_file blank.csv", "blank.csv has no rows"),
        ("--train_file broken.json", "broken.json cannot be read as json"),
        ("--train_file missing.jsonl", "the train data have no sentence in row 2"),
        ("--train_file twice.csv", "two columns of the same name"),
        ("--train_file train.csv --text_column words", "no column 'words'; their columns are sentence, label"),
        ("--train_file bare.csv", "a csv or tsv file without a header, name its columns with --column_names"),
        ("--train_file train.csv --label_column class", "no column 'class'; their columns are sentence, label"),
        ("--train_file train.csv --column_names a b c", "train.csv has 2 columns, and 3 names for them: a, b, c"),
        ("--train_file train.csv --text_column a b c", "text_column must name one column or two, got a, b, c"),
        ("--train_file train.csv --do_eval", "there are no validation data: name a file with --validation_file"),
        (
            "--train_file train.csv --validation_file other.csv --do_eval",
            "the validation data have labels that cannot be predicted: 'maybe'; the training data have 0, 1",
        ),
        (
            "--train_file train.csv --test_file other.csv --do_predict",
            "the test data have labels that cannot be predicted: 'maybe'",
        ),
        ("--train_file other.csv --problem_type regression", "cannot be predicted: 'maybe'; in regression"),
        ("--train_file train.csv --problem_type regression --metric f1", "metric is for classes"),
        ("--train_file train.csv --task_name cola", "task_name names the data already"),
        ("--train_file train.csv --dataset_name other", "name files or --dataset_name, not both"),
        ("--train_file train.csv --max_train_samples 0", "max_train_samples must be at least 1, got 0"),
        ("--train_file train.csv --max_seq_length 65", "the position embedding matrix of absolute ends at 64 tokens"),
        ("--train_file train.csv --position_scheme absolut+t5", "did you mean 'absolute'"),
        ("--train_file train.csv --position_scheme t5 --position_buckets 7", "position_buckets"),
        (
            "--train_file train.csv --position_scheme rope --position_max_distance 7",
            "position_max_distance=7 has no use",
        ),
        ("--train_file train.csv --position_rope_scaling {linear}", "must be a JSON object"),
        ("--train_file train.csv --position_learning_rate -1", "position_learning_rate must not be negative"),
        ("--train_file train.csv --position_learning_rate nan", "position_learning_rate must be a finite number"),
        ("--train_file train.csv --model_name_or_path ./nowhere", "./nowhere"),
        ("--train_file train.csv --save_strategy sometimes", "sometimes"),
        ("--train_file train.csv --eval_do_concat_batches false", "metrics are computed of all predictions together"),
        ("--train_file train.csv --batch_eval_metrics true", "metrics are computed of all predictions together"),
        ("--train_file train.csv --prediction_loss_only true", "metrics are computed of all predictions together"),
        ("--train_file train.csv --attn_implementation flash_attention_2", "flash_attention_2"),
    ],
)
def test_mistakes_end_in_one_line_before_weights_are_read(arguments, message, checkpoint, mistake_in_training):
    said = mistake_in_training(run_classification, checkpoint, WRONG_FILES, arguments)
    assert message in said and ("without a header" in said) == ("bare.csv" in arguments)


def test_nothing_to_do_is_a_mistake_too(checkpoint, files, mistake):
    assert "give --do_train, --do_eval or --do_predict" in mistake(run_classification, *of_files(files, checkpoint))


@pytest.mark.parametrize("arguments", [["--metric", "bleu"], ["--task_name", "squad"], ["--position_combine", "mix"]])
def test_choices_are_checked_by_the_command_line(arguments, checkpoint, run_main):
    with pytest.raises(SystemExit) as stopped:
        run_main(run_classification, "--model_name_or_path", checkpoint, *arguments)
    assert stopped.value.code.startswith(f"error: {' '.join(arguments)}: must be one of ")


MISTAKEN = {
    "--task_name mrcp": "--task_name mrcp: must be one of .*; did you mean mrpc\\?",
    "--position_schme t5": "unknown argument --position_schme; did you mean --position_scheme\\?",
    "--learning_rat 1": "unknown argument --learning_rat; did you mean --learning_rate\\?",
    "--zzzzzzzz 1": "unknown argument --zzzzzzzz; --help lists all",
    "cola": "unexpected 'cola'; arguments are given as --name value",
    "--output_dir /proc/nowhere": "--output_dir /proc/nowhere: nothing can be written to /proc .*",
}


@tiny.cross(script=[run_classification, run_classification_no_trainer], arguments=MISTAKEN, strength=1)
def test_a_mistaken_command_line_is_told_in_one_line(script, arguments, checkpoint, tmp_path, run_main, capsys):
    message, wrong = MISTAKEN[arguments], arguments.split()
    if "--output_dir" not in wrong:
        wrong += ["--output_dir", tmp_path]
    with pytest.raises(SystemExit) as stopped:
        run_main(script, "--model_name_or_path", checkpoint, *wrong)
    assert re.fullmatch(f"error: {message}", stopped.value.code) and not capsys.readouterr().err


def test_help_begins_with_positions_and_shows_each_argument_by_one_spelling(run_main, capsys):
    with pytest.raises(SystemExit):
        run_main(run_classification, "--help")
    said = capsys.readouterr().out
    groups = [line for line in said.splitlines() if re.fullmatch(r"\w+:", line)]
    assert groups[:2] == ["options:", "positions:"] and {*groups[2:]} == {"data:", "checkpoint:", "training:"}
    assert "(default: None)" not in said and "--position-scheme" not in said
    assert len(said[: said.index("options:")].splitlines()) < 3


@pytest.mark.parametrize("option", ["--text_column", "--label_column"])
def test_a_missing_column_names_the_argument(option, checkpoint, files, tmp_path, mistake):
    arguments = [*of_files(files, checkpoint), option, "nowhere", "--do_train", "--output_dir", tmp_path]
    assert "no column 'nowhere'" in (said := mistake(run_classification, *arguments)) and said.endswith(
        f"{option} names another"
    )


def test_the_guard_against_reading_weights_works(checkpoint, files, tmp_path, mistake):
    with pytest.raises(AssertionError, match="about to be read"):
        mistake(
            run_classification,
            *of_files(files, checkpoint),
            "--do_train",
            "--output_dir",
            tmp_path,
            "--use_cpu",
            "true",
        )


def test_text_columns_default_to_the_usual_names():
    assert ClassificationArguments().text_column is None
    assert run_classification.USUAL_COLUMNS[-2:] == [("sentence",), ("text",)]
