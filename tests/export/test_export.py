"""Exported models compute what the model computes, at any batch size and length."""

import warnings

import pytest
import tiny
import torch
from torch.export import Dim

from hf_posenc.modeling.schemes.table import SCHEMES


TABLE = tiny.SIZES["max_position_embeddings"]
TRACED_LENGTH = 10
ALL = [*SCHEMES, "absolute+t5", "tupe+t5", "sinusoidal+deberta", "alibi+rope"]
# One per kind of work in the attention: none, bias, rotation, bias per pair, query and key tables, value side.
KINDS = ["absolute", "t5", "rope", "tupe", "sinusoidal+deberta", "relative", "none"]

pytestmark = pytest.mark.slow


class LastHiddenState(torch.nn.Module):
    """A model as exporters want it: two tensors in, one out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def ends_at_the_table(scheme: str) -> bool:
    return bool({"absolute", "tupe"} & {*scheme.split("+")})


def dynamic_shapes(scheme: str) -> dict:
    """Any batch, and any length; up to the table where there is one."""
    length = Dim("length", max=TABLE) if ends_at_the_table(scheme) else Dim("length", max=100_000)
    return {name: {0: Dim("batch"), 1: length} for name in ("input_ids", "attention_mask")}


def check(family: str, scheme: str, model, exported, tolerance: float) -> None:
    """Compare at lengths shorter and longer than the traced one; the position parameters are not zero."""
    for batch, length in (
        (1, 3),
        (2, TRACED_LENGTH),
        (5, 37),
        (2, TABLE if ends_at_the_table(scheme) else TABLE + 21),
    ):
        if tiny.FAMILIES[family].family.positions_follow_padding and ends_at_the_table(scheme):
            length = min(length, TABLE - 2)
        inputs = tiny.inputs(batch=batch, length=length, family=family)
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state
        output = exported(**inputs)
        assert tiny.difference_where_attended(output, expected, inputs["attention_mask"]) < tolerance, (batch, length)


@pytest.mark.parametrize("scheme", KINDS)
def test_windows_are_exported(scheme):
    model = tiny.build(scheme, position_window=5, position_global_every=2)
    inputs = tiny.inputs(length=TRACED_LENGTH)
    program = torch.export.export(LastHiddenState(model), (), inputs, dynamic_shapes=dynamic_shapes(scheme))
    check("bert", scheme, model, program.module(), 1e-5)


@tiny.cross(scheme=ALL, family=tiny.FAMILIES, strength=1)
def test_torch_export(family, scheme):
    model = tiny.build(scheme, family).double()
    inputs = tiny.inputs(length=TRACED_LENGTH, family=family)
    program = torch.export.export(LastHiddenState(model), (), inputs, dynamic_shapes=dynamic_shapes(scheme))
    check(family, scheme, model, program.module(), 1e-10)


@tiny.cross(scheme=KINDS, family=tiny.FAMILIES, strength=1)
def test_onnx(family, scheme, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = tiny.build(scheme, family)
    inputs = tiny.inputs(length=TRACED_LENGTH, family=family)
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            LastHiddenState(model),
            tuple(inputs.values()),
            path,
            dynamo=True,
            verbose=False,
            dynamic_shapes=dynamic_shapes(scheme),
            input_names=list(inputs),
        )
    session = onnxruntime.InferenceSession(path)

    def run(**inputs):
        (output,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return torch.from_numpy(output)

    check(family, scheme, model, run, 1e-5)
