"""Intervals of means over texts: what else could have come out with other texts of the same kind."""

import numpy as np


DRAWS = 2000


def interval(
    values: np.ndarray, over: np.ndarray | None = None, group: np.ndarray | None = None, seed: int = 0
) -> tuple[float, float]:
    """Between which 95 % of the draws are, where as many groups are drawn with replacement, of Σ values / Σ over.

    Args:
        values: (number,), such as distances, or whether a guess was right.
        over: (number,), what their sum is divided by the sum of; by default 1 each, which gives the mean.
        group: (number,), integers, what is drawn as a whole, such as the document that a value is from; by default each by itself.

    Returns:
        The ends of the interval; NaN for a single group, which says nothing of other groups.

    Source: percentile bootstrap, Efron and Tibshirani (1993), "An Introduction to the Bootstrap", chapter 13.
    """
    values = np.asarray(values, dtype=float)
    over = np.ones_like(values) if over is None else np.asarray(over, dtype=float)
    _, group = np.unique(np.arange(len(values)) if group is None else group, return_inverse=True)
    sums, divisors = (np.bincount(group, weights=weights) for weights in (values, over))
    if len(sums) < 2:
        return np.nan, np.nan
    drawn = np.random.default_rng(seed).integers(len(sums), size=(DRAWS, len(sums)))
    low, high = np.quantile(sums[drawn].sum(1) / divisors[drawn].sum(1), [0.025, 0.975])
    return float(low), float(high)
