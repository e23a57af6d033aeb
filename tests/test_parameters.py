"""Which parameters belong to schemes: found in any module, and trained alone."""

import pytest
import tiny
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from transformers import BertModel

from hf_posenc import freeze_all_but_positions, position_parameters


def test_they_are_found_by_their_full_names_in_what_holds_variants():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = tiny.build("t5"), tiny.build("absolute+relative")

    pair = Pair()
    found = position_parameters(pair)
    assert "left.encoder.relative_attention_bias.weight" in found
    assert "right.encoder.layer.1.attention.self.relative_key_embeddings.weight" in found
    assert all(pair.get_parameter(name) is parameter for name, parameter in found.items())


def test_the_table_of_the_checkpoint_is_none_of_them():
    assert position_parameters(tiny.build("absolute")) == {}
    assert position_parameters(BertModel(tiny.stock_config())) == {}


def test_those_that_are_parametrized_are_found_under_their_new_names():
    model = tiny.build("t5+relative")
    before = position_parameters(model)
    table = model.encoder.relative_attention_bias
    weight_norm(table)
    register_parametrization(model.encoder.layer[0].attention.self.relative_key_embeddings, "weight", nn.Identity())
    found = position_parameters(model)
    new = {
        "encoder.relative_attention_bias.parametrizations.weight.original0",
        "encoder.relative_attention_bias.parametrizations.weight.original1",
        "encoder.layer.0.attention.self.relative_key_embeddings.parametrizations.weight.original",
    }
    assert {*found} - {*before} == new and len(before) + 1 == len(found)
    assert all(model.get_parameter(name) is parameter for name, parameter in found.items())
    freeze_all_but_positions(model)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == {*found}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_nothing_else_is_trained_once_all_else_is_frozen(family):
    model = tiny.build("absolute+deberta", family, "ForSequenceClassification")
    count = freeze_all_but_positions(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == position_parameters(model).keys()
    assert count == sum(parameter.numel() for parameter in position_parameters(model).values())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(**tiny.inputs(family=family), labels=torch.tensor([0, 1, 0])).loss.backward()
    optimizer.step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed and changed <= trained


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), tiny.build("rope"), tiny.build("absolute")], ids=["linear", "rope", "absolute"]
)
def test_a_model_without_any_is_refused(model):
    with pytest.raises(ValueError, match="no position parameters to train"):
        freeze_all_but_positions(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
