"""Checks of the sizes in a config, before a model is built from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import CONFIG_NAME

from ..modeling.models.family import Family


# Numbers that all configs have, by BERT's names, and the largest that each may be: beyond, it is a mistake, and takes the memory.
LARGEST = {
    "vocab_size": 2**31 - 1,
    "hidden_size": 2**20,
    "num_hidden_layers": 1000,
    "num_attention_heads": 2**16,
    "intermediate_size": 2**24,
    "max_position_embeddings": 2**31 - 1,
}


@contextmanager
def config_of(place: str) -> Iterator[None]:
    """Context in which errors of Transformers and torch about a config become a ValueError with one line.

    Args:
        place: the name of the model, for the message.

    Raises:
        ValueError: the config is wrong. An OSError stays an OSError.
    """
    try:
        yield
    except StrictDataclassError as error:
        raise ValueError(f"{place}: {CONFIG_NAME} has an invalid value ({_line(error)})") from error
    except (ValueError, OSError):
        raise
    except Exception as error:
        name = "" if isinstance(error, TypeError) else f"{type(error).__name__}: "
        raise ValueError(f"{place}: {CONFIG_NAME} has an invalid value ({name}{_line(error)})") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def check_sizes(place: str, entries: dict[str, Any], usual: PreTrainedConfig, family: Family | None) -> None:
    """Raise ValueError, with the name of the entry, if a size in a config is impossible.

    Args:
        place: the name of the model, for messages.
        entries: the entries of its `config.json`.
        usual: a config of the same class with default values.
        family: the description of its family. None for a family without position schemes, whose entries have the names of BERT's.
    """
    known = {usual.attribute_map.get(name, name): value for name, value in entries.items()}
    config = SimpleNamespace(**{**vars(usual), **known})
    names = {} if family is None else family.config_names
    sizes = {name: names.get(name, name) for name in (*LARGEST, "hidden_act")}
    for name, largest in LARGEST.items():
        value = getattr(config, sizes[name], None)
        if not _is_integer(value, 1, largest):
            raise ValueError(f"{place}: {sizes[name]} must be an integer from 1 to {largest:,}, got {value!r}")
    width, heads = (getattr(config, sizes[name]) for name in ("hidden_size", "num_attention_heads"))
    if width % heads:
        raise ValueError(
            f"{place}: {sizes['hidden_size']} must be a multiple of {sizes['num_attention_heads']}, got {width} and {heads}"
        )
    if family is not None and family.token_types and not _is_integer(config.type_vocab_size, 1):
        raise ValueError(f"{place}: type_vocab_size must be an integer of at least 1, got {config.type_vocab_size!r}")
    activation = getattr(config, sizes["hidden_act"], None)
    if not isinstance(activation, str) or activation not in ACT2FN:
        raise ValueError(
            f"{place}: {sizes['hidden_act']} must be one of {', '.join(sorted(ACT2FN))}, got {activation!r}"
        )
    _check_padding(place, config, family)
    for name in ("dtype", "torch_dtype"):
        value = getattr(config, name, None)
        named = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
        if value is not None and not isinstance(named, torch.dtype):
            raise ValueError(f"{place}: {name} must be the name of a torch dtype, such as 'float32', got {value!r}")


def _check_padding(place: str, config: SimpleNamespace, family: Family | None) -> None:
    """Raise ValueError for a padding id outside of the vocabulary, or one that leaves no position."""
    counts = family is not None and family.positions_follow_padding
    padding, last = config.pad_token_id, config.vocab_size - 1
    if not _is_integer(padding, 0, last) and (counts or padding is not None):
        raise ValueError(
            f"{place}: pad_token_id must be an integer from 0 to {last}, the last id of vocab_size, got {padding!r}"
        )
    if counts and family.first_position(config) >= config.max_position_embeddings:
        raise ValueError(
            f"{place}: max_position_embeddings must be more than {family.first_position(config)}, where positions begin, got "
            f"{config.max_position_embeddings}"
        )


def _is_integer(value: Any, least: int, largest: int | None = None) -> bool:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer and value >= least and (largest is None or value <= largest)
