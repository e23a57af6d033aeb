"""What a model is, from its config: schemes, config options, parameters, limits.

Of weights, only the names are read. No code of a checkpoint is run.
"""

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
# A tokenizer that knows no longest text says so by a number beyond this.
NO_LENGTH = 10**20
# What a tokenizer is read from where it has no config, as old checkpoints do.
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "sentencepiece.bpe.model")
# The end of an architecture's name -> the Hub's name for its task, where the Hub has one.
PIPELINE_TAGS = {
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "Model": "feature-extraction",
}


def check_named(place: str | Path, what: str) -> None:
    """Raise ValueError for an empty name: as a path it would be the current folder."""
    if not str(place).strip():
        raise ValueError(f"the name of {what} is empty")


def check_exists(model: str, revision: str | None = None) -> None:
    """Raise OSError immediately if there is no such folder and no such model on the Hub.

    Transformers would ask the Hub for every file that it may need, with retries for each if the Hub does not answer.

    Raises:
        ValueError: the name is empty, which as a path would be the current folder.
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
    """The entries of config.json of a folder or of a repository on the Hub, of whatever family.

    Raises:
        OSError: there is no config, or it cannot be downloaded.
        ValueError: it is no JSON object.
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
    """[`read_entries`] of a model of a supported family.

    Raises:
        OSError: as there.
        ValueError: as there, or the model is of another family.
    """
    entries = read_entries(model, revision)
    model_type = entries.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_CLASSES:
        raise ValueError(
            f"{model} is of model type {model_type!r}; the families that have position schemes are {families()}"
        )
    return entries


def adapter_base(adapter_config: Path) -> str | None:
    """The base model that an adapter's config names."""
    entries = json.loads(adapter_config.read_text(encoding="utf-8"))
    if not isinstance(entries, dict):
        raise ValueError(f"{adapter_config} must hold a JSON object, got {type(entries).__name__}")
    return entries.get("base_model_name_or_path")


def checked_config(model: str, revision: str | None = None) -> PreTrainedConfig:
    """The config of a folder or of a repository on the Hub, with or without a position scheme, of a supported family.

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
    """[`checked_config`], whose `architectures` name what the weights are: see [`name_as_weights`]."""
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
    """If the weights contain nothing of the task head that a config names, let the config name the base model, and log a warning.

    Many configs of base models name a task head, among them those of sentence-transformers. That head would be random numbers.

    Args:
        cls: the class that the config names.
        download: fetch weights from the Hub to look at their names; otherwise those that are not here are not looked at.
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
    """The schemes of a config, in the order of `position_scheme`, and last what only global layers have."""
    return [*config.schemes.values()]


def flags_of(config: PositionConfigMixin) -> dict[str, Any]:
    """The config options other than `position_scheme` that are set in a config."""
    flags = {flag: getattr(config, flag) for flag in FLAGS if flag != "position_scheme"}
    return {flag: value for flag, value in flags.items() if value is not None}


def flag_rows(names: Iterable[str] | None = None) -> list[tuple[str, str, str]]:
    """The config options of schemes, by default of all, as rows for people: name, values, and for each scheme its help and default."""
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
    """For each config option except `position_scheme`: its JSON type ("word" for one of several), its help, and an example of a dictionary."""
    flags = {}
    for flag, values, meaning in flag_rows():
        kind = kind_of(flag)
        flags[flag] = {"kind": JSON_TYPES.get(type(kind), "word"), "help": f"{values}. {meaning}"}
        if isinstance(kind, Dictionary):
            flags[flag]["example"] = kind.example
    return flags


def unpad_row() -> tuple[str, str, str]:
    """Name, values and meaning of `unpad`, the config option that belongs to no scheme."""
    return UNPAD.name, UNPAD.kind.values, f"all: {UNPAD.help} (default {UNPAD.described_default()})"


def auto_class(config: PositionConfigMixin) -> str:
    """The name of the Auto class that loads a model with this config as the class that it was saved as."""
    name = saved_class(config).__name__
    return next(auto for auto, served in config.auto_classes.items() if served == name)


def pipeline_tag(config: PositionConfigMixin) -> str | None:
    """The Hub's name for the task of a model with this config; None if the Hub has none."""
    name = saved_class(config).__name__
    return next((tag for ending, tag in PIPELINE_TAGS.items() if name.endswith(ending)), None)


def parameter_shapes(config: PositionConfigMixin) -> tuple[dict[str, tuple[int, ...]], int]:
    """Name and shape of each parameter that the schemes add, and the number of all parameters of the model."""
    model = made_of(config, saved_class(config))
    shapes = {name: tuple(parameter.shape) for name, parameter in position_parameters(model).items()}
    return shapes, model.num_parameters()


def per_layer(shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...], int]]:
    """Parameters as rows (name with N for the layer's number, shape, how often), those of equal layers as one."""
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
