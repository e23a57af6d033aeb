"""KeyBERT finds the same keywords with a variant that starts silent, and with a stock model that leaves padding out."""

import torch
from keybert import KeyBERT
from observing import MINILM, TEXTS, difference, left_out
from sentence_transformers import SentenceTransformer

import hf_posenc


# KeyBERT embeds documents and candidates in batches; short documents have hardly any candidates.
DOCUMENTS = [text for text in TEXTS if len(text) > 60]


def sentences(**settings) -> SentenceTransformer:
    return SentenceTransformer(MINILM, device="cpu", model_kwargs=settings)


def keywords(model: SentenceTransformer) -> list[list[tuple[str, float]]]:
    """Five keywords of one or two words for each document, with their scores to four places."""
    return KeyBERT(model).extract_keywords(DOCUMENTS, keyphrase_ngram_range=(1, 2), top_n=5)


def same(found: list, expected: list) -> float:
    """The largest difference of scores, where the same words are found in the same order."""
    words = [[word for word, _ in row] for row in expected]
    assert [[word for word, _ in row] for row in found] == words, (found, expected)
    scores = ([score for row in some for _, score in row] for some in (found, expected))
    return difference(*scores)


def stock_without_padding() -> float:
    model = sentences()
    expected = keywords(model)
    assert [len(row) for row in expected] == [5] * len(DOCUMENTS) and len(DOCUMENTS) == 3
    assert any("curie" in word for word, _ in expected[0]), expected[0]
    assert hf_posenc.unpad(model) == 1
    with left_out(model) as places:
        found = same(keywords(model), expected)
    assert sum(places) >= 32, places
    return found


def variant() -> float:
    expected = keywords(sentences())
    model = sentences(position_scheme="absolute+t5")
    found = same(keywords(model), expected)
    with torch.no_grad():
        for parameter in hf_posenc.position_parameters(model).values():
            parameter.normal_(std=0.5)
    assert keywords(model) != expected
    return found


if __name__ == "__main__":
    for check in (stock_without_padding, variant):
        found = check()
        assert found < 2e-4, (check.__name__, found)  # KeyBERT rounds to four places
        print(f"{check.__name__.replace('_', ' ')}: scores differ by {found:.0e}")
