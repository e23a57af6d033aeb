"""Calibrate: fit the parameters of a student's positions to the attention of the original, layer by layer."""

import math
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import accumulate

import torch
from torch import nn
from transformers.utils import logging

from hf_posenc.modeling.models.family import Family
from hf_posenc.parameters import position_parameters
from hf_posenc.training import frequencies

from .checkpoints import keeps_positions
from .observation import AttentionComparison, Batch, LayerByLayer, observe, undisturbed


logger = logging.get_logger(__name__)

# Pairs of tokens, those of each head counted, that are held in memory at once, some nine bytes each.
MOST_PAIRS = 64_000_000
# Pairs of which scores are computed at once: tensors of this size stay in a processor's cache, and are not mapped anew for each operation.
PAIRS_AT_ONCE = 6_000_000
# Steps of the minimisation where whole projections are fitted: they have a hundred times as many numbers as a table.
PROJECTION_STEPS = 20
# Of L-BFGS; each step in it is twice as much as what is fitted.
LONGEST_HISTORY = 12
# Of the mean over directions, the variance that a direction of a layer's inputs is taken to have at least.
LEAST_VARIANCE = 1e-3
# How often parameters that layers share are fitted: what they do in one layer changes the states of those above.
SWEEPS = 3
# In a limited time, no more text is taken than allows for so many times as long as both models need to read it.
LEAST_READINGS = 4
# And nothing is fitted with fewer evaluations: of these, the coordinates take three and the last measurement one.
LEAST_EVALUATIONS = 6
# Nor projections on fewer tokens for each feature of the hidden states: they then fit these tokens, and no others.
LEAST_TOKENS = 4


def left(until: float) -> float:
    """Seconds until a time of `time.monotonic()`."""
    return until - time.monotonic()


def share(until: float, parts: float) -> float:
    """When the first of so many equal parts of the time that is left will be over."""
    return time.monotonic() + left(until) / parts


class Fit:
    """Parameters under which attention diverges least from the original's, with a small ridge around where they start.

    Most terms are linear in their parameters, and the problem convex. L-BFGS solves it, in coordinates in which all parameters matter
    about as much ([`coordinates`]): otherwise rows of a table that few pairs look up, and features that hardly vary, come last.

    Args:
        parameters: what is fitted, in place.
        observations: of one layer, or of several that share the parameters.
        ridge: by how much the penalty of a change curves, where the divergence does by 1 on average.
    """

    def __init__(self, parameters: list[nn.Parameter], observations: list[AttentionComparison], ridge: float = 1e-4):
        self.parameters, self.observations, self.ridge = parameters, observations, ridge
        self.sizes = [parameter.numel() for parameter in parameters]
        self.total = sum(float(observation.weights.sum()) for observation in observations)
        self.start = self._flat(parameters)

    def _flat(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.detach().double().flatten() for tensor in tensors])

    def set(self, values: torch.Tensor) -> None:
        """Give the parameters their values, (all,)."""
        for parameter, part in zip(self.parameters, values.split(self.sizes)):
            parameter.data.copy_(part.view_as(parameter))

    @cached_property
    def at_start(self) -> tuple[float, torch.Tensor]:
        """[`divergence`] where the parameters start."""
        return self.divergence(self.start)

    def divergence(self, values: torch.Tensor) -> tuple[float, torch.Tensor]:
        """The mean divergence at some values of the parameters, and its gradient by them, (all,)."""
        self.set(values)
        divergence, gradient = 0.0, torch.zeros_like(values)
        for observation in self.observations:
            with torch.enable_grad():
                scores = observation.scores()
            part, by_score = observation.divergence(scores.detach())
            divergence += part
            by_parameter = torch.autograd.grad(scores, self.parameters, by_score, materialize_grads=True)
            gradient += self._flat(by_parameter)
        return divergence / self.total, gradient / self.total

    def scale(self, probes: int = 2) -> torch.Tensor:
        """1/√curvature by each parameter, (all,): estimated with random signs, in a matrix as row times column.

        0 where the divergence does not depend on a parameter at all.
        """
        _, here = self.at_start
        generator = torch.Generator().manual_seed(0)
        curvature = torch.zeros_like(here)
        for _ in range(probes):
            signs = torch.randint(0, 2, here.shape, generator=generator).to(here) * 2 - 1
            curvature += signs * (self.divergence(self.start + signs)[1] - here) / probes
        shapes = [parameter.shape if parameter.dim() == 2 else (1, -1) for parameter in self.parameters]
        parts = [part.view(shape).clamp(min=0) for part, shape in zip(curvature.split(self.sizes), shapes)]
        # Of a number that all keys of a query get (tupe's row of [CLS]), softmax leaves nothing but rounding.
        least = torch.finfo(torch.float32).eps * max(part.mean() for part in parts)
        scales = []
        for part in parts:
            mean = part.mean().clamp(min=torch.finfo(torch.float32).tiny)
            smooth = part.mean(1, keepdim=True) * part.mean(0, keepdim=True) / mean
            scales.append(((smooth + 1e-4 * mean).rsqrt() * (part.mean() > least)).flatten())
        return torch.cat(scales)

    def coordinates(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A symmetric linear map (all,) -> (all,) of what is searched to changes of the parameters."""
        scale = self.scale()
        return lambda vector: scale * vector

    def run(self, steps: int, until: float = math.inf) -> tuple[float, float]:
        """Minimise in so many steps, or fewer where time is up before; the mean divergence before and after."""
        began = time.monotonic()
        before, _ = self.at_start
        each = time.monotonic() - began
        if left(until) < LEAST_EVALUATIONS * each:
            return before, before
        change = self.coordinates()
        moved = torch.zeros_like(self.start, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [moved],
            max_iter=steps,
            max_eval=int(min(steps * 5 // 4, max(2, left(until) / each - 1))),
            history_size=min(steps, LONGEST_HISTORY),
            line_search_fn="strong_wolfe",
        )

        def closure() -> float:
            by = moved.detach()
            divergence, gradient = self.divergence(self.start + change(by)) if by.any() else self.at_start
            moved.grad = change(gradient) + self.ridge * by
            return divergence + 0.5 * self.ridge * float(by.square().sum())

        optimizer.step(closure)
        after, _ = self.divergence(self.start + change(moved.detach()))
        if not math.isfinite(after):  # the line search went where no numbers are: as it was is better
            self.set(self.start)
            return before, before
        return before, after


class ProjectionFit(Fit):
    """Weights and biases of a layer's queries and keys, fitted in the same way.

    Scores are products of both, so that the problem is not convex, and where it starts matters. In its coordinates the inputs of the
    layer are white, and each feature of a query changes scores as much as any other.

    Args:
        attention: the self-attention.
        observations: of its layer.
        inputs: (tokens, hidden), what the layer is given.
    """

    def __init__(self, attention: nn.Module, observations: list[AttentionComparison], inputs: torch.Tensor):
        projections = attention.query_projection, attention.key_projection
        super().__init__([p for each in projections for p in (each.weight, each.bias)], observations, ridge=1e-3)
        inputs = nn.functional.pad(inputs.double(), (0, 1), value=1.0)  # with the bias as one more column
        self.whitening = _inverse_root(inputs.T @ inputs / len(inputs))
        strengths = [
            (inputs @ torch.cat([each.weight, each.bias[:, None]], 1).double().T).square().mean(0).sqrt()
            for each in projections
        ]
        # A feature of the query matters as much as that of the key is strong, and the other way around.
        self.scales = [
            1 / (attention.scaling * (strength + 0.1 * strength.mean()))[:, None] for strength in reversed(strengths)
        ]

    def coordinates(self) -> Callable[[torch.Tensor], torch.Tensor]:
        def change(vector: torch.Tensor) -> torch.Tensor:
            parts = vector.split(self.sizes)
            changed = []
            for scale, weight, bias in zip(self.scales, parts[::2], parts[1::2]):
                matrix = torch.cat([weight.view(len(bias), -1), bias[:, None]], dim=1)
                matrix = scale * (matrix @ self.whitening)
                changed += [matrix[:, :-1].flatten(), matrix[:, -1]]
            return torch.cat(changed)

        return change


def _inverse_root(moment: torch.Tensor) -> torch.Tensor:
    """M^(-1/2) of a symmetric positive matrix, none of whose directions counts as less than a part of their mean."""
    strength, vectors = torch.linalg.eigh(moment)
    return vectors * (strength + LEAST_VARIANCE * strength.mean()).rsqrt() @ vectors.T


def _affordable(batches: list[Batch], heads: int, held: int) -> list[Batch]:
    """As much of the batches as there is room for, in parts that are computed at once; at least one part."""
    parts = []
    for batch in batches:
        rows, length = batch["input_ids"].shape
        at_once = max(1, PAIRS_AT_ONCE // (heads * length**2))
        parts += [
            {name: value[row : row + at_once] for name, value in batch.items()} for row in range(0, rows, at_once)
        ]
    pairs = [heads * held * len(ids) * ids.shape[1] ** 2 for ids in (part["input_ids"] for part in parts)]
    return parts[: max(1, sum(total <= MOST_PAIRS for total in accumulate(pairs)))]


@torch.no_grad()
def calibrate(
    student: nn.Module, teacher: nn.Module, batches: list[Batch], steps: int = 12, seconds: float = math.inf
) -> None:
    """Fit the position parameters in a student's attention to the attention weights of the teacher, in place.

    The fit minimizes the Kullback-Leibler divergence between the attention weights of teacher and student, one layer after the other. The
    student's hidden states are the input, so the layers below are already fitted. To second order, this is a weighted least-squares fit of
    the scores. The divergence is better, because it also counts tokens with a small weight in the teacher and a large one in the student.

    Parameters that layers share (in `t5` without `position_per_layer`, `deberta` and `tupe`) are fitted to all layers together, three times.
    With `rope`, the query and key projections are fitted; learned frequencies stay as they are. If the student keeps all positions of the
    teacher, or if its schemes neither have parameters in the scores nor rotate, nothing is done.

    Args:
        student: a model with a position scheme, with or without a task head.
        teacher: the same checkpoint, with its previous positions.
        batches: text, on the device of both models. If there is too much for the memory, only the first rows are used. A bias by bucket needs
            about 2,000 tokens, vectors by distance more, and projections about 20,000.
        steps: number of steps of the minimization. Each step computes a layer once or twice for the whole text.
        seconds: about how long the fit may take. If it is short, less text is used and fewer steps are made. Default: no limit.
    """
    family: Family = student.config.family
    encoder = family.encoder_of(student.base_model)
    layers = family.layers_of(encoder)
    attentions = [family.self_attention_of(layer) for layer in layers]
    own = {*fitted_parameters(layers)}
    shared = [parameter for parameter in fitted_parameters(encoder) if parameter not in own]
    if keeps_positions(student, teacher) or not (shared or own or any(map(rotates, attentions))):
        return
    held, sweeps, until = len(layers) if shared else 1, SWEEPS if shared else 1, time.monotonic() + seconds
    batches = _affordable(batches, student.config.sizes.num_attention_heads, held)
    with undisturbed(student), undisturbed(teacher, "eager"):
        batches = _readable(student, teacher, batches, seconds / sweeps)
        for sweep in range(sweeps):
            over = share(until, sweeps - sweep)
            observations = _sweep(student, teacher, batches, steps, bool(shared), over)
            if shared:
                before, after = Fit(shared, observations).run(steps, over)
                logger.info(f"all layers: divergence {before:.4f} -> {after:.4f}")


def _readable(student: nn.Module, teacher: nn.Module, batches: list[Batch], seconds: float) -> list[Batch]:
    """As many of the batches as can be fitted in some time, by how long both models take to read the first; at least that one."""
    if seconds == math.inf:
        return batches
    began = time.monotonic()
    for model in (teacher, student):
        model.base_model(**batches[0])
    most = seconds / (LEAST_READINGS * (time.monotonic() - began))
    return batches[: max(1, min(len(batches), int(most)))]


def fitted_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The position parameters of a module that are fitted. Learned frequencies are not: the projections make up for most others."""
    learned = frequencies(module)
    return [parameter for name, parameter in position_parameters(module).items() if name not in learned]


def rotates(attention: nn.Module) -> bool:
    """Whether a scheme rotates queries and keys (`rope`): all that their projections give then counts by the distance."""
    return any(scheme.rotates for scheme in attention.position_schemes)


def _sweep(
    student: nn.Module, teacher: nn.Module, batches: list[Batch], steps: int, keep: bool, until: float
) -> list[AttentionComparison]:
    """Fit what layers have of their own, one after another; what was observed in all of them, if it is to be kept.

    Where it is, half of the time is left for what they share.
    """
    until = share(until, 2) if keep else until
    family = student.config.family
    original, own = (LayerByLayer(model.base_model, family, batches) for model in (teacher, student))
    kept = []
    for layer in range(len(own.layers)):
        attention = own.attention(layer)
        turns = rotates(attention)
        observations = [
            observe(own, layer, index, original.run_for_weights(layer, index), batch, again=turns)
            for index, batch in enumerate(batches)
        ]
        fits = []
        if parameters := fitted_parameters(attention):
            fits.append((Fit(parameters, observations), steps))
        if turns:
            states = torch.cat([h[b["attention_mask"].bool()] for h, b in zip(own.hidden_states, batches)])
            if len(states) >= LEAST_TOKENS * states.shape[1] or until == math.inf:
                fits.append((ProjectionFit(attention, observations, states), max(steps, PROJECTION_STEPS)))
        for index, (fit, number) in enumerate(fits):
            parts = (len(own.layers) - layer) * (len(fits) - index)
            before, after = fit.run(number, share(until, parts))
            logger.info(f"layer {layer}: divergence {before:.4f} -> {after:.4f}")
        if keep:
            kept += observations
        for index in range(len(batches)):
            own.run(layer, index)
    return kept
