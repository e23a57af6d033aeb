"""Where the queries and keys of a forward pass are, what is there to attend to, and the buckets that distances fall into.

Sign convention of this package: a relative position is `key - query`, as in T5. Schemes whose references count the
other way round (`query - key`: relative_key, Transformer-XL, DeBERTa) negate it themselves and say so.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..masks import visible
from .terms import PairTerm, RelativeTerm, expand_to_pairs, relative_distances


def clip_distance(relative_position: torch.Tensor, max_distance: int) -> torch.Tensor:
    """clip(relative_position, -max_distance, max_distance) + max_distance: rows 0 to 2·max_distance (Shaw et al. 2018)."""
    return relative_position.clamp(-max_distance, max_distance) + max_distance


def t5_bucket(
    relative_position: torch.Tensor, num_buckets: int, max_distance: int, bidirectional: bool = True
) -> torch.Tensor:
    """T5's logarithmic buckets.

    Half of the buckets (of those left for a direction) hold one distance each, the other half grow logarithmically up
    to `max_distance`; everything beyond shares the last one. With `bidirectional`, keys after the query have their own
    half of all buckets; without, they share bucket 0 (they are masked anyway).

    Args:
        relative_position: int64 tensor of any shape, `key - query`.

    Returns:
        int64 tensor of the same shape, 0 to `num_buckets` - 1.

    Source: Raffel et al. 2020 (https://arxiv.org/abs/1910.10683); checked against
    `T5Attention._relative_position_bucket` of transformers.
    """
    buckets = torch.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        buckets = (relative_position > 0).long() * num_buckets
        distance = relative_position.abs()
    else:
        distance = (-relative_position).clamp(min=0)
    exact = num_buckets // 2
    # Below `exact` the logarithm is not used, the clamp only keeps it finite.
    logarithmic = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (logarithmic * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return buckets + torch.where(distance < exact, distance, far)


def deberta_bucket(distance: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """DeBERTa-v2's logarithmic buckets, signed like their argument.

    Distances up to `num_buckets // 2` are kept; beyond, they grow logarithmically so that `max_distance - 1` falls into
    `num_buckets - 1`, and on beyond that: nothing is clamped here. A table of 2·`num_buckets` rows is clamped to by who looks up,
    clip(bucket + `num_buckets`, 0, 2·`num_buckets` - 1), so that from `max_distance` on keys on one side share row 0, and those on the
    other the last row.

    Args:
        distance: int64 tensor of any shape, `query - key` (any sign convention works, the function is odd).

    Returns:
        int64 tensor of the same shape.

    Source: He et al. 2021 (https://arxiv.org/abs/2006.03654); checked against `make_log_bucket_position` of
    transformers' DeBERTa-v2, which is Microsoft's.
    """
    middle = num_buckets // 2
    magnitude = distance.abs()
    # Both logarithms by the same function, so that they round alike: at max_distance - 1 their ratio is 1.
    log_scale = torch.log(torch.tensor((max_distance - 1) / middle, dtype=torch.float32, device=distance.device))
    logarithmic = torch.ceil(torch.log(magnitude.clamp(min=1).float() / middle) / log_scale * (middle - 1)) + middle
    # An exported model has the second as a number: their ratio may round to more than 1 there, which is for what is further away.
    logarithmic = torch.where(magnitude < max_distance, logarithmic.clamp(max=num_buckets - 1), logarithmic)
    return torch.where(magnitude <= middle, distance, logarithmic.long() * distance.sign())


@dataclass
class Positions:
    """Where the queries and the keys of one forward pass are.

    Attributes:
        query: int64 (batch or 1, query), positions of the queries; `first` is the position of a sequence's first token.
        key: int64 (batch or 1, key).
        offset: number of tokens in the cache.
        contiguous: the tokens of each sequence follow each other one by one: `key - query` is `j - i - offset`, and a
            scheme may work per distance instead of per pair.
        first: the family's first position (0, and padding_idx + 1 in RoBERTa-like families).
        mask: as the caller gave it: by token, (batch, key), by pair in the form of any backend, or None.
        is_causal: with a mask by token, or none, queries do not see what follows them (decoders).
    """

    query: torch.Tensor
    key: torch.Tensor
    offset: int | torch.Tensor
    contiguous: bool
    first: int
    mask: Any = None
    is_causal: bool = False

    @property
    def visible(self) -> torch.Tensor | None:
        """Where there is something to attend to, bool: (batch, key) by token, (batch or 1, query, key) by pair, or None for
        everywhere; what follows a query is not looked at here."""
        return visible(self.mask, self.query.shape[1], self.key.shape[1], self.key.device)

    @property
    def context_lengths(self) -> torch.Tensor:
        """How many tokens queries may attend to, int64 (batch or 1, 1), or (batch or 1, query) where queries of a sequence differ.

        In an encoder the length of the sequence without its padding, or of the document where several are packed in a row; in a
        decoder the index of the query in it, counted from 1.
        """
        visible = self.visible
        if visible is not None and visible.dim() == 3:
            return visible.sum(-1)
        if not self.is_causal:
            return self.key.new_full((1, 1), self.key.shape[1]) if visible is None else visible.sum(-1, keepdim=True)
        slots = torch.arange(self.query.shape[1], device=self.key.device) + self.offset
        return slots[None] + 1 if visible is None else visible.long().cumsum(-1).index_select(1, slots)

    @property
    def are_tokens(self) -> torch.Tensor | None:
        """Which of the queries' tokens somebody may attend to, those that are no padding, bool (batch or 1, query); None for all."""
        visible = self.visible
        if visible is None:
            return None
        seen = visible if visible.dim() == 2 else visible.any(1)
        return seen.index_select(1, torch.arange(self.query.shape[1], device=seen.device) + self.offset)

    @property
    def documents(self) -> torch.Tensor | None:
        """Which document each token belongs to, by the index of the first token in it, int64 (batch or 1, key).

        Tokens that may attend to each other are of one document, whatever stands between them: padding, or another document. Padding is
        of none but its own. Where pairs say that there are no documents (a window), all of a sequence is one.

        None where no mask of pairs shows it, or it has no row for each key (a cache).
        """
        visible = self.visible
        if visible is None or visible.dim() == 2 or visible.shape[1] != visible.shape[2]:
            return None
        first = visible.to(torch.uint8).argmax(-1)
        first = torch.where(visible.any(-1), first, torch.arange(first.shape[1], device=first.device))
        # What padding may attend to counts for nothing: nobody reads what it gets.
        seen = visible & visible.any(1)[:, :, None]
        are_apart = seen & (first[:, :, None] != first[:, None])
        return first.masked_fill(are_apart.flatten(1).any(1, keepdim=True), 0)

    @property
    def are_first_of_documents(self) -> torch.Tensor | None:
        """Which tokens begin a document, where several are packed in a row, bool (batch or 1, key); None as for `documents`."""
        documents, visible = self.documents, self.visible
        if documents is None or visible is None:
            return None
        return (documents == torch.arange(documents.shape[1], device=documents.device)) & visible.any(1)

    @property
    def relative(self) -> torch.Tensor:
        """`key - query`: (query + key - 1,) per distance if contiguous, else (batch or 1, query, key) per pair."""
        if self.contiguous:
            return relative_distances(self.query.shape[1], self.key.shape[1], self.offset, self.query.device)
        return self.key[:, None, :] - self.query[:, :, None]

    def by_row(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The distances that there are, (rows,), and which of them each of `relative` is: rows of a table per distance."""
        relative = self.relative
        if self.contiguous:
            return relative, torch.arange(relative.shape[0], device=relative.device)
        distances, rows = torch.unique(relative, return_inverse=True)
        return distances, rows.view_as(relative)  # ONNX has them in a line

    def per_pair(self, rows: torch.Tensor) -> torch.Tensor:
        """What is known of each of the `relative` distances, (batch or 1, query, key)."""
        return expand_to_pairs(rows, self.query.shape[1], self.key.shape[1])[None] if self.contiguous else rows

    def bias(self, of_distance: Callable[[torch.Tensor], torch.Tensor]) -> "RelativeTerm | PairTerm":
        """The term of a bias that is a function of the distance, computed per distance where that will do.

        Args:
            of_distance: from int64 (..., n) `key - query` to (..., heads, n).
        """
        relative = self.relative
        if self.contiguous:
            return RelativeTerm(torch.arange(relative.shape[-1], device=relative.device), bias=of_distance(relative))
        # (batch or 1, query, key) -> (batch or 1, query, heads, key) -> (batch or 1, heads, query, key)
        return PairTerm(of_distance(relative).transpose(1, 2))
