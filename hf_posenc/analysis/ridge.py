"""Ridge regression, for linear probes: one decomposition of the features serves every penalty and every target."""

from dataclasses import dataclass

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


def r_squared(targets: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    """The coefficient of determination of (..., examples, targets), by target."""
    residual = (targets - predictions).square().sum(-2)
    return 1 - residual / (targets - targets.mean(-2, keepdim=True)).square().sum(-2)


def fit_ridge(features: torch.Tensor, fitted: torch.Tensor, true: torch.Tensor, split: Split) -> RidgeFit:
    """Ridge regression with a penalty chosen by target on the validation examples, measured on the test examples.

    w = argmin Σ (y - ȳ - w·z)² + λ n |w|² over the n training examples, z the features with mean 0 and variance 1 there.

    Args:
        features: (examples, features).
        fitted: (examples, targets), what the probe is fitted to, and its penalty chosen by.
        true: (examples, targets), what it is measured against: the same, unless `fitted` was shuffled.
        split: which examples serve what.
    """
    features, fitted, true = features.double(), fitted.double(), true.double()
    mean, scale = features[split.train].mean(0), features[split.train].std(0)
    # A feature that never varies tells nothing.
    scale = torch.where(scale > 0, scale, torch.inf)
    standard = (features - mean) / scale
    train, offset = standard[split.train], fitted[split.train].mean(0)
    values, vectors = torch.linalg.eigh(train.T @ train / len(train))
    projected = vectors.T @ (train.T @ (fitted[split.train] - offset)) / len(train)
    penalties = torch.tensor(PENALTIES, dtype=torch.float64)
    # (penalties, features, targets)
    weights = vectors @ (projected / (values.clamp(min=0)[:, None] + penalties[:, None, None]))
    chosen = r_squared(fitted[split.validation], standard[split.validation] @ weights + offset).argmax(0)
    weights = weights[chosen, :, torch.arange(len(chosen))].T
    wanted, predictions = true[split.test], standard[split.test] @ weights + offset
    return RidgeFit(
        weights=weights / scale[:, None],
        penalty=penalties[chosen],
        r2=r_squared(wanted, predictions),
        error=(wanted - predictions).abs().mean(0),
        squares=(wanted - predictions).square(),
        around=(wanted - wanted.mean(0)).square(),
    )
