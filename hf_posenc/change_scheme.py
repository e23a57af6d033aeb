"""Another position scheme for a model in memory, in place.

The model is made twice more, without memory for parameters: as it was made, and as it is to be. Only what differs between these two is
changed in it, so that modules, attributes and classes that somebody has put elsewhere stay.
"""

import copy as copying
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .integrations.unpadding import is_unpadded, remove_hooks, unpad
from .modeling.attention.window import window_settings
from .modeling.models.configuration_posenc import PositionConfigMixin, stored_flags
from .modeling.models.modeling_posenc import PosencPreTrainedModel
from .modeling.schemes.table import FLAGS
from .parameters import position_parameters
from .variants import NOT_STOCK, STOCK_CONFIGS, STOCK_MODELS, VARIANT_MODELS, families, family_of, variant_config


logger = logging.get_logger(__name__)

# The entry of a config that says what a model was before `to_stock` made it one of Transformers.
EXPORTED = "hf_posenc"
# Packages of what spreads a model over processes.
WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "deepspeed.")


def is_exported(model: Any) -> bool:
    """Whether a model is of an architecture of Transformers that `to_stock` made of one with a position scheme."""
    is_stock = isinstance(model, PreTrainedModel) and not isinstance(model, PosencPreTrainedModel)
    return is_stock and isinstance(getattr(model.config, EXPORTED, None), dict)


def change_scheme(
    model: PreTrainedModel, position_scheme: str | None, reports: bool = True, **flags: Any
) -> PreTrainedModel:
    """[`with_position_scheme`] of a model in place; with `reports=False`, positions that are lost or change outputs are not logged."""
    _check(model)
    config = _changed_config(model.config, position_scheme, flags)
    stock = STOCK_MODELS.get(type(model), type(model))
    cls = stock if position_scheme is None else VARIANT_MODELS[stock]
    # As both were made: what differs between these is what changes.
    before = _without_weights(type(model), copying.deepcopy(model.config), model)
    after = _without_weights(cls, config, model)
    changing = _changing(model, before, after)
    if reports and position_scheme is not None:
        names = {*before.state_dict()}, {*after.state_dict()}
        after.report_positions(names[1] - names[0], names[0] - names[1])
        _report_new_start(before, after)
    is_requested = is_unpadded(model.base_model)
    remove_hooks(model)
    was = model.config
    for module, made, wanted, _ in [*_matched(model, before, after)]:
        has_one = "config" in vars(made) and "config" in vars(wanted)
        # One of another class than it was made may have a config of its own.
        if has_one and (type(module) is type(made) or vars(module).get("config") is was):
            module.config = wanted.config
    new = [part for places in changing for part in _change(*places, model.device)]
    with torch.no_grad():
        for part in new:
            model._init_weights(part)
    if is_requested and getattr(model.config, "unpad", True):
        unpad(model)
    return model


def _report_new_start(before: PreTrainedModel, after: PreTrainedModel) -> None:
    """Log a warning where schemes stay, and what they have learned does not, since other options give them other parameters."""
    kept, there = position_parameters(before), after.state_dict()
    lost = [name for name, value in kept.items() if name in there and there[name].shape != value.shape]
    if kept and {*before.config.schemes} <= {*after.config.schemes}:
        lost += [name for name in kept if name not in there]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        logger.warning_once(
            f"position_scheme={after.config.position_scheme!r}: with these config options, the values of {lost[0]}{more} are not "
            "kept: train the model again before use."
        )


def _check(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that cannot be changed."""
    check_not_wrapped(model)
    if type(model) in STOCK_MODELS or type(model) in VARIANT_MODELS:
        return
    stock = next((cls for cls in type(model).__mro__ if cls in VARIANT_MODELS), None)
    classes = {*STOCK_MODELS, *VARIANT_MODELS}
    inside = next(((path, type(part)) for path, part in model.named_modules() if type(part) in classes), None)
    hint = ""
    if inside is not None:
        path, cls = inside
        hint = f"; change the {cls.__name__} inside it, hf_posenc.with_position_scheme(model.{path}, ...)"
    elif is_exported(model):
        hint = "; it was made by to_stock: hf_posenc.from_stock(model) returns the model with its position scheme"
    elif stock is not None:
        hint = f"; derive it from {VARIANT_MODELS[stock].__name__} and build it from a config with position_scheme"
    raise ValueError(
        f"a {type(model).__name__} cannot get another position_scheme: only Transformers' own models and task heads of {families()} can{hint}"
    )


def check_not_wrapped(module: nn.Module) -> None:
    """Raise ValueError for a model in a wrapper that has collected its parameters, or with modules of one."""
    if hasattr(module, "peft_config") or any(type(part).__module__.startswith("peft.") for part in module.modules()):
        raise ValueError(
            f"this {type(module).__name__} is wrapped by PEFT: change the model before wrapping it, or after `merge_and_unload()`"
        )
    wrapper = next((type(part) for part in module.modules() if type(part).__module__.startswith(WRAPPERS)), None)
    if wrapper is not None:
        raise ValueError(
            f"the model is wrapped by {wrapper.__module__.partition('.')[0]}'s {wrapper.__name__}, which would not know the new "
            "parameters: change the model before wrapping it"
        )


def _changed_config(config: PreTrainedConfig, position_scheme: str | None, flags: dict[str, Any]) -> PreTrainedConfig:
    """A new, validated config with another scheme; if that is None, Transformers' own config."""
    if position_scheme is not None:
        changed = variant_config(config, position_scheme, **flags)
    elif flags:
        raise ValueError(
            f"position_scheme=None gives Transformers' own model, which has no {', '.join(flags)}: leave it out"
        )
    elif not isinstance(config, PositionConfigMixin):
        changed = copying.deepcopy(config)
    elif type(config) not in STOCK_CONFIGS:
        raise ValueError(
            f"Transformers has no original for your own config class {type(config).__name__}: use "
            f"position_scheme={family_of(config).native_scheme!r}, which computes the same"
        )
    else:
        _check_native(config)
        changed = STOCK_CONFIGS[type(config)].from_dict(_stock_entries(config))
    changed.dtype, changed.name_or_path = config.dtype, config.name_or_path
    return changed


def _check_native(config: PositionConfigMixin) -> None:
    """Raise ValueError for a config with a position scheme that computes with other positions than original models of its family."""
    family = family_of(config)
    native = type(config).from_dict(_stock_entries(config), position_scheme=family.native_scheme)
    own, stock = (
        {name: scheme(each).settings() for name, scheme in each.schemes.items()} for each in (config, native)
    )
    if own != stock or window_settings(config) != window_settings(native):
        others = {flag: value for flag, value in stored_flags(vars(config)).items() if flag != "position_scheme"}
        raise ValueError(
            f"only position_scheme={family.native_scheme!r} without other config options computes what Transformers' own {family.model_type} "
            f"model does; this model has {config.position_scheme!r} with {others or 'no other option'}"
        )


def _stock_entries(config: PositionConfigMixin) -> dict[str, Any]:
    """The entries of a config with a position scheme that an original one has too."""
    # One that was loaded from an exported model may have that model's entry.
    left_out = {*NOT_STOCK, *FLAGS, EXPORTED}
    return {name: value for name, value in config.to_dict().items() if name not in left_out}


def _without_weights(cls: type[PreTrainedModel], config: PreTrainedConfig, model: PreTrainedModel) -> PreTrainedModel:
    """A model as its class makes it, without memory for its parameters."""
    said, implementation = config.dtype, model.config._attn_implementation
    if cls._supports_sdpa != model._supports_sdpa and implementation == ("eager" if cls._supports_sdpa else "sdpa"):
        implementation = None  # it was no choice: original MPNet has nothing but eager
    with torch.device("meta"):
        made = cls._from_config(config, attn_implementation=implementation, dtype=model.dtype)
    made.config.dtype = said
    return made.train(model.training)


def _matched(
    module: nn.Module, before: nn.Module, after: nn.Module, path: str = ""
) -> Iterator[tuple[nn.Module, nn.Module, nn.Module, str]]:
    """A module and its parts as they are, as they were made, and as they are to be made; where all three exist.

    A part that several modules share is there several times.
    """
    yield module, before, after, path
    for name in after._modules:
        parts = [each._modules.get(name) for each in (module, before, after)]
        if None not in parts:
            yield from _matched(*parts, f"{path}.{name}".lstrip("."))


def _changing(model: nn.Module, before: nn.Module, after: nn.Module) -> list[tuple[nn.Module, nn.Module, nn.Module]]:
    """The modules that must change, each once: as they are, as they were made, and as they are to be made.

    Raises:
        ValueError: one of them is not as its model's class made it, is not where it was made, or would have to be two.
    """
    matched = [*_matched(model, before, after)]
    classes = {type(made) for _, made, wanted, _ in matched if _differences(made, wanted)}
    known = {path for path, _ in before.named_modules()}
    for path, module in model.named_modules():
        # A plain torch.nn.Embedding may be anybody's.
        if type(module) in classes and path not in known and not type(module).__module__.startswith("torch."):
            raise ValueError(
                f"{path} is not a module that the model's config describes: set num_hidden_layers in the config; if you wrapped "
                "a module, change the scheme before that"
            )
    seen: dict[nn.Module, tuple[nn.Module, nn.Module, str]] = {}
    for module, made, wanted, path in matched:
        where = path or type(module).__name__
        if module not in seen:
            seen[module] = made, wanted, where
            if _differences(made, wanted):
                _check_as_made(module, made, wanted, where)
            continue
        first_made, first_wanted, first = seen[module]
        if new := _differences(first_wanted, wanted) - _differences(first_made, made):
            raise ValueError(
                f"{where} and {first} are the same module, and these config options give each of them another {min(new)}: copy the module first"
            )
    return [(module, made, wanted) for module, (made, wanted, _) in seen.items() if _differences(made, wanted)]


def _check_as_made(module: nn.Module, made: nn.Module, wanted: nn.Module, where: str) -> None:
    """Raise ValueError for a module that must change, and that somebody has changed or replaced."""
    if type(module) is not type(made):
        raise ValueError(
            f"{where} is a {type(module).__qualname__} instead of a {type(made).__qualname__}, which holds or would hold positions: "
            "change the scheme before replacing the module"
        )
    if "forward" in vars(module):
        raise ValueError(
            f"the forward of {where} was replaced, for example by accelerate when it dispatches a model: change the scheme before that"
        )
    for name in {*wanted._modules, *wanted._parameters} - {*made._modules, *made._parameters, *made._buffers}:
        if hasattr(module, name):
            raise ValueError(
                f"{where} already has an attribute {name!r}, which the position scheme needs: rename yours"
            )


def _differences(made: nn.Module, wanted: nn.Module) -> set[str]:
    """In what two modules differ as they were made; what is in their parts, and what their config says, is left aside."""
    own, other = _shapes(made), _shapes(wanted)
    shapes = {name for name in {*own, *other} if name not in own or name not in other or own[name] != other[name]}
    parts = made._modules.keys() ^ wanted._modules.keys()
    kind = {"class"} if type(made) is not type(wanted) else set()
    return kind | parts | shapes | _other_settings(made, wanted) | _other_settings(wanted, made)


def _shapes(module: nn.Module) -> dict[str, torch.Size | None]:
    return {name: None if value is None else value.shape for name, value in module._parameters.items()}


def _other_settings(made: nn.Module, wanted: nn.Module) -> set[str]:
    """The names of attributes of a module that another lacks or has another value of; every config is one value."""
    own, other = vars(wanted), vars(made)
    names = own.keys() - vars(nn.Module()).keys()
    return {name for name in names if name not in other or (name != "config" and not _equal(other[name], own[name]))}


def _equal(first: Any, second: Any) -> bool:
    """Whether two attributes are the same setting; objects that do not say are not."""
    return first is second or (type(first) is type(second) and bool(first == second))


def _keep_values(module: nn.Module, made: nn.Module, wanted: nn.Module) -> None:
    """Keep the value of a tensor that is trained in one of the two that were made, and a constant in the other."""
    for name in made._parameters.keys() & wanted._buffers.keys():
        module._buffers[name] = module._parameters.pop(name).detach().clone()
    for name in made._buffers.keys() & wanted._parameters.keys():
        module._parameters[name] = nn.Parameter(module._buffers.pop(name))


def _change(module: nn.Module, made: nn.Module, wanted: nn.Module, device: torch.device) -> list[nn.Module]:
    """Change a module, not its parts, where the two that were made differ.

    Args:
        device: for new parameters of a module that has none.

    Returns:
        The modules that have new parameters, not initialised yet.
    """
    device = next((parameter.device for parameter in module.parameters()), device)
    new: list[nn.Module] = []
    for name in made._modules.keys() - wanted._modules.keys():
        module._modules.pop(name, None)
    for name, part in wanted._modules.items():
        if name not in made._modules:
            module._modules[name] = part
            new += part.to_empty(device=device).modules()
    _keep_values(module, made, wanted)
    for name in made._parameters.keys() - wanted._parameters.keys():
        module._parameters.pop(name, None)
    for name, shape in _shapes(wanted).items():
        if shape is not None and name not in made._buffers and _shapes(made).get(name) != shape:
            value = wanted._parameters[name]
            module._parameters[name] = nn.Parameter(torch.empty_like(value, device=device), value.requires_grad)
            new.append(module)
    for name in vars(made).keys() - vars(wanted).keys():
        vars(module).pop(name, None)
    for name in _other_settings(made, wanted):
        setattr(module, name, vars(wanted)[name])
    module.__class__ = type(wanted)
    return new
