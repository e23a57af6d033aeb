"""DeBERTa's disentangled attention: content queries meet position keys, and position queries content keys."""

import math
from functools import partial

import torch
from torch import nn

from ..extras import EXTRAS
from ..torch_state import is_traced
from .base import AttentionContext, AttentionScheme
from .flags import NEWEST_TABLE, TABLE_VERSION, Boolean, Flag, Subset, buckets, form, init, max_distance
from .parameters import Initial, Normal, PositionLayerNorm, PositionLinear, PositionTable, ones, without_bias, zeros
from .positions import Positions, deberta_bucket
from .terms import RelativeTerm


class DistanceTable(PositionTable):
    """A table whose state dict says, in its metadata, how its rows are read.

    Files of tensors keep no metadata: what they hold is read as the model that it is loaded into reads its own.

    Attributes:
        table_version: how; see [`Deberta`].
        reached: the first and the last row that version 1 reads.
    """

    def __init__(self, rows: int, width: int, initial: Initial, version: int, reached: tuple[int, int]):
        super().__init__(rows, width, initial)
        self.table_version, self.reached = version, reached

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][TABLE_VERSION] = self.table_version

    def _load_from_state_dict(
        self, state_dict, prefix: str, local_metadata, strict, missing, unexpected, errors
    ) -> None:
        name, version = f"{prefix}weight", local_metadata.get(TABLE_VERSION, self.table_version)
        if name in state_dict and version < self.table_version:
            # Rows that were not read get what was read instead of them.
            rows = torch.arange(self.num_embeddings, device=state_dict[name].device).clamp(*self.reached)
            state_dict[name] = state_dict[name][rows]
        if name in state_dict and version > self.table_version:
            errors.append(
                f"{name} is of a model with {TABLE_VERSION}={version}, and this one, with {TABLE_VERSION}={self.table_version}, reads the "
                "rows of great distances in another way: load it into a model from the config that belongs to it"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)


class Deberta(AttentionScheme):
    """score(i, j) = (q_i·k_j + q_i·K[δ(i,j)] + k_j·Q[δ(i,j)] + Q[δ(i,j)]·K[δ(j,i)]) / √d, by default without the last term.

    The terms are c2p, p2c and p2p. K = W_k P and Q = W_q P per head, from a table P for all layers,
    `encoder.rel_embeddings.weight` (2·span, hidden); δ(i,j) = bucket(i - j) + span, clipped to the table, so distances are
    `query - key` here. span is `position_buckets`, or `position_max_distance` with 0 buckets (then bucket(r) = r). From
    `position_max_distance` on, keys on the right share row 0 and those on the left the last row.

    With buckets, 0.3.0 and earlier clamped distances to ±(`position_max_distance` - 1): row 0 was not read, and keys on the right
    shared row 1. Checkpoints of that time are still read so. Their configs lack `position_table_version`, which is 2 in new ones.

    - `position_share_projections`: W_q and W_k are the layer's own query and key projections, without their biases;
      otherwise `encoder.layer.N.attention.self.pos_query_proj` and `pos_key_proj`, with biases.
    - `position_norm`: LayerNorm over P first, `encoder.LayerNorm`.
    - Form `paper`: the whole sum over √(d·(1 + number of terms)), shared projections with their biases. That is what
      DeBERTa's checkpoints compute, and is not output-preserving.

    The paper writes p2c with δ(j,i); every released checkpoint and both public codes have δ(i,j).

    Source: He et al. 2021 (https://arxiv.org/abs/2006.03654); checked against `DebertaModel` and `DebertaV2Model` of
    transformers. p2p is the paper's formula, no public code runs it.
    """

    name = "deberta"
    flags = (
        init(),
        form("keep the content score of a checkpoint, or divide all scores by √(d·(1 + terms)) as published"),
        buckets(256, "number of logarithmic buckets in each direction; 0: none"),
        max_distance(512, "distances from this one on share the last row"),
        Flag("position_attention_types", Subset(("c2p", "p2c", "p2p"), needed=2), ("c2p", "p2c"), "which score terms"),
        Flag(
            "position_share_projections",
            Boolean(),
            True,
            "reuse the content projections (v2, v3), or learn separate ones (v1)",
        ),
        Flag("position_norm", Boolean(), False, "LayerNorm on the relative position embeddings (v2, v3)"),
    )
    formula = "(q_i·k_j + q_i·K[δ(i,j)] + k_j·Q[δ(i,j)])/√d, K = W_k P, Q = W_q P"
    paper = "He et al. 2021, arXiv:2006.03654"
    extrapolates = "yes: distances beyond max_distance share a row"
    table_has_versions = True
    # Of the options.
    attention_types: tuple[str, ...]
    buckets: int  # 0 and None: none
    form: str
    init: str
    max_distance: int
    norm: bool
    share_projections: bool

    def check(self, config) -> None:
        if self.buckets == 1:
            raise ValueError("position_buckets must be 0 (no buckets) or at least 2 for deberta, got 1")
        if self.buckets and self.max_distance - 1 <= self.buckets / 2:
            raise ValueError(
                f"position_max_distance must be greater than position_buckets / 2 + 1 = {self.buckets / 2 + 1:g} for "
                f"deberta, got {self.max_distance}"
            )
        others = [
            name
            for name, scheme in config.schemes.items()
            if name != self.name and issubclass(scheme, AttentionScheme) and scheme.scales_content()
        ]
        if self.form == "paper" and others:
            raise ValueError(
                f"position_form='paper' is for deberta or {others[0]}, not for both: each scales the content score"
            )

    def read(self, config) -> None:
        self.span = self.buckets or self.max_distance
        self.table_version = (config.position_table_version or NEWEST_TABLE) if self.buckets else None
        self.needs_key = "c2p" in self.attention_types or "p2p" in self.attention_types
        self.needs_query = "p2c" in self.attention_types or "p2p" in self.attention_types

    def starts_silent(self) -> bool:
        return super().starts_silent() and self.form == "checkpoint"

    def scaling(self, scaling: float) -> float:
        return scaling / math.sqrt(1 + len(self.attention_types)) if self.form == "paper" else scaling

    def add_encoder_parameters(self, encoder: nn.Module, config) -> None:
        normal = Normal(config.sizes.initializer_range)
        silent = self.init == "silent"
        # Exactly one factor of the product norm · table · projection starts at zero.
        table_is_zero = silent and self.share_projections and not self.norm
        encoder.rel_embeddings = self._table(config.sizes.hidden_size, zeros if table_is_zero else normal)
        if self.norm:
            initial = zeros if silent else ones
            encoder.LayerNorm = PositionLayerNorm(config.sizes.hidden_size, config.sizes.layer_norm_eps, initial)

    def _table(self, width: int, initial: Initial) -> PositionTable:
        if not self.buckets:
            return PositionTable(2 * self.span, width, initial)
        return DistanceTable(2 * self.span, width, initial, self.table_version, self.reached_rows())  # type: ignore[arg-type]

    def reached_rows(self) -> tuple[int, int]:
        """The first and the last row of a table with buckets that `position_table_version` 1 reads."""
        with torch.device("cpu"):  # not on the meta device, where from_pretrained builds models
            reach = int(deberta_bucket(torch.tensor(self.max_distance - 1), self.buckets, self.max_distance))
        return self.span - reach, self.span + reach

    def add_layer_parameters(self, attention: nn.Module, config) -> None:
        attention.pos_dropout = nn.Dropout(config.sizes.hidden_dropout_prob)
        if self.share_projections:
            return
        normal, sizes = (
            Normal(config.sizes.initializer_range),
            (config.sizes.hidden_size, attention.num_heads * attention.head_dim),
        )
        first = zeros if self.init == "silent" and not self.norm else normal
        # A projection that only p2p reads is multiplied by the other one, which is zero already.
        if self.needs_key:
            initial = first if "c2p" in self.attention_types else normal
            attention.pos_key_proj = PositionLinear(*sizes, initial)
        if self.needs_query:
            initial = first if "p2c" in self.attention_types else normal
            attention.pos_query_proj = PositionLinear(*sizes, initial)

    def prepare(self, positions: Positions, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """Rows of the table, and how far from its middle they reach."""
        distance = -positions.relative
        if self.table_version == 1:
            distance = distance.clamp(1 - self.max_distance, self.max_distance - 1)
        if self.buckets:
            distance = deberta_bucket(distance, self.buckets, self.max_distance)
        # p2p also needs δ(j,i), which tells span - 1 from what is beyond, while δ(i,j) does not: see `_rows_of_table`.
        last = 2 * self.span if "p2p" in self.attention_types else 2 * self.span - 1
        rows = (distance + self.span).clamp(0, last)
        # Looked at where that costs next to nothing.
        looks = positions.contiguous and rows.device.type == "cpu" and not is_traced()
        return rows, int((rows - self.span).abs().max()) if looks else self.span

    def _rows_of_table(
        self, attention: nn.Module, encoder: nn.Module, device: torch.device, reach: int
    ) -> torch.Tensor:
        """P with LayerNorm and dropout, of distances up to `reach` where that is less than span.

        (2·reach + 1, hidden), or the whole table, (2·span, hidden); for p2p its last row then stands twice. Row r belongs to
        the distance r - reach, clipped to ±span, and row 2·reach - r to its opposite.
        """
        start, stop = self.span - reach, min(self.span + reach + 1, 2 * self.span)
        table = encoder.rel_embeddings(torch.arange(start, stop, device=device))
        if self.norm:
            table = encoder.LayerNorm(table)
        table = attention.pos_dropout(table.to(device))
        return torch.cat([table, table[-1:]]) if "p2p" in self.attention_types and reach == self.span else table

    def _project(self, attention: nn.Module, shared: nn.Module, own: str, table: torch.Tensor) -> torch.Tensor:
        """A projection of the table's rows, (heads, rows, head_dim)."""
        if not self.share_projections:
            projected = getattr(attention, own)(table)
        elif self.form == "paper":
            projected = shared(table)
        else:
            projected = without_bias(shared, table)
        return projected.view(-1, attention.num_heads, attention.head_dim).transpose(0, 1)

    def terms(self, context: AttentionContext) -> list[RelativeTerm]:
        attention, encoder, (rows, reach) = context.attention, context.encoder, context.prepared
        modules = [encoder.rel_embeddings, attention.pos_dropout]
        if self.norm:
            modules.append(encoder.LayerNorm)
        if self.needs_key:
            modules.append(attention.key_projection if self.share_projections else attention.pos_key_proj)
        if self.needs_query:
            modules.append(attention.query_projection if self.share_projections else attention.pos_query_proj)
        project = partial(self._tables, attention, encoder, rows.device)
        # What is kept serves all lengths; what is not, only needs the rows that these distances reach.
        constants = (
            attention.scaling,
            attention.num_heads,
            self.span,
            tuple(self.attention_types),
            self.form,
            self.norm,
        )
        whole = EXTRAS.cached(attention, modules, (), constants, lambda: project(self.span), otherwise=lambda: None)
        query_table, key_table, bias = project(reach) if whole is None else whole
        rows = rows - (self.span - reach) if whole is None else rows
        return [RelativeTerm(rows, query_table=query_table, key_table=key_table, bias=bias)]

    def _tables(
        self, attention: nn.Module, encoder: nn.Module, device: torch.device, reach: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Of c2p and p2c, (heads, rows, head_dim), and of p2p, (heads, rows); None for a term that is not chosen."""
        table = self._rows_of_table(attention, encoder, device, reach)
        key = self._project(attention, attention.key_projection, "pos_key_proj", table) if self.needs_key else None
        query = (
            self._project(attention, attention.query_projection, "pos_query_proj", table) if self.needs_query else None
        )
        scaling, types = attention.scaling, self.attention_types
        return (
            key * scaling if "c2p" in types else None,
            query * scaling if "p2c" in types else None,
            (query * key.flip(1)).sum(-1) * scaling if "p2p" in types else None,  # type: ignore[union-attr]
        )
