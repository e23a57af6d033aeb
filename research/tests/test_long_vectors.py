"""long_vectors.py: late chunks, what is chosen and learned on which file, and the whole from the command line."""

import json
import math
import re
import statistics

import chunk_pooling
import long_vectors
import pytest
import tiny
import torch
from long_documents import chunks
from long_prose import save_reader, write_articles
from long_vectors import Method, cosines, every, late_chunks, neighbours, one, spans, states_of
from transformers import AutoModel


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two files of eight articles."""
    return write_articles(tmp_path_factory.mktemp("text"), "valid.txt", "test.txt", number=8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, texts):
    return save_reader(tmp_path_factory.mktemp("checkpoint"), texts / "test.txt")


@pytest.fixture
def options(texts, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(long_vectors, "CHUNKS", [(16, False), (16, True), (32, False), (32, True)])
    monkeypatch.setattr(long_vectors, "SIZES", [16, 32])
    monkeypatch.setattr(
        long_vectors, "ALL_CHUNKS", ("chunks 16", "chunks 16 overlapping", "chunks 32", "chunks 32 overlapping")
    )
    files = ["--text_files", texts / "valid.txt", texts / "test.txt"]
    sizes = "--length 96 --candidates 6 --article_queries 2 --max_steps 2 --trained_length 32"
    return [*files, *sizes.split(), "--model_name_or_path", checkpoint, "--output_dir", tmp_path / "out"]


@tiny.cross(length=[3, 9, 33, 102, 256], size=[10, 13, 64], strength=1)
def test_spans_are_what_chunks_are_made_of(length, size):
    document = [*range(length)]
    assert [document[start:end] for start, end in spans(length, size)] == [c[1:-1] for c in chunks(document, size)]


def test_late_chunks_are_means_of_states_in_loops():
    states = torch.randn(3, 41, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = late_chunks(states, 12)
    for document, own in zip(states.tolist(), found.tolist(), strict=True):
        pieces = chunks([*range(41)], 12)
        assert len(own) == len(pieces) == 4
        for vector, piece in zip(own, pieces):
            inner = [document[place] for place in piece[1:-1]]
            assert vector == pytest.approx([sum(column) / len(inner) for column in zip(*inner)])


def test_two_neighbours_are_a_chunk_of_twice_the_size_that_overlaps():
    """At this length, where a chunk of twice the size has just twice the tokens."""
    length = 2 + 5 * 10  # chunks of 12 have 10 tokens and those of 22 have 20
    states = torch.randn(1, length, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    overlapping = [piece[1:-1] for piece in chunks([*range(length)], 22, overlap=True)]
    expected = torch.stack([states[0, piece[0] : piece[-1] + 1].mean(dim=0) for piece in overlapping])
    torch.testing.assert_close(neighbours(late_chunks(states, 12))[0], expected)


@torch.no_grad()
def test_states_are_the_models(checkpoint):
    model = AutoModel.from_pretrained(checkpoint).eval()
    ids = [2, *range(5, 25), 3]
    expected = model(torch.tensor([ids])).last_hidden_state[0]
    torch.testing.assert_close(states_of(model, ids), expected, atol=5e-2, rtol=0)  # bfloat16 where there is some


def test_a_document_is_as_similar_as_its_best_vector():
    generator = torch.Generator().manual_seed(0)
    queries, vectors = (torch.randn(*shape, 5, generator=generator) for shape in ((3,), (4, 6)))
    expected = [[max(torch.cosine_similarity(q, v, dim=0) for v in own) for own in vectors] for q in queries]
    torch.testing.assert_close(cosines(queries, vectors), torch.tensor(expected))


def test_centred_is_less_the_mean_of_all_documents():
    generator = torch.Generator().manual_seed(0)
    kept = {
        "queries": torch.randn(3, 5, generator=generator),
        "chunks 64": torch.randn(4, 6, 5, generator=generator) + 2,
    }
    method = Method("original", ("chunks 64",), one(lambda own: own.mean(dim=-2)), long_vectors.CENTRED)
    documents = [own.mean(dim=0) for own in kept["chunks 64"]]
    centre = sum(documents) / 4
    for centred, taken in (("documents", 0), ("documents and queries", centre)):
        expected = [
            [torch.cosine_similarity(q - taken, d - centre, dim=0) for d in documents] for q in kept["queries"]
        ]
        torch.testing.assert_close(method.similarities(kept, "chunks 64", centred), torch.tensor(expected))
    plain = Method("original", ("chunks 64",), every).similarities(kept, "chunks 64", "")
    torch.testing.assert_close(plain, cosines(kept["queries"], kept["chunks 64"]))


@pytest.mark.slow
def test_from_nothing_and_on_from_where_it_was_stopped(options, tmp_path, run_main, monkeypatch):
    out = tmp_path / "out"
    run_main(long_vectors, *options, "--models", "original", "strided", "t5")
    results = json.loads((out / "results.json").read_text())
    scores = json.loads((out / "scores.json").read_text())
    names = long_vectors.methods(["original", "strided", "t5"])
    assert results["methods"].keys() == scores["scores"].keys() == names.keys()
    assert results["sizes"]["passkey"]["queries"] == 12 and results["sizes"]["articles"]["groups"] == 16
    for name, own in results["methods"].items():
        assert own["vectors"] == 1 or " chunk of " in name
        assert own["less"].keys() == {*long_vectors.references(name, names)}
        for task, found in own["tasks"].items():
            low, high = found["interval"]
            assert low <= found["ndcg"] <= high
            assert found["ndcg"] == pytest.approx(statistics.fmean(scores["scores"][name][task]), abs=1e-3)
            for other, less in own["less"].items():
                theirs = results["methods"][other]["tasks"][task]["ndcg"]
                assert less[task]["mean"] == pytest.approx(found["ndcg"] - theirs, abs=1e-6)
    late = results["methods"]["t5, best late chunk of 16"]
    assert late["vectors"] == results["methods"]["best chunk of 16"]["vectors"] == len(spans(96, 16))
    assert list(late["less"]) == ["best chunk of 16"]

    assert (out / "results.png").read_bytes()[1:4] == b"PNG"

    doubled = results["methods"]["t5, best late chunk of 32 overlapping"]
    assert doubled["vectors"] == results["methods"]["t5, best late chunk of 16"]["vectors"] - 1
    assert list(doubled["less"]) == ["best chunk of 32 overlapping"]

    # What learned from a file measures the other.
    for learned, articles in (("valid", range(8)), ("test", range(8, 16))):
        text = "".join(file.read_text() for file in (out / "texts" / learned / "learned").iterdir())
        years = {int(year) // 1000 for year in re.findall(r"year (\d+)", text)}
        assert years == {*[*articles][long_vectors.HELD_OUT :]}
    read = []
    monkeypatch.setattr(long_vectors.AutoModel, "from_pretrained", lambda folder: read.append(folder.name) or folder)
    [arguments] = long_vectors.ScriptParser((long_vectors.VectorArguments,)).parse()
    arguments.models = ["original", "strided", "t5"]
    comparison = long_vectors.Comparison(arguments)
    monkeypatch.setattr(long_vectors.Path, "eval", lambda self: self, raising=False)
    assert [comparison.reader("t5", file).name for file in ("valid", "test")] == ["t5-test", "t5-valid"]
    seeds = []
    made = ("seed", "position_window", "position_global_every")
    monkeypatch.setattr(
        long_vectors, "convert", lambda source, scheme, **given: seeds.append((scheme, *map(given.get, made)))
    )
    assert comparison.reader("t5 seed 3", "test").name == "t5_seed_3-valid" and seeds == [("t5", 3, None, None)]
    window = "t5 window of 128 no layer global"
    assert comparison.reader(window, "test").name == "t5_window_of_128_no_layer_global-valid"
    assert seeds[1:] == [("t5", 0, 128, 0)]

    # Conversions of one scheme are averaged, query by query.
    again = {
        ("t5 seed 1", file, task): comparison.kept["t5", file, task]
        for file in comparison.files
        for task in ("passkey",)
    }
    for place, kept in again.items():
        comparison.kept[place] = kept | {"whole": kept["whole"].flip(0)}
    comparison.arguments.models.append("t5 seed 1")
    whole = "whole", ""
    both = comparison.by_conversion(names["t5"], "test", "passkey", whole)
    assert len(both) == 2 and both[0] != both[1]
    means = [(first + second) / 2 for first, second in zip(*both)]
    assert comparison.found(names["t5"], "test", "passkey", whole) == pytest.approx(means)
    assert [
        len(comparison.by_conversion(names[name], "test", "passkey", (setting, "")))
        for name, setting in (("strided", "whole"), ("truncated", "truncated"))
    ] == [1, 1]
    both_files = [
        statistics.fmean(comparison.by_conversion(names["t5"], file, "passkey", whole)[1])
        for file in ("valid", "test")
    ]
    assert comparison.means_by_conversion(names["t5"], "passkey")[1] == pytest.approx(statistics.fmean(both_files))

    # Settings are chosen on the other file.
    chosen = comparison.chosen(names[long_vectors.MEAN], "valid")
    means = {
        choice: statistics.fmean(
            statistics.fmean(comparison.found(names[long_vectors.MEAN], "test", task, choice))
            for task in long_vectors.TASKS
        )
        for choice in names[long_vectors.MEAN].choices()
    }
    assert means[chosen] == max(means.values()) and len(means) == 4

    # Nothing is left to compute, and no model is needed.
    monkeypatch.setattr(long_vectors.Comparison, "reader", None)
    run_main(long_vectors, *options, "--models", "original", "strided", "t5")
    with pytest.raises(SystemExit, match="candidates is 6 there and 5 here"):
        run_main(long_vectors, *options, "--candidates", "5")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--models", "t6"], "unknown models t6; there are original, strided"),
        (["--models", "t5 seed 1"], "t5 seed 1 is another conversion of a scheme that is not among the models"),
        (["--text_files", "one.txt"], "text_files must be two, got 1"),
        (["--text_files", "a/x.txt", "b/x.txt"], "must have different names"),
        (["--length", "32"], "length must be at least 64 tokens, got 32"),
        (["--candidates", "1"], "two candidates"),
        (["--length", "100000"], "too few for documents of 100000"),
    ],
)
def test_mistakes_are_told_in_a_line(options, mistake, wrong, message):
    assert message in mistake(long_vectors, *options, *wrong)


# Every way to pool chunks is its formula, computed in loops in float64.


def norm(vector):
    return math.sqrt(sum(one * one for one in vector))


def mean_of(vectors, weights):
    return [sum(w * v[i] for w, v in zip(weights, vectors)) / sum(weights) for i in range(len(vectors[0]))]


def in_loops(name, vectors):
    if name == "mean":
        return mean_of(vectors, [1.0] * len(vectors))
    if name == "maximum":
        return [max(v[i] for v in vectors) for i in range(len(vectors[0]))]
    if name == "norm_top_mean":
        longest = sorted(vectors, key=norm, reverse=True)[:3]
        return mean_of(longest, [1.0] * len(longest))
    if name == "norm_softmax_mean":
        return mean_of(vectors, [math.exp(norm(v)) for v in vectors])
    centre = mean_of(vectors, [1.0] * len(vectors))
    cosines = [sum(a * b for a, b in zip(v, centre)) / (norm(v) * norm(centre)) for v in vectors]
    return mean_of(vectors, [max(1 - one, 1e-6) for one in cosines])


@tiny.cross(
    name=["mean", "maximum", "norm_top_mean", "norm_softmax_mean", "salience_mean"], number=[1, 2, 3, 7], strength=2
)
def test_pooled_chunks_are_those_of_loops(name, number):
    generator = torch.Generator().manual_seed(number)
    chunks = torch.randn(4, number, 6, generator=generator, dtype=torch.float64) + 0.5
    found = getattr(chunk_pooling, name)(chunks)
    expected = torch.tensor([in_loops(name, document) for document in chunks.tolist()], dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(getattr(chunk_pooling, name)(chunks[0]), expected[0])


def test_parameters_are_used():
    chunks = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    longest = chunks[chunks.norm(dim=-1).argmax()]
    torch.testing.assert_close(chunk_pooling.norm_top_mean(chunks, number=1), longest)
    torch.testing.assert_close(chunk_pooling.norm_softmax_mean(chunks, temperature=1e-4), longest)
    torch.testing.assert_close(chunk_pooling.norm_softmax_mean(chunks, temperature=1e9), chunks.mean(dim=0))


def test_what_is_unlike_its_document_counts_more():
    same, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    found = chunk_pooling.salience_mean(torch.stack([same] * 9 + [other]))
    assert found[1] > 0.5 > 0.1 == pytest.approx(chunk_pooling.mean(torch.stack([same] * 9 + [other]))[1].item())
    torch.testing.assert_close(chunk_pooling.salience_mean(torch.stack([same] * 3)), same)
