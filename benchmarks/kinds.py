"""Models of several kinds that compute the same, by scheme and by shape of the batch: seconds of a forward pass, and its peak memory."""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import report
import stock_attention
import torch
from model import in_own_process, measure_memory_of, step
from torch import nn
from transformers.utils import logging


@dataclass(frozen=True)
class Kinds:
    """What a script measures, which it does by [`main`].

    Attributes:
        script: its file, which is run once more for each measurement of memory.
        name: of its results.
        schemes: in the order of the table.
        shapes: batch x length.
        kinds: of a scheme, the names of its models.
        build: a model in evaluation, of a scheme, a kind, a length and a number of layers.
        inputs_of: the batch of a shape.
        table: the results in Markdown.
        more: what else is measured of a scheme's models, by kind, on a batch.
    """

    script: str
    name: str
    schemes: Iterable[str]
    shapes: Iterable[str]
    kinds: Callable[[str], list[str]]
    build: Callable[[str, str, int, int], nn.Module]
    inputs_of: Callable[[str], dict[str, torch.Tensor]]
    table: Callable[[list[dict[str, Any]]], str]
    more: Callable[[dict[str, nn.Module], dict[str, torch.Tensor]], dict[str, Any]] = lambda models, inputs: {}

    def measure(self, scheme: str, shape: str, layers: int, rounds: int) -> dict[str, Any]:
        """Seconds and bytes of a scheme's models, which take turns."""
        inputs = self.inputs_of(shape)
        length = inputs["input_ids"].shape[1]
        models = {kind: self.build(scheme, kind, length, layers) for kind in self.kinds(scheme)}
        calls = {kind: partial(step, model, inputs, "forward") for kind, model in models.items()}
        seconds = stock_attention.take_turns(calls, rounds, "cpu")
        own = [sys.executable, self.script, "--layers", str(layers), "--memory_of", scheme]
        return {
            "scheme": scheme,
            "shape": shape,
            **self.more(models, inputs),
            "seconds": {kind: round(taken, 4) for kind, taken in seconds.items()},
            "bytes": {kind: in_own_process([*own, kind, shape]) for kind in models},
        }

    def main(self, description: str) -> None:
        """The script's command line."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--layers", type=int, default=6)
        parser.add_argument("--rounds", type=int, default=7)
        parser.add_argument("--memory_of", nargs=3, help=argparse.SUPPRESS)
        given = parser.parse_args()
        logging.set_verbosity_error()
        if given.memory_of:
            scheme, kind, shape = given.memory_of
            inputs = self.inputs_of(shape)
            model = self.build(scheme, kind, inputs["input_ids"].shape[1], given.layers)
            print(measure_memory_of(model, inputs, "forward", "cpu"))
            return
        results = [self.measure(s, shape, given.layers, given.rounds) for s in self.schemes for shape in self.shapes]
        report.write(self.name, {"layers": given.layers, "rounds": given.rounds, "results": results})
        print(self.table(results))
