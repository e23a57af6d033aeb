"""Fine-tune a BERT-family checkpoint with position schemes to classify texts.

    python examples/classify.py --train_file train.csv --validation_file dev.csv --output_dir outputs/classify
    accelerate launch --num_processes 2 examples/classify.py --train_file train.csv --output_dir outputs/classify

Both files are csv with the columns text and label; labels are any strings or numbers:

    text,label
    "The river flooded the town again.",news
    "Whisk the eggs, then add the flour.",recipe

The rates and epochs below suit thousands of rows: with a few hundred, raise them.

Afterwards, `pipeline("text-classification", "outputs/classify")` classifies texts, wherever hf_posenc is imported.
"""

import argparse
import csv

import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_posenc.training import tables_and_biases  # with hf_posenc imported, models take position_scheme


POSITION_SCHEME = "absolute+t5"  # the checkpoint's own positions, and a bias by distance that starts at zero
LEARNING_RATE = 5e-5
POSITION_LEARNING_RATE = 0.01  # for what starts at zero: 5e-5 would leave it there
EPOCHS = 3
BATCH_SIZE = 16


def read_rows(file: str, columns: tuple[str, ...]) -> Dataset:
    """The rows of a csv file, as strings: "null" is a text, and "NA" a label."""
    with open(file, encoding="utf-8-sig", newline="") as opened:
        rows = [*csv.DictReader(opened, strict=True)]
    if wrong := [number for number, row in enumerate(rows, start=1) if None in row or None in row.values()]:
        raise ValueError(f"{file}: row {wrong[0]} does not have as many cells as the header")
    return Dataset.from_list([{name: row[name] for name in columns} for row in rows])


def adamw(model: torch.nn.Module, arguments: TrainingArguments, position_learning_rate: float) -> torch.optim.AdamW:
    """The optimizer of `Trainer`, with a learning rate for tables and biases of position schemes, and no weight decay there."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    positions = [trained.pop(name) for name in tables_and_biases(model) if name in trained]
    groups = [
        {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": arguments.weight_decay},
        {"params": [p for p in trained.values() if p.ndim <= 1], "weight_decay": 0.0},  # biases and norms
        {"params": positions, "lr": position_learning_rate, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=arguments.learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file")
    parser.add_argument("--model", default="google-bert/bert-base-uncased")
    parser.add_argument("--output_dir", required=True)
    options = parser.parse_args()
    set_seed(0)

    training = TrainingArguments(
        options.output_dir,
        learning_rate=LEARNING_RATE,
        weight_decay=0.01,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        eval_strategy="epoch" if options.validation_file else "no",
        logging_steps=50,
        use_cpu=not torch.accelerator.is_available(),  # without a GPU, several processes train together all the same
    )
    files = {"train": options.train_file, "validation": options.validation_file}
    data = DatasetDict({split: read_rows(file, ("text", "label")) for split, file in files.items() if file})
    names = sorted({*data["train"]["label"]})

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        options.model,
        position_scheme=POSITION_SCHEME,
        num_labels=len(names),
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )

    def encode(rows: dict[str, list]) -> dict[str, list]:
        labels = [names.index(label) for label in rows["label"]]
        return {**tokenizer(rows["text"], truncation=True), "labels": labels}

    with training.main_process_first():  # the others read what it has cached
        data = data.map(encode, batched=True, remove_columns=data["train"].column_names)

    trainer = Trainer(
        model,
        training,
        train_dataset=data["train"],
        eval_dataset=data.get("validation"),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=lambda seen: {"accuracy": (seen.predictions.argmax(-1) == seen.label_ids).mean().item()},
        optimizers=(adamw(model, training, POSITION_LEARNING_RATE), None),
    )
    trainer.train()
    trainer.save_model()
    if options.validation_file:
        trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()  # of several processes
