"""Tensors that depend on parameters alone: computed once while a model is evaluated, and not in every forward pass."""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad

from .distance_products import declare_constant, is_constant
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

# Numbers in a matrix from which on reading it takes longer than calling a function.
LARGE = 1 << 16

# A tensor, or several (None among them for what is not needed).
Result = TypeVar("Result")

# By module, and outside of it: no copy, pickle or state dict of a model carries this along.
_cache: "weakref.WeakKeyDictionary[nn.Module, tuple[list[torch.Tensor], tuple[float, ...], Any]]" = (
    weakref.WeakKeyDictionary()
)
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

    "Changed" is told by the values, since version counters miss writes through `.data`: see [`_values_of`]. That costs one
    reading of the parameters, and is done where it is cheaper than computing: on CPUs, in eval mode, without gradients,
    autocast, hooks or a compiler. The result stays in the cache until the owner is trained.

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
    if not all(is_plain(module) for module in modules) or not _may_cache(sources):
        if torch.is_grad_enabled() and not is_traced():
            _cache.pop(owner, None)
        return (otherwise or compute)()
    last, values = _cache.get(owner), [_values_of(source) for source in sources]
    if last is not None and constants == last[1] and _same(values, last[0]):
        return last[2]
    # Copied first: who changes a parameter meanwhile, in another thread, finds other values than these.
    kept = [
        value.detach().clone() if value is source and not is_constant(source) else value
        for value, source in zip(values, sources)
    ]
    result = compute()
    _cache[owner] = kept, constants, result
    for tensor in (result,) if isinstance(result, torch.Tensor) else result:
        if tensor is not None:
            declare_constant(tensor)
    return result


def clear_cache() -> None:
    """Drop what is cached, of every model."""
    _cache.clear()


def is_plain(module: nn.Module) -> bool:
    """Whether a module, in eval mode, is nothing but a function of its parameters, which nobody listens to."""
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


def _values_of(source: torch.Tensor) -> torch.Tensor:
    """What tells the values of a tensor from others: itself, to be compared with a copy, where it is small.

    Of a large matrix it is its product with a vector of random numbers: it is read once and not compared with a copy, which
    takes a third of the time and a thousandth of the memory. What the product does not show, any other product with the
    matrix shows no more: changes by less than its rounding errors.
    """
    is_large = source.dim() == 2 and source.numel() >= LARGE and source.dtype in (torch.float32, torch.float64)
    if is_constant(source) or not is_large:
        return source
    return source.detach() @ _random_vector(source.shape[1], source.dtype)


@functools.lru_cache(maxsize=16)
def _random_vector(size: int, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(0))


def _same(values: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(values) == len(others) and all(
        value is other or (value.dtype == other.dtype and value.shape == other.shape and torch.equal(value, other))
        for value, other in zip(values, others)
    )
