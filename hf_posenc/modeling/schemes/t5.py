"""T5's learned bias per head and logarithmic bucket of the distance."""

from typing import Any

import torch
from torch import nn

from .base import AttentionContext, AttentionScheme
from .flags import Boolean, Flag, buckets, init, max_distance
from .parameters import Normal, PositionTable, whole_table, zeros
from .positions import Positions, t5_bucket
from .terms import RelativeTerm


class T5(AttentionScheme):
    """score(i, j) = q_i·k_j/√d + b[h, bucket(j - i)].

    b is `encoder.relative_attention_bias.weight` (buckets, heads), one table for all layers, or with
    `position_per_layer` one in each `encoder.layer.N.attention.self`. The bias is not divided by √d. Buckets are bidirectional in
    an encoder and unidirectional in a decoder. With `tupe` (TUPE-R) the bias is 0 in [CLS]'s row and column.

    MPNet's checkpoints have such a table, of 32 buckets and distance 128, under the same key: `absolute+t5` computes what they do.

    Source: Raffel et al. 2020 (https://arxiv.org/abs/1910.10683); buckets and bias checked against `T5Attention` of
    transformers.
    """

    name = "t5"
    flags = (
        init(),
        buckets(32, "number of logarithmic buckets, even and at least 4"),
        max_distance(128, "distances from this one on share the last bucket"),
        Flag("position_per_layer", Boolean(), False, "one bias matrix per layer instead of one for all layers"),
    )
    formula = "q_i·k_j/√d + b[h, bucket(j−i)]"
    paper = "Raffel et al. 2020, arXiv:1910.10683"
    extrapolates = "yes: distances beyond max_distance share a bucket"
    reads_content = False
    # Of the options.
    buckets: int
    init: str
    max_distance: int
    per_layer: bool

    def check(self, config) -> None:
        if self.buckets < 4 or self.buckets % 2:
            raise ValueError(f"position_buckets must be even and at least 4 for t5, got {self.buckets}")
        exact = self.buckets // 2 if config.sizes.is_decoder else self.buckets // 4
        if self.max_distance <= exact:
            raise ValueError(
                f"position_max_distance must be greater than {exact} (the distances that have a bucket each "
                f"with position_buckets={self.buckets}) for t5, got {self.max_distance}"
            )

    @classmethod
    def conversion_options(cls, aims: Any) -> dict[str, Any]:
        """A bias for each layer; and where longer texts are read, a bucket that begins at the training length, the last near the longest."""
        options = {} if "position_per_layer" in aims.given else {"position_per_layer": True}
        if {"position_buckets", "position_max_distance"} & {*aims.given} or aims.max_length <= aims.trained_length:
            return options
        return options | cls._buckets_for(aims.trained_length, aims.max_length)

    @staticmethod
    def _buckets_for(trained_length: int, max_length: int) -> dict[str, int]:
        for count in (32, 48, 64, 96, 128):
            exact = count // 4
            for number in range(exact - 1, 0, -1):  # of the logarithmic buckets that lie within the training length
                furthest = round(exact * (trained_length / exact) ** (exact / number))
                if furthest > max_length:
                    break
                ends = t5_bucket(-torch.tensor([trained_length - 1, trained_length]), count, furthest)
                if furthest * 2 >= max_length and ends[0] != ends[1]:
                    return {"position_buckets": count, "position_max_distance": furthest}
        return {}

    def read(self, config) -> None:
        self.bidirectional = not config.sizes.is_decoder
        # TUPE-R: [CLS] is where the table of absolute positions, which tupe reads, has the first position.
        self.unties_cls = self.reads_table = any(
            scheme.unties_cls for name, scheme in config.schemes.items() if name != self.name
        )

    def _table(self, config) -> PositionTable:
        # Where original checkpoints have the table, it starts as Transformers'.
        is_native = self.name in config.family.native_keys and self.name in config.trained_schemes
        silent = self.init == "silent" and not is_native
        initial = zeros if silent else Normal(config.sizes.initializer_range)
        return PositionTable(self.buckets, config.sizes.num_attention_heads, initial)

    def add_encoder_parameters(self, encoder: nn.Module, config) -> None:
        if not self.per_layer:
            encoder.relative_attention_bias = self._table(config)

    def add_layer_parameters(self, attention: nn.Module, config) -> None:
        if self.per_layer:
            attention.relative_attention_bias = self._table(config)

    def prepare(self, positions: Positions, dtype: torch.dtype) -> torch.Tensor:
        rows = t5_bucket(positions.relative, self.buckets, self.max_distance, self.bidirectional)
        if not self.unties_cls:
            return rows
        query_is_cls, key_is_cls = positions.query == positions.first, positions.key == positions.first
        # The row after the last bucket stands for "no bias".
        return positions.per_pair(rows).masked_fill(query_is_cls[:, :, None] | key_is_cls[:, None, :], self.buckets)

    def terms(self, context: AttentionContext) -> list[RelativeTerm]:
        owner, rows = context.attention if self.per_layer else context.encoder, context.prepared
        # (buckets, heads) -> (heads, buckets)
        bias = whole_table(owner.relative_attention_bias, self.buckets, rows.device).t()
        if self.unties_cls:
            bias = nn.functional.pad(bias, (0, 1))
        return [RelativeTerm(rows=rows, bias=bias)]
