"""PEFT and variants: default targets, and position parameters that travel in an adapter's file.

PEFT is optional and takes seconds to import, so nothing here imports it. It is taught what follows when it is there, be
that before or after this package; what a version of PEFT does not have is passed over.

- Its tables of default targets know stock model types; the variants' own are entered beside them.
- [`train_positions`] writes the names of position parameters into the adapter's `modules_to_save`. PEFT passes over
  names that lead to no module there, and a parameter's never does, so whatever saves an adapter is taught to look for
  them. Loading them needs nothing; it is only taught to refuse where they would be lost.
- `AutoPeftModel` imports the class of the base model only from packages that it trusts: this one becomes one of them.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from torch import nn

from .modeling.configuration_posenc import PositionConfigMixin
from .parameters import position_parameters


def bare_name(name: str) -> str:
    """The name of a parameter in the model that PEFT has wrapped, and torch.compile perhaps around or inside it."""
    return name.replace("_orig_mod.", "").removeprefix("base_model.").removeprefix("model.")


def train_positions(model: nn.Module) -> int:
    """Train the position parameters together with an adapter, and save them in its file.

        model = AutoModel.from_pretrained(..., position_scheme="absolute+t5")
        model = get_peft_model(model, LoraConfig())
        train_positions(model)

    From here on everything is PEFT's: `Trainer`, `save_pretrained`, `PeftModel.from_pretrained`, `merge_and_unload`.

    As the biases of LoRA's `bias="all"` they are trained in place: they stay where they are when the adapter is
    disabled, and one adapter at a time can have them. Call it again on an adapter that is loaded to be trained on. (A
    table that is a module of its own can be PEFT's instead: `modules_to_save=["relative_attention_bias"]`. It is left to
    PEFT then.)

    Args:
        model: what `get_peft_model` returned, or a model after `add_adapter`.

    Returns:
        Number of position parameters that are trained now; 0 where the schemes have none (rope, alibi).

    Raises:
        TypeError: `model` has no adapter.
        ValueError: `model` is no variant, or has several adapters.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not configs:
        raise TypeError(
            f"train_positions needs a model with an adapter, got {type(model).__name__}: call get_peft_model first, or use "
            "freeze_all_but_positions to train nothing but positions"
        )
    if not _has_variant(model):
        raise ValueError("train_positions: the model has no position_scheme; load it with one before get_peft_model")
    if len(configs) > 1:
        raise ValueError(
            f"the model holds its position parameters once, and they can go with one adapter, not with {', '.join(configs)}"
        )
    [config] = configs.values()

    # PEFT's own copies, of modules that the user named in `modules_to_save`, are PEFT's to train and to save.
    parameters = {
        bare_name(name): parameter
        for name, parameter in position_parameters(model).items()
        if not {"original_module", "modules_to_save"} & {*name.split(".")}
    }
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    named = list(config.modules_to_save or ())
    config.modules_to_save = named + [name for name in parameters if name not in named] or None
    return sum(parameter.numel() for parameter in parameters.values())


def _has_variant(model: nn.Module) -> bool:
    return any(hasattr(module, "position_parts") for module in model.modules())


def _named_keys(model: nn.Module, adapter_name: str, keys: Iterable[str]) -> set[str]:
    """Those of the state-dict keys whose parameters an adapter's `modules_to_save` names one by one."""
    named = {*(getattr(model.peft_config[adapter_name], "modules_to_save", None) or ())}
    return {key for key in keys if bare_name(key) in named}


def _saving(get_state_dict: Callable) -> Callable:
    """PEFT's `get_peft_model_state_dict`, with the parameters that the adapter's `modules_to_save` names."""

    @functools.wraps(get_state_dict)
    def get_peft_model_state_dict(
        model, state_dict=None, adapter_name="default", unwrap_compiled=False, *args, **kwargs
    ):
        if unwrap_compiled:
            model = getattr(model, "_orig_mod", model)
        entries = get_state_dict(model, state_dict, adapter_name, False, *args, **kwargs)
        if _has_variant(model):
            everything = model.state_dict() if state_dict is None else state_dict
            entries.update({key: everything[key] for key in _named_keys(model, adapter_name, everything)})
        return entries

    return get_peft_model_state_dict


def _loading(set_state_dict: Callable) -> Callable:
    """PEFT's `set_peft_model_state_dict`; ValueError where position parameters would be lost or overwritten."""

    @functools.wraps(set_state_dict)
    def set_peft_model_state_dict(model, peft_model_state_dict, adapter_name="default", *args, **kwargs):
        named = _named_keys(model, adapter_name, peft_model_state_dict)
        if named:
            _check_place(model, adapter_name, named)
        return set_state_dict(model, peft_model_state_dict, adapter_name, *args, **kwargs)

    return set_peft_model_state_dict


def _check_place(model: nn.Module, adapter_name: str, keys: set[str]) -> None:
    """Raise ValueError if the model lacks position parameters that an adapter brings, or holds another adapter's."""
    lacking = sorted(keys - model.state_dict().keys())
    if lacking:
        raise ValueError(
            f"the adapter has position parameters that the model lacks ({', '.join(lacking[:3])}{', ...' * (len(lacking) > 3)}): "
            "load the model with the position_scheme that the adapter was trained with"
        )
    for other in model.peft_config:
        if other != adapter_name and _named_keys(model, other, keys):
            raise ValueError(
                f"the adapters {other!r} and {adapter_name!r} both have position parameters, which a model holds once: "
                "load one of them"
            )


def _trusting(get_allowlist: Callable) -> Callable:
    """PEFT's `get_default_import_allowlist`, with this package."""

    @functools.wraps(get_allowlist)
    def get_default_import_allowlist():
        return [*get_allowlist(), __package__]

    return get_default_import_allowlist


TAUGHT: dict[str, Callable[[Callable], Callable]] = {
    "get_peft_model_state_dict": _saving,
    "set_peft_model_state_dict": _loading,
    "get_default_import_allowlist": _trusting,
}


def _enter_types(table: dict[str, Any], configs: tuple[type[PositionConfigMixin], ...]) -> None:
    """Enter the variants into a table by model type, with the value of the stock type or of the one that it is built as."""
    for config in configs:
        for stock in (config.stock_model_type, "roberta" if config.family.positions_follow_padding else "bert"):
            if stock in table:
                names = config.family.linear_layers if stock != config.stock_model_type else {}
                table.setdefault(config.model_type, _in_names_of(names, table[stock]))
                break


def _in_names_of(names: Mapping[str, tuple[str, ...]], value: Any) -> Any:
    """A list of BERT's linear layers with a family's own names, where it has others."""
    if not (names and isinstance(value, list)):
        return value
    return [own for name in value for own in names.get(name, (name,))]


def _teach(configs: tuple[type[PositionConfigMixin], ...]) -> None:
    """Enter the variants into PEFT's tables, and put the taught functions wherever PEFT has imported its own to."""
    taught = {}
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "peft"]:
        for name, value in list(vars(module).items()):
            if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(value, dict):
                _enter_types(value, configs)
            elif name in TAUGHT:
                setattr(module, name, taught.setdefault(value, TAUGHT[name](value)))


class _PeftImport(MetaPathFinder):
    """Waits for the import of PEFT, leaves it to the other finders, and teaches PEFT when it has run."""

    def __init__(self, configs: tuple[type[PositionConfigMixin], ...]):
        self.configs = configs

    def find_spec(self, fullname, path, target=None) -> ModuleSpec | None:
        if fullname != "peft":
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        # Looking whether PEFT is installed leads here too: only when its code runs is the waiting over.
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader.exec_module = functools.partial(self._execute, spec.loader.exec_module)
        return spec

    def _execute(self, exec_module: Callable, module) -> None:
        exec_module(module)
        if module.__name__ == "peft" and self in sys.meta_path:
            sys.meta_path.remove(self)
            _teach(self.configs)


def install(configs: tuple[type[PositionConfigMixin], ...]) -> None:
    """Teach PEFT now if it has been imported, and when it is imported otherwise."""
    if sys.modules.get("peft") is not None:
        _teach(configs)
    else:
        sys.meta_path.insert(0, _PeftImport(configs))
