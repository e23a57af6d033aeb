"""A trained model's positions changed, and what it knows kept: start, extend, calibrate, heal, measure."""

from .calibration import calibrate
from .converting import compare, convert
from .extension import extend
from .healing import Diverged, Healing, heal
from .report import Report
from .start import start


__all__ = ["Diverged", "Healing", "Report", "calibrate", "compare", "convert", "extend", "heal", "start"]
