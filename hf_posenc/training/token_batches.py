"""Batches by a limit of tokens, of texts of similar lengths."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler


# Texts that are sorted together, in batches of the mean size; as in transformers' `LengthGroupedSampler`.
BATCHES_SORTED_TOGETHER = 50
# Orders that are drawn until one needs no more batches than an epoch has, and by how much that is more than the first one needs.
DRAWS, SPARE = 10, 0.02


class TokenBatchSampler(Sampler[list[int]]):
    """A batch sampler with a limit of tokens for each batch: many short texts, or a few long ones.

    As in transformers' `LengthGroupedSampler`, texts are shuffled, cut into parts of about 50 batches, and sorted by length within each
    part. The sorted texts are cut into batches, and the batches are shuffled. The batch with the longest text comes first, so that a lack of
    memory shows early. Each text is in one batch of an epoch. A text that is longer than the limit is alone in its batch.

    All epochs have the same number of batches, a multiple of `multiple_of`. If there are too few texts for that, the shortest come
    twice. Each group of `multiple_of` consecutive batches has similar numbers of tokens, so all processes have the same amount of work.
    accelerate distributes the batches to the processes and passes the epoch to the sampler:

        sampler = TokenBatchSampler(lengths, max_tokens=4096, multiple_of=accelerator.num_processes)
        loader = accelerator.prepare(DataLoader(data, batch_sampler=sampler, collate_fn=DataCollatorWithPadding(tokenizer)))

    With several processes, a loader of `accelerate.skip_first_batches` does not pass the epoch. In a training loop that
    resumes in the middle of an epoch, call `sampler.set_epoch(epoch)`. `PositionTrainer` does.

    accelerate before 1.14 needs `Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))` for several processes.

    Batches differ in their number of texts, so the mean of their losses is not the mean over all texts. `PositionTrainer` and models with a position
    scheme divide by `num_items_in_batch`, the labels of all batches of an optimizer step in all processes. In a training loop, take the sum of the
    losses, divide it by that number, and multiply it by the number of processes, because DistributedDataParallel takes the mean.

    Args:
        lengths: number of tokens of each text.
        max_tokens: largest number of tokens of a batch.
        counts_padding: count padding too: the number of texts times the length of the longest. `False` counts the tokens of the texts only,
            which suits padding-free models.
        multiple_of: number of processes.
        shuffle: `False` sorts all texts, and gives the same batches in the same order in each epoch.
        seed: seed of the order. The order differs between epochs.

    Raises:
        ValueError: there are fewer texts than `multiple_of`, or a number is not positive.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        counts_padding: bool = True,
        multiple_of: int = 1,
        shuffle: bool = True,
        seed: int = 0,
    ):
        self.lengths = [int(length) for length in lengths]
        if max_tokens < 1 or multiple_of < 1:
            raise ValueError(f"max_tokens={max_tokens} and multiple_of={multiple_of} must be positive")
        if len(self.lengths) < multiple_of:
            raise ValueError(f"{len(self.lengths)} texts are fewer than the {multiple_of} batches of all processes")
        self.max_tokens, self.counts_padding = max_tokens, counts_padding
        self.multiple_of, self.shuffle, self.seed, self.epoch = multiple_of, shuffle, seed, 0
        # Sorted texts fit into about the fewest batches, so that these always do.
        number = len(self._cut(self._sorted(range(len(self.lengths)))))
        if shuffle:
            number = math.ceil((1 + SPARE) * max(number, len(self._cut(self._draw(0)))))
        self.number = multiple_of * math.ceil(min(number, len(self.lengths)) / multiple_of)

    @property
    def sampler(self) -> "TokenBatchSampler":
        """This object. accelerate passes the epoch to the `sampler` of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._even(self._batches())
        batches.sort(key=self._cost, reverse=True)
        turns = [batches[start : start + self.multiple_of] for start in range(0, len(batches), self.multiple_of)]
        if self.shuffle:
            turns = [turns[turn] for turn in torch.randperm(len(turns), generator=self._generator(DRAWS)).tolist()]
        longest = max(range(len(turns)), key=lambda turn: max(self.lengths[t] for batch in turns[turn] for t in batch))
        return iter([batch for turn in (turns.pop(longest), *turns) for batch in turn])

    def _batches(self) -> list[list[int]]:
        """The batches of an epoch, at most as many as it has."""
        for draw in range(DRAWS if self.shuffle else 0):
            batches = self._cut(self._draw(draw))
            if len(batches) <= self.number:
                return batches
        return self._cut(self._sorted(range(len(self.lengths))))

    def _even(self, batches: list[list[int]]) -> list[list[int]]:
        """As many batches as an epoch has: the largest ones are halved. Where each text is alone already, the cheapest ones come twice."""
        while (missing := self.number - len(batches)) > 0:
            if len(batches) == len(self.lengths):
                return batches + sorted(batches, key=self._cost)[:missing]
            batches = sorted(batches, key=len)
            kept, largest = batches[:-missing], batches[-missing:]
            halves = [half for batch in largest for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :])]
            batches = kept + [half for half in halves if half]
        return batches

    def _generator(self, draw: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) * (DRAWS + 1) + draw)

    def _draw(self, draw: int) -> list[int]:
        """An order of the texts, sorted by length in parts."""
        order = torch.randperm(len(self.lengths), generator=self._generator(draw)).tolist()
        mean = max(sum(self.lengths) / len(order), 1)
        size = max(BATCHES_SORTED_TOGETHER * int(self.max_tokens / mean), BATCHES_SORTED_TOGETHER)
        return [text for start in range(0, len(order), size) for text in self._sorted(order[start : start + size])]

    def _sorted(self, texts: Sequence[int]) -> list[int]:
        return sorted(texts, key=self.lengths.__getitem__, reverse=True)

    def _cost(self, batch: list[int]) -> int:
        lengths = [self.lengths[text] for text in batch]
        return len(lengths) * max(lengths) if self.counts_padding else sum(lengths)

    def _cut(self, order: list[int]) -> list[list[int]]:
        """Batches of neighbours, as large as the limit lets them be."""
        batches: list[list[int]] = []
        longest = tokens = 0
        for text in order:
            length = self.lengths[text]
            longest, tokens = max(longest, length), tokens + length
            cost = (len(batches[-1]) + 1) * longest if batches and self.counts_padding else tokens
            if not batches or cost > self.max_tokens:
                batches.append([])
                longest = tokens = length
            batches[-1].append(text)
        return batches
