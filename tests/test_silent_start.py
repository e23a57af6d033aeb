"""Promise 5: a scheme added to what a checkpoint has changes nothing at the start, and then learns."""

import pytest
import torch
from tiny import (
    FAMILIES,
    aligned,
    build,
    cross,
    fill_positions,
    heads,
    inputs,
    schemes_beside,
    stock_config,
    variant_class,
)
from torch import nn
from transformers import AutoModel, AutoModelForMaskedLM, BertModel, PreTrainedModel

from hf_posenc import position_parameters
from hf_posenc.modeling.models.embeddings import COMBINE
from hf_posenc.modeling.schemes.table import SCHEMES


TOLERANCE = 5e-6  # rounding: attention with position terms sums in another order
# Flags that keep the function of a checkpoint with absolute positions, in all the ways there are to start at zero.
SILENT = {
    "absolute+t5": {},
    "absolute+t5, per layer": {"position_per_layer": True},
    "absolute+relative": {},
    "absolute+relative, keys only": {"position_on_values": False},
    "absolute+relative_key": {},
    "absolute+relative_key_query": {},
    "absolute+transformer_xl": {},
    "absolute+tupe": {},
    "absolute+tupe+t5": {},
    "absolute+deberta": {},
    "absolute+deberta, all types": {"position_attention_types": ["c2p", "p2c", "p2p"]},
    "absolute+deberta, norm": {"position_norm": True},
    "absolute+deberta, own projections": {"position_share_projections": False},
    "absolute+deberta, own projections, norm": {"position_share_projections": False, "position_norm": True},
    "absolute+deberta, own projections, all types": {
        "position_share_projections": False,
        "position_attention_types": ["c2p", "p2c", "p2p"],
    },
    "absolute+relative+t5+deberta": {},
    "absolute": {},
    "absolute, concat": {"position_combine": "concat"},
    "absolute, gate": {"position_combine": "gate"},
    "absolute, attention": {"position_combine": "attention"},
    "absolute, every layer": {"position_every_layer": True},
    "absolute+t5, every layer, gate": {"position_every_layer": True, "position_combine": "gate"},
}
LOUD = {
    "absolute+rope": {},
    "absolute+alibi": {},
    "absolute+alibi+rope": {},
    "absolute+deberta, paper": {"position_form": "paper"},
    "absolute+disentangled, paper": {"position_form": "paper"},
    "absolute+tupe, paper": {"position_form": "paper"},
}
for name in schemes_beside([case.split(",")[0].replace("disentangled", "deberta") for case in SILENT | LOUD]):
    if name not in ("none", "sinusoidal"):
        (SILENT if SCHEMES[name].silent else LOUD)[f"absolute+{name}"] = {}
# Schemes small enough to tell apart in models of 12 tokens.
SMALL = {"t5": {"position_buckets": 8, "position_max_distance": 16}, "relative": {"position_max_distance": 4}}
SMALL["deberta"] = {"position_buckets": 8, "position_max_distance": 16}


def flags_of(case: str, flags: dict) -> dict:
    scheme = case.split(",")[0]
    small = next((SMALL[name] for name in SMALL if name in scheme.split("+")), {})
    return {"position_scheme": scheme, **small, **flags}


SILENT_FLAGS = {case: flags_of(case, flags) for case, flags in SILENT.items()}
LOUD_FLAGS = {case: flags_of(case, flags) for case, flags in LOUD.items()}


def silent_flags(family: str, case: str) -> dict:
    """The flags of a case, with all that checkpoints of the family were trained with; MPNet's table is as it is."""
    flags, native = SILENT_FLAGS[case], FAMILIES[family].family
    if native.native_scheme == "absolute":
        return flags
    added = [name for name in flags["position_scheme"].split("+") if name not in native.native_scheme.split("+")]
    scheme = "+".join([native.native_scheme, *added])
    return {**{flag: flags[flag] for flag in flags if flag not in native.native_flags}, "position_scheme": scheme}


@torch.no_grad()
def hidden_states(model: PreTrainedModel, family: str = "bert") -> torch.Tensor:
    """All layers' outputs at the tokens that are not padding."""
    batch = inputs(family=family)
    states = torch.stack(model.eval()(**batch, output_hidden_states=True).hidden_states)
    return states[:, batch["attention_mask"].bool()]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, tuple[str, PreTrainedModel]]:
    """Of every family a stock checkpoint with a language-model head, and the model."""
    made = {}
    for family in FAMILIES:
        torch.manual_seed(0)
        stock = next(cls for cls in heads(family) if cls.__name__.endswith("ForMaskedLM"))
        model = stock(stock_config(family)).eval()
        folder = str(tmp_path_factory.mktemp(family))
        model.save_pretrained(folder)
        made[family] = folder, model
    return made


def test_every_scheme_is_among_the_cases():
    tried = {name for flags in (SILENT_FLAGS | LOUD_FLAGS).values() for name in flags["position_scheme"].split("+")}
    assert {"deberta" if name == "disentangled" else name for name in tried} == {*SCHEMES} - {"none", "sinusoidal"}
    assert {flags.get("position_combine", "add") for flags in SILENT.values()} == {*COMBINE}


@cross(
    case=SILENT,
    family=FAMILIES,
    # How a family differs does not depend on the scheme, but for what MPNet's checkpoints have of their own.
    where=lambda case, family: (
        family in ("bert", "mpnet")
        or case in ("absolute+t5", "absolute+relative", "absolute+deberta", "absolute, gate")
    ),
    rest=pytest.mark.slow,
)
def test_a_silent_scheme_keeps_the_function_of_the_checkpoint(family, case, checkpoints, said):
    folder, stock = checkpoints[family]
    expected = hidden_states(stock, family)
    flags = silent_flags(family, case)
    model = AutoModelForMaskedLM.from_pretrained(folder, **flags)
    if family == "mpnet" and "tupe" in flags["position_scheme"]:
        # Beside tupe the bias that MPNet has for [CLS] is 0: nothing starts silent there, and that is said.
        [line] = said
        assert ": tupe cannot start output-preserving" in line
        assert (hidden_states(model, family) - expected).abs().max() > 1e-2
        return
    assert not said
    scale = expected.abs().max()
    assert (hidden_states(model, family) - expected).abs().max() <= TOLERANCE * scale
    if position_parameters(model):
        fill_positions(model)
        assert (hidden_states(model, family) - expected).abs().max() > 100 * TOLERANCE * scale


@pytest.mark.parametrize("case", LOUD)
def test_what_cannot_start_silent_says_so_once(case, checkpoints, said, tmp_path):
    folder, stock = checkpoints["bert"]
    model = AutoModelForMaskedLM.from_pretrained(folder, **LOUD_FLAGS[case])
    [line] = said
    assert "cannot start output-preserving" in line and "fine-tune" in line
    named = [name for name in ("rope", "alibi", "deberta", "tupe") if name in line.split("silent")[0].split(":")[1]]
    scheme = LOUD_FLAGS[case]["position_scheme"].replace("disentangled", "deberta")
    assert named == sorted(scheme.split("+")[1:], reverse=True)
    assert (hidden_states(model) - hidden_states(stock)).abs().max() > 1e-2

    AutoModelForMaskedLM.from_pretrained(folder, **LOUD_FLAGS[case])
    # A saved one was trained with it; a new model has no checkpoint to differ from.
    model.save_pretrained(tmp_path)
    AutoModelForMaskedLM.from_pretrained(tmp_path)
    AutoModelForMaskedLM.from_pretrained(tmp_path, config=model.config.from_pretrained(tmp_path))
    AutoModel.from_config(model.config)
    assert said == [line]


def test_only_what_is_new_to_a_saved_variant_is_said(checkpoints, said, tmp_path):
    model = AutoModelForMaskedLM.from_pretrained(checkpoints["bert"][0], position_scheme="absolute+rope")
    model.save_pretrained(tmp_path)
    del said[:]
    AutoModelForMaskedLM.from_pretrained(tmp_path, position_scheme="absolute+rope+t5")
    assert not said
    AutoModelForMaskedLM.from_pretrained(tmp_path, position_scheme="absolute+rope+alibi")
    [line] = said
    assert ": alibi cannot start output-preserving" in line


@pytest.mark.parametrize(
    "flags",
    [
        {"position_scheme": "rope+t5"},
        {"position_scheme": "t5", "position_window": 4, "position_global_scheme": "rope"},
    ],
)
def test_a_published_start_beside_rope_is_loaded(flags, tmp_path):
    """Alone, as in the checkpoint, rope has no use for `position_init`."""
    build("rope").save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, position_init="paper", **flags)
    assert model.encoder.relative_attention_bias.weight.any()


@pytest.mark.parametrize(
    "case", [case for case in SILENT if case not in ("absolute", "absolute+t5, every layer, gate")]
)
def test_position_init_reference_is_not_silent_and_says_so(case, checkpoints, said):
    folder, stock = checkpoints["bert"]
    flags = {**SILENT_FLAGS[case], "position_init": "paper"}
    if "+" not in case:  # how positions join the words has one start: addition
        with pytest.raises(ValueError, match="position_init='paper' has no use with position_scheme='absolute'"):
            AutoModelForMaskedLM.from_pretrained(folder, **flags)
        return
    model = AutoModelForMaskedLM.from_pretrained(folder, **flags)
    assert (hidden_states(model) - hidden_states(stock)).abs().max() > 1e-2
    [line] = said
    names = " and ".join(flags["position_scheme"].split("+")[1:])
    assert f": {names} cannot start output-preserving with position_init='paper'; " in line and "fine-tuned" in line


# Softmax does not see what it finds in every score of a query. These are there for the formulas.
WITHOUT_EFFECT = ("cls_to_others.weight", "pos_key_proj.bias", "position_key.bias")


@cross(case=[case for case in SILENT if case != "absolute"], family=["bert", "electra"], strength=1)
def test_every_position_parameter_learns_from_the_second_step_on(family, case, checkpoints):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_pretrained(checkpoints[family][0], **SILENT_FLAGS[case]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = inputs(length=24, family=family)
    batch["labels"] = inputs(length=24, family=family, seed=1)["input_ids"]
    parameters = position_parameters(model)
    assert parameters
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        gradients = {name: parameter.grad.abs().max().item() for name, parameter in parameters.items()}
        optimizer.step()
    idle = [name for name, largest in gradients.items() if largest < 1e-7]
    assert all(name.endswith(WITHOUT_EFFECT) for name in idle), gradients
    before = hidden_states(model, family)
    for name in idle:
        nn.init.normal_(parameters[name])
    assert (hidden_states(model, family) - before).abs().max() < 1e-4


@cross(combine=COMBINE, family=[*FAMILIES, "minilm"], strength=1)
def test_every_way_of_combining_starts_as_the_sum_of_word_and_position(family, combine, checkpoints, minilm):
    """Before token types and LayerNorm, against the tables themselves."""
    folder = minilm if family == "minilm" else checkpoints[family][0]
    stock = AutoModel.from_pretrained(folder).embeddings
    model = AutoModel.from_pretrained(folder, position_scheme="absolute", position_combine=combine)
    embeddings = model.embeddings
    ids = torch.arange(5, 55).view(2, 25)
    first = model.config.first_position
    words = stock.word_embeddings(ids)
    positions = stock.position_embeddings.weight[first : first + 25][None]
    combined = embeddings.position_combine.combine(embeddings, words, positions)
    assert (combined - (words + positions)).abs().max() <= TOLERANCE
    assert positions.abs().max() > 100 * TOLERANCE

    # The same where the model does it: what reaches the LayerNorm.
    seen = []
    for module in (stock, embeddings):
        module.LayerNorm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        module(ids)
    assert (seen[0] - seen[1]).abs().max() <= TOLERANCE

    fill_positions(model)
    combined = embeddings.position_combine.combine(embeddings, words, positions)
    if combine != "add":
        assert (combined - (words + positions)).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("flags", [
    {"position_scheme": "absolute+t5"},
    {"position_scheme": "absolute+deberta"},
    {"position_combine": "concat"},
    {"position_combine": "gate"},
    {"position_combine": "attention"},
    {"position_every_layer": True},
], ids=lambda flags: "-".join(map(str, flags.values())))  # fmt: skip
@pytest.mark.slow
def test_a_pretrained_model_computes_what_it_did(flags, minilm):
    batch = {"input_ids": torch.arange(1000, 1064).view(2, 32)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, 20:] = 0
    with torch.no_grad():
        expected = AutoModel.from_pretrained(minilm)(**batch).last_hidden_state
        model = AutoModel.from_pretrained(minilm, **flags)
        assert (model(**batch).last_hidden_state - expected).abs().max() < 1e-5
        fill_positions(model)
        assert (model(**batch).last_hidden_state - expected).abs().max() > 1e-2


@pytest.mark.slow
def test_new_models_start_as_those_from_a_checkpoint(checkpoints):
    """`from_config` and `BertModel(config)` initialise as `from_pretrained` does."""
    for case, flags in SILENT_FLAGS.items():
        loaded = AutoModel.from_pretrained(checkpoints["bert"][0], **flags)
        made = BertModel(stock_config(**flags))
        for name, parameter in position_parameters(loaded).items():
            other = made.get_parameter(name)
            assert bool(parameter.any()) == bool(other.any()), (case, name)
            if not parameter.any() or parameter.unique().numel() == 2:  # zeros, identities, ones
                assert torch.equal(parameter, other), (case, name)


def test_initialising_again_keeps_what_was_loaded(tmp_path):
    """Filling in a missing head must not touch positions that are in the checkpoint."""
    model = build("absolute+t5")
    model.save_pretrained(tmp_path)
    again = variant_class("bert", "ForTokenClassification").from_pretrained(tmp_path)
    assert isinstance(again.classifier, nn.Linear)
    trained = model.encoder.relative_attention_bias.weight
    assert trained.any() and torch.equal(again.bert.encoder.relative_attention_bias.weight, trained)


def test_absolute_positions_added_to_a_variant_without_start_silent(tmp_path, said):
    trained = build("t5")
    trained.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = trained(**inputs()).last_hidden_state
        model = aligned(AutoModel.from_pretrained(tmp_path, position_scheme="absolute+t5"))
        assert torch.equal(model(**inputs()).last_hidden_state, expected)
    assert not any("cannot start output-preserving" in line for line in said)
    model(**inputs()).last_hidden_state.square().mean().backward()
    assert model.embeddings.position_embeddings.weight.grad.any()


def test_absolute_positions_that_a_checkpoint_never_read_are_said_not_to_be_silent(tmp_path, said):
    """transformers 4 wrote a table beside its relative schemes, and did not read it."""
    model = variant_class("bert")(stock_config(position_scheme="absolute+relative_key"))
    model.save_pretrained(tmp_path)
    stored = tmp_path / "config.json"
    stored.write_text(stored.read_text().replace("absolute+relative_key", "relative_key"))
    AutoModel.from_pretrained(tmp_path, position_scheme="absolute+relative_key")
    assert any("absolute cannot start output-preserving" in line for line in said)


def test_tupe_is_said_not_to_be_silent_beside_a_bias_that_was_trained(tmp_path, said):
    model = build("absolute+t5")
    model.save_pretrained(tmp_path)
    before = hidden_states(AutoModel.from_pretrained(tmp_path))
    assert not said
    with_tupe = AutoModel.from_pretrained(tmp_path, position_scheme="absolute+t5+tupe")
    assert (hidden_states(with_tupe) - before).abs().max() > 1e-2
    [line] = said
    assert ": tupe cannot start output-preserving" in line
