"""Which scheme? The same task, data, seeds and budget for a list of schemes, and what each reaches at what cost.

    python benchmarks/compare_schemes.py
    python benchmarks/compare_schemes.py --schemes absolute absolute+t5 "deberta:position_buckets=64" none --seeds 1 2 3
    python benchmarks/compare_schemes.py --scheme_file mine.py --schemes absolute absolute+mine
    python benchmarks/compare_schemes.py --task masked_lm --train_file valid.txt --eval_file test.txt --eval_lengths 64 128 256

`punctuation` fine-tunes a checkpoint (the packaged MiniLM unless another is named) to restore the punctuation of a text;
`masked_lm` trains a small model from scratch (or a checkpoint, where one is named) and evaluates it at several
lengths, on the same masked tokens each time. Flags of a scheme follow its name after a colon, separated by commas, lists and
objects as JSON ('deberta:position_attention_types=["c2p","p2c","p2p"]'); `position_learning_rate` may be one of them. `--position_learning_rates` tries several for `--rate_steps` on a part of the
training text, which nothing is fine-tuned on meanwhile, one step above the highest too where the highest is the best, and all seeds then
have the best; `--learning_rates` does the same with the learning rate of all, for what has no rate of positions. `--conversion_steps`
converts the checkpoint to each scheme first, on all of the training text, `--conversions` times, and each has all seeds.

Every finished run is a file of its own in the output folder: the same command goes on where it was stopped, and several
processes may share the work if each is given schemes or seeds of its own. Then come `results.json` (everything),
`results.csv` (a line per run), `results.md` (mean and standard deviation over the seeds), `quality_and_cost.png` and
`learning_curves.png`. Cost is the time of a training step relative to `absolute`, measured in turns on the same batch.
"""

import copy
import csv
import io
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_posenc import convert, position_parameters
from hf_posenc._utils import as_markdown
from hf_posenc.files import write_whole
from hf_posenc.modeling.schemes.table import SCHEMES, scheme_names, sources_of
from hf_posenc.training import RandomizedPositions, check_rate, frequencies, tables_and_biases


# What the example scripts are made of.
sys.path.append(str(Path(__file__).parents[1] / "examples"))

from arguments import SCHEME_FILE, ScriptParser, fit_tokenizer  # noqa: E402
from masked_lm import cut, loss_and_accuracy, losses_and_hits, mask_stream, read_lines, token_stream, train_tokenizer  # noqa: E402
from minilm import packaged_minilm  # noqa: E402
from punctuation import IGNORED, LABELS, chapters, f1_scores, hold_out, read_documents, windows  # noqa: E402
from quickstart import DEFAULTS, load_config  # noqa: E402
from records import keep_settings, write_json  # noqa: E402
from scheme_labels import file_name, flags_of, parse_overrides, run_file  # noqa: E402
from training import PositionTrainingArguments, ScriptTrainer, describe_scheme  # noqa: E402


@dataclass
class CompareArguments:
    """What to compare, on which task."""

    task: Literal["punctuation", "masked_lm"] = field(default="punctuation", metadata={"help": "What is learned."})
    schemes: list[str] = field(
        default_factory=lambda: list(SCHEMES),
        metadata={
            "help": "Schemes, each with flags of its own if wanted: 'name:flag=value,flag=value', values as JSON."
        },
    )
    scheme_file: list[str] | None = field(default=None, metadata=SCHEME_FILE)
    seeds: list[int] = field(default_factory=lambda: [42, 43, 44], metadata={"help": "A run for each."})
    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Checkpoint to start from. Default: the packaged MiniLM (punctuation), from scratch (masked_lm)."
        },
    )
    train_file: str | None = field(
        default=None,
        metadata={"help": "UTF-8 text to train on. Default for punctuation: CPython's language reference."},
    )
    eval_file: str | None = field(
        default=None,
        metadata={"help": "masked_lm: UTF-8 text to evaluate on. punctuation holds documents out instead."},
    )
    length: int = field(default=64, metadata={"help": "Tokens in a training example, special tokens counted."})
    eval_lengths: list[int] = field(
        default_factory=list, metadata={"help": "Lengths to evaluate at. Default: the training length."}
    )
    position_learning_rates: list[float] = field(
        default_factory=list,
        metadata={
            "help": "Choose among these for each scheme that adds parameters. Default: --position_learning_rate for all."
        },
    )
    learning_rates: list[float] | None = field(
        default=None,
        metadata={"help": "Choose among these for each scheme to which no position learning rate applies."},
    )
    rate_steps: int | None = field(
        default=None, metadata={"help": "Steps of each run that such a rate is tried in. Default: --max_steps."}
    )
    conversion_steps: int = field(
        default=0,
        metadata={"help": "Steps of distillation of a conversion of the checkpoint to each scheme; 0: none."},
    )
    conversions: int | None = field(
        default=None, metadata={"help": "Conversions to each scheme, each with a seed of its own. Default: 1."}
    )
    position_offset: int | None = field(
        default=None,
        metadata={"help": "In training, add a number up to this to the position ids of each sequence. Default: 0."},
    )
    random_positions: int | None = field(
        default=None,
        metadata={
            "help": "In training, draw the positions of each sequence, in ascending order, from so many. Default: none are drawn."
        },
    )
    held_out_share: float = field(default=0.2, metadata={"help": "punctuation: share of the text that is held out."})
    mask_share: float = field(default=0.15, metadata={"help": "masked_lm: share of the tokens that are masked."})
    max_eval_tokens: int = field(default=65536, metadata={"help": "masked_lm: tokens of the text to evaluate on."})
    vocabulary: int = field(default=2048, metadata={"help": "From scratch: size of the vocabulary."})
    config_overrides: str = field(
        default="hidden_size=128,num_hidden_layers=3,num_attention_heads=4,intermediate_size=512",
        metadata={"help": "From scratch: what differs from BertConfig, as key=value,key=value."},
    )
    cost_rounds: int = field(default=12, metadata={"help": "Training steps of each scheme that are timed; 0: none."})

    def __post_init__(self):
        if self.length < 8 or min(self.lengths) < 8:
            raise ValueError(f"lengths must be at least 8 tokens, got {self.length} and {self.eval_lengths}")
        for name in ("held_out_share", "mask_share"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        if self.task == "masked_lm" and not (self.train_file and self.eval_file):
            raise ValueError("the task masked_lm needs --train_file and --eval_file, two UTF-8 text files")
        if self.conversion_steps and self.task == "masked_lm" and not self.model_name_or_path:
            raise ValueError("--conversion_steps needs a checkpoint to convert: --model_name_or_path")
        for name in ("position_learning_rates", "learning_rates"):
            for rate in getattr(self, name) or ():
                check_rate(rate, name)
        if self.conversion_steps < 0 or not all(rate > 0 for rate in self.position_learning_rates):
            raise ValueError("conversion_steps and position_learning_rates must not be negative, nor a rate 0")
        if not all(rate > 0 for rate in self.learning_rates or ()):
            raise ValueError("learning_rates must be positive")
        for name, least in (("conversions", 1), ("position_offset", 0), ("random_positions", self.length)):
            if (given := getattr(self, name)) is not None and given < least:
                raise ValueError(f"{name} must be at least {least}, got {given}")
        if self.position_offset and self.random_positions:
            raise ValueError("give position_offset or random_positions, not both")
        if self.rate_steps is not None and self.rate_steps < 1:
            raise ValueError(f"rate_steps must be at least 1, got {self.rate_steps}")

    @property
    def lengths(self) -> list[int]:
        """The lengths to evaluate at."""
        return self.eval_lengths or [self.length]

    @property
    def checkpoint(self) -> str | None:
        """What is started from; None: from scratch."""
        return self.model_name_or_path or (packaged_minilm() if self.task == "punctuation" else None)


# Rates are tried with this seed, whichever seeds a process runs with: all runs of a scheme have one rate.
RATE_SEED = 42
# The settings of TrainingArguments that a result depends on most.
RECORDED = (
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "position_learning_rate",
    "warmup_steps",
    "weight_decay",
    "adam_beta2",
    "bf16",
    "fp16",
)


@dataclass(frozen=True)
class Candidate:
    """A scheme with its flags, as it was written on the command line."""

    label: str
    flags: dict[str, Any] = field(hash=False)
    position_learning_rate: float | None = None
    learning_rate: float | None = None

    @classmethod
    def parse(cls, label: str) -> "Candidate":
        """From `name` or `name:flag=value,flag=value`; values are JSON, or else strings."""
        flags = flags_of(label)
        rates = {name: flags.pop(name, None) for name in ("position_learning_rate", "learning_rate")}
        for name, rate in rates.items():
            check_rate(rate, name)
        return cls(label, flags, **rates)

    def has_rates_of(self, run: "Run") -> bool:
        """Whether a recorded run had the rates that were chosen; what nobody chose is the same in a whole folder."""
        chosen = {name: getattr(self, name) for name in ("position_learning_rate", "learning_rate")}
        return all(rate is None or rate == getattr(run, name) for name, rate in chosen.items())


@dataclass
class Task:
    """Data, and how a model for it is made and judged.

    Attributes:
        text: what is trained on.
        length: tokens of a training example, at most.
        evaluate_on: for each length, its examples.
        documents: for each length, how many of the examples each document has; None where there are no documents.
        quality: the metric that ranks schemes, and `higher_is_better`.
        config: makes a config from a checkpoint (None: from scratch) and flags.
        model: makes a model from a config, with freshly seeded weights where it has new ones.
    """

    text: str
    length: int
    train: list[dict]
    evaluate_on: dict[int, list[dict]]
    quality: str
    higher_is_better: bool
    config: Callable[..., PreTrainedConfig]
    model: Callable[[PreTrainedConfig], PreTrainedModel]
    trainer: dict[str, Any]
    documents: dict[int, list[int]] | None = None


def punctuation_task(arguments: CompareArguments, is_development: bool = False) -> Task:
    """Token classification: what punctuation followed each word.

    Args:
        is_development: hold out a part of what is trained on otherwise, and look at nothing else.
    """
    documents = chapters() if arguments.train_file is None else read_documents(arguments.train_file)
    train, held_out = hold_out(documents, arguments.held_out_share)
    if is_development:
        train, held_out = hold_out(train, arguments.held_out_share)
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    judged = {length: [windows([one], tokenizer, length) for one in held_out] for length in arguments.lengths}
    return Task(
        text="\n\n".join(train),
        length=arguments.length,
        train=windows(train, tokenizer, arguments.length),
        evaluate_on={length: [*chain(*documents)] for length, documents in judged.items()},
        documents={length: [*map(len, documents)] for length, documents in judged.items()},
        quality="f1",
        higher_is_better=True,
        config=load_config,
        model=lambda config: AutoModelForTokenClassification.from_pretrained(config.name_or_path, config=config),
        trainer={
            "data_collator": DataCollatorForTokenClassification(tokenizer),
            "processing_class": tokenizer,
            "compute_metrics": f1_scores,
        },
    )


def masked_lm_task(arguments: CompareArguments, is_development: bool = False) -> Task:
    """Masked language modelling, from scratch or from a checkpoint; `is_development` as in [`punctuation_task`]."""
    lines = read_lines(arguments.train_file)
    tokenizer = (
        AutoTokenizer.from_pretrained(arguments.checkpoint)
        if arguments.checkpoint
        else train_tokenizer(lines, arguments.vocabulary)
    )
    if is_development:
        first = round((1 - arguments.held_out_share) * len(lines))
        lines, judged = lines[:first], lines[first:]
    else:
        judged = read_lines(arguments.eval_file)
    stream = token_stream(judged, tokenizer, arguments.max_eval_tokens)
    masked, labels = mask_stream(stream, tokenizer, arguments.mask_share, seed=0)

    def config(checkpoint: str | None, **flags) -> PreTrainedConfig:
        if checkpoint:
            return AutoConfig.from_pretrained(checkpoint, **flags)
        return AutoConfig.for_model("bert", **scratch_sizes(arguments, tokenizer), **flags)

    def model(config: PreTrainedConfig) -> PreTrainedModel:
        if config.name_or_path:
            return AutoModelForMaskedLM.from_pretrained(config.name_or_path, config=config)
        return AutoModelForMaskedLM.from_config(config)

    return Task(
        text="\n".join(lines),
        length=arguments.length,
        train=cut(token_stream(lines, tokenizer), tokenizer, arguments.length),
        evaluate_on={length: cut(masked, tokenizer, length, labels) for length in arguments.lengths},
        quality="masked_loss",
        higher_is_better=False,
        config=config,
        model=model,
        trainer={
            "data_collator": MaskedLMCollator(tokenizer, mlm_probability=arguments.mask_share),
            "processing_class": tokenizer,
            "compute_metrics": loss_and_accuracy,
            "preprocess_logits_for_metrics": losses_and_hits,
        },
    )


def scratch_sizes(arguments: CompareArguments, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Keywords of a BertConfig; tables of positions reach as far as the longest evaluation."""
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": max(arguments.length, *arguments.lengths),
        **parse_overrides(arguments.config_overrides),
    }


class MaskedLMCollator(DataCollatorForLanguageModeling):
    """Masks training examples anew each time, and leaves those alone that bring their labels, as evaluation's do."""

    def torch_call(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        if "labels" in examples[0]:
            return {name: torch.tensor([example[name] for example in examples]) for name in examples[0]}
        return super().torch_call(examples)


TASKS: dict[str, Callable[..., Task]] = {"punctuation": punctuation_task, "masked_lm": masked_lm_task}


@dataclass
class Run:
    """One scheme, one seed.

    Attributes:
        parameters: of the whole model; `position_parameters`: those that the scheme added.
        metrics: by length, then by name.
        learning_curve: (step, training loss) pairs.
        position_learning_rate: of tables and biases that the scheme added; None: that of all others.
        scales: what single numbers of the scheme, such as amplitudes, are after training, by name.
        learning_rate: of all others, where it was chosen.
        conversion: the seed of the conversion that the checkpoint comes from.
        documents: by length, of each document how many marks were found, how many were written where none of this kind is, and
            how many were missed.
        seconds: of training and evaluation.
        kept_bytes: what the forward pass of a training batch keeps for the backward pass, parameters not counted.
    """

    scheme: str
    seed: int
    parameters: int
    position_parameters: int
    train_seconds: float
    metrics: dict[str, dict[str, float]]
    learning_curve: list[tuple[int, float]]
    position_learning_rate: float | None = None
    scales: dict[str, float] = field(default_factory=dict)
    learning_rate: float | None = None
    conversion: int | None = None
    documents: dict[str, list[list[int]]] = field(default_factory=dict)
    kept_bytes: int | None = None
    seconds: float | None = None


def scales_of(model: PreTrainedModel) -> dict[str, float]:
    """The single numbers, learned or not, by which a model weighs its position vectors."""
    return {
        name.removesuffix(".weight"): float(value)
        for name, value in model.base_model.state_dict().items()
        if name.endswith("position_scale.weight")
    }


def kept_for_backward(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that a forward pass in training keeps for the backward pass, each storage counted once, parameters not at all."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.random.fork_rng(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.train()(**batch).loss  # alive until all is counted, so that no storage takes the place of another
    found = sum(kept.values())
    del loss
    return found


def marks_by_document(predictions: np.ndarray, labels: np.ndarray, examples: list[int]) -> list[list[int]]:
    """Of each document the marks that were found, that were written wrongly, and that were missed: micro-F1 is of their sums.

    Args:
        predictions: scores (examples, tokens, labels).
        labels: (examples, tokens).
        examples: how many each document has, in their order.
    """
    is_word, predicted = labels != IGNORED, predictions.argmax(axis=-1)
    none = LABELS.index("none")
    found = is_word & (predicted == labels) & (labels != none)
    wrong = is_word & (predicted != labels) & (predicted != none)
    missed = is_word & (predicted != labels) & (labels != none)
    ends = np.cumsum(examples)
    return [
        [int(count[end - size : end].sum()) for count in (found, wrong, missed)] for end, size in zip(ends, examples)
    ]


class OffsetTrainer(ScriptTrainer):
    """[`ScriptTrainer`] in whose training positions are others.

    Each sequence begins at a position of its own, from the first to `offset` later; or has positions drawn from `drawn_from`, if that is
    not 0, as [`RandomizedPositions`] draws them.
    """

    offset: int = 0
    drawn_from: int = 0

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.drawn_from:
            inputs = RandomizedPositions(dict, self.drawn_from)(inputs)
        elif self.offset:
            ids = inputs["input_ids"]
            first = torch.randint(self.offset + 1, (len(ids), 1), device=ids.device)
            inputs = {**inputs, "position_ids": first + torch.arange(ids.shape[1], device=ids.device)}
        return super().training_step(model, inputs, *args, **kwargs)


def train_and_evaluate(
    candidate: Candidate,
    config: PreTrainedConfig,
    seed: int,
    task: Task,
    training: PositionTrainingArguments,
    position_offset: int = 0,
    random_positions: int = 0,
) -> Run:
    """One run; same seed, same data in the same order for every candidate."""
    began = time.perf_counter()
    training.seed = seed
    if candidate.position_learning_rate is not None:
        training.position_learning_rate = candidate.position_learning_rate
    if candidate.learning_rate is not None:
        training.learning_rate = candidate.learning_rate
    set_seed(seed)
    model = task.model(config)
    tokenizer = copy.deepcopy(task.trainer["processing_class"])
    fit_tokenizer(tokenizer, task.length, config)
    own = {**task.trainer, "processing_class": tokenizer}
    trainer = OffsetTrainer(model=model, args=training, train_dataset=task.train, **own)
    trainer.offset, trainer.drawn_from = position_offset, random_positions
    seconds = trainer.train().metrics["train_runtime"]
    metrics, documents = {}, {}
    for length, examples in task.evaluate_on.items():
        output = trainer.predict(examples, metric_key_prefix="eval")
        metrics[str(length)] = {
            name.removeprefix("eval_"): value
            for name, value in output.metrics.items()
            if name not in ("epoch", "eval_loss") and not name.endswith(("runtime", "per_second", "preparation_time"))
        }
        if task.documents is not None:
            sizes = task.documents[length]
            documents[str(length)] = marks_by_document(output.predictions, output.label_ids, sizes)
    batch = task.trainer["data_collator"]([dict(one) for one in task.train[: training.per_device_train_batch_size]])
    return Run(
        scheme=candidate.label,
        seed=seed,
        parameters=model.num_parameters(),
        position_parameters=sum(parameter.numel() for parameter in position_parameters(model).values()),
        train_seconds=seconds,
        metrics=metrics,
        learning_curve=[(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry],
        position_learning_rate=training.position_learning_rate,
        scales=scales_of(model),
        learning_rate=candidate.learning_rate,
        documents=documents,
        kept_bytes=kept_for_backward(model, {name: tensor.to(model.device) for name, tensor in batch.items()}),
        seconds=time.perf_counter() - began,
    )


def rates_to_choose(candidate: Candidate, task: Task, arguments: CompareArguments) -> tuple[str, list[float]]:
    """The rate that is chosen for a candidate, and among which: none where it names one or there is nothing to choose.

    Scales, of which a layer has one, take the lowest.
    """
    model = task.model(task.config(arguments.checkpoint, **candidate.flags))
    learned = [*tables_and_biases(model).values(), *frequencies(model).values()]
    if not learned:
        given = candidate.learning_rate is not None
        return "learning_rate", [] if given else sorted(arguments.learning_rates or [])
    rates = [] if candidate.position_learning_rate is not None else sorted(arguments.position_learning_rates)
    return "position_learning_rate", rates[:1] if all(one.numel() == 1 for one in learned) else rates


def with_best_rate(
    candidate: Candidate,
    start: Callable[[Candidate], PreTrainedConfig],
    task: Task,
    arguments: CompareArguments,
    training: PositionTrainingArguments,
) -> Candidate:
    """The candidate with the rate that is best on a development part, with `RATE_SEED`.

    What was tried is in the output folder. Where the highest is the best, one as much higher as that is above the next is tried too.
    """
    kind, rates = rates_to_choose(candidate, task, arguments)
    if len(rates) < 2:
        return replace(candidate, **{kind: rates[0]}) if rates else candidate
    training = copy.copy(training)
    training.max_steps = arguments.rate_steps or training.max_steps
    development: list[Task] = []

    def reached(rate: float) -> float:
        name = f"{candidate.label}-{rate}" if kind == "position_learning_rate" else f"{candidate.label}-{kind}={rate}"
        file = run_file(Path(training.output_dir) / "rates", name, RATE_SEED)
        if not file.exists():
            if not development:
                development.append(TASKS[arguments.task](arguments, is_development=True))
            own = replace(candidate, **{kind: rate})
            print(f"\n{candidate.label}, {kind.replace('_', ' ')} {rate}, on the development part", flush=True)
            positions = arguments.position_offset or 0, arguments.random_positions or 0
            run = train_and_evaluate(own, start(own), RATE_SEED, development[0], copy.copy(training), *positions)
            write_json(file, asdict(run))
        metrics = json.loads(file.read_text(encoding="utf-8"))["metrics"]
        return metrics[str(arguments.lengths[0])][task.quality] * (1 if task.higher_is_better else -1)

    best = max(rates, key=reached)
    if best == rates[-1]:
        best = max([best, above(rates)], key=reached)
    return replace(candidate, **{kind: best})


def above(rates: list[float]) -> float:
    """A rate as much above the highest of several, in rising order, as that is above the next, of one digit."""
    return float(f"{rates[-1] ** 2 / rates[-2]:.0e}")


def is_converted(candidate: Candidate, arguments: CompareArguments) -> bool:
    """Whether a candidate starts from a conversion; what keeps the checkpoint's own positions needs none."""
    return bool(arguments.conversion_steps) and candidate.flags["position_scheme"].split("+")[0] != "absolute"


def converted(
    candidate: Candidate, task: Task, arguments: CompareArguments, folder: Path, number: int = 0
) -> str | None:
    """The checkpoint that a candidate starts from: converted to its scheme, on the training text, if that is asked for.

    Args:
        number: which of the conversions, and its seed.
    """
    if not is_converted(candidate, arguments):
        return arguments.checkpoint
    output = folder / "conversions" / (file_name(candidate.label) + f"-{number}" * bool(number))
    if not output.exists():
        print(f"\n{candidate.label}: conversion", flush=True)
        text = folder / "conversions" / "text.txt"
        write_whole({text: task.text})
        convert(
            arguments.checkpoint,
            **candidate.flags,
            text=[text],
            max_steps=arguments.conversion_steps,
            output=output,
            resume=True,
            seed=number,
        )
    return str(output)


def measure_cost(
    configs: dict[str, PreTrainedConfig], task: Task, checkpoint: str | None, batch_size: int, rounds: int
) -> dict[str, float]:
    """Median time of forward and backward relative to `absolute`, all schemes in turns; the order alternates.

    The first two rounds are not counted.
    """
    reference = "absolute"
    models = {label: task.model(config).train() for label, config in configs.items()}
    if reference not in models:
        models[reference] = task.model(task.config(checkpoint, position_scheme=reference)).train()
    batch = task.trainer["data_collator"]([dict(example) for example in task.train[:batch_size]])
    seconds: dict[str, list[float]] = {label: [] for label in models}
    for turn in range(rounds + 2):
        for label in list(models) if turn % 2 else reversed(models):
            start = time.perf_counter()
            models[label](**batch).loss.backward()
            seconds[label].append(time.perf_counter() - start)
            models[label].zero_grad()
    return {
        label: statistics.median(own / base for own, base in zip(seconds[label][2:], seconds[reference][2:]))
        for label in configs
    }


def read_run(file: Path) -> Run:
    """A recorded run."""
    return Run(**json.loads(file.read_text(encoding="utf-8")))


def read_runs(folder: Path) -> list[Run]:
    """All runs in an output folder, whoever made them."""
    return [read_run(file) for file in sorted((folder / "runs").glob("*.json"))]


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for a single value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


@dataclass
class Row:
    """A scheme over its seeds: mean and standard deviation of the quality, by length."""

    scheme: str
    seeds: int
    quality: dict[str, tuple[float, float]]
    position_parameters: int
    relative_cost: float | None


def summarize(runs: list[Run], task: Task, costs: dict[str, float]) -> list[Row]:
    """A row per scheme, the best first at the shortest length."""
    rows = []
    for scheme in dict.fromkeys(run.scheme for run in runs):
        own = [run for run in runs if run.scheme == scheme]
        quality = {
            length: mean_and_deviation([run.metrics[length][task.quality] for run in own]) for length in own[0].metrics
        }
        rows.append(Row(scheme, len(own), quality, own[0].position_parameters, costs.get(scheme)))
    sign = -1 if task.higher_is_better else 1
    return sorted(rows, key=lambda row: sign * next(iter(row.quality.values()))[0])


def markdown_table(rows: list[Row], quality: str) -> str:
    """The rows as a Markdown table."""
    lengths = list(rows[0].quality)
    heads = [f"{quality} at {length}" for length in lengths] if len(lengths) > 1 else [quality]
    header = ["scheme", *heads, "seeds", "new parameters", "time of a step / absolute"]
    lines = []
    for row in rows:
        values = [f"{mean:.3f}" + f" ± {spread:.3f}" * (row.seeds > 1) for mean, spread in row.quality.values()]
        cost = "" if row.relative_cost is None else f"{row.relative_cost:.2f}"
        lines.append([row.scheme, *values, str(row.seeds), f"{row.position_parameters:,}", cost])
    return as_markdown(header, lines) + "\n"


def csv_lines(runs: list[Run]) -> str:
    """A line per run and length."""
    metrics = list(next(iter(runs[0].metrics.values())))
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["scheme", "seed", "length", *metrics, "parameters", "position_parameters", "train_seconds"])
    for run in runs:
        for length, values in run.metrics.items():
            own = [values[metric] for metric in metrics]
            size = [run.parameters, run.position_parameters, round(run.train_seconds, 1)]
            writer.writerow([run.scheme, run.seed, length, *own, *size])
    return written.getvalue()


def plot_quality_and_cost(rows: list[Row], quality: str) -> bytes:
    """A PNG: each scheme's quality at each length, over the time of a training step; bars are standard deviations."""
    return as_png(draw_quality_and_cost(rows, quality))


def draw_quality_and_cost(rows: list[Row], quality: str):
    """The matplotlib figure of [`plot_quality_and_cost`]; names stand at the right in the order of the points, joined to them."""
    import matplotlib.pyplot as plt

    lengths = list(rows[0].quality)
    figure, axes = plt.subplots(
        1, len(lengths), figsize=(6.5 * len(lengths) + 1, 5.5), squeeze=False, layout="constrained"
    )
    for axis, length in zip(axes[0], lengths):
        for row in rows:
            axis.errorbar(row.relative_cost, *row.quality[length], fmt="o", capsize=3)
        axis.set(xlabel="time of a training step / absolute", title=f"{length} tokens")
        axis.grid(alpha=0.3)
        low, high = axis.get_ylim()
        ordered = sorted(rows, key=lambda row: row.quality[length][0])
        apart = min(0.05, 1 / max(len(rows) - 1, 1))
        places = spread_out([(row.quality[length][0] - low) / (high - low) for row in ordered], apart)
        for row, place, line in zip(ordered, places, (axis.containers[rows.index(row)].lines[0] for row in ordered)):
            axis.annotate(
                row.scheme,
                (row.relative_cost, row.quality[length][0]),
                xytext=(1.02, place),
                textcoords="axes fraction",
                fontsize=8,
                va="center",
                color=line.get_color(),
                arrowprops={"arrowstyle": "-", "color": line.get_color(), "alpha": 0.4, "relpos": (0, 0.5)},
            )
    axes[0][0].set_ylabel(quality)
    return figure


def spread_out(places: list[float], apart: float) -> list[float]:
    """Numbers in rising order, moved until they are `apart`, between 0 and 1 (if there is room for them)."""

    def pushed(places: list[float], first: float) -> list[float]:
        found = []
        for place in places:
            found.append(max(place, found[-1] + apart if found else first))
        return found

    def down(places: list[float], first: float) -> list[float]:
        return [-place for place in pushed([-place for place in reversed(places)], first)][::-1]

    # The means of what is pushed up and of what is pushed down are apart, too.
    middle = [(a + b) / 2 for a, b in zip(pushed(places, -math.inf), down(places, -math.inf))]
    return down(pushed(middle, 0.0), -1.0)


def plot_learning_curves(runs: list[Run]) -> bytes:
    """A PNG: training loss over steps, a line per scheme (mean over the seeds), dashed where it has flags of its own."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    schemes = list(dict.fromkeys(run.scheme for run in runs))
    kinds = [[scheme for scheme in schemes if (":" in scheme) == flagged] for flagged in (False, True)]
    colours = {scheme: plt.get_cmap("tab20")(number % 20) for kind in kinds for number, scheme in enumerate(kind)}
    for scheme in schemes:
        curves = [run.learning_curve for run in runs if run.scheme == scheme]
        steps = [step for step, _ in curves[0]]
        losses = [statistics.fmean(loss for _, loss in points) for points in zip(*curves)]
        axis.plot(steps, losses, label=scheme, color=colours[scheme], linestyle="--" if ":" in scheme else "-")
    axis.set(xlabel="step", ylabel="training loss")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, ncols=2)
    return as_png(figure)


def as_png(figure) -> bytes:
    """A matplotlib figure as the content of a PNG file."""
    import matplotlib.pyplot as plt

    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    plt.close(figure)
    return content.getvalue()


def settings_of(arguments: CompareArguments, training: PositionTrainingArguments) -> dict[str, Any]:
    """What a result depends on, apart from scheme and seed."""
    kept = {
        name: value
        for name, value in asdict(arguments).items()
        if name not in ("schemes", "scheme_file", "seeds", "cost_rounds", "conversions")
    }
    for name in ("train_file", "eval_file"):
        kept[name] = kept[name] and Path(kept[name]).name
    return {**kept, **{name: getattr(training, name) for name in RECORDED}}


def report(runs: list[Run], task: Task, costs: dict[str, float], settings: dict[str, Any], folder: Path) -> str:
    """Write everything that is known into the output folder, and return the table."""
    rows = summarize(runs, task, costs)
    table = markdown_table(rows, task.quality)
    packages = ("hf_posenc", "transformers", "torch", "accelerate")
    entries = {
        "settings": settings,
        "versions": {"python": platform.python_version(), **{package: version(package) for package in packages}},
        "relative_cost": costs,
        "summary": [asdict(row) for row in rows],
        "runs": [asdict(run) for run in runs],
    }
    write_json(folder / "results.json", entries)
    write_whole({folder / "results.csv": csv_lines(runs)})
    write_whole({folder / "results.md": table})
    write_whole({folder / "learning_curves.png": plot_learning_curves(runs)})
    if all(row.relative_cost is not None for row in rows):
        write_whole({folder / "quality_and_cost.png": plot_quality_and_cost(rows, task.quality)})
    return table


def costs_of(
    candidates: list[Candidate],
    start: Callable[[Candidate], PreTrainedConfig],
    task: Task,
    arguments: CompareArguments,
    batch_size: int,
    folder: Path,
) -> dict[str, float]:
    """Relative costs, measured once for a list of schemes and then read from the folder."""
    file = folder / "relative_cost.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if arguments.cost_rounds and not {one.label for one in candidates} <= known.keys():
        configs = {one.label: start(one) for one in candidates}
        known |= measure_cost(configs, task, arguments.checkpoint, batch_size, arguments.cost_rounds)
        write_json(file, known)
    return known


def main() -> None:
    # The quick start's settings, and a few steps more.
    defaults = {**DEFAULTS, "max_steps": 240, "output_dir": "outputs/compare_schemes"}
    parser = ScriptParser((CompareArguments, PositionTrainingArguments), **defaults)
    try:
        arguments, training = parser.parse()
        if find_spec("matplotlib") is None:  # not after hours of training
            raise ImportError('the plots need matplotlib: pip install -c constraints.txt -e ".[analysis]"')
        folder = Path(training.output_dir)
        candidates = [Candidate.parse(label) for label in dict.fromkeys(arguments.schemes)]
        task = TASKS[arguments.task](arguments)
        for candidate in candidates:  # not after hours of training
            task.config(arguments.checkpoint, **candidate.flags)
        settings = settings_of(arguments, training)
        keep_settings(folder / "settings.json", settings)
        for candidate in candidates:
            for name, source in sources_of(scheme_names(candidate.flags["position_scheme"])).items():
                file, described = folder / "schemes" / f"{name}.json", {"file": describe_scheme(source)}
                keep_settings(file, described)  # a file that was changed is another scheme
    except (OSError, ValueError, TypeError, ImportError) as error:
        sys.exit(f"error: {error}")

    def start(candidate: Candidate, number: int = 0) -> PreTrainedConfig:
        """What a run of a candidate starts from; converts the checkpoint first where that is asked for and not done."""
        return task.config(converted(candidate, task, arguments, folder, number), **candidate.flags)

    if arguments.position_learning_rates or arguments.learning_rates:
        candidates = [with_best_rate(one, start, task, arguments, training) for one in candidates]
    for number, seed, candidate in product(range(arguments.conversions or 1), arguments.seeds, candidates):
        conversion = number if is_converted(candidate, arguments) else None
        file = run_file(folder, candidate.label, seed, conversion)
        if (number and conversion is None) or (file.exists() and candidate.has_rates_of(read_run(file))):
            continue
        print(f"\n{candidate.label}, seed {seed}", flush=True)
        own = copy.copy(training)
        positions = arguments.position_offset or 0, arguments.random_positions or 0
        run = train_and_evaluate(candidate, start(candidate, number), seed, task, own, *positions)
        write_json(file, asdict(replace(run, conversion=conversion)))
    costs = costs_of(candidates, start, task, arguments, training.per_device_train_batch_size, folder)
    print(f"\n{report(read_runs(folder), task, costs, settings, folder)}\nwritten to {folder}")


if __name__ == "__main__":
    main()
