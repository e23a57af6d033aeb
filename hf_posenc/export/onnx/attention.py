"""Attention while a model is exported: what ONNX Runtime's own operator takes, and scores of tables by distance as nodes."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...integrations.stock_attention import deberta, mpnet
from ...integrations.stock_attention.attention import TokenMask
from ...modeling.attention.backends import eager_position_attention, score_bias
from ...modeling.attention.window import windowed
from ...modeling.models.self_attention import PositionSelfAttention
from ...modeling.schemes.positions import allowed
from ...modeling.schemes.terms import RelativeTerm, Term
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
    replaced = [
        (PositionSelfAttention, "_attend", _attend_with_terms),
        (deberta, "self_attend", _self_attend),
        (mpnet, "self_attend", _self_attend),
    ]
    originals = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    is_hooked = type(model.base_model).__name__ in ("DebertaModel", "DebertaV2Model", "MPNetModel")
    try:
        for config in configs.values():
            config._attn_implementation = "sdpa" if is_hooked else IMPLEMENTATION
        for place, name, function in replaced:
            setattr(place, name, function)
        yield
    finally:
        for place, name, function in originals:
            setattr(place, name, function)
        for key, config in configs.items():
            config._attn_implementation = before[key]
        for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            functions._global_mapping.pop(IMPLEMENTATION, None)


def _mask_of_tokens(*, attention_mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor | None:
    """The mask of tokens, (batch, 1, 1, length)."""
    return None if attention_mask is None else attention_mask[:, None, None, :].bool()


def _attend_without_terms(module, query, key, value, attention_mask, scaling=None, **kwargs):
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return multi_head_attention(query, key, value, attention_mask, None, scaling), None


def _attend_with_terms(self, content_query, key, value, attention_mask, query, terms, window, kwargs):
    """`PositionSelfAttention._attend`."""
    values = tuple(term for term in terms if isinstance(term, RelativeTerm) and term.value_table is not None)
    bias = _score_bias(query, key, terms, attention_mask)
    if window is not None:
        attention_mask = windowed(attention_mask, window, query.shape[2], key.shape[2], query.device)
    if values:
        settings = {"position_bias": bias, "value_terms": values}
        return eager_position_attention(self, content_query, key, value, attention_mask, self.scaling, **settings)
    if window is not None:
        # The operator takes a mask of tokens alone; one of pairs is a bias.
        unseen = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, LOWEST)
        bias, attention_mask = unseen if bias is None else bias + unseen, None
    return multi_head_attention(content_query, key, value, attention_mask, bias, self.scaling), None


def _self_attend(implementation, module, query, key, value, terms, mask, scaling, dropout):
    """[`self_attend`] of stock DeBERTa and MPNet."""
    words = None
    if isinstance(mask, TokenMask):
        words = mask.given.bool()
        mask = words[:, None, None, :]
    if isinstance(mask, torch.Tensor):
        mask = allowed(mask[:, :, :1])  # of pairs, as transformers makes it of tokens; additive in older ones
    output = multi_head_attention(query, key, value, mask, _score_bias(query, key, terms, mask), scaling)
    return (output if words is None else _with_padding(output, value, words)).flatten(2)


def _with_padding(output: torch.Tensor, value: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """DeBERTa's padding attends to nothing: every key has the same weight. Heads read it where it stands on the left."""
    return torch.where(words[..., None, None], output, value.mean(2)[:, None])


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


def _score_bias(
    query: torch.Tensor, key: torch.Tensor, terms: list[Term], mask: torch.Tensor | None
) -> torch.Tensor | None:
    """[`score_bias`], with tables by distance in few nodes."""
    parts, others = [], []
    for term in terms:
        if not isinstance(term, RelativeTerm) or term.rows.dim() != 1:
            others.append(term)
            continue
        parts += _scores(query, key, term, mask)
        if term.bias is not None:
            others.append(RelativeTerm(term.rows, bias=term.bias))
    rest = score_bias(query, key, others)
    parts += [] if rest is None else [rest]
    return functools.reduce(torch.add, parts) if parts else None


def _scores(
    query: torch.Tensor, key: torch.Tensor, term: RelativeTerm, mask: torch.Tensor | None
) -> list[torch.Tensor]:
    """Products with a term's tables, (batch, heads, length, length)."""
    inputs = {}
    if term.query_table is not None:
        inputs["Query"] = term.biased_query(query), term.query_table
    if term.key_table is not None:
        inputs["Key"] = key, term.key_table
    if not inputs:
        return []
    tensors = [tensor.contiguous() for pair in inputs.values() for tensor in pair]
    shape = (*query.shape[:3], key.shape[2])
    # Inputs that are the same in all layers make the same rows in all layers.
    tokens = query[:, :1, :, :1].transpose(2, 3) if mask is None else mask
    like = [tokens, query.new_zeros(query.shape[1]), query.new_zeros(tensors[1].shape[-2])]
    symbolic = functools.partial(torch.onnx.ops.symbolic, shape=shape, version=1)
    pair_rows = symbolic(f"{OWN}::{PAIR_ROWS}", [term.rows, *like], dtype=torch.int32)
    name = f"{OWN}::{''.join(inputs)}Scores"
    return [symbolic(name, [term.rows, pair_rows, *tensors], dtype=query.dtype)]
