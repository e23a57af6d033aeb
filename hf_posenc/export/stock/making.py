"""Models in memory: to an architecture of Transformers, and back."""

import copy
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ...change_scheme import EXPORTED, change_scheme
from ...inspection import longest_sequence
from ...modeling.models.configuration_posenc import PositionConfigMixin
from ...modeling.models.modeling_posenc import PosencPreTrainedModel
from ...modeling.schemes.flags import NEWEST_TABLE, TABLE_VERSION
from ...variants import CONFIG_CLASSES, VARIANT_MODELS
from .architectures import ARCHITECTURES, Architecture
from .names import FAMILIES, POOLER, TYPES, Names, Tensors, named_tensors, read_tensors


logger = logging.get_logger(__name__)

FITTING = "absolute, t5, absolute+t5, deberta, absolute+deberta and rope"
# Heads that read two texts, or may.
OF_PAIRS = ("ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice")
# Longest texts that are no choice of anybody's.
NO_LENGTH = 10**6


# Tokens of a text: one and two special tokens, and what `convert` makes models for.
SHORTEST, LONGEST = 3, 2**17


def to_stock(
    model: PreTrainedModel,
    *,
    max_length: int | None = None,
    single_text: bool = False,
    tokenizer: Any = None,
) -> PreTrainedModel:
    """Convert a model with a position scheme to an architecture of Transformers: `mpnet`, `deberta-v2`, `jina_embeddings_v3`, or its original one.

    Outputs are equal up to rounding, except at padding. The scheme alone decides the architecture: `t5` and `absolute+t5` become
    MPNet, `deberta` and `absolute+deberta` become DeBERTa-v2, `rope` becomes Jina Embeddings v3 (Transformers 5.4 and newer), and `absolute` becomes
    the original architecture. MPNet has no token types, and only the default buckets of T5. A model that cannot be represented exactly is refused.

    Args:
        model: a base model or a model with a task head, with a position scheme, of any family. It is not changed.
        max_length: maximum sequence length of the new model, in tokens, if its positions are relative. Default: the tokenizer's
            `model_max_length`, or that of the config.
        single_text: the model is never given pairs of texts. Needed if the architecture has no token types and the task head may read
            pairs.
        tokenizer: the model's tokenizer, to check that token id 1, which MPNet takes for padding, does not occur in texts.

    Returns:
        A model of a class of Transformers. `config.hf_posenc` keeps the position scheme for [`from_stock`].

    Raises:
        TypeError: `model` is not a model of Transformers.
        ValueError: no architecture of Transformers represents it. The message says why, and what would fit.
    """
    config = check_exportable(model)
    architecture = architecture_of(config)
    head = head_of(type(model), config)
    if architecture is None:
        check_length(max_length, config)
        return change_scheme(copy.deepcopy(model), None)
    check_head(architecture, type(model), head, config)
    check_padding(architecture, tokenizer)
    check_types(architecture, model, head, single_text)
    length = length_of(architecture, max_length, tokenizer)
    if not architecture.has_pooler and head == "Model" and getattr(model, "pooler", None) is not None:
        logger.warning_once(f"the base model of {architecture.model_type!r} has no pooler: pooler_output is lost")
    source = FAMILIES[config.family.model_type]
    tensors = read_tensors(model.state_dict(), source.of_class(type(model).__name__))
    untie = not architecture.has_types and _unties(tensors, config)
    architecture.change(tensors, length)
    entries = architecture.entries(head, length)
    # Also of a base model: a head that is put on it later is to fit when it comes back.
    pooler = source.heads["ForSequenceClassification"].activation
    entries |= {} if architecture.has_pooler else {"pooler_hidden_act": pooler}
    entries |= {"tie_word_embeddings": False} if untie else {}
    _mend_pooler(architecture, tensors, head, config.sizes.hidden_size)
    made = architecture.config_class(**entries)
    setattr(made, EXPORTED, source_entries(config))
    cls = getattr(transformers, f"{architecture.names.prefix}{head}")
    return _filled(cls, made, tensors, architecture.names, model)


def from_stock(model: PreTrainedModel) -> PosencPreTrainedModel:
    """Convert the output of [`to_stock`] back to a model with its position scheme, also after it was trained.

    Args:
        model: a model of a class of Transformers, with `config.hf_posenc`. It is not changed.

    Returns:
        A model of the class with a position scheme (`Posenc...`).

    Raises:
        TypeError: `model` is not a model of Transformers.
        ValueError: it was not made by `to_stock`, or it was trained in a way that the model with a position scheme cannot represent.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"from_stock needs a model of Transformers, got {type(model).__name__}")
    config = source_config(model.config)
    if config is None:
        raise ValueError(f"this {type(model).__name__} was not made by to_stock: its config has no {EXPORTED!r}")
    architecture = architecture_of(config)
    head = type(model).__name__.removeprefix(architecture.names.prefix)
    check_head_back(architecture, model, head, config)
    check_config_back(architecture, model.config)
    family = FAMILIES[config.family.model_type]
    names = architecture.names.of_class(type(model).__name__)
    tensors = read_tensors(model.state_dict(), names)
    untie = config.family.token_types is None and _unties(tensors, model.config)
    architecture.change_back(tensors, model.config)
    for name in ("id2label", "label2id", "problem_type", "vocab_size"):
        setattr(config, name, getattr(model.config, name))
    config.tie_word_embeddings = model.config.tie_word_embeddings and not untie
    [cls] = [each for each in VARIANT_MODELS.values() if each.__name__ == f"Posenc{family.prefix}{head}"]
    if head == "Model" and POOLER not in family.modules:
        for leaf in ("weight", "bias"):
            tensors.pop(f"{POOLER}.{leaf}", None)
    pooler = (
        {"add_pooling_layer": False}
        if head == "Model" and POOLER in family.modules and f"{POOLER}.weight" not in tensors
        else {}
    )
    return _filled(cls, config, tensors, family, model, **pooler)


def check_exportable(model: Any) -> PositionConfigMixin:
    """The config of a model with a position scheme; TypeError or ValueError for anything else."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"to_stock needs a model of Transformers, got {type(model).__name__}")
    if not isinstance(model, PosencPreTrainedModel) or type(model) not in VARIANT_MODELS.values():
        raise ValueError(f"a {type(model).__name__} has no position scheme of hf_posenc; save it with save_pretrained")
    return model.config


def architecture_of(config: PositionConfigMixin) -> Architecture | None:
    """The architecture that computes a config's scheme; None for the family's own.

    Raises:
        ValueError: there is none, or not with these options; says what would fit.
    """
    names = {*config.schemes} - {"none"}
    if names == {*config.family.native_scheme.split("+")}:
        return None
    inside, table = names - {"absolute"}, "absolute" in names
    for cls in ARCHITECTURES:
        if inside == {cls.scheme} and (cls.with_table or not table):
            architecture = cls(config)
            if reasons := [*architecture.refusals()]:
                raise ValueError(
                    f"position_scheme={config.position_scheme!r} would become {architecture.model_type!r}, but "
                    + "; ".join(reasons)
                    + ". A conversion with --stock chooses options that fit; its source is the original checkpoint, not this model"
                )
            return architecture
    raise ValueError(
        f"Transformers has no architecture with position_scheme={config.position_scheme!r}; it has one for {FITTING}. Convert the model to one "
        "of these first: hf-posenc convert MODEL --out OUT --position-scheme t5 --stock"
    )


def head_of(cls: type[PreTrainedModel], config: PositionConfigMixin) -> str:
    """The end of a class's name: "Model" or that of a head."""
    return cls.__name__.removeprefix(f"Posenc{config.family.prefix}")


def check_head(architecture: Architecture, cls: type[PreTrainedModel], head: str, config: PositionConfigMixin) -> None:
    """Raise ValueError for a head that the architecture does not have, or has with another activation."""
    names, where = FAMILIES[config.family.model_type], f"{cls.__name__} would become {architecture.model_type!r}"
    if head == "Model":
        return
    if head not in names.heads or head not in architecture.names.heads:
        common = [each for each in names.heads if each in architecture.names.heads]
        raise ValueError(f"{where}, which has no such task head; the base model and the heads {', '.join(common)} fit")
    own, there = _activations(architecture, head, config)
    if own != (there or own):
        raise ValueError(
            f"{where}, whose task head has the activation {there!r}, but the model's has {own!r}; deberta or the base model fit"
        )


def check_head_back(
    architecture: Architecture, model: PreTrainedModel, head: str, config: PositionConfigMixin
) -> None:
    """Raise ValueError for a head, perhaps put on an exported base model, that the family does not have, or has with another activation."""
    if head == "Model":
        return
    names = FAMILIES[config.family.model_type]
    where = f"this {type(model).__name__} would become a {names.prefix}{head}"
    if head not in names.heads or head not in architecture.names.heads:
        raise ValueError(
            f"{where}, which does not exist: from_stock(model.base_model) converts the model without its head"
        )
    own, there = _activations(architecture, head, config)
    if there is None:
        there = own if names.heads[head].activation is None else model.config.pooler_hidden_act
    if own != there:
        raise ValueError(
            f"{where}, whose task head has the activation {own!r}, but this one's has {there!r}: from_stock(model.base_model) converts "
            "the model without its head"
        )


def check_config_back(architecture: Architecture, config: PreTrainedConfig) -> None:
    """Raise ValueError where the config of an exported model computes something else since than the model that it was."""
    was = architecture.config_class(**architecture.entries_again(config))
    for name in architecture.computed_by:
        before, now = getattr(was, name), getattr(config, name)
        if before != now:
            raise ValueError(
                f"{name} of its config was changed since to_stock, from {before!r} to {now!r}, which the model with a position scheme "
                "would not compute: set it back, or keep the model as it is"
            )


def _activations(architecture: Architecture, head: str, config: PositionConfigMixin) -> tuple[str, str | None]:
    """The activation of a head of the model, and of the architecture; None where its config says which."""
    names = FAMILIES[config.family.model_type]
    own, there = (each.heads[head].activation for each in (names, architecture.names))
    of_layers = config.family.setting(config, "hidden_act")
    return own or of_layers, there or (of_layers if head == "ForMaskedLM" else None)


def check_types(architecture: Architecture, model: PreTrainedModel, head: str, single_text: bool) -> None:
    """Raise ValueError if a head that may read pairs would lose token types; otherwise log a warning."""
    if architecture.has_types or not types_differ(model):
        return
    if head in OF_PAIRS and not single_text:
        raise ValueError(
            f"{type(model).__name__} would become {architecture.model_type!r}, which has no token types: both texts of a pair would have "
            "the same type. If the model only reads single texts, pass single_text=True (--single-text); for pairs, deberta "
            "and rope fit"
        )
    logger.warning_once(
        f"{architecture.model_type!r} has no token types: outputs for single texts are the same, those for pairs of texts are not"
    )


def check_padding(architecture: Architecture, tokenizer: Any) -> None:
    """Raise ValueError where positions would be counted otherwise: MPNet skips id 1, and DeBERTa counts all tokens from the left."""
    if not architecture.reads_table:
        return
    follows = architecture.source.family.positions_follow_padding
    if architecture.model_type == "mpnet" and not follows:
        if tokenizer is None:
            logger.warning_once("'mpnet' takes token id 1 for padding: outputs differ for texts in which it occurs")
        elif not str(token := tokenizer.convert_ids_to_tokens(1)).startswith("[unused"):
            raise ValueError(
                f"the model would become 'mpnet', which takes token id 1 for padding when it counts positions, but here token 1 is {token!r}, "
                "which occurs in texts; t5 without absolute fits"
            )
    if architecture.counts_from_left:
        if tokenizer is None:
            logger.warning_once("'deberta-v2' counts positions from the left: pad on the right")
        elif tokenizer.padding_side == "left":
            raise ValueError(
                "the model would become 'deberta-v2', which counts padding on the left as positions, and the tokenizer pads on the left: "
                "set tokenizer.padding_side to 'right', or use deberta without absolute"
            )


def length_of(architecture: Architecture, max_length: int | None, tokenizer: Any) -> int:
    """The maximum sequence length of the new model, in tokens.

    Raises:
        ValueError: it is more than the number of position embeddings, or not a length.
    """
    config = architecture.source
    check_length(max_length, config)
    rows = config.sizes.max_position_embeddings
    if architecture.reads_table:
        return rows - config.sizes.first_position
    told = getattr(tokenizer, "model_max_length", None)
    return max_length or (int(told) if told is not None and told < NO_LENGTH else rows)


def check_length(max_length: int | None, config: PositionConfigMixin) -> None:
    """Raise ValueError for what is not a length, and for more tokens than a model has position embeddings for."""
    if max_length is None:
        return
    if isinstance(max_length, bool) or not isinstance(max_length, int) or not SHORTEST <= max_length <= LONGEST:
        raise ValueError(f"max_length must be a number of tokens, {SHORTEST} to {LONGEST:,}, got {max_length!r}")
    longest = longest_sequence(config)
    if longest is not None and max_length > longest:
        raise ValueError(f"max_length must be at most {longest}, the number of position embeddings, got {max_length}")


def source_entries(config: PositionConfigMixin) -> dict[str, Any]:
    """What an exported config keeps of that of the model."""
    left_out = {"auto_map", "transformers_version", "dtype", "architectures", "_name_or_path", "id2label", "label2id"}
    entries = {name: value for name, value in config.to_diff_dict().items() if name not in left_out}
    # A matrix that is read as in 0.3.0 and earlier becomes one that is read as DeBERTa does.
    return entries | ({TABLE_VERSION: NEWEST_TABLE} if getattr(config, TABLE_VERSION) else {})


def source_config(config: Any) -> PositionConfigMixin | None:
    """The config of the model that an exported one was; None for any other."""
    entries = getattr(config, EXPORTED, None)
    if not isinstance(entries, dict) or "position_scheme" not in entries:
        return None
    cls = CONFIG_CLASSES.get(entries.get("model_type"))
    if cls is None or not issubclass(cls, PositionConfigMixin):
        raise ValueError(
            f"the config's {EXPORTED!r} names model type {entries.get('model_type')!r}, which hf_posenc does not support"
        )
    return cls.from_dict(dict(entries))


def types_differ(model: PreTrainedModel) -> bool:
    """Whether token types other than 0 change anything."""
    family = model.config.family
    if family.token_types is None:
        return False
    rows = getattr(family.embeddings_of(model.base_model), family.token_types).weight.detach()
    return not torch.equal(rows, rows[:1].expand_as(rows))


def _unties(tensors: Tensors, config: PreTrainedConfig) -> bool:
    """Whether a decoder that has the token embeddings has to keep them as they were, if these get the token type."""
    types = tensors.get(f"{TYPES}.weight")
    tied = config.tie_word_embeddings and "head.decoder.weight" in tensors
    return tied and types is not None and bool(types[0].any())


def _mend_pooler(architecture: Architecture, tensors: Tensors, head: str, width: int) -> None:
    """A base model has a pooler if its architecture has one."""
    if head != "Model":
        return
    has_one = f"{POOLER}.weight" in tensors
    if has_one and not architecture.has_pooler:
        for leaf in ("weight", "bias"):
            del tensors[f"{POOLER}.{leaf}"]
    elif architecture.has_pooler and not has_one:
        # The model has none, so nobody reads what this one gives: the first state, by its tanh.
        words = tensors["words.weight"]
        tensors[f"{POOLER}.weight"] = torch.eye(width, dtype=words.dtype, device=words.device)
        tensors[f"{POOLER}.bias"] = words.new_zeros(width)


def _filled(
    cls: type[PreTrainedModel], config: Any, tensors: Tensors, names: Names, like: PreTrainedModel, **settings: Any
) -> PreTrainedModel:
    """A new model with these tensors, on the device, in the dtype and in the mode of another."""
    with torch.random.fork_rng(devices=[]):
        made = cls._from_config(config, dtype=like.dtype, **settings)
    with torch.no_grad():
        state = named_tensors(tensors, names.of_class(cls.__name__), made.state_dict())
        made.load_state_dict(state, strict=True)
    made.config.name_or_path = like.config.name_or_path
    return made.to(like.device).train(like.training)
