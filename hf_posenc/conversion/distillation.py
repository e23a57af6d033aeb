"""Distillation: a converted model learns to compute the hidden states of its original, on a few minutes of text."""

import math
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..files import whole_file
from ..modeling.schemes.parameters import PositionTable
from ..modeling.schemes.table import SCHEMES
from ..parameters import position_parameters
from ..variants import family_of
from .following import Following, Timer, told_to_end
from .targets import Batch, Target, hidden_states, normalised_error, original_states, placed, placed_on
from .texts import SHORTEST, Windows


TRAIN = ("all", "positions", "beyond", "none")
PRECISIONS = ("bf16", "no")
DEFAULT_STEPS = 800
# Tokens of a step that learning rates are given for.
STEP_TOKENS = 512
WARM_UP = 20
# In hundreds of steps, squared gradients have to be forgotten sooner than by 0.999.
BETAS = (0.9, 0.98)
# Learning rates at their highest. Each number of a table of position vectors or biases adds to few scores, and moves far;
# matrices sum over hundreds of features. Learned frequencies start where `rope` has them, and move little at the rate of matrices.
DEFAULT_RATE = 1.5e-4
# If only new rows of the matrix of absolute positions are trained: each is copied from another place, and has to move as far as rows differ.
RATE_BEYOND = 2.4e-3
POSITION_RATES = {
    "relative_attention_bias": 0.05,
    "rel_embeddings": 0.01,
    "relative_key_embeddings": 0.02,
    "relative_value_embeddings": 0.02,
    "distance_embedding": 0.02,
    "pos_bias_u": 0.01,
    "pos_bias_v": 0.01,
    "cls_to_others": 0.05,
    "others_to_cls": 0.05,
    "rotary_frequencies": 0.01,
}
# How often the cosine on held-out text is looked at, and the state saved if that is due. However little it gains, the training goes on:
# most is gained when the rates fall.
CHECK_EVERY = 50
# Of what is looked at between steps.
CHECKED_ROWS = 24


# Of a parameter of which not all rows may change, 1 where they may: (rows, 1).
Masks = dict[nn.Parameter, torch.Tensor]


class Diverged(FloatingPointError):
    """Training led to infinite numbers or NaN. The model has the parameters of the last check that was finite."""


@dataclass(frozen=True)
class Distillation:
    """The settings of [`distill`].

    Attributes:
        trained_length: training length of the original, in tokens.
        max_length: maximum sequence length of the converted model, in tokens.
        train: the parameters to train: "all" (except the token embeddings, the pooler and the task head), "positions" (those of the schemes, and
            the position embedding matrix), "beyond" (rows that texts within the training length do not use) or "none".
        max_steps: number of training steps. Default: 800, if no other limit is given. Training ends at the first limit that is reached.
        max_minutes: training time, in minutes.
        max_tokens: number of training tokens, of all processes together.
        seed: seed for drawing batches from the text.
        learning_rate: the highest learning rate, for steps of 512 tokens. Position vectors and biases have higher rates. Default: 1.5e-4;
            2.4e-3 for "beyond".
        tokens_per_step: largest number of tokens in a batch of a process.
        gradient_accumulation_steps: number of batches of each process in a step.
        mixed_precision: "bf16" or "no". Default: bf16 if the device supports it.
        gradient_checkpointing: compute activations again in the backward pass, to save memory.
    """

    trained_length: int
    max_length: int
    train: str = "all"
    max_steps: int | None = None
    max_minutes: float | None = None
    seed: int = 0
    learning_rate: float | None = None
    tokens_per_step: int = STEP_TOKENS
    gradient_accumulation_steps: int = 1
    max_tokens: int | None = None
    mixed_precision: str | None = None
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.train not in TRAIN:
            raise ValueError(f"train must be one of {', '.join(TRAIN)}, got {self.train!r}")
        if self.mixed_precision not in (None, *PRECISIONS):
            raise ValueError(f"mixed_precision must be one of {', '.join(PRECISIONS)}, got {self.mixed_precision!r}")
        for name, least in (("tokens_per_step", SHORTEST), ("gradient_accumulation_steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("max_steps", "max_minutes", "max_tokens", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be greater than 0, got {value}; without distillation: train='none'")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be an integer of 64 bits, got {self.seed}")
        if self.max_steps is None and self.max_minutes is None and self.max_tokens is None:
            object.__setattr__(self, "max_steps", DEFAULT_STEPS)
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", RATE_BEYOND if self.train == "beyond" else DEFAULT_RATE)

    def with_rate_of(self, names: set[str]) -> "Distillation":
        """A copy with the learning rate that suits some new schemes, by their names, if this one has the default."""
        rates = (SCHEMES[name].distillation_rate or DEFAULT_RATE for name in names)
        return replace(self, learning_rate=max(self.learning_rate or DEFAULT_RATE, *rates))

    def after(self, seconds: float) -> "Distillation":
        """A copy with less training time, when so many seconds of it have passed; enough is left for one step."""
        if self.max_minutes is None:
            return self
        return replace(self, max_minutes=max(self.max_minutes - seconds / 60, 1e-9))

    @property
    def seconds(self) -> float:
        """Training time; infinite where it has no limit."""
        return math.inf if self.max_minutes is None else 60 * self.max_minutes

    @property
    def reaches_further(self) -> bool:
        return self.max_length > self.trained_length

    def tokens(self, step: int, processes: int = 1) -> int:
        """The largest number of tokens of a number of steps. Batches contain whole windows, so they may have fewer."""
        return step * self.tokens_per_step * self.gradient_accumulation_steps * processes

    def rates_by(self, processes: int = 1) -> float:
        """The factor of the learning rates: the square root of n, if a step has n times 512 tokens."""
        return math.sqrt(self.tokens(1, processes) / STEP_TOKENS)

    def spent(self, step: int, seconds: float, processes: int = 1) -> float:
        """The progress of the training, from 0 to 1 at the first limit that is reached."""
        parts = [step / self.max_steps if self.max_steps else 0.0]
        if self.max_minutes:
            parts.append(seconds / (60 * self.max_minutes))
        if self.max_tokens:
            parts.append(self.tokens(step, processes) / self.max_tokens)
        return min(max(parts), 1.0)

    def draw(self, windows: Windows, step: int, number: int = 0) -> Batch:
        """Draw a batch of windows of one length. If `max_length` is greater than the training length, every second step has a longer one.

        Args:
            windows: the text.
            step: number of the step.
            number: number of the batch, among those of all processes in this step.
        """
        generator = torch.Generator().manual_seed(hash((self.seed, step, number)) % 2**63)
        longest = min(self.max_length, len(windows.tokens) + 2)
        if longest > self.trained_length and (step % 2 or self.train == "beyond"):
            low, high = math.log(self.trained_length + 1), math.log(longest)
            length = round(math.exp(low + (high - low) * torch.rand((), generator=generator).item()))
        else:
            low = min(SHORTEST, self.trained_length)
            length = int(torch.randint(low, self.trained_length + 1, (), generator=generator))
        return windows.draw(length, max(1, self.tokens_per_step // length), generator)


def distill(
    student: PreTrainedModel,
    original: PreTrainedModel,
    windows: Windows,
    held_out: Windows,
    distillation: Distillation,
    checkpoint: Path | None = None,
    target: Target = original_states,
    error: Callable[..., torch.Tensor] = normalised_error,
    blocks: Callable[[int], Windows] | None = None,
    following: Following | None = None,
) -> list[dict[str, float]]:
    """Train the hidden states of a converted model towards those of its original, in place.

    The optimizer is AdamW without weight decay. Dropout is off. Learning rates rise for 20 steps and fall to 0 at the end of the training. The
    device and the processes are those that `accelerate` finds.

    Args:
        student: the converted model.
        original: a model of the same family and size. Its parameters are not changed.
        windows: text to learn from, or its first block.
        held_out: text to measure the cosine on.
        checkpoint: the file of the training state. If it exists, training resumes from it.
        target: a function that returns the hidden states to learn. Default: those of the original, which beyond the training length reads
            overlapping windows.
        error: a function that returns the loss from the student's hidden states and the target.
        blocks: a function that returns the windows of a block of the text, by its number. Each block is used for as many tokens as the first
            has. Default: the first block is all text.
        following: settings for trackers and for saving the training state. Default: no trackers, and a save once a minute.

    Returns:
        A dict for every 50 steps and the last: step, seconds, tokens, learning rate, error, and cosine of the last layer on held-out text.

    Raises:
        ValueError: there is nothing to train, or the text is shorter than a batch.
        Diverged: the error or the cosine is infinite or NaN. The student has the parameters of the last check that was finite.
        SystemExit: the process got SIGTERM. The training state was saved.
    """
    from accelerate import Accelerator  # only here: the rest of the package does without

    if distillation.train == "none":
        return []
    windows.check_enough(max(STEP_TOKENS, distillation.trained_length), "training")
    held_out.check_enough(distillation.trained_length, "held-out")
    following = following or Following()
    accelerator = Accelerator(cpu=_lacks_gpu(), **following.keywords())
    # `accelerate launch`, or a Trainer before, may have another precision than is asked for; it would stay in the student's forward.
    accelerator.native_amp = False
    with placed_on(accelerator.device, original, student):
        original.eval()
        student.eval()  # dropout off, for gradients too
        masks = choose_parameters(student, windows, distillation)
        base = student.base_model
        by = distillation.rates_by(accelerator.num_processes)
        groups = parameter_groups(base, distillation.learning_rate or DEFAULT_RATE, by)
        optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, fused=True)
        model, optimizer = accelerator.prepare(base, optimizer)
        save = _Saving(checkpoint, student, optimizer, Timer(following.save_minutes))
        text = blocks or (lambda number: windows)
        run = _Run(accelerator, distillation, windows, text, held_out, original, target, error, save)
        following.begin(accelerator, asdict(distillation))
        try:
            with (
                told_to_end() if checkpoint is not None else nullcontext(lambda: False) as told,
                recomputed(student, distillation),
            ):
                return run.steps(model, optimizer, masks, _load(checkpoint, student, optimizer), told)
        finally:
            following.end(accelerator)
            student.requires_grad_(True)


@dataclass
class _Run:
    """The loop over steps."""

    accelerator: Any
    distillation: Distillation
    windows: Windows
    blocks: Callable[[int], Windows]
    held_out: Windows
    original: PreTrainedModel
    target: Target
    error: Callable[..., torch.Tensor]
    save: "_Saving"

    def steps(
        self, model: nn.Module, optimizer, masks: Masks, state: dict[str, Any], told: Callable[[], bool]
    ) -> list[dict[str, float]]:
        """Train to the end, and say how it went; after numbers that are not finite, with the model put back."""
        held = _Held(model)
        try:
            return self._loop(model, optimizer, masks, state, held, told)
        except Diverged:
            held.put_back()
            raise

    def _loop(self, model, optimizer, masks: Masks, state, held: "_Held", told: Callable[[], bool]) -> list[dict]:
        step, history, error = state["step"], state["history"], math.nan
        began = time.monotonic() - state["seconds"]
        checked = self._checked_text()
        with self._bar(step) as bar:
            while True:
                seconds = time.monotonic() - began
                spent = self.distillation.spent(step, seconds, self.accelerator.num_processes)
                seconds, spent, is_told = self._agreed(seconds, spent, told())
                kept = {"step": step, "seconds": seconds, "history": history}
                ended, looked_at = step > 0 and spent >= 1, history[-1]["step"] if history else 0
                is_checked = step > looked_at and (ended or step % CHECK_EVERY == 0)
                if is_checked:
                    history.append(self._looked_at(model, checked, step, seconds, error, looked_at))
                    bar.set_postfix(cosine=f"{history[-1]['cosine']:.4f}")
                    held.update()
                if is_told:
                    self.save(kept)
                    raise SystemExit(128 + signal.SIGTERM)
                if is_checked and self._agreed(ended or self.save.is_due())[0]:
                    self.save(kept)
                if ended:
                    return history
                factor = (1 - spent) * min(1.0, (step + 1) / WARM_UP)
                for group in optimizer.param_groups:
                    group["lr"] = group["highest"] * factor
                error = self._step(model, optimizer, masks, step)
                self._require_finite(error, "error", step, history[-1]["step"] if history else 0)
                step += 1
                bar.update(self._tokens(1))

    def _tokens(self, step: int) -> int:
        return self.distillation.tokens(step, self.accelerator.num_processes)

    def _bar(self, step: int) -> tqdm:
        """Progress in tokens, where the number of them is known."""
        totals = [self.distillation.max_tokens, self._tokens(self.distillation.max_steps or 0)]
        return tqdm(
            total=min(filter(None, totals), default=None),
            initial=self._tokens(step),
            desc="distillation",
            unit="tokens",
            unit_scale=True,
            disable=not self.accelerator.is_local_main_process,
        )

    def _looked_at(
        self, model, checked: list[tuple[Batch, torch.Tensor]], step: int, seconds: float, error: float, before: int
    ) -> dict[str, Any]:
        """How far a step has come: an entry of the history, which trackers get too."""
        cosine = self._cosine(model, checked)
        self._require_finite(cosine, "cosine", step, before)
        rate = self.distillation.learning_rate
        entry = {"step": step, "seconds": seconds, "tokens": self._tokens(step), "learning_rate": rate}
        entry |= {"error": error, "cosine": cosine}
        self.accelerator.log(entry, step=step)
        return entry

    def _require_finite(self, value: float, what: str, step: int, looked_at: int) -> None:
        if not math.isfinite(value):
            raise Diverged(
                f"distillation diverged: at step {step} the {what} is no finite number, and the model is put back to step {looked_at}; "
                f"give a lower learning_rate (it was {self.distillation.learning_rate:g})"
            )

    def _step(self, model: nn.Module, optimizer, masks: Masks, step: int) -> float:
        """One step, and its mean error; nothing is learned from one that is not finite, in whichever process: it is NaN then."""
        number, errors = self.distillation.gradient_accumulation_steps, []
        windows = self.blocks(self._tokens(step) // len(self.windows.tokens))
        for turn in range(number):
            place = turn * self.accelerator.num_processes + self.accelerator.process_index
            batch = placed(self.distillation.draw(windows, step, place), self.accelerator.device)
            is_last = turn == number - 1
            with nullcontext() if is_last else self.accelerator.no_sync(model):
                with self._precision():
                    aim = self.target(self.original, batch, self.distillation.trained_length)
                    states = hidden_states(model, batch)
                error = self.error(states, aim)
                del aim, states
                if not self.accelerator.gather(error.detach().reshape(1)).isfinite().all():
                    optimizer.zero_grad()
                    return math.nan
                self.accelerator.backward(error / number)
            errors.append(error.item())
        for parameter, mask in masks.items():
            parameter.grad.mul_(mask)
        optimizer.step()
        optimizer.zero_grad()
        return sum(errors) / number

    @torch.no_grad()
    def _cosine(self, model: nn.Module, checked: list[tuple[Batch, torch.Tensor]]) -> float:
        """Mean cosine of held-out tokens' last states with their target, over the lengths that are looked at."""
        cosines = []
        for batch, aim in checked:
            with self._precision():
                found = hidden_states(model, batch)[-1]
            real = batch["attention_mask"].bool()
            cosines.append(torch.cosine_similarity(found[real].float(), aim[real], dim=-1).mean())
        return self._agreed(torch.stack(cosines).mean().item())[0]

    @torch.no_grad()
    def _checked_text(self) -> list[tuple[Batch, torch.Tensor]]:
        batches = [self.held_out.lines(self.distillation.trained_length, CHECKED_ROWS)]
        if self.distillation.reaches_further and len(self.held_out.tokens) + 2 >= self.distillation.max_length:
            batches.append(self.held_out.evenly_spaced(self.distillation.max_length, 2))
        batches = [placed(batch, self.accelerator.device) for batch in batches]
        return [
            (batch, self.target(self.original, batch, self.distillation.trained_length)[-1].float())
            for batch in batches
        ]

    def _precision(self) -> torch.autocast:
        device, wanted = self.accelerator.device, self.distillation.mixed_precision
        enabled = has_bfloat16(device) if wanted is None else wanted == "bf16"
        return torch.autocast(device.type, torch.bfloat16, enabled=enabled)

    def _agreed(self, *values: float) -> list[float]:
        """Numbers that all processes have alike: those of the first."""
        if self.accelerator.num_processes == 1:
            return [*values]
        from accelerate.utils import broadcast

        return broadcast(torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)).tolist()


@contextmanager
def recomputed(student: PreTrainedModel, distillation: Distillation) -> Iterator[None]:
    """Within, activations of layers are computed again in the backward pass, where that is asked for.

    By their `forward`: MPNet's layers are none of those that Transformers computes again.
    """
    family = family_of(student.config)
    layers = family.layers_of(family.encoder_of(student.base_model)) if distillation.gradient_checkpointing else []
    for layer in layers:
        layer.forward = partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class _Held:
    """A copy of what is trained of a model, to go back to."""

    def __init__(self, model: nn.Module):
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.update()

    def update(self) -> None:
        self.copies = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def put_back(self) -> None:
        for parameter, copy in zip(self.parameters, self.copies):
            parameter.copy_(copy)


def device_of(distillation: Distillation) -> torch.device:
    """Where [`distill`] trains: the device that `accelerate` finds for this process, or the CPU if nothing is trained."""
    if distillation.train == "none":
        return torch.device("cpu")
    from accelerate import PartialState

    return PartialState(cpu=_lacks_gpu()).device


def _lacks_gpu() -> bool:
    """Accelerate is told so: only those who choose CPUs get the processes of `accelerate launch`."""
    return not torch.accelerator.is_available()


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16 by itself, and not by detours."""
    if device.type == "cpu":
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def choose_parameters(student: PreTrainedModel, windows: Windows, distillation: Distillation) -> Masks:
    """Set `requires_grad` of a model's parameters as `train` says, and return the rows that may change of those of which not
    all may: a mask of (rows, 1) by parameter.

    Raises:
        ValueError: there is nothing to train.
    """
    base, family = student.base_model, family_of(student.config)
    embeddings = family.embeddings_of(base)
    words = getattr(embeddings, family.words).weight
    table = getattr(embeddings, family.table, None)
    positions = {*position_parameters(base).values()} | ({table.weight} if table is not None else set())
    frozen = {words, *(getattr(base, "pooler", None) or nn.Module()).parameters()}
    student.requires_grad_(False)
    masks: dict[nn.Parameter, torch.Tensor] = {}
    if distillation.train == "all":
        chosen = {*base.parameters()} - frozen
    elif distillation.train == "positions":
        chosen = positions
    else:
        masks = rows_beyond(base, positions, windows, distillation.trained_length)
        chosen = {*masks}
        first = family.first_position(student.config)
        if table is not None and table.weight in masks:
            masks[table.weight][:first] = 0  # a row of padding's is none of a position
    if not chosen:
        known = (
            "it has no position parameters" if distillation.train == "positions" else "all that it has is used within"
        )
        raise ValueError(
            f"train={distillation.train!r}: the model has nothing to train beyond {distillation.trained_length} tokens: {known}; choose "
            f"another of {', '.join(TRAIN)}"
        )
    for parameter in chosen:
        parameter.requires_grad_(True)
    return masks


def rows_beyond(
    base: PreTrainedModel, positions: set[nn.Parameter], windows: Windows, trained_length: int
) -> dict[nn.Parameter, torch.Tensor]:
    """By table of positions, a mask (rows, 1) of the rows that no text within the trained length uses: their gradient is 0."""
    tables = {
        module.weight
        for module in base.modules()
        if isinstance(module, (PositionTable, nn.Embedding)) and module.weight in positions
    }
    if not tables:
        return {}
    for table in tables:
        table.requires_grad_(True)
    batch = windows.draw(trained_length, 2, torch.Generator().manual_seed(0))
    states = hidden_states(base, batch)
    generator = torch.Generator().manual_seed(1)
    of_states = [torch.randn(state.shape, generator=generator).to(state) for state in states]
    torch.stack([(state * by).sum() for state, by in zip(states, of_states)]).sum().backward()
    masks = {}
    for table in tables:
        unused = (table.grad == 0).all(dim=1, keepdim=True)
        table.grad = None
        table.requires_grad_(False)
        if unused.any():
            masks[table] = unused.to(table.dtype)
    return masks


def parameter_groups(base: PreTrainedModel, learning_rate: float, by: float = 1.0) -> list[dict[str, Any]]:
    """The parameters to train, by their learning rate: `learning_rate` where positions have no other, times `by`."""
    positions = {parameter: name for name, parameter in position_parameters(base).items()}
    # None stands for `learning_rate`, so that the groups are the same ones whatever it is.
    groups: dict[float | None, list[nn.Parameter]] = {}
    for parameter in base.parameters():
        if parameter.requires_grad:
            name = positions.get(parameter, "")
            own = next((rate for part, rate in POSITION_RATES.items() if f".{part}." in f".{name}"), None)
            groups.setdefault(own, []).append(parameter)
    rates = {own: by * (learning_rate if own is None else own) for own in groups}
    return [{"params": group, "lr": rates[own], "highest": rates[own]} for own, group in groups.items()]


@dataclass
class _Saving:
    """Writes the state atomically, by the first process."""

    checkpoint: Path | None
    student: PreTrainedModel
    optimizer: Any
    timer: Timer

    def is_due(self) -> bool:
        return self.checkpoint is not None and self.timer.is_due()

    def __call__(self, state: dict[str, Any]) -> None:
        if self.checkpoint is None or not is_first_process():
            return
        complete = {**state, "student": self.student.state_dict(), "optimizer": self.optimizer.state_dict()}
        try:
            with whole_file(self.checkpoint) as file:
                torch.save(complete, file)
        except RuntimeError as error:  # which is no OSError, whatever its cause
            raise OSError(f"{self.checkpoint} cannot be written: {error}") from error


def _load(checkpoint: Path | None, student: PreTrainedModel, optimizer) -> dict[str, Any]:
    """Put the state that was saved back, but for the learning rates; what steps begin with."""
    if checkpoint is None or not checkpoint.is_file():
        return {"step": 0, "seconds": 0.0, "history": []}
    try:
        state = torch.load(checkpoint, weights_only=True, map_location="cpu")
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{checkpoint} is damaged ({error}): leave --resume out to begin anew") from error
    student.load_state_dict(state.pop("student"))
    highest = [group["highest"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state.pop("optimizer"))
    for group, rate in zip(optimizer.param_groups, highest):
        group["highest"] = rate
    return state


def process_of() -> tuple[int, int]:
    """The number of this process, and of how many, as `accelerate launch` says."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def is_first_process() -> bool:
    """Whether this process is the only one, or the one of them that writes."""
    return process_of()[0] == 0


def settings_of(distillation: Distillation) -> dict[str, Any]:
    """What a checkpoint of distillation belongs to."""
    return asdict(distillation)
