"""The kinds of terms that schemes add to the attention score, each in all the forms that attention functions take."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch


# What one kind of block computes of a term: the name of the kind, its tensors, and the rows of a table.
BlockPart = tuple[str, tuple[torch.Tensor, ...], torch.Tensor | None]


def relative_distances(query_length: int, key_length: int, offset: int | torch.Tensor, device) -> torch.Tensor:
    """List all values of `key - query`, for queries at `offset`, `offset + 1`, ... and keys at 0, 1, ...

    Args:
        query_length: number of queries.
        key_length: number of keys.
        offset: position of the first query, which is the number of tokens in the cache.
        device: device of the result.

    Returns:
        int64 (query_length + key_length - 1,), ascending. The distance of query i and key j is at index `j - i + query_length - 1`.
        [`expand_to_pairs`] does this lookup for all pairs.
    """
    return torch.arange(query_length + key_length - 1, device=device) - (query_length - 1) - offset


def look_up(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """values[..., index], with gradients that are summed in float32 at least.

    The gradient of a value is the sum over all entries that are looked up there. In half precision, small numbers are lost
    once this sum is large.
    """
    return _with_digits_for_sums(values)[..., index].to(values.dtype)


def gather(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """values.gather(-1, index), with gradients as those of [`look_up`]."""
    return _with_digits_for_sums(values).gather(-1, index).to(values.dtype)


def _with_digits_for_sums(values: torch.Tensor) -> torch.Tensor:
    """Values that have gradients in float32 at least, others as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32)) if values.requires_grad else values


def expand_to_pairs(by_distance: torch.Tensor, query_length: int, key_length: int) -> torch.Tensor:
    """Look up a value for each pair of query and key, in values for each distance.

    Args:
        by_distance: (..., query_length + key_length - 1), in the order of [`relative_distances`].
        query_length: number of queries.
        key_length: number of keys.

    Returns:
        (..., query_length, key_length).
    """
    keys = torch.arange(key_length, device=by_distance.device)
    queries = torch.arange(query_length, device=by_distance.device)
    return look_up(by_distance, keys[None, :] - queries[:, None] + (query_length - 1))


class Term:
    """A term of the attention score. A kind of term is a class that defines the first three; the other forms have defaults.

    Attributes:
        scores: from query and key, (batch, heads, query or key, head_dim), and the products of these with the tables of a term
            ([`gathered_products`]), to what is added to the scores: parts of (batch or 1, heads or 1, query, key).
        block_parts: the term as blockwise attention takes it, where it [`suits_blocks`].
        of_group: the term of some of the sequences, of which only the first tokens are left. Given a function that takes these sequences
            from (batch or 1, ...), how many tokens there were, and how many there are.
        dimensions: its tensors, and how many dimensions each may have.
        reads_content: it multiplies queries or keys, or is made of the tokens' states.
        is_laid_out: all that it adds is known for every pair already.
        rows, bias, query_table, key_table, value_table: of a table that is looked up by distance; None for other kinds.
    """

    scores: Callable[[torch.Tensor, torch.Tensor, Callable], list[torch.Tensor]]
    block_parts: Callable[[], Iterator[BlockPart]]
    of_group: Callable[[Callable[[torch.Tensor], torch.Tensor], int, int], "Term"]
    dimensions: ClassVar[dict[str, tuple[int, ...]]] = {}
    reads_content: bool = False
    is_laid_out: ClassVar[bool] = False
    rows = bias = query_table = key_table = value_table = None

    def modification(self, query: torch.Tensor, key: torch.Tensor) -> Callable:
        """The term as FlexAttention takes it: from a score and its indices (batch, head, query, key) to the score with the term."""
        pairs = sum(self.scores(query, key, gathered_products)).expand(*query.shape[:3], key.shape[2])
        return lambda score, *indices: score + pairs[indices]

    @property
    def suits_blocks(self) -> bool:
        """Whether blockwise attention takes it."""
        return True

    def pieces(self) -> Iterator[tuple[str, "Term"]]:
        """The term as terms of one piece each, with the names that analysis has for them."""
        yield "bias", self

    def by_distance(self) -> "Term":
        """The term with a row for each distance instead of a row for each entry of a table, where there are fewer distances."""
        return self

    def without_query_bias(self) -> "Term":
        """The term with a bias of the queries as a bias by distance."""
        return self

    def is_for_each_head(self, batch: int, heads: int) -> bool:
        """Whether each sequence and each head has its own scores, as far as there are several."""
        return False


@dataclass
class RelativeTerm(Term):
    """A score term from matrices with a row for each distance or bucket: a relative position bias, or relative position embeddings.

    `rows` says which row r of the matrices the pair of query i and key j uses. The score of the pair in attention head h gets

        (query_i + query_bias[h]) · query_table[h, r]  +  key_j · key_table[h, r]  +  bias[h, r]

    and the output of query i gets Σ_j weight_ij · value_table[r]. Every part but `rows` is optional. Nothing is multiplied by 1/√head_dim:
    if your formula has this factor, multiply the matrices by it.

    Attributes:
        rows: int64, one of two shapes: (query + key - 1,), a row for each distance in the order of [`relative_distances`]; or
            (batch or 1, query, key), a row for each pair.
        query_table: (heads or 1, rows, head_dim), multiplied with queries.
        key_table: (heads or 1, rows, head_dim), multiplied with keys.
        query_bias: (heads, head_dim), added to the queries that are multiplied with `query_table`. It needs a `query_table`.
        bias: (heads or 1, rows). Or (batch, heads or 1, rows), if each sequence has another bias; `rows` must then be per distance.
        value_table: (rows, head_dim), the same for all attention heads. It is added to the values.
    """

    dimensions = {
        "rows": (1, 3),
        "query_table": (3,),
        "key_table": (3,),
        "bias": (2, 3),
        "value_table": (2,),
        "query_bias": (2,),
    }

    rows: torch.Tensor = field()
    query_table: torch.Tensor | None = None
    key_table: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    value_table: torch.Tensor | None = None
    query_bias: torch.Tensor | None = None

    @property
    def reads_content(self) -> bool:  # type: ignore[override]
        return self.bias is None

    @property
    def differs_by_sequence(self) -> bool:
        """True if each sequence has another bias, (batch, heads or 1, rows)."""
        return self.bias is not None and self.bias.dim() == 3

    def biased_query(self, query: torch.Tensor) -> torch.Tensor:
        """The queries with `query_bias` added, (batch, heads, query, head_dim)."""
        return query if self.query_bias is None else query + self.query_bias.to(query.device)[:, None]

    def without_query_bias(self) -> "RelativeTerm":
        if self.query_bias is None:
            return self
        # (heads or 1, rows, head_dim) @ (heads, head_dim, 1) -> (heads, rows)
        table = self.query_table  # there is one where there is a bias of queries
        bias = (table @ self.query_bias.to(table.device)[..., None]).squeeze(-1)  # type: ignore[union-attr]
        return replace(self, bias=bias if self.bias is None else self.bias + bias, query_bias=None)

    def rows_of_pairs(self, query_length: int, key_length: int) -> torch.Tensor:
        """The row that each pair uses, (batch or 1, query, key)."""
        return expand_to_pairs(self.rows, query_length, key_length)[None] if self.rows.dim() == 1 else self.rows

    def scores(self, query: torch.Tensor, key: torch.Tensor, products: Callable) -> list[torch.Tensor]:
        parts, lengths = [], (query.shape[2], key.shape[2])
        bias = None if self.bias is None else self.bias.to(query.device)
        if bias is not None and bias.dim() == 3:
            parts.append(expand_to_pairs(bias.index_select(-1, self.rows.to(query.device)), *lengths))
        elif bias is not None:
            # (heads, rows) looked up with (batch, query, key) -> (heads, batch, query, key)
            parts.append(look_up(bias, self.rows_of_pairs(*lengths).to(query.device)).transpose(0, 1))
        if self.query_table is not None or self.key_table is not None:
            parts += products(query, key, self)
        return parts

    def modification(self, query: torch.Tensor, key: torch.Tensor) -> Callable:
        # Products with the rows of a table, (batch, heads, length, rows), and not with those of every pair.
        rows, last = self.rows.to(query.device), query.shape[2] - 1
        of_query = of_key = bias = None
        if self.query_table is not None:
            of_query = self.biased_query(query) @ self.query_table.to(query.device).transpose(-1, -2)
        if self.key_table is not None:
            of_key = key @ self.key_table.to(query.device).transpose(-1, -2)
        if self.bias is not None:
            bias = self.bias.to(query.device)
            bias = bias.expand(*query.shape[:2], bias.shape[-1])  # (batch, heads, rows)

        def modify(score, batch, head, query_index, key_index):
            if rows.dim() == 1:
                row = rows[key_index - query_index + last]
            else:
                row = rows[batch if rows.shape[0] > 1 else 0, query_index, key_index]
            if of_query is not None:
                score = score + of_query[batch, head, query_index, row]
            if of_key is not None:
                score = score + of_key[batch, head, key_index, row]
            return score if bias is None else score + bias[batch, head, row]

        return modify

    def block_parts(self) -> Iterator[BlockPart]:
        tables = {
            "DistanceBias": self.bias,
            "QueryTable": self.query_table,
            "KeyTable": self.key_table,
            "ValueTable": self.value_table,
        }
        yield from ((kind, (table,), self.rows) for kind, table in tables.items() if table is not None)

    @property
    def suits_blocks(self) -> bool:
        return self.rows.dim() == 1

    def of_group(self, of: Callable[[torch.Tensor], torch.Tensor], length: int, own: int) -> "RelativeTerm":
        if self.rows.dim() == 1:
            rows = self.rows[length - own : length + own - 1]
        else:
            rows = of(self.rows)[:, :own, :own]
        return replace(self, rows=rows, bias=of(self.bias) if self.differs_by_sequence else self.bias)

    def pieces(self) -> Iterator[tuple[str, Term]]:
        alone = RelativeTerm(rows=self.rows)
        if self.query_table is not None:
            yield "c2p", replace(alone, query_table=self.query_table)
        if self.query_bias is not None:
            yield "v", replace(alone, bias=replace(self, bias=None).without_query_bias().bias)
        if self.key_table is not None:
            yield "p2c", replace(alone, key_table=self.key_table)
        if self.bias is not None:
            # With tables it is DeBERTa's position-to-position term.
            name = "bias" if self.query_table is None and self.key_table is None else "p2p"
            yield name, replace(alone, bias=self.bias)

    def by_distance(self) -> "RelativeTerm":
        """The same term with a row for each distance, if this makes its matrices smaller; otherwise the term itself.

        Short sequences use few rows of a matrix, and products with the other rows are wasted. Under `torch.compile` and export, where
        lengths are symbols that must not be compared, it returns the term itself.
        """
        if self.rows.dim() != 1 or torch.compiler.is_compiling():
            return self
        tables = {"query_table": -2, "key_table": -2, "bias": -1, "value_table": -2}  # the dimension of their rows
        given = {name: dim for name, dim in tables.items() if getattr(self, name) is not None}
        if any(self.rows.shape[0] >= getattr(self, name).shape[dim] for name, dim in given.items()):
            return self
        reached: dict[str, Any] = {
            name: (table := getattr(self, name)).index_select(dim, self.rows.to(table.device))
            for name, dim in given.items()
        }
        return replace(self, rows=torch.arange(self.rows.shape[0], device=self.rows.device), **reached)

    def is_for_each_head(self, batch: int, heads: int) -> bool:
        if self.query_table is not None or self.key_table is not None or self.bias is None:
            return True
        sequences = (
            self.bias.shape[0] if self.differs_by_sequence else 1 if self.rows.dim() == 1 else self.rows.shape[0]
        )
        return (sequences, self.bias.shape[-2]) == (batch, heads)


def gathered_products(query: torch.Tensor, key: torch.Tensor, term: RelativeTerm) -> list[torch.Tensor]:
    """Products of queries and keys with a term's tables, each (batch, heads, query, key), gathered per pair.

    Args:
        query, key: (batch, heads, query or key, head_dim).
    """
    parts, (batch, heads, query_length, _), key_length = [], query.shape, key.shape[2]
    rows = term.rows_of_pairs(query_length, key_length).to(query.device)
    if term.query_table is not None:
        # (batch, heads, query, rows)
        by_row = term.biased_query(query) @ term.query_table.to(query.device).transpose(-1, -2)
        parts.append(gather(by_row, rows[:, None].expand(batch, heads, query_length, key_length)))
    if term.key_table is not None:
        by_row = key @ term.key_table.to(query.device).transpose(-1, -2)  # (batch, heads, key, rows)
        of_key = rows.transpose(1, 2)[:, None].expand(batch, heads, key_length, query_length)
        parts.append(gather(by_row, of_key).transpose(-1, -2))
    return parts


@dataclass
class PairTerm(Term):
    """A score term given as a number for each pair of query and key.

    It needs memory for every pair, also in blockwise attention. If positions are consecutive, a [`RelativeTerm`] needs much less.

    Attributes:
        bias: (batch or 1, heads or 1, query, key), added to the score without a factor.
    """

    dimensions = {"bias": (4,)}
    is_laid_out: ClassVar[bool] = True

    bias: torch.Tensor = field()

    def scores(self, query: torch.Tensor, key: torch.Tensor, products: Callable) -> list[torch.Tensor]:
        return [self.bias.to(query.device)]

    def block_parts(self) -> Iterator[BlockPart]:
        yield "PairBias", (self.bias,), None

    def of_group(self, of: Callable[[torch.Tensor], torch.Tensor], length: int, own: int) -> "PairTerm":
        return PairTerm(of(self.bias)[..., :own, :own])

    def is_for_each_head(self, batch: int, heads: int) -> bool:
        return self.bias.shape[:2] == (batch, heads)


@dataclass
class ProductTerm(Term):
    """A score term that is the inner product of two vectors, one for the query and one for the key.

    The score of query i and key j in attention head h gets query[h, i] · key[h, j], without a factor. In TUPE, these are projected position
    embeddings.

    Attributes:
        query: (batch or 1, heads, query, width). The width is free.
        key: (batch or 1, heads, key, width).
    """

    dimensions = {"query": (4,), "key": (4,)}

    query: torch.Tensor
    key: torch.Tensor

    def scores(self, query: torch.Tensor, key: torch.Tensor, products: Callable) -> list[torch.Tensor]:
        return [self.query.to(query.device) @ self.key.to(query.device).transpose(-1, -2)]

    def block_parts(self) -> Iterator[BlockPart]:
        yield "PositionProduct", (self.query, self.key), None

    def of_group(self, of: Callable[[torch.Tensor], torch.Tensor], length: int, own: int) -> "ProductTerm":
        return ProductTerm(of(self.query)[:, :, :own], of(self.key)[:, :, :own])

    def pieces(self) -> Iterator[tuple[str, Term]]:
        yield "p2p", self

    def is_for_each_head(self, batch: int, heads: int) -> bool:
        return batch in (self.query.shape[0], self.key.shape[0])


@dataclass
class SumTerm(Term):
    """A score term that depends on the tokens between query and key, by a difference of two running sums over the tokens.

    The score of query i and key j in attention head h gets

        -scale[h, i] · |query[h, i] - key[h, j]|              with side=None,
        -scale[h, i] · max(query[h, i] - key[h, j], 0)        with side="left",
        -scale[h, i] · max(key[h, j] - query[h, i], 0)        with side="right".

    If the sums never decrease from one token to the next, the second is zero for keys after the query, and the third for keys before it.
    Blockwise attention computes this term, and its gradient, without memory for every pair.

    All tensors must be float32 or float64, because half precision cannot represent the difference of two large sums.

    Attributes:
        scale: (batch or 1, heads, query).
        query: (batch or 1, heads, query), the running sum up to each query.
        key: (batch or 1, heads, key), the running sum up to each key.
        side: "left", "right", or None for both.
    """

    dimensions = {"scale": (3,), "query": (3,), "key": (3,)}
    reads_content = True

    scale: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    side: str | None = None

    @property
    def of_both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key sums, such that the score depends on their difference; with a side, on its positive part only."""
        return (-self.query, -self.key) if self.side == "right" else (self.query, self.key)

    def pairs(self) -> torch.Tensor:
        """The term as a number for each pair, (batch or 1, heads, query, key)."""
        query, key = self.of_both
        difference = query[..., None] - key[..., None, :]
        return -self.scale[..., None] * (difference.abs() if self.side is None else difference.relu())

    def scores(self, query: torch.Tensor, key: torch.Tensor, products: Callable) -> list[torch.Tensor]:
        most = torch.finfo(query.dtype).max / 2
        return [self.pairs().to(query.device).clamp(-most, most).to(query.dtype)]

    def modification(self, query: torch.Tensor, key: torch.Tensor) -> Callable:
        numbers = (part.to(query.device).expand(query.shape[0], -1, -1) for part in (self.scale, *self.of_both))
        (scale, queries, keys), is_both = numbers, self.side is None

        def modify(score, batch, head, query_index, key_index):
            difference = queries[batch, head, query_index] - keys[batch, head, key_index]
            length = difference.abs() if is_both else difference.clamp(min=0)
            return score - (scale[batch, head, query_index] * length).to(score.dtype)

        return modify

    def block_parts(self) -> Iterator[BlockPart]:
        kind = "SumDifference" if self.side is None else "OneSidedDifference"
        yield kind, (self.scale, *self.of_both), None

    def of_group(self, of: Callable[[torch.Tensor], torch.Tensor], length: int, own: int) -> "SumTerm":
        scale, query, key = (of(tensor)[..., :own] for tensor in (self.scale, self.query, self.key))
        return replace(self, scale=scale, query=query, key=key)

    def pieces(self) -> Iterator[tuple[str, Term]]:
        yield self.side or "sums", self

    def is_for_each_head(self, batch: int, heads: int) -> bool:
        return batch in (self.scale.shape[0], self.key.shape[0])
