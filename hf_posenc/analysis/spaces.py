"""Do words and positions share a space?

Vectors that are added can be told apart as well as concatenated ones where they lie in orthogonal subspaces. Whole word matrices
have full rank, so the subspaces here are those that hold a share of the variance.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..modeling.scheme import without_bias
from . import style
from .access import Subject, check_varied, study
from .records import Record


SHARES = (0.5, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Overlap(Record):
    """The subspaces that hold a share of the variance of words and of positions, each about its mean.

    Attributes:
        share: of the variance.
        width: dimensions of the space, as far as both can reach it.
        word_dimensions, position_dimensions: of the two subspaces.
        angles: principal angles between them in degrees, ascending; as many as the smaller one has dimensions.
        random_angles: principal angles of random subspaces of these sizes, mean over draws.
        words_in_positions: share of the words' whole variance that lies in the subspace of the positions. By chance it is
            position_dimensions / width.
        positions_in_words: share of the positions' whole variance in the subspace of the words; by chance word_dimensions /
            width.
    """

    share: float
    width: int
    word_dimensions: int
    position_dimensions: int
    angles: np.ndarray
    random_angles: np.ndarray
    words_in_positions: float
    positions_in_words: float

    @property
    def words_by_chance(self) -> float:
        return self.position_dimensions / self.width

    @property
    def positions_by_chance(self) -> float:
        return self.word_dimensions / self.width


@dataclass(frozen=True)
class Space(Record):
    """A place where words and positions meet.

    Attributes:
        name: "embeddings", "queries" or "keys".
        overlaps: one for each share.
    """

    name: str
    overlaps: list[Overlap]


@dataclass(frozen=True)
class SharedSpace(Record):
    """Words and positions of a model where they are added, and as the first layer's queries and keys see them."""

    model: str
    spaces: list[Space]


def shared_space(
    model: "Subject | str", shares: tuple[float, ...] = SHARES, draws: int = 5, seed: int = 0
) -> SharedSpace:
    """Principal angles and overlap of variance between words and positions.

    Words are all rows of the table of words, each counted once, and positions all that the model has. After the projections: what
    the embedding's LayerNorm does but for its division (that scales each token's vector and turns none), then W_q or W_k
    of the first layer without biases.

    Args:
        model: what [`study`] takes.
        shares: of the variance, above 0 and at most 1.
        draws: of random subspaces.
        seed: for them.

    Raises:
        ValueError: the model has no position vectors that join the words, or no checkpoint; a share is out of range.
    """
    subject = study(model)
    subject.check_trained("the space of words and positions")
    if not all(0 < share <= 1 for share in shares):
        raise ValueError(f"shares must be above 0 and at most 1, got {shares}")
    generator = torch.Generator().manual_seed(seed)
    positions, attention = subject.added_positions(), subject.attentions[0]
    check_varied(subject.name, positions)
    words, positions = covariance(subject.word_vectors), covariance(positions)
    with torch.no_grad():
        # Rows are what becomes of each dimension; float32, as the weights are.
        seen = subject.into_attention(torch.eye(len(words)))
        maps = {
            "embeddings": torch.eye(len(words)),
            "queries": without_bias(attention.query_projection, seen),
            "keys": without_bias(attention.key_projection, seen),
        }
    spaces = []
    for name, rows in maps.items():
        rows = rows.double()
        # In axes of what can be reached, which in ELECTRA is a part of the space.
        rows = rows @ torch.linalg.qr(rows.T)[0]
        mapped = (rows.T @ words @ rows, rows.T @ positions @ rows)
        spaces.append(Space(name, overlaps(*mapped, shares, draws, generator)))
    return SharedSpace(subject.name, spaces)


def covariance(vectors: torch.Tensor) -> torch.Tensor:
    """Of vectors (number, width), about their mean, (width, width) in float64; a part at a time, for large vocabularies."""
    mean = vectors.mean(0, dtype=torch.float64)
    centred = (some.double() - mean for some in vectors.split(8192))
    return sum(some.T @ some for some in centred) / len(vectors)


def overlaps(
    words: torch.Tensor, positions: torch.Tensor, shares: tuple[float, ...], draws: int, generator: torch.Generator
) -> list[Overlap]:
    """The overlaps of two sets of vectors by their covariances, each (width, width)."""
    word_variances, word_axes = _principal_axes(words)
    position_variances, position_axes = _principal_axes(positions)
    found = []
    for share in shares:
        of_words = word_axes[:, : _dimensions(word_variances, share)]
        of_positions = position_axes[:, : _dimensions(position_variances, share)]
        sizes = of_words.shape[1], of_positions.shape[1]
        found.append(
            Overlap(
                share,
                len(words),
                *sizes,
                _angles(of_words, of_positions),
                np.mean([_random_angles(len(words), sizes, generator) for _ in range(draws)], axis=0),
                _variance_within(words, of_positions),
                _variance_within(positions, of_words),
            )
        )
    return found


def _principal_axes(covariances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Variances (width,), descending, and axes (width, width), columns."""
    variances, axes = torch.linalg.eigh(covariances)
    return variances.flip(0).clamp(min=0), axes.flip(1)


def _dimensions(variances: torch.Tensor, share: float) -> int:
    """How many of the largest variances hold a share of their sum."""
    cumulated = variances.cumsum(0) / variances.sum()
    return int((cumulated < share - 1e-12).sum()) + 1


def _variance_within(covariances: torch.Tensor, subspace: torch.Tensor) -> float:
    """Share of the variance that lies in a subspace with an orthonormal basis, (width, dimensions)."""
    # By rounding, nothing can come out below nothing.
    return max(0.0, float((subspace.T @ covariances @ subspace).trace() / covariances.trace()))


def _angles(first: torch.Tensor, second: torch.Tensor) -> np.ndarray:
    """Principal angles between the spans of orthonormal columns, in degrees, ascending (Björck and Golub 1973)."""
    return torch.linalg.svdvals(first.T @ second).clamp(max=1).arccos().rad2deg().numpy()


def _random_angles(width: int, sizes: tuple[int, int], generator: torch.Generator) -> np.ndarray:
    """Those of one pair of random subspaces; the first may as well be spanned by the first axes."""
    first = torch.eye(width, sizes[0], dtype=torch.float64)
    second = torch.linalg.qr(torch.randn(width, sizes[1], dtype=torch.float64, generator=generator))[0]
    return _angles(first, second)


@style.styled
def plot_shared_space(data: SharedSpace) -> style.Figure:
    """Above, how much of the variance of one lies in the subspace of the other; below, the principal angles."""
    figure, axes = style.panels(2, len(data.spaces), height=2.8, sharey="row")
    titles = {"embeddings": "embeddings", "queries": "after W_q, layer 1", "keys": "after W_k, layer 1"}
    for (above, below), space in zip(axes.T, data.spaces):
        _plot_overlap(above, space)
        _plot_angles(below, space)
        above.set_title(titles[space.name])
    axes[0, 0].set_ylabel("variance inside")
    axes[1, 0].set_ylabel("principal angle (degrees)")
    axes[0, -1].legend(loc="upper left", bbox_to_anchor=(1.02, 1))
    axes[1, -1].legend(loc="upper left", bbox_to_anchor=(1.02, 1), title="subspaces hold")
    style.title(figure, f"{data.model}: words and positions in one space (dotted: random subspaces of the same sizes)")
    return figure


def _plot_overlap(axis, space: Space) -> None:
    places = np.arange(len(space.overlaps))
    lines = (
        ("of words in\npositions", style.BLUE, "o", "words_in_positions", "words_by_chance"),
        ("of positions\nin words", style.VERMILION, "s", "positions_in_words", "positions_by_chance"),
    )
    for label, colour, marker, found, by_chance in lines:
        axis.plot(places, [getattr(x, found) for x in space.overlaps], color=colour, marker=marker, label=label)
        axis.plot(places, [getattr(x, by_chance) for x in space.overlaps], color=colour, linestyle=":")
    axis.set(xlabel="subspaces hold", ylim=(0, 1.02))
    axis.set_xticks(places, [f"{overlap.share:.0%}" for overlap in space.overlaps])


def _plot_angles(axis, space: Space) -> None:
    for overlap, colour in zip(space.overlaps, style.shades(len(space.overlaps))):
        places = np.arange(1, len(overlap.angles) + 1)
        axis.plot(places, overlap.angles, color=colour, label=f"{overlap.share:.0%}", marker=".")
        axis.plot(places, overlap.random_angles, color=colour, linestyle=":")
    axis.set(xlabel="angle, smallest first", ylim=(0, 92), yticks=[0, 30, 60, 90])
    axis.xaxis.get_major_locator().set_params(integer=True)


def describe_shared_space(data: SharedSpace) -> str:
    """At 90 % (or the share nearest to it), whether they overlap less than random subspaces would."""
    said = []
    for space in data.spaces:
        overlap = min(space.overlaps, key=lambda found: abs(found.share - 0.9))
        ratio = overlap.positions_in_words / overlap.positions_by_chance
        verdict = "less than" if ratio < 0.8 else "more than" if ratio > 1.25 else "about as much as"
        said.append(
            f"{verdict} random ones in the {space.name} ({overlap.positions_in_words:.0%} of the positions' variance lies in that of the words, by "
            f"chance {overlap.positions_by_chance:.0%}; {overlap.words_in_positions:.1%} of the words' in that of the positions, by chance "
            f"{overlap.words_by_chance:.1%}; smallest angle {overlap.angles[0]:.0f}°, random {overlap.random_angles[0]:.0f}°)"
        )
    share = overlap.share
    return f"The subspaces with {share:.0%} of the variance of words and of positions of {data.model} overlap {', '.join(said)}."
