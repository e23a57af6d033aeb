"""hf_posenc.extend: short texts keep their vectors, longer ones are no longer cut off, and the rest of a folder stays."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_checkpoints
import torch
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import hf_posenc
from hf_posenc.conversion import converting, extending, longer_tables
from hf_posenc.conversion.distillation import Distillation
from hf_posenc_cli import main


WORDS = "the old river ran past a small house where nobody had been for years and its doors were open".split()


def loaded(folder: Path) -> PreTrainedModel:
    return AutoModel.from_pretrained(folder).eval()


@tiny.cross(family=tiny.FAMILIES, method=["trained", "tile", "mean", "interpolate"], strength=1)
def test_short_texts_keep_their_states_and_longer_ones_are_read(family, method, tmp_path):
    folder = tiny_checkpoints.save(tmp_path / "original", family, max_position_embeddings=50)
    text = folder.with_name("original.txt")
    budget = {"max_steps": 2} if method == "trained" else {}
    found = hf_posenc.extend(
        folder, 64, output=tmp_path / "longer", method=method, text=[text], trained_length=16, **budget
    )
    assert (found.trained_length, found.max_length, found.difference) == (16, 64, 0.0)
    before, after = loaded(folder), loaded(tmp_path / "longer")
    ids = torch.randint(5, 90, (2, 16))
    assert torch.equal(before(input_ids=ids)[0], after(input_ids=ids)[0])
    after(input_ids=torch.randint(5, 90, (1, 64)))
    assert AutoTokenizer.from_pretrained(tmp_path / "longer").model_max_length == 64
    if method != "interpolate":  # which is another architecture
        states = after.state_dict()
        changed = [name for name, value in before.state_dict().items() if not torch.equal(value, states[name])]
        assert [name for name in changed if "position_embeddings" not in name] == []


def test_texts_may_be_a_generator(tmp_path):
    folder = tiny_checkpoints.save(tmp_path / "original", "bert", max_position_embeddings=50)
    sizes = {"method": "trained", "trained_length": 16, "max_steps": 2}
    texts = (path for path in [folder.with_name("original.txt")])
    found = hf_posenc.extend(folder, 64, output=tmp_path / "longer", text=texts, **sizes)
    assert found.report.settings["text"] == str(folder.with_name("original.txt")) and len(found.lengths) == 1


def test_the_folder_that_one_is_in_has_a_name_and_what_was_not_measured_no_table(tmp_path, monkeypatch):
    folder = tiny_checkpoints.save(tmp_path / "original", "bert", max_position_embeddings=50)
    monkeypatch.chdir(folder)
    found = hf_posenc.extend(".", 64, output=tmp_path / "longer", method="tile", trained_length=16)
    assert found.original == found.report.original == "original"
    assert str(found.report) == "Not measured: how well longer texts are read."
    with pytest.raises(ValueError, match="at most 131,072, got 1000000000"):
        hf_posenc.extend(folder, 10**9, output=tmp_path / "huge", method="mean", trained_length=16)


@pytest.mark.parametrize("method", ["tile", "mean"])
def test_a_matrix_that_is_read_inside_the_attention_is_continued_too(method, tmp_path):
    folder = tiny_checkpoints.save(tmp_path / "original", "bert", max_position_embeddings=50)
    before = tiny.fill_positions(AutoModel.from_pretrained(folder, position_scheme="tupe")).eval()
    before.save_pretrained(tmp_path / "tupe")
    tiny_checkpoints.tokenizer().save_pretrained(tmp_path / "tupe")
    hf_posenc.extend(tmp_path / "tupe", 100, output=tmp_path / "longer", method=method, trained_length=50)
    after = loaded(tmp_path / "longer")
    short, long = torch.randint(5, 90, (2, 50)), torch.randint(5, 90, (2, 100))
    assert torch.equal(before(input_ids=short)[0], after(input_ids=short)[0])
    with pytest.raises(ValueError, match="100 tokens"):
        before(input_ids=long)
    assert after(input_ids=long)[0].isfinite().all()


@pytest.fixture
def sentences(minilm, tmp_path):
    """MiniLM as a folder of sentence-transformers that cuts at 32 tokens."""
    library = pytest.importorskip("sentence_transformers", minversion="6.0")
    model = library.SentenceTransformer(minilm, device="cpu")
    model.max_seq_length = 32
    model.save(str(tmp_path / "minilm"))
    return tmp_path / "minilm"


@pytest.mark.parametrize("method", ["chunks", "tile"])
def test_an_index_of_short_texts_stays_and_what_was_cut_off_is_found(method, sentences, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sklearn.neighbors import NearestNeighbors

    for name in ("LICENSE", "NOTICE.txt"):
        (sentences / name).write_text("words of lawyers")
    found = hf_posenc.extend(sentences, 96, output=tmp_path / "longer", method=method)
    assert all((tmp_path / "longer" / name).read_text() == "words of lawyers" for name in ("LICENSE", "NOTICE.txt"))
    before = SentenceTransformer(str(sentences), device="cpu")
    after = SentenceTransformer(str(tmp_path / "longer"), device="cpu", trust_remote_code=method == "chunks")
    assert before.max_seq_length == 32 and after.max_seq_length == 96 and found.difference <= 1e-6
    short = [f"{a} {b} {c}" for a in WORDS[:8] for b in WORDS[8:] for c in ("green", "seven")]
    stored = before.encode(short)
    np.testing.assert_allclose(after.encode(short), stored, atol=1e-6)
    index = NearestNeighbors(n_neighbors=5, algorithm="ball_tree").fit(stored)
    queries = ["an old house", "a green river", "open doors"]
    neighbours = [index.kneighbors(model.encode(queries), return_distance=False) for model in (before, after)]
    assert np.array_equal(*neighbours)
    # Only what was added differs, behind the old end: the old model does not see it.
    long = [" ".join(WORDS * 2), " ".join(WORDS * 2 + ["volcano", "lava", "eruption"] * 8)]
    assert np.array_equal(*before.encode(long))
    index = NearestNeighbors(n_neighbors=1).fit(np.concatenate([stored, after.encode(long)]))
    assert index.kneighbors(after.encode(["a volcano and its lava"]), return_distance=False).item() == len(short) + 1
    assert [child.name for child in sorted(sentences.iterdir()) if child.name[0].isdigit()] == [
        child.name for child in sorted((tmp_path / "longer").iterdir()) if child.name[0].isdigit()
    ]


@pytest.mark.parametrize("method", ["chunks", "tile"])
def test_an_old_length_beyond_the_one_that_texts_were_cut_at_is_refused(method, sentences, tmp_path):
    with pytest.raises(ValueError, match="trained_length must be at most 32, .* got 64"):
        hf_posenc.extend(sentences, 96, output=tmp_path / "longer", method=method, trained_length=64)


def test_it_is_counted_how_many_texts_are_longer(sentences, tmp_path, capsys):
    texts = [{"text": " ".join((WORDS * 9)[:number])} for number in (3, 20, 40, 60, 150)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)) + "\n")
    with pytest.raises(SystemExit, match="0"):
        main(
            ["extend", str(sentences), "--out", str(tmp_path / "longer"), "--max-length", "96", "--method", "tile"]
            + ["--text", str(tmp_path / "texts.jsonl")]
        )
    printed = " ".join(capsys.readouterr().out.split())
    assert "minilm: maximum sequence length 96, before 32 (method 'tile')." in printed
    assert "the largest difference is 0.0e+00" in printed
    assert "3 of 5 texts (60.0%) are longer and have other vectors now" in printed
    assert "1 of those are longer than 96 tokens, and are still cut off there." in printed


def test_who_gets_the_folder_is_told_how_to_load_it(minilm, sentences, tmp_path):
    """By the command, the card and `inspect`; the first of them is run."""
    from sentence_transformers import SentenceTransformer

    found = hf_posenc.extend(sentences, 96, output=tmp_path / "longer")
    loading = re.search(r"SentenceTransformer\(.*?\)", str(found))[0]
    assert eval(loading, {"SentenceTransformer": SentenceTransformer}).max_seq_length == 96
    card = (tmp_path / "longer" / "README.md").read_text()
    assert (
        'SentenceTransformer("longer", trust_remote_code=True)' in card
        and "up to 96 tokens, in chunks of at most 32" in card
    )
    said = str(hf_posenc.inspect(tmp_path / "longer"))
    assert "truncates at 96 tokens (max_seq_length), and reads chunks of 32" in said
    assert "sentence-transformers cannot load it" in said and "model_max_length=" not in said
    before = str(hf_posenc.inspect(minilm))
    assert "truncates at 256 tokens (max_seq_length)" in before and "does not change this model" in before


class TestErrors:
    """Said before weights are read."""

    @pytest.fixture(autouse=True)
    def no_weights(self, monkeypatch):
        from transformers import PreTrainedModel

        monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)

    @pytest.fixture
    def folder(self, tmp_path):
        return tiny_checkpoints.save(tmp_path / "original")

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                {"max_length": 32},
                "max_length must be greater than 32, the checkpoint's maximum sequence length, got 32",
            ),
            ({"method": "stretch"}, "method must be one of chunks, trained, tile, interpolate, mean, got 'stretch'"),
            ({"method": "tile", "max_steps": 3}, "max_steps, max_minutes and resume are for method='trained'"),
            (
                {"method": "chunks"},
                "method='chunks' needs a model of sentence-transformers: take 'trained', or 'tile'",
            ),
        ],
    )
    def test_what_cannot_be_is_refused(self, given, message, folder, tmp_path):
        with pytest.raises(ValueError, match=message):
            hf_posenc.extend(folder, **({"max_length": 64, "output": tmp_path / "out"} | given))
        assert not (tmp_path / "out").exists()

    def test_positions_without_an_end_need_no_extension(self, tmp_path):
        tiny.build("deberta", head="Model").save_pretrained(tmp_path / "deberta")
        tiny_checkpoints.tokenizer().save_pretrained(tmp_path / "deberta")
        with pytest.raises(ValueError, match=r"the positions of this checkpoint \(deberta\) have no matrix that ends"):
            hf_posenc.extend(tmp_path / "deberta", 64, output=tmp_path / "out", method="tile")


@pytest.mark.parametrize("budget", [{"method": "tile"}, {"method": "trained", "max_steps": 1}], ids=str)
def test_nothing_is_written_where_vectors_would_change(budget, tmp_path, monkeypatch):
    def spoiled(*arguments):
        model = longer_tables.lengthen(*arguments)
        with torch.no_grad():
            model.base_model.embeddings.position_embeddings.weight[7, 0] += (
                1e-3  # LayerNorm takes off what all features get
            )
        return model

    for module in (extending, converting):
        monkeypatch.setattr(module, "lengthen", spoiled)
    folder = tiny_checkpoints.save(tmp_path / "original")
    with pytest.raises(
        ValueError, match=r"vectors of short texts would change, by up to .*e-\d+: nothing was written"
    ):
        hf_posenc.extend(folder, 64, output=tmp_path / "longer", text=tmp_path / "original.txt", **budget)
    assert not (tmp_path / "longer").exists()


def test_a_model_with_a_scheme_keeps_it(tmp_path):
    model = tiny.build("absolute+deberta", head="Model", max_position_embeddings=40)
    model.save_pretrained(tmp_path / "own")
    tiny_checkpoints.tokenizer().save_pretrained(tmp_path / "own")
    (tmp_path / "own.txt").write_text(tiny_checkpoints.text())
    hf_posenc.extend(
        tmp_path / "own", 64, output=tmp_path / "out", method="tile", trained_length=20, text=tmp_path / "own.txt"
    )
    longer = AutoModel.from_pretrained(tmp_path / "out").eval()
    assert longer.config.position_scheme == "absolute+deberta" and longer.config.max_position_embeddings == 64
    ids = torch.randint(5, 90, (2, 20))
    assert torch.equal(longer(input_ids=ids)[0], model.eval()(input_ids=ids)[0])


@pytest.mark.parametrize("method", ["trained", "tile", "chunks"])
@pytest.mark.parametrize(
    "entry", [{"document_length": 40}, {"processing_kwargs": {"text": {"max_length": 40}}}], ids=str
)
def test_folders_that_cut_texts_off_by_another_setting_are_refused(entry, method, minilm, tmp_path):
    library = pytest.importorskip("sentence_transformers", minversion="6.0")
    library.SentenceTransformer(minilm, device="cpu").save(str(tmp_path / "original"))
    [file] = (tmp_path / "original").glob("sentence_*_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | entry))
    with pytest.raises(ValueError, match=f"cuts texts off at 40 tokens by {[*entry][0]}"):
        hf_posenc.extend(tmp_path / "original", 1024, output=tmp_path / "longer", method=method)
    with pytest.raises(ValueError, match="cuts texts off at 40 tokens"):
        hf_posenc.convert(tmp_path / "original", "t5", max_length=1024, max_steps=1)
    assert not (tmp_path / "longer").exists()


def test_what_reads_in_chunks_is_no_model_to_go_on_from(sentences, tmp_path):
    """Its encoder alone reads otherwise."""
    hf_posenc.extend(sentences, 96, output=tmp_path / "longer")
    message = "longer reads texts in chunks of 32 tokens, .* give the model that it was made from"
    for use in (
        lambda: hf_posenc.convert(tmp_path / "longer", "t5", train="none"),
        lambda: hf_posenc.extend(tmp_path / "longer", 128, output=tmp_path / "again"),
        lambda: converting.compare(sentences, tmp_path / "longer"),
        lambda: converting.compare(tmp_path / "longer", sentences),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    assert not (tmp_path / "again").exists()


def test_new_rows_alone_are_trained_at_a_rate_of_their_own():
    """They begin as copies, and have as far to go as rows differ; whatever is named stays."""
    rates = {train: Distillation(32, 96, train=train).learning_rate for train in ("all", "positions", "beyond")}
    assert rates == {"all": 1.5e-4, "positions": 1.5e-4, "beyond": 2.4e-3}
    assert Distillation(32, 96, train="beyond", learning_rate=1e-4).learning_rate == 1e-4
    assert Distillation(32, 96, train="beyond").with_rate_of({"t5"}).learning_rate == 2.4e-3
    assert Distillation(32, 96).with_rate_of({"t5"}).learning_rate == 1.5e-4
    assert Distillation(32, 96).with_rate_of({"t5", "rope"}).learning_rate == 3e-4


def test_checkpoints_with_an_adapter_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    folder = tiny_checkpoints.save(tmp_path / "original", "bert", max_position_embeddings=50)
    (folder / "adapter_config.json").write_text("{}")
    for method in ("tile", "trained"):
        with pytest.raises(ValueError, match="has an adapter of PEFT"):
            hf_posenc.extend(folder, 64, output=tmp_path / "longer", method=method, trained_length=16)
    (folder / "adapter_config.json").unlink()
    wrapped = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["query"]), loaded(folder))
    with pytest.raises(ValueError, match="wrapped by PEFT"):
        hf_posenc.convert(wrapped, "absolute", tokenizer=AutoTokenizer.from_pretrained(folder), max_length=64)
