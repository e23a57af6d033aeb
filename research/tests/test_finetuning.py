"""The study of fine-tuning: what is read of LitBank, how works are cut and counted, and which rates are tried."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import fine_tuning
import finetuning_tables as tables
import folders
import numpy as np
import pytest
import tagging
import tasks
import torch
from embedding_quality import read_pairs
from huggingface_hub import ModelCard
from litbank import (
    TAGS,
    Encoded,
    Entity,
    Work,
    counts,
    counts_by_mention,
    decode,
    outermost,
    pieces_to_learn,
    read_work,
)
from minilm import packaged_minilm
from recorded import Runs
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sklearn.metrics import accuracy_score, matthews_corrcoef
from transformers import AutoTokenizer


TOKENIZER = AutoTokenizer.from_pretrained(packaged_minilm())


def work(number: int = 400) -> Work:
    draw = random.Random(0)
    words = draw.choices(
        ["Anna", "internationalisation", "of", "Rome", "sees", "the", "extraordinarily", "town"], k=number
    )
    entities, at = [], 0
    while at + 9 < number:
        entities.append(Entity(at, at + draw.randrange(6), draw.choice(("PER", "GPE"))))
        at = entities[-1].last + draw.randint(1, 4)
    return Work("drawn", words, entities)


def test_tags_are_decoded_as_they_are_made():
    assert decode([TAGS[tag] for tag in work().tags]) == work().entities
    # An I without its B begins a span, and so does another class.
    assert decode(["I-PER", "I-PER", "O", "B-FAC", "I-GPE", "B-GPE"]) == [
        Entity(0, 1, "PER"), Entity(3, 3, "FAC"), Entity(4, 4, "GPE"), Entity(5, 5, "GPE")
    ]  # fmt: skip


def test_entities_of_all_columns_are_read_but_those_inside_others(tmp_path):
    file = tmp_path / "1_book_brat.tsv"
    rows = ["the\tO\tB-PER", "aunt\tO\tI-PER", "of\tO\tI-PER", "Anna\tB-PER\tI-PER", "", "Rome\tO\tB-GPE"]
    file.write_text("".join(f"{row}\tO\tO\t\n" if row else "\n" for row in rows))
    found = read_work(file)
    assert found.words == ["the", "aunt", "of", "Anna", "Rome"] and found.name == "1_book"
    assert found.entities == [Entity(0, 3, "PER"), Entity(4, 4, "GPE")]
    assert outermost({Entity(2, 3, "LOC"), Entity(2, 3, "FAC")}) == [Entity(2, 3, "FAC")]
    assert [found.is_name(one) for one in (Entity(0, 3, "PER"), Entity(2, 3, "PER"), Entity(2, 2, "PER"))] == [
        False,
        True,
        False,
    ]


def test_pieces_have_every_word_once_and_no_entity_that_a_cut_divides():
    encoded = Encoded.of(work(), TOKENIZER)
    pieces = pieces_to_learn(encoded, 64)
    assert all(len(ids) <= 64 and len(ids) == len(labels) for ids, labels in pieces)
    assert [token for ids, _ in pieces for token in ids[1:-1]] == encoded.ids[1:-1]
    learned, word, cuts = {}, 0, 0
    for ids, labels in pieces:
        tokens = TOKENIZER.convert_ids_to_tokens(ids)
        for index in range(1, len(ids) - 1):
            if tokens[index].startswith("##"):
                assert labels[index] == -100
            else:
                learned[word] = labels[index]
                word += 1
        cuts += 1
        assert labels[0] == labels[-1] == -100
    left_out = {word for word, label in learned.items() if label == -100}
    divided = [one for one in encoded.work.entities if left_out & {*range(one.first, one.last + 1)}]
    assert left_out == {word for one in divided for word in range(one.first, one.last + 1)}
    assert 0 < len(divided) < cuts and len(encoded.work.entities) > 3 * len(divided)
    assert all(label in (-100, encoded.work.tags[word]) for word, label in learned.items())


def test_later_mentions_of_a_name_are_counted_by_their_distance_from_the_first():
    words = ["Anna", *["sees"] * 99, "The", "anna", "Rome", *["sees"] * 400, "Anna", *["sees"] * 900, "anna", "Anna"]
    places = {"first": 0, "near": 100, "other": 102, "far": 503, "no name": 1404, "farther": 1405}
    spans = {place: Entity(first, first + (place == "near"), "PER") for place, first in places.items()}
    words[101] = "Anna"
    encoded = Encoded.of(Work("names", words, [*spans.values()]), TOKENIZER)
    found = [spans["first"], spans["farther"], Entity(100, 101, "GPE"), Entity(50, 50, "PER")]
    assert counts_by_mention(encoded, found) == [[1, 1], [0, 1], [0, 1], [1, 0]]


def test_counts_are_by_where_an_entity_begins():
    encoded = Encoded.of(work(800), TOKENIZER)
    entities = encoded.work.entities
    wrong = Entity(entities[0].first, entities[0].last, "VEH")
    table = counts(encoded, [wrong, *entities[2:]])
    assert table[0][1:] == [1, 2] and all(row[1:] == [0, 0] for row in table[1:]) and len(table) > 2
    beyond = sum(encoded.starts[one.first] >= 512 for one in entities)
    assert sum(row[0] for row in table[1:]) == beyond > 0
    names = counts(encoded, entities, names=True)
    assert sum(row[0] for row in names) == sum(map(encoded.work.is_name, entities)) < len(entities)


class Reads(torch.nn.Module):
    """A tagger that is right where a token has ten tokens on both sides, or the work's end, and says so by the class."""

    def forward(self, input_ids, attention_mask):
        length = attention_mask.sum(1)
        index = torch.arange(input_ids.shape[1])[None]
        central = (index >= 10) & (index < length[:, None] - 10)
        tags = torch.where(central, TAGS.index("B-PER"), TAGS.index("B-VEH"))
        return type("Output", (), {"logits": torch.nn.functional.one_hot(tags, len(TAGS)).float()})


def test_each_word_is_read_from_the_most_central_window():
    encoded = Encoded.of(work(800), TOKENIZER)
    found = tagging.tagged(Reads(), encoded, tagging.CUTS[tagging.WINDOWS])
    assert [one.first for one in found] == [*range(800)]
    outside = [word for word, one in enumerate(found) if one.label == "VEH"]
    last = len(encoded.ids)
    assert outside == [w for w, start in enumerate(encoded.starts) if start < 10 or start >= last - 10]


def test_what_is_cut_off_has_no_entities():
    encoded = Encoded.of(work(800), TOKENIZER)
    found = tagging.tagged(Reads(), encoded, tagging.CUTS[tagging.CUT])
    assert {encoded.starts[one.first] < 511 for one in found} == {True} and len(found) > 50


class Spans(torch.nn.Module):
    """An entity of three words wherever "Anna" is, but of one where a window begins less than 30 tokens before."""

    def forward(self, input_ids, attention_mask):
        logits = torch.zeros(*input_ids.shape, len(TAGS))
        anna = TOKENIZER.convert_tokens_to_ids("anna")
        for row, ids in zip(logits, input_ids.tolist()):
            tags = ["O"] * len(ids)
            starts = [n for n, token in enumerate(ids) if token == anna and n + 3 < len(ids)]
            for start in starts:
                tags[start : start + 3] = ["B-PER"] + ["I-PER" if start >= 30 else "O"] * 2
            row[range(len(ids)), [TAGS.index(tag) for tag in tags]] = 5.0
        return type("Output", (), {"logits": logits})


def test_windows_are_joined_by_the_longest_entity_or_the_first():
    words = ["sees"] * 700
    for at in range(10, 690, 20):
        words[at] = "Anna"
    encoded = Encoded.of(Work("made", words, []), TOKENIZER)
    assert len(encoded.ids) == 702
    longest, first = (tagging.joined(Spans(), encoded, longest=longest) for longest in (True, False))
    starts = [*range(10, 690, 20)]
    assert [one.first for one in longest] == [one.first for one in first] == starts
    # Beyond the first window, each word is in two; in the second of them it may be near the beginning.
    assert [one.last - one.first for one in longest[1:]] == [2] * (len(starts) - 1)
    assert [one.last - one.first for one in first[1:]] == [2] * (len(starts) - 1)
    backwards = [*reversed(tagging.CUTS[tagging.WINDOWS](encoded.ids))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tagging.CUTS, tagging.WINDOWS, lambda ids: backwards)
        longest, first = (tagging.joined(Spans(), encoded, longest=longest) for longest in (True, False))
    assert {one.last - one.first for one in longest[1:]} == {2} and {one.last - one.first for one in first} == {0, 2}


class ByPlace(torch.nn.Module):
    """Scores that differ from window to window, by a token and where it is."""

    def forward(self, input_ids, attention_mask):
        places = torch.arange(input_ids.shape[1])[None, :, None]
        return type("Output", (), {"logits": 5 * torch.sin(input_ids[..., None] + places * torch.arange(len(TAGS)))})


def test_probabilities_are_averaged_over_all_windows_of_a_word():
    encoded = Encoded.of(work(900), TOKENIZER)
    expected = []
    for start in encoded.starts:
        of_word = []
        for piece in tagging.CUTS[tagging.WINDOWS](encoded.ids):
            if start in piece.places:
                logits = ByPlace()(torch.tensor([piece.ids]), None).logits[0, piece.places.index(start)]
                of_word.append(logits.softmax(-1))
        expected.append(TAGS[int(torch.stack(of_word).mean(0).argmax())])
    found = tagging.averaged(ByPlace(), encoded)
    assert found == decode(expected) and len(found) > 50
    assert found != tagging.tagged(ByPlace(), encoded, tagging.CUTS[tagging.WINDOWS])


def test_ways_to_join_the_same_windows_compute_them_once_and_count_their_time():
    encoded, model, computed = Encoded.of(work(900), TOKENIZER), ByPlace(), []

    def counted(**batch):
        computed.append(batch)
        return model(**batch)

    once = tagging.ReadOnce(counted)
    began = once.clock()
    first = tagging.averaged(once, encoded)
    batches, spent = len(computed), once.clock() - began
    assert batches > 1 and once.saved == 0
    assert tagging.averaged(once, encoded) == first == tagging.averaged(model, encoded)
    assert tagging.tagged(once, encoded, tagging.CUTS[tagging.WINDOWS]) != first
    assert len(computed) == batches and 0 < once.saved < 2 * spent
    tagging.tagged(once, encoded, tagging.CUTS[tagging.APART])
    assert len(computed) > batches


@pytest.mark.parametrize("positions", [(), fine_tuning.POSITION_RATES])
def test_rates_are_tried_one_after_the_other_and_followed_beyond_an_end(positions, tmp_path):
    def score(rates):
        rate, position = rates
        return -abs(np.log(rate / 8e-4)) - (abs(np.log(position / 0.003)) if position else 0)

    runs = Runs(tmp_path / "runs.jsonl", {})
    search, tried = fine_tuning.RateSearch(runs, {"arm": "one"}), []
    runs.add({"arm": "another", "rate": 1.0, "position_rate": None, "searched": 9.0})
    for rates in search.to_try(positions):
        tried.append(rates)
        runs.add({"arm": "one", "rate": rates[0], "position_rate": rates[1], "searched": score(rates)})
    first = 0.01 if positions else None
    assert tried[:4] == [(1e-4, first), (2e-4, first), (4e-4, first), (8e-4, first)]
    assert tried[4:] == ([(8e-4, 0.003), (8e-4, 0.03), (8e-4, 0.0009)] if positions else [])
    assert search.best() == (8e-4, 0.003 if positions else None)
    assert [*search.to_try(positions)] == []


def test_intervals_count_works_and_runs():
    """Against the normal approximation of a nested design, and narrower for a paired difference."""
    generator = np.random.default_rng(0)
    of_runs, of_works = generator.normal(0, 0.02, (40, 1)), generator.normal(0, 0.1, (40, 20))
    share = np.clip(0.7 + of_runs + of_works, 0, 1)
    own = np.stack([1000 * share, 0 * share, 1000 * (1 - share)], axis=-1).round().astype(int)
    found = tables.difference(own, None, tables.recall)
    error = np.std(tables.recall(own), ddof=1) / np.sqrt(40)
    assert abs(found.mean - share.mean()) < 1e-3
    # Works are drawn within the runs that were drawn: their variance is counted twice.
    variance = error**2 + (own[..., 0] / 1000).var(axis=1).mean() / (20 * 40)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * variance**0.5, rel=0.08)
    other = own + [-20, 0, 20]
    less = tables.difference(own, other, tables.recall)
    assert less.mean == pytest.approx(0.02) and less.high - less.low < 1e-9
    assert tables.verdict(less) == "higher" and tables.verdict(tables.Interval(0.0, -0.01, 0.01)) == "on par"
    assert tables.verdict(tables.Interval(0.0, -0.03, 0.01)) == "undecided"


def test_ranks_of_turns_are_those_of_the_first_that_answers():
    task = tasks.TASKS["qmsum"]
    rows = [tasks.Row(("a", "b"), float(label), group) for group, label in ((1, 0), (1, 1), (1, 1), (2, 1), (2, 0))]
    assert task.score(rows, np.array([3.0, 2.0, 1.0, 5.0, 4.0])) == pytest.approx((1 / 2 + 1) / 2)
    assert task.score(rows, np.array([3.0, 2.0, 9.0, 4.0, 5.0])) == pytest.approx((1 + 1 / 2) / 2)


@pytest.mark.parametrize("score", [1.0, float("nan")])
def test_a_model_that_scores_all_turns_alike_ranks_none_of_them_first(score):
    rows = [tasks.Row(("a", "b"), float(label), group) for group, label in ((1, 0), (1, 1), (1, 0), (2, 1), (2, 0))]
    assert tasks.TASKS["qmsum"].score(rows, np.full(5, score)) == pytest.approx((1 / 3 + 1 / 2) / 2)


def test_what_ranks_have_without_training(monkeypatch, tmp_path):
    model = SentenceTransformer(packaged_minilm(), device="cpu")
    texts = (
        "Which battery?",
        "A: A lithium battery.",
        "B: The logo is yellow, as I said before.",
        "A: Why not solar cells?",
    )
    rows = [tasks.Row((texts[0], text), float(number == 1), 1) for number, text in enumerate(texts[1:])]
    study, (first, *others) = (
        tasks.Study(tmp_path, packaged_minilm()),
        model.encode([*texts], normalize_embeddings=True),
    )
    assert study.cosines(rows) == pytest.approx([first @ other for other in others], abs=1e-5)

    monkeypatch.setitem(tasks.TASKS, "qmsum", replace(tasks.TASKS["qmsum"], rows=lambda data: ([], rows)))
    runs = Runs(tmp_path / "tasks.jsonl", {})
    for _ in range(2):
        tasks.without_training(study, runs, "qmsum")
    chance, cosine = (line["tested"] for line in runs.read())
    # The one that answers is first, second or third of three.
    assert chance == pytest.approx((1 + 1 / 2 + 1 / 3) / 3, abs=0.1) and cosine == 1 / (
        1 + sum(others @ first > others[1] @ first)
    )


def test_ranks_of_turns_are_summed_by_meeting():
    queries = ((1, 0, "m"), (1, 1, "m"), (1, 1, "m"), (2, 1, "n"), (2, 0, "n"), (3, 0, "m"), (3, 1, "m"))
    rows = [tasks.Row(("a", "b"), float(label), group, meeting) for group, label, meeting in queries]
    task, scores = tasks.TASKS["qmsum"], np.array([3.0, 2.0, 1.0, 5.0, 4.0, 0.0, 1.0])
    numbers, sums = task.units(rows, scores)
    assert numbers.tolist() == [2, 1] and sums.tolist() == [1.5, 1]
    assert task.score(rows, scores) == pytest.approx(2.5 / 3)
    assert task.measure(numbers, sums, np.array([[2, 1], [0, 3]])) == pytest.approx([4 / 5, 1])


@pytest.mark.parametrize("name", ["cola", "stsb", "sst2, 1,000"])
def test_measures_of_drawn_rows_are_those_of_the_libraries(name):
    generator = np.random.default_rng(0)
    task, scores = tasks.TASKS[name], generator.normal(size=50)
    labels = scores / 5 + generator.normal(size=50)
    labels = labels.round(1) if name == "stsb" else (labels > 0).astype(float)  # some are equal
    counted = generator.multinomial(50, [1 / 50] * 50, size=4)
    drawn = [np.repeat(np.arange(50), row) for row in counted]
    reference = {
        "cola": lambda rows: matthews_corrcoef(labels[rows], scores[rows] > 0),
        "stsb": lambda rows: spearmanr(labels[rows], scores[rows]).statistic,
        "sst2, 1,000": lambda rows: accuracy_score(labels[rows], scores[rows] > 0),
    }[name]
    assert task.measure(labels, scores, counted) == pytest.approx([reference(rows) for rows in drawn])
    rows = [tasks.Row(("a",), float(label)) for label in labels]
    assert task.score(rows, scores) == pytest.approx(reference(np.arange(50)))


def test_intervals_of_tasks_count_rows_and_seeds():
    """Against the normal approximation of an accuracy."""
    generator, task = np.random.default_rng(0), tasks.TASKS["sst2, 1,000"]
    labels = generator.integers(2, size=400).astype(float)

    def units(shares: list[float]) -> np.ndarray:
        right = [generator.random(400) < share for share in shares]
        return np.array([[labels, np.where(one, 2 * labels - 1, 1 - 2 * labels)] for one in right])

    own = units([0.7, 0.8, 0.75])
    drawn = tables._scores_of_draws(task, own)
    of_seeds = ((own[:, 1] > 0) == own[:, 0]).mean(axis=1)
    assert drawn[0] == pytest.approx(of_seeds.mean())
    of_rows = ((own[:, 1] > 0) == own[:, 0]).mean(axis=0).var() / 400
    # Seeds that are drawn twice count their rows twice.
    within = (of_seeds * (1 - of_seeds) / 400).mean() / 3 * (2 / 3)
    assert drawn[1:].std() == pytest.approx((of_rows + of_seeds.var() / 3 + within) ** 0.5, rel=0.1)


def test_tables_of_tasks_have_those_with_all_runs(tmp_path):
    lines = ['{"settings": {}}']
    for arm, score in (("control", -1.0), ("absolute+t5", 1.0), ("absolute+deberta", -1.0)):
        for seed in tasks.SEEDS:
            units = [[0.0, 0.0, 1.0, 1.0], [score, -1.0, 1.0, 1.0]]
            lines.append(json.dumps({"task": "sst2, 1,000", "arm": arm, "seed": seed, "tested": 0, "units": units}))
    lines.append(json.dumps({"task": "cola", "arm": "control", "seed": 0, "tested": 0, "units": [[0.0], [1.0]]}))
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines), encoding="utf-8")
    rows = tables.tasks_table(tmp_path).splitlines()[2:]
    assert len(rows) == 1 and rows[0].startswith(
        "| SST-2 with 1,000 phrases, accuracy | 1.000 | −0.250 (−0.750 to 0.000) | 0.000 ("
    )


def test_tables_of_tasks_say_what_ranks_have_without_training(tmp_path):
    lines = ['{"settings": {}}']
    lines += [json.dumps({"task": "qmsum", "arm": arm, "tested": 0.25}) for arm in ("chance", "cosine")]
    for arm in tasks.ARMS:
        lines += [
            json.dumps({"task": "qmsum", "arm": arm, "seed": seed, "tested": 0.5, "units": [[2, 4], [1.0, 2.0]]})
            for seed in tasks.SEEDS
        ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert (
        tables.tasks_table(tmp_path)
        .splitlines()[2]
        .startswith(
            "| QMSum, mean reciprocal rank (chance 0.250, cosine similarity of the original's embeddings 0.250) | 0.500 | 0.000 ("
        )
    )


def test_rows_of_a_query_stay_together():
    rows = [tasks.Row(("a",), 0.0, number // 5) for number in range(200)]
    rest, developed = tasks.apart(rows)
    assert {row.group for row in rest} & {row.group for row in developed} == set() and len(developed) == 20
    rest, developed = tasks.apart([row._replace(group=0) for row in rows])
    assert len(developed) == 20 and len(rest) == 180


def drawn_run(generator, name, readings, works=3):
    """A line of the study's file, all of whose counts are drawn."""

    def tables_of(*shape):
        return {f"work {number}": generator.integers(1, 50, shape).tolist() for number in range(works)}

    kinds = {"works": (5, 3), "names": (5, 3), "mentions": (4, 2)}
    return [
        {"arm": name, "fold": fold, "seed": fold, "readings": {
            reading: {"core_seconds": 6.0, **{kind: tables_of(*shape) for kind, shape in kinds.items()}}
            for reading in readings
        }}
        for fold in range(5)
    ]  # fmt: skip


def rows(table):
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def test_tables_have_the_scores_of_the_folds_that_all_arms_have(tmp_path):
    generator = np.random.default_rng(0)
    control = drawn_run(generator, "control", [*tables.WAYS, tagging.WHOLE])
    converted = drawn_run(generator, "t5 converted", [tagging.WHOLE])
    others = [
        drawn_run(generator, name, [tagging.WHOLE])
        for name in tables.FIRST_GROUP["minilm"][1:]
        if name != "t5 converted"
    ]
    unfinished = drawn_run(generator, "relative", [tagging.WHOLE])[:3]
    runs = Runs(tmp_path / "minilm.jsonl", {})
    # One arm has no fold 4 yet: no arm is shown with it.
    for line in (*control, *converted, *unfinished, *others[0][:4], *(line for lines in others[1:] for line in lines)):
        runs.add(line)
    control, converted = control[:4], converted[:4]
    assert tables.shown("minilm", tmp_path) == [(fold, fold) for fold in range(4)]
    arms = [row[0] for row in rows(tables.main_table(tmp_path))]
    assert "converted to `t5`, whole works" in arms and "`relative`, whole works" not in arms

    def counts_of_run(run, reading, which="works"):
        return np.array([*run["readings"][reading][which].values()])

    ways = rows(tables.ways_table("minilm", tmp_path))
    assert [row[0] for row in ways] == [*tables.WAYS.values()]
    for row, reading in zip(ways, tables.WAYS):
        right, wrong, missed = np.moveaxis([counts_of_run(run, reading)[:, 1:].sum((0, 1)) for run in control], -1, 0)
        assert float(row[1].split()[0]) == pytest.approx((right / (right + missed)).mean(), abs=5e-4)
        assert float(row[2].split()[0]) == pytest.approx((2 * right / (2 * right + wrong + missed)).mean(), abs=5e-4)
        assert row[-1] == "862"  # 2 seconds for 2,321 tokens
    number, windows, whole = rows(tables.mentions_table(tmp_path))[:3]
    assert whole[0] == "converted to `t5`, whole works"
    for place in range(4):
        counts = [counts_of_run(run, tagging.WINDOWS, "mentions")[:, place].sum(0) for run in control]
        assert int(number[place + 1].replace(",", "")) == np.sum(counts)
        assert float(windows[place + 1]) == pytest.approx(
            np.mean([right / (right + m) for right, m in counts]), abs=5e-4
        )
        counts = [counts_of_run(run, tagging.WHOLE, "mentions")[:, place].sum(0) for run in converted]
        assert float(whole[place + 1].split()[0]) == pytest.approx(
            np.mean([right / (right + m) for right, m in counts]), abs=5e-4
        )


def test_the_table_of_the_larger_model_has_each_run(tmp_path):
    generator, runs = np.random.default_rng(0), Runs(tmp_path / "mpnet.jsonl", {})
    lines = {
        name: [{**line, "fold": 0, "seed": seed} for seed, line in enumerate(drawn_run(generator, name, readings)[:2])]
        for name, readings in (("control", [*tables.WAYS]), ("deberta", [tagging.WINDOWS, tagging.WHOLE]))
    }
    lines["rope"] = drawn_run(generator, "rope", [tagging.WHOLE])[:1]  # of which one run is missing
    for line in (line for of_arm in lines.values() for line in of_arm):
        runs.add(line)
    found = rows(tables.larger_table(tmp_path))
    assert [row[0].split(",")[0] for row in found] == ["original positions", "`deberta`", "`deberta`"]
    right, _, missed = np.moveaxis(
        [
            np.sum([*line["readings"][tagging.WHOLE]["works"].values()], axis=0)[1:].sum(axis=0)
            for line in lines["deberta"]
        ],
        -1,
        0,
    )
    assert [float(score) for score in found[2][1].split(", ")] == pytest.approx(right / (right + missed), abs=5e-4)


def test_an_arm_with_a_rate_of_its_own_is_not_searched(tmp_path):
    runs = Runs(tmp_path / "mpnet.jsonl", {})
    searched = {"arm": "control", "fold": 0, "seed": 0, "rate": 4e-4, "position_rate": None}
    runs.add({**searched, "searched": 0.4})
    runs.add({**searched, "readings": {}})  # of another rate
    plan, recorded = tagging.Plan(SimpleNamespace(study=tagging.STUDIES["mpnet"]), runs), []
    plan.record = lambda *arguments, tests=False: recorded.append((*arguments, tests))
    plan.run(["control"], [0])
    assert recorded == [("control", 0, seed, (1e-4, None), True) for seed in (0, 1)]


def test_a_card_has_what_the_study_measured_and_is_renewed(tmp_path, monkeypatch):
    """The conversion is kept; STS-B is measured on the folder, and the figures are those of the pages."""
    name, data, out = "minilm-t5-stock", tmp_path / "data", tmp_path / "out"
    monkeypatch.setitem(
        folders.FOLDERS, name, replace(folders.FOLDERS[name], trained_length=64, max_length=96, steps=1)
    )
    draw = random.Random(0)
    lines = [
        " ".join(draw.choices("river stone cloud paper engine garden window letter".split(), k=80)) for _ in range(40)
    ]
    for file, text in {
        "wikitext2/valid.txt": "\n".join(lines),
        "stsb/stsb-en-test.csv": "\n".join(
            f"{a[:60]},{b[:60]},{score % 6}" for score, (a, b) in enumerate(zip(lines, lines[1:]))
        ),
    }.items():
        (data / file).parent.mkdir(parents=True)
        (data / file).write_text(text)
    folders.make(name, packaged_minilm(), out, data)
    card = ModelCard.load(out / name / "README.md")
    assert card.data.base_model == folders.MINILM and "longer than 96 word pieces" in card.text
    own, control = (tables.counts_of("minilm", *row) for row in (("t5 converted", tagging.WHOLE), tables.CONTROL))
    less = tables.difference(own.part(1), control.part(1), tables.recall)
    assert less.written() in card.text and "and a bias for each layer" in card.text
    model = SentenceTransformer(str(out / name), device="cpu")
    texts, scores = read_pairs(data / "stsb" / "stsb-en-test.csv")
    vectors = model.encode(texts, convert_to_tensor=True)
    found = spearmanr(torch.cosine_similarity(vectors[::2], vectors[1::2]), scores).statistic
    assert f"| this model | {found:.3f} |" in card.text
    monkeypatch.setattr(folders, "convert", None)
    folders.make(name, packaged_minilm(), out, data)
    assert ModelCard.load(out / name / "README.md").text == card.text
