"""DeBERTa v1, v2 and v3 as transformers has them, without matrices of pairs.

transformers' encoder makes three things for all layers: a mask of pairs, a matrix of relative positions, and the table of
relative positions. Here it makes a mask of tokens and the rows of the table *per distance* instead, and each layer's
self-attention, given these, computes what Transformers computes. Everything else is Transformers' own code.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from transformers import DebertaPreTrainedModel, DebertaV2PreTrainedModel
from transformers.models.deberta import modeling_deberta as v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2

from ...modeling.kernels.caching import Products, cached, caches_on, is_plain, vectors_of
from ...modeling.kernels.constants import declare_constant
from ...modeling.kernels.fast import split_heads
from ...modeling.masks import as_pairs
from ...modeling.schemes.terms import RelativeTerm, expand_to_pairs, relative_distances
from ...modeling.stock_interface import Receives
from ...modeling.torch_state import is_traced
from ..changes import Changes, hook_method
from ..unpadding import current_packing, note_hooked
from .attention import computes, mask_of_tokens, self_attend


MODELS = (DebertaPreTrainedModel, DebertaV2PreTrainedModel)
ENCODERS = (v1.DebertaEncoder, v2.DebertaV2Encoder)
SELF_ATTENTIONS = (v1.DisentangledSelfAttention, v2.DisentangledSelfAttention)
# So many rows of the table, and tokens with further rows added, are multiplied with a matrix in little more time than
# reading the matrix takes.
FEW_ROWS, FEW_TOKENS = 64, 96


class RelativeRows(NamedTuple):
    """Relative positions of a forward pass, in place of Transformers' matrix of them.

    Attributes:
        implementation: the backend, as the config had it.
        relative: int64 (2 · length - 1,), Transformers' buckets of query - key, in the order of [`relative_distances`].
        rows: of the same shape, their rows of the table.
        start, stop: the part of the table that they are in.
    """

    implementation: str
    relative: torch.Tensor | None
    rows: torch.Tensor | None
    start: int
    stop: int


def rows_of_table(
    length: int, span: int, buckets: int, max_distance: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transformers' buckets of query - key per distance, and their rows: clamp(bucket + span, 0, 2 · span - 1).

    Args:
        buckets: -1 or 0 for none.
    """
    relative = -relative_distances(length, length, 0, device)
    if buckets > 0 and max_distance > 0:
        relative = v2.make_log_bucket_position(relative, buckets, max_distance).long()
    return relative, (relative + span).clamp(0, 2 * span - 1)


@functools.lru_cache(maxsize=64)
def _reached(length: int, span: int, buckets: int, max_distance: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """[`rows_of_table`] on CPUs, kept; and the first row that is reached, and the one after the last."""
    with torch.inference_mode(False):  # they may be used in training later
        relative, rows = rows_of_table(length, span, buckets, max_distance, torch.device("cpu"))
        declare_constant(rows)
        start, stop = int(rows.min()), int(rows.max()) + 1
        return relative, rows, start, stop


def _config(encoder: nn.Module):
    """The config of an encoder; None where somebody has replaced its attention."""
    attention = getattr(encoder.layer[0], "attention", None) if len(encoder.layer) else None
    if not isinstance(getattr(attention, "self", None), SELF_ATTENTIONS):
        return None
    return attention.config


def configs(module: nn.Module) -> list:
    """The configs of all encoders in a module."""
    found = [_config(encoder) for encoder in module.modules() if isinstance(encoder, ENCODERS)]
    return [config for config in found if config is not None]


def _implementation(encoder: nn.Module) -> str | None:
    """The backend that an encoder's config names, None for eager; packed states are computed by "sdpa" in place of eager."""
    config = _config(encoder)
    if config is None:
        return None
    if not computes(config._attn_implementation):
        return None if current_packing() is None else "sdpa"
    refuse_options(config)
    return config._attn_implementation


def refuse_options(config) -> None:
    """Raise ValueError for what a config has that only eager attention computes."""
    if config.model_type == "deberta" and getattr(config, "talking_head", False):
        raise ValueError(
            "talking_head=True mixes attention weights across heads, which only attn_implementation='eager' computes"
        )


def refuse_model(model: nn.Module) -> None:
    """Raise ValueError for a model in which only eager attention is right."""
    if any(getattr(module, "z_steps", 0) > 1 for module in model.modules()):
        raise ValueError("z_steps > 1 (layers that repeat with other queries) is only for attn_implementation='eager'")


def _mask(original: Callable, encoder: nn.Module, attention_mask: torch.Tensor):
    """`get_attention_mask`."""
    if _implementation(encoder) is None:
        return original(attention_mask)
    if attention_mask.dim() == 2:
        return mask_of_tokens(attention_mask)
    return original(attention_mask).bool()


def _distances(original: Callable, encoder: nn.Module, hidden_states, query_states=None, relative_pos=None):
    """`get_rel_pos`."""
    implementation = _implementation(encoder)
    if implementation is None or query_states is not None or relative_pos is not None:
        return original(hidden_states, query_states, relative_pos)
    if not encoder.relative_attention:
        return RelativeRows(implementation, None, None, 0, 0)
    buckets = getattr(encoder, "position_buckets", -1)
    max_distance = encoder.max_relative_positions
    span = buckets if buckets > 0 else max_distance
    packing, device = current_packing(), hidden_states.device
    length = hidden_states.shape[1] if packing is None else packing.shape[1]
    if is_traced():
        relative, rows = rows_of_table(length, span, buckets, max_distance, device)
        return RelativeRows(implementation, relative, rows, 0, 2 * span)
    relative, rows, start, stop = _reached(length, span, buckets, max_distance)
    return RelativeRows(implementation, relative.to(device), rows.to(device), start, stop)


def _table(original: Callable, encoder: nn.Module) -> torch.Tensor | None:
    """`get_rel_embedding`, which normalises the same table again in every forward pass."""
    # Without relative attention there may be a norm and is no table.
    is_normed = encoder.relative_attention and isinstance(getattr(encoder, "LayerNorm", None), nn.LayerNorm)
    if not is_normed or _implementation(encoder) is None:
        return original()
    return cached(encoder, [encoder.rel_embeddings, encoder.LayerNorm], (), tuple(encoder.norm_rel_ebd), original)


def _forward(
    projections: Callable, receives: Receives, original: Callable, attention: nn.Module, hidden_states, *args, **kwargs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`DisentangledSelfAttention.forward`.

    Args:
        projections: of the version, see [`_project_v1`].
        receives: how Transformers' is called. Its relative positions are [`RelativeRows`] where a backend is named.
    """
    given = {**dict(zip(receives.names[1:], args)), **kwargs}
    distances, mask = given.get("relative_pos"), given.get(receives.mask)
    if (
        not isinstance(distances, RelativeRows)
        or given.get("output_attentions")
        or given.get("query_states") is not None
    ):
        return original(
            hidden_states, **{**given, **_as_stock_takes_them(receives, mask, distances, hidden_states.shape[1])}
        )
    query, key, value, scaling, terms = projections(attention, hidden_states, distances, given.get("rel_embeddings"))
    dropout = attention.dropout.p if attention.training else 0.0
    return self_attend(distances.implementation, attention, query, key, value, terms, mask, scaling, dropout), None


def _as_stock_takes_them(receives: Receives, mask, distances, length: int) -> dict:
    """Mask and relative positions of pairs, of a backend's own."""
    if isinstance(distances, RelativeRows):
        distances = None if distances.relative is None else expand_to_pairs(distances.relative, length, length)[None]
    return {receives.mask: as_pairs(mask), "relative_pos": distances}


def _project_v1(
    attention: nn.Module, hidden_states: torch.Tensor, distances: RelativeRows, table: torch.Tensor | None
):
    """Query, key and value, (batch, heads, length, head_dim), the scale of their product, and the position terms."""
    heads = attention.num_attention_heads
    query, key, value = split_heads(attention.in_proj(hidden_states), heads).chunk(3, dim=-1)
    query = query + split_heads(attention.q_bias[None, None], heads)
    value = value + split_heads(attention.v_bias[None, None], heads)
    scaling = 1 / math.sqrt(query.shape[-1] * (1 + len(attention.pos_att_type)))
    key_projection = attention.pos_proj if hasattr(attention, "pos_proj") else None
    query_projection = attention.pos_q_proj if hasattr(attention, "pos_q_proj") else None
    terms = _terms(attention, distances, table, key_projection, query_projection, scaling)
    return query, key, value, scaling, terms


def _project_v2(
    attention: nn.Module, hidden_states: torch.Tensor, distances: RelativeRows, table: torch.Tensor | None
):
    """Query, key and value, (batch, heads, length, head_dim), the scale of their product, and the position terms, of v2 and v3."""
    heads, types = attention.num_attention_heads, attention.pos_att_type
    scaling = 1 / math.sqrt(attention.attention_head_size * (1 + ("c2p" in types) + ("p2c" in types)))
    if _projects_jointly(attention, distances, table):
        return _project_jointly(attention, hidden_states, distances, table, scaling)
    query, key, products = _project_with_vectors(attention, hidden_states)
    query, key, value = (split_heads(states, heads) for states in (query, key, attention.value_proj(hidden_states)))
    key_projection = query_projection = None
    if attention.relative_attention:  # without, the types still count for the scale
        own = "" if attention.share_att_key else "pos_"
        key_projection = getattr(attention, f"{own}key_proj") if "c2p" in types else None
        query_projection = getattr(attention, f"{own}query_proj") if "p2c" in types else None
    terms = _terms(attention, distances, table, key_projection, query_projection, scaling, products)
    return query, key, value, scaling, terms


def _project_with_vectors(
    attention: nn.Module, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Products]:
    """Queries and keys, (batch, length, hidden_size), and products that tell whether what was projected before still holds."""
    projections = attention.query_proj, attention.key_proj
    vectors = None
    # A number of tokens that is looked at while it is traced would be fixed.
    if attention.share_att_key and not is_traced() and hidden_states.shape[:2].numel() <= FEW_TOKENS:
        vectors = vectors_of(attention, projections)
    if vectors is None:
        return *(projection(hidden_states) for projection in projections), {}
    count = hidden_states.shape[:2].numel()
    joint = torch.cat([hidden_states.flatten(0, 1), *vectors])
    outputs = [projection(joint) for projection in projections]
    products = {
        id(projection.weight): (len(joint), output[count + index])
        for index, (projection, output) in enumerate(zip(projections, outputs))
    }
    return *(output[:count].unflatten(0, hidden_states.shape[:2]) for output in outputs), products


def _projects_jointly(attention: nn.Module, distances: RelativeRows, table: torch.Tensor | None) -> bool:
    """Whether hidden states and rows of the table make one product with each matrix, where nothing is kept: a short text takes
    as long as reading the matrix does."""
    return (
        not is_traced()  # splitting by a number of tokens would fix it
        and attention.share_att_key
        and not (table is not None and caches_on(table.device))
        and bool(attention.pos_att_type)
        and table is not None
        and distances.rows is not None
        and distances.stop - distances.start <= FEW_ROWS
        and all(is_plain(module) for module in (attention.query_proj, attention.key_proj, attention.pos_dropout))
    )


def _project_jointly(
    attention: nn.Module, hidden_states: torch.Tensor, distances: RelativeRows, table: torch.Tensor, scaling: float
):
    """What [`_project_v2`] returns, with two products less."""
    heads, types, tokens = attention.num_attention_heads, attention.pos_att_type, hidden_states.shape[:2]
    joint = torch.cat([hidden_states.flatten(0, 1), table[distances.start : distances.stop]])
    query, query_rows = attention.query_proj(joint).tensor_split([tokens.numel()])
    key, key_rows = attention.key_proj(joint).tensor_split([tokens.numel()])
    term = RelativeTerm(distances.rows - distances.start)
    if "c2p" in types:
        term.query_table = split_heads(key_rows, heads) * scaling
    if "p2c" in types:
        term.key_table = split_heads(query_rows, heads) * scaling
    projected = query.unflatten(0, tokens), key.unflatten(0, tokens), attention.value_proj(hidden_states)
    return *(split_heads(states, heads) for states in projected), scaling, [term]


def _terms(
    attention: nn.Module,
    distances: RelativeRows,
    table: torch.Tensor | None,
    key_projection: nn.Module | None,
    query_projection: nn.Module | None,
    scaling: float,
    products: Products | None = None,
) -> list[RelativeTerm]:
    """c2p and p2c with the rows of the table that the distances reach."""
    projections = [module for module in (key_projection, query_projection) if module is not None]
    if distances.rows is None or table is None or not projections:
        return []

    def project(rows: torch.Tensor) -> list[torch.Tensor]:
        rows = attention.pos_dropout(rows)
        # As a batch of one: with an adapter for each sequence, PEFT would take rows for sequences, and refuses this, as in eager.
        projected = (module(rows[None])[0] for module in projections)
        return [split_heads(rows, attention.num_attention_heads) * scaling for rows in projected]

    # What is kept serves all lengths; what is not, only needs the rows that this length reaches.
    constants = scaling, attention.num_attention_heads
    rows, modules = distances.rows, [attention.pos_dropout, *projections]
    tables = cached(
        attention, modules, (table,), constants, lambda: project(table), otherwise=lambda: None, products=products
    )
    if tables is None:
        tables, rows = project(table[distances.start : distances.stop]), rows - distances.start
    tables = list(tables)
    key_table = tables.pop() if query_projection is not None else None
    return [RelativeTerm(rows, query_table=tables.pop() if tables else None, key_table=key_table)]


def install(changes: Changes) -> None:
    """Hook encoders and self-attentions."""
    for encoder in ENCODERS:
        hook_method(changes, encoder, "get_attention_mask", _mask)
        hook_method(changes, encoder, "get_rel_pos", _distances)
        hook_method(changes, encoder, "get_rel_embedding", _table)
    for attention, projections in zip(SELF_ATTENTIONS, (_project_v1, _project_v2)):
        receives = Receives.of(attention.forward)
        hook_method(changes, attention, "forward", functools.partial(_forward, projections, receives))
        note_hooked(changes, attention)
