"""Which backend DeBERTa and MPNet have: hooks on their models, and a function that changes it."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..._utils import module_inside
from ...modeling.models.modeling_posenc import PosencPreTrainedModel
from ..changes import Changes, hook_class_method, hook_method
from . import deberta, mpnet
from .attention import IMPLEMENTATIONS


FAMILIES = (deberta, mpnet)
_POSSIBLE = ", ".join(("eager", *IMPLEMENTATIONS))
# What is installed.
_changes: list[Changes] = []


def _correct_implementation(
    original: Callable, model: PreTrainedModel, requested_attention: str | None, *args, **kwargs
) -> str:
    """`get_correct_attn_implementation`: these backends are there, and unnamed means eager, as in Transformers."""
    if isinstance(model, PosencPreTrainedModel):
        return original(requested_attention, *args, **kwargs)
    if requested_attention is None:
        return "eager"
    if requested_attention not in ("eager", *IMPLEMENTATIONS):
        if requested_attention not in ALL_ATTENTION_FUNCTIONS.valid_keys() and "eager" not in requested_attention:
            raise ValueError(
                f"attn_implementation={requested_attention!r} is unknown; {type(model).__name__} has {_POSSIBLE}"
            )
        return original(requested_attention, *args, **kwargs)
    if requested_attention != "eager":
        refuse(model)
    # In an encoder-decoder, the config of an encoder's model is a copy, and not the one that the encoder reads.
    for config in _configs(model):
        config._attn_implementation = requested_attention
    return requested_attention


def _configs(module: nn.Module) -> list:
    """The configs of all encoders of these families in a module."""
    return [config for family in FAMILIES for config in family.configs(module)]


def refuse(model: nn.Module) -> None:
    """Raise ValueError for a model with an option that eager attention alone computes."""
    deberta.refuse_model(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            deberta.refuse_options(module.config)


def set_attn_implementation(model: Any, implementation: str) -> int:
    """Change the attention backend of every DeBERTa and MPNet encoder in a model.

    Args:
        model: any module, such as a `SentenceTransformer`, a `CrossEncoder`, a GLiNER model or your class; or a pipeline.
        implementation: "sdpa", "flex_attention", or "eager" (Transformers' own).

    Returns:
        The number of encoders that were changed.

    Raises:
        TypeError: `model` is not a module and contains none.
        ValueError: `model` contains no such encoder, an encoder has an option that is not supported, or the backend is unknown.
        RuntimeError: the hooks are not installed: call `hf_posenc.install()`.
    """
    module = module_inside(model)
    if implementation not in ("eager", *IMPLEMENTATIONS):
        raise ValueError(f"attn_implementation={implementation!r} is unknown; these are possible: {_POSSIBLE}")
    if not _changes or not _changes[-1].active:
        raise RuntimeError("the hooks are not installed: call hf_posenc.install() first")
    found = _configs(module)
    if not found:
        raise ValueError(
            f"{type(model).__name__} holds no DeBERTa (v1, v2, v3) and no MPNet of transformers whose attention could be "
            "changed; other models are changed by their own set_attn_implementation"
        )
    if implementation != "eager":
        refuse(module)
    # Models may have been given copies of their encoder's config.
    bases = tuple(base for family in FAMILIES for base in family.MODELS)
    models = [inner for inner in module.modules() if isinstance(inner, bases)]
    for config in found + [inner.config for inner in models if not isinstance(inner, PosencPreTrainedModel)]:
        config._attn_implementation = implementation
    return len(found)


def install(changes: Changes) -> None:
    """Hook the models of these families, which then have the backends."""
    for family in FAMILIES:
        for model in family.MODELS:
            hook_method(changes, model, "get_correct_attn_implementation", _correct_implementation)
            hook_class_method(changes, model, "_can_set_attn_implementation", lambda original, cls: True)
        family.install(changes)
    _changes[:] = [changes]
