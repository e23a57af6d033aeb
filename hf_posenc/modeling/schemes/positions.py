"""Where the queries and keys of a forward pass are, and what is there to attend to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .relative_positions import expand_to_pairs, relative_distances
from .terms import PairTerm, RelativeTerm


def allowed(mask: torch.Tensor) -> torch.Tensor:
    """Where a boolean or additive mask lets a query attend."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


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
        is_causal: beside a mask by token, or none, queries do not see what follows them (decoders).
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
        mask, length = self.mask, self.key.shape[1]
        if mask is None:
            return None
        if not isinstance(mask, torch.Tensor):  # flex_attention's BlockMask
            from torch.nn.attention.flex_attention import create_mask

            shape = mask.shape[0], None, self.query.shape[1], length
            return create_mask(mask.mask_mod, *shape, device=self.key.device)[:, 0]
        mask = mask.to(self.key.device)
        if mask.dim() == 2:
            # Shorter than the keys, it hides the last ones, as in transformers: empty slots of a static cache.
            return nn.functional.pad(mask.bool(), (0, max(length - mask.shape[1], 0)))[:, :length]
        seen = allowed(mask)[..., :length]
        return seen if mask.dim() == 3 else seen.any(1)

    @property
    def context_lengths(self) -> torch.Tensor:
        """How many tokens queries may attend to, int64 (batch or 1, 1), or (batch or 1, query) where queries of a sequence differ.

        In an encoder the length of the sequence without its padding, or of the document where several are packed in a row; in a
        decoder the place of the query in it, counted from 1.
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

        None where no mask of pairs says so, or it has no row for each key (a cache).
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
        if documents is None:
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
