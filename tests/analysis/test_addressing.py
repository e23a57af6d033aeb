"""Which positions a head can find by which encoding."""

import numpy as np
import pytest
import torch

from hf_posenc.analysis import addressing, addressing_of_all
from hf_posenc.analysis.addressing import index, normalised_index, parabola, rotated_sinusoids, sinusoids_of
from hf_posenc.modeling.schemes.sinusoidal import sinusoids


@pytest.mark.parametrize("encoding", [index, normalised_index])
def test_an_index_points_at_the_ends_whatever_the_score(encoding):
    """Any bilinear score with it is a straight line in the key."""
    own = torch.cat([encoding(20), torch.ones(20, 1)], dim=1)
    for _ in range(50):
        scores = own @ torch.randn(2, 2, dtype=torch.float64) @ own.T
        assert {*scores.argmax(1).tolist()} <= {0, 19}
    # Of 127 queries that have a position before them, one has it at an end.
    assert addressing("", encoding, 128).fitted == pytest.approx(1 / 127)


@pytest.mark.parametrize("back", [1, 8])
def test_sinusoids_point_at_any_distance(back):
    found = addressing("", sinusoids_of(128), 128, back)
    assert found.fitted > 0.99 and found.halved == 1.0


def test_vectors_that_are_all_different_directions_point_anywhere():
    rows = torch.randn(64, 80)
    found = addressing("", lambda length: rows[:length].double(), 32, 3)
    assert found.fitted == 1.0 and found.doubled < 0.6


def test_sinusoids_are_turned_by_one_matrix_wherever_they_are():
    at = torch.arange(100)
    before, after = (sinusoids(at - back, 32, 10000.0, "interleaved", torch.float64) for back in (3, 0))
    angles = 3 * 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    blocks = torch.stack([torch.stack([angles.cos(), angles.sin()]), torch.stack([-angles.sin(), angles.cos()])])
    turn = torch.block_diag(*blocks.permute(2, 0, 1))
    torch.testing.assert_close(after @ turn, before)
    torch.testing.assert_close(rotated_sinusoids(at - 3, at, 32), after @ turn @ after.T)


def test_a_parabola_is_the_squared_distance():
    at = torch.arange(9)
    expected = -(np.subtract.outer(np.arange(9.0) - 2, np.arange(9)) ** 2)
    np.testing.assert_allclose(parabola(at - 2, at), expected)


def test_all_are_side_by_side_and_a_table_ends():
    found = {(one.encoding, one.back): one for one in addressing_of_all(torch.randn(40, 64), 64, length=32)}
    assert found["learned table", 1].fitted == 1.0 and found["learned table", 1].doubled is None
    for name in ("index and its square, in closed form", "sinusoids, in closed form"):
        assert found[name, 8].fitted == found[name, 8].halved == found[name, 8].doubled == 1.0
    with pytest.raises(ValueError, match="back must be from 1 to a quarter of the length, 8, got 9"):
        addressing("", index, 32, 9)
