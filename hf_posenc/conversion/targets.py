"""What a converted model should compute: the hidden states of the original, where that can read the text at all.

Beyond the trained length, the original's own windows stand in for it: the text is cut into overlapping windows of that
length, and each token has the states of the window in which it lies most central. This is agreement with a model that
sees no further than its windows, and no proof that anything further away is used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


Batch = dict[str, torch.Tensor]
# (original, batch, trained length) -> hidden states of the embeddings and of every layer, (rows, length, width) each.
Target = Callable[[PreTrainedModel, Batch, int], tuple[torch.Tensor, ...]]


def placed(batch: Batch, device: torch.device) -> Batch:
    return {name: value.to(device) for name, value in batch.items()}


def place_of(model: torch.nn.Module) -> torch.device:
    """Where a model is, which may be wrapped for several processes."""
    return next(model.parameters()).device


@contextmanager
def placed_on(device: torch.device, *models: torch.nn.Module) -> Iterator[None]:
    """Models are on a device within, and afterwards where they were."""
    before = [place_of(model) for model in models]
    for model in models:
        model.to(device)
    try:
        yield
    finally:
        for model, place in zip(models, before):
            model.to(place)


def hidden_states(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
    """The states of the embeddings and of every layer, (batch, length, width) each, of a base model, where that is."""
    return model(**placed(batch, place_of(model)), output_hidden_states=True, return_dict=True).hidden_states


@torch.no_grad()
def original_states(original: PreTrainedModel, batch: Batch, window: int) -> tuple[torch.Tensor, ...]:
    """The original's states: of the text as a whole up to `window` tokens, and beyond of its windows."""
    if batch["input_ids"].shape[1] <= window:
        return hidden_states(original.base_model, batch)
    return windowed_states(original, batch, window)


@torch.no_grad()
def windowed_states(
    original: PreTrainedModel, batch: Batch, window: int, shifted: bool = False
) -> tuple[torch.Tensor, ...]:
    """States of long texts, put together from windows that overlap by half.

    Args:
        batch: rows of one length without padding, each between [CLS] and [SEP]; every window is put between these too.
            [CLS] has its states of the first window, [SEP] of the last.
        window: number of tokens of a window.
        shifted: cut half a step later, for another tiling of the same kind.
    """
    input_ids = batch["input_ids"]
    inner, number = window - 2, input_ids.shape[1] - 2
    step = inner // 2
    first = step // 2 if shifted else 0
    starts = torch.tensor(sorted({0, *range(first, number - inner, step), number - inner}))
    places = starts[:, None] + torch.arange(inner)  # (windows, inner), among the tokens between [CLS] and [SEP]
    # (tokens, windows): how far a token lies from the middle of each window.
    off_centre = (torch.arange(number)[:, None] - (starts + (inner - 1) / 2)[None, :]).abs()
    owner = off_centre.argmin(dim=1)
    column = torch.arange(number) - starts[owner] + 1
    rows = []
    for row in input_ids:
        windows = torch.cat(
            [row[:1].expand(len(starts), 1), row[1:-1][places], row[-1:].expand(len(starts), 1)], dim=1
        )
        states = hidden_states(original.base_model, {"input_ids": windows, "attention_mask": torch.ones_like(windows)})
        rows.append([torch.cat([layer[:1, 0], layer[owner, column], layer[-1:, -1]]) for layer in states])
    return tuple(torch.stack(layer) for layer in zip(*rows))


def normalised_error(states: tuple[torch.Tensor, ...], target: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean over the layers of the squared error over the variance of the target's states.

    The embeddings are left out: without a table they have no positions, and the layers above are what has to agree.

    Args:
        states, target: of the embeddings and of every layer, (batch, length, width) each.
    """
    errors = [
        (state.float() - aim.float()).square().mean() / aim.float().var() for state, aim in zip(states[1:], target[1:])
    ]
    return torch.stack(errors).mean()
