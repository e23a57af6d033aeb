"""Is the position still known in deeper layers? Linear probes of where a token is, and of how far apart two are, layer by layer.

A probe is a ridge regression from the vectors of a layer to a number, fitted on some documents and measured on others. What
a text gives away by itself is told by the same probes on the same weights without positions, and what a probe of that size
can fake by probes whose labels were shuffled.

Source: linear probes with controls after Hewitt and Liang (2019), "Designing and Interpreting Probes with Control Tasks".
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from . import style
from .access import Subject, study
from .bootstrap import interval
from .progress import steps
from .records import Record
from .ridge import RidgeFit, Split, fit_ridge
from .windows import CutTexts, cut


# What is predicted, and from which features of a layer: x and y are the vectors of two tokens of a window.
TARGETS = {
    "position": "where a token is, from its vector x",
    "signed distance": "from x to y, with its sign, from y − x",
    "distance": "how far x and y are apart, from x ⊙ y",
}
MODEL, WITHOUT, SHUFFLED = "model", "without positions", "shuffled labels"
COLOURS = {MODEL: style.BLUE, WITHOUT: style.ORANGE, SHUFFLED: style.GREY}
BATCH = 16


@dataclass(frozen=True)
class Probes(Record):
    """How well linear probes predict positions and distances from hidden states. The result of [`probes.probes`].

    The targets are "position", "signed distance" and "distance". The series are "model", "without positions" (the same weights with
    `position_scheme="none"`) and "shuffled labels".

    Attributes:
        model: the model's name.
        layers: numbers of layers: 0 is the input of the first layer, N the output of layer N.
        r2: for each target and series, R² on held-out documents, (layers,). 1 is exact; a constant reaches 0.
        interval: for each target and series, the 95 % bootstrap interval of R² over held-out documents, (layers, 2).
        error: for each target and series, the mean absolute error in tokens, (layers,).
        chance: for each target, the mean absolute error in tokens if the median of the training examples is predicted.
        length: tokens of each piece of text, special tokens counted.
        documents: number of documents in "train", "validation" and "test".
        examples: number of examples in "train", "validation" and "test". An example is a token or a pair of tokens.
    """

    model: str
    layers: list[int]
    r2: dict[str, dict[str, np.ndarray]]
    interval: dict[str, dict[str, np.ndarray]]
    error: dict[str, dict[str, np.ndarray]]
    chance: dict[str, float]
    length: int
    documents: dict[str, int]
    examples: dict[str, int]


@dataclass
class Sample:
    """Tokens and pairs of tokens, drawn from windows.

    Attributes:
        tokens: int64 (windows, tokens), places in the window.
        first, second: int64 (windows, tokens), two different ones of these tokens each, as indices into them.
    """

    tokens: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor

    @classmethod
    def draw(cls, windows: CutTexts, size: int, generator: torch.Generator) -> "Sample":
        """At most `size` words of each window, and as many pairs of them."""
        count = len(windows.input_ids)
        order = torch.rand(count, len(windows.places), generator=generator).argsort(1)
        tokens = windows.places[order[:, :size]]
        size = tokens.shape[1]
        first = torch.arange(size).repeat(count, 1)
        apart = torch.randint(1, size, (count, size), generator=generator)
        return cls(tokens, first, (first + apart) % size)

    def targets(self) -> torch.Tensor:
        """(examples, targets), what the probes are to tell, in the order of `TARGETS`."""
        distance = self.tokens.gather(1, self.second) - self.tokens.gather(1, self.first)
        return torch.stack([self.tokens, distance, distance.abs()], dim=-1).flatten(0, 1).double()

    def features(self, vectors: torch.Tensor) -> list[torch.Tensor]:
        """What the probe of each target reads, (examples, features), of vectors (windows, tokens, width)."""
        x, y = (vectors.take_along_dim(index[..., None], dim=1) for index in (self.first, self.second))
        return [features.flatten(0, 1) for features in (vectors, y - x, x * y)]


def split_by_document(document: torch.Tensor, generator: torch.Generator) -> Split:
    """Documents dealt out at random: three fifths for training, one each for validation and test.

    Args:
        document: int64 (examples,), the number of each example's document.

    Raises:
        ValueError: fewer than five documents.
    """
    present = document.unique()
    if len(present) < 5:
        raise ValueError(
            f"probes are fitted on some documents and measured on others, so at least 5 long enough documents are needed, got {len(present)}: "
            "pass more or longer texts"
        )
    shuffled = present[torch.randperm(len(present), generator=generator)]
    fifth = len(present) // 5
    parts = shuffled[2 * fifth :], shuffled[:fifth], shuffled[fifth : 2 * fifth]
    return Split(*(torch.isin(document, part) for part in parts))


def without_positions(subject: Subject) -> Subject:
    """A model with these weights and without any positions."""
    model = subject.model
    config = type(model.config).adopt(copy.deepcopy(model.config), position_scheme="none")
    with torch.random.fork_rng(devices=[]):
        bare = type(model)._from_config(config, attn_implementation="eager", dtype=model.dtype)
    bare.load_state_dict(model.state_dict(), strict=False)
    return replace(subject, name=f"{subject.name} {WITHOUT}", model=bare.eval())


def sampled_states(
    subject: Subject, windows: CutTexts, sample: Sample, part: int = 0, parts: int = 1
) -> list[torch.Tensor]:
    """Vectors of the sampled tokens, (windows, tokens, width), by layer; `part` and `parts` are those of [`steps`]."""
    batches, pairs = [], zip(windows.input_ids.split(BATCH), sample.tokens.split(BATCH))
    for rows, tokens in steps(pairs, "batch", part, parts):
        states = subject.observe(rows).hidden_states
        batches.append([state.take_along_dim(tokens[..., None], dim=1) for state in states])
    return [torch.cat(parts) for parts in zip(*batches)]


def _fit_layer(
    features: list[torch.Tensor], targets: torch.Tensor, shuffled: torch.Tensor, split: Split
) -> list[RidgeFit]:
    """The probe of each target and, as its second output, the one with shuffled labels."""
    return [
        fit_ridge(of_target, torch.stack([own, others], dim=1), torch.stack([own, own], dim=1), split)
        for of_target, own, others in zip(features, targets.T, shuffled.T)
    ]


def probes(
    model: Subject | str,
    texts: Iterable[str] | None = None,
    length: int = 128,
    windows: int = 128,
    tokens: int = 32,
    seed: int = 0,
) -> Probes:
    """Fit linear probes of position and distance on the hidden states of each layer.

    A probe is a ridge regression. It is fitted on some documents and measured on others. Two controls are fitted too: on the same weights
    without positions, and with shuffled labels.

    Args:
        model: what [`study`] takes.
        texts: documents, as strings. Default: the Python language reference.
        length: tokens of each piece of text, special tokens counted.
        windows: largest number of pieces of text.
        tokens: largest number of tokens, and of pairs of tokens, from each piece.
        seed: seed of the pieces of text, the tokens, the split of documents and the shuffled labels.

    Raises:
        ValueError: there is too little text, or the model has no tokenizer.

    Source: controls after Hewitt and Liang 2019 (https://arxiv.org/abs/1909.03368).
    """
    subject = study(model)
    generator = torch.Generator().manual_seed(seed)
    pieces = cut(subject, texts, length, windows, generator)
    sample = Sample.draw(pieces, tokens, generator)
    targets = sample.targets()
    document = pieces.document.repeat_interleave(sample.tokens.shape[1])
    split = split_by_document(document, generator)
    shuffled = targets[torch.randperm(len(targets), generator=generator)]
    fits = {}
    for part, (series, seen) in enumerate({MODEL: subject, WITHOUT: without_positions(subject)}.items()):
        states = steps(sampled_states(seen, pieces, sample, 2 * part, 4), "layer", 2 * part + 1, 4)
        fits[series] = [_fit_layer(sample.features(state), targets, shuffled, split) for state in states]

    def by_target(value: Callable[[RidgeFit, int], Any]) -> dict[str, dict[str, np.ndarray]]:
        series = {MODEL: (MODEL, 0), WITHOUT: (WITHOUT, 0), SHUFFLED: (MODEL, 1)}
        return {
            target: {
                name: np.array([value(layer[index], column) for layer in fits[fitted]])
                for name, (fitted, column) in series.items()
            }
            for index, target in enumerate(TARGETS)
        }

    def r2_interval(fit: RidgeFit, column: int) -> tuple[float, float]:
        low, high = interval(fit.squares[:, column], fit.around[:, column], document[split.test])
        return 1 - high, 1 - low

    middle = targets[split.train].median(0).values
    chance = (targets[split.test] - middle).abs().mean(0)
    parts = vars(split)
    return Probes(
        model=subject.name,
        layers=[*range(len(fits[MODEL]))],
        r2=by_target(lambda fit, column: fit.r2[column].item()),
        interval=by_target(r2_interval),
        error=by_target(lambda fit, column: fit.error[column].item()),
        chance=dict(zip(TARGETS, chance.tolist())),
        length=pieces.input_ids.shape[1],
        documents={name: len(document[part].unique()) for name, part in parts.items()},
        examples={name: int(part.sum()) for name, part in parts.items()},
    )


@style.styled
def plot_probes(data: Probes) -> Figure:
    """R² for each layer, in a panel for each of position, signed distance and distance."""
    figure, axes = style.panels(1, len(TARGETS), sharey=True)
    for axis, (target, meaning) in zip(axes[0], TARGETS.items()):
        axis.axhline(0, color="black", linewidth=0.6)
        for series, values in data.r2[target].items():
            axis.plot(
                data.layers,
                np.clip(values, -0.25, None),
                color=COLOURS[series],
                marker="o",
                markersize=4,
                label=series,
            )
        axis.set_title(f"{target}\n{meaning}", fontsize=9)
        axis.set(xlabel="layer (0: embeddings)", ylim=(-0.28, 1.04))
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_ylabel("R² on held-out documents")
    axes[0, -1].legend(loc="upper right")
    return figure


def describe_probes(data: Probes) -> str:
    """Say in some sentences how well position and distance are predicted before the first and after the last layer."""
    r2, error = data.r2["position"], data.error["position"]
    signed, distance = data.r2["signed distance"][MODEL], data.r2["distance"][MODEL]
    first, last = (f"{error[MODEL][layer]:.1f} tokens (R² {r2[MODEL][layer]:.2f})" for layer in (0, -1))
    verdict = "survives" if r2[MODEL][-1] >= 0.9 else "fades in" if r2[MODEL][-1] >= 0.1 else "does not survive"
    if max(r2[MODEL]) < 0.1:
        verdict = "is not known in any of"
    return (
        f"In {data.model} the position {verdict} the layers. A linear probe is off by {first} before the first layer and by {last} "
        f"after the last; a constant guess is off by {data.chance['position']:.1f}. The same weights without positions reach R² "
        f"{max(r2[WITHOUT]):.2f} at best. The signed distance of two tokens is predicted with R² {signed[0]:.2f} before and "
        f"{signed[-1]:.2f} after the layers, and the distance without sign, from products, with {distance[0]:.2f} and {distance[-1]:.2f}."
    )
