"""What several parts need: the model inside what people have in hand, and tables in Markdown.

In hand they have a pipeline, a SentenceTransformer, a compiled model, a Trainer.
"""

from collections.abc import Callable, Sequence
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


def as_markdown(
    header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1, for_terminals: bool = False
) -> str:
    """A table in Markdown.

    Args:
        header: of the columns.
        rows: of as many cells.
        words: how many columns, the first ones, hold words; the others are numbers, set to the right.
        for_terminals: cells are padded to the width of their column, so that it reads well as it is.
    """
    rules = ["---"] * words + ["---:"] * (len(header) - words)
    if for_terminals:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        rules = ["-" * (width + 2) for width in widths]
        header, *rows = (
            [cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (header, *rows)
        )
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(rules)}|", *lines[1:]])
