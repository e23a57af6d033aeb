"""What a GPU has to show, in one command: that every backend is right there, that models train, and what they cost.

    python benchmarks/gpu.py                        # on CUDA, with a limit of eight minutes
    python benchmarks/gpu.py --device cpu --quick   # the same code with tiny sizes, to see that it runs

1. Parity: every scheme on BERT, and stock DeBERTa-v3 and MPNet, with every backend, in float32 (no TF32), beside the same model in
   float64 by eager attention on the CPU: hidden states and, where the backend has a backward pass, the gradients of all parameters,
   as shares of the largest. Position parameters are random, and without them the outputs have to be others.
2. Training: twenty steps of a token classifier with `absolute+deberta`; the loss has to fall.
3. Speed and peak memory of stock BERT (twice), the schemes that the README names, stock DeBERTa-v3 by eager, sdpa and FlexAttention, and
   disentangled-flash and FlashDeBERTa where they are installed.

What the limit leaves no time for is listed. The exit code is 1 where parity or training fails. Writes results/gpu.json, on CUDA alone.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import model as whole_models
import report
import stock_attention
import torch
from contestants import BACKENDS, CUDA_PEERS, Size, build_bert, can, make_batch
from torch import nn
from transformers import BertConfig, BertForTokenClassification
from transformers.utils import logging

from hf_posenc import position_parameters
from hf_posenc._utils import as_markdown
from hf_posenc.modeling.schemes.table import SCHEMES


# Shares of the largest number: float32 has seven digits, of which sums of a few thousand products leave five.
TOLERANCE = 1e-4
WITHOUT_DROPOUT = "training without dropout"
NAMED = ("t5", "rope", "relative", "deberta")
STOCK_FAMILIES = tuple(stock_attention.FAMILIES)


@torch.no_grad()
def randomise(model: nn.Module, names: list[str]) -> None:
    generator = torch.Generator().manual_seed(1)
    for name in names:
        parameter = model.get_parameter(name)
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


def parity_cases(backends: list[str]) -> Iterator[tuple[str, str, Callable[[Size, str], nn.Module]]]:
    """Name, backend, and what builds the model with a backend."""
    for backend in backends:
        for scheme in SCHEMES:
            yield scheme, backend, lambda size, backend, scheme=scheme: build_bert(size, scheme, backend)
        for family in STOCK_FAMILIES if backend != "eager" else ():
            yield family, backend, lambda size, backend, family=family: stock_attention.build(family, size, backend)


def outputs(model: nn.Module, inputs: dict[str, torch.Tensor], trains: bool) -> tuple[torch.Tensor, dict]:
    """Hidden states where there are tokens, and gradients by parameter, on the CPU in float64."""
    model.zero_grad()
    with torch.set_grad_enabled(trains):
        hidden = model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
        if trains:
            (hidden * torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view_as(hidden)).sum().backward()
    found = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return hidden.detach().double().cpu(), found


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


def parity(build: Callable[[Size, str], nn.Module], backend: str, size: Size, device: str) -> dict[str, float | None]:
    """How far a backend is from float64, as shares of the largest number, and how far the model without positions is."""
    torch.manual_seed(0)
    exact = build(size, "eager").double().eval()
    with torch.no_grad():
        for parameter in exact.parameters():
            # As they are initialised, attention is nearly uniform, and positions hardly matter.
            parameter.mul_(5.0 if parameter.dim() == 2 else 1.0)
    names = [name for name in position_parameters(exact) if exact.get_parameter(name).is_floating_point()]
    silent, _ = outputs(exact, inputs := make_batch(size, 3, 0.125, "cpu"), trains=False)
    randomise(exact, names)
    trains = can(backend, WITHOUT_DROPOUT, device)
    expected, gradients = outputs(exact, inputs, trains)
    own = build(size, backend).eval()
    own.load_state_dict(exact.state_dict())
    found, own_gradients = outputs(
        own.to(device, torch.float32), {name: tensor.to(device) for name, tensor in inputs.items()}, trains
    )
    largest = max((float(gradient.abs().max()) for gradient in gradients.values()), default=1.0)
    return {
        "hidden_states": relative_difference(found, expected),
        "gradients": max(
            (float((own_gradients[name] - gradients[name]).abs().max()) / largest for name in gradients), default=None
        ),
        "positions": relative_difference(silent, expected) if names else None,
    }


def training_losses(size: Size, device: str) -> list[float]:
    """Losses of a small classifier that learns whether a token stands in the first half of its text."""
    torch.manual_seed(0)
    sizes = {"vocab_size": size.vocabulary, "hidden_size": size.hidden, "num_hidden_layers": size.layers}
    sizes |= {"num_attention_heads": size.heads, "intermediate_size": 4 * size.hidden}
    model = BertForTokenClassification(BertConfig(**sizes, position_scheme="absolute+deberta")).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, losses = make_batch(size, 8, 0.0, device), []
    labels = (torch.arange(size.length, device=device) < size.length // 2).long().expand(8, -1).contiguous()
    for _ in range(20):
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def speed_builders(mode: str, device: str) -> dict[str, Callable[[Size], nn.Module]]:
    """What is measured, stock BERT first."""
    builders = {"BERT": build_bert, "BERT, a second copy": build_bert}
    for scheme, backend in itertools.product(NAMED, ("sdpa", "flex_attention")):
        if can(backend, mode, device):
            builders[f"{scheme}, {backend}"] = partial(build_bert, scheme=scheme, backend=backend)
    for backend in BACKENDS:
        if can(backend, mode, device):
            builders[f"DeBERTa-v3, {backend}"] = partial(stock_attention.build, "DeBERTa-v3", backend=backend)
    return builders | {name: build for name, build in CUDA_PEERS.items() if device == "cuda" and find_spec(name)}


def cost(build, size: Size, batch: int, mode: str, device: str, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Median seconds of a pass, and its peak bytes beside what was there."""
    model, inputs = whole_models.build(build, size, mode, device, dtype), make_batch(size, batch, 0.125, device)
    call = partial(whole_models.step, model, inputs, mode)
    call()  # compiles
    taken = statistics.median(whole_models.seconds(call, device) for _ in range(rounds))
    return {"seconds": taken, "bytes": whole_models.measure_memory_of(model, inputs, mode, device)}


def tables(results: dict) -> str:
    rows = [
        [
            case["model"],
            case["backend"],
            *(f"{case[key]:.0e}" if case.get(key) is not None else "" for key in ("hidden_states", "gradients")),
            "yes" if case["passed"] else f"no: {case.get('error', 'too far')}",
        ]
        for case in results["parity"]
    ]
    parts = ["Largest differences from float64, as shares of the largest number.", ""]
    parts += [as_markdown(["model", "backend", "hidden states", "gradients", f"below {TOLERANCE}"], rows, words=5)]
    parts += ["", f"Losses of twenty steps: {', '.join(f'{loss:.2f}' for loss in results['losses'])}.", ""]
    costs = [
        [c["model"], c["mode"], c["shape"], c["dtype"], f"{1000 * c['seconds']:.1f}", f"{c['bytes'] / 2**20:,.0f}"]
        if "seconds" in c
        else [c["model"], c["mode"], c["shape"], c["dtype"], c["error"], ""]
        for c in results["costs"]
    ]
    parts += [as_markdown(["model", "mode", "batch x length", "numbers", "ms", "MiB"], costs, words=4)]
    if results["left_out"]:
        parts += ["", "No time was left for: " + "; ".join(results["left_out"]) + "."]
    return "\n".join(parts)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, and no FlexAttention, which takes a compiler minutes on CPUs"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="nothing new is begun after so many")
    arguments = parser.parse_args()
    device, quick = arguments.device, arguments.quick
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: there is no CUDA device here; --device cpu --quick runs the same code with tiny sizes")
    logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = False
    stop = time.monotonic() + 60 * arguments.minutes
    small = Size(layers=2, hidden=64, heads=4, vocabulary=2000, length=32, dropout=0.0)
    results: dict = {"parity": [], "losses": [], "costs": [], "left_out": []}
    for package in CUDA_PEERS:
        if device == "cuda" and not find_spec(package):
            print(f"{package} is not installed", flush=True)

    results["losses"] = training_losses(small, device)
    backends = ["eager", "sdpa"] if quick else BACKENDS
    for name, backend, build in parity_cases(backends):
        if time.monotonic() > stop:
            results["left_out"].append(f"parity of {name}, {backend}")
            continue
        try:
            found = parity(build, backend, small, device)
            measured = [found[key] for key in ("hidden_states", "gradients") if found[key] is not None]
            passed = max(measured) < TOLERANCE and (found["positions"] is None or found["positions"] > 100 * TOLERANCE)
        except Exception as error:  # reported as a failure, so that the others are tried too
            found, passed = {"error": first_line(error)}, False
        results["parity"].append({"model": name, "backend": backend, "passed": passed, **found})
        print(results["parity"][-1], flush=True)

    shapes = ["2x32"] if quick else ["1x512", "8x512", "32x512", "4x4096"]
    dtypes = ["float32"] if quick else ["bfloat16", "float32"]
    for dtype, shape, mode in itertools.product(dtypes, shapes, ("forward", WITHOUT_DROPOUT)):
        batch, length = map(int, shape.split("x"))
        size = (
            Size(layers=2, hidden=64, heads=4, vocabulary=2000, length=length, dropout=0.0)
            if quick
            else Size(layers=6, length=length, dropout=0.0)
        )
        for name, build in speed_builders(mode, device).items():
            setting = {"model": name, "mode": mode, "shape": shape, "dtype": dtype}
            if quick and "flex" in name:
                continue
            if time.monotonic() > stop:
                results["left_out"].append(f"{name}, {mode}, {shape}, {dtype}")
                continue
            try:
                found = cost(build, size, batch, mode, device, getattr(torch, dtype), 2 if quick else 10)
            except Exception as error:  # out of memory, or what somebody else's package raises
                found = {"error": first_line(error)}
            results["costs"].append({**setting, **found})
            print(results["costs"][-1], flush=True)
    print(tables(results))
    if device == "cuda":
        results = {"settings": {"device": torch.cuda.get_device_name(), "minutes": arguments.minutes}, **results}
        report.write("gpu", results)
    falls = statistics.fmean(results["losses"][-5:]) < statistics.fmean(results["losses"][:5])
    failed = [f"{case['model']}, {case['backend']}" for case in results["parity"] if not case["passed"]]
    if failed or not falls:
        sys.exit(f"error: {'the loss did not fall; ' * (not falls)}no parity: {'; '.join(failed) or 'none'}")


if __name__ == "__main__":
    main()
