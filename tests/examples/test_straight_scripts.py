"""The scripts to copy run from top to bottom, in one process and in two, and need nothing of the other files here."""

import ast
import inspect
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fresh_process import ROOT
from scripts import LAUNCH_TWO, environment, save_checkpoint
from tiny import FAMILIES, variant_config
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from hf_posenc import position_parameters
from hf_posenc.modeling.schemes.table import SCHEMES
from hf_posenc.training import PositionTrainer


library = pytest.importorskip("sentence_transformers", minversion="6.0")

import classify  # noqa: E402
import convert_and_search  # noqa: E402
import pretrain  # noqa: E402
import rerank  # noqa: E402
import tag_documents  # noqa: E402


PAGE = ROOT / "docs" / "fine-tuning.md"
SCRIPTS = {script.__name__: script for script in (classify, tag_documents, rerank, pretrain, convert_and_search)}
PACKAGES = {"torch", "transformers", "accelerate", "datasets", "sentence_transformers", "evaluate", "hf_posenc"}
WORDS = "anna bert carla sees likes the river town of".split()


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A checkpoint, one of sentence-transformers, and a small file of each format."""
    folder = tmp_path_factory.mktemp("world")
    checkpoint = save_checkpoint(folder / "checkpoint", " ".join(WORDS))
    library.SentenceTransformer(str(checkpoint), device="cpu").save(str(folder / "sentences"))
    draw = random.Random(0)

    def text(number: int) -> str:
        return " ".join(draw.choices(WORDS, k=number))

    texts = [f"{text(8)},{'number' if row % 2 else 7}" for row in range(64)]
    (folder / "texts.csv").write_text("\n".join(["text,label", *texts]) + "\n")
    pairs = [f"{query},{text(6)},{row % 2}" for query in ("anna sees", "the town") for row in range(64)]
    (folder / "pairs.csv").write_text("\n".join(["query,passage,label", *pairs]) + "\n")
    documents = [text(number).split() for number in (600, 5, 1200, 30, 600, 20, 40, 9)]
    tagged = [{"tokens": words, "tags": ["B-PER" if w in WORDS[:3] else "O" for w in words]} for words in documents]
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, tagged)) + "\n")
    (folder / "text.txt").write_text("\n".join(text(40) for _ in range(60)) + "\n")
    return folder


def arguments(script: str, world: Path, out: Path) -> list[str]:
    files = {
        "classify": "texts.csv",
        "rerank": "pairs.csv",
        "tag_documents": "documents.jsonl",
        "pretrain": "text.txt",
    }
    if script == "convert_and_search":
        own = ["--model", world / "sentences", "--passages", world / "text.txt", "--max_steps", 3, "--top", 2]
        own += ["--query", "anna sees", "--query", "the town"]
    else:
        own = ["--train_file", world / files[script], "--validation_file", world / files[script]]
        own += ["--tokenizer" if script == "pretrain" else "--model", world / "checkpoint"]
    if script == "pretrain":
        own += ["--hidden_size", 64, "--num_hidden_layers", 1, "--max_steps", 2]
    return [*map(str, own), "--output_dir", str(out)]


def steps(out: Path) -> int:
    return max(int(folder.name.rpartition("-")[2]) for folder in out.glob("checkpoint-*"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_stands_alone(name):
    text = Path(SCRIPTS[name].__file__).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    tree = ast.parse(text)
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module.partition(".")[0] for module in imported} <= PACKAGES | sys.stdlib_module_names
    for launched in (
        f"    python examples/{name}.py --",
        f"    accelerate launch --num_processes 2 examples/{name}.py --",
    ):
        assert launched in ast.get_docstring(tree, clean=False)
    assert f"| [`{name}.py`](../examples/{name}.py) |" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name, world, tmp_path, run_main, said, capsys):
    run_main(SCRIPTS[name], *arguments(name, world, tmp_path / "out"))
    model = AutoModel.from_pretrained(tmp_path / "out")
    assert model.config.position_scheme == SCRIPTS[name].POSITION_SCHEME
    # Somewhere else than 5e-5 a step would have led them, and without a warning that they stay.
    assert all(parameter.abs().max() > 1e-3 for parameter in position_parameters(model).values())
    assert bool(position_parameters(model)) == (name != "pretrain")
    assert not [line for line in said if "start at 0" in line]
    printed = capsys.readouterr().out
    measured = {"classify": "eval_accuracy", "rerank": "eval_ndcg@10", "tag_documents": "eval_f1_of_words"}
    assert measured.get(name, "perplexity" if name == "pretrain" else "\nthe town\n") in printed


def test_documents_are_read_as_a_whole(world, tmp_path, run_main):
    """Pieces end where the length ends, no word is left out, and each has one label."""
    lengths, labels = [], 0
    collate = tag_documents.DataCollatorForTokenClassification.torch_call

    def look(collator, features):
        nonlocal labels
        lengths.extend(len(feature["input_ids"]) for feature in features)
        labels += sum(label != -100 for feature in features for label in feature["labels"])
        return collate(collator, features)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tag_documents.DataCollatorForTokenClassification, "torch_call", look)
        patch.setattr(tag_documents, "EPOCHS", 1)
        patch.setattr(tag_documents, "MAX_LENGTH", 1000)
        options = arguments("tag_documents", world, tmp_path / "out")
        at = options.index("--validation_file")
        run_main(tag_documents, *options[:at], *options[at + 2 :])
    assert sorted(lengths) == sorted([602, 7, 1000, 1200 - 998 + 2, 32, 602, 22, 42, 11])
    assert labels == 600 + 5 + 1200 + 30 + 600 + 20 + 40 + 9
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 1000


def test_a_word_that_the_end_of_a_piece_divides_has_one_label(tmp_path, run_main, monkeypatch):
    checkpoint = save_checkpoint(tmp_path / "checkpoint", "anna bert", "##bert", "##anna")
    words = ["annabertanna", "bert"] * 20
    rows = [{"tokens": words, "tags": ["B-PER", "O"] * 20}] * 2
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    seen = []
    monkeypatch.setattr(tag_documents, "MAX_LENGTH", 9)
    monkeypatch.setattr(tag_documents.Trainer, "train", lambda trainer: seen.extend(trainer.train_dataset))
    given = ["--train_file", tmp_path / "rows.jsonl", "--model", checkpoint, "--output_dir", tmp_path / "out"]
    run_main(tag_documents, *map(str, given))
    assert len(seen) == 2 * 12  # of 80 tokens in pieces of 7
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for piece in seen:
        for token, label in zip(tokenizer.convert_ids_to_tokens(piece["input_ids"]), piece["labels"]):
            assert (label == -100) == token.startswith(("[", "##"))
    assert sum(label != -100 for piece in seen for label in piece["labels"]) == 2 * len(words)


@pytest.mark.parametrize("name", ["pretrain", "tag_documents"])
def test_names_of_files_are_no_patterns(name, world, tmp_path, run_main, monkeypatch):
    script = SCRIPTS[name]
    given = arguments(name, world, tmp_path / "out")
    file = Path(given[given.index("--train_file") + 1])
    (tmp_path / f"d[1]{file.suffix}").write_text(file.read_text())
    (tmp_path / f"d1{file.suffix}").write_text(file.read_text().split("\n")[0] + "\n")
    given[given.index("--train_file") + 1] = str(tmp_path / f"d[1]{file.suffix}")
    sizes = []
    monkeypatch.setattr(script.Trainer, "train", lambda trainer: sizes.append(len(trainer.train_dataset)))
    monkeypatch.setattr(script.Trainer, "evaluate", lambda trainer: {"eval_loss": 0.0})
    run_main(script, *given)
    assert sizes[0] == (8 if name == "tag_documents" else 5)


def test_a_file_without_queries_to_rerank_is_refused_before_training(world, tmp_path, run_main, capsys):
    (tmp_path / "dev.csv").write_text("query,passage,label\nanna sees,the town,1\nthe town,of bert,0\n")
    given = arguments("rerank", world, tmp_path / "out")
    given[given.index("--validation_file") + 1] = str(tmp_path / "dev.csv")
    with pytest.raises(ValueError, match="no query with passages that answer it and passages that do not"):
        run_main(rerank, *given)
    assert not (tmp_path / "out").exists()
    rows = rerank.read_rows(str(world / "pairs.csv"), ("query", "passage", "label")).cast_column(
        "label", rerank.Value("float32")
    )
    assert len(rerank.by_query(rows)) == 2 and "2 of 2 queries" in capsys.readouterr().out


def test_a_converted_folder_is_used_as_it_is(world, tmp_path, run_main, capsys, monkeypatch):
    options = arguments("convert_and_search", world, tmp_path / "out")
    run_main(convert_and_search, *options)
    first = capsys.readouterr().out.partition("\nanna sees\n")[2]
    monkeypatch.setattr(convert_and_search.hf_posenc, "convert", None)
    run_main(convert_and_search, *options)
    assert capsys.readouterr().out.partition("\nanna sees\n")[2] == first and first.count("\n  0.") == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_unchanged_in_two_processes(name, world, tmp_path):
    done, ran = {}, {}
    for processes, before in (("one", ()), ("two", LAUNCH_TWO)):
        options = arguments(name, world, tmp_path / processes)
        run = [sys.executable, *before, ROOT / "examples" / f"{name}.py", *options]
        done[processes] = subprocess.run(
            run,
            env=environment(tmp_path / "cache") | {"CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done[processes].returncode == 0, done[processes].stderr[-3000:]
        parameters = AutoModel.from_pretrained(tmp_path / processes).state_dict()
        assert all(value.isfinite().all() for value in parameters.values())
        ran[processes] = parameters
    assert ran["one"].keys() == ran["two"].keys()
    # Together, not each by itself: half the steps, other than where their number is given, and one process prints.
    if name in ("classify", "rerank", "tag_documents"):
        assert steps(tmp_path / "one") == {"classify": 12, "rerank": 8, "tag_documents": 10}[name]
        assert steps(tmp_path / "two") == {"classify": 6, "rerank": 4, "tag_documents": 5}[name]
    told = "\nthe town\n" if name == "convert_and_search" else "***** eval metrics *****"
    assert [process.stdout.count(told) for process in done.values()] == [1, 1]
    assert any(not torch.equal(ran["one"][key], ran["two"][key]) for key in ran["one"])


def rates(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of each parameter that is trained."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups
    found = [(names[id(p)], (group["lr"], group["weight_decay"])) for group in groups for p in group["params"]]
    assert len({*found}) == len(found)
    return dict(found)


CASES = [("bert", scheme) for scheme in SCHEMES] + [(family, "absolute+deberta") for family in FAMILIES]


@pytest.mark.parametrize("script", [classify, tag_documents])
@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_the_ten_lines_give_the_groups_of_position_trainer(script, family, scheme, tmp_path):
    model = AutoModelForSequenceClassification.from_config(variant_config(family, position_scheme=scheme))
    next(model.parameters()).requires_grad_(False)
    settings = TrainingArguments(str(tmp_path), learning_rate=3e-5, weight_decay=0.02, use_cpu=True)
    ours = PositionTrainer(model, settings, position_learning_rate=0.05).create_optimizer()
    theirs = script.adamw(model, settings, 0.05)
    assert rates(theirs, model) == rates(ours, model)
    for key in ("betas", "eps"):
        assert theirs.defaults[key] == ours.defaults[key]
    if position_parameters(model) and scheme != "sinusoidal":
        assert {(3e-5, 0.02), (3e-5, 0.0), (0.05, 0.0)} == {*rates(theirs, model).values()}


def test_there_are_ten_lines_of_it_and_they_are_the_same_everywhere():
    lines = inspect.getsource(classify.adamw)
    assert lines == inspect.getsource(tag_documents.adamw) and len(lines.splitlines()) == 10
    # On the page, too, but for type hints and a docstring.
    assert "".join(lines.splitlines(keepends=True)[2:]) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", ["deberta", "absolute+t5", "absolute+transformer_xl"])
def test_the_mapping_of_sentence_transformers_gives_the_groups_of_position_trainer(
    scheme, world, tmp_path, run_main, monkeypatch
):
    monkeypatch.setattr(rerank, "POSITION_SCHEME", scheme)
    seen = {}
    train = rerank.CrossEncoderTrainer.train
    monkeypatch.setattr(
        rerank.CrossEncoderTrainer, "train", lambda trainer: seen.update(trainer=trainer) or train(trainer)
    )
    run_main(rerank, *arguments("rerank", world, tmp_path / "out"))
    trainer = seen["trainer"]
    trainer.optimizer = None
    found = rates(trainer.create_optimizer(), trainer.model)
    settings = TrainingArguments(str(tmp_path), learning_rate=rerank.LEARNING_RATE, use_cpu=True)
    ours = PositionTrainer(trainer.model, settings, position_learning_rate=rerank.POSITION_LEARNING_RATE)
    assert found == rates(ours.create_optimizer(), trainer.model)
    assert len({*found.values()}) == 2
