"""Span F1: precision, recall and F1 of the spans (entities, chunks) that BIO tags mark.

A tag is `O`, `B-<type>` or `I-<type>`. Tags mark spans as conlleval reads them:

- a span begins at every `B-`, and at an `I-` that the token before it does not lead up to: at the start of a sentence,
  after `O`, or after a token of another type. So `I-PER` without `B-PER` opens a span, it is not an error;
- it goes on over each following `I-` of its own type, and ends before anything else; it never leaves its sentence.

A predicted span is right if the references have one of the same type, first token and last token: there is no credit for
part of a span. Over all sentences, of one type or of all types together (overall, a micro average):

    precision = right / predicted    recall = right / in the references    F1 = 2 right / (predicted + in the references)

and each is 0 where that is 0 / 0.

    >>> metric = evaluate.load("examples/metrics/span_f1")
    >>> metric.compute(predictions=[["B-PER", "O", "B-LOC"]], references=[["B-PER", "O", "O"]])
    {'LOC': {'precision': 0.0, 'recall': 0.0, 'f1': 0.0, 'number': 0},
     'PER': {'precision': 1.0, 'recall': 1.0, 'f1': 1.0, 'number': 1},
     'overall_precision': 0.5, 'overall_recall': 1.0, 'overall_f1': 0.6666666666666666, 'overall_accuracy': 0.666...}

Predictions and references are lists of sentences, and a sentence is a list of tags; tokens that are not to be scored
(label -100) are left out of both. With `names` as an array of the tags and `scored = labels != -100`, a batch becomes
`[list(names[row[keep]]) for row, keep in zip(labels, scored)]`. The result has the form that the Hub's `seqeval` has:
a dictionary per type, `number` being its spans in the references, and the overall values. `overall_accuracy` is the
share of tags that are right.

Source: Tjong Kim Sang and De Meulder, CoNLL-2003 shared task (2003), and its script conlleval. The same numbers as
seqeval gives by default; its `mode="strict"` differs: there an `I-` without `B-` is no span.
"""

import re
from collections import Counter

import datasets
import evaluate


TAG = re.compile(r"O|[BI]-.+")


class SpanF1(evaluate.Metric):
    """The metric `span_f1`, values between 0 and 1; the module says how it is defined."""

    def _info(self) -> evaluate.MetricInfo:
        tags = datasets.Sequence(datasets.Value("string"))
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Tjong Kim Sang and De Meulder, Introduction to the CoNLL-2003 Shared Task, 2003",
            features=datasets.Features({"predictions": tags, "references": tags}),
            reference_urls=["https://aclanthology.org/W03-0419", "https://www.clips.uantwerpen.be/conll2003/ner/"],
        )

    def _compute(
        self, predictions: list[list[str]], references: list[list[str]]
    ) -> dict[str, float | dict[str, float | int]]:
        """Scores of sentences that have at least one token.

        Raises:
            ValueError: there is nothing to score, a sentence has more tags in one than in the other, or a tag is none.
        """
        if not any(predictions) and not any(references):
            raise ValueError("nothing to score: there are no predicted tags")
        right: Counter[str] = Counter()
        predicted: Counter[str] = Counter()
        expected: Counter[str] = Counter()
        right_tags = 0
        for sentence, (guess, truth) in enumerate(zip(predictions, references)):
            if len(guess) != len(truth):
                raise ValueError(f"sentence {sentence} has {len(guess)} predicted tags, but {len(truth)} references")
            guessed_spans, true_spans = spans(guess), spans(truth)
            right.update(kind for kind, _, _ in guessed_spans & true_spans)
            predicted.update(kind for kind, _, _ in guessed_spans)
            expected.update(kind for kind, _, _ in true_spans)
            right_tags += sum(map(str.__eq__, guess, truth))
        per_type = {
            kind: {**scores(right[kind], predicted[kind], expected[kind]), "number": expected[kind]}
            for kind in sorted(predicted | expected)
        }
        overall = scores(right.total(), predicted.total(), expected.total())
        accuracy = right_tags / sum(map(len, references))
        return {
            **per_type,
            **{f"overall_{name}": value for name, value in overall.items()},
            "overall_accuracy": accuracy,
        }


def spans(tags: list[str]) -> set[tuple[str, int, int]]:
    """The spans of a sentence, each as its type, its first token and the token after its last.

    Raises:
        ValueError: a tag is not `O`, `B-<type>` or `I-<type>`.
    """
    found = set()
    kind, start = None, None
    for position, tag in enumerate([*tags, "O"]):
        if not TAG.fullmatch(tag):
            raise ValueError(f"a tag must be 'O', 'B-<type>' or 'I-<type>', got {tag!r}")
        if start is not None and tag != f"I-{kind}":
            found.add((kind, start, position))
            start = None
        if start is None and tag != "O":
            kind, start = tag[2:], position
    return found


def scores(right: int, predicted: int, expected: int) -> dict[str, float]:
    """Precision, recall and F1 from numbers of spans."""
    return {
        "precision": right / predicted if predicted else 0.0,
        "recall": right / expected if expected else 0.0,
        "f1": 2 * right / (predicted + expected) if predicted + expected else 0.0,
    }
