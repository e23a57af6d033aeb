"""Promise 6: nothing is dropped in silence, and nothing is there that is not used."""

import itertools
import json
import re
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny import (
    FAMILIES,
    another_value,
    build,
    fill_positions,
    heads,
    inputs,
    stock_config,
    variant_class,
    variant_config,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    BertModel,
)

from hf_posenc import position_parameters
from hf_posenc.modeling.models.configuration_posenc import FLAGS
from hf_posenc.modeling.schemes.table import ALL, SCHEMES


LEFT_OUT = "leaves out the absolute positions that this checkpoint was trained with"
FLAGS_OF = {name: {flag.name: flag for flag in scheme.flags} for name, scheme in SCHEMES.items()}
PAIRS = [(flag, scheme) for flag in FLAGS if flag != "position_scheme" for scheme in SCHEMES]


@pytest.fixture(scope="module")
def stock_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("stock")
    torch.manual_seed(0)
    BertModel(stock_config()).save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def outputs(model, family: str = "bert") -> torch.Tensor:
    return model.eval()(**inputs(family=family)).to_tuple()[0]


# Flag and scheme -> those without which it has no use there.
NEEDED_IN = {("position_init", "rope"): {"position_learn_frequencies": "shared"}}


class TestAbsolutePositions:
    @pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "absolute"])
    def test_leaving_them_out_is_said_once_in_one_sentence(self, scheme, stock_folder, said, transformers_said):
        for _ in range(2):
            AutoModel.from_pretrained(stock_folder, position_scheme=scheme)
        [line] = [line for line in said if "absolute" in line]
        assert line.startswith(f"position_scheme={scheme!r} {LEFT_OUT}: fine-tune before use")
        assert line.count(". ") == 0 and line.endswith(".")
        # One voice is enough: the table of missing and unexpected keys does not list them as well.
        assert not any("position_embeddings" in entry for entry in transformers_said)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_families_and_heads_say_it_too(self, family, tmp_path, said):
        stock = next(cls for cls in heads(family) if cls.__name__.endswith("ForMaskedLM"))
        stock(stock_config(family)).save_pretrained(tmp_path)
        for cls in (AutoModelForMaskedLM, AutoModel, stock):
            cls.from_pretrained(tmp_path, position_scheme="t5")
        [line] = said
        assert LEFT_OUT in line

    @pytest.mark.parametrize(
        "scheme", ["t5", "deberta", "relative", "tupe", "transformer_xl", "relative_key", "tupe+t5"]
    )
    def test_what_the_sentence_says_to_do_keeps_them(self, scheme, stock_folder, said):
        model = AutoModel.from_pretrained(stock_folder, position_scheme=scheme)
        [line] = said
        remedy = re.search(r"keep them with position_scheme='([^']+)'", line).group(1)
        assert remedy == f"absolute+{scheme}"
        remedied = AutoModel.from_pretrained(stock_folder, position_scheme=remedy)
        assert said == [line]
        expected = outputs(AutoModel.from_pretrained(stock_folder))
        assert (outputs(model) - expected).abs().max() > 1e-2
        assert (outputs(remedied) - expected).abs().max() < 1e-5

    @pytest.mark.parametrize("scheme", ["none", "sinusoidal", "none+t5"])
    def test_where_they_cannot_be_kept_no_way_to_keep_them_is_offered(self, scheme, stock_folder, said):
        AutoModel.from_pretrained(stock_folder, position_scheme=scheme)
        [line] = [line for line in said if LEFT_OUT in line]
        names = re.findall(r"'([^']+)'", line)
        assert names == ([scheme, "absolute+t5"] if "t5" in scheme else [scheme])

    # (what the checkpoint is, None for stock; what is asked for, with flags; whether a composite can give its function back)
    @pytest.mark.parametrize("trained, scheme, flags, can", [
        *((None, name, {}, True) for name in ("t5", "tupe", "deberta")),
        *((None, name, {}, False) for name in ("rope", "alibi")),
        *(
            pytest.param(None, name, {}, True, marks=pytest.mark.slow)
            for name in SCHEMES
            if name not in ("absolute", "sinusoidal", "none", "rope", "alibi", "t5", "tupe", "deberta")
        ),
        (None, "none+t5", {}, True),
        (None, "t5+relative", {}, True),
        (None, "rope+t5", {}, False),
        (None, "alibi+rope", {}, False),
        (None, "deberta", {"position_form": "paper"}, False),
        (None, "tupe", {"position_form": "paper"}, False),
        *(
            pytest.param(
                None,
                name,
                {"position_init": "paper"} | NEEDED_IN.get(("position_init", name), {}),
                False,
                marks=() if name == "t5" else pytest.mark.slow,
            )
            for name in FLAGS_OF
            if "position_init" in FLAGS_OF[name]
        ),
        ("absolute+rope", "rope", {}, True),
        ("absolute+rope", "rope+t5", {}, True),
        ("absolute+alibi+t5", "t5", {}, False),
        ("absolute+rope", "alibi+rope", {}, False),
    ], ids=str)  # fmt: skip
    def test_a_way_to_keep_them_is_offered_only_where_it_gives_the_checkpoint_s_function_back(
        self, trained, scheme, flags, can, stock_folder, tmp_path, said
    ):
        folder = stock_folder
        if trained is not None:
            build(trained).save_pretrained(tmp_path)
            folder = str(tmp_path)
        expected = outputs(AutoModel.from_pretrained(folder))
        AutoModel.from_pretrained(folder, position_scheme=scheme, **flags)
        [line] = [line for line in said if LEFT_OUT in line]
        keeping = f"absolute+{scheme.removeprefix('none+')}"
        assert re.findall(r"'([^']+)'", line) == [scheme, *([keeping] if can else [])]
        assert line.split(": ")[1].startswith("fine-tune before use")
        del said[:]
        kept = outputs(AutoModel.from_pretrained(folder, position_scheme=keeping, **flags))
        difference = (kept - expected).abs().max()
        assert difference < 1e-5 if can else difference > 1e-3
        assert not (can and said)

    @pytest.mark.parametrize("scheme", [f"absolute+{name}" for name in ("t5", "tupe", "relative")])
    def test_keeping_them_is_not_commented(self, scheme, stock_folder, said):
        AutoModel.from_pretrained(stock_folder, position_scheme=scheme)
        assert not said

    @pytest.mark.parametrize("scheme", ["t5", "tupe", "disentangled", "none"])
    def test_a_saved_variant_without_them_has_none_to_leave_out(self, scheme, tmp_path, said):
        build(scheme).save_pretrained(tmp_path)
        AutoModel.from_pretrained(tmp_path)
        assert not said

    def test_taking_them_from_a_saved_variant_is_said(self, tmp_path, said):
        build("absolute+t5").save_pretrained(tmp_path)
        AutoModel.from_pretrained(tmp_path, position_scheme="t5")
        [line] = said
        assert LEFT_OUT in line


def test_taking_away_another_scheme_s_parameters_is_reported(tmp_path, transformers_said):
    build("absolute+t5").save_pretrained(tmp_path)
    AutoModel.from_pretrained(tmp_path, position_scheme="absolute")
    [report] = [line for line in transformers_said if "LOAD REPORT" in line]
    assert re.search(r"encoder\.relative_attention_bias\.weight.*UNEXPECTED", report)


def listed(transformers_said: list[str]) -> dict[str, str]:
    """Key -> status of every row of the load reports, layers written out as transformers has them; forgets them."""
    row = re.compile(r"^(\S.*?) +\| (?:\x1b\[\d+m)?(MISSING|UNEXPECTED|MISMATCH)", flags=re.MULTILINE)
    rows = {key: status for report in transformers_said for key, status in row.findall(report)}
    del transformers_said[:]
    return rows


def damage(folder: Path, pattern: str) -> set[str]:
    """Take the weights whose name matches away from a checkpoint; returns them with {0, 1} for layers, as reports have them."""
    weights = load_file(folder / "model.safetensors")
    gone = {key for key in weights if re.search(pattern, key)}
    assert gone
    save_file({key: weights[key] for key in weights.keys() - gone}, folder / "model.safetensors", {"format": "pt"})
    return gone


def written_out(keys: dict[str, str]) -> set[str]:
    """Keys of a report, one for each layer."""
    found = set()
    for key in keys:
        layers = re.search(r"\{([\d, ]+)\}", key)
        found |= {key.replace(layers[0], layer) for layer in layers[1].split(", ")} if layers else {key}
    return found


POSITIONS_IN = "position|pos_|relative|rel_|distance_embedding|linear_pos|cls_to_others|others_to_cls"
WITH_PARAMETERS = {
    **{name: {} for name in SCHEMES if name not in ("absolute", "none", "rope", "alibi")},
    "absolute, concat": {"position_combine": "concat"},
    "absolute, gate": {"position_combine": "gate"},
    "absolute, attention": {"position_combine": "attention"},
    "absolute, every layer": {"position_every_layer": True},
    "t5, per layer": {"position_per_layer": True},
    "deberta, own": {"position_share_projections": False, "position_norm": True},
    "deberta, paper": {"position_form": "paper"},
    "absolute+relative, gate, every layer": {"position_combine": "gate", "position_every_layer": True},
}
# One with a table of the model, one of each layer, one in the embeddings, and linear maps.
CORE = ("t5", "relative", "tupe", "deberta, own", "absolute, gate")
some_in_the_core = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in CORE else pytest.mark.slow) for case in WITH_PARAMETERS]
)


class TestLoadReport:
    """transformers lists what it initialised because it was not in the checkpoint: heads and damage, not new schemes."""

    @some_in_the_core
    def test_does_not_list_what_is_new_to_a_stock_checkpoint(self, case, stock_folder, transformers_said):
        flags = {"position_scheme": case.split(",")[0], **WITH_PARAMETERS[case]}
        keywords_of_all = ({}, {"dtype": torch.bfloat16}, {"device_map": "cpu"})
        for keywords in keywords_of_all if case in ("t5", "deberta, own") else keywords_of_all[:1]:
            torch.manual_seed(0)
            model = AutoModelForSequenceClassification.from_pretrained(stock_folder, **flags, **keywords)
            assert listed(transformers_said) == dict.fromkeys(["classifier.weight", "classifier.bias"], "MISSING")
            # They have their initial values all the same, on the right device.
            made = BertModel(stock_config(**flags))
            parameters = position_parameters(model)
            assert parameters.keys() == {f"bert.{name}" for name in position_parameters(made)}
            for name, parameter in position_parameters(made).items():
                loaded = parameters[f"bert.{name}"]
                assert loaded.device.type == "cpu" and loaded.dtype == keywords.get("dtype", torch.float32)
                assert loaded.isfinite().all() and loaded.any() == parameter.any(), name
                if parameter.unique().numel() <= 2:  # zeros, ones, identities, a scale
                    assert torch.equal(loaded, parameter.to(loaded.dtype)), name

    @pytest.mark.parametrize("family", FAMILIES)
    def test_leaves_families_entry_points_and_heads_alike(self, family, tmp_path, transformers_said):
        stock = next(cls for cls in heads(family) if cls.__name__.endswith("ForMaskedLM"))
        stock(stock_config(family)).save_pretrained(tmp_path)
        # As older checkpoints have it: where their weights once were.
        stored = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(stored | {"_name_or_path": "someone/elsewhere"}))
        for cls in (AutoModelForMaskedLM, stock, variant_class(family, "ForMaskedLM")):
            _, info = cls.from_pretrained(tmp_path, position_scheme="absolute+t5+relative", output_loading_info=True)
            assert not any(info.values()), info
        config = AutoConfig.from_pretrained(tmp_path, position_scheme="absolute+t5")
        AutoModelForMaskedLM.from_pretrained(tmp_path, config=config)
        assert listed(transformers_said) == {}

    @some_in_the_core
    def test_lists_every_position_parameter_that_a_saved_variant_lacks(self, case, tmp_path, transformers_said):
        flags = {"position_scheme": case.split(",")[0], **WITH_PARAMETERS[case]}
        scheme = flags.pop("position_scheme")
        model = build(scheme, head="ForMaskedLM", **flags)
        model.save_pretrained(tmp_path)
        whole = (tmp_path / "model.safetensors").read_bytes()
        # All layers are alike; the last stands for them.
        names = [name for name in position_parameters(model) if "layer.0." not in name]
        for number, name in enumerate(names):
            (tmp_path / "model.safetensors").write_bytes(whole)
            gone = damage(tmp_path, re.escape(name))
            _, info = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
            assert info["missing_keys"] == gone == {name}
            assert written_out(listed(transformers_said)) == gone
            # And where something is added in the same breath.
            if number == 0 and scheme != "alibi":
                AutoModelForMaskedLM.from_pretrained(tmp_path, position_scheme=f"{scheme}+alibi")
                assert written_out(listed(transformers_said)) == gone

    # The head's prefix in keys is there or not.
    @pytest.mark.parametrize("head, trained, flags, pattern, scheme, more, also", [
        ("Model", "absolute+t5", {}, "relative_attention_bias", "absolute+t5+deberta", {}, ""),
        ("ForMaskedLM", "absolute+t5", {}, "relative_attention_bias", "absolute+t5+deberta", {}, ""),
        ("Model", "absolute+t5+deberta", {}, "relative_attention_bias", "absolute+t5+relative", {}, "UNEXPECTED"),
        ("ForMaskedLM", "absolute+t5", {}, "relative_attention_bias", "absolute+t5",
         {"position_combine": "gate", "position_every_layer": True}, ""),
        ("Model", "absolute", {"position_combine": "gate"}, "position_gate.bias", "absolute+t5", {"position_every_layer": True}, ""),
        ("ForMaskedLM", "absolute", {"position_every_layer": True}, "layer.1.position_scale.weight", "absolute+tupe", {}, ""),
        ("Model", "sinusoidal+tupe", {}, "pos_q_linear", "absolute+t5+tupe", {}, "UNEXPECTED"),
        ("ForMaskedLM", "disentangled", {}, "rel_embeddings", "absolute+deberta", {"position_combine": "concat"}, ""),
    ])  # fmt: skip
    def test_tells_damage_from_what_is_new_to_a_saved_variant(
        self, head, trained, flags, pattern, scheme, more, also, tmp_path, transformers_said
    ):
        build(trained, head=head, **flags).save_pretrained(tmp_path)
        AutoModelForMaskedLM.from_pretrained(tmp_path, position_scheme=scheme, **more)
        rows = listed(transformers_said)
        assert [key for key, status in rows.items() if status == "MISSING" and re.search(POSITIONS_IN, key)] == []
        left = [key for key, status in rows.items() if status == "UNEXPECTED" and re.search(POSITIONS_IN, key)]
        assert bool(left) == bool(also)
        gone = {("bert." if head == "Model" else "") + key for key in damage(tmp_path, pattern)}
        AutoModelForMaskedLM.from_pretrained(tmp_path, position_scheme=scheme, **more)
        missing = {key: status for key, status in listed(transformers_said).items() if status == "MISSING"}
        assert {key for key in written_out(missing) if re.search(POSITIONS_IN, key)} == gone

    def test_lists_new_parameters_of_a_scheme_that_was_trained_with_others(self, tmp_path, transformers_said):
        """The trained ones are lost by this: nothing to be silent about."""
        build("absolute+t5").save_pretrained(tmp_path)
        AutoModel.from_pretrained(tmp_path, position_per_layer=True)
        assert listed(transformers_said) == {
            "encoder.relative_attention_bias.weight": "UNEXPECTED",
            "encoder.layer.{0, 1}.attention.self.relative_attention_bias.weight": "MISSING",
        }

    @pytest.mark.parametrize(
        "entry_point",
        ["model's config", "read elsewhere", "read elsewhere by its class", "by hand", "attribute by hand"],
    )
    def test_lists_damage_where_the_config_does_not_come_from_the_checkpoint(
        self, entry_point, tmp_path, transformers_said
    ):
        flags = {"position_scheme": "absolute+t5"}
        BertModel(stock_config()).save_pretrained(tmp_path / "stock")
        config = AutoConfig.from_pretrained(tmp_path / "stock", **flags)
        model = BertModel.from_pretrained(tmp_path / "stock", **flags)
        model.save_pretrained(tmp_path / "saved")
        gone = damage(tmp_path / "saved", "relative_attention_bias")
        assert listed(transformers_said) == {}
        configs = {
            "model's config": model.config,
            "read elsewhere": config,
            "read elsewhere by its class": type(stock_config()).from_pretrained(tmp_path / "stock", **flags),
            "by hand": variant_config(**flags),
            "attribute by hand": stock_config(),
        }
        configs["attribute by hand"].position_scheme = "absolute+t5"
        AutoModel.from_pretrained(tmp_path / "saved", config=configs[entry_point])
        assert listed(transformers_said) == dict.fromkeys(gone, "MISSING")

    @tiny.cross(flags_are=["beside it", "in it", "of a config by hand"], family=FAMILIES, strength=1)
    def test_does_not_list_what_is_new_where_a_stock_config_was_read_first(
        self, family, flags_are, tmp_path, transformers_said
    ):
        """As sentence-transformers does with its `model_kwargs`."""
        stock = next(cls for cls in heads(family) if cls.__name__.endswith("ForMaskedLM"))
        stock(stock_config(family)).save_pretrained(tmp_path)
        flags = {"position_scheme": FAMILIES[family].family.native_scheme + "+deberta"}
        config = AutoConfig.from_pretrained(tmp_path) if flags_are != "of a config by hand" else stock_config(family)
        if flags_are != "beside it":
            config.position_scheme = flags.pop("position_scheme")
        model = AutoModelForMaskedLM.from_pretrained(tmp_path, config=config, **flags)
        assert any("rel_embeddings" in name for name in position_parameters(model))
        assert listed(transformers_said) == {}

    def test_lists_damage_under_a_stock_config_with_flags_beside_it(self, tmp_path, transformers_said):
        build("absolute+t5").save_pretrained(tmp_path)
        gone = damage(tmp_path, "relative_attention_bias")
        for config in (stock_config(), AutoConfig.from_pretrained(tmp_path)):
            AutoModel.from_pretrained(tmp_path, config=config, position_scheme="absolute+t5+deberta")
            assert written_out(listed(transformers_said)) == gone

    def test_lists_everything_where_there_is_no_config_beside_the_weights(self, tmp_path, transformers_said):
        BertModel(stock_config()).save_pretrained(tmp_path)
        (tmp_path / "config.json").unlink()
        AutoModel.from_pretrained(tmp_path, config=stock_config(), position_scheme="absolute+t5")
        assert listed(transformers_said) == {"encoder.relative_attention_bias.weight": "MISSING"}

    def test_lists_a_damaged_table_of_a_checkpoint_of_transformers_4(self, tmp_path, transformers_said):
        model = BertForMaskedLM(stock_config(position_scheme="relative_key"))
        model.save_pretrained(tmp_path)
        config = (tmp_path / "config.json").read_text()
        config = config.replace('"position_scheme"', '"position_embedding_type"').replace('"posenc_bert"', '"bert"')
        (tmp_path / "config.json").write_text(config)
        gone = damage(tmp_path, r"1\.attention\.self\.distance_embedding")
        AutoModelForMaskedLM.from_pretrained(tmp_path, position_scheme="relative_key+t5")
        assert listed(transformers_said) == dict.fromkeys(gone, "MISSING")


class TestParameters:
    # Every scheme in a family without and in one with positions of its own beside the table, every family with and without the table.
    @tiny.cross(
        scheme=SCHEMES,
        family=FAMILIES,
        where=lambda scheme, family: family in ("bert", "mpnet") or scheme in ("absolute", "deberta"),
        rest=pytest.mark.slow,
    )
    def test_a_variant_has_those_of_stock_and_of_its_scheme_and_no_others(self, family, scheme):
        stock = next(cls for cls in heads(family) if cls.__name__.endswith("ForMaskedLM"))(stock_config(family))
        model = build(scheme, family, head="ForMaskedLM")
        theirs, ours = stock.state_dict().keys(), model.state_dict().keys()
        native = FAMILIES[family].family.native_keys
        # An amplitude that is not learned is a buffer.
        constant = {f"{model.base_model_prefix}.embeddings.position_scale.weight"} & {*dict(model.named_buffers())}
        assert bool(constant) == (scheme == "sinusoidal")
        assert ours - theirs - constant == {
            key for key in position_parameters(model) if not key.endswith((*native.values(), "-"))
        }
        others = {key for name, end in native.items() if name != scheme for key in theirs if key.endswith(end)}
        assert len(others) == len({*native} - {scheme})
        table = {key for key in theirs if key.endswith("embeddings.position_embeddings.weight")}
        assert len(table) == 1
        assert theirs - ours == (set() if scheme in ("absolute", "tupe") else table) | others
        assert {name for name, _ in model.named_buffers()} - constant <= {name for name, _ in stock.named_buffers()}
        # What a family's own checkpoints have of a scheme is a position parameter, too.
        own = position_parameters(model).keys() & theirs
        assert bool(own) == (scheme in native)

    @pytest.mark.parametrize("scheme, flags, absent", [
        ("deberta", {"position_attention_types": ["c2p"], "position_share_projections": False}, "pos_query_proj"),
        ("deberta", {"position_attention_types": ["p2c"], "position_share_projections": False}, "pos_key_proj"),
        ("deberta", {}, "pos_(query|key)_proj|encoder.LayerNorm"),
        ("relative", {"position_on_values": False}, "relative_value_embeddings"),
        ("t5", {"position_per_layer": True}, "^encoder.relative_attention_bias"),
        ("t5", {}, "attention.self.relative_attention_bias"),
        ("absolute", {}, "position_(projection|gate|query|key|value|scale)"),
        ("sinusoidal", {}, "position_(projection|gate|query|key|value)|position_embeddings"),
        ("absolute", {"position_every_layer": True}, "layer.0.position_scale"),
        ("rope", {}, "rot|freq|position"),
        ("alibi", {}, "slope|alibi|position"),
        ("none", {}, "position"),
    ])  # fmt: skip
    def test_flags_leave_out_what_they_leave_unused(self, scheme, flags, absent):
        keys = build(scheme, **flags).state_dict()
        assert not [key for key in keys if re.search(absent, key)]

    @pytest.mark.parametrize("family, scheme, flags", [
        *((family, name, {}) for family, name in zip(itertools.cycle(["bert", "roberta", "electra"]), SCHEMES)),
        ("bert", "absolute+t5", {}),
        ("roberta", "absolute+t5", {}),
        ("electra", "absolute+t5", {}),
        ("roberta", "absolute", {"position_combine": "concat"}),
        ("electra", "absolute", {"position_combine": "gate", "position_every_layer": True}),
        ("bert", "absolute+tupe+t5", {}),
        ("bert", "sinusoidal+deberta", {}),
        ("bert", "absolute", {"position_combine": "concat"}),
        ("bert", "absolute", {"position_combine": "gate", "position_every_layer": True}),
        ("bert", "sinusoidal", {"position_combine": "attention", "position_every_layer": True}),
        ("bert", "relative", {"position_on_values": False}),
        ("bert", "t5", {"position_per_layer": True}),
        ("bert", "deberta", {"position_share_projections": False, "position_norm": True}),
        ("bert", "deberta", {"position_share_projections": False, "position_attention_types": ["p2c"]}),
        ("bert", "deberta", {"position_share_projections": False, "position_attention_types": ["c2p", "p2p"]}),
        ("bert", "tupe", {"position_form": "paper"}),
    ], ids=str)  # fmt: skip
    def test_all_take_part_in_a_step(self, family, scheme, flags):
        """A parameter without a gradient stops DistributedDataParallel."""
        batch = inputs(family=family, padding=None)
        batch["labels"] = batch["input_ids"]
        stock = next(cls for cls in heads(family) if cls.__name__.endswith("ForMaskedLM"))(stock_config(family))
        model = build(scheme, family, head="ForMaskedLM", **flags).train()
        idle = []
        for each in (stock, model):
            each(**batch).loss.backward()
            idle.append({name for name, parameter in each.named_parameters() if parameter.grad is None})
        assert idle[1] == idle[0] == set()

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_the_silent_start_uses_them_all_as_well(self, scheme, stock_folder):
        model = AutoModelForMaskedLM.from_pretrained(stock_folder, position_scheme=scheme).train()
        batch = inputs(padding=None)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


# Flag -> those without which it has no use.
NEEDED = {
    "position_every_layer_weight": {"position_every_layer": True},
    "position_width": {"position_combine": "concat"},
}


class TestFlags:
    @pytest.mark.parametrize("flag", [flag for flag, users in FLAGS.items() if users and ALL not in users])
    def test_one_that_does_not_apply_is_an_error(self, flag):
        value = another_value(next(iter(FLAGS[flag].values())))
        needed = {"position_window": 8} if flag == "position_global_base" else {}
        for scheme in [name for name in SCHEMES if name not in FLAGS[flag]]:
            message = re.escape(f"{flag}={value!r} has no use with position_scheme={scheme!r}")
            with pytest.raises(ValueError, match=message) as error:
                stock_config(position_scheme=scheme, **needed, **{flag: value})
            # Where it would be of use is said too.
            explanation = str(error.value).split(":", 1)[1] if flag != "position_rope_scaling" else str(error.value)
            assert all(name in explanation for name in FLAGS[flag]), scheme

    @pytest.mark.parametrize("flag, scheme", [pair for pair in PAIRS if pair[0] in FLAGS_OF[pair[1]]])
    def test_one_that_applies_makes_a_difference(self, flag, scheme):
        value = another_value(FLAGS_OF[scheme][flag])
        values = {"position_scheme": scheme}
        if flag == "position_max_distance" and "position_buckets" in FLAGS_OF[scheme]:
            values["position_buckets"] = 8
        values |= NEEDED.get(flag, {}) | NEEDED_IN.get((flag, scheme), {})
        # A stretched table has no room for strides in texts that are nearly as long as it is.
        batch = inputs(length=12 if flag == "position_stride" else 40)
        results = []
        for flags in (values, {**values, flag: value}):
            torch.manual_seed(0)
            model = BertModel(stock_config(**flags)).eval()
            start = {name: parameter.clone() for name, parameter in position_parameters(model).items()}
            # What these set would be overwritten.
            if flag not in ("position_init", "position_amplitude", "position_every_layer_weight"):
                fill_positions(model, seed=3)
            with torch.no_grad():
                results.append((start, model(**batch).last_hidden_state))
        assert results[0][0].keys() != results[1][0].keys() or (results[0][1] - results[1][1]).abs().max() > 1e-4

    @pytest.mark.parametrize("entry_point", ["keyword", "attribute", "beside a config"])
    def test_every_entry_point_refuses_one_that_does_not_apply(self, entry_point, stock_folder):
        with pytest.raises(
            ValueError, match="position_max_distance=4 has no use with position_scheme='relative_key'.*relative"
        ):
            if entry_point == "keyword":
                AutoModel.from_pretrained(stock_folder, position_scheme="relative_key", position_max_distance=4)
            config = AutoConfig.from_pretrained(stock_folder)
            if entry_point == "beside a config":
                AutoModel.from_pretrained(
                    stock_folder, config=config, position_scheme="relative_key", position_max_distance=4
                )
            config.position_scheme, config.position_max_distance = "relative_key", 4
            AutoModel.from_pretrained(stock_folder, config=config)

    def test_stored_ones_are_dropped_with_one_line_when_the_scheme_is_overridden(self, tmp_path, said):
        flags = {"position_per_layer": True, "position_buckets": 8, "position_max_distance": 16}
        build("absolute+t5", position_combine="gate", **flags).save_pretrained(tmp_path)
        for _ in range(2):
            model = AutoModel.from_pretrained(tmp_path, position_scheme="absolute+deberta")
        [line] = said
        assert line == "position_scheme='absolute+deberta' has no use for the stored position_per_layer: dropped."
        # The others are of use to the new schemes, and stay.
        kept = {name for name in FLAGS if getattr(model.config, name) is not None} - {"position_scheme"}
        assert kept == {"position_buckets", "position_max_distance", "position_combine"}
        assert model.encoder.rel_embeddings.num_embeddings == 16
        model.save_pretrained(tmp_path / "again")
        assert AutoConfig.from_pretrained(tmp_path / "again").position_per_layer is None

    def test_stored_ones_are_dropped_beside_a_config_too(self, tmp_path, said):
        build("absolute+t5", position_buckets=8).save_pretrained(tmp_path)
        config = AutoConfig.from_pretrained(tmp_path)
        model = AutoModel.from_pretrained(tmp_path, config=config, position_scheme="absolute+relative")
        assert said == ["position_scheme='absolute+relative' has no use for the stored position_buckets: dropped."]
        assert model.config.position_buckets is None and config.position_buckets == 8

    def test_one_given_with_an_overriding_scheme_is_never_dropped(self, tmp_path):
        build("absolute+t5", position_buckets=8).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="position_per_layer=True has no use"):
            AutoModel.from_pretrained(tmp_path, position_scheme="absolute+rope", position_per_layer=True)

    def test_overriding_another_flag_of_a_saved_variant_keeps_the_scheme(self, tmp_path):
        build("absolute+t5").save_pretrained(tmp_path)
        model = AutoModel.from_pretrained(tmp_path, position_combine="gate")
        assert type(model) is variant_class("bert")
        assert (model.config.position_scheme, model.config.position_combine) == ("absolute+t5", "gate")

    def test_the_same_scheme_given_again_keeps_the_flags(self, tmp_path, said):
        build("absolute+t5", position_buckets=8).save_pretrained(tmp_path)
        model = AutoModel.from_pretrained(tmp_path, position_scheme="absolute+t5")
        assert model.config.position_buckets == 8 and not said

    def test_an_attribute_that_takes_the_scheme_from_its_flags_is_an_error(self):
        config = variant_config(position_scheme="t5", position_buckets=8)
        config.position_scheme = "rope"
        with pytest.raises(ValueError, match="position_buckets=8 has no use with position_scheme='rope'"):
            AutoModel.from_config(config)
        with pytest.raises(ValueError, match="position_buckets=8 has no use with position_scheme='rope'"):
            config.save_pretrained("nowhere")
