"""Tensors that depend on parameters alone: computed once while a model is evaluated, and not in every forward pass."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as every_module

from .scheme import PositionEmbedding, PositionLayerNorm, PositionLinear, PositionParameter, is_traced


# Modules whose output is a function of their parameters. A subclass (LoRA's, a parametrisation's) may have other state.
PLAIN = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.Dropout,
    PositionLinear,
    PositionEmbedding,
    PositionLayerNorm,
    PositionParameter,
)

# A tensor, or several.
Result = TypeVar("Result")

# By module, and outside of it: no copy, pickle or state dict of a model carries this along.
_cache: "weakref.WeakKeyDictionary[nn.Module, tuple[list[torch.Tensor], tuple[float, ...], Any]]" = (
    weakref.WeakKeyDictionary()
)


def cached(
    owner: nn.Module,
    modules: Iterable[nn.Module],
    inputs: Iterable[torch.Tensor],
    constants: tuple[float, ...],
    compute: Callable[[], Result],
) -> Result:
    """`compute()`, or what it returned last if nothing that it depends on has changed since.

    "Changed" is told by the values, which are compared with a copy: version counters miss writes through `.data`. That
    costs one reading of the parameters, and is done where it is cheaper than computing: on CPUs, in eval mode, without
    gradients, autocast, hooks or a compiler. The copies and the result stay in the cache until the owner is trained.

    Args:
        owner: the module that the result belongs to; one result is cached for each.
        modules: what `compute` calls.
        inputs: the tensors that it reads beside their parameters.
        constants: numbers that it reads.
        compute: a function of the three, and of nothing else that can change.
    """
    modules = list(modules)
    sources = [*inputs, *(parameter for module in modules for parameter in module.parameters())]
    if not all(_is_plain(module) for module in modules) or not _may_cache(sources):
        if torch.is_grad_enabled() and not is_traced():
            _cache.pop(owner, None)
        return compute()
    last = _cache.get(owner)
    if last is not None and _same(sources, last[0]) and constants == last[1]:
        return last[2]
    # Copied first: who changes a parameter meanwhile, in another thread, finds the copies different.
    copies = [source.detach().clone() for source in sources]
    result = compute()
    _cache[owner] = copies, constants, result
    return result


def clear_cache() -> None:
    """Drop what is cached, of every model."""
    _cache.clear()


def _is_plain(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks
    hooks = hooks or every_module._global_forward_hooks or every_module._global_forward_pre_hooks
    # A tensor in the place of a parameter is not among the parameters.
    replaced = {"forward", "weight", "bias"} & module.__dict__.keys()
    return type(module) in PLAIN and not hooks and not replaced and not module.training


def caches_on(device: torch.device) -> bool:
    """Whether results on a device are cached at this moment, where the modules allow it."""
    return device.type == "cpu" and not (torch.is_grad_enabled() or is_traced() or torch.is_autocast_enabled("cpu"))


def _may_cache(sources: list[torch.Tensor]) -> bool:
    return all(
        caches_on(source.device)
        and type(source) in (torch.Tensor, nn.Parameter)
        and forward_ad.unpack_dual(source).tangent is None
        for source in sources
    )


def _same(sources: list[torch.Tensor], copies: list[torch.Tensor]) -> bool:
    return len(sources) == len(copies) and all(
        source.dtype == copy.dtype and torch.equal(source, copy) for source, copy in zip(sources, copies)
    )
