"""Gradients of each sample by itself are right or refused: what a batch uses once has none. Opacus itself: tests/clients/use_opacus.py."""

import pytest
import tiny
import torch
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

from hf_posenc import position_parameters
from hf_posenc.modeling.schemes.table import SCHEMES


SOME_FLAGS = [
    ("t5", {"position_per_layer": True}),
    ("deberta", {"position_share_projections": False, "position_norm": True}),
    ("fire", {"position_per_layer": False}),
    ("sinusoidal", {"position_learn_amplitude": True}),
    ("absolute", {"position_every_layer": True}),
    ("sinusoidal", {"position_every_layer": True}),
]
CASES = [*((name, {}) for name in SCHEMES), *SOME_FLAGS]


def opacus_hook(module, arguments, output) -> None:
    """Stands for what Opacus registers on each module that it computes gradients of."""


opacus_hook.__module__ = "opacus.grad_sample.grad_sample_module"


def refused(model, inputs: dict) -> str | None:
    try:
        model(**inputs)
    except ValueError as error:
        assert "per-sample gradients (Opacus)" in str(error)
        return str(error)
    return None


@tiny.cross(case=CASES, family=tiny.FAMILIES, strength=1)
def test_each_parameter_of_a_scheme_is_refused_while_it_is_trained(case, family):
    scheme, flags = case
    model, inputs = tiny.build(scheme, family, **flags).train(), tiny.inputs(padding=None, family=family)
    assert refused(model, inputs) is None
    for name in position_parameters(model):
        module = model.get_submodule(name.rpartition(".")[0])
        handle = module.register_forward_hook(opacus_hook)
        assert refused(model, inputs), name
        with torch.no_grad():
            assert refused(model, inputs) is None
        assert refused(model.eval(), inputs) is None
        model.train()
        handle.remove()
        assert refused(model, inputs) is None


def test_the_table_of_absolute_positions_is_refused_unless_each_sample_has_positions():
    model, inputs = tiny.build("absolute").train(), tiny.inputs(padding=None)
    model.embeddings.position_embeddings.register_forward_hook(opacus_hook)
    assert "give position_ids of (batch, length)" in refused(model, inputs)
    positions = torch.arange(12).expand(3, -1)
    assert refused(model, {**inputs, "position_ids": positions}) is None
    assert "give position_ids" in refused(model, {**inputs, "position_ids": positions[:1]})
    one = {name: value[:1] for name, value in inputs.items()}
    assert refused(model, one) is None
    # Layers read it too.
    for scheme, flags in (("tupe", {}), ("absolute", {"position_every_layer": True})):
        model = tiny.build(scheme, **flags).train()
        model.embeddings.position_embeddings.register_forward_hook(opacus_hook)
        assert "layers read" in refused(model, {**inputs, "position_ids": positions})


def test_projections_that_positions_go_through_are_refused_with_a_frozen_table_too():
    inputs = tiny.inputs(padding=None)
    for name in ("query", "key"):
        model = tiny.build("deberta").train()
        getattr(model.encoder.layer[1].attention.self, name).register_forward_hook(opacus_hook)
        assert "which positions go through too" in refused(model, inputs)
        own = tiny.build("deberta", position_share_projections=False).train()
        getattr(own.encoder.layer[1].attention.self, name).register_forward_hook(opacus_hook)
        assert refused(own, inputs) is None
    electra = tiny.build("sinusoidal", "electra", position_every_layer=True).train()
    electra.embeddings_project.register_forward_hook(opacus_hook)
    assert "before each layer" in refused(electra, inputs)


@pytest.mark.parametrize("scheme", ["rope", "alibi", "sinusoidal", "none"])
def test_hooks_on_all_modules_of_a_model_without_position_parameters_are_none_of_its_business(scheme):
    model = tiny.build(scheme).train()
    for module in model.modules():
        if [*module.parameters(recurse=False)]:
            module.register_forward_hook(opacus_hook)
    assert refused(model, tiny.inputs()) is None


# torch's own per-sample gradients, which Opacus has under the name "ew".
@tiny.cross(case=CASES, batch=[1, 3, 23, 32], strength=1)
def test_pytorch_s_per_sample_gradients_are_right_or_refused(case, batch):
    scheme, flags = case
    model = tiny.build(scheme, head="ForSequenceClassification", num_hidden_layers=1, **flags).double().train()
    input_ids = tiny.inputs(batch=batch, padding=None)["input_ids"]
    labels = torch.arange(batch) % 2
    single = []
    for row in range(batch):
        model.zero_grad()
        model(input_ids[row : row + 1], labels=labels[row : row + 1]).loss.backward()
        single.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    try:
        call_for_per_sample_grads(model, batch_size=batch, loss_reduction="mean")(
            input_ids, labels=labels
        ).loss.backward()
    except ValueError as error:
        assert "per-sample gradients (Opacus)" in str(error)
        return
    assert scheme in ("rope", "alibi", "none", "sinusoidal") or (scheme == "absolute" and batch == 1)
    for name, parameter in model.named_parameters():
        if name in single[0]:
            wanted = torch.stack([gradients[name] for gradients in single])
            torch.testing.assert_close(parameter.grad_sample, wanted, msg=name)
