"""Conversions on a device that is not the CPU: the same numbers, and nothing is left on the CPU."""

from contextlib import contextmanager

import accelerate
import pretended
import pytest
import tiny_checkpoints
import torch
from pairs import original, student_of, text
from torch import nn

from hf_posenc import convert, position_parameters
from hf_posenc.conversion import compare, converting, distillation, measuring, targets
from hf_posenc.conversion.calibration import calibrate


pytestmark = pretended.needed


@pytest.fixture
def found_by_accelerate(monkeypatch):
    """A function after whose call Accelerate finds the device; where parameters are, in each stage."""
    places: dict[str, set[torch.device]] = {}

    def observed(stage: str, function):
        def call(*arguments, **options):
            models = [one for one in arguments if isinstance(one, nn.Module)]
            places.setdefault(stage, set()).update(p.device for model in models for p in model.parameters())
            return function(*arguments, **options)

        return call

    @contextmanager
    def placed_on(device, *models):
        with pretended.there(), targets.placed_on(device, *models):  # models are loaded before
            yield

    def switch_on() -> dict[str, set[torch.device]]:
        monkeypatch.setattr(accelerate, "Accelerator", pretended.AcceleratorThere)
        monkeypatch.setattr(converting, "device_of", lambda distillation: pretended.DEVICE)
        monkeypatch.setattr(converting, "placed_on", placed_on)
        for stage in ("start", "calibrate"):
            monkeypatch.setattr(converting, stage, observed(stage, getattr(converting, stage)))
        monkeypatch.setattr(distillation._Run, "_step", observed("distill", distillation._Run._step))
        monkeypatch.setattr(measuring, "hidden_states", observed("measure", measuring.hidden_states))
        return places

    return switch_on


@pytest.mark.parametrize("scheme", ["t5", "relative", "deberta", "rope"])
def test_calibration(scheme, tmp_path):
    def calibrated(folder, move=lambda one: one) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        teacher = original("bert")
        student = student_of(teacher, folder, scheme)
        with pretended.there():
            student, teacher = move(student), move(teacher)
            calibrate(
                student, teacher, [{name: move(one) for name, one in batch.items()} for batch in text()], steps=3
            )
            own = position_parameters(student) or dict(student.named_parameters())
            return {name: one.detach().cpu() for name, one in own.items()}

    expected = calibrated(tmp_path / "here")
    found = calibrated(tmp_path / "there", lambda one: one.to(pretended.DEVICE))
    assert any(one.any() for one in expected.values())
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("absolute+t5", {"train": "beyond"}),
        pytest.param("deberta", {"gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param("rope", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_conversion(scheme, options, found_by_accelerate, tmp_path):
    source = tiny_checkpoints.save(tmp_path / "bert", head="ForMaskedLM")
    lengths = {"trained_length": 16, "max_length": 32, "max_steps": 4, "mixed_precision": "no"}

    def converted():
        model, report = convert(source, scheme, text=[source.with_name("bert.txt")], **lengths, **options)
        agreement = [row[name] for row in report.rows for name in ("token_cosine", "logits_apart") if name in row]
        return model.state_dict(), agreement + [row["masked_lm_loss"] for row in report.losses]

    expected, cosines = converted()
    places = found_by_accelerate()
    found, there = converted()
    stages = {"start", "calibrate", "measure", "distill"} - ({"calibrate"} if "absolute" in scheme else set())
    assert places == dict.fromkeys(stages, {pretended.DEVICE})
    assert {one.device.type for one in found.values()} == {"cpu"}
    assert there == pytest.approx(cosines, rel=1e-3, abs=1e-3)
    # With `rope`, queries and keys may have another basis that scores the same.
    for name, one in expected.items() if scheme != "rope" else ():
        torch.testing.assert_close(found[name], one, rtol=0, atol=2e-3)


def test_comparison(found_by_accelerate, monkeypatch, tmp_path):
    source = tiny_checkpoints.save(tmp_path / "bert", head="ForMaskedLM")
    text_file = source.with_name("bert.txt")
    convert(source, "t5", text=[text_file], trained_length=16, max_length=32, max_steps=2, output=tmp_path / "t5")

    def compared() -> list[float]:
        report = compare(source, tmp_path / "t5", text=[text_file])
        return [row[name] for row in report.rows + report.losses for name in row if isinstance(row[name], float)]

    expected = compared()
    places = found_by_accelerate()
    monkeypatch.setattr(converting, "_measuring_device", lambda: pretended.DEVICE)
    assert compared() == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert places == {"measure": {pretended.DEVICE}}
