"""longembed.py: a miniature of LongEmbed and one of NanoBEIR, as their data sets are laid out, from the command line."""

import json
import math

import pytest
from long_prose import prose
from scripts import save_checkpoint
from torch.nn.functional import normalize


SentenceTransformer = pytest.importorskip("sentence_transformers").SentenceTransformer
import longembed  # noqa: E402


PEOPLE = ["Ada", "Bo", "Cy", "Di"]


def write_rows(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    text = f"{prose(1)} {' '.join(PEOPLE)} pass key the of is what"
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), text, dropout=0.0)


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Local copies: of LongEmbed a folder for each task with corpus, queries and qrels as splits; of NanoBEIR the other way round."""
    longembed_, nano = tmp_path_factory.mktemp("longembed"), tmp_path_factory.mktemp("nano")
    for task, lengths in (("passkey", (256, 512)), ("qmsum", (None,))):
        rows = {"corpus": [], "queries": [], "qrels": []}
        for length in lengths:
            more = {"context_length": length} if length else {}
            for number, who in enumerate(PEOPLE):
                filler = f"the tall tree, a small dog. {prose(1)[:60]} " * (1 if length == 256 else 2)
                document, query = f"d{length}-{number}", f"q{length}-{number}"
                rows["corpus"].append({"doc_id": document, "text": f"{filler} the pass key of {who}", **more})
                if number:  # LongEmbed asks for some of the documents
                    rows["queries"].append({"qid": query, "text": f"what is the pass key of {who}", **more})
                    rows["qrels"].append({"qid": query, "doc_id": document, **more})
        for name, own in rows.items():
            write_rows(longembed_ / task / f"{name}.jsonl", own)
    write_rows(nano / "corpus" / "NanoNQ.jsonl", [{"_id": who, "text": f"the {who} in the house"} for who in PEOPLE])
    write_rows(nano / "queries" / "NanoNQ.jsonl", [{"_id": f"q{who}", "text": f"what is {who}"} for who in PEOPLE])
    write_rows(nano / "qrels" / "NanoNQ.jsonl", [{"query-id": f"q{who}", "corpus-id": who} for who in PEOPLE])
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: NanoNQ\n    path: {name}/NanoNQ.jsonl\n"
        for name in ("corpus", "queries", "qrels")
    )
    (nano / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return longembed_, nano


def reference(model, queries, documents, relevant, cut_off):
    """Mean nDCG in a loop; one document is relevant."""
    own = {
        name: normalize(model.encode(text, convert_to_tensor=True).double(), dim=0) for name, text in documents.items()
    }
    scores = []
    for name, text in queries.items():
        asked = normalize(model.encode(text, convert_to_tensor=True).double(), dim=0)
        ranked = sorted(own, key=lambda one: -float(asked @ own[one]))
        [wanted] = relevant[name]
        rank = ranked.index(wanted) + 1
        scores.append(1 / math.log2(rank + 1) if rank <= cut_off else 0.0)
    return sum(scores) / len(scores)


def test_lengths_are_apart_and_every_query_has_its_document(copies):
    for length in (256, 512):
        queries, documents, relevant = longembed.read_longembed(str(copies[0]), "passkey", length)
        assert len(documents) == 4 and len(queries) == len(relevant) == 3
        assert all(name.startswith(f"d{length}-") for name in documents)
        assert relevant == {name: {f"d{name[1:]}"} for name in queries}
    queries, documents, _ = longembed.read_longembed(str(copies[0]), "qmsum")
    assert (len(queries), len(documents)) == (3, 4)
    with pytest.raises(ValueError, match="has no passkey of 1024 tokens"):
        longembed.read_longembed(str(copies[0]), "passkey", 1024)


def test_scores_are_those_of_a_loop_and_are_not_computed_twice(checkpoint, copies, tmp_path, run_main, monkeypatch):
    options = ["--model", checkpoint, "--longembed", copies[0], "--nanobeir", copies[1], "--output_dir", tmp_path]
    options += ["--tasks", "passkey", "qmsum", "nq", "--lengths", "256", "512"]
    run_main(longembed, *options)
    results = json.loads((tmp_path / "results.json").read_text())
    found = {(one["task"], one["length"]): one["ndcg"] for one in results["scores"]}
    assert found.keys() == {("passkey", 256), ("passkey", 512), ("qmsum", None), ("nq", None)}
    model = SentenceTransformer(str(checkpoint))
    for (task, length), score in found.items():
        if task == "nq":
            data = {f"q{who}": f"what is {who}" for who in PEOPLE}, {who: f"the {who} in the house" for who in PEOPLE}
            data += ({f"q{who}": {who} for who in PEOPLE},)
        else:
            data = longembed.read_longembed(str(copies[0]), task, length)
        assert score == pytest.approx(reference(model, *data, cut_off=1 if task == "passkey" else 10)), task
    assert f"| passkey | 256 | {found['passkey', 256]:.3f} |" in (tmp_path / "results.md").read_text()
    monkeypatch.setattr(longembed, "SentenceTransformer", None)  # nothing is left to compute
    run_main(longembed, *options)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "pass --download, or name a local copy of dwzhu/LongEmbed"),
        (["--tasks", "nq"], "local copy of sentence-transformers/NanoBEIR-en with --nanobeir"),
        (["--tasks", "nothing"], "unknown tasks nothing"),
        (["--longembed", "missing"], "--longembed missing is no folder"),
    ],
)
def test_mistakes_are_told_in_a_line(mistake, wrong, message):
    assert message in mistake(longembed, "--model", "any", *wrong)
