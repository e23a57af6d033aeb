"""How many dimensions change with the position?

The claim: only about half of a sinusoid's dimensions change over the usual lengths of texts, so adding it to the token embeddings is
nearly a concatenation.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..modeling.schemes.sinusoidal import sinusoids
from . import style
from .access import Subject, check_varied, study
from .averages import covariance
from .records import Record


@dataclass(frozen=True)
class Movement(Record):
    """How much each dimension of position vectors changes with the position, over several spans of positions.

    Attributes:
        name: "sinusoids", or the model's name.
        spans: the spans, (first position, last position + 1).
        change: (spans, width), the standard deviation over the positions of a span.
        typical: the standard deviation over all positions, as root mean square over dimensions.
        moving: (spans,), the share of dimensions whose standard deviation is at least `threshold` times the typical one.
        holding: (spans,), the smallest share of dimensions that has 95 % of the variance.
        directions: (spans,), the same for principal components: their number, divided by the width.
    """

    name: str
    spans: list[tuple[int, int]]
    change: np.ndarray
    typical: float
    moving: np.ndarray
    holding: np.ndarray
    directions: np.ndarray


@dataclass(frozen=True)
class MovingDimensions(Record):
    """How many dimensions change with the position, in a model and in sinusoids. The result of [`moving_dimensions`].

    Attributes:
        model: the model's name.
        threshold: share of the typical standard deviation from which a dimension counts as moving.
        tables: a [`Movement`] for sinusoids of the same width, then one for the model.
    """

    model: str
    threshold: float
    tables: list[Movement]


def moving_dimensions(
    model: "Subject | str", lengths: tuple[int, ...] = (64, 128, 512), threshold: float = 0.1
) -> MovingDimensions:
    """Measure how much each dimension of the position vectors changes over the first positions, and over the rest.

    Args:
        model: what [`study`] takes.
        lengths: numbers of first positions. Each gives a span, if the model has so many positions. A last span goes to the last position, from
            the largest of them that is less than the number of positions.
        threshold: share of the typical standard deviation from which a dimension counts as moving.

    Raises:
        ValueError: the model has no position vectors.
    """
    subject = study(model)
    vectors = subject.position_vectors().double()
    check_varied(subject.name, vectors)
    positions, width = vectors.shape
    classic = sinusoids(torch.arange(positions), width, 10000.0, "interleaved", torch.float64)
    spans = [(0, length) for length in sorted(lengths) if length <= positions] or [(0, positions)]
    start = max((length for length in lengths if length < positions), default=0)
    if (start, positions) not in spans:
        spans.append((start, positions))
    tables = [movement("sinusoids", classic, spans, threshold)]
    if subject.trained or subject.scheme != "sinusoidal":
        tables.append(movement(subject.name, vectors, spans, threshold))
    return MovingDimensions(subject.name, threshold, tables)


def movement(name: str, vectors: torch.Tensor, spans: list[tuple[int, int]], threshold: float = 0.1) -> Movement:
    """How much the dimensions of vectors (positions, width) change over spans of the positions."""
    change = torch.stack([vectors[first:last].std(0, correction=0) for first, last in spans]).numpy()
    holding, directions = [], []
    for first, last in spans:
        centred = vectors[first:last] - vectors[first:last].mean(0)
        holding.append(_share_holding(centred.square().sum(0).numpy(), vectors.shape[1]))
        directions.append(_share_holding(torch.linalg.svdvals(centred).square().numpy(), vectors.shape[1]))
    typical = float(vectors.var(0, correction=0).mean().sqrt())
    moving = (change >= threshold * typical).mean(1)
    return Movement(name, spans, change, typical, moving, np.array(holding), np.array(directions))


@dataclass(frozen=True)
class WordsBesidePositions(Record):
    """Which dimensions differ between tokens, and which change with the position. The result of [`words_beside_positions`].

    Attributes:
        model: the model's name.
        width: number of dimensions.
        word_rms: root mean square of the token embeddings, each row of the matrix counted once.
        position_rms: root mean square of what positions add.
        word_deviation: root mean square of the token embeddings without their mean.
        position_deviation: root mean square of what positions add, without its mean.
        moved: number of dimensions that change with the position: their standard deviation is at least `threshold` times the typical one.
        used: number of dimensions that differ between tokens, by the same rule.
        both: number of dimensions in `moved` and in `used`.
        words_in_moved: share of the token embeddings' variance in the dimensions of `moved`.
        word_directions: number of principal components with 95 % of the token embeddings' variance.
        position_directions: number of principal components with 95 % of the positions' variance.
    """

    model: str
    width: int
    word_rms: float
    position_rms: float
    word_deviation: float
    position_deviation: float
    moved: int
    used: int
    both: int
    words_in_moved: float
    word_directions: int
    position_directions: int


def words_beside_positions(model: "Subject | str", threshold: float = 0.1) -> WordsBesidePositions:
    """Compare the dimensions that differ between tokens with those that change with the position.

    Args:
        model: what [`study`] takes.
        threshold: share of the typical standard deviation from which a dimension counts.

    Raises:
        ValueError: the model adds no position vectors to its token embeddings, or is not a checkpoint.
    """
    subject = study(model)
    subject.check_trained("comparing token embeddings and positions")
    words, positions = subject.word_vectors, subject.added_positions()
    check_varied(subject.name, positions)
    variances = [vectors.double().var(0, correction=0) for vectors in (words, positions)]
    used, moved = (own.sqrt() >= threshold * own.mean().sqrt() for own in variances)
    directions = [
        round(width * _share_holding(torch.linalg.eigvalsh(covariance(vectors)).clamp(min=0).numpy(), width))
        for vectors, width in ((words, words.shape[1]), (positions, words.shape[1]))
    ]
    return WordsBesidePositions(
        subject.name,
        words.shape[1],
        *(float(vectors.double().square().mean().sqrt()) for vectors in (words, positions)),
        *(float(own.mean().sqrt()) for own in variances),
        moved=int(moved.sum()),
        used=int(used.sum()),
        both=int((moved & used).sum()),
        words_in_moved=float(variances[0][moved].sum() / variances[0].sum()),
        word_directions=directions[0],
        position_directions=directions[1],
    )


def _share_holding(variances: np.ndarray, width: int) -> float:
    """The smallest number of the variances that make up 95 % of their sum, over width."""
    cumulated = np.sort(variances)[::-1].cumsum()
    if cumulated[-1] == 0:
        return 0.0
    return float(np.searchsorted(cumulated, 0.95 * cumulated[-1] * (1 - 1e-12)) + 1) / width


def _span_name(span: tuple[int, int]) -> str:
    return f"first {span[1]}" if span[0] == 0 else f"{span[0]} to {span[1]}"


@style.styled
def plot_moving_dimensions(data: MovingDimensions) -> style.Figure:
    """The standard deviation of each dimension over each span of positions, sorted for each span."""
    figure, axes = style.panels(1, len(data.tables), height=3.5, sharex=True)
    for axis, table in zip(axes[0], data.tables):
        colours = style.shades(len(table.spans))
        width = table.change.shape[1]
        for span, change, share, colour in zip(table.spans, table.change, table.moving, colours):
            dashed = {"linestyle": "--"} if span[0] else {}
            axis.plot(
                np.arange(1, width + 1),
                np.sort(change)[::-1],
                color=colour,
                label=f"{_span_name(span)}: {share:.0%}",
                **dashed,
            )
        axis.axhline(data.threshold * table.typical, color="0.6", linewidth=0.9, linestyle=":")
        axis.set(xlabel="dimension, sorted for each span", title=table.name, yscale="log")
        axis.set_ylim(1e-3 * table.typical, 2 * table.change.max())
        axis.legend(title="positions: share that changes", loc="lower left")
    axes[0, 0].set_ylabel("standard deviation over positions")
    return figure


def describe_moving_dimensions(data: MovingDimensions) -> str:
    """Say in a sentence which share of the dimensions changes over each span."""
    said = []
    for table in data.tables:
        shares = ", ".join(
            f"{share:.0%} over {'the ' if not span[0] else 'positions '}{_span_name(span)}"
            for span, share in zip(table.spans, table.moving)
        )
        whole = max(range(len(table.spans)), key=lambda index: table.spans[index][1] - table.spans[index][0])
        said.append(
            f"of {table.name} {shares} change; over the {_span_name(table.spans[whole])}, {table.holding[whole]:.0%} of the dimensions "
            f"hold 95 % of the variance, and {table.directions[whole]:.1%} of the principal components do"
        )
    claim = data.tables[0].moving[0]
    verdict = "holds for sinusoids" if 0.35 <= claim <= 0.65 else "does not hold for sinusoids"
    if len(data.tables) > 1:
        own = data.tables[1].moving[0]
        verdict += " and " + ("holds" if 0.35 <= own <= 0.65 else "does not hold") + f" for {data.tables[1].name}"
    return f"The claim that only about half of the dimensions change {verdict}: {'; '.join(said)}."
