"""The command line, `hf-posenc`: a separate package, so that hf_posenc is imported only after the command line was parsed."""

from .commands import app, main


__all__ = ["app", "main"]
