"""qmsum.py: how meetings are divided, what is right for a query, BM25 and nDCG against loops, and the whole from the command line."""

import gzip
import json
import math
import random
import sys

import numpy as np
import pytest
import qmsum
import torch
from intervals import of_groups
from minilm import packaged_minilm
from qmsum import Meetings, bm25, fused, ndcg, spread
from sklearn.metrics import ndcg_score
from transformers import AutoConfig, AutoTokenizer

from hf_posenc.conversion.distillation import has_bfloat16


TOKENIZER = AutoTokenizer.from_pretrained(packaged_minilm())
WORDS = "remote control battery design price market user interface speech data budget children school policy".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "qmsum"
    folder.mkdir()
    draw, meetings, queries = random.Random(0), [], []
    for number in range(6):
        turns = [
            [f"Speaker {draw.choice('AB')}", " ".join(draw.choices(WORDS, k=draw.randint(3, 60)))] for _ in range(40)
        ]
        meetings.append({"id": f"m{number}", "split": "val" if number < 2 else "train", "turns": turns})
        for at in (3, 20, 33):
            query = {"document": f"m{number}", "query": f"What about {turns[at][1][:40]}", "answer": turns[at][1]}
            queries.append(query | {"relevant_turns": [[str(at), str(at + 1)]] if at != 33 else None})
    with gzip.open(folder / "documents.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, meetings)) + "\n")
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)) + "\n")
    return folder.parent


def test_units_are_all_turns_in_their_order(data):
    meetings = Meetings(data, TOKENIZER)
    whole, units = meetings.documents("whole"), meetings.documents("units-256")
    assert [document.meeting for document in whole] == [*range(6)] and len(units) > 20
    for number, document in enumerate(whole):
        own = [unit for unit in units if unit.meeting == number]
        assert sum((unit.ids for unit in own), ()) == document.ids
        assert [turn for unit in own for turn in unit.turns] == [*range(40)] == [*document.turns]
        assert "\n".join(unit.text for unit in own) == document.text
        assert all(len(unit.ids) <= 254 for unit in own)
        # No unit could have taken the first turn of the next.
        first = [len(meetings.ids[number][unit.turns[0]]) for unit in own]
        assert all(len(unit.ids) + after > 254 for unit, after in zip(own, first[1:]))


def test_what_is_right_for_a_query_has_one_of_its_turns(data):
    meetings = Meetings(data, TOKENIZER)
    units = meetings.documents("units-256")
    found = meetings.relevant(units, "questions")
    assert len(found) == 12 and meetings.relevant(units, "answers") == found  # a third has no turns
    for query, own in found:
        assert own == [
            n for n, unit in enumerate(units) if unit.meeting == query.meeting and query.turns & {*unit.turns}
        ]
    whole = meetings.documents("whole")
    assert len(meetings.relevant(whole, "answers")) == 18
    assert len(meetings.relevant(whole, "questions")) == 12
    assert spread([["3", "5"], ["9", "9"]]) == {3, 4, 5, 9}


def test_bm25_is_that_of_loops():
    draw = random.Random(0)
    documents = [" ".join(draw.choices([*WORDS, "a"], k=draw.randint(3, 40))).title() for _ in range(15)]
    queries = ["the PRICE of a battery", "school, school", "nothing"]
    mean = sum(len(document.split()) for document in documents) / 15
    expected = []
    for query in queries:
        scores = []
        for document in (document.lower().split() for document in documents):
            score = 0.0
            for word in query.lower().replace(",", "").split():
                having = sum(word in other.lower().split() for other in documents)
                times = document.count(word)
                idf = math.log(1 + (15 - having + 0.5) / (having + 0.5))
                score += idf * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * len(document) / mean))
            scores.append(score)
        expected.append(scores)
    np.testing.assert_allclose(bm25(documents, queries), expected, atol=1e-12)


def test_ndcg_is_sklearn_s_and_ranks_are_fused():
    generator = np.random.default_rng(0)
    similarities = generator.normal(size=(20, 30))
    relevant = [generator.choice(30, size=number, replace=False).tolist() for number in generator.integers(1, 14, 20)]
    truth = np.zeros((20, 30))
    for row, own in zip(truth, relevant):
        row[own] = 1
    expected = [ndcg_score(t[None], s[None], k=10) for t, s in zip(truth, similarities)]
    np.testing.assert_allclose(ndcg(similarities, relevant), expected, atol=1e-12)
    both = fused(np.array([[3.0, 2.0, 1.0]]), np.array([[1.0, 3.0, 2.0]]))
    np.testing.assert_allclose(both, [[1 / 61 + 1 / 63, 1 / 62 + 1 / 61, 1 / 63 + 1 / 62]])


def test_a_stored_vector_and_the_rest_are_merged_by_tokens(data, tmp_path):
    meetings = Meetings(data, TOKENIZER)
    bench = qmsum.Bench(meetings, "units-1024", packaged_minilm(), "minilm", tmp_path, {})
    merged = bench.upgraded(128, False)
    ids = bench.documents[0].ids
    assert len(ids) > 600
    encode = bench.original

    def vector(inner):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16(encode.device)):
            return encode(input_ids=torch.tensor([[101, *inner, 102]])).last_hidden_state[0].float().mean(dim=0)

    def unit(one):
        return one / one.norm()

    rest = ids[254:]
    number = math.ceil(len(rest) / 126)
    edges = [len(rest) * part // number for part in range(number + 1)]
    chunks = torch.stack([vector(rest[first:end]) for first, end in zip(edges, edges[1:])])
    expected = 254 * unit(vector(ids[:254])) + len(rest) * unit(chunks.mean(dim=0))
    assert torch.cosine_similarity(merged[0], expected, dim=0) > 0.9999


def test_another_model_reads_documents_as_a_whole(data, tmp_path):
    folder = packaged_minilm()
    bench = qmsum.Bench(Meetings(data, TOKENIZER), "units-1024", folder, "minilm", tmp_path, {"same": folder})
    kept, cut = bench.whole("same"), bench.cut(512)
    torch.testing.assert_close(qmsum.first_of_each(kept), cut.vectors.float(), atol=2e-3, rtol=0)
    texts = bench.firsts(512)
    assert kept.numbers.tolist() == [1 + math.ceil((len(ids) - 2) / 126) for [ids] in texts]
    # Late chunks with their numbers of tokens are the mean of all states but those of special tokens.
    [ids], own = texts[0], kept.by_text()[0]
    states = qmsum.states_of(bench.original, ids)
    edges = [(len(ids) - 2) * part // 5 for part in range(6)]
    sizes = torch.tensor([end - first for first, end in zip(edges, edges[1:])])
    mean = (own[1:] * sizes[:, None]).sum(dim=0) / sizes.sum()
    torch.testing.assert_close(mean, states[1:-1].mean(dim=0), atol=2e-3, rtol=0)
    by_name = {method.name: method for method in bench.methods()}
    late = by_name["same, best late chunk of 128"].find("answers")
    assert late.vectors == (kept.numbers - 1).double().mean()
    queries = bench.queries("answers")
    vectors = torch.nn.functional.normalize(own[1:], dim=-1)
    np.testing.assert_allclose(late.similarities[:, 0], (queries @ vectors.T).amax(dim=1).numpy(), atol=1e-5)


def test_a_conversion_is_made_once(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(qmsum, "STEPS", 1)
    monkeypatch.setattr(qmsum, "LONGEST", 300)
    draw = random.Random(0)
    articles = [
        f"\n = Article {number} = \n\n" + "\n".join(" ".join(draw.choices(WORDS, k=150)) for _ in range(4))
        for number in range(12)
    ]
    text = tmp_path / "texts" / "wikitext2" / "valid.txt"
    text.parent.mkdir(parents=True)
    text.write_text("\n".join(articles) + "\n")
    asked = ("t5, window of 128", packaged_minilm(), tmp_path / "texts", TOKENIZER, tmp_path / "work")
    folder = qmsum.made(*asked)
    config = AutoConfig.from_pretrained(folder)
    flags = (config.position_scheme, config.position_window, config.position_global_every)
    assert flags == ("t5", 128, 0) and AutoTokenizer.from_pretrained(folder).model_max_length == 300
    report = json.loads((folder / "conversion.json").read_text())
    assert report["distillation"][-1]["step"] == 1
    monkeypatch.setattr(qmsum, "convert", None)
    assert qmsum.made(*asked) == folder
    monkeypatch.setattr(sys, "argv", ["qmsum.py", "--data", str(data), "--converted", "alibi"])
    with pytest.raises(SystemExit):
        qmsum.main()
    assert "alibi needs a folder" in capsys.readouterr().err


def test_from_the_command_line_and_again(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(qmsum, "CHUNKS", ((64, True), (128, False)))
    arguments = [
        "--data",
        data,
        "--parts",
        "units-256",
        "--output_dir",
        tmp_path / "out",
        "--work_dir",
        tmp_path / "work",
        "--converted",
        f"same={packaged_minilm()}",
    ]
    printed = []
    for more in (["--methods", "BM25"], ["--time"], []):
        monkeypatch.setattr(sys, "argv", ["qmsum.py", *map(str, arguments), *more])
        qmsum.main()
        printed.append(capsys.readouterr().out)
    first, *printed = printed
    assert "vectors in" not in first and "| BM25 " in first and "cut at" not in first
    assert "vectors in" in printed[0] and "vectors in" not in printed[1]
    result = json.loads((tmp_path / "out" / "minilm-units-256-answers.json").read_text())
    scores, command = result["methods"], result["circumstances"]["command"]
    assert "same=model" in command and str(tmp_path) not in command
    assert "milliseconds" not in scores["BM25"]
    assert all(method["milliseconds"] > 0 for name, method in scores.items() if name != "BM25")
    tables = [out[out.index("minilm-units-256-answers") :] for out in printed]
    assert tables[0] == tables[1] and "| BM25 " in tables[0]
    result = json.loads((tmp_path / "out" / "minilm-units-256-answers.json").read_text())
    assert sum(result["val"]) == 2 and result["queries"] == [2] * 6
    picked = qmsum.chosen(result)
    assert {"BM25", "cut", "mean of chunks", "best chunk", "BM25 and mean of chunks"} <= {*picked}
    for family, name in picked.items():
        on_val = {n: sum(one["ndcg"][:2]) for n, one in result["methods"].items() if one["family"] == family}
        assert on_val[name] == max(on_val.values())
    less = qmsum.difference(result, picked["BM25"], picked["cut"])
    sums = [sum(result["methods"][picked[one]]["ndcg"][2:]) for one in ("BM25", "cut")]
    assert less["mean"] == pytest.approx((sums[0] - sums[1]) / 8)
    assert qmsum.score(result, picked["BM25"]) == pytest.approx(sums[0] / 8)


def test_meetings_of_val_alone(data, tmp_path, monkeypatch, capsys):
    """All settings are shown, scores are theirs, and texts are cut where they are told to be."""
    arguments = [*"--parts units-1024 --asked answers --name other --cut 200 --val_alone".split(), "--data", data]
    arguments += ["--output_dir", tmp_path / "out", "--work_dir", tmp_path / "work"]

    def run(*methods):
        monkeypatch.setattr(sys, "argv", ["qmsum.py", *map(str, arguments), "--methods", *methods])
        qmsum.main()
        return capsys.readouterr().out

    printed = run("BM25", "cut at 200", "mean of chunks of 128")
    assert "all queries" not in printed
    result = json.loads((tmp_path / "out" / "other-units-1024-answers.json").read_text())
    assert result["val"] == [True] * 2
    for name, method in result["methods"].items():
        assert qmsum.score(result, name) == pytest.approx(sum(method["ndcg"]) / sum(result["queries"]))
        assert f"| {name} |" in printed
    assert "cut at 200" in result["methods"]
    bench = qmsum.Bench(
        Meetings(data, TOKENIZER, None, True), "units-1024", packaged_minilm(), "x", tmp_path, {}, cut=200
    )
    assert max(len(ids) for [ids] in bench.firsts(200)) == 200
    torch.testing.assert_close(
        bench.cut(200).vectors, qmsum.Vectors(tmp_path / "work" / "other-units-1024").kept("cut at 200", None).vectors
    )
    again = run("cut at 128")
    assert "| cut at 128 |" in again and "| cut at 200 |" in again


def test_means_are_over_queries_and_intervals_over_meetings():
    generator = np.random.default_rng(0)
    queries = generator.integers(1, 9, 400)
    of_meetings = generator.normal(0.4, 0.1, 400)
    sums = queries * of_meetings
    assert qmsum.mean(sums, queries) == pytest.approx(np.average(of_meetings, weights=queries))
    low, high = of_groups(sums, queries)
    residual = sums - queries * qmsum.mean(sums, queries)
    error = np.sqrt((residual**2).sum()) / queries.sum()
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.05)
