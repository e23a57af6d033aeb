"""Training with a learning rate of its own for position parameters, as an importer of the package does it."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import Sentences, build, stock_config, variant_class, variant_config
from transformers import EncoderDecoderConfig, EncoderDecoderModel, TrainingArguments
from transformers.utils import logging

from hf_posenc import position_parameters
from hf_posenc.training import PositionTrainer, move_to_own_groups


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What the trainer warns of."""
    lines = []
    monkeypatch.setattr(logging.get_logger("hf_posenc.training"), "warning", lambda line: lines.append(line))
    return lines


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
    assert all("encoder.relative_attention_bias.weight" in line and "by about 0.001 at most" in line for line in said)


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


@pytest.mark.parametrize(
    ("scheme", "rates"), [("t5", "0.01 (deberta) to 0.1"), ("absolute+t5", "0.001 (deberta) to 0.01")]
)
@pytest.mark.parametrize(
    "make",
    [Holder, encoder_decoder, lambda scheme: get_peft_model(fresh(scheme), LoraConfig(target_modules=["query"]))],
)
def test_models_that_hold_a_variant_are_told_too(make, scheme, rates, said, tmp_path):
    trainer(make(scheme), tmp_path).create_optimizer_and_scheduler(100)
    assert len(said) == 1 and f"from {rates} (t5)" in said[0]


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
