"""Models on the Hub: `pushing` uploads them, `cards` writes their model cards, and `card_files` merges these into existing cards."""

from .pushing import push


__all__ = ["push"]
