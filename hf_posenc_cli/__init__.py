"""The command line, `hf-posenc`. It imports hf_posenc once a command is understood, and is no part of it for that reason."""

from .commands import app, main


__all__ = ["app", "main"]
