"""What is written is whole, or is not there; folders of sentence-transformers stay what they are."""

import itertools
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
from fresh_process import ROOT
from transformers import AutoModel, PreTrainedModel

from hf_posenc import convert
from hf_posenc.conversion.checkpoints import load_checkpoint
from hf_posenc.conversion.distillation import distill
from hf_posenc.conversion.measuring import Yardstick
from hf_posenc.conversion.targets import normalised_error
from hf_posenc.conversion.texts import Windows, read_documents
from hf_posenc_cli import main


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


@pytest.mark.slow
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

    @pytest.mark.parametrize("lengths", [{"trained_length": 48}, {"trained_length": 48, "max_length": 48}], ids=str)
    def test_a_training_length_beyond_the_cut_is_read(self, lengths, sentences, words, tmp_path):
        from sentence_transformers import SentenceTransformer

        convert(sentences, "t5", text=words, train="none", output=tmp_path / "out", **lengths)
        assert SentenceTransformer(str(tmp_path / "out"), device="cpu").max_seq_length == 48

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

    @pytest.mark.parametrize(
        "settings, ways",
        [
            ({"pooling_mode": "lasttoken"}, "lasttoken"),
            ({"pooling_mode": ["mean", "max"]}, "max+mean"),
            (
                {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
                "mean+lasttoken",
            ),
            ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len_tokens"),
            ({}, "mean"),
            ({"pooling_mode": "of another library"}, "mean"),
            ({"pooling_mode": 3}, "mean"),
        ],
        ids=str,
    )
    def test_how_it_pools_is_read_in_either_form(self, settings, ways, sentences):
        (sentences / "1_Pooling" / "config.json").write_text(json.dumps(settings))
        assert load_checkpoint(sentences).pooling == ways

    @pytest.mark.parametrize(
        "file, said", [("1_Pooling/config.json", "is a link that leads out"), ("1_Pooling/model.bin", "is a pickle")]
    )
    def test_a_module_that_does_not_go_along_is_said_at_once(
        self, file, said, sentences, words, tmp_path, monkeypatch
    ):
        (tmp_path / "elsewhere").write_text("{}")
        (sentences / file).unlink(missing_ok=True)
        (sentences / file).symlink_to(tmp_path / "elsewhere")
        monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)  # no weight is read
        with pytest.raises(ValueError, match=said):
            convert(sentences, "t5", text=words, train="none", output=tmp_path / "out")

    def test_a_longer_stock_one_needs_no_plugin(self, sentences, words, tmp_path):
        convert(sentences, "absolute", text=words, max_length=60 + 30, train="none", output=tmp_path / "out")
        settings = json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
        lengths = {settings.get("max_seq_length", 90)}
        lengths.add(json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"])
        lengths.add(json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"])
        assert lengths == {90}
        assert not [*(tmp_path / "out").glob("*.py")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onnx_computes_what_the_model_computes(checkpoint, words, tmp_path, dtype):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    AutoModel.from_pretrained(checkpoint, dtype=dtype).save_pretrained(checkpoint)
    model, _ = convert(checkpoint, "t5", text=words, train="none", output=tmp_path / "out", onnx=True)
    assert model.dtype == dtype
    model.float()  # the file is in float32
    session = onnxruntime.InferenceSession(tmp_path / "out" / "onnx" / "model.onnx")
    for batch, length in ((1, 5), (3, 80)):
        ids = torch.randint(5, 99, (batch, length))
        mask = torch.ones_like(ids)
        mask[0, length // 2 :] = 0
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        [found] = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
        assert (torch.from_numpy(found) - expected)[mask.bool()].abs().max() < 1e-4


@pytest.mark.slow
def test_numbers_are_saved_as_they_were(checkpoint, words, tmp_path):
    half = AutoModel.from_pretrained(checkpoint, dtype=torch.bfloat16)
    half.save_pretrained(checkpoint)
    convert(checkpoint, "t5", text=words, train="none", output=tmp_path / "out")
    assert AutoModel.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


class TestNothingHalfWritten:
    @pytest.mark.slow
    def test_a_full_disk(self, checkpoint, words, tmp_path):
        code = (
            "import resource, sys\nfrom hf_posenc_cli import main\n"
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
        monkeypatch.setattr("hf_posenc.hub.folders.shutil.disk_usage", lambda _: usage)
        with pytest.raises(OSError, match="MB free, and .* MB are needed"):
            convert(checkpoint, "t5", text=words, output=tmp_path / "out")

    def test_a_place_that_cannot_be_written_to(self, checkpoint, words):
        with pytest.raises(OSError, match="cannot be created|cannot be written"):
            convert(checkpoint, "t5", text=words, output=Path("/proc/nowhere/out"))

    @pytest.mark.slow
    def test_a_link_to_an_empty_folder_is_followed(self, checkpoint, words, tmp_path):
        (tmp_path / "disk" / "real").mkdir(parents=True)
        (tmp_path / "out").symlink_to("disk/real")
        convert(checkpoint, "t5", text=words, max_steps=2, output=tmp_path / "out")
        assert (tmp_path / "out").is_symlink() and AutoModel.from_pretrained(tmp_path / "disk" / "real")
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]

    @pytest.mark.parametrize(
        "output, said",
        [
            ("link", "out/link is a link to nowhere, which does not exist"),
            (".", "is the current folder"),
            ("../out", "is the current folder"),
            ("mounted", "mounted is a mount point"),
        ],
    )
    def test_a_place_that_no_folder_can_take(self, output, said, checkpoint, words, tmp_path, monkeypatch):
        (tmp_path / "out").mkdir()
        monkeypatch.chdir(tmp_path / "out")
        if output == "link":
            Path("link").symlink_to("nowhere")
            output = tmp_path / "out" / "link"
        if output == "mounted":
            Path(output).mkdir()
            monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mounted")
        monkeypatch.setattr("hf_posenc.conversion.converting.load_checkpoint", None)  # nothing is read yet
        before = {*(tmp_path / "out").iterdir()}
        with pytest.raises(OSError, match=said):
            convert(checkpoint, "t5", text=words, output=output)
        assert {*(tmp_path / "out").iterdir()} == before and not [*tmp_path.glob(".*")]

    @pytest.mark.parametrize("train", ["none", "all"])
    def test_what_cannot_take_its_place_stays_where_it_is(self, train, checkpoint, words, tmp_path, monkeypatch):
        def refuse(source, target):
            if Path(target) == tmp_path / "out":
                raise PermissionError("no right to")
            return replace(source, target)

        replace = os.replace
        monkeypatch.setattr(os, "replace", refuse)
        budget = {} if train == "none" else {"max_steps": 3}
        with pytest.raises(OSError, match="cannot be created: no right to; its complete content is in") as error:
            convert(checkpoint, "t5", text=words, train=train, output=tmp_path / "out", **budget)
        [whole] = [path for path in tmp_path.glob(".out.*") if path.name != ".out.conversion"]
        assert str(whole) in str(error.value)
        assert AutoModel.from_pretrained(whole).config.position_scheme == "t5"
        assert (whole / "conversion.json").is_file()

    @pytest.mark.slow
    def test_what_was_healed_stays_when_it_cannot_be_written(self, checkpoint, words, tmp_path, monkeypatch):
        def full(*_, **__):
            raise OSError(28, "No space left on device")

        arguments = {"text": words, "max_steps": 3, "output": tmp_path / "out"}
        with monkeypatch.context() as patched:
            patched.setattr(PreTrainedModel, "save_pretrained", full)
            with pytest.raises(OSError, match=r"No space left.*kept in .*\.out\.conversion, resume goes on"):
                convert(checkpoint, "t5", **arguments)
        assert {path.name for path in tmp_path.glob("*out*")} == {".out.conversion"}
        monkeypatch.setattr("hf_posenc.conversion.distillation._Run._step", None)  # no step is made again
        _, report = convert(checkpoint, "t5", resume=True, **arguments)
        assert report.distillation[-1]["step"] == 3
        assert {path.name for path in tmp_path.glob("*out*")} == {"out"}

    def test_numbers_that_are_not_finite(self, checkpoint, words, tmp_path):
        """In half precision, what the conversion put into the words is more than its numbers reach."""
        model = AutoModel.from_pretrained(checkpoint)
        with torch.no_grad():
            model.embeddings.token_type_embeddings.weight[:, 3] = 65000
            model.embeddings.position_embeddings.weight[:, 3] = 1000
        model.half().save_pretrained(checkpoint)
        with pytest.raises(ValueError, match="in torch.float16, .*token_type_embeddings.weight has numbers"):
            convert(checkpoint, "t5", text=words, train="none", output=tmp_path / "out")
        assert not [*tmp_path.glob("*out*")]

    @pytest.mark.parametrize("steps", [3, 60])
    @pytest.mark.slow
    def test_training_that_diverges(self, steps, checkpoint, words, tmp_path, monkeypatch, capsys):
        errors = itertools.count()

        def error(states, aim):
            return normalised_error(states, aim) * (math.inf if next(errors) == steps else 1)

        defaults = tuple(error if value is normalised_error else value for value in distill.__defaults__)
        monkeypatch.setattr(distill, "__defaults__", defaults)
        line = [
            "convert",
            str(checkpoint),
            "--out",
            str(tmp_path / "out"),
            "--position-scheme",
            "t5",
            "--text",
            str(words[0]),
        ]
        with pytest.raises(SystemExit) as exit:
            main([*line, "--max_steps", "100"])
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-posenc: ")]
        assert exit.value.code == 1 and len(said) == 1 and "lower learning_rate" in said[0]
        kept = tmp_path / ".out.conversion"
        assert not (tmp_path / "out").exists()
        assert kept.exists() == (str(kept) in said[0]) == (steps > 50)

    @pytest.mark.parametrize("name", ["LICENSE", "README.md", "NOTICE.txt"])
    def test_a_link_out_of_the_checkpoint_is_not_followed(self, name, checkpoint, words, tmp_path, monkeypatch):
        (tmp_path / "secret").write_text("mine")
        (checkpoint / name).symlink_to(tmp_path / "secret")
        monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)  # no weight is read
        with pytest.raises(ValueError, match=f"{name} is a link that leads out of the folder"):
            convert(checkpoint, "t5", text=words, train="none", output=tmp_path / "out")
        assert not [*tmp_path.glob("*out*")]

    def test_links_to_the_blobs_of_the_hub_s_cache_are_followed(self, checkpoint, words, tmp_path):
        snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        (checkpoint / "LICENSE").write_text("free")
        for number, file in enumerate(sorted(checkpoint.iterdir())):
            file.rename(blobs / str(number))
            (snapshot / file.name).symlink_to(f"../../blobs/{number}")
        convert(snapshot, "t5", text=words, train="none", output=tmp_path / "out")
        assert (tmp_path / "out" / "LICENSE").read_text() == "free"

    def test_a_card_that_cannot_be_read_is_said_at_once(self, checkpoint, words, tmp_path, monkeypatch):
        (checkpoint / "README.md").write_text("---\n[\n---\n")
        monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)  # no weight is read
        with pytest.raises(ValueError, match="cannot be read as a card"):
            convert(checkpoint, "t5", text=words, train="none", output=tmp_path / "out")

    def test_a_folder_that_holds_something(self, checkpoint, words, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("mine")
        with pytest.raises(FileExistsError, match="exists and is not empty"):
            convert(checkpoint, "t5", text=words, output=tmp_path / "out")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


class TestTwoAtOnce:
    """Of two processes with one output, the second is refused before it has done anything, and leaves the first its work."""

    HOLD = "import sys, time, filelock\nlock = filelock.FileLock(sys.argv[1])\nlock.acquire()\nprint('held', flush=True)\ntime.sleep(600)"

    @pytest.fixture
    def first(self, tmp_path):
        """A process that is converting to `out`."""
        work = tmp_path / ".out.conversion"
        work.mkdir()
        (work / "report.json").write_text("its own")
        process = subprocess.Popen(
            [sys.executable, "-c", self.HOLD, str(work / "lock")], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()
        process.wait()

    @pytest.mark.parametrize("train, resume", [("none", False), ("all", False), ("all", True)])
    def test_the_second_is_refused(self, train, resume, first, checkpoint, words, tmp_path, monkeypatch):
        monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)  # no weight is read
        with pytest.raises(FileExistsError, match=f"another process is converting to {tmp_path / 'out'}: wait"):
            convert(checkpoint, "t5", text=words, train=train, resume=resume, output=tmp_path / "out")
        assert (tmp_path / ".out.conversion" / "report.json").read_text() == "its own"
        assert not (tmp_path / "out").exists()

    def test_another_output_is_free(self, first, checkpoint, words, tmp_path):
        convert(checkpoint, "t5", text=words, train="none", output=tmp_path / "other")
        assert not [*tmp_path.glob(".other*")]

    def test_one_that_was_killed_holds_nothing_up(self, first, checkpoint, words, tmp_path):
        first.kill()
        first.wait()
        assert (tmp_path / ".out.conversion" / "lock").exists()
        convert(checkpoint, "t5", text=words, max_steps=2, output=tmp_path / "out")
        assert {path.name for path in tmp_path.glob("*out*")} == {"out"}

    @pytest.mark.slow
    def test_the_first_goes_on(self, checkpoint, words, tmp_path):
        command = [sys.executable, "-m", "hf_posenc", "convert", str(checkpoint), "--out", str(tmp_path / "out")]
        command += ["--position-scheme", "t5", "--text", str(words[0]), "--max-steps", "100000"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (tmp_path / ".out.conversion" / "lock").exists():
            assert first.poll() is None, "it ended before a second could begin"
        second = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert second.returncode == 2 and "another process is converting to" in second.stderr.splitlines()[-1]
        assert first.poll() is None and (tmp_path / ".out.conversion" / "lock").exists()
        first.kill()
        first.wait()
        convert(checkpoint, "t5", text=words, train="none", output=tmp_path / "out")
        assert {path.name for path in tmp_path.glob("*out*")} == {"out"}


def test_the_command_line_converts_and_compares(checkpoint, words, tmp_path, capsys):
    line = [
        "convert",
        str(checkpoint),
        "--out",
        str(tmp_path / "out"),
        "--position-scheme",
        "deberta",
        "--train",
        "none",
    ]
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
    (tmp_path / "link").symlink_to("r")
    with pytest.raises(SystemExit) as exit:
        main(
            [
                "compare",
                str(checkpoint),
                str(tmp_path / "out"),
                "--text",
                str(words[0]),
                "--out",
                str(tmp_path / "link"),
            ]
        )
    assert not exit.value.code
    assert "| converted | 32 " in capsys.readouterr().out
    assert json.loads((tmp_path / "r").read_text())["rows"] and (tmp_path / "link").is_symlink()


def test_a_report_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "report.json", tmp_path):
        with pytest.raises(SystemExit) as exit:
            main(["compare", "nowhere", "nowhere", "--out", str(place)])
        assert exit.value.code == 2 and f"hf-posenc: {place} " in capsys.readouterr().err
