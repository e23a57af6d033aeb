"""The four terms: how much of an attention score comes from tokens alone, and how much from positions.

In the first layer query and key are linear in x + p, word and position, once the statistics of the embedding's LayerNorm are
fixed (they depend on word and position both, so that each part is scaled by its whole token): (W_q(x+p))·(W_k(y+f)) is the
sum of word-word, word-position, position-word and position-position. Token types and biases, and the means of words and of positions,
make a third, constant part. The nine terms sum to the score.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ..modeling.schemes.parameters import without_bias
from . import style
from .access import Subject, heads_of, study
from .progress import steps
from .records import Record


WORD, POSITION, CONSTANT = "word", "position", "constant"
SOURCES = (WORD, POSITION, CONSTANT)


@torch.no_grad()
def inputs_by_source(subject: Subject, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The first layer's input as the sum of what comes from words, from positions, and from neither.

    The embedding e = x + p + t (word, position, token type) goes through LayerNorm: γ (e - mean e)/σ + β. With σ as it is for
    each token, this is a sum of a part of x, one of p and one of t; γ t/σ differs between tokens by its σ alone and is counted with
    the word but for its mean. Words and positions are centred over all tokens of the batch, their means are constant.

    Args:
        input_ids: (batch, length), without padding.

    Returns:
        By source, (batch, length, hidden_size) each.

    Raises:
        ValueError: positions are combined with token embeddings in another way than by a sum.
    """
    embeddings = subject.embeddings
    words = embeddings.words(input_ids)
    positions = torch.zeros_like(words)
    constant = torch.zeros_like(words)
    if embeddings.position_scheme is not None:
        nothing = torch.zeros_like(words)
        constant = subject.combine(nothing, nothing)
        words = subject.combine(words, nothing) - constant
        positions = subject.added(subject.vectors_in_text(input_ids).expand_as(words))
    types = embeddings.types(None, words)
    constant = constant if types is None else constant + types

    norm = embeddings.LayerNorm
    whole = words + positions + constant
    deviation = (whole.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    words, positions, constant = (
        norm.weight * (part - part.mean(-1, keepdim=True)) / deviation for part in (words, positions, constant)
    )
    means = [part.mean((0, 1)) for part in (words, positions, constant)]
    words = words - means[0] + (constant - means[2])
    positions = positions - means[1]
    constant = (sum(means) + norm.bias).expand_as(words)
    if subject.projection is not None:
        words, positions = without_bias(subject.projection, words), without_bias(subject.projection, positions)
        constant = subject.projection(constant)
    return {WORD: words, POSITION: positions, CONSTANT: constant}


@torch.no_grad()
def nine_terms(subject: Subject, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The content score of the first layer as nine terms (batch, heads, query, key).

    Args:
        input_ids: (batch, length), without padding.

    Returns:
        By name: "word-position" is the product of the query's word and the key's position.
    """
    attention = subject.attentions[0]
    parts = {
        source: heads_of(attention, part, biases=source == CONSTANT)
        for source, part in inputs_by_source(subject, input_ids).items()
    }
    return {
        f"{asking}-{asked}": query @ key.transpose(-1, -2) * attention.scaling
        for asking, (query, _) in parts.items()
        for asked, (_, key) in parts.items()
    }


@dataclass(frozen=True)
class LayerTerms(Record):
    """The terms of a layer's attention score, and their shares of its variance over keys.

    Softmax depends only on differences between keys. So terms that do not depend on the key are left out.

    Attributes:
        layer: the layer's number, from 0.
        terms: their names. In the first layer, "word-position" is the product of the query's token and the key's position, and so on. In other
            layers, `content` is the product of query and key. The others are the terms of schemes, as in [`LayerScores`].
        covariances: (heads, terms, terms), the covariances of terms over keys, as shares of the variance of the whole score. Those of an
            attention head sum to 1.
        positional: names of the terms that depend on the key's position.
        position_share: (heads,), variance of the sum of these terms, as a share of the variance of the whole score.
    """

    layer: int
    terms: list[str]
    covariances: np.ndarray
    positional: list[str]
    position_share: np.ndarray

    @property
    def shares(self) -> np.ndarray:
        """Variance of each term as a share of that of the whole score, (heads, terms). They need not sum to 1."""
        return np.diagonal(self.covariances, axis1=1, axis2=2)

    def to_dict(self) -> dict:
        return super().to_dict() | {"shares": self.shares.tolist()}


@dataclass(frozen=True)
class ScoreTerms(Record):
    """The terms of a model's attention scores. The result of [`score_terms`].

    Attributes:
        model: the model's name.
        scheme: its `position_scheme`.
        layers: a [`LayerTerms`] for the first layer, and for each other layer whose schemes have score terms.
        largest_error: the largest difference between the sum of the nine terms and the content score of the first layer.
    """

    model: str
    scheme: str
    layers: list[LayerTerms]
    largest_error: float

    @property
    def position_heads(self) -> list[int]:
        """Attention heads of the first layer, from 0, in which terms with the key's position have more than half of the variance."""
        return np.flatnonzero(self.layers[0].position_share > 0.5).tolist()

    def to_dict(self) -> dict:
        return super().to_dict() | {"position_heads": self.position_heads}


@torch.no_grad()
def score_terms(
    model: "Subject | str", texts: Iterable[str] | torch.Tensor | None = None, length: int = 128, count: int = 8
) -> ScoreTerms:
    """Split attention scores into terms of tokens and terms of positions, on text.

    In the first layer, query and key are linear in token embedding, position and a constant part (biases, token types and means), once the
    LayerNorm of each token is fixed. So the content score is the sum of nine products, such as "word-position". Terms of schemes come on top.

    Args:
        model: what [`study`] takes.
        texts: strings, or token ids (batch, length). Default: chapters of the Python language reference.
        length: number of tokens to which a text is truncated, special tokens counted.
        count: number of chapters, if `texts` is not given.

    Raises:
        ValueError: the model has no tokenizer or is not a checkpoint, a text is empty, or positions are combined with token embeddings by
            something else than a sum.
    """
    subject = study(model)
    subject.check_trained("splitting scores into terms")
    sums: dict[int, tuple[list[str], torch.Tensor]] = {}
    largest_error = 0.0
    batches = [some for batch in subject.batches(texts, length, count) for some in batch.split(4)]
    for input_ids in steps(batches, "batch"):
        observed = subject.observe(input_ids, range(len(subject.layers))).layers
        for number, scores in observed.items():
            parts = dict(scores.parts)
            if number == 0:
                nine = nine_terms(subject, input_ids)
                error = (sum(nine.values()) - parts.pop("content")).abs().max()
                largest_error = max(largest_error, float(error))
                parts = {name: part for name, part in nine.items() if not name.endswith(CONSTANT)} | parts
            if len(parts) > 1:
                names, covariances = _covariances(parts)
                previous = sums[number][1] if number in sums else 0.0
                sums[number] = names, previous + covariances
    layers = [_layer_terms(number, names, covariances) for number, (names, covariances) in sums.items()]
    return ScoreTerms(subject.name, subject.scheme, layers, largest_error)


def _covariances(parts: dict[str, torch.Tensor]) -> tuple[list[str], torch.Tensor]:
    """Sums over texts, queries and keys of products of parts that are centred over keys, (heads, terms, terms)."""
    shape = torch.broadcast_shapes(*(part.shape for part in parts.values()))
    # (terms, batch, heads, query, key)
    stacked = torch.stack([part.expand(shape) for part in parts.values()]).double()
    stacked = stacked - stacked.mean(-1, keepdim=True)
    flat = stacked.permute(2, 0, 1, 3, 4).flatten(2)  # (heads, terms, the rest)
    return list(parts), flat @ flat.transpose(1, 2)


def _layer_terms(number: int, names: list[str], sums: torch.Tensor) -> LayerTerms:
    covariances = (sums / sums.sum((1, 2), keepdim=True)).numpy()
    positional = [name for name in names if _has_position_of_key(name)]
    chosen = [names.index(name) for name in positional]
    return LayerTerms(number, names, covariances, positional, covariances[:, chosen][:, :, chosen].sum((1, 2)))


def _has_position_of_key(name: str) -> bool:
    asking, _, asked = name.rpartition("-")
    return asked == POSITION if asking in SOURCES else name.split()[-1] not in ("content", "u")


@style.styled
def plot_score_terms(data: ScoreTerms) -> style.Figure:
    """The share of the variance of each term, for each attention head of the first layer and for each other layer."""
    first, others = data.layers[0], data.layers[1:]
    heights = [0.28 * len(first.shares) + 1.2] + ([0.28 * len(others) + 1.2] if others else [])
    figure, axes = style.panels(
        len(heights), 1, height=sum(heights) / len(heights), gridspec_kw={"height_ratios": heights}
    )
    columns = [*first.terms, "all with the\nkey's position"]
    values = np.column_stack([first.shares, first.position_share])
    rows = [f"head {head + 1}" for head in range(len(values))]
    _plot_shares(axes[0, 0], values, rows, columns)
    axes[0, 0].set_title(f"{data.model}, layer 1: share of the variance of scores over keys (query-key)")
    if others:
        values = np.stack([np.append(layer.shares.mean(0), layer.position_share.mean()) for layer in others])
        rows = [f"layer {layer.layer + 1}" for layer in others]
        _plot_shares(axes[1, 0], values, rows, [*others[0].terms, "all with the\nkey's position"])
        axes[1, 0].set_title("other layers, mean over heads")
    return figure


def _plot_shares(axis, values: np.ndarray, rows: list[str], columns: list[str]) -> None:
    """A heatmap with its numbers written in."""
    style.heatmap(axis, values, diverging=False, vmin=0, vmax=1)
    axis.set_xticks(range(len(columns)), [name.replace("-", "-\n") for name in columns])
    axis.set_yticks(range(len(rows)), rows)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    for (row, column), value in np.ndenumerate(values):
        axis.text(
            column,
            row,
            f"{value:.2f}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if value < 0.6 else "black",
        )


def describe_score_terms(data: ScoreTerms) -> str:
    """Say in a sentence which terms are largest in the first layer, and in which attention heads positions have most of the variance."""
    first = data.layers[0]
    mean = dict(zip(first.terms, first.shares.mean(0)))
    largest = sorted(mean, key=mean.get, reverse=True)[:3]
    said = ", ".join(f"{name} {mean[name]:.0%}" for name in largest)
    heads = ", ".join(str(head + 1) for head in data.position_heads)
    count = len(data.position_heads)
    which = f"{count} of {len(first.shares)} heads ({heads})" if count else "no head"
    return (
        f"In layer 1 of {data.model}, the largest shares of the variance over keys are {said} (mean of the heads; names are query-key, and constant is "
        f"what all tokens have in common). In {which}, the terms with the key's position have more than half of it."
    )
