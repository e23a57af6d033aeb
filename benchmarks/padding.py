"""What it saves to leave padding out, on batches of real sentences: time and memory beside stock BERT, which computes it.

    python benchmarks/padding.py --data DATA                        # everything, in about fifteen minutes
    python benchmarks/padding.py --data DATA --texts CoLA --batches 32 --orders random --modes forward
    python benchmarks/padding.py --thresholds                       # from which padding on it pays, with `absolute`

DATA holds the texts in the layout of GLUE and WikiText: cola/train.tsv, sst2/train.tsv, wikitext2/valid.txt (lines, up to
256 tokens). They are cut into words by the tokenizer of all-MiniLM-L6-v2, which is BERT's, and padded to the longest of
their batch. "random" are batches in random order; "sorted" are neighbours of sorted lengths, as samplers by length and
sentence-transformers' `encode` make them; "full" have no padding (128 tokens). Beside them, as in benchmarks/model.py, 8
sequences of 512 tokens, one eighth of them padding ("8 × 512"). End to end, the same command with `--unpad true` and `false`:

    python examples/run_classification.py --train_file sst2/train.tsv --validation_file sst2/dev.tsv --do_train \\
        --model_name_or_path path/to/checkpoint --position_scheme absolute --max_steps 200 --output_dir outputs/padding

Time: models take turns as in benchmarks/model.py, stock BERT with sdpa before and after each of them, and a second copy of
it shows how far equal models come out apart. Training is with dropout 0.1. Memory: in a process of its own for each.
Writes a run of results/padding.json.
"""

import argparse
import csv
import json
import math
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import report
import torch
from contestants import MODES, STOCK, STOCK_AGAIN, Size, build_bert, make_batch
from minilm import packaged_minilm
from model import build, in_own_process, measure_memory_of, step, take_turns
from torch import nn
from transformers import AutoTokenizer
from transformers.utils import logging

import hf_posenc
from hf_posenc._utils import as_markdown
from hf_posenc.modeling.kernels import packing


LONGEST = {"CoLA": 128, "SST-2": 128, "WikiText-2": 256}
ORDERS = ("random", "sorted", "full")
EIGHTH = "8 × 512"


def sentences(data: Path, name: str) -> list[str]:
    """The texts of a data set, as its files have them."""
    if name == "WikiText-2":
        lines = (data / "wikitext2" / "valid.txt").read_text(encoding="utf-8").splitlines()
        return [line.strip() for line in lines if line.strip()]
    file, header, column = {"CoLA": ("cola/train.tsv", 0, 3), "SST-2": ("sst2/train.tsv", 1, 1)}[name]
    with (data / file).open(encoding="utf-8", newline="") as opened:
        rows = [*csv.reader(opened, delimiter="\t", quoting=csv.QUOTE_NONE)][header:]
    return [row[column] for row in rows]


def batches(data: Path, name: str, size: int, order: str, count: int) -> list[dict[str, torch.Tensor]]:
    """Some batches of a data set, the same with every call."""
    if order == "full":
        ids = torch.randint(1000, 30522, (size, 128), generator=torch.Generator().manual_seed(0))
        return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    generator = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(packaged_minilm())
    chosen = generator.sample(sentences(data, name), 50 * size)
    encoded = tokenizer(chosen, truncation=True, max_length=LONGEST[name])["input_ids"]
    if order == "sorted":
        encoded.sort(key=len)
    starts = generator.sample(range(50), count)
    parts = [encoded[start * size : (start + 1) * size] for start in starts]
    return [dict(tokenizer.pad({"input_ids": part}, return_tensors="pt")) for part in parts]


def share_of_padding(parts: list[dict[str, torch.Tensor]]) -> float:
    masks = [part["attention_mask"] for part in parts]
    return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def build_unpadded(size: Size) -> nn.Module:
    model = build_bert(size)
    hf_posenc.unpad(model)
    return model


def contestants(schemes: list[str]) -> dict[str, Callable[[Size], nn.Module]]:
    builders = {STOCK: build_bert, STOCK_AGAIN: build_bert, "BERT, hf_posenc.unpad": build_unpadded}
    return builders | {scheme: partial(build_bert, scheme=scheme) for scheme in schemes}


def steps(model: nn.Module, parts: list[dict[str, torch.Tensor]], mode: str) -> None:
    for part in parts:
        step(model, part, mode)


def settings(arguments: argparse.Namespace) -> list[tuple[str, int, str]]:
    """What is measured: data set, batch, order."""
    found = [
        (name, size, order)
        for name in arguments.texts
        for size in arguments.batches
        for order in arguments.orders
        if order != "full"
    ]
    if "full" in arguments.orders:
        found += [("", size, "full") for size in arguments.batches]
    return found


def measure(arguments, mode: str, parts: list[dict[str, torch.Tensor]], schemes: list[str]) -> dict[str, dict]:
    """What each model takes for the batches, by its name."""
    size = Size(layers=arguments.layers, dropout=MODES[mode])
    builders = contestants(schemes)
    calls = {
        name: partial(steps, build(builder, size, mode, "cpu", torch.float32), parts, mode)
        for name, builder in builders.items()
    }
    calls[STOCK]()
    start = time.perf_counter()
    calls[STOCK]()
    round_seconds = (time.perf_counter() - start) * 2 * len(calls)
    rounds = max(2, min(arguments.rounds, int(arguments.seconds / round_seconds) - 1))
    return take_turns(calls, rounds, "cpu", dropped=1)


def thresholds(arguments: argparse.Namespace) -> None:
    """Time of a variant that leaves padding out, however little it is, as a multiple of its own time with padding."""
    packing.FEWEST_PLACES, packing.SMALLEST_SHARE = 1, 0.0
    size, results = Size(layers=arguments.layers, dropout=0.1), []
    for mode in arguments.modes:
        models = {
            unpad: build(partial(build_bert, scheme="absolute"), size, mode, "cpu", torch.float32) for unpad in (0, 1)
        }
        models[0].config.unpad = False
        for shape in ((1, 16), (2, 16), (4, 16), (8, 16), (8, 32), (8, 128), (32, 32)):
            for share in (0.02, 0.05, 0.1, 0.2):
                part = ragged(*shape, share)
                if part is None:
                    continue
                calls = {STOCK if not unpad else "unpad": partial(step, models[unpad], part, mode) for unpad in (0, 1)}
                found = take_turns(calls, arguments.rounds, "cpu")["unpad"]
                padding = int((part["attention_mask"] == 0).sum())
                setting = {"mode": mode, "batch": shape[0], "length": shape[1], "padding": padding}
                results.append({**setting, "share": round(padding / math.prod(shape), 3), **found})
                print(json.dumps(results[-1]), flush=True)
    rows = [
        [r["mode"], f"{r['batch']} × {r['length']}", f"{r['padding']} ({r['share']:.0%})", f"{r['ratio']:.2f}"]
        for r in results
    ]
    table = as_markdown(["mode", "batch", "padding", "time"], rows, words=2)
    report.write(f"padding/{arguments.name}_thresholds", {"results": results})
    print(table)


def ragged(batch: int, length: int, share: float) -> dict[str, torch.Tensor] | None:
    """Sequences the shortest of which have the padding, as equally as can be; None if there is none."""
    padding = round(share * batch * length)
    if not padding:
        return None
    short = math.ceil(batch / 2)
    lengths = torch.full((batch,), length)
    lengths[batch - short :] -= padding // short
    lengths[batch - padding % short or batch :] -= 1
    mask = (torch.arange(length) < lengths[:, None]).long()
    ids = torch.randint(1000, 30522, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids * mask, "attention_mask": mask}


def memory_here(arguments: argparse.Namespace, text: str, batch: int, order: str) -> int:
    name, mode = arguments.memory_of
    size = Size(layers=arguments.layers, dropout=MODES[mode])
    model = build(contestants(arguments.schemes)[name], size, mode, "cpu", torch.float32)
    [part] = batches(arguments.data, text, batch, order, 1)
    return measure_memory_of(model, part, mode, "cpu")


def measure_memory(arguments: argparse.Namespace, name: str, mode: str, text: str, batch: int, order: str) -> int:
    """Peak bytes of a call above the level before, in a process of its own."""
    command = [sys.executable, __file__, "--data", str(arguments.data), "--memory_of", name, mode]
    command += ["--texts", text, "--batches", str(batch), "--orders", order, "--layers", str(arguments.layers)]
    command += ["--schemes", *arguments.schemes, "--threads", str(arguments.threads)]
    return in_own_process(command)


def table(results: list[dict]) -> str:
    """Times as fractions of stock's, the other way round: how many times as fast."""
    names = [name for name in results[0]["models"] if name != STOCK]
    names += [name for result in results for name in result["models"] if name not in (*names, STOCK)]
    names = [*dict.fromkeys(names)]
    heads = ["batches", "padding", *(f"{name}, times as fast" for name in names), *(f"{n}, memory" for n in names)]
    rows = []
    for result in results:
        what = f"{result['batches']}, {result['mode']}"
        cells = [what, f"{result['padding']:.0%}"]
        found = [result["models"].get(name, {}) for name in names]
        cells += [f"{1 / entry['ratio']:.2f}" if "ratio" in entry else "" for entry in found]
        cells += [f"{entry['memory_ratio']:.2f}" if "memory_ratio" in entry else "" for entry in found]
        rows.append(cells)
    return as_markdown(heads, rows)


def described(name: str, size: int, order: str) -> str:
    return f"{size} × 128, full" if order == "full" else f"{name}, {size}, {order}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with cola, sst2 and wikitext2")
    parser.add_argument("--thresholds", action="store_true", help="measure from which padding on it pays")
    parser.add_argument("--name", default="2_layers", help="name of the run in results/padding.json")
    parser.add_argument("--texts", nargs="*", default=list(LONGEST), help=", ".join(LONGEST))
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 8])
    parser.add_argument("--orders", nargs="*", default=list(ORDERS), choices=ORDERS)
    parser.add_argument("--schemes", nargs="*", default=["absolute", "absolute+t5"])
    parser.add_argument("--modes", nargs="+", default=["forward", "training"], choices=list(MODES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8, help="rounds beside the first; half of them count")
    parser.add_argument("--seconds", type=float, default=40.0, help="about how long a setting may take")
    parser.add_argument("--no_eighth", action="store_true", help="leave out 8 × 512")
    parser.add_argument("--no_memory", action="store_true", help="measure times only")
    parser.add_argument("--resume", action="store_true", help="go on where a run with the same settings stopped")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory_of", nargs=2, metavar=("MODEL", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    if arguments.memory_of:
        [setting] = settings(arguments)
        print(json.dumps(memory_here(arguments, *setting)))
        return

    if arguments.thresholds:
        thresholds(arguments)
        return
    if arguments.data is None:
        parser.error("--data is needed: the folder with cola, sst2 and wikitext2")

    chosen = {name: getattr(arguments, name) for name in ("layers", "rounds", "seconds")}
    results = report.stopped_at(f"padding/{arguments.name}", chosen).get("results", []) if arguments.resume else []
    there = {(entry["batches"], entry["mode"]) for entry in results}

    def keep(what: str, mode: str, padding: float, models: dict[str, dict]) -> None:
        results.append({"batches": what, "mode": mode, "padding": round(padding, 4), "models": models})
        print(json.dumps(results[-1]), flush=True)
        report.write(f"padding/{arguments.name}", {"settings": chosen, "results": results})

    for mode in arguments.modes:
        for text, size, order in settings(arguments):
            if (described(text, size, order), mode) in there:
                continue
            count = 1 if text == "WikiText-2" else 4
            parts = batches(arguments.data, text, size, order, count)
            models = measure(arguments, mode, parts, arguments.schemes)
            if not arguments.no_memory and size == max(arguments.batches) and order == "random":
                for name, entry in models.items():
                    entry["memory"] = measure_memory(arguments, name, mode, text, size, order)
                for entry in models.values():
                    entry["memory_ratio"] = round(entry["memory"] / models[STOCK]["memory"], 4)
            keep(described(text, size, order), mode, share_of_padding(parts), models)
        if not arguments.no_eighth and (EIGHTH, mode) not in there:
            parts = [make_batch(Size(length=512), 8, 0.125, "cpu")]
            keep(EIGHTH, mode, share_of_padding(parts), measure(arguments, mode, parts, ["absolute", "deberta"]))
    print(table(results))


if __name__ == "__main__":
    main()
