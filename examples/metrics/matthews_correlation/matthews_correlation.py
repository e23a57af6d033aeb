"""Matthews correlation: the correlation of predicted and true classes, fair also where classes are of unequal size.

For two classes, from the counts of true and false positives and negatives:

    MCC = (tp tn - fp fn) / sqrt((tp + fp) (tp + fn) (tn + fp) (tn + fn))

For more, with t_k examples of class k, p_k predictions of it, c right predictions and n in all:

    MCC = (c n - sum_k t_k p_k) / sqrt((n² - sum_k p_k²) (n² - sum_k t_k²))

1 is perfect, 0 is what guessing gives, and, for two classes, -1 is always wrong. Where the denominator is 0 (everything
in one class), the value is 0.

    >>> metric = evaluate.load("examples/metrics/matthews_correlation")
    >>> metric.compute(predictions=[1, 1, 0, 0], references=[1, 0, 0, 0])
    {'matthews_correlation': 0.5773502691896258}

Predictions and references are class numbers, one per example.

Source: Matthews, Biochimica et Biophysica Acta 405 (1975); for several classes Gorodkin, Computational Biology and
Chemistry 28 (2004). Computed by `sklearn.metrics.matthews_corrcoef`.
"""

import warnings

import datasets
import evaluate
from sklearn.metrics import matthews_corrcoef


class MatthewsCorrelation(evaluate.Metric):
    """The metric `matthews_correlation`, between -1 and 1; the module says how it is defined."""

    def _info(self) -> evaluate.MetricInfo:
        # Integer features would cut probabilities down to classes in silence; as floats, scikit-learn refuses them.
        label = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Matthews, 1975; Gorodkin, 2004",
            features=datasets.Features({"predictions": label, "references": label}),
            reference_urls=[
                "https://scikit-learn.org/stable/modules/generated/sklearn.metrics.matthews_corrcoef.html"
            ],
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        """Matthews correlation of at least one prediction.

        Raises:
            ValueError: there is nothing to score, or a value is not a whole number.
        """
        if len(predictions) == 0:
            raise ValueError("nothing to score: there are no predictions")
        with warnings.catch_warnings():
            # Everything in one class is 0 by definition; the advice to pass labels is not for the one who reads it here.
            warnings.filterwarnings("ignore", message="A single label was found")
            return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
