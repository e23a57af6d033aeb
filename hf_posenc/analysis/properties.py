"""What properties do positions have: monotonicity, translation invariance, symmetry?

The definitions are those of Wang et al. (ICLR 2021, "On Position Embeddings in BERT"), for a proximity φ of positions:

- monotonicity: φ(x, x+m) < φ(x, x+n) exactly where m > n: what is farther is less near;
- translation invariance: φ(x, x+m) is the same for every x: a Toeplitz matrix;
- symmetry: φ(x, y) = φ(y, x).

Each depends on the φ that it is said of. Sinusoids are translation-invariant in the inner product, where any other φ may
break it: as W_q and W_k see them they are not. Of tables, φ here is the inner product and the cosine. Both are symmetric whatever
the table is, so symmetry is measured of attention alone. Of attention as it acts, φ is the weight that the first layer gives on a sequence of one word repeated (identical-word
probing), mean over words. The paper's properties hold or do not; the shares here, from 0 to 1, say how nearly.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..modeling.schemes.sinusoidal import sinusoids
from . import style
from .access import Subject, heads_of, study
from .progress import steps
from .records import Record


@dataclass(frozen=True)
class Properties(Record):
    """How far a matrix φ(query, key), such as similarities or attention weights, is monotone, translation-invariant and symmetric.

    Attributes:
        monotonicity: share of the pairs of keys on one side of a query in which the farther key has the smaller φ. 1/2 by chance.
        local_monotonicity: the same for keys at most `reach` positions away.
        reach: this distance, in positions.
        translation_invariance: share of the variance of all entries that the distance explains ([`toeplitz_share`]).
        largest_deviation: the largest difference between two entries of the same distance, divided by the standard deviation of all.
        symmetry: share of the variance of all entries in the symmetric part (φ(x, y) + φ(y, x))/2. 1 for a symmetric matrix, 0 for an
            antisymmetric one, about 1/2 by chance. None if φ is symmetric by definition.
        later: share of keys after the query in the sum of all entries off the diagonal. None if entries may be negative.

    Source: Wang et al. 2021, "On Position Embeddings in BERT" (https://openreview.net/forum?id=onxoVA9FxMw). There a property holds or does
    not; here it is a share.
    """

    monotonicity: float
    local_monotonicity: float
    reach: int
    translation_invariance: float
    largest_deviation: float
    symmetry: float | None
    later: float | None


def toeplitz_share(matrix: np.ndarray) -> float:
    """Share of the variance of a square matrix that is left if each diagonal is replaced by its mean.

    It is 1 for a Toeplitz matrix, whose entries depend on the distance only, and about 2/n for n x n independent entries.

    Args:
        matrix: (n, n).
    """
    residual = matrix - _toeplitz(matrix)
    variance = np.square(matrix - matrix.mean()).sum()
    return 1.0 if _is_nothing(variance, matrix) else float(1 - np.square(residual).sum() / variance)


def _toeplitz(matrix: np.ndarray) -> np.ndarray:
    """The matrix with the mean of each diagonal in its place."""
    size = len(matrix)
    means = np.array([np.diagonal(matrix, offset).mean() for offset in range(1 - size, size)])
    return means[np.arange(size)[None, :] - np.arange(size)[:, None] + size - 1]


def _is_nothing(variance: float, matrix: np.ndarray) -> bool:
    """Whether the entries differ by rounding alone."""
    return variance <= matrix.size * np.square(1e-12 * np.abs(matrix).max())


def properties_of(matrix: np.ndarray, reach: int = 10) -> Properties:
    """Measure the properties of a square matrix.

    Args:
        matrix: (queries, keys), of equal numbers.
        reach: largest distance of local monotonicity, in positions.
    """
    size, matrix = len(matrix), matrix.astype(np.float64)
    centred = matrix - matrix.mean()
    variance = np.square(centred).sum()
    nothing = _is_nothing(variance, matrix)
    spread = max(float(np.ptp(np.diagonal(matrix, offset))) for offset in range(1 - size, size))
    later = None
    if (matrix >= 0).all():
        above, below = np.triu(matrix, 1).sum(), np.tril(matrix, -1).sum()
        later = float(above / (above + below))
    return Properties(
        monotonicity(matrix),
        monotonicity(matrix, reach),
        reach,
        toeplitz_share(matrix),
        0.0 if nothing else float(spread / np.sqrt(variance / matrix.size)),
        1.0 if nothing else float(np.square((centred + centred.T) / 2).sum() / variance),
        later,
    )


def monotonicity(matrix: np.ndarray, reach: int | None = None) -> float:
    """Share of the pairs of keys on one side of a query, the query's own place counted to both, of which the farther is less near.

    Keys that are as near count one half.

    Args:
        matrix: square, rows being queries.
        reach: largest distance, by default any.
    """
    size = len(matrix)
    reach = size - 1 if reach is None else min(reach, size - 1)
    ordered, pairs = 0.0, 0
    for sided in (matrix, matrix[::-1, ::-1]):
        # (queries, distances): what is `distance` after the query, nan beyond the end
        padded = np.pad(sided, ((0, 0), (0, reach)), constant_values=np.nan)
        after = np.stack([padded[row, row : row + reach + 1] for row in range(size)])
        for gap in range(1, reach + 1):
            nearer, farther = after[:, :-gap], after[:, gap:]
            ordered += (farther < nearer).sum() + 0.5 * (farther == nearer).sum()
            pairs += np.isfinite(farther).sum()
    return float(ordered / pairs)


@dataclass(frozen=True)
class TableProperties(Record):
    """The properties of a model's position vectors. The result of [`table_properties`].

    Attributes:
        model: the model's name.
        scheme: its `position_scheme`.
        positions: number of positions.
        by_proximity: a [`Properties`] for each of "inner product", "cosine" and "centred cosine" (the cosine of the vectors without their mean).
        sinusoids: the same for the inner product of as many sinusoids.
    """

    model: str
    scheme: str
    positions: int
    by_proximity: dict[str, Properties]
    sinusoids: Properties


def table_properties(model: "Subject | str", length: int = 128, reach: int = 10) -> TableProperties:
    """Measure the properties of a model's position vectors, by inner product, cosine, and cosine without the mean vector.

    The vectors of a learned matrix often have a large common part. The inner product and the cosine then mostly measure this part.

    Args:
        model: what [`study`] takes.
        length: number of first positions.
        reach: largest distance of local monotonicity, in positions.

    Raises:
        ValueError: the model has no position vectors.
    """
    subject = study(model)
    vectors = subject.position_vectors(min(length, subject.longest or length)).double()
    unit, centred = (torch.nn.functional.normalize(own, dim=-1) for own in (vectors, vectors - vectors.mean(0)))
    sides = {"inner product": vectors, "cosine": unit, "centred cosine": centred}
    classic = sinusoids(torch.arange(len(vectors)), vectors.shape[1], 10000.0, "interleaved", torch.float64)
    found = {name: _of_products(own, reach) for name, own in sides.items()}
    return TableProperties(subject.name, subject.scheme, len(vectors), found, _of_products(classic, reach))


def _of_products(vectors: torch.Tensor, reach: int) -> Properties:
    """The properties of the inner products of vectors."""
    return replace(properties_of((vectors @ vectors.T).numpy(), reach), symmetry=None)


@dataclass(frozen=True)
class AttentionProperties(Record):
    """The properties of attention weights on a repeated token. The result of [`attention_properties`].

    Attributes:
        model: the model's name.
        scheme: its `position_scheme`.
        words: number of tokens that the weights are the mean over.
        weights: (heads, queries, keys), of the first layer.
        heads: a [`Properties`] for each attention head.
        mean: the same for the mean of the attention heads.
    """

    model: str
    scheme: str
    words: int
    weights: np.ndarray
    heads: list[Properties]
    mean: Properties


@torch.no_grad()
def attention_properties(
    model: "Subject | str", length: int = 128, words: int = 100, reach: int = 10, seed: int = 0
) -> AttentionProperties:
    """Measure the properties of the first layer's attention weights, on sequences in which all tokens are the same.

    There are no special tokens, so that tokens differ in their position only. The weights are averaged over random tokens (identical word
    probing, Wang et al. 2021).

    Args:
        model: what [`study`] takes.
        length: number of tokens of a sequence.
        words: number of random tokens. They are whole words, if the tokenizer marks them, and never special tokens.
        reach: largest distance of local monotonicity, in positions.
        seed: seed of the choice of tokens.

    Raises:
        ValueError: the model is not a checkpoint.
    """
    subject = study(model)
    subject.check_trained("identical-word probing")
    length = min(length, subject.longest or length)
    chosen = _random_words(subject, words, seed)
    total = torch.zeros((), dtype=torch.float64)
    for some in steps(chosen.split(8), "batch"):
        scores = subject.observe(some[:, None].expand(-1, length).contiguous(), [0], until=1).layers[0]
        total = total + scores.weights.double().sum(0)
    weights = (total / len(chosen)).numpy()
    return AttentionProperties(
        subject.name,
        subject.scheme,
        len(chosen),
        weights,
        [properties_of(head, reach) for head in weights],
        properties_of(weights.mean(0), reach),
    )


def _random_words(subject: Subject, count: int, seed: int) -> torch.Tensor:
    """Ids of words (count,), none of them special."""
    generator = np.random.default_rng(seed)
    rows, tokenizer = len(subject.word_vectors), subject.tokenizer
    special, pieces = {subject.model.config.pad_token_id}, [""] * rows
    if tokenizer is not None:
        special |= {*tokenizer.all_special_ids}
        pieces = [piece or "" for piece in tokenizer.convert_ids_to_tokens(list(range(min(rows, len(tokenizer)))))]
    candidates = [number for number in range(len(pieces)) if number not in special]
    # Others mark where a word begins ("Ġ", "▁"), and WordPiece what goes on in one ("##").
    begins = [number for number in candidates if pieces[number][:1] in ("Ġ", "▁") and pieces[number][1:].isalpha()]
    whole = begins or [number for number in candidates if pieces[number].isalpha()]
    candidates = whole or candidates
    chosen = generator.choice(candidates, size=min(count, len(candidates)), replace=False)
    return torch.tensor(np.sort(chosen))


@dataclass(frozen=True)
class PositionTerm(Record):
    """The part of the first layer's attention score that depends on positions only. The result of [`position_term`].

    Attributes:
        model: the model's name.
        scheme: its `position_scheme`.
        parts: names of the parts that it is the sum of: "position-position" for vectors that are added to the token embeddings, and the
            biases of schemes.
        scores: (heads, queries, keys).
        toeplitz: (heads,), the [`toeplitz_share`] of each attention head.
        by_chance: the share that independent entries would have.
    """

    model: str
    scheme: str
    parts: list[str]
    scores: np.ndarray
    toeplitz: np.ndarray
    by_chance: float


@torch.no_grad()
def position_term(model: "Subject | str", length: int = 128) -> PositionTerm:
    """Measure how far the part of the first layer's score that depends on positions only is a function of the distance.

    Vectors that are added to the token embeddings are centered. They pass through the linear part of the embeddings' LayerNorm, are divided by
    the mean standard deviation of all token embeddings at the mean position, and are projected to queries and keys.

    Args:
        model: what [`study`] takes.
        length: number of tokens of a text.

    Raises:
        ValueError: no part of the score depends on positions only, or the model is not a checkpoint.
    """
    subject = study(model)
    subject.check_trained("what positions alone add to scores")
    length = min(length, subject.longest or length)
    attention = subject.attentions[0]
    input_ids = subject.any_ids(length)
    scores = subject.observe(input_ids, [0], until=1).layers[0]
    parts = {name: part[0] for name, part in scores.parts.items() if name.split()[-1] in ("bias", "p2p", "v")}
    if subject.embeddings.position_scheme is not None:
        vectors = subject.added(subject.vectors_in_text(input_ids)[0])
        deviation = (subject.word_vectors + vectors.mean(0)).std(-1, correction=0).mean()
        hidden = subject.into_attention(vectors - vectors.mean(0))[None] / deviation
        query, key = heads_of(attention, hidden, biases=False)
        parts["position-position"] = (query @ key.transpose(-1, -2) * attention.scaling)[0]
    if not parts:
        raise ValueError(
            f"{subject.name}: with position_scheme={subject.scheme!r} no part of the score depends on positions alone"
        )
    matrices = sum(parts.values()).double().numpy()
    toeplitz = np.array([toeplitz_share(matrix) for matrix in matrices])
    return PositionTerm(subject.name, subject.scheme, list(parts), matrices, toeplitz, 2 / (length + 1))


SHOWN = {
    "monotonicity": "monotonicity",
    "local_monotonicity": "local monotonicity",
    "translation_invariance": "translation invariance",
    "symmetry": "symmetry",
}


def _plot_properties(axis, series: dict[str, Properties]) -> None:
    """A row for each property that all of the series have, a marker for each of the series."""
    shown = [name for name in SHOWN if all(getattr(found, name) is not None for found in series.values())]
    rows = np.arange(len(shown))[::-1]
    for index, (name, found) in enumerate(series.items()):
        values = [getattr(found, attribute) for attribute in shown]
        offset = 0.14 * ((len(series) - 1) / 2 - index)
        colour = style.CATEGORIES[index]
        axis.plot(values, rows + offset, linestyle="", marker="osD^v"[index], markersize=7, color=colour, label=name)
    axis.axvline(0.5, color="0.8", linewidth=0.8, zorder=0)
    axis.set(xlim=(-0.03, 1.03), ylim=(-0.6, len(shown) - 0.4), xlabel="share (1: the property holds)")
    axis.set_yticks(rows, [SHOWN[name] for name in shown])
    axis.grid(axis="y", color="0.92")
    axis.set_axisbelow(True)


@style.styled
def plot_table_properties(data: TableProperties) -> style.Figure:
    """The properties of a model's position vectors and of sinusoids."""
    figure, [[axis]] = style.panels(height=2.9)
    series = {f"{data.model}, {name}": found for name, found in data.by_proximity.items()}
    _plot_properties(axis, series | {"sinusoids, inner product": data.sinusoids})
    axis.set_title(f"{data.model}: first {data.positions} position vectors")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def describe_table_properties(data: TableProperties) -> str:
    """Say in some sentences how far the properties hold, with sinusoids and chance for comparison."""

    def said(attribute: str) -> list[str]:
        return [f"{getattr(found, attribute):.0%}" for found in (*data.by_proximity.values(), data.sinusoids)]

    product, cosine, centred, sinusoids = said("translation_invariance")
    *local, local_sinusoids = said("local_monotonicity")
    *over_all, all_sinusoids = said("monotonicity")
    return (
        f"Between the first {data.positions} vectors of {data.model}, distance alone explains {product} of the variance of the inner products, "
        f"{cosine} of the cosines and {centred} of the cosines without the mean vector (sinusoids {sinusoids}, by chance "
        f"{2 / (data.positions + 1):.1%}). Of two positions on one side of a third, the farther one is less similar in {', '.join(local)} of the "
        f"cases within {data.sinusoids.reach} positions (sinusoids {local_sinusoids}) and in {', '.join(over_all)} of all cases (sinusoids "
        f"{all_sinusoids}; by chance 50%)."
    )


@style.styled
def plot_attention_properties(data: AttentionProperties, shown: int = 64) -> style.Figure:
    """The mean attention weights of all heads, and the properties of each head.

    Args:
        data: the result of [`attention_properties`].
        shown: number of first positions in the map of weights.
    """
    figure, [[left, right]] = style.panels(1, 2, height=3.7, gridspec_kw={"width_ratios": [1, 1.2]})
    mean = data.weights.mean(0)[:shown, :shown]
    limit = np.quantile(mean, 0.97)
    style.heatmap(left, mean, diverging=False, aspect="equal", vmin=0, vmax=limit, label="weight", extend="max")
    left.set(xlabel="key", ylabel="query", title=f"{data.model}: one word repeated")
    colours = style.shades(len(data.heads))
    rows = np.arange(len(SHOWN))[::-1]
    jitter = np.linspace(0.25, -0.25, len(data.heads))
    for head, (found, colour) in enumerate(zip(data.heads, colours)):
        values = [getattr(found, attribute) for attribute in SHOWN]
        right.plot(values, rows + jitter[head], linestyle="", marker="o", markersize=4.5, color=colour)
    values = [getattr(data.mean, attribute) for attribute in SHOWN]
    right.plot(
        values,
        rows,
        linestyle="",
        marker="D",
        markersize=7,
        markerfacecolor="none",
        markeredgecolor="black",
        label="mean of the heads",
    )
    right.axvline(0.5, color="0.8", linewidth=0.8, zorder=0)
    right.set(
        xlim=(-0.03, 1.03), xlabel="share (1: the property holds)", title="layer 1, one dot per head (dark: head 1)"
    )
    right.set_yticks(rows, SHOWN.values())
    right.legend(loc="upper left", bbox_to_anchor=(0, -0.18))
    return figure


def describe_attention_properties(data: AttentionProperties) -> str:
    """Say in some sentences how far the properties hold for the mean of the attention heads, and which head is most translation-invariant."""
    mean, shares = data.mean, [found.translation_invariance for found in data.heads]
    best = int(np.argmax(shares))
    return (
        f"On sequences of one repeated word ({data.words} words), the attention of layer 1 of {data.model}, averaged over heads, is locally "
        f"monotone in {mean.local_monotonicity:.0%} of the cases. Distance alone explains {mean.translation_invariance:.0%} of its variance "
        f"(most in head {best + 1}: {shares[best]:.0%}), and its symmetric part has {mean.symmetry:.0%}. Of the attention to other positions, "
        f"{mean.later:.0%} goes to later ones."
    )


@style.styled
def plot_position_term(data: PositionTerm) -> style.Figure:
    """The scores of each attention head as a map, with the share that the distance explains."""
    columns = 4
    rows = -(-len(data.scores) // columns)
    figure, axes = style.panels(rows, columns, height=2.15, sharex=True, sharey=True)
    for head, axis in enumerate(axes.flat):
        if head >= len(data.scores):
            axis.set_visible(False)
            continue
        limit = np.quantile(np.abs(data.scores[head]), 0.995) or 1.0
        axis.imshow(data.scores[head], cmap=style.DIVERGING, vmin=-limit, vmax=limit, interpolation="nearest")
        axis.set_title(f"head {head + 1}: {data.toeplitz[head]:.0%}, ±{limit:.2g}", fontsize=9)
        axis.spines[:].set_visible(False)
    figure.supxlabel("position of the key", fontsize=10)
    figure.supylabel("position of the query", fontsize=10)
    parts = " + ".join(data.parts)
    style.title(figure, f"{data.model}, layer 1: {parts}; share that the distance explains, and range")
    return figure


def describe_position_term(data: PositionTerm) -> str:
    """Say in some sentences what share of the scores the distance explains, and in how many heads more than half."""
    top, most = int(data.toeplitz.argmax()), int((data.toeplitz > 0.5).sum())
    return (
        f"Of what positions alone add to the scores of layer 1 of {data.model} ({' + '.join(data.parts)}), distance explains "
        f"{np.median(data.toeplitz):.0%} of the variance in the median head and {data.toeplitz[top]:.0%} in head {top + 1}. In {most} of "
        f"{len(data.toeplitz)} heads it explains more than half (by chance {data.by_chance:.1%})."
    )
