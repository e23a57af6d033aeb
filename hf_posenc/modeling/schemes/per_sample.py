"""Gradients of each sample by itself, as Opacus computes them, are refused where a batch uses a parameter once for all its samples.

Opacus takes the first dimension of what a module is called with for the samples of the batch. A table of distances is asked for
all its rows, once for the batch: its rows would pass for samples, and where there happen to be as many, nobody would notice.
"""

from collections.abc import Iterator

import torch
from torch import nn

from ..torch_state import is_traced


def may_be_measured(module: nn.Module) -> bool:
    """Whether gradients may be computed of what runs, and it may be looked at."""
    return module.training and torch.is_grad_enabled() and not is_traced()


def is_measured(module: nn.Module) -> bool:
    """Whether gradients of each sample are computed of a module or of one of its parts: by Opacus's hooks, or by PyTorch's
    `ExpandedWeight` in place of parameters."""
    for part in module.modules():
        if any(str(getattr(hook, "__module__", "")).startswith("opacus.") for hook in part._forward_hooks.values()):
            return True
        if any(type(parameter).__name__ == "ExpandedWeight" for parameter in part._parameters.values()):
            return True
    return False


def refuse_measured(encoder: nn.Module, base_model: nn.Module | None) -> None:
    """Raise ValueError where gradients of each sample are computed of what an encoder with positions uses once for a batch.

    Args:
        base_model: where the encoder's schemes or layers read its embeddings.
    """
    if may_be_measured(encoder):
        for name, module in (*_used_once(encoder), *_read_once(encoder, base_model)):
            refuse_if_measured(module, name)


def refuse_if_measured(module: nn.Module, name: str, remedy: str = "") -> None:
    """Raise ValueError where gradients of each sample are computed of a module that is used once for a batch."""
    if is_measured(module):
        raise ValueError(
            f"per-sample gradients (Opacus): {name} is used once for all samples of a batch, so that the gradient of each "
            f"cannot be told: {remedy}freeze it before the model is wrapped (module.requires_grad_(False)), or take a scheme without "
            "parameters (position_scheme='rope', 'alibi', 'sinusoidal' or 'none')"
        )


def _used_once(encoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The schemes' modules on an encoder, its layers and self-attentions, and projections that positions go through too."""
    layers = encoder.family.layers_of(encoder)
    attentions = [encoder.family.self_attention_of(layer) for layer in layers]
    shares = any(getattr(scheme, "share_projections", False) for scheme in encoder.position_schemes)
    for owner in (encoder, *layers, *attentions):
        for name, module in owner.named_children():
            # Wrapped by PEFT perhaps, and not what holds the layers.
            parts = [*module.modules()]
            if any("position_initial" in vars(part) for part in parts) and not any(a in parts for a in attentions):
                yield name, module
    for attention in attentions if shares else ():
        yield "the projection of queries, which positions go through too,", attention.query_projection
        yield "the projection of keys, which positions go through too,", attention.key_projection


def _read_once(encoder: nn.Module, base_model: nn.Module | None) -> Iterator[tuple[str, nn.Module]]:
    """What layers read of the embeddings."""
    if base_model is None or not (encoder.reads_table or encoder.every_layer):
        return
    family = encoder.family
    embeddings = family.embeddings_of(base_model)
    if embeddings.has_table:
        yield "the position embedding matrix, which layers read,", embeddings.table
    if encoder.every_layer and family.projection and hasattr(base_model, family.projection):
        yield (
            "the projection of embeddings, which positions go through before each layer,",
            getattr(base_model, family.projection),
        )
