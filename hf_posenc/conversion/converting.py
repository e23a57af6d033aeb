"""From one scheme to another in one call: start, extend, calibrate, distill, measured after each."""

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .. import inspection
from ..export.onnx import exporting
from ..export.stock.making import source_config
from ..hub.folders import REPORT, check_space, checked_output, folder_of, kept_files
from ..modeling.models.configuration_posenc import PositionConfigMixin
from ..modeling.schemes.sinusoidal import precise_dtype
from ..modeling.schemes.table import SCHEMES, scheme_names, sources_of
from ..parameters import position_parameters
from ..variants import check_flag_names, family_of, variant_config
from . import digests
from .calibration import calibrate, rotates
from .checkpoints import (
    Checkpoint,
    check_finite,
    check_installed,
    check_layers_alike,
    check_max_length,
    check_reads_as_far,
    is_native,
    is_new,
    keeps_positions,
    load_checkpoint,
    make_student,
)
from .distillation import (
    STEP_TOKENS,
    Distillation,
    Diverged,
    device_of,
    distill,
    is_first_process,
    process_of,
    settings_of,
)
from .following import Following
from .longer_tables import METHODS, lengthen, stride_of
from .measuring import Yardstick
from .report import ConversionReport
from .start import Aims, start
from .targets import Batch, placed, placed_on
from .texts import BLOCK_CHARACTERS, SHORTEST, Blocks, Windows, held_out_apart, read_documents
from .writing import write_converted


if TYPE_CHECKING:
    from ..export.stock.folder import Exported

logger = logging.get_logger(__name__)

# In the working folder, the file that is locked while a process has it, and the state.
LOCK, STATE = "lock", "distillation.pt"
# Of the text that scores are calibrated on.
CALIBRATION_ROWS = 8
CALIBRATION_BATCHES = 2
# And of the text that whole projections are fitted on: batches of so many tokens, of all lengths.
PROJECTION_BATCHES = 32
PROJECTION_TOKENS = 1024
# Settings that may be others when a conversion is resumed; texts are compared by what they contain.
FREE = {"learning_rate", "text"}


@dataclass
class ConversionArguments:
    """The settings of [`convert`], which are also the options of `hf-posenc convert`.

    Args:
        output: The folder to write, with tokenizer, sentence-transformers modules, model card and report. It is written atomically.
        text: Text to learn from: a file (.jsonl: the 'text' of each row), a folder or the name of a data set (NAME or NAME:CONFIG), or several
            of these. Text from the domain of the model keeps its outputs best. Default: the Python language reference.
        held_out: Text to measure on, given in the same way. Default: every tenth document of the text.
        max_length: Maximum sequence length of the converted model, in tokens. Default: the training length.
        trained_length: Training length of the original, in tokens. Default: max_seq_length of sentence-transformers, else model_max_length
            of the tokenizer, but at most the number of its positions.
        extend: How the rows of a longer position embedding matrix are made: tile (repeat the trained rows), mean (repeat their mean) or
            interpolate (put new rows between them; the model then needs hf_posenc).
        train: What distillation trains: all, positions, beyond (only what texts within the training length do not use) or none.
        max_steps: Number of training steps. Default: 800, if neither max_minutes nor max_tokens is given. Training ends at the first limit
            that is reached.
        max_minutes: Minutes from the start of the conversion to the end of training, which has at least one step. The last measurement comes
            after it.
        max_tokens: Number of training tokens, of all processes together.
        tokens_per_step: Largest number of tokens in a batch of a process. If a step has n times 512 tokens, over all processes and accumulated
            batches, learning rates are multiplied by the square root of n.
        gradient_accumulation_steps: Number of batches of each process in a step.
        mixed_precision: bf16 or no. Default: bf16 if the device supports it.
        gradient_checkpointing: Compute activations again in the backward pass, which needs less memory and a third more time.
        learning_rate: Highest learning rate of distillation. Position vectors and biases have higher rates. Default: 2.4e-3 for new rows alone
            (train: beyond), 3e-4 for rope and tupe, else 1.5e-4.
        seed: Seed for drawing batches from the text.
        resume: Continue an interrupted conversion, with the same weights, texts and settings, except the learning rate, which may be another.
            Needs an output.
        save_minutes: Minutes between two saves of the training state, from which a conversion resumes. It is also saved after 50 steps, at
            SIGTERM and at the end.
        report_to: A tracker of accelerate that records the training: tensorboard, wandb, ...
        logging_dir: The folder of trackers that write files.
        onnx: Also write onnx/model.onnx. Needs an output.
        stock: Write the model as an architecture of Transformers, which loads without hf_posenc: t5 as MPNet, deberta as DeBERTa-v2, rope as
            Jina Embeddings v3. t5 and deberta may be combined with absolute. Needs an output. `convert` still returns the model with its scheme.

    Raises:
        OSError: the output cannot be written.
        ValueError: a setting is wrong.
        ImportError: a library is missing.
    """

    output: str | Path | None = None
    text: Sequence[str | Path] | None = None
    held_out: Sequence[str | Path] | None = None
    max_length: int | None = None
    trained_length: int | None = None
    extend: str = "tile"
    train: str = "all"
    max_steps: int | None = None
    max_minutes: float | None = None
    learning_rate: float | None = None
    max_tokens: int | None = None
    tokens_per_step: int = STEP_TOKENS
    gradient_accumulation_steps: int = 1
    mixed_precision: str | None = None
    gradient_checkpointing: bool = False
    seed: int = 0
    resume: bool = False
    save_minutes: float = 1.0
    report_to: str | None = None
    logging_dir: str = "runs"
    onnx: bool = False
    stock: bool = False

    def __post_init__(self) -> None:
        if self.output is not None:
            inspection.check_named(self.output, "the output")
            self.output = checked_output(Path(self.output))
        elif self.resume or self.onnx or self.stock:
            raise ValueError("resume, onnx and stock need an output folder")
        if self.onnx:
            exporting.check_installed()
        if self.train != "none":
            check_installed("accelerate", "hf_posenc[train]")
            self.following()
        if self.extend not in METHODS:
            raise ValueError(f"extend must be one of {', '.join(METHODS)}, got {self.extend!r}")
        self.text, self.held_out = as_list(self.text), as_list(self.held_out)

    def following(self) -> Following:
        """The settings for trackers and for saving the training state."""
        return Following(self.report_to, self.logging_dir, self.save_minutes)

    def distillation(self, trained_length: int) -> Distillation:
        """The settings of distillation, for an original with this training length."""
        shared = {entry.name for entry in fields(Distillation)} - {"trained_length", "max_length"}
        return Distillation(
            trained_length,
            trained_length if self.max_length is None else self.max_length,
            **{name: getattr(self, name) for name in shared},
        )


@dataclass
class Conversion:
    """What is to be done, all of it checked before any weight is read.

    Attributes:
        documents, held_out: text to learn from, and to measure on.
        check: what the converted model is given before it is written; it may raise a ValueError.
        began: when it began, in seconds of the monotonic clock.
    """

    checkpoint: Checkpoint
    position_scheme: str
    flags: dict[str, Any]
    arguments: ConversionArguments
    distillation: Distillation
    documents: list[str]
    held_out: list[str]
    seconds: dict[str, float] = field(default_factory=dict)
    check: Callable[[PreTrainedModel], None] | None = None
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def of(
        cls,
        model: str | Path | PreTrainedModel,
        tokenizer: Any,
        position_scheme: str,
        flags: dict[str, Any],
        arguments: ConversionArguments,
        documents: list[str] | None = None,
    ) -> "Conversion":
        """A conversion as [`convert`] gets it; see there for what is raised.

        Args:
            documents: of `arguments.text`, where they were read before.
        """
        began = time.monotonic()
        documents = documents or read_documents(arguments.text)
        held_out = read_documents(arguments.held_out) if arguments.held_out else None
        checkpoint = load_checkpoint(model, tokenizer, arguments.trained_length)
        if arguments.output is not None:
            kept_files(checkpoint.folder)
        distillation = arguments.distillation(checkpoint.trained_length)
        check_reads_as_far(checkpoint, distillation.max_length)
        flags = chosen_flags(
            checkpoint, position_scheme, flags, distillation.max_length, arguments.extend, arguments.stock
        )
        new = {name for name in scheme_names(position_scheme) if is_new(name, position_scheme, checkpoint.config)}
        if arguments.learning_rate is None and new:
            distillation = distillation.with_rate_of(new)
        is_variant = not is_native(checkpoint.config, position_scheme, flags)
        if arguments.stock and is_variant:
            from ..export.stock.folder import check_conversion  # only here: it is built on conversions' folders

            check_conversion(
                variant_config(checkpoint.config, position_scheme, **flags),
                checkpoint.cls,
                checkpoint.folder,
                checkpoint.tokenizer,
                distillation.max_length,
            )
        if any(SCHEMES[name].orders_heads for name in new):
            check_installed("scipy", "hf_posenc[train]")
        if held_out is None:
            documents, held_out = held_out_apart(documents)
        return cls(checkpoint, position_scheme, flags, arguments, distillation, documents, held_out, began=began)

    @property
    def original(self) -> PreTrainedModel:
        return self.checkpoint.model

    @property
    def output(self) -> Path | None:
        return None if self.arguments.output is None else Path(self.arguments.output)

    @property
    def work(self) -> Path | None:
        """Where the state is kept while the model is distilled: next to the output."""
        return self.output and self.output.absolute().with_name(f".{self.output.name}.conversion")

    @property
    def state(self) -> Path | None:
        """The file of that state, there once something of it is worth going on with."""
        return self.work and self.work / STATE

    def windows(self) -> tuple[Windows, Windows]:
        """The text to learn from and to measure on, tokenized.

        Raises:
            ValueError: there is too little, or the tokenizer does not know it.
        """
        return self._windows_of(self.documents), self._windows_of(self.held_out, "held-out")

    def _windows_of(self, documents: list[str], what: str = "training") -> Windows:
        windows = Windows(documents, self.checkpoint.tokenizer)
        windows.check_known(self.checkpoint.config.vocab_size, what)
        windows.check_enough(self.distillation.trained_length, what)
        return windows

    def blocks(self, first: Windows) -> Blocks | None:
        """The text to learn from, block by block; None where the first block is all of it."""
        left_out = [] if self.arguments.held_out else self.held_out
        if not self.arguments.text or sum(map(len, self.documents + left_out)) < BLOCK_CHARACTERS:
            return None
        return Blocks(first, self.arguments.text, self._windows_of, left_out, *process_of())

    def student(self) -> PreTrainedModel:
        """The model of the new scheme as it starts, with a table of the new length where it has one."""
        source, trained = self.original, self.distillation.trained_length
        table = inspection.longest_sequence(variant_config(source.config, self.position_scheme, **self.flags))
        # An original without a table may read further than its config has positions.
        if self.distillation.reaches_further or (table is not None and table < self.distillation.max_length):
            source = lengthen(source, self.distillation.max_length, trained, self.arguments.extend)
        if is_native(self.original.config, self.position_scheme, self.flags):
            return source
        return make_student(source, self.position_scheme, self.flags)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[stage] = round(time.monotonic() - began, 1)

    def report(self, windows: Windows, held_out: Windows) -> ConversionReport:
        """What was given, before anything is measured."""
        from ..hub.cards import installed_versions  # only here: it brings the template engine along

        settings = settings_of(self.distillation) | {
            "text": ", ".join(map(str, self.arguments.text))
            if self.arguments.text
            else "the reference of the Python language",
            "extend": self.arguments.extend if self.distillation.reaches_further else None,
        }
        del settings["trained_length"], settings["max_length"]
        original = str(self.checkpoint.folder or self.original.config.name_or_path or type(self.original).__name__)
        return ConversionReport(
            original=Path(original).absolute().name if self.checkpoint.folder else original,
            position_scheme=self.position_scheme,
            flags=self.flags,
            trained_length=self.distillation.trained_length,
            max_length=self.distillation.max_length,
            inputs=self._inputs(windows, held_out) if self.output else {},
            settings=settings,
            seconds=self.seconds,
            versions=installed_versions(),
        )

    def _inputs(self, windows: Windows, held_out: Windows) -> dict[str, str]:
        return {
            "weights": digests.of_tensors(self.original.state_dict().items()),
            "config": digests.of_config(self.original.config),
            "text": digests.of_text(windows),
            "held_out": digests.of_text(held_out),
            **{
                f"code of {name}": digests.of_code(source.text)
                for name, source in sources_of(scheme_names(self.position_scheme)).items()
            },
        }

    def run(self) -> tuple[PreTrainedModel, ConversionReport]:
        """All stages, each measured, and what comes of them written."""
        with self._alone():
            return self._run()

    def _run(self) -> tuple[PreTrainedModel, ConversionReport]:
        windows, held_out = self.windows()
        if self.output is not None:
            check_space(self.output, self.original, self.distillation.train != "none")
        lengths = self.distillation.trained_length, self.distillation.max_length
        given = self.position_scheme, self.flags, *lengths
        self.flags |= conversion_options(self.original.config, *given, self.original, self.arguments.stock)
        student, report = self.student(), self.report(windows, held_out)
        interrupted = self._interrupted(report)
        stages = [self._start, self._calibrate, self._keep_state, self._distill]
        if interrupted is not None:
            # Another learning rate may follow one that was too high.
            report = replace(interrupted, original=report.original, settings=report.settings)
            self.seconds = report.seconds
            stages = [self._distill]
        else:
            self._forget()
        with placed_on(self._device(), self.original, student):
            yardstick = Yardstick(self.original, held_out, *lengths, self.checkpoint.pooling)
            progress = _Progress(student, windows, held_out, self._calibration_batches(windows), yardstick, report)
            for stage in stages:
                stage(progress)
            report.losses = yardstick.losses(self.checkpoint.tokenizer.mask_token_id, student)
        report.conclude(yardstick.left_out)
        check_finite(student, "the converted model")
        if self.check is not None:
            self.check(student)
        if self.output is not None and is_first_process():
            self._write(self.output, student, report)
        return student, report

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within, no other process converts to the same output; it would take away what is kept of this one.

        The lock is the system's, which lets go of it however a process ends. Afterwards the working folder stays only where there is
        a state in it to go on with.

        Raises:
            FileExistsError: another process does.
        """
        if self.work is None or not is_first_process():
            yield
            return
        self.work.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.work / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise FileExistsError(
                f"another process is converting to {self.output}: wait for it, or name another folder"
            ) from None
        try:
            yield
        finally:
            if not (self.work / STATE).is_file():
                shutil.rmtree(self.work, ignore_errors=True)
            lock.release()

    def _forget(self) -> None:
        """Remove what is kept of a conversion before this one."""
        if self.work is not None and is_first_process():
            for file in self.work.iterdir():
                if file.name != LOCK:
                    file.unlink()

    def _calibration_batches(self, windows: Windows) -> list[Batch]:
        generator = torch.Generator().manual_seed(self.distillation.seed)
        length = self.distillation.trained_length
        return self._placed(windows.draw(length, CALIBRATION_ROWS, generator) for _ in range(CALIBRATION_BATCHES))

    def _projection_batches(self, windows: Windows) -> list[Batch]:
        """More text, of all lengths: short windows have more tokens by pairs, and their distances are frequent."""
        generator = torch.Generator().manual_seed(self.distillation.seed)
        longest = self.distillation.trained_length
        shortest = min(SHORTEST, longest)
        exponents = torch.rand(PROJECTION_BATCHES, generator=generator, dtype=torch.float64)
        lengths = (shortest * (longest / shortest) ** exponents).round().int().tolist()
        return self._placed(windows.draw(length, max(1, PROJECTION_TOKENS // length), generator) for length in lengths)

    def _placed(self, batches: Iterable[Batch]) -> list[Batch]:
        return [placed(batch, self.original.device) for batch in batches]

    def _device(self) -> torch.device:
        """Where all stages but the training run."""
        return _with_float64(device_of(self.distillation))

    def _start(self, at: "_Progress") -> None:
        """The new scheme's parameters by algebra, from what the original has instead."""
        if self.distillation.reaches_further:
            at.measure(self.original, "original")
        if isinstance(at.student.config, PositionConfigMixin):
            announce("initializing the new scheme")
            with self.timed("start"):
                start(at.student, self.original, at.batches, self.distillation.trained_length)
        at.measure(at.student, "start")

    def _calibrate(self, at: "_Progress") -> None:
        """A fit of the new score terms to the original's scores."""
        if needs_calibration(at.student, self.original):
            announce("calibrating attention scores")
            with self.timed("calibrate"):
                turns = rotates(first_attention(at.student))
                batches = self._projection_batches(at.windows) if turns else at.batches
                calibrate(at.student, self.original, batches, seconds=self._left().seconds / 2)
            at.measure(at.student, "calibrate")

    def _left(self) -> Distillation:
        """The settings of the training, with the time that is left for it."""
        return self.distillation.after(time.monotonic() - self.began)

    def _keep_state(self, at: "_Progress") -> None:
        """The folder that distillation keeps its state in, and the report so far."""
        if self.work and self.distillation.train != "none" and is_first_process():
            (self.work / "report.json").write_text(at.report.to_json(), encoding="utf-8")

    def _distill(self, at: "_Progress") -> None:
        """Training towards the original's hidden states."""
        texts = at.windows, at.held_out
        settings = self._left()
        try:
            with self.timed("distill"):
                at.report.distillation = distill(
                    at.student,
                    self.original,
                    *texts,
                    settings,
                    self.state,
                    blocks=self.blocks(at.windows),
                    following=self.arguments.following(),
                )
        except Diverged as error:
            if self.state is not None and self.state.is_file():
                raise Diverged(
                    f"{error}; with resume it goes on from there: the state is kept in {self.work}"
                ) from error
            raise
        if at.report.distillation:
            self.seconds["distill"] = round(at.report.distillation[-1]["seconds"], 1)  # before an interruption, too
            at.measure(at.student, "distill")

    def _write(self, output: Path, student: PreTrainedModel, report: ConversionReport) -> None:
        try:
            exported = self._exported(student) if self.arguments.stock else None
            student.to(self.checkpoint.dtype)
            write_converted(output, student, self.checkpoint, report, self.arguments.onnx, exported)
        except (OSError, ValueError) as error:
            if self.state is not None and self.state.is_file():
                kind = OSError if isinstance(error, OSError) else ValueError
                raise kind(f"{error}; what was distilled is kept in {self.work}, resume goes on with it") from error
            raise
        if self.work is not None:
            shutil.rmtree(self.work, ignore_errors=True)

    def _exported(self, student: PreTrainedModel) -> "Exported | None":
        """The model as an architecture of Transformers; None where it is one already."""
        from ..export.stock.folder import make  # only here: it is built on conversions' folders

        if not isinstance(student.config, PositionConfigMixin):
            return None
        length = None if inspection.longest_sequence(student.config) else self.distillation.max_length
        return make(student, self.checkpoint.tokenizer, length, False, self.checkpoint.dtype)

    def _interrupted(self, report: ConversionReport) -> ConversionReport | None:
        """The report of what is gone on with, as far as it came; None where there is nothing.

        Raises:
            ValueError: it is of another conversion.
        """
        if not self.arguments.resume or self.work is None or not (self.work / STATE).is_file():
            return None
        try:
            there = ConversionReport.from_json((self.work / "report.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"{self.work / 'report.json'}, which says what was interrupted, cannot be read ({error}): leave --resume out to "
                "begin anew"
            ) from error
        report = ConversionReport.from_json(report.to_json())  # lists where options are tuples
        changed = [name for name in report.inputs if report.inputs[name] != there.inputs.get(name)]
        if changed:
            raise ValueError(
                f"the conversion that was interrupted began with other {', '.join(changed)}: give the same ones, or leave --resume "
                "out to begin anew"
            )
        for name in ("position_scheme", "flags", "trained_length", "max_length", "settings"):
            before, now = (_but_free_settings(getattr(each, name)) for each in (there, report))
            if before != now:
                raise ValueError(
                    f"the conversion that was interrupted had another {name} ({before}, now {now}): give the same command, or "
                    "leave --resume out to begin anew"
                )
        return there


@dataclass
class _Progress:
    """What the stages of a conversion work on; `batches` are those that scores are calibrated on."""

    student: PreTrainedModel
    windows: Windows
    held_out: Windows
    batches: list[Batch]
    yardstick: Yardstick
    report: ConversionReport

    def measure(self, model: PreTrainedModel, stage: str) -> None:
        announce(f"measuring after {stage}" if model is self.student else "measuring the original")
        self.report.rows += self.yardstick.measure(model, stage)


def _with_float64(device: torch.device) -> torch.device:
    """A device, or the CPU instead of one that has no float64, which all stages but the training need."""
    return device if precise_dtype(device) == torch.float64 else torch.device("cpu")


def _measuring_device() -> torch.device:
    """A GPU that is there, or the CPU."""
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return _with_float64(there or torch.device("cpu"))


def announce(stage: str) -> None:
    """What is going on, on standard error of the first process, as the progress bar of distillation is."""
    if is_first_process():
        tqdm.write(f"conversion: {stage}", file=sys.stderr)


def first_attention(student: PreTrainedModel) -> nn.Module:
    """The self-attention of the first layer, which has the schemes of all."""
    family = student.config.family
    return family.self_attention_of(family.layers_of(family.encoder_of(student.base_model))[0])


def _but_free_settings(value: Any) -> Any:
    """Settings without those that may change on the way: the learning rate, and where the text lies; anything else as it is."""
    return {name: one for name, one in value.items() if name not in FREE} if isinstance(value, dict) else value


def needs_calibration(student: PreTrainedModel, original: PreTrainedModel) -> bool:
    """Whether a model has score terms with parameters, or rotates, in place of what its original was trained with."""
    if not isinstance(student.config, PositionConfigMixin):
        return False
    of_attention = position_parameters(student.config.family.encoder_of(student.base_model))
    return bool(of_attention or rotates(first_attention(student))) and not keeps_positions(student, original)


def conversion_options(
    config: PreTrainedConfig,
    position_scheme: str,
    flags: dict[str, Any],
    trained_length: int,
    max_length: int,
    teacher: PreTrainedModel | None = None,
    stock: bool = False,
) -> dict[str, Any]:
    """What the new ones of a checkpoint's schemes choose where nothing is given.

    Args:
        teacher: once weights are loaded.
        stock: only how parameters start: what an architecture of Transformers computes is not ours to choose, as MPNet's one matrix.
    """
    chosen: dict[str, Any] = {}
    schemes = {name: SCHEMES[name] for name in scheme_names(position_scheme)}
    for name, scheme in schemes.items():
        if is_new(name, position_scheme, config):
            aims = Aims(flags | chosen, schemes, trained_length, max_length, teacher)
            chosen |= scheme.conversion_options(aims)
    return {name: value for name, value in chosen.items() if name == "position_init" or not stock}


def convert(
    model: str | Path | PreTrainedModel,
    position_scheme: str,
    arguments: ConversionArguments | None = None,
    *,
    tokenizer: Any = None,
    **overrides: Any,
) -> tuple[PreTrainedModel, ConversionReport]:
    """Convert a trained model to another position scheme, by distillation.

    Args:
        model: a folder, a name on the Hub or a model in memory, of Transformers or sentence-transformers, with or without a task head. A
            model in memory is not changed.
        position_scheme: the new scheme. If it is the scheme that the checkpoint already has and `max_length` is greater than the training
            length, the result is a checkpoint of Transformers' own class with a longer position embedding matrix.
        arguments: output, text, lengths and limits of training: [`ConversionArguments`].
        tokenizer: the tokenizer, if `model` is a model in memory. It is not changed either.
        overrides: settings of `arguments` by name (`output="outputs/t5", max_steps=400`), and `position_*` config options.

    Returns:
        The converted model, on the CPU and in eval mode, and the report. With an output, the model is in the dtype of the checkpoint,
        and otherwise in float32.

    Raises:
        OSError: a file cannot be read or written.
        TypeError, ValueError: an option, a length or the text is wrong, or the model cannot be converted.
        ImportError: a library is missing.
        Diverged: in distillation, the error or the cosine became infinite or NaN.
    """
    settings = {entry.name for entry in fields(ConversionArguments)}
    check_flag_names(overrides.keys() - settings, settings)
    given = {name: overrides.pop(name) for name in settings & overrides.keys()}
    arguments = replace(arguments or ConversionArguments(), **given)
    return Conversion.of(model, tokenizer, position_scheme, overrides, arguments).run()


def as_list(sources: str | Path | Sequence[str | Path] | None) -> list[str | Path] | None:
    """Sources of text, where one may be given by itself."""
    return [sources] if isinstance(sources, (str, Path)) else None if sources is None else [*sources]


def chosen_flags(
    checkpoint: Checkpoint,
    position_scheme: str,
    given: dict[str, Any],
    max_length: int,
    method: str = "tile",
    stock: bool = False,
) -> dict[str, Any]:
    """The options of the converted model: those given, and those that conversion chooses by itself.

    Raises:
        TypeError, ValueError: one is wrong, or the checkpoint has this scheme already.
    """
    config, trained = checkpoint.config, checkpoint.trained_length
    check_max_length(max_length, trained)
    check_layers_alike(given)
    flags = {name: value for name, value in given.items() if value is not None}
    if flags.get("position_stride", 1) != 1:
        raise ValueError("position_stride follows from the lengths: give extend='interpolate' and max_length")
    if method == "interpolate" and max_length > trained:
        if not any(SCHEMES[name].reads_option("position_stride") for name in scheme_names(position_scheme)):
            raise ValueError(
                f"extend='interpolate' needs a position embedding matrix to stretch: position_scheme='absolute+{position_scheme}'"
            )
        flags["position_stride"] = stride_of(max_length, trained)
    if is_native(config, position_scheme, flags):
        if max_length == trained:
            raise ValueError(
                f"the checkpoint has position_scheme={position_scheme!r} already, and a maximum sequence length of {trained}: give a "
                "greater max_length, or another scheme"
            )
        return {}
    flags |= conversion_options(config, position_scheme, flags, trained, max_length, stock=stock)
    new = variant_config(config, position_scheme, **flags)
    if isinstance(config, PositionConfigMixin):
        same = {*scheme_names(new.position_scheme)} == {*scheme_names(config.position_scheme)}
        if same and inspection.flags_of(new) == inspection.flags_of(config) and max_length <= trained:
            raise ValueError(f"the checkpoint has position_scheme={position_scheme!r} already")
    return flags


def compare(
    original: str | Path,
    converted: str | Path,
    *,
    text: Sequence[str | Path] | None = None,
    trained_length: int | None = None,
    max_length: int | None = None,
) -> ConversionReport:
    """Measure how close the outputs of a converted model are to those of its original.

    Args:
        original: the model before the conversion: a folder or a name on the Hub.
        converted: the converted model: a folder or a name on the Hub.
        text: files, folders or names of data sets to measure on. Default: the Python language reference.
        trained_length: training length of the original, in tokens. Default: that of the conversion, or as in [`convert`].
        max_length: length of the longest text to measure, in tokens. Default: that of the conversion, or the training length.

    Raises:
        OSError: a file cannot be read.
        ValueError: the models differ in family or size, or the text is too short.
    """
    documents = read_documents(as_list(text))
    stored = folder_of(str(converted)) / REPORT
    try:
        there = ConversionReport.from_json(stored.read_text(encoding="utf-8")) if stored.is_file() else None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{stored} is no report of a conversion ({error}): remove it") from error
    if there is not None and trained_length is None:
        trained_length = there.trained_length
    source = load_checkpoint(original, trained_length=trained_length)
    if max_length is None:
        max_length = max(there.max_length if there else 0, source.trained_length)
    check_max_length(max_length, source.trained_length)
    other = load_checkpoint(converted, trained_length=source.trained_length)
    # Of a model that `to_stock` made, the family is that of what it was.
    families = {family_of(source_config(each.config) or each.config) for each in (source, other)}
    sizes = {(each.config.hidden_size, each.config.num_hidden_layers) for each in (source, other)}
    if len(families) > 1 or len(sizes) > 1:
        raise ValueError(f"{original} and {converted} are of different families or sizes")
    windows = Windows(documents, source.tokenizer)
    windows.check_known(min(source.config.vocab_size, other.config.vocab_size), "held-out")
    windows.check_enough(source.trained_length, "held-out")
    first, second = source.model, other.model
    config = second.config
    is_variant = isinstance(config, PositionConfigMixin)
    report = ConversionReport(
        original=str(original),
        position_scheme=config.position_scheme if is_variant else family_of(config).native_scheme,
        flags=inspection.flags_of(config) if is_variant else {},
        trained_length=source.trained_length,
        max_length=max_length,
    )
    with placed_on(_measuring_device(), first, second):
        yardstick = Yardstick(first, windows, report.trained_length, report.max_length, source.pooling)
        report.rows = yardstick.measure(first, "original") + yardstick.measure(second, "converted")
        report.losses = yardstick.losses(source.tokenizer.mask_token_id, second)
    report.conclude(yardstick.left_out)
    return report
