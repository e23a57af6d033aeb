"""Angles and overlaps of planted subspaces."""

import numpy as np
import pytest
import tiny
import torch

from hf_posenc import analysis
from hf_posenc.analysis.spaces import Space, covariance, overlaps


WIDTH = 24


def vectors_in(axes: torch.Tensor, count: int = 400) -> torch.Tensor:
    """Random vectors (count, width) in the span of the columns, as much in each, about a mean elsewhere."""
    random = torch.linalg.qr(torch.randn(count, axes.shape[1], dtype=torch.float64))[0]
    random = torch.linalg.qr(random - random.mean(0))[0] * count**0.5
    return random @ axes.T + 3


def overlap(words: torch.Tensor, positions: torch.Tensor, share: float, draws: int = 3):
    generator = torch.Generator().manual_seed(0)
    return overlaps(covariance(words), covariance(positions), (share,), draws, generator)[0]


def planted(words: slice, positions: slice, share: float = 0.999):
    basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64))[0]
    return overlap(vectors_in(basis[:, words]), vectors_in(basis[:, positions]), share)


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


@pytest.mark.parametrize(
    ("words", "positions", "said"),
    [
        (slice(0, 8), slice(8, 12), "less than random ones in the embeddings (0%"),
        (slice(0, 6), slice(0, 6), "more than random ones in the embeddings (100%"),
        (slice(0, 12), slice(10, 14), "about as much as random ones in the embeddings (50%"),
    ],
)
def test_the_sentence_says_whether_they_overlap_more_than_by_chance(words, positions, said):
    data = analysis.SharedSpace("planted", [Space("embeddings", [planted(words, positions)])])
    assert said in analysis.describe_shared_space(data)


def test_the_dimensions_are_as_few_as_hold_the_share():
    assert planted(slice(0, 10), slice(10, 20), share=0.5).word_dimensions == 5
    assert planted(slice(0, 10), slice(10, 20), share=0.8).position_dimensions == 8
    assert planted(slice(0, 10), slice(10, 20), share=0.81).position_dimensions == 9


def test_random_subspaces_are_what_random_vectors_have():
    words, positions = torch.randn(5000, WIDTH), torch.randn(5000, WIDTH)
    found = overlap(words, positions, 0.5, draws=50)
    assert found.words_in_positions == pytest.approx(found.words_by_chance, abs=0.05)
    # The mean of the squared cosines of two random subspaces is the larger one's share of the space.
    squared = np.mean(np.cos(np.deg2rad(found.random_angles)) ** 2)
    assert squared == pytest.approx(max(found.word_dimensions, found.position_dimensions) / WIDTH, abs=0.05)


def test_covariances_of_large_vocabularies_are_summed_up_in_parts():
    vectors = torch.randn(20_000, 5) + 2
    np.testing.assert_allclose(covariance(vectors), np.cov(vectors.numpy(), rowvar=False, bias=True), atol=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_queries_and_keys_are_those_of_the_first_layer(family):
    model = tiny.build("absolute", family)
    with torch.no_grad():  # less variance in some dimensions than in others, and a norm that weighs them
        model.embeddings.word_embeddings.weight.mul_(
            torch.linspace(0.2, 2, model.embeddings.word_embeddings.embedding_dim)
        )
        model.embeddings.LayerNorm.weight.uniform_(0.5, 1.5)
    subject = analysis.study(model)
    data = analysis.shared_space(model, shares=(0.6,))
    assert [space.name for space in data.spaces] == ["embeddings", "queries", "keys"]

    def seen(vectors: torch.Tensor, projection: torch.nn.Module) -> torch.Tensor:
        """By the modules themselves: the norm divides by each vector's deviation, which is multiplied back."""
        normed = subject.embeddings.LayerNorm(vectors) - subject.embeddings.LayerNorm.bias
        normed = normed * (vectors.var(-1, correction=0, keepdim=True) + subject.embeddings.LayerNorm.eps).sqrt()
        if subject.projection is not None:
            normed = normed @ subject.projection.weight.T
        return normed @ projection.weight.T

    attention = subject.attentions[0]
    for space, projection in zip(data.spaces[1:], (attention.query_projection, attention.key_projection)):
        with torch.no_grad():
            mapped = [seen(vectors, projection) for vectors in (subject.word_vectors, subject.position_vectors())]
        expected, [found] = overlap(*mapped, share=0.6), space.overlaps
        np.testing.assert_allclose(found.angles, expected.angles, atol=0.1)
        assert found.words_in_positions == pytest.approx(expected.words_in_positions, abs=1e-4)
        assert found.positions_in_words == pytest.approx(expected.positions_in_words, abs=1e-4)
        assert found.width == (24 if family == "electra" else 32)


def test_without_added_positions_there_is_no_shared_space():
    for scheme in ("t5", "tupe", "none"):
        with pytest.raises(ValueError, match="adds no positions to its words: position_scheme="):
            analysis.shared_space(tiny.build(scheme))
    with pytest.raises(ValueError, match=r"shares must be above 0 and at most 1, got \(0.5, 2\)"):
        analysis.shared_space(tiny.build("absolute"), shares=(0.5, 2))
    with pytest.raises(ValueError, match="needs a checkpoint, got the scheme 'sinusoidal' by its name"):
        analysis.shared_space("sinusoidal")
