"""Batches whose positions are drawn at random."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class RandomizedPositions:
    """A data collator that gives the tokens of each text random positions, in ascending order.

    A model that is trained on short texts then sees all distances that longer texts have. Each text gets as many positions as it has tokens,
    drawn without replacement from `longest`. They are passed as `position_ids`, which all schemes accept. Padding gets the position id that is
    usual in the model's family.

    Use this collator for training. Evaluate without it, or with `longest` equal to the length of the longest text.

    Args:
        collator: the collator that makes batches, such as `DataCollatorWithPadding(tokenizer)`. A batch must have `input_ids` and
            may have an `attention_mask`.
        longest: number of positions to draw from.
        first_position: position id of a text's first token, `model.config.first_position`: 0, and `pad_token_id + 1` in families like RoBERTa.

    Raises:
        ValueError: a text has more tokens than there are positions; or texts are packed, so that the batch has `position_ids` or a mask of
            pairs of tokens.

    Source: Ruoss et al. 2023, "Randomized Positional Encodings Boost Length Generalization of Transformers"
    (https://arxiv.org/abs/2305.16843).
    """

    collator: Callable[[Any], Any]
    longest: int
    first_position: int = 0

    def __call__(self, features: Any) -> Any:
        batch = self.collator(features)
        input_ids = batch["input_ids"]
        if "position_ids" in batch:
            raise ValueError(
                "the batch has position_ids already, as that of a collator that packs texts: RandomizedPositions draws them for texts in rows of "
                "their own"
            )
        mask = batch.get("attention_mask", torch.ones_like(input_ids))
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"RandomizedPositions needs an attention_mask of the shape of input_ids, {tuple(input_ids.shape)}, got {tuple(mask.shape)}"
            )
        tokens = mask.bool()
        most = int(tokens.sum(-1).max())
        if most > self.longest:
            raise ValueError(
                f"a text of {most} tokens needs more than the {self.longest} positions of RandomizedPositions"
            )
        positions = torch.full_like(input_ids, max(self.first_position - 1, 0))
        rows = positions.view(-1, positions.shape[-1]), tokens.view(-1, tokens.shape[-1])
        for row, kept in zip(*rows, strict=True):
            drawn = torch.randperm(self.longest)[: int(kept.sum())].sort().values
            row[kept] = self.first_position + drawn.to(row)
        batch["position_ids"] = positions
        return batch
