"""Configs: fields read off the schemes' flags, what is saved of them, and how one config becomes another."""

import copy
import dataclasses
import json
import pickle

import pytest
import tiny
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, BertConfig, BertModel

from hf_posenc.modeling.models import configuration_posenc, modeling_posenc
from hf_posenc.modeling.models.configuration_posenc import (
    check_flag,
    check_names,
    flags_in_use,
    override_flags,
)
from hf_posenc.modeling.schemes.table import FLAGS, SCHEMES, build_schemes


families = pytest.mark.parametrize("family", tiny.FAMILIES)


@families
def test_every_flag_is_a_field_that_is_not_given_at_first(family):
    config = tiny.FAMILIES[family]()
    fields = {field.name: field for field in dataclasses.fields(config)}
    assert FLAGS.keys() <= fields.keys()
    assert all(getattr(config, flag) is None for flag in FLAGS if flag != "position_scheme")
    assert config.position_scheme == config.family.native_scheme


@tiny.cross(scheme=SCHEMES, family=tiny.FAMILIES, strength=1)
def test_a_saved_config_has_the_flags_that_were_given_and_comes_back(scheme, family, tmp_path):
    flags = {flag.name: tiny.another_value(flag) for flag in SCHEMES[scheme].flags}
    # Values that do not go together, or with what a family's checkpoints have.
    flags.pop("position_max_distance", None)
    if "position_stride" in flags:
        flags.pop("position_every_layer")
        flags.pop("position_every_layer_weight")
    flags.pop("position_learn_amplitude", None)
    if "position_learn_frequencies" in flags:
        flags.pop("position_rope_scaling")
    if family == "mpnet" and scheme == "t5":
        flags.clear()
    config = tiny.variant_config(family, position_scheme=scheme, **flags)
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert {key for key in stored if key in FLAGS} == {"position_scheme", *flags}
    for again in (AutoConfig.from_pretrained(tmp_path), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(again) is type(config)
        assert {flag: getattr(again, flag) for flag in FLAGS} == {flag: getattr(config, flag) for flag in FLAGS}


def test_flags_in_use_are_those_of_the_schemes():
    of_all = {"position_scheme", "position_window", "position_global_every", "position_global_scheme"}
    assert flags_in_use("none") == of_all
    assert flags_in_use("absolute+t5") == of_all | {
        "position_combine",
        "position_every_layer",
        "position_every_layer_weight",
        "position_stride",
        "position_width",
        "position_init",
        "position_buckets",
        "position_max_distance",
        "position_per_layer",
    }


def test_another_scheme_leaves_behind_what_it_has_no_use_for(said):
    stored = {"position_scheme": "t5", "position_per_layer": True, "position_buckets": 8, "hidden_size": 32}
    entries = override_flags(stored, {"position_scheme": "deberta"})
    assert entries["position_per_layer"] is None and entries["position_buckets"] == 8 and entries["hidden_size"] == 32
    assert said == ["position_scheme='deberta' has no use for the stored position_per_layer: dropped."]
    assert stored["position_per_layer"] is True  # the caller's stays as it is


def test_a_flag_of_an_impossible_type_is_refused_by_name():
    for flag in FLAGS:
        with pytest.raises(TypeError, match=flag):
            check_flag(flag, object())


@pytest.mark.parametrize("name", ["postion_scheme", "position_shceme", "pos_scheme", "position_bucket"])
def test_misspelt_names_lead_to_the_right_ones(name):
    with pytest.raises(ValueError, match="unknown config option .* did you mean 'position_"):
        check_names([name])


@families
def test_adopting_keeps_the_object_and_its_entries(family):
    stock = tiny.stock_config(family)
    entries = {key: value for key, value in vars(stock).items() if not key.startswith("_")}
    adopted = tiny.FAMILIES[family].adopt(stock)
    assert adopted is stock and type(stock) is tiny.FAMILIES[family]
    assert entries.items() <= vars(stock).items()
    other = tiny.FAMILIES[family].adopt(stock, position_scheme="rope")
    assert other is not stock and other.position_scheme == "rope" and stock.position_scheme != "rope"


@pytest.fixture
def built(monkeypatch) -> list:
    """The configs that schemes are built of, from here on."""
    configs = []

    def counted(config):
        configs.append(config)
        return build_schemes(config)

    for module in (configuration_posenc, modeling_posenc):
        monkeypatch.setattr(module, "build_schemes", counted)
    monkeypatch.setattr(configuration_posenc, "_VALID", type(configuration_posenc._VALID)(maxlen=8))
    return configs


def test_schemes_are_built_to_validate_them_once_and_for_each_model_once(built, tmp_path):
    BertModel(tiny.stock_config()).save_pretrained(tmp_path / "stock")
    assert not built
    for auto in (AutoModel, AutoModelForSequenceClassification):
        configuration_posenc._VALID.clear()
        model = auto.from_pretrained(tmp_path / "stock", position_scheme="t5")
        assert len(built) == 2
        built.clear()
        model.save_pretrained(tmp_path / "saved")
        assert len(built) == 1
        built.clear()
        configuration_posenc._VALID.clear()
        auto.from_pretrained(tmp_path / "saved")
        assert len(built) == 2
        built.clear()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"position_buckets": 7}, "position_buckets"),
        ({"position_buckets": True}, "position_buckets"),
        ({"position_buckets": 32.0}, "position_buckets"),
        ({"position_stride": 2}, "position_stride"),
        ({"position_bucket": 32}, "did you mean"),
        ({"is_decoder": True, "position_max_distance": 16}, "position_max_distance"),
    ],
)
def test_a_config_that_was_valid_is_validated_anew_once_an_entry_has_changed(change, said, tmp_path):
    config = tiny.variant_config(position_scheme="t5", position_buckets=32)
    config.check_positions()
    vars(config).update(change)
    for use in (
        config.check_positions,
        lambda: config.save_pretrained(tmp_path),
        lambda: AutoModel.from_config(config),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            use()


def test_an_option_that_is_changed_in_its_place_is_validated_anew():
    config = BertConfig(position_scheme="rope", position_rope_scaling={"rope_type": "linear", "factor": 2.0})
    config.position_rope_scaling["rope_type"] = "nearly linear"
    with pytest.raises(ValueError, match="nearly linear"):
        config.check_positions()


def test_a_scheme_of_the_same_name_validates_anew(monkeypatch):
    config = tiny.variant_config(position_scheme="alibi")

    class Other(SCHEMES["alibi"]):
        def check(self, config):
            raise ValueError("no heads")

    monkeypatch.setitem(SCHEMES, "alibi", Other)
    with pytest.raises(ValueError, match="no heads"):
        config.check_positions()


def test_a_config_with_an_entry_that_is_no_plain_data_is_validated_each_time(built):
    config = tiny.variant_config(position_scheme="alibi", anything=object())
    built.clear()
    config.check_positions()
    config.check_positions()
    assert len(built) == 2
