"""sentence-transformers: models that read long texts in chunks (`chunks`), and the folders that the library saves (`folders`)."""

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .chunks import ChunkedTransformer, in_chunks


__all__ = ["ChunkedTransformer", "in_chunks"]


def __getattr__(name: str) -> Any:
    """`chunks` needs sentence-transformers, and `folders` does not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import chunks

    return getattr(chunks, name)
