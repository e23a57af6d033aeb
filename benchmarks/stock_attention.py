"""Stock DeBERTa-v3 and MPNet with this package's attention, beside what else there is: time, and memory at the longest.

    python benchmarks/stock_attention.py                       # the table in results/, about 15 minutes on 2 cores
    python benchmarks/stock_attention.py --shapes 1x128 --modes forward --rounds 20
    python benchmarks/stock_attention.py --device cuda --dtype bfloat16 --shapes 8x512 32x512 4x4096

6 layers of bert-base's size. All models of a family live in one process and take turns, in an order that is reversed from round
to round; what is reported is how many times as fast as transformers' eager attention each is, by medians, and a second eager
copy shows how far apart equal models come out. Peers: `torch.compile` of the eager model and
of ours, ONNX Runtime on that model exported
(forward, CPU), and disentangled-flash (its PyTorch backend on CPUs, its Triton kernels on CUDA) and FlashDeBERTa (CUDA) where
they are installed. Batches of more than one sequence have padding (an eighth). Writes results/stock_attention[_cuda].json.
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import model as whole_models
import report
import torch
from contestants import DEBERTA, MODES, Size, bert_sizes, build_bert, make_batch
from torch import nn
from transformers import DebertaV2Config, DebertaV2Model, MPNetConfig, MPNetModel
from transformers.utils import logging

import hf_posenc  # noqa: F401  gives the models their backends
from hf_posenc._utils import as_markdown


EAGER, AGAIN, OWN, UNCACHED = "eager", "eager, a second copy", "hf_posenc", "hf_posenc, nothing cached"
COMPILED, OWN_COMPILED, BERT = "torch.compile", "hf_posenc, torch.compile", "BERT of the same size, sdpa"
ONNX, DISENTANGLED, FLASH = "ONNX Runtime", "disentangled-flash", "FlashDeBERTa"
FAMILIES = {
    "DeBERTa-v3": (
        DebertaV2Model,
        DebertaV2Config,
        {**DEBERTA, "norm_rel_ebd": "layer_norm", "max_relative_positions": -1},
    ),
    "MPNet": (MPNetModel, MPNetConfig, {}),
}
SHAPES = {
    "forward": ["1x16", "1x64", "1x128", "1x256", "1x512", "8x128", "8x512", "1x4096"],
    "training": ["16x128", "8x512", "1x2048"],
    "training without dropout": ["16x128", "8x512", "1x2048"],
}


def build(family: str, size: Size, backend: str) -> nn.Module:
    model_class, config_class, own = FAMILIES[family]
    # DeBERTa's table stays as wide as the checkpoints', at any length.
    positions = 512 if family == "DeBERTa-v3" else size.length + 2
    config = config_class(**bert_sizes(size), **own, max_position_embeddings=positions)
    config._attn_implementation = backend
    return model_class(config)


# Compiling takes minutes, so the table has it where it says most; shapes that are asked for are all compiled.
COMPILED_SHAPES, COMPILED_MODES = ("1x128", "8x512"), ("forward", "training")
# What peers do with longer sequences takes minutes a turn.
LONGEST_OF_PEERS = 512


class Hidden(nn.Module):
    """A model as a function of two tensors, for export."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


@functools.cache
def onnx_session(family: str, layers: int, threads: int) -> Any:
    """The exported eager model in ONNX Runtime, for all lengths, with as many threads."""
    import onnxruntime

    model = whole_models.build(
        partial(build, family, backend="eager"), Size(layers, length=4096), "forward", "cpu", torch.float32
    )
    inputs = make_batch(Size(length=96), 2, 0.0, "cpu")
    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=4096)}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "model.onnx"))
        dynamic = dict.fromkeys(inputs, sizes)
        torch.onnx.export(Hidden(model), (), file, kwargs=inputs, dynamic_shapes=dynamic, dynamo=True, verbose=False)
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def by_onnx(family: str, inputs: dict[str, torch.Tensor], arguments: argparse.Namespace) -> None:
    session = onnx_session(family, arguments.layers, arguments.threads)
    session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})


def optimised(model: nn.Module, mode: str, device: str, length: int) -> nn.Module:
    """The model with disentangled-flash."""
    import disentangled_flash

    backend = "triton" if device == "cuda" else "torch"
    if mode == "forward":
        return disentangled_flash.enable_deberta_inference(model, backend=backend, sequence_lengths=length)
    return disentangled_flash.enable_deberta_training(model, backend=backend)


def uncached(call: Callable[[], None]) -> None:
    with hf_posenc.cache_projections(False):
        call()


def calls(
    family: str, size: Size, inputs: dict, mode: str, arguments: argparse.Namespace
) -> list[dict[str, Callable]]:
    """What to measure, by name, eager first: in groups whose members do not disturb each other.

    Threads of ONNX Runtime spin for a while after their work is done, and switching the cache off empties it.
    """
    device, dtype = arguments.device, getattr(torch, arguments.dtype)
    made = partial(whole_models.build, size=size, mode=mode, device=device, dtype=dtype)
    eager = partial(build, family, backend="eager")
    backend = "sdpa" if device == "cpu" or MODES[mode] and mode != "forward" else "flex_attention"
    own = made(partial(build, family, backend=backend))
    models = {EAGER: made(eager), AGAIN: made(eager), OWN: own, BERT: made(build_bert)}
    step = partial(whole_models.step, batch=inputs, mode=mode)
    groups = [{name: partial(step, model) for name, model in models.items()}]
    eager_step = groups[0][EAGER]
    shape = f"{inputs['input_ids'].shape[0]}x{size.length}"
    if size.length > LONGEST_OF_PEERS and not arguments.shapes:
        return groups
    if mode == "forward" and family == "DeBERTa-v3":
        groups.append({EAGER: eager_step, UNCACHED: partial(uncached, groups[0][OWN])})
    if COMPILED in arguments.peers and (arguments.shapes or (shape in COMPILED_SHAPES and mode in COMPILED_MODES)):
        compiled = {COMPILED: made(eager), OWN_COMPILED: made(partial(build, family, backend=backend))}
        groups.append({EAGER: eager_step, **{name: partial(step, torch.compile(m)) for name, m in compiled.items()}})
    if family == "DeBERTa-v3" and DISENTANGLED in arguments.peers and find_spec("disentangled_flash"):
        groups.append(
            {EAGER: eager_step, DISENTANGLED: partial(step, optimised(made(eager), mode, device, size.length))}
        )
    if family == "DeBERTa-v3" and FLASH in arguments.peers and device == "cuda" and find_spec("flashdeberta"):
        from flashdeberta import FlashDebertaV2Model

        flash = made(lambda size: FlashDebertaV2Model(build(family, size, "eager").config))
        groups.append({EAGER: eager_step, FLASH: partial(step, flash)})
    if mode == "forward" and device == "cpu" and ONNX in arguments.peers and find_spec("onnxruntime"):
        groups.append({EAGER: eager_step, ONNX: partial(by_onnx, family, inputs, arguments)})
    return groups


def take_turns(calls: dict[str, Callable[[], None]], rounds: int, device: str) -> dict[str, float]:
    """Median seconds of each; in every round each has a turn, after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name in reversed(calls) if turn % 2 else calls:
            taken = whole_models.seconds(calls[name], device)
            if turn:
                times[name].append(taken)
    return {name: statistics.median(taken) for name, taken in times.items()}


def works(call: Callable[[], None], name: str) -> bool:
    """Whether a peer runs here at all; said if it does not."""
    try:
        call()
    except Exception as error:  # anything that somebody else's package raises
        print(
            f"{name} does not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            flush=True,
        )
        return False
    return True


def measure(family: str, shape: str, mode: str, arguments: argparse.Namespace) -> dict:
    """How many times as fast as eager each model is, and what eager takes."""
    batch, length = map(int, shape.split("x"))
    size = Size(layers=arguments.layers, length=length, dropout=MODES[mode])
    inputs = make_batch(size, batch, 0.125 if batch > 1 else 0.0, arguments.device)
    # Eager takes minutes for the longest sequences.
    fewest = 1 if length > 2048 else 3
    rounds = max(
        fewest, min(arguments.rounds, arguments.tokens // (8 * batch * length if fewest == 1 else batch * length))
    )
    found, own = {}, {EAGER, AGAIN, OWN, UNCACHED, OWN_COMPILED, BERT}
    for group in calls(family, size, inputs, mode, arguments):
        if all(name in own or works(call, name) for name, call in group.items()):
            times = take_turns(group, rounds, arguments.device)
            found.setdefault("eager_seconds", round(times[EAGER], 4))
            speed = found.setdefault("speed", {})
            speed.update({name: round(times[EAGER] / taken, 3) for name, taken in times.items() if name != EAGER})
    return {"family": family, "shape": shape, "mode": mode, **found}


def measure_memory(family: str, shape: str, arguments: argparse.Namespace) -> dict:
    """Peak memory of a forward pass, each in a process of its own."""
    found = {}
    for backend in ("eager", "sdpa"):
        command = [sys.executable, __file__, "--memory_of", family, backend, "--shapes", shape]
        command += [
            "--layers",
            str(arguments.layers),
            "--device",
            arguments.device,
            "--threads",
            str(arguments.threads),
        ]
        found[backend] = whole_models.in_own_process(command)
    return {"family": family, "shape": shape, "bytes": found, "ratio": round(found["eager"] / found["sdpa"], 2)}


def table(results: list[dict], memory: list[dict]) -> str:
    """Times as fast as transformers' eager attention."""
    names = [AGAIN, OWN, UNCACHED, COMPILED, OWN_COMPILED, ONNX, DISENTANGLED, FLASH, BERT]
    names = [name for name in names if any(name in result["speed"] for result in results)]
    rows = []
    for result in results:
        speeds = [f"{result['speed'][name]:.2f}" if name in result["speed"] else "" for name in names]
        rows.append(
            [result["family"], result["mode"], str(result["shape"]), f"{result['eager_seconds']:.3f}", *speeds]
        )
    header = ["model", "mode", "batch x length", "eager, s", *names]
    lines = ["Times as fast as transformers' eager attention.", "", as_markdown(header, rows, words=len(header))]
    for entry in memory:
        megabytes = {name: f"{size / 2**20:.0f} MiB" for name, size in entry["bytes"].items()}
        lines += [
            "",
            f"Peak memory of {entry['family']} at {entry['shape']}, forward: {megabytes['eager']} eager, "
            f"{megabytes['sdpa']} hf_posenc, a factor of {entry['ratio']:.1f}.",
        ]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--modes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--shapes", nargs="+", help="batch x length, such as 8x512; by default those of each mode")
    peers = [COMPILED, ONNX, DISENTANGLED, FLASH]
    parser.add_argument("--peers", nargs="*", default=peers, choices=peers)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=16, help="at most, beside the first two; half of them count")
    parser.add_argument("--tokens", type=int, default=12288, help="of all rounds: long sequences have fewer")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", help="of the files in results/")
    parser.add_argument("--resume", action="store_true", help="go on where a run with the same settings stopped")
    parser.add_argument("--memory_of", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    if arguments.memory_of:
        family, backend = arguments.memory_of
        batch, length = map(int, arguments.shapes[0].split("x"))
        size = Size(layers=arguments.layers, length=length)
        options = size, batch, 0.0, "forward", arguments.device, torch.float32
        print(json.dumps(whole_models.measure_memory_here(partial(build, family, backend=backend), *options)))
        return
    name = arguments.name or ("stock_attention" if arguments.device == "cpu" else "stock_attention_cuda")
    chosen = {key: getattr(arguments, key) for key in ("layers", "rounds", "tokens", "device", "dtype")}
    before = report.stopped_at(name, chosen) if arguments.resume else {}
    results: list[dict] = before.get("results", [])
    memory: list[dict] = before.get("memory", [])
    done = {(result["family"], result["mode"], result["shape"]) for result in results}
    for family in arguments.families:
        for mode in arguments.modes:
            for shape in arguments.shapes or SHAPES[mode]:
                if (family, mode, shape) in done:
                    continue
                results.append(measure(family, shape, mode, arguments))
                torch.compiler.reset()
                print(json.dumps(results[-1]), flush=True)
                report.write(name, {"settings": chosen, "results": results, "memory": memory})
    longest = max(arguments.shapes or ["1x4096"], key=lambda shape: int(shape.split("x")[1]))
    measured = {entry["family"] for entry in memory}
    for family in arguments.families if "forward" in arguments.modes else ():
        if family in measured:
            continue
        memory.append(measure_memory(family, longest, arguments))
    report.write(name, {"settings": chosen, "results": results, "memory": memory})
    print(table(results, memory))


if __name__ == "__main__":
    main()
