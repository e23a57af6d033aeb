"""Models that hold models with a position scheme: what is saved of them must bring the schemes back.

`save_pretrained` writes the config of the whole model: of a user's own class around a BertModel, an encoder-decoder, a head. A scheme that was
put into a part later (`model.bert = with_position_scheme(model.bert, ...)`) is in the config of the part alone, and would be lost. So the
model is built again, as `from_pretrained` builds it but without memory for parameters, and compared. Where a scheme would be lost, the config
of the whole gets it; where that does not help, nothing is saved.
"""

import copy
from collections.abc import Callable

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..modeling.attention.window import window_settings
from ..modeling.models.configuration_posenc import FLAGS, READ_FROM, PositionConfigMixin, carries_flags, stored_flags
from ..modeling.models.modeling_posenc import PosencPreTrainedModel, check_built_as_configured
from ..modeling.schemes.flags import UNPAD
from ..variants import BASE_MODELS, NOT_STOCK, STOCK_CONFIGS, VARIANT_CONFIGS


logger = logging.get_logger(__name__)

STOCK = "no position_scheme"


def save_pretrained(original: Callable, model: PreTrainedModel, *args, **kwargs):
    """`PreTrainedModel.save_pretrained`, once the config tells of the position schemes of all models in the model."""
    if not model._hf_peft_config_loaded:  # an adapter is saved without a config
        keep_schemes(model)
    return original(*args, **kwargs)


def keep_schemes(model: PreTrainedModel) -> None:
    """Have a model's config tell of the position schemes of the models in it.

    Raises:
        ValueError: it cannot, so that they would be loaded with other schemes; or the config of one was changed after it was built.
    """
    parts = _base_models(model)
    has_variants = any(_is_variant(part) for part in parts.values())
    if not has_variants and not any(_tells(config) for config in _configs(model.config).values()):
        return
    if _is_variant(model) and [*parts.values()] == [model.base_model]:
        return  # it has looked at itself
    for part in parts.values():
        if _is_variant(part):
            check_built_as_configured(part)
    if not (lost := _lost(model, parts, model.config)):
        return
    changes = _changes(model.config, parts)
    if not changes or _lost(model, parts, _with(copy.deepcopy(model.config), changes)):
        raise ValueError(_explained(model, parts, lost))
    model.config = _with(model.config, changes)


def _base_models(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The base models in a model, itself perhaps, of families that have position schemes: by their path, original ones too."""
    return {path: part for path, part in model.named_modules() if isinstance(part, tuple(BASE_MODELS))}


def _is_variant(model: PreTrainedModel) -> bool:
    return isinstance(model, PosencPreTrainedModel)


def _configs(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """A config, as "", and the configs in it by name."""
    return {"": config} | {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}


def _tells(config: PreTrainedConfig) -> bool:
    """Whether a model with a position scheme is built of a config: of an original one too, where an option was set by hand."""
    return isinstance(config, PositionConfigMixin) or (type(config) in VARIANT_CONFIGS and carries_flags(vars(config)))


def _computes(config: PreTrainedConfig) -> tuple | None:
    """What a base model with a config computes positions by, except its parameters; None for an original one."""
    if not _tells(config):
        return None
    if not isinstance(config, PositionConfigMixin):
        config = VARIANT_CONFIGS[type(config)].adopt(copy.deepcopy(config))
    schemes = {name: scheme(config).settings() for name, scheme in config.schemes.items()}
    return schemes, window_settings(config), config.unpad


def _positions(model: PreTrainedModel) -> tuple | None:
    """The same of a base model, which may be an original one of whatever config."""
    return _computes(model.config) if _is_variant(model) else None


def _lost(model: PreTrainedModel, parts: dict[str, PreTrainedModel], config: PreTrainedConfig) -> dict[str, str]:
    """The base models in a model that would be other ones if it was saved with a config and loaded, by path: what they would be."""
    cls = type(model)
    try:
        read = (cls.config_class or type(config)).from_dict(config.to_dict())
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            loaded = _base_models(cls(read))
    except Exception as error:  # of whatever the class does, or needs in addition to a config
        logger.debug(f"{cls.__name__} is not built of its config alone: {type(error).__name__}: {error}")
        return _not_told(model, parts, config)
    return {
        path: _said(loaded[path].config)
        for path, part in parts.items()
        if path in loaded and _positions(part) != _positions(loaded[path])
    }


def _not_told(model: PreTrainedModel, parts: dict[str, PreTrainedModel], config: PreTrainedConfig) -> dict[str, str]:
    """The same for a class that is not built of a config alone: by what the config says where base models would be built of it."""
    configs, lost = _configs(config), {}
    for path, part in parts.items():
        place = _place(configs, path, part)
        # An original model with another config may have been made by other means.
        is_built_of_it = _is_variant(part) or any(part.config is each for each in _configs(model.config).values())
        if place is not None and is_built_of_it and _positions(part) != _computes(configs[place]):
            lost[path] = _said(configs[place])
        elif place is None and _is_variant(part):
            logger.warning_once(
                f"{type(model).__name__} is not built of its config alone, and hf_posenc cannot see whether {path} is loaded with "
                f"{_said(part.config)} again: its __init__ must see to it."
            )
    return lost


def _place(configs: dict[str, PreTrainedConfig], path: str, part: PreTrainedModel) -> str | None:
    """Where in a model's config the one of a base model is, or one of its family that it would be built of; None if that is not clear."""
    wanted = next(variant.config_class for stock, variant in BASE_MODELS.items() if isinstance(part, stock))
    of_family = []
    for place, config in configs.items():
        if config is part.config:
            return place
        if issubclass(VARIANT_CONFIGS.get(type(config), type(config)), wanted):
            of_family.append(place)
    named = [place for place in of_family if place and path.startswith(place.removesuffix("_config"))]
    found = named or of_family
    return found[0] if len(found) == 1 else None


def _changes(config: PreTrainedConfig, parts: dict[str, PreTrainedModel]) -> dict[str, PreTrainedConfig]:
    """What a model's config needs, by entry, to describe its base models; nothing where two of them contradict each other."""
    configs = _configs(config)
    changes: dict[str, PreTrainedConfig] = {}
    for path, part in sorted(parts.items(), key=lambda each: not _is_variant(each[1])):
        place = _place(configs, path, part)
        if place is None or (not _is_variant(part) and (place in changes or type(configs[place]) in VARIANT_CONFIGS)):
            continue
        if place in changes and _computes(changes[place]) != _positions(part):
            return {}
        changes[place] = part.config if place else _telling(config, part.config)
    return changes


def _telling(config: PreTrainedConfig, of: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the config of a whole model with the options of the config of a model in it, or without any where that has none."""
    changed = copy.deepcopy(config)
    for name in {*FLAGS, *NOT_STOCK, READ_FROM, "_stored_flags"}:
        vars(changed).pop(name, None)
    if not isinstance(of, PositionConfigMixin):
        changed.__class__ = STOCK_CONFIGS.get(type(config), type(config))
        return changed
    vars(changed).update(stored_flags(vars(of)), **{UNPAD.name: of.unpad})
    return VARIANT_CONFIGS.get(type(config), type(config)).adopt(changed)


def _with(config: PreTrainedConfig, changes: dict[str, PreTrainedConfig]) -> PreTrainedConfig:
    """A model's config with others inserted."""
    config = changes.get("", config)
    for place, other in changes.items():
        if place:
            setattr(config, place, other)
    return config


def _said(config: PreTrainedConfig) -> str:
    flags = stored_flags(vars(config))
    if getattr(config, UNPAD.name, UNPAD.default) != UNPAD.default:
        flags[UNPAD.name] = config.unpad
    return ", ".join(f"{flag}={value!r}" for flag, value in flags.items()) or STOCK


def _explained(model: PreTrainedModel, parts: dict[str, PreTrainedModel], lost: dict[str, str]) -> str:
    told = "; ".join(
        f"{path or 'it'} has {_said(parts[path].config) if _is_variant(parts[path]) else STOCK} and would be loaded with {other}"
        for path, other in lost.items()
    )
    [part, *_] = [f".{path}" if path else "" for path in lost]
    return (
        f"this {type(model).__name__} is not saved: its config, a {type(model.config).__name__}, does not describe the position schemes "
        f"in it ({told}). Change schemes by with_position_scheme and not in a config. Models that are built of one config have one scheme: "
        "give each its own config, as EncoderDecoderConfig does, in a class that derives from a family's Posenc...Config where it "
        f"derives from one of transformers'; or save the inner model alone, model{part}.save_pretrained(folder)"
    )
