"""MPNet: its checkpoints' bias by distance is the scheme t5, beside what all families promise."""

import pytest
import torch
from tiny import FAMILIES, build, fill_positions, inputs, stock_config, variant_class, variant_config
from transformers import AutoConfig, AutoModel, MPNetForMaskedLM, MPNetModel, PreTrainedModel

from hf_posenc import position_parameters
from hf_posenc.modeling.schemes.table import SCHEMES, scheme_names


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")


LENGTH = 290  # beyond the largest distance that has a bucket of its own
KEY = "encoder.relative_attention_bias.weight"


@pytest.fixture
def stock() -> MPNetModel:
    """With a bias that is felt, and a table for LENGTH tokens."""
    model = MPNetModel(stock_config("mpnet", max_position_embeddings=LENGTH + 2)).eval()
    torch.nn.init.normal_(model.encoder.relative_attention_bias.weight)
    return model


@pytest.fixture
def folder(stock, tmp_path) -> str:
    stock.save_pretrained(tmp_path)
    return str(tmp_path)


@torch.no_grad()
def output(model, length: int = 12, **given) -> torch.Tensor:
    return model.eval()(**inputs(length=length, family="mpnet"), **given).last_hidden_state


@pytest.mark.parametrize("length", [12, LENGTH])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_the_native_composite_computes_what_stock_computes(stock, folder, implementation, length, said):
    model = AutoModel.from_pretrained(folder, position_scheme="absolute+t5", attn_implementation=implementation)
    batch = inputs(length=length, family="mpnet")
    with torch.no_grad():
        ours, theirs = (each(**batch, output_hidden_states=True) for each in (model, stock))
    attended = batch["attention_mask"].bool()
    for own, their in zip(
        (*ours.hidden_states, ours.last_hidden_state), (*theirs.hidden_states, theirs.last_hidden_state)
    ):
        assert (own - their)[attended].abs().max() < 1e-5
    assert (ours.pooler_output - theirs.pooler_output).abs().max() < 1e-5
    assert not said
    without = AutoModel.from_pretrained(folder, position_scheme="absolute")
    assert (output(without, length) - theirs.last_hidden_state)[attended].abs().max() > 1e-2


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("scheme", ["absolute+t5", "absolute"])
def test_weights_are_given_with_every_backend(stock, folder, implementation, scheme):
    """Stock gives them at once: it has no other backend than eager."""
    model = AutoModel.from_pretrained(folder, position_scheme=scheme, attn_implementation=implementation)
    ours = model(**inputs(family="mpnet"), output_attentions=True).attentions
    assert len(ours) == 2 and all(weights.shape == (3, 4, 12, 12) for weights in ours)
    assert torch.allclose(ours[0].sum(-1), torch.ones(3, 4, 12))
    theirs = stock(**inputs(family="mpnet"), output_attentions=True).attentions
    assert all(torch.allclose(own, their, atol=1e-5) for own, their in zip(ours, theirs)) == (scheme == "absolute+t5")


def test_gradients_are_those_of_stock(stock, folder):
    model = AutoModel.from_pretrained(folder, position_scheme="absolute+t5").eval()
    batch, weights = inputs(family="mpnet"), torch.randn(3, 12, 32)
    for each in (model, stock):
        (each(**batch).last_hidden_state * weights)[batch["attention_mask"].bool()].sum().backward()
    ours, theirs = dict(model.named_parameters()), dict(stock.named_parameters())
    assert ours.keys() == theirs.keys()
    for name in ours:
        if theirs[name].grad is not None:
            assert (ours[name].grad - theirs[name].grad).abs().max() < 1e-4 * max(1, theirs[name].grad.abs().max())
    assert theirs[KEY].grad.abs().max() > 1e-4


def test_position_ids_move_the_bias_as_well_unlike_in_stock(stock, folder):
    model = AutoModel.from_pretrained(folder, position_scheme="absolute+t5")
    batch = inputs(batch=1, family="mpnet", padding=None)
    position_ids = torch.arange(12)[None] * 3 + 2
    ours, theirs = (each(**batch, position_ids=position_ids).last_hidden_state for each in (model, stock))
    assert (ours - theirs).abs().max() > 1e-3
    # Stock's bias, were it told where the tokens are.
    stock.encoder.compute_position_bias = lambda hidden_states: _bias(stock.encoder, position_ids)
    theirs = stock(**batch, position_ids=position_ids).last_hidden_state
    assert (ours - theirs).abs().max() < 1e-5


def _bias(encoder, position_ids: torch.Tensor) -> torch.Tensor:
    relative = position_ids[:, None, :] - position_ids[:, :, None]
    return encoder.relative_attention_bias(encoder.relative_position_bucket(relative)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("scheme, lost, remedy", [
    ("absolute", "t5", "absolute+t5"),
    ("t5", "absolute", "absolute+t5"),
    ("absolute+deberta", "t5", "absolute+t5+deberta"),
    ("deberta", "absolute and t5", "absolute+t5+deberta"),
    ("none", "absolute and t5", None),
    ("sinusoidal", "absolute and t5", None),
])  # fmt: skip
def test_what_a_scheme_takes_away_is_said_once_with_a_true_remedy(stock, folder, scheme, lost, remedy, said):
    model = AutoModel.from_pretrained(folder, position_scheme=scheme)
    assert (KEY in model.state_dict()) == ("t5" in scheme.split("+"))
    if "t5" in scheme:
        assert torch.equal(model.encoder.relative_attention_bias.weight, stock.encoder.relative_attention_bias.weight)
    [line] = [line for line in said if "leaves out" in line]
    assert f"leaves out the {lost} positions that this checkpoint was trained with: fine-tune before use" in line
    assert ("keep them" in line) == (remedy is not None)
    if remedy:
        assert f"keep them with position_scheme={remedy!r}." in line
        assert (output(AutoModel.from_pretrained(folder, position_scheme=remedy)) - output(stock)).abs().max() < 1e-4
    AutoModel.from_pretrained(folder, position_scheme=scheme)
    assert len([line for line in said if "leaves out" in line]) == 1


def test_the_load_report_names_a_bias_that_a_checkpoint_lacks(tmp_path, transformers_said):
    model = MPNetForMaskedLM(stock_config("mpnet"))
    state = {key: value for key, value in model.state_dict().items() if not key.endswith(KEY)}
    model.save_pretrained(tmp_path, state_dict=state)
    variant_class("mpnet", "ForMaskedLM").from_pretrained(tmp_path, position_scheme="absolute+t5+deberta")
    [report] = [line for line in transformers_said if "LOAD REPORT" in line]
    assert KEY in report and "MISSING" in report and "rel_embeddings" not in report


def test_a_bias_that_a_variant_never_had_starts_silent(folder, tmp_path):
    AutoModel.from_pretrained(folder, position_scheme="absolute").save_pretrained(tmp_path / "absolute")
    before = output(AutoModel.from_pretrained(tmp_path / "absolute"))
    model = AutoModel.from_pretrained(tmp_path / "absolute", position_scheme="absolute+t5", position_buckets=8)
    assert (output(model) - before).abs().max() < 1e-5
    assert model.encoder.relative_attention_bias.weight.shape == (8, 4)
    fill_positions(model)
    expected = output(model)
    assert (expected - before).abs().max() > 1e-2
    model.save_pretrained(tmp_path / "other")
    assert torch.equal(output(AutoModel.from_pretrained(tmp_path / "other")), expected)


def test_from_scratch_the_bias_starts_as_stocks():
    torch.manual_seed(0)
    stock = MPNetModel(stock_config("mpnet"))
    model = variant_class("mpnet")(variant_config("mpnet"))
    for each in (stock, model):
        assert each.encoder.relative_attention_bias.weight.std().item() == pytest.approx(0.2, rel=0.2)
    assert KEY in position_parameters(model)


def test_every_flag_of_its_own_schemes_is_its_checkpoints_or_changes_nothing_of_theirs():
    family, without = (
        FAMILIES["mpnet"].family,
        {
            "position_init",
            "position_combine",
            "position_every_layer",
            "position_every_layer_weight",
            "position_stride",
            "position_width",
        },
    )
    own = {flag.name for name in scheme_names(family.native_scheme) for flag in SCHEMES[name].flags}
    assert own == {*family.native_flags} | without


@pytest.mark.parametrize("flags, named", [
    ({"position_buckets": 8}, "position_buckets=8 does not fit .* has 32"),
    ({"position_buckets": 64}, "position_buckets=64 does not fit"),
    ({"position_max_distance": 64}, "position_max_distance=64 does not fit .* has 128"),
    ({"position_per_layer": True}, "position_per_layer=True does not fit"),
])  # fmt: skip
def test_other_buckets_beside_the_trained_bias_are_refused_before_weights_load(folder, flags, named, monkeypatch):
    for scheme in ("absolute+t5", "t5+tupe"):
        for entry_point in (AutoModel, MPNetModel, AutoConfig):
            with pytest.raises(ValueError, match=named):
                entry_point.from_pretrained(folder, position_scheme=scheme, **flags)
    # The values that it has are no others.
    model = AutoModel.from_pretrained(
        folder, position_scheme="absolute+t5", position_buckets=32, position_max_distance=128, position_per_layer=False
    )
    assert model.encoder.relative_attention_bias.weight.abs().max() > 1


def test_a_table_per_layer_in_a_config_made_by_hand_is_refused_for_a_checkpoint_with_one(folder):
    config = variant_config("mpnet", position_per_layer=True, max_position_embeddings=LENGTH + 2)
    with pytest.raises(
        ValueError, match="one position embedding matrix for all layers for t5; load it without position_per_layer"
    ):
        AutoModel.from_pretrained(folder, config=config)


def test_positions_follow_the_padding_index_of_the_code_not_of_the_config():
    """Stock's embeddings say 1, whatever the config's `pad_token_id`."""
    config = variant_config("mpnet", pad_token_id=0)
    assert config.first_position == 2
    stock = MPNetModel(stock_config("mpnet", pad_token_id=0)).eval()
    model = variant_class("mpnet")(config)
    model.load_state_dict(stock.state_dict())
    assert (output(model) - output(stock)).abs().max() < 1e-5


def test_the_input_is_given_once():
    model = build("absolute+t5", "mpnet")
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model()
    batch = inputs(family="mpnet", padding=None)
    embeds = model.embeddings.word_embeddings(batch["input_ids"])
    assert torch.equal(model(inputs_embeds=embeds).last_hidden_state, model(**batch).last_hidden_state)


@pytest.mark.parametrize("implementation", [None, "sdpa", "flex_attention", "eager"])
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
def test_heads_get_their_backend_though_stock_base_models_refuse_it(head, implementation, monkeypatch):
    """Without the plugin's hooks a head builds a stock base model first."""
    monkeypatch.setattr(PreTrainedModel, "__new__", staticmethod(lambda cls, *args, **kwargs: object.__new__(cls)))
    config = variant_config("mpnet", position_scheme="absolute+t5", attn_implementation=implementation)
    model = variant_class("mpnet", head)(config)
    expected = implementation or "sdpa"
    assert model.config._attn_implementation == model.base_model.config._attn_implementation == expected
    model.set_attn_implementation("eager")
    assert model.base_model.config._attn_implementation == "eager"
