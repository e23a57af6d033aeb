"""Calibrate: fit a student's position parameters to the attention scores of the original, without training."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from hf_posenc.modeling.attention import score_bias
from hf_posenc.modeling.family import Family
from hf_posenc.modeling.scheme import AttentionContext
from hf_posenc.modeling.schemes import scheme_names


logger = logging.get_logger(__name__)

# Pairs of positions, all heads counted, that are looked at in a layer: eight bytes each are held at once.
MOST_PAIRS = 30_000_000
# Smaller weights are as good as none; the logarithm of nothing is not finite.
SMALLEST_WEIGHT = 1e-30


class _Reached(Exception):
    """The forward pass is where it was wanted."""


class LayerByLayer:
    """A base model whose layers are run one at a time, all batches through each.

    Attributes:
        hidden_states: by batch, (batch, length, hidden), the input of the next layer.
        layers: of the model's encoder.
    """

    def __init__(self, model: nn.Module, family: Family, batches: list[dict[str, torch.Tensor]]):
        self.family = family
        self.layers = family.layers_of(family.encoder_of(model))
        self.hidden_states: list[torch.Tensor] = []
        # By batch, what the first layer is given beside its input, and what the others are.
        self._arguments: list[list[tuple[tuple, dict[str, Any]]]] = []
        for batch in batches:
            (hidden_states, *first), *others = self._calls(model, batch)
            self.hidden_states.append(hidden_states)
            self._arguments.append([tuple(first), *(tuple(call[1:]) for call in others)])

    def _calls(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, tuple, dict]]:
        """(input, other arguments, keywords) of the first layer and of the second, if there is one."""
        calls = []
        watched = self.layers[:2]

        def note(layer: nn.Module, arguments: tuple, keywords: dict) -> None:
            calls.append((arguments[0], arguments[1:], keywords))
            if len(calls) == len(watched):
                raise _Reached

        hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in watched]
        try:
            model(**batch)
        except _Reached:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return calls

    def arguments(self, layer: int, batch: int) -> tuple[tuple, dict[str, Any]]:
        """What a layer is given beside its input."""
        calls = self._arguments[batch]
        return calls[min(layer, len(calls) - 1)]

    def run(self, layer: int, batch: int) -> None:
        """Put a layer's output in the place of its input."""
        arguments, keywords = self.arguments(layer, batch)
        output = self.layers[layer](self.hidden_states[batch], *arguments, **keywords)
        self.hidden_states[batch] = output[0] if isinstance(output, tuple) else output

    def run_for_weights(self, layer: int, batch: int) -> torch.Tensor:
        """The same; returns the weights of the layer's self-attention, (batch, heads, query, key)."""
        weights = []

        def note(attention: nn.Module, arguments: tuple, output: tuple) -> None:
            weights.append(output[1])

        keywords = self.arguments(layer, batch)[1]
        if "output_attentions" in keywords:
            keywords["output_attentions"] = True
        hook = self.family.self_attention_of(self.layers[layer]).register_forward_hook(note)
        try:
            self.run(layer, batch)
        finally:
            hook.remove()
        return weights[0]


@dataclass
class Observation:
    """A batch in one layer: how the student asks, and where the original looks.

    Attributes:
        attention: the student's self-attention.
        query, key: (batch, heads, length, head_dim), the student's.
        contexts: of its schemes.
        weights: (batch, heads, query, key), the original's; 0 for queries that are padding.
        target: the original's scores, but for a constant per query.
    """

    attention: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    contexts: list[AttentionContext]
    weights: torch.Tensor
    target: torch.Tensor

    def scores(self) -> torch.Tensor:
        """The student's scores, a function of its position parameters."""
        content_query, terms = self.attention.ask(self.query, self.key, self.contexts)
        scores = content_query @ self.key.transpose(-1, -2) * self.attention.scaling
        return scores + score_bias(self.query, self.key, terms)

    def gradient(self) -> tuple[float, torch.Tensor, torch.Tensor]:
        """Half the weighted squared error, the scores, and its gradient by them."""
        scores = self.scores()
        error = scores.detach() - self.target
        # The best constant of a query is the weighted mean, as its weights sum to 1.
        error -= (self.weights * error).sum(-1, keepdim=True)
        gradient = self.weights * error
        return 0.5 * float((gradient * error).sum()), scores, gradient


def observe(student: LayerByLayer, layer: int, batch: int, weights: torch.Tensor, mask: torch.Tensor) -> Observation:
    """The student's queries and keys in a layer, and the weights (batch, heads, query, key) of the original there."""
    attention = student.family.self_attention_of(student.layers[layer])
    state = student.arguments(layer, batch)[1]["position_state"]
    query, key, _, contexts = attention.project(student.hidden_states[batch], None, state)
    target = weights.clamp(min=SMALLEST_WEIGHT).log()
    return Observation(attention, query, key, contexts, weights * mask[:, None, :, None], target)


class Fit:
    """Parameters that minimise the weighted squared error of scores, with a small ridge around their start.

    They are changed in coordinates in which they all matter about as much: rows of a table that few pairs look up, and
    features that hardly vary, would be learned last otherwise.
    """

    def __init__(self, parameters: list[nn.Parameter], observations: list[Observation], ridge: float = 1e-4):
        self.parameters, self.observations, self.ridge = parameters, observations, ridge
        self.total = sum(float(observation.weights.sum()) for observation in observations)
        self.start = self._flat(parameters)

    def _flat(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.detach().double().flatten() for tensor in tensors])

    def _set(self, values: torch.Tensor) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, values.split(sizes)):
            parameter.data.copy_(part.view_as(parameter))

    def error(self, values: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Half the mean squared error of the scores at some values of the parameters, and its gradient by them."""
        self._set(values)
        loss, gradients = 0.0, [torch.zeros_like(parameter) for parameter in self.parameters]
        for observation in self.observations:
            with torch.enable_grad():
                half, scores, gradient = observation.gradient()
            parts = torch.autograd.grad(scores, self.parameters, gradient, allow_unused=True)
            loss += half
            for total, part in zip(gradients, parts):
                if part is not None:
                    total += part
        return loss / self.total, self._flat(gradients) / self.total

    def scale(self, probes: int = 2) -> torch.Tensor:
        """1/sqrt of the curvature by each parameter, estimated with random signs, for tables as a row times a column."""
        _, here = self.error(self.start)
        curvature = torch.zeros_like(here)
        generator = torch.Generator().manual_seed(0)
        for _ in range(probes):
            signs = torch.randint(0, 2, here.shape, generator=generator).double() * 2 - 1
            curvature += signs * (self.error(self.start + signs)[1] - here) / probes
        scales = []
        for part, parameter in zip(curvature.split([p.numel() for p in self.parameters]), self.parameters):
            part = part.view(parameter.shape if parameter.dim() == 2 else (1, -1)).clamp(min=0)
            rows, columns, mean = part.mean(1, keepdim=True), part.mean(0, keepdim=True), part.mean()
            smooth = rows * columns / mean.clamp(min=1e-30)
            scales.append((smooth + 1e-4 * mean).clamp(min=1e-30).rsqrt().flatten() * (mean > 0))
        return torch.cat(scales)

    def run(self, steps: int) -> float:
        """Minimise; returns half the mean squared error."""
        scale = self.scale()
        moved = torch.zeros_like(self.start, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [moved], max_iter=steps, history_size=20, line_search_fn="strong_wolfe", tolerance_change=1e-9
        )

        def closure() -> float:
            loss, gradient = self.error(self.start + scale * moved.detach())
            moved.grad = gradient * scale + self.ridge * moved.detach()
            return loss + 0.5 * self.ridge * float(moved.detach().square().sum())

        optimizer.step(closure)
        self._set(self.start + scale * moved.detach())
        return self.error(self.start + scale * moved.detach())[0]


@contextmanager
def showing_weights(model: nn.Module) -> Iterator[None]:
    """A stock model computes its attention such that the weights are seen, and without dropout."""
    implementation, training = model.config._attn_implementation, model.training
    model.set_attn_implementation("eager")
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)
        model.train(training)


@torch.no_grad()
def calibrate(student: nn.Module, teacher: nn.Module, batches: list[dict[str, torch.Tensor]], steps: int = 20) -> None:
    family: Family = student.config.family
    if {*scheme_names(family.native_scheme)} <= {*scheme_names(student.config.position_scheme)}:
        return
    training = student.training
    student.eval()
    with showing_weights(teacher):
        original, own = (LayerByLayer(model.base_model, family, batches) for model in (teacher, student))
        for layer in range(len(own.layers)):
            attention = family.self_attention_of(own.layers[layer])
            parameters = [m.weight for m in attention.modules() if "position_initial" in vars(m)]
            observations = []
            for index, batch in enumerate(batches):
                weights = original.run_for_weights(layer, index)
                observations.append(observe(own, layer, index, weights, batch["attention_mask"]))
            fit = Fit(parameters, observations)
            before = fit.error(fit.start)[0]
            after = fit.run(steps)
            logger.info(f"layer {layer}: error of the scores {before:.4f} -> {after:.4f}")
            for index in range(len(batches)):
                own.run(layer, index)
    student.train(training)
