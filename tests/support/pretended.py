"""Devices that are not the CPU, on a machine without one: tensors say that they are there, and their values are on the CPU.

PyTorch refuses to compute with tensors of two devices; so does this. What a model or a function leaves on the CPU, or reads as an array, is an error
here as on a GPU. Numbers are those of the CPU, so that all results can be compared. Nothing is said of the kernels of a GPU.

    with pretended.there():
        model = model.to(pretended.DEVICE)
        model(**pretended.moved(inputs))

There is a second device, SECOND, for forward passes alone: PyTorch's backward pass counts one.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

from hf_posenc.integrations import unpadding
from hf_posenc.modeling.kernels import packing


# PyTorch 2.6 is supported, and lets no Python code stand in for a device; the versions that are tested do.
EXISTS = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
needed = pytest.mark.skipif(not EXISTS, reason="this PyTorch has no devices that are written in Python")
NAME = "pretended"
aten = torch.ops.aten
# As on a GPU, these take tensors of the CPU too.
TAKE_BOTH = {
    aten._to_copy.default,
    aten.copy_.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
# The host waits for the device there.
WAIT = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}


def _register() -> torch.device:
    """Once for a process, and so that nobody who looks for an accelerator finds it."""

    class Module(backend_registration._DummyBackendModule):
        def is_available(self) -> bool:
            return False

        def device_count(self) -> int:
            return 0

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

    class Hook(backend_registration._DummyPrivateUse1Hook):
        def is_available(self) -> bool:
            return False

        def has_primary_context(self, dev_id: int) -> bool:
            return False

    backend_registration._setup_privateuseone_for_python_backend(NAME, Module(), Hook())
    assert not torch.accelerator.is_available()
    return torch.device(NAME, 0)


DEVICE = _register() if EXISTS else None
SECOND = torch.device(NAME, 1) if EXISTS else None
# Dtypes that the devices lack, as MPS does float64.
missing: set[torch.dtype] = set()
# How often the host waited, by operation.
waits: Counter[str] = Counter()


class There(torch.Tensor):
    """A tensor on a device."""

    values: torch.Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, values: torch.Tensor, place: torch.device) -> "There":
        if values.dtype in missing:
            raise TypeError(f"{place} has no {values.dtype}")
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=place,
        )
        made.values, made.place = values, place
        return made

    def __repr__(self) -> str:
        return f"There({self.values})"

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        return _compute(function, arguments, named or {})


def _compute(function, arguments: tuple, named: dict[str, Any]) -> Any:
    tensors = [one for one in tree_flatten((arguments, named))[0] if isinstance(one, torch.Tensor)]
    there = [one for one in tensors if isinstance(one, There)]
    here = [one for one in tensors if not isinstance(one, There)]
    places = {one.place for one in there}
    # A number on the CPU may be computed with.
    if there and function not in TAKE_BOTH and (len(places) > 1 or any(one.dim() > 0 for one in here)):
        shapes = ", ".join(f"{tuple(one.shape)} on {one.device}" for one in tensors)
        raise RuntimeError(f"{function}: expected all tensors to be on the same device, got {shapes}")
    if there and function in WAIT:
        waits[str(function)] += 1
    asked = named.get("device")
    is_asked = asked is not None and torch.device(asked).type == NAME
    place = torch.device(NAME, torch.device(asked).index or 0) if is_asked else next(iter(places), None)
    given, options = tree_map_only(There, lambda one: one.values, (arguments, named))
    result = function(*given, **({**options, "device": "cpu"} if is_asked else options))
    if function is aten.copy_.default:
        return arguments[0]
    if is_asked or (there and asked is None):
        result = tree_map_only(torch.Tensor, lambda one: There(one, place), result)
    is_moved = function is aten._to_copy.default and places != {place}
    return return_and_correct_aliasing(function, arguments, named, result) if there and not is_moved else result


class _Mode(TorchDispatchMode):
    """Makes tensors on the device where none is given."""

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        return _compute(function, arguments, named or {})


@contextmanager
def there() -> Iterator[None]:
    """Within, tensors and modules may be moved to the device and made on it; models are loaded before, since Transformers loads otherwise in a mode."""
    of_values, to_list, grad = torch.tensor, torch.Tensor.tolist, torch.no_grad

    def made(values: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        on_cpu = of_values(values, **options)
        return on_cpu if device is None else on_cpu.to(device)

    waits.clear()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    # As on a GPU, a module that is moved keeps its parameters: optimizers have them.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with (
            mock.patch.object(torch, "tensor", made),
            mock.patch.object(torch.Tensor, "tolist", lambda one: to_list(one.cpu())),
            # Tensors of a subclass cannot be views in inference mode.
            mock.patch.object(torch.inference_mode, "__enter__", lambda mode: grad.__enter__(mode)),
            mock.patch.object(torch.inference_mode, "__exit__", lambda mode, *error: grad.__exit__(mode, *error)),
            _Mode(),
        ):
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def moved(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(DEVICE) for name, value in inputs.items()}


class AcceleratorThere(Accelerator):
    """Accelerate where it has found the device."""

    @property
    def device(self) -> torch.device:
        return DEVICE


def skip_padding_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is skipped on the device, if that is asked for, as on CUDA."""
    devices = (*packing.ON_REQUEST, NAME)
    for module in (packing, unpadding):
        monkeypatch.setattr(module, "ON_REQUEST", devices)
