"""Intervals over texts."""

import numpy as np
import pytest

from hf_posenc.analysis.bootstrap import interval


def test_the_interval_of_a_mean_is_two_standard_errors_on_either_side():
    values = np.random.default_rng(1).normal(5, 2, 400)
    low, high = interval(values)
    error = values.std() / 20
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.2 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.2 * error)


def test_a_document_is_drawn_as_a_whole():
    """A hundred values of ten documents, alike within each, tell no more than ten."""
    of_document = np.random.default_rng(2).normal(size=10)
    repeated = np.repeat(of_document, 10)
    assert interval(repeated, group=np.repeat(np.arange(10), 10)) == pytest.approx(interval(of_document))
    low, high = interval(repeated)
    assert high - low < 0.6 * np.ptp(interval(of_document))


def test_ratios_are_of_sums():
    values, over = np.array([1.0, 8.0]), np.array([2.0, 4.0])
    assert interval(values, over) == (0.5, 2.0)


def test_one_group_says_nothing_of_others():
    assert np.isnan(interval(np.arange(5.0), group=np.zeros(5))).all()
