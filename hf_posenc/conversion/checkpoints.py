"""What is converted: a checkpoint with its head and tokenizer, and the model of another scheme that is made of it."""

import copy
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from .. import inspection
from ..change_scheme import change_scheme, check_not_wrapped
from ..hub.folders import folder_of
from ..inspection.sentence_folders import MODULES, check_only_limit_of, chunk_size, pooling, text_length
from ..inspection.weights import load_whole
from ..modeling.models.configuration_posenc import PositionConfigMixin
from ..modeling.schemes.flags import GLOBAL_BASE, GLOBAL_SCHEME
from ..modeling.schemes.table import SCHEMES, scheme_names
from ..parameters import position_parameters
from ..variants import CONFIG_CLASSES, VARIANT_MODELS, family_of, saved_class, scheme_of
from .texts import SHORTEST


# The least share of a model's rows for which its own tokenizer has tokens: rows without a token, for a round number, are few.
LEAST_KNOWN = 0.5
# What begins a text, ends it and fills a batch up.
FRAME = ("cls_token", "sep_token", "pad_token")
# The longest text that a conversion has to do with: attention over more would be of no use, and tables for it fill the memory.
LONGEST = 2**17
# Families whose own scheme is their knowledge.
OF_THEIR_OWN = {"deberta", "deberta-v2"}


@dataclass
class Checkpoint:
    """A checkpoint to convert; its weights are read when they are first used.

    Attributes:
        config: its config, original or with a position scheme.
        tokenizer: the one in its folder.
        folder: where it is; None for a model that was handed over.
        trained_length: number of tokens up to which it is taken to read well.
        given: the model that was handed over.
    """

    config: PreTrainedConfig
    tokenizer: Any
    folder: Path | None
    trained_length: int
    given: PreTrainedModel | None = None

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model with its head, in float32 and eval mode; of one that was handed over, a copy of which nothing is frozen.

        Raises:
            OSError: the weights cannot be read.
            ValueError: some are missing, or no finite numbers.
        """
        if self.given is not None:
            model = copy.deepcopy(self.given).float().cpu().requires_grad_(True)
        else:
            model = load_whole(saved_class(self.config), str(self.folder), dtype=torch.float32)
        check_finite(model, "the checkpoint")
        return model.eval()

    @property
    def cls(self) -> type[PreTrainedModel]:
        """The class of the model, head included."""
        return saved_class(self.config) if self.given is None else type(self.given)

    @property
    def dtype(self) -> torch.dtype:
        """What its numbers were saved in."""
        return self.given.dtype if self.given is not None else self.config.dtype or torch.float32

    @property
    def pooling(self) -> str:
        """How sentence-transformers makes a text's vector, as [`pooling`] says it; "mean" without it."""
        return "mean" if self.folder is None else pooling(self.folder)


def check_reads_as_far(checkpoint: Checkpoint, max_length: int) -> None:
    """Raise ValueError where longer texts than before are to be read, and a setting of sentence-transformers cuts them off."""
    if checkpoint.folder is None:
        return
    if max_length > min(checkpoint.trained_length, stored_length(checkpoint.folder, checkpoint.tokenizer)):
        check_only_limit_of(checkpoint.folder)


def load_checkpoint(
    model: str | Path | PreTrainedModel, tokenizer=None, trained_length: int | None = None
) -> Checkpoint:
    """What is to be converted, checked before its weights are read.

    Args:
        model: a folder (of transformers, or of sentence-transformers as a whole), a name on the Hub, or a model.
        tokenizer: its tokenizer, which stays as it is; by default the one in its folder.
        trained_length: number of tokens that it reads well. By default sentence-transformers' `max_seq_length`, else the
            tokenizer's `model_max_length`, else what its table of positions has.

    Raises:
        OSError: something is missing.
        ValueError: the model is of a family or kind that cannot be converted, has an adapter of PEFT, or reads texts in chunks; the tokenizer
            is not its own; or the length is beyond its table.
    """
    folder, given = None, None
    if isinstance(model, PreTrainedModel):
        check_not_wrapped(model)
        given, config = model, model.config
        check_convertible(config)
        if type(model) not in {*VARIANT_MODELS, *VARIANT_MODELS.values()}:
            raise ValueError(f"{type(model).__name__} does not belong to a family with position schemes")
    else:
        folder = folder_of(str(model))
        if (size := chunk_size(folder)) is not None:
            raise ValueError(
                f"{folder} reads texts in chunks of {size} tokens, as `in_chunks` and `extend` make it: give the model that it was made from"
            )
        if (folder / ADAPTER_CONFIG_NAME).is_file():
            raise ValueError(
                f"{folder} has an adapter of PEFT ({ADAPTER_CONFIG_NAME}): load it, merge it (`merge_and_unload()`), and save the model to another folder"
            )
        config = source_config(folder)
        check_convertible(config)
        saved_class(config)
    # A copy: reading text changes a tokenizer, and what is written is to cut elsewhere.
    tokenizer = _tokenizer_of(folder, config) if tokenizer is None else copy.deepcopy(tokenizer)
    check_tokenizer(tokenizer, config)
    length = _trained_length(trained_length, folder, config, tokenizer)
    return Checkpoint(config, tokenizer, folder, length, given)


def _tokenizer_of(folder: Path | None, config: PreTrainedConfig) -> Any:
    """The tokenizer in a checkpoint's folder, or where a model that was handed over is from."""
    place = folder or config.name_or_path
    if not place:
        raise ValueError("the model does not say where its tokenizer is: give tokenizer=...")
    inspection.check_exists(str(place))
    try:
        return AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:  # what tokenizers raises has no class of its own
        raise ValueError(f"the tokenizer in {place} cannot be read: {' '.join(str(error).split())}") from error


def check_tokenizer(tokenizer: Any, config: PreTrainedConfig) -> None:
    """Raise ValueError for a tokenizer that cannot be the model's.

    Where there is none, transformers makes one of a family's special tokens, for which all text is unknown.
    """
    if len(tokenizer) < LEAST_KNOWN * config.vocab_size:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path or 'the model'} has {len(tokenizer)} tokens, and the model {config.vocab_size}: "
            "put the model's own into its folder (tokenizer.json, or vocab.txt), or give it as tokenizer=... in Python"
        )
    for name in FRAME:
        if getattr(tokenizer, name) is None:
            raise ValueError(
                f"the tokenizer has no {name}, which the texts of an encoder need: set tokenizer.{name} and save it"
            )


def _trained_length(given: int | None, folder: Path | None, config: PreTrainedConfig, tokenizer: Any) -> int:
    """The number of tokens that a checkpoint reads well: the one that was given, or what the files in its folder say."""
    table = inspection.longest_sequence(config)
    length = given
    if length is None:
        length = min(length for length in (stored_length(folder, tokenizer), table or inspection.NO_LENGTH) if length)
    if length >= inspection.NO_LENGTH:
        raise ValueError("the training length of the checkpoint is unknown: give trained_length")
    if not SHORTEST <= length <= (table or LONGEST):
        limit = f"{table}, the rows of its position embedding matrix" if table else f"{LONGEST:,}"
        raise ValueError(f"trained_length must be between {SHORTEST} and {limit}, got {length}")
    return int(length)


def check_max_length(max_length: int, trained_length: int) -> None:
    """Raise ValueError for a length that is less than the trained one, or no length of a text."""
    if not trained_length <= max_length <= LONGEST:
        raise ValueError(
            f"max_length must be at least the training length, {trained_length}, and at most {LONGEST:,}, got {max_length}"
        )


def check_installed(library: str, requirement: str) -> None:
    """Raise ImportError, naming what to install, where a library that only some conversions need is not installed."""
    if importlib.util.find_spec(library) is None:
        raise ImportError(f"this needs {library}: pip install '{requirement}'")


def check_finite(model: torch.nn.Module, what: str) -> None:
    """Raise ValueError, naming the first, where parameters of a model have numbers that are not finite."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{what} cannot be used: {name} has numbers that are not finite")


def stored_length(folder: Path | None, tokenizer) -> int:
    """The length that sentence-transformers cuts at, else the tokenizer."""
    stored = text_length(folder) if folder is not None else None
    return stored or tokenizer.model_max_length


def source_config(folder: Path) -> PreTrainedConfig:
    """The config of a folder.

    Raises:
        OSError: there is none.
        ValueError: the model is of a family without position schemes.
    """
    if not (folder / CONFIG_NAME).is_file() and (folder / MODULES).is_file():
        raise ValueError(
            f"{folder} has its transformer in a sub-folder: load it with sentence-transformers and save it again, which puts it "
            "into the folder itself"
        )
    model_type = inspection.read_entries(str(folder)).get("model_type")
    if isinstance(model_type, str) and model_type in OF_THEIR_OWN:
        raise ValueError(
            f"{folder} is a {model_type} model, which knows order by the positions of its architecture alone: fine-tune it as it is"
        )
    return inspection.load_config(str(folder))


def check_convertible(config: PreTrainedConfig) -> None:
    """Raise ValueError for what is no encoder, or of no family with position schemes."""
    if config.model_type not in CONFIG_CLASSES:
        if config.model_type in OF_THEIR_OWN:
            raise ValueError(
                f"a {config.model_type} model knows order by the positions of its architecture alone: they stay"
            )
        raise ValueError(f"{config.model_type!r} is not a family with position schemes")
    if getattr(config, "is_decoder", False):
        raise ValueError("the model is a decoder (is_decoder); only encoders are converted")
    if (getattr(config, "position_stride", None) or 1) > 1:
        raise ValueError("the model's position embedding matrix was stretched (position_stride): convert its original")
    check_layers_alike({flag: getattr(config, flag, None) for flag in (GLOBAL_SCHEME.name, GLOBAL_BASE.name)})


def check_layers_alike(flags: Mapping[str, Any]) -> None:
    """Raise ValueError for flags that give global layers other positions: a conversion treats all layers alike."""
    for flag in (GLOBAL_SCHEME.name, GLOBAL_BASE.name):
        if flags.get(flag) is not None:
            raise ValueError(
                f"{flag}={flags[flag]!r}: conversion gives all layers the same positions; leave it out, and train instead"
            )


def keeps_scheme(name: str, config: PreTrainedConfig, original: PreTrainedConfig) -> bool:
    """Whether two configs have a scheme that computes the same: with the same options, and its own sizes where it has some."""
    if not all(name in scheme_names(scheme_of(each)) for each in (config, original)):
        return False
    if not isinstance(original, PositionConfigMixin):
        return True  # no other options fit the parameters of an original checkpoint
    return SCHEMES[name](config).settings() == SCHEMES[name](original).settings()


def keeps_positions(student: PreTrainedModel, original: PreTrainedModel) -> bool:
    """Whether a student has all of its original's schemes, with the options and the parameters that they have there."""
    kept = (keeps_scheme(name, student.config, original.config) for name in scheme_names(scheme_of(original.config)))
    own, there = position_parameters(student), position_parameters(original)
    return all(kept) and all(name in own and torch.equal(own[name], value) for name, value in there.items())


def is_native(config: PreTrainedConfig, position_scheme: str, flags: Mapping[str, Any]) -> bool:
    """Whether a scheme is what an original checkpoint has by itself: it then stays an original checkpoint."""
    if isinstance(config, PositionConfigMixin):
        return False
    native = family_of(config).native_scheme
    return {*scheme_names(position_scheme)} == {*scheme_names(native)} and not flags


def is_new(name: str, position_scheme: str, config: PreTrainedConfig) -> bool:
    """Whether a scheme is among those that a checkpoint is to have, and not among those that it has."""
    return name in scheme_names(position_scheme) and name not in scheme_names(scheme_of(config))


def make_student(original: PreTrainedModel, position_scheme: str, flags: Mapping[str, Any]) -> PreTrainedModel:
    """A copy of a model, head included, with another scheme, whose new parameters are as initialized."""
    return change_scheme(copy.deepcopy(original), position_scheme, reports=False, **flags).eval()
