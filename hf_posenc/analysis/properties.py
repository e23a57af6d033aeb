"""What properties do positions have: monotonicity, translation invariance, symmetry?

The definitions are those of Wang et al. (ICLR 2021, "On Position Embeddings in BERT"), for a proximity φ of positions:

- monotonicity: φ(x, x+m) < φ(x, x+n) exactly where m > n: what is farther is less near;
- translation invariance: φ(x, x+m) is the same for every x: a Toeplitz matrix;
- symmetry: φ(x, y) = φ(y, x).

Each depends on the φ that it is said of. Sinusoids are translation-invariant in the inner product, where any other φ may
break it: as W_q and W_k see them they are not. Of tables, φ here is the inner product and the cosine. Both are symmetric whatever
the table is, so that symmetry is asked of attention alone. Of attention as it acts, φ is the weight that the first layer gives on a sequence of one word repeated (identical-word
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
    """How nearly a matrix of proximities φ(query, key) has the properties.

    Attributes:
        monotonicity: share of the pairs of keys on one side of a query of which the farther is the less near; 1/2 by chance.
        local_monotonicity: the same among keys up to `reach` positions away.
        reach: in positions.
        translation_invariance: the Toeplitz share: of the variance of all entries, what the distance alone explains.
        largest_deviation: the largest difference between two entries of one distance, over the standard deviation of all.
        symmetry: of the variance of all entries, the share of the symmetric part (φ(x, y) + φ(y, x))/2; 1 for a symmetric
            matrix, 0 for an antisymmetric one, about 1/2 by chance. None where φ is symmetric by definition.
        later: of the entries off the diagonal, what the keys after the query have of the sum; None where entries may be negative.
    """

    monotonicity: float
    local_monotonicity: float
    reach: int
    translation_invariance: float
    largest_deviation: float
    symmetry: float | None
    later: float | None


def toeplitz_share(matrix: np.ndarray) -> float:
    """Of the variance of a square matrix, the share that is left where each diagonal is replaced by its mean.

    1 for a Toeplitz matrix, a constant one too; about 2/n for independent entries.
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
    """The properties of a square matrix of proximities, rows being queries."""
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
    """The properties of position vectors.

    Attributes:
        positions: how many were looked at.
        by_proximity: "inner product", "cosine" and "centred cosine", that of the vectors without their mean.
        sinusoids: the properties of as many sinusoids in the inner product.
    """

    model: str
    scheme: str
    positions: int
    by_proximity: dict[str, Properties]
    sinusoids: Properties


def table_properties(model: "Subject | str", length: int = 128, reach: int = 10) -> TableProperties:
    """The properties of a model's position vectors, in three proximities.

    Where all vectors have a large part in common, as those of a learned table, the inner product and the cosine are about that part.

    Args:
        model: what [`study`] takes.
        length: number of first positions.
        reach: of local monotonicity.

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
    """Attention as it acts on one word repeated.

    Attributes:
        words: over how many words the weights are means.
        weights: (heads, queries, keys), of the first layer.
        heads: the properties of each head's weights.
        mean: those of the mean of the heads.
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
    """Identical-word probing: the weights of the first layer where every token is the same word, mean over words.

    No special tokens stand among them, so that nothing but the position differs.

    Args:
        model: what [`study`] takes.
        length: of the sequences.
        words: number of random words; whole words where the tokenizer's pieces tell, special tokens never.
        reach: of local monotonicity.
        seed: of the choice of words.

    Raises:
        ValueError: no checkpoint.
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
    """The part of the first layer's score that positions alone make.

    Attributes:
        parts: what it is the sum of: "position-position" of vectors that join the words, and the schemes' biases.
        scores: (heads, queries, keys).
        toeplitz: (heads,), the Toeplitz share of each.
        by_chance: what independent entries would have.
    """

    model: str
    scheme: str
    parts: list[str]
    scores: np.ndarray
    toeplitz: np.ndarray
    by_chance: float


@torch.no_grad()
def position_term(model: "Subject | str", length: int = 128) -> PositionTerm:
    """How much of the position-position term of each head is a function of the distance.

    Vectors that join the words are centred, and go through the embedding's LayerNorm, with the mean standard deviation of all words
    at the mean position, and through W_q and W_k.

    Args:
        model: what [`study`] takes.
        length: number of first positions.

    Raises:
        ValueError: no part of the score is of positions alone; no checkpoint.
    """
    subject = study(model)
    subject.check_trained("what positions alone add to scores")
    length = min(length, subject.longest or length)
    attention = subject.attentions[0]
    scores = subject.observe(subject.any_ids(length), [0], until=1).layers[0]
    parts = {name: part[0] for name, part in scores.parts.items() if name.split()[-1] in ("bias", "p2p", "v")}
    if subject.embeddings.position_scheme is not None:
        vectors = subject.added_positions(length)
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
    """The properties of a model's vectors beside those of sinusoids."""
    figure, [[axis]] = style.panels(height=2.9)
    series = {f"{data.model}, {name}": found for name, found in data.by_proximity.items()}
    _plot_properties(axis, series | {"sinusoids, inner product": data.sinusoids})
    axis.set_title(f"{data.model}: first {data.positions} position vectors")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def describe_table_properties(data: TableProperties) -> str:
    """In all proximities, beside sinusoids and chance."""

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
    """The mean of the heads at the first positions, and the properties of each head."""
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
    """Of the mean of the heads, and the most translation-invariant head."""
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
    """The term of each head as a map, with its Toeplitz share."""
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
    """How many heads depend on the distance alone, and which most."""
    top, most = int(data.toeplitz.argmax()), int((data.toeplitz > 0.5).sum())
    return (
        f"Of what positions alone add to the scores of layer 1 of {data.model} ({' + '.join(data.parts)}), distance explains "
        f"{np.median(data.toeplitz):.0%} of the variance in the median head and {data.toeplitz[top]:.0%} in head {top + 1}. In {most} of "
        f"{len(data.toeplitz)} heads it explains more than half (by chance {data.by_chance:.1%})."
    )
