"""Training with a learning rate of its own for position parameters, as an importer of the package does it."""

import pytest
from tiny import build, variant_class, variant_config
from transformers import TrainingArguments
from transformers.utils import logging

from hf_posenc import position_parameters
from hf_posenc.training import PositionTrainer


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


def test_a_negative_rate_is_refused(tmp_path):
    with pytest.raises(ValueError, match="position_learning_rate must not be negative, got -1"):
        trainer(fresh("t5"), tmp_path, position_learning_rate=-1)
