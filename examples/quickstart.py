"""Fine-tune a BERT-family checkpoint as it is and with another position scheme, and compare.

    python examples/quickstart.py
    python examples/quickstart.py --position_scheme rope --compare_with original none
    python examples/quickstart.py --model_name_or_path path/to/checkpoint --text_file text.txt --position_scheme t5

The task is punctuation restoration (punctuation.py): commas and full stops, taken out of real English, are put back. All
models are trained with the same data in the same order, on windows of 64 tokens. The same held-out text is then read in windows of
64 tokens, and of four times as many, by distance from the start. The defaults need nothing but installed packages: the packaged MiniLM
(minilm.py) and CPython's language reference. All arguments of `TrainingArguments` and all `position_*` options are accepted.
"""

import copy
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from arguments import PositionArguments, ScriptParser, fit_tokenizer
from minilm import packaged_minilm
from punctuation import LABELS, chapters, f1_scores, hold_out, read_documents, windows
from records import write_json
from tqdm.auto import tqdm
from training import PositionTrainingArguments, ScriptTrainer
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    set_seed,
)
from transformers.utils import logging

import hf_posenc  # noqa: F401  the one import: from here on, position_scheme=... works
from hf_posenc.files import write_whole
from hf_posenc.inspection import longest_sequence


# The checkpoint as it is, among the models to compare with.
ORIGINAL = "original"


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
        default_factory=lambda: [ORIGINAL],
        metadata={
            "help": "Schemes to train for comparison, with default flags; 'original' is the checkpoint as it is."
        },
    )
    window: int = field(default=64, metadata={"help": "Tokens in a window of text, special tokens counted."})
    long_window: int | None = field(
        default=None,
        metadata={
            "help": "Tokens in the long windows that are read after training. Default: four times those of a window."
        },
    )
    held_out_share: float = field(default=0.2, metadata={"help": "Share of the text that is held out."})

    def __post_init__(self):
        if self.window < 8:
            raise ValueError(f"window must be at least 8 tokens, got {self.window}")
        if self.long_window is not None and self.long_window <= self.window:
            raise ValueError(
                f"long_window must be more than the {self.window} tokens of a window, got {self.long_window}"
            )
        if not 0 < self.held_out_share < 1:
            raise ValueError(f"held_out_share must lie between 0 and 1, got {self.held_out_share}")


# Where these differ from TrainingArguments: two cores finish in minutes, and there is nothing to resume.
DEFAULTS = {
    "output_dir": "outputs/quickstart",
    "max_steps": 200,
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
    """Windows of text, and what turns text into them.

    Attributes:
        window, long_window: tokens of a window at most.
        train, held_out: windows.
        long: those of `long_window` tokens that all held-out documents, one behind the other, are cut into.
    """

    tokenizer: PreTrainedTokenizerBase
    window: int
    long_window: int
    train: list[dict]
    held_out: list[dict]
    long: list[dict]


@dataclass
class Result:
    """A row of the table.

    Attributes:
        position_scheme: "original" for the checkpoint as it is.
        f1_comma, f1_full_stop, f1: on held-out windows.
        f1_long: micro-F1 on long ones; None where the model cannot read them, or there are none.
        f1_by_distance: the same by distance from the start, in the spans that [`spans`] gives.
        reads: the maximum sequence length; None where there is no limit.
    """

    position_scheme: str
    f1_comma: float
    f1_full_stop: float
    f1: float
    f1_long: float | None
    f1_by_distance: list[float]
    reads: int | None
    train_seconds: float


def load_data(arguments: QuickstartArguments, checkpoint: str) -> Data:
    """Tokenized windows of the text, split by documents."""
    documents = chapters() if arguments.text_file is None else read_documents(arguments.text_file)
    train, held_out = hold_out(documents, arguments.held_out_share)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    long_window = arguments.long_window or 4 * arguments.window
    long = windows([" ".join(held_out)], tokenizer, long_window)
    data = Data(
        tokenizer,
        arguments.window,
        long_window,
        train=windows(train, tokenizer, arguments.window),
        held_out=windows(held_out, tokenizer, arguments.window),
        long=[features for features in long if len(features["input_ids"]) == long_window],
    )
    print(
        f"{len(train)} documents to train on ({len(data.train)} windows of up to {arguments.window} tokens), "
        f"{len(held_out)} held out ({len(data.held_out)} windows; {len(data.long)} of {long_window:,} tokens)"
    )
    return data


def load_config(checkpoint: str, **flags) -> PreTrainedConfig:
    """Config of a token classifier with position flags; wrong flags are errors here, before any weight is loaded."""
    return AutoConfig.from_pretrained(
        checkpoint, id2label=dict(enumerate(LABELS)), label2id={label: i for i, label in enumerate(LABELS)}, **flags
    )


def name_of(config: PreTrainedConfig) -> str:
    """The `position_scheme` of a config, "original" for one without."""
    return getattr(config, "position_scheme", None) or ORIGINAL


def load_configs(checkpoint: str, flags: dict, others: list[str]) -> list[PreTrainedConfig]:
    """Configs of the models to compare, each of another name: the original, the one with the given options, and the others."""
    asked = load_config(checkpoint, **flags)
    compared = [
        load_config(checkpoint, **({} if other == ORIGINAL else {"position_scheme": other})) for other in others
    ]
    configs = {name_of(config): config for config in [*compared, asked]}
    return [configs[name] for name in sorted(configs, key=lambda name: (name != ORIGINAL, name != name_of(asked)))]


class OneBar(TrainerCallback):
    """One progress bar for all models, instead of those of Trainer, which has several for each.

    Args:
        models: how many there are to train.
        disable: show none.
    """

    def __init__(self, models: int = 1, disable: bool = True):
        self.models = models
        self.bar = tqdm(disable=disable, unit="step")

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar.total = self.models * state.max_steps
        self.bar.set_description(Path(args.output_dir).name)

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.bar.set_postfix(loss=f"{float(logs['loss']):.3f}")


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


def fine_tune(
    checkpoint: str,
    config: PreTrainedConfig,
    arguments: PositionTrainingArguments,
    data: Data,
    bar: OneBar | None = None,
) -> Result:
    """Fine-tune a model, save it, load it back, and measure it on the held-out text, in short windows and in long ones.

    Raises:
        RuntimeError: the model that was loaded back does not predict what the trained one predicts.
    """
    arguments, name = copy.copy(arguments), name_of(config)
    arguments.output_dir = str(variant_folder(arguments, name))
    set_seed(arguments.seed)
    model = AutoModelForTokenClassification.from_pretrained(checkpoint, config=config)
    data = replace(data, tokenizer=copy.deepcopy(data.tokenizer))
    fit_tokenizer(data.tokenizer, data.window, config)
    trainer = quiet(make_trainer(model, arguments, data))
    trainer.add_callback(bar or OneBar())
    seconds = trainer.train().metrics["train_runtime"]
    prediction = trainer.predict(data.held_out, metric_key_prefix="held_out")

    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    reloaded = quiet(
        make_trainer(AutoModelForTokenClassification.from_pretrained(arguments.output_dir), arguments, data)
    )
    again = reloaded.predict(data.held_out).predictions
    if not np.array_equal(prediction.predictions.argmax(-1), again.argmax(-1)):
        raise RuntimeError(f"the model saved in {arguments.output_dir} predicts something else once loaded back")
    difference = np.abs(prediction.predictions - again).max()
    if arguments.should_save:
        tqdm.write(
            f"{name}: saved in {arguments.output_dir}; loaded back, it predicts the same (largest difference of a logit: {difference:.1e})"
        )
    reads = longest_sequence(config)
    f1_long, f1_by_distance = None, []
    if data.long and (reads is None or data.long_window <= reads):
        long = reloaded.predict(data.long, metric_key_prefix="long")
        f1_long = long.metrics["long_f1"]
        f1_by_distance = [
            f1_scores(EvalPrediction(long.predictions[:, first:end], long.label_ids[:, first:end]))["f1"]
            for first, end in spans(data)
        ]
    scores = {name: prediction.metrics[f"held_out_{name}"] for name in ("f1_comma", "f1_full_stop", "f1")}
    return Result(name, **scores, f1_long=f1_long, f1_by_distance=f1_by_distance, reads=reads, train_seconds=seconds)


def spans(data: Data) -> list[tuple[int, int]]:
    """Where a long window is divided, (first token, last token + 1) counted from 0: after the training length, then at twice as many each time."""
    ends = [data.window]
    while 2 * ends[-1] < data.long_window:
        ends.append(2 * ends[-1])
    return [*zip([0, *ends], [*ends, data.long_window])]


def quiet(trainer: ScriptTrainer) -> ScriptTrainer:
    """A trainer made quiet: no progress bars, and nothing printed in their place."""
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    return trainer


def variant_folder(arguments: PositionTrainingArguments, position_scheme: str) -> Path:
    """Where a model is saved."""
    return Path(arguments.output_dir) / position_scheme.replace("+", "_")


def markdown_table(results: list[Result], data: Data) -> str:
    """The results as a Markdown table: F1 on short windows, on long ones, and on these by distance from the start."""
    parts = [f"tokens {first + 1:,}–{end:,}" for first, end in spans(data)]
    heads = [f"F1, {data.window:,} tokens", f"F1, {data.long_window:,} tokens", *parts, "seconds"]
    lines = [
        f"| {'positions':<20} | {' | '.join(heads)} |",
        f"|{'-' * 22}|{'|'.join('-' * (len(head) + 1) + ':' for head in heads)}|",
    ]
    for result in results:
        by_distance = [f"{f1:.3f}" for f1 in result.f1_by_distance] or ["–"] * len(parts)
        cells = [f"{result.f1:.3f}", at_length(result, data), *by_distance, f"{result.train_seconds:.0f}"]
        lines.append(
            f"| {result.position_scheme:<20} | {' | '.join(f'{cell:>{len(head)}}' for cell, head in zip(cells, heads))} |"
        )
    return "\n".join(lines)


def at_length(result: Result, data: Data) -> str:
    """F1 on long windows, or why there is none."""
    if result.f1_long is not None:
        return f"{result.f1_long:.3f}"
    return f"ends at {result.reads:,}" if data.long else "no such text"


def write_results(
    results: list[Result], table: str, data: Data, arguments: QuickstartArguments, training: PositionTrainingArguments
) -> None:
    """In the output folder, the table as results.md, and with its circumstances as results.json."""
    folder = Path(training.output_dir)
    entries = {
        "arguments": asdict(arguments),
        "training": {name: getattr(training, name) for name in RECORDED},
        "windows": {"train": len(data.train), "held_out": len(data.held_out), "long": len(data.long)},
        "long_window": data.long_window,
        "results": [asdict(result) for result in results],
    }
    write_json(folder / "results.json", entries)
    write_whole({folder / "results.md": table + "\n"})


def main() -> None:
    kinds = QuickstartArguments, PositionArguments, PositionTrainingArguments
    parser = ScriptParser(kinds, **DEFAULTS)
    try:
        arguments, positions, training = parser.parse()
        checkpoint = arguments.model_name_or_path or packaged_minilm()
        configs = load_configs(checkpoint, positions.flags(), arguments.compare_with)
        data = load_data(arguments, checkpoint)
    except (OSError, ValueError, TypeError, ImportError) as error:
        sys.exit(f"error: {error}")

    logging.disable_progress_bar()  # of weights that are loaded: there is one bar
    logging.set_verbosity_error()  # no report for each model that its head is new; warnings of hf_posenc stay
    bar = OneBar(len(configs), disable=bool(training.disable_tqdm) or not training.should_save)
    results = [fine_tune(checkpoint, config, training, data, bar) for config in configs]
    bar.bar.close()
    if training.should_save:
        table = markdown_table(results, data)
        print(f"\nOn the held-out documents:\n\n{table}")
        write_results(results, table, data, arguments, training)


if __name__ == "__main__":
    main()
