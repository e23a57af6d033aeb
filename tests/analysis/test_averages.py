"""What states have in common at a position and of a word, and that noise counts in neither."""

import numpy as np
import pytest
import torch
from reading import documents, subject

from hf_posenc.analysis import survival
from hf_posenc.analysis.averages import FEWEST, averages
from hf_posenc.analysis.windows import cut


def test_means_are_those_of_each_half_of_the_texts():
    model = subject("absolute")
    found = averages(model, documents(), length=24, seed=3)
    ids, places = found.windows.input_ids, found.windows.places
    generator = torch.Generator().manual_seed(3)
    cut(model, documents(), 24, 1024, generator)
    half = torch.randperm(len(ids), generator=generator) % 2
    layer = 1
    states = model.observe(ids).hidden_states[layer].double()
    np.testing.assert_allclose(found.positions[layer, 1], states[half == 1][:, places].mean(0), atol=1e-5)
    token = int(found.token_ids[3])
    own = states[half == 0][ids[half == 0] == token].mean(0)
    np.testing.assert_allclose(found.words[layer, 0, 3], own, atol=1e-5)
    assert found.occurrences[3] == (ids[:, places] == token).sum()
    assert all((ids[half == part] == token).sum() >= FEWEST for part in (0, 1))
    of_words = states[:, places][torch.isin(ids[:, places], found.token_ids)]
    assert found.variance[layer] == pytest.approx(float(of_words.var(0, correction=0).sum()), rel=1e-5)


def test_states_without_positions_have_no_variance_of_positions():
    """Their means at positions differ by noise alone, which is not counted."""
    found = averages(subject("none"), documents(40), length=24)
    noise = found.positions.mean(1).var(1, correction=0).sum(-1) / found.variance
    words, positions = found.shares()
    assert (noise > 1e-3).all() and (np.abs(positions) < noise.numpy() / 2).all()
    assert words[0] == pytest.approx(1, abs=0.05)


def test_at_the_input_words_and_positions_are_nearly_all():
    words, positions = averages(subject("absolute"), documents(40), length=24).shares()
    assert words[0] + positions[0] == pytest.approx(1, abs=0.15) and min(words[0], positions[0]) > 0.01


def test_too_little_text_is_an_error():
    with pytest.raises(ValueError, match="occur 4 times in each half"):
        averages(subject("absolute"), documents(2, length=30), length=24)


def test_a_word_is_told_where_its_own_embedding_is_nearest():
    model = subject("absolute")
    found = survival(model, documents(), length=24, named=5)
    ids = averages(model, documents(), length=24).windows.input_ids[:5]
    rows = torch.nn.functional.normalize(model.word_vectors).numpy()
    for layer, states in enumerate(model.observe(ids).hidden_states):
        right = [
            np.argmax(rows @ states[row, place].numpy()) == ids[row, place]
            for row in range(5)
            for place in range(1, 23)
        ]
        assert found.nearest[layer] == pytest.approx(np.mean(right))
        assert found.interval[layer][0] <= found.nearest[layer] <= found.interval[layer][1]
    assert (found.tokens, found.vocabulary) == (5 * 22, len(rows))


def test_words_of_another_width_are_an_error():
    with pytest.raises(ValueError, match="they have no cosine"):
        survival(subject("absolute", "electra"), documents(), length=24)
