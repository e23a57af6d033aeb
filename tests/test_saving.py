"""Promise 3: what is saved can be loaded, or fails loudly."""

import inspect
import json
from pathlib import Path

import pytest
import tiny
import torch
from fresh_process import run_fresh
from tiny import (
    FAMILIES,
    STOCK_CONFIGS,
    Sentences,
    aligned,
    build,
    fill_positions,
    heads,
    inputs,
    schemes_beside,
    stock_config,
    variant_class,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    BertModel,
    Trainer,
    TrainingArguments,
)

import hf_posenc
from hf_posenc import position_parameters
from hf_posenc.checkpoint_code import code_files
from hf_posenc.modeling.schemes.table import SCHEMES


# Every scheme once, every family at least once; with flags where there are some to forget.
SAVED = [
    ("bert", "absolute+t5", {"position_buckets": 8, "position_per_layer": True}),
    ("bert", "sinusoidal", {"position_combine": "attention", "position_every_layer": True}),
    ("bert", "deberta", {"position_attention_types": ["p2c", "c2p"], "position_norm": True, "position_buckets": 4}),
    ("bert", "relative", {"position_max_distance": 3}),
    ("roberta", "tupe+t5", {}),
    ("roberta", "absolute", {"position_combine": "gate"}),
    ("roberta", "relative_key_query", {}),
    ("xlm-roberta", "absolute+rope", {"position_rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("xlm-roberta", "transformer_xl", {"position_base": 500.0}),
    ("camembert", "alibi+relative_key", {}),
    ("electra", "absolute+t5", {"position_combine": "concat", "position_every_layer": True}),
    ("electra", "none", {}),
    ("mpnet", "absolute+t5+transformer_xl", {"position_base": 500.0}),
    ("distilbert", "absolute+deberta", {"position_buckets": 4, "position_every_layer": True}),
]
SAVED += [("bert", name, {}) for name in schemes_beside(scheme for _, scheme, _ in SAVED)]
every_family = pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in ("bert", "mpnet") else pytest.mark.slow) for name in FAMILIES],
)
IDS = [f"{family}-{scheme}" for family, scheme, _ in SAVED]


@torch.no_grad()
def outputs(model, family: str = "bert") -> torch.Tensor:
    return aligned(model).eval()(**inputs(family=family)).to_tuple()[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> list[tuple[Path, torch.nn.Module]]:
    """The folder of every entry of SAVED, and the model that was saved there."""
    pairs = []
    for index, (family, scheme, flags) in enumerate(SAVED):
        folder = tmp_path_factory.mktemp(f"saved{index}")
        model = build(scheme, family, head="ForMaskedLM", **flags)
        model.save_pretrained(folder)
        pairs.append((folder, model))
    return pairs


def test_the_saved_ones_cover_all_families_and_schemes():
    assert {family for family, _, _ in SAVED} == {*FAMILIES}
    assert {name for _, scheme, _ in SAVED for name in scheme.split("+")} == {*SCHEMES}


@pytest.mark.parametrize("index", range(len(SAVED)), ids=IDS)
def test_a_saved_variant_loads_by_auto_and_stock_classes_without_a_flag(index, saved, transformers_said, said):
    (family, scheme, flags), (folder, model) = SAVED[index], saved[index]
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == FAMILIES[family].model_type
    version = {"position_table_version": 2} if "deberta" in scheme else {}
    assert {name: value for name, value in config.items() if name.startswith("position_")} == {
        "position_scheme": scheme,
        **flags,
        **version,
    }
    stock = next(cls for cls in heads(family) if cls.__name__.endswith("ForMaskedLM"))
    loaded = [
        cls.from_pretrained(folder, output_loading_info=True) for cls in (AutoModelForMaskedLM, stock, type(model))
    ]
    # Nothing to complain about, and positions that were trained are not said to be lost or new.
    assert not transformers_said and not said
    expected = outputs(model, family)
    for again, info in loaded:
        assert type(again) is type(model)
        assert not any(info.values()), info
        assert torch.equal(outputs(again, family), expected)
    fresh = fill_positions(type(model)(model.config), seed=1)  # would be seen if nothing were loaded
    assert (outputs(fresh, family) - expected).abs().max() > 1e-3


@every_family
def test_the_base_model_of_a_saved_head_and_a_head_on_a_saved_base_model_keep_the_scheme(family, tmp_path):
    head = build("absolute+t5", family, head="ForMaskedLM")
    head.save_pretrained(tmp_path / "head")
    base = AutoModel.from_pretrained(tmp_path / "head")
    assert type(base) is variant_class(family)
    with torch.no_grad():
        expected = head(**inputs(family=family), output_hidden_states=True).hidden_states[-1]
    assert torch.equal(outputs(base, family), expected)
    base.save_pretrained(tmp_path / "base")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=5)
    assert type(classifier) is variant_class(family, "ForSequenceClassification")
    assert torch.equal(outputs(classifier.base_model, family), expected)


@every_family
def test_configs_make_the_round_trip(family, tmp_path):
    flags = {"position_scheme": "absolute+deberta", "position_attention_types": ("c2p",), "position_buckets": 4}
    config = stock_config(family, **flags, num_labels=3)
    config.save_pretrained(tmp_path / "config")
    for number, again in enumerate(
        (
            AutoConfig.from_pretrained(tmp_path / "config"),
            STOCK_CONFIGS[family].from_pretrained(tmp_path / "config"),
            FAMILIES[family].from_pretrained(tmp_path / "config" / "config.json"),
            STOCK_CONFIGS[family].from_json_file(tmp_path / "config" / "config.json"),
            FAMILIES[family].from_dict(config.to_dict()),
            STOCK_CONFIGS[family].from_dict(config.to_dict()),
            STOCK_CONFIGS[family](**config.to_dict()),
        )
    ):
        assert type(again) is FAMILIES[family]
        ours, theirs = again.to_dict(), config.to_dict()
        assert {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)} <= {
            "_name_or_path",
            "transformers_version",
        }
        assert again.model_type == FAMILIES[family].model_type
        if number in (0, 6):  # read, and made
            again.save_pretrained(tmp_path / "again")
            assert (tmp_path / "again/config.json").read_text() == (tmp_path / "config/config.json").read_text()
    # Only what was given is written.
    saved = {name for name in config.to_dict() if "position_" in name and name != "max_position_embeddings"}
    assert saved == {*flags, "position_table_version"}


def test_a_trainer_s_checkpoint_is_loaded_and_resumed(tmp_path):
    arguments = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "report_to": "none",
        "use_cpu": True,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "seed": 0,
    }
    model = build("absolute+t5", head="ForSequenceClassification")
    start = {name: parameter.detach().clone() for name, parameter in position_parameters(model).items()}
    Trainer(model, TrainingArguments(**arguments, max_steps=2), train_dataset=Sentences()).train()
    assert all(not torch.equal(parameter, start[name]) for name, parameter in position_parameters(model).items())

    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2")
    assert type(again) is hf_posenc.PosencBertForSequenceClassification
    assert torch.equal(outputs(again), outputs(model))

    fresh = build("absolute+t5", head="ForSequenceClassification", seed=1)
    trainer = Trainer(fresh, TrainingArguments(**arguments, max_steps=4), train_dataset=Sentences())
    result = trainer.train(resume_from_checkpoint=True)
    assert result.global_step == 4

    # Two steps from a checkpoint are what four steps in a row are.
    whole = build("absolute+t5", head="ForSequenceClassification")
    settings = TrainingArguments(**{**arguments, "output_dir": str(tmp_path / "whole")}, max_steps=4)
    Trainer(whole, settings, train_dataset=Sentences()).train()
    assert (outputs(fresh) - outputs(whole)).abs().max() < 1e-5
    assert (outputs(fresh) - outputs(model)).abs().max() > 1e-3


LOAD_EVERYTHING = """
import torch, transformers
from transformers import AutoModelForMaskedLM
torch.set_num_threads(1)

{aligned}
results = []
for folder, batch in torch.load({job!r}):
    model = aligned(AutoModelForMaskedLM.from_pretrained(folder, **{keywords!r})).eval()
    with torch.no_grad():
        results.append((type(model).__name__, type(model).__module__, model(**batch).logits))
    if {resave!r}:
        model.save_pretrained(folder + "-again")
torch.save(results, {result!r})
"""


def load_in_fresh_process(saved, tmp_path: Path, plugin: bool, before: str = "", after: str = "", **keywords):
    """(class name, module, logits) of every saved variant as another process loads them, and what it printed."""
    job, result = tmp_path / "job.pt", tmp_path / "result.pt"
    torch.save([(str(folder), inputs(family=family)) for (family, _, _), (folder, _) in zip(SAVED, saved)], job)
    names = {"job": str(job), "result": str(result), "aligned": inspect.getsource(aligned)}
    code = LOAD_EVERYTHING.format(**names, keywords=keywords, resave=not plugin)
    printed = run_fresh(before + code + after, tmp_path / "cache", plugin=plugin)
    return torch.load(result), printed


@pytest.mark.slow
def test_a_fresh_process_with_the_plugin_computes_the_same(saved, tmp_path):
    results, _ = load_in_fresh_process(saved, tmp_path, plugin=True, before="import hf_posenc\n")
    for (family, _, _), (_, model), (name, module, logits) in zip(SAVED, saved, results, strict=True):
        assert (name, module) == (type(model).__name__, type(model).__module__)
        assert (logits - outputs(model, family)).abs().max() < 1e-6


@pytest.mark.slow
def test_a_process_without_the_plugin_computes_the_same_if_it_trusts_the_saved_code(saved, tmp_path):
    """... asks or refuses without trust, warns with a concrete stock class, and saves what the plugin can load."""
    folder = str(saved[0][0])
    refusals = "".join(
        f"""
try:
    transformers.{auto}.from_pretrained({folder!r}, **{keywords!r})
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
    print("REFUSED")
"""
        for auto in ("AutoModel", "AutoModelForMaskedLM", "AutoConfig")
        for keywords in ({}, {"trust_remote_code": False})
    )
    # The same as a person at a terminal, who says yes: to the config, and to the model.
    refusals += f"""
import io, sys
sys.stdin = io.StringIO("y\\ny\\n")
print("ANSWERED", type(transformers.AutoModel.from_pretrained({folder!r})).__name__)
"""
    stock = f"print('STOCK', type(transformers.BertModel.from_pretrained({folder!r})).__name__)\n"
    results, printed = load_in_fresh_process(
        saved, tmp_path, plugin=False, before="import transformers\n" + refusals, after=stock, trust_remote_code=True
    )
    assert printed.count("REFUSED") == 6
    assert printed.count("[y/N]") == 3 + 2 and "ANSWERED PosencBert" in printed
    # The one way that is not refused: transformers only warns of the other model type.
    assert "STOCK BertModel" in printed
    assert "You are using a model of type `posenc_bert` to instantiate a model of type `bert`" in printed

    for (family, scheme, _), (folder, model), (name, module, logits) in zip(SAVED, saved, results, strict=True):
        assert name == type(model).__name__ and module.startswith("transformers_modules.")
        expected = outputs(model, family)
        assert (logits - expected).abs().max() < 1e-5, (family, scheme)  # whole matrices sum in another order
        again = AutoModelForMaskedLM.from_pretrained(f"{folder}-again")
        assert type(again) is type(model)
        assert (outputs(again, family) - expected).abs().max() < 1e-6


@pytest.mark.slow
def test_code_loaded_from_a_checkpoint_lives_beside_the_plugin(saved, tmp_path):
    """A process may have loaded a variant with trust before it imports the plugin."""
    folder, model = saved[0]
    torch.save((inputs(), outputs(model)), tmp_path / "expected.pt")
    printed = run_fresh(
        f"""
import torch
from transformers import AutoModel, AutoModelForMaskedLM, BertModel

{inspect.getsource(aligned)}
remote = AutoModelForMaskedLM.from_pretrained({str(folder)!r}, trust_remote_code=True).eval()
import hf_posenc
batch, expected = torch.load({str(tmp_path / "expected.pt")!r})
ours = AutoModelForMaskedLM.from_pretrained({str(folder)!r}, trust_remote_code=True).eval()
made = type(remote)(remote.config).eval()
made.load_state_dict(remote.state_dict())
from_remote = BertModel.from_pretrained({str(folder)!r}, config=remote.config).eval()
with torch.no_grad():
    for model in (remote, ours, made):
        assert (aligned(model)(**batch).logits - expected).abs().max() < 1e-6
    hidden = ours(**batch, output_hidden_states=True).hidden_states[-1]
    assert (aligned(from_remote)(**batch).last_hidden_state - hidden).abs().max() < 1e-6
assert type(remote).__module__.startswith("transformers_modules.") and type(remote) is not type(ours)
assert type(ours) is hf_posenc.PosencBertForMaskedLM
print("DONE")
""",
        tmp_path / "cache",
        plugin=True,
    )
    assert "DONE" in printed


@every_family
def test_a_saved_variant_has_its_code_beside_it_and_nothing_else(family, tmp_path):
    for number, thing in enumerate((build("t5", family), build("t5", family).config)):
        thing.save_pretrained(tmp_path / str(number))
        code = {path.name: path.read_text() for path in (tmp_path / str(number)).glob("*.py")}
        assert code == code_files(build("t5", family).config)
    assert {path.name for path in (tmp_path / "0").iterdir()} == {*code, "config.json", "model.safetensors"}
    auto_map = json.loads((tmp_path / "0/config.json").read_text())["auto_map"]
    module = Path(FAMILIES[family].modeling_file).stem
    assert auto_map == {
        "AutoConfig": f"{FAMILIES[family].modeling_file.removesuffix('.py')}.{FAMILIES[family].__name__}",
        **{auto: f"{module}.{name}" for auto, name in FAMILIES[family].auto_classes.items()},
    }


@tiny.cross(cls=[AutoModel, BertModel], keep=[0, 100, 0.5, -1], strength=1)
def test_a_truncated_checkpoint_is_an_error(cls, keep, tmp_path):
    build("absolute+t5").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(Exception, match="(?i)header|incomplete|invalid|truncated|too small"):
        cls.from_pretrained(tmp_path)


def test_a_missing_shard_is_an_error(tmp_path):
    build("absolute+t5").save_pretrained(tmp_path, max_shard_size="20KB")
    sorted(tmp_path.glob("model-*.safetensors"))[-1].unlink()
    with pytest.raises(OSError, match="model-"):
        AutoModel.from_pretrained(tmp_path)


def test_shards_are_put_together_again(tmp_path):
    model = build("absolute+t5", position_per_layer=True)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert torch.equal(outputs(AutoModel.from_pretrained(tmp_path)), outputs(model))


@pytest.mark.parametrize(
    "index",
    [pytest.param(i, id=IDS[i], marks=() if i in (0, 4, 7, 12) else pytest.mark.slow) for i in range(len(SAVED))],
)
def test_device_map_and_dtype_load_the_same_model(index, saved):
    (family, _, _), (folder, model) = SAVED[index], saved[index]
    expected = outputs(model, family)
    mapped = AutoModelForMaskedLM.from_pretrained(folder, device_map="auto")
    assert torch.equal(outputs(mapped, family), expected)
    half = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="auto")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    got = outputs(half, family).float()
    assert got.isfinite().all()
    # As good as the same rounding of the weights makes a model that was never saved.
    rounded = outputs(model.bfloat16(), family).float()
    model.float()
    assert torch.equal(got, rounded)
    assert (got - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("scheme", ["absolute+t5", "absolute+rope", "sinusoidal", "t5"])
def test_flags_go_with_device_map_and_dtype(scheme, tmp_path):
    torch.manual_seed(0)
    BertForMaskedLM(stock_config()).save_pretrained(tmp_path)
    keywords = {"position_scheme": scheme, "device_map": "auto", "dtype": torch.bfloat16}
    model = AutoModelForMaskedLM.from_pretrained(tmp_path, **keywords)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    plain = AutoModelForMaskedLM.from_pretrained(tmp_path, position_scheme=scheme).bfloat16()
    assert torch.equal(outputs(fill_positions(model)), outputs(fill_positions(plain)))


def test_layers_on_other_devices_find_what_they_share(tmp_path):
    """Big models are spread by accelerate, weights offloaded to the disk between their uses."""
    # In double precision: accelerate hands the weights over where they lie on the disk, so that bits may differ.
    model = build("absolute+t5", num_hidden_layers=3).double()
    model.save_pretrained(tmp_path / "model")
    layers = {f"encoder.layer.{n}": "disk" for n in range(1, 3)}
    device_map = {
        "embeddings": "cpu",
        "encoder.relative_attention_bias": "cpu",
        "encoder.layer.0": "cpu",
        "pooler": "cpu",
        **layers,
    }
    offloading = {"device_map": device_map, "offload_folder": tmp_path / "disk"}
    spread = AutoModel.from_pretrained(tmp_path / "model", dtype=torch.float64, **offloading)
    assert next(spread.encoder.layer[2].parameters()).device.type == "meta"
    assert (outputs(spread) - outputs(model)).abs().max() < 1e-12
