"""long_documents.py: its scores on known answers, what each method reads, and the whole from the command line."""

import itertools
import json
import math
import re

import long_documents
import pytest
import tiny
import torch
from long_documents import Encoder, Reading, Score, chunks, interval, ndcg, truncated, whole
from long_prose import save_reader, write_articles
from recorded import change_lines, read_lines
from transformers import AutoModel

from hf_posenc.conversion import lengthen


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Twelve articles to learn from, and as many to find things in."""
    return write_articles(tmp_path_factory.mktemp("text"), "train.txt", "test.txt", number=12)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, texts):
    return save_reader(tmp_path_factory.mktemp("checkpoint"), texts / "test.txt")


@pytest.fixture
def options(texts, checkpoint, tmp_path):
    files = ["--train_file", texts / "train.txt", "--test_file", texts / "test.txt"]
    sizes = "--lengths 64 128 --longest 160 --distilled_length 128 --candidates 8 --queries 6 --article_queries 2 --max_steps 2"
    model = ["--model_name_or_path", checkpoint, "--trained_length", "32"]
    return [*files, *sizes.split(), *model, "--output_dir", tmp_path / "out"]


def test_ndcg_of_known_ranks():
    similarities = torch.tensor([[0.9, 0.1, 0.5], [0.9, 0.1, 0.5], [0.9, 0.1, 0.5], [0.5, 0.5, 0.1]])
    relevant = [0, 2, 1, 0]
    assert ndcg(similarities, relevant, 10).tolist() == pytest.approx([1, 1 / math.log2(3), 1 / 2, 1 / math.log2(3)])
    assert ndcg(similarities, relevant, 2).tolist() == pytest.approx([1, 1 / math.log2(3), 0, 1 / math.log2(3)])
    assert ndcg(similarities, relevant, 1).tolist() == [1, 0, 0, 0]


def test_the_interval_is_that_of_a_binomial():
    scores = [1.0] * 70 + [0.0] * 30
    low, high = interval(scores, list(range(100)), seed=0)
    half = 1.96 * math.sqrt(0.7 * 0.3 / 100)
    assert low == pytest.approx(0.7 - half, abs=0.02) and high == pytest.approx(0.7 + half, abs=0.02)
    assert interval(scores, list(range(100)), seed=0) == (low, high)
    assert interval([1.0] * 5, list(range(5)), seed=0) == (1.0, 1.0)


def test_scores_of_one_document_are_drawn_together():
    """Four copies of each query say no more than one, if they are of one document."""
    scores = [float(number % 2) for number in range(30)]
    alone = interval(scores, list(range(30)), seed=1)
    together = interval(
        [score for score in scores for _ in range(4)], [n for n in range(30) for _ in range(4)], seed=1
    )
    apart = interval([score for score in scores for _ in range(4)], list(range(120)), seed=1)
    assert together == pytest.approx(alone)
    assert apart[1] - apart[0] < 0.6 * (alone[1] - alone[0])


@tiny.cross(length=[3, 9, 32, 33, 102, 256], size=[10, 13, 32, 64], strength=1)
def test_chunks_are_as_few_and_as_equal_as_can_be(length, size):
    document = [*range(length)]
    pieces = chunks(document, size)
    assert [token for piece in pieces for token in piece[1:-1]] == document[1:-1]
    assert all((piece[0], piece[-1]) == (0, length - 1) for piece in pieces)
    lengths = [*map(len, pieces)]
    assert max(lengths) <= size and max(lengths) - min(lengths) <= 1
    assert len(pieces) == math.ceil((length - 2) / (size - 2))


@tiny.cross(length=[11, 33, 102, 256], size=[10, 12, 13, 32], strength=1)
def test_overlapping_chunks_begin_in_the_middle_of_the_one_before(length, size):
    document = [*range(length)]
    pieces = chunks(document, size, overlap=True)
    if length <= size:
        assert pieces == [document]
        return
    assert all(len(piece) <= size and (piece[0], piece[-1]) == (0, length - 1) for piece in pieces)
    assert len(pieces) == math.ceil((length - 2) / ((size - 2) / 2)) - 1
    for before, after in itertools.pairwise(pieces):
        assert abs(2 * before[1:-1].index(after[1]) - len(before[1:-1])) <= 1
        assert before[-2] == after[1:-1][len(before[1:-1]) - before[1:-1].index(after[1]) - 1]
    assert {*itertools.chain(*pieces)} == {*document}


def test_chunks_of_a_short_document_are_the_document():
    for overlap in (False, True):
        assert chunks([1, 5, 6, 2], 10, overlap) == chunks([1, 5, 6, 2], 4, overlap) == [[1, 5, 6, 2]]
        assert chunks([1, 5, 2], 10, overlap) == [[1, 5, 2]] and chunks([1, 2], 10, overlap) == [[1, 2]]


def test_truncation_keeps_the_last_token():
    assert truncated([1, 5, 6, 7, 2], 4) == [[1, 5, 6, 2]]
    assert truncated([1, 5, 2], 4) == [[1, 5, 2]]


@torch.no_grad()
def test_vectors_and_similarities_are_those_of_loops(checkpoint):
    model = AutoModel.from_pretrained(checkpoint).eval()
    encoder = Encoder(model)
    generator = torch.Generator().manual_seed(0)
    documents = [
        [2, *torch.randint(5, 40, (number,), generator=generator).tolist(), 3] for number in (20, 33, 20, 7, 50)
    ]
    asked = [document[:6] for document in documents[:3]]

    def vector(ids):
        return model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0)

    cut = lambda document: chunks(document, 12, False)  # noqa: E731
    readings = {
        Reading(whole): lambda q, d: torch.cosine_similarity(q, vector(d), dim=0),
        Reading(cut): lambda q, d: torch.cosine_similarity(q, torch.stack([*map(vector, cut(d))]).mean(0), dim=0),
        Reading(cut, best=True): lambda q, d: max(torch.cosine_similarity(q, vector(c), dim=0) for c in cut(d)),
    }
    for reading, expected in readings.items():
        found = reading.similarities(encoder, asked, documents)
        wanted = torch.tensor([[expected(vector(query), document) for document in documents] for query in asked])
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=0)  # bfloat16 where the processor has it


def test_tiled_tables_read_short_texts_as_the_original_does(checkpoint):
    model = AutoModel.from_pretrained(checkpoint).eval()
    ids = [[2, *range(5, 25), 3]]
    torch.testing.assert_close(Encoder(lengthen(model, 128, 32)).vectors(ids), Encoder(model).vectors(ids))


def test_differences_are_between_answers_to_the_same_query():
    """One that is always a little better is surely better, however much queries differ."""
    scores = torch.rand(40, generator=torch.Generator().manual_seed(0)).tolist()
    lower = [score - 0.05 - 0.01 * (number % 2) for number, score in enumerate(scores)]
    better, worse = (
        Score(method, "needle", 64, ndcg, [0.0] * 40, [*range(40)], 40, 1, 1.0)
        for method, ndcg in ((long_documents.COMPARED, scores), ("tiled", lower))
    )
    assert better.summary(0)["low"] < worse.summary(0)["high"]
    found = long_documents.difference(better, worse, seed=0)
    assert 0.05 <= found["low"] <= found["mean"] <= found["high"] <= 0.06 and found["mean"] == pytest.approx(0.055)
    [table] = long_documents.difference_tables([found])
    assert "| tiled | **+0.05 (" in table.replace("+0.06 (", "+0.05 (") and table.count("**") == 2
    unsure = {**found, "low": -0.01}
    assert "**" not in long_documents.difference_tables([unsure])[0]


def test_depths_are_summed_up_in_fifths():
    score = Score("t5", "passkey", 64, [1.0, 0.0, 1.0, 1.0], [0.0, 0.19, 0.41, 1.0], [0, 1, 2, 3], 8, 1, 2.0)
    assert score.summary(0)["by_depth"] == [0.5, None, 1.0, None, 1.0]
    assert score.summary(0)["ndcg"] == 0.75


@pytest.mark.slow
def test_all_methods_from_nothing_and_on_from_where_it_was_stopped(options, tmp_path, run_main, monkeypatch, capsys):
    out = tmp_path / "out"
    run_main(long_documents, *options, "--methods", "truncated", "tiled", "chunk mean")
    file, taken = out / "runs.jsonl", ("tiled", "needle", 128)
    settings, *lines = read_lines(file)
    runs = {(run["method"], run["task"], run["length"]): run for run in lines}
    assert len(runs) == len(lines) == 3 * 5  # three methods; two lengths of two tasks, and articles of the longest
    assert json.loads((out / "development.json").read_text())["best chunk"].keys() == {"passkey", "needle", "articles"}

    change_lines(file, lambda _: [settings, *(run for place, run in runs.items() if place != taken)])
    computed = []
    score = long_documents.Comparison.score

    def counted(self, method, encoder, task, length):
        computed.append((method, task, length))
        return score(self, method, encoder, task, length)

    monkeypatch.setattr(long_documents.Comparison, "score", counted)
    run_main(long_documents, *options)
    assert [one for one in computed if one[0] in ("truncated", "tiled", "chunk mean")] == [taken]
    assert {one[0] for one in computed} == {*long_documents.METHODS} - {"truncated", "chunk mean"}
    now = {(run["method"], run["task"], run["length"]): run for run in read_lines(file)[1:]}
    assert {place for place in runs if now[place] != runs[place]} <= {taken}
    assert now[taken]["ndcg"] == runs[taken]["ndcg"]

    results = json.loads((out / "results.json").read_text())
    assert results["settings"]["seed"] == 0
    assert {one["method"] for one in results["scores"]} == {*long_documents.METHODS}
    table = capsys.readouterr().out
    assert len(results["differences"]) == 5 * (len(long_documents.METHODS) - 1)
    means = {(one["method"], one["task"], one["length"]): one["ndcg"] for one in results["scores"]}
    for one in results["differences"]:
        place = one["task"], one["length"]
        assert one["mean"] == pytest.approx(means[long_documents.COMPARED, *place] - means[one["other"], *place])
    for one in results["scores"]:
        assert one["low"] <= one["ndcg"] <= one["high"]
        assert one["vectors"] == 1 or one["method"] == "best chunk"
        assert f"{one['ndcg']:.2f} ({one['low']:.2f}–{one['high']:.2f})" in table
    best = results["development"]["best chunk"]["needle"]
    assert set(best) == {"64", "64 overlapping"} and f"{best['64']:.2f} |" in table
    assert long_documents.page(results) in table
    assert (out / "results.png").read_bytes()[1:4] == b"PNG"

    # Nothing is left to compute, and no model is needed.
    monkeypatch.setattr(long_documents.Comparison, "model", None)
    run_main(long_documents, *options)
    with pytest.raises(SystemExit, match="candidates is 8 there and 7 here"):
        run_main(long_documents, *options, "--candidates", "7")


@pytest.mark.slow
def test_conversions_learn_from_no_text_that_is_tested_or_chosen_with(options, texts, tmp_path, run_main):
    run_main(long_documents, *options, "--methods", "t5", "--tasks", "passkey")
    learned = "".join(file.read_text() for file in (tmp_path / "out" / "learned").iterdir())
    years = {int(year) // 1000 for year in re.findall(r"year (\d+)", learned)}
    assert years == {number for number in range(12) if number % 3}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--methods", "t6"], "unknown methods t6; there are truncated; truncated late"),
        (["--tasks", "passkeys"], "unknown tasks passkeys"),
        (["--lengths", "32"], "lengths must be at least 64 tokens, got 32"),
        (["--lengths", "161"], "lengths must be at most --longest, 160 tokens, got 161"),
        (["--queries", "9"], "no more queries than them"),
        (["--test_file", "missing.txt"], "missing.txt"),
        (["--lengths", "100000", "--longest", "100000"], "too few for documents of 100000"),
        (["--trained_length", "65"], "trained_length must be between 16 and 64"),
        (["--output_dir", "/proc/nothing"], "--output_dir /proc/nothing"),
        (["--length", "64"], "unknown argument --length"),
    ],
)
def test_mistakes_are_told_in_a_line(options, mistake, wrong, message):
    assert message in mistake(long_documents, *options, *wrong)
