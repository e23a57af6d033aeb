"""The plugin: hooks by which transformers' own classes and registries understand the `position_*` options.

Apart from `stock_attention`, whose hooks are installed here too, this is the only file that touches transformers. Small hooks
on its base classes, each of which does nothing unless an option is given:

- `BertConfig(...)` with an option among its keywords makes the config with a position scheme (and likewise for the other families).
- `BertConfig.from_dict`, which every `from_pretrained` goes through, does the same for keywords and stored entries.
- `BertConfig.get_config_dict` reads a saved model with a position scheme without a warning, and registers the schemes in its
  folder; `AutoConfig` says whether their code is trusted.
- An original model class that is given a config with an option makes the model with a position scheme, which is a subclass of it.
- `save_pretrained` of a model that contains models with a position scheme describes them in its config, or refuses: see [`saving`].

Others may hook the same methods. Each hook calls what it found there, and [`uninstall`] takes away only what is still ours.
"""

import sys
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
from transformers.utils import logging

from ..custom_schemes import provide_schemes, trusting_code
from ..modeling.models.configuration_posenc import (
    FLAGS,
    LEGACY_KEY,
    READ_FROM,
    PositionConfigMixin,
    carries_flags,
    check_names,
    legacy_scheme,
)
from ..modeling.stock_interface import tells_versions
from ..variants import CONFIGS, STOCK_MODELS, VARIANT_CONFIGS, VARIANT_MODELS, families
from . import peft as adapters
from . import pipelines, saving, stock_attention, trainer
from .changes import INSTALLED, Changes, finder, hook_class_method, hook_method


logger = logging.get_logger(__name__)


def _asks_for_variant(config: PreTrainedConfig) -> bool:
    """Whether a config has an option, whoever set it; ValueError for a misspelt one."""
    if type(config) in VARIANT_CONFIGS:
        check_names(vars(config), strictly=False)
        return carries_flags(vars(config))
    if isinstance(config, PositionConfigMixin) or vars(config).get("position_scheme") is not None:
        return True
    # A class of one's own that derives from an original config: what it does not say itself is an option too.
    is_derived = any(cls in VARIANT_CONFIGS for cls in type(config).__mro__)
    return is_derived and bool(_given_flags(vars(config), type(config)))


def _given_flags(entries: dict[str, Any], cls: type) -> dict[str, Any]:
    """The options among keywords or entries of a config class that has none itself."""
    return {flag: entries[flag] for flag in FLAGS if entries.get(flag) is not None and not hasattr(cls, flag)}


def _class_to_make(cls: type, *args, **kwargs) -> type:
    """What `PreTrainedModel.__new__` makes: the subclass with position schemes, if config or keywords have an option.

    Python then runs the `__init__` of that subclass.

    Raises:
        ValueError: the class is of a family without position schemes, or derives from an original base model; somebody has replaced
            the original class; an option is misspelt.
    """
    config = kwargs.get("config", args[0] if args else None)
    # Copying and unpickling pass no config; what is no config at all is transformers' to refuse.
    if isinstance(config, PreTrainedConfig):
        if cls in VARIANT_MODELS:
            check_names(kwargs)
            if _asks_for_variant(config) or carries_flags(kwargs):
                cls = VARIANT_MODELS[cls]
        elif not hasattr(cls, "position_classes") and (
            _asks_for_variant(config) or kwargs.get("position_scheme") is not None
        ):
            _check_other_class(cls)
        if cls in STOCK_MODELS:
            _check_not_replaced(STOCK_MODELS[cls])
    return cls


def _check_other_class(cls: type) -> None:
    """Raise ValueError for a class in which an option would be lost: one that has no position schemes, nor a subclass with them."""
    stock = next((c for c in cls.__mro__ if c in VARIANT_MODELS), None)
    if stock is None:
        _check_not_replaced(cls)
    if stock is None and cls.__module__.startswith("transformers."):
        raise ValueError(
            f"position_scheme is not supported by {cls.__name__}; the families that have position schemes are {families()}"
        )
    # A task head, or a user's class that contains an original model, is left as it is: the base model inside is made here.
    if stock is not None and VARIANT_MODELS[stock].position_classes.model is VARIANT_MODELS[stock]:
        raise ValueError(
            f"{cls.__name__} derives from {stock.__name__}, which has no position schemes; derive it from "
            f"{VARIANT_MODELS[stock].__name__} to build it from a config with position_scheme"
        )


def _check_not_replaced(stock: type) -> None:
    """Raise ValueError for a class of transformers that somebody has replaced."""
    if not stock.__module__.startswith("transformers."):
        return
    # Where heads look it up, and where Auto classes do.
    package = stock.__module__.rpartition(".")[0]
    places = [vars(sys.modules[name]) for name in (stock.__module__, package) if name in sys.modules]
    now = next((names[stock.__name__] for names in places if names.get(stock.__name__, stock) is not stock), stock)
    if now is not stock:
        raise ValueError(
            f"{stock.__module__}.{stock.__name__} has been replaced by {now.__module__}.{now.__qualname__}, which a "
            f"model with a position scheme would not use: restore the original class, or derive your class from "
            f"hf_posenc.Posenc{stock.__name__} and build that"
        )


def _config_to_make(cls: type, *args, **kwargs) -> type:
    """What `PreTrainedConfig.__new__` makes: the config with a position scheme where a keyword is an option.

    Raises:
        ValueError: an option is misspelt.
    """
    if cls in VARIANT_CONFIGS:
        check_names(kwargs, strictly=False)
        if carries_flags(kwargs):
            cls = VARIANT_CONFIGS[cls]
    return cls


def _from_dict(original: Callable, cls: type, config_dict: dict, **kwargs):
    """`PreTrainedConfig.from_dict`: the config with a position scheme where keywords or entries have an option."""
    if cls in VARIANT_CONFIGS:
        check_names(kwargs)
        if carries_flags(kwargs) or carries_flags(config_dict):
            if kwargs.get("position_scheme") is None and config_dict.get("position_scheme") is None:
                _report_restored(legacy_scheme(config_dict))
            return VARIANT_CONFIGS[cls].from_dict(config_dict, **kwargs)
        for flag in FLAGS:  # given, but as None: not for the model
            kwargs.pop(flag, None)
        return original(config_dict, **kwargs)
    stock = next((c for c in cls.__mro__ if c in VARIANT_CONFIGS), None)
    given = _given_flags(kwargs, cls)
    if stock is not None and given and not issubclass(cls, PositionConfigMixin):
        raise ValueError(
            f"{cls.__module__}.{cls.__qualname__} derives from {stock.__name__}, which has no position schemes; derive it from "
            f"{VARIANT_CONFIGS[stock].__name__} to give it {' and '.join(given)}"
        )
    if "position_scheme" in given:
        raise ValueError(
            f"position_scheme={kwargs['position_scheme']!r} is not supported for model type "
            f"{config_dict.get('model_type', cls.model_type)!r}; the families that have position schemes are {families()}"
        )
    return original(config_dict, **kwargs)


def _report_restored(scheme: str | None) -> None:
    if scheme is not None:
        logger.warning_once(
            f"{LEGACY_KEY}={scheme!r}: restored as position_scheme={scheme!r}, which transformers 5 by itself would ignore."
        )


def _get_config_dict(original: Callable, cls: type, pretrained_model_name_or_path, **kwargs):
    """`PreTrainedConfig.get_config_dict`: for an original config class, a saved model with a position scheme has that class's type.

    A config with a position scheme is told where it was read. Schemes that a checkpoint brings are registered, or it is refused.
    """
    given = kwargs
    config_dict, kwargs = original(pretrained_model_name_or_path, **kwargs)
    if isinstance(config_dict, dict):
        provide_schemes(config_dict, str(pretrained_model_name_or_path), given)
    if cls in VARIANT_CONFIGS and (carries_flags(kwargs) or carries_flags(config_dict)):
        kwargs[READ_FROM] = str(pretrained_model_name_or_path)
    if cls in VARIANT_CONFIGS and config_dict.get("model_type") == VARIANT_CONFIGS[cls].model_type:
        config_dict = {**config_dict, "model_type": cls.model_type}
    return config_dict, kwargs


def _auto_config(original: Callable, cls: type, pretrained_model_name_or_path, **kwargs):
    """`AutoConfig.from_pretrained`: code that is saved with a config is run where it is trusted, and nowhere else."""
    with trusting_code(kwargs.get("trust_remote_code") is True):
        return original(pretrained_model_name_or_path, **kwargs)


def _hook_new(changes: Changes, owner: type, choose: Callable[..., type]) -> None:
    """Have `owner.__new__` make what `choose` says, which gets its arguments."""
    find = finder(owner, "__new__")

    def __new__(cls, *args, **kwargs):
        if changes.active:
            cls = tells_versions(choose)(cls, *args, **kwargs)
        new = find(cls)
        return new(cls) if new is object.__new__ else new(cls, *args, **kwargs)

    # Set on a finished class, `__new__` does not become a static method by itself. nn.DataParallel calls it of instances.
    changes.set_attribute(owner, "__new__", staticmethod(__new__))


def _register(changes: Changes, mapping, key: Any, value: type) -> None:
    """Enter a class of ours into one of transformers' registries. Somebody else's for the same key stays, and is named."""
    entries = mapping._extra_content
    if key in entries and entries[key] is not value:
        logger.warning(
            f"{getattr(key, '__name__', key)!r} leads to {entries[key]!r}, which somebody has registered for it, and not to {value!r}."
        )
        return
    changes.set_entry(entries, key, value)


def _register_family(changes: Changes, stock: type, variant: type[PositionConfigMixin]) -> None:
    """Register a family's classes with position schemes wherever the original ones are: in every Auto class, AutoTokenizer included.

    Where somebody has replaced an original model class, the other one serves the config with a position scheme too: a class
    with a task head gets the model with a position scheme inside, and one that derives from the base model says that it cannot.
    """
    _register(changes, CONFIG_MAPPING, variant.model_type, variant)
    for auto in vars(modeling_auto).values():
        if not (isinstance(auto, type) and issubclass(auto, _BaseAutoModelClass)) or auto._model_mapping is None:
            continue
        if stock in auto._model_mapping:
            model = auto._model_mapping[stock]
            _register(changes, auto._model_mapping, variant, VARIANT_MODELS.get(model, model))
    tokenizer = TOKENIZER_MAPPING.get(stock, None)
    if tokenizer is not None:
        _register(changes, TOKENIZER_MAPPING, variant, tokenizer)


def install() -> None:
    """Install the hooks on Transformers and PEFT, so that their classes accept position schemes.

    `import hf_posenc` calls this. If the hooks are installed, it does nothing. Hooks of another copy of hf_posenc (another version, or
    this one before it was reloaded) are removed first.
    """
    installed = vars(PreTrainedModel).get(INSTALLED)
    if installed is not None and installed.made_by is install:
        return
    if installed is not None:
        if installed.place != __file__:
            logger.warning(
                f"hf_posenc from {installed.place} is uninstalled for hf_posenc from {__file__}. Models and configs that "
                "it has made stay of its classes."
            )
        installed.undo()
    changes = Changes()
    changes.made_by, changes.place = install, __file__
    try:
        changes.set_attribute(PreTrainedModel, INSTALLED, changes)
        _hook_new(changes, PreTrainedModel, _class_to_make)
        _hook_new(changes, PreTrainedConfig, _config_to_make)
        hook_class_method(changes, PreTrainedConfig, "from_dict", _from_dict)
        hook_class_method(changes, PreTrainedConfig, "get_config_dict", _get_config_dict)
        hook_class_method(changes, AutoConfig, "from_pretrained", _auto_config)
        hook_method(changes, PreTrainedModel, "save_pretrained", saving.save_pretrained)
        for stock, variant in VARIANT_CONFIGS.items():
            _register_family(changes, stock, variant)
        adapters.install(CONFIGS, changes)
        trainer.install(changes)
        pipelines.install(changes)
        stock_attention.install(changes)
    except BaseException:
        changes.undo()
        raise


def uninstall() -> None:
    """Remove the hooks on Transformers and PEFT. If they are not installed, do nothing.

    Changes that others have made in the meantime stay: their entries in registries, and their hooks around those of hf_posenc, which
    then only call the original. Classes with a position scheme still work, as in
    `PosencBertModel.from_pretrained(..., position_scheme=...)`.

    `__new__` of `PreTrainedModel` and `PreTrainedConfig` also stays, because Python cannot remove it from a class. It only calls the
    original.
    """
    installed = vars(PreTrainedModel).get(INSTALLED)
    if installed is not None:
        installed.undo()
