"""Models that skip padding on request: [`unpad`].

Models with a position scheme compute packed states themselves. Original models get two hooks on their encoder, which keep classes and code:
it is given packed states, and what it returns is padded again. In between, the `forward` of an original self-attention, hooked in its class from the
first `unpad` on, computes packed states by the same backends. Layers and encoders may be added, removed and replaced: each call looks at the model as it is.

Hooks are copied and pickled with a model, and refer to the copy then. A replaced `forward` of an instance would go on calling the original, and
what accelerate or PEFT puts there would replace it.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, logging, output_capturing

from .._utils import module_inside
from ..modeling.attention.backends import Attention, attend
from ..modeling.kernels.fast import split_heads
from ..modeling.kernels.packing import ON_REQUEST, Packing, loss_reads_padding, packing_of
from ..modeling.masks import Mask, allowed, is_tensor
from ..modeling.models.family import Family
from ..modeling.models.modeling_posenc import PosencPreTrainedModel, PositionModel
from ..modeling.stock_interface import ModelInputs, Receives, tells_versions
from ..modeling.torch_state import is_traced
from .changes import INSTALLED, Changes


logger = logging.get_logger(__name__)


# DeBERTa's names of what is the same in all families; version 1 has one projection for all three.
DEBERTA = Family("deberta", "Deberta", heads={}, query="in_proj", key="in_proj", value="in_proj")
DEBERTA_V2 = Family("deberta-v2", "DebertaV2", heads={}, query="query_proj", key="key_proj", value="value_proj")


class Call(NamedTuple):
    """A call of an encoder of [`unpad`].

    Attributes:
        packing: of its states; None where padding is computed.
        around: the call that this one is a part of.
        frame: of PyTorch's function that calls the encoder's hooks and the encoder.
    """

    packing: Packing | None
    around: "Call | None"
    frame: FrameType


_current: ContextVar[Call | None] = ContextVar("current_call", default=None)


def _running() -> Call | None:
    """The call of an encoder of [`unpad`] that runs. PyTorch calls no hook after a KeyboardInterrupt: calls that it ended are dropped here."""
    call = _current.get()
    if call is None:
        return None
    frames, frame = set(), sys._getframe(1)
    while frame is not None and frame is not call.frame:
        frames.add(frame)
        frame = frame.f_back
    if frame is not None:
        return call
    while call is not None and call.frame not in frames:
        call = call.around
    _current.set(call)
    return call


def current_packing() -> Packing | None:
    """The packing of the states of the original encoder that runs, if it skips padding."""
    call = None if is_traced() else _running()
    return None if call is None else call.packing


@functools.cache
def stock_families() -> dict[type[PreTrainedModel], Family]:
    """The families, by the class of their original base model."""
    from transformers import DebertaModel, DebertaV2Model

    from ..variants import BASE_MODELS

    families = {stock: variant.position_classes.family for stock, variant in BASE_MODELS.items()}
    return families | {DebertaModel: DEBERTA, DebertaV2Model: DEBERTA_V2}


def _family_of(model: nn.Module) -> Family | None:
    """The family of an original base model, or of a class derived from one; None for all else."""
    if isinstance(model, PosencPreTrainedModel):
        return None
    return next((family for stock, family in stock_families().items() if isinstance(model, stock)), None)


def unpad(model: Any, on: bool = True) -> int:
    """Skip padding in models, on CPUs and CUDA, if a batch has enough of it.

    Every token that is not padding gets the same hidden state as before, up to rounding. Padding gets zeros. Copies and pickles of a model
    keep the setting.

    Models with a position scheme skip padding on CPUs without this call. They need it on CUDA. It sets their config option `unpad`, which is
    saved if it is `False`. Nothing is saved with Transformers' own models, so call it again after loading.

    Args:
        model: a base model or a model with a task head of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT, MPNet, DeBERTa or
            DeBERTa-v2; or an object that contains one or several: a `SentenceTransformer`, a `CrossEncoder`, a pipeline or your module.
        on: `False` computes padding again.

    Returns:
        The number of base models in which padding is now skipped, or with `on=False`, computed.

    Raises:
        TypeError: `model` is not a module and contains none.
        ValueError: `model` contains no such base model, or it contains a module that reads hidden states at padding, such as a
            convolution. (A recurrent network raises an error later, if it is called with anything but a `PackedSequence`.)
    """
    model = module_inside(model)
    found = {part: family for part in model.modules() if (family := _family_of(part)) is not None}
    with_scheme = [part for part in model.modules() if isinstance(part, PositionModel)]
    if not found and not with_scheme:
        families = ", ".join(family.model_type for family in stock_families().values())
        raise ValueError(f"unpad works on models of {families}, and there is none in this {type(model).__name__}")
    around = _outside(model, [*found, *with_scheme])
    if on:
        _refuse_readers_of_padding(around)
    remove_hooks(model)
    for part in with_scheme:
        part.unpad_is_requested = part.config.unpad = on
    if on:
        for part in found:
            part.register_forward_pre_hook(_hook_encoder)
            _hook_encoder(part)
        for part in around.values():
            if isinstance(part, nn.RNNBase):
                part.register_forward_pre_hook(_refuse_padded)
    return len(found) + len(with_scheme)


def is_unpadded(model: nn.Module) -> bool:
    """Whether [`unpad`] was called for a base model."""
    return getattr(model, "unpad_is_requested", False) or _has_hook(model, _hook_encoder)


# What mixes the states of neighbours, whatever a mask says. (Attention takes masks, and so does pooling.)
READERS_OF_PADDING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.MaxPool1d,
    nn.AvgPool1d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveMaxPool1d,
    nn.BatchNorm1d,
)


def _outside(model: nn.Module, base_models: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """The modules that are not part of the base models, by name."""
    inside = {part for base in base_models for part in base.modules()}
    return {name: part for name, part in model.named_modules() if part not in inside}


def _refuse_readers_of_padding(modules: dict[str, nn.Module]) -> None:
    """Raise ValueError where modules outside the base models would be given zeros in place of hidden states of padding."""
    readers = [
        f"{name} ({type(part).__name__})" for name, part in modules.items() if isinstance(part, READERS_OF_PADDING)
    ]
    if readers:
        raise ValueError(
            f"{', '.join(readers[:3])} reads the hidden states of neighbours, padding included, which would be zeros: leave this "
            "model as it is, or pass unpad the part of it whose hidden states are not read so"
        )


def _refuse_padded(network: nn.RNNBase, args: tuple) -> None:
    """Hook of a recurrent network outside a base model."""
    if args and isinstance(args[0], torch.Tensor) and not is_traced():
        raise ValueError(
            f"this {type(network).__name__} reads hidden states at padding, which are zeros since hf_posenc.unpad: give it a PackedSequence "
            "(torch.nn.utils.rnn.pack_padded_sequence), or call hf_posenc.unpad(model, on=False)"
        )


def _has_hook(module: nn.Module, hook: Callable, kind: str = "_forward_pre_hooks") -> bool:
    return any(found is hook for found in vars(module)[kind].values())


def _hook_encoder(model: PreTrainedModel, args: tuple = ()) -> None:
    """Hook a model's encoder, unless it is hooked. As a hook of the model, it finds an encoder that was replaced."""
    encoder = _family_of(model).encoder_of(model)
    if not _has_hook(encoder, _pad_output, "_forward_hooks"):
        encoder.register_forward_pre_hook(UnpadInput(model), with_kwargs=True)
        encoder.register_forward_hook(_pad_output, always_call=True)


def _take_packed_states(layers: nn.ModuleList, family: Family) -> bool:
    """Whether all layers have a self-attention that knows packed states."""
    try:
        return all(_takes_packed_states(family.self_attention_of(layer)) for layer in layers)
    except AttributeError:
        return False


# Self-attentions of transformers that compute packed states: what hooked them, and the hook.
_hooked: dict[type[nn.Module], tuple[Changes, Callable]] = {}


def note_hooked(changes: Changes, cls: type[nn.Module]) -> None:
    """Note that the `forward` of an original self-attention, as it is now, computes packed states where [`current_packing`] has a packing."""
    _hooked[cls] = changes, cls.forward


@functools.cache
def _self_attentions() -> dict[type[nn.Module], tuple[Family, Callable]]:
    """The original self-attentions of the families with position schemes: family, and eager attention function."""
    from ..variants import VARIANT_MODELS

    parts = {variant.position_classes for variant in VARIANT_MODELS.values()}
    stock = (
        next(cls for cls in part.self_attention.__mro__ if cls.__module__.startswith("transformers."))
        for part in parts
    )
    return {cls: (part.family, part.eager) for cls, part in zip(stock, parts)}


def _takes_packed_states(attention: nn.Module) -> bool:
    """Whether a self-attention computes packed states: one of transformers' own, in which nobody has changed `forward`."""
    changes = vars(PreTrainedModel).get(INSTALLED)
    own = _self_attentions()
    cls = next((cls for cls in type(attention).__mro__ if cls in own or cls in _hooked), None)
    if changes is None or cls is None or "forward" in vars(attention):
        return False
    if _hooked.get(cls, (None,))[0] is not changes:
        if cls not in own or not cls.forward.__module__.startswith("transformers."):
            return False
        _hook_self_attention(changes, cls, *own[cls])
    return type(attention).forward is _hooked[cls][1]


def _hook_self_attention(changes: Changes, cls: type[nn.Module], family: Family, eager: Callable) -> None:
    """Have an original self-attention compute packed states, (1, tokens, hidden), by the backend that its config names."""
    stock = cls.forward

    # What it found is called as a function: as a bound method, torch.compile would look it up again by its name.
    @functools.wraps(stock)
    def forward(self, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        packing = current_packing() if changes.active else None
        if packing is None:
            return stock(self, *args, **kwargs)
        return _attend_packed(self, _states(self, args, kwargs), packing, family, eager), None

    changes.set_attribute(cls, "forward", tells_versions(forward))
    note_hooked(changes, cls)


def _attend_packed(
    attention: nn.Module, states: torch.Tensor, packing: Packing, family: Family, eager: Callable
) -> torch.Tensor:
    """What an original self-attention returns for packed states, (1, tokens, hidden)."""
    heads, dropout = getattr(attention, family.heads_count), attention.dropout.p if attention.training else 0.0
    query, key, value = (
        split_heads(getattr(attention, name)(states), heads) for name in (family.query, family.key, family.value)
    )

    implementation, mask = attention.config._attn_implementation, Mask.of(None, query, key, packing=packing)
    states = query, query, key, value
    output, _ = attend(
        Attention(attention, implementation, *states, [], mask, attention.scaling, dropout, eager=eager)
    )
    output = output.flatten(2)
    return output if family.output is None else getattr(attention, family.output)(output)


def remove_hooks(model: nn.Module) -> None:
    """Take away the hooks of this file in a model."""
    for module in model.modules():
        hooks = vars(module)
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            ours = [key for key, hook in hooks[name].items() if getattr(hook, "__module__", None) == __name__]
            for key in ours:
                for table in (name, f"{name}_with_kwargs", f"{name}_always_called"):
                    hooks.get(table, {}).pop(key, None)


@functools.cache
def _receives(cls: type[nn.Module]) -> Receives:
    return Receives.of(cls.forward)


def _inputs(module: nn.Module, args: tuple, kwargs: dict) -> ModelInputs:
    """What a module was called with."""
    return ModelInputs.of(_receives(type(module)), args, kwargs)


def _is_model_of(encoder: nn.Module, caller: object) -> bool:
    """Whether a module is the original base model of an encoder: that of the hook, or a replica of it, which nn.DataParallel gives the same hook."""
    family = _family_of(caller)
    return family is not None and family.encoder_of(caller) is encoder


def _head_reads_padding(encoder: nn.Module) -> bool:
    """Whether the loss of the head that calls the base model of an encoder reads padding.

    Its `forward` may have been called past its hooks, and nobody but the head knows its labels then: they are looked up where it
    calls its base model from.
    """
    for caller, arguments in _calling_forwards():
        is_head = isinstance(caller, PreTrainedModel) and caller.base_model is not caller
        if is_head and _is_model_of(encoder, caller.base_model):
            inputs = ModelInputs(arguments, arguments.get(_receives(type(caller)).mask))
            return loss_reads_padding(inputs, is_requested=True)
    return False


def _calling_forwards() -> Iterator[tuple[object, dict]]:
    """The modules whose `forward` this is called from, the innermost first, and what each has by which name."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "forward":
            yield frame.f_locals.get("self"), frame.f_locals
        frame = frame.f_back


class UnpadInput:
    """Hook of an encoder that is given packed states where its padding is left out.

    The encoder knows the mask of pairs that its model has made, whether that or its `forward` was called, as sentence-transformers does.
    DeBERTa's model hands its mask on, and asks for all hidden states whether it was asked or not.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def __call__(self, encoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if is_traced():
            return None
        states = _states(encoder, args, kwargs)
        packing = self.packing_of(encoder, states, _inputs(encoder, args, kwargs))
        _current.set(Call(packing, _running(), sys._getframe(1)))
        return None if packing is None else _with_states(encoder, args, kwargs, packing.unpad_input(states))

    def packing_of(self, encoder: nn.Module, states: torch.Tensor, inputs: ModelInputs) -> Packing | None:
        """The packing of a call; None where padding is computed."""
        model, family, asked = self.model, _family_of(self.model), {}
        if family in (DEBERTA, DEBERTA_V2):
            caller, arguments = next(_calling_forwards(), (None, {}))
            if not _is_model_of(encoder, caller):  # the encoder was called by itself
                return None
            mask = inputs.attention_mask
            asked = {name: arguments.get(name) for name in ("output_hidden_states", "output_attentions")}
        else:
            mask = _mask_of_keys(inputs.attention_mask, states, model.config._attn_implementation)
        # What records outputs is a dictionary of them.
        if output_capturing._active_collector.get() or not _may_pack(model, encoder, family, mask):
            logger.debug(
                "padding is computed: no mask of tokens, outputs that are recorded, other layers than the family's, gradient checkpointing, or "
                "an option of DeBERTa"
            )
            return None
        if _head_reads_padding(encoder):
            logger.debug("padding is computed: the loss reads positions that are padding")
            return None
        as_called = ModelInputs({**inputs.arguments, **asked, "inputs_embeds": states}, mask, inputs.cache)
        heads = family.setting(model.config, "num_attention_heads")
        return packing_of(model.config, encoder, heads, as_called, is_requested=True)


def _mask_of_keys(mask: torch.Tensor | None, states: torch.Tensor, implementation: str) -> torch.Tensor | None:
    """The mask (batch, length) that a mask of pairs was made of; None if it says more, or for other sequences."""
    if is_tensor(mask) and implementation == "eager" and not mask.is_floating_point():
        return None  # Transformers adds it to the scores, as numbers
    if not is_tensor(mask) or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[0] != len(states):
        return None
    of_query = mask[:, 0, 0]
    seen = allowed(of_query)
    adds_numbers = mask.dtype != torch.bool and bool(of_query[seen].any())
    return seen if not adds_numbers and torch.equal(mask, mask[:, :, :1].expand_as(mask)) else None


def _may_pack(model: PreTrainedModel, encoder: nn.Module, family: Family, mask: torch.Tensor | None) -> bool:
    """Whether nothing that original models alone have stands against it."""
    layers = family.layers_of(encoder)
    if not is_tensor(mask) or mask.device.type not in ON_REQUEST or not _take_packed_states(layers, family):
        return False
    if any(getattr(layer, "gradient_checkpointing", False) and layer.training for layer in layers):
        return False  # layers run again in the backward pass, outside of the call
    if family not in (DEBERTA, DEBERTA_V2):
        return True
    # Padding is a query there, a convolution reads neighbours, and a second pass over the last layer reads the one
    # before.
    starts_with_token = mask.dim() == 2 and bool(mask[:, 0].all())
    has_eager_options = getattr(model.config, "talking_head", False) or model.z_steps > 1
    return starts_with_token and getattr(encoder, "conv", None) is None and not has_eager_options


def _states(module: nn.Module, args: tuple, kwargs: dict) -> torch.Tensor:
    """The hidden states that a module was called with."""
    return args[0] if args else kwargs[_receives(type(module)).names[0]]


def _with_states(module: nn.Module, args: tuple, kwargs: dict, states: torch.Tensor) -> tuple[tuple, dict]:
    """Arguments with other hidden states."""
    if args:
        return (states, *args[1:]), kwargs
    return args, {**kwargs, _receives(type(module)).names[0]: states}


def _pad_output(encoder: nn.Module, args: tuple, output):
    """What an encoder returns, padded again; None after an error."""
    packing = current_packing()
    if not is_traced() and (call := _current.get()) is not None:
        _current.set(call.around)
    if packing is None or output is None:
        return None
    packed = output if isinstance(output, torch.Tensor) else output[0]
    unpacked = packing.pad_input(packed)

    def replace(value):
        """DeBERTa's model takes the last one of all layers' states."""
        if isinstance(value, tuple):
            return tuple(replace(part) for part in value)
        return unpacked if value is packed else value

    if isinstance(output, ModelOutput):
        for name, value in output.items():
            output[name] = replace(value)
        return output
    return replace(output)
