"""Configs: fields read off the schemes' flags, what is saved of them, and how one config becomes another."""

import copy
import dataclasses
import json
import pickle

import pytest
import tiny
from transformers import AutoConfig

from hf_posenc.modeling.models.configuration_posenc import (
    check_flag,
    check_names,
    flags_in_use,
    override_flags,
)
from hf_posenc.modeling.schemes.table import FLAGS, SCHEMES


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
    of_all = {"position_scheme", "position_window", "position_global_every"}
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
