"""The command line, `hf-posenc`: a package of its own, so that hf_posenc is imported only after the command line was parsed."""

from .commands import app, main


__all__ = ["app", "main"]
