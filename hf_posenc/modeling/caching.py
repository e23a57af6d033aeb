"""Tensors that depend on parameters alone: computed once while a model is evaluated, and not in every forward pass."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad

from .packing import is_hooked
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
# Tensors that are results themselves, by their id: what others are computed from them is told by which tensor it is.
_results: "weakref.WeakValueDictionary[int, torch.Tensor]" = weakref.WeakValueDictionary()
_is_enabled = True


class cache_projections:
    """Whether derived tables are kept while models are evaluated on CPUs; they are, unless this says otherwise.

    A function for the whole process, and a context manager, which puts back what was: `cache_projections(False)`, or
    `with cache_projections(False): ...`. Without, tables are computed in every forward pass, and no memory is held.
    """

    def __init__(self, enabled: bool):
        global _is_enabled
        self.before, _is_enabled = _is_enabled, bool(enabled)
        if not enabled:
            clear_cache()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: Any) -> None:
        global _is_enabled
        _is_enabled = self.before


def cached(
    owner: nn.Module,
    modules: Iterable[nn.Module],
    inputs: Iterable[torch.Tensor],
    constants: tuple[float, ...],
    compute: Callable[[], Result],
    otherwise: Callable[[], Result] | None = None,
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
        otherwise: called in its place where nothing is kept.
    """
    modules = list(modules)
    sources = [*inputs, *(parameter for module in modules for parameter in module.parameters())]
    if not all(_is_plain(module) for module in modules) or not _may_cache(sources):
        if torch.is_grad_enabled() and not is_traced():
            _cache.pop(owner, None)
        return (otherwise or compute)()
    last = _cache.get(owner)
    if last is not None and _same(sources, last[0]) and constants == last[1]:
        return last[2]
    # Copied first: who changes a parameter meanwhile, in another thread, finds the copies different.
    copies = [source if _is_result(source) else source.detach().clone() for source in sources]
    result = compute()
    _cache[owner] = copies, constants, result
    if type(result) is torch.Tensor:
        _results[id(result)] = result
    return result


def clear_cache() -> None:
    """Drop what is cached, of every model."""
    _cache.clear()


def _is_plain(module: nn.Module) -> bool:
    # A tensor in the place of a parameter is not among the parameters.
    replaced = {"forward", "weight", "bias"} & module.__dict__.keys()
    return type(module) in PLAIN and not is_hooked(module) and not replaced and not module.training


def caches_on(device: torch.device) -> bool:
    """Whether results on a device are cached at this moment, where the modules allow it."""
    return (
        _is_enabled
        and device.type == "cpu"
        and not (torch.is_grad_enabled() or is_traced() or torch.is_autocast_enabled("cpu"))
    )


def _may_cache(sources: list[torch.Tensor]) -> bool:
    return all(
        caches_on(source.device)
        and type(source) in (torch.Tensor, nn.Parameter)
        and forward_ad.unpack_dual(source).tangent is None
        for source in sources
    )


def _is_result(tensor: torch.Tensor) -> bool:
    return _results.get(id(tensor)) is tensor


def _same(sources: list[torch.Tensor], copies: list[torch.Tensor]) -> bool:
    return len(sources) == len(copies) and all(
        source is copy
        or (source.dtype == copy.dtype and source.shape == copy.shape and torch.equal(_bits(source), _bits(copy)))
        for source, copy in zip(sources, copies)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as 64-bit numbers where it lies so: they are compared in two thirds of the time."""
    per_number = max(8 // tensor.element_size(), 1)
    fits = tensor.numel() % per_number == 0 and tensor.storage_offset() % per_number == 0
    if not tensor.is_contiguous() or not fits or tensor.element_size() > 8:
        return tensor
    return tensor.detach().view(-1).view(torch.int64)
