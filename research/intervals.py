"""Intervals and tests for figures of several seeds: what a comparison may say, and what it may not."""

import statistics
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit


# Two schemes are called no different where their F1 differs by less than this.
MARGIN = 0.03
# A verdict of no difference needs so many pairs of seeds.
PAIRS = 10


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its interval."""

    mean: float
    low: float
    high: float

    def written(self, digits: int = 3) -> str:
        """For people: 0.004 (−0.010 to 0.018)."""
        numbers = [f"{value:.{digits}f}" for value in (self.mean, self.low, self.high)]
        mean, low, high = (text.replace("-", "−") if float(text) else text.lstrip("-") for text in numbers)
        return f"{mean} ({low} to {high})"


def of_mean(values: list[float], confidence: float = 0.95) -> Interval:
    """Student's interval of the mean of independent values from a normal distribution.

    Raises:
        ValueError: there is a single value.
    """
    if len(values) < 2:
        raise ValueError("one value has no interval")
    mean, error = statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5
    half = float(stdtrit(len(values) - 1, (1 + confidence) / 2)) * error
    return Interval(mean, mean - half, mean + half)


def paired(own: list[float], other: list[float], confidence: float = 0.95) -> Interval:
    """Student's interval of the mean difference of values that belong together: of one seed, with the same data."""
    return of_mean([ours - theirs for ours, theirs in zip(own, other, strict=True)], confidence)


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests of a mean difference against a margin (Schuirmann 1987).

    Attributes:
        p: the larger of the two tests'.
        interval: of 1 - 2·level (90 % for a level of 5 %); it lies within the margin where both tests reject.
        holds: whether both reject.
    """

    p: float
    interval: Interval
    holds: bool


def equivalence(own: list[float], other: list[float], margin: float = MARGIN, level: float = 0.05) -> Equivalence:
    """Whether two schemes differ by less than a margin, seed by seed."""
    differences = [ours - theirs for ours, theirs in zip(own, other, strict=True)]
    interval = of_mean(differences, 1 - 2 * level)
    error, degrees = statistics.stdev(differences) / len(differences) ** 0.5, len(differences) - 1
    distances = margin - interval.mean, margin + interval.mean
    if error == 0:
        p = 0.0 if min(distances) > 0 else 1.0
    else:
        p = max(float(stdtr(degrees, -distance / error)) for distance in distances)
    return Equivalence(p, interval, p < level)


def sign(interval: Interval) -> str | None:
    """ "higher" or "lower" of an interval of differences without zero in it."""
    return "higher" if interval.low > 0 else "lower" if interval.high < 0 else None


def verdict(own: list[float], other: list[float], margin: float = MARGIN) -> str | None:
    """What may be said of two schemes: "higher", "lower", "no different", or nothing (None), where the interval has to do.

    The first two where the interval of 95 % has no zero in it, the third by two one-sided tests over at least [`PAIRS`] seeds.
    Where both hold the difference is there, and smaller than the margin: the sign is told.
    """
    if told := sign(paired(own, other)):
        return told
    return "no different" if len(own) >= PAIRS and equivalence(own, other, margin).holds else None


def crossed(table: np.ndarray, confidence: float = 0.95) -> Interval:
    """Interval of the mean of a table (conversions, seeds) whose rows share their seeds: both vary, and neither is repeated.

    The two-way random model without repetition: the variance of the mean is (MS_rows + MS_columns - MS_rest) / cells, with
    Satterthwaite's degrees of freedom; not less than by the seeds alone, or by the conversions alone.

    Raises:
        ValueError: there are fewer than two rows or columns.
    """
    rows, columns = table.shape
    if min(rows, columns) < 2:
        raise ValueError(f"expected at least two conversions and two seeds, got {rows} and {columns}")
    mean, of_rows, of_columns = table.mean(), table.mean(axis=1), table.mean(axis=0)
    rest = table - of_rows[:, None] - of_columns + mean
    freedom = np.array([rows - 1, columns - 1, (rows - 1) * (columns - 1)])
    squares = np.array([of_rows.var() * rows * columns, of_columns.var() * rows * columns, (rest**2).sum()]) / freedom
    together = squares[0] + squares[1] - squares[2]
    candidates = [*zip(squares[:2], freedom[:2]), (together, together**2 / (squares**2 / freedom).sum())]
    square, degrees = max(candidates, key=lambda candidate: candidate[0])
    half = float(stdtrit(degrees, (1 + confidence) / 2) * (square / table.size) ** 0.5)
    return Interval(float(mean), float(mean - half), float(mean + half))


def of_groups(
    sums: np.ndarray, numbers: np.ndarray, draws: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap of a mean over queries that belong to groups, as to documents: groups are drawn again, with all of their queries.

    Args:
        sums, numbers: of each group, the sum over its queries and how many it has.
    """
    drawn = np.random.default_rng(seed).integers(len(sums), size=(draws, len(sums)))
    ends = [(1 - confidence) / 2, (1 + confidence) / 2]
    low, high = np.quantile(sums[drawn].sum(axis=1) / numbers[drawn].sum(axis=1), ends)
    return float(low), float(high)


def f1(counts: np.ndarray) -> np.ndarray:
    """Micro-F1 (...) of how many marks were found, wrong and missed, (..., 3); 0 where there is nothing."""
    found, wrong, missed = np.moveaxis(counts, -1, 0)
    return 2 * found / np.maximum(2 * found + wrong + missed, 1)


def resampled(
    own: np.ndarray, other: np.ndarray | None = None, draws: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Bootstrap of the mean F1 over seeds, or of its difference to another scheme's, seeds and documents resampled together.

    Each draw takes seeds with replacement, and documents with replacement, the same documents for every seed, since all seeds are
    scored on the same ones, and the same seeds and documents for both schemes. Percentile interval.

    Args:
        own, other: counts (seeds, documents, 3), as [`f1`] takes them; conversions, which are kept as they are and averaged over, may
            stand between the two.
    """
    generator = np.random.default_rng(seed)
    seeds, documents = own.shape[0], own.shape[-2]
    sides = [own] if other is None else [own, other]

    def difference(rows: np.ndarray, weights: np.ndarray) -> float:
        """Of the seeds `rows`, each document counted as often as `weights` says."""
        means = [f1(np.einsum("s...dc,d->s...c", side[rows], weights)).mean() for side in sides]
        return means[0] - (means[1] if other is not None else 0.0)

    found = []
    for _ in range(draws):
        rows = generator.integers(seeds, size=seeds)
        weights = np.bincount(generator.integers(documents, size=documents), minlength=documents)
        found.append(difference(rows, weights))
    low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(difference(np.arange(seeds), np.ones(documents))), float(low), float(high))
