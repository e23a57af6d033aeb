"""SQuAD v1.1: exact match and F1 of answers to questions, in percent.

Before they are compared, answers are put in lower case, rid of ASCII punctuation, then of the words a, an and the, and
split at white space into words. An answer is scored against each gold answer of its question, and the best value
counts, for either score by itself:

    exact match = 1 if the words are the same in the same order, else 0
    F1 = 2 common / (words in the answer + words in the gold answer)

`common` counts the words that both have, as often as both have them. F1 is 0 where nothing is common, so also where
nothing is left of both, which is an exact match nevertheless. The results are means over questions, times 100.

    >>> metric = evaluate.load("examples/metrics/squad")
    >>> metric.compute(
    ...     predictions=[{"id": "q1", "prediction_text": "the old Tower"}],
    ...     references=[{"id": "q1", "answers": {"text": ["Tower", "A big, old tower"], "answer_start": [11, 0]}}],
    ... )
    {'exact_match': 0.0, 'f1': 80.0}

Predictions and references have the form that they have for the Hub's `squad`, one of each per question, in any order;
`answer_start` does not matter. Every question has a gold answer in SQuAD v1.1.

Source: Rajpurkar, Zhang, Lopyrev and Liang, SQuAD (2016), https://arxiv.org/abs/1606.05250, section 6.1, and its
evaluation script for v1.1.
"""

import re
import string
from collections import Counter
from typing import Any

import datasets
import evaluate


ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


class Squad(evaluate.Metric):
    """The metric `squad`, values between 0 and 100; the module says how it is defined."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        answers = datasets.Sequence({"text": text, "answer_start": datasets.Value("int32")})
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Rajpurkar et al., SQuAD: 100,000+ Questions for Machine Comprehension of Text, 2016",
            features=datasets.Features(
                {"predictions": {"id": text, "prediction_text": text}, "references": {"id": text, "answers": answers}}
            ),
            reference_urls=["https://arxiv.org/abs/1606.05250", "https://rajpurkar.github.io/SQuAD-explorer/"],
        )

    def _compute(self, predictions: list[dict[str, str]], references: list[dict[str, Any]]) -> dict[str, float]:
        """Exact match and F1 of at least one answer.

        Raises:
            ValueError: there is nothing to score, an id occurs twice or on one side only, or a gold answer is missing.
        """
        if len(predictions) == 0:
            raise ValueError("nothing to score: there are no predictions")
        predicted = {prediction["id"]: words(prediction["prediction_text"]) for prediction in predictions}
        gold = {reference["id"]: list(map(words, reference["answers"]["text"])) for reference in references}
        if len(predicted) < len(predictions) or len(gold) < len(references):
            raise ValueError("an id occurs more than once among the predictions or among the references")
        if predicted.keys() != gold.keys():
            odd = ", ".join(sorted(predicted.keys() ^ gold.keys())[:5])
            raise ValueError(f"predictions and references must have the same ids; on one side only: {odd}")
        for question, answers in gold.items():
            if not answers:
                raise ValueError(f"question {question} has no gold answer; SQuAD v1.1 has no unanswerable questions")
        exact = [max(answer == predicted[question] for answer in answers) for question, answers in gold.items()]
        f1 = [max(overlap(predicted[question], answer) for answer in answers) for question, answers in gold.items()]
        return {"exact_match": 100 * sum(exact) / len(gold), "f1": 100 * sum(f1) / len(gold)}


def words(text: str) -> list[str]:
    """The words of an answer that count."""
    # In this order, as published: "the-cat" has become one word before articles are looked for.
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def overlap(answer: list[str], gold: list[str]) -> float:
    """F1 of an answer's words against those of one gold answer."""
    common = (Counter(answer) & Counter(gold)).total()
    return 2 * common / (len(answer) + len(gold)) if common else 0.0
