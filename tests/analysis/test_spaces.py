"""Angles and overlaps of planted subspaces."""

import numpy as np
import pytest
import tiny
import torch

from hf_posenc import analysis
from hf_posenc.analysis.spaces import overlaps


WIDTH = 24


def vectors_in(axes: torch.Tensor, count: int = 400) -> torch.Tensor:
    """Random vectors (count, width) in the span of the columns, as much in each, about a mean elsewhere."""
    random = torch.linalg.qr(torch.randn(count, axes.shape[1], dtype=torch.float64))[0]
    random = torch.linalg.qr(random - random.mean(0))[0] * count**0.5
    return random @ axes.T + 3


def planted(words: slice, positions: slice, share: float = 0.999):
    basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64))[0]
    [found] = overlaps(
        vectors_in(basis[:, words]), vectors_in(basis[:, positions]), (share,), 3, torch.Generator().manual_seed(0)
    )
    return found


def test_orthogonal_subspaces():
    found = planted(slice(0, 8), slice(8, 12))
    assert (found.word_dimensions, found.position_dimensions, found.width) == (8, 4, WIDTH)
    np.testing.assert_allclose(found.angles, 90, atol=1e-6)
    assert found.words_in_positions == pytest.approx(0, abs=1e-12)
    assert found.positions_in_words == pytest.approx(0, abs=1e-12)
    assert (found.words_by_chance, found.positions_by_chance) == (4 / WIDTH, 8 / WIDTH)


def test_identical_subspaces():
    found = planted(slice(0, 6), slice(0, 6))
    np.testing.assert_allclose(found.angles, 0, atol=1e-4)
    assert found.words_in_positions == pytest.approx(1) and found.positions_in_words == pytest.approx(1)


def test_subspaces_that_share_two_of_four_directions():
    found = planted(slice(0, 4), slice(2, 6))
    np.testing.assert_allclose(found.angles, [0, 0, 90, 90], atol=1e-4)
    assert found.words_in_positions == pytest.approx(0.5) and found.positions_in_words == pytest.approx(0.5)


def test_the_dimensions_are_as_few_as_hold_the_share():
    assert planted(slice(0, 10), slice(10, 20), share=0.5).word_dimensions == 5
    assert planted(slice(0, 10), slice(10, 20), share=0.8).position_dimensions == 8
    assert planted(slice(0, 10), slice(10, 20), share=0.81).position_dimensions == 9


def test_random_subspaces_are_what_random_vectors_have():
    words, positions = torch.randn(5000, WIDTH), torch.randn(5000, WIDTH)
    [found] = overlaps(words, positions, (0.5,), 50, torch.Generator().manual_seed(0))
    assert found.words_in_positions == pytest.approx(found.words_by_chance, abs=0.05)
    # The mean of the squared cosines of two random subspaces is the larger one's share of the space.
    squared = np.mean(np.cos(np.deg2rad(found.random_angles)) ** 2)
    assert squared == pytest.approx(max(found.word_dimensions, found.position_dimensions) / WIDTH, abs=0.05)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_projections_see_what_the_first_layer_sees(family):
    model = tiny.build("absolute", family)
    subject = analysis.study(model)
    data = analysis.shared_space(model)
    assert [space.name for space in data.spaces] == ["embeddings", "queries", "keys"]
    # Differences of the first layer's queries are what the map makes of differences of words, over their own deviations.
    with torch.no_grad():
        ids = torch.tensor([[7, 8]])
        words = subject.word_vectors[ids[0]]
        embedded = subject.embeddings.LayerNorm(words)
        expected = embedded if subject.projection is None else subject.projection(embedded)
        deviation = words.std(-1, correction=0)[:, None]
        mapped = subject.into_attention(words) / deviation
    torch.testing.assert_close(mapped[0] - mapped[1], expected[0] - expected[1], atol=1e-4, rtol=1e-4)


def test_without_added_positions_there_is_no_shared_space():
    for scheme in ("t5", "tupe", "none"):
        with pytest.raises(ValueError, match="adds no positions to its words: position_scheme="):
            analysis.shared_space(tiny.build(scheme))
    with pytest.raises(ValueError, match=r"shares must be above 0 and at most 1, got \(0.5, 2\)"):
        analysis.shared_space(tiny.build("absolute"), shares=(0.5, 2))
    with pytest.raises(ValueError, match="needs a checkpoint, got the scheme 'sinusoidal' by its name"):
        analysis.shared_space("sinusoidal")
