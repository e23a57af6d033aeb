"""Another position scheme for a model in memory: [`with_position_scheme`], as `peft.get_peft_model` is for adapters."""

import copy as copying
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .integrations.unpadding import remove_hooks
from .modeling.configuration_posenc import SCHEME_FILES, PositionConfigMixin, stored_flags
from .modeling.flags import UNPAD
from .modeling.schemes import FLAGS
from .modeling.window import window_settings
from .registry import STOCK_CONFIGS, STOCK_MODELS, VARIANT_MODELS, families, family_of, variant_config


# Entries beside the flags that a stock config does not have.
NOT_STOCK = {UNPAD.name, "model_type", "auto_map", SCHEME_FILES}


def with_position_scheme(
    model: PreTrainedModel, position_scheme: str | None, *, copy: bool = False, **flags: Any
) -> PreTrainedModel:
    """Give a model in memory another position scheme, as `from_pretrained(..., position_scheme=...)` gives one to a checkpoint.

    The model is changed in place. What it has in common with the new one stays what it is: parameters (an optimizer goes on
    with them), head, hooks, device, dtype, mode. Parameters of schemes that it lacks are new, and start as in `from_pretrained`.
    `model.config` becomes another object; what else holds the one of before (the config of an encoder-decoder) keeps that.

    Args:
        model: a stock model or a variant, base model or head, of a family that has position schemes.
        position_scheme: as in a config. None turns a variant whose scheme is what its family's stock models have into one of these.
        copy: leave the model as it is, and change a copy.
        flags: other `position_*` flags. A variant keeps those that it has, as far as they apply.

    Returns:
        The model, or its copy: of the variant's class, or the stock class.

    Raises:
        TypeError: `model` is no PreTrainedModel, or a flag has the wrong type.
        ValueError: the model is of another family or a class of its own, is wrapped by PEFT, dispatched by accelerate or has had
            modules replaced where positions go; a flag is wrong. The model is then as before.
    """
    return change_scheme(copying.deepcopy(model) if copy else model, position_scheme, **flags)


def change_scheme(
    model: PreTrainedModel, position_scheme: str | None, reports: bool = True, **flags: Any
) -> PreTrainedModel:
    """[`with_position_scheme`] in place; with `reports=False`, nothing is logged of positions that are lost or not silent."""
    _check(model)
    config = _changed_config(model.config, position_scheme, flags)
    stock = STOCK_MODELS.get(type(model), type(model))
    wanted = stock if position_scheme is None else VARIANT_MODELS[stock]
    # As both were made: what differs between these is what changes.
    before = _without_weights(type(model), copying.deepcopy(model.config), model)
    after = _without_weights(wanted, config, model)
    _check_modules(model, before, after)
    if reports and position_scheme is not None:
        names = {*before.state_dict()}, {*after.state_dict()}
        after.report_positions(names[1] - names[0], names[0] - names[1])
    remove_hooks(model)  # of `unpad`: variants leave padding out by themselves
    new = [part for places in [*_matched(model, before, after)] for part in _change(*places)]
    with torch.no_grad():
        for part in new:
            model._init_weights(part)
    return model


def _check(model: PreTrainedModel) -> None:
    """Raise what [`with_position_scheme`] raises for a model that it cannot change."""
    what = type(model).__name__
    if isinstance(model, nn.Module) and (
        hasattr(model, "peft_config") or any(type(part).__module__.startswith("peft.") for part in model.modules())
    ):
        raise ValueError(
            f"this {what} is wrapped by PEFT: change the model before it is wrapped, or after `merge_and_unload()`"
        )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"with_position_scheme needs a model of transformers, got {model!r} of type {what}")
    if type(model) not in STOCK_MODELS and type(model) not in VARIANT_MODELS:
        base_model = next((cls for cls in (*STOCK_MODELS, *VARIANT_MODELS) if isinstance(model.base_model, cls)), None)
        hint = "" if base_model is None else f"; change the {base_model.__name__} inside it"
        raise ValueError(
            f"a {what} cannot get another position_scheme: it takes a model or head of transformers' own of {families()}{hint}"
        )


def _changed_config(config: PreTrainedConfig, position_scheme: str | None, flags: dict[str, Any]) -> PreTrainedConfig:
    """A new config with another scheme, validated; a stock one where that is None."""
    if position_scheme is not None:
        changed = variant_config(config, position_scheme, **flags)
    elif flags:
        raise ValueError(f"a stock model has no {', '.join(flags)}")
    elif not isinstance(config, PositionConfigMixin):
        changed = copying.deepcopy(config)
    else:
        _check_native(config)
        changed = STOCK_CONFIGS[type(config)].from_dict(_stock_entries(config))
    changed.dtype, changed.name_or_path = config.dtype, config.name_or_path
    return changed


def _check_native(config: PositionConfigMixin) -> None:
    """Raise ValueError for a variant's config that computes with other positions than stock models of its family."""
    family = family_of(config)
    native = type(config).from_dict(_stock_entries(config), position_scheme=family.native_scheme)
    own, stock = (
        {name: scheme(each).settings() for name, scheme in each.schemes.items()} for each in (config, native)
    )
    if own != stock or window_settings(config) != window_settings(native):
        others = {flag: value for flag, value in stored_flags(vars(config)).items() if flag != "position_scheme"}
        raise ValueError(
            f"only position_scheme={family.native_scheme!r} without other flags computes what a stock {family.model_type} model "
            f"does; this one has {config.position_scheme!r} with {others or 'no other flag'}"
        )


def _stock_entries(config: PositionConfigMixin) -> dict[str, Any]:
    """The entries of a variant's config that a stock one has too."""
    return {name: value for name, value in config.to_dict().items() if name not in NOT_STOCK and name not in FLAGS}


def _without_weights(cls: type[PreTrainedModel], config: PreTrainedConfig, model: PreTrainedModel) -> PreTrainedModel:
    """A model as its class makes it, without memory for its parameters."""
    said, implementation = config.dtype, model.config._attn_implementation
    if cls._supports_sdpa != model._supports_sdpa and implementation == ("eager" if cls._supports_sdpa else "sdpa"):
        implementation = None  # it was no choice: stock MPNet has nothing but eager
    with torch.device("meta"):
        made = cls._from_config(config, attn_implementation=implementation, dtype=model.dtype)
    made.config.dtype = said
    return made.train(model.training)


def _matched(
    module: nn.Module, before: nn.Module, after: nn.Module, path: str = ""
) -> Iterator[tuple[nn.Module, nn.Module, nn.Module, str]]:
    """A module and its parts as they are, as they were made, and as they are to be made; where all three exist."""
    yield module, before, after, path
    for name, part in module.named_children():
        if name in before._modules and name in after._modules:
            yield from _matched(part, before._modules[name], after._modules[name], f"{path}.{name}".lstrip("."))


def _check_modules(model: nn.Module, before: nn.Module, after: nn.Module) -> None:
    """Raise ValueError where a module that must change is not as its model's class made it, or not where."""
    matched = [*_matched(model, before, after)]
    changing = {type(made) for _, made, wanted, _ in matched if type(made) is not type(wanted)}
    known = {path for path, _ in before.named_modules()}
    for path, module in model.named_modules():
        # A plain torch.nn.Embedding may be anybody's.
        if type(module) in changing and path not in known and not type(module).__module__.startswith("torch."):
            raise ValueError(
                f"{path} is none of the modules that the model's config tells of: set its num_hidden_layers"
            )
    for module, made, wanted, path in matched:
        if type(made) is type(wanted):
            continue
        where = path or type(module).__name__
        if type(module) is not type(made):
            raise ValueError(
                f"{where} is a {type(module).__qualname__} in place of the {type(made).__qualname__} that would get positions"
            )
        if "forward" in vars(module):
            raise ValueError(
                f"the forward of {where} has been replaced, as accelerate does where it dispatches a model: change the scheme before"
            )


def _change(module: nn.Module, before: nn.Module, after: nn.Module, path: str) -> list[nn.Module]:
    """Change a module, not its parts, where the two that were made differ.

    Returns:
        The modules that have new parameters, not initialised yet.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    new: list[nn.Module] = []
    for kind in ("_modules", "_parameters"):
        own, made, wanted = (vars(each)[kind] for each in (module, before, after))
        for name in made.keys() - wanted.keys():
            own.pop(name, None)
        for name, value in wanted.items():
            if name not in made:
                own[name] = value
                if kind == "_modules":
                    new += value.to_empty(device=device).modules()
            if kind == "_parameters" and value is not None:
                if name not in made or made[name] is None or made[name].shape != value.shape:
                    own[name] = nn.Parameter(torch.empty_like(value, device=device), value.requires_grad)
                    new.append(module)
    internal = vars(nn.Module()).keys()
    made, wanted = ({n: v for n, v in vars(each).items() if n not in internal} for each in (before, after))
    for name in made.keys() - wanted.keys():
        vars(module).pop(name, None)
    for name, value in wanted.items():
        if name not in made or name == "config" or not _equal(made[name], value):
            setattr(module, name, value)
    module.__class__ = type(after)
    return new


def _equal(first: Any, second: Any) -> bool:
    """Whether two attributes are the same setting; objects that do not say are not."""
    return first is second or (type(first) is type(second) and bool(first == second))
