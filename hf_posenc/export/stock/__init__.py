"""A model with a position scheme as an architecture of Transformers itself, which runs without hf_posenc and custom code.

`to_stock` makes it in memory, `from_stock` leads back, and `export` writes a complete folder. What an architecture does not compute exactly
is refused, with the reason; what is written has been compared with the model first.
"""

from .folder import export
from .making import from_stock, to_stock


__all__ = ["export", "from_stock", "to_stock"]
