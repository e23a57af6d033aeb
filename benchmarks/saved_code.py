"""What hf_posenc saves time: models by the code that is saved with them, and the same by hf_posenc.

    python benchmarks/saved_code.py      # about ten minutes on 2 cores, alone on the machine

6 layers of bert-base's size, random weights, forward passes. Both models of a scheme live in one process and take turns; memory is the
peak of a pass in a process of its own. Batches of more than one sequence have padding: four tenths of the places, or an eighth. Writes
results/saved_code.json.
"""

import tempfile
from typing import Any

import torch
from contestants import Size, build_bert, make_batch
from kinds import Kinds
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module

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


@torch.no_grad()
def largest_difference(models: dict[str, nn.Module], inputs: dict[str, torch.Tensor]) -> float:
    """Of the last hidden states where nothing is padding."""
    first, second = (model(**inputs).last_hidden_state for model in models.values())
    return float((first - second)[inputs["attention_mask"].bool()].abs().max())


def table(results: list[dict[str, Any]]) -> str:
    """Seconds and MiB, a row for each scheme and shape."""
    rows = []
    for entry in results:
        seconds, taken = entry["seconds"], entry["bytes"]
        cells = [f"{seconds[kind]:.3f} s, {taken[kind] / 2**20:,.0f} MiB" for kind in (WITH, WITHOUT)]
        padding = f"{SHAPES[entry['shape']]:.0%}"
        rows.append([f"`{entry['scheme']}`", entry["shape"].replace("x", " × "), padding, *cells])
    return as_markdown(["scheme", "batch × length", "padding", "by hf_posenc", "by the saved code"], rows)


if __name__ == "__main__":
    Kinds(
        __file__,
        NAME,
        SCHEMES,
        SHAPES,
        lambda scheme: [WITH, WITHOUT],
        build,
        inputs_of,
        table,
        more=lambda models, inputs: {"difference": largest_difference(models, inputs)},
    ).main(__doc__)
