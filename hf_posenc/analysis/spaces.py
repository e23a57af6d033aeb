"""Do token embeddings and positions share a space?

Vectors that are added can be told apart as well as concatenated ones where they lie in orthogonal subspaces. Whole word matrices
have full rank, so the subspaces here are those that hold a share of the variance. Each head has a space of its own after W_q and W_k, and
is looked at by itself.

By chance: the positions turned by a random rotation where they are added to the token embeddings, before W_q and W_k. It keeps how their variance is spread
over directions, and forgets which directions these are.

Source: principal angles after Björck and Golub (1973), "Numerical Methods for Computing Angles Between Linear Subspaces"; random
rotations after Stewart (1980), "The Efficient Generation of Random Orthogonal Matrices".
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ..modeling.schemes.parameters import without_bias
from . import style
from .access import Subject, check_varied, study
from .averages import averages, covariance
from .progress import steps
from .records import Record


SHARES = (0.5, 0.8, 0.9, 0.95)
# Enough for an interval of 95 %: five of them are beyond either end. Each takes a QR decomposition of full width, seconds in a base model.
ROTATIONS = 200
EMBEDDINGS, STATES, QUERIES, KEYS = "embeddings", "states", "queries", "keys"


@dataclass(frozen=True)
class AgainstChance(Record):
    """A number for each attention head, and the same number after random rotations of the positions.

    Attributes:
        found: (heads,), the number.
        chance: (heads,), its mean over random rotations.
        low: (heads,), lower end of the interval with 95 % of the rotations.
        high: (heads,), upper end of this interval.
    """

    found: np.ndarray
    chance: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def below(self) -> np.ndarray:
        """True where the number is below the interval, (heads,)."""
        return self.found < self.low

    @property
    def above(self) -> np.ndarray:
        return self.found > self.high


@dataclass(frozen=True)
class Overlap(Record):
    """The overlap of two subspaces: of tokens, and of positions.

    Each is spanned by the fewest principal components that have a share of the variance.

    Attributes:
        share: this share of the variance.
        word_dimensions: (heads,), dimensions of the subspace of tokens.
        position_dimensions: (heads,), dimensions of the subspace of positions.
        positions_in_words: share of the positions' whole variance in the subspace of tokens.
        words_in_positions: share of the tokens' whole variance in the subspace of positions.
        angle: the smallest principal angle between the two subspaces, in degrees.
    """

    share: float
    word_dimensions: np.ndarray
    position_dimensions: np.ndarray
    positions_in_words: AgainstChance
    words_in_positions: AgainstChance
    angle: AgainstChance


@dataclass(frozen=True)
class Space(Record):
    """A space with tokens and positions, and their overlap in it.

    Attributes:
        name: "embeddings", where both are added; "states", the input of a layer; "queries" or "keys" of a layer. The first two are one space,
            the others one for each attention head.
        layer: the layer's number, from 0.
        width: number of dimensions of a space.
        overlaps: an [`Overlap`] for each share of the variance.
    """

    name: str
    layer: int
    width: int
    overlaps: list[Overlap]


@dataclass(frozen=True)
class SharedSpace(Record):
    """The overlap of tokens and positions in a model. The result of [`shared_space`] and [`shared_space_by_layer`].

    Attributes:
        model: the model's name.
        spaces: a [`Space`] for each place in the model, layer by layer.
        rotations: number of random rotations.
    """

    model: str
    spaces: list[Space]
    rotations: int


def shared_space(
    model: "Subject | str", shares: tuple[float, ...] = SHARES, rotations: int = ROTATIONS, seed: int = 0
) -> SharedSpace:
    """Measure how far token embeddings and positions lie in the same subspace, where they are added and in each head of the first layer.

    Token embeddings are all rows of the matrix, each counted once. Positions are all that the model has. Queries and keys are computed
    without biases, after the linear part of the embeddings' LayerNorm ([`Subject.into_attention`]). The numbers are compared with those after
    random rotations of the positions.

    Args:
        model: what [`study`] takes.
        shares: shares of the variance that the subspaces have, above 0 and at most 1. Default: 0.5, 0.8, 0.9 and 0.95.
        rotations: number of random rotations, at least 2. Default: 200.
        seed: seed of the rotations.

    Raises:
        ValueError: the model adds no position vectors to its token embeddings, or is not a checkpoint; or an argument is out of range.

    Source: principal angles after Björck and Golub 1973.
    """
    subject = _checked(model, shares, rotations)
    positions = subject.added_positions()
    check_varied(subject.name, positions)
    words, positions = covariance(subject.word_vectors), covariance(positions)
    with torch.no_grad():
        # Rows are what becomes of each dimension; float32, as the weights are.
        maps = _head_maps(subject, 0, subject.into_attention(torch.eye(len(words))))
    generator = torch.Generator().manual_seed(seed)
    found = overlaps(words, positions, {EMBEDDINGS: None, **maps}, shares, rotations, generator)
    return SharedSpace(subject.name, _spaces(0, words, maps, found), rotations)


def shared_space_by_layer(
    model: "Subject | str",
    texts: Iterable[str] | None = None,
    length: int = 128,
    windows: int = 1024,
    shares: tuple[float, ...] = SHARES,
    rotations: int = ROTATIONS,
    seed: int = 0,
) -> SharedSpace:
    """Measure how far tokens and positions lie in the same subspace in every layer, from the hidden states of text.

    The vector of a position is the mean of the hidden states at this position, and the vector of a token the mean over its occurrences. Noise
    in these means does not count. This works for every checkpoint with a tokenizer, also if no positions are added to the token embeddings.

    Args:
        model: what [`study`] takes.
        texts: documents, as strings. Default: the Python language reference.
        length: tokens of each piece of text, special tokens counted.
        windows: largest number of pieces of text.
        shares: as for [`shared_space`].
        rotations: as for [`shared_space`].
        seed: seed of the pieces of text and of the rotations.

    Raises:
        ValueError: there is too little text, the model has no tokenizer or is not a checkpoint, or an argument is out of range.
    """
    subject = _checked(model, shares, rotations)
    read = averages(subject, texts, length, windows, seed)
    spaces = []
    for layer in range(len(subject.layers)):
        words, positions = read.covariances(layer)
        with torch.no_grad():
            maps = _head_maps(subject, layer, torch.eye(len(words)))
        generator = torch.Generator().manual_seed(seed)
        found = overlaps(words, positions, {STATES: None, **maps}, shares, rotations, generator)
        spaces += _spaces(layer, words, maps, found)
    return SharedSpace(subject.name, spaces, rotations)


def _checked(model: "Subject | str", shares: tuple[float, ...], rotations: int) -> Subject:
    subject = study(model)
    subject.check_trained("the space of words and positions")
    if not all(0 < share <= 1 for share in shares):
        raise ValueError(f"shares must be above 0 and at most 1, got {shares}")
    if rotations < 2:
        raise ValueError(f"an interval by chance takes at least 2 rotations, got {rotations}")
    return subject


def _head_maps(subject: Subject, layer: int, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each head makes of directions (width, hidden_size): (heads, width, head_dim), by name."""
    attention, heads = subject.attentions[layer], subject.sizes.num_attention_heads
    projections = {QUERIES: attention.query_projection, KEYS: attention.key_projection}
    return {
        name: without_bias(projection, rows).double().unflatten(-1, (heads, -1)).transpose(0, 1)
        for name, projection in projections.items()
    }


def _spaces(
    layer: int, words: torch.Tensor, maps: dict[str, torch.Tensor], found: dict[str, list[Overlap]]
) -> list[Space]:
    widths = {name: projection.shape[-1] for name, projection in maps.items()}
    return [Space(name, layer, widths.get(name, len(words)), own) for name, own in found.items()]


@dataclass(frozen=True)
class _Cloud:
    """Vectors by their second moments, in one space for each head.

    Attributes:
        covariance: (heads, width, width).
        variances: (heads, width), along the axes, descending.
        axes: (heads, width, width), orthonormal columns.
    """

    covariance: torch.Tensor
    variances: torch.Tensor
    axes: torch.Tensor

    @classmethod
    def of(cls, covariance: torch.Tensor) -> "_Cloud":
        variances, axes = torch.linalg.eigh(covariance)
        return cls(covariance, variances.flip(-1).clamp(min=0), axes.flip(-1))

    def rotated(self, rotation: torch.Tensor) -> "_Cloud":
        return _Cloud(rotation.T @ self.covariance @ rotation, self.variances, rotation.T @ self.axes)

    def seen(self, maps: torch.Tensor | None) -> "_Cloud":
        """By maps (heads, width, head_dim), or as it is."""
        return self if maps is None else _Cloud.of(maps.mT @ self.covariance @ maps)

    def largest(self, shares: torch.Tensor) -> torch.Tensor:
        """Bool (shares, heads, width), those axes, as few as can be, that hold a share of the variance."""
        before = self.variances.cumsum(-1) - self.variances
        return before < (shares[:, None, None] - 1e-9) * self.variances.sum(-1, keepdim=True)

    def within(self, axes: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """(shares, heads), share of the variance that lies along chosen ones (shares, heads, width) of orthonormal axes."""
        along = (axes * (self.covariance @ axes)).sum(-2)
        # By rounding, nothing can come out below nothing.
        return ((along * chosen).sum(-1) / along.sum(-1)).clamp(min=0)


def _compared(words: _Cloud, positions: _Cloud, shares: torch.Tensor) -> torch.Tensor:
    """(3, shares, heads): positions in words, words in positions, and the smallest angle in degrees."""
    of_words, of_positions = words.largest(shares), positions.largest(shares)
    most = int(of_positions.sum(-1).max())
    cosines = words.axes.mT @ positions.axes[..., :most]
    cosines = cosines * of_words[..., None] * of_positions[..., None, :most]
    angle = torch.linalg.matrix_norm(cosines, 2).clamp(max=1).arccos().rad2deg()
    return torch.stack(
        [positions.within(words.axes, of_words), words.within(positions.axes, of_positions), angle.to(words.axes)]
    )


def random_rotation(width: int, generator: torch.Generator) -> torch.Tensor:
    """An orthogonal matrix (width, width), any as likely as any other, reflections among them."""
    q, r = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=generator))
    return q * r.diagonal().sign()


def overlaps(
    words: torch.Tensor,
    positions: torch.Tensor,
    maps: dict[str, torch.Tensor | None],
    shares: tuple[float, ...],
    rotations: int,
    generator: torch.Generator,
) -> dict[str, list[Overlap]]:
    """The overlaps of two sets of vectors by their covariances, each (width, width), in several spaces.

    Args:
        maps: by name, (heads, width, head_dim), what becomes of a vector in each head; None for the vector as it is.
    """
    words, positions, of = (
        _Cloud.of(words[None]),
        _Cloud.of(positions[None]),
        torch.tensor(shares, dtype=torch.float64),
    )
    words = {name: words.seen(own) for name, own in maps.items()}
    found = {name: positions.seen(own) for name, own in maps.items()}
    chance: dict[str, list[torch.Tensor]] = {name: [] for name in maps}
    for _ in steps(range(rotations), "rotation"):
        turned = positions.rotated(random_rotation(positions.axes.shape[-1], generator))
        for name, own in maps.items():
            chance[name].append(_compared(words[name], turned.seen(own), of))
    return {name: _overlaps(words[name], found[name], torch.stack(drawn), of) for name, drawn in chance.items()}


def _overlaps(words: _Cloud, positions: _Cloud, drawn: torch.Tensor, shares: torch.Tensor) -> list[Overlap]:
    """Of one space; `drawn` is (rotations, 3, shares, heads)."""
    low, high = drawn.quantile(torch.tensor([0.025, 0.975]).to(drawn), dim=0)
    numbers = torch.stack([_compared(words, positions, shares), drawn.mean(0), low, high])
    dimensions = [cloud.largest(shares).sum(-1).numpy() for cloud in (words, positions)]
    return [
        Overlap(
            float(share),
            *(own[index] for own in dimensions),
            *(AgainstChance(*numbers[:, measure, index].numpy()) for measure in range(3)),
        )
        for index, share in enumerate(shares)
    ]


@style.styled
def plot_shared_space(data: SharedSpace) -> style.Figure:
    """The share of the variance of tokens and positions in the subspace of the other; whiskers are 95 % of random rotations."""
    figure, axes = style.panels(2, len(data.spaces), height=2.8, sharey="row")
    rows = (
        ("positions_in_words", "of positions in token subspace"),
        ("words_in_positions", "of tokens in position subspace"),
    )
    for column, space in zip(axes.T, data.spaces):
        for axis, (measure, _) in zip(column, rows):
            _plot_overlaps(axis, space, measure)
        after = "" if space.name in (EMBEDDINGS, STATES) else ", heads"
        column[0].set_title(f"{space.name} {space.layer + 1}{after}")
        column[1].set_xlabel("subspaces hold")
        for axis in column:
            axis.set_ylim(0, 1.02)
    for axis, (_, label) in zip(axes[:, 0], rows):
        axis.set_ylabel(f"variance {label}")
    axes[0, -1].legend(loc="upper left", bbox_to_anchor=(1.02, 1))
    style.title(figure, f"{data.model}: token embeddings and positions in one space, by layer")
    return figure


def _plot_overlaps(axis, space: Space, measure: str) -> None:
    for place, overlap in enumerate(space.overlaps):
        found = getattr(overlap, measure)
        heads = len(found.found)
        places = place + np.linspace(-0.3, 0.3, heads) if heads > 1 else np.array([place])
        labels = ("found", "rotated at random") if place == 0 else (None, None)
        whiskers = style.whiskers(found.chance, found.low, found.high)
        axis.errorbar(places, found.chance, whiskers, color=style.GREY, linewidth=1, fmt="none", label=labels[1])
        axis.plot(places, found.found, ".", color=style.VERMILION, markersize=5, label=labels[0])
    axis.set_xticks(range(len(space.overlaps)), [f"{overlap.share:.0%}" for overlap in space.overlaps])


def describe_shared_space(data: SharedSpace) -> str:
    """Say in a sentence in how many heads positions lie less, or more, in the subspace of tokens than after random rotations."""
    said = [f"in the {space.name} of layer {space.layer + 1} {_said_of(space)}" for space in data.spaces]
    return (
        f"Share of the positions' variance in the subspace of the token embeddings of {data.model}, compared with {data.rotations:,} random "
        f"rotations of the positions: {'; '.join(said)}."
    )


def _said_of(space: Space) -> str:
    heads, parts = len(space.overlaps[0].word_dimensions), []
    for overlap in space.overlaps:
        found = overlap.positions_in_words
        if heads == 1:
            verdict = "less" if found.below[0] else "more" if found.above[0] else "as much"
            said = f"{verdict} ({found.found[0]:.1%}, by chance {found.low[0]:.1%} to {found.high[0]:.1%})"
        else:
            said = f"less in {found.below.sum()} and more in {found.above.sum()} of {heads} heads"
        parts.append(f"{said} at {overlap.share:.0%}")
    return ", ".join(parts)
