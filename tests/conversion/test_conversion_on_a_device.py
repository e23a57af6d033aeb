"""Conversions on a device that is not the CPU: the same numbers, and nothing is left on the CPU."""

import accelerate
import pretended
import pytest
import tiny_checkpoints
import torch
from pairs import original, student_of, text

from hf_posenc import convert, position_parameters
from hf_posenc.conversion import converting, distillation
from hf_posenc.conversion.calibration import calibrate


pytestmark = pytest.mark.skipif(not pretended.EXISTS, reason="this PyTorch cannot pretend a device")


@pytest.fixture
def trains_there(monkeypatch):
    """Accelerate finds the device; models are loaded before."""

    def distill(*arguments, **options):
        with pretended.there():
            return distillation.distill(*arguments, **options)

    step, places = distillation._Run._step, set()

    def observed(run, model, *arguments):
        places.update(parameter.device for parameter in model.parameters())
        return step(run, model, *arguments)

    def switch_on():
        monkeypatch.setattr(accelerate, "Accelerator", pretended.AcceleratorThere)
        monkeypatch.setattr(converting, "distill", distill)
        monkeypatch.setattr(distillation._Run, "_step", observed)
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
def test_distillation(scheme, options, trains_there, tmp_path):
    source = tiny_checkpoints.save(tmp_path / "bert")
    lengths = {"trained_length": 16, "max_length": 32, "max_steps": 4, "mixed_precision": "no"}

    def converted():
        model, report = convert(source, scheme, text=[source.with_name("bert.txt")], **lengths, **options)
        return model.state_dict(), [entry["cosine"] for entry in report.distillation]

    expected, cosines = converted()
    places = trains_there()
    found, there = converted()
    assert places == {pretended.DEVICE} and {one.device.type for one in found.values()} == {"cpu"}
    assert there == pytest.approx(cosines, abs=1e-4)
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=2e-3)
