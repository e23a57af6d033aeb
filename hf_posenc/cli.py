"""The command line by its old address: it is a package of its own, so that `--help` need not import transformers."""

from hf_posenc_cli import app, main


__all__ = ["app", "main"]
