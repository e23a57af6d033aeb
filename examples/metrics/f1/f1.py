"""F1: the harmonic mean of precision and recall, of one class or averaged over classes.

For a class with `tp` true positives, `fp` false positives and `fn` false negatives:

    precision = tp / (tp + fp)    recall = tp / (tp + fn)    F1 = 2 tp / (2 tp + fp + fn), and 0 where that is 0 / 0

    >>> f1 = evaluate.load("examples/metrics/f1")
    >>> f1.compute(predictions=[1, 1, 0, 1], references=[1, 0, 0, 1])
    {'f1': 0.8}
    >>> f1.compute(predictions=[0, 1, 2, 2], references=[0, 1, 1, 2], average=None)
    {'f1_0': 1.0, 'f1_1': 0.6666666666666666, 'f1_2': 0.6666666666666666}

Predictions and references are class numbers, one per example. `compute` also takes

- `average`: `"binary"` (default), F1 of the class `pos_label` where there are two classes; `"micro"`, F1 of the counts
  summed over classes, which is the accuracy unless `labels` leaves a class out; `"macro"`, the mean over classes;
  `"weighted"`, the mean weighted by how often a class is the reference; `None`, every class by itself as `f1_<class>`.
- `labels`: the classes that count, for all but `"binary"`. Default: all that are predicted or are a reference.
- `pos_label`: the class that `"binary"` scores, by default 1.

Source: van Rijsbergen, Information Retrieval, 2nd edition (1979), chapter 7. Computed by `sklearn.metrics.f1_score`.
"""

from collections.abc import Sequence

import datasets
import evaluate
from sklearn.metrics import f1_score
from sklearn.utils.multiclass import unique_labels


AVERAGES = ("binary", "micro", "macro", "weighted", None)


class F1(evaluate.Metric):
    """The metric `f1`, between 0 and 1; the module says how it is defined."""

    def _info(self) -> evaluate.MetricInfo:
        # Integer features would cut probabilities down to classes in silence; as floats, scikit-learn refuses them.
        label = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="van Rijsbergen, Information Retrieval, 2nd edition, 1979",
            features=datasets.Features({"predictions": label, "references": label}),
            reference_urls=["https://scikit-learn.org/stable/modules/generated/sklearn.metrics.f1_score.html"],
        )

    def _compute(
        self,
        predictions: list[float],
        references: list[float],
        average: str | None = "binary",
        labels: Sequence[int] | None = None,
        pos_label: int | None = None,
    ) -> dict[str, float]:
        """F1 of at least one prediction.

        Raises:
            ValueError: there is nothing to score, a value is not a whole number, `average` is unknown, `labels` or
                `pos_label` does not apply to it, or `"binary"` is asked for more than two classes.
        """
        if average not in AVERAGES:
            possible = ", ".join(map(repr, AVERAGES))
            raise ValueError(f"average must be one of {possible}, got {average!r}")
        if average == "binary" and labels is not None:
            raise ValueError("labels does not apply to average='binary', which scores one class: give pos_label")
        if average != "binary" and pos_label is not None:
            raise ValueError(f"pos_label applies to average='binary', not to {average!r}: give labels=[{pos_label}]")
        if labels is not None and len(labels) == 0:
            raise ValueError("labels is empty: name the classes that count, or leave it out to count all")
        if len(predictions) == 0:
            raise ValueError("nothing to score: there are no predictions")
        if average is None and labels is None:
            labels = unique_labels(references, predictions)
        score = f1_score(
            references,
            predictions,
            labels=labels,
            pos_label=1 if pos_label is None else pos_label,
            average=average,
            zero_division=0.0,
        )
        if average is None:
            return {f"f1_{int(label)}": float(of_label) for label, of_label in zip(labels, score)}
        return {"f1": float(score)}
