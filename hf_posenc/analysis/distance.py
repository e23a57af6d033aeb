"""How does the attention score depend on the distance?"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from . import style
from .access import LayerScores, Subject, study
from .records import Record


COLUMNS = 4


@dataclass(frozen=True)
class Curves(Record):
    """A part of the attention score for each distance and attention head.

    Attributes:
        part: its name in [`LayerScores`]. `content` is the whole score of a model without positions inside the attention.
        distances: (distances,), key - query.
        mean: (heads, distances), the mean over all pairs of tokens at a distance.
        lower: (heads, distances), the lower quartile.
        upper: (heads, distances), the upper quartile.
        is_bias: True if the value depends on the distance only.
    """

    part: str
    distances: np.ndarray
    mean: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    is_bias: bool


@dataclass(frozen=True)
class ScoreByDistance(Record):
    """What positions add to a layer's attention score, for each distance. The result of [`score_by_distance`].

    Attributes:
        model: the model's name.
        scheme: its `position_scheme`.
        layer: the layer's number, from 0.
        curves: a [`Curves`] for each part of the score.
    """

    model: str
    scheme: str
    layer: int
    curves: list[Curves]


def score_by_distance(
    model: "Subject | str",
    texts: Iterable[str] | torch.Tensor | None = None,
    layer: int = 0,
    max_distance: int | None = None,
    length: int = 128,
    count: int = 8,
) -> ScoreByDistance:
    """Measure what positions add to the attention score before softmax, for each distance key - query and each attention head.

    A relative position bias does not depend on the text. Products with relative position embeddings, and rotations, do: the result has their
    mean and quartiles over text. For a model without positions inside the attention, it has the whole score.

    Args:
        model: what [`study`] takes.
        texts: strings, or token ids (batch, length). Default: chapters of the Python language reference.
        layer: the layer's number, from 0.
        max_distance: largest distance, in tokens. Default: 64, or less if the texts are shorter.
        length: number of tokens to which a text is truncated, special tokens counted.
        count: number of chapters, if `texts` is not given.

    Raises:
        ValueError: there is no such layer or distance, or the score depends on the text and the model has no tokenizer.
    """
    subject = study(model)
    layers = len(subject.layers)
    if not 0 <= layer < layers:
        raise ValueError(f"layer must be from 0 to {layers - 1} for {subject.name}, got {layer}")
    without_words = texts is None and subject.tokenizer is None
    batches = [subject.any_ids(length)] if without_words else subject.batches(texts, length, count)
    longest = max(ids.shape[1] for ids in batches)
    max_distance = min(64, longest - 1) if max_distance is None else max_distance
    if not 1 <= max_distance < longest:
        raise ValueError(
            f"max_distance must be from 1 to {longest - 1}, the longest text less one, got {max_distance}"
        )
    observed = [subject.observe(ids, [layer], until=layer + 1).layers[layer] for ids in batches]
    names = [name for name in observed[0].parts if name.split()[-1] not in ("content", "u")] or ["content"]
    if without_words and not all(name in observed[0].terms and _is_free_of_words(observed[0], name) for name in names):
        raise ValueError(
            f"{subject.name}: scores of position_scheme={subject.scheme!r} depend on the text: use a checkpoint with a tokenizer"
        )
    curves = []
    for name in names:
        statistics = _by_distance([scores.parts[name] for scores in observed], max_distance)
        term = observed[0].terms.get(name)
        is_bias = term is not None and term.rows is not None and term.bias is not None and term.rows.dim() == 1
        curves.append(Curves(name, np.arange(-max_distance, max_distance + 1), *statistics, is_bias))
    return ScoreByDistance(subject.name, subject.scheme, layer, curves)


def _is_free_of_words(scores: LayerScores, name: str) -> bool:
    return not scores.terms[name].reads_content


def _by_distance(parts: list[torch.Tensor], max_distance: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and quartiles of (batch, heads, query, key) over the pairs of each distance, each (heads, distances)."""
    columns = []
    for distance in range(-max_distance, max_distance + 1):
        reaching = [part for part in parts if part.shape[-1] > abs(distance)]
        # (heads, batch · pairs)
        values = torch.cat(
            [part.diagonal(distance, -2, -1).transpose(0, 1).flatten(1) for part in reaching], dim=1
        ).double()
        quartiles = values.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64), dim=1)
        columns.append(torch.stack([values.mean(1), *quartiles]))
    mean, lower, upper = torch.stack(columns, dim=-1).numpy()
    return mean, lower, upper


@style.styled
def plot_score_by_distance(data: ScoreByDistance) -> style.Figure:
    """What positions add to the score at each distance: a line for each head, or a panel with quartiles if it depends on the text."""
    heights = [3.3 if curves.is_bias else 1.5 * -(-len(curves.mean) // COLUMNS) + 0.5 for curves in data.curves]
    whole = style.sheet(sum(heights))
    for part, curves in zip(
        whole.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0], data.curves
    ):
        what = "score of tokens and positions together" if curves.part == "content" else curves.part
        style.title(
            part, f"{data.model}, layer {data.layer + 1}: {what}" + ("" if curves.is_bias else ", mean and quartiles")
        )
        (_plot_lines if curves.is_bias else _plot_panels)(part, curves)
        part.supxlabel("distance (key − query)", fontsize=10)
    return whole


def _plot_lines(part, curves: Curves) -> None:
    axis = part.subplots()
    for head, colour in enumerate(style.shades(len(curves.mean))):
        axis.plot(curves.distances, curves.mean[head], color=colour, linewidth=1.4, label=str(head + 1))
    axis.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    axis.set_ylabel("score")
    columns = 1 if len(curves.mean) <= 12 else 2
    axis.legend(title="head", loc="center left", bbox_to_anchor=(1, 0.5), ncols=columns)


def _plot_panels(part, curves: Curves) -> None:
    axes = part.subplots(-(-len(curves.mean) // COLUMNS), COLUMNS, sharex=True, squeeze=False)
    for head, axis in enumerate(axes.flat):
        if head >= len(curves.mean):
            axis.set_visible(False)
            continue
        axis.fill_between(
            curves.distances, curves.lower[head], curves.upper[head], color=style.BLUE, alpha=0.25, linewidth=0
        )
        axis.plot(curves.distances, curves.mean[head], color=style.BLUE, linewidth=1.1)
        axis.axvline(0, color="0.8", linewidth=0.8, zorder=0)
        axis.set_title(f"head {head + 1}", fontsize=9)


def describe_score_by_distance(data: ScoreByDistance) -> str:
    """Say in a sentence how much scores vary with the distance, in which attention head most, and whether left and right differ."""
    said = []
    for curves in data.curves:
        swing = curves.mean.max(1) - curves.mean.min(1)
        spread = float(np.median(curves.upper - curves.lower))
        middle = len(curves.distances) // 2
        sides = curves.mean[:, :middle][:, ::-1] - curves.mean[:, middle + 1 :]
        top, one_sided = int(swing.argmax()), int(np.abs(sides).max(1).argmax())
        name = "the whole score" if curves.part == "content" else curves.part
        line = f"{name} varies by {swing.min():.2g} to {swing.max():.2g} with the distance (most in head {top + 1})"
        if not curves.is_bias:
            line += f", compared with {spread:.2g} between the quartiles at one distance"
        line += f", and left differs from right by up to {np.abs(sides).max():.2g} (head {one_sided + 1})"
        said.append(line)
    return f"In layer {data.layer + 1} of {data.model}, {'; '.join(said)}."
