"""Where do the rows of a position embedding matrix begin to look different?

A model that was trained on shorter texts last has rows that this training did not reach. They are as they were before, and how far a row
is from the next one shows it. At every row, the distances between neighbouring rows before it are compared with those after it. The control
are all rows that are no edge: there, the two sides differ by chance and by what changes slowly.
"""

from dataclasses import dataclass

import numpy as np
import torch

from .records import Record


# Distances on either side, those next to a row that are left out (where texts were cut stands [SEP], whose row is like no other), and those
# that tell an edge from a slow change.
REACH, GAP, NEAR = 16, 3, 5
# At an edge the logarithm of the ratio is so many times that of nine tenths of the other rows, and the ratio is at least so far from 1.
TIMES, LEAST = 3.0, 1.05
# An edge is so much of itself in the nearest distances; a slow change is less than half.
ABRUPT = 0.75
FEWEST = 64


@dataclass(frozen=True)
class Edge(Record):
    """A row of a position embedding matrix from which neighboring rows are closer to each other, or farther apart, than before it.

    Attributes:
        row: its number, from 0.
        before: median distance between neighboring rows, of 16 before this row.
        after: the same from this row on.
        ratio: `after` divided by `before`.
        others: the interval in which 95 % of these ratios are at other rows, (low, high).
        count: number of other rows.
    """

    row: int
    before: float
    after: float
    ratio: float
    others: tuple[float, float]
    count: int

    def __str__(self) -> str:
        low, high = self.others
        return (
            f"From row {self.row} on the rows look different: neighbours are {self.after:.3g} apart (median of {REACH}), before it {self.before:.3g}, a "
            f"ratio of {self.ratio:.2f}, and at {self.count} other rows 95 % of the ratios are between {low:.2f} and {high:.2f}; as where a "
            f"model was last trained on texts of at most {self.row} tokens"
        )


def find_edge(vectors: torch.Tensor) -> Edge | None:
    """The clearest edge of position vectors (positions, width); None where none stands out, or there are too few rows to tell."""
    steps = (vectors[1:] - vectors[:-1]).double().norm(dim=-1).numpy()
    steps = steps + 1e-9 * (steps.max(initial=0) or 1.0)  # rows that are all alike have a ratio, too
    # The first row, that of [CLS], is not among the neighbours.
    rows = np.arange(1 + REACH + GAP, len(steps) - REACH)
    logs = np.array([_contrast(steps, row) for row in rows])
    if len(rows) < FEWEST:
        return None
    row = _located(steps, int(rows[np.abs(logs).argmax()]))
    is_other = np.abs(rows - row) > REACH + GAP
    if row not in rows or is_other.sum() < FEWEST:
        return None
    found, near, others = _contrast(steps, row), _contrast(steps, row, NEAR), logs[is_other]
    least = max(TIMES * np.quantile(np.abs(others), 0.9), np.log(LEAST))
    if abs(found) < least or near / found < ABRUPT:
        return None
    low, high = np.exp(np.quantile(others, [0.025, 0.975])).tolist()
    return Edge(row, *_sides(steps, row), float(np.exp(found)), (low, high), int(is_other.sum()))


def _sides(steps: np.ndarray, row: int, reach: int = REACH) -> tuple[float, float]:
    """Median distance between neighbours before a row and from it on; the distance to the row itself is the last before it."""
    before, after = steps[row - GAP - reach : row - GAP], steps[row : row + reach]
    return float(np.median(before)), float(np.median(after))


def _contrast(steps: np.ndarray, row: int, reach: int = REACH) -> float:
    before, after = _sides(steps, row, reach)
    return float(np.log(after / before))


def _located(steps: np.ndarray, row: int) -> int:
    """The row that an edge near this one is at: the last with a jump to it, else where two levels fit the distances best."""
    before, after = _sides(steps, row)
    near = np.arange(row - REACH, row + REACH)
    jumps = near[steps[near - 1] > 1.5 * max(before, after)]
    if jumps.size:
        return int(jumps[-1])
    own = steps[near]
    misfits = [np.abs(own[:cut] - before).sum() + np.abs(own[cut:] - after).sum() for cut in range(len(own))]
    return int(near[np.argmin(misfits)]) + 1  # the first distance that fits better is that to the row
