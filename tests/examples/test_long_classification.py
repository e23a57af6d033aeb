"""long_classification.py: what is labelled, what a run reads, and the whole from the command line."""

import json
import random

import long_classification
import pytest
import torch
from long_classification import IGNORED, SHORTEST, Task, as_batch, mixed, paragraphs_of
from long_prose import PEOPLE
from scripts import save_checkpoint
from transformers import AutoTokenizer

from hf_posenc import convert


def article(number: int) -> list[str]:
    """Paragraphs that name their article in each sentence."""
    return [
        " ".join(f"article{number} saw {who} in the year {10 * row + place}." for place, who in enumerate(PEOPLE))
        for row in range(6)
    ]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for name, first in (("train.txt", 0), ("test.txt", 6)):
        paragraphs = (" \n \n ".join(article(number)) for number in range(first, first + 6))
        (folder / name).write_text("".join(f" \n = T = \n \n {own} \n" for own in paragraphs), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("checkpoint")
    text = "".join((texts / name).read_text() for name in ("train.txt", "test.txt"))
    return save_checkpoint(folder, text, dropout=0.0)


@pytest.fixture
def options(texts, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(long_classification, "TRAINED_LENGTH", 32)
    files = [
        "--train_file",
        texts / "train.txt",
        "--test_file",
        texts / "test.txt",
        "--model_name_or_path",
        checkpoint,
    ]
    sizes = ["--lengths", "192", "480", "--max_steps", "2", "--tested", "4", "--seeds", "1"]
    return [*files, *sizes, "--output_dir", tmp_path / "out"]


def test_labels_say_which_paragraphs_are_of_the_first_ones_article(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    articles = paragraphs_of([article(number) for number in range(6)], tokenizer)
    assert all(SHORTEST <= len(one) <= 96 for own in articles for one in own)
    names = {tokenizer.convert_tokens_to_ids(f"article{number}") for number in range(6)}
    drawn = random.Random(0)
    shares = []
    for _ in range(20):
        document = mixed(articles, 400, tokenizer, drawn)
        assert len(document.ids) == len(document.labels) == 400
        assert (document.ids[0], document.ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        named = [(token, label) for token, label in zip(document.ids, document.labels) if token in names]
        own = document.ids[1]
        assert own in names and len({token for token, _ in named}) == 2
        first = document.labels.index(next(label for label in document.labels if label != IGNORED))
        assert {*document.labels[:first]} == {IGNORED} and first == 1 + len(
            next(o for o in articles if o[0][0] == own)[0]
        )
        assert all(label == int(token != own) for token, label in named if label != IGNORED)
        shares.append(sum(label == 1 for label in document.labels) / 400)
    assert 0.35 < sum(shares) / len(shares) < 0.6


def test_the_same_seed_gives_the_same_documents(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    articles = paragraphs_of([article(number) for number in range(6)], tokenizer)
    first, second, other = (mixed(articles, 200, tokenizer, random.Random(seed)) for seed in (1, 1, 2))
    assert first == second != other


def test_all_models_are_trained_and_tested_and_none_twice(options, texts, checkpoint, tmp_path, run_main, capsys):
    convert(
        str(checkpoint),
        "absolute+t5",
        output=tmp_path / "converted",
        text=[texts / "train.txt"],
        trained_length=32,
        max_length=480,
        train="none",
    )
    options += ["--converted", tmp_path / "converted"]
    run_main(long_classification, *options)
    runs = {file.name: file.read_text() for file in (tmp_path / "out" / "runs").iterdir()}
    # Stock reads 64 tokens and is trained at none of the lengths.
    assert len(runs) == 2 * 4
    for run in map(json.loads, runs.values()):
        assert run["steps"] == 2 and run["read"] == 480 and 0 <= run["accuracy"] <= 1 and len(run["by_depth"]) == 4
    table = (tmp_path / "out" / "results.md").read_text()
    assert table.count("\n") == 2 + 8 and table in capsys.readouterr().out
    run_main(long_classification, *options)
    assert runs == {file.name: file.read_text() for file in (tmp_path / "out" / "runs").iterdir()}
    with pytest.raises(SystemExit, match="tested is 4 there and 5 here"):
        run_main(long_classification, *options, "--tested", "5")


def test_what_is_not_read_counts_as_a_guess(options):
    [arguments] = long_classification.ScriptParser(
        (long_classification.ClassificationArguments,)
    ).parse_args_into_dataclasses([*map(str, options), "--models", "absolute"])
    task = Task(arguments)

    class Right(torch.nn.Module):
        """Knows every label."""

        device = torch.device("cpu")

        def forward(self, input_ids):
            ids, labels = as_batch(task.tested)
            [row] = (ids[:, : input_ids.shape[1]] == input_ids).all(dim=1).nonzero()[0]
            wanted = labels[row, : input_ids.shape[1]].clamp(min=0)
            return type("Output", (), {"logits": torch.nn.functional.one_hot(wanted, 2)[None].float()})

    accuracy, by_depth = task.test(Right(), 240)
    assert by_depth == [1.0, 1.0, 0.5, 0.5]
    labelled = as_batch(task.tested)[1] != IGNORED
    expected = (labelled[:, :240].sum() + 0.5 * labelled[:, 240:].sum()) / labelled.sum()
    assert accuracy == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--models", "t6"], "unknown models t6"),
        ([], "name the folder of the model that was converted with --converted"),
        (["--models", "t5", "--lengths", "100"], "lengths must be at least 192"),
        (["--models", "t5", "--lengths", "300"], "the greatest length must be at least 480"),
        (["--models", "t5", "--train_file", "missing.txt"], "missing.txt"),
        (["--models", "t5", "--seeds", "0"], "must be greater than 0"),
    ],
)
def test_mistakes_are_told_in_a_line(options, mistake, wrong, message):
    assert message in mistake(long_classification, *options, *wrong)
