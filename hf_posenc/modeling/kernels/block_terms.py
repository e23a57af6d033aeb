"""The terms of attention scores and values in a block: one class for each kind, forward next to backward.

A term knows nothing of masks, softmax or the order of blocks. It is given a block, or the distances of a block, and adds its
scores; given the gradient of these scores, it adds to the gradients of all that it has read. `keep` says whether there is
something already to add to: without it, what is there is overwritten.
"""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch

from .block_masks import of_block, of_sequence
from .blocks import AttentionShape, Block, Clipping, first_distance
from .distance_products import Buffer, ShiftBuffer, Table, add_product, looked_up, scattered


@dataclass
class Inputs:
    """What is projected from the hidden states, (batch, heads, query or key, head_dim), or the gradients of these.

    Attributes:
        content_query, query: of the content score, and of the terms; the same tensor where there is no difference.
    """

    content_query: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def zeros(self) -> "Inputs":
        """Gradients, to be added to."""
        content_query, key, value = (torch.zeros_like(given) for given in (self.content_query, self.key, self.value))
        is_same = self.query is self.content_query
        return Inputs(content_query, content_query if is_same else torch.zeros_like(self.query), key, value)


@dataclass(frozen=True)
class Setting:
    """What all terms of a pass share.

    Attributes:
        clipping: distances at either end that share all vectors.
        keys: keys that are multiplied with their own rows of a table at a time.
        gradients: None in a forward pass.
    """

    sizes: AttentionShape
    clipping: Clipping
    keys: int
    inputs: Inputs
    gradients: Inputs | None = None


@dataclass(frozen=True)
class Part:
    """What one class here computes of one term.

    Attributes:
        kind: the class.
        tensors: what it is given, as many as the class says.
        rows: of a table, (distances,).
        needs_gradient: for each of the tensors; empty in a forward pass.
    """

    kind: type["BlockTerm"]
    tensors: tuple[torch.Tensor, ...]
    rows: torch.Tensor | None = None
    needs_gradient: tuple[bool, ...] = ()


class BlockTerm:
    """All parts of one kind, of all terms.

    Attributes:
        tensor_count: how many tensors a part has.
    """

    tensor_count: ClassVar[int] = 1

    def __init__(self, setting: Setting, parts: list[Part]):
        self.setting, self.parts = setting, parts
        self.needs_gradient = any(need for part in parts for need in part.needs_gradient)

    @staticmethod
    def is_shared(tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether what is added to the scores is the same in all sequences."""
        raise NotImplementedError

    def value_range(self) -> float:
        """How far apart what it adds may be in a head, where that is known without products: there it may be steep."""
        return 0.0

    def gradients(self) -> list[torch.Tensor | None]:
        """Those of the parts' tensors, in their order; None for what needs none."""
        raise NotImplementedError


class DistanceTerm(BlockTerm):
    """What adds, to the score of a query and a key, a number that depends on the query and their distance."""

    @property
    def reads_gradient(self) -> bool:
        """Whether it has something to learn from the gradient of its scores."""
        return self.needs_gradient

    def add_scores(self, block: Block, start: int, out: torch.Tensor, keep: bool) -> None:
        """Add to `out`, (heads, queries, distances), what each query of a block gives to distances from `start` on."""
        raise NotImplementedError

    def accumulate_gradient(self, block: Block, start: int, gradient: torch.Tensor) -> None:
        """Add to the gradients, given that of the numbers that [`add_scores`] adds."""
        raise NotImplementedError


class DistanceBias(DistanceTerm):
    """bias[h, r(j - i)]."""

    def __init__(self, setting: Setting, parts: list[Part]):
        super().__init__(setting, parts)
        # (batch or 1, heads, distances and the rest of a line)
        terms = [(self._by_sequence(part.tensors[0]), part.rows) for part in parts]
        self.bias = looked_up(terms, -1).expand(-1, setting.sizes.heads, -1)
        self._gradient = self.bias.new_zeros(self.bias.shape) if self.needs_gradient else None

    @staticmethod
    def _by_sequence(bias: torch.Tensor) -> torch.Tensor:
        """(batch or 1, heads or 1, rows)."""
        return bias if bias.dim() == 3 else bias[None]

    @staticmethod
    def is_shared(tensors: tuple[torch.Tensor, ...]) -> bool:
        return tensors[0].dim() == 2 or tensors[0].shape[0] == 1

    def value_range(self) -> float:
        """The greatest difference of two biases of a head."""
        return float((self.bias.amax(-1) - self.bias.amin(-1)).amax())

    def add_scores(self, block: Block, start: int, out: torch.Tensor, keep: bool) -> None:
        bias = of_sequence(self.bias, block.sequence)[block.heads, None, start : start + out.shape[-1]]
        out.add_(bias) if keep else out.copy_(bias)

    def accumulate_gradient(self, block: Block, start: int, gradient: torch.Tensor) -> None:
        if self._gradient is not None:
            own = of_sequence(self._gradient, block.sequence)
            own[block.heads, start : start + gradient.shape[-1]] += gradient.sum(1)

    def gradients(self) -> list[torch.Tensor | None]:
        found = []
        for part in self.parts:
            bias = part.tensors[0]
            found.append(scattered(self._gradient, self._by_sequence(bias), part.rows, -1).view(bias.shape))
        return found


def bias_as_matrix(bias: torch.Tensor, block: Block, query_length: int) -> torch.Tensor:
    """A block's biases, (heads, queries, keys), its *last* query first.

    In this order the index of a distance grows with both indices of a pair, and one row of biases is in memory what a
    whole matrix of them looks like.

    Args:
        bias: (batch or 1, heads, distances), of all heads of the block.
    """
    start, own = first_distance(block.queries, block.keys, query_length), of_sequence(bias, block.sequence)
    return own.as_strided(block.shape, (own.stride(0), 1, 1), own.storage_offset() + start)


class QueryTable(DistanceTerm):
    """query_i · table[h, r(j - i)]."""

    reads_gradient = True

    def __init__(self, setting: Setting, parts: list[Part]):
        super().__init__(setting, parts)
        distances = setting.clipping.laid_out
        terms = [(part.tensors[0], part.rows[distances]) for part in parts]
        self.table = Table(terms, setting.sizes.heads, distances.start)

    @staticmethod
    def is_shared(tensors: tuple[torch.Tensor, ...]) -> bool:
        return False

    def add_scores(self, block: Block, start: int, out: torch.Tensor, keep: bool) -> None:
        self.table.products(self.setting.inputs.query[block.query_place], block.heads, start, out, keep)

    def accumulate_gradient(self, block: Block, start: int, gradient: torch.Tensor) -> None:
        self.table.add_sums(gradient, block.heads, start, self.setting.gradients.query[block.query_place])
        if self.needs_gradient:
            query = self.setting.inputs.query[block.query_place]
            self.table.accumulate_gradient(gradient, query, block.heads, start)

    def gradients(self) -> list[torch.Tensor | None]:
        return self.table.gradients() if self.needs_gradient else [None] * len(self.parts)


class KeyTable(BlockTerm):
    """key_j · table[h, r(j - i)]: a query table with the roles of queries and keys exchanged.

    Its distances are counted from the other end, and the products come out by key and are turned round.
    """

    def __init__(self, setting: Setting, parts: list[Part]):
        super().__init__(setting, parts)
        distances, count = setting.clipping.laid_out, setting.sizes.distances
        terms = [(part.tensors[0], part.rows[distances].flip(0)) for part in parts]
        self.table = Table(terms, setting.sizes.heads, count - distances.stop)
        self._products = ShiftBuffer(setting.inputs.key)
        self._turned = ShiftBuffer(setting.inputs.key, starts_at_zero=True)

    @staticmethod
    def is_shared(tensors: tuple[torch.Tensor, ...]) -> bool:
        return False

    def _some_keys(self, block: Block):
        """A few keys of a block at a time: the smallest distance, from these keys to the queries, and the vectors."""
        stop = block.keys.start
        for keys in self.setting.inputs.key[block.key_place].split(self.setting.keys, 1):
            start, stop = stop, stop + keys.shape[1]
            yield first_distance(slice(start, stop), block.queries, self.setting.sizes.key_length), keys

    def put_scores(self, block: Block, out: torch.Tensor, added: torch.Tensor | None) -> None:
        """out = `added` and the scores of a block, (heads, queries, keys).

        The products of a few keys are added up while they are in a cache.
        """
        heads, queries, _ = block.shape
        outs = out.split(self.setting.keys, -1)
        known = [None] * len(outs) if added is None else added.split(self.setting.keys, -1)
        for (start, keys), part, also in zip(self._some_keys(block), outs, known):
            products = self._products.of_shape(heads, keys.shape[1], queries)
            self.table.products(keys, block.heads, start, products.by_distance)
            if also is None:
                part.copy_(products.by_pair.mT)
            else:
                torch.add(products.by_pair.mT, also, out=part)

    def accumulate_gradient(self, block: Block, score_gradient: torch.Tensor) -> None:
        heads, queries, _ = block.shape
        own_gradients = self.setting.gradients.key[block.key_place].split(self.setting.keys, 1)
        parts = score_gradient.split(self.setting.keys, -1)
        for (start, keys), part, own in zip(self._some_keys(block), parts, own_gradients):
            turned = self._turned.of_shape(heads, keys.shape[1], queries)
            turned.by_pair.copy_(part.mT)
            self._accumulate(turned.by_distance, keys, own, block.heads, start)

    def vector(self, block: Block, distance: int) -> torch.Tensor:
        """What all keys of a block meet whose distances are clipped to one, (heads or 1, 1, head_dim)."""
        return self.table.vector(block.heads, self._opposite(distance))[:, None]

    def accumulate_clipped_gradient(self, block: Block, distance: int, score_gradient: torch.Tensor) -> None:
        """Add to the gradients, given that of the scores, where all distances of a block are clipped to one."""
        keys, own = (inputs.key[block.key_place] for inputs in (self.setting.inputs, self.setting.gradients))
        self._accumulate(score_gradient.sum(1)[..., None], keys, own, block.heads, self._opposite(distance))

    def _opposite(self, distance: int) -> int:
        return self.setting.sizes.distances - 1 - distance

    def _accumulate(self, gradient, keys, key_gradient, heads: slice, start: int) -> None:
        self.table.add_sums(gradient, heads, start, key_gradient)
        if self.needs_gradient:
            self.table.accumulate_gradient(gradient, keys, heads, start)

    def gradients(self) -> list[torch.Tensor | None]:
        return self.table.gradients() if self.needs_gradient else [None] * len(self.parts)


class ValueTable(BlockTerm):
    """Σ_j weight_ij · table[h, r(j - i)], added to the output of a query."""

    def __init__(self, setting: Setting, parts: list[Part]):
        super().__init__(setting, parts)
        distances = setting.clipping.laid_out
        terms = [(part.tensors[0][None], part.rows[distances]) for part in parts]
        self.table = Table(terms, setting.sizes.heads, distances.start)

    @staticmethod
    def is_shared(tensors: tuple[torch.Tensor, ...]) -> bool:
        return True

    def add_output(self, block: Block, start: int, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Add to `out`, (heads, queries, head_dim), given the weights per distance, (heads, queries, distances)."""
        self.table.add_sums(weights, block.heads, start, out)

    def weight_gradient(self, block: Block, start: int, output_gradient: torch.Tensor, out: torch.Tensor) -> None:
        """out = the gradient of the weights per distance."""
        self.table.products(output_gradient, block.heads, start, out)

    def accumulate_gradient(
        self, block: Block, start: int, weights: torch.Tensor, output_gradient: torch.Tensor
    ) -> None:
        if self.needs_gradient:
            self.table.accumulate_gradient(weights, output_gradient, block.heads, start)

    def gradients(self) -> list[torch.Tensor | None]:
        found = self.table.gradients() if self.needs_gradient else [None] * len(self.parts)
        return [gradient if gradient is None else gradient[0] for gradient in found]


class PairwiseTerm(BlockTerm):
    """What is known for every pair of positions."""

    @staticmethod
    def is_shared(tensors: tuple[torch.Tensor, ...]) -> bool:
        return all(tensor.shape[0] == 1 for tensor in tensors)

    def __init__(self, setting: Setting, parts: list[Part]):
        super().__init__(setting, parts)
        self._gradients = [
            tuple(
                torch.zeros_like(tensor) if need else None for tensor, need in zip(part.tensors, part.needs_gradient)
            )
            for part in parts
        ]

    def add_scores(self, block: Block, out: torch.Tensor, keep: bool) -> None:
        """Add to `out`, (heads, queries, keys), the scores of a block."""
        raise NotImplementedError

    def accumulate_gradient(self, block: Block, score_gradient: torch.Tensor) -> None:
        """Add to the gradients, given that of a block's scores."""
        raise NotImplementedError

    def gradients(self) -> list[torch.Tensor | None]:
        return [gradient for gradients in self._gradients for gradient in gradients]


class PairBias(PairwiseTerm):
    """bias[h, i, j], with one value for what its dimensions of size 1 share."""

    def add_scores(self, block: Block, out: torch.Tensor, keep: bool) -> None:
        for part in self.parts:
            bias = of_block(part.tensors[0], block)
            out.add_(bias) if keep else out.copy_(bias)
            keep = True

    def accumulate_gradient(self, block: Block, score_gradient: torch.Tensor) -> None:
        for (gradient,) in self._gradients:
            if gradient is not None:
                own = of_block(gradient, block)
                own += score_gradient.sum_to_size(own.shape)


class PositionProduct(PairwiseTerm):
    """position_query_i · position_key_j."""

    tensor_count = 2

    def add_scores(self, block: Block, out: torch.Tensor, keep: bool) -> None:
        for part in self.parts:
            query, key = self._of_block(part.tensors, block)
            add_product(out, query, key.transpose(1, 2), keep)
            keep = True

    def accumulate_gradient(self, block: Block, score_gradient: torch.Tensor) -> None:
        for part, gradients in zip(self.parts, self._gradients):
            query, key = self._of_block(part.tensors, block)
            query_gradient, key_gradient = self._of_block(gradients, block)
            if query_gradient is not None:
                add_product(query_gradient, score_gradient, key)
            if key_gradient is not None:
                add_product(key_gradient, score_gradient.transpose(1, 2), query)

    @staticmethod
    def _of_block(tensors: tuple, block: Block) -> list[torch.Tensor | None]:
        return [
            tensor if tensor is None else of_sequence(tensor, block.sequence)[block.heads, places]
            for tensor, places in zip(tensors, (block.queries, block.keys))
        ]


class SumDifference(PairwiseTerm):
    """-scale_i · |query_i - key_j|, of numbers and not of vectors."""

    tensor_count = 3

    def __init__(self, setting: Setting, parts: list[Part]):
        super().__init__(setting, parts)
        self._values, self._slopes = Buffer(setting.inputs.key), Buffer(setting.inputs.key)

    @staticmethod
    def _lengths(difference: torch.Tensor) -> torch.Tensor:
        """What is left of differences, in place."""
        return difference.abs_()

    @staticmethod
    def _signs(difference: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The derivative of the lengths, in place of the differences."""
        return difference.sign_()

    def value_range(self) -> float:
        """No less than the greatest difference of two scores of a head."""
        greatest = 0.0
        for part in self.parts:
            scale, query, key = part.tensors
            apart = torch.maximum(query.amax(-1), key.amax(-1)) - torch.minimum(query.amin(-1), key.amin(-1))
            greatest += float((scale.abs().amax(-1) * apart).amax())
        return greatest

    def _differences(self, tensors: list[torch.Tensor], block: Block, buffer: Buffer) -> torch.Tensor:
        _, query, key = tensors
        return torch.sub(query[..., None], key[:, None], out=buffer.of_shape(*block.shape))

    def add_scores(self, block: Block, out: torch.Tensor, keep: bool) -> None:
        for part in self.parts:
            tensors = self._of_block(part.tensors, block)
            lengths = self._lengths(self._differences(tensors, block, self._values))
            scale = tensors[0][..., None]
            out.addcmul_(lengths, scale, value=-1.0) if keep else torch.mul(lengths, -scale, out=out)
            keep = True

    def accumulate_gradient(self, block: Block, score_gradient: torch.Tensor) -> None:
        for part, gradients in zip(self.parts, self._gradients):
            tensors = self._of_block(part.tensors, block)
            of_scale, of_query, of_key = self._of_block(gradients, block)
            differences = self._differences(tensors, block, self._slopes)
            lengths = self._lengths(self._values.of_shape(*block.shape).copy_(differences))
            slopes = self._signs(differences, lengths).mul_(score_gradient)
            if of_scale is not None:
                of_scale -= lengths.mul_(score_gradient).sum(-1)
            if of_query is not None:
                of_query -= slopes.sum(-1) * tensors[0]
            if of_key is not None:
                of_key += torch.bmm(tensors[0][:, None], slopes)[:, 0]

    @staticmethod
    def _of_block(tensors: tuple, block: Block) -> list[torch.Tensor | None]:
        places = block.queries, block.queries, block.keys
        return [
            tensor if tensor is None else of_sequence(tensor, block.sequence)[block.heads, place]
            for tensor, place in zip(tensors, places)
        ]


class OneSidedDifference(SumDifference):
    """-scale_i · max(query_i - key_j, 0)."""

    @staticmethod
    def _lengths(difference: torch.Tensor) -> torch.Tensor:
        return difference.relu_()

    @staticmethod
    def _signs(difference: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.gt(lengths, 0, out=difference)


class Content:
    """query_i · key_j · scaling, the score that is there without positions."""

    def __init__(self, setting: Setting, scaling: float):
        self.setting, self.scaling = setting, scaling

    def add_scores(self, block: Block, out: torch.Tensor, keep: bool) -> None:
        query, key = self.setting.inputs.content_query[block.query_place], self.setting.inputs.key[block.key_place]
        out.baddbmm_(query, key.transpose(1, 2), beta=float(keep), alpha=self.scaling)

    def accumulate_gradient(self, block: Block, score_gradient: torch.Tensor) -> None:
        inputs, gradients = self.setting.inputs, self.setting.gradients
        add_product(
            gradients.content_query[block.query_place], score_gradient, inputs.key[block.key_place] * self.scaling
        )
        scaled = inputs.content_query[block.query_place] * self.scaling
        add_product(gradients.key[block.key_place], score_gradient.transpose(1, 2), scaled)


# All kinds, in the order in which their scores are added: a bias by distance is cheapest where nothing is there yet.
KINDS: tuple[type[BlockTerm], ...] = (
    DistanceBias,
    QueryTable,
    KeyTable,
    ValueTable,
    PositionProduct,
    SumDifference,
    OneSidedDifference,
    PairBias,
)


def block_terms(setting: Setting, parts: list[Part]) -> list[BlockTerm]:
    """One object for each kind that there is among the parts, which are in the order of [`KINDS`]."""
    return [kind(setting, list(own)) for kind, own in itertools.groupby(parts, key=lambda part: part.kind)]
