"""The quick start from the command line, on a tiny budget, and once as its reader runs it."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import quickstart
import torch
from arguments import PositionArguments
from fresh_process import ROOT
from minilm import check_sha256
from punctuation import f1_scores
from scripts import tokens_kept
from training import PositionTrainingArguments
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    BertTokenizerFast,
    EvalPrediction,
)

from hf_posenc.modeling.models.configuration_posenc import FLAGS


# Whoever asks for a connection that leaves the machine is written down.
SITECUSTOMIZE = """
import socket

connect = socket.socket.connect

def watched(self, address):
    if self.family != socket.AF_UNIX:
        open({log!r}, "a").write(f"{{address}}\\n")
    return connect(self, address)

socket.socket.connect = watched
lookup = socket.getaddrinfo

def watched_lookup(host, *args, **kwargs):
    open({log!r}, "a").write(f"{{host}}\\n")
    return lookup(host, *args, **kwargs)

socket.getaddrinfo = watched_lookup
"""


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> Path:
    subjects = ["the cat", "a small dog", "my old friend", "the tall tree", "every child", "the quiet river"]
    blocks = [
        f"On that day, {a} saw {b}, and {c} did not. Then {b} went home."
        for a in subjects
        for b in subjects
        for c in subjects
    ]
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(blocks[::5]), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, text_file) -> Path:
    """A tiny BERT of random weights with a tokenizer that knows the words of the text."""
    folder = tmp_path_factory.mktemp("checkpoint")
    words = sorted(set(re.findall(r"\w+", text_file.read_text(encoding="utf-8").lower())))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def run(*arguments: str | Path, watch: Path | None = None) -> subprocess.CompletedProcess:
    """The quick start in a process of its own; with `watch`, a folder in which connections are written down."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if watch is not None:
        (watch / "sitecustomize.py").write_text(SITECUSTOMIZE.format(log=str(watch / "connections")))
        environment["PYTHONPATH"] += os.pathsep + str(watch)
        environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, ROOT / "examples" / "quickstart.py", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )


def table(output: str) -> dict[str, list[str]]:
    """The printed table: scheme -> F1, F1 at length or why there is none, by distance from the start, seconds."""
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in output.splitlines() if row.startswith("| ")]
    [header, *rows] = rows
    assert header[0] == "positions" and all(len(row) == len(header) == 7 for row in rows)
    return {scheme: values for scheme, *values in rows}


@pytest.fixture(scope="module")
def finished(checkpoint, text_file, tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """A run of a few steps and its folder."""
    folder = tmp_path_factory.mktemp("run")
    process = run(
        *("--model_name_or_path", checkpoint, "--text_file", text_file, "--output_dir", folder / "outputs"),
        *("--position_scheme", "sinusoidal+t5", "--position_combine", "gate", "--position_buckets", "8"),
        *("--max_steps", "3", "--window", "24", "--seed", "7", "--compare_with", "original", "none"),
        watch=folder,
    )
    assert process.returncode == 0, process.stderr
    return process, folder


@pytest.mark.slow
def test_stock_the_scheme_asked_for_and_none_are_trained_and_compared(finished):
    process, folder = finished
    scores = table(process.stdout)
    assert list(scores) == ["original", "sinusoidal+t5", "none"]
    assert all(0 <= float(row[0]) <= 1 for row in scores.values())
    results = json.loads((folder / "outputs" / "results.json").read_text(encoding="utf-8"))
    assert [row["position_scheme"] for row in results["results"]] == list(scores)
    assert results["training"]["max_steps"] == 3 and results["training"]["seed"] == 7
    assert process.stdout.count("loaded back, it predicts the same") == 3
    assert AutoConfig.from_pretrained(folder / "outputs" / "original").model_type == "bert"


@pytest.mark.slow
def test_what_is_longer_than_the_table_is_read_by_those_that_can(finished):
    process, folder = finished
    results = json.loads((folder / "outputs" / "results.json").read_text(encoding="utf-8"))
    assert results["long_window"] == 4 * 24 and results["windows"]["long"] >= 1
    rows = {row["position_scheme"]: row for row in results["results"]}
    assert rows["original"]["f1_long"] is None and rows["original"]["reads"] == 64
    assert table(process.stdout)["original"][1:5] == ["ends at 64", "–", "–", "–"]
    stock = AutoModelForTokenClassification.from_pretrained(folder / "outputs" / "original")
    with pytest.raises((IndexError, RuntimeError)):
        stock(torch.ones(1, 96, dtype=torch.long))
    for scheme in ("sinusoidal+t5", "none"):
        assert rows[scheme]["reads"] is None and 0 <= rows[scheme]["f1_long"] <= 1
        long = [rows[scheme]["f1_long"], *rows[scheme]["f1_by_distance"]]
        assert [*map(float, table(process.stdout)[scheme][1:5])] == pytest.approx(long, abs=5e-4)


@pytest.mark.slow
def test_there_is_one_progress_bar(finished):
    bars = re.findall(r"(\S[^|\r\n]*?): +\d+%\|[^|]*\| (\d+)/(\d+)", finished[0].stderr)
    assert {name for name, _, _ in bars} == {"original", "sinusoidal_t5", "none"}
    assert {total for _, _, total in bars} == {"9"}
    counted = [int(done) for _, done, _ in bars]
    assert counted == sorted(counted) and counted[-1] == 9
    assert finished[0].stderr.count("%|") == len(bars), finished[0].stderr
    assert "UNEXPECTED" not in finished[0].stderr and "leaves out" in finished[0].stderr


@pytest.mark.slow
def test_what_is_saved_is_the_variant_with_its_flags_and_tokenizer(finished, text_file):
    folder = finished[1] / "outputs" / "sinusoidal_t5"
    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == "posenc_bert"
    assert (config.position_scheme, config.position_combine, config.position_buckets) == ("sinusoidal+t5", "gate", 8)
    assert config.id2label == {0: "none", 1: "comma", 2: "full stop"}
    model = AutoModelForTokenClassification.from_pretrained(folder)
    assert model.bert.encoder.relative_attention_bias.weight.abs().max() > 0  # trained, and so not silent any more
    assert AutoTokenizer.from_pretrained(folder)("the cat")["input_ids"][1:-1] != [1, 1]


@pytest.mark.slow
def test_nothing_is_read_from_the_hub(finished):
    assert not (finished[1] / "connections").exists(), (finished[1] / "connections").read_text()


@pytest.mark.slow
def test_connections_would_be_noticed(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.format(log=str(tmp_path / "connections")))
    code = "import socket\ntry: socket.create_connection(('127.0.0.1', 9), timeout=1)\nexcept OSError: pass"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True)
    assert "127.0.0.1" in (tmp_path / "connections").read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--text_file", "no/such/file.txt"], "no/such/file.txt"),
        (["--text_file", os.devnull], "0 documents"),
        (["--position_scheme", "absolut+t5"], "did you mean 'absolute'"),
        (["--position_scheme", "t5", "--position_buckets", "7"], "position_buckets"),
        (["--position_scheme", "rope", "--position_rope_scaling", "{linear}"], "JSON"),
        (["--window", "3"], "window"),
        (["--long_window", "64"], "long_window must be more than the 64 tokens"),
        (["--compare_with", "stok"], "stok"),
        (["--position_learning_rate", "-1"], "position_learning_rate"),
        (["--held_out_share", "1.5"], "held_out_share"),
        (["--model_name_or_path", "./no/such/model"], "./no/such/model"),
    ],
)
def test_mistakes_end_in_one_clear_message(checkpoint, text_file, arguments, message, monkeypatch, capsys):
    defaults = ["--model_name_or_path", str(checkpoint), "--text_file", str(text_file)]
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *defaults, *arguments])
    with pytest.raises(SystemExit) as stopped:
        quickstart.main()
    assert str(stopped.value).startswith("error: ")
    assert message in str(stopped.value)


@pytest.mark.slow
def test_all_schemes_see_the_same_batches_from_the_same_start(checkpoint, text_file, tmp_path, monkeypatch):
    seen: dict[str, list] = {}
    heads = []

    class Recorder(quickstart.DataCollatorForTokenClassification):
        def torch_call(self, features):
            seen[scheme].append([feature["input_ids"] for feature in features])
            return super().torch_call(features)

    class Watched(quickstart.ScriptTrainer):
        def train(self, *args, **kwargs):
            heads.append(self.model.classifier.weight.detach().clone())
            return super().train(*args, **kwargs)

    monkeypatch.setattr(quickstart, "DataCollatorForTokenClassification", Recorder)
    monkeypatch.setattr(quickstart, "ScriptTrainer", Watched)
    training = PositionTrainingArguments(
        output_dir=str(tmp_path), max_steps=12, per_device_train_batch_size=8, save_strategy="no", disable_tqdm=True
    )
    arguments = quickstart.QuickstartArguments(str(checkpoint), str(text_file), window=24)
    data = quickstart.load_data(arguments, str(checkpoint))
    for scheme in ("absolute+t5", "none", "rope"):
        seen[scheme] = []
        config = quickstart.load_config(str(checkpoint), position_scheme=scheme)
        quickstart.fine_tune(str(checkpoint), config, training, data)
    assert len(data.train) < 12 * 8, "the comparison should go beyond the first epoch"
    # What follows is evaluated: long windows too, where a scheme can read them.
    trained = {scheme: batches[:12] for scheme, batches in seen.items()}
    assert trained["absolute+t5"] == trained["none"] == trained["rope"]
    assert seen["none"][0] != [feature["input_ids"] for feature in data.train[:8]], "nothing was shuffled"
    assert torch.equal(heads[0], heads[1]) and torch.equal(heads[0], heads[2])


@pytest.mark.slow
def test_a_variant_that_changes_on_disk_is_noticed(checkpoint, text_file, tmp_path, monkeypatch):
    class Forgetful(quickstart.ScriptTrainer):
        def save_model(self, *args, **kwargs):
            super().save_model(*args, **kwargs)
            model = AutoModelForTokenClassification.from_pretrained(self.args.output_dir)
            model.classifier.bias.data += torch.tensor([0.0, 100.0, 0.0])
            model.save_pretrained(self.args.output_dir)

    monkeypatch.setattr(quickstart, "ScriptTrainer", Forgetful)
    training = PositionTrainingArguments(output_dir=str(tmp_path), max_steps=1, save_strategy="no", disable_tqdm=True)
    data = quickstart.load_data(
        quickstart.QuickstartArguments(str(checkpoint), str(text_file), window=24), str(checkpoint)
    )
    config = quickstart.load_config(str(checkpoint), position_scheme="t5")
    with pytest.raises(RuntimeError, match="once loaded back"):
        quickstart.fine_tune(str(checkpoint), config, training, data)


@pytest.mark.slow
def test_each_variants_tokenizer_reads_as_far_as_its_model(checkpoint, text_file, tmp_path):
    """The checkpoint's tokenizer has no limit; its table of absolute positions ends at 64 tokens."""
    training = PositionTrainingArguments(output_dir=str(tmp_path), max_steps=1, save_strategy="no", disable_tqdm=True)
    arguments = quickstart.QuickstartArguments(str(checkpoint), str(text_file), window=24)
    data = quickstart.load_data(arguments, str(checkpoint))
    no_limit = data.tokenizer.model_max_length
    for scheme, limit, kept in (("absolute", no_limit, 64), ("t5", no_limit, 2002), ("t5", 20, 24)):
        data.tokenizer.model_max_length = limit
        config = quickstart.load_config(str(checkpoint), position_scheme=scheme)
        quickstart.fine_tune(str(checkpoint), config, training, data)
        assert tokens_kept(tmp_path / scheme) == {kept}
        assert data.tokenizer.model_max_length == limit, "the next variant is trained with it"


def test_position_parameters_learn_at_a_rate_of_their_own(checkpoint, text_file, tmp_path):
    training = PositionTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        learning_rate=1e-3,
        position_learning_rate=0.1,
        weight_decay=0.5,
        save_strategy="no",
    )
    data = quickstart.load_data(quickstart.QuickstartArguments(str(checkpoint), str(text_file)), str(checkpoint))
    config = quickstart.load_config(str(checkpoint), position_scheme="absolute+t5")
    model = AutoModelForTokenClassification.from_pretrained(checkpoint, config=config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = quickstart.make_trainer(model, training, data)
    every = [parameter for group in trainer.create_optimizer().param_groups for parameter in group["params"]]
    assert len(every) == len({id(parameter) for parameter in every}) == len(before)

    trainer.train()
    # Adam's first step is the learning rate, whatever the gradient; half of it is what no other rate would give.
    moved = {name: (parameter - before[name]).abs().max().item() for name, parameter in model.named_parameters()}
    assert moved.pop("bert.encoder.relative_attention_bias.weight") == pytest.approx(0.1, rel=0.01)
    assert max(moved.values()) < 5e-3


def test_every_flag_is_an_argument():
    assert [argument.name for argument in fields(PositionArguments)] == [
        "position_scheme",
        "scheme_file",
        *[*FLAGS][1:],
        "unpad",
    ]


def test_weights_that_were_changed_are_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="missing"):
        check_sha256(file, "0" * 64)
    file.write_bytes(b"weights")
    check_sha256(file, "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c")
    with pytest.raises(ValueError, match="not the file that was published"):
        check_sha256(file, "0" * 64)


def test_models_to_compare_are_each_there_once(checkpoint):
    def names(others: list[str], **flags) -> list[str]:
        return [quickstart.name_of(config) for config in quickstart.load_configs(str(checkpoint), flags, others)]

    assert names(["original", "none"], position_scheme="t5") == ["original", "t5", "none"]
    assert names(["none", "t5", "original"], position_scheme="t5") == ["original", "t5", "none"]
    assert names([], position_scheme="rope") == ["rope"]
    [config] = quickstart.load_configs(str(checkpoint), {"position_scheme": "t5", "position_buckets": 8}, ["t5"])
    assert config.position_buckets == 8, "flags are those that were given"


def test_without_a_scheme_t5_is_added_to_the_checkpoints_positions(checkpoint, text_file, run_main, monkeypatch):
    asked = []
    monkeypatch.setattr(quickstart, "fine_tune", lambda checkpoint, config, *rest: asked.append(config) or sys.exit())

    def config(*arguments: str):
        with pytest.raises(SystemExit):
            run_main(
                *(quickstart, "--model_name_or_path", checkpoint, "--text_file", text_file, "--compare_with", "none"),
                *("--output_dir", text_file.parent / "outputs", *arguments),
            )
        return asked[-1]

    assert (config().position_scheme, config().position_max_distance) == ("absolute+t5", None)
    assert config("--position_max_distance", "40").position_max_distance == 40
    assert config("--position_scheme", "rope").position_scheme == "rope"


@pytest.mark.slow
def test_long_windows_are_cut_from_held_out_text_and_measured_as_they_are(checkpoint, text_file, tmp_path):
    arguments = quickstart.QuickstartArguments(str(checkpoint), str(text_file), window=24, long_window=100)
    data = quickstart.load_data(arguments, str(checkpoint))
    assert data.long and {len(features["input_ids"]) for features in data.long} == {100}
    held_out = [token for features in data.held_out for token in features["input_ids"][1:-1]]
    long = [token for features in data.long for token in features["input_ids"][1:-1]]
    assert long == held_out[: len(long)], "the same text, cut elsewhere"
    training = PositionTrainingArguments(output_dir=str(tmp_path), max_steps=1, save_strategy="no", disable_tqdm=True)
    config = quickstart.load_config(str(checkpoint), position_scheme="rope")
    result = quickstart.fine_tune(str(checkpoint), config, training, data)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "rope").eval()
    batch = {name: torch.tensor([features[name] for features in data.long]) for name in data.long[0]}
    labels = batch.pop("labels").numpy()
    with torch.no_grad():
        logits = model(**batch).logits.numpy()

    def expected(first: int, end: int) -> float:
        return f1_scores(EvalPrediction(logits[:, first:end], labels[:, first:end]))["f1"]

    assert result.f1_long == pytest.approx(expected(0, 100)) and result.reads is None
    ends = [(0, 24), (24, 48), (48, 96), (96, 100)]
    assert result.f1_by_distance == pytest.approx([expected(*span) for span in ends])
    text = "no such text"
    assert quickstart.at_length(replace(result, f1_long=None), replace(data, long=[])) == text
