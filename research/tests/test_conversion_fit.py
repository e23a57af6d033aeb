"""The study of a fit without gradients: its least squares are those of LAPACK, and it leaves what is right as it is."""

import copy
from dataclasses import asdict

import pytest
import tiny
import torch
from fit_tables import HERE, table
from least_squares import TRIALS, Fitted, LayerFit, NormalEquations, Solver
from recorded import read_lines
from torch import nn


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_the_solution_is_that_of_lstsq(ridge):
    """With the ridge as further equations; the inputs are centred, since the bias has none."""
    inputs, aim, weights = drawn(200, 7) + 2, drawn(200, 3, seed=1), drawn(200, seed=2).exp()
    sums = NormalEquations(7, 3)
    for part in torch.arange(200).split(64):
        sums.add(inputs[part], aim[part], weights[part])
    [(_, found)] = sums.solutions((ridge,))
    mean = (weights[:, None] * inputs).sum(0) / weights.sum()
    scale = ((weights[:, None] * (inputs - mean).square()).sum(0)).mean()
    root = weights.sqrt()[:, None]
    rows = torch.cat([root * torch.cat([inputs, torch.ones(200, 1)], 1), (ridge * scale).sqrt() * torch.eye(7, 8)])
    wanted = torch.linalg.lstsq(rows, torch.cat([root * aim, torch.zeros(7, 3)])).solution
    torch.testing.assert_close(found, wanted)
    error = (root * (aim - torch.cat([inputs, torch.ones(200, 1)], 1) @ found)).square().sum()
    assert sums.error(found) == pytest.approx(float(error))


@torch.no_grad()
def test_a_layer_finds_what_it_lacks_and_nothing_in_noise():
    inputs = drawn(600, 5)
    right, layer = (nn.Linear(5, 4).double() for _ in range(2))
    solver, before = Solver([layer]), copy.deepcopy(layer.state_dict())
    for is_left_out, part in ((False, inputs[:300]), (True, inputs[300:])):
        solver.add(is_left_out, part, right(part))
    solver.apply()
    torch.testing.assert_close(layer.weight, right.weight, rtol=0, atol=1e-3)
    layer.load_state_dict(before)
    solver = Solver([layer])
    solver.add(False, inputs[:300], layer(inputs[:300]) + drawn(300, 4, seed=3))
    solver.add(True, inputs[300:], layer(inputs[300:]) - solver.sums[0].products[-1] / 300)
    solver.apply()
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


EVERYTHING = Fitted(inputs=True, intermediate=True, output=True, norms=True)


def pair():
    teacher = tiny.build("t5", position_per_layer=True).double().eval()
    tiny.fill_positions(teacher)
    return teacher, copy.deepcopy(teacher)


@torch.no_grad()
def fit(student, teacher, fitted=EVERYTHING) -> None:
    batches = [tiny.inputs(8, 20, seed=seed) for seed in range(8)]
    LayerFit(student, teacher, fitted, batches[:6], batches[6:]).run(lambda layer: None)


def test_a_model_that_equals_its_teacher_stays_as_it_is():
    teacher, student = pair()
    fit(student, teacher)
    for name, value in student.state_dict().items():
        torch.testing.assert_close(value, teacher.state_dict()[name], rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_projections_that_were_changed_are_found_again():
    teacher, student = pair()
    for layer in student.encoder.layer:
        for dense in (layer.attention.output.dense, layer.output.dense):
            dense.weight += 0.3 * drawn(*dense.weight.shape)
            dense.bias += drawn(len(dense.bias), seed=1)
    batch = tiny.inputs(4, 20, seed=20)
    mask = batch["attention_mask"].bool()

    def off() -> float:
        return float((student(**batch)[0] - teacher(**batch)[0])[mask].abs().max())

    before = off()
    fit(student, teacher, Fitted(output=True))
    assert before > 0.1 and off() < 0.05 * before


@torch.no_grad()
def test_biases_of_norms_are_found_again():
    """Exactly: the states after a LayerNorm are its bias and what does not depend on it."""
    teacher, student = pair()
    for layer in student.encoder.layer:
        layer.attention.output.LayerNorm.bias += drawn(len(layer.attention.output.LayerNorm.bias))
        layer.output.LayerNorm.bias -= drawn(len(layer.output.LayerNorm.bias), seed=1)
    fit(student, teacher, Fitted(attention_output=False, norms=True))
    for name, value in student.state_dict().items():
        torch.testing.assert_close(value, teacher.state_dict()[name], rtol=1e-9, atol=1e-9)


def test_the_table_has_every_budget_once():
    runs = read_lines(HERE / "runs.jsonl")[1:]
    assert len(table().splitlines()) == 2 + len({(str(run["fitted"]), run["steps"]) for run in runs})
    assert {(str(run["fitted"]), run["steps"], run["seed"]) for run in runs} <= {
        (str(trial["fitted"]), trial["steps"], trial["seed"]) for trial in map(asdict, TRIALS)
    }
