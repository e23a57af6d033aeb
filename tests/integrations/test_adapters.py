"""PEFT: default targets in every family, and position parameters that are trained and saved with an adapter."""

import copy
import importlib
import json
import os
import re
import sys
from functools import partial
from pathlib import Path

import peft
import pytest
import tiny
import torch
import transformers
from fresh_process import run_fresh
from packaging.version import Version
from peft import (
    AdaLoraConfig,
    AutoPeftModel,
    AutoPeftModelForSequenceClassification,
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from peft.utils import ModulesToSaveWrapper, constants
from safetensors.torch import load_file, save_file
from tiny import (
    FAMILIES,
    aligned,
    build,
    fill_positions,
    heads,
    inputs,
    schemes_beside,
    stock_config,
    variant_class,
    variant_config,
)
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from hf_posenc import freeze_all_but_positions, position_parameters, train_positions, variants
from hf_posenc.integrations import hooks as plugin
from hf_posenc.integrations import peft as adapters
from hf_posenc.integrations.changes import Changes
from hf_posenc.modeling.schemes.base import AttentionContext
from hf_posenc.modeling.schemes.table import SCHEMES
from hf_posenc.modeling.stock_interface import LOADS_MODULES_TO_SAVE


# Every scheme, in every form that has parameters of its own.
WITH_PARAMETERS = [
    ("sinusoidal", {"position_learn_amplitude": True}),
    ("sinusoidal", {"position_combine": "concat", "position_every_layer": True}),
    ("absolute", {"position_combine": "gate", "position_every_layer": True}),
    ("absolute", {"position_combine": "attention"}),
    ("relative", {}),
    ("relative_key", {}),
    ("relative_key_query", {}),
    ("transformer_xl", {}),
    ("absolute+t5", {}),
    ("absolute+t5", {"position_per_layer": True}),
    ("tupe+t5", {}),
    ("deberta", {}),
    ("deberta", {"position_norm": True}),
    ("deberta", {"position_share_projections": False}),
    ("none+deberta", {"position_form": "paper"}),
]
WITHOUT_PARAMETERS = ["rope", "alibi", "absolute", "none"]
WITH_PARAMETERS += [
    (name, {}) for name in schemes_beside([*WITHOUT_PARAMETERS, *(scheme for scheme, _ in WITH_PARAMETERS)])
]
TOLERANCE = 1e-6


def name_of(case) -> str:
    return ",".join(str(part) for part in case) if isinstance(case, tuple) else str(case)


@torch.no_grad()
def output(model: nn.Module, seed: int = 7) -> torch.Tensor:
    return aligned(model).eval()(**inputs(seed=seed))[0]


def error(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first - second).abs().max().item()


def train(model: nn.Module, steps: int = 10) -> None:
    """Some steps towards random outputs."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=2e-2)
    target = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(1))
    model.train()
    for step in range(steps):
        loss = (model(**inputs(seed=step))[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def saved_base(folder: Path, scheme: str, **overrides) -> str:
    """Folder of a saved variant whose position parameters are not zero."""
    build(scheme, **overrides).save_pretrained(folder)
    return str(folder)


def trained_adapter(base: str, config=None) -> PeftModel:
    model = get_peft_model(AutoModel.from_pretrained(base), config or LoraConfig())
    train_positions(model)
    train(model)
    return model


def without_positions(folder: Path, copy_to: Path) -> str:
    """A copy of an adapter that never had position parameters."""
    copy_to.mkdir()
    config = json.loads((folder / "adapter_config.json").read_text()) | {"modules_to_save": None}
    (copy_to / "adapter_config.json").write_text(json.dumps(config))
    entries = load_file(folder / "adapter_model.safetensors")
    save_file({key: value for key, value in entries.items() if "lora_" in key}, copy_to / "adapter_model.safetensors")
    return str(copy_to)


def opened_by_auto_model(folder: Path, **flags) -> nn.Module:
    """An adapter's folder as `AutoModel` opens it, or, where it says that it cannot, in the way that it says."""
    if Version(transformers.__version__) >= Version(LOADS_MODULES_TO_SAVE):
        return AutoModel.from_pretrained(folder, **flags)
    with pytest.raises(ImportError, match=rf"needs transformers {LOADS_MODULES_TO_SAVE}.*PeftModel\.from_pretrained"):
        AutoModel.from_pretrained(folder, **flags)
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    return PeftModel.from_pretrained(AutoModel.from_pretrained(base, **flags), folder).base_model.model


def add_adapter(model: nn.Module, *args) -> None:
    """transformers' own adapters, where the PEFT that is here is one that this transformers takes."""
    from transformers.integrations.peft import MIN_PEFT_VERSION as wanted

    if Version(peft.__version__) < Version(wanted):
        pytest.skip(f"transformers {transformers.__version__} takes adapters with PEFT {wanted} and newer alone")
    model.add_adapter(LoraConfig(), *args)


def test_the_cases_are_all_schemes():
    names = {name for scheme, _ in WITH_PARAMETERS for name in scheme.split("+")}
    assert names | {*WITHOUT_PARAMETERS} == {*SCHEMES}


# The parts of BERT's layers, and which of a family's do their work.
OWN_NAMES = {
    "distilbert": {
        r"encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)": lambda match: (
            f"transformer.layer.{match[1]}.attention.{match[2][0]}_lin"
        ),
        r"encoder\.layer\.(\d+)\.attention\.output\.dense": r"transformer.layer.\1.attention.out_lin",
        r"encoder\.layer\.(\d+)\.output\.dense": r"transformer.layer.\1.ffn.lin2",
        r"encoder\.layer\.(\d+)\.intermediate\.dense": r"transformer.layer.\1.ffn.lin1",
    },
    "mpnet": {
        r"attention\.self\.(query|key|value)": lambda match: f"attention.attn.{match[1][0]}",
        r"attention\.output\.dense": "attention.attn.o",
    },
}


class TestDefaultTargets:
    def targets(self, model: nn.Module, config_class: type) -> set[str]:
        """Modules that a PEFT method changes by default."""
        parameters = dict(get_peft_model(model, config_class()).named_parameters())
        added = {name for name in parameters if "lora_" in name or "ia3_" in name}
        bare = [name.removeprefix("base_model.").removeprefix("model.") for name in added]
        return {name.split(".lora_")[0].split(".ia3_")[0] for name in bare}

    @tiny.cross(config_class=[LoraConfig, IA3Config, AdaLoraConfig], family=FAMILIES, rest=pytest.mark.slow)
    def test_are_those_of_stock(self, family, config_class):
        if config_class is AdaLoraConfig:

            def config_class():
                return AdaLoraConfig(total_step=10)

        got = self.targets(build("deberta+t5+transformer_xl", family), config_class)
        assert any(name.endswith(f".{FAMILIES[family].family.value}") for name in got)
        assert not [name for name in got if "pos" in name or "rel" in name]
        stock = next(cls for cls in heads(family) if variants.VARIANT_MODELS[cls] is variant_class(family))
        try:
            expected = self.targets(stock(stock_config(family)), config_class)
        except ValueError as no_default:
            # PEFT does not know the stock type itself: that of the family that it is built as, then.
            assert "target_modules" in str(no_default)
            parent = "bert" if family in ("electra", "distilbert") else "roberta"
            stock = next(cls for cls in heads(parent) if variants.VARIANT_MODELS[cls] is variant_class(parent))
            expected = self.targets(stock(stock_config(parent)), config_class)
            for theirs, own in OWN_NAMES.get(family, {}).items():
                expected = {re.sub(theirs, own, name) for name in expected}
        assert got == expected

    def test_are_in_every_table_of_peft_and_nothing_else_changed_there(self):
        tables = {
            name: table
            for name, table in vars(constants).items()
            if name.startswith("TRANSFORMERS_MODELS_TO_") and "bert" in table
        }
        assert len(tables) >= 10
        for name, table in tables.items():
            assert {config.model_type for config in FAMILIES.values()} <= table.keys(), name
            assert table["posenc_bert"] == table["bert"], name
            assert table["posenc_xlm_roberta"] == table.get("xlm-roberta", table["roberta"]), name
            assert "camembert" not in table, name

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "first",
        [
            # Looking whether PEFT is installed, as transformers does, is not importing it.
            "import hf_posenc, importlib.util\nassert importlib.util.find_spec('peft')\nmodel = made()\nimport peft",
            "import hf_posenc, peft\nmodel = made()",
            "import peft\nfrom peft import get_peft_model_state_dict\nimport hf_posenc\nmodel = made()",
        ],
        ids=["plugin, model, peft", "plugin, peft, model", "peft, plugin, model"],
    )
    def test_are_there_in_every_order_of_imports(self, first, tmp_path):
        printed = run_fresh(
            f"""
import sys

def made():
    from transformers import BertConfig, BertModel
    sizes = dict(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    return BertModel(BertConfig(**sizes, position_scheme="transformer_xl"))

{first}
from peft import IA3Config, LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict

for wrapped in (get_peft_model(made(), IA3Config()), get_peft_model(model, LoraConfig())):
    assert any("self.value" in name for name, parameter in wrapped.named_parameters() if parameter.requires_grad)
    hf_posenc.train_positions(wrapped)
    for get in (get_peft_model_state_dict, peft.get_peft_model_state_dict):
        assert any(key.endswith("pos_bias_u.weight") for key in get(wrapped))
print("WAITING", [finder for finder in sys.meta_path if type(finder).__module__ == "hf_posenc.integrations.peft"])
""",
            tmp_path,
            plugin=True,
        )
        assert "WAITING []" in printed

    @pytest.mark.parametrize("code", ["", "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING = {'bert': ['query']}"])
    def test_a_peft_that_lacks_what_is_taught_is_left_in_peace(self, code, tmp_path, monkeypatch):
        (tmp_path / "peft").mkdir()
        (tmp_path / "peft" / "__init__.py").write_text(code)
        for name in [name for name in sys.modules if name.split(".")[0] == "peft"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
        adapters.install(plugin.CONFIGS, Changes())
        stand_in = importlib.import_module("peft")
        assert stand_in.__file__.startswith(str(tmp_path))
        assert not any(isinstance(finder, adapters._PeftImport) for finder in sys.meta_path)
        if code:
            assert stand_in.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["posenc_electra"] == ["query"]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name_of(case), marks=() if case[0] in ("absolute+t5", "tupe+t5") else pytest.mark.slow)
        for case in WITH_PARAMETERS
    ],
)
def test_positions_of_every_scheme_are_trained_saved_loaded_and_merged(case, tmp_path):
    scheme, flags = case
    base = saved_base(tmp_path / "base", scheme, **flags)
    original = output(AutoModel.from_pretrained(base))
    model = get_peft_model(AutoModel.from_pretrained(base), LoraConfig())
    count = train_positions(model)
    positions = position_parameters(model)
    assert count == sum(parameter.numel() for parameter in positions.values()) > 0
    before = copy.deepcopy(positions)
    train(model)
    moved = {name for name, parameter in positions.items() if not torch.equal(parameter, before[name])}
    # A whole row of scores at one value is nothing to softmax, so this one may stay.
    assert moved >= {name for name in positions if "cls_to_others" not in name}
    expected = output(model)
    model.save_pretrained(tmp_path / "adapter")

    # A disabled adapter leaves the function of the base model.
    assert error(expected, original) > 1e-3
    with model.disable_adapter():
        assert error(output(model), original) <= TOLERANCE
    assert not any("modules_to_save" in name for name in model.unload().state_dict())

    lossy = PeftModel.from_pretrained(
        AutoModel.from_pretrained(base), without_positions(tmp_path / "adapter", tmp_path / "lossy")
    )
    assert error(output(lossy), expected) > 1e-3

    loaded = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "adapter")
    assert error(output(loaded), expected) <= TOLERANCE
    merged = loaded.merge_and_unload()
    assert error(output(merged), expected) <= 1e-5
    merged.save_pretrained(tmp_path / "merged")
    assert error(output(AutoModel.from_pretrained(tmp_path / "merged")), expected) <= 1e-5
    assert merged.state_dict().keys() == AutoModel.from_pretrained(base).state_dict().keys()

    by_auto_class = opened_by_auto_model(tmp_path / "adapter")
    assert type(by_auto_class) is variant_class("bert")
    assert error(output(by_auto_class), expected) <= TOLERANCE


@pytest.mark.parametrize(
    "config_class, family",
    [
        pytest.param(LoraConfig, "bert"),
        pytest.param(IA3Config, "mpnet"),
        *(pytest.param(LoraConfig, name, marks=pytest.mark.slow) for name in ("roberta", "distilbert", "mpnet")),
        *(pytest.param(IA3Config, name, marks=pytest.mark.slow) for name in ("xlm-roberta", "camembert", "electra")),
    ],
)
def test_every_family_and_method_carries_positions(family, config_class, tmp_path):
    flags = {"position_every_layer": True}
    base = saved_base(tmp_path / "base", "sinusoidal+t5+transformer_xl+deberta", family=family, **flags)
    model = trained_adapter(base, config_class())
    expected = output(model)
    model.save_pretrained(tmp_path / "adapter")
    fresh = AutoModel.from_pretrained(base)
    fill_positions(fresh, seed=3)  # so that only what the adapter brings can be right
    loaded = PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    assert error(output(loaded), expected) <= TOLERANCE
    assert error(output(loaded.merge_and_unload()), expected) <= 1e-5
    assert error(output(AutoModel.from_pretrained(base)), expected) > 1e-3


@pytest.mark.parametrize("share", [True, False])
def test_lora_on_the_projections_of_deberta_acts_on_positions_too(share, tmp_path):
    base = saved_base(tmp_path / "base", "deberta", position_share_projections=share)
    model = get_peft_model(AutoModel.from_pretrained(base), LoraConfig(target_modules=["query", "key"]))
    encoder = model.base_model.model.encoder
    attention = encoder.layer[0].attention.self
    scheme = attention.position_schemes[0]

    def tables():
        context = AttentionContext(
            attention, encoder, None, None, None, None, None, prepared=(torch.arange(9), scheme.span)
        )
        [term] = scheme.terms(context)
        return term.query_table, term.key_table

    before = tables()
    train(model)  # positions frozen: what changes comes from the adapter
    changed = [error(old, new) > 1e-3 for old, new in zip(before, tables())]
    assert changed == [share, share]
    expected = output(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "adapter")
    assert error(output(loaded), expected) <= TOLERANCE
    assert error(output(loaded.merge_and_unload()), expected) <= 1e-5


@pytest.mark.slow
def test_adapters_on_every_linear_layer_reach_those_of_the_schemes(tmp_path):
    base = saved_base(tmp_path / "base", "tupe+transformer_xl")
    model = trained_adapter(base, LoraConfig(target_modules="all-linear"))
    assert any("linear_pos.lora_A" in name for name, _ in model.named_parameters())
    expected = output(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "adapter")
    assert error(output(loaded), expected) <= TOLERANCE
    assert error(output(loaded.merge_and_unload()), expected) <= 1e-5
    assert error(output(AutoModel.from_pretrained(base)), expected) > 1e-3
    assert error(output(opened_by_auto_model(tmp_path / "adapter")), expected) <= TOLERANCE


def test_what_an_adapter_changes_itself_is_left_to_it():
    config = LoraConfig(target_modules=["linear_pos", "relative_attention_bias"])
    model = get_peft_model(build("t5+transformer_xl"), config)
    assert train_positions(model) == 2 * 2 * 32
    assert {name.rpartition(".")[2] for name in config.modules_to_save} == {"pos_bias_u", "pos_bias_v"}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    assert any("linear_pos.lora_A" in name for name in trained)


def test_other_modules_that_the_config_names_are_saved_too(tmp_path):
    config = LoraConfig(modules_to_save=["output.LayerNorm"])
    model = get_peft_model(build("t5"), config)
    train_positions(model)
    assert sorted(config.modules_to_save) == ["encoder.relative_attention_bias", "output.LayerNorm"]
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert any("output.LayerNorm" in key for key in saved) and any("relative_attention_bias" in key for key in saved)


@pytest.mark.slow
def test_modules_that_the_config_names_already_are_not_wrapped_twice(tmp_path):
    base = saved_base(tmp_path / "base", "absolute+t5+transformer_xl")
    config = LoraConfig(modules_to_save=["relative_attention_bias", "linear_pos"])
    model = trained_adapter(base, config)
    named = ["relative_attention_bias", "linear_pos", "pos_bias_u", "pos_bias_v"]
    assert {name.rpartition(".")[2] for name in config.modules_to_save} == {*named}
    assert len(config.modules_to_save) == 2 + 2 * 2
    wrapped = [name for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    assert len(wrapped) == 1 + 3 * 2
    stock = [p for name, p in model.named_parameters() if "original_module" in name]
    assert len(stock) == 7 and not any(p.requires_grad for p in stock)
    expected = output(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "adapter")
    assert error(output(loaded), expected) <= TOLERANCE


@pytest.mark.slow
def test_what_is_trained_is_what_modules_to_save_of_peft_alone_would_train(tmp_path):
    base = saved_base(tmp_path / "base", "absolute+t5+transformer_xl+tupe", position_every_layer=True)
    modules = sorted({name.rpartition(".")[0] for name in position_parameters(AutoModel.from_pretrained(base))})
    results = []
    for config in (LoraConfig(modules_to_save=modules), LoraConfig()):
        torch.manual_seed(0)
        model = get_peft_model(AutoModel.from_pretrained(base), config)
        if config.modules_to_save is None:
            train_positions(model)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        train(model, steps=3)
        results.append((trained, sorted(config.modules_to_save), peft.get_peft_model_state_dict(model)))
    (trained, named, entries), (own, own_named, own_entries) = results
    assert own == trained and own_named == named and own_entries.keys() == entries.keys()
    assert all(torch.equal(own_entries[key], entries[key]) for key in entries)
    assert {f"base_model.model.{name}.weight" for name in modules} <= entries.keys()


def test_no_function_of_peft_that_saves_or_loads_is_replaced():
    for name in ("get_peft_model_state_dict", "set_peft_model_state_dict"):
        found = {
            getattr(module, name)
            for key, module in [*sys.modules.items()]
            if key.split(".")[0] == "peft" and getattr(module, name, None) is not None
        }
        assert {(function.__module__, hasattr(function, "__wrapped__")) for function in found} == {
            ("peft.utils.save_and_load", False)
        }


@pytest.mark.slow
def test_positions_survive_loading_and_saving_again(tmp_path):
    base = saved_base(tmp_path / "base", "absolute+t5+transformer_xl")
    model = trained_adapter(base)
    expected = output(model)
    model.save_pretrained(tmp_path / "first")
    again = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "first", is_trainable=True)
    again.save_pretrained(tmp_path / "second")
    first, second = (load_file(tmp_path / part / "adapter_model.safetensors") for part in ("first", "second"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    assert sum("pos_bias_u" in key for key in second) == 2

    # Training goes on, and where the adapter was loaded for inference, when it is called for.
    assert all(parameter.requires_grad for parameter in position_parameters(again).values())
    frozen = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "first")
    assert not any(parameter.requires_grad for parameter in position_parameters(frozen).values())
    assert train_positions(frozen) == train_positions(model) == train_positions(again)
    assert all(parameter.requires_grad for parameter in position_parameters(frozen).values())
    train(again, steps=3)
    assert error(output(again), expected) > 1e-3
    again.save_pretrained(tmp_path / "third")
    third = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "third")
    assert error(output(third), output(again)) <= TOLERANCE


@pytest.mark.parametrize("unwrap", [True, False])
@pytest.mark.slow
def test_positions_are_found_in_a_compiled_model(unwrap):
    model = get_peft_model(build("absolute+t5+transformer_xl"), LoraConfig())
    compiled = torch.compile(model)
    assert train_positions(compiled) == train_positions(model) > 0
    expected = peft.get_peft_model_state_dict(model)
    assert sum("lora_" not in key for key in expected) == len(position_parameters(model))
    prefix = "" if unwrap else "_orig_mod."
    found = peft.get_peft_model_state_dict(compiled, unwrap_compiled=unwrap)
    assert found.keys() == {f"{prefix}{key}" for key in expected}


@pytest.mark.slow
def test_prompts_carry_positions(tmp_path):
    base = saved_base(tmp_path / "base", "absolute+t5+transformer_xl")
    prompts = PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=2)
    model = get_peft_model(AutoModel.from_pretrained(base), prompts)
    train_positions(model)
    fill_positions(model, seed=3)
    expected = output(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "adapter")
    assert error(output(loaded), expected) <= TOLERANCE
    for wrapper in [module for module in loaded.modules() if isinstance(module, ModulesToSaveWrapper)]:
        wrapper.enable_adapters(False)
    assert error(output(loaded), expected) > 1e-3


def test_adapters_that_transformers_itself_added_carry_positions(tmp_path):
    base = saved_base(tmp_path / "base", "absolute+t5+transformer_xl")
    model = AutoModel.from_pretrained(base)
    add_adapter(model)
    train_positions(model)
    train(model)
    expected = output(model)
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "adapter")
    assert error(output(loaded), expected) <= TOLERANCE
    assert error(output(AutoModel.from_pretrained(base)), expected) > 1e-3
    assert error(output(opened_by_auto_model(tmp_path / "adapter")), expected) <= TOLERANCE


def test_two_adapters_of_transformers_have_positions_each(tmp_path):
    base = saved_base(tmp_path / "base", "absolute+t5+transformer_xl")
    model = AutoModel.from_pretrained(base)
    for name in ("first", "second"):
        add_adapter(model, name)
    outputs = {}
    for name in ("first", "second"):
        train_positions(model, name)
    for name in ("first", "second"):
        model.set_adapter(name)
        train(model, steps=3 if name == "first" else 6)
        outputs[name] = output(model)
    assert error(outputs["first"], outputs["second"]) > 1e-3
    model.set_adapter("first")
    assert error(output(model), outputs["first"]) <= TOLERANCE


def test_transformers_own_methods_need_the_peft_that_it_names_and_loading_does_not(tmp_path):
    from transformers.integrations.peft import MIN_PEFT_VERSION as wanted

    if Version(transformers.__version__) < Version(LOADS_MODULES_TO_SAVE):
        pytest.skip(f"before {LOADS_MODULES_TO_SAVE}, adapters with positions are not loaded")
    base = saved_base(tmp_path / "base", "absolute+t5")
    trained = trained_adapter(base)
    trained.save_pretrained(tmp_path / "adapter")
    model = AutoModel.from_pretrained(base)
    before = output(model)
    model.load_adapter(str(tmp_path / "adapter"))
    assert error(output(model), output(trained)) <= TOLERANCE < error(output(model), before)
    methods = {
        "set_adapter": ("default",),
        "active_adapters": (),
        "disable_adapters": (),
        "enable_adapters": (),
        "save_pretrained": (tmp_path / "again",),
        "delete_adapter": ("default",),
    }
    calls = [partial(getattr(model, name), *arguments) for name, arguments in methods.items()]
    for call in (partial(AutoModel.from_pretrained(base).add_adapter, LoraConfig()), *calls):
        if Version(peft.__version__) < Version(wanted):
            with pytest.raises(ValueError, match=f"version of PEFT .* >= {wanted}"):
                call()
        else:
            call()


class TestAutoClasses:
    """Of PEFT: an adapter leads to the variant that it was trained on."""

    def test_lead_to_a_saved_variant(self, tmp_path):
        model = trained_adapter(saved_base(tmp_path / "base", "absolute+t5"))
        model.save_pretrained(tmp_path / "adapter")
        loaded = AutoPeftModel.from_pretrained(tmp_path / "adapter")
        assert type(loaded.get_base_model()) is variant_class("bert")
        assert error(output(loaded), output(model)) <= TOLERANCE

    def test_lead_to_a_saved_classifier_with_the_head_that_was_trained(self, tmp_path):
        base = saved_base(tmp_path / "base", "deberta", head="ForSequenceClassification")
        model = get_peft_model(
            AutoModelForSequenceClassification.from_pretrained(base), LoraConfig(task_type="SEQ_CLS")
        )
        train_positions(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) / 10)
        model.save_pretrained(tmp_path / "adapter")
        expected = output(model)
        loaded = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter")
        assert type(loaded.get_base_model()) is variant_class("bert", "ForSequenceClassification")
        assert error(output(loaded), expected) <= TOLERANCE
        assert error(output(AutoModelForSequenceClassification.from_pretrained(base)), expected) > 1e-3

    def test_need_the_flag_again_where_the_base_is_stock(self, tmp_path):
        BertModel(stock_config()).save_pretrained(tmp_path / "stock")
        model = get_peft_model(
            AutoModel.from_pretrained(tmp_path / "stock", position_scheme="absolute+t5"), LoraConfig()
        )
        train_positions(model)
        train(model)
        model.save_pretrained(tmp_path / "adapter")
        loaded = AutoPeftModel.from_pretrained(tmp_path / "adapter", position_scheme="absolute+t5")
        assert error(output(loaded), output(model)) <= TOLERANCE
        # PEFT passes over modules that the model lacks.
        without = AutoPeftModel.from_pretrained(tmp_path / "adapter")
        assert not position_parameters(without) and error(output(without), output(model)) > 1e-3
        loaded = opened_by_auto_model(tmp_path / "adapter", position_scheme="absolute+t5")
        assert error(output(loaded), output(model)) <= TOLERANCE


@pytest.mark.slow
def test_trainer_trains_and_saves_positions_with_the_adapter(tmp_path):
    base = saved_base(tmp_path / "base", "absolute+t5+transformer_xl", head="ForSequenceClassification")
    model = get_peft_model(AutoModelForSequenceClassification.from_pretrained(base), LoraConfig(task_type="SEQ_CLS"))
    train_positions(model)
    before = copy.deepcopy(position_parameters(model))
    rows = [
        {name: value[0] for name, value in inputs(batch=1, seed=seed).items()} | {"labels": seed % 2}
        for seed in range(8)
    ]
    arguments = {"output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    arguments |= {"max_steps": 10, "save_steps": 10, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    trainer = Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=rows)
    trainer.train()
    assert all(not torch.equal(value, before[name]) for name, value in position_parameters(model).items())
    fresh = AutoModelForSequenceClassification.from_pretrained(base)
    loaded = PeftModel.from_pretrained(fresh, tmp_path / "out" / "checkpoint-10")
    assert error(output(loaded), output(model)) <= TOLERANCE

    # And a later run goes on from there.
    model = get_peft_model(AutoModelForSequenceClassification.from_pretrained(base), LoraConfig(task_type="SEQ_CLS"))
    train_positions(model)
    trainer = Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=rows)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-10"))  # nothing is left to do
    assert error(output(model), output(loaded)) <= TOLERANCE


def test_adapters_have_positions_of_their_own(tmp_path):
    base = saved_base(tmp_path / "base", "absolute+t5+transformer_xl")
    original = output(AutoModel.from_pretrained(base))
    model = trained_adapter(base)
    expected = {"default": output(model)}
    model.add_adapter("second", LoraConfig())
    model.add_adapter("third", LoraConfig())
    model.set_adapter("second")
    # Until it has its own, an adapter sees the base model's.
    assert error(output(model), original) <= TOLERANCE
    count = train_positions(model)
    train(model, steps=5)
    expected["second"] = output(model)
    assert error(expected["second"], expected["default"]) > 1e-3
    # One that is not active can be named, and gets no gradient before it is.
    assert train_positions(model, "third") == count
    thirds = [parameter for name, parameter in position_parameters(model).items() if ".third." in name]
    assert sum(parameter.numel() for parameter in thirds) == count
    assert not any(parameter.requires_grad for parameter in thirds)
    assert error(output(model), expected["second"]) <= TOLERANCE
    model.set_adapter("third")
    assert all(parameter.requires_grad for parameter in thirds)
    assert error(output(model), original) <= TOLERANCE
    for name in expected:
        model.set_adapter(name)
        assert error(output(model), expected[name]) <= TOLERANCE

    model.save_pretrained(tmp_path / "adapters", selected_adapters=["default", "second"])
    loaded = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "adapters")
    loaded.load_adapter(tmp_path / "adapters" / "second", "second")
    assert error(output(loaded), expected["default"]) <= TOLERANCE
    loaded.set_adapter("second")
    assert error(output(loaded), expected["second"]) <= TOLERANCE
    loaded.delete_adapter("default")
    assert error(output(loaded.merge_and_unload()), expected["second"]) <= 1e-5


@pytest.mark.parametrize("scheme", [*WITHOUT_PARAMETERS, "sinusoidal"])
def test_schemes_without_parameters_have_nothing_to_train(scheme):
    config = LoraConfig()
    model = get_peft_model(build(scheme), config)
    assert train_positions(model) == 0
    assert config.modules_to_save is None
    with pytest.raises(ValueError, match="no position parameters"):
        freeze_all_but_positions(build(scheme))


def test_train_positions_says_what_it_cannot_do():
    with pytest.raises(TypeError, match="get_peft_model"):
        train_positions(build("t5"))
    with pytest.raises(ValueError, match="no position_scheme"):
        train_positions(get_peft_model(BertModel(stock_config()), LoraConfig()))
    model = get_peft_model(build("t5"), LoraConfig())
    model.add_adapter("second", LoraConfig())
    with pytest.raises(ValueError, match="'third'.*default, second"):
        train_positions(model, "third")
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="2 adapters are active, of default, second"):
        train_positions(model)


@pytest.mark.parametrize("case", WITH_PARAMETERS, ids=name_of)
def test_positions_only_trains_positions_only(case):
    scheme, flags = case
    model = build(scheme, head="ForSequenceClassification", **flags)
    before = copy.deepcopy(model.state_dict())
    count = freeze_all_but_positions(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == position_parameters(model).keys()
    assert count == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        model(**inputs(seed=step), labels=torch.tensor([0, 1, 1])).loss.backward()
        optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed <= trained
    assert changed >= {name for name in trained if "cls_to_others" not in name}


def test_the_count_of_position_parameters_is_that_of_the_formulas():
    layers, heads_, width = 2, 4, 32
    expected = {
        "t5": 32 * heads_,
        "deberta": 2 * 256 * width,
        "transformer_xl": layers * (width * width + 2 * width),
        "relative": layers * 2 * (2 * 64 + 1) * (width // heads_),
        "relative_key": layers * (2 * 64 - 1) * (width // heads_),
        "tupe": 2 * width + 2 * (width * width + width) + 2 * heads_,
        "sinusoidal": 1,
    }
    for scheme, count in expected.items():
        flags = {"position_learn_amplitude": True} if scheme == "sinusoidal" else {}
        model = variant_class("bert")(variant_config("bert", position_scheme=scheme, **flags))
        assert train_positions(get_peft_model(model, LoraConfig())) == count, scheme
        assert freeze_all_but_positions(model) == count, scheme


@pytest.mark.slow
def test_an_adapter_for_minilm_with_deberta_is_under_2_percent_of_the_model(minilm, tmp_path):
    model: PreTrainedModel = AutoModel.from_pretrained(minilm, position_scheme="deberta")
    model.save_pretrained(tmp_path / "base")
    model = get_peft_model(AutoModel.from_pretrained(tmp_path / "base"), LoraConfig())
    train_positions(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 5)
    model.save_pretrained(tmp_path / "adapter")
    sizes = [
        os.path.getsize(tmp_path / file) for file in ("adapter/adapter_model.safetensors", "base/model.safetensors")
    ]
    assert sizes[0] < 0.02 * sizes[1]
    loaded = PeftModel.from_pretrained(AutoModel.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert error(output(loaded), output(model)) <= TOLERANCE
    assert error(output(AutoModel.from_pretrained(tmp_path / "base")), output(model)) > 1e-3


@torch.no_grad()
def fill_lora(model: nn.Module) -> None:
    """LoRA starts at zero, where it proves nothing."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)


@tiny.cross(scheme=["absolute", "absolute+t5", "tupe", "absolute+tupe"], family=FAMILIES, strength=1)
def test_lora_on_the_table_of_absolute_positions(scheme, family, tmp_path):
    model = build(scheme, family)
    batch = inputs(family=family)
    before = model(**batch)[0]
    adapted = get_peft_model(model, LoraConfig(target_modules=["position_embeddings"], r=4))
    fill_lora(adapted)
    expected = adapted.eval()(**batch)[0]
    assert error(expected, before) > 1e-2
    adapted.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(build(scheme, family), tmp_path).eval()
    assert error(again(**batch)[0], expected) < 10 * TOLERANCE
    assert error(again.merge_and_unload()(**batch)[0], expected) < 100 * TOLERANCE


@pytest.mark.parametrize(
    "scheme, flags", [("sinusoidal", {}), ("absolute", {"position_combine": "concat", "position_width": 8})]
)
def test_lora_on_the_word_embeddings(scheme, flags):
    model, batch = build(scheme, **flags), inputs()
    before = model(**batch)[0]
    adapted = get_peft_model(model, LoraConfig(target_modules=["word_embeddings"], r=4))
    fill_lora(adapted)
    expected = adapted.eval()(**batch)[0]
    assert error(expected, before) > 1e-2
    assert error(adapted.merge_and_unload()(**batch)[0], expected) < 100 * TOLERANCE


@pytest.mark.parametrize("scheme", ["absolute", "sinusoidal", "sinusoidal+tupe"])
def test_lora_on_electras_projection_acts_on_repeated_positions_too(scheme):
    model, batch = build(scheme, "electra", position_every_layer=True), inputs(family="electra")
    before = model(**batch)[0]
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4))
    assert hasattr(adapted.base_model.model.embeddings_project, "lora_A")
    fill_lora(adapted)
    expected = adapted.eval()(**batch)[0]
    assert error(expected, before) > 1e-2
    assert error(adapted.merge_and_unload()(**batch)[0], expected) < 100 * TOLERANCE


def with_two_adapters(scheme: str, targets: list[str] | str, positions: bool = False, **flags) -> nn.Module:
    model = build(scheme, **flags)
    for name in ("one", "two"):
        config = LoraConfig(target_modules=targets, init_lora_weights=False, r=4)
        if name == "one":
            model = get_peft_model(model, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
        if positions:
            train_positions(model, name)
    return model.eval()


def alone(model: nn.Module, batch: dict, name: str) -> torch.Tensor:
    if name == "__base__":
        with model.disable_adapter():
            return model(**batch).last_hidden_state
    model.set_adapter(name)
    return model(**batch).last_hidden_state


OWN = {"position_share_projections": False}
ATTENTION_SCHEMES = [
    "relative",
    "relative_key",
    "relative_key_query",
    "transformer_xl",
    "t5",
    "tupe",
    "deberta",
    "kerple",
]
ADAPTER_NAMES = ["one", "__base__", "two", "one", "two", "__base__"]


@torch.no_grad()
@tiny.cross(scheme=SCHEMES, padding=[None, "right"], strength=1)
def test_every_sequence_of_a_batch_may_have_its_adapter(scheme, padding):
    flags = OWN if scheme == "deberta" else {}
    model, batch = with_two_adapters(scheme, ["query", "key", "value"], **flags), inputs(6, 40, padding=padding)
    batch["attention_mask"][:, 20:] = 1 if padding is None else 0
    found = model(**batch, adapter_names=ADAPTER_NAMES).last_hidden_state
    for row, name in enumerate(ADAPTER_NAMES):
        own, other = (
            alone(model, {key: value[row : row + 1] for key, value in batch.items()}, adapter)
            for adapter in (name, "one" if name == "two" else "two")
        )
        attended = batch["attention_mask"][row].bool()
        torch.testing.assert_close(found[row, attended], own[0, attended], rtol=0, atol=1e-5)
        assert (own - other)[0, attended].abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize(
    "flags", [{}, {"position_form": "paper", "position_init": "paper"}], ids=["checkpoint", "paper"]
)
@pytest.mark.parametrize("length", [2, 20])
def test_an_adapter_per_sequence_is_refused_where_positions_go_through_it(flags, length):
    """Where there are as many rows in the table as sequences too: PEFT would take the ones for the others."""
    model, names = with_two_adapters("deberta", ["query", "key"], **flags), ["one", "two", "one"]
    batch = inputs(3, length, padding=None)
    with pytest.raises(
        ValueError, match="projections of .*attention.self, which positions go through.*one adapter at a time"
    ):
        model(**batch, adapter_names=names)
    model.set_adapter("two")
    model(**batch)
    model = with_two_adapters("deberta", ["value"], **flags)
    expected = alone(model, batch, "two")
    torch.testing.assert_close(model(**batch, adapter_names=["two"] * 3).last_hidden_state, expected)


@torch.no_grad()
@pytest.mark.parametrize(
    "scheme, targets, positions",
    [
        *((scheme, ["value"], True) for scheme in ATTENTION_SCHEMES),
        ("transformer_xl", "all-linear", False),
        ("tupe", "all-linear", False),
        ("deberta", "all-linear", False),
    ],
)
def test_an_adapter_per_sequence_is_refused_where_positions_are_part_of_it(scheme, targets, positions):
    model = with_two_adapters(scheme, targets, positions)
    with pytest.raises(
        ValueError, match="the adapters change .*encoder.* all sequences of a batch have the same positions"
    ):
        model(**inputs(6, 20), adapter_names=ADAPTER_NAMES)
    alone(model, inputs(6, 20), "one")


@torch.no_grad()
def test_adapters_of_positions_in_the_embeddings_are_mixed_where_they_are_given_sequences():
    model = with_two_adapters("absolute", ["value"], True, position_combine="gate")
    batch, names = inputs(3, padding=None), ["one", "two", "__base__"]
    found = model(**batch, adapter_names=names).last_hidden_state
    for row, name in enumerate(names):
        own = alone(model, {key: value[row : row + 1] for key, value in batch.items()}, name)
        torch.testing.assert_close(found[row], own[0], rtol=0, atol=1e-5)
    model = with_two_adapters("sinusoidal", ["value"], True, position_learn_amplitude=True)
    with pytest.raises(ValueError, match="the adapters change .*embeddings"):
        model(**batch, adapter_names=names)
