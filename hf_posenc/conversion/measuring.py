"""What a converted model keeps of its original, measured on text that neither was converted with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cosine_similarity, cross_entropy, pad
from transformers import PreTrainedModel

from .. import inspection
from .targets import Batch, hidden_states, original_states, placed, windowed_states
from .texts import Windows


# Lines within the trained length, and tokens of the windows beyond.
LINES = 64
TOKENS_BEYOND = 8192
ROWS_AT_ONCE = 8
NEIGHBOURS = 5
MASKED = 0.15
# Texts that a head for multiple choice is to choose among.
CHOICES = 4
Row = dict[str, Any]


def _weighted(states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    weights = weights[:, :, None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


# As sentence-transformers names and computes them: vectors (batch, width) of states (batch, length, width) and a mask (batch, length),
# with padding on the right. Cosines do not depend on lengths of vectors, so one mean is as good as the other.
POOLED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": lambda states, mask: states[:, 0],
    "lasttoken": lambda states, mask: states[torch.arange(len(states)), mask.sum(1) - 1],
    "max": lambda states, mask: states.masked_fill(mask[:, :, None] == 0, -torch.inf).amax(1),
    "mean": _weighted,
    "mean_sqrt_len_tokens": _weighted,
    "weightedmean": lambda states, mask: _weighted(states, mask.cumsum(1) * mask),
}


def lengths_to_measure(trained_length: int, max_length: int) -> list[int]:
    """The trained length, four times that, eight times and so on, and the longest."""
    lengths, length = [trained_length], trained_length * 4
    while length < max_length:
        lengths.append(length)
        length *= 2
    return lengths + [max_length] * (max_length > trained_length)


@dataclass
class _Mean:
    """The mean of the elements of tensors that come one after the other."""

    total: float = 0.0
    number: int = 0

    def add(self, values: torch.Tensor) -> None:
        self.total += float(values.sum(dtype=torch.float64))
        self.number += values.numel()

    @property
    def value(self) -> float:
        return self.total / self.number


@dataclass
class _Text:
    """The text of one length, with what the original makes of it."""

    length: int
    batch: Batch
    target: tuple[torch.Tensor, ...]
    other: torch.Tensor | None

    @property
    def real(self) -> torch.Tensor:
        return self.batch["attention_mask"].bool()


def _by_length(batch: Batch) -> Batch:
    """The rows of a batch in the order of their lengths, so that those that are read at once have little padding."""
    order = batch["attention_mask"].sum(1).argsort(stable=True)
    return {name: value[order] for name, value in batch.items()}


def _parts(batch: Batch) -> Iterator[Batch]:
    """A few rows at a time, cut to the longest of them."""
    for row in range(0, len(batch["input_ids"]), ROWS_AT_ONCE):
        part = {name: value[row : row + ROWS_AT_ONCE] for name, value in batch.items()}
        longest = int(part["attention_mask"].sum(1).max())
        yield {name: value[:, :longest] for name, value in part.items()}


@torch.no_grad()
def _in_parts(compute: Callable[[Batch], tuple[torch.Tensor, ...]], batch: Batch) -> tuple[torch.Tensor, ...]:
    """Tensors (batch, length, ...) of a batch, on the CPU, computed a few rows at a time; 0 at padding that was cut off."""
    length = batch["input_ids"].shape[1]
    parts = [
        [pad(tensor.cpu(), (0, 0, 0, length - tensor.shape[1])) for tensor in compute(part)] for part in _parts(batch)
    ]
    return tuple(torch.cat(tensors) for tensors in zip(*parts))


class Yardstick:
    """The original on held-out text of several lengths; measures models against it.

    Args:
        original: the model that was converted.
        held_out: text; lengths that it has no window of are left out.
        trained_length: number of tokens up to which the original itself is the target; beyond, its own windows are.
        max_length: the longest text to measure on.
        pooling: how a text's vector is made of its tokens': ways of [`POOLED`], joined by "+".

    Attributes:
        left_out: the lengths for which the text was too short.
    """

    def __init__(
        self,
        original: PreTrainedModel,
        held_out: Windows,
        trained_length: int,
        max_length: int,
        pooling: str = "mean",
    ):
        self.original, self.pooling, self.trained_length = original, pooling, trained_length
        self.texts: list[_Text] = []
        self.left_out: list[int] = []
        self.held_out = held_out
        for length in lengths_to_measure(trained_length, max_length):
            beyond = length > trained_length
            rows = max(4, TOKENS_BEYOND // length) if beyond else LINES
            batch = held_out.evenly_spaced(length, rows) if beyond else _by_length(held_out.lines(length, rows))
            if len(batch["input_ids"]) < 2:
                self.left_out.append(length)
                continue
            target = _in_parts(lambda part: original_states(original, part, trained_length), batch)
            other = None
            if beyond:
                [other] = _in_parts(
                    lambda part: windowed_states(original, part, trained_length, shifted=True)[-1:], batch
                )
            self.texts.append(_Text(length, batch, target, other))
        if not self.texts:
            raise ValueError("the held-out text is shorter than two lines: name more text")

    def measure(self, model: PreTrainedModel, stage: str) -> list[Row]:
        """A row per length that the model can read."""
        longest = inspection.longest_sequence(model.config)
        return [
            {"stage": stage, "length": text.length, **self._agreement(model, text), **self._head(model, text)}
            for text in self.texts
            if longest is None or text.length <= longest
        ]

    def _agreement(self, model: PreTrainedModel, text: _Text) -> Row:
        found = _in_parts(lambda part: hidden_states(model.base_model, part), text.batch)
        real = text.real
        by_layer = [
            cosine_similarity(own[real], aim[real], dim=-1).mean().item() for own, aim in zip(found, text.target)
        ]
        last, aim = found[-1][real], text.target[-1][real]
        row = {
            "tokens": int(real.sum()),
            "token_cosine": by_layer[-1],
            "token_cosine_by_layer": by_layer,
            **self._sentences(found[-1], text.target[-1], text.batch["attention_mask"]),
        }
        if text.other is not None:
            generator = torch.Generator().manual_seed(0)
            pairs = torch.randint(len(last), (2, 4096), generator=generator)
            middle = aim.mean(dim=0)
            row |= {
                "other_tiling": cosine_similarity(text.other[real], aim, dim=-1).mean().item(),
                "random_pairs": cosine_similarity(last[pairs[0]], last[pairs[1]], dim=-1).mean().item(),
                "centred_cosine": cosine_similarity(last - middle, aim - middle, dim=-1).mean().item(),
            }
        return row

    def _sentences(self, found: torch.Tensor, aim: torch.Tensor, mask: torch.Tensor) -> Row:
        own, original = (self._pooled(states, mask) for states in (found, aim))
        row = {"sentence_cosine": cosine_similarity(own, original, dim=-1).mean().item()}
        number = len(own)
        if number > NEIGHBOURS + 1:
            similar = [cosine_similarity(v[:, None], v[None], dim=-1) for v in (own, original)]
            upper = torch.triu_indices(number, number, offset=1)
            row["spearman"] = spearman(*(s[upper[0], upper[1]] for s in similar))
            row["neighbours_kept"] = neighbours_kept(*similar)
        return row

    def _pooled(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.cat([POOLED[way](states, mask) for way in self.pooling.split("+")], dim=-1)

    @torch.no_grad()
    def _head(self, model: PreTrainedModel, text: _Text) -> Row:
        """Where there is a head, how far its answers agree within the trained length, padding left out."""
        if model.base_model is model or text.length > self.trained_length:
            return {}
        same, apart = _Mean(), _Mean()
        answers_are_tokens = type(model).__name__.endswith("ForQuestionAnswering")
        # One number for each token, which is above 0 where it takes the token for replaced.
        detects = type(model).__name__.endswith("ElectraForPreTraining")
        for part in _parts(text.batch):
            real = part["attention_mask"].bool()
            for own, aim in zip(_logits(model, part), _logits(self.original, part)):
                if own.dim() == 3 or detects:  # logits of each token
                    own, aim = own[real], aim[real]
                apart.add((own - aim)[real if answers_are_tokens else ...].abs())
                if answers_are_tokens:
                    own, aim = (logits.masked_fill(~real, -torch.inf) for logits in (own, aim))
                if detects:
                    same.add((own > 0) == (aim > 0))
                elif own.shape[-1] > 1:  # one number alone is no choice: it would always be the same
                    same.add(own.argmax(-1) == aim.argmax(-1))
        means = {"same_answers": same, "logits_apart": apart}
        return {name: mean.value for name, mean in means.items() if mean.number}

    def losses(self, mask_token_id: int | None, converted: PreTrainedModel) -> list[Row]:
        """The loss on masked words of the original and of the converted model, where they are such models."""
        models = {"original": self.original, "converted": converted}
        return [
            {"model": name, **row}
            for name, model in models.items()
            for row in self._masked_losses(model, mask_token_id)
        ]

    @torch.no_grad()
    def _masked_losses(self, model: PreTrainedModel, mask_token_id: int | None) -> list[Row]:
        """For a masked language model, its loss by the length of the visible context.

        The tokens are the same for all lengths: 15 % of those in the last half of a trained length of long texts.
        """
        longest_text = max(self.texts, key=lambda text: text.length)
        if not _is_masked_lm(model) or mask_token_id is None:
            return []
        whole = longest_text.batch["input_ids"]
        if not longest_text.real.all():
            whole = self.held_out.evenly_spaced(self.trained_length, LINES)["input_ids"]
        generator = torch.Generator().manual_seed(0)
        late = torch.arange(whole.shape[1]) >= whole.shape[1] - self.trained_length // 2
        asked = (torch.rand(whole.shape, generator=generator) < MASKED) & late
        asked[:, -1] = False
        masked = torch.where(asked, mask_token_id, whole)
        limit = inspection.longest_sequence(model.config)
        rows = []
        for length in [text.length for text in self.texts if limit is None or text.length <= limit]:
            length = min(length, whole.shape[1])
            # The last tokens, behind [CLS].
            visible = torch.cat([masked[:, :1], masked[:, -(length - 1) :]], dim=1)
            batch = {"input_ids": visible, "attention_mask": torch.ones_like(visible)}
            places = torch.cat([asked[:, :1], asked[:, -(length - 1) :]], dim=1)
            words = torch.cat([whole[:, :1], whole[:, -(length - 1) :]], dim=1)
            [scores] = _in_parts(lambda part: (_logits(model, part)[0],), batch)
            rows.append({"length": length, "masked_lm_loss": cross_entropy(scores[places], words[places]).item()})
        return rows


def _logits(model: PreTrainedModel, batch: Batch) -> list[torch.Tensor]:
    """What a head gives, a tensor or two, on the CPU."""
    given = _as_choices(batch) if type(model).__name__.endswith("ForMultipleChoice") else batch
    output = model(**placed(given, model.device), return_dict=True)
    return [value.cpu() for name, value in output.items() if name.endswith("logits")]


def _as_choices(batch: Batch) -> Batch:
    """Texts (batch, length) as the choices of questions, (questions, choices, length); what is left over is not used."""
    choices = min(CHOICES, len(batch["input_ids"]))
    questions = len(batch["input_ids"]) // choices
    return {name: value[: questions * choices].unflatten(0, (questions, choices)) for name, value in batch.items()}


def _is_masked_lm(model: PreTrainedModel) -> bool:
    return type(model).__name__.endswith("ForMaskedLM")


def neighbours_kept(own: torch.Tensor, original: torch.Tensor) -> float:
    """The share of each text's nearest neighbours that stay, by similarities (texts, texts), whose diagonals are overwritten."""
    nearest = [similar.fill_diagonal_(-2).topk(NEIGHBOURS).indices for similar in (own, original)]
    return (nearest[0][:, :, None] == nearest[1][:, None, :]).any(-1).float().mean().item()


def spearman(first: torch.Tensor, second: torch.Tensor) -> float:
    """The correlation of the ranks of two lists of numbers; equal numbers are ranked as they stand."""
    ranks = torch.stack([values.argsort().argsort().double() for values in (first, second)])
    return torch.corrcoef(ranks)[0, 1].item()
