"""A model with a position scheme as an architecture of Transformers itself, which runs without hf_posenc and custom code.

`to_stock` converts a model in memory, `from_stock` converts it back, and `export` writes a complete folder. A model that no architecture represents
exactly is refused, with the reason. The outputs are compared with those of the model before anything is written.
"""

from .folder import export
from .making import from_stock, to_stock


__all__ = ["export", "from_stock", "to_stock"]
