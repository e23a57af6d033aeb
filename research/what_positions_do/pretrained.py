"""Measure of a checkpoint what docs/questions.md says of its matrices, of single layers, of shuffled words and of clipped distances.

Called by what_positions_do.py, for MiniLM, for its conversion to `t5`, and for all-mpnet-base-v2 where one is named.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_posenc import analysis
from hf_posenc.analysis.bootstrap import interval
from hf_posenc.analysis.dimensions import movement
from hf_posenc.analysis.order import SHUFFLED
from hf_posenc.analysis.probes import without_positions
from hf_posenc.analysis.windows import CutTexts, cut
from hf_posenc.modeling.schemes.positions import t5_bucket
from hf_posenc.modeling.schemes.sinusoidal import sinusoids


LENGTH, BATCH = 128, 16
THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# Of sinusoids: (width, positions of the model, first positions that are looked at).
SINUSOIDS = ((384, 512, 64), (384, 512, 512), (512, 512, 128), (512, 128, 128), (768, 512, 512))
CLIPS = (0, 1, 2, 4, 8, 16, 32, 64)
FEWEST = 4

Numbers = dict[str, Any]


@torch.no_grad()
def measure(checkpoint: str, name: str, size: "Size") -> Numbers:
    """All that applies to a model: of position vectors where it has some, of a bias where it has that of `t5`."""
    subject = analysis.study(checkpoint, name=name)
    models = {name: subject, "without positions": without_positions(subject)}
    found: Numbers = {}
    if size.shuffled:
        found["equivariance"] = {name: equivariance(own, size.shuffled) for name, own in models.items()}
    if subject.embeddings.position_scheme is not None:
        found["thresholds"] = thresholds(subject)
        found["cloud"] = cloud(subject)
        found["layers"] = {name: layers(own, size.windows) for name, own in models.items()}
        found["subspaces"] = subspaces(subject, size.rotations)
    if "t5" in subject.model.config.schemes:
        found["clipped"] = clipped(subject, size.clipped)
    return found


@dataclass(frozen=True)
class Size:
    """How much is read: `windows` of 128 tokens whose states are taken apart, `shuffled` texts of 48 tokens, and by length how many
    windows distances are `clipped` in; `rotations` of positions at random."""

    windows: int
    shuffled: int
    clipped: dict[int, int]
    rotations: int


LARGE = Size(windows=759, shuffled=100, clipped={128: 60, 512: 20}, rotations=200)
# For a model that takes as long as ten of the other.
SMALL = Size(windows=96, shuffled=0, clipped={128: 10}, rotations=100)


def thresholds(subject: analysis.Subject) -> list[Numbers]:
    """By threshold, the share of the dimensions that move: of sinusoids, and of the model's position vectors."""
    vectors = subject.position_vectors().double()
    found = []
    for width, positions, span in SINUSOIDS:
        waves = sinusoids(torch.arange(positions), width, 10000.0, "interleaved", torch.float64)
        found.append({"of": "sinusoids", "width": width, "positions": positions} | _moving(waves, span))
    for span in (64, 128, len(vectors)):
        of = {"of": subject.name, "width": vectors.shape[1], "positions": len(vectors)}
        found.append(of | _moving(vectors, span))
    return found


def _moving(vectors: torch.Tensor, span: int) -> Numbers:
    moves = movement("", vectors, [(0, span)])
    [change] = moves.change
    shares = {str(threshold): float((change >= threshold * moves.typical).mean()) for threshold in THRESHOLDS}
    return {"span": span, "moving": shares}


def cloud(subject: analysis.Subject, sample: int = 2000) -> Numbers:
    """Distances of positions from their mean, and of words from the nearest other word; whose cloud a token's vector is nearest to.

    Special and unused tokens are left out. A word's cloud is the word with each position added.
    """
    words, positions = subject.word_vectors.double(), subject.added_positions().double()
    tokenizer = subject.tokenizer
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    kept = torch.tensor(
        [
            number
            for number, name in enumerate(names)
            if name[0] not in "[<" and number not in tokenizer.all_special_ids
        ]
    )
    words = words[kept]
    radius = (positions - positions.mean(0)).norm(dim=1)
    between = torch.pdist(positions)
    drawn = torch.randperm(len(words), generator=torch.Generator().manual_seed(0))[:sample]
    distances = torch.cdist(words[drawn], words)
    distances[torch.arange(len(drawn)), drawn] = torch.inf
    nearest = distances.min(1).values
    return {
        "words": len(words),
        "sampled": len(drawn),
        "radius": _spread(radius),
        "radius_of_128": _spread((positions[:LENGTH] - positions[:LENGTH].mean(0)).norm(dim=1)),
        "radius_but_first": _spread(radius[1:]),
        "between_positions": _spread(between),
        "nearest_word": _spread(nearest),
        "nearest_word_median_interval": _of_median(nearest),
        "apart": float((nearest > 2 * radius[1:].median()).double().mean()),
        "own_word_nearest": _own(words, positions, drawn),
    }


def _spread(values: torch.Tensor) -> Numbers:
    low, median, high = values.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=values.dtype)).tolist()
    return {"median": median, "low": low, "high": high, "largest": float(values.max())}


def _of_median(values: torch.Tensor, draws: int = 2000) -> list[float]:
    random = np.random.default_rng(0)
    drawn = np.median(values.numpy()[random.integers(len(values), size=(draws, len(values)))], axis=1)
    return np.quantile(drawn, [0.025, 0.975]).tolist()


def _own(words: torch.Tensor, positions: torch.Tensor, drawn: torch.Tensor) -> float:
    """Of words with a random position each, the share whose nearest point, among all words with another random position, is of their own word."""
    first, second = torch.randint(len(positions), (2, len(words)), generator=torch.Generator().manual_seed(1))
    distances = torch.cdist(words[drawn] + positions[first[drawn]], words + positions[second])
    return float((distances.argmin(1) == drawn).double().mean())


def equivariance(subject: analysis.Subject, texts: int) -> Numbers:
    """What becomes of token vectors when words are shuffled: f(Px) and P f(x)."""
    order = analysis.order_sensitivity(subject, count=texts)
    change = order.reordered[SHUFFLED]
    return {
        "tokens": change.tokens,
        "tokens_interval": list(change.tokens_interval),
        "text": change.text,
        "text_interval": list(change.text_interval),
        "largest": change.largest,
        "texts": order.texts,
        "length": order.length,
    }


class Groups:
    """Sums of states by group, of each half of the texts, for the variance that the halves' means have in common.

    Args:
        groups: how many there are.
    """

    def __init__(self, groups: int):
        self.count, self.sums = torch.zeros(2, groups, dtype=torch.float64), None

    def add(self, half: int, labels: torch.Tensor, values: torch.Tensor) -> None:
        """Labels (number,), values (number, width)."""
        if self.sums is None:
            self.sums = torch.zeros(*self.count.shape, values.shape[1], dtype=torch.float64)
        self.sums[half].index_add_(0, labels, values)
        self.count[half].index_add_(0, labels, torch.ones(len(labels), dtype=torch.float64))

    def common(self) -> float:
        """Variance, summed over the width, of groups that are in each half often enough, weighted by how often."""
        often = (self.count >= FEWEST).all(0)
        means = self.sums[:, often] / self.count[:, often, None]
        weights = self.count[:, often].sum(0) / self.count[:, often].sum()
        centred = means - (weights[:, None] * means).sum(1, keepdim=True)
        return float((centred.prod(0).sum(1) * weights).sum())


# What a state can be said to be of, and the same labels dealt out at random.
LABELS = ("position", "word", "document")


def layers(subject: analysis.Subject, count: int) -> Numbers:
    """By layer, from the input on: shares of the variance of the states that positions, words (tokens) and documents have.

    Each share also with its labels shuffled: within a window where they are positions, over all tokens where they are words, over all windows
    where they are documents. By head, the share of the scores' variance over keys that the two positions alone explain. Special tokens count
    in neither.
    """
    generator = torch.Generator().manual_seed(0)
    windows = cut(subject, None, LENGTH, count, generator)
    places, ids = windows.places, windows.input_ids
    half = torch.randperm(len(ids), generator=generator) % 2
    labels = _labels(windows, generator)
    depth, heads = len(subject.layers), subject.sizes.num_attention_heads
    groups = [{name: Groups(int(own.max()) + 1) for name, own in labels.items()} for _ in range(depth + 1)]
    moments = [[0, 0, 0] for _ in range(depth + 1)]
    scores = torch.zeros(depth, 2, heads, len(places), len(places), dtype=torch.float64)
    squares = torch.zeros(depth, heads, dtype=torch.float64)
    for part in (0, 1):
        for some in (half == part).nonzero()[:, 0].split(BATCH):
            seen = subject.observe(ids[some], layers=range(depth))
            for layer, states in enumerate(seen.hidden_states):
                values = states[:, places].flatten(0, 1).double()
                moments[layer][0] += len(values)
                moments[layer][1] += values.sum(0)
                moments[layer][2] += values.square().sum()
                for name, own in groups[layer].items():
                    own.add(part, labels[name][some].flatten(), values)
            for layer in range(depth):
                own = seen.layers[layer].scores[:, :, places][..., places].double()
                own = own - own.mean(-1, keepdim=True)
                scores[layer, part] += own.sum(0)
                squares[layer] += own.square().sum((0, 2, 3))
    variances = [float(square - total.square().sum() / number) / number for number, total, square in moments]
    shares = {name: [own[name].common() / variance for own, variance in zip(groups, variances)] for name in labels}
    of_scores = scores / half.bincount(minlength=2)[:, None, None, None]
    by_head = of_scores.prod(1).sum((-1, -2)) / (squares / len(ids))
    return {
        "windows": len(ids),
        "documents": len(windows.document.unique()),
        "shares": shares,
        "scores": by_head.tolist(),
    }


def _labels(windows: CutTexts, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """By name, (windows, tokens): what a token is of, and as a control the same dealt out at random."""
    places = windows.places
    words = windows.input_ids[:, places].unique(return_inverse=True)[1]
    positions = torch.arange(len(places)).expand_as(words)
    documents = windows.document.unique(return_inverse=True)[1][:, None].expand_as(words)
    turned = torch.stack([row[torch.randperm(len(row), generator=generator)] for row in positions])
    dealt = words.flatten()[torch.randperm(words.numel(), generator=generator)].view_as(words)
    others = documents[torch.randperm(len(documents), generator=generator)]
    own = dict(zip(LABELS, (positions, words, documents)))
    return own | {f"{name}, shuffled": label for name, label in zip(LABELS, (turned, dealt, others))}


def subspaces(subject: analysis.Subject, rotations: int) -> list[Numbers]:
    """Of the positions' variance, what lies where a share of the words' does, in the embeddings, and 95 % of the rotations."""
    [space] = [own for own in analysis.shared_space(subject, rotations=rotations).spaces if own.name == "embeddings"]
    return [
        {
            "share": overlap.share,
            "rotations": rotations,
            "found": float(overlap.positions_in_words.found[0]),
            "chance": float(overlap.positions_in_words.chance[0]),
            "low": float(overlap.positions_in_words.low[0]),
            "high": float(overlap.positions_in_words.high[0]),
        }
        for overlap in space.overlaps
    ]


def clipped(subject: analysis.Subject, counts: dict[int, int]) -> list[Numbers]:
    """How much the vectors change where all distances from one on have its bias, as a share of that between unrelated tokens (texts)."""
    found = []
    for length, count in counts.items():
        windows = cut(subject, None, length, count, torch.Generator().manual_seed(0))
        before = _last(subject, windows.input_ids)
        for clip in CLIPS:
            tables = _tables(subject)
            kept = [table.weight.detach().clone() for table in tables]
            for table, rows in zip(tables, kept):
                table.weight.copy_(rows[_bucket_of_clipped(subject, clip)])
            found.append(
                {"length": length, "clip": clip} | _change(before, _last(subject, windows.input_ids), windows)
            )
            for table, rows in zip(tables, kept):
                table.weight.copy_(rows)
    return found


def _tables(subject: analysis.Subject) -> list[torch.nn.Module]:
    owners = [subject.encoder, *subject.attentions]
    return [owner.relative_attention_bias for owner in owners if hasattr(owner, "relative_attention_bias")]


def _bucket_of_clipped(subject: analysis.Subject, clip: int) -> torch.Tensor:
    """For each bucket, that of its distance, clipped. `clip` is the first distance of a bucket."""
    [scheme] = [own for own in subject.attentions[0].position_schemes if own.name == "t5"]
    distances = torch.arange(-4096, 4097)
    buckets, of_clipped = (
        t5_bucket(own, scheme.buckets, scheme.max_distance) for own in (distances, distances.clamp(-clip, clip))
    )
    rows = torch.arange(scheme.buckets)
    rows[buckets] = of_clipped
    return rows


def _last(subject: analysis.Subject, input_ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([subject.observe(some).hidden_states[-1] for some in input_ids.split(BATCH)]).double()


def _change(before: torch.Tensor, after: torch.Tensor, windows: CutTexts) -> Numbers:
    def apart(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return 1 - torch.cosine_similarity(first, second, dim=-1)

    places = windows.places
    tokens = apart(before[:, places], after[:, places]).mean(1)
    others = apart(before[:, places], before.roll(1, dims=0)[:, places.roll(1)]).mean(1)
    texts = apart(before.mean(1), after.mean(1))
    between = apart(before.mean(1), before.mean(1).roll(1, dims=0))
    return {
        "texts": len(before),
        "documents": len(windows.document.unique()),
        "cosine": float(1 - tokens.mean()),
        "tokens": float(tokens.sum() / others.sum()),
        "tokens_interval": list(interval(tokens.numpy(), others.numpy(), windows.document.numpy())),
        "text": float(texts.sum() / between.sum()),
        "text_interval": list(interval(texts.numpy(), between.numpy(), windows.document.numpy())),
    }
