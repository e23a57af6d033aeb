"""What is written is whole, or is not there; folders of sentence-transformers stay what they are."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
from fresh_process import ROOT
from transformers import AutoModel

from hf_posenc import convert
from hf_posenc.cli import main
from hf_posenc.conversion.checkpoints import load_checkpoint
from hf_posenc.conversion.measuring import Yardstick
from hf_posenc.conversion.texts import Windows, read_documents


@pytest.fixture
def checkpoint(tmp_path):
    return tiny_checkpoints.save(tmp_path / "bert")


@pytest.fixture
def words(checkpoint):
    return [checkpoint.with_name("bert.txt")]


@pytest.fixture
def sentences(tmp_path):
    """A folder of sentence-transformers with a prompt and a text of its own."""
    library = pytest.importorskip("sentence_transformers")
    checkpoint = tiny_checkpoints.save(tmp_path / "bert")
    models = pytest.importorskip("sentence_transformers.models")
    transformer = models.Transformer(str(checkpoint), max_seq_length=24)
    pooling = models.Pooling(transformer.get_word_embedding_dimension(), pooling_mode="cls")
    model = library.SentenceTransformer(
        modules=[transformer, pooling, models.Normalize()], prompts={"query": "w5 w6"}, device="cpu"
    )
    model.save(str(tmp_path / "sentences"))
    card = tmp_path / "sentences" / "README.md"
    card.write_text(card.read_text() + "\nA word of the author's own.\n")
    return tmp_path / "sentences"


class TestSentenceTransformers:
    def test_a_folder_comes_out_whole_and_reads_further(self, sentences, words, tmp_path):
        from sentence_transformers import SentenceTransformer

        _, report = convert(sentences, "absolute+t5", text=words, max_length=60, train="none", output=tmp_path / "out")
        assert report.trained_length == 24
        assert load_checkpoint(sentences).pooling == load_checkpoint(tmp_path / "out").pooling == "cls"
        before, after = (SentenceTransformer(str(folder), device="cpu") for folder in (sentences, tmp_path / "out"))
        assert after.max_seq_length == 60 and before.max_seq_length == 24
        assert [type(module).__name__ for module in after] == ["Transformer", "Pooling", "Normalize"]
        assert after.prompts == before.prompts
        assert type(after[0].auto_model).__name__ == "PosencBertModel"
        short, long = "w9 w17 w23", " ".join(tiny_checkpoints.WORDS[:50])
        close = torch.tensor(after.encode(short)) - torch.tensor(before.encode(short))
        assert close.abs().max() < 1e-5
        assert after.encode(long) @ after.encode(" ".join(tiny_checkpoints.WORDS[:30])) < 0.9999
        card = (tmp_path / "out" / "README.md").read_text()
        assert "A word of the author's own." in card and "Not measured" in card

    def test_its_texts_are_compared_as_it_pools_them(self, sentences, words):
        model, report = convert(sentences, "t5", text=words, held_out=words, train="none")
        original, held_out = (
            load_checkpoint(sentences),
            Windows(read_documents(words), load_checkpoint(sentences).tokenizer),
        )
        found = {
            pooling: Yardstick(original.model, held_out, 24, 24, pooling).measure(model, "calibrate")[0][
                "sentence_cosine"
            ]
            for pooling in ("cls", "mean")
        }
        assert report.final()[0]["sentence_cosine"] == pytest.approx(found["cls"], abs=1e-6)
        assert abs(found["cls"] - found["mean"]) > 1e-3

    def test_a_longer_stock_one_needs_no_plugin(self, sentences, words, tmp_path):
        convert(sentences, "absolute", text=words, max_length=60 + 30, train="none", output=tmp_path / "out")
        settings = json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
        lengths = {settings.get("max_seq_length", 90)}
        lengths.add(json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"])
        lengths.add(json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"])
        assert lengths == {90}
        assert not [*(tmp_path / "out").glob("*.py")]


@pytest.mark.slow
def test_onnx_computes_what_the_model_computes(checkpoint, words, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, _ = convert(checkpoint, "t5", text=words, train="none", output=tmp_path / "out", onnx=True)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "onnx" / "model.onnx")
    for batch, length in ((1, 5), (3, 80)):
        ids = torch.randint(5, 99, (batch, length))
        mask = torch.ones_like(ids)
        mask[0, length // 2 :] = 0
        [found] = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
        assert (torch.from_numpy(found) - expected)[mask.bool()].abs().max() < 1e-4


def test_numbers_are_saved_as_they_were(checkpoint, words, tmp_path):
    half = AutoModel.from_pretrained(checkpoint, dtype=torch.bfloat16)
    half.save_pretrained(checkpoint)
    convert(checkpoint, "t5", text=words, train="none", output=tmp_path / "out")
    assert AutoModel.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


class TestNothingHalfWritten:
    @pytest.mark.slow
    def test_a_full_disk(self, checkpoint, words, tmp_path):
        code = (
            "import resource, sys\nfrom hf_posenc.cli import main\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))\n"
            f"main(['convert', {str(checkpoint)!r}, {str(tmp_path / 'out')!r}, '--position_scheme', 't5', '--text', "
            f"{str(words[0])!r}, '--train', 'none'])"
        )
        before = {*tmp_path.iterdir()}
        assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
        process = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 2
        assert "hf-posenc: " in process.stderr.splitlines()[-1]
        assert {*tmp_path.iterdir()} == before

    def test_too_little_space_is_said_at_once(self, checkpoint, words, tmp_path, monkeypatch):
        usage = type("Usage", (), {"free": 1000})
        monkeypatch.setattr("hf_posenc.conversion.writing.shutil.disk_usage", lambda _: usage)
        with pytest.raises(OSError, match="MB left and .* MB are needed"):
            convert(checkpoint, "t5", text=words, output=tmp_path / "out")

    def test_a_place_that_cannot_be_written_to(self, checkpoint, words):
        with pytest.raises(OSError, match="cannot be made|cannot be written"):
            convert(checkpoint, "t5", text=words, output=Path("/proc/nowhere/out"))

    def test_a_folder_that_holds_something(self, checkpoint, words, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("mine")
        with pytest.raises(FileExistsError, match="there already, and not empty"):
            convert(checkpoint, "t5", text=words, output=tmp_path / "out")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_the_command_line_converts_and_compares(checkpoint, words, tmp_path, capsys):
    line = ["convert", str(checkpoint), str(tmp_path / "out"), "--position_scheme", "deberta", "--train", "none"]
    line += [
        "--text",
        str(words[0]),
        "--position_attention_types",
        "c2p",
        "--position_norm",
        "--position_buckets",
        "16",
    ]
    with pytest.raises(SystemExit) as exit:
        main(line)
    assert not exit.value.code
    assert "| calibrate | 32 " in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["position_attention_types"] == ["c2p"] and config["position_norm"] is True
    with pytest.raises(SystemExit) as exit:
        main(
            [
                "compare",
                str(checkpoint),
                str(tmp_path / "out"),
                "--text",
                str(words[0]),
                "--report",
                str(tmp_path / "r"),
            ]
        )
    assert not exit.value.code
    assert "| converted | 32 " in capsys.readouterr().out
    assert json.loads((tmp_path / "r").read_text())["rows"]
