"""Whether two models compute the same: on padded batches of several lengths, in all layers and at the end."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput


# The shortest length that is tried, and the longest.
SHORTEST, LONGEST = 7, 2048
# What rounding may do, as a share of the largest number of an output: float32 in tens of layers, and angles of rotary positions, which other code
# computes in float32.
ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4}
HALF_PRECISION = 5e-2
OUTPUTS = ("logits", "start_logits", "end_logits", "pooler_output")


@dataclass(frozen=True)
class Agreement:
    """The largest difference of two models at tokens that are not padding.

    Attributes:
        difference: of any number in any output.
        lengths: that were tried, in tokens.
        size: of the largest number.
    """

    difference: float
    lengths: tuple[int, ...]
    size: float

    def __str__(self) -> str:
        return f"largest difference {self.difference:.1e} in outputs up to {self.size:.1f}, at {', '.join(map(str, self.lengths))} tokens"


def check_agreement(
    model: PreTrainedModel, other: PreTrainedModel, max_length: int, with_types: bool, sides: tuple[str, ...]
) -> Agreement:
    """Run both and compare hidden states of all layers, logits and pooled outputs.

    Args:
        max_length: of the longest sequence; at most 2,048 tokens are tried.
        with_types: token types other than 0 occur.
        sides: on which padding stands, "right" and "left".

    Raises:
        ValueError: they differ by more than rounding.
    """
    lengths = tuple(sorted({min(length, max_length) for length in (SHORTEST, 128, 512, LONGEST)}))
    modes = model.training, other.training
    worst, size = 0.0, 1.0
    try:
        model.eval(), other.eval()
        for length in lengths:
            for side in sides if length > SHORTEST else ("right",):
                for name, own, there in _outputs(model, other, length, with_types, side):
                    worst = max(worst, _difference(name, own, there, length, model.dtype))
                    size = max(size, own.abs().max().item())
    finally:
        model.train(modes[0]), other.train(modes[1])
    return Agreement(worst, lengths, size)


def _difference(name: str, own: torch.Tensor, there: torch.Tensor, length: int, dtype: torch.dtype) -> float:
    difference, size = (own - there).abs().max().item(), max(1.0, own.abs().max().item())
    if not difference <= ROUNDING.get(dtype, HALF_PRECISION) * size:  # also if it is no number
        raise ValueError(
            f"the two models differ: {name} by {difference:.1e} at {length} tokens, with values up to {size:.1f}; nothing was written"
        )
    return difference


@torch.no_grad()
def _outputs(
    model: PreTrainedModel, other: PreTrainedModel, length: int, with_types: bool, side: str
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Each output of both models, where tokens are no padding."""
    inputs = _batch(model, length, with_types, side)
    attended = inputs["attention_mask"].bool()
    is_choice = type(model).__name__.endswith("ForMultipleChoice")
    if is_choice:
        inputs = {name: tensor[None] for name, tensor in inputs.items()}
    own: ModelOutput = model(**inputs, output_hidden_states=True, return_dict=True)
    if not with_types:
        inputs.pop("token_type_ids", None)
    there: ModelOutput = other(**inputs, output_hidden_states=True, return_dict=True)
    for layer, states in enumerate(zip(own.hidden_states, there.hidden_states, strict=True)):
        yield f"hidden state {layer}", *(each[attended] for each in states)
    for name in OUTPUTS:
        pair = [getattr(each, name, None) for each in (own, there)]
        if any(each is None for each in pair):
            continue
        if pair[0].shape[: attended.dim()] == attended.shape:
            pair = [each[attended] for each in pair]
        elif side == "left":  # of the first token, which is padding in the second sequence: nobody reads that
            pair = [each[:, :1] if is_choice else each[:1] for each in pair]
        yield name, *pair


def _batch(model: PreTrainedModel, length: int, with_types: bool, side: str) -> dict[str, Any]:
    """Two sequences of random tokens, one of them with padding; the same for every call."""
    config, generator = model.config, torch.Generator().manual_seed(length)
    vocabulary = config.vocab_size
    ids = torch.randint(min(5, vocabulary - 1), vocabulary, (2, length), generator=generator)
    padding = config.pad_token_id or 0
    ids[ids == padding] = (padding + 1) % vocabulary if padding + 1 != 1 else 2 % vocabulary
    mask = torch.ones_like(ids)
    place = slice(0, length // 3) if side == "left" else slice(length - length // 3, None)
    ids[1, place], mask[1, place] = padding, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if with_types:
        inputs["token_type_ids"] = (torch.arange(length) > length // 2).long().expand(2, -1).clone()
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}
