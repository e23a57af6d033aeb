"""Which class with a position scheme belongs to which original class of Transformers, from the families' descriptions.

The class has the name of the original with "Posenc" before it, and is in the file of its family. That file imported the original from Transformers;
it stays the original even if another package replaces it there. Reading these tables installs nothing.
"""

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from .modeling.models import (
    modeling_bert,
    modeling_camembert,
    modeling_distilbert,
    modeling_electra,
    modeling_mpnet,
    modeling_roberta,
    modeling_xlm_roberta,
)
from .modeling.models.configuration_posenc import SCHEME_FILES, PositionConfigMixin, check_names
from .modeling.models.family import Family
from .modeling.models.modeling_posenc import PosencPreTrainedModel
from .modeling.schemes.flags import UNPAD, did_you_mean
from .modeling.schemes.table import FLAGS


# The file and the config class of every family.
_FAMILIES = (
    (modeling_bert, modeling_bert.PosencBertConfig),
    (modeling_roberta, modeling_roberta.PosencRobertaConfig),
    (modeling_xlm_roberta, modeling_xlm_roberta.PosencXLMRobertaConfig),
    (modeling_camembert, modeling_camembert.PosencCamembertConfig),
    (modeling_electra, modeling_electra.PosencElectraConfig),
    (modeling_distilbert, modeling_distilbert.PosencDistilBertConfig),
    (modeling_mpnet, modeling_mpnet.PosencMPNetConfig),
)
CONFIGS: tuple[type[PositionConfigMixin], ...] = tuple(config for _, config in _FAMILIES)
# Original config class -> the one with a position scheme.
VARIANT_CONFIGS: dict[type[PreTrainedConfig], type[PositionConfigMixin]] = {
    getattr(module, f"{config.family.prefix}Config"): config for module, config in _FAMILIES
}
# Original model class -> the one with a position scheme, base models and task heads.
VARIANT_MODELS: dict[type[PreTrainedModel], type[PosencPreTrainedModel]] = {
    getattr(module, name): getattr(module, f"Posenc{name}")
    for module, config in _FAMILIES
    for name in (f"{config.family.prefix}{head}" for head in dict.fromkeys(config.family.heads.values()))
}
# The base models among these.
BASE_MODELS: dict[type[PreTrainedModel], type[PosencPreTrainedModel]] = {
    stock: variant for stock, variant in VARIANT_MODELS.items() if variant.position_classes.model is variant
}
# The other way round.
STOCK_CONFIGS: dict[type[PositionConfigMixin], type[PreTrainedConfig]] = {v: s for s, v in VARIANT_CONFIGS.items()}
STOCK_MODELS: dict[type[PosencPreTrainedModel], type[PreTrainedModel]] = {v: s for s, v in VARIANT_MODELS.items()}
# Model type -> config class, original and with a position scheme.
CONFIG_CLASSES: dict[str, type[PreTrainedConfig]] = {
    config.model_type: config for config in (*VARIANT_CONFIGS, *STOCK_CONFIGS)
}

# Entries in addition to the options that an original config does not have.
NOT_STOCK = {UNPAD.name, "model_type", "auto_map", SCHEME_FILES}


def families() -> str:
    """The original model types that have position schemes, for messages."""
    return ", ".join(config.model_type for config in VARIANT_CONFIGS)


def family_of(config: PreTrainedConfig) -> Family:
    """The description of the family of a config, with or without a position scheme.

    Raises:
        ValueError: the config is of no family that has position schemes.
    """
    variant = VARIANT_CONFIGS.get(type(config), type(config))
    if not issubclass(variant, PositionConfigMixin):
        raise ValueError(
            f"model type {config.model_type!r} has no position schemes; the families that have some are {families()}"
        )
    return variant.family


def variant_config(config: PreTrainedConfig, position_scheme: str, **flags: Any) -> PositionConfigMixin:
    """A validated config with a position scheme and the sizes of another config. Config options of that one stay, as far as they apply.

    Raises:
        TypeError, ValueError: a config option is wrong.
    """
    cls = VARIANT_CONFIGS.get(type(config), type(config))
    return cls.from_dict(config.to_dict(), position_scheme=position_scheme, **flags)


def check_flag_names(names: Iterable[str], others: Iterable[str] = ()) -> None:
    """Raise ValueError for a misspelt config option, and TypeError for an unknown keyword, which would become a config entry and change nothing.

    Args:
        others: keywords that the caller takes, for the hint.
    """
    check_names(names)
    for name in names:
        if name not in FLAGS and name != UNPAD.name:
            raise TypeError(f"unexpected keyword {name!r}{did_you_mean(name, others)}")


def scheme_of(config: PreTrainedConfig) -> str:
    """The `position_scheme` of a config; without one, what the family's checkpoints were trained with."""
    return config.position_scheme if isinstance(config, PositionConfigMixin) else family_of(config).native_scheme


def saved_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that a checkpoint was saved as; the base model if its config does not say.

    Raises:
        ValueError: the family is not supported, or the config names no class that supports position schemes.
    """
    family, classes = family_of(config), STOCK_MODELS if type(config) in STOCK_CONFIGS else VARIANT_MODELS
    named = {cls.__name__: cls for cls in classes if cls.config_class is type(config)}
    names = config.architectures or ()
    for name in names:
        # An original task head around a model with a position scheme is loaded as the task head with a position scheme.
        for own in (name, f"Posenc{name}"):
            if own in named:
                return named[own]
    if names and classes is VARIANT_MODELS:
        raise ValueError(f"the checkpoint is a {names[0]}, which is not one of {', '.join(named)}")
    return next(cls for name, cls in named.items() if name.endswith(f"{family.prefix}Model"))
