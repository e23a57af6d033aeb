"""Fine-tune a BERT-family checkpoint with another position scheme, and see what its positions are worth.

    python examples/quickstart.py
    python examples/quickstart.py --position_scheme rope --max_steps 200
    python examples/quickstart.py --model_name_or_path path/to/checkpoint --text_file text.txt --position_scheme t5

The task is punctuation restoration (punctuation.py): commas and full stops, taken out of real English, are put back. The
scheme asked for and, for comparison, a model without positions are trained with the same data in the same order. The
defaults need nothing but installed packages: the packaged MiniLM (minilm.py) and CPython's language reference. All
flags of `TrainingArguments` and all `position_*` flags are accepted.
"""

import copy
import json
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from arguments import PositionArguments, ScriptParser, fit_tokenizer
from minilm import packaged_minilm
from punctuation import LABELS, f1_scores, hold_out, language_reference, read_documents, windows
from training import PositionTrainingArguments, ScriptTrainer
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    set_seed,
)

import hf_posenc  # noqa: F401  the one import: from here on, position_scheme=... works


@dataclass
class QuickstartArguments:
    """What to fine-tune, and on which text."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Checkpoint of a BERT-family model: a folder or a name on the Hub. Default: packaged MiniLM."
        },
    )
    text_file: str | None = field(
        default=None,
        metadata={
            "help": "UTF-8 text whose documents are separated by blank lines. Default: CPython's language reference."
        },
    )
    compare_with: list[str] = field(
        default_factory=lambda: ["none"], metadata={"help": "Schemes to train for comparison, with default flags."}
    )
    window: int = field(default=64, metadata={"help": "Tokens in a window of text, special tokens counted."})
    held_out_share: float = field(default=0.2, metadata={"help": "Share of the text that is held out."})

    def __post_init__(self):
        if self.window < 8:
            raise ValueError(f"window must be at least 8 tokens, got {self.window}")
        if not 0 < self.held_out_share < 1:
            raise ValueError(f"held_out_share must lie between 0 and 1, got {self.held_out_share}")


# Where these differ from TrainingArguments: two cores finish in minutes, and there is nothing to resume.
DEFAULTS = {
    "output_dir": "outputs/quickstart",
    "max_steps": 240,
    "learning_rate": 5e-4,
    "position_learning_rate": 0.1,
    "warmup_steps": 0.1,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 32,
    "logging_steps": 20,
    "save_strategy": "no",
}
# The settings that a result depends on most.
RECORDED = (
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "learning_rate",
    "position_learning_rate",
    "seed",
)


@dataclass
class Data:
    """Windows of text of at most `window` tokens, and what turns text into them."""

    tokenizer: PreTrainedTokenizerBase
    window: int
    train: list[dict]
    held_out: list[dict]


@dataclass
class Result:
    """A row of the table."""

    position_scheme: str
    f1_comma: float
    f1_full_stop: float
    f1: float
    train_seconds: float


def load_data(arguments: QuickstartArguments, checkpoint: str) -> Data:
    """Tokenized windows of the text asked for, split by documents."""
    documents = language_reference() if arguments.text_file is None else read_documents(arguments.text_file)
    train, held_out = hold_out(documents, arguments.held_out_share)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    data = Data(
        tokenizer,
        arguments.window,
        train=windows(train, tokenizer, arguments.window),
        held_out=windows(held_out, tokenizer, arguments.window),
    )
    print(
        f"{len(train)} documents to train on ({len(data.train)} windows of up to {arguments.window} tokens), "
        f"{len(held_out)} held out ({len(data.held_out)} windows)"
    )
    return data


def load_config(checkpoint: str, **flags) -> PreTrainedConfig:
    """Config of a token classifier with position flags; wrong flags are errors here, before any weight is loaded."""
    return AutoConfig.from_pretrained(
        checkpoint, id2label=dict(enumerate(LABELS)), label2id={label: i for i, label in enumerate(LABELS)}, **flags
    )


def make_trainer(model, arguments: PositionTrainingArguments, data: Data) -> ScriptTrainer:
    """The standard Trainer, but for the learning rate of positions."""
    return ScriptTrainer(
        model=model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=data.held_out,
        data_collator=DataCollatorForTokenClassification(data.tokenizer),
        processing_class=data.tokenizer,
        compute_metrics=f1_scores,
    )


def fine_tune(checkpoint: str, config: PreTrainedConfig, arguments: PositionTrainingArguments, data: Data) -> Result:
    """Fine-tune a variant, save it, load it back, and measure it on the held-out text.

    Raises:
        RuntimeError: the variant that was loaded back does not predict what the trained one predicts.
    """
    arguments = copy.copy(arguments)
    arguments.output_dir = str(variant_folder(arguments, config.position_scheme))
    set_seed(arguments.seed)
    model = AutoModelForTokenClassification.from_pretrained(checkpoint, config=config)
    data = replace(data, tokenizer=copy.deepcopy(data.tokenizer))
    fit_tokenizer(data.tokenizer, data.window, config)
    trainer = make_trainer(model, arguments, data)
    seconds = trainer.train().metrics["train_runtime"]
    prediction = trainer.predict(data.held_out, metric_key_prefix="held_out")

    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    reloaded = AutoModelForTokenClassification.from_pretrained(arguments.output_dir)
    again = make_trainer(reloaded, arguments, data).predict(data.held_out).predictions
    if not np.array_equal(prediction.predictions.argmax(-1), again.argmax(-1)):
        raise RuntimeError(f"the variant saved in {arguments.output_dir} predicts something else once loaded back")
    difference = np.abs(prediction.predictions - again).max()
    print(
        f"saved in {arguments.output_dir}; loaded back, it predicts the same (largest difference of a logit: {difference:.1e})"
    )
    scores = {name: prediction.metrics[f"held_out_{name}"] for name in ("f1_comma", "f1_full_stop", "f1")}
    return Result(config.position_scheme, **scores, train_seconds=seconds)


def variant_folder(arguments: PositionTrainingArguments, position_scheme: str) -> Path:
    """Where a variant is saved."""
    return Path(arguments.output_dir) / position_scheme.replace("+", "_")


def markdown_table(results: list[Result]) -> str:
    """The results as a Markdown table."""
    lines = [
        f"| {'scheme':<20} | F1 comma | F1 full stop | micro-F1 | seconds |",
        f"|{'-' * 22}|---------:|-------------:|---------:|--------:|",
    ]
    for r in results:
        lines.append(
            f"| {r.position_scheme:<20} | {r.f1_comma:8.3f} | {r.f1_full_stop:12.3f} | {r.f1:8.3f} | {r.train_seconds:7.0f} |"
        )
    return "\n".join(lines)


def write_results(
    results: list[Result], table: str, data: Data, arguments: QuickstartArguments, training: PositionTrainingArguments
) -> None:
    """In the output folder, the table as results.md, and with its circumstances as results.json."""
    folder = Path(training.output_dir)
    entries = {
        "arguments": asdict(arguments),
        "training": {name: getattr(training, name) for name in RECORDED},
        "windows": {"train": len(data.train), "held_out": len(data.held_out)},
        "results": [asdict(result) for result in results],
    }
    (folder / "results.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(table + "\n", encoding="utf-8")


def main() -> None:
    parser = ScriptParser((QuickstartArguments, PositionArguments, PositionTrainingArguments), **DEFAULTS)
    try:
        arguments, positions, training = parser.parse()
        checkpoint = arguments.model_name_or_path or packaged_minilm()
        configs = [load_config(checkpoint, **positions.flags())]
        others = dict.fromkeys(scheme for scheme in arguments.compare_with if scheme != positions.position_scheme)
        configs += [load_config(checkpoint, position_scheme=scheme) for scheme in others]
        data = load_data(arguments, checkpoint)
    except (OSError, ValueError, TypeError, ImportError) as error:
        sys.exit(f"error: {error}")

    results = []
    for config in configs:
        print(f"\nposition_scheme={config.position_scheme!r}: {training.max_steps} steps", flush=True)
        results.append(fine_tune(checkpoint, config, training, data))
    if training.should_save:
        table = markdown_table(results)
        print(f"\nOn the held-out documents:\n\n{table}")
        write_results(results, table, data, arguments, training)


if __name__ == "__main__":
    main()
