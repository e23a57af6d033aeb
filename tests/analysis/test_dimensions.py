"""Shares of moving dimensions, planted."""

import math

import numpy as np
import pytest
import tiny
import torch

from hf_posenc import analysis
from hf_posenc.analysis.dimensions import movement


def test_planted_dimensions_are_found():
    vectors = torch.full((64, 20), 5.0, dtype=torch.float64)
    vectors[:, :6] = torch.randn(64, 6, dtype=torch.float64)
    vectors[32:, 10:13] = torch.randn(32, 3, dtype=torch.float64)
    found = movement("planted", vectors, [(0, 32), (0, 64), (32, 64)])
    np.testing.assert_allclose(found.moving, [6 / 20, 9 / 20, 9 / 20])
    assert found.change.shape == (3, 20) and (found.change[0, 6:] == 0).all()
    np.testing.assert_allclose(found.change[1], vectors.numpy().std(0), atol=1e-12)
    for index, (first, last) in enumerate(found.spans):
        part = vectors[first:last].numpy()
        along_axes, turned = part.var(0), np.linalg.eigvalsh(np.cov(part, rowvar=False))
        for variances, share in ((along_axes, found.holding[index]), (turned, found.directions[index])):
            largest = np.sort(variances)[::-1]
            [fewest] = [
                number
                for number in range(1, 21)
                if largest[:number].sum() >= 0.95 * largest.sum() > largest[: number - 1].sum()
            ]
            assert share == fewest / 20


def test_few_directions_may_move_all_dimensions():
    basis = torch.linalg.qr(torch.randn(20, 2, dtype=torch.float64))[0]
    vectors = torch.randn(64, 2, dtype=torch.float64) @ basis.T
    found = movement("turned", vectors, [(0, 64)])
    assert found.moving[0] > 0.8 and found.directions[0] == 2 / 20


def test_a_sinusoid_moves_where_its_angle_does():
    data = analysis.moving_dimensions("sinusoidal", lengths=(64, 128))
    [table] = data.tables
    assert table.spans == [(0, 64), (0, 128), (128, 512)]
    # The fastest pairs go round and round (standard deviation √½), the slowest go straight.
    np.testing.assert_allclose(table.change[1, 2:100], math.sqrt(0.5), atol=0.05)
    slope = 10000 ** (-2 * 255 / 512)
    assert table.change[1, 510] == pytest.approx(slope * np.arange(128).std(), rel=1e-2)
    assert table.moving[0] < table.moving[1] < 1
    assert analysis.describe_moving_dimensions(data).startswith(
        "The claim that only about half of the dimensions change holds for sinusoids"
    )


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_learned_table_stands_beside_sinusoids_of_its_size(family):
    data = analysis.moving_dimensions(tiny.build("absolute", family), lengths=(16, 1000))
    width = 24 if family == "electra" else 32
    assert [table.change.shape[1] for table in data.tables] == [width, width]
    assert data.tables[1].spans == [(0, 16), (16, 64 - (0 if family in ("bert", "electra", "distilbert") else 2))]
    assert data.tables[1].moving.min() == 1  # random numbers everywhere


def test_without_vectors_there_is_nothing_that_moves():
    with pytest.raises(ValueError, match="has no absolute position vectors: position_scheme is 't5'"):
        analysis.moving_dimensions(tiny.build("t5"))


def test_words_beside_positions_are_counted_by_dimension():
    """Words in the first 20 dimensions, positions in the last 16 of 32: they share four."""
    model = tiny.build("absolute")
    with torch.no_grad():
        words, positions = model.embeddings.word_embeddings.weight, model.embeddings.table.weight
        words.normal_()[:, 20:] = 0.3
        positions.normal_(0, 0.5)[:, :16] = 0
    found = analysis.words_beside_positions(model)
    assert (found.width, found.used, found.moved, found.both) == (32, 20, 16, 4)
    assert found.words_in_moved == pytest.approx(4 / 20, abs=0.05)
    assert found.word_rms == pytest.approx((20 / 32 + 0.3**2 * 12 / 32) ** 0.5, rel=0.05)
    assert found.word_deviation == pytest.approx((20 / 32) ** 0.5, rel=0.05)
    assert found.position_rms == pytest.approx(0.5 * 0.5**0.5, rel=0.1)
    assert found.position_directions <= 16 < found.word_directions <= 20


def test_words_beside_positions_take_a_model_that_adds_them():
    with pytest.raises(ValueError, match="adds no positions to its token embeddings"):
        analysis.words_beside_positions(tiny.build("t5"))
