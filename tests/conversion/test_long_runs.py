"""Conversions of hours: text that does not fit into memory, steps of many batches, states, trackers, the end by a signal."""

import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import distributed_worker as worker
import pytest
import tiny
import tiny_checkpoints
import torch
from accelerate.state import AcceleratorState
from fresh_process import ROOT
from transformers import AutoModel

from hf_posenc import convert, position_parameters
from hf_posenc.conversion import distillation, texts
from hf_posenc.conversion.checkpoints import make_student
from hf_posenc.conversion.distillation import Distillation, distill, parameter_groups, recomputed
from hf_posenc.conversion.following import Following, Timer
from hf_posenc.conversion.report import ConversionReport
from hf_posenc.conversion.targets import hidden_states, normalised_error, original_states
from hf_posenc.conversion.texts import Blocks, Windows, blocks_of
from hf_posenc.hub.folders import REPORT


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def windows(seed: int = 0) -> Windows:
    return Windows([tiny_checkpoints.text(seed=seed)], tiny_checkpoints.tokenizer())


def models(**config):
    """An original and its student, whose position parameters are random."""
    original = tiny_checkpoints.stock()
    student = make_student(original, "t5", {"position_per_layer": True})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in position_parameters(student).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return original, student


class TestBlocks:
    @pytest.fixture
    def small(self, monkeypatch):
        monkeypatch.setattr(texts, "BLOCK_CHARACTERS", 20)
        monkeypatch.setattr(texts, "PART_CHARACTERS", 8)

    def test_a_source_goes_on_where_a_block_ended_and_begins_again_at_its_end(self, small, tmp_path):
        for name, lines in (("a", 4), ("b", 9), ("c", 8)):
            (tmp_path / f"{name}.txt").write_text(f"{name}\n" * lines)
        a, b, c = ("a\n", "b\n", "c\n")
        blocks = [*itertools.islice(blocks_of(tmp_path), 4)]
        # One line is left at the end, less than half of a block.
        assert blocks == [[a * 4, b * 6], [b * 3, c * 7], [c, a * 4, b * 5], [b * 4, c * 6]]

    def test_a_block_goes_on_to_the_end_of_a_line(self, small, tmp_path):
        (tmp_path / "a.txt").write_text("a" * 9)
        (tmp_path / "b.txt").write_text("b" * 15 + "\n" + "B" * 18)
        first = ["a" * 9, "b" * 15 + "\n"]
        assert [*itertools.islice(blocks_of(tmp_path), 3)] == [first, ["", "B" * 18], first]

    def test_a_source_that_ends_in_the_later_half_of_a_block_has_a_shorter_one(self, small, tmp_path):
        (tmp_path / "a.txt").write_text("a" * 9 + "\n" * 24)
        assert [len("".join(block)) for block in itertools.islice(blocks_of(tmp_path), 4)] == [20, 13, 20, 13]
        (tmp_path / "a.txt").write_text("a" * 9)
        assert [*itertools.islice(blocks_of(tmp_path), 2)] == [["a" * 9]] * 2

    def test_a_long_file_is_read_in_parts_that_end_with_a_line(self, small, tmp_path):
        file = tmp_path / "long.txt"
        file.write_text("".join(f"line {number:02d}\n" for number in range(9)))
        pieces = [*itertools.chain.from_iterable(itertools.islice(blocks_of(file), 3))]
        assert "".join(pieces) == file.read_text()
        file.write_bytes(b"line\n" * 9 + b"\xff")
        with pytest.raises(ValueError, match="not text in UTF-8"):
            [*itertools.islice(blocks_of(file), 5)]

    def test_a_source_without_text_has_none(self, tmp_path):
        (tmp_path / "empty.txt").write_text("")
        assert [*blocks_of(tmp_path / "empty.txt")] == []

    def blocks(self, sources, **more):
        return Blocks("first", sources, lambda documents: documents, **more)

    def test_each_has_its_part_of_every_source_and_nothing_that_is_measured_on(self, small, tmp_path):
        big, small_one = tmp_path / "big", tmp_path / "small.txt"
        big.mkdir()
        for number in range(8):
            (big / f"{number}.txt").write_text("\n".join(f"{number}{letter}" for letter in "abc"))
        small_one.write_text("own")
        blocks = self.blocks([big, small_one], left_out=["3a\n3b\n3c"])
        assert blocks(0) == "first"
        # 0a0b0c, 1a1b1c, 2a2b | 2c, 3a3b3c, 4a4b4c, 5a | 5b5c, 6a6b6c, 7a7b7c
        assert blocks(1) == ["2c", "", "4a\n4b\n4c", "5a", "own"]
        assert blocks(1) == blocks(1)
        assert blocks(2) == ["5b\n5c", "6a\n6b\n6c", "7a\n7b\n7c", "own"]

    def test_lines_of_a_document_that_is_measured_on_are_nowhere(self, tmp_path, monkeypatch):
        monkeypatch.setattr(texts, "BLOCK_CHARACTERS", 60)
        (tmp_path / "one.txt").write_text("\n".join(f"line {number}" for number in range(40)))
        blocks = self.blocks([tmp_path], left_out=["line 3\nline 12\n"])
        lines = [line for number in range(1, 12) for document in blocks(number) for line in document.splitlines()]
        assert lines and not {"line 3", "line 12"} & {*lines} and {"line 4", "line 13"} < {*lines}

    def test_parts_of_a_long_line_that_are_measured_on_are_nowhere(self, tmp_path, monkeypatch):
        monkeypatch.setattr(texts, "BLOCK_CHARACTERS", 10_000)
        (tmp_path / "one.txt").write_text(" ".join(f"w{number}" for number in range(4000)))
        training, held_out = texts.held_out_apart(texts.read_documents([tmp_path / "one.txt"]))
        blocks = self.blocks([tmp_path / "one.txt"], left_out=held_out)
        for number in (1, 2):
            text = "".join(blocks(number))
            assert not any(piece.strip() in text for piece in held_out)
            assert all(piece.strip() in text for piece in training)

    def test_processes_share_the_documents(self, small, tmp_path):
        for number in range(8):
            (tmp_path / f"{number}.txt").write_text(str(number) * 5)
        alone, first, second = (self.blocks([tmp_path], process=p, processes=n) for p, n in ((0, 1), (0, 2), (1, 2)))
        parts = first(1), second(1)
        assert sorted(parts[0] + parts[1]) == sorted(alone(1)) and not {*parts[0]} & {*parts[1]}

    def test_whoever_begins_later_reads_the_same(self, small, tmp_path):
        for number in range(9):
            (tmp_path / f"{number}.txt").write_text(str(number) * 9)
        one, other = self.blocks([tmp_path]), self.blocks([tmp_path])
        assert [one(number) for number in range(5)][4] == other(4)
        assert one(5) == other(5)


class TestSteps:
    def gradients(self, original, student, batches):
        student.requires_grad_(True).zero_grad()
        for batch in batches:
            aim = original_states(original, batch, 32)
            (normalised_error(hidden_states(student, batch), aim) / len(batches)).backward()
        return {name: value.grad.clone() for name, value in student.named_parameters() if value.grad is not None}

    def learned(self, monkeypatch, settings, **more):
        """The gradients of the first step."""
        found = {}
        original, student = models()

        def step(optimizer, *_):
            found.update({n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None})

        monkeypatch.setattr(torch.optim.AdamW, "step", step)
        settings = Distillation(32, 32, max_steps=1, mixed_precision="no", **settings)
        distill(student, original, windows(), windows(1), settings, **more)
        return found

    def test_the_precision_is_the_one_asked_for_whatever_accelerate_launch_says(self, monkeypatch):
        expected = self.learned(monkeypatch, {})
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            torch.testing.assert_close(self.learned(monkeypatch, {}), expected, rtol=0, atol=0)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)

    def test_a_step_of_two_batches_has_the_mean_of_their_gradients(self, monkeypatch):
        found = self.learned(monkeypatch, {"gradient_accumulation_steps": 2})
        settings = Distillation(32, 32, max_steps=1)
        batches = [settings.draw(windows(), 0, number) for number in range(2)]
        assert batches[0]["input_ids"].shape != batches[1]["input_ids"].shape
        expected = self.gradients(*models(), batches)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)
        once = self.learned(monkeypatch, {})
        assert any((once[name] - found[name]).abs().max() > 1e-3 for name in found)

    def test_a_batch_has_as_many_tokens_as_are_allowed(self):
        few, many = (Distillation(32, 32, tokens_per_step=number) for number in (512, 4096))
        for step in range(20):
            shapes = [each.draw(windows(), step)["input_ids"].shape for each in (few, many)]
            assert shapes[0][1] == shapes[1][1]
            assert [shape[0] for shape in shapes] == [512 // shapes[0][1], 4096 // shapes[0][1]]

    @pytest.mark.parametrize("settings, steps", [({"max_tokens": 2048}, 4), ({"max_tokens": 2000}, 4)])
    def test_a_budget_in_tokens(self, settings, steps):
        original, student = models()
        history = distill(student, original, windows(), windows(1), Distillation(32, 32, **settings))
        assert history[-1]["step"] == steps and history[-1]["tokens"] == 512 * steps

    def test_rates_rise_with_the_square_root_of_a_step_s_tokens(self):
        assert Distillation(32, 32).rates_by() == 1
        assert Distillation(32, 32, tokens_per_step=1024, gradient_accumulation_steps=2).rates_by(4) == 4
        _, student = models()
        one, four = (parameter_groups(student, 1e-3, by) for by in (1, 4))
        assert [group["highest"] for group in four] == [4 * group["highest"] for group in one]

    def test_activations_that_are_computed_again_give_the_same_gradients(self, monkeypatch):
        calls = []
        forward = torch.utils.checkpoint.checkpoint
        monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *a, **k: calls.append(1) or forward(*a, **k))
        kept = self.learned(monkeypatch, {})
        assert not calls
        again = self.learned(monkeypatch, {"gradient_checkpointing": True})
        assert calls
        for name, gradient in again.items():
            torch.testing.assert_close(gradient, kept[name], atol=1e-7, rtol=1e-5)

    @pytest.mark.parametrize("family", tiny.FAMILIES)
    def test_layers_of_every_family_are_computed_again(self, family):
        student, batch = tiny.build("rope", family), tiny.inputs(2, 12, family)
        layers = student.config.family.layers_of(student.config.family.encoder_of(student.base_model))
        calls = []
        for layer in layers:
            layer.register_forward_hook(lambda *_: calls.append("forward"))
            student.config.family.self_attention_of(layer).register_forward_hook(lambda *_: calls.append("attention"))
        with recomputed(student, Distillation(32, 32, gradient_checkpointing=True)):
            hidden_states(student, batch)[-1].sum().backward()
        assert calls.count("attention") == 2 * len(layers) and calls.count("forward") == len(layers)

    def test_dropout_stays_off_and_all_is_as_before(self):
        _, student = models()
        student.eval()
        for module in student.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
        batch = windows().draw(24, 2, torch.Generator().manual_seed(0))
        with recomputed(student, Distillation(32, 32, gradient_checkpointing=True)):
            first, second = (hidden_states(student, batch)[-1] for _ in range(2))
        assert torch.equal(first, second)
        assert not any("forward" in vars(layer) for layer in student.encoder.layer)
        assert not any(module.training for module in student.modules())

    def test_later_blocks_are_learned_from(self):
        """A block is used for as many tokens as the first has."""
        first, asked = windows(), []

        def block(number):
            asked.append(number)
            return windows(2) if number else first

        original, student = models()
        first.tokens = first.tokens[:2048]
        distill(student, original, first, windows(1), Distillation(32, 32, max_steps=9), blocks=block)
        assert asked == [0, 0, 0, 0, 1, 1, 1, 1, 2]


class TestFollowing:
    def test_time_comes_at_first_and_then_by_the_minute(self, monkeypatch):
        now = iter([0.0, 59.0, 61.0, 100.0, 122.0])
        monkeypatch.setattr("hf_posenc.conversion.following.time.monotonic", lambda: next(now))
        timer = Timer(1)
        assert [timer.is_due() for _ in range(5)] == [True, False, True, False, True]

    @pytest.mark.parametrize(
        "settings, error, said",
        [
            ({"report_to": "papers"}, ValueError, "report_to must be all, or one of"),
            ({"save_minutes": -1}, ValueError, "save_minutes must be at least 0"),
            ({"tokens_per_step": 5}, ValueError, "tokens_per_step must be at least 16"),
            ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps must be at least 1"),
            ({"max_tokens": 0}, ValueError, "max_tokens must be greater than 0"),
            ({"mixed_precision": "fp8"}, ValueError, "mixed_precision must be one of bf16, no"),
        ],
    )
    def test_bad_settings_are_refused_before_weights_are_read(self, settings, error, said, tmp_path, monkeypatch):
        checkpoint = tiny_checkpoints.save(tmp_path / "bert")
        monkeypatch.setattr(AutoModel, "from_pretrained", None)
        with pytest.raises(error, match=said):
            convert(checkpoint, "t5", text=[checkpoint.with_name("bert.txt")], **settings)

    def test_a_tracker_gets_the_curve(self, tmp_path):
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        original, student = models()
        following = Following("tensorboard", str(tmp_path))
        history = distill(
            student, original, windows(), windows(1), Distillation(32, 32, max_steps=60), following=following
        )
        events = EventAccumulator(str(tmp_path / "hf_posenc-convert"))
        events.Reload()
        assert [(one.step, round(one.value, 5)) for one in events.Scalars("cosine")] == [
            (entry["step"], round(entry["cosine"], 5)) for entry in history
        ]

    def test_a_tracker_that_is_not_installed_is_named(self, monkeypatch):
        monkeypatch.setattr("accelerate.tracking.get_available_trackers", list)
        with pytest.raises(ImportError, match="'wandb' needs the package of wandb"):
            Following("wandb")


def command(checkpoint, out, *more):
    return [
        *(sys.executable, "-m", "hf_posenc", "convert", str(checkpoint), "--out", str(out)),
        *("--position-scheme", "t5", "--text", str(checkpoint.with_name("bert.txt")), *more),
    ]


@pytest.mark.slow
def test_a_conversion_that_is_told_to_end_goes_on_to_the_same_digits(tmp_path):
    checkpoint = tiny_checkpoints.save(tmp_path / "bert")
    more = ("--max-steps", "400", "--save-minutes", "1000")
    subprocess.run(command(checkpoint, tmp_path / "whole", *more), env=ENVIRONMENT, check=True, capture_output=True)
    told = subprocess.Popen(command(checkpoint, tmp_path / "out", *more), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    state = tmp_path / ".out.conversion" / "distillation.pt"
    while not state.is_file():  # that of step 50
        assert told.poll() is None, "it ended before it could be told to"
    told.send_signal(signal.SIGTERM)
    assert told.wait(60) == 128 + signal.SIGTERM
    assert torch.load(state, weights_only=True)["step"] >= 50 and not (tmp_path / "out").exists()
    subprocess.run(
        command(checkpoint, tmp_path / "out", *more, "--resume"), env=ENVIRONMENT, check=True, capture_output=True
    )
    histories = [json.loads((tmp_path / name / REPORT).read_text())["distillation"] for name in ("whole", "out")]
    assert [{**one, "seconds": 0} for one in histories[0]] == [{**one, "seconds": 0} for one in histories[1]]
    states = [AutoModel.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "out")]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("at", [50, 60])
def test_one_that_is_told_to_end_at_a_step_that_is_looked_at_has_the_same_history(at, tmp_path, monkeypatch):
    checkpoint = tiny_checkpoints.save(tmp_path / "bert")
    given = {"position_scheme": "t5", "text": [checkpoint.with_name("bert.txt")], "max_steps": 60}
    _, whole = convert(checkpoint, **given)

    @contextmanager
    def told_to_end():
        calls = itertools.count()
        yield lambda: next(calls) == at

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr("hf_posenc.conversion.distillation.told_to_end", told_to_end)
        convert(checkpoint, **given, output=tmp_path / "out")
    _, resumed = convert(checkpoint, **given, output=tmp_path / "out", resume=True)
    histories = [[{**entry, "seconds": 0} for entry in one.distillation] for one in (whole, resumed)]
    assert histories[0] == histories[1] and [entry["step"] for entry in histories[0]] == [50, 60]


@pytest.mark.slow
def test_two_processes_and_two_batches_have_the_same_curve(tmp_path):
    checkpoint = tiny_checkpoints.save(tmp_path / "bert")
    more = ("--max-steps", "100", "--mixed-precision", "no")

    def curve(process):
        report = ConversionReport.from_json((process / REPORT).read_text())
        return [(entry["tokens"], entry["cosine"]) for entry in report.distillation]

    batches = command(checkpoint, tmp_path / "batches", *more, "--gradient-accumulation-steps", "2")
    subprocess.run(batches, env=ENVIRONMENT, check=True, capture_output=True)
    settings = str(ROOT / "examples" / "accelerate_ddp_cpu.yaml")
    both = command(checkpoint, tmp_path / "processes", *more)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", settings, *both[1:]]
    environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": worker.loopback()}
    subprocess.run(launcher, env=environment, check=True, capture_output=True, timeout=240)
    one, other = (curve(tmp_path / name) for name in ("batches", "processes"))
    assert [tokens for tokens, _ in one] == [tokens for tokens, _ in other] == [51200, 102400]
    assert [cosine for _, cosine in one] == pytest.approx([cosine for _, cosine in other], abs=2e-4)


def test_text_of_many_blocks_is_converted_with(tmp_path, monkeypatch):
    """And what is measured on is in none of them."""
    checkpoint = tiny_checkpoints.save(tmp_path / "bert")
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(tiny_checkpoints.text(4, seed=number))
    size = sum(len(file.read_text()) for file in folder.iterdir())
    monkeypatch.setattr(texts, "BLOCK_CHARACTERS", size // 3)
    monkeypatch.setattr("hf_posenc.conversion.converting.BLOCK_CHARACTERS", size // 3)
    seen, made = [], distillation.Distillation.draw
    monkeypatch.setattr(
        distillation.Distillation, "draw", lambda self, text, *a: seen.append(text) or made(self, text, *a)
    )
    _, report = convert(checkpoint, "t5", text=[folder], trained_length=32, max_steps=12)
    assert report.distillation[-1]["step"] == 12
    different = [*{id(text): text for text in seen}.values()]
    assert len(different) > 2
    [lines, *_] = (folder / "05.txt").read_text().splitlines()
    held_out = " ".join(map(str, tiny_checkpoints.tokenizer()(lines, add_special_tokens=False)["input_ids"]))
    assert not any(held_out in " ".join(map(str, text.tokens.tolist())) for text in different)
