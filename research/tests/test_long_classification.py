"""long_classification.py: what documents are made of, what a run reads, and the whole from the command line."""

import json
import random

import long_classification
import pytest
import torch
from long_classification import LONGEST, PARAGRAPHS, SHORTEST, Classifier, Task, mixed, paragraphs_of
from long_documents import chunks
from long_prose import PEOPLE
from recorded import read_lines
from scripts import save_checkpoint
from transformers import AutoModel, AutoTokenizer

from hf_posenc import convert, position_parameters


ARTICLES = 6


def article(number: int) -> list[str]:
    """Paragraphs that name their article in each sentence."""
    return [
        " ".join(f"article{number} saw {who} in the year {10 * row + place}." for place, who in enumerate(PEOPLE))
        for row in range(6)
    ]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    paragraphs = (" \n \n ".join(article(number)) for number in range(ARTICLES))
    file.write_text("".join(f" \n = T = \n \n {own} \n" for own in paragraphs), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, text):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), text.read_text(), dropout=0.0)


@pytest.fixture
def options(text, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(long_classification, "TRAINED_LENGTH", 32)
    files = ["--text_file", text, "--model_name_or_path", checkpoint, "--output_dir", tmp_path / "out"]
    return [*files, "--lengths", "256", "512", "--max_steps", "2", "--tested", "4", "--seeds", "1"]


def task_of(options, *more: str) -> Task:
    parser = long_classification.ScriptParser((long_classification.ClassificationArguments,))
    [arguments] = parser.parse_args_into_dataclasses([*map(str, options), *more])
    return Task(arguments)


def test_every_section_of_a_document_is_of_another_article(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    articles = paragraphs_of([article(number) for number in range(ARTICLES)], tokenizer)
    assert all(len(own) >= PARAGRAPHS and SHORTEST <= len(one) <= LONGEST for own in articles for one in own)
    names = {tokenizer.convert_tokens_to_ids(f"article{number}"): number for number in range(ARTICLES)}
    drawn, orders = random.Random(0), set()
    for _ in range(10):
        document = mixed(articles, 800, tokenizer, drawn)
        assert len(document.ids) == len(document.articles) == 800
        assert (document.ids[0], document.ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert all(names.get(token, own) == own for token, own in zip(document.ids, document.articles))
        order = [*dict.fromkeys(document.articles[1:-1])]
        ends = [799 - document.articles[::-1].index(own) for own in order]
        assert len(order) == 3 and ends == [255, 511, 798]
        shares = document.shares(ARTICLES)
        assert shares.sum().item() == pytest.approx(1)
        assert shares[order].tolist() == pytest.approx([255 / 798, 256 / 798, 287 / 798])
        orders.add(tuple(order))
    assert len(orders) > 5


def test_the_same_seed_gives_the_same_documents(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    articles = paragraphs_of([article(number) for number in range(ARTICLES)], tokenizer)
    first, second, other = (mixed(articles, 512, tokenizer, random.Random(seed)) for seed in (1, 1, 2))
    assert first == second != other


@pytest.mark.slow
def test_models_are_what_their_names_say(options, text, checkpoint, tmp_path):
    """Their scheme, the rows of their table, what they read, and that new position parameters are zero."""
    convert(str(checkpoint), "t5", output=tmp_path / "t5", text=[text], trained_length=32, train="none")
    task = task_of(options, "--models", "t5 converted", "--converted", str(tmp_path))
    document = [*range(512)]
    expected = {
        "truncated": ("absolute", 64, [64]),
        "chunk mean": ("absolute", 64, [32] * 17),
        "absolute": ("absolute", 512, [512]),
        "t5": ("t5", None, [512]),
        "absolute+t5": ("absolute+t5", 512, [512]),
        "t5 converted": ("t5", None, [512]),
    }
    for name, (scheme, rows, read) in expected.items():
        model = task.model(name, 64)
        assert getattr(model.encoder.config, "position_scheme", "absolute") == scheme
        table = getattr(model.encoder.embeddings, "position_embeddings", None)
        assert (None if rows is None else rows) == (None if table is None else len(table.weight))
        assert [len(piece) for piece in model.cut(document)] == read
        if name != "t5 converted":
            assert not any(one.any() for one in position_parameters(model).values())
    tables = {
        name: task.model(name, 64).encoder.embeddings.position_embeddings.weight for name in ("absolute", "truncated")
    }
    assert torch.equal(tables["absolute"][:32], tables["truncated"][:32])
    assert torch.equal(tables["absolute"][32:63], tables["truncated"][1:32])  # [CLS] has the first row


def test_runs_train_on_other_paragraphs_than_they_are_tested_on(options, monkeypatch):
    task = task_of(options, "--models", "absolute")
    drawn_from, rates = [], []
    real, step = long_classification.mixed, torch.optim.AdamW.step
    monkeypatch.setattr(long_classification, "mixed", lambda *given: drawn_from.append(given[0]) or real(*given))
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self: rates.append([group["highest"] for group in self.param_groups]) or step(self),
    )
    for starts_at_zero, expected in ((True, [1e-4, 0.001, 0.01]), (False, [1e-4, 0.001])):
        rates.clear()
        task.train(task.model("t5", 256), 256, 1, starts_at_zero=starts_at_zero)
        assert rates == [expected] * 2
    assert drawn_from and all(articles is task.learned for articles in drawn_from)
    trained = {tuple(paragraph[:20]) for own in task.learned for paragraph in own}
    pieces = {tuple(document.ids[place : place + 20]) for document in task.tested for place in range(512 - 20)}
    assert len(trained) == 3 * ARTICLES and not trained & pieces


def test_the_vector_of_a_document_is_the_mean_over_the_tokens_of_its_pieces(checkpoint):
    encoder = AutoModel.from_pretrained(checkpoint)
    documents = [[2, *(5 + place % 20 for place in range(number)), 3] for number in (70, 21)]
    found = Classifier(encoder, 3, lambda document: chunks(document, 32)).vectors(documents)
    for document, own in zip(documents, found):
        with torch.no_grad():
            states = [encoder(torch.tensor([piece])).last_hidden_state[0] for piece in chunks(document, 32)]
        torch.testing.assert_close(own, torch.cat(states).mean(dim=0), rtol=0.02, atol=0.02)  # bfloat16


def test_the_head_starts_as_prototypes(checkpoint):
    """Their own examples have the highest logits, and the mean of all articles none that is higher than another."""
    model = Classifier(AutoModel.from_pretrained(checkpoint), 3).train()
    examples = [[[2, *range(first, first + 6), 3], [2, *range(first + 2, first + 8), 3]] for first in (4, 12, 20)]
    model.start_with(examples)
    vectors = torch.stack([model.vectors(own).mean(dim=0) for own in examples])
    logits = model.head(vectors).detach()
    assert logits.argmax(dim=1).tolist() == [0, 1, 2]
    assert logits.diagonal().mean().item() == pytest.approx(long_classification.SHARPNESS, rel=0.05)
    torch.testing.assert_close(model.head(vectors.mean(dim=0)), torch.zeros(3), atol=0.1, rtol=0)


@pytest.mark.slow
def test_all_models_are_trained_and_tested_and_none_twice(options, text, checkpoint, tmp_path, run_main, capsys):
    for scheme in ("t5", "absolute+t5"):
        convert(
            str(checkpoint),
            scheme,
            output=tmp_path / "converted" / scheme,
            text=[text],
            trained_length=32,
            max_length=512,
            train="none",
        )
    options += ["--converted", tmp_path / "converted"]
    run_main(long_classification, *options)
    runs = read_lines(tmp_path / "out" / "runs.jsonl")[1:]
    # What is truncated reads 64 tokens, and is trained at none of the lengths.
    assert len(runs) == 2 * 6
    for run in runs:
        assert run["steps"] == 2 and 0 <= run["precision"] <= 1
        assert [value is None for value in run["by_depth"]] == [False, True, False, True]
        both = [value for value in run["by_depth"] if value is not None]
        assert run["precision"] == pytest.approx(sum(both) / 2)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    table = long_classification.table([long_classification.Run(**run) for run in results["runs"]])
    assert table.count("\n") == 2 + 12 and table in capsys.readouterr().out
    run_main(long_classification, *options)
    assert runs == read_lines(tmp_path / "out" / "runs.jsonl")[1:]
    with pytest.raises(SystemExit, match="tested is 4 there and 5 here"):
        run_main(long_classification, *options, "--tested", "5")


def test_what_is_not_read_is_not_found(options):
    """A head that tells articles without fail finds those of the first section, where no more than that is read."""
    task = task_of(options, "--models", "absolute")

    class Right(torch.nn.Module):
        def __init__(self, read):
            super().__init__()
            self.read = read

        def forward(self, documents):
            [document] = documents
            known = next(one for one in task.tested if one.ids == document)
            counts = torch.bincount(torch.tensor(known.articles[1 : self.read]), minlength=task.labels)
            others = torch.tensor([one not in known.articles for one in range(task.labels)])
            return torch.where(others, 0.5, counts.float())[None]

    assert task.test(Right(511)) == (1.0, [1.0, None, 1.0, None])
    assert task.test(Right(250)) == (0.5, [1.0, None, 0.0, None])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--models", "t6"], "unknown models t6"),
        ([], "name the folder of converted models with --converted"),
        (["--models", "t5 converted", "--converted", "nowhere"], "--converted nowhere has no folder t5"),
        (["--models", "t5", "--lengths", "100"], "lengths must be at least 256"),
        (["--models", "t5", "--lengths", "1536"], "documents of 1536 tokens take more than 6"),
        (["--models", "t5", "--text_file", "missing.txt"], "missing.txt"),
        (["--models", "t5", "--seeds", "-1"], "and seeds not negative"),
        (["--models", "t5", "--max_steps", "0"], "max_steps and tested must be greater than 0"),
    ],
)
def test_mistakes_are_told_in_a_line(options, mistake, wrong, message):
    assert message in mistake(long_classification, *options, *wrong)
