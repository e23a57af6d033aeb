"""The loop on bare accelerate: from the command line, killed and resumed."""

import json
import math
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import run_classification_no_trainer
import torch
from fresh_process import ROOT
from safetensors.torch import load_file
from scripts import environment, save_checkpoint, tokens_kept


SCRIPT = ROOT / "examples" / "run_classification_no_trainer.py"
WORDS = "good bad cat dog the a runs sleeps".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny checkpoint without dropout, `model`, one with dropout, `dropping`, and train.csv and dev.csv.

    Sentences are of class "yes" where "good" comes before "bad": a matter of order.
    """
    folder = tmp_path_factory.mktemp("classification")
    for name, dropout in (("model", 0.0), ("dropping", 0.3)):
        save_checkpoint(folder / name, " ".join(WORDS), dropout=dropout)
    draw = random.Random(0)
    for file, number in (("train.csv", 96), ("dev.csv", 33)):
        sentences = [draw.sample(WORDS, draw.randint(3, 8)) for _ in range(number)]
        lines = [
            f"{' '.join(words)},{'yes' if 'bad' in words[words.index('good') :] else 'no'}"
            for words in ([*s, "good"] if "good" not in s else s for s in sentences)
        ]
        (folder / file).write_text("\n".join(["sentence,label", *lines]) + "\n")
    return folder


def arguments(folder: Path, output: Path, *others: str) -> list[str]:
    """The script and its arguments."""
    data = ["--train_file", folder / "train.csv", "--validation_file", folder / "dev.csv", "--cpu"]
    positions = ["--position_scheme", "absolute+deberta", "--position_learning_rate", "0.01"]
    steps = ["--learning_rate", "1e-3", "--num_train_epochs", "2"]
    model = [] if "--model_name_or_path" in others else ["--model_name_or_path", folder / "model"]
    return [str(each) for each in (SCRIPT, *data, *positions, *steps, *model, "--output_dir", output, *others)]


def run(command: list[str], cache: Path) -> str:
    process = subprocess.run(command, env=environment(cache), capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return process.stdout


def history(output: Path) -> dict:
    return json.loads((output / "history.json").read_text())


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_numbers(folder, tmp_path):
    options = ["--model_name_or_path", str(folder / "dropping"), "--checkpointing_steps", "5"]
    run([sys.executable, *arguments(folder, tmp_path / "whole", *options)], folder)

    command = [sys.executable, *arguments(folder, tmp_path / "killed", *options)]
    kill_at_the_checkpoint(4, command, folder, tmp_path / "killed" / "checkpoint")  # after 5, 10, 12 and 17 steps
    # Another kill left a checkpoint half written.
    unfinished = tmp_path / "killed" / "checkpoint.unfinished"
    unfinished.mkdir(exist_ok=True)
    (unfinished / "model.safetensors").write_bytes(b"half")
    printed = run(command, folder)
    assert "going on from" in printed and "was not finished; it is passed over" in printed
    whole, killed = history(tmp_path / "whole"), history(tmp_path / "killed")
    assert killed == whole
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    # What was written is the best epoch's.
    results = json.loads((tmp_path / "killed" / "all_results.json").read_text())
    assert results["eval_accuracy"] == max(scores["accuracy"] for scores in killed["scores"])


def test_steps_may_be_given_in_place_of_epochs(folder, tmp_path, run_main):
    options = ["--max_train_steps", "15", "--per_device_train_batch_size", "8"]
    run_main(run_classification_no_trainer, *arguments(folder, tmp_path, *options)[1:])
    found = history(tmp_path)
    assert found["step"] == len(found["losses"]) == 15 and len(found["scores"]) == 2  # an epoch has 12


def test_a_run_that_stopped_after_its_last_step_is_not_trained_on(folder, tmp_path, run_main, monkeypatch):
    options = ["--max_train_steps", "15", "--checkpointing_steps", "5", "--per_device_train_batch_size", "8"]
    evaluate = run_classification_no_trainer.Loop.evaluate

    def stop(loop):
        if loop.progress.step == 15:
            raise KeyboardInterrupt
        return evaluate(loop)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_classification_no_trainer.Loop, "evaluate", stop)
        run_main(run_classification_no_trainer, *arguments(folder, tmp_path / "stopped", *options)[1:])
    for name in ("stopped", "whole"):
        run_main(run_classification_no_trainer, *arguments(folder, tmp_path / name, *options)[1:])
    assert history(tmp_path / "stopped") == history(tmp_path / "whole")


def kill_at_the_checkpoint(number: int, command: list[str], cache: Path, checkpoint: Path) -> None:
    """Start a command and kill it when a checkpoint was put in its place for the so-manyth time."""
    process = subprocess.Popen(command, env=environment(cache), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seen: set[int] = set()
    while len(seen) < number:
        assert process.poll() is None, "the run ended before it was killed"
        with suppress(FileNotFoundError):
            seen.add((checkpoint / "whole").stat().st_mtime_ns)
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_the_tokenizer_reads_as_much_as_in_training(folder, tmp_path, run_main):
    options = ["--position_scheme", "rope", "--position_learning_rate", "0", "--num_train_epochs", "1"]
    options += ["--max_seq_length", "300", "--max_train_samples", "8"]
    run_main(run_classification_no_trainer, *arguments(folder, tmp_path, *options)[1:])
    assert tokens_kept(tmp_path) == {300}


def test_a_model_that_diverged_is_never_the_best(folder, tmp_path, run_main, monkeypatch):
    monkeypatch.setattr(run_classification_no_trainer.Loop, "evaluate", lambda loop: {"accuracy": math.nan})
    with pytest.raises(SystemExit, match="error: accuracy was no finite number after any epoch"):
        run_main(run_classification_no_trainer, *arguments(folder, tmp_path, "--num_train_epochs", "1")[1:])
    assert not [*tmp_path.glob("*.safetensors")]


def test_another_run_in_the_same_folder_is_refused(folder, tmp_path, mistake):
    (tmp_path / "run_settings.json").write_text('{"learning_rate": 0.5}')
    said = mistake(run_classification_no_trainer, *arguments(folder, tmp_path)[1:])
    assert "learning_rate is 0.5 there and 0.001 here" in said


@pytest.mark.parametrize("option", [("--test_file", "test.csv"), ("--max_predict_samples", "3")])
def test_what_it_does_not_do_is_refused(option, folder, tmp_path, mistake):
    said = mistake(run_classification_no_trainer, *arguments(folder, tmp_path, *option)[1:])
    assert "nothing is predicted here: leave out test_file and max_predict_samples" in said


def test_the_rate_grows_in_a_share_of_the_steps(folder, tmp_path, mistake):
    said = mistake(run_classification_no_trainer, *arguments(folder, tmp_path, "--warmup_share", "7")[1:])
    assert "warmup_share must be at most 1, got 7.0" in said


@pytest.mark.parametrize("name", ["learning_rate", "position_learning_rate", "weight_decay"])
def test_what_is_no_rate_is_refused(name, folder, tmp_path, mistake):
    said = mistake(run_classification_no_trainer, *arguments(folder, tmp_path, f"--{name}", "nan")[1:])
    assert f"{name} must be a finite number, got nan" in said


def test_positions_without_a_rate_of_their_own_are_told(folder, tmp_path, run_main, said):
    given = arguments(folder, tmp_path, "--max_train_steps", "2")[1:]
    place = given.index("--position_learning_rate")
    run_main(run_classification_no_trainer, *given[:place], *given[place + 2 :])
    assert sum("give them a higher learning rate" in line for line in said) == 1
