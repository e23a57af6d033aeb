"""The plugin: teaches transformers' own classes and registries the `position_*` flags.

This is the only file that touches transformers. Four small hooks on its two base classes, each of which does nothing
unless a flag is given:

- `BertConfig(...)` with a flag among its keywords makes the variant's config (and likewise for the other families).
- `BertConfig.from_dict`, which every `from_pretrained` goes through, does the same for keywords and stored entries.
- `BertConfig.get_config_dict` reads a saved variant without complaint.
- A stock model class that is given a config with a flag makes the variant, which is a subclass of it.
"""

import functools
from importlib import import_module
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
from transformers.utils import logging

from . import adapters
from .modeling.configuration_posenc import (
    CONFIGS,
    FLAGS,
    LEGACY_KEY,
    PositionConfigMixin,
    carries_flags,
    check_names,
    legacy_scheme,
)
from .modeling.modeling_posenc import PosencPreTrainedModel


logger = logging.get_logger(__name__)

_MODELING = [import_module(f".modeling.{Path(config.modeling_file).stem}", __package__) for config in CONFIGS]
# Stock config class -> the variant's.
VARIANT_CONFIGS: dict[type, type[PositionConfigMixin]] = {config.__mro__[2]: config for config in CONFIGS}
# Stock model class -> the variant's, base models and heads.
VARIANT_MODELS: dict[type, type[PosencPreTrainedModel]] = {
    next(c for c in variant.__mro__ if c.__module__.startswith("transformers.")): variant
    for module in _MODELING
    for variant in vars(module).values()
    if isinstance(variant, type)
    and issubclass(variant, PosencPreTrainedModel)
    and issubclass(variant, PreTrainedModel)
    and variant.__module__ == module.__name__
}


def _families() -> str:
    return ", ".join(config.stock_model_type for config in CONFIGS)


def _asks_for_variant(config: PreTrainedConfig) -> bool:
    """Whether a config carries a flag, whoever put it there; ValueError for a misspelt one."""
    if type(config) in VARIANT_CONFIGS:
        check_names(vars(config), strictly=False)
        return carries_flags(vars(config))
    return isinstance(config, PositionConfigMixin) or vars(config).get("position_scheme") is not None


def _new_model(cls, *args, **kwargs):
    """`PreTrainedModel.__new__`: the variant of a stock class where the config, or a keyword beside it, has a flag.

    Python runs the variant's `__init__` then, since it is a subclass of the stock class.

    Raises:
        ValueError: the class is of a family without variants, or derives from a stock base model; a flag is misspelt.
    """
    config = kwargs.get("config", args[0] if args else None)
    # Copying and unpickling pass no config; what is no config at all is transformers' to refuse.
    if isinstance(config, PreTrainedConfig):
        if cls in VARIANT_MODELS:
            check_names(kwargs)
            if _asks_for_variant(config) or carries_flags(kwargs):
                cls = VARIANT_MODELS[cls]
        elif not hasattr(cls, "position_parts") and (
            _asks_for_variant(config) or kwargs.get("position_scheme") is not None
        ):
            _check_other_class(cls)
    return object.__new__(cls)


def _check_other_class(cls: type) -> None:
    """Raise ValueError for a class, neither a stock one with a variant nor a variant, that a flag would be lost in."""
    stock = next((c for c in cls.__mro__ if c in VARIANT_MODELS), None)
    if stock is None and cls.__module__.startswith("transformers."):
        raise ValueError(
            f"position_scheme is not supported by {cls.__name__}; the families that have position schemes are {_families()}"
        )
    # A head, or a class of the user's own that holds a stock model, is left as it is: the base model inside is made here.
    if stock is not None and VARIANT_MODELS[stock].position_parts.model is VARIANT_MODELS[stock]:
        raise ValueError(
            f"{cls.__name__} derives from {stock.__name__}, which has no position schemes; derive it from "
            f"{VARIANT_MODELS[stock].__name__} to build it from a config with position_scheme"
        )


def _new_config(cls, *args, **kwargs):
    """`PreTrainedConfig.__new__`: the variant's config where a keyword is a flag; ValueError for a misspelt one."""
    if cls in VARIANT_CONFIGS:
        check_names(kwargs, strictly=False)
        if carries_flags(kwargs):
            cls = VARIANT_CONFIGS[cls]
    return object.__new__(cls)


def _teach_from_dict() -> None:
    """`PreTrainedConfig.from_dict`: the variant's config where keywords or entries have a flag."""
    stock_from_dict = PreTrainedConfig.from_dict.__func__

    @functools.wraps(stock_from_dict)
    def from_dict(cls, config_dict, **kwargs):
        if cls in VARIANT_CONFIGS:
            check_names(kwargs)
            if carries_flags(kwargs) or carries_flags(config_dict):
                if kwargs.get("position_scheme") is None and config_dict.get("position_scheme") is None:
                    _report_restored(legacy_scheme(config_dict))
                return VARIANT_CONFIGS[cls].from_dict(config_dict, **kwargs)
            for flag in FLAGS:  # given, but as None: not for the model
                kwargs.pop(flag, None)
        elif kwargs.get("position_scheme") is not None and not hasattr(cls, "position_scheme"):
            raise ValueError(
                f"position_scheme={kwargs['position_scheme']!r} is not supported for model type "
                f"{config_dict.get('model_type', cls.model_type)!r}; the families that have position schemes are {_families()}"
            )
        return stock_from_dict(cls, config_dict, **kwargs)

    PreTrainedConfig.from_dict = classmethod(from_dict)


def _report_restored(scheme: str | None) -> None:
    if scheme is not None:
        logger.warning_once(
            f"{LEGACY_KEY}={scheme!r}: restored as position_scheme={scheme!r}, which transformers 5 by itself would ignore."
        )


def _teach_get_config_dict() -> None:
    """`PreTrainedConfig.get_config_dict`: for a stock config class, a saved variant is of its own type."""
    stock_get_config_dict = PreTrainedConfig.get_config_dict.__func__

    @functools.wraps(stock_get_config_dict)
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        config_dict, kwargs = stock_get_config_dict(cls, pretrained_model_name_or_path, **kwargs)
        if cls in VARIANT_CONFIGS and config_dict.get("model_type") == VARIANT_CONFIGS[cls].model_type:
            config_dict["model_type"] = cls.model_type
        return config_dict, kwargs

    PreTrainedConfig.get_config_dict = classmethod(get_config_dict)


def _register(stock: type, variant: type[PositionConfigMixin]) -> None:
    """Enter a family's variants where transformers has the stock classes: every Auto class, AutoTokenizer included."""
    AutoConfig.register(variant.model_type, variant)
    for auto in vars(modeling_auto).values():
        if not (isinstance(auto, type) and issubclass(auto, _BaseAutoModelClass)) or auto._model_mapping is None:
            continue
        if stock in auto._model_mapping:
            auto.register(variant, VARIANT_MODELS[auto._model_mapping[stock]])
    TOKENIZER_MAPPING.register(variant, TOKENIZER_MAPPING[stock])


def install() -> None:
    """Open all doors. Runs once, when hf_posenc is imported."""
    # Set on a finished class, `__new__` does not become a static method by itself. nn.DataParallel calls it of instances.
    PreTrainedModel.__new__ = staticmethod(_new_model)
    PreTrainedConfig.__new__ = staticmethod(_new_config)
    _teach_from_dict()
    _teach_get_config_dict()
    for stock, variant in VARIANT_CONFIGS.items():
        _register(stock, variant)
    adapters.install(CONFIGS)
