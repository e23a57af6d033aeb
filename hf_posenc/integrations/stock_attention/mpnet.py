"""MPNet as transformers has it, without matrices of pairs.

transformers' encoder looks the bias of every pair up for all layers. Here it looks up the bias *per distance* instead, and each
layer's self-attention, given this, computes what Transformers computes. Everything else is Transformers' own code.
"""

import functools
import gc
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetPreTrainedModel, MPNetSelfAttention

from ...modeling.attention.backends import score_bias
from ...modeling.kernels.fast import split_heads
from ...modeling.masks import Mask, additive, allowed, is_tensor
from ...modeling.models.modeling_posenc import PosencPreTrainedModel, PositionEncoder
from ...modeling.schemes.terms import PairTerm, RelativeTerm, Term, expand_to_pairs, look_up, relative_distances
from ...modeling.stock_interface import Receives
from ...modeling.torch_state import is_traced
from ..changes import Changes, hook_method
from ..unpadding import current_packing, note_hooked
from .attention import computes, self_attend


MODELS = (MPNetPreTrainedModel,)
# Tokens from which on blocks are faster than PyTorch's kernel with the bias of every pair.
BLOCKS_FROM = 256
# How Transformers' self-attention is called.
RECEIVES = Receives.of(MPNetSelfAttention.forward)


class Bias(NamedTuple):
    """The bias of a forward pass by distance, in place of Transformers' tensor of it.

    Attributes:
        implementation: the backend, as the config had it.
        rows: int64 (2 · length - 1,), the bucket of each distance, in the order of [`relative_distances`].
        bias: (heads, buckets).
        pairs: (1, heads, length, length), the bias of each pair where that is little, looked up once for all layers; else None.
    """

    implementation: str
    rows: torch.Tensor
    bias: torch.Tensor
    pairs: torch.Tensor | None

    @property
    def term(self) -> PairTerm | RelativeTerm:
        return RelativeTerm(self.rows, bias=self.bias) if self.pairs is None else PairTerm(self.pairs)


def configs(module: nn.Module) -> list:
    """The configs of all encoders in a module, models with a position scheme left out."""
    encoders = (inner for inner in module.modules() if isinstance(inner, MPNetEncoder))
    return [encoder.config for encoder in encoders if _has_stock_attention(encoder)]


def _has_stock_attention(encoder: nn.Module) -> bool:
    """Whether nobody has replaced the attention of an encoder."""
    attentions = (getattr(layer.attention, "attn", None) for layer in encoder.layer)
    return all(isinstance(attention, MPNetSelfAttention) for attention in attentions) and not isinstance(
        encoder, PositionEncoder
    )


def _buckets(length: int, number: int, device: torch.device) -> torch.Tensor:
    """Transformers' buckets per distance."""
    relative = relative_distances(length, length, 0, device)
    return MPNetEncoder.relative_position_bucket(relative, num_buckets=number)


@functools.lru_cache(maxsize=64)
def _reached(length: int, number: int) -> tuple[torch.Tensor, int]:
    """Transformers' buckets per distance on CPUs, kept; and the number of the last bucket and one."""
    with torch.inference_mode(False):  # they may be used in training later
        rows = _buckets(length, number, torch.device("cpu"))
        return rows, int(rows.max()) + 1


def _by_pair(bias: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
    """(1, heads, length, length), a view."""
    return expand_to_pairs(look_up(bias, rows), length, length)[None]


def _to_eager() -> None:
    """Without the hooks, MPNet would add the boolean mask of "sdpa" to its scores."""
    for found in gc.get_objects():
        if (
            issubclass(type(found), MPNetPreTrainedModel)
            and not isinstance(found, PosencPreTrainedModel)
            and "config" in vars(found)
        ):
            vars(found)["config"]._attn_implementation = "eager"


def _bias(original: Callable, encoder: nn.Module, x: torch.Tensor, position_ids=None, num_buckets: int = 32):
    """`compute_position_bias`."""
    implementation, packing = encoder.config._attn_implementation, current_packing()
    if packing is not None and not computes(implementation):
        implementation = "sdpa"  # which computes packed states in place of eager
    if computes(implementation) and not _has_stock_attention(encoder):
        # Its model has made the mask of this backend, which Transformers' self-attention would add to its scores as numbers.
        raise ValueError(
            f"attn_implementation={implementation!r} needs Transformers' own MPNetSelfAttention in every layer, and this MPNet has another: "
            "use attn_implementation='eager'"
        )
    if not computes(implementation) or position_ids is not None or not _has_stock_attention(encoder):
        return original(x, position_ids, num_buckets)
    length = x.shape[1] if packing is None else packing.shape[1]
    if is_traced():
        rows, stop = _buckets(length, num_buckets, x.device), num_buckets
    else:
        rows, stop = _reached(length, num_buckets)
    rows = rows.to(x.device)
    # As a batch of one: with an adapter for each sequence, PEFT would take buckets for sequences.
    bias = encoder.relative_attention_bias(torch.arange(stop, device=x.device)[None])[0].t()
    # A length that is traced is any length.
    is_short = not is_traced() and x.device.type == "cpu" and length < BLOCKS_FROM
    pairs = _by_pair(bias, rows, length).contiguous() if is_short else None
    return Bias(implementation, rows, bias, pairs)


def _forward(original: Callable, attention: nn.Module, hidden_states: torch.Tensor, *args, **kwargs):
    """`MPNetSelfAttention.forward`; its bias is a [`Bias`] where a backend is named."""
    given = {**dict(zip(RECEIVES.names[1:], args)), **kwargs}
    of_pairs = next((name for name, value in given.items() if isinstance(value, Bias)), None)
    if of_pairs is None:
        return original(hidden_states, *args, **kwargs)
    bias, mask, heads = given[of_pairs], given.get(RECEIVES.mask), attention.num_attention_heads
    if given.get("output_attentions"):
        length = hidden_states.shape[1]
        states = hidden_states[:, None]
        mask = additive(Mask.of(mask, states, states).dense(), states.dtype)
        given |= {RECEIVES.mask: mask, of_pairs: _by_pair(bias.bias, bias.rows, length)}
        return original(hidden_states, **given)
    inputs = (attention.q, attention.k, attention.v)
    query, key, value = (split_heads(projection(hidden_states), heads) for projection in inputs)
    dropout = attention.dropout.p if attention.training else 0.0
    scaling, terms = attention.attention_head_size**-0.5, [bias.term]
    looks_for_padding = is_tensor(mask) and current_packing() is None
    if looks_for_padding and torch.is_grad_enabled() and not torch.onnx.is_in_onnx_export():
        terms, mask = _attending_evenly(query, key, terms, mask, scaling)
    output = self_attend(bias.implementation, attention, query, key, value, terms, mask, scaling, dropout)
    return (attention.o(output),)


def _attending_evenly(
    query: torch.Tensor, key: torch.Tensor, terms: list[Term], mask: torch.Tensor, scaling: float
) -> tuple[list[Term], torch.Tensor]:
    """Terms and mask with which a query that attends to nothing gives every key the same weight, as a function of its scores.

    Transformers adds the lowest number to all of these, which leaves nothing of them but their gradients. Here their own values are
    taken off instead, and the mask lets them pass.

    Args:
        query, key: (batch, heads, length, head_dim).
        mask: boolean or additive, (batch or 1, heads or 1, length or 1, length).
    """
    nowhere = ~allowed(mask).any(-1, keepdim=True)
    # Looking at values costs next to nothing on CPUs, waits for the device elsewhere, and is impossible when traced.
    if nowhere.device.type == "cpu" and not is_traced() and not nowhere.any():
        return terms, mask
    with torch.no_grad():
        scores = query @ key.mT * scaling + score_bias(query, key, terms)
    terms = [*terms, PairTerm((-scores).masked_fill(~nowhere, 0.0))]
    # A mask of booleans stays away from `where`, which ONNX Runtime has for numbers alone.
    return terms, mask | nowhere if mask.dtype == torch.bool else mask.masked_fill(nowhere, 0.0)


def install(changes: Changes) -> None:
    """Hook the encoder and the self-attention."""
    hook_method(changes, MPNetEncoder, "compute_position_bias", _bias)
    hook_method(changes, MPNetSelfAttention, "forward", _forward)
    note_hooked(changes, MPNetSelfAttention)
    changes.to_undo(_to_eager)
