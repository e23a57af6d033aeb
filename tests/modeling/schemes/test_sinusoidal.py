"""sinusoidal: the closed form, tensor2tensor's form, the amplitude, and sequences of any length."""

import json
import math

import numpy as np
import pytest
import tiny
import torch
from transformers import BertModel, RobertaModel

from hf_posenc import position_parameters
from hf_posenc.modeling.schemes.sinusoidal import sinusoids


FAR = [0, 1, 2, 63, 511, 512, 4095, 8191, 8192]


@pytest.mark.parametrize("width", [24, 768, 7])
@pytest.mark.parametrize("base", [10000.0, 123.0])
def test_interleaved_is_the_closed_form_up_to_position_8192(base, width):
    ours = sinusoids(torch.tensor(FAR), width, base, "interleaved", torch.float32)
    assert ours.dtype == torch.float32 and ours.shape == (len(FAR), width)
    for row, position in zip(ours.tolist(), FAR):
        for feature, value in enumerate(row):
            angle = position / base ** ((feature - feature % 2) / width)
            assert abs(value - (math.cos(angle) if feature % 2 else math.sin(angle))) < 1e-7


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_the_frequency_multiplies_all_angles(layout):
    ours = sinusoids(torch.tensor(FAR), 24, 123.0, layout, torch.float64, frequency=2.0)
    twice = sinusoids(2 * torch.tensor(FAR), 24, 123.0, layout, torch.float64)
    assert (ours - twice).abs().max() < 1e-9
    once = sinusoids(torch.tensor(FAR), 24, 123.0, layout, torch.float64)
    assert (ours - once).abs().max() > 0.5


def test_angles_in_single_precision_would_show():
    frequencies = 10000.0 ** (-torch.arange(0, 768, 2, dtype=torch.float32) / 768)
    single = (torch.tensor(FAR, dtype=torch.float32)[:, None] * frequencies).sin()
    ours = sinusoids(torch.tensor(FAR), 768, 10000.0, "interleaved", torch.float32)
    assert (single - ours[:, ::2]).abs().max() > 1e-4


def timing_signal(length: int, channels: int, longest: float) -> np.ndarray:
    """tensor2tensor's signal: sines then cosines of timescales in geometric progression from 1 to `longest`."""
    timescales = np.geomspace(1.0, longest, channels // 2)
    angles = np.arange(length, dtype=np.float64)[:, None] / timescales[None, :]
    return np.pad(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), [(0, 0), (0, channels % 2)])


@pytest.mark.parametrize("width", [24, 768, 7])
@pytest.mark.parametrize("base", [10000.0, 123.0])
def test_halves_is_the_signal_of_tensor2tensor(base, width):
    ours = sinusoids(torch.arange(8193), width, base, "halves", torch.float64).numpy()
    assert np.abs(ours - timing_signal(8193, width, base)).max() < 1e-9
    interleaved = sinusoids(torch.arange(8193), width, base, "interleaved", torch.float64).numpy()
    assert np.abs(ours - interleaved).max() > 1


def positions_added(model, length: int, position_ids: torch.Tensor | None = None) -> torch.Tensor:
    """The vectors (length, width) that the model puts beside its word embeddings."""
    with torch.no_grad():
        return model.embeddings.position_vectors(position_ids, length, 0, torch.device("cpu"))[0]


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
@pytest.mark.parametrize(
    "flags", [{}, {"position_layout": "halves"}, {"position_base": 50.0}, {"position_frequency": 2.0}], ids=str
)
def test_embeddings_are_words_plus_scaled_sinusoids(family, flags):
    model = tiny.build("sinusoidal", family=family, **flags)
    embeddings, inputs = model.embeddings, tiny.inputs(family=family, length=100, padding="left")
    width = embeddings.word_embeddings.embedding_dim
    base, layout = flags.get("position_base", 10000.0), flags.get("position_layout", "interleaved")
    signal = sinusoids(torch.arange(100), width, base, layout, torch.float32, flags.get("position_frequency", 1.0))
    with torch.no_grad():
        words = embeddings.word_embeddings(inputs["input_ids"]) + embeddings.token_type_embeddings.weight[0]
        ours = embeddings(inputs["input_ids"])
        assert (ours - embeddings.LayerNorm(words + embeddings.position_scale.weight * signal)).abs().max() < 1e-5
        assert (ours - embeddings.LayerNorm(words)).abs().max() > 1e-3


KEY = "embeddings.position_scale.weight"


@pytest.mark.parametrize("learned", [False, True])
def test_the_amplitude_starts_where_its_rms_is_that_of_learned_tables(learned, tmp_path):
    BertModel(tiny.stock_config(initializer_range=0.02)).save_pretrained(tmp_path)
    learn = {"position_learn_amplitude": True} if learned else {}

    def starting(**flags) -> tuple[float, float]:
        model = BertModel.from_pretrained(tmp_path, position_scheme="sinusoidal", **learn, **flags)
        assert list(position_parameters(model)) == [KEY] * learned
        assert KEY in model.state_dict() and model.embeddings.position_scale.weight.shape == (1,)
        assert model.embeddings.position_scale.weight.requires_grad == learned
        rms = positions_added(model, 500).square().mean().sqrt().item()
        return model.embeddings.position_scale.weight.item(), rms

    scale, rms = starting()
    assert abs(scale - 0.02 * math.sqrt(2)) < 1e-7
    assert abs(rms - 0.02) < 1e-6
    scale, rms = starting(position_layout="halves")
    assert abs(rms - 0.02) < 1e-6
    scale, rms = starting(position_amplitude=1.0)
    assert scale == 1 and abs(rms - math.sqrt(0.5)) < 1e-6


@pytest.mark.parametrize("combine", ["add", "gate", "attention"])
def test_a_checkpoint_in_which_the_amplitude_was_learned_computes_what_it_did(combine, tmp_path):
    """Its config has no flag that says so: they were all learned."""
    old = tiny.build("sinusoidal", position_combine=combine, position_learn_amplitude=True).eval()
    assert abs(old.embeddings.position_scale().item() - tiny.SIZES["initializer_range"] * math.sqrt(2)) > 1e-2
    old.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    entries = json.loads(config.read_text(encoding="utf-8"))
    assert entries.pop("position_learn_amplitude")
    config.write_text(json.dumps(entries), encoding="utf-8")
    new, said = type(old).from_pretrained(tmp_path, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    assert not new.embeddings.position_scale.weight.requires_grad
    with torch.no_grad():
        expected = old(**tiny.inputs()).last_hidden_state
        assert torch.equal(new.eval()(**tiny.inputs()).last_hidden_state, expected)
        new.embeddings.position_scale.weight.zero_()
        assert (new(**tiny.inputs()).last_hidden_state - expected).abs().max() > 1e-3


def test_amplitude_zero_starts_as_no_positions_and_learns():
    model, none = tiny.build("sinusoidal", position_amplitude=0.0), tiny.build("none")
    torch.nn.init.zeros_(model.embeddings.position_scale.weight)  # `build` has filled it
    none.load_state_dict(model.state_dict(), strict=False)
    inputs = tiny.inputs()
    output = model(**inputs).last_hidden_state
    assert torch.equal(output, none(**inputs).last_hidden_state)
    output[inputs["attention_mask"].bool()].pow(3).sum().backward()
    assert model.embeddings.position_scale.weight.grad.abs() > 1e-3


def test_concatenated_the_amplitude_is_a_constant_under_the_same_key(tmp_path):
    """The projection scales positions by itself, and a learned factor beside it would move all that it computes at once."""
    model = tiny.build("sinusoidal", position_combine="concat")
    assert KEY in model.state_dict() and KEY not in dict(model.named_parameters())
    assert list(position_parameters(model)) == [
        f"embeddings.position_projection.{part}" for part in ("weight", "bias")
    ]
    amplitude = tiny.variant_config().initializer_range * math.sqrt(2)
    assert model.embeddings.position_scale().item() == pytest.approx(amplitude)
    # A checkpoint in which it was learned.
    with torch.no_grad():
        model.embeddings.position_scale.weight.fill_(0.7)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert again.embeddings.position_scale().item() == pytest.approx(0.7)
    with torch.no_grad():
        assert torch.equal(again(**tiny.inputs())[0], model.eval()(**tiny.inputs())[0])


@pytest.mark.parametrize(
    "flags, why",
    [
        ({"position_combine": "concat"}, "position_amplitude=0 no position would ever be added"),
        ({"position_learn_amplitude": False}, "position_amplitude=0 no position would ever be added"),
        ({"position_combine": "concat", "position_learn_amplitude": True}, "position_learn_amplitude has no use"),
    ],
)
def test_an_amplitude_of_zero_that_is_never_trained_is_refused(flags, why):
    with pytest.raises(ValueError, match=why):
        tiny.variant_config(position_scheme="sinusoidal", position_amplitude=0, **flags)


def test_any_length_is_read():
    model = tiny.build("sinusoidal")
    assert "embeddings.position_embeddings.weight" not in model.state_dict()
    length = 5 * tiny.SIZES["max_position_embeddings"]
    inputs = tiny.inputs(batch=1, length=length)
    with torch.no_grad():
        output = model(**inputs).last_hidden_state
        inputs["input_ids"] = inputs["input_ids"].flip(1)
        assert (model(**inputs).last_hidden_state.flip(1) - output).abs().max() > 1e-3
    assert output.isfinite().all() and output.shape[1] == length


@pytest.mark.parametrize("family, first", [("bert", 0), ("roberta", 2), ("xlm-roberta", 2), ("camembert", 2)])
def test_given_positions_count_from_the_first_of_the_family(family, first):
    model = tiny.build("sinusoidal", family=family)
    slots = torch.arange(12)[None]
    assert torch.equal(positions_added(model, 12), positions_added(model, 12, slots + first))
    signal = sinusoids(torch.tensor([7, 3, 8000]), 32, 10000.0, "interleaved", torch.float32)
    given = positions_added(model, 3, torch.tensor([[7, 3, 8000]]) + first)
    assert torch.allclose(given, model.embeddings.position_scale.weight * signal)


def test_a_cache_continues_to_count():
    model = tiny.build("sinusoidal", head="LMHeadModel", is_decoder=True)
    input_ids = tiny.inputs(batch=2, padding=None)["input_ids"]
    with torch.no_grad():
        whole = model(input_ids).logits
        cache, steps = None, []
        for token in input_ids.split(1, dim=1):
            output = model(token, **{tiny.CACHE: cache}, use_cache=True)
            cache = getattr(output, tiny.CACHE)
            steps.append(output.logits)
        model.bert.embeddings.position_scale.weight.zero_()
        assert (model(input_ids).logits - whole).abs().max() > 1e-3
    assert (torch.cat(steps, dim=1) - whole).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_casts_sines_not_positions(dtype, tmp_path):
    RobertaModel(tiny.stock_config("roberta")).save_pretrained(tmp_path)
    model = RobertaModel.from_pretrained(tmp_path, position_scheme="sinusoidal", position_amplitude=1.0, dtype=dtype)
    added = positions_added(model, 8193)
    assert added.dtype == dtype
    exact = sinusoids(torch.arange(8193), 32, 10000.0, "interleaved", torch.float64)
    assert torch.equal(added, exact.to(dtype))


@pytest.mark.parametrize(
    "flags",
    [
        {"position_base": 1.0},
        {"position_amplitude": -1.0},
        {"position_layout": "thirds"},
        {"position_frequency": 0},
        {"position_frequency": 3.2},
    ],
)
def test_flags_out_of_range_are_refused_by_name(flags):
    with pytest.raises(ValueError, match=next(iter(flags))):
        tiny.variant_config(position_scheme="sinusoidal", **flags)
