"""Models that TorchScript records at one length compute what the model computes at others: `torch.jit.trace`, and `torch.onnx.export` with dynamo=False."""

import functools
import io
import warnings
from collections.abc import Callable

import pytest
import stock_models
import tiny
import torch
from torch import nn
from transformers import BertModel

from hf_posenc.modeling.models.modeling_posenc import PosencPreTrainedModel
from hf_posenc.modeling.schemes.positions import deberta_bucket


TRACED = 12
LENGTHS = ((3, TRACED), (3, 7), (1, 40), (5, 33), (2, 1))
NAMES = ("input_ids", "attention_mask")
# One per kind of work in the attention, and all.
KINDS = ["absolute", "t5", "rope", "tupe", "relative", "deberta", "fire", "cable", "none"]
ALL = [*tiny.SCHEMES, "absolute+t5", "tupe+t5", "sinusoidal+deberta"]
BACKENDS = ["sdpa", "eager"]
Run = Callable[..., torch.Tensor]


class FirstOutput(nn.Module):
    """A model as exporters want it: tensors in, one out."""

    def __init__(self, model: nn.Module, names: tuple[str, ...] = NAMES):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, tensors, strict=True)))[0]


def traced(module: FirstOutput, example: tuple[torch.Tensor, ...]) -> Run:
    return torch.jit.trace(module, example, check_trace=False)


def exported(module: FirstOutput, example: tuple[torch.Tensor, ...]) -> Run:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    file = io.BytesIO()
    axes = {name: {0: "batch", 1: "length"} for name in module.names}
    names = [*module.names]
    torch.onnx.export(module, example, file, dynamo=False, opset_version=17, input_names=names, dynamic_axes=axes)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    wanted = {given.name for given in session.get_inputs()}  # without those that a model does not read

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        given = {name: tensor.numpy() for name, tensor in zip(names, tensors) if name in wanted}
        return torch.from_numpy(session.run(None, given)[0])

    return run


@functools.cache
def masks_are_traced() -> bool:
    """Whether transformers' own models can be traced with a mask: up to 5.8 they cannot."""
    module = FirstOutput(BertModel(tiny.stock_config())).eval()
    try:
        traced(module, (*tiny.inputs().values(),))
    except IndexError:
        return False
    return True


def record(model: nn.Module, example: dict[str, torch.Tensor]) -> dict[str, Run]:
    if isinstance(model, PosencPreTrainedModel) and not masks_are_traced():
        pytest.skip("before 5.9, a mask is not traced by transformers' own models either")
    module = FirstOutput(model.eval(), tuple(example)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"trace": traced(module, (*example.values(),)), "onnx": exported(module, (*example.values(),))}


def check(model: nn.Module, family: str = "bert", padding: str | None = None, **more: Callable) -> None:
    """At other batches, lengths and sides of padding than in the example.

    Args:
        padding: in the example.
        more: inputs beside ids and mask, made of these.
    """

    def inputs(batch: int, length: int, padding: str | None) -> dict[str, torch.Tensor]:
        given = tiny.inputs(batch=batch, length=length, family=family, padding=padding if length > 2 else None)
        return {**given, **{name: make(given["input_ids"]) for name, make in more.items()}}

    runs = record(model, inputs(2, TRACED, padding))
    for batch, length in LENGTHS:
        for side in ("right", "left"):
            given = inputs(batch, length, side)
            with torch.no_grad():
                expected = model(**given)[0]
                for how, run in runs.items():
                    output = run(*given.values())
                    assert output.shape == expected.shape
                    difference = tiny.difference_where_attended(output, expected, given["attention_mask"])
                    assert difference < 1e-4, (how, batch, length, side)


@tiny.cross(scheme=KINDS, family=tiny.FAMILIES, backend=BACKENDS, padding=[None, "left"], strength=1)
def test_lengths_of_every_kind_of_scheme(scheme, family, backend, padding):
    model = tiny.build(scheme, family, num_hidden_layers=1)
    model.set_attn_implementation(backend)
    check(model, family, padding)


@pytest.mark.slow
@tiny.cross(scheme=ALL, family=tiny.FAMILIES, backend=BACKENDS, padding=[None, "right", "left"])
def test_lengths_of_all_schemes(scheme, family, backend, padding):
    model = tiny.build(scheme, family)
    model.set_attn_implementation(backend)
    check(model, family, padding)


@tiny.cross(case=stock_models.KINDS, padding=[None, "left"], strength=1)
def test_lengths_of_stock_models(case, padding):
    model = stock_models.build(case, attn_implementation="sdpa", num_hidden_layers=1)
    check(model, "mpnet" if case == "mpnet" else "bert", padding)


@pytest.mark.slow
@pytest.mark.parametrize("case", stock_models.CASES)
def test_lengths_of_all_stock_models(case):
    check(stock_models.build(case, attn_implementation="sdpa"), "mpnet" if case == "mpnet" else "bert")


@tiny.cross(
    scheme=["none", "t5", "tupe", "relative"],
    backend=BACKENDS,
    family=["bert", "roberta"],
    where=lambda scheme, backend, family: (scheme == "none") == (backend == "sdpa"),
    strength=1,
    rest=pytest.mark.slow,
)
def test_lengths_of_windows(scheme, backend, family):
    model = tiny.build(scheme, family, num_hidden_layers=1, position_window=5, position_global_every=0)
    model.set_attn_implementation(backend)
    check(model, family)


FLAGS = [
    ("deberta", {"position_buckets": 4, "position_max_distance": 8}),
    ("fire", {"is_decoder": True, "use_cache": False}),
]
MORE_FLAGS = [
    ("deberta", {"position_attention_types": ["c2p", "p2c", "p2p"], "position_share_projections": False}),
    ("absolute", {"position_stride": 3}),
    ("sinusoidal", {"position_combine": "concat", "position_width": 8, "position_every_layer": True}),
    ("cable", {"position_two_sums": True}),
]


@pytest.mark.parametrize("scheme, flags", FLAGS + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE_FLAGS])
def test_lengths_of_flags(scheme, flags):
    check(tiny.build(scheme, **flags))


@pytest.mark.parametrize(
    "scheme", ["transformer_xl", *(pytest.param(s, marks=pytest.mark.slow) for s in ("t5", "fire"))]
)
def test_lengths_where_positions_are_given(scheme):
    def positions(ids: torch.Tensor) -> torch.Tensor:
        return torch.arange(ids.shape[1]).expand(ids.shape) + torch.arange(len(ids))[:, None]

    check(tiny.build(scheme), position_ids=positions)


@pytest.mark.parametrize("buckets, max_distance", [(4, 8), (10, 40), (256, 512)])
def test_distances_short_of_the_longest_have_deberta_s_last_bucket_and_those_beyond_none_whatever_is_rounded(
    buckets, max_distance, monkeypatch
):
    log = torch.log

    def rounded_up(tensor: torch.Tensor) -> torch.Tensor:
        return log(tensor) * (1 + 2**-22 if tensor.dim() else 1)

    monkeypatch.setattr(torch, "log", rounded_up)
    near = deberta_bucket(torch.tensor([1 - max_distance, max_distance - 1]), buckets, max_distance)
    assert near.tolist() == [1 - buckets, buckets - 1]
    far = deberta_bucket(torch.tensor([-9999, -max_distance, max_distance, 9999]), buckets, max_distance)
    assert (far.abs() >= buckets).all() and (far.sign() == torch.tensor([-1, -1, 1, 1])).all()
