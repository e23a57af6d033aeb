"""Accuracy: the share of predictions that equal their reference.

    accuracy = #{i : prediction_i = reference_i} / n

    >>> evaluate.load("examples/metrics/accuracy").compute(predictions=[0, 1, 2, 2], references=[0, 1, 1, 2])
    {'accuracy': 0.75}

Predictions and references are class numbers, one per example. Computed by `sklearn.metrics.accuracy_score`.
"""

import datasets
import evaluate
from sklearn.metrics import accuracy_score


class Accuracy(evaluate.Metric):
    """The metric `accuracy`, between 0 and 1; the module says how it is defined."""

    def _info(self) -> evaluate.MetricInfo:
        # Integer features would cut probabilities down to classes in silence; as floats, scikit-learn refuses them.
        label = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            features=datasets.Features({"predictions": label, "references": label}),
            reference_urls=["https://scikit-learn.org/stable/modules/generated/sklearn.metrics.accuracy_score.html"],
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        """Accuracy of at least one prediction.

        Raises:
            ValueError: there is nothing to score, or a value is not a whole number.
        """
        if len(predictions) == 0:
            raise ValueError("nothing to score: there are no predictions")
        return {"accuracy": float(accuracy_score(references, predictions))}
