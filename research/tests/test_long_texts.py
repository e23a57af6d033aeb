"""Long documents with something to find in them: it is there, where it should be, and nowhere else."""

import long_texts
import pytest
from long_prose import prose
from long_texts import articles, facts, ids_of, needle, passkey, read_articles, sentences
from scripts import save_checkpoint
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Five articles as WikiText has them."""
    text = "".join(
        f" \n = Title {n} = \n \n {prose(n)} \n \n = = Section = = \n \n = = = Sub = = = \n \n {prose(n + 5)} \n"
        for n in range(1, 6)
    )
    path = tmp_path_factory.mktemp("text") / "wiki.txt"
    path.write_text(text.replace(",", " ,").replace(".", " ."), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, file):
    known = " ".join([long_texts.FILLER, *sum(facts(), ()), *long_texts.FIRST_NAMES, *long_texts.SURNAMES, "pass key"])
    digits = [f"{mark}{digit}" for digit in range(10) for mark in ("", "##")]
    folder = save_checkpoint(tmp_path_factory.mktemp("checkpoint"), f"{file.read_text()} {known}", *digits)
    return AutoTokenizer.from_pretrained(folder)


def inside(document: list[int], sought: list[int]) -> list[int]:
    """Where tokens begin in a document."""
    return [at for at in range(len(document)) if document[at : at + len(sought)] == sought]


@pytest.mark.parametrize("length", [64, 300])
def test_every_pass_key_is_in_its_document_and_in_no_other_at_its_depth(tokenizer, length):
    made = passkey(tokenizer, length, candidates=20, queries=10, seed=3)
    assert len(made.documents) == 20 and len({*map(tuple, made.documents)}) == 20
    assert {len(document) for document in made.documents} == {length}
    assert len(made.queries) == len({*made.relevant}) == 10
    for query, relevant, depth in zip(made.queries, made.relevant, made.depths):
        name = ids_of(tokenizer, query.removeprefix("What is the pass key for ").removesuffix("?"))
        found = [inside(document, name) for document in made.documents]
        assert [number for number, places in enumerate(found) if places] == [relevant]
        first, second = found[relevant]
        needle_ends = second + len(name) + 1
        free = length - 2 - (needle_ends - first)
        assert depth == pytest.approx((first - 1) / free)
        document = made.documents[relevant]
        around = document[1:first] + document[needle_ends:-1]
        filler = ids_of(tokenizer, " ".join([long_texts.FILLER] * length))
        assert around == filler[:free], "what is around it is not the same in all documents"


def test_depths_are_spread_over_the_documents(tokenizer):
    made = passkey(tokenizer, 600, candidates=50, queries=50, seed=0)
    steps = sorted(made.depths)
    assert steps[0] < 0.05 and steps[-1] > 0.95
    assert all(abs(depth - (number + 0.5) / 50) < 0.03 for number, depth in enumerate(steps))


def test_every_fact_is_in_its_document_between_two_sentences(tokenizer, file):
    haystack = [one for article in read_articles(file) for paragraph in article for one in sentences(paragraph)]
    made = needle(tokenizer, 200, candidates=30, queries=30, seed=1, haystack=haystack)
    answers = dict(facts())
    plain = ids_of(tokenizer, " ".join(haystack))
    for query, relevant, depth in zip(made.queries, made.relevant, made.depths):
        sought = ids_of(tokenizer, answers[query])
        assert [number for number, one in enumerate(made.documents) if inside(one, sought)] == [relevant]
        document = made.documents[relevant]
        [place] = inside(document, sought)
        assert depth == pytest.approx((place - 1) / (198 - len(sought)))
        assert place == 1 or tokenizer.decode(document[place - 1]) == "."
        assert document[1:place] + document[place + len(sought) : -1] == plain[: 198 - len(sought)]


def test_sentences_that_ask_were_taken_out_of_their_document(tokenizer, file):
    texts = read_articles(file)
    made = articles(tokenizer, texts, 400, queries=4, seed=2)
    parts = len(made.documents)
    assert parts >= 10, "an article is several documents"
    assert made.relevant == [number for number in range(parts) for _ in range(4)]
    assert {*made.groups} == {*range(5)} and made.groups == sorted(made.groups)
    asked = {*made.queries}
    for query, relevant, article, depth in zip(made.queries, made.relevant, made.groups, made.depths):
        assert not any(inside(document, ids_of(tokenizer, query)) for document in made.documents)
        text = [one for paragraph in texts[article] for one in sentences(paragraph)]
        number = text.index(query)
        document, where = made.documents[relevant], 1 + round(depth * 398)
        before = ids_of(tokenizer, text[number - 1])
        if depth and text[number - 1] not in asked:
            assert document[where - len(before) : where] == before
        after = ids_of(tokenizer, next(one for one in text[number + 1 :] if one not in asked))
        assert document[where:-1][: len(after)] == after[: 399 - where]
    for number, depth in enumerate(made.depths):  # a quarter each, less what was taken out before
        part = number % 4
        assert part / 4 - 0.2 < depth < (part + 1) / 4


def test_documents_of_an_article_are_its_parts_one_after_the_other(tokenizer, file):
    texts = read_articles(file)[:2]
    made = articles(tokenizer, texts, 300, queries=1, seed=0)
    text = [one for article in texts for paragraph in article for one in sentences(paragraph)]
    left = [token for one in text if one not in made.queries for token in ids_of(tokenizer, one)]
    assert made.groups == [0, 0, 0, 1, 1, 1]
    places = [inside(left, document[1:-1]) for document in made.documents]
    assert all(len(found) == 1 for found in places) and places == sorted(places)
    assert all(later - earlier >= 298 for [earlier], [later] in zip(places, places[1:])), "parts overlap"


def test_short_articles_are_left_out(tokenizer, file):
    texts = read_articles(file)
    texts[2] = texts[2][:1]
    length = len(ids_of(tokenizer, " ".join(texts[2])))
    assert {*articles(tokenizer, texts, length, queries=2, seed=0).groups} == {0, 1, 3, 4}


def test_joined_articles_are_all_used_and_a_sentence_belongs_to_its_own(tokenizer, file):
    texts = read_articles(file)
    texts[2] = texts[2][:1]
    made = articles(tokenizer, texts, 300, queries=3, seed=0, joined=True)
    said = [[one for paragraph in own for one in sentences(paragraph)] for own in texts]
    assert {*made.groups} == {*range(5)}, "short articles too"
    assert made.groups == sorted(made.groups) and len({*made.queries}) == len(made.queries)
    assert all(query in said[article] for query, article in zip(made.queries, made.groups))
    by_document = [{*made.groups[start : start + 3]} for start in range(0, len(made.groups), 3)]
    assert any(len(own) > 1 for own in by_document), "a document goes on with the next article"
    left = [token for own in said for one in own if one not in made.queries for token in ids_of(tokenizer, one)]
    places = [inside(left, document[1:-1]) for document in made.documents]
    assert [len(found) for found in places] == [1] * len(places) and places == sorted(places)
    gaps = [later - earlier - 298 for [earlier], [later] in zip(places, places[1:])]
    longest = max(len(ids_of(tokenizer, one)) for own in said for one in own)
    assert all(0 <= gap < longest for gap in gaps), "nothing is left out but the end of a sentence"


@pytest.mark.parametrize("kind", ["passkey", "needle", "articles"])
def test_a_seed_gives_the_same_and_another_seed_another(tokenizer, file, kind):
    texts = read_articles(file)
    haystack = [one for paragraph in texts[0] for one in sentences(paragraph)]

    def made(seed):
        if kind == "passkey":
            return passkey(tokenizer, 128, 10, 5, seed)
        if kind == "needle":
            return needle(tokenizer, 128, 10, 5, seed, haystack)
        return articles(tokenizer, texts, 300, 3, seed)

    assert made(7) == made(7)
    assert made(7).queries != made(8).queries and made(7).documents != made(8).documents


def test_articles_are_read_without_titles_and_headings_and_with_ordinary_spaces(tmp_path):
    file = tmp_path / "wiki.txt"
    file.write_text(
        " \n = One = \n \n It had 2 @,@ 000 metres , a well @-@ known <unk> ( of old ) . \n He didn 't go . \n \n = = Past = = \n \n"
        " It was John 's : all of it . \n \n = Two = \n \n An x = y here . \n",
        encoding="utf-8",
    )
    assert read_articles(file) == [
        ["It had 2,000 metres, a well-known [UNK] (of old).", "He didn't go.", "It was John's: all of it."],
        ["An x = y here."],
    ]


def test_sentences_end_where_a_capital_letter_or_a_number_follows():
    text = 'He came on 5. May 2001. "Why?" she asked. 12 birds flew! See p. xii.'
    assert sentences(text) == ["He came on 5.", "May 2001.", '"Why?" she asked.', "12 birds flew!", "See p. xii."]


def test_facts_have_questions_of_their_own():
    questions = [question for question, _ in facts()]
    assert len(questions) == len({*questions}) == 100


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: passkey(t, 128, 101, 5, 0), "there are 100 names, too few for 101 documents"),
        (lambda t: passkey(t, 12, 5, 5, 0), "have no room for"),
        (lambda t: needle(t, 128, 5, 5, 0, ["The cat saw."]), "too few for documents of 128"),
        (
            lambda t: articles(t, [["The cat saw."], ["The dog saw."]], 128, 1, 0),
            "2 articles give 0 documents of 128 tokens",
        ),
        (lambda t: read_articles("missing.txt"), "missing.txt"),
    ],
)
def test_what_cannot_be_made_is_said(tokenizer, make, message):
    with pytest.raises((ValueError, OSError), match=message):
        make(tokenizer)


def test_a_file_without_articles_is_refused(tmp_path):
    (tmp_path / "plain.txt").write_text("No title at all.\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has 0 articles, and it takes two"):
        read_articles(tmp_path / "plain.txt")
    (tmp_path / "latin.txt").write_bytes("= Ä =".encode("latin-1"))
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_articles(tmp_path / "latin.txt")
