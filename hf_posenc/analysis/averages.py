"""What is common to a model's states at a position, and to those of a word, layer by layer.

h = mean + position + word + rest: a position is the mean over texts of the states at it, a word that over its occurrences. Where a word
stands has little to do with which word it is, as windows begin anywhere in their documents.

Such means are of few states, and the rest in them is noise that looks like variance of positions (or of words). So each is taken twice,
from one half of the texts and from the other, whose noise has nothing in common, and covariances are between the two.

Source: states as a sum of means after Song and Zhong (2023), "Uncovering hidden geometry in Transformers via disentangling position and
context", arXiv:2310.04861.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from .access import Subject
from .windows import CutTexts, cut


BATCH = 16
FEWEST = 4


@dataclass(frozen=True)
class Averages:
    """Means of the states of a model over texts.

    Attributes:
        windows: the texts.
        positions: float64 (layers + 1, 2, positions, width), of each half of the texts; layer 0 is what goes into the first. Places of
            special tokens are not among them.
        words: float64 (layers + 1, 2, words, width), of words (tokens of the vocabulary) with `FEWEST` occurrences in each half at least.
        occurrences: int64 (words,), in both halves.
        token_ids: int64 (words,), which these are.
        variance: (layers + 1,), the whole variance of the states of these words' occurrences about their mean, summed over the width.
    """

    windows: CutTexts
    positions: torch.Tensor
    words: torch.Tensor
    occurrences: torch.Tensor
    token_ids: torch.Tensor
    variance: torch.Tensor

    def covariances(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of words, each counted once, and of positions, (width, width) each, without the noise of the means."""
        return _between_halves(self.words[layer]), _between_halves(self.positions[layer])

    def shares(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the whole variance of the states, what words, each counted as often as it occurs, and positions have, (layers + 1,) each."""
        weights = self.occurrences.double() / self.occurrences.sum()
        of_words = _common(self.words, weights) / self.variance
        count = self.positions.shape[2]
        of_positions = _common(self.positions, torch.full((count,), 1 / count, dtype=torch.float64)) / self.variance
        return of_words.numpy(), of_positions.numpy()


def _common(halves: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(layers,), variance that both halves (layers, 2, number, width) have in common, summed over the width."""
    centred = halves - (weights[:, None] * halves).sum(2, keepdim=True)
    return (centred.prod(1).sum(-1) * weights).sum(-1)


def _between_halves(halves: torch.Tensor) -> torch.Tensor:
    """Covariance (width, width) of what both halves (2, number, width) have in common, and no variance below zero."""
    first, second = halves - halves.mean(1, keepdim=True)
    both = first.T @ second / len(first)
    variances, axes = torch.linalg.eigh((both + both.T) / 2)
    return (axes * variances.clamp(min=0)) @ axes.T


@torch.no_grad()
def averages(
    subject: Subject, texts: Iterable[str] | None = None, length: int = 128, windows: int = 1024, seed: int = 0
) -> Averages:
    """Means of the states over texts.

    Args:
        subject: with a tokenizer.
        texts: documents; by default Python's language reference.
        length: tokens of a window, special ones counted.
        windows: at most so many.
        seed: of where documents are begun, and of the halves.

    Raises:
        ValueError: too little text: no two words occur often enough in each half; or no tokenizer.
    """
    generator = torch.Generator().manual_seed(seed)
    pieces = cut(subject, texts, length, windows, generator)
    half = torch.randperm(len(pieces.input_ids), generator=generator) % 2
    places = pieces.places
    ids, rows = pieces.input_ids[:, places].unique(return_inverse=True)
    counts = torch.zeros(2, len(ids), dtype=torch.long)
    for part in (0, 1):
        counts[part] = rows[half == part].flatten().bincount(minlength=len(ids))
    often = (counts >= FEWEST).all(0)
    if often.sum() < 2:
        raise ValueError(
            f"too little text: {int(often.sum())} words occur {FEWEST} times in each half of {len(half)} texts, but at least two words are needed"
        )
    layers, width = len(subject.layers) + 1, subject.sizes.hidden_size
    by_position = torch.zeros(layers, 2, len(places), width, dtype=torch.float64)
    by_word = torch.zeros(layers, 2, len(ids), width, dtype=torch.float64)
    squares = torch.zeros(layers, len(ids), dtype=torch.float64)
    for part in (0, 1):
        chosen = half == part
        for inputs, numbers in zip(pieces.input_ids[chosen].split(BATCH), rows[chosen].split(BATCH)):
            for layer, states in enumerate(subject.observe(inputs).hidden_states):
                states = states[:, places].double()
                by_position[layer, part] += states.sum(0)
                by_word[layer, part].index_add_(0, numbers.flatten(), states.flatten(0, 1))
                squares[layer].index_add_(0, numbers.flatten(), states.square().sum(-1).flatten())
    number = counts[:, often].sum()
    variance = squares[:, often].sum(1) / number - (by_word[:, :, often].sum((1, 2)) / number).square().sum(-1)
    texts_of = half.bincount(minlength=2)
    return Averages(
        windows=pieces,
        positions=by_position / texts_of[:, None, None],
        words=by_word[:, :, often] / counts[:, often][..., None],
        occurrences=counts[:, often].sum(0),
        token_ids=ids[often],
        variance=variance,
    )


def covariance(vectors: torch.Tensor) -> torch.Tensor:
    """Of vectors (number, width), about their mean, (width, width) in float64; a part at a time, for large vocabularies."""
    mean = vectors.mean(0, dtype=torch.float64)
    centred = (some.double() - mean for some in vectors.split(8192))
    return sum(some.T @ some for some in centred) / len(vectors)
