"""What a model is, from its config: schemes, config options, parameters, limits.

Of weights, only the names are read. No code of a checkpoint is run.
"""

import ast
import copy
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, cached_file, has_file, logging

from ..modeling.models.configuration_posenc import PositionConfigMixin
from ..modeling.schemes.base import PositionScheme
from ..modeling.schemes.flags import UNPAD, Boolean, Dictionary, Integer, Number, Subset
from ..modeling.schemes.table import ALL, FLAGS, SCHEMES, kind_of, scheme_names
from ..parameters import position_parameters
from ..variants import CONFIG_CLASSES, families, family_of, saved_class, variant_config
from .sizes import check_sizes, config_of
from .weights import class_of_weights, tensor_names


logger = logging.get_logger(__name__)

# Kind of a flag -> the type of its values in JSON.
JSON_TYPES = {Boolean: "boolean", Integer: "integer", Number: "number", Subset: "list", Dictionary: "object"}
TOKENIZER_CONFIG = "tokenizer_config.json"
NO_LENGTH = 10**20
"""If `model_max_length` of a tokenizer is larger than this number, it means that there is no limit."""
# What a tokenizer is read from where it has no config, as old checkpoints do.
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "sentencepiece.bpe.model")
PIPELINE_TAGS = {
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "Model": "feature-extraction",
}
"""The Hub's name for the task of a model, by the end of the name of its class."""


def check_named(place: str | Path, what: str) -> None:
    """Raise ValueError if a name is empty, because an empty path is the current folder.

    Args:
        place: the name or path.
        what: what it names, for the message.
    """
    if not str(place).strip():
        raise ValueError(f"the name of {what} is empty")


def check_exists(model: str, revision: str | None = None) -> None:
    """Check that there is a folder or a model on the Hub with this name.

    It sends one request. Transformers would look for each file that it may need, with retries for each if the Hub cannot be reached.

    Args:
        model: a folder or a name on the Hub.
        revision: branch, tag or commit on the Hub.

    Raises:
        OSError: there is none, or the Hub cannot be reached.
        ValueError: the name is empty.
    """
    check_named(model, "the model")
    if Path(model).exists():
        return
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise OSError(f"{model}: there is no such folder, and this is not a valid name on the Hub") from error
    if try_to_load_from_cache(model, CONFIG_NAME, revision=revision):
        return
    if constants.HF_HUB_OFFLINE:
        raise OSError(
            f"{model}: there is no such folder and no such model in the cache, and HF_HUB_OFFLINE is set, so the Hub was not asked"
        )
    try:
        HfApi().model_info(model, revision=revision, timeout=10)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = f" at {revision}" if revision else ""
        raise OSError(
            f"{model}: there is no such folder, and no model of this name{at} on the Hub that you have access to"
        ) from error
    except HfHubHTTPError:
        return  # whatever is wrong, reading the config says it
    except Exception as error:  # nobody answers; the HTTP library's own classes change with its versions
        raise OSError(
            f"{model}: there is no such folder, and {constants.ENDPOINT} cannot be reached ({error})"
        ) from error


def read_entries(model: str, revision: str | None = None) -> dict[str, Any]:
    """Read the entries of a `config.json`, of any model.

    Args:
        model: a folder or a name on the Hub.
        revision: branch, tag or commit on the Hub.

    Raises:
        OSError: there is no config, or it cannot be downloaded.
        ValueError: it is not a JSON object.
    """
    try:
        entries, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
        is_object = isinstance(entries, dict)
    except (AttributeError, TypeError, LookupError):  # it goes on with whatever JSON there is
        is_object = False
    if not is_object:
        raise ValueError(f"{model}: {CONFIG_NAME} must hold a JSON object")
    if not entries:
        raise OSError(f"{model} has no config.json")
    return entries


def read_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """Read the entries of a `config.json`, of a model of a supported family.

    Args:
        model: a folder or a name on the Hub.
        revision: branch, tag or commit on the Hub.

    Raises:
        OSError: there is no config, or it cannot be downloaded.
        ValueError: it is not a JSON object, or the family is not supported.
    """
    entries = read_entries(model, revision)
    model_type = entries.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_CLASSES:
        raise ValueError(
            f"{model} is of model type {model_type!r}; the families that have position schemes are {families()}"
        )
    return entries


def adapter_base(adapter_config: Path) -> str | None:
    """Read the base model of a PEFT adapter from its config. None if it names none.

    Args:
        adapter_config: the file `adapter_config.json`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a JSON object.
    """
    entries = json.loads(adapter_config.read_text(encoding="utf-8"))
    if not isinstance(entries, dict):
        raise ValueError(f"{adapter_config} must hold a JSON object, got {type(entries).__name__}")
    return entries.get("base_model_name_or_path")


def checked_config(model: str, revision: str | None = None) -> PreTrainedConfig:
    """Load the config of a model of a supported family, with or without a position scheme, and check it.

    Args:
        model: a folder or a name on the Hub.
        revision: branch, tag or commit on the Hub.

    Raises:
        OSError: there is no config, or it cannot be downloaded.
        ValueError: the family is not supported, a config option is wrong, or a value is impossible.
    """
    entries = read_config(model, revision)
    cls = CONFIG_CLASSES[entries["model_type"]]
    with config_of(model):
        usual = cls()
        check_sizes(model, entries, usual, family_of(usual))
        config = cls.from_dict(entries)
        made_of(config, saved_class(config), layers=1)
    return config


def load_config(model: str, revision: str | None = None, download: bool = False) -> PreTrainedConfig:
    """Load a config as [`checked_config`] does, and correct `architectures` as [`name_as_weights`] does.

    Args:
        model: a folder or a name on the Hub.
        revision: branch, tag or commit on the Hub.
        download: download the weights from the Hub, if they are not in the cache, to read their parameter names.

    Raises:
        OSError: there is no config, or it cannot be downloaded.
        ValueError: the family is not supported, a config option is wrong, or a value is impossible.
    """
    config = checked_config(model, revision)
    name_as_weights(config, saved_class(config), model, revision, download)
    return config


def name_as_weights(
    config: PreTrainedConfig,
    cls: type[PreTrainedModel],
    place: str,
    revision: str | None = None,
    download: bool = False,
) -> None:
    """Set `architectures` of a config to the base model, and log a warning, if the weights lack the task head that it names.

    Many configs of base models name a task head, for example those of sentence-transformers. Its parameters would be random numbers.

    Args:
        config: the config. It is changed in place.
        cls: the class that the config names.
        place: the folder, or the name on the Hub.
        revision: branch, tag or commit on the Hub.
        download: download the weights from the Hub, if they are not in the cache, to read their parameter names. With False, the config
            then stays as it is.
    """
    model = made_of(config, cls, layers=1)
    names = None if model.base_model is model else tensor_names(place, revision, download)
    found = cls if names is None else class_of_weights(model, names)
    if found is not cls:
        logger.warning_once(
            f"{place}: its config names {cls.__name__}, but its weights contain no such task head: it is read as {found.__name__}."
        )
        config.architectures = [found.__name__]


def made_of(config: PreTrainedConfig, cls: type[PreTrainedModel], layers: int | None = None) -> PreTrainedModel:
    """A model of a class, without memory for its parameters, and with fewer layers if so many are given."""
    if layers is not None:
        config = copy.deepcopy(config)
        config.num_hidden_layers = layers
    with torch.device("meta"):
        return cls(config)


def native_positions(config: PreTrainedConfig) -> str:
    """The positions that the original models of a config's family were trained with, in words."""
    return " and ".join(f"{name} positions" for name in scheme_names(family_of(config).native_scheme))


def schemes_of(config: PositionConfigMixin) -> list[type[PositionScheme]]:
    """The classes of a model's schemes: those of `position_scheme` in its order, then those that only global layers have."""
    return [*config.schemes.values()]


def flags_of(config: PositionConfigMixin) -> dict[str, Any]:
    """The config options that are set in a config, except `position_scheme`, and their values."""
    flags = {flag: getattr(config, flag) for flag in FLAGS if flag != "position_scheme"}
    return {flag: value for flag, value in flags.items() if value is not None}


def flag_rows(names: Iterable[str] | None = None) -> list[tuple[str, str, str]]:
    """Describe config options in rows of a table.

    Args:
        names: names of schemes. Only their options are described. Default: all schemes.

    Returns:
        For each option its name, the possible values, and for each scheme what it does and its default.
    """
    names, rows = [ALL, *(SCHEMES if names is None else names)], []
    for flag, users in FLAGS.items():
        said: dict[tuple[str, str], list[str]] = {}
        for name in names:
            if name in users:
                said.setdefault((users[name].help, users[name].described_default()), []).append(name)
        if said:
            meanings = [f"{', '.join(who)}: {help} (default {default})" for (help, default), who in said.items()]
            rows.append((flag, kind_of(flag).values, "; ".join(meanings)))
    return rows


def flags_by_name() -> dict[str, dict[str, str]]:
    """Describe all config options except `position_scheme`, for a command line.

    Returns:
        A dictionary for each option, with `kind`, the JSON type of its values ("word" for one of several strings), `help`, and if the values
            are dictionaries, `example`.
    """
    flags = {}
    for flag, values, meaning in flag_rows():
        kind = kind_of(flag)
        flags[flag] = {"kind": JSON_TYPES.get(type(kind), "word"), "help": f"{values}. {meaning}"}
        if isinstance(kind, Dictionary):
            flags[flag]["example"] = json.dumps(ast.literal_eval(kind.example))
    return flags


def unpad_row() -> tuple[str, str, str]:
    """Describe the option `unpad`, which belongs to no scheme, as a row of [`flag_rows`]."""
    return UNPAD.name, UNPAD.kind.values, f"all: {UNPAD.help} (default {UNPAD.described_default()})"


def auto_class(config: PositionConfigMixin) -> str:
    """The name of the Auto class to load a model with, such as `AutoModelForMaskedLM`. It follows from `architectures` in the config."""
    name = saved_class(config).__name__
    return next(auto for auto, served in config.auto_classes.items() if served == name)


def pipeline_tag(config: PositionConfigMixin) -> str | None:
    """The Hub's name for the task of a model, such as `fill-mask`. None if the Hub has no name for it."""
    name = saved_class(config).__name__
    return next((tag for ending, tag in PIPELINE_TAGS.items() if name.endswith(ending)), None)


def parameter_shapes(config: PositionConfigMixin) -> tuple[dict[str, tuple[int, ...]], int]:
    """The parameters that a model's schemes add.

    Args:
        config: the config of a model. No weights are needed.

    Returns:
        The name and shape of each of these parameters, and the number of all parameters of the model.
    """
    model = made_of(config, saved_class(config))
    shapes = {name: tuple(parameter.shape) for name, parameter in position_parameters(model).items()}
    return shapes, model.num_parameters()


def per_layer(shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...], int]]:
    """Describe parameters in rows of a table, with one row for the same parameter of all layers.

    Args:
        shapes: name and shape of each parameter.

    Returns:
        For each row the name, with N for the number of the layer, the shape, and the number of such parameters.
    """
    rows: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, shape in shapes.items():
        row = (re.sub(r"\.layer\.\d+\.", ".layer.N.", name), shape)
        rows[row] = rows.get(row, 0) + 1
    return [(*row, count) for row, count in rows.items()]


def longest_sequence(config: PreTrainedConfig) -> int | None:
    """The number of tokens that a model's position embedding matrix has rows for; None if no matrix limits it."""
    if not isinstance(config, PositionConfigMixin):
        config = variant_config(config, family_of(config).native_scheme)
    if any(scheme.ends_with_table for scheme in schemes_of(config)):
        return config.max_position_embeddings - config.first_position
    return None


def tokenizer_length(model: str, revision: str | None = None) -> float | None:
    """The `model_max_length` of a saved model's tokenizer: the number of tokens at which it truncates and warns.

    Infinite if it has no limit, and None if there is no tokenizer.

    Raises:
        OSError: the repository cannot be downloaded.
        ValueError: the tokenizer's config is no JSON object, or its `model_max_length` is no number.
    """
    if not has_file(model, TOKENIZER_CONFIG, revision=revision):
        return math.inf if any(has_file(model, name, revision=revision) for name in VOCABULARIES) else None
    text = Path(cached_file(model, TOKENIZER_CONFIG, revision=revision)).read_text(encoding="utf-8")
    try:
        entries = json.loads(text)
        # The second is its name in the oldest checkpoints.
        return length_of(entries.get("model_max_length", entries.get("max_len")))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{model}: {TOKENIZER_CONFIG} cannot be read: {error}") from error


def length_of(model_max_length: float | None) -> float:
    """The number of tokens at which a tokenizer truncates, by its `model_max_length`; infinite if it has no limit."""
    # transformers writes 1e30 for no limit, and takes everything from 1e20 on for that.
    return math.inf if model_max_length is None or model_max_length > NO_LENGTH else int(model_max_length)
