"""Promise 1: with the plugin imported and no flag given, nothing of transformers changes."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch
from fresh_process import run_fresh
from tiny import FAMILIES, SIZES, STOCK_CONFIGS, aligned, build, heads, inputs, stock_computes, stock_config
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_posenc import PosencBertConfig
from hf_posenc.modeling.schemes.table import SCHEMES


def observe_stock(families: list[str], sizes: dict, minilm: str, folder: str) -> dict:
    """All that can be seen of the stock classes, by name; imports for itself, to be run without the plugin as well."""
    import importlib
    import json
    import os

    import torch
    import transformers
    from transformers import AutoConfig, AutoModel

    torch.set_num_threads(1)

    def tensors(model, multiple_choice: bool) -> list:
        ids = torch.arange(5, 29).view(2, 12) % 90 + 5
        mask = torch.ones_like(ids)
        mask[1, 8:] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        if multiple_choice:
            if (
                getattr(model.base_model, "pooler", True) is None
            ):  # what the head reads, up to 5.13: it cannot be called
                return []
            batch = {name: value[None].repeat(2, 1, 1) for name, value in batch.items()}
        with torch.no_grad():
            return [value for value in aligned(model)(**batch).to_tuple() if isinstance(value, torch.Tensor)]

    seen = {}
    for family in families:
        package = family.replace("-", "_")
        module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
        for name in module.__all__:
            cls = getattr(module, name)
            if "position_ids" not in inspect.signature(cls.forward).parameters:  # no model of its own
                continue
            extra = {"embedding_size": 24} if family == "electra" else {}
            config = cls.config_class(**sizes, **extra)
            torch.manual_seed(0)
            model = cls(config).eval()
            place = os.path.join(folder, name)
            model.save_pretrained(place)
            by_class = cls.from_pretrained(place)
            by_auto = AutoModel.from_pretrained(place)
            seen[name] = {
                "classes": [
                    f"{type(m).__module__}.{type(m).__qualname__}"
                    for m in (config, model, by_class, by_auto, AutoConfig.from_pretrained(place))
                ],
                "modules": [type(m).__qualname__ for m in model.modules()],
                "keys": list(model.state_dict()),
                "auto_keys": list(by_auto.state_dict()),
                "files": sorted(os.listdir(place)),
                "config": json.loads(config.to_json_string()),
                "signature": str(inspect.signature(cls)),
                "outputs": tensors(model, "MultipleChoice" in name),
                "loaded_outputs": tensors(by_class, "MultipleChoice" in name),
            }
    model, info = AutoModel.from_pretrained(minilm, output_loading_info=True)
    seen["minilm"] = {
        "class": type(model).__qualname__,
        "config": json.loads(model.config.to_json_string()),
        "info": {name: sorted(map(str, value)) for name, value in info.items()},
        "outputs": tensors(model, False),
    }
    seen["configs"] = {
        name: str(inspect.signature(getattr(transformers, name)))
        for name in ("BertConfig", "RobertaConfig", "XLMRobertaConfig", "CamembertConfig", "ElectraConfig")
    }
    return seen


def assert_same(ours, stock, path: str = "") -> None:
    if isinstance(stock, dict):
        assert ours.keys() == stock.keys(), path
        for name in stock:
            assert_same(ours[name], stock[name], f"{path}/{name}")
    elif isinstance(stock, list):
        assert len(ours) == len(stock), path
        for index, (a, b) in enumerate(zip(ours, stock)):
            assert_same(a, b, f"{path}/{index}")
    elif isinstance(stock, torch.Tensor):
        assert torch.equal(ours, stock), path
    else:
        assert ours == stock, path


@pytest.mark.parametrize(
    "families", [["bert"], pytest.param([name for name in FAMILIES if name != "bert"], marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_stock_classes_compute_and_save_what_they_do_without_the_plugin(families, minilm, tmp_path):
    source = f"import inspect\nimport torch\n{inspect.getsource(aligned)}\n{inspect.getsource(observe_stock)}"
    arguments = f"{families!r}, {SIZES!r}, {minilm!r}, {str(tmp_path / 'without')!r}"
    result = tmp_path / "stock.pt"
    run_fresh(
        f"{source}\ntorch.save(observe_stock({arguments}), {str(result)!r})",
        tmp_path / "cache",
        plugin=False,
    )
    stock = torch.load(result)
    assert sum(len(heads(family)) for family in families) == len(stock) - 2
    silent = {name for name, entry in stock.items() if name != "configs" and not entry["outputs"]}
    assert silent == {cls.__name__ for family in families for cls in heads(family) if not stock_computes(cls)}
    assert_same(observe_stock(families, SIZES, minilm, str(tmp_path / "with")), stock)


@pytest.mark.slow
def test_importing_the_plugin_imports_nothing_heavy_of_its_own(tmp_path):
    printed = run_fresh(
        "import sys\n"
        "import transformers\n"
        "from transformers.models.bert import modeling_bert\n"
        "from transformers.models.roberta import modeling_roberta\n"
        "from transformers.models.xlm_roberta import modeling_xlm_roberta\n"
        "from transformers.models.camembert import modeling_camembert\n"
        "from transformers.models.electra import modeling_electra\n"
        "before = set(sys.modules)\n"
        "import hf_posenc\n"
        "print('ADDED', *sorted({name.split('.')[0] for name in set(sys.modules) - before}))\n",
        tmp_path,
        plugin=True,
    )
    [line] = [line for line in printed.splitlines() if line.startswith("ADDED")]
    added = set(line.split()[1:])
    assert "hf_posenc" in added
    heavy = {
        "datasets",
        "matplotlib",
        "peft",
        "accelerate",
        "evaluate",
        "sklearn",
        "pandas",
        "scipy",
        "onnx",
        "triton",
    }
    assert not added & heavy


@pytest.mark.parametrize("family", FAMILIES)
def test_models_without_a_flag_are_exactly_of_the_stock_classes(family):
    config = stock_config(family)
    assert type(config) is STOCK_CONFIGS[family]
    for stock in heads(family):
        assert type(stock(config)) is stock
        assert type(stock(config=config)) is stock
    # An old config.json has this key, and people add entries of their own.
    config = stock_config(family, position_embedding_type="absolute", my_own_entry=3)
    assert type(config) is STOCK_CONFIGS[family]
    assert type(heads(family)[0](config)) is heads(family)[0]


def test_flags_given_as_none_are_not_given(tmp_path):
    BertModel(stock_config()).save_pretrained(tmp_path)
    assert type(BertConfig(position_scheme=None, position_combine=None)) is BertConfig
    assert type(AutoConfig.from_pretrained(tmp_path, position_scheme=None)) is BertConfig
    assert type(AutoModel.from_pretrained(tmp_path, position_scheme=None, position_buckets=None)) is BertModel
    assert type(BertModel.from_pretrained(tmp_path, position_scheme=None)) is BertModel


def test_unused_keywords_are_returned_as_ever(tmp_path):
    BertModel(stock_config()).save_pretrained(tmp_path)
    config, unused = AutoConfig.from_pretrained(tmp_path, return_unused_kwargs=True, hidden_dropout_prob=0.3, other=1)
    assert (type(config), config.hidden_dropout_prob, unused) == (BertConfig, 0.3, {"other": 1})
    config, unused = AutoConfig.from_pretrained(tmp_path, return_unused_kwargs=True, position_scheme="t5", other=1)
    assert (type(config), config.position_scheme, unused) == (PosencBertConfig, "t5", {"other": 1})


@pytest.mark.parametrize("config", [stock_config(), stock_config(position_scheme="absolute+t5", position_buckets=8)])
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), dataclasses.replace],
    ids=["copy", "deepcopy", "pickle", "replace"],
)
def test_configs_can_be_copied(config, duplicate):
    other = duplicate(config)
    assert type(other) is type(config) and other is not config
    assert other == config and other.to_dict() == config.to_dict()


@pytest.mark.parametrize("position_scheme", [None, "absolute+t5"])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_models_can_be_copied(position_scheme, duplicate):
    model = BertModel(stock_config()).eval() if position_scheme is None else build(position_scheme)
    other = duplicate(model)
    assert type(other) is type(model)
    batch = inputs()
    expected = model(**batch).last_hidden_state
    assert torch.equal(other(**batch).last_hidden_state, expected)
    # The copy has parameters of its own, those that layers share too.
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    assert torch.equal(model(**batch).last_hidden_state, expected)
    assert not torch.allclose(other(**batch).last_hidden_state, expected, atol=0.1)


def replicate(model: torch.nn.Module) -> torch.nn.Module:
    """A model's replica as `nn.DataParallel` makes them: module by module, with plain tensors for parameters."""
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            replica._modules[name] = replicas.get(child)
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.clone())
    return replicas[model]


@pytest.mark.parametrize("position_scheme", [None, *SCHEMES])
def test_models_can_be_replicated_by_data_parallel(position_scheme):
    """Trainer does so on several GPUs that no launcher has divided."""
    model = BertModel(stock_config()).eval() if position_scheme is None else build(position_scheme)
    replica = replicate(model)
    assert type(replica) is type(model)
    with torch.no_grad():
        assert torch.equal(replica(**inputs()).last_hidden_state, model(**inputs()).last_hidden_state)
        # On a GPU of its own a replica has no parameters but its own.
        for name, parameter in model.encoder.named_parameters():
            module, _, attribute = name.rpartition(".")
            getattr(replica.encoder.get_submodule(module), attribute).mul_(1.5)
            parameter.mul_(1.5)
        assert torch.equal(replica(**inputs()).last_hidden_state, model(**inputs()).last_hidden_state)


@pytest.mark.parametrize("config", [stock_config(), build("t5").config], ids=["stock", "variant"])
def test_new_is_a_static_method_of_configs_too(config):
    assert type(config.__new__(type(config))) is type(config)


def test_other_architectures_keep_keywords_that_look_like_flags():
    config = DebertaV2Config(
        **{**SIZES, "position_buckets": 8, "relative_attention": True, "position_biased_input": False}
    )
    assert (type(config), config.position_buckets) == (DebertaV2Config, 8)
    assert type(DebertaV2Model(config)) is DebertaV2Model
    assert type(DebertaV2Config.from_dict(config.to_dict(), position_buckets=16)) is DebertaV2Config
    assert DebertaV2Config.from_dict(config.to_dict(), position_buckets=16).position_buckets == 16


def test_classes_of_ones_own_may_have_a_position_scheme_of_their_own():
    class OwnConfig(PreTrainedConfig):
        model_type = "own"
        position_scheme: str = "spiral"

    class OwnModel(PreTrainedModel):
        config_class = OwnConfig

        def __init__(self, config, position_scheme=None):
            super().__init__(config)
            self.given = position_scheme

    config = OwnConfig.from_dict({}, position_scheme="helix")
    assert (type(config), config.position_scheme) == (OwnConfig, "helix")
    model = OwnModel(config, position_scheme="zigzag")
    assert (type(model), model.given) == (OwnModel, "zigzag")


def test_an_encoder_decoder_of_stock_parts_stays_stock(tmp_path):
    decoder = stock_config(is_decoder=True, add_cross_attention=True)
    model = EncoderDecoderModel(config=EncoderDecoderConfig.from_encoder_decoder_configs(stock_config(), decoder))
    assert type(model.encoder) is BertModel
    model.save_pretrained(tmp_path)
    again = EncoderDecoderModel.from_pretrained(tmp_path)
    assert {type(module) for module in again.modules()} == {type(module) for module in model.modules()}
    assert type(again.config.encoder) is BertConfig
