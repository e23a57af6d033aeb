"""A trained model's positions changed, and what it knows kept: start, extend, calibrate, distill, measure."""

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
