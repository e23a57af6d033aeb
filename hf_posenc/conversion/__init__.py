"""A trained model's positions changed, and what it knows kept: start, extend, calibrate, distill, measure."""

from .calibration import calibrate
from .converting import ConversionArguments, compare, convert
from .distillation import Distillation, Diverged, distill
from .extending import Extension, extend
from .longer_tables import lengthen
from .report import ConversionReport
from .start import start


__all__ = [
    "ConversionArguments",
    "Distillation",
    "Diverged",
    "Extension",
    "ConversionReport",
    "calibrate",
    "compare",
    "convert",
    "distill",
    "extend",
    "lengthen",
    "start",
]
