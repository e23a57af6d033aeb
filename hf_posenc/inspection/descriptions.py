"""What people are told of schemes and of models: on the command line, in Python and in notebooks."""

import html
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils import find_adapter_config_file

from .._utils import module_inside, outermost
from ..checkpoint_code import has_code
from ..modeling.models.configuration_posenc import PositionConfigMixin
from ..modeling.schemes.table import ALIASES, SCHEMES
from ..parameters import position_parameters
from ..variants import BASE_MODELS, CONFIG_CLASSES, families, family_of, saved_class
from .configs import (
    adapter_base,
    check_exists,
    flag_rows,
    flags_of,
    length_of,
    load_config,
    longest_sequence,
    native_positions,
    parameter_shapes,
    per_layer,
    read_config,
    schemes_of,
    tokenizer_length,
    unpad_row,
)


Rows = list[tuple[str, ...]]


@dataclass(repr=False)
class Description:
    """Tables and sentences; prints as text, and as HTML in a notebook.

    Attributes:
        parts: in their order, a sentence or the rows of a table.
    """

    parts: list[str | Rows]

    def __str__(self) -> str:
        return "\n\n".join(part if isinstance(part, str) else _aligned(part) for part in self.parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(
            f"<p>{html.escape(part)}</p>" if isinstance(part, str) else _html_table(part) for part in self.parts
        )


def _aligned(rows: Rows) -> str:
    """Rows as columns of text."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _html_table(rows: Rows) -> str:
    lines = ("".join(f'<td style="text-align: left">{html.escape(cell)}</td>' for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def schemes() -> Description:
    """The position schemes and their flags.

    With the number of parameters that each adds to bert-base, how far it reads, and what it computes.
    """
    rows = [("name", "new in bert-base", "longer than in training", "starts silent", "paper", "formula")]
    for name, scheme in SCHEMES.items():
        shapes, _ = parameter_shapes(CONFIG_CLASSES["posenc_bert"](position_scheme=name))
        added = sum(torch.Size(shape).numel() for shape in shapes.values())
        silent = "yes" if scheme.silent else "no"
        rows.append((name, f"{added:,}", scheme.extrapolates, silent, scheme.paper, scheme.formula))
    aliases = ", ".join(f"{alias} is {name}" for alias, name in ALIASES.items())
    names = f"Join names with + to have several: absolute+t5. Other names: {aliases}."
    return Description([rows, names, [("flag", "values", "for"), *flag_rows(), unpad_row()]])


def inspect(model: Any, revision: str | None = None) -> Description:
    """What the positions of a model are.

    Scheme, flags and parameters; of a saved model also where the tokenizer beside it cuts, and what transformers makes of it without
    hf_posenc. Of what is saved it reads the configs and, where weights are here, the names in them: no numbers, and no code.

    Args:
        model: a folder, or a name on the Hub: a model or an adapter. Or a config, a model in memory, or what holds some: a pipeline,
            a SentenceTransformer, a module of your own.
        revision: branch, tag or commit on the Hub.

    Raises:
        OSError: there is no such model, or it cannot be had.
        TypeError: it is none of these.
        ValueError: the model is of a family without position schemes, or its flags are wrong.
    """
    if isinstance(model, PreTrainedConfig):
        family_of(model)
        name = f"{type(model).__name__} ({model.model_type})"
        return Description([_rows(name, model, _tokens(longest_sequence(model), {}))])
    if not isinstance(model, (str, os.PathLike)):
        return _inspect_in_memory(model)
    model = str(model)
    check_exists(model, revision)
    adapter = find_adapter_config_file(model, revision=revision)
    parts, of_adapter = [], None
    if adapter is not None:
        base = adapter_base(Path(adapter))
        parts.append(f"{model} is an adapter of {base}:")
        of_adapter = tokenizer_length(model, revision)
        model, revision = base, None
    config = load_config(model, revision)
    tokenizers = {"tokenizer": tokenizer_length(model, revision)}
    if of_adapter is not None:
        tokenizers["adapter's tokenizer"] = of_adapter
    tokens = _tokens(longest_sequence(config), tokenizers)
    name, without = f"{model} ({config.model_type})", ["the same: hf_posenc leaves such a model as it is"]
    if isinstance(config, PositionConfigMixin):
        entries = read_config(model, revision)
        name = f"{model} ({entries['model_type']}, {saved_class(config).__name__})"
        without = _without(model, revision, entries, config)
    rows = [("" if index else "without hf_posenc", line) for index, line in enumerate(without)]
    return Description([*parts, [*_rows(name, config, tokens), *rows]])


def _inspect_in_memory(given: Any) -> Description:
    """What the positions of each model are that is given or in what is given."""
    models = outermost(module_inside(given), lambda part: isinstance(part, tuple(BASE_MODELS)))
    if not models:
        raise ValueError(
            f"this {type(given).__name__} holds no model of the families that have position schemes: {families()}"
        )
    tokenizer, tables = getattr(given, "tokenizer", None), []
    for path, model in models.items():
        name = f"{type(model).__name__}, {path} of this {type(given).__name__}" if path else type(model).__name__
        tokenizers = {"tokenizer": length_of(tokenizer.model_max_length)} if tokenizer is not None else {}
        tokens = _tokens(longest_sequence(model.config), tokenizers)
        shapes = {parameter: tuple(value.shape) for parameter, value in position_parameters(model).items()}
        tables.append(_rows(name, model.config, tokens, (shapes, model.num_parameters())))
    return Description(tables)


def _rows(name: str, config: PreTrainedConfig, tokens: Rows, parameters: tuple[dict, int] | None = None) -> Rows:
    """What a model of a config is; its parameters are those that the config tells of, if they are not given."""
    if not isinstance(config, PositionConfigMixin):
        stock = f"not given: a stock model, with learned {native_positions(config)}"
        return [("model", name), ("position_scheme", stock), *tokens]
    shapes, total = parameters or parameter_shapes(config)
    added = sum(torch.Size(shape).numel() for shape in shapes.values())
    return [
        ("model", name),
        ("position_scheme", config.position_scheme),
        *(("", f"{scheme.name}: {scheme.formula} ({scheme.paper})") for scheme in schemes_of(config)),
        ("flags", ", ".join(f"{flag}={value!r}" for flag, value in flags_of(config).items()) or "defaults"),
        *tokens,
        ("parameters", f"{added:,} of {total:,} belong to the scheme"),
        *(("", f"{name} {shape}" + f" × {count}" * (count > 1)) for name, shape, count in per_layer(shapes)),
    ]


def _tokens(longest: int | None, tokenizers: dict[str, float | None]) -> list[tuple[str, str]]:
    """Rows of how many tokens a model reads, and how many each of its tokenizers leaves."""
    reads = "any number" if longest is None else f"at most {longest}: there its table of absolute positions ends"
    rows = [("tokens", reads)]
    for name, length in tokenizers.items():
        said, *hints = _tokenizer(length, longest)
        rows += [(name, said), *(("", hint) for hint in hints)]
    return rows


def _tokenizer(length: float | None, longest: int | None) -> list[str]:
    """What a tokenizer that cuts at a length does for a model that reads so many tokens, and what to do about it."""
    if length is None:
        return ["none beside it"]
    cuts = "has no limit" if length == math.inf else f"cuts at {length} tokens (model_max_length)"
    change = (
        f"to change it: AutoTokenizer.from_pretrained(..., model_max_length={longest or 'N'}).save_pretrained(...)"
    )
    if length == (longest or math.inf):
        return [f"{cuts}, as the model"]
    if length < (longest or math.inf):
        return [
            f"{cuts}; the model itself reads {longest or 'any number'}",
            "pipelines drop the rest with truncation=True, and warn without",
            change,
        ]
    return [
        f"{cuts}; the model's table ends at {longest}",
        "longer text is an error, with truncation=True too",
        change,
    ]


def _without(model: str, revision: str | None, entries: dict, config: PositionConfigMixin) -> list[str]:
    """What transformers makes of a variant by itself."""
    stock = config.stock_model_type
    if entries["model_type"] == stock:
        return [
            f"transformers 5 loads it as a plain {stock} with {native_positions(config)} and other outputs; its load report only lists "
            "what it leaves out, as UNEXPECTED keys"
        ]
    lines = [f"{stock}'s own classes warn, and load a plain {stock} with other outputs"]
    if not has_code(model, entries, revision):
        return ["the Auto classes cannot load it: it has no code beside its weights (hf-posenc push adds it)", *lines]
    return [
        "with trust_remote_code=True the Auto classes run the code beside it: equal outputs",
        "without, they ask [y/N] whether to, and refuse it where nobody says yes",
        *lines,
    ]
