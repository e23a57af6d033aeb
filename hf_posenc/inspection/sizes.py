"""The numbers in a config of which a model is made, checked before one is made."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import CONFIG_NAME

from ..modeling.family import Family


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
    """Within, what a config does not bear (an error of whatever kind, of transformers or of torch) is a ValueError of one line.

    Raises:
        ValueError: that, or one that was raised within.
    """
    try:
        yield
    except StrictDataclassError as error:
        raise ValueError(f"{place}: {CONFIG_NAME} holds what no model has ({_line(error)})") from error
    except (ValueError, OSError):
        raise
    except Exception as error:
        name = "" if isinstance(error, TypeError) else f"{type(error).__name__}: "
        raise ValueError(f"{place}: {CONFIG_NAME} holds what no model has ({name}{_line(error)})") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def check_sizes(config: PreTrainedConfig, family: Family | None) -> None:
    """Raise ValueError, naming the entry, for a number that no model can have.

    Args:
        family: the description of the config's family; None for one without position schemes, whose names are BERT's.
    """
    names = {} if family is None else family.config_names
    values = {name: getattr(config, names.get(name, name), None) for name in LARGEST}
    for name, value in values.items():
        if not _is_integer(value) or not 1 <= value <= LARGEST[name]:
            raise ValueError(f"{names.get(name, name)} must be an integer from 1 to {LARGEST[name]:,}, got {value!r}")
    width, heads = values["hidden_size"], values["num_attention_heads"]
    if width % heads:
        raise ValueError(
            f"{names.get('hidden_size', 'hidden_size')} must be a multiple of "
            f"{names.get('num_attention_heads', 'num_attention_heads')}, got {width} and {heads}"
        )
    if family is not None and family.token_types and not _is_integer(config.type_vocab_size, least=1):
        raise ValueError(f"type_vocab_size must be an integer from 1 on, got {config.type_vocab_size!r}")
    activation = getattr(config, names.get("hidden_act", "hidden_act"), None)
    if not isinstance(activation, str) or activation not in ACT2FN:
        known = ", ".join(sorted(ACT2FN))
        raise ValueError(f"{names.get('hidden_act', 'hidden_act')} must be one of {known}, got {activation!r}")
    _check_padding(config, family, values)


def _check_padding(config: PreTrainedConfig, family: Family | None, values: dict[str, Any]) -> None:
    """Raise ValueError for an id of padding that is no word's, or that leaves no position."""
    padding, words, positions = config.pad_token_id, values["vocab_size"], values["max_position_embeddings"]
    counts = family is not None and family.positions_follow_padding
    if (padding is None and not counts) or (_is_integer(padding, least=0) and padding < words):
        if counts and family.first_position(config) >= positions:
            raise ValueError(
                f"max_position_embeddings must be more than {family.first_position(config)}, at which positions begin, got {positions}"
            )
        return
    raise ValueError(
        f"pad_token_id must be an integer from 0 to {words - 1}, the last id of vocab_size, got {padding!r}"
    )


def _is_integer(value: Any, least: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)
