"""Which keys a block of an attention may attend to, and which weights its dropout keeps."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..masks import Window, allowed
from .blocks import Block, block_seed, slices
from .distance_products import Buffer


def query_parts(window: Window, queries: int, size: int, start: int, stop: int) -> Iterator[slice]:
    """As many queries, at most `size` at a time: those of a part all see some of the keys from `start` to `stop`, or none does."""
    first = min(max(start - window.reach - window.offset, 0), queries)
    last = min(max(stop + window.reach - window.offset, first), queries)
    for begin, end in ((0, first), (first, last), (last, queries)):
        for part in slices(end - begin, size):
            yield slice(begin + part.start, begin + part.stop)


def keys_near(window: Window, queries: slice, start: int, stop: int) -> slice:
    """Those of the keys from `start` to `stop` that some of the queries see, or all where the first query sees none."""
    if not window.sees_some(queries.start, start, stop):
        return slice(start, stop)
    nearest = queries.start + window.offset - window.reach, queries.stop + window.offset + window.reach
    return slice(max(nearest[0], start), min(nearest[1], stop))


def key_ranges(mask: torch.Tensor | None, batch: int, key_length: int) -> list[tuple[int, int] | None]:
    """Per sequence, from which key to which all queries attend; None where the mask says something else."""
    if mask is None:
        return [(0, key_length)] * batch
    if mask.dtype != torch.bool or mask.shape[1] != 1:
        return [None] * batch
    if mask.shape[2] > 1 and mask.stride(2):
        # Eight at a time where they lie so.
        rows = mask.view(torch.int64) if _holds_eights(mask) else mask
        if not torch.equal(rows, rows[:, :, :1].expand_as(rows)):
            return [None] * batch
    attended = mask[:, 0, 0].expand(batch, key_length)
    counts = attended.sum(-1)
    first = attended.to(torch.uint8).argmax(-1)
    last = key_length - attended.flip(-1).to(torch.uint8).argmax(-1)
    whole = (counts > 0) & (last - first == counts)
    return [(start, stop) if ok else None for start, stop, ok in zip(first.tolist(), last.tolist(), whole.tolist())]


def _holds_eights(mask: torch.Tensor) -> bool:
    return mask.is_contiguous() and mask.shape[-1] % 8 == 0 and mask.storage_offset() % 8 == 0


def of_sequence(tensor: torch.Tensor, sequence: int) -> torch.Tensor:
    """A sequence's part of (batch or 1, ...)."""
    return tensor[sequence if tensor.shape[0] > 1 else 0]


def of_block(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """A block's part of (batch or 1, heads or 1, query or 1, key or 1)."""
    own = of_sequence(tensor, block.sequence)
    places = block.heads, block.queries, block.keys
    return own[tuple(place if size > 1 else slice(0, 1) for place, size in zip(places, own.shape))]


@dataclass(frozen=True)
class AttentionMask:
    """What queries may attend to.

    Attributes:
        ranges: see [`key_ranges`]; the mask is read for sequences that have none.
        mask: bool or additive, (batch or 1, heads or 1, query or 1, key), or None.
        is_causal: whether a query attends to no later key; there is no mask then.
        window: of the queries; a mask without ranges has it in it already.
    """

    ranges: list[tuple[int, int] | None]
    mask: torch.Tensor | None = None
    is_causal: bool = False
    window: Window | None = None

    def forbidden(self, block: Block) -> torch.Tensor | None:
        """Where a pair of a block is masked, (heads or 1, queries or 1, keys); None where a range of keys is attended."""
        if self.ranges[block.sequence] is not None:
            return None if self.window is None else self._beyond_window(block)
        if self.is_causal:
            keys, queries = (torch.arange(part.start, part.stop) for part in (block.keys, block.queries))
            return (keys > queries[:, None])[None]
        return ~allowed(of_block(self.mask, block))

    def keys_seen(self, sequence: int, queries: slice) -> slice:
        """Keys among which are all that some queries of a sequence without a range may attend to.

        All of them where a query may attend to none: it gives each the same weight.
        """
        mask = of_sequence(self.mask, sequence)
        attended = allowed(mask[:, queries if mask.shape[1] > 1 else slice(0, 1)])
        seen = attended.flatten(0, 1).any(0).nonzero()
        if not len(seen) or not attended.any(-1).all():
            return slice(0, mask.shape[-1])
        return slice(int(seen[0]), int(seen[-1]) + 1)

    def _beyond_window(self, block: Block) -> torch.Tensor | None:
        """Which keys are out of a sequence's range or too far away, (1, queries, keys); None where the queries see none near."""
        start, stop = self.ranges[block.sequence]
        if not self.window.sees_some(block.queries.start, start, stop):
            return None
        query, key = (torch.arange(part.start, part.stop) for part in (block.queries, block.keys))
        near = self.window.rule(None, None, query[:, None], key)
        return ~(near & (key >= start) & (key < stop))[None]

    def apply(self, scores: torch.Tensor, block: Block) -> None:
        """Overwrite masked scores (summed, they overflow in float16) and add what an additive mask has for the others.

        Keys outside the sequence's range are masked too.
        """
        lowest = torch.finfo(scores.dtype).min
        forbidden = self.forbidden(block)
        if forbidden is not None:
            if self.mask is not None and self.mask.dtype != torch.bool:
                scores.add_(of_block(self.mask, block))
            scores.masked_fill_(forbidden, lowest)
            return
        start, stop = self.ranges[block.sequence]
        for beside in (slice(block.keys.start, start), slice(stop, block.keys.stop)):
            if beside.start < beside.stop:
                scores[..., block.columns(beside)] = lowest


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention weights, each drawn again in the backward pass instead of kept.

    Attributes:
        probability: with which a weight is dropped; it is rounded to the steps that sixteen bits have.
        seed: what is dropped in a block is a function of this and of the block's index alone.
    """

    probability: float
    seed: int = 0

    def __bool__(self) -> bool:
        return self.probability > 0

    @property
    def dropped_of_65536(self) -> int:
        return round(self.probability * 65536)

    @property
    def keep_probability(self) -> float:
        """The probability that a weight is kept, as it is drawn; where none is, 1 (nothing is left to scale)."""
        return 1 - self.dropped_of_65536 / 65536 or 1.0

    def mask(self, block: Block, buffer: Buffer) -> torch.Tensor:
        """1.0 where a weight of a block is kept and 0.0 where it is dropped, in the memory of `buffer`."""
        mask = buffer.of_shape(*block.shape)
        if self.dropped_of_65536 == 65536:
            return mask.zero_()
        generator = torch.Generator(mask.device).manual_seed(block_seed(self.seed, block))
        # Sixteen random bits for each weight: drawing 64 at a time is several times faster than `bernoulli_`.
        bits = torch.empty(-(-mask.numel() // 4), dtype=torch.int64, device=mask.device)
        bits.random_(-(1 << 63), None, generator=generator)
        bits = bits.view(torch.int16)[: mask.numel()].view(mask.shape)
        return torch.ge(bits, self.dropped_of_65536 - 32768, out=mask)
