"""Train a BERT-family model with any position scheme to fill in masked words, from a checkpoint or from scratch.

    python examples/run_mlm.py --model_name_or_path google-bert/bert-base-uncased --position_scheme t5 \\
        --position_learning_rate 0.1 --max_seq_length 1024 --train_file train.txt --validation_file valid.txt \\
        --do_train --do_eval --output_dir outputs/bert-t5
    python examples/run_mlm.py --model_type bert --tokenizer_name google-bert/bert-base-uncased \\
        --config_overrides hidden_size=256,num_hidden_layers=4,num_attention_heads=4,intermediate_size=1024 \\
        --position_scheme alibi --train_file train.txt --validation_file valid.txt --do_train --do_eval
    python examples/run_mlm.py --model_type roberta --tokenizer_name FacebookAI/roberta-base --position_scheme rope \\
        --dataset_name path/or/name --streaming --max_steps 100000 --do_train --output_dir outputs/roberta-rope

Text comes from txt files (a line is a text), or from a column of other files and datasets. Texts are joined and cut into
inputs of `--max_seq_length` tokens, or kept apart with `--line_by_line`. All flags of `TrainingArguments` and all
`position_*` flags are accepted. The same command goes on with a run that was interrupted (exactly so, unless a stream had
ended and begun anew).

Tokens are masked as in BERT (Devlin et al. 2019): of those chosen, 80 % become the mask, 10 % any token, and 10 % stay. Which
ones depends on the text, the seed and the epoch only, so that a run that is resumed sees the same; for evaluation it
depends on the text alone, so that runs with any seed, batch size and number of processes are measured alike.
"""

import glob
import json
import zlib
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from arguments import (
    DataArguments,
    ModelArguments,
    PositionArguments,
    fit_tokenizer,
    mistakes_in_one_line,
    parse_arguments,
    sequence_length,
)
from data_files import (
    JSON,
    TABLES,
    check_columns,
    check_file,
    limit_rows,
    load_splits,
    needed_splits,
    preprocess,
    read_table,
)
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from torch.nn.functional import cross_entropy
from training import PositionTrainingArguments, Run, ScriptTrainer, evaluate_and_save
from transformers import (
    CONFIG_MAPPING,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    set_seed,
)

from hf_posenc.integrations.hooks import CONFIGS


IGNORED = -100  # the label that the loss leaves out
LENGTH = 512  # of an input, unless another is asked for


@dataclass
class LanguageModelArguments(ModelArguments):
    """`ModelArguments` for a model that may also be new."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Checkpoint of a BERT-family model to go on from. Without one, a model starts from scratch."
        },
    )
    model_type: str | None = field(
        default=None,
        metadata={
            "choices": [config.stock_model_type for config in CONFIGS],
            "help": "Family of a model from scratch.",
        },
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Sizes of a model from scratch: hidden_size=256,num_hidden_layers=4,..."}
    )

    def __post_init__(self):
        if (self.model_name_or_path is None) == (self.model_type is None):
            raise ValueError(
                "name a checkpoint with --model_name_or_path, or a family with --model_type to start from scratch"
            )
        if self.model_type is not None and self.tokenizer_name is None:
            raise ValueError("a model from scratch takes a tokenizer: --tokenizer_name")
        if self.model_type is None and self.config_overrides is not None:
            raise ValueError("config_overrides is for a model from scratch, and a checkpoint has its sizes")

    def new_config(
        self, positions: PositionArguments, tokenizer: PreTrainedTokenizerBase, length: int
    ) -> PreTrainedConfig:
        """The config of a model from scratch that reads `length` tokens; ValueError or TypeError where it cannot be."""
        flags = {"position_scheme": PositionArguments.position_scheme, **positions.flags()}
        stock = CONFIG_MAPPING[self.model_type]
        overrides = read_overrides(self.config_overrides or "", stock())
        of_tokenizer = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
        entries = {name: value for name, value in of_tokenizer.items() if value is not None}
        config = stock(vocab_size=len(tokenizer), **entries | overrides, **flags)
        if "max_position_embeddings" not in overrides:
            config.max_position_embeddings = length + config.first_position
        return config

    def load_model(self, auto_class: type, config: PreTrainedConfig, finished: str | None = None) -> PreTrainedModel:
        """As of `ModelArguments`; a model from scratch is initialised."""
        if finished is not None or self.model_name_or_path is not None:
            return super().load_model(auto_class, config, finished)
        return auto_class.from_config(config, **self.backend)


@dataclass
class LanguageModelDataArguments(DataArguments):
    """Which text, and what is made of it."""

    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    line_by_line: bool = field(
        default=False, metadata={"help": "Each text is an input, cut where it is too long, instead of joining them."}
    )
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens to predict."})
    streaming: bool = field(
        default=False, metadata={"help": "Read the training data as they are needed; say how long with --max_steps."}
    )
    shuffle_buffer: int = field(default=10_000, metadata={"help": "Texts among which streamed ones are shuffled."})

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"mlm_probability must lie between 0 and 1, got {self.mlm_probability}")
        if self.test_file is not None or self.max_predict_samples is not None:
            raise ValueError(
                "a masked language model has no test data to predict: leave out test_file and max_predict_samples"
            )


def read_overrides(overrides: str, config: PreTrainedConfig) -> dict[str, Any]:
    """The entries of `name=value,name=value`; ValueError for a name that the config does not have."""
    entries = {}
    for override in filter(None, overrides.split(",")):
        name, _, value = override.partition("=")
        if not hasattr(config, name):
            raise ValueError(f"config_overrides: {config.model_type} has no {name!r}")
        try:
            entries[name] = json.loads(value)
        except json.JSONDecodeError:
            entries[name] = value
    return entries


def read_texts(file: str) -> Dataset:
    """The lines of a txt file as column `text`, or a table; OSError or ValueError as [`read_table`]."""
    path = check_file(file, (".txt", *TABLES))
    if path.suffix != ".txt":
        return read_table(file)
    try:
        return load_dataset("text", data_files=glob.escape(file), split="train")
    except DatasetsError as error:
        raise ValueError(f"{file} cannot be read as UTF-8 text: {error.__cause__ or error}") from error


def stream_texts(arguments: LanguageModelDataArguments, split: str) -> IterableDataset:
    """The text of a split, read as it is needed; OSError or ValueError where there is none."""
    if arguments.dataset_name is not None:
        rows = load_dataset(arguments.dataset_name, arguments.dataset_config_name, split=split, streaming=True)
    elif split in arguments.files:
        path = check_file(arguments.files[split], (".txt", *JSON))
        kind = "text" if path.suffix == ".txt" else "json"
        rows = load_dataset(kind, data_files=glob.escape(str(path)), split="train", streaming=True)
    else:
        raise ValueError(
            f"there are no {split} data: name a file with --{split}_file, or a dataset with --dataset_name"
        )
    columns = [*next(iter(rows), {})]
    if arguments.text_column not in columns:
        raise ValueError(
            f"the {split} data have no column {arguments.text_column!r}; their columns are {', '.join(columns)}"
        )
    return rows.select_columns([arguments.text_column])


def load_texts(
    arguments: LanguageModelDataArguments, training: PositionTrainingArguments
) -> dict[str, Dataset | IterableDataset]:
    """The splits that are needed, with a column of text.

    Streamed, the training data come in an order that depends on the seed, and of the validation data at most
    `max_eval_samples` texts are read.

    Raises:
        OSError: a file is missing.
        ValueError: a split or the column is missing, or nobody says how long to read from a stream.
    """
    needed = needed_splits(training)
    if "test" in needed:
        raise ValueError("a masked language model predicts nothing of use by itself: leave out --do_predict")
    if not arguments.streaming:
        stored = load_splits(arguments, needed, read_texts)
        check_columns(stored, [arguments.text_column], "--text_column")
        for split, rows in stored.items():
            texts = rows[arguments.text_column][:]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"the {split} data have a {arguments.text_column} that is no text")
            if not any(text.strip() for text in texts):
                raise ValueError(f"the {split} data have no text")
        return dict(stored)
    if training.do_train and training.max_steps <= 0:
        raise ValueError("nobody knows how long a stream is: give --max_steps with --streaming")
    texts: dict[str, Dataset | IterableDataset] = {split: stream_texts(arguments, split) for split in needed}
    if "train" in texts:
        texts["train"] = texts["train"].shuffle(seed=training.seed, buffer_size=arguments.shuffle_buffer)
    if "validation" in texts:
        texts["validation"] = Dataset.from_list([*islice(texts["validation"], arguments.max_eval_samples)])
    return texts


def encode(
    rows: dict[str, list], text_column: str, tokenizer: PreTrainedTokenizerBase, length: int, line_by_line: bool
) -> dict[str, list]:
    """Inputs of at most `length` tokens, special tokens counted, from texts; for `Dataset.map`.

    Joined texts are cut into inputs that are all full, but for the last one of a batch of texts.
    """
    texts = [text for text in rows[text_column] if text and not text.isspace()]
    if line_by_line:
        return {"input_ids": tokenizer(texts, truncation=True, max_length=length)["input_ids"] if texts else []}
    first, *last = tokenizer("")["input_ids"]
    tokens = [
        token for text in texts for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ]
    step = length - 1 - len(last)
    return {"input_ids": [[first, *tokens[start : start + step], *last] for start in range(0, len(tokens), step)]}


class Masking:
    """A collator that masks inputs, and pads them; inputs that have labels already are only padded.

    Args:
        tokenizer: knows the mask, the padding and what is not to be masked.
        share: share of the tokens to predict.
        seed: with the epoch and the input, decides which.
        multiple: pad to a multiple of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, share: float, seed: int, multiple: int | None = None):
        self.masker = DataCollatorForLanguageModeling(tokenizer, mlm_probability=share)
        self.pad = DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=multiple)
        self.tokenizer = tokenizer
        self.special = {*tokenizer.all_special_ids}
        self.seed = seed
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()  # with the workers of a data loader

    def __call__(self, inputs: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        return self.pad(
            [row if "labels" in row else self.mask(row["input_ids"], self.seed, int(self.epoch)) for row in inputs]
        )

    def mask(self, input_ids: list[int], *numbers: int) -> dict[str, list[int]]:
        """An input with some of its tokens masked, always the same with the same numbers, and its labels.

        At least one is: a batch without any would have no loss.
        """
        self.masker.generator = torch.Generator()
        self.masker.generator.manual_seed(zlib.crc32(np.array([*numbers, *input_ids]).tobytes()))
        tokens = torch.tensor([input_ids])
        masked, labels = self.masker.torch_mask_tokens(tokens.clone())
        ordinary = [index for index, token in enumerate(input_ids) if token not in self.special]
        if ordinary and (labels == IGNORED).all():
            chosen = ordinary[torch.randint(len(ordinary), (), generator=self.masker.generator)]
            masked[0, chosen], labels[0, chosen] = self.tokenizer.mask_token_id, tokens[0, chosen]
        return {"input_ids": masked[0].tolist(), "labels": labels[0].tolist()}


class NewMasks(TrainerCallback):
    """Tells the collator the number of the pass over the data. `state.epoch` counts all passes over a stream as one."""

    def __init__(self, masking: Masking):
        self.masking, self.number = masking, None

    def on_train_begin(self, args, state, control, **kwargs):
        self.number = None

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.number = int(state.epoch or 0) if self.number is None else self.number + 1
        self.masking.epoch.fill_(self.number)


def mask_for_evaluation(rows: dict[str, list], masking: Masking) -> dict[str, list]:
    """Inputs with masks that depend on nothing but the inputs; for `Dataset.map`."""
    masked = [masking.mask(input_ids) for input_ids in rows["input_ids"]]
    return {name: [row[name] for row in masked] for name in ("input_ids", "labels")}


def score_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """For each input the sum of -log p over its masked tokens, how many are predicted right, and how many they are.

    So that evaluation keeps three numbers of an input instead of all logits, and weighs every token alike.

    Args:
        logits: (batch, tokens, vocabulary).
        labels: (batch, tokens).

    Returns:
        (batch, 3), float32.
    """
    surprise = cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    is_scored = labels != IGNORED
    is_right = (logits.argmax(-1) == labels) & is_scored
    return torch.stack([surprise.sum(-1), is_right.sum(-1), is_scored.sum(-1)], dim=-1)


def perplexity(prediction: EvalPrediction) -> dict[str, float]:
    """Perplexity exp(mean of -log p) and accuracy over all masked tokens, from what [`score_tokens`] returns."""
    surprise, right, number = prediction.predictions.sum(axis=0, dtype=np.float64)
    # Beyond what a float holds, as a model that diverged has it.
    return {"perplexity": float(np.exp(np.float64(surprise / number))), "accuracy": float(right / number)}


def main() -> None:
    with mistakes_in_one_line():
        arguments, checkpoint, positions, training = parse_arguments(
            LanguageModelDataArguments, LanguageModelArguments, PositionArguments, PositionTrainingArguments
        )
        texts = load_texts(arguments, training)
        tokenizer = checkpoint.load_tokenizer()
        if tokenizer.mask_token is None:
            raise ValueError(f"the tokenizer {tokenizer.name_or_path} has no mask token")
        if checkpoint.model_type is None:
            config = checkpoint.load_config(positions)
        else:
            config = checkpoint.new_config(positions, tokenizer, arguments.max_seq_length or LENGTH)
        if not tokenizer("")["input_ids"] or tokenizer.pad_token is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path} adds no special tokens to a text, or has no padding"
            )
        if len(tokenizer) > config.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens, and the checkpoint knows {config.vocab_size}"
            )
        length = sequence_length(arguments.max_seq_length, LENGTH, config)
        fit_tokenizer(tokenizer, length, config)
        training.choose_best_by("perplexity")
        run = Run(training, config, checkpoint, arguments)
        set_seed(training.seed)
        model = checkpoint.load_model(AutoModelForMaskedLM, config, run.finished_model)

    masking = Masking(tokenizer, arguments.mlm_probability, training.seed, training.pad_to_multiple_of)
    data = make_inputs(texts, arguments, training, masking, length)
    trainer = ScriptTrainer(
        model=model,
        args=training,
        train_dataset=data.get("train"),
        eval_dataset=data.get("validation"),
        data_collator=masking,
        processing_class=tokenizer,
        compute_metrics=perplexity,
        preprocess_logits_for_metrics=score_tokens,
        callbacks=[NewMasks(masking)],
    )
    if training.do_train:
        run.train(trainer)
    if training.do_eval:
        evaluate_and_save(trainer, data["validation"])


def make_inputs(
    texts: dict[str, Dataset | IterableDataset],
    arguments: LanguageModelDataArguments,
    training: PositionTrainingArguments,
    masking: Masking,
    length: int,
) -> dict[str, Dataset | IterableDataset]:
    """Inputs of each split; those of validation masked for good."""
    options = {
        "text_column": arguments.text_column,
        "tokenizer": masking.tokenizer,
        "length": length,
        "line_by_line": arguments.line_by_line,
    }
    stored = {split: rows for split, rows in texts.items() if isinstance(rows, Dataset)}
    inputs = limit_rows(preprocess(stored, encode, arguments, training, **options), arguments)
    if "validation" in inputs:
        masked = {"validation": inputs["validation"]}
        inputs |= preprocess(masked, mask_for_evaluation, arguments, training, masking=masking)
    for split, rows in texts.items():
        if split not in inputs:
            streamed = rows.map(encode, batched=True, fn_kwargs=options, remove_columns=[arguments.text_column])
            inputs[split] = streamed.take(arguments.max_train_samples) if arguments.max_train_samples else streamed
    return inputs


if __name__ == "__main__":
    main()
