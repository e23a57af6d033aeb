"""What torch is doing: whether what runs is recorded, transformed or differentiated, and who listens at a module."""

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as every_module


# torch.compiler.is_exporting is younger than the oldest torch supported.
is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)

# Modes in which tensors have no values, or in which operations are recorded.
_SYMBOLIC = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY


def is_traced() -> bool:
    """True if code must not read the values of tensors.

    This is so under `torch.compile`, tracing and export, with fake tensors that have only shapes, and in transforms of `torch.func`.
    """
    if _is_recorded() or torch._C._are_functorch_transforms_active():
        return True
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in _SYMBOLIC)


def _is_recorded() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_transformed() -> bool:
    """Whether `torch.func` differentiates or maps what runs."""
    return not _is_recorded() and torch._C._are_functorch_transforms_active()


def may_carry_tangents() -> bool:
    """Whether forward-mode AD is on, `torch.func.jvp` among it; asking each tensor costs more, and there are many."""
    return forward_ad._current_level >= 0  # no public name says so without a tensor


# Modules of Python whose hooks packed states do no harm. Those of transformers that record outputs stay on a model once they
# were used, and do nothing where nothing is recorded. Those of `hf_posenc.unpad` are there to pack.
HARMLESS_HOOKS = {"transformers.utils.output_capturing", "hf_posenc.integrations.unpadding"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody's hooks would see packed states in a module or in one of its parts."""
    if any(getattr(every_module, f"_global{name}") for name in _HOOKS):
        return True
    return any(
        getattr(hook, "__module__", None) not in HARMLESS_HOOKS
        for part in module.modules()
        for name in _HOOKS
        for hook in part.__dict__[name].values()
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether a module or one of its parts was compiled by itself: in there, packed states would be traced."""
    return any(part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in module.modules())
