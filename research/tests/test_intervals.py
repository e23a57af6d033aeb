"""intervals.py against scipy and closed forms."""

import numpy as np
import pytest
from intervals import Interval, crossed, equivalence, f1, of_mean, paired, resampled, verdict
from scipy import stats
from sklearn.metrics import f1_score


def numbers(count: int, mean: float = 0.0, deviation: float = 1.0, seed: int = 0) -> list[float]:
    """Numbers whose mean and sample standard deviation are exactly these."""
    drawn = np.random.default_rng(seed).normal(size=count)
    return list(mean + deviation * (drawn - drawn.mean()) / drawn.std(ddof=1))


@pytest.mark.parametrize("count", [2, 3, 10])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_interval_of_a_mean_is_scipys(count, confidence):
    values = list(np.random.default_rng(count).normal(3, 2, size=count))
    theirs = stats.ttest_1samp(values, 0).confidence_interval(confidence)
    ours = of_mean(values, confidence)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    assert ours.mean == pytest.approx(np.mean(values))


def test_pairs_are_compared_seed_by_seed():
    rng = np.random.default_rng(1)
    common = rng.normal(0, 10, size=6)
    own, other = list(common + 0.5 + rng.normal(0, 0.1, 6)), list(common)
    theirs = stats.ttest_rel(own, other).confidence_interval()
    ours = paired(own, other)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    assert ours.low > 0, "seeds differ by far more than the schemes"
    with pytest.raises(ValueError):
        paired(own, other[:5])


def test_one_value_has_no_interval():
    with pytest.raises(ValueError, match="no interval"):
        of_mean([1.0])


@pytest.mark.parametrize("mean", [-0.04, -0.02, 0.0, 0.013, 0.031])
@pytest.mark.parametrize("deviation", [0.005, 0.05])
def test_equivalence_is_two_one_sided_tests(mean, deviation):
    differences = numbers(10, mean, deviation)
    ours = equivalence(differences, [0.0] * 10, margin=0.03)
    above = stats.ttest_1samp(differences, -0.03, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, 0.03, alternative="less").pvalue
    assert ours.p == pytest.approx(max(above, below))
    assert ours.holds == (max(above, below) < 0.05)
    assert ours.holds == (-0.03 < ours.interval.low and ours.interval.high < 0.03), (
        "the interval of 90 % says the same"
    )


def test_a_verdict_needs_an_interval_without_zero_or_ten_seeds():
    zeros = [0.0] * 10
    assert verdict(numbers(10, 0.02, 0.01), zeros) == "higher"
    assert verdict(numbers(10, -0.02, 0.01), zeros) == "lower"
    assert verdict(numbers(10, 0.001, 0.01), zeros) == "no different"
    assert verdict(numbers(10, 0.001, 0.1), zeros) is None
    assert verdict(numbers(3, 0.0001, 0.001), zeros[:3]) is None, "three seeds"


def test_conversions_that_share_seeds_are_no_more_certain_than_their_seeds():
    rng = np.random.default_rng(0)
    rows, columns = rng.normal(0, 1.0, size=(4, 1)), rng.normal(0, 2.0, size=(1, 30))
    # Without noise of its own, a cell is its row and its column: the variance of the mean is the sum of both means'.
    ours = crossed(5.0 + rows + columns)
    variances = [part.var(ddof=1) / part.size for part in (rows, columns)]
    degrees = sum(variances) ** 2 / (variances[0] ** 2 / 3 + variances[1] ** 2 / 29)
    half = stats.t.ppf(0.975, degrees) * sum(variances) ** 0.5
    assert (ours.high - ours.low) / 2 == pytest.approx(half)
    # Conversions that are alike: what seeds say, and not what the three means of the same seeds do.
    alike = np.repeat(columns, 3, axis=0)
    seeds = of_mean(list(columns[0]))
    assert (crossed(alike).low, crossed(alike).high) == pytest.approx((seeds.low, seeds.high))
    for wrong in (np.zeros((1, 5)), np.zeros((3, 1))):
        with pytest.raises(ValueError, match="at least two conversions and two seeds"):
            crossed(wrong)


def test_the_interval_of_crossed_conversions_and_seeds_holds_what_it_says():
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(600):
        table = rng.normal(0, 1.0, size=(3, 1)) + rng.normal(0, 1.0, size=(1, 10)) + rng.normal(0, 0.5, size=(3, 10))
        interval = crossed(table)
        inside += interval.low <= 0 <= interval.high
    assert 0.92 < inside / 600 <= 1


def test_f1_of_counts_is_scikit_learns():
    rng = np.random.default_rng(0)
    labels, predicted = rng.integers(3, size=500), rng.integers(3, size=500)
    found = ((labels == predicted) & (labels > 0)).sum()
    wrong, missed = (((labels != predicted) & (side > 0)).sum() for side in (predicted, labels))
    assert f1(np.array([found, wrong, missed])) == pytest.approx(
        f1_score(labels, predicted, labels=[1, 2], average="micro")
    )
    assert f1(np.zeros(3)) == 0


def test_resampling_finds_the_spread_of_seeds_and_of_documents():
    """Counts for which F1 is linear in them, 2·found / 2·100, so that the variance of a mean over crossed draws is known."""
    rng = np.random.default_rng(0)
    seeds, documents = 20, 30
    by_seed, by_document = rng.normal(0, 4, size=(seeds, 1)), rng.normal(0, 8, size=(1, documents))
    found = 50 + by_seed + by_document
    counts = np.stack([found, 100 - found, 100 - found], axis=-1)
    ours = resampled(counts, draws=4000)
    error = (by_seed.var() / seeds + by_document.var() / documents) ** 0.5 / 100
    assert ours.mean == pytest.approx(found.mean() / 100)
    assert (ours.high - ours.low) / 2 == pytest.approx(1.96 * error, rel=0.06)
    # The same documents and seeds for both sides: what they share is no difference.
    better = np.stack([found + 5, 95 - found, 95 - found], axis=-1)
    apart = resampled(better, counts, draws=200)
    assert (apart.mean, apart.low, apart.high) == pytest.approx((0.05, 0.05, 0.05))
    # Of several conversions the mean.
    several = np.stack([counts, better, better], axis=1)
    apart = resampled(several, np.stack([counts] * 3, axis=1), draws=200)
    assert (apart.mean, apart.low, apart.high) == pytest.approx((0.1 / 3, 0.1 / 3, 0.1 / 3))


def test_intervals_are_written_with_a_minus():
    assert Interval(-0.0001, -0.0104, 0.018).written() == "0.000 (−0.010 to 0.018)"
