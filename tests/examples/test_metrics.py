"""The metrics of examples/metrics: what they compute, what they refuse, and that loading them takes no network."""

import doctest
import functools
import json
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fresh_process import ROOT, run_fresh
from transformers import EvalPrediction


METRICS = ROOT / "examples" / "metrics"
CLASSIFICATION = ("accuracy", "f1", "matthews_correlation")
NAMES = (*CLASSIFICATION, "span_f1", "squad")
# Predictions and references that any metric of this name takes.
SMALL: dict[str, tuple[list, list]] = {
    **{name: ([1, 1, 0, 1], [1, 0, 0, 1]) for name in CLASSIFICATION},
    "span_f1": ([["B-PER", "I-PER", "O"], ["B-LOC"]], [["B-PER", "I-PER", "O"], ["B-PER"]]),
    "squad": (
        [{"id": "1", "prediction_text": "a big cat"}, {"id": "2", "prediction_text": "Paris"}],
        [
            {"id": "1", "answers": {"text": ["cat"], "answer_start": [3]}},
            {"id": "2", "answers": {"text": ["paris."], "answer_start": [0]}},
        ],
    ),
}


@pytest.fixture(scope="module")
def compute(tmp_path_factory) -> Callable[..., dict[str, Any]]:
    """A metric by its name, on predictions and references."""
    import evaluate

    cache_dir = str(tmp_path_factory.mktemp("metrics"))

    @functools.cache
    def module(name: str) -> type:
        return type(evaluate.load(str(METRICS / name), keep_in_memory=True, cache_dir=cache_dir))

    def compute(name: str, predictions: Any, references: Any, **options: Any) -> dict[str, Any]:
        metric = module(name)(keep_in_memory=True, cache_dir=cache_dir)
        return metric.compute(predictions=predictions, references=references, **options)

    return compute


def draw(num_labels: int, num_examples: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and references of unequal class sizes, 60 % alike."""
    generator = np.random.default_rng(num_labels)
    sizes = np.arange(1, num_labels + 1) / np.arange(1, num_labels + 1).sum()
    references = generator.choice(num_labels, num_examples, p=sizes)
    guesses = generator.integers(num_labels, size=num_examples)
    return np.where(generator.random(num_examples) < 0.6, references, guesses), references


def test_accuracy_is_that_of_scikit_learn(compute):
    from sklearn.metrics import accuracy_score

    predictions, references = draw(3)
    accuracy = compute("accuracy", predictions, references)["accuracy"]
    assert accuracy == pytest.approx(accuracy_score(references, predictions), abs=1e-12)


def test_binary_f1_is_that_of_the_positive_class(compute):
    from sklearn.metrics import f1_score

    predictions, references = draw(2)
    of_one = compute("f1", predictions, references)["f1"]
    of_zero = compute("f1", predictions, references, pos_label=0)["f1"]
    assert of_one == pytest.approx(f1_score(references, predictions), abs=1e-12)
    assert of_zero == pytest.approx(f1_score(references, predictions, pos_label=0), abs=1e-12)
    assert abs(of_one - of_zero) > 0.01


@pytest.mark.parametrize("average", ["micro", "macro", "weighted", None])
def test_averages_of_f1_are_those_of_scikit_learn(compute, average):
    from sklearn.metrics import f1_score

    predictions, references = draw(5)
    for labels in (None, [3, 1]):
        scores = compute("f1", predictions, references, average=average, labels=labels)
        assert [*scores] == ([f"f1_{label}" for label in labels or range(5)] if average is None else ["f1"])
        expected = f1_score(references, predictions, average=average, labels=labels)
        assert [*scores.values()] == pytest.approx(np.atleast_1d(expected).tolist(), abs=1e-12)
    others = [f1_score(references, predictions, average=other) for other in ("micro", "macro", "weighted")]
    assert min(abs(others[0] - others[1]), abs(others[1] - others[2]), abs(others[0] - others[2])) > 1e-4


def test_f1_of_each_label_goes_by_the_labels_that_are_named(compute):
    scores = compute("f1", [0, 1, 2, 2], [0, 1, 1, 2], average=None, labels=[2, 0, 9])
    assert scores == {"f1_2": pytest.approx(2 / 3), "f1_0": 1.0, "f1_9": 0.0}


def test_matthews_correlation_is_that_of_scikit_learn(compute):
    from sklearn.metrics import matthews_corrcoef

    for num_labels in (2, 7):
        predictions, references = draw(num_labels)
        value = compute("matthews_correlation", predictions, references)["matthews_correlation"]
        assert value == pytest.approx(matthews_corrcoef(references, predictions), abs=1e-12)
        assert 0.1 < value < 0.9


def test_classes_that_do_not_occur_give_zero_without_a_warning(compute):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert compute("matthews_correlation", [1, 1], [1, 1]) == {"matthews_correlation": 0.0}
        assert compute("matthews_correlation", [1, 1], [1, 0]) == {"matthews_correlation": 0.0}
        assert compute("f1", [0, 0], [0, 0]) == {"f1": 0.0}


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")  # NaN, inside scikit-learn
@pytest.mark.parametrize("name", CLASSIFICATION)
def test_what_is_no_class_is_refused_and_not_rounded(compute, name):
    for refused in ([0.2, 0.8, 0.6], [0.0, float("nan"), 1.0], ["a", "b", "c"], np.eye(3)):
        with pytest.raises(ValueError, match="continuous|NaN|could not convert|expected format"):
            compute(name, refused, [0, 1, 1])


# What it is -> predicted tags, true tags, spans that are right, that are predicted, that are there.
SPANS = {
    "all right": ("B-A I-A O B-B", "B-A I-A O B-B", 2, 2, 2),
    "last token differs": ("B-A I-A I-A", "B-A I-A O", 0, 1, 1),
    "first token differs": ("O B-A I-A", "B-A I-A I-A", 0, 1, 1),
    "type differs": ("B-B I-B", "B-A I-A", 0, 1, 1),
    "B- always begins a span": ("B-A B-A", "B-A I-A", 0, 2, 1),
    "I- at the start opens a span": ("I-A I-A", "B-A I-A", 1, 1, 1),
    "I- after O opens a span": ("O I-A O", "O B-A O", 1, 1, 1),
    "I- of another type opens a span": ("B-A I-B", "B-A B-B", 2, 2, 2),
    "a type that comes back is a new span": ("B-A I-B I-A", "B-A O O", 1, 3, 1),
    "O ends a span": ("B-A O I-A", "B-A I-A I-A", 0, 2, 1),
    "the end of a sentence ends a span": ("B-A | I-A", "B-A | B-A", 2, 2, 2),
    "a type may have a hyphen": ("B-A-x I-A-x", "B-A-y I-A-y", 0, 1, 1),
    "no span at all": ("O O", "O O", 0, 0, 0),
    "a span too many": ("B-A O", "O O", 0, 1, 0),
    "a span too few": ("O O", "O B-A", 0, 0, 1),
}


def test_spans_are_read_as_conlleval_reads_them(compute):
    for name, (*sides, right, predicted, expected) in SPANS.items():
        tags = [[sentence.split() for sentence in side.split("|")] for side in sides]
        result = compute("span_f1", *tags)
        assert result["overall_precision"] == (right / predicted if predicted else 0), name
        assert result["overall_recall"] == (right / expected if expected else 0), name
        f1 = 2 * right / (predicted + expected) if predicted + expected else 0
        assert result["overall_f1"] == pytest.approx(f1), name


def test_span_f1_tells_types_apart(compute):
    references = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "O", "B-ORG"]]
    predictions = [["B-PER", "I-PER", "O", "B-LOC"], ["B-PER", "O", "B-LOC"]]
    assert compute("span_f1", predictions, references) == {
        "LOC": {"precision": 1 / 2, "recall": 1 / 2, "f1": 1 / 2, "number": 2},
        "ORG": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "number": 1},
        "PER": {"precision": 1 / 2, "recall": 1.0, "f1": pytest.approx(2 / 3), "number": 1},
        "overall_precision": 2 / 4,
        "overall_recall": 2 / 4,
        "overall_f1": 1 / 2,
        "overall_accuracy": 5 / 7,
    }


def spans_by_definition(tags: list[str], kinds: list[str]) -> Iterator[tuple[str, int, int]]:
    """All stretches of a sentence that are spans, tried one after the other."""
    for kind, first, last in product(kinds, range(len(tags)), range(len(tags))):
        begin, inside = f"B-{kind}", f"I-{kind}"
        led_up_to = first > 0 and tags[first - 1] in (begin, inside)
        begins = tags[first] == begin or (tags[first] == inside and not led_up_to)
        goes_on = all(tag == inside for tag in tags[first + 1 : last + 1])
        ends = last == len(tags) - 1 or tags[last + 1] != inside
        if first <= last and begins and goes_on and ends:
            yield kind, first, last


def test_span_f1_is_that_of_sets_of_spans_found_by_brute_force(compute):
    kinds = ["A", "B", "C-D"]
    generator = np.random.default_rng(len(kinds))
    tags = np.array(["O", "O", *(f"{prefix}-{kind}" for prefix in "BI" for kind in kinds)])
    references = [generator.choice(tags, generator.integers(1, 12)) for _ in range(60)]
    predictions = [
        np.where(generator.random(len(row)) < 0.7, row, generator.choice(tags, len(row))) for row in references
    ]
    found, expected = (
        {(number, *span) for number, row in enumerate(rows) for span in spans_by_definition(row.tolist(), kinds)}
        for rows in (predictions, references)
    )
    result = compute("span_f1", predictions, references)
    for kind in kinds:
        found_here, expected_here = ({span for span in spans if span[1] == kind} for spans in (found, expected))
        right = len(found_here & expected_here)
        assert result[kind] == {
            "precision": pytest.approx(right / len(found_here), abs=1e-12),
            "recall": pytest.approx(right / len(expected_here), abs=1e-12),
            "f1": pytest.approx(2 * right / (len(found_here) + len(expected_here)), abs=1e-12),
            "number": len(expected_here),
        }
    assert result["overall_precision"] == pytest.approx(len(found & expected) / len(found), abs=1e-12)
    assert result["overall_recall"] == pytest.approx(len(found & expected) / len(expected), abs=1e-12)
    assert 0.2 < result["overall_f1"] < 0.8


# What it is -> answer, gold answers, exact match, F1.
ANSWERS = {
    "the same": ("Denver Broncos", ["Denver Broncos"], 1, 1),
    "case": ("denver BRONCOS", ["Denver Broncos"], 1, 1),
    "article": ("The Denver Broncos", ["Denver Broncos"], 1, 1),
    "all articles": ("Broncos of an a the", ["Broncos of"], 1, 1),
    "an article is a whole word": ("theatre", ["atre"], 0, 0),
    "white space": ("  Denver \t\n Broncos ", ["Denver Broncos"], 1, 1),
    "punctuation goes, and joins": ("$5,000!", ["5000"], 1, 1),
    "punctuation goes before articles": ("the-cat", ["cat"], 0, 0),
    "only ASCII punctuation": ("the — cat", ["cat"], 0, 2 / 3),
    "an article before other punctuation": ("a’s", ["’s"], 1, 1),
    "one word of three": ("in Denver, Colorado", ["Denver"], 0, 2 / 4),
    "order counts for the exact match only": ("Broncos Denver", ["Denver Broncos"], 0, 1),
    "words count as often as both have them": ("no no no", ["no no"], 0, 4 / 5),
    "nothing common": ("red fox", ["blue whale"], 0, 0),
    "empty answer": ("", ["Denver"], 0, 0),
    "empty gold answer": ("Denver", ["", "Denver"], 1, 1),
    "both empty": ("", [""], 1, 0),
    "nothing left of both": ("The.", ["a"], 1, 0),
    "the best of several": ("old Tower", ["Tower", "the big old Tower", "Oslo"], 0, 4 / 5),
    "exact with any of several": ("big Tower", ["Tower big", "Big Tower"], 1, 1),
}


def test_squad_scores_an_answer_as_version_1_1_defines_it(compute):
    for name, (answer, gold, exact, f1) in ANSWERS.items():
        references = [{"id": "q", "answers": {"text": gold, "answer_start": [0] * len(gold)}}]
        result = compute("squad", [{"id": "q", "prediction_text": answer}], references)
        assert result == {"exact_match": 100 * exact, "f1": pytest.approx(100 * f1)}, name


def test_squad_takes_means_over_questions_and_matches_them_by_id(compute):
    predictions = [{"id": "2", "prediction_text": "Paris"}, {"id": "1", "prediction_text": "a big cat"}]
    references = SMALL["squad"][1]
    result = compute("squad", predictions, references)
    assert result == {"exact_match": 50.0, "f1": pytest.approx(100 * (2 / 3 + 1) / 2)}


def test_the_output_of_a_trainer_can_be_scored(compute):
    logits = np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.5]], dtype=np.float32)
    prediction = EvalPrediction(predictions=logits, label_ids=np.array([0, 1, 1]))
    predictions = np.argmax(prediction.predictions, axis=-1)
    assert compute("accuracy", predictions, prediction.label_ids) == {"accuracy": pytest.approx(2 / 3)}
    assert compute("f1", predictions, prediction.label_ids) == {"f1": pytest.approx(2 / 3)}
    assert compute("matthews_correlation", predictions, prediction.label_ids) == {"matthews_correlation": 0.5}

    names = np.array(["O", "B-PER", "I-PER"])
    labels = np.array([[-100, 1, 2, 0, -100], [-100, 0, 1, -100, -100]])
    predictions = np.array([[2, 1, 2, 0, 0], [1, 1, 1, 2, 2]])
    scored = labels != -100
    tags = [[list(names[row[keep]]) for row, keep in zip(side, scored)] for side in (predictions, labels)]
    result = compute("span_f1", *tags)
    assert (result["overall_precision"], result["overall_recall"]) == (pytest.approx(2 / 3), 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_batches_add_up_on_disk_too(compute, tmp_path, name):
    import evaluate

    predictions, references = SMALL[name]
    metric = evaluate.load(str(METRICS / name), cache_dir=str(tmp_path))
    for prediction, reference in zip(predictions, references):
        metric.add_batch(predictions=[prediction], references=[reference])
    assert metric.compute() == compute(name, predictions, references)


@pytest.mark.parametrize("name", NAMES)
def test_empty_input_and_different_lengths_are_refused(compute, name):
    predictions, references = SMALL[name]
    for right in ([], references):
        with pytest.raises(ValueError, match="nothing to score"):
            compute(name, [], right)
    for sides in ((predictions[1:], references), (predictions, references[1:])):
        with pytest.raises(ValueError, match="[Mm]ismatch"):
            compute(name, *sides)


def test_f1_refuses_options_that_it_cannot_follow(compute):
    cases = [
        ({"average": "samples"}, "average must be one of 'binary', 'micro', 'macro', 'weighted', None, got 'samples'"),
        ({"average": ["macro"]}, "average must be"),
        ({"labels": [1]}, "labels does not apply"),
        ({"average": "macro", "pos_label": 1}, "pos_label applies"),
        ({"average": "macro", "labels": []}, "labels is empty"),
        ({"pos_label": 7}, "pos_label=7"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            compute("f1", [0, 1], [1, 1], **options)


def test_binary_f1_of_three_classes_is_refused(compute):
    with pytest.raises(ValueError, match="multiclass"):
        compute("f1", [0, 1, 2], [0, 1, 2])


def test_span_f1_refuses_what_are_not_tags_of_the_same_tokens(compute):
    cases = [
        ([["O"], ["O", "O"]], [["O"], ["O"]], "sentence 1 has 2 predicted tags, but 1 "),
        ([[], []], [[], []], "nothing to score"),
        ([["PER"]], [["O"]], "a tag must be 'O', 'B-<type>' or 'I-<type>', got 'PER'"),
        ([["O"]], [["E-PER"]], "got 'E-PER'"),
        ([["B-"]], [["O"]], "got 'B-'"),
        ([[1]], [[1]], "expected format"),
    ]
    for predictions, references, message in cases:
        with pytest.raises(ValueError, match=message):
            compute("span_f1", predictions, references)


def test_squad_refuses_what_it_cannot_match(compute):
    cases = [
        (["1", "2"], ["1", "3"], ["x"], "on one side only: 2, 3"),
        (["1", "1"], ["1", "2"], ["x"], "more than once"),
        (["1", "2"], ["2", "2"], ["x"], "more than once"),
        (["1", "2"], ["1", "2"], [], "question 1 has no gold answer"),
    ]
    for ids, gold_ids, texts, message in cases:
        predictions = [{"id": name, "prediction_text": "x"} for name in ids]
        references = [{"id": name, "answers": {"text": texts, "answer_start": [0] * len(texts)}} for name in gold_ids]
        with pytest.raises(ValueError, match=message):
            compute("squad", predictions, references)


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_in_the_descriptions_are_true(name, monkeypatch, tmp_path):
    import evaluate

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path)
    description = evaluate.load(f"examples/metrics/{name}").description
    examples = doctest.DocTestParser().get_doctest(description, {"evaluate": evaluate}, name, None, None)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(examples).attempted >= 1
    assert runner.failures == 0


def all_numbers(result: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in result.items():
        yield from all_numbers(value) if isinstance(value, dict) else [(key, value)]


@pytest.mark.parametrize("name", NAMES)
def test_results_are_plain_numbers(compute, name):
    options = (
        [{}] if name != "f1" else [{"average": average} for average in ("binary", "micro", "macro", "weighted", None)]
    )
    for option in options:
        result = compute(name, *SMALL[name], **option)
        for key, value in all_numbers(result):
            assert type(value) is (int if key == "number" else float)
        assert json.loads(json.dumps(result)) == result


@pytest.mark.slow
def test_metrics_load_from_anywhere_without_network_and_without_the_plugin(compute, tmp_path):
    code = f"""
import json, os, socket, sys
os.environ["HF_HOME"] = {str(tmp_path / "home")!r}
os.chdir({str(tmp_path)!r})

def refuse(*args, **kwargs):
    raise SystemExit(f"network: {{args}}")

socket.socket.connect = socket.getaddrinfo = refuse

sys.modules["transformers"] = None  # evaluate imports all of it where it can, for pipelines: seconds, and no metric's need
import evaluate
del sys.modules["transformers"]

for name, (predictions, references) in {SMALL!r}.items():
    metric = evaluate.load(os.path.join({str(METRICS)!r}, name))
    print(json.dumps(metric.compute(predictions=predictions, references=references)))
"""
    printed = run_fresh(code, tmp_path / "modules", plugin=False)
    results = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert results == [compute(name, *SMALL[name]) for name in NAMES]
    assert Path(tmp_path / "modules" / "evaluate_modules").is_dir()  # copied there, not found in an older cache
