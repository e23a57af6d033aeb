"""Promise 4: a table of `deberta` that was saved when it was read in another way goes on computing what it did, whichever way it comes."""

import copy
import json
from pathlib import Path

import pytest
import torch
from fresh_process import run_fresh
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from saved_before import unpacked
from tiny import Sentences, build, cross, inputs, stock_config, variant_config
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    EncoderDecoderConfig,
    Trainer,
    TrainingArguments,
)

import hf_posenc
from hf_posenc import PosencBertConfig, with_position_scheme
from hf_posenc.integrations import hooks as plugin


# Made by make_deberta_outputs.py with the code of before.
BEFORE = unpacked("deberta")
WITH_BUCKETS = ["shared", "own", "beside-t5"]
MODELS = [*WITH_BUCKETS, "no-buckets"]
ADAPTERS = ["adapter-copy", "adapter-lora"]
LENGTHS = (9, 48)
FLAGS = {"position_scheme": "deberta", "position_buckets": 8, "position_max_distance": 16}
TOLERANCE = 1e-5
every_old_model = pytest.mark.parametrize("name", MODELS)


def saved_outputs(name: str) -> dict[str, torch.Tensor]:
    """Inputs and outputs of a model or an adapter, by `LENGTH.what`."""
    every = load_file(BEFORE / "outputs.safetensors")
    return {key.removeprefix(f"{name}."): value for key, value in every.items() if key.startswith(f"{name}.")}


@torch.no_grad()
def differences(model: nn.Module, name: str) -> list[float]:
    """How far a model is from what the code of before computed, by length."""
    saved, found = saved_outputs(name), []
    for length in LENGTHS:
        batch = {key: saved[f"{length}.{key}"] for key in ("input_ids", "attention_mask")}
        output = model.eval()(**batch).last_hidden_state.float()
        error = (output - saved[f"{length}.last_hidden_state"]) * batch["attention_mask"][..., None]
        found.append(error.abs().max().item())
    return found


def assert_as_before(model: nn.Module, name: str, tolerance: float = TOLERANCE) -> None:
    assert max(differences(model, name)) < tolerance


def entries(name: str) -> dict:
    return json.loads((BEFORE / name / "config.json").read_text())


def new_config(name: str):
    """A config with the flags and sizes of an old one, made today."""
    own = {
        key: value for key, value in entries(name).items() if key not in ("auto_map", "model_type", "architectures")
    }
    cls = AutoConfig.from_pretrained(BEFORE / name)
    return type(cls)(**own)


@cross(name=MODELS, backend=["eager", "sdpa", "flex_attention"], strength=1)
def test_a_checkpoint_computes_what_it_did(name, backend, transformers_said):
    model = AutoModel.from_pretrained(BEFORE / name, attn_implementation=backend)
    with torch.compiler.set_stance("force_eager"):
        assert_as_before(model, name)
    assert not transformers_said


@pytest.mark.parametrize("name", WITH_BUCKETS)
def test_read_in_the_new_way_it_would_not(name):
    new = AutoModel.from_config(new_config(name))
    new.load_state_dict(load_file(BEFORE / name / "model.safetensors"))
    near, far = differences(new, name)
    assert near < TOLERANCE and far > 100 * TOLERANCE
    assert new.config.to_dict()["position_table_version"] == 2
    assert "position_table_version" not in AutoConfig.from_pretrained(BEFORE / name).to_dict()


@every_old_model
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_shard_size": 2000}, {"safe_serialization": True, "state_dict": "given"}],
    ids=["whole", "sharded", "state dict given"],
)
def test_saved_again_it_computes_what_it_did(name, settings, tmp_path):
    model = AutoModel.from_pretrained(BEFORE / name)
    if "state_dict" in settings:
        settings = {**settings, "state_dict": model.state_dict()}
    model.save_pretrained(tmp_path / "again", **settings)
    again = AutoModel.from_pretrained(tmp_path / "again")
    assert_as_before(again, name)
    again.save_pretrained(tmp_path / "once more")
    assert_as_before(AutoModel.from_pretrained(tmp_path / "once more"), name)


@every_old_model
def test_dtype_and_devices_change_nothing(name, tmp_path):
    assert_as_before(AutoModel.from_pretrained(BEFORE / name, dtype=torch.float64), name)
    assert max(differences(AutoModel.from_pretrained(BEFORE / name, dtype=torch.bfloat16), name)) < 0.2
    assert_as_before(AutoModel.from_pretrained(BEFORE / name, device_map="auto"), name)
    on_disk = {"embeddings": "cpu", "encoder": "disk", "pooler": "cpu"}
    model = AutoModel.from_pretrained(BEFORE / name, device_map=on_disk, offload_folder=str(tmp_path))
    assert_as_before(model, name)
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(BEFORE / name))
    model.load_state_dict(load_file(BEFORE / name / "model.safetensors"), assign=True)
    # Buffers of stock's, which are not saved.
    embeddings = model.embeddings
    embeddings.position_ids = torch.arange(50)[None]
    embeddings.token_type_ids = torch.zeros(1, 50, dtype=torch.long)
    assert_as_before(model, name)


@every_old_model
def test_a_state_dict_is_read_as_the_model_s_config_says(name, tmp_path):
    """Built from the config that lay beside it, however that was read."""
    state = load_file(BEFORE / name / "model.safetensors")
    configs = [AutoConfig.from_pretrained(BEFORE / name)]
    configs.append(type(configs[0])(**entries(name)))
    configs.append(type(configs[0]).from_dict(entries(name)))
    configs.append(type(configs[0]).from_json_file(BEFORE / name / "config.json"))
    configs.append(copy.deepcopy(configs[0]))
    configs.append(type(configs[0])(**configs[0].to_dict()))
    for config in configs:
        model = AutoModel.from_config(config)
        model.load_state_dict(state)
        assert_as_before(model, name)
    loaded = AutoModel.from_pretrained(BEFORE / name)
    loaded.load_state_dict(state)
    assert_as_before(loaded, name)
    torch.save(loaded.state_dict(), tmp_path / "weights.pt")
    model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert_as_before(model, name)


@every_old_model
def test_a_state_dict_of_one_kind_of_model_fits_the_other_or_is_refused(name):
    old = AutoModel.from_pretrained(BEFORE / name)
    new = AutoModel.from_config(new_config(name))
    new.load_state_dict(old.state_dict())
    assert_as_before(new, name)
    before = {key: value.clone() for key, value in old.state_dict().items()}
    if name in WITH_BUCKETS:
        with pytest.raises(RuntimeError, match="position_table_version=2"):
            old.load_state_dict(new.state_dict())
        assert not torch.equal(new.encoder.rel_embeddings.weight[0], before["encoder.rel_embeddings.weight"][0])
    other = AutoModel.from_config(new_config(name))
    other.load_state_dict(new.state_dict())
    assert torch.equal(other.encoder.rel_embeddings.weight, new.encoder.rel_embeddings.weight)


@every_old_model
def test_a_config_that_is_handed_over_makes_no_difference(name):
    """The config of one kind, and the weights of the other."""
    assert_as_before(AutoModel.from_pretrained(BEFORE / name, config=new_config(name)), name)
    assert_as_before(AutoModel.from_pretrained(BEFORE / name, config=AutoConfig.from_pretrained(BEFORE / name)), name)


def test_nor_does_the_old_config_and_the_weights_of_a_new_model(tmp_path):
    new = AutoModel.from_config(new_config("shared")).eval()
    nn.init.normal_(new.encoder.rel_embeddings.weight)
    new.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, config=AutoConfig.from_pretrained(BEFORE / "shared")).eval()
    ids = torch.randint(5, 20, (2, 48), generator=torch.manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids)[0], new(ids)[0])
    assert loaded.config.to_dict()["position_table_version"] == 2


@every_old_model
def test_with_position_scheme_keeps_how_a_table_is_read_as_long_as_there_is_one(name):
    model = AutoModel.from_pretrained(BEFORE / name)
    scheme = model.config.position_scheme
    same = with_position_scheme(model, scheme, copy=True)
    assert_as_before(same, name)
    more = with_position_scheme(model, f"{scheme}+kerple", copy=True)  # which starts at zero
    assert_as_before(more, name)
    assert_as_before(with_position_scheme(more, scheme, copy=True), name)
    without = with_position_scheme(model, "alibi", copy=True)
    anew = with_position_scheme(without, "deberta", copy=True)
    assert anew.config.position_table_version != 1
    if name in WITH_BUCKETS:
        other = with_position_scheme(model, scheme, position_buckets=4, copy=True)
        assert other.config.position_table_version != 1 and other.encoder.rel_embeddings.weight.shape == (8, 8)
        far = with_position_scheme(model, scheme, position_max_distance=20, copy=True)
        assert far.config.position_table_version == 1


@pytest.mark.parametrize("name", WITH_BUCKETS)
def test_flags_beside_an_old_checkpoint(name):
    scheme = entries(name)["position_scheme"]
    again = AutoModel.from_pretrained(
        BEFORE / name, position_scheme=scheme, position_buckets=entries(name)["position_buckets"]
    )
    assert_as_before(again, name)
    assert_as_before(AutoModel.from_pretrained(BEFORE / name, position_scheme=f"{scheme}+kerple"), name)
    assert_as_before(AutoModel.from_pretrained(BEFORE / name, position_table_version=1), name)
    with pytest.raises(
        ValueError, match="position_table_version=2: this checkpoint was saved by hf_posenc 0.3.0 or earlier"
    ):
        AutoModel.from_pretrained(BEFORE / name, position_table_version=2)
    for wrong, error in ((3, ValueError), ("2", TypeError)):
        with pytest.raises(error, match="position_table_version must be 1 or 2"):
            AutoModel.from_pretrained(BEFORE / "stock", **FLAGS, position_table_version=wrong)


def test_a_table_that_is_new_to_an_old_checkpoint_is_read_in_the_new_way(tmp_path):
    old = entries("no-buckets")
    for change in (
        {"position_buckets": 16, "position_max_distance": 40},
        {"position_scheme": "t5+deberta", "position_buckets": 4},
    ):
        config = AutoConfig.from_pretrained(BEFORE / "no-buckets", **change)
        assert config.to_dict()["position_table_version"] == 2
    config = AutoConfig.from_pretrained(BEFORE / "shared", position_buckets=4)
    assert config.to_dict()["position_table_version"] == 2
    # By hand, in the file of a stock checkpoint.
    stock = json.loads((BEFORE / "stock" / "config.json").read_text())
    for made in (
        BertConfig(**stock, **FLAGS),
        BertConfig.from_dict({**stock, **FLAGS}),
        PosencBertConfig(**stock, **FLAGS),
    ):
        assert made.to_dict()["position_table_version"] == 2
    config = BertConfig(**stock)
    for flag, value in FLAGS.items():
        setattr(config, flag, value)
    assert BertModel(config).config.to_dict()["position_table_version"] == 2
    assert old["position_buckets"] == 0


def test_an_encoder_inside_another_config_is_read_as_before():
    both = EncoderDecoderConfig(encoder=entries("shared"), decoder=stock_config(is_decoder=True).to_dict())
    model = AutoModel.from_config(both.encoder)
    model.load_state_dict(load_file(BEFORE / "shared" / "model.safetensors"))
    assert_as_before(model, "shared")


@pytest.mark.parametrize(
    "scheme, flags", [("t5", {}), ("absolute", {"position_combine": "gate"}), ("deberta", {"position_buckets": 0})]
)
def test_only_configs_with_such_a_table_say_how_it_is_read(scheme, flags, tmp_path):
    assert "position_table_version" not in variant_config(position_scheme=scheme, **flags).to_dict()
    build(scheme, **flags).save_pretrained(tmp_path)
    assert "position_table_version" not in json.loads((tmp_path / "config.json").read_text())


def as_head(folder: Path) -> None:
    """The old checkpoint `shared` as a Trainer has left it in a folder, with a head."""
    model = AutoModelForSequenceClassification.from_pretrained(BEFORE / "shared", num_labels=2)
    assert model.config.position_table_version == 1
    model.save_pretrained(folder)
    state = {"global_step": 2, "max_steps": 2, "epoch": 1.0, "log_history": [], "train_batch_size": 4}
    (folder / "trainer_state.json").write_text(json.dumps(state))


class ShortWords(Sentences):
    """Of a vocabulary of 20."""

    def __getitem__(self, index):
        return {**(row := super().__getitem__(index)), "input_ids": row["input_ids"] % 15 + 5}


@pytest.mark.parametrize("built", ["from flags", "from the old checkpoint"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_trainer_that_resumes_a_run_of_before_goes_on_as_it_was(built, sharded, tmp_path):
    as_head(tmp_path / "checkpoint-2")
    if sharded:
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2")
        (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
        model.save_pretrained(tmp_path / "checkpoint-2", max_shard_size=2000)
    if built == "from flags":
        config = {"num_labels": 2, "position_form": "paper", **FLAGS}
        model = AutoModelForSequenceClassification.from_pretrained(BEFORE / "stock", **config)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(BEFORE / "shared", num_labels=2)
    arguments = {
        "output_dir": str(tmp_path),
        "report_to": "none",
        "use_cpu": True,
        "max_steps": 2,
        "disable_tqdm": True,
    }
    trainer = Trainer(model, TrainingArguments(**arguments), train_dataset=ShortWords())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # nothing is left to do
    assert_as_before(model.base_model, "shared")
    trainer.save_model(str(tmp_path / "end"))
    assert_as_before(AutoModel.from_pretrained(tmp_path / "end"), "shared")


@pytest.mark.slow
def test_a_trainer_imported_after_hf_posenc_does_so_too(tmp_path):
    """The Trainer takes seconds to import, and is hooked when somebody imports it."""
    printed = run_fresh(
        """
import sys
import hf_posenc
assert "transformers.trainer" not in sys.modules
from transformers import Trainer
print("HOOKED", Trainer._load_from_checkpoint.__wrapped__.__module__, len([f for f in sys.meta_path if getattr(f, "name", "") == "transformers.trainer"]))
hf_posenc.uninstall()
print("PUT BACK", hasattr(Trainer._load_from_checkpoint, "__wrapped__"))
""",
        tmp_path,
        plugin=True,
    )
    assert "HOOKED transformers.trainer 0" in printed and "PUT BACK False" in printed


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_read_as_its_base_model_reads_its_table(name):
    """A stock base has no table: who loads it with flags says when the adapter was trained."""
    base = BertModel.from_pretrained(BEFORE / "stock", **FLAGS, position_table_version=1)
    model = PeftModel.from_pretrained(base, BEFORE / name)
    assert_as_before(model, name)
    assert_as_before(copy.deepcopy(model).merge_and_unload(), name)
    new = PeftModel.from_pretrained(BertModel.from_pretrained(BEFORE / "stock", **FLAGS), BEFORE / name)
    near, far = differences(new, name)
    assert near < TOLERANCE and far > 100 * TOLERANCE


@pytest.mark.parametrize(
    "settings", [{"modules_to_save": ["rel_embeddings"]}, {"target_modules": ["rel_embeddings", "value"]}]
)
def test_adapters_of_an_old_checkpoint_are_saved_and_loaded(settings, tmp_path):
    model = get_peft_model(
        AutoModel.from_pretrained(BEFORE / "shared"), LoraConfig(r=2, **{"target_modules": ["value"], **settings})
    )
    assert_as_before(model, "shared")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(AutoModel.from_pretrained(BEFORE / "shared"), tmp_path)
    ids = torch.randint(5, 20, (2, 48), generator=torch.manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(ids)[0], model.eval()(ids)[0])
    assert max(differences(again, "shared")) > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared", "own"])
def test_without_hf_posenc_it_computes_what_it_did(name, tmp_path):
    """Saved again, with the code of today beside it."""
    AutoModel.from_pretrained(BEFORE / name).save_pretrained(tmp_path / "again")
    run_fresh(
        f"""
import torch
from safetensors.torch import load_file
from transformers import AutoModel
model = AutoModel.from_pretrained({str(tmp_path / "again")!r}, trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules.")
saved = load_file({str(BEFORE / "outputs.safetensors")!r})
saved = {{key.removeprefix("{name}."): value for key, value in saved.items() if key.startswith("{name}.")}}
with torch.no_grad():
    output = model(input_ids=saved["48.input_ids"], attention_mask=saved["48.attention_mask"]).last_hidden_state
assert ((output - saved["48.last_hidden_state"]) * saved["48.attention_mask"][..., None]).abs().max() < {TOLERANCE}
model.save_pretrained({str(tmp_path / "once more")!r})
""",
        tmp_path / "cache",
        plugin=False,
    )
    assert_as_before(AutoModel.from_pretrained(tmp_path / "once more"), name)


def test_without_the_plugin_s_hooks_too(tmp_path):
    plugin.uninstall()
    try:
        assert_as_before(hf_posenc.PosencBertModel.from_pretrained(BEFORE / "shared"), "shared")
    finally:
        plugin.install()


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_BUCKETS)
def test_exported_it_computes_what_it_did(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from hf_posenc.export.onnx.exporting import export_model

    export_model(AutoModel.from_pretrained(BEFORE / name).eval(), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    saved = saved_outputs(name)
    for length in LENGTHS:
        given = {
            each.name: saved.get(f"{length}.{each.name}", torch.zeros(2, length, dtype=torch.long))
            for each in session.get_inputs()
        }
        found = torch.tensor(session.run(None, {key: value.numpy() for key, value in given.items()})[0])
        error = (found - saved[f"{length}.last_hidden_state"]) * saved[f"{length}.attention_mask"][..., None]
        assert error.abs().max() < 1e-4


def test_new_weights_saved_and_loaded_by_hand_stay_as_they_are(tmp_path):
    """Whatever a file of tensors lacks, a new model's own checkpoint changes nothing in it."""
    model = build("deberta", position_buckets=8, position_max_distance=16)
    model.save_pretrained(tmp_path)
    again = build("deberta", position_buckets=8, position_max_distance=16, seed=1)
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    batch = inputs(length=40)
    with torch.no_grad():
        assert torch.equal(again(**batch)[0], model(**batch)[0])
