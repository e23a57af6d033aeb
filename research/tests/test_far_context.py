"""far_context.py and far_texts.py: what a document tells and where, what is read at once, and the whole from the command line."""

import json
import random
import re

import far_context
import numpy as np
import pytest
import torch
from far_context import (
    BANDS,
    BEHIND,
    LONGER,
    WINDOWS,
    Contest,
    FarArguments,
    Piece,
    Run,
    counted,
    most_context,
    summary,
    windows,
)
from far_texts import KIND_OF, KINDS, LEARNED, PLACES, QUESTIONS, TESTED, Articles, asked, places_of, tagged
from long_prose import prose
from long_texts import SURNAMES
from recorded import read_lines
from scripts import save_checkpoint


LENGTH = 256


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "wikitext2"
    folder.mkdir()
    for name, first in (("valid", 0), ("test", 10)):
        articles = (f" \n = T = \n \n {prose(first + number)} \n" for number in range(5))
        (folder / f"{name}.txt").write_text("".join(articles), encoding="utf-8")
    return folder.parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, data):
    said = [text for wording in (LEARNED, TESTED) for part in vars(wording).values() for text in part]
    nouns = [noun for own in KINDS.values() for noun in own]
    prose_of_both = " ".join(file.read_text() for file in sorted((data / "wikitext2").iterdir()))
    known = " ".join([prose_of_both, *said, *QUESTIONS, *nouns, *PLACES, *SURNAMES])
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), known, dropout=0.0)


@pytest.fixture
def options(data, checkpoint, tmp_path):
    sizes = {"length": LENGTH, "window": 64, "beginning": 16, "question_window": 64, "doc_stride": 16}
    sizes |= {"learned_length": 192, "short": 96}
    amounts = {"names": 3, "mentions": 3, "trained_length": 32, "conversion_steps": 1, "tested": 3, "max_steps": 3}
    folders = {"data": data, "model_name_or_path": checkpoint, "output_dir": tmp_path / "out", "work_dir": tmp_path}
    return [str(part) for name, value in (folders | sizes | amounts).items() for part in (f"--{name}", value)]


def contest_of(options, *more: str) -> Contest:
    [arguments] = far_context.ScriptParser((FarArguments,)).parse_args_into_dataclasses([*options, *more])
    return Contest(arguments)


@pytest.fixture
def articles(options) -> Articles:
    return contest_of(options).learned


def test_a_document_defines_each_name_before_it_is_mentioned(articles):
    seen, kinds_of = [], {}
    for seed in range(20):
        drawn = random.Random(seed)
        told = articles.told(articles.anywhere(LENGTH, drawn), LENGTH, 3, 4, LEARNED, drawn)
        assert LENGTH - 30 < sum(len(one.ids) for one in told) <= LENGTH
        document, words = tagged(told, articles), {token: name for name, token in articles.names.items()}
        assert (
            document.ids[0] == articles.tokenizer.cls_token_id and document.ids[-1] == articles.tokenizer.sep_token_id
        )
        places = [*document.kinds]
        # All places of names are asked for, and no others.
        assert places == [place for place, token in enumerate(document.ids) if token in words]
        assert len(places) == 3 * 5
        defined = {}
        for (one, place, distance), token in zip(places_of(told, articles.names), (document.ids[at] for at in places)):
            assert words[token] == one.name and place in places
            if one.defines:
                assert one.name not in defined and one.noun in one.text and distance == 0
                defined[one.name] = place, one.noun
            else:
                assert not any(re.search(rf"\b{noun}\b", one.text) for noun in KIND_OF)
            start, noun = defined[one.name]
            assert distance == place - start == document.distances[place] and document.kinds[place] == KIND_OF[noun]
            kinds_of.setdefault(one.name, set()).add(document.kinds[place])
        seen.append(tuple(document.ids))
    assert len({*seen}) == 20
    assert any(len(kinds) > 1 for kinds in kinds_of.values())  # a name alone does not tell


def test_answers_are_where_they_are_said_to_be_and_need_as_many_places(articles):
    drawn = random.Random(3)
    told = articles.told(articles.anywhere(LENGTH, drawn), LENGTH, 4, 1, TESTED, drawn, places=True)
    rows = asked(told, articles, "a")
    assert len(rows) == 8 and len({row["id"] for row in rows}) == 8
    for row in rows:
        [place], [start] = row["answers"]["text"], row["answers"]["answer_start"]
        assert row["context"][start : start + len(place)] == place in PLACES
        [sentence] = [one for one in told if one.place == place]
        definition = next(one for one in told if one.defines and one.name == sentence.name)
        subject, other = (sentence.name, sentence.noun) if row["places"] == 1 else (sentence.noun, sentence.name)
        assert subject in row["question"] and other not in row["question"]
        assert (row["distance"] > 0) == (row["places"] == 2)
        between = row["context"].index(sentence.text) - row["context"].index(definition.text)
        assert between > 0
    # Questions about what names stand for have one answer.
    nouns = [one.noun for one in told if one.defines]
    assert len({*nouns}) == len(nouns)


@pytest.mark.parametrize(("size", "shared", "beginning"), [(64, 0, 0), (64, 32, 0), (64, 24, 16), (300, 20, 0)])
def test_windows_read_every_token_and_are_not_longer_than_they_may_be(size, shared, beginning):
    ids = [1, *range(100, 300), 2]
    pieces = windows(ids, size, shared, beginning)
    assert {place for piece in pieces for place in piece.places} >= {*range(1, 201)}
    for piece, following in zip(pieces, [*pieces[1:], None]):
        assert len(piece.ids) == len(piece.places) <= size
        assert (piece.ids[0], piece.ids[-1]) == (1, 2)
        own = [place for place in piece.places if place >= 0]
        assert own == [*range(own[0], own[-1] + 1)]
        assert all(ids[place] == token for token, place in zip(piece.ids, piece.places) if place >= 0)
        if piece is not pieces[0]:
            assert piece.ids[1 : 1 + beginning] == ids[1 : 1 + beginning]
        if following:
            assert own[-1] - min(place for place in following.places if place >= 0) == shared - 1
    # The piece in which a place is furthest from the nearer end.
    for place, (number, token) in most_context(pieces).items():
        assert pieces[number].places[token] == place
        context = [
            min(at, len(piece.ids) - 1 - at) for piece in pieces for at, own in enumerate(piece.places) if own == place
        ]
        assert min(token, len(pieces[number].ids) - 1 - token) == max(context)


def test_tags_are_those_of_the_piece_with_most_context_and_counted_by_distance(options):
    contest = contest_of(options)
    document = contest.tested_tags[0]
    pieces = contest.cut(WINDOWS, overlap=True)(document.ids)
    where = most_context(pieces)

    def model(rows, wrong=()):
        """Says the right kind in the piece that counts, and a wrong one elsewhere."""
        [row] = rows
        number = next(at for at, piece in enumerate(pieces) if piece.ids == row)
        logits = torch.zeros(1, len(row), len(KINDS))
        for token, place in enumerate(pieces[number].places):
            if place in document.kinds:
                right = where[place] == (number, token) and place not in wrong
                logits[0, token, (document.kinds[place] + (not right)) % len(KINDS)] = 1
        return logits

    cut = contest.cut(WINDOWS, overlap=True)
    asked_for = [0] * len(BANDS)
    for distance in document.distances.values():
        asked_for[next(band for band, (low, high) in enumerate(BANDS) if low <= distance < high)] += 1
    assert contest.test_tags(model, cut, document) == [[number, number] for number in asked_for]
    last = max(document.kinds, key=document.distances.get)
    missed = contest.test_tags(lambda rows: model(rows, {last}), cut, document)
    assert [number - right for right, number in missed] == [
        int(low <= document.distances[last] < high) for low, high in BANDS
    ]


def test_differences_are_those_of_the_same_seeds_and_documents(options):
    contest = contest_of(options)
    bands = len(BANDS)

    def run(contestant, seed, right):
        counts = [[[right, 4]] * bands, [[right + 1, 4]] * bands]
        return Run("tags", contestant, seed, 3, 1.0, [0.5], counts)

    runs = [run(WINDOWS, 1, 1), run(WINDOWS, 2, 0), run("t5", 2, 2), run("t5", 1, 3)]
    found = summary(runs, contest.arguments)["tags"]["t5"]["bands"]["all"]
    assert found["asked"] == 2 * 4 * (bands - 1)
    less = found["less"][WINDOWS]
    assert less["mean"] == pytest.approx(0.5) and less["interval"] == pytest.approx([0.5, 0.5])
    assert found["f1"] == [7 / 8, 5 / 8]  # in the order of seeds, whatever the order of files
    assert np.array_equal(counted(runs[:1], [1, 2]), [[[2, 6, 6], [4, 4, 4]]])


@pytest.mark.slow
def test_every_contestant_is_trained_and_tested_and_none_twice(options, tmp_path, run_main, capsys):
    options += ["--seeds", "1", "2"]
    run_main(far_context, *options)
    runs = read_lines(tmp_path / "out" / "runs.jsonl")[1:]
    assert len(runs) == 2 * (5 + 2)
    for run in runs:
        assert run["steps"] == 3 and len(run["counts"]) == 3
        number = sum(number for bands in run["counts"] for _, number in bands)
        assert number == 3 * (3 * 4 if run["task"] == "tags" else 2 * 3)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {*results["tasks"]["tags"]} == {WINDOWS, BEHIND, LONGER, "t5", "deberta"}
    assert {*results["conversion_seconds"]} == {"t5", "deberta"}
    table = far_context.tables(results["tasks"])
    assert table.count("\n|") + 1 >= 2 * 3 + 6 and table in capsys.readouterr().out
    run_main(far_context, *options)
    assert runs == read_lines(tmp_path / "out" / "runs.jsonl")[1:]
    with pytest.raises(SystemExit, match="window is 64 there and 60 here"):
        run_main(far_context, *options, "--window", "60")


def test_what_is_trained_on_is_of_the_first_file_and_tested_on_of_the_second(options, data):
    contest = contest_of(options)
    first, second = (
        {one.text for article in own.found for one in article} for own in (contest.learned, contest.tested)
    )
    assert first and second and not first & second
    years = {
        name: {*re.findall(r"year (\d+)", (data / "wikitext2" / f"{name}.txt").read_text())}
        for name in ("valid", "test")
    }
    assert all(set(re.findall(r"year (\d+)", text)) <= years["valid"] for text in first)
    real = re.compile("|".join(re.escape(text) for text in first))
    assert not any(real.search(row["context"]) for rows in contest.tested_questions for row in rows)
    wordings = {text for part in ("definitions", "mentions", "places") for text in getattr(LEARNED, part)}
    assert not wordings & {text for part in ("definitions", "mentions", "places") for text in getattr(TESTED, part)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--tasks", "tag"], "unknown tasks tag"),
        (["--contestants", "t6"], "unknown contestants t6"),
        (["--window", "20"], "a window more than the beginning"),
        (["--length", "64"], "more tokens than a window"),
        (["--seeds", "-1"], "seeds not negative"),
        (["--length", "5000"], "0 articles of 5000 tokens"),
        (["--data", "missing"], "missing"),
    ],
)
def test_mistakes_are_told_in_a_line(options, mistake, wrong, message):
    assert message in mistake(far_context, *options, *wrong)


def test_a_piece_is_what_it_is():
    assert far_context.whole([1, 5, 2]) == [Piece([1, 5, 2], [0, 1, 2])]
