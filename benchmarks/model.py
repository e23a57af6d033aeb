"""What a scheme costs in a whole model, beside stock BERT and the peers: time and memory, forward and in training.

    python benchmarks/model.py                              # 2 layers of bert-base size, batch 8 x 512, all schemes and peers
    python benchmarks/model.py --lengths 128 512 2048 --tokens 4096 --memory
    python benchmarks/model.py --profile --schemes deberta --modes forward
    python benchmarks/model.py --device cuda --dtype bfloat16 --layers 12 --batch 16 --backends sdpa flex_attention

Time: all models live in one process and take turns, in an order that is reversed from round to round, stock BERT (sdpa)
before and after each of them; the first two rounds are dropped, and what counts is the median of a model's ratios to the
mean of these two neighbours, in the half of the rounds in which these agree best. A second copy of stock BERT shows how
far apart equal models come out. Memory: each model and length in a process of its own that returns what it frees at once,
peak above the level before the call. Writes a run of results/model.json,
a plot in outputs/, and with --profile results/profiles.md.
"""

import argparse
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
from contestants import (
    MODES,
    PEERS,
    STOCK,
    STOCK_AGAIN,
    Size,
    build_bert,
    comparison_parser,
    contestants,
    make_batch,
    schemes,
    settings,
)
from torch import nn
from transformers.utils import logging

from hf_posenc._utils import as_markdown
from hf_posenc.files import whole_file, write_whole
from hf_posenc.modeling.kernels import caching


def step(model: nn.Module, batch: dict[str, torch.Tensor], mode: str) -> None:
    """One call of a model, in training with its backward pass."""
    if mode == "forward":
        with torch.no_grad():
            model(**batch)
        return
    hidden = model(**batch)[0]
    hidden.float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def seconds(call: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def build(builder: Callable[[Size], nn.Module], size: Size, mode: str, device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return builder(size).to(device, dtype).train(mode != "forward")


def take_turns(calls: dict[str, Callable[[], None]], rounds: int, device: str, dropped: int = 2) -> dict[str, dict]:
    """Per name: median seconds, and median ratio to stock BERT with its quartiles, of the rounds that count.

    A machine that others use too changes its speed at any moment. So of each model's rounds beside the first, `dropped` ones, those
    half count (two at least) in which the calls of stock BERT before and after took the most similar time.
    """
    stock = calls[STOCK]
    others = [name for name in calls if name != STOCK]
    times: list[float] = []
    # Of each round: how far apart the neighbours are, the model's own time, and its ratio to their mean.
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in others}
    for turn in range(rounds + dropped):
        before = seconds(stock, device)
        for name in reversed(others) if turn % 2 else others:
            own, after = seconds(calls[name], device), seconds(stock, device)
            if turn >= dropped:
                times.append(after)
                found[name].append((abs(math.log(after / before)), own, 2 * own / (before + after)))
            before = after
    results = {STOCK: {"seconds": round(statistics.median(times), 4), "ratio": 1.0}}
    for name, measured in found.items():
        _, own, ratios = zip(*sorted(measured)[: max(2, math.ceil(rounds / 2))])
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        results[name] = {
            "seconds": round(statistics.median(own), 4),
            "ratio": round(median, 4),
            "quartiles": [round(low, 4), round(high, 4)],
        }
    return results


def measure_times(
    builders: dict, size: Size, batch: int, padding: float, mode: str, rounds: int, device, dtype
) -> dict:
    """What [`take_turns`] finds of whole models."""
    inputs = make_batch(size, batch, padding, device)
    calls = {
        name: partial(step, build(builder, size, mode, device, dtype), inputs, mode)
        for name, builder in builders.items()
    }
    return take_turns(calls, rounds, device)


def measure_memory_here(builder, size: Size, batch: int, padding: float, mode: str, device: str, dtype) -> int:
    """Peak bytes above the level before the call, and after one on a short sequence.

    What evaluation caches from call to call (projected tables) is cleared in between, so that it counts.
    """
    model = build(builder, size, mode, device, dtype)
    return measure_memory_of(model, make_batch(size, batch, padding, device), mode, device)


def measure_memory_of(model: nn.Module, inputs: dict[str, torch.Tensor], mode: str, device: str) -> int:
    """Peak bytes of a pass of a model, above the level before it and after one on a short sequence."""
    step(model, {name: tensor[:1, :16] for name, tensor in inputs.items()}, mode)
    caching.clear_cache()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(model, inputs, mode)
        return torch.cuda.max_memory_allocated() - before
    report.forget_peak()
    before = report.resident("VmRSS")
    step(model, inputs, mode)
    return report.resident("VmHWM") - before


def in_own_process(command: list[str]) -> Any:
    """The last line that a command prints, read as JSON.

    Its process gives what it frees back at once: the level of its memory shows what is in use (glibc).
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_memory(name: str, arguments: argparse.Namespace, length: int, batch: int, mode: str) -> int | str:
    """Peak bytes of a pass in a process of its own; "out of memory" where that is what happens."""
    command = [sys.executable, __file__, "--memory_of", name, mode, "--lengths", str(length), "--batch", str(batch)]
    for option in ("layers", "padding", "device", "dtype", "threads"):
        command += [f"--{option}", str(getattr(arguments, option))]
    for option in ("schemes", "backends", "peers"):
        command += [f"--{option}", *getattr(arguments, option)]
    try:
        return in_own_process(command)
    except subprocess.CalledProcessError as error:
        if "OutOfMemory" in error.stderr or "can't allocate memory" in error.stderr or error.returncode == -9:
            return "out of memory"
        raise RuntimeError(f"{shlex.join(command)} failed:\n{error.stderr}") from error


def profile(builder, size: Size, batch: int, padding: float, mode: str, device: str, dtype) -> str:
    """Where the time of three calls goes, by operator."""
    model = build(builder, size, mode, device, dtype)
    inputs = make_batch(size, batch, padding, device)
    step(model, inputs, mode)
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            step(model, inputs, mode)
    key = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=key, row_limit=20, max_name_column_width=50)


def keep_profile(name: str, found: str) -> None:
    """Put a profile in results/profiles.md, in the place of one of the same name."""
    file = report.RESULTS / "profiles.md"
    first, *there = file.read_text(encoding="utf-8").split("\n## ")
    sections = {section.partition("\n")[0]: section for section in there}
    lines = "\n".join(line.rstrip() for line in found.splitlines())
    sections[name] = f"{name}\n\n```text\n{lines}\n```\n"
    write_whole({file: "\n## ".join([first, *(sections[one] for one in sorted(sections))])})
    print(f"wrote {name} to {file}")


def table(results: list[dict]) -> str:
    """Ratios to stock BERT as a Markdown table: a row for each model, a column for each setting."""
    columns = list(dict.fromkeys((r["mode"], r["batch"], r["length"]) for r in results))
    names = list(dict.fromkeys(r["model"] for r in results))
    found = {(r["model"], r["mode"], r["batch"], r["length"]): r for r in results}
    with_memory = any("memory_ratio" in r for r in results)
    heads = [f"{mode}, {batch} × {length:,}" for mode, batch, length in columns]
    rows = []
    for name in names:
        cells = []
        for column in columns:
            r = found.get((name, *column))
            if r is None:
                cells.append("")
                continue
            cell = f"{r['ratio']:.2f}" if "ratio" in r else "–"
            if with_memory:
                memory = r.get("memory_ratio")
                cell += f" ({memory:.2f})" if isinstance(memory, float) else f" ({r.get('memory', '–')})"
            cells.append(cell)
        rows.append([name, *cells])
    return as_markdown(["model", *heads], rows)


def plot(results: list[dict], file: Path) -> None:
    """Ratios of time: bars at one length, curves over several."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    modes = list(dict.fromkeys(r["mode"] for r in results))
    figure, axes = plt.subplots(1, len(modes), figsize=(5 * len(modes), 6), sharey=True, squeeze=False)
    lengths = sorted({r["length"] for r in results})
    for axis, mode in zip(axes[0], modes):
        own = [r for r in results if r["mode"] == mode and "ratio" in r]
        if len(lengths) == 1:
            own = [r for r in own if r["model"] != STOCK][::-1]
            colours = ["tab:grey" if r["model"] in (STOCK_AGAIN, *PEERS) else "tab:blue" for r in own]
            axis.barh([r["model"] for r in own], [r["ratio"] for r in own], color=colours)
            axis.axvline(1.0, color="black", linewidth=0.8)
            axis.set_xlabel("time, stock BERT = 1")
        else:
            names = list(dict.fromkeys(r["model"] for r in own if r["model"] != STOCK))
            for name, colour in zip(names, itertools.cycle(plt.get_cmap("tab20").colors)):
                points = sorted((r["length"], r["ratio"]) for r in own if r["model"] == name)
                style = "--" if name in (STOCK_AGAIN, *PEERS) else "-"
                axis.plot(*zip(*points), style, marker="o", markersize=3, color=colour, label=name)
            axis.axhline(1.0, color="black", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.set_xlabel("tokens")
            axis.set_ylabel("time, stock BERT = 1")
            axis.legend(fontsize=7)
        axis.set_title(mode)
    figure.tight_layout()
    with whole_file(file) as written:
        figure.savefig(written, format="png", dpi=120)
    plt.close(figure)


def main() -> None:
    parser = comparison_parser(__doc__, "forward")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--memory", action="store_true", help="measure peak memory too")
    parser.add_argument("--no_times", action="store_true", help="measure memory only")
    parser.add_argument("--profile", action="store_true", help="profile stock BERT and the schemes, nothing else")
    parser.add_argument("--memory_of", nargs=2, metavar=("MODEL", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    dtype = getattr(torch, arguments.dtype)

    if arguments.memory_of:
        name, mode = arguments.memory_of
        size = Size(layers=arguments.layers, length=arguments.lengths[0], dropout=MODES[mode])
        builder = contestants(arguments, mode)[name]
        measured = measure_memory_here(
            builder, size, arguments.batch, arguments.padding, mode, arguments.device, dtype
        )
        print(json.dumps(measured))
        return

    if arguments.profile:
        for mode, size, batch in settings(arguments, layers=arguments.layers):
            for name, builder in ({STOCK: build_bert} | schemes(arguments, mode)).items():
                found = profile(builder, size, batch, arguments.padding, mode, arguments.device, dtype)
                keep_profile(f"{name}, {mode}, {size.length}", found)
        return
    results = []
    chosen = {name: getattr(arguments, name) for name in ("layers", "padding", "rounds", "dtype", "device")}
    for mode, size, batch in settings(arguments, layers=arguments.layers):
        builders = contestants(arguments, mode)
        setting = {"mode": mode, "batch": batch, "length": size.length}
        entries = {name: {"model": name, **setting} for name in builders}
        if not arguments.no_times:
            options = (mode, arguments.rounds, arguments.device, dtype)
            for name, found in measure_times(builders, size, batch, arguments.padding, *options).items():
                entries[name] |= found
        if arguments.memory:
            for name in builders:
                entries[name]["memory"] = measure_memory(name, arguments, size.length, batch, mode)
            stock = entries[STOCK]["memory"]
            for entry in entries.values():
                if isinstance(entry["memory"], int) and isinstance(stock, int):
                    entry["memory_ratio"] = round(entry["memory"] / stock, 4)
        results += entries.values()
        for entry in entries.values():
            print(json.dumps(entry), flush=True)
        # What is measured so far is kept if the run is stopped.
        report.write(f"model/{arguments.name}", {"settings": chosen, "results": results})
        if not arguments.no_times:
            plot(results, Path("outputs", f"model_{arguments.name}.png"))
    print(table(results))


if __name__ == "__main__":
    main()
