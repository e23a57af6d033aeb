"""Attention while a model is exported: what ONNX Runtime's own operator takes, and scores of tables by distance as nodes."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...modeling.attention.backends import BACKENDS, Attention, Backend, Output, eager, score_bias
from ...modeling.masks import additive, allowed
from ...modeling.schemes.terms import RelativeTerm, gathered_products
from .graph import CONTRIB, OWN, PAIR_ROWS


# Of a kind of attention, in transformers' tables, while a model is exported.
IMPLEMENTATION = "hf_posenc_onnx"
# The score of what is not attended to.
LOWEST = torch.finfo(torch.float32).min


@contextmanager
def attention_for_onnx(model: nn.Module) -> Iterator[None]:
    """Within, what a model's attention computes is recorded in operators of ONNX Runtime."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend_without_terms)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask_of_tokens)
    BACKENDS[IMPLEMENTATION] = Backend(onnx, takes_values=True, takes_all=True)
    try:
        for config in configs.values():
            config._attn_implementation = IMPLEMENTATION
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
        for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            functions._global_mapping.pop(IMPLEMENTATION, None)
        del BACKENDS[IMPLEMENTATION]


def _mask_of_tokens(*, attention_mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor | None:
    """The mask of tokens, (batch, 1, 1, length)."""
    return None if attention_mask is None else attention_mask[:, None, None, :].bool()


def _attend_without_terms(module, query, key, value, attention_mask, scaling=None, **kwargs):
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return multi_head_attention(query, key, value, attention_mask, None, scaling), None


def onnx(attention: Attention) -> Output:
    """The backend: ONNX Runtime's operator, and what terms add as its bias. Value sides are written out."""
    query, key, mask = attention.query, attention.key, attention.mask
    tokens = mask.tensor
    if tokens is not None:
        tokens = allowed(tokens[:, :, :1])  # of pairs, as transformers makes it of tokens; additive in older ones
    products = functools.partial(_products, mask=tokens)
    if attention.has_values:
        return eager(attention, products)
    bias = score_bias(query, key, attention.terms, products)
    if mask.window is not None:
        # The operator takes a mask of tokens alone; one of pairs is a bias.
        unseen = additive(mask.window.within(tokens, mask.query_length, mask.key_length, mask.device), query.dtype)
        bias, tokens = unseen if bias is None else bias + unseen, None
    return multi_head_attention(attention.content_query, key, attention.value, tokens, bias, attention.scaling), None


def multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """ONNX Runtime's operator.

    Args:
        query, key, value: (batch, heads, length, head_dim).
        mask: (batch, 1, 1, length), True for what is attended to.
        bias: (batch or 1, heads or 1, length, length).

    Returns:
        (batch, length, heads, head_dim).
    """
    heads, width = query.shape[1], query.shape[3]
    states = [states.transpose(1, 2).flatten(2) for states in (query, key, value)]
    tokens = None if mask is None else mask[:, 0, 0].to(torch.int32)
    attributes = {"num_heads": heads, "scale": float(scaling), "mask_filter_value": LOWEST}
    output = torch.onnx.ops.symbolic(
        f"{CONTRIB}::MultiHeadAttention",
        [*states, None, tokens, bias],
        attributes,
        dtype=query.dtype,
        shape=states[0].shape,
        version=1,
    )
    return output.unflatten(2, (heads, width))


def _products(
    query: torch.Tensor, key: torch.Tensor, term: RelativeTerm, mask: torch.Tensor | None
) -> list[torch.Tensor]:
    """Products with a term's tables, each (batch, heads, length, length); of tables by distance in few nodes."""
    if term.rows.dim() != 1:
        return gathered_products(query, key, term)
    inputs = {}
    if term.query_table is not None:
        inputs["Query"] = term.biased_query(query), term.query_table
    if term.key_table is not None:
        inputs["Key"] = key, term.key_table
    tensors = [tensor.contiguous() for pair in inputs.values() for tensor in pair]
    shape = (*query.shape[:3], key.shape[2])
    # Inputs that are the same in all layers make the same rows in all layers.
    tokens = query[:, :1, :, :1].transpose(2, 3) if mask is None else mask
    like = [tokens, query.new_zeros(query.shape[1]), query.new_zeros(tensors[1].shape[-2])]
    symbolic = functools.partial(torch.onnx.ops.symbolic, shape=shape, version=1)
    pair_rows = symbolic(f"{OWN}::{PAIR_ROWS}", [term.rows, *like], dtype=torch.int32)
    name = f"{OWN}::{''.join(inputs)}Scores"
    return [symbolic(name, [term.rows, pair_rows, *tensors], dtype=query.dtype)]
