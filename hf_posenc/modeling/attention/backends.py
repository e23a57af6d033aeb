"""Self-attention: what a backend is given, the table of backends, and which of them computes.

A backend is a function from an [`Attention`] to the output, (batch, query, heads, head_dim), and the weights or None. Here are
those that compute with whole matrices; `modeling.kernels` adds faster ones where hf_posenc is imported.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from ..extras import EXTRAS
from ..masks import Mask, allowed
from ..schemes.terms import Term, gathered_products
from ..torch_state import is_transformed, may_carry_tangents


logger = logging.get_logger(__name__)


@dataclass
class Attention:
    """softmax(scaling · content_query · key + terms) · value, and what value-side terms add: the computation of a backend.

    Attributes:
        module: the self-attention.
        implementation: the attention function that the config names.
        content_query, query: (batch, heads, query, head_dim), of the content score and of the terms.
        key, value: (batch, heads, key, head_dim).
        terms: score terms, and terms with a value side.
        dropout: probability with which a weight is dropped.
        in_blocks: whether blockwise attention may be chosen.
        eager: transformers' eager attention function for the module; None where every backend takes it without terms.
        settings: further keyword arguments of transformers' attention functions.
    """

    module: nn.Module
    implementation: str
    content_query: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    terms: list[Term]
    mask: Mask
    scaling: float
    dropout: float = 0.0
    in_blocks: bool = True
    eager: Callable | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def terms_by_distance(self) -> list[Term]:
        """The terms with as few rows in their tables as they need."""
        return self.terms if EXTRAS.reads_through_views(self.query) else [term.by_distance() for term in self.terms]

    @property
    def has_values(self) -> bool:
        """Whether a term has a value side."""
        return any(term.value_table is not None for term in self.terms)

    def bias(self) -> torch.Tensor | None:
        """What the terms add to the content scores, (batch or 1, heads or 1, query, key)."""
        return score_bias(self.query, self.key, self.terms_by_distance())


Output = tuple[torch.Tensor, torch.Tensor | None]


def score_bias(
    query: torch.Tensor, key: torch.Tensor, terms: list[Term], products: Callable | None = None
) -> torch.Tensor | None:
    """What score terms add to the content score, (batch or 1, heads or 1, query, key), or None.

    Args:
        query: (batch, heads, query, head_dim).
        key: (batch, heads, key, head_dim).
        products: of these with tables; see [`gathered_products`].
    """
    total = None
    for term in terms:
        for part in term.scores(query, key, products or EXTRAS.products or gathered_products):
            total = part if total is None else total + part
    return total


def value_side(weights: torch.Tensor, term: Term) -> torch.Tensor:
    """Σ_j weights_ij · value_table[rows_ij]: (batch, heads, query, key) -> (batch, heads, query, head_dim)."""
    rows = term.rows_of_pairs(*weights.shape[-2:]).to(weights.device)[:, None].expand(weights.shape)
    table = term.value_table.to(weights.device)
    # In half precision, the weights of a long text would be lost one by one in a sum that is large already.
    precise = weights.to(torch.promote_types(weights.dtype, torch.float32))
    by_row = precise.new_zeros(*weights.shape[:-1], table.shape[0]).scatter_add(-1, rows, precise)
    return by_row.to(weights.dtype) @ table


def with_mask(query: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Terms and mask as one additive mask for a kernel, and the query that goes with it.

    Where everything is masked, both are zero: each key gets the same weight and no score a gradient, as in eager. The lowest
    number everywhere would do that forward; but kernels keep the logarithm of a sum of exponentials for their backward
    pass, which that number swallows, and then take each weight for 1.

    Args:
        query: (batch, heads, query, head_dim).
        bias: (batch or 1, heads or 1, query, key).
        mask: boolean or additive, (batch or 1, heads or 1, query or 1, key), or None.
    """
    if mask is None:
        return query, bias
    attended = allowed(mask)
    if mask.dtype != torch.bool:
        bias = bias + mask.to(bias.dtype)
    nowhere = ~attended.any(-1, keepdim=True)
    bias = torch.where(attended, bias, torch.finfo(bias.dtype).min).masked_fill(nowhere, 0.0)
    return query.masked_fill(nowhere, 0.0), bias


def sdpa(attention: Attention, attend: Callable = nn.functional.scaled_dot_product_attention) -> Output:
    """PyTorch's kernel, given whole matrices of what is added to the content score."""
    query, mask, bias = attention.content_query, attention.mask.dense(), attention.bias()
    if bias is None and mask is not None:
        bias = query.new_zeros(1, 1, 1, 1)
    if bias is not None:
        query, bias = with_mask(query, bias.to(attention.key.dtype), mask)
    settings = {"attn_mask": bias, "dropout_p": attention.dropout, "scale": attention.scaling}
    return attend(query, attention.key, attention.value, **settings).transpose(1, 2).contiguous(), None


def written_out(attention: Attention) -> Output:
    """As PyTorch's kernel computes it, in single steps, which inductor fuses, and forward-mode AD and `torch.func` go through."""
    return sdpa(attention, _in_steps)


def _in_steps(query, key, value, attn_mask: torch.Tensor | None, dropout_p: float, scale: float) -> torch.Tensor:
    scores = query @ key.transpose(-1, -2) * scale
    if attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return nn.functional.dropout(weights, dropout_p) @ value


def eager(attention: Attention, products: Callable | None = None) -> Output:
    """Written out, with the weights, (batch, heads, query, key); transformers' eager function knows no terms.

    Masked scores are overwritten after the terms are added: summed, they overflow in float16.

    Args:
        products: see [`score_bias`].
    """
    scores = attention.content_query @ attention.key.transpose(2, 3) * attention.scaling
    terms = attention.terms_by_distance()
    bias = score_bias(attention.query, attention.key, terms, products)
    if bias is not None:
        scores = scores + bias
    mask = attention.mask.dense()
    if mask is not None:
        if mask.dtype != torch.bool:
            scores = scores + mask.to(scores.dtype)
        scores = scores.masked_fill(~allowed(mask), torch.finfo(scores.dtype).min)
    weights = nn.functional.softmax(scores, dim=-1)
    weights = nn.functional.dropout(weights, p=attention.dropout)
    output = weights @ attention.value
    for term in terms:
        if term.value_table is not None:
            output = output + value_side(weights, term)
    return output.transpose(1, 2).contiguous(), weights


def of_transformers(attention: Attention) -> Output:
    """transformers' own attention function, which knows no terms."""
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention.implementation, attention.eager)
    mask = attention.mask.for_transformers(attention.implementation, attention.content_query.dtype)
    settings = {"dropout": attention.dropout, "scaling": attention.scaling, **attention.settings}
    return attend(attention.module, attention.content_query, attention.key, attention.value, mask, **settings)


@dataclass(frozen=True)
class Backend:
    """A line of the table.

    Attributes:
        compute: the backend.
        takes_values: it computes value sides of terms too.
        takes_all: it stands for transformers' attention functions too, where there are no terms.
    """

    compute: Callable[[Attention], Output]
    takes_values: bool = False
    takes_all: bool = False


# By the name of an attention function of transformers, and of those that stand for one of them where they are faster.
BACKENDS: dict[str, Backend] = {
    "transformers": Backend(of_transformers),
    "eager": Backend(eager, takes_values=True),
    "sdpa": Backend(sdpa),
    "written out": Backend(written_out),
}


def takes_all(name: str) -> bool:
    """Whether an attention function, by its name, stands for transformers' own where there are no terms."""
    return name in BACKENDS and BACKENDS[name].takes_all


def backend_of(attention: Attention) -> str:
    """The name of the backend that computes an attention."""
    if attention.mask.packing is not None:
        return EXTRAS.backend_of_packed(attention)
    name = attention.implementation
    if name == "sdpa" and (is_transformed() or may_carry_tangents()):
        # PyTorch's fused kernels have no forward derivatives, and under `torch.func` none of a mask.
        return "eager" if attention.has_values else "written out"
    if name == "sdpa" and (faster := EXTRAS.faster_than_sdpa(attention)) is not None:
        return faster
    if not attention.terms and attention.eager is not None and not takes_all(name):
        return "transformers"
    if attention.has_values and not BACKENDS[name].takes_values:
        if not torch.compiler.is_compiling():
            logger.warning_once(
                f"{name} has no value-side position term here; this self-attention is computed by eager."
            )
        return "eager"
    return name


def attend(attention: Attention) -> Output:
    """The output of a self-attention, (batch, query, heads, head_dim), and its weights where the backend has them."""
    return BACKENDS[backend_of(attention)].compute(attention)
