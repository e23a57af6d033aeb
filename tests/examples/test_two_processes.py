"""A script on `Trainer` in two processes has the losses of one process with the doubled batch."""

import json
import random
import subprocess
from pathlib import Path

import pytest
import torch
from scripts import LAUNCH_TWO, command, environment, save_checkpoint


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
