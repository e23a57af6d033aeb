"""How embedding-level positions join the word embedding, against the formulas written out."""

import pytest
import tiny
import torch
from transformers import BertModel


MODES = ["add", "concat", "gate", "attention"]


def reference(embeddings, mode: str, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The formulas of the combine modes, token by token."""
    out = torch.empty_like(words)
    width = words.shape[-1]
    linear = lambda layer, x: layer.weight @ x + layer.bias  # noqa: E731
    for place in range(words.shape[0]):
        w, p = words[place], positions[place]
        if mode == "add":
            out[place] = w + p
        elif mode == "concat":
            out[place] = linear(embeddings.position_projection, torch.cat([w, p]))
        elif mode == "gate":
            out[place] = w + 2 * torch.sigmoid(linear(embeddings.position_gate, torch.cat([w, p]))) * p
        else:
            query = linear(embeddings.position_query, w)
            scores = [query @ linear(embeddings.position_key, source) / width**0.5 for source in (w, p)]
            weights = torch.softmax(torch.stack(scores), dim=0)
            values = [linear(embeddings.position_value, source) for source in (w, p)]
            out[place] = weights[0] * values[0] + weights[1] * values[1]
    return out


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_combine_modes_compute_their_formulas(mode, family):
    model = tiny.build("absolute", family, position_combine=mode).double()
    embeddings = model.embeddings
    inputs = tiny.inputs(batch=1, length=7, family=family, padding=None)
    with torch.no_grad():
        # Some families have no token types.
        types = embeddings.token_type_embeddings.weight[0] if hasattr(embeddings, "token_type_embeddings") else 0.0
        words = embeddings.word_embeddings(inputs["input_ids"][0])
        positions = embeddings.position_embeddings.weight[torch.arange(7) + embeddings.first_position]
        joined = reference(embeddings, mode, words, positions) + types
        expected = embeddings.LayerNorm(joined)[None]
        torch.testing.assert_close(embeddings(inputs["input_ids"]), expected)
        if mode != "add":
            plain = embeddings.LayerNorm(words + positions + types)
            assert (expected[0] - plain).abs().max() > 1e-2


@pytest.mark.parametrize("mode", MODES)
def test_token_types_are_added_after_combining(mode):
    embeddings = tiny.build("absolute", position_combine=mode).embeddings.double()
    embeddings.LayerNorm = torch.nn.Identity()
    input_ids = tiny.inputs(batch=1, length=5, padding=None)["input_ids"]
    types = torch.tensor([[0, 0, 1, 1, 1]])
    with torch.no_grad():
        difference = embeddings(input_ids, token_type_ids=types) - embeddings(input_ids)
        table = embeddings.token_type_embeddings.weight
    expected = (table[1] - table[0]) * types[0, :, None]
    torch.testing.assert_close(difference[0], expected)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("scheme", ["absolute", "sinusoidal"])
def test_every_layer_but_the_first_gets_the_positions_again(scheme, family):
    model = tiny.build(scheme, family, position_every_layer=True, num_hidden_layers=3).double()
    inputs = tiny.inputs(batch=3, length=7, family=family)
    layers = tiny.FAMILIES[family].family.layers_of(tiny.FAMILIES[family].family.encoder_of(model))
    seen, given = [], []
    for layer in layers:
        layer.attention.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        layer.register_forward_hook(
            lambda module, args, output: given.append(output[0] if isinstance(output, tuple) else output)
        )
    with torch.no_grad():
        model(**inputs)
        embeddings = model.embeddings
        ids = embeddings.family_position_ids(inputs["input_ids"], 0) if scheme == "absolute" else None
        p = embeddings.position_vectors(ids, 7, 0, torch.device("cpu"))
        if hasattr(model, "embeddings_project"):
            p = p @ model.embeddings_project.weight.T
    for n in (1, 2):
        scale = layers[n].position_scale.weight
        assert abs(scale.item()) > 1e-3
        torch.testing.assert_close(seen[n], given[n - 1] + scale * p)


@pytest.mark.parametrize("weight", [0, 1.0, 12.5])
def test_before_every_layer_positions_start_with_the_weight_that_is_asked_for(weight, tmp_path):
    stock = BertModel(tiny.stock_config(num_hidden_layers=3)).double().eval()
    stock.save_pretrained(tmp_path)
    flags = {"position_every_layer": True, "position_every_layer_weight": weight}
    model = BertModel.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager", **flags).eval()
    ids = tiny.inputs(batch=2, length=6, padding=None)["input_ids"]
    with torch.no_grad():
        ours = model(ids).last_hidden_state
        states = stock.embeddings(ids)
        for number, layer in enumerate(stock.encoder.layer):
            if number:
                for place in range(6):
                    states[:, place] += weight * stock.embeddings.position_embeddings.weight[place]
            states = layer(states)
        torch.testing.assert_close(ours, states)
        assert weight == 0 or (ours - stock(ids).last_hidden_state).abs().max() > 1e-2
    config = model.config
    silent = [scheme(config).starts_silent() for scheme in config.schemes.values()]
    assert silent == [weight == 0]


@pytest.mark.parametrize("weight", [0, 1.0])
def test_what_a_checkpoint_computes_no_longer_is_said_once(weight, tmp_path, said):
    BertModel(tiny.stock_config()).save_pretrained(tmp_path)
    model = BertModel.from_pretrained(tmp_path, position_every_layer=True, position_every_layer_weight=weight)
    expected = [
        "position_every_layer_weight=1.0: the model computes something else than its checkpoint until it is fine-tuned."
    ]
    assert said == (expected if weight else [])
    said.clear()
    model.save_pretrained(tmp_path)
    BertModel.from_pretrained(tmp_path)
    assert not said


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("scheme", ["absolute", "sinusoidal"])
@pytest.mark.parametrize("every_layer", [False, True])
def test_words_and_positions_stand_side_by_side_in_features_of_their_own(scheme, family, every_layer):
    own = 8
    model = tiny.build(
        scheme, family, position_combine="concat", position_width=own, position_every_layer=every_layer
    ).double()
    embeddings, inputs = model.embeddings, tiny.inputs(batch=1, length=7, family=family, padding=None)
    assert not [name for name in model.state_dict() if "position_projection" in name]
    with torch.no_grad():
        words = embeddings.word_embeddings(inputs["input_ids"][0])
        width = words.shape[-1]
        joined, beside = words.clone(), torch.zeros_like(words)
        for place in range(7):
            for feature in range(width - own, width):
                if scheme == "absolute":
                    p = embeddings.position_embeddings.weight[place + embeddings.first_position, feature]
                else:
                    number = feature - (width - own)
                    angle = torch.tensor(place / 10000 ** (number // 2 * 2 / own), dtype=torch.float64)
                    p = embeddings.position_scale.weight[0] * (angle.cos() if number % 2 else angle.sin())
                joined[place, feature] = beside[place, feature] = p
        types = embeddings.token_type_embeddings.weight[0] if hasattr(embeddings, "token_type_embeddings") else 0.0
        torch.testing.assert_close(embeddings(inputs["input_ids"])[0], embeddings.LayerNorm(joined + types))
        torch.testing.assert_close(embeddings.position_vectors(None, 7, 0, torch.device("cpu"))[0], beside)
        assert beside.abs().max() > 1e-2 and (joined - words - beside).abs().max() > 1e-2


@pytest.mark.parametrize(
    "flags, why",
    [
        ({"position_width": 8}, "position_width=8 has no use with position_combine='add'"),
        ({"position_width": 32, "position_combine": "concat"}, "must be less than the 32 features"),
        (
            {"position_width": 24, "position_combine": "concat", "family": "electra"},
            "must be less than the 24 features",
        ),
        ({"position_every_layer_weight": 1.0}, "has no use without position_every_layer=True"),
    ],
)
@pytest.mark.parametrize("scheme", ["absolute", "sinusoidal"])
def test_widths_and_weights_that_do_not_fit_are_refused(scheme, flags, why):
    with pytest.raises(ValueError, match=why):
        tiny.variant_config(position_scheme=scheme, **flags)


def test_the_first_layer_has_no_scale_of_its_own():
    model = tiny.build("absolute", position_every_layer=True)
    assert not hasattr(model.encoder.layer[0], "position_scale")
    assert model.encoder.layer[1].position_scale.weight.shape == (1,)


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert"])
def test_sinusoids_count_slots_and_take_given_positions_without_the_offset(family):
    model = tiny.build("sinusoidal", family)
    inputs = tiny.inputs(batch=2, length=6, family=family, padding=None)
    with torch.no_grad():
        by_slot = model(**inputs).last_hidden_state
        first = model.embeddings.first_position
        given = model(**inputs, position_ids=(torch.arange(6) + first)[None]).last_hidden_state
    torch.testing.assert_close(by_slot, given)


def test_token_types_may_be_left_out_beyond_max_position_embeddings():
    model = tiny.build("sinusoidal")
    inputs = tiny.inputs(batch=2, length=100)
    with torch.no_grad():
        explicit = model(**inputs, token_type_ids=torch.zeros_like(inputs["input_ids"])).last_hidden_state
        torch.testing.assert_close(model(**inputs).last_hidden_state, explicit)


def test_inputs_embeds_take_the_place_of_the_word_embedding():
    for family in tiny.FAMILIES:
        model = tiny.build("absolute+t5", family, position_combine="gate")
        inputs = tiny.inputs(batch=2, length=6, family=family, padding=None)
        with torch.no_grad():
            embeds = model.get_input_embeddings()(inputs["input_ids"])
            expected = model(**inputs).last_hidden_state
            torch.testing.assert_close(model(inputs_embeds=embeds).last_hidden_state, expected)
