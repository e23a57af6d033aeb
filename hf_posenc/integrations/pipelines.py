"""Pipelines of transformers take position options in `model_kwargs`. Beside it, some drop them without a word: here that is an error."""

import sys
from collections.abc import Callable
from typing import Any

from ..modeling.models.configuration_posenc import FLAGS
from .changes import AtImport, Changes, hook_method


PIPELINES = "transformers.pipelines.base"


def _make(original: Callable, pipeline: Any, *args, **kwargs) -> None:
    """`Pipeline.__init__`. Raises TypeError for an option among its keywords: by then the model is made."""
    if given := [name for name in kwargs if name in FLAGS]:
        raise TypeError(
            f"a pipeline takes {', '.join(given)} in model_kwargs, as in model_kwargs={{{given[0]!r}: ...}}"
        )
    original(*args, **kwargs)


def _hook(changes: Changes) -> None:
    hook_method(changes, sys.modules[PIPELINES].Pipeline, "__init__", _make)


def install(changes: Changes) -> None:
    """Hook the pipelines now, or when they are imported."""
    if PIPELINES in sys.modules:
        _hook(changes)
    else:
        AtImport(PIPELINES, lambda: _hook(changes)).wait(changes)
