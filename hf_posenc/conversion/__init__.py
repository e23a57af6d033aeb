"""A trained model's positions changed, and what it knows kept: start, extend, calibrate, distill, measure."""

import warnings
from typing import Any

from .calibration import calibrate
from .converting import compare, convert
from .distillation import Distillation, Diverged, distill
from .extension import extend
from .report import ConversionReport
from .start import start


__all__ = [
    "Distillation",
    "Diverged",
    "ConversionReport",
    "calibrate",
    "compare",
    "convert",
    "distill",
    "extend",
    "start",
]

# Names of before 0.3.
_RENAMED = {"Healing": "Distillation", "heal": "distill", "Report": "ConversionReport"}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"hf_posenc.conversion.{name} is called {_RENAMED[name]} now", FutureWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
