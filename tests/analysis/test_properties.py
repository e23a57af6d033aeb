"""Properties of matrices, tables and attention that have them, and of some that do not."""

import dataclasses

import numpy as np
import pytest
import tiny
import torch

from hf_posenc import analysis
from hf_posenc.analysis.properties import monotonicity


SIZE = 40


def toeplitz(of_distance) -> np.ndarray:
    places = np.arange(SIZE)
    return of_distance((places[None, :] - places[:, None]).astype(float))


def noise(seed: int = 0, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(size, size))


def test_a_planted_toeplitz_matrix_has_share_1():
    planted = toeplitz(lambda distance: np.sin(distance) - 0.1 * distance)
    assert analysis.toeplitz_share(planted) == pytest.approx(1, abs=1e-12)
    assert analysis.toeplitz_share(np.full((5, 5), 3.7)) == 1
    # Signal and noise of equal variance, and noise alone: two means are taken off for each place.
    signal = planted / planted.std()
    mixed = [analysis.toeplitz_share(signal + noise(seed)) for seed in range(20)]
    assert np.mean(mixed) == pytest.approx(0.5, abs=0.04)
    alone = [analysis.toeplitz_share(noise(seed)) for seed in range(20)]
    assert np.mean(alone) == pytest.approx(2 / (SIZE + 1), abs=0.01)


def test_the_largest_deviation_is_one_that_is_planted():
    planted = toeplitz(lambda distance: np.sin(distance))
    planted[3, 7] += 2
    assert analysis.properties_of(planted).largest_deviation == pytest.approx(2 / planted.std())


def test_monotonicity_against_its_definition():
    matrix = noise(size=9)
    matrix[3, 5] = matrix[3, 6]
    for reach in (None, 3):
        ordered = pairs = 0.0
        for x in range(9):
            for side in (-1, 1):
                for m in range(1, (reach or 8) + 1):
                    for n in range(m):
                        if 0 <= x + side * m < 9:
                            far, near = matrix[x, x + side * m], matrix[x, x + side * n]
                            ordered, pairs = ordered + (far < near) + 0.5 * (far == near), pairs + 1
        assert monotonicity(matrix, reach) == pytest.approx(ordered / pairs)
    assert monotonicity(toeplitz(lambda distance: -abs(distance))) == 1
    assert monotonicity(toeplitz(abs)) == 0
    assert monotonicity(np.ones((4, 4))) == 0.5
    assert monotonicity(toeplitz(lambda distance: np.where(abs(distance) < 5, -abs(distance), 0.0)), reach=4) == 1


def test_symmetry_and_direction():
    symmetric, antisymmetric = toeplitz(lambda d: np.exp(-abs(d))), toeplitz(lambda d: d)
    assert analysis.properties_of(symmetric).symmetry == pytest.approx(1)
    assert analysis.properties_of(antisymmetric).symmetry == pytest.approx(0)
    assert analysis.properties_of(antisymmetric).later is None  # negative entries are no weights
    assert analysis.properties_of(symmetric).later == pytest.approx(0.5)
    assert analysis.properties_of(np.triu(np.ones((9, 9)))).later == 1
    found = analysis.properties_of(np.ones((5, 5)))
    assert (found.symmetry, found.translation_invariance, found.largest_deviation) == (1, 1, 0)


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sinusoids_are_exactly_translation_invariant_in_the_inner_product(layout):
    data = analysis.table_properties(analysis.of_scheme("sinusoidal", position_layout=layout))
    product = data.by_proximity["inner product"]
    assert product.translation_invariance == pytest.approx(1, abs=1e-9)
    # The scale and the sinusoids themselves are float32 numbers.
    assert product.largest_deviation < 1e-5
    assert data.sinusoids.largest_deviation < 1e-12
    assert product.local_monotonicity > 0.99 > monotonicity(noise())


def test_sinusoids_are_not_translation_invariant_as_attention_sees_them():
    data = analysis.position_term(tiny.build("sinusoidal"))
    assert data.parts == ["position-position"] and data.toeplitz.max() < 0.9


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_learned_table_has_the_properties_of_its_inner_products(family):
    model = tiny.build("absolute", family)
    data = analysis.table_properties(model, length=30)
    table = analysis.study(model).position_vectors(30).double().numpy()
    expected = dataclasses.replace(analysis.properties_of(table @ table.T), symmetry=None)
    assert data.positions == 30 and data.by_proximity["inner product"] == pytest.approx(expected)
    assert data.by_proximity["inner product"].translation_invariance < 0.9


def test_what_all_vectors_have_in_common_is_not_in_the_centred_cosine():
    """A large part in all vectors, a little different in each, hides the circle that they are on."""
    model = tiny.build("absolute")
    angles = torch.arange(64) * 2 * torch.pi / 64
    with torch.no_grad():
        table = model.embeddings.position_embeddings.weight.zero_()
        table[:, 4], table[:, 9], table[:, 2] = angles.sin(), angles.cos(), 50 + 0.3 * torch.randn(64)
    found = analysis.table_properties(model).by_proximity
    assert found["centred cosine"].translation_invariance > 0.8 > 0.2 > found["inner product"].translation_invariance


def test_symmetry_is_asked_where_it_can_be_missing():
    """Inner products are symmetric whatever the vectors are: a 1 there would say nothing of them."""
    data = analysis.table_properties(tiny.build("absolute"))
    assert {found.symmetry for found in (*data.by_proximity.values(), data.sinusoids)} == {None}
    labels = [label.get_text() for label in analysis.plot_table_properties(data).axes[0].get_yticklabels()]
    assert labels == ["monotonicity", "local monotonicity", "translation invariance"]
    assert "symmetr" not in analysis.FIGURES["table-properties"].question
    attention = analysis.attention_properties(tiny.build("absolute"), words=10)
    assert all(0 < found.symmetry < 0.999 for found in attention.heads)
    labels = [label.get_text() for label in analysis.plot_attention_properties(attention).axes[1].get_yticklabels()]
    assert "symmetry" in labels


@pytest.mark.parametrize("scheme", ["alibi", "t5", "kerple", "transformer_xl", "alibi+t5"])
def test_biases_of_the_distance_are_toeplitz(scheme):
    data = analysis.position_term(tiny.build(scheme))
    np.testing.assert_allclose(data.toeplitz, 1, atol=1e-9)
    assert data.by_chance == pytest.approx(2 / 129)


@pytest.mark.parametrize("flags", [{}, {"position_stride": 3}])
def test_the_position_term_is_that_of_the_nine(flags):
    model = tiny.build("absolute", **flags)
    with torch.no_grad():  # all words alike, so that each token has the deviation of the mean one
        model.embeddings.word_embeddings.weight.copy_(torch.randn(32).expand(99, 32))
        model.embeddings.position_embeddings.weight.mul_(1e-3)
    subject = analysis.study(model)
    ids = torch.full((1, 20), 7)
    nine = analysis.terms.nine_terms(subject, ids)["position-position"][0].double().numpy()
    data = analysis.position_term(subject, length=20)
    np.testing.assert_allclose(data.scores, nine, rtol=0.15, atol=0.02 * np.abs(nine).max())


def test_without_a_term_of_positions():
    for scheme in ("rope", "none", "relative"):
        with pytest.raises(ValueError, match="no part of the score depends on positions alone"):
            analysis.position_term(tiny.build(scheme))


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet"])
def test_one_word_repeated_has_even_attention_without_positions(family):
    data = analysis.attention_properties(tiny.build("none", family), length=16, words=10)
    np.testing.assert_allclose(data.weights, 1 / 16, atol=1e-6)
    assert data.words == 10 and len(data.heads) == 4


def test_attention_on_one_word_is_the_mean_of_the_first_layer_over_words():
    model = tiny.build("absolute")
    data = analysis.attention_properties(model, length=12, words=1000)
    ids = torch.tensor([number for number in range(99) if number != 0])[:, None].expand(-1, 12)
    weights = analysis.study(model).observe(ids, [0]).layers[0].weights.double().mean(0)
    np.testing.assert_allclose(data.weights, weights, atol=1e-6)
    assert data.mean == pytest.approx(analysis.properties_of(weights.mean(0).numpy()), abs=1e-6)


def test_alibi_attends_monotonously_and_evenly_to_both_sides():
    model = tiny.build("alibi")
    data = analysis.attention_properties(model, length=32, words=10)
    for found in data.heads:
        assert found.monotonicity == pytest.approx(1, abs=0.01) and found.later == pytest.approx(0.5)


def test_words_of_a_tokenizer_are_whole_and_not_special(minilm):
    subject = analysis.study(minilm)
    chosen = analysis.properties._random_words(subject, 200, 0)
    pieces = subject.tokenizer.convert_ids_to_tokens(chosen.tolist())
    assert len({*pieces}) == 200 and all(piece.isalpha() for piece in pieces)


class Pieces:
    """As much of a tokenizer as names the pieces: numbers are special from 0 to 2."""

    all_special_ids = [0, 1, 2]

    def __init__(self, piece):
        self.piece = piece

    def __len__(self):
        return 99

    def convert_ids_to_tokens(self, ids):
        return [self.piece(number) for number in ids]


@pytest.mark.parametrize("marker", ["Ġ", "▁"])
def test_where_pieces_say_that_a_word_begins_those_alone_are_words(marker):
    pieces = Pieces(lambda number: (marker + "the", "ing", marker + "12", marker, None)[number % 5])
    subject = analysis.study(tiny.build("absolute", "roberta"), pieces)
    chosen = analysis.properties._random_words(subject, 1000, 0)
    assert chosen.tolist() == [*range(5, 99, 5)]


def test_where_pieces_say_that_a_word_goes_on_the_others_are_words():
    pieces = Pieces(lambda number: ("the", "##ing", "12")[number % 3])
    chosen = analysis.properties._random_words(analysis.study(tiny.build("absolute"), pieces), 1000, 0)
    assert chosen.tolist() == [*range(3, 99, 3)]


def test_a_scheme_by_its_name_has_no_attention():
    for function in (analysis.attention_properties, analysis.position_term):
        with pytest.raises(ValueError, match="needs a checkpoint, got the name of a scheme, 'alibi'"):
            function("alibi")
