"""What a scheme costs in one self-attention, projections and all: stock BERT's, every scheme's and the peers'.

    python benchmarks/attention.py                                  # bert-base size, batch 8 x 512, all schemes and peers
    python benchmarks/attention.py --backends sdpa eager --lengths 512 2048 --tokens 4096
    python benchmarks/attention.py --device cuda --dtype bfloat16 --backends sdpa flex_attention --batch 16

Each model runs once, and what its first self-attention was called with is kept; then the self-attentions take turns as the
models do in model.py, on the same arguments every time. Writes results/<name>.json.
"""

import json
from collections.abc import Callable

import report
import torch
from contestants import comparison_parser, contestants, make_batch, settings
from model import build, table, take_turns
from torch import nn
from transformers.utils import logging


# Where the peers have their first self-attention.
PLACES = (
    "encoder.layer.0.attention.self",
    "encoder.layer.0.attention.attn",
    "encoder.block.0.layer.0.SelfAttention",
    "layer.0.rel_attn",
)


def first_attention(model: nn.Module) -> nn.Module:
    """The first self-attention of a model of any of the families here."""
    modules = dict(model.named_modules())
    return next(modules[place] for place in PLACES if place in modules)


def replay(model: nn.Module, inputs: dict[str, torch.Tensor], mode: str) -> Callable[[], None]:
    """A call of the model's first self-attention with the arguments that it had in the model."""
    attention = first_attention(model)
    seen = {}

    def keep(module, args, kwargs):
        seen.setdefault("call", (args, kwargs))

    hook = attention.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    args, kwargs = seen["call"]
    is_training = mode != "forward"

    def fresh(value):
        floating = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 3
        return value.detach().requires_grad_(is_training) if floating else value

    def call() -> None:
        with torch.set_grad_enabled(is_training):
            output = attention(*map(fresh, args), **{name: fresh(value) for name, value in kwargs.items()})
            if is_training:
                next(part for part in output if part is not None).float().square().mean().backward()
                model.zero_grad(set_to_none=True)

    return call


def main() -> None:
    arguments = comparison_parser(__doc__, "attention").parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    dtype = getattr(torch, arguments.dtype)

    results = []
    chosen = {name: getattr(arguments, name) for name in ("padding", "rounds", "dtype", "device")}
    for mode, size, batch in settings(arguments, layers=1, vocabulary=2048):
        inputs = make_batch(size, batch, arguments.padding, arguments.device)
        models = {
            name: build(builder, size, mode, arguments.device, dtype)
            for name, builder in contestants(arguments, mode).items()
        }
        calls = {name: replay(model, inputs, mode) for name, model in models.items()}
        for name, found in take_turns(calls, arguments.rounds, arguments.device).items():
            results.append({"model": name, "mode": mode, "batch": batch, "length": size.length, **found})
            print(json.dumps(results[-1]), flush=True)
        # What is measured so far is kept if the run is stopped.
        report.write(arguments.name, {"settings": chosen, "results": results})
    print(table(results))


if __name__ == "__main__":
    main()
