"""Losses of heads over several processes and accumulated batches: every label counts once, whoever computes it."""

import pytest
import tiny
import torch
from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainingArguments


def halves(head: str, family: str) -> list[dict]:
    """Two batches with labels, of which one has more than the other where labels are left out."""
    batches = []
    for seed in (0, 1):
        batch = tiny.inputs(batch=3, length=12, family=family, seed=seed, padding="right" if seed else None)
        generator = torch.Generator().manual_seed(seed)
        shape, classes = (3,), 2
        if head in ("ForMaskedLM", "ForTokenClassification"):
            shape, classes = (3, 12), 2 if head == "ForTokenClassification" else tiny.SIZES["vocab_size"]
        labels = torch.randint(classes, shape, generator=generator)
        if len(shape) == 2:
            labels[batch["attention_mask"] == 0] = -100
            labels[:, : 2 + 5 * seed] = -100
        if head == "ForMultipleChoice":
            batch = {name: tensor[:, None].repeat(1, 2, 1) for name, tensor in batch.items()}
            batch["input_ids"][:, 1] = batch["input_ids"][:, 1].flip(-1)
        batches.append({**batch, "labels": labels})
    return batches


HEADS = ["ForMaskedLM", "ForTokenClassification", "ForSequenceClassification", "ForMultipleChoice"]


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("head", HEADS)
def test_losses_of_parts_add_up_to_the_mean_over_all_labels(head, family, return_dict):
    model = tiny.build("t5", family, head)
    first, second = halves(head, family)
    whole = {name: torch.cat([first[name], second[name]]) for name in first}
    number = (whole["labels"] != -100).sum()
    with torch.no_grad():
        parts = [model(**half, num_items_in_batch=number, return_dict=return_dict)[0] for half in (first, second)]
        means = [model(**half)[0] for half in (first, second)]
        torch.testing.assert_close(sum(parts), model(**whole)[0])
        torch.testing.assert_close(model(**whole, num_items_in_batch=number)[0], model(**whole)[0])
    if first["labels"].ndim == 2:
        assert abs(sum(means) / 2 - sum(parts)) > 1e-3  # a mean of means is something else


@pytest.mark.parametrize("scheme", ["absolute", "deberta"])
def test_trainer_accumulates_batches_to_the_steps_of_a_larger_batch(scheme, tmp_path):
    rows = [
        {name: tensor[i].tolist() for name, tensor in half.items()}
        for half in halves("ForTokenClassification", "bert")
        for i in range(3)
    ]
    trained, losses = [], []
    for batch, accumulated in ((6, 1), (2, 3)):
        model = tiny.build(scheme, head="ForTokenClassification")
        arguments = TrainingArguments(
            tmp_path,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulated,
            max_steps=3,
            optim="sgd",
            learning_rate=0.1,
            logging_steps=1,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        )
        trainer = Trainer(model, arguments, train_dataset=Dataset.from_list(rows))
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        trained.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    before = nn.utils.parameters_to_vector(tiny.build(scheme, head="ForTokenClassification").parameters())
    torch.testing.assert_close(trained[1], trained[0], atol=1e-6, rtol=1e-5)
    assert (trained[0] - before).abs().max() > 1e-2
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
