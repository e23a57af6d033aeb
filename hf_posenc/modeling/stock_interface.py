"""What transformers' modules hand to each other, told by what it is: names inside them change from release to release.

Classes with a position scheme derive from original ones, whose code goes on calling: a model its embeddings and its encoder,
an encoder its layers, a layer its self-attention. In 5.24, for example, the cache changed its name in all of these calls, and in the public ones.
So a cache is told by its type, the number of tokens in it by being a number, and a mask by its annotation and index in the
signature of the original class; whatever else is handed on goes on untouched. Here alone a name of this kind is read. The names
of what a tokenizer gives, of a model's public inputs and of its settings are those of transformers' documentation.

Signatures are read when a class is made, and not in a forward pass, which torch.compile could not trace then.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask


# Tested with these versions of transformers. This code is saved with checkpoints and loaded with others.
TESTED = ("5.5.4", "5.16.1", "5.23.0", "5.24.0")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def is_untested(version: str) -> bool:
    """Whether a version of transformers is newer than any that was tested."""
    return _number(version) > _number(TESTED[-1])


def tells_versions(function: Callable) -> Callable:
    """A function whose failure, with a transformers newer than any tested, says which is here and which were tested.

    Errors about values are the caller's, or say themselves what is wrong; what a release has changed shows as another kind.
    """
    if not is_untested(transformers.__version__):
        return function

    @functools.wraps(function)
    def telling(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except (TypeError, AttributeError, KeyError, ImportError) as error:
            tell_versions(error)
            raise

    return telling


def tell_versions(error: BaseException) -> None:
    """Add to an error which transformers is here and which were tested, once."""
    note = (
        f"hf_posenc was tested with transformers {TESTED[0]} to {TESTED[-1]}, and this is {transformers.__version__}: if what "
        f"failed is not your own code, install transformers=={TESTED[-1]} or a newer hf_posenc"
    )
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


# Since when transformers loads what `modules_to_save` names in an adapter: before, it leaves that as it starts.
LOADS_MODULES_TO_SAVE = "5.18"
# Since when the multiple-choice heads of XLM-RoBERTa and CamemBERT have the pooler that they read.
MULTIPLE_CHOICE_POOLS = "5.14"


def needs(what: str, version: str, instead: str = "") -> ImportError:
    """The error of what a newer transformers is needed for."""
    return ImportError(
        f"{what} needs transformers {version} or newer, and this is {transformers.__version__}: "
        + " or ".join(filter(None, [f'pip install "transformers>={version}"', instead]))
    )


def check_adapter_positions(model: torch.nn.Module, known: set[str]) -> None:
    """Raise ImportError where an adapter that transformers has just loaded brings positions that were not loaded.

    Args:
        known: names of the adapters that were there before.
    """
    if _number(transformers.__version__) >= _number(LOADS_MODULES_TO_SAVE):
        return
    for adapter in model.peft_config.keys() - known:
        for module in model.modules():
            # PEFT's wrapper of a module that adapters have copies of.
            copies = getattr(module, "modules_to_save", None)
            if copies is not None and adapter in copies and "position_initial" in vars(module.original_module):
                raise needs(
                    "an adapter with position parameters, loaded by AutoModel or load_adapter,",
                    LOADS_MODULES_TO_SAVE,
                    "load it with peft.PeftModel.from_pretrained(model, adapter)",
                )


def asks_for_pooler(forward: Callable) -> Callable:
    """The forward of a head, that says which transformers it needs where Transformers has built it without what it reads."""
    is_older = _number(transformers.__version__) < _number(MULTIPLE_CHOICE_POOLS)
    if not is_older or "ForMultipleChoice" not in forward.__qualname__:
        return forward

    @functools.wraps(forward)
    def asking(self, *args, **kwargs):
        if getattr(self.base_model, "pooler", True) is None:
            raise needs(type(self).__name__, MULTIPLE_CHOICE_POOLS)
        return forward(self, *args, **kwargs)

    return asking


@functools.cache
def parameters(forward: Callable) -> tuple[inspect.Parameter, ...]:
    """The parameters of a module's forward that can be given by position, without `self`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p for p in inspect.signature(forward).parameters.values() if p.kind in kinds)[1:]


@functools.cache
def names(forward: Callable) -> tuple[str, ...]:
    """The names of [`parameters`]."""
    return tuple(parameter.name for parameter in parameters(forward))


def mask_name(forward: Callable) -> str | None:
    """The name under which a forward takes the mask of its own tokens, None where it takes nothing but its input.

    A parameter that calls itself a mask, and not one of the encoder's in an encoder-decoder; else the first tensor after the
    input; else, where nothing is annotated, the first parameter after the input.
    """
    others = parameters(forward)[1:]
    called_so = [p for p in others if "mask" in p.name and "encoder" not in p.name]
    tensors = [p for p in others if "Tensor" in str(p.annotation)]
    return next((p.name for p in (*called_so, *tensors, *others)), None)


def stock_forward(cls: type) -> Callable | None:
    """The forward of the nearest class of transformers' own that a class derives from."""
    for base in cls.__mro__:
        if base.__module__.startswith("transformers.") and "forward" in vars(base):
            return base.forward
    return None


def cache_in(args: tuple, kwargs: dict) -> Cache | None:
    """The cache among the arguments of a call."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Cache):
            return value
    return None


def past_length_in(args: Iterable, kwargs: dict) -> int | torch.Tensor:
    """The number of tokens in a cache, among the arguments of the embeddings.

    An integer; of a static cache a tensor that holds one, of the shape () or, before transformers 5.6, (1,).
    """
    for value in (*args, *kwargs.values()):
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number or (isinstance(value, torch.Tensor) and value.dim() < 2 and value.numel() == 1):
            return value
    return 0


def bidirectional_mask(config, hidden_states: torch.Tensor, mask: torch.Tensor | None):
    """transformers' mask of pairs, in the form that the config's attention function takes."""
    return create_bidirectional_mask(config, hidden_states, mask)


@dataclass(frozen=True)
class Receives:
    """How a module is called, as its original class has it.

    Attributes:
        names: of its parameters, the input first.
        mask: which of them is the mask.
    """

    names: tuple[str, ...]
    mask: str | None

    @classmethod
    def of(cls, forward: Callable) -> "Receives":
        return cls(names(forward), mask_name(forward))

    def mask_and_cache(self, args: tuple, kwargs: dict) -> tuple[Any, Cache | None, dict[str, Any]]:
        """The mask, the cache, and all else by name, of a call whose arguments after the input these are."""
        if len(args) >= len(self.names):
            raise TypeError(
                f"takes {len(self.names)} arguments and was given {len(args) + 1}: {', '.join(self.names)}"
            )
        given = {**dict(zip(self.names[1:], args)), **kwargs}
        cache = cache_in((), given)
        mask = given.pop(self.mask, None)
        return mask, cache, {name: value for name, value in given.items() if not isinstance(value, Cache)}


@dataclass(frozen=True)
class ModelInputs:
    """What a base model or a head was called with.

    Attributes:
        arguments: all that was given, by name.
        attention_mask: as its caller gave it.
        cache: None where none was given.
    """

    arguments: dict[str, Any]
    attention_mask: Any = None
    cache: Cache | None = field(default=None, repr=False)

    @classmethod
    def of(cls, receives: Receives, args: tuple, kwargs: dict) -> "ModelInputs":
        arguments = {**dict(zip(receives.names, args)), **kwargs}
        return cls(arguments, arguments.get(receives.mask), cache_in((), arguments))

    @property
    def input_ids(self) -> torch.Tensor | None:
        return self.arguments.get("input_ids")

    @property
    def position_ids(self) -> torch.Tensor | None:
        return self.arguments.get("position_ids")

    @property
    def shape(self) -> tuple[int, ...] | None:
        """(batch, length), with what comes between them in multiple choice; None where there is no input."""
        embedded = self.arguments.get("inputs_embeds")
        if isinstance(self.input_ids, torch.Tensor):
            return tuple(self.input_ids.shape)
        return tuple(embedded.shape[:-1]) if isinstance(embedded, torch.Tensor) else None

    @property
    def reads_another_sequence(self) -> bool:
        """Whether there is cross-attention, to the states of an encoder."""
        return self.arguments.get("encoder_hidden_states") is not None

    def records(self, config) -> bool:
        """Whether hidden states or attention weights are asked for, here or in the config."""
        for name in ("output_hidden_states", "output_attentions"):
            asked = self.arguments.get(name)
            asked = getattr(config, name, False) if asked is None else asked
            if asked is not None and asked is not False:  # 0 is a layer
                return True
        return False
