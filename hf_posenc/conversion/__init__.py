"""A trained model's positions changed, and what it knows kept: start, extend, calibrate, heal, measure."""

from .converting import convert


__all__ = ["convert"]
