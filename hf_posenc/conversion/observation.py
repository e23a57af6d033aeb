"""Look at a model layer by layer: inputs, queries and attention weights of its self-attentions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_posenc.modeling.attention.backends import score_bias
from hf_posenc.modeling.models.family import Family
from hf_posenc.modeling.schemes.base import AttentionContext


# Inputs as a tokenizer gives them: `input_ids` and `attention_mask`, (batch, length) each.
Batch = dict[str, torch.Tensor]
# What a layer is given in addition to its input: arguments and keywords.
Arguments = tuple[tuple, dict[str, Any]]
# What weighs less is as good as nothing, whose logarithm is not finite.
SMALLEST_WEIGHT = 1e-30


class _Reached(Exception):
    """The forward pass is where it was wanted."""


class LayerByLayer:
    """A base model whose layers are run one at a time, all batches through each.

    Attributes:
        family: the family's description.
        layers: of the model's encoder.
        hidden_states: by batch, (batch, length, hidden), the input of the next layer.
    """

    def __init__(self, model: nn.Module, family: Family, batches: list[Batch]):
        self.family = family
        self.layers = family.layers_of(family.encoder_of(model))
        self.hidden_states: list[torch.Tensor] = []
        # By batch, what the first layer is given, and what all others are.
        self._arguments: list[list[Arguments]] = []
        for batch in batches:
            calls = self._calls(model, batch)
            self.hidden_states.append(calls[0][0][0])
            self._arguments.append([(arguments[1:], keywords) for arguments, keywords in calls])

    def _calls(self, model: nn.Module, batch: Batch) -> list[Arguments]:
        """With what the first layer is called, and the second, if there is one."""
        calls: list[Arguments] = []
        watched = self.layers[:2]

        def note(layer: nn.Module, arguments: tuple, keywords: dict) -> None:
            calls.append((arguments, keywords))
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

    def arguments(self, layer: int, batch: int) -> Arguments:
        """What a layer is given in addition to its input."""
        calls = self._arguments[batch]
        return calls[min(layer, len(calls) - 1)]

    def attention(self, layer: int) -> nn.Module:
        """A layer's self-attention."""
        return self.family.self_attention_of(self.layers[layer])

    def run(self, layer: int, batch: int) -> None:
        """Put a layer's output in place of its input."""
        arguments, keywords = self.arguments(layer, batch)
        output = self.layers[layer](self.hidden_states[batch], *arguments, **keywords)
        self.hidden_states[batch] = output[0] if isinstance(output, tuple) else output

    def run_for_weights(self, layer: int, batch: int) -> torch.Tensor:
        """Put a layer's output in place of its input, and return its attention weights, (batch, heads, query, key)."""
        weights = []

        def note(attention: nn.Module, arguments: tuple, output: tuple) -> None:
            weights.append(output[1])

        keywords = self.arguments(layer, batch)[1]
        if "output_attentions" in keywords:  # elsewhere eager attention gives the weights unasked
            keywords["output_attentions"] = True
        hook = self.attention(layer).register_forward_hook(note)
        try:
            self.run(layer, batch)
        finally:
            hook.remove()
        return weights[0]


@contextmanager
def undisturbed(model: nn.Module, implementation: str | None = None) -> Iterator[None]:
    """A model evaluated without dropout, its attention computed by another implementation if one is named."""
    training, usual = model.training, model.config._attn_implementation
    model.eval()
    if implementation not in (None, usual):
        model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.train(training)
        if implementation not in (None, usual):
            model.set_attn_implementation(usual)


@dataclass
class AttentionComparison:
    """A batch in one layer: the student's queries and keys, and the teacher's attention weights.

    Attributes:
        attention: the student's self-attention.
        project: gives its query and key, (batch, heads, length, head_dim), and the contexts of its schemes.
        weights: (batch, heads, query, key), the original's; 0 for queries that are padding.
        attended: (batch, 1, query, key), whether there is something to attend to.
        logarithms: of the weights, (batch, heads, query, key).
        padding: (batch, 1, query, 1), whether a query is; None where none is.
    """

    attention: nn.Module
    project: Callable[[], tuple[torch.Tensor, torch.Tensor, list[AttentionContext]]]
    weights: torch.Tensor
    attended: torch.Tensor

    def __post_init__(self) -> None:
        self.logarithms = self.weights.clamp(min=SMALLEST_WEIGHT).log()
        padding = ~self.weights.any(1, keepdim=True).any(-1, keepdim=True)
        self.padding = padding if padding.any() else None
        self._hidden = None if self.attended.all() else ~self.attended

    def scores(self) -> torch.Tensor:
        """The student's scores, (batch, heads, query, key), a function of its parameters."""
        query, key, contexts = self.project()
        content_query, terms = self.attention.score_terms(query, key, contexts)
        scores = content_query @ key.transpose(-1, -2) * self.attention.scaling
        bias = score_bias(query, key, terms)
        return scores if bias is None else scores + bias

    def _logarithms(self, scores: torch.Tensor) -> torch.Tensor:
        """Logarithms of the weights that scores give."""
        if self._hidden is not None:
            scores = scores.masked_fill(self._hidden, torch.finfo(scores.dtype).min)
        return scores.log_softmax(-1)

    def divergence(self, scores: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Kullback-Leibler divergence of attention by these scores from the original's, and its gradient by them.

        Near the original's scores it is half the weighted squared error of the scores, the weights being the original's and a
        constant for each query being free.

        Args:
            scores: (batch, heads, query, key).

        Returns:
            The sum over queries, and (batch, heads, query, key).
        """
        found = self._logarithms(scores)
        divergence = torch.dot(self.weights.flatten(), (self.logarithms - found).flatten())
        return float(divergence), self._weights(found).sub_(self.weights)

    def difference(self, scores: torch.Tensor) -> torch.Tensor:
        """Squared difference of attention by these scores from the original's, (heads,): bounded where scores are far off."""
        return self._weights(self._logarithms(scores)).sub_(self.weights).square_().sum((0, 2, 3))

    def _weights(self, logarithms: torch.Tensor) -> torch.Tensor:
        """Attention weights by their logarithms, which are overwritten; 0 for queries that are padding."""
        weights = logarithms.exp_()
        return weights if self.padding is None else weights.masked_fill_(self.padding, 0.0)


def observe(
    student: LayerByLayer, layer: int, index: int, weights: torch.Tensor, batch: Batch, again: bool = False
) -> AttentionComparison:
    """A student's queries and keys in a layer, with the teacher's attention weights there, (batch, heads, query, key).

    Args:
        index: of the batch.
        again: project whenever scores are wanted, since the projections may have changed; otherwise once.
    """
    attention, hidden_states = student.attention(layer), student.hidden_states[index]
    state = student.arguments(layer, index)[1].get("position_state")

    def project() -> tuple[torch.Tensor, torch.Tensor, list[AttentionContext]]:
        query, key, _, contexts = attention.project(hidden_states, None, state)
        return query, key, contexts

    if not again:
        projected = project()
    window = attention.window_beside()
    if window is not None:  # the original's weights, of what the student can see
        weights = weights * window.pairs(*weights.shape[-2:], weights.device)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=SMALLEST_WEIGHT)
    attended = (weights > 0).any(1, keepdim=True)
    is_token = batch["attention_mask"].to(weights)[:, None, :, None]
    return AttentionComparison(attention, project if again else lambda: projected, weights * is_token, attended)
