"""Every way to pool chunks is its formula, computed in loops in float64."""

import math

import chunk_pooling
import pytest
import tiny
import torch


def norm(vector):
    return math.sqrt(sum(one * one for one in vector))


def mean_of(vectors, weights):
    return [sum(w * v[i] for w, v in zip(weights, vectors)) / sum(weights) for i in range(len(vectors[0]))]


def in_loops(name, vectors):
    if name == "mean":
        return mean_of(vectors, [1.0] * len(vectors))
    if name == "maximum":
        return [max(v[i] for v in vectors) for i in range(len(vectors[0]))]
    if name == "norm_top_mean":
        longest = sorted(vectors, key=norm, reverse=True)[:3]
        return mean_of(longest, [1.0] * len(longest))
    if name == "norm_softmax_mean":
        return mean_of(vectors, [math.exp(norm(v)) for v in vectors])
    centre = mean_of(vectors, [1.0] * len(vectors))
    cosines = [sum(a * b for a, b in zip(v, centre)) / (norm(v) * norm(centre)) for v in vectors]
    return mean_of(vectors, [max(1 - one, 1e-6) for one in cosines])


@tiny.cross(
    name=["mean", "maximum", "norm_top_mean", "norm_softmax_mean", "salience_mean"], number=[1, 2, 3, 7], strength=2
)
def test_pooled_chunks_are_those_of_loops(name, number):
    generator = torch.Generator().manual_seed(number)
    chunks = torch.randn(4, number, 6, generator=generator, dtype=torch.float64) + 0.5
    found = getattr(chunk_pooling, name)(chunks)
    expected = torch.tensor([in_loops(name, document) for document in chunks.tolist()], dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(getattr(chunk_pooling, name)(chunks[0]), expected[0])


def test_parameters_are_used():
    chunks = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    longest = chunks[chunks.norm(dim=-1).argmax()]
    torch.testing.assert_close(chunk_pooling.norm_top_mean(chunks, number=1), longest)
    torch.testing.assert_close(chunk_pooling.norm_softmax_mean(chunks, temperature=1e-4), longest)
    torch.testing.assert_close(chunk_pooling.norm_softmax_mean(chunks, temperature=1e9), chunks.mean(dim=0))


def test_what_is_unlike_its_document_counts_more():
    same, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    found = chunk_pooling.salience_mean(torch.stack([same] * 9 + [other]))
    assert found[1] > 0.5 > 0.1 == pytest.approx(chunk_pooling.mean(torch.stack([same] * 9 + [other]))[1].item())
    torch.testing.assert_close(chunk_pooling.salience_mean(torch.stack([same] * 3)), same)
