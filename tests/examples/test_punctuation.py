"""Punctuation restoration as a task: nothing is given away, nothing is both trained on and held out."""

import pytest
from punctuation import (
    IGNORED,
    LABELS,
    chapters,
    hold_out,
    prose,
    read_documents,
    take_punctuation,
    windows,
)
from transformers import AutoTokenizer


NONE, COMMA, FULL_STOP = range(3)


@pytest.fixture(scope="module")
def tokenizer(minilm):
    return AutoTokenizer.from_pretrained(minilm)


@pytest.mark.parametrize(
    "text, words, labels",
    [
        ("Yes, it is.", ["yes", "it", "is"], [COMMA, NONE, FULL_STOP]),
        ("Yes , it is .", ["yes", "it", "is"], [COMMA, NONE, FULL_STOP]),
        ('The "yield"\nstatement, (see 3.1.4).', ["the", "yield", "statement", "(see", "3.1.4)"], [0, 0, 1, 0, 2]),
        ("(In brackets.) So.", ["(in", "brackets)", "so"], [NONE, FULL_STOP, FULL_STOP]),
        ("a, b, etc., and so on...", ["a", "b", "etc", "and", "so", "on"], [1, 1, 2, 0, 0, 2]),
        (". , first", ["first"], [NONE]),
        ("", [], []),
    ],
)
def test_punctuation_becomes_the_label_of_the_word_before_it(text, words, labels):
    assert take_punctuation(text) == (words, labels)


def test_code_grammar_and_headings_are_no_prose():
    sentence = "This is a sentence about the language, and it goes on."
    text = f"""
Assignment statements
*********************

   target ::= identifier | "(" [target_list] ")" | attributeref .

>>> a.b = [1, 2, 3]; c.d = {{4: 5}}; print(e.f, g.h) . .

2. {sentence}

no full stop here although there are many words in this line
"""
    assert prose(text) == [sentence]


def test_documents_of_the_language_reference_share_no_paragraph():
    from pydoc_data.topics import topics

    documents = chapters()
    paragraphs = [paragraph for topic in topics.values() for paragraph in dict.fromkeys(prose(topic))]
    # Topics do quote each other, so that without care text would be both trained on and held out.
    assert len(set(paragraphs)) < 0.9 * len(paragraphs)
    train, held_out = hold_out(documents, 0.2)
    assert sorted(train + held_out) == sorted(documents)
    assert sum(map(len, documents)) > 200_000
    assert 0.15 < sum(map(len, held_out)) / sum(map(len, documents)) < 0.3
    for paragraph in set(paragraphs):
        assert sum(f" {paragraph} " in f" {document} " for document in documents) == 1, paragraph


def test_windows_hold_every_word_once_and_no_punctuation(tokenizer):
    documents = chapters()[-3:]
    features = windows(documents, tokenizer, length=40)
    expected = [take_punctuation(document) for document in documents]
    words = [word for words, _ in expected for word in words]
    labels = [label for _, labels in expected for label in labels]

    assert all(len(feature["input_ids"]) == len(feature["labels"]) <= 40 for feature in features)
    found = [label for feature in features for label in feature["labels"] if label != IGNORED]
    assert found == labels
    assert {NONE, COMMA, FULL_STOP} == set(found)
    # Put together again, the tokens are the words, and so no label can be read off the input.
    tokens = [i for feature in features for i in feature["input_ids"] if i not in tokenizer.all_special_ids]
    whole = [i for word in words for i in tokenizer(word, add_special_tokens=False)["input_ids"]]
    assert tokens == whole
    assert LABELS == ("none", "comma", "full stop")


def test_blocks_between_blank_lines_are_documents(tmp_path):
    file = tmp_path / "text.txt"
    first = "The first document has two lines,\nand this is the second one."
    second = "The second document, as it happens, has one line only."
    file.write_text(f"A heading\n\n{first}\n\n\n \n{second}\n\n{second}\n", encoding="utf-8")
    assert read_documents(file) == [first.replace("\n", " "), second]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "0 documents"),
        (b"Only one block of text is here, and it is a good one.\n", "1 documents"),
        ("Der Text ist in Latin-1, nicht in UTF-8, und hat Umlaute: \xfc.".encode("latin-1"), "not UTF-8"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(tmp_path, content, message):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_documents(file)
