"""Scores by distance against the pairs themselves."""

import numpy as np
import pytest
import tiny
import torch

from hf_posenc import analysis
from hf_posenc.modeling.schemes.alibi import alibi_slopes


def words(length: int = 12) -> torch.Tensor:
    return tiny.inputs(length=length, padding=None)["input_ids"]


def test_a_bias_is_what_it_is():
    for data in (
        analysis.score_by_distance("alibi", max_distance=9),
        analysis.score_by_distance(analysis.of_scheme("alibi"), torch.ones(2, 12, dtype=torch.long), max_distance=9),
    ):
        [curves] = data.curves
        expected = -np.array(alibi_slopes(8))[:, None] * abs(np.arange(-9, 10))
        np.testing.assert_allclose(curves.mean, expected, rtol=1e-6)
        assert curves.is_bias and np.array_equal(curves.lower, curves.upper)
        assert curves.distances.tolist() == [*range(-9, 10)]
        assert "left differs from right by up to 0 " in analysis.describe_score_by_distance(data)


@pytest.mark.parametrize(
    "scheme", ["relative", "deberta", "rope", "transformer_xl", "absolute+t5", "tupe", "absolute"]
)
def test_mean_and_quartiles_are_those_of_all_pairs_at_a_distance(scheme):
    subject = analysis.study(tiny.build(scheme))
    data = analysis.score_by_distance(subject, words(), layer=1, max_distance=5)
    scores = subject.observe(words(), [1]).layers[1]
    expected = {name for name in scores.parts if name not in ("content", "u")} or {"content"}
    assert {curves.part for curves in data.curves} == expected
    for curves in data.curves:
        part = scores.parts[curves.part].expand(-1, 4, -1, -1).numpy()
        for column, distance in enumerate(range(-5, 6)):
            for head in range(4):
                pairs = [
                    part[b, head, i, i + distance]
                    for b in range(len(part))
                    for i in range(12)
                    if 0 <= i + distance < 12
                ]
                assert curves.mean[head, column] == pytest.approx(np.mean(pairs), abs=1e-5)
                assert curves.lower[head, column] == pytest.approx(np.quantile(pairs, 0.25), abs=1e-5)
                assert curves.upper[head, column] == pytest.approx(np.quantile(pairs, 0.75), abs=1e-5)


def test_texts_of_several_lengths(minilm):
    data = analysis.score_by_distance(minilm, ["Tom bit a dog.", "It rains cats and dogs all day."], max_distance=8)
    assert data.curves[0].mean.shape == (12, 17)


def test_what_there_is_not_is_told_in_a_line():
    model = tiny.build("absolute")
    for options, message in (
        ({"layer": 2}, "layer must be from 0 to 1 for .*, got 2"),
        ({"layer": -1}, "layer must be from 0 to 1 for .*, got -1"),
        ({"max_distance": 12}, "max_distance must be from 1 to 11, the longest text less one, got 12"),
    ):
        with pytest.raises(ValueError, match=message):
            analysis.score_by_distance(model, words(), **options)
    for needs_words in (model, "rope", "relative", "absolute"):
        with pytest.raises(ValueError, match="depend on the text: use a checkpoint with a tokenizer"):
            analysis.score_by_distance(needs_words)
