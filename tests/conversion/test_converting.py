"""One call changes a checkpoint's positions and keeps what it knows, in every family, or says why not and leaves nothing."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import distributed_worker as worker
import pytest
import tiny
import tiny_checkpoints
import torch
from fresh_process import ROOT, run_fresh
from pairs import every_family
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

import hf_posenc
from hf_posenc import convert
from hf_posenc.conversion import ConversionArguments, compare, converting
from hf_posenc.conversion.distillation import Distillation
from hf_posenc.conversion.report import ConversionReport
from hf_posenc.hub.folders import REPORT
from hf_posenc.modeling.schemes.sinusoidal import sinusoids
from hf_posenc.modeling.schemes.table import SCHEMES


@pytest.fixture
def checkpoint(tmp_path):
    return tiny_checkpoints.save(tmp_path / "bert")


@pytest.fixture
def no_weight_is_read(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("weights were about to be read")

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(refuse))


def words_of(checkpoint):
    return [checkpoint.with_name(checkpoint.name + ".txt")]


class TestBaseAndFrequencyOfSinusoids:
    """What `convert` chooses after the table, and leaves as it is asked for."""

    @pytest.fixture
    def planted(self, checkpoint):
        """A checkpoint whose table has waves of up to 2 radians a position."""
        model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
        table = model.embeddings.position_embeddings.weight
        with torch.no_grad():
            table.copy_(
                0.1 * sinusoids(torch.arange(len(table)), table.shape[1], 20.0, "interleaved", table.dtype, 2.0)
            )
        model.save_pretrained(checkpoint)
        return checkpoint

    def converted(self, checkpoint, scheme="sinusoidal", **flags):
        model, report = convert(checkpoint, scheme, text=words_of(checkpoint), train="none", **flags)
        chosen = {
            name: value for name, value in report.flags.items() if name in ("position_base", "position_frequency")
        }
        assert all(getattr(model.config, name) == value for name, value in chosen.items())
        return chosen, cosines(report, "start")[32]

    def test_the_nearest_are_chosen(self, planted, tmp_path):
        chosen, cosine = self.converted(planted, position_combine="concat", output=tmp_path / "out")
        assert chosen["position_frequency"] == 2.0
        loaded = AutoModel.from_pretrained(tmp_path / "out")
        assert loaded.config.position_frequency == 2.0 and loaded.config.position_base == chosen["position_base"]
        published, worse = self.converted(planted, position_combine="concat", position_frequency=1.0)
        assert published == {"position_frequency": 1.0} and worse < cosine - 0.003

    @pytest.mark.parametrize(
        ("scheme", "flags"),
        [
            ("sinusoidal", {}),
            ("sinusoidal", {"position_combine": "gate"}),
            ("sinusoidal+rope", {"position_combine": "concat"}),
            ("sinusoidal", {"position_combine": "concat", "position_base": 30.0}),
        ],
        ids=str,
    )
    def test_nothing_is_chosen_for_others(self, scheme, flags, planted):
        chosen, _ = self.converted(planted, scheme, **flags)
        assert chosen == {name: value for name, value in flags.items() if name == "position_base"}


def test_minutes_count_what_comes_before_training(checkpoint, monkeypatch):
    minutes, allowed = [], []

    def slow(*_, seconds):
        allowed.append(seconds)
        time.sleep(0.5)

    def no_training(*arguments, **_):
        minutes.extend(each.max_minutes for each in arguments if isinstance(each, Distillation))
        return []

    monkeypatch.setattr(converting, "calibrate", slow)
    monkeypatch.setattr(converting, "distill", no_training)
    for given in (60.0, 0.005):
        _, report = convert(checkpoint, "t5", text=words_of(checkpoint), max_minutes=given)
        assert report.settings["max_minutes"] == given
    assert 50 < minutes[0] < 60 - 0.5 / 60 and 0 < minutes[1] < 1e-6
    assert 25 * 60 < allowed[0] < 30 * 60 and 0 < allowed[1] < 0.15  # half of what is left


def test_each_stage_is_announced(checkpoint, capfd):
    convert(checkpoint, "t5", text=words_of(checkpoint), max_length=40, max_steps=2)
    said = re.findall(r"conversion: (.*)", capfd.readouterr().err)
    assert said == [
        "measuring the original",
        "initializing the new scheme",
        "measuring after start",
        "calibrating attention scores",
        "measuring after calibrate",
        "measuring after distill",
    ]


@pytest.mark.parametrize("scheme", ["rope", "t5"])
def test_a_frozen_model_is_converted_as_any_other(scheme, checkpoint):
    states = []
    for is_frozen in (True, False):
        model = AutoModel.from_pretrained(checkpoint).requires_grad_(not is_frozen)
        settings = {"tokenizer": AutoTokenizer.from_pretrained(checkpoint), "text": words_of(checkpoint)}
        converted, _ = convert(model, scheme, **settings, max_steps=2)
        assert all(parameter.requires_grad != is_frozen for parameter in model.parameters())
        states.append(converted.state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_window_is_converted_to(checkpoint, tmp_path):
    flags = {"position_window": 8, "position_global_every": 2}
    usual = {"text": words_of(checkpoint), "max_steps": 2}
    model, report = convert(checkpoint, "t5", **flags, **usual, output=tmp_path / "out")
    assert flags.items() <= report.flags.items()
    assert [part.reach for part in model.modules() if hasattr(part, "reach")] == [None, 4]
    again = AutoModel.from_pretrained(tmp_path / "out")
    assert [part.reach for part in again.modules() if hasattr(part, "reach")] == [None, 4]
    ids = tiny.inputs(batch=1, length=30, padding=None)["input_ids"]
    with torch.no_grad():
        found = again(ids).last_hidden_state
        assert torch.equal(found, model.base_model(ids).last_hidden_state)
        again.encoder.layer[1].attention.self.reach = None
        assert (again(ids).last_hidden_state - found).abs().max() > 1e-3
    # The checkpoint's own positions, in a window, are another scheme too.
    model, _ = convert(checkpoint, "absolute", **flags, **usual)
    assert model.config.position_window == 8


def cosines(report: ConversionReport, stage: str) -> dict[int, float]:
    return {row["length"]: row["token_cosine"] for row in report.rows if row["stage"] == stage}


class TestEveryFamily:
    # The longer of the two: once in the core.
    @pytest.mark.parametrize(
        "family", [pytest.param(name, marks=() if name == "bert" else pytest.mark.slow) for name in tiny.FAMILIES]
    )
    @pytest.mark.slow
    def test_healing_brings_the_states_back(self, family, tmp_path):
        checkpoint = tiny_checkpoints.save(tmp_path / family, family)
        # MPNet has a bias of t5's kind already.
        scheme = "deberta" if family == "mpnet" else "t5"
        model, report = convert(checkpoint, scheme, text=words_of(checkpoint), max_steps=40, output=tmp_path / "out")
        started, distilled = cosines(report, "start")[32], cosines(report, "distill")[32]
        assert distilled > started + 0.01
        # What random weights say of positions is no function of the distance: there is little to fit.
        assert cosines(report, "calibrate")[32] > started - 0.01
        errors = [entry["cosine"] for entry in report.distillation]
        assert errors[-1] > started
        loaded = tiny.aligned(AutoModel.from_pretrained(tmp_path / "out").eval())
        assert loaded.config.position_scheme == scheme
        inputs = tiny.inputs(family=family)
        inputs["attention_mask"][:] = 1
        with torch.no_grad():
            assert torch.equal(loaded(**inputs).last_hidden_state, tiny.aligned(model)(**inputs).last_hidden_state)

    @every_family
    def test_what_joins_its_own_positions_starts_exactly(self, family, tmp_path):
        checkpoint = tiny_checkpoints.save(tmp_path / family, family)
        native = tiny.FAMILIES[family].family.native_scheme
        scheme = f"{native}+deberta"
        model, report = convert(checkpoint, scheme, text=words_of(checkpoint), train="none", max_length=48)
        original = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
        ids = torch.randint(5, 99, (2, 32), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            difference = model(ids).last_hidden_state - original(ids).last_hidden_state
        assert difference.abs().max() < 1e-5
        assert cosines(report, "start")[32] == pytest.approx(1, abs=1e-5)


class TestLonger:
    @pytest.mark.slow
    def test_absolute_gives_a_stock_checkpoint_that_needs_no_plugin(self, checkpoint, tmp_path):
        model, report = convert(
            checkpoint, "absolute", text=words_of(checkpoint), max_length=100, train="none", output=tmp_path / "out"
        )
        assert type(model).__module__.startswith("transformers.")
        assert model.config.max_position_embeddings == 100
        ids = [[7, *range(5, 99), 8, 9]]
        code = (
            "import torch\nfrom transformers import AutoModel, AutoTokenizer\n"
            f"model = AutoModel.from_pretrained({str(tmp_path / 'out')!r}).eval()\n"
            f"length = AutoTokenizer.from_pretrained({str(tmp_path / 'out')!r}).model_max_length\n"
            f"print('found', length, model(torch.tensor({ids})).last_hidden_state.double().square().sum().item(), 'found')"
        )
        length, total = run_fresh(code, tmp_path / "modules", plugin=False).split("found")[1].split()
        assert int(length) == 100
        with torch.no_grad():
            expected = model(torch.tensor(ids)).last_hidden_state.double().square().sum().item()
        assert float(total) == pytest.approx(expected, abs=1e-3)
        assert {row["length"] for row in report.rows} == {32, 100}
        assert "another tiling" in report.table() and "Reads locally" in report.table()
        assert "Longer than it was" in (tmp_path / "out" / "README.md").read_text()

    @pytest.mark.parametrize(
        "scheme",
        ["absolute+t5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("absolute", "absolute+deberta"))],
    )
    def test_beyond_leaves_what_is_within_exactly_as_it_was(self, scheme, checkpoint):
        model, _ = convert(checkpoint, scheme, text=words_of(checkpoint), max_length=96, train="beyond", max_steps=10)
        original = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
        before, _ = convert(checkpoint, scheme, text=words_of(checkpoint), max_length=96, train="none")
        ids = torch.randint(5, 99, (2, 96), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            within = model(ids[:, :32]).last_hidden_state - original(ids[:, :32]).last_hidden_state
            beyond = model(ids).last_hidden_state - before(ids).last_hidden_state
        assert within.abs().max() < 1e-5
        assert beyond.abs().max() > 1e-3

    @every_family
    @pytest.mark.slow
    def test_a_stretched_table_keeps_what_is_within_for_good(self, family, tmp_path):
        checkpoint = tiny_checkpoints.save(tmp_path / family, family)
        scheme = tiny.FAMILIES[family].family.native_scheme
        arguments = {"text": words_of(checkpoint), "max_length": 90, "extend": "interpolate"}
        convert(checkpoint, scheme, train="beyond", max_steps=10, output=tmp_path / "out", **arguments)
        model, original = (AutoModel.from_pretrained(folder).eval() for folder in (tmp_path / "out", checkpoint))
        before, _ = convert(checkpoint, scheme, train="none", **arguments)
        assert model.config.position_stride == 3
        ids = torch.randint(5, 99, (2, 90), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for length in (7, 32):
                part = {"input_ids": ids[:, :length]}
                torch.testing.assert_close(
                    model(**part).last_hidden_state, original(**part).last_hidden_state, atol=1e-5, rtol=0
                )
            assert (model(ids).last_hidden_state - before(ids).last_hidden_state).abs().max() > 1e-3
        with pytest.raises(ValueError, match="convert its original"):
            convert(tmp_path / "out", "t5", text=words_of(checkpoint), train="none")

    def test_a_bucket_of_t5_begins_at_the_trained_length(self, checkpoint):
        model, report = convert(checkpoint, "t5", text=words_of(checkpoint), max_length=96, train="none")
        distances = -torch.arange(96)
        config = model.config
        rows = hf_posenc.modeling.schemes.positions.t5_bucket(
            distances, config.position_buckets, config.position_max_distance
        )
        assert not {*rows[:32].tolist()} & {*rows[32:].tolist()}

    @pytest.mark.slow
    def test_nothing_lies_beyond_where_all_is_used_within(self, checkpoint, tmp_path):
        arguments = {"text": words_of(checkpoint), "max_length": 64, "train": "beyond", "max_steps": 2}
        before = {*tmp_path.iterdir()}
        with pytest.raises(ValueError, match="nothing to train beyond 32 tokens"):
            convert(checkpoint, "transformer_xl", output=tmp_path / "out", **arguments)
        assert {*tmp_path.iterdir()} == before


@pytest.fixture(scope="module")
def few_words(tmp_path_factory):
    """A text, long enough to measure on."""
    path = tmp_path_factory.mktemp("text") / "few.txt"
    path.write_text(tiny_checkpoints.text(60), encoding="utf-8")
    return path


@pytest.mark.slow
class TestSavedVariants:
    """What was converted, or trained with a scheme, is converted again: its positions are filled with random values."""

    # Every scheme to and from a table, to rotations and from biases; what is done is done for each side by itself.
    @tiny.cross(
        before=SCHEMES,
        after=SCHEMES,
        where=lambda before, after: (
            before != after and (before in ("absolute", "t5") or after in ("absolute", "rope"))
        ),
        rest=pytest.mark.slow,
    )
    def test_every_scheme_becomes_every_other(self, before, after, few_words):
        original = tiny.build(before, num_hidden_layers=1)
        tokenizer = tiny_checkpoints.tokenizer()
        model, report = convert(original, after, text=few_words, train="none", tokenizer=tokenizer)
        assert model.config.position_scheme == after
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        assert 0.3 < report.final()[0]["token_cosine"] < 1 + 1e-6

    @pytest.mark.parametrize(
        "before",
        [
            pytest.param(name, marks=() if name in ("t5", "deberta", "absolute") else pytest.mark.slow)
            for name in SCHEMES
            if name != "relative_key"
        ],
    )
    def test_what_joins_a_scheme_that_is_there_starts_exactly(self, before, few_words):
        """Flags that conversion chooses where a scheme is new, as a table of `t5` per layer, leave one that is there alone."""
        original = tiny.build(before)
        joining = "deberta" if before == "relative_key_query" else "relative_key"
        tokenizer = tiny_checkpoints.tokenizer()
        model, _ = convert(original, f"{before}+{joining}", text=few_words, train="none", tokenizer=tokenizer)
        ids = torch.randint(5, 99, (2, 32))
        with torch.no_grad():
            difference = model(ids).last_hidden_state - original(ids).last_hidden_state
        assert difference.abs().max() < 1e-5

    @every_family
    def test_one_that_reads_further_than_its_config_says_gets_a_table_of_that_length(self, family, few_words):
        original = tiny.build("rope", family)
        tokenizer = tiny_checkpoints.tokenizer(family, length=80)
        model, report = convert(original, "absolute", text=few_words, train="none", tokenizer=tokenizer)
        assert report.final()[0]["length"] == 80
        assert model(torch.randint(5, 99, (1, 80))).last_hidden_state.isfinite().all()


class TestHeads:
    @pytest.mark.parametrize(
        "head",
        [
            pytest.param(cls.__name__, marks=() if cls.__name__.endswith("MaskedLM") else pytest.mark.slow)
            for cls in tiny.heads("bert")
        ],
    )
    def test_every_head_is_measured(self, head, tmp_path, few_words):
        checkpoint = tiny_checkpoints.save(tmp_path / "bert", head=head.removeprefix("Bert"))
        model, report = convert(checkpoint, "t5", text=few_words, train="none")
        assert type(model).__name__ == f"Posenc{head}"
        assert ("same_answers" in report.final()[0]) == (head != "BertModel")

    def test_one_that_gives_tuples_is_measured_and_trained(self, tmp_path):
        checkpoint = tiny_checkpoints.save(tmp_path / "bert", head="ForMaskedLM", return_dict=False)
        settings = {"text": words_of(checkpoint), "max_steps": 2, "output": tmp_path / "out", "stock": True}
        model, report = convert(checkpoint, "rope", **settings)
        assert not model.config.return_dict and report.losses and report.final()[0]["stage"] == "distill"

    @pytest.mark.slow
    def test_a_classifier_is_converted_as_a_whole(self, tmp_path):
        checkpoint = tiny_checkpoints.save(tmp_path / "bert", head="ForSequenceClassification", num_labels=3)
        model, report = convert(checkpoint, "t5", text=words_of(checkpoint), max_steps=10, output=tmp_path / "out")
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
        original = AutoModelForSequenceClassification.from_pretrained(checkpoint)
        assert type(loaded).__name__ == "PosencBertForSequenceClassification"
        assert loaded.config.num_labels == 3
        for part in ("classifier", "bert.pooler"):
            for name, value in original.get_submodule(part).state_dict().items():
                assert torch.equal(loaded.get_submodule(part).state_dict()[name], value)
        assert 0 <= report.rows[-1]["same_answers"] <= 1

    def test_a_masked_language_models_loss_is_told_by_visible_context(self, tmp_path):
        checkpoint = tiny_checkpoints.save(tmp_path / "bert", head="ForMaskedLM")
        model, report = convert(
            checkpoint, "absolute+t5", text=words_of(checkpoint), max_length=64, train="none", output=tmp_path / "out"
        )
        assert [(row["model"], row["length"]) for row in report.losses] == [
            ("original", 32),
            ("original", 64),
            ("converted", 32),
            ("converted", 64),
        ]
        loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
        assert loaded.cls.predictions.decoder.weight is loaded.bert.embeddings.word_embeddings.weight


class TestReport:
    @pytest.mark.slow
    def test_is_beside_the_model_and_compare_repeats_it(self, checkpoint, tmp_path):
        _, report = convert(
            checkpoint,
            "t5",
            text=words_of(checkpoint),
            held_out=words_of(checkpoint),
            max_steps=10,
            output=tmp_path / "out",
        )
        stored = ConversionReport.from_json((tmp_path / "out" / REPORT).read_text())
        assert stored == report
        card = (tmp_path / "out" / "README.md").read_text()
        assert f"{report.final()[0]['token_cosine']:.4f}" in card and "Not measured" in card
        again = compare(checkpoint, tmp_path / "out", text=words_of(checkpoint))
        assert again.final()[0]["token_cosine"] == pytest.approx(report.final()[0]["token_cosine"], abs=1e-6)
        assert again.rows[0]["token_cosine"] == pytest.approx(1, abs=1e-6)

    def test_is_compared_at_its_lengths_wherever_it_lies(self, checkpoint, tmp_path, monkeypatch):
        """In a folder, or on the Hub."""
        convert(checkpoint, "t5", output=tmp_path / "out", text=words_of(checkpoint), max_length=64, train="none")
        monkeypatch.setattr("hf_posenc.hub.folders.check_exists", lambda *_: None)
        monkeypatch.setattr("hf_posenc.hub.folders.snapshot_download", lambda *_, **__: str(tmp_path / "out"))
        for place in (tmp_path / "out", "me/converted"):
            found = compare(checkpoint, place, text=words_of(checkpoint))
            assert (found.trained_length, found.max_length) == (32, 64)

    @pytest.mark.slow
    def test_a_killed_conversion_that_is_resumed_has_the_same_report(self, checkpoint, tmp_path):
        def command(out, *more):
            return [
                *(sys.executable, "-m", "hf_posenc", "convert", str(checkpoint), "--out", str(out)),
                *("--position-scheme", "t5"),
                *("--text", str(words_of(checkpoint)[0]), "--max-steps", "120", *more),
            ]

        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(command(tmp_path / "whole"), env=environment, check=True, capture_output=True)
        killed = subprocess.Popen(
            command(tmp_path / "out"), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        state = tmp_path / ".out.conversion" / "distillation.pt"
        while not state.is_file():
            assert killed.poll() is None, "it ended before it could be killed"
        killed.kill()
        killed.wait()
        assert not (tmp_path / "out").exists()
        subprocess.run(command(tmp_path / "out", "--resume"), env=environment, check=True, capture_output=True)
        reports = [json.loads((tmp_path / name / REPORT).read_text()) for name in ("whole", "out")]
        for report in reports:
            report.pop("seconds")
            for entry in report["distillation"]:
                entry.pop("seconds")
        assert reports[0] == reports[1]
        models = [AutoModel.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "out")]
        assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
        assert not state.parent.exists()


@pytest.mark.slow
def test_two_processes_learn_from_two_texts_and_write_one_model(checkpoint, tmp_path):
    def run(out, *launcher):
        command = [sys.executable, "-m", *launcher, "hf_posenc", "convert", str(checkpoint), "--out", str(out)]
        command += ["--position-scheme", "t5", "--text", str(words_of(checkpoint)[0]), "--max-steps", "30"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment["GLOO_SOCKET_IFNAME"] = worker.loopback()
        process = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=240)
        assert process.stdout.count("| distill ") == 1
        return ConversionReport.from_json((out / REPORT).read_text())

    alone = run(tmp_path / "alone")
    settings = str(ROOT / "examples" / "accelerate_ddp_cpu.yaml")
    both = run(tmp_path / "both", "accelerate.commands.launch", "--config_file", settings, "-m")
    assert cosines(both, "distill")[32] > cosines(both, "calibrate")[32] + 0.01
    assert cosines(both, "calibrate") == cosines(alone, "calibrate")
    assert cosines(both, "distill") != cosines(alone, "distill")
    assert not [*tmp_path.glob(".*")]


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.slow
class TestResume:
    """After distillation, and before anything is written, it is interrupted."""

    @staticmethod
    def arguments(folder):
        """Of a conversion of `a/bert`, its text and held-out text being `a/bert.txt` and `held_out.txt`."""
        return {
            "model": folder / "a" / "bert",
            "position_scheme": "t5",
            "text": [folder / "a" / "bert.txt"],
            "held_out": [folder / "held_out.txt"],
            "max_steps": 60,
            "output": folder / "out",
        }

    @pytest.fixture(scope="class")
    def once(self, tmp_path_factory):
        """The folder of a conversion that was interrupted, and a copy of it."""
        folder = tmp_path_factory.mktemp("interrupted")
        (folder / "a").mkdir()
        tiny_checkpoints.save(folder / "a" / "bert")
        (folder / "held_out.txt").write_text(tiny_checkpoints.text(60, seed=2))
        with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("hf_posenc.conversion.converting.write_converted", interrupt)
            convert(**self.arguments(folder))
        assert (folder / ".out.conversion" / "distillation.pt").is_file() and not (folder / "out").exists()
        return folder, shutil.copytree(folder, tmp_path_factory.mktemp("copy") / "interrupted")

    @pytest.fixture
    def tmp_path(self, once):
        """The folder of the conversion, as it was when it was interrupted."""
        folder, copy = once
        shutil.rmtree(folder)
        return shutil.copytree(copy, folder)

    @pytest.fixture
    def interrupted(self, tmp_path):
        """The arguments of the conversion that was interrupted in `tmp_path`."""
        return self.arguments(tmp_path)

    @pytest.mark.parametrize("name", ["distillation.pt", "report.json"])
    def test_says_what_to_do_where_its_files_are_damaged(self, interrupted, tmp_path, name):
        file = tmp_path / ".out.conversion" / name
        file.write_bytes(file.read_bytes()[:-200])
        with pytest.raises(ValueError, match=rf"{name}.*leave --resume out to begin anew"):
            convert(**interrupted, resume=True)

    def test_goes_on_with_the_same_model_and_texts_wherever_they_lie(self, interrupted, tmp_path):
        (tmp_path / "b").mkdir()
        (tmp_path / "a" / "bert").rename(tmp_path / "b" / "model")
        (tmp_path / "a" / "bert.txt").rename(tmp_path / "b" / "words.txt")
        moved = {"model": tmp_path / "b" / "model", "text": [tmp_path / "b" / "words.txt"]}
        _, report = convert(**{**interrupted, **moved}, resume=True)
        assert report.distillation[-1]["step"] == 60
        assert report.original == "model" and report.settings["text"] == str(moved["text"][0])

    @pytest.mark.slow
    def test_keeps_the_seconds_of_all_stages(self, interrupted, tmp_path):
        before = json.loads((tmp_path / ".out.conversion" / "report.json").read_text())["seconds"]
        convert(**interrupted, resume=True)
        seconds = json.loads((tmp_path / "out" / REPORT).read_text())["seconds"]
        assert seconds.keys() == {"start", "calibrate", "distill"}
        assert {name: seconds[name] for name in ("start", "calibrate")} == before
        assert not (tmp_path / ".out.conversion").exists()

    def test_needs_the_same_weights(self, interrupted, tmp_path):
        (tmp_path / "b").mkdir()
        other = tiny_checkpoints.save(tmp_path / "b" / "bert", seed=1)
        with pytest.raises(ValueError, match="began with other weights: give the same"):
            convert(**{**interrupted, "model": other}, resume=True)
        assert not (tmp_path / "out").exists()

    def test_needs_the_same_config(self, interrupted):
        entries = json.loads((interrupted["model"] / "config.json").read_text())
        (interrupted["model"] / "config.json").write_text(json.dumps(entries | {"hidden_act": "relu"}))
        with pytest.raises(ValueError, match="began with other config: give the same"):
            convert(**interrupted, resume=True)

    @pytest.mark.parametrize("which", ["text", "held_out"])
    def test_needs_the_same_texts(self, which, interrupted):
        [path] = interrupted[which]
        path.write_text(path.read_text().replace("w5", "w6"))
        with pytest.raises(ValueError, match=f"began with other {which}: give the same"):
            convert(**interrupted, resume=True)

    def test_needs_the_same_code_of_a_custom_scheme(self, interrupted, monkeypatch):
        interrupted["max_steps"] = 2

        def written_as(text):
            sources = {"t5": SimpleNamespace(text=text)}
            monkeypatch.setattr("hf_posenc.conversion.converting.sources_of", lambda names: sources)

        written_as("bias = a")
        with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("hf_posenc.conversion.converting.write_converted", interrupt)
            convert(**interrupted)
        written_as("bias = -a")
        with pytest.raises(ValueError, match="began with other code of t5: give the same"):
            convert(**interrupted, resume=True)
        written_as("bias = a")
        _, report = convert(**interrupted, resume=True)
        assert "code of t5" in report.inputs

    def test_takes_options_that_are_tuples_for_the_lists_of_the_report(self, interrupted, tmp_path):
        interrupted |= {"position_scheme": "deberta", "position_attention_types": ("c2p", "p2c"), "max_steps": 2}
        with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("hf_posenc.conversion.converting.write_converted", interrupt)
            convert(**interrupted)
        model, _ = convert(**interrupted, resume=True)
        assert [*model.config.position_attention_types] == ["c2p", "p2c"] and (tmp_path / "out").is_dir()

    def test_may_have_another_learning_rate(self, interrupted, tmp_path):
        with pytest.raises(ValueError, match="another settings.*same command"):
            convert(**{**interrupted, "max_steps": 70, "learning_rate": 1e-5}, resume=True)
        with pytest.raises(ValueError, match="another settings.*same command"):
            convert(**{**interrupted, "max_steps": 70}, resume=True)
        assert not (tmp_path / "out").exists()
        state = torch.load(tmp_path / ".out.conversion" / "distillation.pt")
        state["step"], state["history"] = 50, state["history"][:1]
        torch.save(state, tmp_path / ".out.conversion" / "distillation.pt")
        _, report = convert(**interrupted, learning_rate=1e-5, resume=True)
        assert [entry["learning_rate"] for entry in report.distillation] == [1.5e-4, 1e-5]
        assert report.settings["learning_rate"] == 1e-5

    def test_does_nothing_twice(self, interrupted, monkeypatch):
        """All steps were made: none is made again."""
        monkeypatch.setattr("hf_posenc.conversion.distillation._Run._step", None)
        _, report = convert(**interrupted, resume=True)
        assert [entry["step"] for entry in report.distillation] == [50, 60]


@pytest.mark.parametrize("documents", [1, 2, 12])
def test_documents_of_one_line_each_are_text(documents, checkpoint, tmp_path):
    """They are trained on from end to end, and measured on."""
    (tmp_path / "lines").mkdir()
    for number in range(documents):
        line = " ".join(tiny_checkpoints.text(240 // documents, seed=number).split())
        (tmp_path / "lines" / f"{number:02}.txt").write_text(line)
    _, report = convert(checkpoint, "t5", text=tmp_path / "lines", max_steps=2)
    assert report.final()[0]["length"] == 32 and report.final()[0]["tokens"] > 250


class TestTokenizer:
    def test_one_that_transformers_makes_up_where_there_is_none(self, tmp_path, no_weight_is_read):
        tiny_checkpoints.stock(vocab_size=500).save_pretrained(tmp_path / "bert")
        (tmp_path / "words.txt").write_text(tiny_checkpoints.text())
        with pytest.raises(ValueError, match="tokenizer .*bert has 5 tokens, and the model 500: put .*tokenizer.json"):
            convert(tmp_path / "bert", "t5", text=[tmp_path / "words.txt"], output=tmp_path / "out")
        assert not [*tmp_path.glob("*out*")]

    def test_one_of_another_model(self, checkpoint, no_weight_is_read):
        larger = tiny_checkpoints.stock(vocab_size=60)
        larger.config.architectures = ["BertModel"]
        larger.config.save_pretrained(checkpoint)
        with pytest.raises(ValueError, match="training text .* id 98, and the model's vocabulary has 60"):
            convert(checkpoint, "t5", text=words_of(checkpoint))

    def test_one_without_the_tokens_that_frame_a_text(self, checkpoint, no_weight_is_read):
        tokenizer = tiny_checkpoints.tokenizer()
        tokenizer.sep_token = None
        with pytest.raises(ValueError, match="tokenizer has no sep_token"):
            convert(checkpoint, "t5", text=words_of(checkpoint), tokenizer=tokenizer)

    @pytest.mark.parametrize("where", ["text", "held_out"])
    def test_text_that_it_does_not_know(self, where, checkpoint, tmp_path, no_weight_is_read):
        lines = tiny_checkpoints.text().splitlines()
        unknown = [f"{line} und noch ein paar Wörter" for line in lines]
        (tmp_path / "unknown.txt").write_text("\n".join(unknown))
        texts = {"text": words_of(checkpoint), "held_out": words_of(checkpoint), where: [tmp_path / "unknown.txt"]}
        what = "training" if where == "text" else "held-out"
        with pytest.raises(ValueError, match=rf"1\d % of the {what} text are words that the tokenizer does not know"):
            convert(checkpoint, "t5", output=tmp_path / "out", **texts)
        with pytest.raises(ValueError, match="words that the tokenizer does not know"):
            compare(checkpoint, checkpoint, text=[tmp_path / "unknown.txt"])

    @pytest.mark.slow
    def test_a_few_unknown_words_are_usual(self, checkpoint, tmp_path):
        lines = tiny_checkpoints.text().splitlines()
        (tmp_path / "some.txt").write_text("\n".join(f"{line} ☃" for line in lines))
        convert(checkpoint, "none", text=[tmp_path / "some.txt"], train="none")

    @pytest.mark.slow
    def test_the_caller_s_stays_as_it_is(self, checkpoint, tmp_path):
        tokenizer = tiny_checkpoints.tokenizer()
        tokenizer.backend_tokenizer.enable_truncation(7)
        before = tokenizer.model_max_length, tokenizer.backend_tokenizer.to_str()
        convert(
            AutoModel.from_pretrained(checkpoint),
            "absolute+t5",
            text=words_of(checkpoint),
            max_length=48,
            train="none",
            output=tmp_path / "out",
            tokenizer=tokenizer,
        )
        assert (tokenizer.model_max_length, tokenizer.backend_tokenizer.to_str()) == before
        assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 48


def test_settings_are_given_one_by_one_or_together(checkpoint, tmp_path):
    together = ConversionArguments(output=tmp_path / "out", text=words_of(checkpoint), max_steps=1, seed=3)
    _, first = convert(checkpoint, "t5", together)
    _, second = convert(checkpoint, "t5", replace(together, output=None), position_buckets=8, max_steps=2)
    assert first.settings["max_steps"] == 1 and second.settings["max_steps"] == 2 and second.settings["seed"] == 3
    assert (tmp_path / "out").is_dir() and second.flags["position_buckets"] == 8
    assert together.max_steps == 1 and together.output == tmp_path / "out"


@pytest.mark.parametrize(
    ("keyword", "error", "message"),
    [
        ("max_step", TypeError, "unexpected keyword 'max_step'; did you mean 'max_steps'?"),
        ("hidden_size", TypeError, "unexpected keyword 'hidden_size'"),
        ("position_bucket", ValueError, "unknown config option 'position_bucket'; did you mean 'position_buckets'"),
    ],
)
def test_a_keyword_that_is_neither_setting_nor_flag_is_refused(keyword, error, message, checkpoint, no_weight_is_read):
    with pytest.raises(error, match=re.escape(message)):
        convert(checkpoint, "t5", **{keyword: 3})
    with pytest.raises(error, match=re.escape(message.partition(";")[0])):
        hf_posenc.with_position_scheme(tiny_checkpoints.stock(), "t5", **{keyword: 3})


class TestBadInput:
    @pytest.mark.parametrize(
        "scheme, arguments, error, said",
        [
            ("absolute", {}, ValueError, "already, and a maximum sequence length of 32"),
            ("tfive", {}, ValueError, "unknown scheme 'tfive'; did you mean"),
            ("t5", {"position_bucket": 8}, ValueError, "unknown config option 'position_bucket'; did you mean"),
            ("t5", {"trained_length": 100}, ValueError, "between 16 and 64"),
            (
                "t5",
                {"trained_length": 0},
                ValueError,
                "trained_length must be between 16 and 64, the rows of its position embedding matrix, got 0",
            ),
            ("t5", {"max_length": 20}, ValueError, "at least the training length, 32"),
            ("t5", {"max_length": 0}, ValueError, "at least the training length, 32.*got 0"),
            ("t5", {"max_length": 10**10}, ValueError, "at most 131,072, got 10000000000"),
            ("t5", {"seed": 2**70}, ValueError, "seed must be"),
            ("t5", {"text": [""]}, ValueError, "the name of a text is empty"),
            ("t5", {"train": "some"}, ValueError, "all, positions, beyond, none"),
            ("t5", {"extend": "stretch"}, ValueError, "tile, interpolate, mean"),
            (
                "t5",
                {"extend": "interpolate", "max_length": 64},
                ValueError,
                "needs a position embedding matrix to stretch: .*'absolute\\+t5'",
            ),
            ("absolute", {"position_stride": 2}, ValueError, "follows from the lengths"),
            ("t5", {"max_steps": 0}, ValueError, "max_steps must be greater than 0"),
            ("t5", {"learning_rate": 0}, ValueError, "learning_rate must be greater than 0"),
            ("t5", {"text": ["missing.txt"]}, FileNotFoundError, "no file or folder missing.txt"),
            ("t5", {"text": ["my_corpus/"]}, FileNotFoundError, "no file or folder my_corpus/"),
            ("t5", {"resume": True}, ValueError, "need an output folder"),
        ],
    )
    def test_is_an_error_that_says_what_to_do(self, scheme, arguments, error, said, checkpoint, no_weight_is_read):
        with pytest.raises(error, match=said):
            convert(checkpoint, scheme, **{"text": words_of(checkpoint), "train": "none"} | arguments)

    @pytest.mark.parametrize("name, value", [("trained_length", 0), ("max_length", 0), ("max_length", 10**10)])
    def test_lengths_to_compare_at_are_checked_too(self, name, value, checkpoint, no_weight_is_read):
        with pytest.raises(ValueError, match=f"{name} must be .* got {value}"):
            compare(checkpoint, checkpoint, text=words_of(checkpoint), **{name: value})

    @pytest.mark.parametrize("others", [{"family": "roberta"}, {"hidden_size": 48}, {"num_hidden_layers": 1}], ids=str)
    def test_models_to_compare_are_of_one_family_and_size(self, others, checkpoint, tmp_path, no_weight_is_read):
        other = tiny_checkpoints.save(tmp_path / "other", **others)
        with pytest.raises(ValueError, match="are of different families or sizes"):
            compare(checkpoint, other, text=words_of(checkpoint))

    @pytest.mark.parametrize(
        "place, said",
        [
            ("{tmp}/missing", "there is no such folder"),
            ("missing/in/here", "there is no such folder"),
            ("{tmp}/bert.txt", "is a file: name the folder"),
        ],
    )
    def test_a_place_where_no_model_is(self, place, said, checkpoint, tmp_path):
        place = place.format(tmp=tmp_path)
        for call in (
            lambda: convert(place, "t5", text=words_of(checkpoint)),
            lambda: compare(place, checkpoint, text=words_of(checkpoint)),
            lambda: compare(checkpoint, place, text=words_of(checkpoint)),
        ):
            with pytest.raises(OSError, match=f"{place}.*{said}"):
                call()

    def test_weights_that_are_cut_off(self, checkpoint, tmp_path):
        weights = checkpoint / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        with pytest.raises(OSError, match=f"the weights in {checkpoint} cannot be read"):
            convert(checkpoint, "t5", text=words_of(checkpoint), output=tmp_path / "out")
        assert not [*tmp_path.glob("*out*")]

    @pytest.mark.parametrize("number", [math.nan, math.inf])
    def test_weights_that_are_no_numbers(self, number, checkpoint, tmp_path):
        model = AutoModel.from_pretrained(checkpoint)
        with torch.no_grad():
            model.encoder.layer[1].output.dense.weight[3, 4] = number
        model.save_pretrained(checkpoint)
        said = r"encoder\.layer\.1\.output\.dense\.weight .* not finite"
        for source, tokenizer in ((checkpoint, None), (model, tiny_checkpoints.tokenizer())):
            with pytest.raises(ValueError, match=said):
                convert(source, "t5", text=words_of(checkpoint), output=tmp_path / "out", tokenizer=tokenizer)
        assert not [*tmp_path.glob("*out*")]

    def test_a_scheme_that_is_there_already(self, checkpoint, tmp_path):
        convert(checkpoint, "t5", text=words_of(checkpoint), train="none", output=tmp_path / "out")
        with pytest.raises(ValueError, match="has position_scheme='t5' already"):
            convert(tmp_path / "out", "t5", text=words_of(checkpoint), train="none")

    @pytest.mark.parametrize("content, said", [("", "no text in"), ("w5 w6 w7\n", "tokens, and")])
    def test_text_that_is_empty_or_shorter_than_a_batch(self, content, said, checkpoint, tmp_path):
        (tmp_path / "short.txt").write_text(content)
        with pytest.raises(ValueError, match=said):
            convert(checkpoint, "t5", text=[tmp_path / "short.txt"], output=tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_model_whose_own_scheme_is_its_knowledge(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "deberta-v2"}))
        with pytest.raises(ValueError, match="knows order by the positions"):
            convert(tmp_path, "t5")

    def test_another_family(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        with pytest.raises(ValueError, match="the families that have position schemes are"):
            convert(tmp_path, "t5")
