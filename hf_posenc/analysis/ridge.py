"""Ridge regression, for linear probes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


# Penalties per example, on standardised features: from none to speak of to one that leaves nothing.
PENALTIES = tuple(10.0**exponent for exponent in range(-6, 2))


@dataclass
class Split:
    """Which examples a probe is fitted on, which choose its penalty, and which it is measured on: bool (examples,) each."""

    train: torch.Tensor
    validation: torch.Tensor
    test: torch.Tensor


@dataclass
class RidgeFit:
    """A fitted probe of several targets, and how it does on examples that it was not fitted on.

    Attributes:
        weights: (features, targets), in units of the features as they were given.
        penalty: (targets,), as chosen on the validation examples, per example.
        r2: (targets,), 1 - Σ(y - ŷ)² / Σ(y - ȳ)² over the test examples; 0 is what a constant reaches, less is worse.
        error: (targets,), mean |y - ŷ| over the test examples, in units of the target.
        squares, around: (test examples, targets), (y - ŷ)² and (y - ȳ)² of each.
    """

    weights: torch.Tensor
    penalty: torch.Tensor
    r2: torch.Tensor
    error: torch.Tensor
    squares: torch.Tensor
    around: torch.Tensor


def fit_ridge(features: torch.Tensor, fitted: torch.Tensor, true: torch.Tensor, split: Split) -> RidgeFit:
    """Ridge regression with a penalty chosen by target on the validation examples, measured on the test examples.

    w = argmin Σ (y - ȳ - w·z)² + λ n |w|² over the n training examples, z the features with mean 0 and variance 1 there.

    Args:
        features: (examples, features).
        fitted: (examples, targets), what the probe is fitted to, and its penalty chosen by.
        true: (examples, targets), what it is measured against: the same, unless `fitted` was shuffled.
        split: which examples serve what.
    """
    try:
        from sklearn.linear_model import Ridge
        from sklearn.metrics import r2_score
    except ImportError as error:
        raise ImportError('linear probes need scikit-learn: pip install "hf_posenc[analysis]"') from error

    features, fitted, true = (tensor.double().numpy() for tensor in (features, fitted, true))
    train, validation, test = (part.numpy() for part in (split.train, split.validation, split.test))
    mean, scale = features[train].mean(0), features[train].std(0, ddof=1)
    # A feature that never varies tells nothing.
    scale = np.where(scale > 0, scale, np.inf)
    standard = (features - mean) / scale
    fits = [Ridge(alpha=penalty * train.sum()).fit(standard[train], fitted[train]) for penalty in PENALTIES]
    scores = [
        r2_score(fitted[validation], _predicted(fit, standard[validation]), multioutput="raw_values") for fit in fits
    ]
    penalty = np.asarray(PENALTIES)[np.argmax(scores, axis=0)]
    best = Ridge(alpha=penalty * train.sum()).fit(standard[train], fitted[train])
    wanted, predictions = true[test], _predicted(best, standard[test])
    numbers = (
        np.atleast_2d(best.coef_).T / scale[:, None],
        penalty,
        r2_score(wanted, predictions, multioutput="raw_values"),
        np.abs(wanted - predictions).mean(0),
        np.square(wanted - predictions),
        np.square(wanted - wanted.mean(0)),
    )
    return RidgeFit(*map(torch.from_numpy, numbers))


def _predicted(fit: Any, features: np.ndarray) -> np.ndarray:
    """(examples, targets), of one target too."""
    return features @ np.atleast_2d(fit.coef_).T + fit.intercept_
