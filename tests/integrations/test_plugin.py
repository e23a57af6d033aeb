"""The plugin is a good guest in transformers and PEFT: it calls what it finds there, and leaves everything as it was."""

import copy
import inspect
import shutil
import sys
import types
from pathlib import Path

import pytest
import tiny
import transformers
from fresh_process import ROOT, run_fresh
from tiny import FAMILIES, SIZES, build, inputs, stock_config, variant_config
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    PreTrainedConfig,
)
from transformers.models.bert import modeling_bert

import hf_posenc
from hf_posenc.integrations import hooks as plugin


PRELUDE = f"""
import sys
sys.path.insert(0, {str(Path(tiny.__file__).parent)!r})
import importlib
import transformers
from snapshots import differences, modules_of_peft, snapshot
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, BertForMaskedLM, BertModel, PreTrainedConfig, PreTrainedModel
SIZES = {SIZES!r}
BertModel(BertConfig(**SIZES))  # transformers notes in its classes what it finds out about them
"""


def fresh(code: str, folder: Path) -> str:
    """Run code that ends with "DONE" in a process that has not imported the plugin yet."""
    printed = run_fresh(PRELUDE + code + "\nprint('DONE')", folder / "cache", plugin=True)
    assert "DONE" in printed
    return printed


@pytest.mark.parametrize(
    "peft_before, peft_after",
    [
        pytest.param(False, False, id="no-peft"),
        pytest.param(True, False, id="peft-first"),
        pytest.param(False, True, id="peft-later"),
    ],
)
@pytest.mark.slow
def test_uninstall_puts_everything_back(peft_before, peft_after, tmp_path):
    fresh(
        f"""
if {peft_before}:
    import peft.auto
before = snapshot()
import hf_posenc
assert type(BertConfig(position_scheme="t5")) is hf_posenc.PosencBertConfig
if {peft_after}:
    import peft.auto
    from peft.utils import constants
for _ in range(2):
    changed = differences(before, snapshot())
    assert len(changed) > 50, changed
    hf_posenc.uninstall()
    left = differences(before, snapshot())
    if {peft_after}:
        # There is no snapshot of PEFT from before, but it can be told what is not its own.
        left = [(owner, name) for owner, name in left if owner not in modules_of_peft()]
        tables = [value for name, value in vars(constants).items() if name.startswith("TRANSFORMERS_MODELS_TO_")]
        assert tables and not any("posenc" in key for table in tables for key in table)
        functions = [(name, value) for module in modules_of_peft() for name, value in vars(module).items()]
        codes = {{name: getattr(value, "__code__", None) for name, value in functions}}
        assert not [name for name, code in codes.items() if code is not None and "hf_posenc" in code.co_filename]
    assert not left, left
    hf_posenc.uninstall()  # twice is once
    assert {peft_after} or not differences(before, snapshot())

    # Flags are what they are to transformers by itself: entries that nobody reads.
    config = BertConfig(**SIZES, position_scheme="t5")
    assert type(config) is BertConfig and type(BertModel(config)) is BertModel
    assert type(AutoModel.from_config(config)) is BertModel
    try:
        transformers.AutoConfig.for_model("posenc_bert")
    except ValueError:
        pass
    else:
        raise AssertionError
    hf_posenc.install()
    hf_posenc.install()
    assert type(BertModel(BertConfig(**SIZES, position_scheme="t5"))) is hf_posenc.PosencBertModel
    assert type(transformers.AutoConfig.for_model("posenc_bert")) is hf_posenc.PosencBertConfig
""",
        tmp_path,
    )


@pytest.mark.slow
def test_what_stays_of_new_makes_what_transformers_makes(tmp_path):
    """A `__new__` that stays behind passes on, to what is behind it in the order of bases."""
    fresh(
        """
import copy, pickle
import hf_posenc
hf_posenc.uninstall()
class Counted:
    made = 0
    def __new__(cls, *args, **kwargs):
        Counted.made += 1
        return super().__new__(cls)
class Own(BertModel, Counted):
    pass
config = BertConfig(**SIZES)
model = Own(config)
assert type(model) is Own and Counted.made == 1
assert type(copy.deepcopy(BertModel(config))) is type(pickle.loads(pickle.dumps(BertModel(config)))) is BertModel
assert type(model.__new__(BertModel)) is BertModel
assert "__init__" not in vars(config.__new__(BertConfig))
standing = vars(PreTrainedModel)["__new__"]
for _ in range(5):  # and it does not pile up
    hf_posenc.install()
    hf_posenc.uninstall()
assert vars(PreTrainedModel)["__new__"] is standing
""",
        tmp_path,
    )


OTHER = """
calls = []
def hook_all():
    # Another plugin, written as such are: it keeps what it found, and calls it.
    found_new = PreTrainedModel.__new__
    def new_model(cls, *args, **kwargs):
        calls.append(("model", cls.__name__))
        return found_new(cls) if found_new is object.__new__ else found_new(cls, *args, **kwargs)
    found_new_config = PreTrainedConfig.__new__
    def new_config(cls, *args, **kwargs):
        calls.append(("config", cls.__name__))
        return found_new_config(cls) if found_new_config is object.__new__ else found_new_config(cls, *args, **kwargs)
    found_from_dict = PreTrainedConfig.from_dict.__func__
    def from_dict(cls, config_dict, **kwargs):
        calls.append(("from_dict", cls.__name__))
        return found_from_dict(cls, config_dict, **kwargs)
    found_get = PreTrainedConfig.get_config_dict.__func__
    def get_config_dict(cls, *args, **kwargs):
        calls.append(("get_config_dict", cls.__name__))
        return found_get(cls, *args, **kwargs)
    found = {(PreTrainedModel, "__new__"): vars(PreTrainedModel).get("__new__")}
    for name in ("__new__", "from_dict", "get_config_dict"):
        found[PreTrainedConfig, name] = vars(PreTrainedConfig).get(name)
    PreTrainedModel.__new__ = staticmethod(new_model)
    PreTrainedConfig.__new__ = staticmethod(new_config)
    PreTrainedConfig.from_dict = classmethod(from_dict)
    PreTrainedConfig.get_config_dict = classmethod(get_config_dict)
    return found
HOOKS = [(PreTrainedModel, "__new__"), *((PreTrainedConfig, name) for name in ("__new__", "from_dict", "get_config_dict"))]
def standing():
    return [vars(owner)[name] for owner, name in HOOKS]
"""


def saved_stock(folder: Path) -> str:
    BertModel(stock_config()).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_hooks_call_what_they_found(tmp_path):
    folder = saved_stock(tmp_path / "stock")
    fresh(
        OTHER
        + f"""
hook_all()
theirs = standing()
import hf_posenc
for scheme, prefix in ((None, ""), ("t5", "Posenc")):
    calls.clear()
    model = AutoModel.from_pretrained({folder!r}, position_scheme=scheme)
    assert type(model).__name__ == prefix + "BertModel"
    assert {{("model", prefix + "BertModel"), ("config", prefix + "BertConfig"), ("from_dict", prefix + "BertConfig")}} <= {{*calls}}
    assert [name for name, _ in calls].count("get_config_dict") == 1, calls
    calls.clear()
    model = BertModel(BertConfig(**SIZES, position_scheme=scheme))
    assert calls == [("config", prefix + "BertConfig"), ("model", prefix + "BertModel")], calls
class Marked(BertModel):
    def __new__(cls, *args, **kwargs):
        return super().__new__(cls, *args, **kwargs)
calls.clear()
assert type(Marked(BertConfig(**SIZES))) is Marked and calls[-1] == ("model", "Marked")
hf_posenc.uninstall()
assert all(now is before for now, before in zip(standing(), theirs))
calls.clear()
assert type(AutoModel.from_pretrained({folder!r})) is BertModel
assert {{name for name, _ in calls}} == {{"model", "config", "from_dict", "get_config_dict"}}
""",
        tmp_path,
    )


def test_classes_behind_transformers_base_class_make_their_own_objects(tmp_path):
    """`__new__` of a class that comes after `PreTrainedModel` in the order of bases is called, as without the plugin."""

    class Counted:
        made = []

        def __new__(cls, *args, **kwargs):
            Counted.made.append((cls.__name__, len(args), sorted(kwargs)))
            return super().__new__(cls)

    class Model(BertModel, Counted):
        pass

    class Config(BertConfig, Counted):
        pass

    Model(config=Config(**SIZES), add_pooling_layer=False)
    assert Counted.made == [("Config", 0, sorted(SIZES)), ("Model", 0, ["add_pooling_layer", "config"])]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_plugins_that_hook_later_may_leave_in_any_order(order, tmp_path):
    folder = saved_stock(tmp_path / "stock")
    fresh(
        OTHER
        + f"""
import hf_posenc
ours = standing()
found = hook_all()
theirs = standing()
assert type(AutoModel.from_pretrained({folder!r}, position_scheme="t5")) is hf_posenc.PosencBertModel
assert {{name for name, _ in calls}} == {{"model", "config", "from_dict", "get_config_dict"}}
def leave():
    for (owner, name), value in found.items():
        setattr(owner, name, value)
def check_stock():
    assert type(AutoModel.from_pretrained({folder!r})) is BertModel
    assert type(BertModel(BertConfig(**SIZES, position_scheme="t5"))) is BertModel
    assert type(BertConfig.from_dict({{"position_scheme": "t5"}})) is BertConfig
if {order!r} == "ours first":
    hf_posenc.uninstall()
    assert all(now is before for now, before in zip(standing(), theirs))  # not torn from under them
    calls.clear()
    check_stock()
    assert {{name for name, _ in calls}} == {{"model", "config", "from_dict", "get_config_dict"}}
    # While the other one stays, the plugin may come again.
    hf_posenc.install()
    assert type(AutoModel.from_pretrained({folder!r}, position_scheme="t5")) is hf_posenc.PosencBertModel
    hf_posenc.uninstall()
    check_stock()
    leave()  # puts back our hooks, which only pass on
    assert all(now is before for now, before in zip(standing(), ours))
else:
    leave()
    hf_posenc.uninstall()
check_stock()
hf_posenc.install()
assert type(AutoModel.from_pretrained({folder!r}, position_scheme="t5")) is hf_posenc.PosencBertModel
""",
        tmp_path,
    )


def test_signatures_stay():
    assert [*inspect.signature(PreTrainedConfig.from_dict).parameters] == ["config_dict", "kwargs"]
    assert [*inspect.signature(PreTrainedConfig.get_config_dict).parameters] == [
        "pretrained_model_name_or_path",
        "kwargs",
    ]


@pytest.mark.slow
class TestTwiceIsOnce:
    def test_installed_again_and_reloaded(self, tmp_path):
        fresh(
            OTHER
            + """
before = snapshot()
import hf_posenc
ours = standing()
hf_posenc.install()
importlib.reload(hf_posenc)
assert all(now is then for now, then in zip(standing(), ours))
again = importlib.reload(hf_posenc.integrations.hooks)
importlib.reload(hf_posenc)
assert not any(now is then for now, then in zip(standing(), ours))
assert type(BertModel(BertConfig(**SIZES, position_scheme="t5"))) is hf_posenc.PosencBertModel
assert [type(finder).__module__ for finder in sys.meta_path].count("hf_posenc.integrations.peft") == 1
hf_posenc.uninstall()
assert not differences(before, snapshot())
assert type(BertConfig(position_scheme="t5")) is BertConfig
""",
            tmp_path,
        )

    @pytest.mark.parametrize("peft", [False, True])
    def test_the_copy_that_is_imported_last_is_in_charge(self, peft, tmp_path):
        shutil.copytree(ROOT / "hf_posenc", tmp_path / "copy" / "hf_posenc")
        printed = fresh(
            f"""
import importlib.util
if {peft}:
    import peft.auto
before = snapshot()
import hf_posenc as first
for name in [name for name in sys.modules if name.split(".")[0] == "hf_posenc"]:
    del sys.modules[name]
sys.path.insert(0, {str(tmp_path / "copy")!r})
import hf_posenc as second
assert second.__file__ != first.__file__ and second.PosencBertModel is not first.PosencBertModel
model = BertModel(BertConfig(**SIZES, position_scheme="t5"))
assert type(model) is second.PosencBertModel and type(AutoModel.from_config(model.config)) is second.PosencBertModel
assert type(first.PosencBertModel(first.PosencBertConfig(**SIZES, position_scheme="t5"))) is first.PosencBertModel
if not {peft}:  # each leaves the finding to the other, and to no third
    assert importlib.util.find_spec("peft") is not None
    import peft.auto
from peft.utils import constants
if {peft}:
    [name] = [n for n in ("get_default_import_allowlist",) if hasattr(peft.auto, n)]
    assert getattr(peft.auto, name)().count("hf_posenc") == 1
second.uninstall()
left = differences(before, snapshot())
if not {peft}:
    left = [(owner, name) for owner, name in left if owner not in modules_of_peft()]
assert not left, left
assert type(BertConfig(position_scheme="t5")) is BertConfig
""",
            tmp_path,
        )
        assert "is uninstalled for hf_posenc from" in printed and str(tmp_path / "copy") in printed


@pytest.mark.slow
def test_waiting_for_peft_gets_on_with_others_who_wait(tmp_path):
    """Two finders that ask all others, and so each other, find PEFT all the same."""
    fresh(
        """
import hf_posenc
class Waiting:
    def find_spec(self, fullname, path, target=None):
        if fullname == "peft":
            for finder in sys.meta_path:
                if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                    return spec
sys.meta_path.insert(0, Waiting())
finders = [*sys.meta_path]
import importlib.util
assert importlib.util.find_spec("peft") is not None and sys.meta_path == finders
import peft
assert "posenc_bert" in peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
assert "exec_module" not in vars(peft.__spec__.loader)
""",
        tmp_path,
    )


@pytest.mark.slow
def test_entries_of_others_in_pefts_tables_stay(tmp_path):
    fresh(
        """
from peft.utils import constants
table = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
table["posenc_bert"] = ["own"]
import hf_posenc
assert table["posenc_bert"] == ["own"] and "posenc_electra" in table
table["posenc_electra"] = ["later"]
hf_posenc.uninstall()
assert (table["posenc_bert"], table["posenc_electra"]) == (["own"], ["later"]) and "posenc_roberta" not in table
""",
        tmp_path,
    )


@pytest.mark.slow
def test_the_classes_own_entry_points_work_without_any_hook(tmp_path):
    fresh(
        f"""
from bare_entry_points import use_all
for family in {[*FAMILIES]}:
    print("FAMILY", family)
    use_all({str(tmp_path)!r} + "/" + family, family)
""",
        tmp_path,
    )


class TestClassesThatSomebodyReplaced:
    """What somebody has put in a stock class's place is not overwritten in silence."""

    CLASSES = ["BertEmbeddings", "BertSelfAttention", "BertEncoder", "BertLayer"]
    WAYS = {
        "stock": lambda config: BertModel(config),
        "head": lambda config: BertForMaskedLM(config),
        "auto": lambda config: AutoModel.from_config(config),
        "variant": lambda config: hf_posenc.PosencBertForMaskedLM(config),
    }

    @tiny.cross(part=CLASSES, way=WAYS, strength=1)
    def test_parts(self, part, way, monkeypatch):
        own = type(f"Own{part}", (getattr(modeling_bert, part),), {"__module__": "somebody"})
        monkeypatch.setattr(modeling_bert, part, own)
        flags = {"position_scheme": "absolute", "position_every_layer": True}
        with pytest.raises(
            ValueError,
            match=rf"needs a transformers\S+\.{part} and .* somebody\.Own{part}.*restore the original class",
        ):
            self.WAYS[way](variant_config(**flags))
        # Without a flag it is built with theirs.
        model = BertModel(stock_config())
        assert type(model) is BertModel and any(type(module) is own for module in model.modules())

    def test_a_layer_that_stays_as_it_is_may_be_anybodys(self, monkeypatch):
        own = type("OwnLayer", (modeling_bert.BertLayer,), {})
        monkeypatch.setattr(modeling_bert, "BertLayer", own)
        model = build("t5")
        assert {type(layer) for layer in model.encoder.layer} == {own}
        assert model(**inputs()).last_hidden_state.isfinite().all()

    def test_a_variant_may_be_derived_from_the_own_part(self, monkeypatch):
        class Attention(modeling_bert.BertSelfAttention):
            pass

        class PosencAttention(hf_posenc.PosencBertModel.position_classes.self_attention, Attention):
            pass

        import dataclasses

        class Model(hf_posenc.PosencBertModel):
            position_classes = dataclasses.replace(
                hf_posenc.PosencBertModel.position_classes, self_attention=PosencAttention
            )

        monkeypatch.setattr(modeling_bert, "BertSelfAttention", Attention)
        model = Model(variant_config(position_scheme="t5"))
        assert all(type(layer.attention.self) is PosencAttention for layer in model.encoder.layer)

    @pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM"])
    @pytest.mark.parametrize("place", [modeling_bert, transformers.models.bert], ids=["file", "package"])
    def test_models(self, name, place, monkeypatch, tmp_path):
        stock = getattr(modeling_bert, name)
        auto = {"BertModel": AutoModel, "BertForMaskedLM": AutoModelForMaskedLM}[name]
        stock(stock_config()).save_pretrained(tmp_path)
        monkeypatch.setitem(sys.modules, "somebody", types.ModuleType("somebody"))
        own = type(name, (stock,), {"__module__": "somebody"})
        monkeypatch.setattr(place, name, own)
        if place is transformers.models.bert:
            assert type(auto.from_pretrained(tmp_path)) is own
        for opening in (
            lambda: auto.from_pretrained(tmp_path, position_scheme="t5"),
            lambda: auto.from_config(stock_config(position_scheme="t5")),
            lambda: stock(stock_config(position_scheme="t5")),
        ):
            with pytest.raises(ValueError, match=rf"modeling_bert\.{name} has been replaced by somebody\.{name}"):
                opening()

    @pytest.mark.slow
    def test_before_the_import(self, tmp_path):
        """What stands in the stock class's place then is what the variants derive from, and what Auto classes know."""
        folder = saved_stock(tmp_path / "stock")
        fresh(
            f"""
from transformers.models.bert import modeling_bert
originals = dict(vars(modeling_bert))
class Attention(modeling_bert.BertSelfAttention):
    pass
class Own(modeling_bert.BertModel):
    own = True
class Head(modeling_bert.BertForMaskedLM):
    own = True
modeling_bert.BertSelfAttention, modeling_bert.BertModel, modeling_bert.BertForMaskedLM = Attention, Own, Head
import hf_posenc
for auto, cls in ((AutoModel, Own), (AutoModelForMaskedLM, Head)):
    assert type(auto.from_pretrained({folder!r})) is cls
    model = auto.from_pretrained({folder!r}, position_scheme="t5")
    assert type(model).__name__.startswith("PosencBert") and model.own and isinstance(model, cls)
    assert isinstance(model.base_model.encoder.layer[0].attention.self, Attention)
    assert type(cls(model.config)) is type(model)
for original in (originals["BertModel"], originals["BertForMaskedLM"]):
    try:
        original(BertConfig(**SIZES, position_scheme="t5"))
    except ValueError as error:
        assert "has been replaced by __main__" in str(error), error
    else:
        raise AssertionError
""",
            tmp_path,
        )

    def test_configs(self, monkeypatch, tmp_path):
        folder = saved_stock(tmp_path / "stock")
        own = type("BertConfig", (BertConfig,), {"__module__": "somebody"})
        monkeypatch.setattr(transformers.models.bert, "BertConfig", own)
        assert type(AutoConfig.from_pretrained(folder)) is own
        with pytest.raises(
            ValueError, match=r"somebody\.BertConfig derives from BertConfig.*derive it from PosencBertConfig"
        ):
            AutoConfig.from_pretrained(folder, position_scheme="t5")

    @pytest.mark.slow
    def test_in_the_registries_before_the_import(self, tmp_path):
        """An Auto class that leads to somebody's class for the stock config does so for the variant's."""
        folder = saved_stock(tmp_path / "stock")
        fresh(
            f"""
from transformers import BertForSequenceClassification
from transformers.models.auto import modeling_auto
class Own(BertModel):
    pass
class Head(BertForMaskedLM):
    pass
# `AutoModel.register` takes nothing for a config class of transformers: whoever wants this enters it himself.
modeling_auto.MODEL_MAPPING._extra_content[BertConfig] = Own
modeling_auto.MODEL_FOR_MASKED_LM_MAPPING._extra_content[BertConfig] = Head
import hf_posenc
assert type(AutoModel.from_pretrained({folder!r})) is Own
try:
    AutoModel.from_pretrained({folder!r}, position_scheme="t5")
except ValueError as error:
    assert "Own derives from BertModel" in str(error), error
else:
    raise AssertionError
model = AutoModelForMaskedLM.from_pretrained({folder!r}, position_scheme="t5")
assert type(model) is Head and type(model.bert) is hf_posenc.PosencBertModel
hf_posenc.uninstall()
assert modeling_auto.MODEL_MAPPING._extra_content[BertConfig] is Own
assert hf_posenc.PosencBertConfig not in modeling_auto.MODEL_MAPPING._extra_content
""",
            tmp_path,
        )

    @pytest.mark.slow
    def test_registered_for_a_variants_config(self, tmp_path):
        printed = fresh(
            """
import hf_posenc
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
hf_posenc.uninstall()
class Own(hf_posenc.PosencBertModel):
    pass
class OwnConfig(hf_posenc.PosencRobertaConfig):
    pass
AutoModel.register(hf_posenc.PosencBertConfig, Own)
AutoConfig.register("posenc_roberta", OwnConfig)
hf_posenc.install()
config = BertConfig(**SIZES, position_scheme="t5")
assert type(AutoModel.from_config(config)) is Own
assert type(AutoModelForMaskedLM.from_config(config)) is hf_posenc.PosencBertForMaskedLM
assert type(AutoConfig.for_model("posenc_roberta")) is OwnConfig
class Later(hf_posenc.PosencBertForMaskedLM):
    pass
AutoModelForMaskedLM.register(hf_posenc.PosencBertConfig, Later)
hf_posenc.install()
assert type(AutoModelForMaskedLM.from_config(config)) is Later
hf_posenc.uninstall()
assert modeling_auto.MODEL_MAPPING._extra_content == {hf_posenc.PosencBertConfig: Own}
assert modeling_auto.MODEL_FOR_MASKED_LM_MAPPING._extra_content == {hf_posenc.PosencBertConfig: Later}
assert CONFIG_MAPPING._extra_content == {"posenc_roberta": OwnConfig}
""",
            tmp_path,
        )
        assert "'PosencBertConfig' leads to <class '__main__.Own'>, which somebody has registered" in printed
        assert "'posenc_roberta' leads to <class '__main__.OwnConfig'>" in printed


def stock_and_flags_by_hand(**flags):
    config = stock_config()
    for name, value in flags.items():
        setattr(config, name, value)
    return config


def state(config) -> tuple:
    return type(config), copy.deepcopy(vars(config))


class TestConfigsOfTheCaller:
    """Of what the caller hands in, only a config that a model is built from changes: it becomes the variant's."""

    ROPE = {"position_rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "position_scheme": "rope"}
    DEBERTA = {"position_attention_types": ["p2c", "c2p"], "position_scheme": "absolute+deberta"}
    FLAGS = [{"position_scheme": "absolute+t5", "position_buckets": 8}, ROPE, DEBERTA]

    @tiny.cross(flags=FLAGS, cls=[AutoModel, BertModel, BertForMaskedLM, hf_posenc.PosencBertModel], strength=1)
    def test_loading_leaves_config_and_keywords_as_they_are(self, flags, cls, tmp_path):
        folder = saved_stock(tmp_path / "stock")
        build("relative").save_pretrained(tmp_path / "variant")
        given = copy.deepcopy(flags)
        configs = [
            (stock_config(), given),
            (stock_and_flags_by_hand(**copy.deepcopy(flags)), {}),
            (stock_config(**copy.deepcopy(flags)), {}),
            (variant_config(position_scheme="sinusoidal"), given),
            (AutoConfig.from_pretrained(folder, **copy.deepcopy(flags)), {}),
            (AutoConfig.from_pretrained(tmp_path / "variant"), given),
        ]
        for config, keywords in configs:
            before = state(config)
            model = cls.from_pretrained(folder, config=config, **keywords)
            assert model.config is not config and {**vars(model.config), **flags} == vars(model.config)
            assert state(config) == before and given == flags

    @pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: flags["position_scheme"])
    def test_dictionaries_stay_as_they_are(self, flags):
        entries = {**stock_config().to_dict(), "id2label": {"0": "a", "1": "b"}}
        before, given = copy.deepcopy(entries), copy.deepcopy(flags)
        for cls in (BertConfig, hf_posenc.PosencBertConfig):
            BertModel(cls.from_dict(entries, num_labels=2, **given))
            assert (entries, given) == (before, flags)
        entries = {**before, **given}
        BertModel(BertConfig.from_dict(entries))
        BertModel(BertConfig(**{**SIZES, **given}))
        assert (entries, given) == ({**before, **flags}, flags)

    @tiny.cross(flags=FLAGS, cls=[BertModel, BertForMaskedLM, AutoModel], strength=1)
    def test_building_turns_a_stock_config_into_the_variants_and_changes_no_entry(self, flags, cls):
        make = cls.from_config if cls is AutoModel else cls
        plain = stock_config()
        make(plain)  # what transformers itself notes in a config that it builds from
        config = stock_and_flags_by_hand(**copy.deepcopy(flags))
        model = make(config)
        assert model.config is config and type(config) is hf_posenc.PosencBertConfig
        entries = {name: value for name, value in vars(config).items() if name not in plugin.FLAGS}
        assert entries == vars(plain)
        assert {name: getattr(config, name) for name in flags} == flags

        # Nothing more is to be done to a variant's; another model may be built from it.
        before = state(config)
        make(config)
        assert state(config) == before

    def test_building_with_flags_beside_the_config_copies_it(self):
        for config in (stock_config(), variant_config(position_scheme="rope", **{})):
            before = state(config)
            model = BertModel(config, position_scheme="t5")
            assert state(config) == before and model.config is not config

    @tiny.cross(
        wrong=[
            {"position_scheme": "tfive"},
            {"position_scheme": "t5", "position_base": 10},
            {"position_scheme": "t5", "position_buckets": "many"},
        ],
        cls=[BertModel, BertForMaskedLM, hf_posenc.PosencBertModel],
        strength=1,
    )
    def test_a_config_that_is_refused_stays_as_it_is(self, wrong, cls):
        config = stock_and_flags_by_hand(**wrong)
        before = state(config)
        with pytest.raises((ValueError, TypeError)):
            cls(config)
        assert state(config) == before

    def test_saving_leaves_the_config_as_transformers_does(self, tmp_path):
        plain, model = BertModel(stock_config()), build("absolute+t5")
        before = state(plain.config), state(model.config)
        plain.save_pretrained(tmp_path / "stock")
        model.save_pretrained(tmp_path / "variant")
        changed = [
            {name for name, value in vars(config).items() if entries.get(name) != value}
            for config, (_, entries) in zip((plain.config, model.config), before)
        ]
        assert changed == [{"architectures", "dtype"}, {"architectures", "dtype"}]
