"""Training with a learning rate of its own for position parameters, as an importer of the package does it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed_worker import loopback
from peft import LoraConfig, get_peft_model
from tiny import Sentences, build, inputs, stock_config, variant_class, variant_config
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import BertModel, EncoderDecoderConfig, EncoderDecoderModel, Trainer, TrainingArguments
from transformers.trainer_utils import HPSearchBackend
from transformers.utils import logging

from hf_posenc import freeze_all_but_positions, install, position_parameters, train_positions, uninstall
from hf_posenc.training import PositionTrainer, move_to_own_groups, warn_of_tables_that_stay


def trainer(model, folder, **keywords) -> PositionTrainer:
    arguments = TrainingArguments(output_dir=str(folder), learning_rate=2e-5, report_to="none", use_cpu=True)
    return PositionTrainer(model=model, args=arguments, **keywords)


def fresh(scheme: str):
    return variant_class("bert")(variant_config(position_scheme=scheme))


def test_the_rate_is_that_of_tables_and_biases_alone(tmp_path):
    model = build("absolute+t5")
    optimizer = trainer(model, tmp_path, position_learning_rate=0.05).create_optimizer()
    own = {id(parameter) for parameter in position_parameters(model).values()}
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert len(rates) == len([*model.parameters()])
    assert {rates[key] for key in own} == {(0.05, 0.0)}
    assert {rate for key, (rate, _) in rates.items() if key not in own} == {2e-5}


def test_a_rate_beside_an_optimizer_of_ones_own_is_refused(tmp_path):
    model = fresh("t5")
    optimizers = torch.optim.AdamW(model.parameters(), lr=1e-5), None
    with pytest.raises(ValueError, match="position_learning_rate=0.1 has no use with an optimizer of your own"):
        trainer(model, tmp_path, position_learning_rate=0.1, optimizers=optimizers)
    assert trainer(model, tmp_path, optimizers=optimizers).optimizer is optimizers[0]


@dataclass
class WithRate(TrainingArguments):
    position_learning_rate: float | None = None


@pytest.mark.parametrize("given", [None, 0.05])
@pytest.mark.parametrize("before", [None, 0.01])
def test_the_rate_of_a_search_is_used(given, before, tmp_path):
    arguments = WithRate(str(tmp_path), report_to="none", use_cpu=True, position_learning_rate=before)
    model = build("absolute+t5")
    own = PositionTrainer(model=model, args=arguments, position_learning_rate=given)
    own.hp_search_backend = HPSearchBackend.WANDB  # whose trials are dictionaries

    def rates() -> set[float]:
        own.optimizer = None
        tables = {id(parameter) for parameter in position_parameters(model).values()}
        return {g["lr"] for g in own.create_optimizer().param_groups if tables & {*map(id, g["params"])}}

    for rate in (0.01, 0.1):
        own._hp_search_setup({"position_learning_rate": rate})
        assert rates() == {rate} and arguments.position_learning_rate == rate
    own._hp_search_setup({"learning_rate": 1e-4})
    assert rates() == {0.1} and arguments.learning_rate == 1e-4 and arguments.position_learning_rate == 0.1


@pytest.mark.parametrize(("family", "name"), [("bert", "BertLMHeadModel"), ("roberta", "RobertaForCausalLM")])
def test_label_smoothing_shifts_labels_of_a_decoder(family, name, tmp_path):
    model = build(
        "absolute+t5", head=name.removeprefix("Bert").removeprefix("Roberta"), family=family, is_decoder=True
    )
    ids = torch.randint(5, 50, (4, 12))

    def loss(smoothing: float) -> float:
        arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=smoothing, report_to="none", use_cpu=True)
        return Trainer(model, arguments).compute_loss(model.eval(), {"input_ids": ids, "labels": ids.clone()}).item()

    assert loss(1e-9) == pytest.approx(loss(0.0), abs=1e-5)
    assert loss(0.1) != pytest.approx(loss(0.0), abs=1e-4)


def test_a_loss_outside_of_the_model_that_reads_padding(tmp_path):
    model = build("t5", head="ForTokenClassification")
    batch = inputs(batch=4, length=40, padding=None)
    batch["attention_mask"][1:, 15:] = 0
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, report_to="none", use_cpu=True)

    def loss(unpad: bool) -> float:
        model.config.unpad = unpad
        labels = batch["attention_mask"] % 2  # 0 at padding
        return Trainer(model, arguments).compute_loss(model, {**batch, "labels": labels}).item()

    assert loss(True) == pytest.approx(loss(False), abs=1e-5)


@pytest.mark.parametrize(
    ("model", "keywords", "steps", "is_warned"),
    [
        (lambda: fresh("t5"), {}, 100, True),
        (lambda: fresh("t5"), {}, 10_000, False),  # far enough: 0.1
        (lambda: fresh("t5"), {"position_learning_rate": 0.05}, 100, False),
        (lambda: build("t5"), {}, 100, False),  # trained already
        (lambda: fresh("rope"), {}, 100, False),
    ],
    ids=["zeros", "many steps", "own rate", "trained", "nothing to learn"],
)
def test_tables_that_would_stay_at_zero_are_told_once(model, keywords, steps, is_warned, said, tmp_path):
    own = trainer(model(), tmp_path, **keywords)
    own.create_optimizer_and_scheduler(steps)
    own.create_scheduler(steps, own.optimizer)
    assert len(said) == is_warned
    assert all("encoder.relative_attention_bias.weight" in line and "by at most about 0.001" in line for line in said)


@pytest.mark.parametrize(
    ("scheme", "rates"), [("t5", "0.01 (deberta) to 0.1"), ("absolute+t5", "0.001 (deberta) to 0.01")]
)
def test_the_rate_that_is_named_suits_the_scheme(scheme, rates, said, tmp_path):
    trainer(fresh(scheme), tmp_path).create_optimizer_and_scheduler(100)
    assert len(said) == 1 and f"from {rates} (t5)" in said[0]


class Holder(torch.nn.Module):
    """A model of one's own, which has no config."""

    def __init__(self, scheme: str):
        super().__init__()
        self.encoder, self.head = fresh(scheme), torch.nn.Linear(32, 2)

    def forward(self, input_ids, attention_mask, labels):
        logits = self.head(self.encoder(input_ids, attention_mask).pooler_output)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def encoder_decoder(scheme: str) -> EncoderDecoderModel:
    decoder = stock_config(is_decoder=True, add_cross_attention=True, position_scheme="rope")
    config = EncoderDecoderConfig.from_encoder_decoder_configs(stock_config(position_scheme=scheme), decoder)
    return EncoderDecoderModel(config)


def adapted(scheme: str):
    model = get_peft_model(fresh(scheme), LoraConfig(target_modules=["query"]))
    train_positions(model)
    return model


@pytest.mark.parametrize(
    ("scheme", "rates"), [("t5", "0.01 (deberta) to 0.1"), ("absolute+t5", "0.001 (deberta) to 0.01")]
)
@pytest.mark.parametrize("make", [Holder, encoder_decoder, adapted])
def test_models_that_hold_a_variant_are_told_too(make, scheme, rates, said, tmp_path):
    trainer(make(scheme), tmp_path).create_optimizer_and_scheduler(100)
    assert len(said) == 1 and f"from {rates} (t5)" in said[0]


def plain(model, folder, **keywords) -> Trainer:
    arguments = TrainingArguments(
        str(folder),
        learning_rate=2e-5,
        report_to="none",
        use_cpu=True,
        max_steps=2,
        save_strategy="no",
        disable_tqdm=True,
    )
    return Trainer(model=model, args=arguments, train_dataset=Sentences(), **keywords)


def adamw(model, learning_rate: float, *, position_learning_rate: float | None = None) -> torch.optim.AdamW:
    """One group, or two where positions have a rate of their own."""
    own = {id(parameter) for parameter in position_parameters(model).values()}
    groups = [{"params": [parameter for parameter in model.parameters() if id(parameter) not in own]}]
    groups.append({"params": [*position_parameters(model).values()], "lr": position_learning_rate or learning_rate})
    return torch.optim.AdamW(groups, lr=learning_rate)


def layer_by_layer(model) -> torch.optim.AdamW:
    """Lower layers learn more slowly; positions learn as their layer does."""
    layers = [{"params": [*layer.parameters()], "lr": 1e-5 * 2**i} for i, layer in enumerate(model.encoder.layer)]
    held = {id(parameter) for group in layers for parameter in group["params"]}
    return torch.optim.AdamW([{"params": [p for p in model.parameters() if id(p) not in held], "lr": 1e-4}, *layers])


def warmed_up(model) -> dict:
    """The rate of the first step is 0."""
    optimizer = adamw(model, 3e-5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 10))
    return {"optimizers": (optimizer, schedule)}


def positions_alone(model) -> dict:
    freeze_all_but_positions(model)
    return {}


SAME = {
    "the trainer's optimizer": (lambda: fresh("t5"), lambda model: {}, "2e-05"),
    "an optimizer": (lambda: fresh("t5"), lambda model: {"optimizers": (adamw(model, 1e-4), None)}, "0.0001"),
    "a schedule": (lambda: fresh("t5"), warmed_up, "3e-05"),
    "layers": (lambda: fresh("relative_key"), lambda model: {"optimizers": (layer_by_layer(model), None)}, "1e-05"),
    "nothing else": (lambda: fresh("t5"), positions_alone, "2e-05"),
    "some are trained": (lambda: with_trained_layer("relative_key"), lambda model: {}, "2e-05"),
}


def with_trained_layer(scheme: str):
    model = fresh(scheme)
    with torch.no_grad():
        next(iter(position_parameters(model).values())).normal_()
    return model


@pytest.mark.parametrize(("make", "keywords", "rate"), SAME.values(), ids=SAME)
def test_any_trainer_tells_once_of_tables_at_the_rate_of_the_rest(make, keywords, rate, said, tmp_path):
    model = make()
    own = plain(model, tmp_path, **keywords(model))
    own.create_optimizer_and_scheduler(2)
    own.create_scheduler(2)
    assert len(said) == 1 and f"2 steps at a learning rate of {rate} move" in said[0]
    zero = 1 if "layer" not in said[0] else 2 - ("layer.1" in said[0])
    assert (
        f"{zero} position parameters start at 0, such as encoder." in said[0]
        and "PositionTrainer or with a parameter group" in said[0]
    )


def test_a_training_tells_once(said, tmp_path):
    """As it runs, with the optimizer in accelerate's wrapper."""
    for _ in range(2):
        plain(Holder("t5"), tmp_path).train()
    assert len(said) == 1 and "2 steps at a learning rate of 2e-05" in said[0]


OWN = {
    "a group": (lambda: fresh("t5"), lambda model: adamw(model, 2e-5, position_learning_rate=0.01)),
    "a lower rate": (lambda: fresh("t5"), lambda model: adamw(model, 2e-5, position_learning_rate=1e-6)),
    "high rates": (lambda: fresh("t5"), lambda model: adamw(model, 0.1)),
    "trained": (lambda: build("t5"), lambda model: None),
    "nothing to learn": (lambda: fresh("rope"), lambda model: None),
    "stock": (lambda: BertModel(stock_config()), lambda model: None),
}


@pytest.mark.parametrize(("make", "optimizer"), OWN.values(), ids=OWN)
def test_no_trainer_tells_of_what_learns_or_has_a_rate_of_its_own(make, optimizer, said, tmp_path):
    model = make()
    trainer = plain(model, tmp_path, optimizers=(optimizer(model), None))
    trainer.create_optimizer_and_scheduler(2)
    assert said == []


def test_a_rate_that_is_given_is_not_told_of_even_where_it_is_that_of_the_rest(said, tmp_path):
    trainer(fresh("t5"), tmp_path, position_learning_rate=2e-5).create_optimizer_and_scheduler(2)
    assert said == []


def test_tables_that_are_frozen_at_zero_are_told_of(said, tmp_path):
    model = get_peft_model(fresh("t5"), LoraConfig(target_modules=["query"]))
    plain(model, tmp_path).create_optimizer_and_scheduler(2)
    assert len(said) == 1 and "are frozen" in said[0] and "hf_posenc.train_positions(model)" in said[0]


def test_without_the_plugin_trainers_say_nothing(said, tmp_path):
    own = plain(fresh("t5"), tmp_path)
    uninstall()
    try:
        own.create_optimizer_and_scheduler(2)
    finally:
        install()
    assert said == []


def test_a_model_that_holds_a_variant_is_trained_without_a_rate(said, tmp_path):
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    model = Holder("absolute+t5")
    PositionTrainer(model, arguments, train_dataset=Sentences()).train()
    assert len(said) == 1 and model.encoder.encoder.relative_attention_bias.weight.any()


NO_RATES = [
    (float("nan"), ValueError, "must be a finite number, got nan"),
    (float("inf"), ValueError, "must be a finite number, got inf"),
    (-0.1, ValueError, "must not be negative, got -0.1"),
    (True, TypeError, "must be a number, got True of type bool"),
    ("0.1", TypeError, "must be a number, got '0.1' of type str"),
    ([0.1], TypeError, r"must be a number, got \[0.1\] of type list"),
]


@pytest.mark.parametrize(("rate", "error", "message"), NO_RATES, ids=[str(rate) for rate, _, _ in NO_RATES])
def test_what_is_no_rate_is_refused(rate, error, message, tmp_path):
    model = fresh("t5")
    with pytest.raises(error, match=f"position_learning_rate {message}"):
        trainer(model, tmp_path, position_learning_rate=rate)
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    arguments.position_learning_rate = rate
    with pytest.raises(error, match=f"position_learning_rate {message}"):
        PositionTrainer(model=model, args=arguments)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(error, match=f"position_learning_rate {message}"):
        move_to_own_groups(optimizer, position_parameters(model), rate)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("rate", [None, 0, 0.0, 1, np.float32(0.1), np.float64(0.1)])
def test_what_is_a_rate_is_taken(rate, tmp_path):
    own = trainer(fresh("t5"), tmp_path, position_learning_rate=rate)
    assert own.create_optimizer() is own.optimizer and own.position_learning_rate == rate


def tell_on_the_first_process(rank: int, folder: str) -> None:
    """Half of a sharded model's trainers: with anything that waits for the other process, this would not end."""
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    model = fully_shard(fresh("t5"), mesh=init_device_mesh("cpu", (2,)))
    if rank == 0:
        lines = []
        logging.get_logger("hf_posenc.training.learning_rates").warning_once = lines.append
        warn_of_tables_that_stay(model, torch.optim.AdamW(model.parameters(), lr=2e-5), 2e-5, 100)
        Path(folder, "said").write_text("\n".join(lines))
    deadline = time.monotonic() + 30
    while rank == 1 and not Path(folder, "said").exists():
        assert time.monotonic() < deadline, "the first process waits"
        time.sleep(0.1)
    distributed.destroy_process_group()


@pytest.mark.slow
def test_sharded_tables_are_told_of_by_one_process_alone(tmp_path):
    torch.multiprocessing.spawn(tell_on_the_first_process, (str(tmp_path),), nprocs=2)
    assert (
        "1 position parameters start at 0, such as encoder.relative_attention_bias.weight"
        in (tmp_path / "said").read_text()
    )
