"""The model inside what people have in hand: a pipeline, a SentenceTransformer, a compiled model, a Trainer."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def module_inside(given: Any) -> nn.Module:
    """What is given, where it is a module, or the one that it has as its `model`, as pipelines and trainers have.

    Raises:
        TypeError: it is and has no module.
    """
    module = given if isinstance(given, nn.Module) else getattr(given, "model", None)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"a torch module is needed, or an object whose `model` is one, such as a pipeline, got {_shown(given)}"
        )
    return module


def outermost(module: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """The modules of a kind in a module, itself perhaps, by their path; not those inside one of the kind."""
    found: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        is_inside = any(not outer or path.startswith(f"{outer}.") for outer in found)
        if not is_inside and is_wanted(part):
            found[path] = part
    return found


def model_inside(given: Any) -> PreTrainedModel:
    """The one model of transformers that is given, or that is in what is given.

    Raises:
        TypeError: there is none.
        ValueError: there are several.
    """
    found = outermost(module_inside(given), lambda part: isinstance(part, PreTrainedModel))
    if not found:
        raise TypeError(f"a model of transformers is needed, or something that holds one, got {_shown(given)}")
    if len(found) > 1:
        raise ValueError(
            f"this {type(given).__name__} holds {len(found)} models of transformers ({', '.join(found)}): give one of them"
        )
    [model] = found.values()
    return model


def _shown(given: Any) -> str:
    what = type(given).__name__
    return what if isinstance(given, nn.Module) else f"{given!r:.80} of type {what}"
