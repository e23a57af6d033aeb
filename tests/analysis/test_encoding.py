"""Maps, clock hands and similarities against the formulas of the schemes."""

import math

import numpy as np
import pytest
import tiny
import torch

from hf_posenc import analysis, position_parameters
from hf_posenc.analysis.encoding import sinusoid_map
from hf_posenc.modeling.schemes.alibi import alibi_slopes


def test_the_classic_map_of_sinusoids_in_both_layouts():
    data = analysis.encoding_maps("sinusoidal")
    assert [drawn.what for drawn in data.maps] == ["sinusoids, interleaved", "sinusoids, halves"]
    interleaved, halves = (drawn.values for drawn in data.maps)
    assert interleaved.shape == halves.shape == (128, 512)
    for position in (0, 1, 17, 127):
        for pair in (0, 1, 100, 255):
            angle = position / 10000 ** (2 * pair / 512)
            assert interleaved[position, 2 * pair] == pytest.approx(math.sin(angle), abs=1e-12)
            assert interleaved[position, 2 * pair + 1] == pytest.approx(math.cos(angle), abs=1e-12)
            angle = position / 10000 ** (pair / 255)
            assert halves[position, pair] == pytest.approx(math.sin(angle), abs=1e-12)
            assert halves[position, 256 + pair] == pytest.approx(math.cos(angle), abs=1e-12)
    assert sinusoid_map(3, 8).values.shape == (3, 8)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_table_of_a_stock_model(family):
    torch.manual_seed(0)
    stock = next(cls for cls in tiny.heads(family) if cls.__name__.endswith("Model"))(tiny.stock_config(family))
    data = analysis.encoding_maps(stock)
    table = stock.embeddings.position_embeddings.weight.detach().numpy()
    first = 64 - len(data.maps[0].values)
    assert first in (0, 2) and np.array_equal(data.maps[0].values, table[first:])
    # MPNet has a bias beside its table.
    assert [drawn.what for drawn in data.maps[1:]] == (["bias"] if family == "mpnet" else [])


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_the_map_shows_what_differs_between_positions(family):
    """Not what all rows have in common, nor the first row, which is unlike all others in a learned table."""
    model = tiny.build("absolute", family)
    with torch.no_grad():
        table = model.embeddings.position_embeddings.weight
        table[:, ::5] += 30.0
        table[analysis.study(model).sizes.first_position] += 50 * torch.randn(32)
    data = analysis.encoding_maps(model)
    drawn, vectors = data.maps[0], analysis.study(model).position_vectors().numpy()
    assert np.array_equal(drawn.values, vectors)
    image = analysis.plot_encoding_maps(data).axes[0].images[0]
    np.testing.assert_allclose(image.get_array(), vectors - vectors.mean(0), atol=1e-5)
    others = np.abs((vectors - vectors.mean(0))[1:])
    assert image.get_clim()[1] < 4 * np.quantile(others, 0.9)
    without = np.sqrt(np.mean((vectors - vectors.mean(0)) ** 2))
    assert f"and {without:.3g} without the mean row" in analysis.describe_encoding_maps(data)


def test_the_map_of_sinusoids_is_the_classic_one():
    data = analysis.encoding_maps(tiny.build("sinusoidal"))
    image = analysis.plot_encoding_maps(data).axes[0].images[0]
    assert np.array_equal(image.get_array(), data.maps[0].values)
    assert "mean row" not in analysis.describe_encoding_maps(data)


def test_a_table_is_seen_as_a_whole():
    """Rows beyond 128 may look different; biases reach as far as they did."""
    data = analysis.encoding_maps(tiny.build("absolute+t5", max_position_embeddings=700))
    assert [drawn.values.shape for drawn in data.maps] == [(512, 32), (4, 255)]


def test_biases_by_head_and_distance():
    [drawn] = analysis.encoding_maps(tiny.build("alibi"), length=10).maps
    assert drawn.values.shape == (4, 19) and drawn.first_column == -9
    for head, slope in enumerate(alibi_slopes(4)):
        for column in range(19):
            assert drawn.values[head, column] == pytest.approx(-slope * abs(column - 9))
    model = tiny.build("t5", position_buckets=8, position_max_distance=16)
    [drawn] = analysis.encoding_maps(model, length=3).maps
    table = model.encoder.relative_attention_bias.weight.detach().numpy()
    # -2, -1, 0, 1, 2: two buckets of one distance each, then the first logarithmic one, in each direction
    np.testing.assert_allclose(drawn.values, table[[2, 1, 0, 5, 6]].T, rtol=1e-6)


def test_tables_that_are_asked():
    model = tiny.build("relative", position_max_distance=4)
    [drawn] = analysis.encoding_maps(model, length=6).maps
    attention = model.encoder.layer[0].attention.self
    table = attention.relative_key_embeddings.weight.detach().numpy() * attention.scaling
    np.testing.assert_allclose(drawn.values, table[[0, *range(9), 8]], rtol=1e-6)
    assert drawn.what == "c2p: table multiplied by queries" and drawn.first_row == -5
    maps = analysis.encoding_maps(tiny.build("absolute+rope+relative_key_query"), length=6).maps
    whats = [
        "position vectors",
        "relative_key_query c2p: table",
        "relative_key_query p2c: table",
        "cosine of the angle",
    ]
    assert all(drawn.what.startswith(what) for drawn, what in zip(maps, whats, strict=True))
    with pytest.raises(ValueError, match="no positions: position_scheme is 'none'"):
        analysis.encoding_maps(tiny.build("none"))


def test_clock_hands_stand_where_sine_and_cosine_are():
    for scheme, width in (("sinusoidal", 32), ("rope", 8), ("transformer_xl", 32)):
        data = analysis.clock_hands(tiny.build(scheme, position_base=100.0), positions=20)
        assert data.angles.shape == (width // 2, 20) and data.scheme == scheme
        for pair in range(width // 2):
            frequency = 100 ** (-2 * pair / width)
            np.testing.assert_allclose(data.angles[pair], frequency * np.arange(20), atol=1e-9)
            assert data.wavelengths[pair] == pytest.approx(2 * math.pi / frequency)
    halves = tiny.build("sinusoidal", position_layout="halves", position_base=100.0)
    data = analysis.clock_hands(halves, positions=20)
    vectors = analysis.study(halves).position_vectors(20).numpy() / halves.embeddings.position_scale().item()
    np.testing.assert_allclose(np.sin(data.angles.T), vectors[:, :16], atol=1e-5)
    np.testing.assert_allclose(np.cos(data.angles.T), vectors[:, 16:], atol=1e-5)
    for flags in ({"position_frequency": 2.5}, {"position_combine": "concat", "position_width": 12}):
        model = tiny.build("sinusoidal", **flags)
        data = analysis.clock_hands(model, positions=20)
        own = analysis.study(model).position_vectors(20).numpy() / model.embeddings.position_scale().item()
        width = flags.get("position_width", 32)
        np.testing.assert_allclose(np.sin(data.angles.T), own[:, -width::2], atol=1e-5)
    with pytest.raises(ValueError, match="has no sines and cosines: position_scheme is 'absolute'"):
        analysis.clock_hands(tiny.build("absolute"))


def test_clock_hands_of_learned_frequencies_are_in_order():
    model = tiny.build("rope", position_learn_frequencies="shared", position_base=100.0)
    [factors] = position_parameters(model).values()
    with torch.no_grad():
        factors.copy_(torch.linspace(-2, 30, factors.numel()).reshape(factors.shape))
    data = analysis.clock_hands(model, positions=20)
    own = factors.detach().flatten().double().numpy()
    frequencies = own * 100.0 ** -(np.arange(len(own)) / len(own))
    order = np.argsort(-np.abs(frequencies))
    np.testing.assert_allclose(data.wavelengths, 2 * np.pi / np.abs(frequencies)[order], rtol=1e-5)
    np.testing.assert_allclose(data.angles, frequencies[order, None] * np.arange(20), rtol=1e-5)
    assert [*order] != [*range(len(own))] and (frequencies < 0).any()
    with torch.no_grad():
        factors[..., 0] = 0
    assert analysis.clock_hands(model, positions=20).wavelengths[-1] == np.inf
    assert "positions" in analysis.describe_clock_hands(analysis.clock_hands(model, positions=20))
    analysis.plot_clock_hands(analysis.clock_hands(model, positions=20)).canvas.draw()


def test_clock_hands_of_scaled_rope_turn_slower():
    plain = analysis.clock_hands(tiny.build("rope"))
    scaled = analysis.clock_hands(tiny.build("rope", position_rope_scaling={"rope_type": "linear", "factor": 2.0}))
    np.testing.assert_allclose(scaled.wavelengths, 2 * plain.wavelengths, rtol=1e-6)


def test_similarity_of_positions_on_a_circle_is_the_cosine_of_their_angle():
    model = tiny.build("absolute")
    angles = torch.arange(64) * 2 * math.pi / 64
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.fill_(3.0)
        model.embeddings.position_embeddings.weight[:, 4] += angles.sin()
        model.embeddings.position_embeddings.weight[:, 9] += angles.cos()
    data = analysis.position_similarity(model)
    np.testing.assert_allclose(data.median, np.cos(angles.numpy()), atol=1e-5)
    np.testing.assert_allclose(data.lower, data.upper, atol=1e-5)
    assert "lowest (-1.00) at distance 32" in analysis.describe_position_similarity(data)


def test_a_table_that_starts_at_zero_has_nothing_to_compare():
    model = tiny.build("absolute")
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.zero_()
    for function in (analysis.position_similarity, analysis.moving_dimensions, analysis.shared_space):
        with pytest.raises(ValueError, match="the 64 position vectors of PosencBertModel are all equal"):
            function(model)
