"""KERPLE: its formula in loops, its gradients, where it starts, and what it cannot tell."""

import math

import pytest
import tiny
import torch
from transformers import AutoModel, BertModel

from hf_posenc.modeling.schemes.kerple import SMALLEST, projected


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")


KERNELS = ["log", "power"]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
TOLERANCE = 1e-5


def filled(kernel: str, **overrides) -> torch.nn.Module:
    """A tiny model with r1 in [0.1, 2] and r2 in [0.1, 1.5]."""
    model = tiny.build("kerple", position_kernel=kernel, **overrides)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.base_model.encoder.layer:
            attention = layer.attention.self
            attention.kerple_r1.weight.copy_(0.1 + 1.9 * torch.rand(4, generator=generator))
            attention.kerple_r2.weight.copy_(0.1 + 1.4 * torch.rand(4, generator=generator))
    return model


def penalty(kernel: str, r1: float, r2: float, distance: int) -> float:
    if kernel == "log":
        return -r1 * math.log(1 + r2 * abs(distance))
    return -r1 * abs(distance) ** r2 if distance else 0.0


def weights_in_loops(model, kernel: str, hidden: torch.Tensor, places: list[list[int]]) -> torch.Tensor:
    """Attention weights of the first layer, (batch, heads, query, key)."""
    attention = model.encoder.layer[0].attention.self
    query, key = (
        projection(hidden).unflatten(-1, (4, 8)).transpose(1, 2) for projection in (attention.query, attention.key)
    )
    scores = query @ key.transpose(-1, -2) / math.sqrt(8)
    for b, row in enumerate(places):
        for h in range(4):
            r1, r2 = attention.kerple_r1.weight[h].item(), attention.kerple_r2.weight[h].item()
            for i, at in enumerate(row):
                for j, to in enumerate(row):
                    scores[b, h, i, j] += penalty(kernel, r1, r2, to - at)
    return scores.softmax(-1)


@every_kernel
@pytest.mark.parametrize("given", [False, True], ids=["in a row", "positions given"])
@torch.no_grad()
def test_scores_equal_the_formula_in_loops(kernel, given):
    model, batch = filled(kernel, attn_implementation="eager").double(), tiny.inputs(padding=None)
    places = [[0, 3, 4, 9, 2, 2, 7, 1, 40, 5, 6, 11]] * 3 if given else [list(range(12))] * 3
    ids = {"position_ids": torch.tensor(places)} if given else {}
    outputs = model(**batch, **ids, output_attentions=True, output_hidden_states=True)
    expected = weights_in_loops(model, kernel, outputs.hidden_states[0], places)
    torch.testing.assert_close(outputs.attentions[0], expected, atol=1e-12, rtol=0)
    without = tiny.build("none", attn_implementation="eager").double()
    without.load_state_dict(model.state_dict(), strict=False)
    assert (without(**batch, output_attentions=True).attentions[0] - expected).abs().max() > 1e-3


@tiny.cross(kernel=KERNELS, length=[12, 150], path=tiny.PATHS, indirect=("path",))
@torch.no_grad()
def test_backends_agree(kernel, length, path):
    batch = tiny.inputs(length=length)
    outputs = []
    for backend in ("eager", "sdpa", "flex_attention"):
        model = filled(kernel, attn_implementation=backend)
        outputs.append(model(**batch).last_hidden_state)
    for output in outputs[1:]:
        assert tiny.difference_where_attended(output, outputs[0], batch["attention_mask"]) < TOLERANCE


@every_kernel
def test_gradients_are_those_of_finite_differences(kernel, path):
    """At distance 0, too, where the derivative of a power would be 0 · log 0."""
    model, batch = filled(kernel, num_hidden_layers=1).double(), tiny.inputs(padding=None, length=60)
    attention = model.encoder.layer[0].attention.self
    target = torch.randn(3, 60, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss() -> torch.Tensor:
        return (model(**batch).last_hidden_state * target).sum()

    loss().backward()
    for parameter in (attention.kerple_r1.weight, attention.kerple_r2.weight):
        for head in range(4):
            with torch.no_grad():
                sides = []
                for step in (1e-6, -1e-6):
                    parameter[head] += step
                    sides.append(loss().item())
                    parameter[head] -= step
            expected = (sides[0] - sides[1]) / 2e-6
            assert abs(expected) > 1e-6
            assert parameter.grad[head].item() == pytest.approx(expected, rel=1e-5)


@every_kernel
def test_starts_silent_where_r1_has_a_gradient(kernel, tmp_path):
    torch.manual_seed(0)
    stock = BertModel(tiny.stock_config()).eval()
    stock.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, position_scheme="absolute+kerple", position_kernel=kernel).eval()
    batch = tiny.inputs()
    torch.testing.assert_close(model(**batch)[0], stock(**batch)[0], atol=TOLERANCE, rtol=0)
    model(**batch)[0].square().sum().backward()
    for layer in model.encoder.layer:
        attention = layer.attention.self
        assert (attention.kerple_r1.weight == 0).all() and attention.kerple_r1.weight.grad.abs().sum() > 0
        assert (attention.kerple_r2.weight > 0).all()


def test_a_parameter_comes_back_into_its_interval():
    parameter = torch.tensor([-0.5, 0.0, 0.3, 2.0, 2.5], requires_grad=True)
    found = projected(parameter, 0.0, 2.0)
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.3, 2.0, 2.0])
    gradient = torch.tensor([-1.0, -2.0, 3.0, 4.0, 5.0])
    found.backward(gradient)
    assert torch.equal(parameter.grad, gradient)


@every_kernel
@torch.no_grad()
def test_parameters_outside_their_interval_count_as_its_ends(kernel):
    batch, outputs = tiny.inputs(), []
    for r1, r2 in ((-3.0, 0.5), (0.0, 0.7)), ((1.0, -1.0), (1.0, SMALLEST)), ((1.0, 9.0), (1.0, 2.0)):
        pair = []
        for values in (r1, r2):
            model = tiny.build("kerple", position_kernel=kernel)
            for layer in model.encoder.layer:
                layer.attention.self.kerple_r1.weight.fill_(values[0])
                layer.attention.self.kerple_r2.weight.fill_(values[1])
            pair.append(model(**batch).last_hidden_state)
        outputs.append((pair[0] - pair[1]).abs().max())
    assert outputs[0] == 0 and outputs[1] < 1e-6
    assert outputs[2] < 1e-6 if kernel == "power" else outputs[2] > 1e-3


@every_kernel
@torch.no_grad()
def test_cannot_tell_left_from_right(kernel):
    model, batch = filled(kernel), tiny.inputs(padding=None)
    forwards = model(**batch).last_hidden_state
    backwards = model(input_ids=batch["input_ids"].flip(1)).last_hidden_state.flip(1)
    torch.testing.assert_close(forwards, backwards, atol=TOLERANCE, rtol=0)


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_survives_far_distances(kernel, dtype):
    model, batch = filled(kernel).to(dtype), tiny.inputs(padding=None)
    position_ids = torch.arange(12)[None] * 5000
    output = model(**batch, position_ids=position_ids).last_hidden_state
    assert output.dtype == dtype and output.isfinite().all()


def test_the_paper_s_start_is_uniform():
    for kernel, (high_r1, high_r2) in {"log": (2, 1), "power": (1, 2)}.items():
        torch.manual_seed(0)
        model = BertModel(
            tiny.stock_config(
                position_scheme="kerple",
                position_kernel=kernel,
                position_init="paper",
                num_hidden_layers=8,
                num_attention_heads=16,
            )
        )
        for name, high in (("kerple_r1", high_r1), ("kerple_r2", high_r2)):
            values = torch.cat([getattr(layer.attention.self, name).weight for layer in model.encoder.layer])
            assert values.shape == (128,) and values.min() >= 0 and 0.9 * high < values.max() <= high


def test_has_the_parameters_of_the_checkpoint_format():
    model = tiny.build("kerple")
    keys = {key for key in model.state_dict() if "kerple" in key}
    assert keys == {
        f"encoder.layer.{layer}.attention.self.{name}.weight"
        for layer in (0, 1)
        for name in ("kerple_r1", "kerple_r2")
    }
