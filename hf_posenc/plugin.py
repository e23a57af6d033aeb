"""The hooks and the registry by their address of before 0.3: see [`hf_posenc.integrations.hooks`] and [`hf_posenc.registry`]."""

from .integrations.hooks import install, uninstall
from .modeling.models.configuration_posenc import CONFIGS
from .registry import STOCK_MODELS, VARIANT_CONFIGS, VARIANT_MODELS


__all__ = ["CONFIGS", "STOCK_MODELS", "VARIANT_CONFIGS", "VARIANT_MODELS", "install", "uninstall"]
