"""Fine-tune a BERT-family checkpoint with DeBERTa's positions to rerank passages, with sentence-transformers' `CrossEncoder`.

    python examples/rerank.py --train_file train.csv --validation_file dev.csv --output_dir outputs/rerank
    accelerate launch --num_processes 2 examples/rerank.py --train_file train.csv --output_dir outputs/rerank

Both files are csv with the columns query, passage and label; label is 1 where the passage answers the query:

    query,passage,label
    how long do eggs boil,"Boil the eggs for nine minutes.",1
    how long do eggs boil,"The river flooded the town again.",0

Afterwards, with hf_posenc imported: `CrossEncoder("outputs/rerank").rank(query, passages)`.
"""

import argparse
import csv
import re

import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict, Value
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from transformers import set_seed

from hf_posenc.training import tables_and_biases  # with hf_posenc imported, models take position_scheme


POSITION_SCHEME = "deberta"  # in place of the checkpoint's own; "absolute+deberta" keeps these
LEARNING_RATE = 2e-5
POSITION_LEARNING_RATE = 0.02  # for what starts at zero: 2e-5 would leave it there; 0.001 for "absolute+deberta"
MAX_LENGTH = 512  # of a query and a passage
EPOCHS = 1
BATCH_SIZE = 16


def read_rows(file: str, columns: tuple[str, ...]) -> Dataset:
    """The rows of a csv file, as strings: "null" is a text, and "NA" a label."""
    with open(file, encoding="utf-8-sig", newline="") as opened:
        rows = [*csv.DictReader(opened, strict=True)]
    if wrong := [number for number, row in enumerate(rows, start=1) if None in row or None in row.values()]:
        raise ValueError(f"{file}: row {wrong[0]} does not have as many cells as the header")
    return Dataset.from_list([{name: row[name] for name in columns} for row in rows])


def by_query(rows: Dataset) -> list[dict[str, str | list[str]]]:
    """The passages that answer each query, and those that do not."""
    queries = {query: {"query": query, "positive": [], "negative": []} for query in rows["query"]}
    for row in rows:
        queries[row["query"]]["positive" if row["label"] else "negative"].append(row["passage"])
    kept = [query for query in queries.values() if query["positive"] and query["negative"]]
    if not kept:
        raise ValueError("the validation file has no query with passages that answer it and passages that do not")
    print(f"Reranked: {len(kept)} of {len(queries)} queries, those with passages of both kinds")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file")
    parser.add_argument("--model", default="google-bert/bert-base-uncased")
    parser.add_argument("--output_dir", required=True)
    options = parser.parse_args()
    set_seed(0)

    files = {"train": options.train_file, "validation": options.validation_file}
    columns = ("query", "passage", "label")
    data = DatasetDict({split: read_rows(file, columns) for split, file in files.items() if file})
    data = data.cast_column("label", Value("float32"))

    queries = by_query(data["validation"]) if options.validation_file else []
    has_gpu = torch.accelerator.is_available()
    model = CrossEncoder(
        options.model,
        num_labels=1,
        max_length=MAX_LENGTH,
        device=None if has_gpu else "cpu",
        model_kwargs={"position_scheme": POSITION_SCHEME},
    )
    # sentence-transformers makes parameter groups by itself: a pattern of names, and their rate.
    positions = {rf"{re.escape(name)}$": POSITION_LEARNING_RATE for name in tables_and_biases(model)}
    training = CrossEncoderTrainingArguments(
        options.output_dir,
        learning_rate=LEARNING_RATE,
        learning_rate_mapping=positions,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        warmup_steps=0.1,
        eval_strategy="epoch" if options.validation_file else "no",
        ddp_find_unused_parameters=False,  # all are used, but DDP does not see it in a CrossEncoder's outputs
        use_cpu=not has_gpu,  # without a GPU, several processes train together all the same
    )
    trainer = CrossEncoderTrainer(
        model,
        training,
        train_dataset=data["train"],
        loss=BinaryCrossEntropyLoss(model),
        evaluator=CrossEncoderRerankingEvaluator(queries) if queries else None,
    )
    trainer.train()
    trainer.save_model()
    if options.validation_file:
        trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()  # of several processes
