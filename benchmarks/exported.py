"""Models with a position scheme, and as architectures of Transformers: time and peak memory of both.

    python benchmarks/exported.py        # about ten minutes on 2 cores, alone on the machine

6 layers of bert-base's size, random weights, `t5` with one bias matrix, `deberta`, `rope`, and what `hf_posenc.to_stock` makes of
each: with the attention that Transformers has for it (eager for MPNet and DeBERTa-v2, sdpa for Jina), and with hf_posenc's, where that
is installed. Forward passes; the models of a scheme live in one process and take turns. Memory is the peak of a pass in a process of its
own. Batches of more than one sequence have padding (an eighth). Writes results/exported.json.
"""

from typing import Any

import torch
from contestants import Size, build_bert, make_batch
from kinds import Kinds
from torch import nn

import hf_posenc
from hf_posenc._utils import as_markdown


NAME = "exported"
SCHEMES = ("t5", "deberta", "rope")
SHAPES = ("8x512", "1x2048")
SCHEME, EXPORTED, FAST = "with its scheme", "exported", "exported, hf_posenc's attention"


def build(scheme: str, kind: str, length: int, layers: int) -> nn.Module:
    """A model with a scheme, or what it is exported as, in evaluation."""
    torch.manual_seed(0)
    model = build_bert(Size(layers, length=length), scheme).eval()
    if kind == SCHEME:
        return model
    exported = hf_posenc.to_stock(model, single_text=True, max_length=length).eval()
    own = "sdpa" if scheme == "rope" else "eager"
    exported.set_attn_implementation("sdpa" if kind == FAST else own)
    return exported


def inputs_of(shape: str) -> dict[str, torch.Tensor]:
    """A batch, with padding where it has more than one sequence."""
    batch, length = map(int, shape.split("x"))
    return make_batch(Size(length=length), batch, 0.125 if batch > 1 else 0.0, "cpu")


def kinds(scheme: str) -> list[str]:
    """What there is of a scheme; Jina's architecture has Transformers' own kernels in any case."""
    return [SCHEME, EXPORTED] + [FAST] * (scheme != "rope")


def table(results: list[dict[str, Any]]) -> str:
    """Seconds and MiB, a row for each scheme and shape."""
    rows = []
    for entry in results:
        cells = [
            f"{entry['seconds'][kind]:.2f} s, {entry['bytes'][kind] / 2**20:,.0f} MiB"
            if kind in entry["seconds"]
            else "as exported"
            for kind in (SCHEME, EXPORTED, FAST)
        ]
        rows.append([f"`{entry['scheme']}`", entry["shape"].replace("x", " × "), *cells])
    return as_markdown(["exported scheme", "batch × length", SCHEME, EXPORTED, FAST], rows)


if __name__ == "__main__":
    Kinds(__file__, NAME, SCHEMES, SHAPES, kinds, build, inputs_of, table).main(__doc__)
