"""Promise 4: the keys of checkpoints and the shapes behind them are public, and a change of one is a breaking change.

This list is written by hand, and goes on in the tests of single schemes, as `CHECKPOINT_KEYS`. A test that fails here says that checkpoints
which people have saved no longer load.
"""

import runpy
from pathlib import Path

import pytest
import tiny

from hf_posenc import position_parameters
from hf_posenc.modeling.schemes.table import SCHEMES


ATTENTION = "encoder.layer.1.attention.self"

# Scheme and flags -> keys of the parameters that do not belong to the first layer, whose keys are those of the second. The tiny
# BERT has 2 layers, 4 heads, 32 hidden features and 64 positions.
KEYS = [
    ("absolute", {}, {}),
    ("none", {}, {}),
    ("rope", {}, {}),
    ("alibi", {}, {}),
    ("sinusoidal", {}, {"embeddings.position_scale.weight": (1,)}),
    ("sinusoidal", {"position_learn_amplitude": True}, {"embeddings.position_scale.weight": (1,)}),
    ("absolute", {"position_combine": "concat", "position_width": 8}, {}),
    ("absolute", {"position_every_layer": True}, {"encoder.layer.1.position_scale.weight": (1,)}),
    (
        "absolute",
        {"position_combine": "concat"},
        {"embeddings.position_projection.weight": (32, 64), "embeddings.position_projection.bias": (32,)},
    ),
    (
        "absolute",
        {"position_combine": "gate"},
        {"embeddings.position_gate.weight": (32, 64), "embeddings.position_gate.bias": (32,)},
    ),
    (
        "absolute",
        {"position_combine": "attention"},
        {
            "embeddings.position_query.weight": (32, 32),
            "embeddings.position_query.bias": (32,),
            "embeddings.position_key.weight": (32, 32),
            "embeddings.position_key.bias": (32,),
            "embeddings.position_value.weight": (32, 32),
            "embeddings.position_value.bias": (32,),
        },
    ),
    (
        "relative",
        {},
        {
            f"{ATTENTION}.relative_key_embeddings.weight": (129, 8),
            f"{ATTENTION}.relative_value_embeddings.weight": (129, 8),
        },
    ),
    ("relative_key", {}, {f"{ATTENTION}.distance_embedding.weight": (127, 8)}),
    ("relative_key_query", {}, {f"{ATTENTION}.distance_embedding.weight": (127, 8)}),
    (
        "transformer_xl",
        {},
        {
            f"{ATTENTION}.linear_pos.weight": (32, 32),
            f"{ATTENTION}.pos_bias_u.weight": (4, 8),
            f"{ATTENTION}.pos_bias_v.weight": (4, 8),
        },
    ),
    ("t5", {}, {"encoder.relative_attention_bias.weight": (32, 4)}),
    ("t5", {"position_per_layer": True}, {f"{ATTENTION}.relative_attention_bias.weight": (32, 4)}),
    (
        "tupe",
        {},
        {
            "encoder.pos_ln.weight": (32,),
            "encoder.pos_ln.bias": (32,),
            "encoder.pos_q_linear.weight": (32, 32),
            "encoder.pos_q_linear.bias": (32,),
            "encoder.pos_k_linear.weight": (32, 32),
            "encoder.pos_k_linear.bias": (32,),
            "encoder.cls_to_others.weight": (4,),
            "encoder.others_to_cls.weight": (4,),
        },
    ),
    ("deberta", {}, {"encoder.rel_embeddings.weight": (512, 32)}),
    (
        "deberta",
        {"position_share_projections": False, "position_norm": True},
        {
            "encoder.rel_embeddings.weight": (512, 32),
            "encoder.LayerNorm.weight": (32,),
            "encoder.LayerNorm.bias": (32,),
            f"{ATTENTION}.pos_key_proj.weight": (32, 32),
            f"{ATTENTION}.pos_key_proj.bias": (32,),
            f"{ATTENTION}.pos_query_proj.weight": (32, 32),
            f"{ATTENTION}.pos_query_proj.bias": (32,),
        },
    ),
    ("kerple", {}, {f"{ATTENTION}.kerple_r1.weight": (4,), f"{ATTENTION}.kerple_r2.weight": (4,)}),
]
for _file in sorted((Path(__file__).parent / "modeling").rglob("test_*.py")):
    if "\nCHECKPOINT_KEYS = " in _file.read_text(encoding="utf-8"):
        KEYS += runpy.run_path(str(_file))["CHECKPOINT_KEYS"]


@pytest.mark.parametrize(("scheme", "flags", "keys"), KEYS, ids=[f"{name} {flags}" for name, flags, _ in KEYS])
def test_keys_and_shapes(scheme, flags, keys):
    model = tiny.build(scheme, **flags)
    constants = {name: buffer for name, buffer in model.named_buffers() if name.endswith("position_scale.weight")}
    found = {name: tuple(tensor.shape) for name, tensor in (position_parameters(model) | constants).items()}
    first_layer = {name.replace(".1.", ".0.") for name in keys if ".1." in name} & found.keys()
    assert {name: shape for name, shape in found.items() if name not in first_layer} == keys
    assert found.keys() <= model.state_dict().keys()


def test_every_scheme_is_listed():
    assert {scheme for scheme, *_ in KEYS} == set(SCHEMES)
