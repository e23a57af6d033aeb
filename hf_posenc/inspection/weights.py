"""What the weights of a checkpoint contain, compared with what its config says."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)


# In the order in which `from_pretrained` looks for them.
FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
# What reading weights raises where they are damaged, or are not those of the config next to them.
DAMAGE = (SafetensorError, RuntimeError, EOFError, UnpicklingError)
# Names of before transformers 4, which it still reads.
OLD_NAMES = {"gamma": "weight", "beta": "bias"}


def tensor_names(place: str | Path, revision: str | None = None, download: bool = False) -> set[str] | None:
    """The names of the tensors in the weights that `from_pretrained` reads, without their numbers.

    Args:
        place: a folder, or a name on the Hub.
        download: fetch weights from the Hub that are not in its cache.

    Returns:
        The names; None where there are no weights, or they cannot be read.
    """
    for name in FILES:
        file = cached_file(
            str(place),
            name,
            revision=revision,
            local_files_only=not download,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if file is not None:
            try:
                names = _names_in(Path(file))
            except (*DAMAGE, OSError, ValueError, LookupError, TypeError):
                return None  # reading the weights says what is wrong
            return {_present_name(name) for name in names}
    return None


def _names_in(file: Path) -> set[str]:
    if file.suffix == ".json":
        return {*json.loads(file.read_text(encoding="utf-8"))["weight_map"]}
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as weights:
            return {*weights.keys()}
    return {*torch.load(file, map_location="meta", weights_only=True)}


def _present_name(name: str) -> str:
    module, _, last = name.rpartition(".")
    return f"{module}.{OLD_NAMES[last]}" if last in OLD_NAMES else name


def class_of_weights(model: PreTrainedModel, names: set[str]) -> type[PreTrainedModel]:
    """The class of weights: the model's class, or its base model's if they contain nothing of its task head.

    Parameters that a head shares with the base model, such as a matrix tied to the token embeddings, do not count.

    Args:
        model: of the class that a config names; it needs no numbers.
        names: of the weights' tensors.
    """
    of_base = {id(parameter) for parameter in model.base_model.parameters()}
    of_head = {name for name, parameter in model.named_parameters() if id(parameter) not in of_base}
    return type(model) if not of_head or of_head & names else type(model.base_model)


@contextmanager
def weights_of(place: str | Path) -> Iterator[None]:
    """Turns errors about damaged weights into an OSError."""
    try:
        yield
    except DAMAGE as error:
        raise OSError(f"the weights in {place} cannot be read, copy them again: {error}") from error


def load_whole(cls: type[PreTrainedModel], place: str | Path, **keywords: Any) -> PreTrainedModel:
    """A model whose parameters all come from the checkpoint. A base model loses a pooler that the checkpoint lacks.

    `from_pretrained` initializes missing parameters, which is only right for training.

    Args:
        cls: as [`class_of_weights`] finds it.
        place: a folder, or a name on the Hub.
        keywords: of `from_pretrained`.

    Raises:
        OSError: the weights cannot be read.
        ValueError: they lack parameters of the class.
    """
    with weights_of(place):
        model, loading = cls.from_pretrained(place, output_loading_info=True, **keywords)
    missing = {*loading["missing_keys"]}
    if missing and model.base_model is model and all(name.startswith("pooler.") for name in missing):
        model.pooler, missing = None, set()
    if missing:
        raise ValueError(
            f"the weights in {place} lack {len(missing)} of the parameters of {cls.__name__}, which its config names, such as {min(missing)}: "
            "they would be random numbers. Save the model again, or name the class of the weights under 'architectures' in its config.json"
        )
    return model
