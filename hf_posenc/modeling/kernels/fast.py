"""The backends that hf_posenc adds to the table where it is imported, and which of them computes. See [`Extras`]."""

from dataclasses import dataclass

import torch

from ..attention.backends import BACKENDS, Attention, Backend, Output
from ..extras import EXTRAS
from ..schemes.terms import RelativeTerm, gathered_products
from ..torch_state import is_exporting, is_traced, may_carry_tangents
from .blocks import aligned
from .blockwise import blockwise_attention
from .caching import cached, caches_on
from .distance_products import RelativeShift, Table, reversed_rows
from .flex import flex_attention
from .packed_attention import backend_of_packed, groups, varlen
from .packing import computes_padding_that_is_read, packing_of


# Scores of a sequence below which whole matrices are faster than blocks (about 50 tokens and 12 heads), and scores of a batch up
# to which they are where they are read through views (128 tokens and 12 heads).
FEWEST_SCORES, FEWEST_SCORES_WITH_VIEWS = 1 << 15, 3 << 16


def reads_through_views(query: torch.Tensor) -> bool:
    """Whether products with vectors per distance are read per pair through views, which have no gradient, and not gathered."""
    return query.device.type == "cpu" and not (torch.is_grad_enabled() or is_traced() or may_carry_tangents())


def products(query: torch.Tensor, key: torch.Tensor, term: RelativeTerm) -> list[torch.Tensor]:
    """Products of queries and keys with a term's tables, each (batch, heads, query, key): views, or gathered.

    Args:
        query: (batch, heads, query, head_dim).
        key: (batch, heads, key, head_dim).
    """
    if term.rows.dim() != 1 or term.bias is not None or key.shape[2] == 0 or not reads_through_views(query):
        return gathered_products(query, key, term)
    parts = []
    if term.query_table is not None:
        vectors = Table([(term.query_table, term.rows)], query.shape[1], 0)
        parts.append(_products_by_pair(term.biased_query(query), vectors, key.shape[2]))
    if term.key_table is not None:
        # The roles are exchanged, and distances counted from the other end.
        vectors = Table([(term.key_table, reversed_rows(term.rows))], query.shape[1], 0)
        parts.append(_products_by_pair(key, vectors, query.shape[2]).mT)
    return parts


def _products_by_pair(states: torch.Tensor, vectors: Table, columns: int) -> torch.Tensor:
    """state_i · vector of the distance j - i: (batch, heads, rows, head_dim) -> (batch, heads, rows, columns), a view."""
    rows = states.shape[2]
    by_distance = states @ vectors.columns(slice(0, states.shape[1]))[..., : aligned(rows + columns - 1)]
    return RelativeShift(by_distance, rows, columns).by_pair


@dataclass(frozen=True)
class Circumstances:
    """What the choice of a backend depends on.

    Attributes:
        batch, scores: sequences, and scores of one of them in all heads.
        on_cpu, is_traced, is_compiled: where and how it runs; exports are traced and not compiled.
        views: see [`reads_through_views`].
        fits_blocks: blocks can compute it, and are not ruled out by the caller.
        has_values: a term has a value side.
        has_products_alone: all terms with tables are products, without a bias by distance.
        is_for_each_head: what is added to the scores differs between all sequences and heads.
        is_plain: float32, every query attends to every key, no dropout.
    """

    batch: int
    scores: int
    on_cpu: bool
    is_traced: bool
    is_compiled: bool
    views: bool
    fits_blocks: bool
    has_values: bool
    has_products_alone: bool
    is_for_each_head: bool
    is_plain: bool

    @classmethod
    def of(cls, attention: Attention) -> "Circumstances":
        (batch, heads, queries, _), keys = attention.query.shape, attention.key.shape[2]
        terms, mask = attention.terms, attention.mask
        tables = [term for term in terms if term.rows is not None]
        mask_learns = (given := mask.tensor) is not None and given.requires_grad
        return cls(
            batch=batch,
            scores=heads * queries * keys,
            on_cpu=attention.query.device.type == "cpu",
            is_traced=is_traced(),
            is_compiled=is_compiled(),
            views=reads_through_views(attention.query),
            fits_blocks=attention.in_blocks
            and not mask_learns
            and keys > 0
            and all(term.suits_blocks for term in terms),
            has_values=attention.has_values,
            has_products_alone=bool(tables) and all(term.bias is None for term in tables),
            is_for_each_head=any(term.is_for_each_head(batch, heads) for term in terms),
            is_plain=attention.query.dtype == attention.key.dtype == torch.float32
            and mask.is_everything
            and not attention.dropout
            and not torch.is_autocast_enabled("cpu"),
        )


def choose(given: Circumstances) -> str | None:
    """The backend that is faster than PyTorch's kernel with whole matrices, or the only one; None if there is none."""
    if not given.on_cpu:
        return None
    if given.is_traced:
        # inductor makes one loop of it and of what the bias is gathered from; a kernel would need the whole bias first.
        is_joined = given.is_compiled and given.is_for_each_head and not given.has_values
        return "written out" if is_joined else None
    if given.fits_blocks:
        if given.views and given.has_products_alone:
            in_blocks = given.batch * given.scores > FEWEST_SCORES_WITH_VIEWS
        else:
            in_blocks = given.scores >= FEWEST_SCORES
        # Whole matrices of weights would have to come from another function.
        if in_blocks or given.has_values:
            return "blocks"
    return "views" if given.views and given.is_plain and given.is_for_each_head and not given.has_values else None


def faster_than_sdpa(attention: Attention) -> str | None:
    """The name of the backend that computes an attention faster than "sdpa"; without terms and window none does."""
    if not attention.terms and attention.mask.window is None:
        return None
    return choose(Circumstances.of(attention))


def blocks(attention: Attention) -> Output:
    """[`blockwise_attention`]."""
    mask = attention.mask
    return blockwise_attention(
        attention.content_query,
        attention.query,
        attention.key,
        attention.value,
        attention.terms,
        None if mask.is_causal else mask.without_window().dense(),
        attention.scaling,
        attention.dropout,
        mask.is_causal,
        mask.window,
    ), None


def views(attention: Attention) -> Output:
    """Written out, with a bias that is read through views, and neither mask nor dropout."""
    states = attention.content_query, attention.key, attention.value, attention.bias().to(torch.float32)
    query, key, value, bias = (tensor.flatten(0, 1) for tensor in states)
    weights = torch.baddbmm(bias, query, key.mT, alpha=attention.scaling).softmax(-1)
    output = torch.bmm(weights, value).unflatten(0, attention.query.shape[:2])
    return output.transpose(1, 2).contiguous(), None


def is_compiled() -> bool:
    """Whether this is traced for `torch.compile`, and not for an export."""
    return torch.compiler.is_compiling() and not is_exporting()


def split_heads(projected: torch.Tensor, heads: int) -> torch.Tensor:
    """(..., length, heads · head_dim) -> (..., heads, length, head_dim)."""
    # `unflatten` would have TorchScript's exporter to ONNX write the length of its example down for all.
    return projected.view(*projected.shape[:-1], heads, -1).transpose(-2, -3)


BACKENDS |= {
    "blocks": Backend(blocks, takes_values=True),
    "views": Backend(views),
    "flex_attention": Backend(flex_attention),
    "groups": Backend(groups, takes_values=True),
    "varlen": Backend(varlen),
}
EXTRAS.cached, EXTRAS.caches_on = cached, caches_on
EXTRAS.reads_through_views, EXTRAS.products = reads_through_views, products
EXTRAS.faster_than_sdpa, EXTRAS.backend_of_packed = faster_than_sdpa, backend_of_packed
EXTRAS.packing_of, EXTRAS.computes_padding_that_is_read = packing_of, computes_padding_that_is_read
