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
    """Map relative positions to the logarithmic buckets of T5.

    If `bidirectional`, keys after the query have one half of the buckets, and the others the other half. In each half, the first half of the
    buckets has one distance each. The others grow logarithmically up to `max_distance`. Larger distances share the last bucket.

    Args:
        relative_position: int64 tensor of any shape, `key - query`, in tokens.
        num_buckets: number of buckets.
        max_distance: distances from this one on share the last bucket of their direction.
        bidirectional: False for decoders: all buckets are then for keys before the query. Keys after it, which the mask hides, share
            bucket 0.

    Returns:
        int64 tensor of the same shape, with values from 0 to `num_buckets` - 1.

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
    """Map distances to the logarithmic buckets of DeBERTa-v2, which have the sign of the distance.

    A distance of at most `num_buckets // 2` is its own bucket. Beyond, buckets grow logarithmically, such that a distance of
    `max_distance - 1` has the bucket `num_buckets - 1`. Larger distances have larger buckets. To look up a matrix of 2·`num_buckets` rows, use
    the row clip(bucket + `num_buckets`, 0, 2·`num_buckets` - 1). From `max_distance` on, all keys on one side of the query then share row 0,
    and all keys on the other side share the last row.

    Args:
        distance: int64 tensor of any shape, in tokens: `query - key` in DeBERTa. With the opposite sign, the result has the opposite sign.
        num_buckets: number of buckets in each direction.
        max_distance: see above, in tokens.

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
    """The positions of the queries and keys of one forward pass, and what the mask says about them.

    Relative positions are `key - query`, in tokens.

    Attributes:
        query: int64 (batch or 1, query), the position of each query. Without `position_ids`, the first token of a sequence has the position
            `first`.
        key: int64 (batch or 1, key), the position of each key.
        offset: number of tokens in the cache, 0 without one: the index in the sequence of query i is i + offset.
        contiguous: True if positions are consecutive. The relative position of query i and key j is then j - i - offset, and a scheme can
            compute once for each distance instead of once for each pair.
        first: the first position id of the family: 0, or padding_idx + 1 in RoBERTa-like families.
        mask: the mask that the caller of the model gave: of tokens, (batch, key); of pairs, in the form of any backend; or None.
        is_causal: True in decoders: unless the mask is of pairs, keys after a query are hidden.
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
        """Which keys the mask lets queries attend to, as bool.

        (batch, key) for a mask of tokens, (batch or 1, query, key) for a mask of pairs, and None without a mask. That keys after a query are
        hidden in decoders (`is_causal`) is not included.
        """
        return visible(self.mask, self.query.shape[1], self.key.shape[1], self.key.device)

    @property
    def context_lengths(self) -> torch.Tensor:
        """The number of tokens that each query may attend to, int64 (batch or 1, query), or (batch or 1, 1) if it is the same for all.

        In an encoder, it is the length of the sequence without padding, or of the document if several are packed in a row. In a decoder, it
        is the number of tokens up to the query.
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
        """False for queries that are padding, bool (batch or 1, query). None without a mask.

        With a mask of pairs, a token is padding if no query may attend to it.
        """
        visible = self.visible
        if visible is None:
            return None
        seen = visible if visible.dim() == 2 else visible.any(1)
        return seen.index_select(1, torch.arange(self.query.shape[1], device=seen.device) + self.offset)

    @property
    def documents(self) -> torch.Tensor | None:
        """The document of each token, if several are packed in a row: the index of its first token, int64 (batch or 1, key).

        Tokens that may attend to each other belong to the same document, even if padding or another document is between them. If the mask does
        not separate documents, as with a window, the sequence is one document. Values at padding have no meaning.

        None if the mask is not of pairs, or if queries and keys differ in number (with a cache).
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
        """True for the first token of each document, bool (batch or 1, key). None where [`documents`] is None."""
        documents, visible = self.documents, self.visible
        if documents is None or visible is None:
            return None
        return (documents == torch.arange(documents.shape[1], device=documents.device)) & visible.any(1)

    @property
    def relative(self) -> torch.Tensor:
        """Relative positions, `key - query`, int64.

        (query + key - 1,), each distance once, if positions are consecutive. Otherwise (batch or 1, query, key), for each pair.
        """
        if self.contiguous:
            return relative_distances(self.query.shape[1], self.key.shape[1], self.offset, self.query.device)
        return self.key[:, None, :] - self.query[:, :, None]

    def by_row(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The relative positions that occur, and where: use them to build a matrix with a row for each of them.

        Returns:
            Two int64 tensors. The first has each relative position once, (rows,). The second has the shape of [`relative`], and for each entry
            its row in the first. It is `rows` of a [`RelativeTerm`] whose matrices have these rows.
        """
        relative = self.relative
        if self.contiguous:
            return relative, torch.arange(relative.shape[0], device=relative.device)
        distances, rows = torch.unique(relative, return_inverse=True)
        return distances, rows.view_as(relative)  # ONNX has them in a line

    def per_pair(self, rows: torch.Tensor) -> torch.Tensor:
        """Look up a value for each pair of query and key.

        Args:
            rows: a value for each entry of [`relative`].

        Returns:
            (batch or 1, query, key).
        """
        return expand_to_pairs(rows, self.query.shape[1], self.key.shape[1])[None] if self.contiguous else rows

    def bias(self, of_distance: Callable[[torch.Tensor], torch.Tensor]) -> "RelativeTerm | PairTerm":
        """The score term of a bias that is a function of the relative position.

        Args:
            of_distance: a function from relative positions `key - query`, int64 (..., n), to the bias of each attention head, (..., heads, n).

        Returns:
            A [`RelativeTerm`] if positions are consecutive, with the function computed once for each distance. Otherwise a [`PairTerm`].
        """
        relative = self.relative
        if self.contiguous:
            return RelativeTerm(torch.arange(relative.shape[-1], device=relative.device), bias=of_distance(relative))
        # (batch or 1, query, key) -> (batch or 1, query, heads, key) -> (batch or 1, heads, query, key)
        return PairTerm(of_distance(relative).transpose(1, 2))
