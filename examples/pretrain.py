"""Train a masked language model of the BERT family from scratch, with rotary positions, on a text file.

    python examples/pretrain.py --train_file train.txt --validation_file valid.txt --output_dir outputs/pretrained
    accelerate launch --num_processes 2 examples/pretrain.py --train_file train.txt --output_dir outputs/pretrained

The files are plain text; all lines are joined and cut into pieces of MAX_LENGTH tokens. Afterwards,
`pipeline("fill-mask", "outputs/pretrained")` fills [MASK], and any script here fine-tunes it with `--model outputs/pretrained`.
"""

import argparse
import glob
import math

import torch
from accelerate import PartialState
from datasets import load_dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

import hf_posenc  # noqa: F401  (with it, BertConfig takes position_scheme)


# Nothing here to learn. Tables that start at zero ("t5", "deberta") would reach their values in thousands of steps at this
# rate; in shorter trainings give them a separate one, as `adamw` in classify.py does.
POSITION_SCHEME = "rope"
MAX_LENGTH = 512
LEARNING_RATE = 5e-4
BATCH_SIZE = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file")
    parser.add_argument(
        "--tokenizer", default="google-bert/bert-base-uncased", help="a checkpoint, for its vocabulary"
    )
    parser.add_argument("--hidden_size", type=int, default=512, help="64 for each attention head")
    parser.add_argument("--num_hidden_layers", type=int, default=8)
    parser.add_argument("--max_steps", type=int, default=10_000)
    parser.add_argument("--output_dir", required=True)
    options = parser.parse_args()
    set_seed(0)

    training = TrainingArguments(
        options.output_dir,
        learning_rate=LEARNING_RATE,
        weight_decay=0.01,
        warmup_steps=0.1,  # a share of all steps
        max_steps=options.max_steps,
        per_device_train_batch_size=BATCH_SIZE,
        use_cpu=not torch.accelerator.is_available(),  # without a GPU, several processes train together all the same
    )
    files = {"train": options.train_file, "validation": options.validation_file}
    data = load_dataset("text", data_files={split: glob.escape(file) for split, file in files.items() if file})

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, model_max_length=MAX_LENGTH)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=options.hidden_size // 64,
        intermediate_size=4 * options.hidden_size,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        position_scheme=POSITION_SCHEME,
    )
    model = AutoModelForMaskedLM.from_config(config)

    def encode(rows: dict[str, list]) -> dict[str, list]:
        lines = tokenizer(rows["text"], add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        tokens, size = [token for line in lines for token in line], MAX_LENGTH - 2
        begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
        return {"input_ids": [[begin, *tokens[i : i + size], end] for i in range(0, len(tokens), size)]}

    with training.main_process_first():  # the others read what it has cached
        data = data.map(encode, batched=True, batch_size=10_000, remove_columns="text")

    trainer = Trainer(
        model,
        training,
        train_dataset=data["train"],
        eval_dataset=data.get("validation"),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    if options.validation_file:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", {**metrics, "perplexity": math.exp(metrics["eval_loss"])})


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()  # of several processes
