"""Tensors that depend on parameters alone: computed once while a model is evaluated, and not in every forward pass."""

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ..schemes.deberta import DistanceTable
from ..schemes.parameters import PositionLayerNorm, PositionLinear, PositionParameter, PositionTable
from ..torch_state import is_hooked, is_traced, may_carry_tangents
from .constants import declare_constant, is_constant


# Modules whose output is a function of their parameters. A subclass (LoRA's, a parametrisation's) may have other state.
PLAIN = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.Dropout,
    PositionLinear,
    PositionTable,
    DistanceTable,
    PositionLayerNorm,
    PositionParameter,
)

# Numbers in a matrix from which on reading it takes longer than calling a function.
LARGE = 1 << 16

# A tensor, or several (None among them for what is not needed).
Result = TypeVar("Result")
# By the id of a matrix: the product of its snapshot's vector with it, as the row of a product of so many rows.
Products = dict[int, tuple[int, torch.Tensor]]

# By module, and outside of it: no copy, pickle or state dict of a model contains this.
_cache: "weakref.WeakKeyDictionary[nn.Module, Kept]" = weakref.WeakKeyDictionary()
_is_enabled = True


class cache_projections:
    """Turn the cache of projected position embeddings on or off, for the whole process.

    The cache is on by default. It is used while models are evaluated on CPUs. Without it, the projections are computed in every forward
    pass, and need no memory in between. Turning the cache off frees the memory.

    As a context manager, `with cache_projections(False): ...`, it restores the previous setting at the end of the block.

    Args:
        enabled: whether to cache.
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
    constants: tuple,
    compute: Callable[[], Result],
    otherwise: Callable[[], Result] | None = None,
    products: "Products | None" = None,
) -> Result:
    """`compute()`, or what it returned last if nothing that it depends on has changed since.

    How changes of tensors are told, and which might be missed, is said at [`Snapshot`]. It costs one reading of the parameters,
    and is done where that is cheaper than computing: on CPUs, in eval mode, without gradients, autocast, hooks or a compiler.
    The result stays in the cache until the owner is trained.

    Args:
        owner: the module that the result belongs to; one result is cached for each.
        modules: what `compute` calls.
        inputs: the tensors that it reads in addition to their parameters.
        constants: the settings that it reads in addition to those of the modules: numbers, names, tuples of them.
        compute: a function of the three, and of nothing else that can change.
        otherwise: called instead where nothing is cached.
        products: what [`vectors_of`] gave, multiplied with the same matrices as hidden states.
    """
    modules = list(modules)
    sources = [*inputs, *(parameter for module in modules for parameter in module.parameters())]
    are_plain = all(is_plain(module) for module in modules)
    if not are_plain or not _may_cache(sources):
        # In training, and once a model is quantized, for good.
        if not is_traced() and (torch.is_grad_enabled() or not are_plain):
            _cache.pop(owner, None)
        return (otherwise or compute)()
    settings = constants, [_settings_of(module) for module in modules]
    last = _cache.get(owner)
    if last is not None and last.holds(sources, settings, products or {}):
        return last.result
    # Taken first: who changes a parameter meanwhile, in another thread, finds other values than these.
    snapshots = [Snapshot(source) for source in sources]
    result = compute()
    _cache[owner] = Kept(snapshots, settings, result)
    for tensor in (result,) if isinstance(result, torch.Tensor) else result:
        if tensor is not None:
            declare_constant(tensor)
    return result


def vectors_of(owner: nn.Module, modules: Iterable[nn.Linear]) -> list[torch.Tensor] | None:
    """The vectors, (1, in_features) each, whose products tell whether the modules' matrices still are what they were, if any.

    Where hidden states are multiplied with a matrix anyway, its vector as one more row costs less than reading the matrix for it
    alone, which takes as long as the product of a short text. [`cached`] takes these products.
    """
    modules, last = list(modules), _cache.get(owner)
    if last is None or not caches_on(torch.device("cpu")) or not all(is_plain(module) for module in modules):
        return None
    vectors = {id(snapshot.source()): snapshot.vector for snapshot in last.snapshots if snapshot.is_by_product}
    found = [vectors.get(id(module.weight)) for module in modules]
    return None if any(vector is None for vector in found) else [vector[None] for vector in found]


def clear_cache() -> None:
    """Drop what is cached, of every model."""
    _cache.clear()


def is_plain(module: nn.Module) -> bool:
    """Whether a module, in eval mode, is nothing but a function of its parameters, row by row, which nobody listens to."""
    # A tensor in place of a parameter is not among the parameters.
    replaced = {"forward", "weight", "bias"} & module.__dict__.keys()
    return (
        type(module) in PLAIN
        and not is_hooked(module)
        and not replaced
        and not module.training
        # A quantized matrix may round all rows that it is multiplied with by one scale.
        and all(map(_is_ordinary, module._parameters.values()))
    )


def _is_ordinary(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor is PyTorch's own, and not a quantized or a distributed one; None is too."""
    return type(tensor) in (torch.Tensor, nn.Parameter, type(None))


def caches_on(device: torch.device) -> bool:
    """Whether results on a device are cached at this moment, where the modules allow it."""
    return (
        _is_enabled
        and device.type == "cpu"
        and not (torch.is_grad_enabled() or is_traced() or may_carry_tangents() or torch.is_autocast_enabled("cpu"))
    )


def _may_cache(sources: list[torch.Tensor]) -> bool:
    return all(map(_is_ordinary, sources)) and all(map(caches_on, {source.device for source in sources}))


def _settings_of(module: nn.Module) -> list[tuple[str, Any]]:
    """What a module's function depends on in addition to tensors: `eps`, `p`, `padding_idx` and the like."""
    return [(name, value) for name, value in vars(module).items() if isinstance(value, (int, float, str, tuple))]


class Snapshot:
    """What a tensor was, to tell whether it still is that.

    A small tensor is compared with a copy, number by number, and so is what PyTorch counts no versions of or has few digits. A
    large matrix must be the same object, in the same place, of the same version, and since writes through `.data` or NumPy
    are not counted, have the same product with a vector: it is read once and not compared with a copy, which takes a third
    of the time and a thousandth of the memory. The vector is drawn in each process and gives all columns the same size.

    Missed are, of these writes to matrices of 2^16 numbers and more, those which change the product by less than it is
    rounded: single numbers by a few millionths of the largest in their column, or rows such that changes cancel by chance.
    """

    def __init__(self, source: torch.Tensor):
        # Nobody writes to a constant.
        self.is_by_product = _is_large(source) and not source.is_inference() and not is_constant(source)
        if not self.is_by_product:
            self.copy = source if is_constant(source) else source.detach().clone()
            return
        self.source, self.place = weakref.ref(source), _place_of(source)
        sizes = source.detach().abs().amax(0).clamp_(min=torch.finfo(source.dtype).tiny ** 0.5)
        self.vector = _random_vector(source.shape[1], source.dtype) / sizes
        self.product = source.detach() @ self.vector
        # The same product among so many rows: each number of rows may round it in another way.
        self.rows: dict[int, torch.Tensor] = {}

    def is_of(self, source: torch.Tensor, product: tuple[int, torch.Tensor] | None = None) -> bool:
        """Whether a tensor is what was seen.

        Args:
            product: of the vector with the tensor, if it is known: the number of rows of the product that it is from, and it.
        """
        if self.is_by_product:
            if self.source() is not source or self.place != _place_of(source):
                return False
            if product is not None and (row := self.rows.get(product[0])) is not None and torch.equal(row, product[1]):
                return True
            is_same = torch.equal(source.detach() @ self.vector, self.product)
            if is_same and product is not None:
                self.rows[product[0]] = product[1].clone()
            return is_same
        copy = self.copy
        return copy is source or (
            copy.dtype == source.dtype and copy.shape == source.shape and torch.equal(copy, source)
        )


def _is_large(source: torch.Tensor) -> bool:
    return source.dim() == 2 and source.numel() >= LARGE and source.dtype in (torch.float32, torch.float64)


def _place_of(source: torch.Tensor) -> tuple:
    return source._version, source.data_ptr(), source.dtype, source.shape, source.stride()


@functools.lru_cache(maxsize=16)
def _random_vector(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of either sign from 0.5 to 1.5, other ones in each process, without a change to PyTorch's generator."""
    generator = torch.Generator()
    generator.seed()
    with torch.inference_mode(False):
        numbers = torch.rand(size, dtype=dtype, generator=generator) * 2 - 1
        return numbers + numbers.sign() / 2


@dataclass(frozen=True)
class Kept:
    """A result, and what it was computed from."""

    snapshots: list[Snapshot]
    settings: tuple
    result: Any

    def holds(self, sources: list[torch.Tensor], settings: tuple, products: Products) -> bool:
        """Whether it would be the same, computed from these."""
        return (
            settings == self.settings
            and len(sources) == len(self.snapshots)
            and all(
                snapshot.is_of(source, products.get(id(source))) for snapshot, source in zip(self.snapshots, sources)
            )
        )
