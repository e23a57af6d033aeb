"""What the scripts share: learning rates for positions, whole and broken checkpoints, and runs that go on."""

import json
import os
import re
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import training
from arguments import fit_tokenizer
from checkpoints import check_checkpoint, newest_whole_checkpoint
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import build, variant_config
from torch import nn
from training import PositionTrainingArguments, Run, ScriptTrainer
from transformers import Trainer

from hf_posenc import (
    PosencBertForSequenceClassification,
    freeze_all_but_positions,
    position_parameters,
    train_positions,
)
from hf_posenc.modeling.schemes.table import SCHEMES
from hf_posenc.scheme import SmallPositionLinear, zeros


def rows(number: int = 24) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(5, 99, (number, 7), generator=generator)
    return Dataset.from_dict({"input_ids": input_ids.tolist(), "labels": (input_ids[:, 0] % 2).tolist()})


def arguments(folder: Path, **settings) -> PositionTrainingArguments:
    quiet = {"disable_tqdm": True, "use_cpu": True, "report_to": "none"}
    return PositionTrainingArguments(output_dir=str(folder), **{**quiet, **settings})


def trainer_of(model: nn.Module, settings: PositionTrainingArguments) -> ScriptTrainer:
    data = rows()
    return ScriptTrainer(model=model, args=settings, train_dataset=data, eval_dataset=data)


def classifier(scheme: str, **flags) -> nn.Module:
    return build(scheme, head="ForSequenceClassification", **flags)


def settings_of(optimizer: torch.optim.Optimizer) -> dict[int, tuple[float, float]]:
    """Learning rate and weight decay of every parameter, which is in one group only."""
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert id(parameter) not in found
            found[id(parameter)] = group["lr"], group["weight_decay"]
    return found


# Scheme, its flags, and the ends of the names of its tables and biases, and of its wide matrices and norms.
GROUPS = [
    ("absolute", {}, [], []),
    ("absolute", {"position_combine": "concat"}, [], ["position_projection.weight", "position_projection.bias"]),
    ("absolute", {"position_combine": "gate"}, [], ["position_gate.weight", "position_gate.bias"]),
    ("sinusoidal", {}, [], []),
    ("sinusoidal", {"position_learn_amplitude": True}, ["position_scale.weight"], []),
    ("none", {}, [], []),
    ("relative", {}, ["relative_key_embeddings.weight", "relative_value_embeddings.weight"], []),
    ("relative_key", {}, ["distance_embedding.weight"], []),
    ("relative_key_query", {}, ["distance_embedding.weight"], []),
    ("transformer_xl", {}, ["pos_bias_u.weight", "pos_bias_v.weight"], ["linear_pos.weight"]),
    ("absolute+t5", {}, ["relative_attention_bias.weight"], []),
    ("t5", {"position_per_layer": True}, ["relative_attention_bias.weight"], []),
    (
        "sinusoidal+tupe",
        {},
        ["cls_to_others.weight", "others_to_cls.weight"],
        ["pos_ln.weight", "pos_ln.bias", "linear.weight", "linear.bias"],
    ),
    ("deberta", {}, ["rel_embeddings.weight"], []),
    (
        "deberta",
        {"position_norm": True, "position_share_projections": False},
        ["rel_embeddings.weight"],
        ["encoder.LayerNorm.weight", "encoder.LayerNorm.bias", "_proj.weight", "_proj.bias"],
    ),
    ("rope", {}, [], []),
    ("alibi", {}, [], []),
    ("kerple", {}, ["kerple_r1.weight", "kerple_r2.weight"], []),
    *(
        (
            "fire",
            {"position_per_layer": per_layer},
            [
                f"fire_{name}"
                for name in ("hidden.weight", "hidden.bias", "output.weight", "c.weight", "length.weight")
            ],
            [],
        )
        for per_layer in (True, False)
    ),
    ("cable", {}, ["cable_amplitude.weight"], ["cable_step.weight", "cable_scale.weight"]),
]


def test_every_scheme_has_its_groups_named():
    assert {name for scheme, *_ in GROUPS for name in scheme.split("+")} == {*SCHEMES}


@pytest.mark.parametrize(("scheme", "flags", "tables", "matrices"), GROUPS)
def test_tables_and_biases_have_their_rate_and_no_decay_and_all_others_what_trainer_gives_them(
    scheme, flags, tables, matrices, tmp_path
):
    model = classifier(scheme, **flags)
    common = {"learning_rate": 1e-3, "weight_decay": 0.5}
    stock = settings_of(Trainer(model=model, args=arguments(tmp_path, **common)).create_optimizer())
    ours = settings_of(trainer_of(model, arguments(tmp_path, **common, position_learning_rate=0.1)).create_optimizer())
    assert ours.keys() == stock.keys()
    moved = [name for name, parameter in model.named_parameters() if ours[id(parameter)] != stock[id(parameter)]]
    assert {ours[id(model.get_parameter(name))] for name in moved} <= {(0.1, 0.0)}
    left = position_parameters(model).keys() - {*moved}
    assert all(name.endswith(tuple(tables)) for name in moved) and all(name.endswith(tuple(matrices)) for name in left)
    assert {*moved, *left} == position_parameters(model).keys()
    assert all(any(name.endswith(end) for name in moved) for end in tables)
    assert all(any(name.endswith(end) for name in left) for end in matrices)


def test_adapters_of_schemes_learn_at_the_rate_of_all_others(tmp_path):
    model = get_peft_model(classifier("fire"), LoraConfig(target_modules=["fire_output", "query"], r=4))
    optimizer = trainer_of(
        model, arguments(tmp_path, learning_rate=1e-3, position_learning_rate=0.1)
    ).create_optimizer()
    adapters = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    assert adapters and {settings_of(optimizer)[id(parameter)][0] for parameter in adapters} == {1e-3}


def test_a_small_matrix_is_of_few_features():
    with pytest.raises(ValueError, match="at most 32 input features, got 33: use PositionLinear"):
        SmallPositionLinear(33, 4, zeros)


def test_without_a_rate_of_their_own_the_optimizer_is_trainers(tmp_path):
    model = classifier("absolute+t5")
    common = {"learning_rate": 1e-3, "weight_decay": 0.5}
    stock = settings_of(Trainer(model=model, args=arguments(tmp_path, **common)).create_optimizer())
    assert settings_of(trainer_of(model, arguments(tmp_path, **common)).create_optimizer()) == stock


@pytest.mark.parametrize("wrap", ["PEFT", "another module", pytest.param("compiled", marks=pytest.mark.slow)])
def test_position_parameters_are_found_inside_wrappers(wrap, tmp_path):
    model = classifier("absolute+t5")
    if wrap == "PEFT":
        wrapped = get_peft_model(model, LoraConfig(target_modules=["query"]))
        train_positions(wrapped)
    else:
        # As FSDP and DDP hold a model; FSDP 1 hands the wrapped one over.
        wrapped = torch.compile(model) if wrap == "compiled" else nn.ModuleDict({"module": model})
    trainer = trainer_of(model, arguments(tmp_path, position_learning_rate=0.1))
    optimizer = trainer.create_optimizer(wrapped)
    table = model.bert.encoder.relative_attention_bias.weight
    assert settings_of(optimizer)[id(table)] == (0.1, 0.0)
    assert sum(rate == 0.1 for rate, _ in settings_of(optimizer).values()) == 1


def test_frozen_position_parameters_stay_out_of_the_optimizer(tmp_path):
    model = classifier("absolute+t5")
    model.bert.encoder.relative_attention_bias.requires_grad_(False)
    optimizer = trainer_of(model, arguments(tmp_path, position_learning_rate=0.1)).create_optimizer()
    assert all(rate != 0.1 for rate, _ in settings_of(optimizer).values())


def test_positions_alone_can_be_trained(tmp_path):
    model = classifier("t5")
    freeze_all_but_positions(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer_of(model, arguments(tmp_path, max_steps=1, position_learning_rate=0.1, save_strategy="no")).train()
    moved = {
        name: (parameter.detach() - before[name]).abs().max().item() for name, parameter in model.named_parameters()
    }
    assert moved.pop("bert.encoder.relative_attention_bias.weight") == pytest.approx(0.1, rel=0.01)
    assert max(moved.values()) == 0


def test_an_optimizer_that_lacks_position_parameters_is_refused(tmp_path):
    model = classifier("absolute+t5")
    # FSDP 1 without use_orig_params hands over other parameters than the model's own.
    flattened = nn.ModuleDict({"flat": nn.Linear(2, 2)})
    flattened.position_initial = {"table": None}
    flattened.table = model.bert.encoder.relative_attention_bias.weight
    flattened.named_parameters = flattened.flat.named_parameters
    trainer = trainer_of(model, arguments(tmp_path, position_learning_rate=0.1))
    with pytest.raises(ValueError, match="does not hold 1 of the 1 position parameters.*use_orig_params"):
        trainer.create_optimizer(flattened)


def test_position_parameters_learn_at_their_rate_and_follow_the_schedule(tmp_path):
    settings = arguments(
        tmp_path, max_steps=4, learning_rate=1e-3, position_learning_rate=0.1, save_strategy="no", logging_steps=1
    )
    trainer = trainer_of(classifier("absolute+t5"), settings)
    table = trainer.model.bert.encoder.relative_attention_bias.weight
    moved, before = [], table.detach().clone()

    class Watch(training.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            moved.append((table - before).abs().max().item())
            before.copy_(table.detach())

    trainer.add_callback(Watch())
    trainer.train()
    # Adam moves by at most about its rate, and by all of it in the first step; the schedule goes down to 0 in four steps.
    assert moved[0] == pytest.approx(0.1, rel=0.01)
    assert all(step <= 0.1 * (1 - index / 4) * 1.2 for index, step in enumerate(moved))
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([0.0] * 3, abs=1e-9)


@pytest.mark.parametrize(
    "rate, said", [(-1.0, "not be negative, got -1"), (float("nan"), "be a finite number, got nan")]
)
def test_what_is_no_rate_is_refused(rate, said, tmp_path):
    with pytest.raises(ValueError, match=f"position_learning_rate must {said}"):
        arguments(tmp_path, position_learning_rate=rate)


STAGES = {"do_train": True, "do_eval": True}


@pytest.mark.parametrize(
    "given, evaluates, saves, keeps_best",
    [
        ({}, "no", "epoch", False),
        ({"do_train": True}, "no", "epoch", False),
        (STAGES, "epoch", "epoch", True),
        ({**STAGES, "max_steps": 10}, "steps", "steps", True),
        ({**STAGES, "save_strategy": "steps", "save_steps": 7}, "steps", "steps", True),
        ({**STAGES, "eval_strategy": "steps", "eval_steps": 7}, "steps", "steps", True),
        ({**STAGES, "save_strategy": "no"}, "no", "no", False),
        ({**STAGES, "save_strategy": "best", "metric_for_best_model": "loss"}, "epoch", "best", True),
        ({**STAGES, "eval_strategy": "no"}, "no", "epoch", False),
        ({**STAGES, "eval_strategy": "epoch", "save_strategy": "steps"}, "epoch", "steps", False),
        ({**STAGES, "load_best_model_at_end": False}, "epoch", "epoch", False),
    ],
)
def test_evaluation_and_saving_follow_each_other(given, evaluates, saves, keeps_best, tmp_path):
    settings = arguments(tmp_path, **given)
    assert (settings.eval_strategy.value, settings.save_strategy.value) == (evaluates, saves)
    assert settings.load_best_model_at_end is keeps_best
    if "save_steps" in given or "eval_steps" in given:
        assert settings.save_steps == settings.eval_steps == 7


def test_the_best_model_is_chosen_by_the_tasks_metric_unless_another_was_asked_for(tmp_path):
    settings = arguments(tmp_path, **STAGES)
    settings.choose_best_by("f1")
    assert (settings.metric_for_best_model, settings.greater_is_better) == ("f1", True)
    settings.choose_best_by("perplexity")
    assert (settings.metric_for_best_model, settings.greater_is_better) == ("perplexity", False)
    asked_for = arguments(tmp_path, **STAGES, metric_for_best_model="accuracy")
    asked_for.choose_best_by("perplexity")
    assert (asked_for.metric_for_best_model, asked_for.greater_is_better) == ("accuracy", True)
    # Trainer takes the higher for the better unless it is a loss.
    by_name = arguments(tmp_path, **STAGES, metric_for_best_model="eval_perplexity")
    by_name.choose_best_by("perplexity")
    assert (by_name.metric_for_best_model, by_name.greater_is_better) == ("eval_perplexity", False)
    error = arguments(tmp_path, **STAGES, metric_for_best_model="mse")
    error.choose_best_by("combined_score")
    assert (error.metric_for_best_model, error.greater_is_better) == ("mse", False)
    upside_down = arguments(tmp_path, **STAGES, greater_is_better=False)
    upside_down.choose_best_by("f1")
    assert (upside_down.metric_for_best_model, upside_down.greater_is_better) == ("f1", False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a run with checkpoints 3, 6 and 9, of which 3 is the best."""
    folder = tmp_path_factory.mktemp("trained")
    # The worst model is the best one: that of the first epoch.
    best = {"metric_for_best_model": "loss", "greater_is_better": True, "save_total_limit": 5}
    settings = arguments(folder, **STAGES, **best, num_train_epochs=3, learning_rate=1e-2, position_learning_rate=0.1)
    trainer_of(classifier("absolute+t5"), settings).train()
    state = json.loads((folder / "checkpoint-9" / "trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]).name == "checkpoint-3"
    return folder


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    """A copy of the run's folder, to be broken; times of files are kept."""
    return Path(shutil.copytree(trained, tmp_path / "copied"))


def in_order_of_writing(checkpoint: Path) -> list[str]:
    return [file.name for file in sorted(checkpoint.iterdir(), key=lambda file: file.stat().st_mtime_ns)]


@pytest.mark.parametrize(
    "family, scheme, limit, length, fitted",
    [
        ("bert", "t5", 64, 200, 200),
        ("roberta", "t5", 512, 200, 512),
        ("bert", "t5", 10**30, 200, 10**30),
        ("roberta", "absolute+t5", 32, 48, 48),
        ("bert", "absolute+t5", 10**30, 48, None),
        ("roberta", "absolute+t5", 10**30, 48, None),
        ("roberta", "tupe", 512, 16, None),
        ("bert", "relative_key", 64, 200, 200),
    ],
)
def test_a_tokenizer_is_raised_to_what_was_trained_and_lowered_to_a_tables_end(family, scheme, limit, length, fitted):
    """None: where the model itself refuses to read on."""
    model = build(scheme, family)
    tokenizer = SimpleNamespace(model_max_length=limit)
    fit_tokenizer(tokenizer, length, model.config)
    read = tokenizer.model_max_length
    assert fitted in (read, None)
    with torch.no_grad():
        model(torch.full((1, min(read, 999)), 7))
        if fitted is None:
            with pytest.raises((ValueError, IndexError)):
                model(torch.full((1, read + 1), 7))


def test_whole_checkpoints_pass_and_the_newest_is_found(copied):
    for step in (3, 6, 9):
        check_checkpoint(copied / f"checkpoint-{step}")
    (copied / "checkpoint-notes").mkdir()
    (copied / "checkpoint-12").write_text("no folder")
    assert newest_whole_checkpoint(copied) == copied / "checkpoint-9"
    assert newest_whole_checkpoint(copied / "nowhere") is None


def test_a_kill_at_any_moment_of_writing_is_noticed(copied):
    checkpoint = copied / "checkpoint-9"
    written = in_order_of_writing(checkpoint)
    assert written[-1] == "trainer_state.json" and "optimizer.pt" in written and "model.safetensors" in written
    contents = {name: (checkpoint / name).read_bytes() for name in written}
    for name in reversed(written):
        for size in {0, len(contents[name]) // 2, max(len(contents[name]) - 2, 0)}:
            (checkpoint / name).write_bytes(contents[name][:size])
            with pytest.raises(ValueError, match=r"checkpoint-9/\S+ (is|has)"):
                check_checkpoint(checkpoint)
        (checkpoint / name).unlink()
        with pytest.raises(ValueError, match="is missing|is cut off"):
            check_checkpoint(checkpoint)


CLASSES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


DAMAGES = {
    "missing": None,
    "empty": lambda content: b"",
    "cut in half": lambda content: content[: len(content) // 2],
    "two bytes short": lambda content: content[:-2],
    "zeros at the end": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
}


@pytest.mark.parametrize("part", CLASSES)
def test_a_damaged_part_is_named(part, copied):
    file = copied / "checkpoint-9" / part
    content = file.read_bytes()
    for damage, damaged in DAMAGES.items():
        # Safetensors that are as long as they should be have nothing else to be checked by.
        if (part, damage) == (CLASSES[0], "zeros at the end"):
            continue
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged(content))
        with pytest.raises(ValueError, match=f"checkpoint-9/{re.escape(part)} "):
            check_checkpoint(copied / "checkpoint-9")
        file.write_bytes(content)


def test_safetensors_are_measured_by_their_header(copied):
    file = copied / "checkpoint-9" / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    end = 8 + length + max(v["data_offsets"][1] for k, v in json.loads(content[8 : 8 + length]).items() if k[0] != "_")
    assert end == len(content)
    file.write_bytes(content + b"\0")
    with pytest.raises(ValueError, match=f"has {end + 1:,} bytes instead of {end:,}"):
        check_checkpoint(copied / "checkpoint-9")
    file.write_bytes(struct.pack("<Q", 2**62) + content[8:])
    with pytest.raises(ValueError, match="within its header"):
        check_checkpoint(copied / "checkpoint-9")


def test_every_shard_must_be_there(copied):
    checkpoint = copied / "checkpoint-9"
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ValueError, match="checkpoint-9/model-00002-of-00002.safetensors is missing"):
        check_checkpoint(checkpoint)
    shutil.copy(checkpoint / shards["a"], checkpoint / shards["b"])
    check_checkpoint(checkpoint)


def test_every_process_needs_its_random_numbers(copied):
    checkpoint = copied / "checkpoint-9"
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    with pytest.raises(ValueError, match="rng_state_1.pth is missing"):
        check_checkpoint(checkpoint, processes=2)
    shutil.copy(checkpoint / "rng_state_0.pth", checkpoint / "rng_state_1.pth")
    check_checkpoint(checkpoint, processes=2)


@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_a_checkpoint_whose_best_model_is_lost_is_not_whole(damage, copied):
    best = copied / "checkpoint-3" / "model.safetensors"
    os.truncate(best, 1000) if damage == "cut off" else best.unlink()
    with pytest.raises(ValueError, match="checkpoint-3/model.safetensors is"):
        check_checkpoint(copied / "checkpoint-9")
    assert newest_whole_checkpoint(copied) is None


def test_broken_checkpoints_are_passed_over_with_a_warning_and_kept_under_another_name(copied, caplog):
    os.truncate(copied / "checkpoint-9" / "optimizer.pt", 100)
    (copied / "checkpoint-6" / "trainer_state.json").unlink()
    (copied / "broken-checkpoint-9").mkdir()
    assert newest_whole_checkpoint(copied) == copied / "checkpoint-3"
    newest, older = caplog.messages
    assert "checkpoint-9 is passed over" in newest and "optimizer.pt is cut off" in newest
    assert "checkpoint-6 is passed over" in older and "trainer_state.json is missing" in older
    assert (copied / "broken-checkpoint-9" / "optimizer.pt").stat().st_size == 100
    assert (copied / "broken-checkpoint-6" / "optimizer.pt").exists()


CONFIG = variant_config(position_scheme="absolute+t5")


def new_run(folder: Path, config=CONFIG, **settings) -> Run:
    return Run(arguments(folder, **{"do_train": True, **settings}), config)


def started(folder: Path, **settings) -> Run:
    run = new_run(folder, **settings)
    run._write(finished=False)
    return run


@pytest.mark.parametrize(
    "other, named",
    [
        ({"learning_rate": 1e-3}, "learning_rate is 5e-05 there and 0.001 here"),
        ({"seed": 7}, "seed is 42 there and 7 here"),
        ({"num_train_epochs": 9}, "num_train_epochs"),
        ({"position_learning_rate": 0.1}, "position_learning_rate is None there and 0.1 here"),
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size"),
        ({"do_eval": True}, "eval_strategy is 'no' there and 'epoch' here"),
        ({"config": variant_config(position_scheme="t5")}, "position_scheme is 'absolute+t5' there and 't5' here"),
        ({"config": variant_config(position_scheme="absolute+t5", position_buckets=8)}, "position_buckets is None"),
        ({"learning_rate": 1.0, "seed": 7}, "learning_rate is 5e-05 there and 1.0 here; seed is"),
    ],
)
def test_a_run_with_other_settings_in_the_same_folder_is_refused_and_named(other, named, tmp_path):
    started(tmp_path)
    with pytest.raises(ValueError, match=f"holds a run with other settings .*{re.escape(named)}"):
        new_run(tmp_path, **other)


def test_what_changes_no_result_may_differ_when_a_run_goes_on(tmp_path):
    started(tmp_path)
    new_run(
        tmp_path, do_predict=True, logging_steps=3, per_device_eval_batch_size=2, save_total_limit=1, log_level="info"
    )


def test_files_are_known_by_their_content(tmp_path):
    file = tmp_path / "train.txt"
    file.write_text("one")
    data = training.DataArguments(train_file=str(file), test_file=str(file))
    before = training.recorded_settings(arguments(tmp_path), CONFIG, data)
    assert "test_file" not in before
    moved = shutil.copy(file, tmp_path.joinpath("elsewhere").mkdir() or tmp_path / "elsewhere" / "train.txt")
    same = training.recorded_settings(
        arguments(tmp_path), CONFIG, training.DataArguments(train_file=str(moved), max_predict_samples=3)
    )
    assert same == before
    file.write_text("two")
    assert training.recorded_settings(arguments(tmp_path), CONFIG, data)["train_file"] != before["train_file"]


def test_local_checkpoints_and_data_sets_are_known_by_their_content(tmp_path):
    """They may be replaced under the same name, as by another conversion."""
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir()
    (data / "parts").mkdir(parents=True)
    for file in (model / "model.safetensors", model / "README.md", data / "parts" / "train.jsonl"):
        file.write_text("one")
    others = training.ModelArguments(str(model)), training.DataArguments(dataset_name=str(data))
    before = training.recorded_settings(arguments(tmp_path), CONFIG, *others)
    (model / "README.md").write_text("two")
    assert training.recorded_settings(arguments(tmp_path), CONFIG, *others) == before
    for file, name in (
        (model / "model.safetensors", "model_name_or_path"),
        (data / "parts" / "train.jsonl", "dataset_name"),
    ):
        file.write_text("two")
        now = training.recorded_settings(arguments(tmp_path), CONFIG, *others)
        assert {key for key in now if now[key] != before[key]} == {f"what is in {name}"}
        before = now
    named = training.recorded_settings(
        arguments(tmp_path), CONFIG, training.ModelArguments("google-bert/bert-base-uncased")
    )
    assert not any(key.startswith("what is in") for key in named)


def test_settings_are_recorded_all_or_nothing(tmp_path, monkeypatch):
    run = started(tmp_path)
    before = run.record.read_text()

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run._write(finished=True)
    assert run.record.read_text() == before and not json.loads(before)["finished"]


def test_checkpoints_of_unknown_settings_are_not_gone_on_with(copied):
    with pytest.raises(ValueError, match="no run_settings.json.*--resume_from_checkpoint"):
        new_run(copied)
    named = new_run(copied, resume_from_checkpoint=str(copied / "checkpoint-6"))
    assert named.checkpoint == str(copied / "checkpoint-6")


def test_a_checkpoint_that_is_named_must_be_whole(copied):
    os.truncate(copied / "checkpoint-6" / "scheduler.pt", 10)
    with pytest.raises(
        ValueError, match="--resume_from_checkpoint .*checkpoint-6: checkpoint-6/scheduler.pt is cut off"
    ):
        new_run(copied, resume_from_checkpoint=str(copied / "checkpoint-6"))
    with pytest.raises(ValueError, match="is missing"):
        new_run(copied, resume_from_checkpoint=str(copied / "checkpoint-5"))


def test_a_run_goes_on_from_the_newest_and_a_finished_one_not_at_all(copied):
    run = started(copied.parent / "empty")
    shutil.copy(run.record, copied)
    assert new_run(copied).checkpoint == str(copied / "checkpoint-9")
    assert new_run(copied, resume_from_checkpoint="true").checkpoint == str(copied / "checkpoint-9")
    assert new_run(copied).finished_model is None
    new_run(copied)._write(finished=True)
    finished = new_run(copied)
    assert (finished.finished, finished.checkpoint, finished.finished_model) == (True, None, str(copied))

    def train(*args, **kwargs):
        raise AssertionError("trained again")

    shutil.copy(copied / "checkpoint-9" / "trainer_state.json", copied)
    trainer = SimpleNamespace(train=train)
    finished.train(trainer)
    assert trainer.state.global_step == 9


def test_the_best_model_is_found_where_the_folder_was_moved(trained, tmp_path):
    moved = Path(shutil.copytree(trained, tmp_path / "moved"))
    best = {"metric_for_best_model": "loss", "greater_is_better": True}
    settings = arguments(moved, **STAGES, **best, num_train_epochs=3, learning_rate=1e-2, position_learning_rate=0.1)
    trainer = trainer_of(classifier("absolute+t5"), settings)
    trainer.train(resume_from_checkpoint=str(moved / "checkpoint-9"))
    best = PosencBertForSequenceClassification.from_pretrained(moved / "checkpoint-3")
    last = PosencBertForSequenceClassification.from_pretrained(moved / "checkpoint-9")
    assert trainer.state.best_model_checkpoint == str(moved / "checkpoint-3")
    assert torch.equal(trainer.model.classifier.weight, best.classifier.weight)
    assert not torch.equal(last.classifier.weight, best.classifier.weight)
