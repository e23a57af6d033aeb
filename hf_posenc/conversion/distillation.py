"""Distillation: a converted model learns to compute the hidden states of its original, on a few minutes of text."""

import math
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..files import whole_file
from ..modeling.schemes.parameters import PositionTable
from ..modeling.schemes.table import SCHEMES
from ..parameters import position_parameters
from ..variants import family_of
from .targets import Batch, Target, hidden_states, normalised_error, original_states
from .texts import SHORTEST, Windows


TRAIN = ("all", "positions", "beyond", "none")
DEFAULT_STEPS = 800
# Tokens of a step.
STEP_TOKENS = 512
WARM_UP = 20
# In hundreds of steps, squared gradients have to be forgotten sooner than by 0.999.
BETAS = (0.9, 0.98)
# Learning rates at their highest. Each number of a table of position vectors or biases adds to few scores, and moves far;
# matrices sum over hundreds of features.
DEFAULT_RATE = 1.5e-4
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
}
# How often the cosine on held-out text is looked at and the state saved, and how many times in a row without a gain end it.
CHECK_EVERY = 50
PATIENCE = 6
LEAST_GAIN = 2e-4
# Of what is looked at between steps.
CHECKED_ROWS = 24


class Diverged(FloatingPointError):
    """Training has led to numbers that are not finite. The model is as it was when it was last looked at."""


@dataclass(frozen=True)
class Distillation:
    """How to distill.

    Attributes:
        trained_length: number of tokens that the original reads well.
        max_length: number of tokens that the converted model is to read.
        train: "all" (but the word embeddings, the pooler and heads), "positions" (what the schemes added), "beyond" (rows of
            tables that no text within the trained length uses) or "none".
        max_steps, max_minutes: the budget, whichever ends first; 800 steps if neither is given.
        seed: of the choice of text.
        learning_rate: the highest of everything but the positions that have other rates; 1.5e-4 if none is given.
    """

    trained_length: int
    max_length: int
    train: str = "all"
    max_steps: int | None = None
    max_minutes: float | None = None
    seed: int = 0
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        if self.train not in TRAIN:
            raise ValueError(f"train must be one of {', '.join(TRAIN)}, got {self.train!r}")
        for name in ("max_steps", "max_minutes", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be greater than 0, got {value}; without distillation: train='none'")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be an integer of 64 bits, got {self.seed}")
        if self.max_steps is None and self.max_minutes is None:
            object.__setattr__(self, "max_steps", DEFAULT_STEPS)
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", DEFAULT_RATE)

    def with_rate_of(self, names: set[str]) -> "Distillation":
        """At the rate that suits new schemes, by their names."""
        rates = (SCHEMES[name].distillation_rate or DEFAULT_RATE for name in names)
        return replace(self, learning_rate=max(rates))

    @property
    def reaches_further(self) -> bool:
        return self.max_length > self.trained_length

    def spent(self, step: int, seconds: float) -> float:
        """The part of the budget that is spent, 1 at its end."""
        parts = [step / self.max_steps if self.max_steps else 0.0]
        if self.max_minutes:
            parts.append(seconds / (60 * self.max_minutes))
        return min(max(parts), 1.0)

    def draw(self, windows: Windows, step: int, process: int = 0) -> Batch:
        """The text of a step: windows of one length; beyond the trained length, every second step is of a longer one."""
        generator = torch.Generator().manual_seed(hash((self.seed, step, process)) % 2**63)
        longest = min(self.max_length, len(windows.tokens) + 2)
        if longest > self.trained_length and (step % 2 or self.train == "beyond"):
            low, high = math.log(self.trained_length + 1), math.log(longest)
            length = round(math.exp(low + (high - low) * torch.rand((), generator=generator).item()))
        else:
            low = min(SHORTEST, self.trained_length)
            length = int(torch.randint(low, self.trained_length + 1, (), generator=generator))
        return windows.draw(length, max(1, STEP_TOKENS // length), generator)


def distill(
    student: PreTrainedModel,
    original: PreTrainedModel,
    windows: Windows,
    held_out: Windows,
    distillation: Distillation,
    checkpoint: Path | None = None,
    target: Target = original_states,
    error: Callable[..., torch.Tensor] = normalised_error,
) -> list[dict[str, float]]:
    """Train a converted model to have its original's hidden states, in place.

    AdamW without decay, dropout off; rates rise over 20 steps and fall to 0 with the budget. Computes in bfloat16 where the
    processor has it. On what `accelerate` finds: one CPU, or all processes of `accelerate launch`.

    Args:
        student, original: of one family and size; the original stays as it is.
        windows: text to learn from.
        held_out: text that the cosine is measured on; distillation stops when it grows no more.
        checkpoint: a file to keep the state in. What lies there is gone on with.
        target: what the hidden states should be, see [`targets`].
        error: of the student's states and their target.

    Returns:
        Step, seconds, learning rate, error and held-out cosine of the last layer, every 50 steps and at the end.

    Raises:
        ValueError: there is nothing to train, or the text is shorter than a batch.
        Diverged: the error, or the cosine, is no finite number; the student is as it was when it was last looked at.
    """
    from accelerate import Accelerator  # only here: the rest of the package does without

    if distillation.train == "none":
        return []
    windows.check_enough(max(STEP_TOKENS, distillation.trained_length), "training")
    held_out.check_enough(distillation.trained_length, "held-out")
    # Without a GPU, only those who choose CPUs get the processes of `accelerate launch`.
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    original.to(accelerator.device).eval()
    student.eval()  # dropout off, for gradients too
    masks = choose_parameters(student, windows, distillation)
    base = student.base_model
    optimizer = torch.optim.AdamW(
        parameter_groups(base, distillation.learning_rate), betas=BETAS, weight_decay=0.0, fused=True
    )
    model, optimizer = accelerator.prepare(base, optimizer)
    run = _Run(accelerator, distillation, windows, held_out, original, target, error)
    state = _load(checkpoint, student, optimizer)
    try:
        history = run.steps(model, optimizer, masks, state, lambda kept: _save(checkpoint, student, optimizer, kept))
    finally:
        student.requires_grad_(True)
        student.cpu()
        original.cpu()
    return history


@dataclass
class _Run:
    """The loop over steps."""

    accelerator: Any
    distillation: Distillation
    windows: Windows
    held_out: Windows
    original: PreTrainedModel
    target: Target
    error: Callable[..., torch.Tensor]

    def steps(self, model: nn.Module, optimizer, masks, state: dict, save: Callable[[dict], None]) -> list[dict]:
        """Train to the end, and say how it went; after numbers that are not finite, with the model put back."""
        held = _Held(model)

        def keep(kept: dict) -> None:
            held.update()
            save(kept)

        try:
            return self._loop(model, optimizer, masks, state, keep)
        except Diverged:
            held.put_back()
            raise

    def _loop(self, model: nn.Module, optimizer, masks, state: dict, keep: Callable[[dict], None]) -> list[dict]:
        step, history, error = state["step"], state["history"], math.nan
        began = time.monotonic() - state["seconds"]
        checked = self._checked_text()
        bar = tqdm(
            total=self.distillation.max_steps, initial=step, desc="distillation", unit="step", disable=self._is_quiet()
        )
        with bar:
            while True:
                seconds = self._agreed(time.monotonic() - began)
                spent = self.distillation.spent(step, seconds)
                ended, looked_at = step > 0 and spent >= 1, history[-1]["step"] if history else 0
                if step > looked_at and (ended or step % CHECK_EVERY == 0):
                    cosine = self._cosine(model, checked)
                    self._require_finite(cosine, "cosine", step, looked_at)
                    rate = self.distillation.learning_rate
                    entry = {"step": step, "seconds": seconds, "learning_rate": rate, "error": error, "cosine": cosine}
                    history.append(entry)
                    bar.set_postfix(cosine=f"{cosine:.4f}")
                    keep({"step": step, "seconds": seconds, "history": history})
                if ended or _gains_no_more(history):
                    return history
                factor = (1 - spent) * min(1.0, (step + 1) / WARM_UP)
                for group in optimizer.param_groups:
                    group["lr"] = group["highest"] * factor
                error = self._step(model, optimizer, masks, step)
                self._require_finite(error, "error", step, history[-1]["step"] if history else 0)
                step += 1
                bar.update()

    def _require_finite(self, value: float, what: str, step: int, looked_at: int) -> None:
        if not math.isfinite(value):
            raise Diverged(
                f"distillation diverged: at step {step} the {what} is no finite number, and the model is put back to step {looked_at}; "
                f"give a lower learning_rate (it was {self.distillation.learning_rate:g})"
            )

    def _step(self, model: nn.Module, optimizer, masks: dict[nn.Parameter, torch.Tensor], step: int) -> float:
        """One step, and its error; nothing is learned from one that is not finite, in whichever process: it is NaN then."""
        batch = self._placed(self.distillation.draw(self.windows, step, self.accelerator.process_index))
        with self._precision():
            aim = self.target(self.original, batch, self.distillation.trained_length)
            states = hidden_states(model, batch)
        error = self.error(states, aim)
        if not self.accelerator.gather(error.detach().reshape(1)).isfinite().all():
            return math.nan
        self.accelerator.backward(error)
        for parameter, mask in masks.items():
            parameter.grad.mul_(mask)
        optimizer.step()
        optimizer.zero_grad()
        return error.item()

    @torch.no_grad()
    def _cosine(self, model: nn.Module, checked: list[tuple[Batch, torch.Tensor]]) -> float:
        """Mean cosine of held-out tokens' last states with their target, over the lengths that are looked at."""
        cosines = []
        for batch, aim in checked:
            with self._precision():
                found = hidden_states(model, batch)[-1]
            real = batch["attention_mask"].bool()
            cosines.append(torch.cosine_similarity(found[real].float(), aim[real], dim=-1).mean())
        return self._agreed(torch.stack(cosines).mean().item())

    @torch.no_grad()
    def _checked_text(self) -> list[tuple[Batch, torch.Tensor]]:
        batches = [self.held_out.lines(self.distillation.trained_length, CHECKED_ROWS)]
        if self.distillation.reaches_further and len(self.held_out.tokens) + 2 >= self.distillation.max_length:
            batches.append(self.held_out.evenly_spaced(self.distillation.max_length, 2))
        return [
            (batch, self.target(self.original, batch, self.distillation.trained_length)[-1].float())
            for batch in map(self._placed, batches)
        ]

    def _placed(self, batch: Batch) -> Batch:
        return {name: value.to(self.accelerator.device) for name, value in batch.items()}

    def _precision(self):
        return torch.autocast(
            self.accelerator.device.type, torch.bfloat16, enabled=has_bfloat16(self.accelerator.device)
        )

    def _agreed(self, value: float) -> float:
        """A number that all processes have alike: that of the first."""
        if self.accelerator.num_processes == 1:
            return value
        from accelerate.utils import broadcast

        return broadcast(torch.tensor(value, dtype=torch.float64, device=self.accelerator.device)).item()

    def _is_quiet(self) -> bool:
        return not self.accelerator.is_local_main_process


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


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16 by itself, and not by detours."""
    if device.type == "cpu":
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def _gains_no_more(history: list[dict[str, float]]) -> bool:
    """Whether the last checks gained nothing over the best before them."""
    cosines = [entry["cosine"] for entry in history]
    return len(cosines) > PATIENCE and max(cosines[-PATIENCE:]) < max(cosines[:-PATIENCE]) + LEAST_GAIN


def choose_parameters(
    student: PreTrainedModel, windows: Windows, distillation: Distillation
) -> dict[nn.Parameter, torch.Tensor]:
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
    torch.stack([(state * torch.randn(state.shape, generator=generator)).sum() for state in states]).sum().backward()
    masks = {}
    for table in tables:
        unused = (table.grad == 0).all(dim=1, keepdim=True)
        table.grad = None
        table.requires_grad_(False)
        if unused.any():
            masks[table] = unused.to(table.dtype)
    return masks


def parameter_groups(base: PreTrainedModel, learning_rate: float | None) -> list[dict[str, Any]]:
    """The parameters to train, by their learning rate: `learning_rate` where positions have no other."""
    positions = {parameter: name for name, parameter in position_parameters(base).items()}
    # None stands for `learning_rate`, so that the groups are the same ones whatever it is.
    groups: dict[float | None, list[nn.Parameter]] = {}
    for parameter in base.parameters():
        if parameter.requires_grad:
            name = positions.get(parameter, "")
            own = next((rate for part, rate in POSITION_RATES.items() if f".{part}." in f".{name}"), None)
            groups.setdefault(own, []).append(parameter)
    rates = {own: learning_rate if own is None else own for own in groups}
    return [{"params": group, "lr": rates[own], "highest": rates[own]} for own, group in groups.items()]


def _save(checkpoint: Path | None, student: PreTrainedModel, optimizer, state: dict[str, Any]) -> None:
    """Write the state atomically, by the first process."""
    if checkpoint is None or not is_first_process():
        return
    whole = {**state, "student": student.state_dict(), "optimizer": optimizer.state_dict()}
    try:
        with whole_file(checkpoint) as file:
            torch.save(whole, file)
    except RuntimeError as error:  # which is no OSError, whatever its cause
        raise OSError(f"{checkpoint} cannot be written: {error}") from error


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


def is_first_process() -> bool:
    """Whether this process is the only one, or the one of them that writes."""
    return int(os.environ.get("RANK", 0)) == 0


def settings_of(distillation: Distillation) -> dict[str, Any]:
    """What a checkpoint of distillation belongs to."""
    return asdict(distillation)
