"""Descriptions of schemes and models, for the command line, Python and notebooks."""

import html
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils import cached_file, find_adapter_config_file

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
from .sentence_folders import CHUNKED, MODULES, chunk_size, text_length


Rows = list[tuple[str, ...]]


@dataclass(repr=False)
class Description:
    """Tables and sentences. Prints as text, and as HTML in a notebook.

    Attributes:
        parts: in order, sentences (strings) and tables (lists of rows).
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
    """The position schemes and their config options.

    Shows the number of parameters that each scheme adds to bert-base, whether it reads sequences longer than in training, whether it is
    output-preserving at initialization, its paper and its formula. Schemes that you registered are included.
    """
    rows = [("name", "new in bert-base", "longer than in training", "output-preserving", "paper", "formula")]
    for name, scheme in SCHEMES.items():
        shapes, _ = parameter_shapes(CONFIG_CLASSES["posenc_bert"](position_scheme=name))
        added = sum(torch.Size(shape).numel() for shape in shapes.values())
        silent = "yes" if scheme.silent else "no"
        rows.append((name, f"{added:,}", scheme.extrapolates, silent, scheme.paper, scheme.formula))
    aliases = ", ".join(f"{alias} is {name}" for alias, name in ALIASES.items())
    names = f"Combine schemes with +, as in absolute+t5. Aliases: {aliases}."
    return Description([rows, names, [("config option", "values", "for"), *flag_rows(), unpad_row()]])


def inspect(model: Any, revision: str | None = None) -> Description:
    """Describe the positions of a model.

    Shows the scheme, its config options and parameters. For a saved model, also where its tokenizer truncates, and how Transformers loads it
    without hf_posenc. Of saved models it reads configs and the parameter names in local weights. It reads no values and runs no code.

    Args:
        model: a folder or a name on the Hub (a model or an adapter), a config, a model, or an object that holds models, such as a pipeline,
            a SentenceTransformer or your own module.
        revision: branch, tag or commit on the Hub.

    Raises:
        OSError: there is no such model, or it cannot be downloaded.
        TypeError: `model` is none of these.
        ValueError: the model's family has no position schemes, or its config options are wrong.
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
        if base is None:
            raise ValueError(
                f"{model} is an adapter that names no base model (base_model_name_or_path): give the model itself"
            )
        parts.append(f"{model} is an adapter of {base}:")
        of_adapter = tokenizer_length(model, revision)
        model, revision = base, None
    config = load_config(model, revision)
    tokenizers = {"tokenizer": tokenizer_length(model, revision)}
    if of_adapter is not None:
        tokenizers["adapter's tokenizer"] = of_adapter
    folder = _settings_folder(model, revision)
    length, chunk = text_length(folder), chunk_size(folder)
    tokens = _tokens(longest_sequence(config), {} if chunk else tokenizers)
    if length:
        tokens.append(("sentence-transformers", _texts(length, chunk)))
    name, without = f"{model} ({config.model_type})", ["the same: hf_posenc does not change this model"]
    if chunk:
        without = ["the Auto classes load the encoder, which reads no chunks; sentence-transformers cannot load it"]
    if isinstance(config, PositionConfigMixin):
        entries = read_config(model, revision)
        name = f"{model} ({entries['model_type']}, {saved_class(config).__name__})"
        without = _without(model, revision, entries, config)
    rows = [("" if index else "without hf_posenc", line) for index, line in enumerate(without)]
    return Description([*parts, [*_rows(name, config, tokens), *rows]])


def _settings_folder(model: str, revision: str | None) -> Path:
    """Where the settings of sentence-transformers are: the folder of a model, or what is there of one on the Hub."""
    if Path(model).is_dir():
        return Path(model)
    files = [
        cached_file(model, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        for name in (MODULES, "sentence_bert_config.json")
    ]
    return next((Path(file).parent for file in files if file is not None), Path(model))


def _inspect_in_memory(given: Any) -> Description:
    """The positions of each model in an object in memory."""
    whole = module_inside(given)
    models = outermost(whole, lambda part: isinstance(part, tuple(BASE_MODELS)))
    if not models:
        raise ValueError(
            f"this {type(given).__name__} contains no model of a family that supports position schemes: {families()}"
        )
    chunked = next(
        (part for part in whole.modules() if CHUNKED == f"{type(part).__module__}.{type(part).__name__}"), None
    )
    tokenizer, tables = getattr(given, "tokenizer", None) if chunked is None else None, []
    for path, model in models.items():
        name = f"{type(model).__name__}, {path} of this {type(given).__name__}" if path else type(model).__name__
        tokenizers = {"tokenizer": length_of(tokenizer.model_max_length)} if tokenizer is not None else {}
        tokens = _tokens(longest_sequence(model.config), tokenizers)
        if chunked is not None:
            tokens.append(("sentence-transformers", _texts(chunked.max_seq_length, chunked.chunk_size)))
        shapes = {parameter: tuple(value.shape) for parameter, value in position_parameters(model).items()}
        tables.append(_rows(name, model.config, tokens, (shapes, model.num_parameters())))
    return Description(tables)


def _rows(name: str, config: PreTrainedConfig, tokens: Rows, parameters: tuple[dict, int] | None = None) -> Rows:
    """The description of a model with a config; by default, with the parameters that the config implies."""
    if not isinstance(config, PositionConfigMixin):
        stock = f"not set: Transformers' own model, with learned {native_positions(config)}"
        return [("model", name), ("position_scheme", stock), *tokens]
    shapes, total = parameters or parameter_shapes(config)
    added = sum(torch.Size(shape).numel() for shape in shapes.values())
    return [
        ("model", name),
        ("position_scheme", config.position_scheme),
        *(("", f"{scheme.name}: {scheme.formula} ({scheme.paper})") for scheme in schemes_of(config)),
        ("config options", ", ".join(f"{flag}={value!r}" for flag, value in flags_of(config).items()) or "defaults"),
        *tokens,
        ("parameters", f"{added:,} of {total:,} belong to the scheme"),
        *(("", f"{name} {shape}" + f" × {count}" * (count > 1)) for name, shape, count in per_layer(shapes)),
    ]


def _tokens(longest: int | None, tokenizers: dict[str, float | None]) -> list[tuple[str, str]]:
    """Rows with the maximum sequence length of a model, and where its tokenizers truncate."""
    reads = "any number" if longest is None else f"at most {longest}: its position embedding matrix has no more rows"
    rows = [("tokens", reads)]
    for name, length in tokenizers.items():
        said, *hints = _tokenizer(length, longest)
        rows += [(name, said), *(("", hint) for hint in hints)]
    return rows


def _texts(length: int, chunk: int | None) -> str:
    """What sentence-transformers does with long texts: where it truncates, and the tokens of a chunk where it reads chunks."""
    truncates = f"truncates at {length:,} tokens (max_seq_length)"
    if chunk is None:
        return truncates
    return f"{truncates}, and reads chunks of {chunk}; load it with trust_remote_code=True, and hf_posenc installed"


def _tokenizer(length: float | None, longest: int | None) -> list[str]:
    """Where a tokenizer truncates, compared with the maximum sequence length of its model, and how to change that."""
    if length is None:
        return ["none"]
    cuts = "no limit" if length == math.inf else f"truncates at {length} tokens (model_max_length)"
    change = (
        f"to change it: AutoTokenizer.from_pretrained(..., model_max_length={longest or 'N'}).save_pretrained(...)"
    )
    if length == (longest or math.inf):
        return [f"{cuts}, like the model"]
    if length < (longest or math.inf):
        return [
            f"{cuts}; the model accepts {longest or 'any number'}",
            "pipelines drop the rest with truncation=True, and only warn otherwise",
            change,
        ]
    return [
        f"{cuts}; the model's maximum is {longest}",
        "a longer text is an error, also with truncation=True",
        change,
    ]


def _without(model: str, revision: str | None, entries: dict, config: PositionConfigMixin) -> list[str]:
    """How Transformers loads a model with a position scheme without hf_posenc."""
    stock = config.stock_model_type
    if entries["model_type"] == stock:
        return [
            f"Transformers 5 loads it as a plain {stock} with {native_positions(config)}, whose outputs differ; the load report only lists the "
            "ignored parameters as UNEXPECTED keys"
        ]
    lines = [f"the classes of {stock} warn, and load a plain {stock}, whose outputs differ"]
    if not has_code(model, entries, revision):
        return ["the Auto classes cannot load it: the modeling code is missing (hf-posenc push adds it)", *lines]
    return [
        "with trust_remote_code=True the Auto classes run the modeling code in the checkpoint: equal outputs",
        "without it, they ask [y/N] whether to run that code, and fail unless the answer is yes",
        *lines,
    ]
