"""Losses of heads over several processes and accumulated batches: every label counts once, whoever computes it."""

import inspect

import pytest
import tiny
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hf_posenc import variants
from hf_posenc.modeling.models.modeling_bert import PosencBertForTokenClassification, PosencBertLMHeadModel


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
COMPUTING = [
    (family, head)
    for family in tiny.FAMILIES
    for head in HEADS
    if any(stock.__name__.endswith(head) for stock in tiny.heads_that_compute(family))
]


@tiny.cross(family_and_head=COMPUTING, return_dict=[True, False], strength=1)
def test_losses_of_parts_add_up_to_the_mean_over_all_labels(family_and_head, return_dict):
    family, head = family_and_head
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


@pytest.mark.parametrize("scheme", ["absolute", pytest.param("deberta", marks=pytest.mark.slow)])
def test_trainer_accumulates_batches_to_the_steps_of_a_larger_batch(scheme, tmp_path):
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

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


VOCABULARY = tiny.SIZES["vocab_size"]
ALL_HEADS = [
    (family, stock.__name__.removeprefix(tiny._stock_prefix(family)))
    for family in tiny.FAMILIES
    for stock in tiny.heads_that_compute(family)
    if "labels" in inspect.signature(stock.forward).parameters
    or "start_positions" in inspect.signature(stock.forward).parameters
]


def part(family: str, head: str, seed: int, rows: int = 3, length: int = 12) -> dict:
    """Inputs and every label that a head takes, of which later parts leave more out."""
    batch = tiny.inputs(rows, length, family, padding="right" if seed else None, seed=seed)
    generator = torch.Generator().manual_seed(seed)

    def random(classes, *shape):
        return torch.randint(classes, shape, generator=generator)

    if head in ("ForMaskedLM", "ForTokenClassification", "ForPreTraining", "ForCausalLM", "LMHeadModel"):
        classes = (
            2 if head == "ForTokenClassification" or family == "electra" and head == "ForPreTraining" else VOCABULARY
        )
        labels = random(classes, rows, length)
        if not (family == "electra" and head == "ForPreTraining"):  # whose loss ignores padding, and no label
            labels[:, : 2 + 5 * seed] = -100
        if head in ("ForCausalLM", "LMHeadModel"):
            labels[:, 0] = 7  # which nothing predicts
        batch["labels"] = labels
        if family == "bert" and head == "ForPreTraining":
            batch["next_sentence_label"] = random(2, rows)
    elif head == "ForQuestionAnswering":
        batch["start_positions"], batch["end_positions"] = random(length, rows), random(length, rows)
        batch["end_positions"][:seed] = length + 3  # cut off
    else:
        batch["labels"] = random(2, rows)
        if head == "ForMultipleChoice":
            for name in ("input_ids", "attention_mask"):
                batch[name] = torch.stack([batch[name], batch[name].flip(-1)], dim=1)
        elif seed:
            batch["labels"][0] = -100
    return batch


def formula(outputs, batch: dict, family: str, head: str) -> tuple[torch.Tensor, int]:
    """The sum of a head's losses over its labels, by its logits; and how many labels there are."""
    if head == "ForQuestionAnswering":
        total = 0.0
        for logits, positions in zip(outputs[-2:], (batch["start_positions"], batch["end_positions"]), strict=True):
            for row, position in zip(logits, positions, strict=True):
                if position < len(row):
                    total = total + row.logsumexp(0) - row[position]
        return total / 2, len(batch["start_positions"])
    logits, labels = outputs[1], batch["labels"]
    if family == "electra" and head == "ForPreTraining":
        each = functional.softplus(logits) - logits * labels
        return (each * batch["attention_mask"]).sum(), int(batch["attention_mask"].sum())
    if head in ("ForCausalLM", "LMHeadModel"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    kept = labels != -100
    logits, labels = logits[kept], labels[kept]
    return (logits.logsumexp(-1) - logits.gather(-1, labels[:, None])[:, 0]).sum(), len(labels)


@tiny.cross(
    family_and_head=[pair for pair in ALL_HEADS if pair != ("bert", "ForPreTraining")],
    return_dict=[True, False],
    strength=1,
)
def test_every_head_divides_the_sum_over_its_labels_wherever_they_are_given(family_and_head, return_dict):
    family, head = family_and_head
    model = tiny.build("t5", family, head)
    names = list(inspect.signature(model.forward).parameters)
    for seed in (0, 1):
        batch = part(family, head, seed)
        with torch.no_grad():
            means = model(**batch, return_dict=return_dict)
            by_position = [batch.get(name) for name in names[: 1 + max(names.index(name) for name in batch)]]
            number = torch.tensor(1000)
            for outputs in (
                model(**batch, num_items_in_batch=number, return_dict=return_dict),
                model(*by_position, num_items_in_batch=1000, return_dict=return_dict),
            ):
                assert type(outputs) is type(means)
                values = outputs if isinstance(outputs, tuple) else outputs.to_tuple()
                total, _ = formula(values, batch, family, head)
                torch.testing.assert_close(values[0], total / 1000)
                if return_dict:
                    assert outputs.loss is outputs["loss"] is outputs[0]


@pytest.mark.parametrize(
    "family, head",
    [
        (family, head)
        for family, head in ALL_HEADS
        if family in ("bert", "distilbert", "mpnet") and (family, head) != ("bert", "ForPreTraining")
    ],
)
def test_every_heads_parts_add_up_to_the_larger_batch(family, head):
    model = tiny.build("deberta", family, head)
    parts = [part(family, head, seed) for seed in (0, 1)]
    if head == "ForQuestionAnswering":
        for each in parts:  # two means of one number
            each["end_positions"].clamp_(max=11)
    whole = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
    with torch.no_grad():
        number = sum(formula(model(**each).to_tuple(), each, family, head)[1] for each in parts)
        added = sum(model(**each, num_items_in_batch=number).loss for each in parts)
        torch.testing.assert_close(added, model(**whole).loss)


@pytest.mark.parametrize("family, head", ALL_HEADS)
def test_without_the_number_the_loss_is_stocks_to_the_bit(family, head):
    model = tiny.build("t5", family, head)
    stock = next(each for each in tiny.heads(family) if issubclass(type(model), each))
    batch = part(family, head, 1)
    with torch.no_grad():
        assert torch.equal(model(**batch).loss, stock.forward(model, **batch).loss)
        assert torch.equal(model(**batch, num_items_in_batch=None).loss, stock.forward(model, **batch).loss)
        unlabelled = {name: batch[name] for name in ("input_ids", "attention_mask")}
        assert model(**unlabelled, num_items_in_batch=5).loss is None
        logits = model(**unlabelled, num_items_in_batch=5, return_dict=False)[0]
        assert torch.equal(logits, model(**unlabelled)[0])


@pytest.mark.parametrize("labels", [torch.rand(4, 1), torch.rand(4)], ids=["column", "row"])
def test_regression_divides_the_sum_of_squares(labels):
    model = tiny.build("t5", head="ForSequenceClassification", num_labels=1)
    labels[0] = -100.0  # a number as any other: the mean of squares ignores none
    with torch.no_grad():
        outputs = model(**tiny.inputs(4), labels=labels, num_items_in_batch=7)
    torch.testing.assert_close(outputs.loss, ((outputs.logits.view(-1) - labels.view(-1)) ** 2).sum() / 7)


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_several_numbers_a_sequence_are_as_many_labels(problem):
    model = tiny.build("t5", head="ForSequenceClassification", num_labels=3, problem_type=problem)
    labels = torch.randint(2, (4, 3), generator=torch.Generator().manual_seed(0)).float()
    with torch.no_grad():
        outputs = model(**tiny.inputs(4), labels=labels, num_items_in_batch=24)
    each = (outputs.logits - labels) ** 2
    if problem == "multi_label_classification":
        each = functional.softplus(outputs.logits) - outputs.logits * labels
    torch.testing.assert_close(outputs.loss, each.sum() / 24)


def test_masked_words_of_pretraining_say_nothing_of_the_next_sentence(tmp_path):
    model = tiny.build("t5", head="ForPreTraining")
    parts = [part("bert", "ForPreTraining", seed, rows) for seed, rows in ((0, 2), (0, 5), (1, 3))]
    number = sum(int((each["labels"] != -100).sum()) for each in parts)
    with torch.no_grad():
        for each in parts:
            outputs = model(**each, num_items_in_batch=number)
            kept = each["labels"] != -100
            words = functional.cross_entropy(outputs.prediction_logits[kept], each["labels"][kept], reduction="sum")
            following = functional.cross_entropy(outputs.seq_relationship_logits, each["next_sentence_label"])
            torch.testing.assert_close(outputs.loss, words / number + following)
    # Nothing counts the sequences of all parts, so Trainer takes the mean of the parts.
    assert not trainer(model, tmp_path).model_accepts_loss_kwargs


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification"])
def test_a_part_without_labels_adds_nothing(head):
    model = tiny.build("t5", head=head)
    batch = part("bert", head, 0)
    batch["labels"][:] = -100
    assert model(**batch).loss.isnan()
    loss = model(**batch, num_items_in_batch=9).loss
    assert loss == 0
    loss.backward()
    assert all((parameter.grad == 0).all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_signatures_are_stocks(family):
    for stock in tiny.heads(family):
        variant = variants.VARIANT_MODELS[stock]
        if issubclass(variant, variant.position_classes.model):
            continue
        assert inspect.signature(variant.forward) == inspect.signature(stock.forward), variant


class Named(PosencBertForTokenClassification):
    """A name of the user's own, and no forward."""


class NamedModel(PosencBertForTokenClassification):
    """A name that ends as those of base models do."""


class HandsOn(PosencBertForTokenClassification):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class HandsOnByName(PosencBertForTokenClassification):
    def forward(self, input_ids, attention_mask=None, labels=None, num_items_in_batch=None, **kwargs):
        return super().forward(
            input_ids, attention_mask, labels=labels, num_items_in_batch=num_items_in_batch, return_dict=False
        )


class OwnLoss(PosencBertForTokenClassification):
    def forward(self, input_ids, attention_mask=None, labels=None, num_items_in_batch=None, **kwargs):
        outputs = super().forward(input_ids, attention_mask, **kwargs)
        outputs.loss = functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        outputs.loss = outputs.loss / num_items_in_batch
        return outputs


class Mixin:
    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        return super().forward(input_ids, attention_mask=attention_mask, labels=labels, **kwargs)


class Mixed(Mixin, PosencBertForTokenClassification):
    """A forward that comes from elsewhere."""


class Below(HandsOn):
    """A subclass of a subclass, which changes nothing."""


@pytest.mark.parametrize("subclass", [Named, NamedModel, HandsOn, HandsOnByName, OwnLoss, Mixed, Below])
def test_the_loss_of_a_subclass_is_divided_once(subclass):
    model = tiny.fill_positions(subclass(tiny.variant_config(position_scheme="t5")).eval())
    batch = part("bert", "ForTokenClassification", 1)
    with torch.no_grad():
        outputs = model(**batch, num_items_in_batch=torch.tensor(50))
        values = outputs if isinstance(outputs, tuple) else (outputs.loss, outputs.logits)
        total, own = formula(values, batch, "bert", "ForTokenClassification")
        torch.testing.assert_close(values[0], total / 50)
        if subclass is not OwnLoss:
            torch.testing.assert_close(model(**batch)[0], total / own)


class Writer(PosencBertLMHeadModel):
    """A head that divides its loss itself, and is not called a causal language model."""


def test_a_head_with_a_loss_function_divides_once():
    model = tiny.fill_positions(Writer(tiny.variant_config(position_scheme="t5", is_decoder=True)).eval())
    batch = part("bert", "LMHeadModel", 1)
    with torch.no_grad():
        outputs = model(**batch, num_items_in_batch=50)
        total, _ = formula(outputs.to_tuple(), batch, "bert", "LMHeadModel")
    torch.testing.assert_close(outputs.loss, total / 50)


def test_a_forward_that_takes_nothing_more_is_trainers_to_divide(tmp_path):
    class Strict(PosencBertForTokenClassification):
        def forward(self, input_ids, attention_mask=None, labels=None):
            return super().forward(input_ids, attention_mask, labels=labels)

    assert not trainer(Strict(tiny.variant_config(position_scheme="t5")), tmp_path).model_accepts_loss_kwargs
    assert trainer(HandsOn(tiny.variant_config(position_scheme="t5")), tmp_path).model_accepts_loss_kwargs


def trainer(model, folder, **arguments):
    """A Trainer of two batches' rows."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder,
        optim="sgd",
        learning_rate=0.1,
        max_steps=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        **arguments,
    )
    rows = [
        {name: tensor[i].tolist() for name, tensor in part("bert", "ForTokenClassification", seed).items()}
        for seed in (0, 1)
        for i in range(3)
    ]
    return Trainer(model, arguments, train_dataset=Dataset.from_list(rows))


@pytest.mark.slow
@pytest.mark.parametrize("subclass", [Named, NamedModel, "adapter"])
def test_trainer_accumulates_for_subclasses_and_adapters_too(subclass, tmp_path):
    trained = []
    for batch, accumulated in ((6, 1), (2, 3)):
        torch.manual_seed(0)
        config = tiny.variant_config(position_scheme="t5")
        if subclass == "adapter":
            from peft import LoraConfig, get_peft_model

            model = tiny.build("t5", head="ForTokenClassification")
            model = get_peft_model(model, LoraConfig(task_type="TOKEN_CLS", init_lora_weights=False))
        else:
            model = tiny.fill_positions(subclass(config))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        running = trainer(model, tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulated)
        assert running.model_accepts_loss_kwargs
        running.train()
        trained.append({name: p.detach() - before[name] for name, p in model.named_parameters() if p.requires_grad})
    assert max(change.abs().max() for change in trained[0].values()) > 1e-3
    for name, change in trained[0].items():
        torch.testing.assert_close(trained[1][name], change, atol=1e-6, rtol=1e-4, msg=name)


def test_replicas_hand_the_number_on(tmp_path):
    model = HandsOn(tiny.variant_config(position_scheme="t5")).eval()
    batch = part("bert", "ForTokenClassification", 1)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        outputs = DistributedDataParallel(model)(**batch, num_items_in_batch=torch.tensor(50))
    finally:
        distributed.destroy_process_group()
    total, _ = formula(outputs.to_tuple(), batch, "bert", "ForTokenClassification")
    torch.testing.assert_close(outputs.loss, total / 50)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("subclass", [Named, HandsOn])
def test_compiled_in_one_graph(subclass):
    model = tiny.fill_positions(subclass(tiny.variant_config(position_scheme="t5")).eval())
    batch = part("bert", "ForTokenClassification", 1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        outputs = compiled(**batch, num_items_in_batch=torch.tensor(50))
        torch.testing.assert_close(outputs.loss, model(**batch, num_items_in_batch=50).loss)
