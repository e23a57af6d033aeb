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
    """A part of the attention score against distance, per head.

    Attributes:
        part: as [`LayerScores`] names it; `content` is the whole score where positions are not inside the attention.
        distances: (distances,), key - query.
        mean, lower, upper: (heads, distances), mean and quartiles over texts and places.
        is_bias: all pairs at a distance have one value, whatever the words are.
    """

    part: str
    distances: np.ndarray
    mean: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    is_bias: bool


@dataclass(frozen=True)
class ScoreByDistance(Record):
    """The parts of a layer's attention score that positions have, against distance.

    Attributes:
        model: its name.
        scheme: its `position_scheme`.
        layer: its number, from 0.
        curves: one for each part.
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
    """What positions add to the score before softmax, against the distance key - query, a line per head.

    A bias does not depend on the text. Products of queries or keys with tables, and rotations, do: they are shown as mean and quartiles over real
    text. For a model without positions inside the attention, the whole score is shown.

    Args:
        model: what [`study`] takes.
        texts, length, count: as for [`Subject.batches`].
        layer: its number, from 0.
        max_distance: largest distance, by default 64, or less where the texts are shorter.

    Raises:
        ValueError: a layer or a distance that there is not; words are needed, and there is no tokenizer or no training.
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
    """Biases with a line for each head; what depends on words with a panel for each head, and quartiles over text."""
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
    """How much the distance matters, in which attention heads most, and whether left and right differ."""
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
