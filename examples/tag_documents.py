"""Fine-tune a BERT-family checkpoint to tag the words of whole documents, of more than 512 tokens.

    hf-posenc convert google-bert/bert-base-cased --position-scheme t5 --max-length 4096 --text my_corpus/ --out outputs/t5
    python examples/tag_documents.py --model outputs/t5 --train_file train.jsonl --validation_file dev.jsonl \\
        --output_dir outputs/tags
    accelerate launch --num_processes 2 examples/tag_documents.py --model outputs/t5 ...  # the same in two processes

Both files have a document in each line, with its words and as many tags:

    {"tokens": ["Anna", "lives", "in", "Rome", "."], "tags": ["B-PER", "O", "O", "B-LOC", "O"]}

Without the first command, `--model` may be any BERT: its positions are replaced, and it has more to learn. Afterwards,
`pipeline("token-classification", "outputs/tags", aggregation_strategy="simple")` tags texts of up to MAX_LENGTH tokens.
"""

import argparse
import glob

import torch
from accelerate import PartialState
from datasets import load_dataset
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_posenc.training import tables_and_biases  # with hf_posenc imported, models take position_scheme


POSITION_SCHEME = "t5"  # a bias by distance, in place of a table that ends at 512
MAX_LENGTH = 4096  # longer documents are cut into pieces
LEARNING_RATE = 5e-5
POSITION_LEARNING_RATE = 0.01  # 0.1 where positions start at zero: the model was not converted
EPOCHS = 5


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
    parser.add_argument("--model", default="google-bert/bert-base-cased")
    parser.add_argument("--output_dir", required=True)
    options = parser.parse_args()
    set_seed(0)
    training = TrainingArguments(
        options.output_dir,
        learning_rate=LEARNING_RATE,
        weight_decay=0.01,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=4,
        eval_strategy="epoch" if options.validation_file else "no",
        use_cpu=not torch.accelerator.is_available(),  # without a GPU, several processes train together all the same
    )
    files = {"train": options.train_file, "validation": options.validation_file}
    data = load_dataset("json", data_files={split: glob.escape(file) for split, file in files.items() if file})
    ids = {tag: number for number, tag in enumerate(sorted({tag for tags in data["train"]["tags"] for tag in tags}))}
    tokenizer = AutoTokenizer.from_pretrained(options.model, model_max_length=MAX_LENGTH)
    model = AutoModelForTokenClassification.from_pretrained(
        options.model, position_scheme=POSITION_SCHEME, id2label=dict(enumerate(ids)), label2id=ids
    )

    def encode(rows: dict[str, list]) -> dict[str, list]:
        pieces = tokenizer(rows["tokens"], is_split_into_words=True, truncation=True, return_overflowing_tokens=True)
        pieces["labels"], last = [], {}
        for piece, document in enumerate(pieces.pop("overflow_to_sample_mapping")):
            words, tags = pieces.word_ids(piece), rows["tags"][document]
            before = [None, last.get(document), *words[1:]]  # a word that the end of a piece divides has one label
            is_first = [word is not None and word != previous for previous, word in zip(before, words)]
            last[document] = words[-2]
            pieces["labels"].append([ids[tags[word]] if first else -100 for word, first in zip(words, is_first)])
        return pieces

    with training.main_process_first():  # the others read what it has cached
        data = data.map(encode, batched=True, remove_columns=data["train"].column_names)

    def score(seen: EvalPrediction) -> dict[str, float]:
        found, tags = (side[seen.label_ids != -100] for side in (seen.predictions, seen.label_ids))
        is_found, is_tagged = (side != ids.get("O", -1) for side in (found, tags))
        right = ((found == tags) & is_tagged).sum().item()
        return {"f1_of_words": 2 * right / max(1, is_found.sum().item() + is_tagged.sum().item())}

    trainer = Trainer(
        model,
        training,
        train_dataset=data["train"],
        eval_dataset=data.get("validation"),
        data_collator=DataCollatorForTokenClassification(tokenizer),
        processing_class=tokenizer,
        compute_metrics=score,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        optimizers=(adamw(model, training, POSITION_LEARNING_RATE), None),
    )
    trainer.train()
    trainer.save_model()
    if options.validation_file:
        trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()  # of several processes
