"""Losses over several processes and accumulated batches: heads that understand `num_items_in_batch`.

    loss of a part = sum over the part's own labels / num_items_in_batch

`Trainer` counts the labels other than -100 of all parts of a step (accumulated batches, processes), hands every model that
number, and adds up the parts' losses without dividing by how many there are. Original heads that write text do the same in
their `loss_function`; the others take the mean over their own labels, so that what is trained on is too large by the number
of parts, and a part with few labels weighs as much as one with many. Source: `transformers.trainer.Trainer.compute_loss`
and `transformers.loss.loss_utils.fixed_cross_entropy`.
"""

import functools
import inspect
from collections.abc import Callable

import torch
from torch.nn import functional


def label_names(forward: Callable) -> tuple[str, ...]:
    """The parameters of a forward that are labels; an original head computes a loss once it has them all. Base models have none."""
    names = inspect.signature(forward).parameters
    return tuple(name for name in names if "label" in name or name in ("start_positions", "end_positions"))


def averaged_over_all(forward: Callable) -> Callable:
    """An original head's forward that understands `num_items_in_batch`; without it, Transformers' loss."""
    names = tuple(inspect.signature(forward).parameters)[1:]
    labels = label_names(forward)

    @functools.wraps(forward)
    def averaged(self, *args, num_items_in_batch: torch.Tensor | int | None = None, **kwargs):
        output = forward(self, *args, **kwargs)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if num_items_in_batch is None or any(arguments.get(name) is None for name in labels):
            return output
        values = output if isinstance(output, tuple) else output.to_tuple()
        number = torch.as_tensor(num_items_in_batch, device=values[0].device)
        loss = self.loss_over_all(values, arguments, number)
        if isinstance(output, tuple):
            return loss, *output[1:]
        output.loss = loss
        return output

    return averaged


def number_of_labels(labels: torch.Tensor) -> torch.Tensor | int:
    """How many labels an original loss is the mean over: of classes, those other than -100; of numbers, all.

    Numbers are learnt by regression and by multi-label classification, whose losses ignore none.
    """
    return labels.numel() if labels.is_floating_point() else (labels != -100).sum()


def mean_over_all(mean: torch.Tensor, own: torch.Tensor | int, number: torch.Tensor | int) -> torch.Tensor:
    """Σ over own labels / number, from the mean over `own` of them; 0 if there are none, where the mean is NaN."""
    own = torch.as_tensor(own, device=mean.device)
    return torch.where(own > 0, mean, torch.zeros_like(mean)) * (own / number)


def answers_over_all(
    start_logits: torch.Tensor,
    end_logits: torch.Tensor,
    start_positions: torch.Tensor,
    end_positions: torch.Tensor,
    number: torch.Tensor | int,
) -> torch.Tensor:
    """(Σ loss of own starts + Σ loss of own ends) / (2 · number), where `number` counts the answers in all parts.

    Logits are (batch, length), positions (batch) or (batch, 1). As in Transformers a position beyond the length is ignored; of
    an answer that is cut off, that is its end alone.
    """
    length = start_logits.shape[1]
    sums = [
        functional.cross_entropy(
            logits, positions.view(-1).clamp(0, length).to(logits.device), ignore_index=length, reduction="sum"
        )
        for logits, positions in ((start_logits, start_positions), (end_logits, end_positions))
    ]
    return (sums[0] + sums[1]) / 2 / number
