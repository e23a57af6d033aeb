"""Scripts in two processes, replicas (DDP) and shards (FSDP2), have the losses of one process with as large a batch."""

import json
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scripts import LAUNCH_TWO, LAUNCH_TWO_SHARDS, command, environment, save_checkpoint
from transformers import AutoModelForSequenceClassification


pytestmark = pytest.mark.slow

WORDS = "anna bert carla sees likes the river town of".split()


def sentences(file: Path, number: int) -> Path:
    """Names are spans; sentences differ in length, so that a mean over processes is no mean over tokens."""
    draw = random.Random(number)
    lines = []
    for _ in range(number):
        words = draw.choices(WORDS, k=draw.randint(2, 20))
        tags = ["B-PER" if word in WORDS[:3] else "O" for word in words]
        lines.append(json.dumps({"tokens": words, "ner_tags": tags}))
    file.write_text("\n".join(lines) + "\n")
    return file


def losses(folder: Path) -> list[float]:
    state = json.loads((folder / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def test_the_loss_is_averaged_over_the_tokens_of_both_processes(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "checkpoint", " ".join(WORDS), dropout=0.0)
    options = ["--model_name_or_path", checkpoint, "--train_file", sentences(tmp_path / "train.jsonl", 80)]
    options += ["--position_scheme", "absolute+t5", "--position_learning_rate", "0.1", "--learning_rate", "1e-3"]
    options += ["--do_train", "--max_steps", "20", "--logging_steps", "1", "--ddp_find_unused_parameters", "false"]
    options += ["--save_strategy", "no", "--report_to", "none"]
    printed = {}
    for name, before, batch in (("one", (), 8), ("two", LAUNCH_TWO, 4)):
        own = ["--per_device_train_batch_size", batch, "--output_dir", tmp_path / name]
        python, *script = command("run_token_classification.py", *options, *own)
        process = subprocess.run(
            [python, *before, *script],
            env=environment(tmp_path / "cache"),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert process.returncode == 0, process.stderr
        printed[name] = process
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 20
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), atol=1e-4, rtol=0)
    assert max(one) - min(one) > 0.1  # something was learned
    # One process prints for both: nothing of what it says is there twice.
    for said in ("train metrics", "'loss': ", "LOAD REPORT"):
        counts = {name: (done.stdout + done.stderr).count(said) for name, done in printed.items()}
        assert counts["one"] == counts["two"] > 0, (said, counts)


CLASSIFIERS = {
    # Script -> its own arguments, the losses that it wrote, and a file of a checkpoint's that is written last, of the step 10.
    "run_classification.py": (
        ["--use_cpu", "true", "--do_train", "--max_steps", "24", "--save_steps", "10", "--logging_steps", "1"]
        + ["--disable_tqdm", "true", "--report_to", "none", "--ddp_find_unused_parameters", "false"],
        losses,
        "checkpoint-10/trainer_state.json",
    ),
    "run_classification_no_trainer.py": (
        ["--cpu", "--num_train_epochs", "2", "--checkpointing_steps", "10"],
        lambda folder: json.loads((folder / "history.json").read_text())["losses"],
        "checkpoint/whole",
    ),
}


@pytest.fixture(scope="module")
def sentences_in_order(tmp_path_factory) -> Path:
    """A tiny checkpoint, train.csv and dev.csv; sentences are of class "yes" where "anna" comes before "bert"."""
    folder = tmp_path_factory.mktemp("order")
    save_checkpoint(folder / "model", " ".join(WORDS), dropout=0.0)
    draw = random.Random(0)
    for file, number in (("train.csv", 96), ("dev.csv", 33)):
        rows = [draw.sample(WORDS, len(WORDS))[: draw.randint(7, 9)] for _ in range(number)]
        rows = [[*row, *({"anna", "bert"} - {*row})] for row in rows]
        lines = [f"{' '.join(row)},{'yes' if row.index('anna') < row.index('bert') else 'no'}" for row in rows]
        (folder / file).write_text("\n".join(["sentence,label", *lines]) + "\n")
    return folder


def launched(command: list[str], cache: Path, until: Callable[[], bool] | None = None) -> str:
    """What a command printed; with `until`, it is ended by SIGTERM when that holds, as clusters end jobs."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment(cache), **streams)
    while until is not None and not until():
        assert process.poll() is None, "the run ended before it was killed"
        time.sleep(0.001)
    if until is not None:
        process.terminate()
    printed, _ = process.communicate(timeout=300)
    assert (process.returncode == 0) == (until is None), printed
    return printed


@pytest.mark.parametrize("launch", [LAUNCH_TWO, LAUNCH_TWO_SHARDS], ids=["replicas", "shards"])
@pytest.mark.parametrize("script", CLASSIFIERS)
def test_two_processes_that_accumulate_and_are_killed_have_the_curve_of_one(
    script, launch, sentences_in_order, tmp_path
):
    folder = sentences_in_order
    own, losses_of, last_written = CLASSIFIERS[script]
    options = ["--model_name_or_path", folder / "model", "--train_file", folder / "train.csv", *own]
    options += ["--validation_file", folder / "dev.csv", "--learning_rate", "1e-3"]
    options += ["--position_scheme", "absolute+deberta", "--position_learning_rate", "0.01"]
    python, path, *_ = command(script)
    one = [python, path, *map(str, options), "--output_dir", str(tmp_path / "one")]
    launched([*one, "--per_device_train_batch_size", "8"], folder)
    two = [python, *launch, path, *map(str, options), "--output_dir", str(tmp_path / "two")]
    two += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    launched(two, folder, until=(tmp_path / "two" / last_written).exists)
    launched(two, folder)
    expected, found = (torch.tensor(losses_of(tmp_path / name)) for name in ("one", "two"))
    assert len(expected) == 24 and expected.max() - expected.min() > 1e-2  # something was learned
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    weights = [
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two")
    ]
    assert weights[0]["bert.encoder.rel_embeddings.weight"].abs().max() > 1e-3
    for name, weight in weights[0].items():
        # Softmax does not see what all keys share: the gradient of their bias is nearly all rounding, and Adam takes steps of any gradient.
        tolerance = 1e-3 if name.endswith("key.bias") else 1e-4
        torch.testing.assert_close(weights[1][name], weight, atol=tolerance, rtol=0)
