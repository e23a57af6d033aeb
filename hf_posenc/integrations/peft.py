"""PEFT and models with a position scheme: default targets, and position parameters that are saved with an adapter.

PEFT is optional and takes seconds to import, so nothing here imports it. Its hooks are installed when it is there, be
that before or after this package; what a version of PEFT does not have is passed over.

- Its tables of default targets know original model types; those of models with a position scheme are added.
- [`train_positions`] has PEFT wrap the schemes' modules for an adapter that is there, as `modules_to_save` does for one
  that is yet to come. PEFT itself trains, saves and loads them.
- A batch with an adapter for each sequence (`adapter_names`) is refused where adapters change what a batch has once.
- `AutoPeftModel` imports the class of the base model only from packages that it trusts: this one becomes one of them.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch import nn

from .._utils import module_inside, outermost
from ..modeling.models.configuration_posenc import PositionConfigMixin
from ..modeling.models.modeling_posenc import PositionEncoder
from ..modeling.models.self_attention import PositionSelfAttention
from ..modeling.schemes.parameters import PositionConstant, PositionParameter
from .changes import AtImport, Changes, hook_method


def train_positions(model: Any, adapter_name: str | None = None) -> int:
    """Train the position parameters together with an adapter, and save them in its file.

        model = AutoModel.from_pretrained(..., position_scheme="absolute+t5")
        model = get_peft_model(model, LoraConfig())
        train_positions(model)

    The adapter gets a copy of each module of the schemes, as if its config named these modules in `modules_to_save`. PEFT then
    trains, saves, loads and merges the copies. Each adapter can have position parameters; an adapter without them uses those of the
    base model. You need not call this function for an adapter that was loaded with position parameters, as with `is_trainable=True`.

    If the adapter already changes one of these modules, as LoRA with `target_modules="all-linear"` changes `linear_pos`, the module is
    not copied.

    Load the adapter into a base model with the same scheme. If the model lacks the modules, PEFT skips them without a warning.

    Args:
        model: the result of `get_peft_model`, a model after `add_adapter`, or an object that contains one such model, such as a
            SentenceTransformer.
        adapter_name: the adapter. Default: the active one.

    Returns:
        The number of position parameters that the adapter has now (scalar values). It is 0 if the schemes have none (rope, alibi).

    Raises:
        TypeError: `model` has no adapter.
        ValueError: `model` has no position scheme or no adapter of that name, several adapters are active and none is named, or the
            object contains several models with adapters.
    """
    adapted = outermost(module_inside(model), _has_adapters)
    if not adapted:
        raise TypeError(
            f"train_positions needs a model with an adapter, got {type(model).__name__}: call get_peft_model, or the model's add_adapter, "
            "first, or use freeze_all_but_positions to train nothing but positions"
        )
    if len(adapted) > 1:
        raise ValueError(f"train_positions: {', '.join(adapted)} have adapters: give one of them")
    [model] = adapted.values()
    configs = model.peft_config
    if not any(hasattr(module, "position_classes") for module in model.modules()):
        raise ValueError("train_positions: the model has no position_scheme; load it with one before get_peft_model")
    active = model.active_adapters() if callable(model.active_adapters) else model.active_adapters
    if adapter_name is None:
        if len(active) != 1:
            raise ValueError(
                f"train_positions: {len(active)} adapters are active, of {', '.join(configs)}: name the one that the "
                "positions go with, train_positions(model, adapter_name)"
            )
        [adapter_name] = active
    elif adapter_name not in configs:
        raise ValueError(f"train_positions: no adapter {adapter_name!r}; the model has {', '.join(configs)}")

    # Where PEFT looks for the modules that a config names: the model inside PEFT's, and inside torch.compile's.
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base = getattr(base, "_orig_mod", base)
    names = _own_modules(base)
    _wrap(base, configs[adapter_name], adapter_name, names, activate=adapter_name in active)
    copies = [base.get_submodule(f"{name}.modules_to_save.{adapter_name}") for name in names]
    return sum(parameter.numel() for module in copies for parameter in module.parameters())


def _has_adapters(module: nn.Module) -> bool:
    configs = getattr(module, "peft_config", None)
    return isinstance(configs, dict) and bool(configs)


def _own_modules(base: nn.Module) -> list[str]:
    """Names of the schemes' modules, or of PEFT's wrappers around them, but for those that an adapter changes."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper

    names, inside = [], ()
    for name, module in base.named_modules():
        if name.startswith(inside):
            continue
        if isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper, TrainableTokensWrapper)):
            inside += (f"{name}.",)
        if isinstance(module, ModulesToSaveWrapper):
            module = module.original_module
        # Not by getattr: PEFT's layers pass on what the module inside has.
        if "position_initial" in vars(module) and not isinstance(module, PositionConstant):
            names.append(name)
    return names


def _wrap(base: nn.Module, config: Any, adapter_name: str, names: list[str], activate: bool) -> None:
    """Have PEFT give an adapter its copies of modules, and name them in the adapter's config, as before an injection."""
    from peft import PeftConfig
    from peft.utils import ModulesToSaveWrapper, set_additional_trainable_modules

    def has_copy(module: nn.Module) -> bool:
        return isinstance(module, ModulesToSaveWrapper) and adapter_name in module.modules_to_save

    new = [name for name in names if not has_copy(base.get_submodule(name))]
    if new:
        # PEFT reads `modules_to_save` once, when it injects the adapter: this is that step for these modules alone.
        these = PeftConfig(inference_mode=False)
        these.modules_to_save = new
        set_additional_trainable_modules(base, these, {}, adapter_name, activate_adapter=activate)
        config.modules_to_save = [*(config.modules_to_save or ()), *new]
    if activate:
        for name in names:  # wrappers of another adapter, or loaded for inference
            base.get_submodule(name).set_adapter(adapter_name)


def _refusing_adapter_names(enable_hooks: Callable, model: nn.Module, *args, **kwargs):
    """`PeftModel._enable_peft_forward_hooks`, which raises ValueError where the adapters of a batch (`adapter_names`) change
    what a batch has once.

    PEFT would take the rows of a table for sequences. It is called before PEFT registers its hooks, which stay on the model if
    its forward raises.
    """
    if kwargs.get("adapter_names") is not None and (changed := _changed_for_all_sequences(model)):
        raise ValueError(
            f"adapter_names: the adapters change {changed}, and all sequences of a batch have the same positions: call the "
            "model with the sequences of one adapter at a time, after set_adapter"
        )
    return enable_hooks(*args, **kwargs)


def _changed_for_all_sequences(model: nn.Module) -> str | None:
    """What adapters change of that which is computed once for a batch, for an error; None if that is nothing."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    def is_adapted(module: nn.Module) -> bool:
        return isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper))

    for name, module in model.named_modules():
        children = [(part, own) for part, own in module.named_children() if is_adapted(own)]
        # Those of the embeddings are given sequences, unless they are given nothing.
        is_once = isinstance(module, (PositionEncoder, PositionSelfAttention))
        for part, own in children:
            inner = own.original_module if isinstance(own, ModulesToSaveWrapper) else own.get_base_layer()
            if isinstance(inner, PositionParameter) or (is_once and "position_initial" in vars(inner)):
                return f"{name}.{part}"
        if isinstance(module, PositionSelfAttention):
            shares = any(getattr(scheme, "share_projections", False) for scheme in module.position_schemes)
            for projection in (module.query_projection, module.key_projection) if shares else ():
                if is_adapted(projection):
                    return f"the projections of {name}, which positions go through too"
    return None


def _trusting(get_allowlist: Callable) -> Callable:
    """PEFT's `get_default_import_allowlist`, with this package."""

    @functools.wraps(get_allowlist)
    def get_default_import_allowlist():
        return [*get_allowlist(), "hf_posenc"]

    return get_default_import_allowlist


HOOKED: dict[str, Callable[[Callable], Callable]] = {"get_default_import_allowlist": _trusting}


def _enter_types(table: dict[str, Any], configs: tuple[type[PositionConfigMixin], ...], changes: Changes) -> None:
    """Enter types of models with a position scheme into a table, with the value of the original type or of the one it is built as."""
    for config in configs:
        for stock in (config.stock_model_type, "roberta" if config.family.positions_follow_padding else "bert"):
            if stock in table:
                names = config.family.linear_layers if stock != config.stock_model_type else {}
                if config.model_type not in table:
                    changes.set_entry(table, config.model_type, _in_names_of(names, table[stock]))
                break


def _in_names_of(names: Mapping[str, tuple[str, ...]], value: Any) -> Any:
    """A list of BERT's linear layers with a family's own names, where it has others."""
    if not (names and isinstance(value, list)):
        return value
    return [own for name in value for own in names.get(name, (name,))]


def _hook_function(function: Callable, name: str, changes: Changes) -> Callable:
    """A function of PEFT's, hooked for as long as the changes are not undone."""
    hooked = HOOKED[name](function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return (hooked if changes.active else function)(*args, **kwargs)

    return call


def _install_hooks(configs: tuple[type[PositionConfigMixin], ...], changes: Changes) -> None:
    """Enter the models with a position scheme into PEFT's tables, and put the hooked functions wherever PEFT has imported its own to."""
    hooked = {}
    for module, name, value in _names_in_peft():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(value, dict):
            _enter_types(value, configs, changes)
        elif name in HOOKED:
            if value not in hooked:
                hooked[value] = _hook_function(value, name, changes)
            setattr(module, name, hooked[value])

    model = getattr(sys.modules["peft"], "PeftModel", None)
    if hasattr(model, "_enable_peft_forward_hooks"):
        hook_method(changes, model, "_enable_peft_forward_hooks", _refusing_adapter_names)

    def put_back() -> None:
        # Modules of PEFT that were imported since have the hooked functions from the others.
        found = {function: value for value, function in hooked.items()}
        for module, name, value in _names_in_peft():
            if name in HOOKED and value in found:
                setattr(module, name, found[value])

    changes.to_undo(put_back)


def _names_in_peft() -> list[tuple[ModuleType, str, Any]]:
    """(module, name, value) of everything in the modules of PEFT that have been imported."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "peft" and module is not None]
    return [(module, name, value) for module in modules for name, value in vars(module).items()]


class _PeftImport(AtImport):
    """Waits for the import of PEFT."""

    def __init__(self, configs: tuple[type[PositionConfigMixin], ...], changes: Changes):
        super().__init__("peft", functools.partial(_install_hooks, configs, changes))


def install(configs: tuple[type[PositionConfigMixin], ...], changes: Changes) -> None:
    """Hook PEFT now if it has been imported, and when it is imported otherwise; `changes` knows how to undo it."""
    if sys.modules.get("peft") is not None:
        _install_hooks(configs, changes)
    else:
        _PeftImport(configs, changes).wait(changes)
