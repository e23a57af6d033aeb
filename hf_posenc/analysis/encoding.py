"""What does an encoding look like?

Vectors of positions, and biases and tables of distances, as maps; sines and cosines as the hands of clocks; how alike positions
are against distance. What score heads give against distance is in distance.py.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..modeling.schemes.sinusoidal import inverse_frequencies, sinusoids
from . import style
from .access import LayerScores, Subject, check_varied, study
from .edges import Edge, find_edge
from .records import Record


@dataclass(frozen=True)
class Map(Record):
    """A matrix that is drawn as a map.

    Attributes:
        what: what its values are.
        values: (rows, columns).
        rows: what a row is, such as "position".
        columns: what a column is, such as "dimension".
        first_row: number of the first row, such as -127 for distances.
        first_column: number of the first column.
        is_about_mean: True if the mean over rows is subtracted in the drawing, because it is the same at all positions.
    """

    what: str
    values: np.ndarray
    rows: str
    columns: str
    first_row: int = 0
    first_column: int = 0
    is_about_mean: bool = False

    @property
    def drawn(self) -> np.ndarray:
        """The values as they are drawn, (rows, columns)."""
        return self.values - self.values.mean(0) if self.is_about_mean else self.values


@dataclass(frozen=True)
class EncodingMaps(Record):
    """The position encodings of a model, as matrices. The result of [`encoding_maps`].

    Attributes:
        model: the model's name.
        scheme: its `position_scheme`.
        maps: one [`Map`] for the position vectors, and one for each part of the attention score that depends on positions.
    """

    model: str
    scheme: str
    maps: list[Map]


def sinusoid_map(positions: int = 128, width: int = 512, layout: str = "interleaved") -> Map:
    """The classic map of sinusoids, values between -1 and 1; layouts as for `position_layout`."""
    values = sinusoids(torch.arange(positions), width, 10000.0, layout, torch.float64)
    return Map(f"sinusoids, {layout}", values.numpy(), "position", "dimension")


def encoding_maps(model: "Subject | str", length: int | None = None) -> EncodingMaps:
    """Collect the position vectors, biases, relative position embeddings and rotations of a model's first layer as matrices.

    Args:
        model: what [`study`] takes. The name `sinusoidal` gives the sinusoids in both layouts.
        length: number of positions, at most those that the model has. Biases are shown up to the distance `length` - 1 on both sides. Default:
            128, and 512 rows of a position embedding matrix.

    Raises:
        ValueError: the model has no positions.
    """
    subject = study(model)
    ends = subject.longest is not None
    rows, length = length or (512 if ends else 128), length or 128
    rows, length = (min(number, subject.longest or number) for number in (rows, length))
    maps = []
    if subject.scheme == "sinusoidal" and not subject.trained:
        return EncodingMaps(
            subject.name, subject.scheme, [sinusoid_map(length, layout=x) for x in ("interleaved", "halves")]
        )
    if subject.has_vectors:
        vectors = subject.position_vectors(rows).numpy()
        learned = subject.embeddings.has_table
        maps.append(Map("position vectors", vectors, "position", "dimension", is_about_mean=learned))
    scores = subject.observe(subject.any_ids(length), [0], until=1).layers[0]
    maps += [_map_of_part(name, scores, length) for name in scores.terms]
    if "rotation" in scores.parts:
        maps.append(_map_of_rotation(subject, scores, length))
    if not maps:
        raise ValueError(f"{subject.name} has no positions: position_scheme is {subject.scheme!r}")
    return EncodingMaps(subject.name, subject.scheme, maps)


def _map_of_part(name: str, scores: LayerScores, length: int) -> Map:
    """A table or bias of the first layer, by distance where it is one of distances."""
    term = scores.terms[name]
    if term.rows is None or term.rows.dim() != 1:
        return Map(
            f"{name} of head 1", scores.parts[name][0, 0].numpy(), "position of the query", "position of the key"
        )
    if term.bias is not None:
        bias = term.bias[0] if term.differs_by_sequence else term.bias
        return Map(name, bias[:, term.rows].detach().numpy(), "head", "distance (key − query)", 1, 1 - length)
    table = term.query_table if term.query_table is not None else term.key_table
    asked, heads = ("queries" if term.query_table is not None else "keys"), table.shape[0]
    what = f"{name}: table multiplied by {asked}" + (", head 1" if heads > 1 else "")
    values = table[0, term.rows].detach().numpy()
    return Map(what, values, "distance (key − query)", "dimension of the head", 1 - length)


def _map_of_rotation(subject: Subject, scores: LayerScores, length: int) -> Map:
    """The angles of `rope`; of a custom scheme, what its rotation changes in scores."""
    by_name = {scheme.name: scheme for scheme in subject.encoder.position_schemes}
    if "rope" not in by_name:
        values = scores.parts["rotation"][0, 0].numpy()
        return Map("rotation of head 1", values, "position of the query", "position of the key")
    values = _rope_angles(subject, by_name["rope"], length).cos().numpy()
    return Map("cosine of the angle of rotation", values, "position", "pair of dimensions")


def _rope_angles(subject: Subject, rope, length: int) -> torch.Tensor:
    """(positions, pairs), float64; of frequencies that differ by layer and attention head, those of the first."""
    frequencies, _ = rope._inverse_frequencies(torch.device("cpu"), length)
    if rope.learn_frequencies == "shared":
        frequencies = frequencies * subject.encoder.rotary_frequencies().detach()
    elif rope.learn_frequencies:
        family = subject.encoder.family
        attention = family.self_attention_of(family.layers_of(subject.encoder)[0])
        frequencies = frequencies * attention.rotary_frequencies().detach()[0]
    return torch.arange(length, dtype=torch.float64)[:, None] * frequencies.to(torch.float64)


@style.styled
def plot_encoding_maps(data: EncodingMaps) -> style.Figure:
    """A heatmap of each matrix."""
    figure, axes = style.panels(len(data.maps), 1)
    for axis, drawn in zip(axes[:, 0], data.maps):
        rows, columns = drawn.values.shape
        extent = (
            drawn.first_column - 0.5,
            drawn.first_column + columns - 0.5,
            drawn.first_row + rows - 0.5,
            drawn.first_row - 0.5,
        )
        what = f"{drawn.what} minus their mean" if drawn.is_about_mean else drawn.what
        options = {}
        if drawn.is_about_mean:
            # A typical row sets the colours: the first of a learned table and its last are like no other.
            limit = float(np.median(np.quantile(np.abs(drawn.drawn), 0.99, axis=1))) or 1.0
            options = {"vmin": -limit, "vmax": limit, "extend": "both", "interpolation": "antialiased"}
        style.heatmap(axis, drawn.drawn, extent=extent, **options)
        axis.set(xlabel=drawn.columns, ylabel=drawn.rows, title=f"{data.model}: {what}")
    return figure


def describe_encoding_maps(data: EncodingMaps) -> str:
    """Say in a sentence which encodings the model has, their sizes and the root mean square of their values."""
    said = []
    for drawn in data.maps:
        rows, columns = drawn.values.shape
        size = f"{rows} × {columns}, root mean square {np.sqrt(np.mean(drawn.values**2)):.3g}"
        if drawn.is_about_mean:
            without = np.sqrt(np.mean(drawn.drawn**2))
            size += f", and {without:.3g} without the mean row, which is not drawn"
        said.append(f"{drawn.what} ({size})")
    return f"The positions of {data.model} ({data.scheme}) are {' and '.join(said)}."


@dataclass(frozen=True)
class ClockHands(Record):
    """The sines and cosines of a model as hands of clocks: each pair turns with the position. The result of [`clock_hands`].

    Attributes:
        model: the model's name.
        scheme: its `position_scheme`.
        wavelengths: (pairs,), the number of positions of one turn, the fastest pair first.
        angles: (pairs, positions), in radians.
    """

    model: str
    scheme: str
    wavelengths: np.ndarray
    angles: np.ndarray

    @property
    def turned(self) -> np.ndarray:
        """The number of turns that each pair makes over all positions, (pairs,)."""
        return self.angles.shape[1] / self.wavelengths


def clock_hands(model: "Subject | str", positions: int = 512) -> ClockHands:
    """Compute the angles of the sines and cosines in `sinusoidal`, `rope` or `transformer_xl`.

    Args:
        model: what [`study`] takes.
        positions: number of positions.

    Raises:
        ValueError: the model has none of these schemes.
    """
    subject = study(model)
    schemes = [subject.embeddings.position_scheme, *subject.encoder.position_schemes]
    by_name = {scheme.name: scheme for scheme in schemes if scheme is not None}
    if "sinusoidal" in by_name:
        scheme = by_name["sinusoidal"]
        width = scheme.width or subject.sizes.table_width
        if scheme.layout == "halves":  # tensor2tensor's spacing
            half = width // 2
            frequencies = torch.logspace(0, -1, half, scheme.base, dtype=torch.float64)
        else:
            frequencies = inverse_frequencies(width, scheme.base, torch.device("cpu"))
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * (scheme.frequency * frequencies)
    elif "rope" in by_name:
        scheme = by_name["rope"]
        angles = _rope_angles(subject, scheme, positions)
    elif "transformer_xl" in by_name:
        scheme = by_name["transformer_xl"]
        frequencies = inverse_frequencies(scheme.width, scheme.base, torch.device("cpu"))
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    else:
        raise ValueError(
            f"{subject.name} has no sines and cosines: position_scheme is {subject.scheme!r}; only sinusoidal, rope and "
            "transformer_xl have them"
        )
    # Learned frequencies may have any order and sign, and be 0: such a pair never turns.
    frequencies = (angles[1] - angles[0]).abs()
    wavelengths, order = (2 * torch.pi / frequencies).sort(stable=True)
    return ClockHands(subject.name, scheme.name, wavelengths.numpy(), angles.T[order].numpy())


@style.styled
def plot_clock_hands(data: ClockHands, count: int = 8, positions: int = 64) -> style.Figure:
    """Pairs of a sine and a cosine as clock hands, from fast to slow.

    Args:
        data: the result of [`clock_hands`].
        count: number of pairs.
        positions: number of first positions.
    """
    figure, axes = style.panels(2, (count + 1) // 2, height=2.4, subplot_kw={"aspect": "equal"})
    chosen = np.linspace(0, len(data.wavelengths) - 1, count).round().astype(int)
    positions = min(positions, data.angles.shape[1])
    for axis, pair in zip(axes.flat, chosen):
        circle = np.linspace(0, 2 * np.pi, 200)
        axis.plot(np.sin(circle), np.cos(circle), color="0.85", linewidth=1, zorder=0)
        angle = data.angles[pair, :positions]
        image = axis.scatter(
            np.sin(angle), np.cos(angle), c=np.arange(positions), s=14, cmap=style.SEQUENTIAL, zorder=2
        )
        last = angle[-1]
        axis.plot([0, np.sin(last)], [0, np.cos(last)], color="0.35", linewidth=1.2)
        axis.set(title=f"pair {pair + 1}: a turn in {_number(data.wavelengths[pair])}", xticks=[], yticks=[])
        axis.title.set_fontsize(9)
        axis.spines[:].set_visible(False)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    figure.colorbar(image, ax=axes, label="position", fraction=0.03, pad=0.02)
    style.title(figure, f"{data.model}: sines and cosines as clock hands, the first {positions} positions")
    return figure


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def describe_clock_hands(data: ClockHands) -> str:
    """Say in a sentence how many pairs make a turn, and how long one turn takes."""
    turned, pairs, length = data.turned, len(data.wavelengths), data.angles.shape[1]
    whole, hardly = int((turned >= 1).sum()), int((turned < 0.1).sum())
    return (
        f"Of the {pairs} sines and cosines of {data.model} ({data.scheme}), {whole} turn at least once within {length} positions and {hardly} less than a "
        f"tenth of a turn; one turn takes from {_number(data.wavelengths.min())} to {_number(data.wavelengths.max())} positions."
    )


@dataclass(frozen=True)
class PositionSimilarity(Record):
    """The cosine similarity of the vectors of each two positions. The result of [`position_similarity`].

    Attributes:
        model: the model's name.
        cosines: (positions, positions), of the vectors without their mean.
        distances: (distances,), from 0.
        median: (distances,), the median of the cosines at each distance.
        lower: (distances,), their lower quartile.
        upper: (distances,), their upper quartile.
        edge: the row from which rows look different, an [`Edge`]. None if there is none.
    """

    model: str
    cosines: np.ndarray
    distances: np.ndarray
    median: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    edge: Edge | None = None


def position_similarity(model: "Subject | str", length: int | None = None) -> PositionSimilarity:
    """Compute the cosine similarity of the position vectors of a model, for each pair and each distance.

    The mean over positions is subtracted first. It is the same at all positions, and would make all vectors similar.

    Args:
        model: what [`study`] takes.
        length: number of positions. Default: all.

    Raises:
        ValueError: the model has no position vectors.
    """
    subject = study(model)
    vectors = subject.position_vectors(length).double()
    check_varied(subject.name, vectors)
    edge = find_edge(vectors)
    vectors = torch.nn.functional.normalize(vectors - vectors.mean(0), dim=-1)
    cosines = (vectors @ vectors.T).numpy()
    distances = np.arange(len(cosines))
    quartiles = np.array([np.quantile(np.diagonal(cosines, distance), (0.25, 0.5, 0.75)) for distance in distances])
    return PositionSimilarity(
        subject.name, cosines, distances, quartiles[:, 1], quartiles[:, 0], quartiles[:, 2], edge
    )


@style.styled
def plot_position_similarity(data: PositionSimilarity) -> style.Figure:
    """The similarity of all pairs of positions, and its median and quartiles at each distance."""
    figure, [[left, right]] = style.panels(1, 2, height=3.6, gridspec_kw={"width_ratios": [1, 1.15]})
    style.heatmap(left, data.cosines, aspect="equal", vmin=-1, vmax=1)
    left.set(xlabel="position", ylabel="position", title=data.model)
    if data.edge is not None:
        left.set_title(f"{data.model}, an edge at {data.edge.row}")
        for line in (left.axvline, left.axhline):
            line(data.edge.row - 0.5, color="black", linewidth=0.7, linestyle=":")
    right.fill_between(data.distances, data.lower, data.upper, color=style.BLUE, alpha=0.25, linewidth=0)
    right.plot(data.distances, data.median, color=style.BLUE, linewidth=1)
    right.axhline(0, color="0.6", linewidth=0.8)
    right.set(xlabel="distance", ylabel="cosine similarity", title="median and quartiles")
    return figure


def describe_position_similarity(data: PositionSimilarity) -> str:
    """Say in a sentence how similar neighboring positions are, how similarity falls with the distance, and whether there is an edge."""
    near = float(data.median[1])
    below = np.flatnonzero(data.median < 0.5)
    reach = f"which falls below one half at distance {below[0]}" if below.size else "which never falls below one half"
    low = int(data.median.argmin())
    return (
        f"Neighbouring positions of {data.model} have a cosine similarity of {near:.2f}, {reach} and is lowest "
        f"({data.median[low]:.2f}) at distance {low}." + ("" if data.edge is None else f" {data.edge}.")
    )
