"""Layers that run on the tokens that are not padding: packed before the first of them, unpacked after the last.

Projections, feed-forward, LayerNorm and dropout take each token by itself, so the hidden states of a batch are passed on as (1,
tokens, hidden). Inside the self-attention, sequences of similar lengths are attended to together: their queries, keys and
values are spread over (sequences, heads, length, head_dim), and what comes out is collected again. Every token that is not
padding gets what it would get with padding, and padding itself gets zeros.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers.utils import logging

from ..masks import is_tensor
from ..schemes.terms import Term
from ..stock_interface import ModelInputs, Receives
from ..torch_state import is_compiled, is_hooked, is_traced


logger = logging.get_logger(__name__)


# Share of padding, and number of tokens that are padding, from which on packing is faster than computing them (measured by
# benchmarks/padding.py --thresholds).
SMALLEST_SHARE, FEWEST_PLACES = 0.08, 32
# Scores (pairs of tokens, times heads) that must be saved for sequences to become a group of their own, and how much shorter
# than the longest of the group before they must be.
FEWEST_SAVED, SHORTER = 1 << 16, 0.8
# Packages whose layers take each token by itself, but for the self-attention.
OWN_FORWARDS = ("transformers", __name__.partition(".")[0])
# Attention functions that take masks of pairs.
BACKENDS = ("sdpa", "eager")
# Where padding is skipped: where it was measured to be faster, and where `hf_posenc.unpad` asks for it.
MEASURED, ON_REQUEST = ("cpu",), ("cpu", "cuda")


class PadWithTokens(torch.autograd.Function):
    """Rows of (tokens, width) at their indices in padded sequences; what stands at padding has no gradient.

    Its own gradient, by the indices, is a selection too: that of `index_select` would add up row by row.
    """

    @staticmethod
    def forward(ctx, states: torch.Tensor, source: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.save_for_forward(source)
        return states.index_select(0, source)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient.index_select(0, *ctx.saved_tensors), None, None

    @staticmethod
    def jvp(ctx, tangent: torch.Tensor, *of_constants: None) -> torch.Tensor:
        return tangent.index_select(0, *ctx.saved_tensors)


@dataclass
class Group:
    """Sequences of similar lengths.

    Attributes:
        sequences: int64, which of the batch; None where these are all, in their order.
        shape: (sequences, length).
        tokens: how many of the packed ones are theirs; groups follow each other.
        places: int64 (tokens,), where their tokens are in (sequences · length); None where they are everywhere.
        source: int64 (sequences · length,), the token at each index; at padding a token of the same sequence.
        mask: bool (sequences, 1, 1, length), what may be attended to; None where that is everything.
    """

    sequences: torch.Tensor | None
    shape: tuple[int, int]
    tokens: int
    places: torch.Tensor | None = None
    source: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    @classmethod
    def of(cls, kept: torch.Tensor, attended: torch.Tensor, sequences: torch.Tensor | None = None) -> "Group":
        """The group of some sequences.

        Args:
            kept, attended: bool (sequences, length), which tokens are packed, and which of them others may attend to.
        """
        mask = None if attended.all() else attended[:, None, None]
        tokens = int(kept.sum())
        if tokens == kept.numel():
            return cls(sequences, tuple(kept.shape), tokens, mask=mask)
        order = kept.flatten().cumsum(0).view_as(kept) - 1  # of a token among the packed ones
        source = torch.where(kept, order, order.gather(1, kept.int().argmax(1, keepdim=True)))
        return cls(sequences, tuple(kept.shape), tokens, kept.flatten().nonzero()[:, 0], source.flatten(), mask)

    def pad_heads(self, states: torch.Tensor) -> torch.Tensor:
        """From (tokens, heads, head_dim) to (sequences, heads, length, head_dim)."""
        _, heads, head_dim = states.shape
        return self.pad(states.flatten(1)).view(*self.shape, heads, head_dim).transpose(1, 2)

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """From (tokens, width) to (sequences, length, width)."""
        if self.places is not None:
            states = PadWithTokens.apply(states, self.source, self.places)
        return states.view(*self.shape, -1)

    def collect(self, output: torch.Tensor) -> torch.Tensor:
        """From (sequences, length, heads, head_dim) to (tokens, heads · head_dim)."""
        output = output.flatten(2).flatten(0, 1)
        return output if self.places is None else output.index_select(0, self.places)

    def terms(self, terms: Sequence[Term], length: int) -> list[Term]:
        """What terms of sequences of `length`, (batch or 1, ...), are for these, which end earlier."""
        return [term.of_group(self._of, length, self.shape[1]) for term in terms]

    def to(self, device: torch.device, non_blocking: bool = False) -> "Group":
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: value.to(device, non_blocking=non_blocking) for name, value in tensors.items()})

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[0] == 1 or self.sequences is None:
            return tensor
        return tensor.index_select(0, self.sequences)


@dataclass
class Packing:
    """Which tokens of a batch are packed, in which order.

    Attributes:
        shape: (batch, length).
        places: int64 (tokens,), where they are in (batch · length).
        groups: see [`Group`].
        lengths: tokens of each sequence, in the order in which they are packed; None where some are attended to by nobody.
        starts: int32 (sequences + 1,), of `lengths`: the first token of each sequence, and the number of tokens.
    """

    shape: tuple[int, int]
    places: torch.Tensor
    groups: list[Group]
    lengths: list[int] | None = None
    starts: torch.Tensor | None = None

    @classmethod
    def of(cls, attended: torch.Tensor, heads: int | None) -> "Packing":
        """The packing of a batch in which no sequence is empty.

        The first token of a sequence is packed even if it is padding, and computed as it is without packing: it is a query, and
        nobody attends to it. Heads read it, and so does what pools sentences.

        Args:
            attended: bool (batch, length), the tokens that are not padding, on a CPU.
            heads: of the self-attention; None for a single group in the order of the batch.
        """
        batch, length = attended.shape
        kept = attended.clone()
        kept[:, 0] = True
        lengths, order = attended.sum(1).sort(descending=True, stable=True)
        # Sequences that begin with padding, or have some inside, do not fit into fewer tokens by their first tokens.
        if heads is None or not torch.equal(attended, torch.arange(length) < attended.sum(1, keepdim=True)):
            own = attended.sum(1).tolist() if bool(attended[:, 0].all()) else None
            return cls((batch, length), kept.flatten().nonzero()[:, 0], [Group.of(kept, attended)], *_with_starts(own))
        places, groups, own = [], [], lengths.tolist()
        for start, stop in groups_of(own, heads):
            sequences, longest = order[start:stop], own[start]
            part = kept[sequences, :longest]
            groups.append(Group.of(part, part, sequences))
            places.append((sequences[:, None] * length + torch.arange(longest))[part])
        return cls((batch, length), torch.cat(places), groups, *_with_starts(own))

    def to(self, device: torch.device, non_blocking: bool = False) -> "Packing":
        """The same on a device. accelerate calls it where the layers of a model are on several."""
        if torch.device(device) == self.places.device:
            return self
        places, groups = self.places.to(device), [group.to(device, non_blocking) for group in self.groups]
        return replace(
            self, places=places, groups=groups, starts=None if self.starts is None else self.starts.to(device)
        )

    def unpad_input(self, states: torch.Tensor) -> torch.Tensor:
        """From (batch or 1, length, width) to (1, tokens, width)."""
        states = states.expand(self.shape[0], -1, -1)
        return states.flatten(0, 1).index_select(0, self.places.to(states.device))[None]

    def pad_input(self, states: torch.Tensor) -> torch.Tensor:
        """From (1, tokens, width) to (batch, length, width), zeros where nothing was packed."""
        batch, length = self.shape
        padded = states.new_zeros(batch * length, states.shape[-1])
        return padded.index_copy(0, self.places.to(states.device), states[0]).view(batch, length, -1)

    def pad_heads(self, states: torch.Tensor) -> torch.Tensor:
        """From (1, heads, tokens, head_dim) to (batch, heads, length, head_dim)."""
        heads = states.shape[1]
        padded = self.pad_input(states.transpose(1, 2).flatten(2))
        return padded.view(*self.shape, heads, -1).transpose(1, 2)

    def unpad_heads(self, states: torch.Tensor) -> torch.Tensor:
        """From (batch, heads, length, head_dim) to (1, heads, tokens, head_dim)."""
        heads = states.shape[1]
        packed = self.unpad_input(states.transpose(1, 2).flatten(2))
        return packed.view(1, -1, heads, states.shape[-1]).transpose(1, 2)

    def by_group(self, states: torch.Tensor) -> list[torch.Tensor]:
        """From (1, heads, tokens, head_dim) to (sequences, heads, length, head_dim) for each group."""
        parts = states[0].transpose(0, 1).split([group.tokens for group in self.groups])
        return [group.pad_heads(part) for group, part in zip(self.groups, parts)]

    def attend(self, attend: Callable, states: Sequence[torch.Tensor], terms: Sequence[Term] = ()) -> torch.Tensor:
        """What packed tokens get of those of their own sequence, (1, tokens, heads · head_dim).

        Args:
            attend: an attention of padded sequences: it is given those of one group, (sequences, heads, length, head_dim) for each of
                `states`, the group's terms and mask, and returns (sequences, length, heads, head_dim).
            states: query, key and value, (1, heads, tokens, head_dim), in the order of `attend`. The same twice is padded once.
            terms: score terms of sequences of `shape`.
        """
        padded = {which: self.by_group(one) for which, one in {id(one): one for one in states}.items()}
        outputs = []
        for place, group in enumerate(self.groups):
            own = group.terms(terms, self.shape[1])
            outputs.append(group.collect(attend(*(padded[id(one)][place] for one in states), own, group.mask)))
        return torch.cat(outputs)[None]


def _with_starts(lengths: list[int] | None) -> tuple[list[int] | None, torch.Tensor | None]:
    """`lengths` and `starts` of a [`Packing`]."""
    if lengths is None:
        return None, None
    return lengths, torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def groups_of(lengths: list[int], heads: int) -> list[tuple[int, int]]:
    """Where groups begin and end among sequences that are sorted by their lengths, the longest first."""
    starts = [0]
    for index, length in enumerate(lengths):
        longest = lengths[starts[-1]]
        saved = (len(lengths) - index) * (longest**2 - length**2) * heads
        if length <= SHORTER * longest and saved >= FEWEST_SAVED:
            starts.append(index)
    return list(zip(starts, [*starts[1:], len(lengths)]))


def devices(is_requested: bool) -> tuple[str, ...]:
    """The types of the devices on which padding is skipped."""
    return ON_REQUEST if is_requested else MEASURED


def packing_of(
    config, encoder: nn.Module, heads: int | None, inputs: ModelInputs, is_requested: bool = False
) -> Packing | None:
    """The packing of a batch, where it pays to leave its padding out and nothing stands against it.

    Args:
        config, encoder: of the base model that is called.
        heads: see [`Packing.of`].
        inputs: what it is called with.
        is_requested: by `hf_posenc.unpad`.
    """
    if is_traced():
        return None
    reason = reason_against(config, encoder, inputs, is_requested)
    if reason is not None:
        logger.debug("padding is computed: %s", reason)
        return None
    # Worked out on a CPU, so that a device is waited for once, and not for each number.
    mask = inputs.attention_mask
    return Packing.of(mask.cpu().bool(), heads).to(mask.device)


def reason_against(config, encoder: nn.Module, inputs: ModelInputs, is_requested: bool) -> str | None:
    """Why the padding of a batch is computed, for people; None where it is left out. docs/padding.md lists the reasons.

    Args:
        config, encoder, inputs, is_requested: as for [`packing_of`].
    """
    mask = inputs.attention_mask
    if not is_tensor(mask) or mask.dim() != 2:
        return "there is no attention_mask of (batch, length)"
    # Of a mask of other sequences, Transformers makes what it makes, or an error.
    if tuple(mask.shape) != inputs.shape:
        return f"attention_mask has the shape {tuple(mask.shape)} and the input {inputs.shape}"
    if mask.device.type not in devices(is_requested) or config._attn_implementation not in BACKENDS:
        return (
            f"it is skipped on CPUs, and on CUDA after hf_posenc.unpad, with {' and '.join(BACKENDS)}, not on {mask.device} with "
            f"{config._attn_implementation}"
        )
    lengths = mask.cpu().count_nonzero(1)
    padding, least = mask.numel() - int(lengths.sum()), max(FEWEST_PLACES, SMALLEST_SHARE * mask.numel())
    if padding < least:
        return f"{padding} of {mask.numel()} tokens are padding, and skipping it is faster from {least:.0f} on"
    # A sequence that is padding from end to end attends to its padding, and what is recorded has padding in it.
    if not lengths.all():
        return "a sequence has only padding"
    if padding_is_read.get():
        return "the loss reads positions that are padding"
    if inputs.records(config):
        return "hidden states or attention weights are requested"
    if inputs.cache is not None or inputs.reads_another_sequence or getattr(config, "is_decoder", False):
        return "the model is a decoder, or reads a cache or another sequence"
    if getattr(config, "chunk_size_feed_forward", 0):
        return "chunk_size_feed_forward is set"
    if is_hooked(encoder) or is_compiled(encoder):
        return "the encoder or a part of it has hooks of others, or is compiled by itself"
    if has_layers_of_others(encoder):
        return "a layer has a forward of others, which may read padding or run again in the backward pass"
    return None


def has_layers_of_others(encoder: nn.Module) -> bool:
    """Whether an encoder has a layer whose forward is neither Transformers' nor from here."""
    layers = itertools.chain.from_iterable(part for part in encoder.children() if isinstance(part, nn.ModuleList))
    return any(type(layer).forward.__module__.partition(".")[0] not in OWN_FORWARDS for layer in layers)


# Whether the loss of the head that is called reads what stands at padding.
padding_is_read: ContextVar[bool] = ContextVar("padding_is_read", default=False)


def loss_reads_padding(inputs: ModelInputs, is_requested: bool) -> bool:
    """Whether the loss of a head that is called so has a part at padding: labels there, or a softmax over the sequence.

    Args:
        is_requested: `hf_posenc.unpad` asked to skip it.
    """
    mask, labels = inputs.attention_mask, inputs.arguments.get("labels")
    if inputs.arguments.get("start_positions") is not None:
        return True
    if not is_tensor(mask) or mask.device.type not in devices(is_requested):  # nothing is packed
        return False
    if not isinstance(labels, torch.Tensor) or labels.numel() != mask.numel():
        return False
    if labels.is_floating_point() or mask.dim() != 2:
        return False
    # Losses flatten them, so that flat ones are taken too: as one sequence, in which the next begins where one ends.
    shape = mask.shape if labels.shape == mask.shape else (1, mask.numel())
    learned, is_padding = labels.reshape(shape) != -100, mask.to(labels.device).reshape(shape) == 0
    # A head that writes text learns a token from what stands one index before it.
    return bool((learned & is_padding).any() or (learned[:, 1:] & is_padding[:, :-1]).any())


def computes_padding_that_is_read(forward: Callable) -> Callable:
    """A head's forward whose base model computes padding where the head's loss reads it."""
    receives = Receives.of(forward)

    @functools.wraps(forward)
    def forward_with_padding(self, *args, **kwargs):
        is_requested = getattr(self.base_model, "unpad_is_requested", False)
        if is_traced() or not loss_reads_padding(ModelInputs.of(receives, args, kwargs), is_requested):
            return forward(self, *args, **kwargs)
        token = padding_is_read.set(True)
        try:
            return forward(self, *args, **kwargs)
        finally:
            padding_is_read.reset(token)

    return forward_with_padding
