"""Overlaps of planted subspaces, in a whole space and in heads, beside random rotations of the positions."""

import numpy as np
import pytest
import reading
import tiny
import torch

from hf_posenc import analysis
from hf_posenc.analysis.averages import covariance
from hf_posenc.analysis.spaces import Space, overlaps, random_rotation


WIDTH = 24


def vectors_in(axes: torch.Tensor, count: int = 400) -> torch.Tensor:
    """Random vectors (count, width) in the span of the columns, as much in each, about a mean elsewhere."""
    random = torch.linalg.qr(torch.randn(count, axes.shape[1], dtype=torch.float64))[0]
    random = torch.linalg.qr(random - random.mean(0))[0] * count**0.5
    return random @ axes.T + 3


def overlap(words: torch.Tensor, positions: torch.Tensor, share: float, maps=None, rotations: int = 20):
    generator = torch.Generator().manual_seed(0)
    found = overlaps(covariance(words), covariance(positions), {"it": maps}, (share,), rotations, generator)
    return found["it"][0]


def planted(words: slice, positions: slice, share: float = 0.999, maps=None):
    basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64))[0] if maps is None else torch.eye(WIDTH)
    return overlap(vectors_in(basis[:, words].double()), vectors_in(basis[:, positions].double()), share, maps)


def test_orthogonal_subspaces():
    found = planted(slice(0, 8), slice(8, 12))
    assert (found.word_dimensions, found.position_dimensions) == (8, 4)
    np.testing.assert_allclose(found.angle.found, 90, atol=1e-6)
    assert found.words_in_positions.found == pytest.approx(0, abs=1e-12)
    assert found.positions_in_words.found == pytest.approx(0, abs=1e-12)
    assert found.positions_in_words.below and found.words_in_positions.below and found.angle.above


def test_identical_subspaces():
    found = planted(slice(0, 6), slice(0, 6))
    np.testing.assert_allclose(found.angle.found, 0, atol=1e-4)
    assert found.words_in_positions.found == pytest.approx(1) and found.positions_in_words.found == pytest.approx(1)
    assert found.positions_in_words.above and found.words_in_positions.above and found.angle.below


def test_subspaces_that_share_two_of_four_directions():
    found = planted(slice(0, 4), slice(2, 6))
    assert found.words_in_positions.found == pytest.approx(0.5)
    assert found.positions_in_words.found == pytest.approx(0.5)
    np.testing.assert_allclose(found.angle.found, 0, atol=1e-4)


def test_by_chance_a_subspace_holds_its_share_of_the_space():
    """The mean over rotations of the variance in k of d dimensions is k / d, whatever the spectrum."""
    words, positions = (
        vectors_in(torch.eye(WIDTH).double()[:, :8]),
        torch.randn(500, WIDTH) * torch.linspace(0.1, 3, WIDTH),
    )
    found = overlap(words, positions, 0.999, rotations=300)
    assert found.positions_in_words.chance == pytest.approx(8 / WIDTH, abs=0.01)
    assert found.positions_in_words.low < 8 / WIDTH < found.positions_in_words.high
    assert found.words_in_positions.chance == pytest.approx(found.position_dimensions / WIDTH, abs=0.01)


def test_positions_with_nothing_to_do_with_words_are_within_the_interval_in_nearly_all_heads():
    """Of 40 heads, 95 % are expected."""
    torch.manual_seed(3)
    maps = torch.randn(40, WIDTH, 6, dtype=torch.float64)
    words, positions = (
        torch.randn(300, WIDTH) * torch.rand(WIDTH) @ random_rotation(WIDTH, torch.default_generator).float()
        for _ in "wp"
    )
    found = overlap(words, positions, 0.6, maps, rotations=200)
    for own in (found.positions_in_words, found.words_in_positions):
        assert 30 <= (~own.below & ~own.above).sum()


def test_heads_are_looked_at_one_by_one():
    """One head reads words and positions apart, another puts them into the same dimensions; pooled, both would be lost."""
    apart = torch.eye(WIDTH).double()[:, [0, 1, 8, 9]]
    together = torch.zeros(WIDTH, 4, dtype=torch.float64)
    together[[0, 1, 8, 9], [0, 1, 0, 1]] = 1
    found = planted(slice(0, 8), slice(8, 12), 0.999, torch.stack([apart, together]))
    np.testing.assert_allclose(found.positions_in_words.found, [0, 1], atol=1e-9)
    np.testing.assert_allclose(found.words_in_positions.found, [0, 1], atol=1e-9)
    np.testing.assert_allclose(found.angle.found, [90, 0], atol=1e-4)


def test_random_rotations_are_orthogonal_and_turn_any_vector_anywhere():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([random_rotation(3, generator) for _ in range(2000)])
    torch.testing.assert_close(drawn @ drawn.mT, torch.eye(3, dtype=torch.float64).expand(2000, 3, 3))
    np.testing.assert_allclose(drawn.mean(0), 0, atol=0.05)
    np.testing.assert_allclose(drawn.square().mean(0), 1 / 3, atol=0.03)


@pytest.mark.parametrize(
    ("words", "positions", "said"),
    [
        (slice(0, 8), slice(8, 12), "in the embeddings of layer 1 less (0.0%, by chance"),
        (slice(0, 6), slice(0, 6), "in the embeddings of layer 1 more (100.0%, by chance"),
        (slice(0, 12), slice(10, 14), "in the embeddings of layer 1 as much (50.0%, by chance"),
    ],
)
def test_the_sentence_says_whether_they_overlap_more_than_by_chance(words, positions, said):
    data = analysis.SharedSpace("planted", [Space("embeddings", 0, WIDTH, [planted(words, positions)])], 20)
    assert said in analysis.describe_shared_space(data)


def test_the_sentence_has_every_share_and_counts_heads():
    data = analysis.shared_space(tiny.build("absolute"), shares=(0.5, 0.9), rotations=5)
    said = analysis.describe_shared_space(data)
    assert said.count("heads at 50%") == said.count("heads at 90%") == 2 and "5 random rotations" in said


def test_the_dimensions_are_as_few_as_hold_the_share():
    assert planted(slice(0, 10), slice(10, 20), share=0.5).word_dimensions == 5
    assert planted(slice(0, 10), slice(10, 20), share=0.8).position_dimensions == 8
    assert planted(slice(0, 10), slice(10, 20), share=0.81).position_dimensions == 9


def test_covariances_of_large_vocabularies_are_summed_up_in_parts():
    vectors = torch.randn(20_000, 5) + 2
    np.testing.assert_allclose(covariance(vectors), np.cov(vectors.numpy(), rowvar=False, bias=True), atol=1e-5)


def by_hand(words: np.ndarray, positions: np.ndarray, share: float) -> tuple[float, float]:
    """Positions in words and words in positions, of vectors (number, head_dim), in NumPy."""
    centred = [vectors - vectors.mean(0) for vectors in (words, positions)]
    spans = []
    for vectors in centred:
        _, values, axes = np.linalg.svd(vectors, full_matrices=False)
        kept = np.searchsorted(np.cumsum(values**2) / (values**2).sum(), share - 1e-9) + 1
        spans.append(axes[:kept].T)
    return tuple(
        float(((vectors @ span) ** 2).sum() / (vectors**2).sum())
        for vectors, span in ((centred[1], spans[0]), (centred[0], spans[1]))
    )


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_each_head_is_that_of_the_first_layer_and_chance_is_of_positions_that_were_rotated_before_it(family):
    model = tiny.build("absolute", family)
    with torch.no_grad():  # less variance in some dimensions than in others, and a norm that weighs them
        model.embeddings.word_embeddings.weight.mul_(
            torch.linspace(0.2, 2, model.embeddings.word_embeddings.embedding_dim)
        )
        model.embeddings.LayerNorm.weight.uniform_(0.5, 1.5)
    subject = analysis.study(model)
    data = analysis.shared_space(model, shares=(0.6,), rotations=4, seed=5)
    assert [space.name for space in data.spaces] == ["embeddings", "queries", "keys"]

    def seen(vectors: torch.Tensor, projection: torch.nn.Module) -> np.ndarray:
        """By the modules themselves: the norm divides by each vector's deviation, which is multiplied back; (heads, number, head_dim)."""
        normed = subject.embeddings.LayerNorm(vectors) - subject.embeddings.LayerNorm.bias
        normed = normed * (vectors.var(-1, correction=0, keepdim=True) + subject.embeddings.LayerNorm.eps).sqrt()
        if subject.projection is not None:
            normed = normed @ subject.projection.weight.T
        return (normed @ projection.weight.T).unflatten(-1, (heads, -1)).transpose(0, 1).double().numpy()

    attention, heads = subject.attentions[0], subject.sizes.num_attention_heads
    positions = subject.position_vectors()
    draw = torch.Generator().manual_seed(5)
    rotated = [(positions.double() @ random_rotation(positions.shape[1], draw)).float() for _ in range(4)]
    for space, projection in zip(data.spaces[1:], (attention.query_projection, attention.key_projection)):
        [found] = space.overlaps
        with torch.no_grad():
            words = seen(subject.word_vectors, projection)
            own, *turned = (seen(vectors, projection) for vectors in (positions, *rotated))
        for head in range(heads):
            expected = by_hand(words[head], own[head], 0.6)
            chance = np.mean([by_hand(words[head], one[head], 0.6) for one in turned], axis=0)
            numbers = found.positions_in_words, found.words_in_positions
            assert [number.found[head] for number in numbers] == pytest.approx(expected, abs=1e-4)
            assert [number.chance[head] for number in numbers] == pytest.approx(chance, abs=1e-4)
        assert space.width == words.shape[-1]


def test_every_layer_has_its_own_projections_and_means():
    model = reading.subject("absolute")
    data = analysis.shared_space_by_layer(model, reading.documents(), length=24, shares=(0.6,), rotations=2)
    assert [(space.layer, space.name) for space in data.spaces] == [
        (layer, name) for layer in range(len(model.layers)) for name in ("states", "queries", "keys")
    ]
    read = analysis.averages.averages(model, reading.documents(), length=24)
    words, positions = read.covariances(1)
    key = model.attentions[1].key_projection.weight.detach().double().T
    maps = key.unflatten(-1, (model.sizes.num_attention_heads, -1)).transpose(0, 1)
    expected = overlaps(words, positions, {"keys": maps}, (0.6,), 2, torch.Generator().manual_seed(0))["keys"][0]
    found = data.spaces[-1 if len(model.layers) == 2 else 5].overlaps[0]
    np.testing.assert_allclose(found.positions_in_words.found, expected.positions_in_words.found)


def test_without_added_positions_there_is_no_shared_space():
    for scheme in ("t5", "tupe", "none"):
        with pytest.raises(ValueError, match="adds no positions to its token embeddings: position_scheme is "):
            analysis.shared_space(tiny.build(scheme))
    with pytest.raises(ValueError, match=r"shares must be above 0 and at most 1, got \(0.5, 2\)"):
        analysis.shared_space(tiny.build("absolute"), shares=(0.5, 2))
    with pytest.raises(ValueError, match="takes at least 2 rotations, got 1"):
        analysis.shared_space(tiny.build("absolute"), rotations=1)
    with pytest.raises(ValueError, match="needs a checkpoint, got the name of a scheme, 'sinusoidal'"):
        analysis.shared_space("sinusoidal")


def test_the_interval_of_a_report_is_that_of_two_hundred_rotations():
    """A thousand take minutes in a base model. Both intervals are nearly one."""
    model = tiny.build("absolute")
    data, many = analysis.shared_space(model), analysis.shared_space(model, rotations=1000, seed=1)
    assert data.rotations == 200 and "compared with 200 random rotations" in analysis.describe_shared_space(data)
    for space, other in zip(data.spaces, many.spaces):
        for overlap, wide in zip(space.overlaps, other.overlaps):
            few, more = overlap.positions_in_words, wide.positions_in_words
            np.testing.assert_allclose(few.high - few.low, more.high - more.low, rtol=0.35, atol=0.02)
