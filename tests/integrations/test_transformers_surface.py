"""What of transformers is relied on beside its documented interface: docs/design.md lists it, and here each item is looked at.

A new release that changes one of these breaks the test that names it.
"""

import inspect
import json
import re
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from tiny import FAMILIES, STOCK_CONFIGS, heads, inputs, stock_config
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.utils.hub import PushToHubMixin

import hf_posenc
from hf_posenc import variants
from hf_posenc.checkpoint_code import code_files
from hf_posenc.integrations import hooks as plugin
from hf_posenc.integrations import unpadding
from hf_posenc.modeling import stock_interface
from hf_posenc.modeling.stock_interface import Receives, mask_name


DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
ITEMS = {}


def item(name: str):
    """Register a check under the name that docs/design.md has for what it checks."""

    def register(check):
        ITEMS[name] = check
        return check

    return register


def takes(function, *names: str) -> bool:
    """Whether a function has parameters of these names, or takes any."""
    parameters = inspect.signature(function).parameters
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return all(name in parameters or any_name for name in names)


def stock_models() -> dict[str, nn.Module]:
    return {family: next(iter(heads(family)))._from_config(stock_config(family)).base_model for family in FAMILIES}


@item("PreTrainedModel.__new__")
def models_are_made_by_calling_their_class(monkeypatch):
    seen = []
    find = PreTrainedModel.__new__
    monkeypatch.setattr(
        PreTrainedModel, "__new__", staticmethod(lambda cls, *a, **k: seen.append((a, k)) or find(cls, *a, **k))
    )
    transformers.AutoModel.from_config(stock_config("bert"))
    [(args, kwargs)] = seen
    assert isinstance(kwargs.get("config", args[0] if args else None), PreTrainedConfig)


@item("PreTrainedConfig.from_dict")
def configs_are_read_by_from_dict_and_get_config_dict(tmp_path, monkeypatch):
    stock_config("bert").save_pretrained(tmp_path)
    seen = []
    for name in ("from_dict", "get_config_dict"):
        method = getattr(PreTrainedConfig, name).__func__
        monkeypatch.setattr(
            PreTrainedConfig,
            name,
            classmethod(lambda cls, *a, _n=name, _m=method, **k: seen.append(_n) or _m(cls, *a, **k)),
        )
    config, unused = transformers.BertConfig.from_pretrained(tmp_path, return_unused_kwargs=True, foo=1)
    assert (
        {"from_dict", "get_config_dict"} <= {*seen}
        and unused == {"foo": 1}
        and type(config) is transformers.BertConfig
    )


@item("PreTrainedModel.save_pretrained")
def models_are_saved_by_a_method_that_writes_their_own_config(tmp_path, monkeypatch):
    seen = []
    find = PreTrainedModel.save_pretrained
    monkeypatch.setattr(
        PreTrainedModel, "save_pretrained", lambda self, *a, **k: seen.append(self) or find(self, *a, **k)
    )
    model = transformers.BertForMaskedLM(stock_config("bert"))
    model.config.mine = 3
    model.save_pretrained(tmp_path)
    assert seen == [model] and json.loads((tmp_path / "config.json").read_text())["mine"] == 3
    assert takes(PreTrainedModel.push_to_hub) and "self.save_pretrained(" in inspect.getsource(
        PushToHubMixin.push_to_hub
    )
    # A model is built of its config alone, on the meta device, as it is read.
    with torch.device("meta"):
        assert type(model)(type(model).config_class.from_dict(model.config.to_dict())).base_model.device.type == "meta"


@item("_hf_peft_config_loaded")
def a_model_with_an_adapter_of_transformers_own_says_so():
    assert transformers.BertModel(stock_config("bert"))._hf_peft_config_loaded is False


@item("Trainer._load_from_checkpoint")
def a_trainer_loads_weights_from_the_folder_of_a_checkpoint():
    assert [*inspect.signature(transformers.Trainer._load_from_checkpoint).parameters][1:3] == [
        "resume_from_checkpoint",
        "model",
    ]
    source = inspect.getsource(transformers.Trainer)
    assert "self._load_from_checkpoint(resume_from_checkpoint" in source


@item("Trainer.compute_loss")
def a_trainer_computes_a_loss_of_labels_that_the_model_does_not_see():
    assert [*inspect.signature(transformers.Trainer.compute_loss).parameters][1:3] == ["model", "inputs"]
    source = inspect.getsource(transformers.Trainer)
    assert "self.compute_loss(" in source
    assert "self.label_smoother" in source and "self.compute_loss_func" in source


@item("Pipeline.__init__")
def a_pipeline_gets_the_keywords_that_nobody_knows():
    from transformers.pipelines.base import Pipeline

    assert "kwargs" in inspect.signature(Pipeline.__init__).parameters
    assert re.search(r"pipeline_class\(model=model.*\*\*kwargs\)", inspect.getsource(transformers.pipeline))


@item("_extra_content")
def registries_keep_what_is_registered_in_a_dictionary():
    from transformers.models.auto.auto_factory import _BaseAutoModelClass
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    assert issubclass(transformers.AutoModel, _BaseAutoModelClass)
    for mapping in (CONFIG_MAPPING, TOKENIZER_MAPPING, transformers.AutoModel._model_mapping):
        assert isinstance(mapping._extra_content, dict)


@item("_adjust_missing_and_unexpected_keys")
def loading_reports_go_through_a_method(monkeypatch, tmp_path):
    model = transformers.BertModel(stock_config("bert"))
    model.save_pretrained(tmp_path)
    seen = []
    monkeypatch.setattr(
        PreTrainedModel, "_adjust_missing_and_unexpected_keys", lambda self, info: seen.append(info), raising=True
    )
    transformers.BertModel.from_pretrained(tmp_path)
    assert isinstance(seen[0].missing_keys, set) and isinstance(seen[0].unexpected_keys, set)


@item("_init_weights")
def weights_that_are_missing_are_initialised_module_by_module(monkeypatch):
    seen = []
    found = transformers.BertModel._init_weights
    monkeypatch.setattr(
        transformers.BertModel, "_init_weights", lambda self, m: seen.append(type(m)) or found(self, m)
    )
    transformers.BertModel(stock_config("bert"))
    assert {nn.Linear, nn.Embedding} <= {*seen}


@item("_check_and_adjust_attn_implementation")
def backends_are_checked_by_a_method():
    assert takes(PreTrainedModel._check_and_adjust_attn_implementation, "attn_implementation", "is_init_check")
    assert transformers.BertConfig(attn_implementation="eager")._attn_implementation == "eager"
    assert hasattr(transformers.BertConfig(), "_attn_implementation_internal")


@item("_prepare_position_ids_for_generation")
def generation_counts_positions_by_a_method():
    names = (
        [*inspect.signature(PreTrainedModel._prepare_position_ids_for_generation).parameters]
        if hasattr(PreTrainedModel, "_prepare_position_ids_for_generation")
        else [*inspect.signature(transformers.GenerationMixin._prepare_position_ids_for_generation).parameters]
    )
    assert names[1:3] == ["inputs_tensor", "model_kwargs"]


@item("ALL_ATTENTION_FUNCTIONS")
def attention_functions_are_looked_up_by_name_and_called_with_a_mask_in_fifth_place():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert {"sdpa", "flex_attention"} <= {*ALL_ATTENTION_FUNCTIONS.valid_keys()}
    assert ALL_ATTENTION_FUNCTIONS.get_interface("eager", len) is len
    states = torch.randn(1, 2, 3, 4)
    module = nn.Module().eval()
    module.num_key_value_groups, module.is_causal = 1, False
    output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, states, states, states, None, dropout=0.0, scaling=0.5)
    assert output.shape == (1, 3, 2, 4)


@item("Cache.layers")
def caches_are_lists_of_layers_that_can_be_replaced():
    cache = cache_utils.DynamicCache()
    assert cache.layers == [] and issubclass(cache.layer_class_to_replicate, cache_utils.DynamicLayer)
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert cache.get_seq_length() == 3 and cache.get_mask_sizes(2, 0)[0] == 5
    for name in ("reorder_cache", "batch_repeat_interleave", "batch_select_indices", "reset"):
        assert hasattr(cache_utils.DynamicLayer, name)
    assert issubclass(cache_utils.StaticLayer, cache_utils.CacheLayerMixin)
    both = cache_utils.EncoderDecoderCache(cache, cache_utils.DynamicCache())
    assert both.self_attention_cache is cache and isinstance(both, cache_utils.Cache)


@item("create_bidirectional_mask")
def a_mask_of_pairs_is_made_of_config_states_and_mask():
    states, mask = torch.zeros(2, 4, 8), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    config = stock_config("bert", attn_implementation="eager")
    assert stock_interface.bidirectional_mask(config, states, mask).shape == (2, 1, 4, 4)
    config = stock_config("mpnet", attn_implementation="eager")
    assert stock_interface.bidirectional_mask(config, states, mask).shape == (2, 1, 4, 4)


@item("output_capturing._active_collector")
def outputs_that_are_recorded_are_told_by_a_context_variable():
    from transformers.utils import output_capturing

    model = transformers.BertModel(stock_config("bert")).eval()
    seen = []
    model.encoder.register_forward_pre_hook(lambda *_: seen.append(bool(output_capturing._active_collector.get())))
    model(**inputs())
    model(**inputs(), output_hidden_states=True)
    assert seen == [False, True]


@item("names of parts")
def families_have_the_parts_that_their_descriptions_name():
    for name, model in stock_models().items():
        family = FAMILIES[name].family
        embeddings, encoder = family.embeddings_of(model), family.encoder_of(model)
        assert hasattr(embeddings, family.words) and hasattr(embeddings, family.table)
        assert isinstance(embeddings.LayerNorm, nn.LayerNorm) and isinstance(embeddings.dropout, nn.Dropout)
        for layer in family.layers_of(encoder):
            attention = family.self_attention_of(layer)
            for part in (family.query, family.key, family.value):
                assert isinstance(getattr(attention, part), nn.Linear)
            assert getattr(attention, family.heads_count) * getattr(attention, family.head_dim) == 32
            assert isinstance(family.output_projection_of(layer), nn.Linear)


@item("keywords reach the self-attention")
def encoders_hand_unknown_keywords_to_their_self_attentions():
    for name, model in stock_models().items():
        if name == "mpnet":  # whose encoder and layers are replaced
            continue
        family, seen = FAMILIES[name].family, []
        attention = family.self_attention_of(family.layers_of(family.encoder_of(model))[-1])
        attention.register_forward_pre_hook(lambda _, args, kwargs, seen=seen: seen.append(kwargs), with_kwargs=True)
        model(**inputs(family=name), something_of_ours=3)
        assert seen[0]["something_of_ours"] == 3


@item("annotations of a self-attention")
def the_mask_and_the_cache_of_a_self_attention_are_told_by_its_signature():
    for name, model in stock_models().items():
        family = FAMILIES[name].family
        attention = family.self_attention_of(family.layers_of(family.encoder_of(model))[0])
        receives, cache, mask = Receives.of(type(attention).forward), cache_utils.DynamicCache(), torch.zeros(1)
        assert mask_name(type(attention).forward) == receives.names[1]
        assert receives.mask_and_cache((mask,), {"any_name": cache, "other": 1}) == (mask, cache, {"other": 1})


@item("DebertaV2Encoder.get_rel_pos")
def encoders_of_deberta_make_masks_distances_and_tables_by_methods():
    from hf_posenc.integrations.stock_attention import deberta

    for encoder, attention in zip(deberta.ENCODERS, deberta.SELF_ATTENTIONS):
        assert takes(encoder.get_attention_mask, "attention_mask")
        assert takes(encoder.get_rel_pos, "hidden_states", "query_states", "relative_pos")
        assert takes(encoder.get_rel_embedding)
        assert takes(attention.forward, "output_attentions", "query_states", "relative_pos", "rel_embeddings")
    assert callable(deberta.v2.make_log_bucket_position)


@item("MPNetEncoder.compute_position_bias")
def the_encoder_of_mpnet_makes_its_bias_by_a_method():
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention

    assert takes(MPNetEncoder.compute_position_bias, "x", "position_ids", "num_buckets")
    assert takes(MPNetEncoder.relative_position_bucket, "relative_position", "num_buckets")
    assert takes(MPNetSelfAttention.forward, "position_bias", "output_attentions")


@item("create_position_ids_from_input_ids")
def positions_that_follow_padding_are_made_by_a_function():
    for family, model in stock_models().items():
        if family in ("roberta", "xlm-roberta", "camembert"):
            made = model.embeddings.create_position_ids_from_input_ids(torch.tensor([[5, 6, 1]]), 1, 0)
            assert made.tolist() == [[2, 3, 1]]


@item("dynamic_module_utils.get_relative_import_files")
def the_files_that_travel_are_found_by_a_function():
    from transformers.dynamic_module_utils import get_relative_import_files

    config = hf_posenc.PosencBertConfig()
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        found = {Path(path).name for path in get_relative_import_files(Path(folder, config.modeling_file))}
        assert {config.modeling_file, *found} == {*code_files(config)}


@item("transformers.initialization")
def initialisation_skips_what_was_loaded():
    parameter = nn.Parameter(torch.ones(3))
    parameter._is_hf_initialized = True
    from transformers import initialization

    initialization.zeros_(parameter)
    assert parameter.tolist() == [1, 1, 1]
    initialization.zeros_(other := nn.Parameter(torch.ones(3)))
    assert other.tolist() == [0, 0, 0]


@item("ROPE_INIT_FUNCTIONS")
def frequencies_of_scaled_rotations_come_from_a_table():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert {"linear", "dynamic", "yarn"} <= {*ROPE_INIT_FUNCTIONS}


@item("loss_function")
def heads_that_write_text_divide_their_loss_themselves():
    for stock, variant in variants.VARIANT_MODELS.items():
        if any("label" in name for name in inspect.signature(stock.forward).parameters):
            reads = "loss_function" in inspect.unwrap(stock.forward).__code__.co_names
            assert reads == variant.stock_loss_divides, stock


@pytest.mark.parametrize("name", ITEMS)
def test_it_is_as_it_was(name, request):
    needs = {wanted: request.getfixturevalue(wanted) for wanted in inspect.signature(ITEMS[name]).parameters}
    ITEMS[name](**needs)


def test_the_page_lists_what_is_checked():
    listed = DESIGN.read_text(encoding="utf-8").partition("## What hf_posenc relies on in Transformers")[2]
    assert [name for name in ITEMS if f"`{name}`" not in listed and f"**{name}**" not in listed] == []


def test_no_other_file_names_what_stock_modules_hand_to_each_other():
    package = Path(inspect.getfile(plugin)).parent
    files = [
        *Path(inspect.getfile(stock_interface)).parent.rglob("*.py"),
        *(package / "stock_attention").glob("*.py"),
        Path(unpadding.__file__),
    ]
    files += [Path(plugin.__file__)]
    assert {"modeling_posenc.py", "packing.py", "deberta.py"} <= {file.name for file in files}
    words = (
        "past_key_value",
        "cache_length",
        "encoder_attention_mask",
        "head_mask",
        "cache_position",
        "create_bidirectional",
    )
    for file in files:
        if file.name != "stock_interface.py":
            assert [
                word for word in words if word in file.read_text(encoding="utf-8").replace("cache_lengths", "")
            ] == []


def test_errors_name_the_versions_where_transformers_is_newer_than_any_tested(monkeypatch):
    assert not stock_interface.is_untested(stock_interface.TESTED[-1]) and stock_interface.is_untested("5.99.0.dev0")
    with monkeypatch.context() as patched:
        patched.setattr(stock_interface.transformers, "__version__", "5.99.0")

        @stock_interface.tells_versions
        def fails(error):
            raise error

        with pytest.raises(TypeError) as told:
            fails(TypeError("unexpected keyword"))
        with pytest.raises(ValueError) as silent:
            fails(ValueError("a bad flag"))
    assert "5.99.0" in told.value.__notes__[0] and stock_interface.TESTED[0] in told.value.__notes__[0]
    assert not hasattr(silent.value, "__notes__")
    assert stock_interface.tells_versions(len) is len or stock_interface.is_untested(transformers.__version__)


def test_the_versions_stand_in_the_tables():
    assert list(stock_interface.TESTED) == sorted(stock_interface.TESTED, key=stock_interface._number)
    assert {*STOCK_CONFIGS} == {*FAMILIES}
