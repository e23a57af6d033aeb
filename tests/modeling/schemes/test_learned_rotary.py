"""rope with learned frequencies and with a share of the features: the formula, an output-preserving start, float32, and a rate of its own."""

import pytest
import tiny
import torch
from transformers import BertModel, TrainingArguments
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

from hf_posenc import position_parameters, with_position_scheme
from hf_posenc.conversion.calibration import calibrate
from hf_posenc.conversion.converting import conversion_options
from hf_posenc.conversion.start import start
from hf_posenc.modeling.schemes.parameters import PositionFrequencies
from hf_posenc.modeling.schemes.positions import Positions
from hf_posenc.training import PositionTrainer, frequencies, tables_and_biases


HEADS = tiny.SIZES["num_attention_heads"]
HEAD_DIM = tiny.SIZES["hidden_size"] // HEADS
learned = pytest.mark.parametrize("learn", ["shared", "layer"])


def attention_by_formula(model, layer: int, hidden: torch.Tensor, scale: torch.Tensor, base: float) -> torch.Tensor:
    """Softmax of products of complex numbers, turned by i · a_k · base^(-2k/d), times the values: (batch, length, heads, head_dim)."""
    attention = model.encoder.layer[layer].attention.self
    query, key, value = (
        projection(hidden).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        for projection in (attention.query, attention.key, attention.value)
    )
    pairs = scale.shape[-1]
    angles = torch.arange(hidden.shape[1], dtype=hidden.dtype)[:, None, None] * (
        scale * base ** (-torch.arange(pairs, dtype=hidden.dtype) / pairs)
    ).expand(HEADS, pairs)
    turns = torch.polar(torch.ones_like(angles), angles).transpose(0, 1)  # (heads, length, pairs)

    def turned(states):
        numbers = torch.complex(states[..., :pairs], states[..., pairs : 2 * pairs]) * turns
        return torch.cat([numbers.real, numbers.imag, states[..., 2 * pairs :]], -1)

    scores = turned(query) @ turned(key).mT / HEAD_DIM**0.5
    return (scores.softmax(-1) @ value).transpose(1, 2)


@learned
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_it_is_the_formula_and_so_are_the_gradients(learn, fraction, backend):
    flags = {"position_learn_frequencies": learn, "position_rotary_fraction": fraction, "position_base": 100.0}
    model = tiny.build("rope", attn_implementation=backend, **flags).double()
    hidden = {}
    handle = model.encoder.layer[1].attention.self.register_forward_hook(
        lambda module, args, kwargs, output: hidden.update(
            given=args[0] if args else kwargs["hidden_states"], got=output[0]
        ),
        with_kwargs=True,
    )
    model(**tiny.inputs(padding=None))
    handle.remove()
    owner = model.encoder if learn == "shared" else model.encoder.layer[1].attention.self
    scale = owner.rotary_frequencies.weight
    assert scale.shape[-1] == HEAD_DIM * fraction / 2 and scale.abs().min() > 1e-4
    expected = attention_by_formula(model, 1, hidden["given"], scale, 100.0).flatten(2)
    torch.testing.assert_close(hidden["got"], expected, rtol=0, atol=1e-10)
    weights = torch.randn_like(expected)
    given = hidden["given"].detach()
    found = torch.autograd.grad((hidden["got"] * weights).sum(), scale)[0]
    if learn == "shared":  # what the layer below gets of it is no part of the formula
        attention = model.encoder.layer[1].attention.self
        state = {}
        attention.register_forward_pre_hook(lambda module, args, kwargs: state.update(kwargs), with_kwargs=True)
        model(**tiny.inputs(padding=None))
        again = attention(given, **{name: value for name, value in state.items() if name != "hidden_states"})[0]
        found = torch.autograd.grad((again * weights).sum(), scale)[0]
    wanted = torch.autograd.grad(
        (attention_by_formula(model, 1, given, scale, 100.0).flatten(2) * weights).sum(), scale
    )[0]
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    assert wanted.abs().max() > 1e-3


@learned
def test_with_absolute_it_starts_as_the_checkpoint_and_learns_from_the_first_step(learn):
    torch.manual_seed(0)
    original = BertModel(tiny.stock_config("bert")).eval()
    model = BertModel(
        tiny.stock_config("bert", position_scheme="absolute+rope", position_learn_frequencies=learn)
    ).eval()
    assert not model.load_state_dict(original.state_dict(), strict=False).unexpected_keys
    inputs = tiny.inputs()
    read = inputs["attention_mask"].bool()
    assert torch.equal(model(**inputs)[0][read], original(**inputs)[0][read])
    model(**inputs)[0][read].square().mean().backward()
    for name, parameter in position_parameters(model).items():
        assert not parameter.any() and parameter.grad.abs().min() > 0, name


@learned
def test_frequencies_stay_in_float32(learn, tmp_path):
    model = tiny.build("rope", position_learn_frequencies=learn)
    with torch.no_grad():
        for parameter in position_parameters(model).values():
            parameter.add_(1.0)
    exact = {name: value.clone() for name, value in position_parameters(model).items()}
    model.save_pretrained(tmp_path / "whole")
    halves = model.to(torch.bfloat16)
    halves.save_pretrained(tmp_path / "halves")
    for half in (
        halves,
        *(type(model).from_pretrained(tmp_path / name, dtype=torch.bfloat16) for name in ("whole", "halves")),
    ):
        assert half.get_input_embeddings().weight.dtype == torch.bfloat16
        for name, parameter in position_parameters(half).items():
            assert parameter.dtype == torch.float32 and torch.equal(parameter, exact[name]), name
    assert all(p.dtype == torch.float64 for p in position_parameters(model.double()).values())
    far = {"input_ids": torch.full((1, 12), 5), "position_ids": torch.arange(3000, 3012)[None]}
    assert halves.to(torch.bfloat16)(**far)[0].isfinite().all()


@learned
def test_angles_at_position_2047_are_those_of_single_precision(learn):
    """In bfloat16 only the cosine is rounded (2^-9 of 1, at most), and not the angle, of up to 2,047 radians."""
    model = tiny.build("rope", position_learn_frequencies=learn)
    with torch.no_grad():
        for parameter in position_parameters(model).values():
            parameter.add_(1.0)
    scheme, positions = model.encoder.position_schemes[0], Positions(*(torch.arange(2048)[None],) * 2, 0, True, 0)
    cosines = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model.to(dtype)
        owner = model.encoder if learn == "shared" else model.encoder.layer[0].attention.self
        places = scheme.prepare(positions, dtype)
        cosines.append(torch.stack(scheme._learned(places, owner.rotary_frequencies(), dtype)).double())
    exact, single, half = cosines
    assert (single - exact).abs().max() < 1e-3
    assert (half - single).abs().max() <= 2**-9
    # A frequency with the 8 bits of bfloat16 is radians off there.
    frequencies = owner.rotary_frequencies().bfloat16()
    rounded = scheme._learned(places, frequencies.float(), torch.float32)
    assert (torch.stack(rounded).double() - exact)[..., -1, :].abs().max() > 0.1
    with pytest.raises(ValueError, match="cast to torch.bfloat16"):
        scheme._learned(places, frequencies, torch.bfloat16)


@pytest.mark.slow
@learned
def test_training_on_2048_tokens_stays_finite_with_clipped_gradients(learn):
    """The gradient grows with the distance. Clipped, and at the rate that PositionTrainer gives, the loss falls and frequencies stay near."""
    model = tiny.build(
        "absolute+rope", head="ForMaskedLM", position_learn_frequencies=learn, max_position_embeddings=2048
    )
    with torch.no_grad():
        for name, parameter in position_parameters(model).items():
            if "rotary" in name:
                parameter.zero_()
    ids = torch.randint(5, 99, (1, 2048), generator=torch.Generator().manual_seed(0))
    of_rotary = [p for name, p in position_parameters(model).items() if "rotary" in name]
    others = [p for p in model.parameters() if not any(p is each for each in of_rotary)]
    groups = [{"params": others}, {"params": of_rotary, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=1e-3), []
    for _ in range(6):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(0 < parameter.abs().max() < 0.01 for parameter in of_rotary)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_a_share_of_the_features_is_rotated_as_in_gpt_neox(fraction):
    model = tiny.build("rope", position_rotary_fraction=fraction, hidden_size=64, num_attention_heads=4).double()
    attention, seen = model.encoder.layer[0].attention.self, {}
    rotate = type(attention).rotate

    def observed(query, key, *rest):
        seen["given"], result = (query, key), rotate(attention, query, key, *rest)
        seen["got"] = result[:2]
        return result

    attention.rotate = observed
    model(**tiny.inputs(padding=None))
    width = int(16 * fraction)
    steps = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(seen["given"][0].shape[2])[:, None] * torch.cat([steps, steps])
    parts = [states.tensor_split([width], -1) for states in seen["given"]]
    turned = apply_rotary_pos_emb(parts[0][0], parts[1][0], angles.cos()[None], angles.sin()[None])
    for found, own, (_, rest) in zip(seen["got"], turned, parts):
        torch.testing.assert_close(found, torch.cat([own, rest], -1), rtol=0, atol=1e-5)


def test_the_trainer_gives_frequencies_a_rate_of_their_own(tmp_path):
    model = tiny.build("t5+rope", position_learn_frequencies="shared")
    assert {*frequencies(model)} == {"encoder.rotary_frequencies.weight"}
    assert {*tables_and_biases(model)} == {"encoder.relative_attention_bias.weight"}
    trainer = PositionTrainer(
        model, TrainingArguments(tmp_path, weight_decay=0.1, report_to=[]), position_learning_rate=0.1
    )
    groups = trainer.create_optimizer().param_groups
    [own] = [group for group in groups for p in group["params"] if p is model.encoder.rotary_frequencies.weight]
    assert own["lr"] == 1e-3 and own["weight_decay"] == 0
    assert isinstance(model.encoder.rotary_frequencies, PositionFrequencies)


@learned
def test_a_conversion_starts_and_is_calibrated_as_with_rope(learn):
    torch.manual_seed(0)
    teacher = BertModel(tiny.stock_config("bert")).eval()
    batches = [{"input_ids": torch.randint(1, 90, (4, 24)), "attention_mask": torch.ones(4, 24, dtype=torch.long)}]
    flags = {"position_learn_frequencies": learn}
    flags |= conversion_options(teacher.config, "rope", flags, 64, 64)
    assert flags["position_init"] == "paper"
    students = [with_position_scheme(teacher, "rope", copy=True, **given) for given in ({}, flags)]
    for student in students:
        start(student, teacher, batches)
    plain, own = (student.eval()(**batches[0])[0] for student in students)
    torch.testing.assert_close(own, plain, rtol=0, atol=1e-5)
    for student in students:
        calibrate(student, teacher, batches, steps=2)
    assert all((parameter == 1).all() for parameter in frequencies(students[1]).values())
    calibrated, own = (student.eval()(**batches[0])[0] for student in students)
    assert (calibrated - plain).abs().max() > 1e-2
    torch.testing.assert_close(own, calibrated, rtol=0, atol=1e-3)


REFUSED = [
    ({"position_learn_frequencies": "all"}, "one of 'shared', 'layer'"),
    ({"position_init": "paper"}, "it belongs to position_learn_frequencies"),
    ({"position_rotary_fraction": 1.5}, "at most 1"),
    ({"position_rotary_fraction": 0.01}, "leave a pair"),
    (
        {"position_learn_frequencies": "shared", "position_rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "has no use with position_learn_frequencies",
    ),
]


@pytest.mark.parametrize("flags, message", REFUSED, ids=str)
def test_what_cannot_be_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        BertModel(tiny.stock_config("bert", position_scheme="rope", **flags))


@learned
def test_padding_packed_documents_and_a_cache_change_nothing(learn):
    flags = {"position_learn_frequencies": learn}
    model = tiny.build("rope", **flags)
    left, none = tiny.inputs(padding="left"), tiny.inputs(padding=None)
    for row, kept in enumerate(left["attention_mask"].bool()):
        alone = model(input_ids=left["input_ids"][row : row + 1, kept])[0][0]
        torch.testing.assert_close(model(**left)[0][row, kept], alone, rtol=0, atol=1e-5)
    decoder = tiny.build("rope", is_decoder=True, **flags)
    whole = decoder(input_ids=none["input_ids"])[0]
    first = decoder(input_ids=none["input_ids"][:, :5], use_cache=True)
    cached = getattr(first, "past_key_values", None)
    rest = decoder(input_ids=none["input_ids"][:, 5:], past_key_values=cached)[0]
    torch.testing.assert_close(rest, whole[:, 5:], rtol=0, atol=1e-5)


@pytest.mark.compiled
@learned
def test_it_compiles_in_one_graph_with_the_same_gradients(learn):
    model, inputs = tiny.build("rope", position_learn_frequencies=learn), tiny.inputs()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for each in (model, compiled):
        kept = each(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
        direction = torch.randn(kept.shape, generator=torch.Generator().manual_seed(0))
        gradients = torch.autograd.grad((kept * direction).sum(), [*frequencies(model).values()])
        assert all(gradient.abs().max() > 1e-3 for gradient in gradients)
        found.append((kept, *gradients))
    for own, expected in zip(*found):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
