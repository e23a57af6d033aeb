"""The kinds of terms that schemes add to the attention score."""

from dataclasses import dataclass, replace

import torch


@dataclass
class RelativeTerm:
    """A term of the attention score that looks a table up by distance.

    With r the row of the pair (i, j), and every part optional, the score of query i and key j in head h gets

        (query_i + query_bias[h]) · query_table[h, r]  +  key_j · key_table[h, r]  +  bias[h, r]

    and the output of query i gets Σ_j weight_ij · value_table[r].

    Attributes:
        rows: int64, (query + key - 1,) per distance in the order of [`relative_distances`], or (batch or 1, query, key).
        query_table, key_table: (heads or 1, rows, head_dim). They carry their scale themselves.
        query_bias: (heads, head_dim), beside a query table.
        bias: (heads or 1, rows), or (batch, heads or 1, rows) where each sequence has its own; then rows are per distance.
        value_table: (rows, head_dim).
    """

    rows: torch.Tensor
    query_table: torch.Tensor | None = None
    key_table: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    value_table: torch.Tensor | None = None
    query_bias: torch.Tensor | None = None

    def biased_query(self, query: torch.Tensor) -> torch.Tensor:
        """What is multiplied with the query table, given (batch, heads, query, head_dim)."""
        return query if self.query_bias is None else query + self.query_bias.to(query.device)[:, None]

    def without_query_bias(self) -> "RelativeTerm":
        """This term with its query bias as a bias per row of the table."""
        if self.query_bias is None:
            return self
        # (heads or 1, rows, head_dim) @ (heads, head_dim, 1) -> (heads, rows)
        table = self.query_table  # there is one where there is a bias of queries
        bias = (table @ self.query_bias.to(table.device)[..., None]).squeeze(-1)  # type: ignore[union-attr]
        return replace(self, bias=bias if self.bias is None else self.bias + bias, query_bias=None)

    @property
    def differs_by_sequence(self) -> bool:
        """Whether each sequence has a bias of its own."""
        return self.bias is not None and self.bias.dim() == 3


@dataclass
class PairTerm:
    """A term of the attention score that is known for every pair of positions.

    Attributes:
        bias: (batch or 1, heads or 1, query, key), added to the score as it is.
    """

    bias: torch.Tensor


@dataclass
class ProductTerm:
    """A term of the attention score that is a product of vectors of the query's and the key's position.

    Attributes:
        query: (batch or 1, heads, query, width).
        key: (batch or 1, heads, key, width). The score of a pair gets their inner product as it is.
    """

    query: torch.Tensor
    key: torch.Tensor


@dataclass
class SumTerm:
    """A term of the attention score that is a difference of two numbers, one of the query and one of the key: of sums over tokens.

    The score of query i and key j in head h gets -scale[h, i] · |query[h, i] - key[h, j]|. With `side` it gets that for keys on one side
    alone, -scale[h, i] · max(query[h, i] - key[h, j], 0) for the left and -scale[h, i] · max(key[h, j] - query[h, i], 0) for the right: sums do
    not fall. Nothing is known per pair, forward or backward, beyond a block of pairs.

    Attributes:
        scale, query: (batch or 1, heads, query).
        key: (batch or 1, heads, key). All three in float32 at least: sums over a long text have no digits left in half precision.
        side: "left", "right", or None for both.
    """

    scale: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    side: str | None = None

    @property
    def of_both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is subtracted from each other, of the query and of the key; for one side, what is left is the positive part."""
        return (-self.query, -self.key) if self.side == "right" else (self.query, self.key)

    def pairs(self) -> torch.Tensor:
        """(batch or 1, heads, query, key), where a whole matrix is wanted."""
        query, key = self.of_both
        difference = query[..., None] - key[..., None, :]
        return -self.scale[..., None] * (difference.abs() if self.side is None else difference.relu())


Term = RelativeTerm | PairTerm | ProductTerm | SumTerm
