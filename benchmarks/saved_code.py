"""What hf_posenc saves time: models by the code that is saved with them, and the same by hf_posenc.

    python benchmarks/saved_code.py      # about ten minutes on 2 cores, alone on the machine

6 layers of bert-base's size, random weights, forward passes. Both models of a scheme live in one process and take turns; memory is the
peak of a pass in a process of its own. Batches of more than one sequence have padding: four tenths of the places, or an eighth. Writes
results/saved_code.json.
"""

import argparse
import sys
import tempfile
from functools import partial
from typing import Any

import report
import stock_attention
import torch
from contestants import Size, build_bert, make_batch
from model import in_own_process, measure_memory_of, step
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

from hf_posenc._utils import as_markdown


NAME = "saved_code"
SCHEMES = ("t5", "deberta", "rope")
# Batch x length -> share of padding.
SHAPES = {"1x128": 0.0, "32x128": 0.4, "8x512": 0.125, "1x2048": 0.0}
WITH, WITHOUT = "hf_posenc", "the saved code"


def build(scheme: str, kind: str, length: int, layers: int) -> nn.Module:
    """A model with a scheme in evaluation, by hf_posenc or by the code that it is saved with."""
    torch.manual_seed(0)
    model = build_bert(Size(layers, length=length), scheme).eval()
    if kind == WITH:
        return model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = get_class_from_dynamic_module(model.config.to_dict()["auto_map"]["AutoModel"], folder)
        model = saved.from_pretrained(folder).eval()
        for parameter in model.parameters():  # until they are read, loaded ones are in the file alone
            parameter.data = parameter.data.clone()
        return model


def inputs_of(shape: str) -> dict[str, torch.Tensor]:
    batch, length = map(int, shape.split("x"))
    return make_batch(Size(length=length), batch, SHAPES[shape], "cpu")


def memory(scheme: str, kind: str, shape: str, layers: int) -> int:
    """Peak bytes of a pass, in a process of its own."""
    command = [sys.executable, __file__, "--memory_of", scheme, kind, shape, "--layers", str(layers)]
    return in_own_process(command)


@torch.no_grad()
def largest_difference(models: dict[str, nn.Module], inputs: dict[str, torch.Tensor]) -> float:
    """Of the last hidden states where nothing is padding."""
    first, second = (model(**inputs).last_hidden_state for model in models.values())
    return float((first - second)[inputs["attention_mask"].bool()].abs().max())


def measure(scheme: str, shape: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes by kind, and how far both models differ."""
    inputs = inputs_of(shape)
    models = {kind: build(scheme, kind, inputs["input_ids"].shape[1], arguments.layers) for kind in (WITH, WITHOUT)}
    calls = {kind: partial(step, model, inputs, "forward") for kind, model in models.items()}
    seconds = stock_attention.take_turns(calls, arguments.rounds, "cpu")
    return {
        "scheme": scheme,
        "shape": shape,
        "difference": largest_difference(models, inputs),
        "seconds": {kind: round(taken, 4) for kind, taken in seconds.items()},
        "bytes": {kind: memory(scheme, kind, shape, arguments.layers) for kind in models},
    }


def table(results: list[dict[str, Any]]) -> str:
    """Seconds and MiB, a row for each scheme and shape."""
    rows = []
    for entry in results:
        seconds, taken = entry["seconds"], entry["bytes"]
        cells = [f"{seconds[kind]:.3f} s, {taken[kind] / 2**20:,.0f} MiB" for kind in (WITH, WITHOUT)]
        padding = f"{SHAPES[entry['shape']]:.0%}"
        rows.append([f"`{entry['scheme']}`", entry["shape"].replace("x", " × "), padding, *cells])
    return as_markdown(["scheme", "batch × length", "padding", "by hf_posenc", "by the saved code"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory_of", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    if arguments.memory_of:
        scheme, kind, shape = arguments.memory_of
        inputs = inputs_of(shape)
        model = build(scheme, kind, inputs["input_ids"].shape[1], arguments.layers)
        print(measure_memory_of(model, inputs, "forward", "cpu"))
        return
    results = [measure(scheme, shape, arguments) for scheme in SCHEMES for shape in SHAPES]
    report.write(NAME, {"layers": arguments.layers, "rounds": arguments.rounds, "results": results})
    print(table(results))


if __name__ == "__main__":
    main()
