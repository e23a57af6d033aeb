"""Models on the Hub: pushing them (`pushing`), and their cards (`cards`, which `card_files` merges into what others wrote)."""

from .pushing import push


__all__ = ["push"]
