"""The small parts that schemes are made of: what stands in the place of one is obeyed."""

import copy

import pytest
import tiny
import torch
from torch import nn

from hf_posenc import position_parameters
from hf_posenc.modeling.schemes.parameters import Normal, PositionParameter, ones


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")


# Every scheme with parameters, in every form that has some of its own.
CASES = [
    ("sinusoidal", {"position_every_layer": True}),
    ("sinusoidal", {"position_combine": "concat"}),
    ("absolute", {"position_combine": "gate", "position_every_layer": True}),
    ("absolute", {"position_combine": "attention"}),
    ("relative", {}),
    ("relative_key", {}),
    ("relative_key_query", {}),
    ("transformer_xl", {}),
    ("t5", {}),
    ("t5", {"position_per_layer": True}),
    ("tupe+t5", {}),
    ("deberta", {"position_norm": True}),
    ("deberta", {"position_share_projections": False}),
]


class InPlace(nn.Module):
    """Stands in the place of a module and computes with another one, as a wrapper of PEFT does; it has no weight."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.another = module

    def forward(self, *args):
        return self.another(*args)


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**tiny.inputs()).last_hidden_state


@tiny.cross(case=CASES, family=["bert", "electra"], strength=1)
def test_schemes_call_what_stands_in_the_place_of_their_modules(case, family):
    scheme, flags = case
    model, expected = (tiny.build(scheme, family, seed=0, **flags) for _ in range(2))
    tiny.fill_positions(expected, seed=5)
    before, after = output(model), output(expected)
    assert (before - after).abs().max() > 1e-2
    names = {name.rpartition(".")[0] for name in position_parameters(model)}
    for name in names:
        model.set_submodule(name, InPlace(copy.deepcopy(expected.get_submodule(name))))
    torch.testing.assert_close(output(model), after, rtol=0, atol=1e-6)


class TestPositionParameter:
    def test_gives_its_weight_and_the_gradient_back(self):
        module = PositionParameter((2, 3), ones)
        assert module.weight.shape == (2, 3) and list(module.state_dict()) == ["weight"]
        factor = torch.arange(6.0).view(2, 3)
        (module() * factor).sum().backward()
        assert torch.equal(module(), module.weight) and torch.equal(module.weight.grad, factor)

    def test_gives_a_tensor_that_outlives_the_parameter(self):
        module = PositionParameter((3,), ones)
        nn.init.constant_(module.weight, 2.0)
        given = module()
        module.weight.data.zero_()  # as where parameters are given up after a call
        assert torch.equal(given, torch.full((3,), 2.0))

    def test_starts_as_its_scheme_says_whatever_is_built_around_it(self):
        torch.manual_seed(0)
        config = tiny.variant_config(position_scheme="transformer_xl", position_init="paper", hidden_size=64)
        attention = tiny.variant_class("bert")(config).encoder.layer[0].attention.self
        assert attention.pos_bias_u.position_initial == {"weight": Normal(config.initializer_range)}
        assert abs(attention.pos_bias_u.weight.std().item() / config.initializer_range - 1) < 0.4
