"""rope: the rotations of transformers' ESM and RoFormer, and transformers' own scalings."""

import pytest
import tiny
import torch
from torch import nn
from transformers import EsmConfig, EsmModel, LlamaConfig, RoFormerConfig, RoFormerModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_posenc.modeling.schemes.base import AttentionContext
from hf_posenc.modeling.schemes.positions import Positions
from hf_posenc.modeling.schemes.rotary import LENGTH_DEPENDENT, Rotation, rotate_pairs
from hf_posenc.modeling.schemes.table import build_schemes


TOLERANCE = 1e-5
LENGTHS = (3, 17, 60)
HEAD_DIM = tiny.SIZES["hidden_size"] // tiny.SIZES["num_attention_heads"]
NAMES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
REFERENCE_SIZES = {
    **{name: tiny.SIZES[name] for name in (*NAMES, "max_position_embeddings")},
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SCALINGS = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]


def scheme_of(model: nn.Module):
    _, (scheme,) = build_schemes(model.config)
    return scheme


def first_attention_of(model: nn.Module, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes into the first self-attention, and what comes out."""
    seen = {}

    def keep(module, args, kwargs, output):
        seen["hidden"], seen["output"] = args[0] if args else kwargs["hidden_states"], output[0]

    handle = model.encoder.layer[0].attention.self.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return seen["hidden"], seen["output"]


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("base", [None, 500.0])
def test_halves_is_the_attention_of_esm(base, backend, padding, monkeypatch):
    flags = {} if base is None else {"position_base": base}
    model = tiny.build("rope", attn_implementation=backend, **flags)
    theta = {} if base is None else {"rope_theta": base}
    config = EsmConfig(**REFERENCE_SIZES, position_embedding_type="rotary", pad_token_id=0, **theta)
    reference = EsmModel(config).eval()
    attention, theirs = model.encoder.layer[0].attention.self, reference.encoder.layer[0].attention.self
    missing, unexpected = theirs.load_state_dict(attention.state_dict(), strict=False)
    # Up to 5.5, ESM rotates in its self-attention, always with base 10000.
    rotates_itself = missing == ["rotary_embeddings.inv_freq"]
    assert not unexpected and (rotates_itself or not missing)
    if rotates_itself and base is not None:
        frequencies = theirs.rotary_embeddings.inv_freq
        frequencies.copy_(base ** -(torch.arange(len(frequencies)) / len(frequencies)))
    for length in LENGTHS:
        inputs = tiny.inputs(length=length, padding=padding)
        hidden, output = first_attention_of(model, inputs)
        mask = torch.zeros(3, 1, 1, length).masked_fill(inputs["attention_mask"][:, None, None] == 0, -1e30)
        with torch.no_grad():
            if rotates_itself:
                expected, _ = theirs(hidden, mask)
                with monkeypatch.context() as patch:
                    patch.setattr(theirs, "position_embedding_type", "absolute")
                    unrotated, _ = theirs(hidden, mask)
            else:
                rotations = reference.rotary_embeddings(hidden, torch.arange(length)[None])
                expected, _ = theirs(hidden, mask, position_embeddings=rotations)
                still = (torch.ones_like(rotations[0]), torch.zeros_like(rotations[1]))
                unrotated, _ = theirs(hidden, mask, position_embeddings=still)
        assert tiny.difference_where_attended(output, expected, inputs["attention_mask"]) < TOLERANCE
        assert tiny.difference_where_attended(output, unrotated, inputs["attention_mask"]) > 100 * TOLERANCE


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_interleaved_is_the_whole_model_of_roformer(backend, padding):
    model = tiny.build("rope", position_layout="interleaved", attn_implementation=backend)
    config = RoFormerConfig(**REFERENCE_SIZES, embedding_size=tiny.SIZES["hidden_size"], type_vocab_size=2)
    reference = RoFormerModel(config).eval()
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("pooler")}
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert missing == ["encoder.embed_positions.weight"] and not unexpected
    without = tiny.build("none")
    without.load_state_dict(model.state_dict())
    for length in LENGTHS:
        inputs = tiny.inputs(length=length, padding=padding)
        with torch.no_grad():
            ours, theirs, none = (m(**inputs).last_hidden_state for m in (model, reference, without))
        assert tiny.difference_where_attended(ours, theirs, inputs["attention_mask"]) < TOLERANCE
        assert tiny.difference_where_attended(ours, none, inputs["attention_mask"]) > 100 * TOLERANCE


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_rotation_is_multiplication_of_complex_numbers(layout):
    generator = torch.manual_seed(0)
    states = torch.randn(2, 3, 5, 8, dtype=torch.float64, generator=generator)
    angles = torch.randn(2, 1, 5, 4, dtype=torch.float64, generator=generator)
    x, y = (states[..., :4], states[..., 4:]) if layout == "halves" else (states[..., ::2], states[..., 1::2])
    turned = torch.complex(x, y) * torch.polar(torch.ones_like(angles), angles)
    rotated = rotate_pairs(states, angles.cos(), angles.sin(), layout)
    parts = (rotated[..., :4], rotated[..., 4:]) if layout == "halves" else (rotated[..., ::2], rotated[..., 1::2])
    assert torch.allclose(torch.complex(*parts), turned, rtol=0, atol=1e-14)


def llama(scaling: dict, positions: int, base: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=tiny.SIZES["hidden_size"],
        num_attention_heads=tiny.SIZES["num_attention_heads"],
        max_position_embeddings=positions,
        rope_parameters={"rope_theta": base, **scaling},
    )


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_rotation_in_place_has_the_derivatives_of_the_formula(layout):
    torch.manual_seed(0)
    states = torch.randn(2, 4, 3, 6, dtype=torch.float64).transpose(1, 2).requires_grad_()
    angles = torch.randn(2, 1, 4, 3, dtype=torch.float64)
    given = states, angles.cos(), angles.sin(), layout
    torch.testing.assert_close(Rotation.apply(*given), rotate_pairs(*given), rtol=0, atol=1e-15)
    assert torch.autograd.gradcheck(Rotation.apply, given)
    assert torch.autograd.gradgradcheck(Rotation.apply, given)


@pytest.mark.parametrize("family, positions", [("bert", 64), ("roberta", 62)])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: f"{scaling['rope_type']}-{len(scaling)}")
def test_scalings_are_what_a_llama_would_compute(scaling, family, positions):
    model = tiny.build("rope", family=family, position_rope_scaling=dict(scaling), position_base=500.0)
    function = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    for length in (20, 200):
        theirs, their_factor = function(llama(dict(scaling), positions, 500.0), torch.device("cpu"), seq_len=length)
        ours, factor = scheme_of(model)._inverse_frequencies(torch.device("cpu"), length)
        assert torch.equal(ours, theirs) and factor == their_factor
    plain = 500.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    assert (ours * factor - plain).abs().max() > 1e-3


def test_every_scaling_of_transformers_is_tried_above():
    assert {scaling["rope_type"] for scaling in SCALINGS} == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: f"{scaling['rope_type']}-{len(scaling)}")
def test_scaled_models_run_beyond_their_length_and_differ_from_unscaled(scaling):
    inputs = tiny.inputs(length=100, padding=None)
    with torch.no_grad():
        scaled = tiny.build("rope", position_rope_scaling=scaling)(**inputs).last_hidden_state
        plain = tiny.build("rope")(**inputs).last_hidden_state
    assert scaled.isfinite().all()
    assert (scaled - plain).abs().max() > 1e-3


def test_the_factor_of_yarn_is_on_queries_and_keys():
    scaling = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}
    model, unit = (
        tiny.build("rope", position_rope_scaling={**scaling, "attention_factor": factor}) for factor in (1.5, 1.0)
    )
    inputs = tiny.inputs(padding=None)
    hidden, output = first_attention_of(model, inputs)
    unit.encoder.layer[0].attention.self.scaling *= 1.5**2
    _, expected = first_attention_of(unit, inputs)
    assert (output - expected).abs().max() < TOLERANCE


def test_default_with_a_theta_is_position_base():
    inputs = tiny.inputs()
    with torch.no_grad():
        by_scaling = tiny.build("rope", position_rope_scaling={"rope_type": "default", "rope_theta": 500.0})
        by_base, plain = tiny.build("rope", position_base=500.0), tiny.build("rope")
        outputs = [model(**inputs).last_hidden_state for model in (by_scaling, by_base, plain)]
    assert torch.equal(outputs[0], outputs[1])
    assert (outputs[0] - outputs[2]).abs().max() > 1e-3


REFUSED = [
    ({"position_rope_scaling": {"rope_type": "lineer", "factor": 2.0}}, "rope_type must be one of .*linear"),
    ({"position_rope_scaling": {"factor": 2.0}}, "factor without a rope_type"),
    ({"position_rope_scaling": {"rope_type": "linear"}}, "factor"),
    ({"position_rope_scaling": {"rope_type": "linear", "factor": 0}}, "frequencies"),
    (
        {"position_rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        "2 frequencies for 4 pairs",
    ),
    (
        {"position_rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 3}},
        "not usable",
    ),
    (
        {"position_rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}, "position_base": 6.0},
        "position_base",
    ),
    ({"position_base": 1.0}, "position_base"),
    ({"position_layout": "quarters"}, "position_layout"),
    ({"hidden_size": 36}, "even head size"),
]


@pytest.mark.parametrize("flags, message", REFUSED, ids=str)
def test_what_cannot_be_computed_is_refused_when_the_config_is_made(flags, message):
    with pytest.raises(ValueError, match=message):
        tiny.variant_config(position_scheme="rope", **flags)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: f"{scaling['rope_type']}-{len(scaling)}")
def test_decoders_refuse_frequencies_that_change_with_the_length(scaling):
    flags = {"position_scheme": "rope", "position_rope_scaling": scaling, "is_decoder": True}
    if scaling["rope_type"] in ("dynamic", "longrope"):
        with pytest.raises(ValueError, match="refused in decoders"):
            tiny.variant_config(**flags)
        return
    model = tiny.build(head="LMHeadModel", **flags)
    input_ids = tiny.inputs(batch=2, length=80, padding=None)["input_ids"]
    with torch.no_grad():
        whole = model(input_ids).logits
        prompt = model(input_ids[:, :70], use_cache=True)
        rest = model(input_ids[:, 70:], **{tiny.CACHE: getattr(prompt, tiny.CACHE)}).logits
    assert (whole - torch.cat([prompt.logits, rest], dim=1)).abs().max() < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scaling", [None, SCALINGS[2]], ids=["plain", "yarn"])
def test_half_precision_keeps_its_dtype_and_far_positions(dtype, scaling):
    model = tiny.build("rope", position_rope_scaling=scaling, initializer_range=0.1)
    inputs = tiny.inputs(padding=None)
    # Positions that neither half type could count: angles are computed before the cast.
    near, far = torch.arange(12)[None], torch.arange(12)[None] + 5000
    with torch.no_grad():
        single = model(**inputs, position_ids=near).last_hidden_state
        unrotated = model(**inputs, position_ids=torch.zeros_like(near)).last_hidden_state
        half = model.to(dtype)(**inputs, position_ids=far).last_hidden_state
    assert half.dtype == dtype
    error = (half.float() - single).abs().max()
    assert error < (0.02 if dtype == torch.float16 else 0.1)
    assert (single - unrotated).abs().max() > 2 * error


def test_autocast_rotates_in_the_dtype_of_the_projections():
    query, key = torch.randn(2, 1, 4, 5, 8, dtype=torch.bfloat16)
    scheme = scheme_of(tiny.build("rope"))
    cos, sin = torch.randn(2, 1, 1, 5, 4)
    context = AttentionContext(None, None, None, query, key, None, None, (cos, sin))
    for states, rotated in zip((query, key), scheme.rotate(context)):
        assert torch.equal(rotated, rotate_pairs(states.float(), cos, sin, "halves").bfloat16())


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_only_differences_of_positions_matter(layout):
    model = tiny.build("rope", family="roberta", position_layout=layout).double()
    tokens = tiny.inputs(batch=2, length=10, family="roberta", padding=None)
    padded = {
        "input_ids": nn.functional.pad(tokens["input_ids"], (4, 0), value=model.config.pad_token_id),
        "attention_mask": nn.functional.pad(tokens["attention_mask"], (4, 0)),
    }
    with torch.no_grad():
        plain = model(**tokens).last_hidden_state
        shifted = model(**tokens, position_ids=torch.arange(10)[None] + 1000).last_hidden_state
        stretched = model(**tokens, position_ids=torch.arange(10)[None] * 3).last_hidden_state
        on_the_left = model(**padded).last_hidden_state[:, 4:]
    # cos and sin have the dtype of the model: float64 all the way.
    assert (plain - shifted).abs().max() < 1e-9
    assert (plain - on_the_left).abs().max() < 1e-9
    assert (plain - stretched).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize(
    "scaling", [s for s in SCALINGS if s["rope_type"] in LENGTH_DEPENDENT], ids=lambda s: s["rope_type"]
)
def test_scalings_go_by_the_largest_position_as_in_llama(scaling, family):
    model = tiny.build("rope", family, position_rope_scaling=dict(scaling), position_base=500.0)
    scheme, first = scheme_of(model), model.config.first_position
    usable = model.config.max_position_embeddings - first
    theirs = LlamaRotaryEmbedding(llama(scaling, usable, 500.0))
    for highest in (20, usable - 1, usable, 200, 5000):
        places = torch.tensor([[0, 1, 2, highest], [0, 1, 2, 3]])
        positions = Positions(places + first, places + first, 0, contiguous=False, first=first)
        cos, sin = scheme.prepare(positions, torch.float32)
        expected = [table[..., :4] for table in theirs(torch.zeros(1), places)]
        torch.testing.assert_close([cos[:, 0], sin[:, 0]], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "scaling", [s for s in SCALINGS if s["rope_type"] in LENGTH_DEPENDENT], ids=lambda s: s["rope_type"]
)
def test_packed_documents_are_scaled_as_each_is_alone(scaling):
    model = tiny.build("rope", position_rope_scaling=dict(scaling))
    input_ids = tiny.inputs(batch=1, length=90, padding=None)["input_ids"]
    position_ids = torch.arange(30).repeat(3)[None]
    mask = torch.block_diag(*[torch.ones(30, 30)] * 3).bool()[None, None]
    with torch.no_grad():
        packed = model(input_ids, attention_mask=mask, position_ids=position_ids).last_hidden_state
        alone = [model(part).last_hidden_state for part in input_ids.split(30, dim=1)]
        whole = model(input_ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=TOLERANCE, rtol=0)
    assert (packed - whole).abs().max() > 100 * TOLERANCE


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: f"{scaling['rope_type']}-{len(scaling)}")
def test_scaled_frequencies_compile_in_one_graph(scaling):
    model = tiny.build("rope", position_rope_scaling=dict(scaling))
    inputs = tiny.inputs(length=80)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        found, expected = (each(**inputs).last_hidden_state for each in (compiled, model))
    assert tiny.difference_where_attended(found, expected, inputs["attention_mask"]) < TOLERANCE
