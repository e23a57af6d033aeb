"""What hf_posenc adds where it is imported: what computes the same faster, and checks of what custom schemes return.

Code that is loaded from a checkpoint does without. It computes the same by whole matrices.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _compute(owner, modules, inputs, constants, compute: Callable, otherwise: Callable | None = None) -> Any:
    return (otherwise or compute)()


def _returned(scheme: Any, returned: Any, *given: Any) -> Any:
    return returned


def _no_check(scheme: Any, module: Any) -> nullcontext:
    return nullcontext()


@dataclass
class Extras:
    """Functions of `modeling.kernels` and of `custom_schemes`, which put them here; the defaults are those of a model without hf_posenc.

    Attributes:
        cached: what depends on parameters alone, computed once while a model is evaluated.
        caches_on: whether it is, on a device.
        reads_through_views: whether products with rows per distance are read where they lie, and not gathered.
        products: of queries and keys with the tables of a term; None for those that are gathered per pair.
        faster_than_sdpa: the name of the backend that computes an attention under "sdpa" faster than PyTorch's kernel, or None.
        packing_of: which tokens of a batch are no padding, where the others are left out, or None.
        backend_of_packed: the name of the backend that computes an attention of packed states.
        computes_padding_that_is_read: a task head's forward that has padding computed where its loss reads it.
        checked_terms, checked_rotation: what `terms` and `rotate` of a scheme returned, checked.
        nothing_replaced: a context in which a scheme registers its parameters on a module.
    """

    cached: Callable = _compute
    caches_on: Callable = _nothing
    reads_through_views: Callable = _nothing
    products: Callable | None = None
    faster_than_sdpa: Callable = _nothing
    packing_of: Callable = _nothing
    backend_of_packed: Callable = _nothing
    computes_padding_that_is_read: Callable = lambda forward: forward
    checked_terms: Callable = _returned
    checked_rotation: Callable = _returned
    nothing_replaced: Callable = _no_check


EXTRAS = Extras()
