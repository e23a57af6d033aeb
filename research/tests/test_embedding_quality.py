"""What embeddings keep: a model keeps all of its own, and without positions the order of words is nothing."""

import embedding_quality
import pytest
import torch
from minilm import packaged_minilm
from transformers import AutoModel, AutoTokenizer

import hf_posenc  # noqa: F401


WORDS = (
    "river stone winter garden letter music bridge window market island doctor summer forest engine harbour".split()
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Paragraphs of 50 words and one of 600, and pairs of sentences with scores."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("wikitext2", "stsb"):
        (folder / name).mkdir()
    generator = torch.Generator().manual_seed(0)

    def words(number: int) -> str:
        return " ".join(WORDS[index] for index in torch.randint(len(WORDS), (number,), generator=generator))

    paragraphs = [words(50) for _ in range(70)] + [words(600)]
    (folder / "wikitext2" / "test.txt").write_text("\n".join(paragraphs))
    pairs = [f"{words(8)},{words(8)},{score % 6}.0" for score in range(12)]
    (folder / "stsb" / "stsb-en-test.csv").write_text("\n".join(pairs))
    return folder


def test_texts_have_300_to_500_tokens(data):
    tokenizer = AutoTokenizer.from_pretrained(packaged_minilm())
    texts = embedding_quality.long_texts(tokenizer, data / "wikitext2" / "test.txt")
    assert len(texts) == 11  # of six paragraphs each, and without the long one
    assert all(300 <= len(tokenizer(text)["input_ids"]) <= 500 for text in texts)


def test_two_words_change_places_and_no_others():
    usual, other = embedding_quality.exchanged(
        ["One two three four five six.", "too short", "the the the the the the"]
    )
    assert usual == ["One two three four five six"]
    apart = [pair for pair in zip(usual[0].split(), other[0].split()) if pair[0] != pair[1]]
    assert len(apart) == 2 and apart[0] == apart[1][::-1]


def test_a_model_keeps_its_own_and_without_positions_no_order(data):
    original, none = (
        AutoModel.from_pretrained(packaged_minilm(), **flags).eval() for flags in ({}, {"position_scheme": "none"})
    )
    embeddings = embedding_quality.Embeddings(original, AutoTokenizer.from_pretrained(packaged_minilm()), data)
    same = embeddings.kept(original)
    assert same["sts"]["original"] == same["sts"]["converted"]
    assert same["long_neighbours"] == 1 and same["order"]["spearman"] == pytest.approx(1)
    assert same["order"]["original"] > 0.01
    without = embeddings.kept(none)
    assert without["long_neighbours"] < 1
    assert without["order"]["converted"] == pytest.approx(0, abs=1e-6) and "spearman" not in without["order"]
