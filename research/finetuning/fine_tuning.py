"""How every arm of the study is fine-tuned, and how its rates are searched."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, get_linear_schedule_with_warmup

from hf_posenc.conversion.distillation import has_bfloat16
from hf_posenc.training import frequencies, tables_and_biases


ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / name) for name in ("examples", "benchmarks", "research", "research/long_documents")]

from recorded import Line, Runs  # noqa: E402


# A rate at the end of its range is followed one step further.
RATES, POSITION_RATES = (1e-4, 2e-4, 4e-4), (0.003, 0.01, 0.03)
# Of rotary frequencies: the effect of a step grows with the distance.
FREQUENCY_RATES = (1e-4, 3e-4, 1e-3)
# Of attention there is none: kernels without it take less than half of the time.
DROPOUT = 0.1

Rates = tuple[float, float | None]
Batch = dict[str, torch.Tensor]


def groups(model: PreTrainedModel, rate: float, position_rate: float | None) -> list[dict[str, Any]]:
    """As `PositionTrainer` groups them; a model has learned frequencies or other position parameters, not both."""
    named = dict(model.named_parameters())
    positions = [named.pop(name) for name in tables_and_biases(model) | frequencies(model)]
    return [
        {"params": [one for one in named.values() if one.ndim > 1], "lr": rate, "weight_decay": 0.01},
        {"params": [one for one in named.values() if one.ndim <= 1], "lr": rate, "weight_decay": 0.0},
        {"params": positions, "lr": rate if position_rate is None else position_rate, "weight_decay": 0.0},
    ]


def position_rates(model: PreTrainedModel, of_tables: tuple[float, ...] = POSITION_RATES) -> tuple[float, ...]:
    """Rates to try for position parameters, the second of them first; none where a model has none."""
    if frequencies(model):
        return FREQUENCY_RATES
    return of_tables if tables_and_biases(model) else ()


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16(torch.device("cpu")))


def fine_tune(
    model: PreTrainedModel,
    rows: Sequence[Any],
    collate: Callable[[Sequence[Any]], Batch],
    *,
    batch: int,
    epochs: float,
    rates: Rates,
    seed: int,
) -> list[float]:
    """AdamW, rates that rise for a tenth of the steps and fall to 0, gradients clipped to 1; the mean loss of each epoch."""
    per_epoch = math.ceil(len(rows) / batch)
    steps = round(per_epoch * epochs)
    optimizer = torch.optim.AdamW(groups(model, *rates), fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    generator, losses = torch.Generator().manual_seed(seed), []
    order: list[int] = []
    model.train()
    for _ in range(steps):
        order = order or torch.randperm(len(rows), generator=generator).tolist()
        chosen, order = [rows[index] for index in order[:batch]], order[batch:]
        with autocast():
            loss = model(**collate(chosen)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return [sum(part) / len(part) for at in range(0, steps, per_epoch) if (part := losses[at : at + per_epoch])]


def is_of(run: Line, keys: dict[str, Any]) -> bool:
    return all(run[name] == value for name, value in keys.items())


class RateSearch:
    """The rates of an arm, by what development data say.

    Args:
        keys: what an arm's runs have in common. A run with a rate has its score as `searched`.
        rates: of the model.
    """

    def __init__(self, runs: Runs, keys: dict[str, Any], rates: Sequence[float] = RATES):
        self.runs, self.keys, self.rates = runs, keys, rates

    def tried(self) -> dict[Rates, float]:
        found = [run for run in self.runs.read() if "searched" in run and is_of(run, self.keys)]
        return {(run["rate"], run["position_rate"]): run["searched"] for run in found}

    def best(self) -> Rates:
        tried = self.tried()
        return max(tried, key=tried.__getitem__)

    def to_try(self, positions: Sequence[float]) -> Iterator[Rates]:
        """Rates without a run, one after the other: of the model, and then of positions at the best of those.

        The caller adds the run of each before it asks for the next, which may depend on it.
        """
        first = positions[1] if positions else None
        yield from self._line([(rate, first) for rate in self.rates], lambda rates, by: (rates[0] * by, rates[1]), 2.0)
        if positions:
            rate = max((rates for rates in self.tried() if rates[1] == first), key=self.tried().__getitem__)[0]
            line = [(rate, position) for position in positions]
            yield from self._line(line, lambda rates, by: (rates[0], rates[1] * by), 10 / 3)

    def _line(self, line: list[Rates], further: Callable[[Rates, float], Rates], factor: float) -> Iterator[Rates]:
        yield from (rates for rates in line if rates not in self.tried())
        tried = self.tried()
        best = max(line, key=tried.__getitem__)
        if best in (line[0], line[-1]):
            beyond = further(best, factor if best == line[-1] else 1 / factor)
            rounded = tuple(None if rate is None else float(f"{rate:.1g}") for rate in beyond)
            if rounded not in tried:
                yield rounded
