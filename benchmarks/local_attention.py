"""What a pass over a long text costs beside its chunks, where the time goes, and what a window saves (docs/long-documents-results.md).

    python benchmarks/local_attention.py

MiniLM reads 2,048 tokens: in chunks as it is, and at once with `t5`, with and without `position_window`. Times are medians of calls
that take turns with the chunks, and ratios to those before and after; a step of training has a backward pass, and no dropout; memory is
the peak of a process of its own; the profile is of one call in bfloat16. What positions have learned makes no difference to any of
these: biases are random.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
from contestants import STOCK
from model import in_own_process, measure_memory_of, take_turns
from torch import nn
from torch.profiler import profile, record_function
from transformers import AutoModel
from transformers.utils import logging

import hf_posenc
from hf_posenc._utils import as_markdown


sys.path.append(str(Path(__file__).parents[1] / "examples"))

from minilm import packaged_minilm  # noqa: E402


LENGTH, CHUNK = 2048, 256
CHUNKS = f"{LENGTH // CHUNK} chunks of {CHUNK}"
# What `hf_posenc.convert` chooses for texts of that length.
T5 = {"position_per_layer": True, "position_buckets": 48, "position_max_distance": 1024}
# How the text is read at once: flags.
WHOLE = {"no window": {}} | {
    f"window of {width}, {which} global": {"position_window": width, "position_global_every": every}
    for width, which, every in (
        (128, "every third layer", 3),
        (128, "the first layer", 6),
        (128, "no layer", 0),
        (256, "every third layer", 3),
    )
}
# What is measured: forward in either precision, and training.
MODES = {"forward, bfloat16": torch.bfloat16, "forward, float32": torch.float32, "training, bfloat16": torch.bfloat16}
PROFILED = (CHUNKS, "no window", "window of 128, every third layer global", "window of 128, no layer global")
KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"


def reader(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model, and what it is given."""
    model = AutoModel.from_pretrained(packaged_minilm()).eval()
    ids = torch.randint(1000, 20000, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    if name == CHUNKS:
        return model, ids.view(-1, CHUNK)
    model = hf_posenc.with_position_scheme(model, "t5", **T5, **WHOLE[name])
    with torch.no_grad():
        for parameter in hf_posenc.position_parameters(model).values():
            parameter.normal_()
    return model, ids


def read(model: nn.Module, ids: torch.Tensor, dtype: torch.dtype, learns: bool = False) -> None:
    with torch.set_grad_enabled(learns), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        states = model(input_ids=ids).last_hidden_state
    if learns:
        states.float().square().mean().backward()
        model.zero_grad(set_to_none=True)


def measure_times(rounds: int) -> list[dict[str, Any]]:
    """Seconds and ratio to the chunks, by mode and way to read; training, which takes longer, in half as many rounds."""
    readers, results = {name: reader(name) for name in (CHUNKS, *WHOLE)}, []
    for mode, dtype in MODES.items():
        learns = mode.startswith("training")
        calls = {
            STOCK if name == CHUNKS else name: partial(read, *own, dtype, learns) for name, own in readers.items()
        }
        for name, found in take_turns(calls, rounds // 2 if learns else rounds, "cpu").items():
            results.append({"reader": CHUNKS if name == STOCK else name, "mode": mode, **found})
            print(json.dumps(results[-1]), flush=True)
    return results


def measure_memory(name: str) -> int:
    """Peak bytes of a pass, in a process of its own."""
    command = [sys.executable, __file__, "--memory_of", name]
    return in_own_process(command)


@contextmanager
def named(groups: dict[str, list[nn.Module]]) -> Iterator[None]:
    """Calls of modules are recorded under the name of their group."""
    running: list[record_function] = []

    def begin(name: str, *_) -> None:
        running.append(record_function(name))
        running[-1].__enter__()

    def end(*_) -> None:
        running.pop().__exit__(None, None, None)

    hooks = []
    for name, modules in groups.items():
        for module in modules:
            hooks += [module.register_forward_pre_hook(partial(begin, name)), module.register_forward_hook(end)]
    yield
    for hook in hooks:
        hook.remove()


def measure_profile(name: str) -> dict[str, float]:
    """Milliseconds of a pass in bfloat16, by what they are spent on."""
    model, ids = reader(name)
    layers = model.encoder.layer
    attentions = [layer.attention.self for layer in layers]
    projections = [(one.query, one.key, one.value) for one in attentions]
    groups = {
        "self-attention": attentions,
        "inner": [*itertools.chain(*projections)],
        "outer": [layer.attention.output.dense for layer in layers],
        "feed-forward": [part for layer in layers for part in (layer.intermediate, layer.output.dense)],
    }
    read(model, ids, torch.bfloat16)
    with named(groups), profile() as found:
        with record_function("all"):
            read(model, ids, torch.bfloat16)
    spent = {event.key: event.cpu_time_total / 1000 for event in found.key_averages()}
    parts = {
        "projections": spent["inner"] + spent["outer"],
        "feed-forward": spent["feed-forward"],
        "scores, softmax and sums of values": spent[KERNEL],
        "bias, types and layout around them": spent["self-attention"] - spent["inner"] - spent[KERNEL],
    }
    return parts | {"LayerNorm, embeddings and the rest": spent["all"] - sum(parts.values()), "all": spent["all"]}


def measure_steps() -> dict[str, float]:
    """Milliseconds of the steps that PyTorch's kernel does as one, in the self-attentions of `eager`, which reads the whole text."""
    model, ids = reader("no window")
    model.set_attn_implementation("eager")
    read(model, ids[:, :64], torch.bfloat16)
    with profile() as found:
        read(model, ids, torch.bfloat16)
    spent = {event.key: event.self_cpu_time_total / 1000 for event in found.key_averages()}
    return {"products of matrices": spent["aten::bmm"], "softmax": spent["aten::_softmax"]}


def cost_table(results: list[dict[str, Any]], memory: dict[str, int]) -> str:
    """A row for each way to read."""
    found = {(one["reader"], one["mode"]): one for one in results}
    rows = []
    for name in (CHUNKS, *WHOLE):
        cells = []
        for mode in MODES:
            one = found[name, mode]
            cells += [f"{1000 * one['seconds']:.0f}", f"{one['ratio']:.2f}"]
        rows.append([name, *cells, f"{memory[name] / 2**20:.0f}"])
    heads = [head for mode in MODES for head in (f"{mode}: ms", "times the chunks")]
    return as_markdown(["2,048 tokens read in", *heads, "forward, float32: MiB"], rows)


def profile_table(profiles: dict[str, dict[str, float]]) -> str:
    """A row for what time is spent on, in milliseconds."""
    rows = [[part, *(f"{own[part]:.0f}" for own in profiles.values())] for part in next(iter(profiles.values()))]
    return as_markdown(["ms, bfloat16", *profiles], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="calls of each that count, about half of which are used")
    parser.add_argument("--memory_of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    if arguments.memory_of:
        model, ids = reader(arguments.memory_of)
        print(json.dumps(measure_memory_of(model, {"input_ids": ids}, "forward", "cpu")))
        return
    results = measure_times(arguments.rounds)
    profiles = {name: measure_profile(name) for name in PROFILED}
    memory = {name: measure_memory(name) for name in (CHUNKS, *WHOLE)}
    found = {"times": results, "memory": memory, "profile": profiles, "steps_of_eager": measure_steps()}
    settings = {"length": LENGTH, "rounds": arguments.rounds, "layers": 6}
    report.write("local_attention", {"settings": settings, **found})
    print(f"{cost_table(results, memory)}\n\n{profile_table(profiles)}")


if __name__ == "__main__":
    main()
