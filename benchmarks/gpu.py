"""What a GPU has to show, in one command: that every backend is right there, that models train, and what they cost.

    python benchmarks/gpu.py                              # on CUDA, within 500 seconds
    python benchmarks/gpu.py --parts parity rerankers     # some of it
    python benchmarks/gpu.py --device cpu --quick         # the same code with tiny sizes, to see that it runs

The parts, the most important first:

parity      every scheme on BERT, and Transformers' own DeBERTa-v3 and MPNet, by sdpa and eager, in float32 (no TF32), compared with the
            same model in float64 by eager attention on the CPU: hidden states and, where the backend has a backward pass, the gradients
            of all parameters, as shares of the largest. Position parameters are random, and without them the outputs have to be
            others. The same after `hf_posenc.unpad`, where padding has to be zeros; and in bfloat16, where packed states may be
            computed by PyTorch's `varlen_attn`, within twice the error of the padded batch.
exports     what `hf_posenc.to_stock` makes of `t5`, `deberta` and `rope` (MPNet, DeBERTa-v2, Jina Embeddings v3), by Transformers' own
            attention, compared with the model with its scheme in float64.
rerankers   scores of 100 candidates of one query by BERT, XLM-RoBERTa and DeBERTa-v3 of base size: in batches of 32 in their order, sorted by
            length, with FlashAttention 2 where it is installed, and padding-free in one batch.
training    twenty steps of a token classifier with `absolute+deberta`, whose loss has to fall; seconds of a step of a text classifier, padded
            and padding-free.
speed       time and peak memory of BERT (twice), the schemes that the README names, DeBERTa-v3 by eager, sdpa and FlexAttention, and
            disentangled-flash and FlashDeBERTa where they are installed, at 512 and 4,096 tokens.
conversion  seconds of `hf_posenc.convert` of a model of base size.
flex        parity with FlexAttention, which is compiled for each model.

Weights are random. What the limit leaves no time for is listed. The exit code is 1 where parity, exports or training fail. Writes
results/gpu_DEVICE.json, on CUDA alone.
"""

import argparse
import itertools
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import model as whole_models
import report
import stock_attention
import torch
from contestants import BACKENDS, CUDA_PEERS, Size, bert_sizes, build_bert, can, make_batch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)
from transformers.utils import logging

import hf_posenc
from hf_posenc import position_parameters
from hf_posenc._utils import as_markdown
from hf_posenc.files import write_whole
from hf_posenc.modeling.kernels.packed_attention import has_kernel
from hf_posenc.modeling.schemes.table import SCHEMES


# Shares of the largest number: float32 has seven digits, of which sums of a few thousand products leave five.
TOLERANCE = 1e-4
WITHOUT_DROPOUT = "training without dropout"
NAMED = ("t5", "rope", "relative", "deberta")
EXPORTS = ("rope", "t5", "deberta")
STOCK_FAMILIES = tuple(stock_attention.FAMILIES)
UNPADDED = "unpad"
CANDIDATES, BATCH = 100, 32


@dataclass(frozen=True)
class Run:
    """Where and how large.

    Attributes:
        quick: tiny sizes, and no FlexAttention, which takes a compiler minutes on CPUs.
    """

    device: str
    quick: bool

    @property
    def small(self) -> Size:
        return Size(layers=2, hidden=64, heads=4, vocabulary=2000, length=32, dropout=0.0)

    @property
    def base(self) -> Size:
        return self.small if self.quick else Size(length=512, dropout=0.0)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @property
    def rounds(self) -> int:
        return 2 if self.quick else 10

    def median(self, call: Callable[[], Any]) -> float:
        """Median seconds of a call, after one that compiles."""
        call()
        return statistics.median(whole_models.seconds(call, self.device) for _ in range(self.rounds))


# What is measured: its settings, and what measures it.
Case = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


@torch.no_grad()
def randomise(model: nn.Module, names: list[str]) -> None:
    generator = torch.Generator().manual_seed(1)
    for name in names:
        parameter = model.get_parameter(name)
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


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


def exact_model(build: Callable[[Size, str], nn.Module], size: Size) -> nn.Module:
    """In float64, by eager attention on the CPU."""
    torch.manual_seed(0)
    exact = build(size, "eager").double().eval()
    with torch.no_grad():
        for parameter in exact.parameters():
            # As they are initialised, attention is nearly uniform, and positions hardly matter.
            parameter.mul_(5.0 if parameter.dim() == 2 else 1.0)
    return exact


def moved(inputs: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def parity(build: Callable[[Size, str], nn.Module], backend: str, run: Run, unpadded: bool = False) -> dict[str, Any]:
    """How far a backend is from float64, as shares of the largest number, and how far the model without positions is."""
    exact = exact_model(build, run.small)
    names = [name for name in position_parameters(exact) if exact.get_parameter(name).is_floating_point()]
    inputs = make_batch(run.small, 8, 0.25, "cpu") if unpadded else make_batch(run.small, 3, 0.125, "cpu")
    silent, _ = outputs(exact, inputs, trains=False)
    randomise(exact, names)
    trains = can(backend, WITHOUT_DROPOUT, run.device)
    expected, gradients = outputs(exact, inputs, trains)
    own = build(run.small, backend).eval()
    own.load_state_dict(exact.state_dict())
    own.to(run.device, torch.float32)
    if unpadded:
        hf_posenc.unpad(own)
        check_unpadded(own, moved(inputs, run.device))
    found, own_gradients = outputs(own, moved(inputs, run.device), trains)
    largest = max((float(gradient.abs().max()) for gradient in gradients.values()), default=1.0)
    measured = {
        "hidden_states": relative_difference(found, expected),
        "gradients": max(
            (float((own_gradients[name] - gradients[name]).abs().max()) / largest for name in gradients), default=None
        ),
        "positions": relative_difference(silent, expected) if names else None,
    }
    differences = [measured[key] for key in ("hidden_states", "gradients") if measured[key] is not None]
    matters = measured["positions"] is None or measured["positions"] > 100 * TOLERANCE
    return measured | {"passed": max(differences) < TOLERANCE and matters}


@torch.no_grad()
def check_unpadded(model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    """Raise RuntimeError where padding was computed."""
    padding = inputs["attention_mask"] == 0
    if model(**inputs).last_hidden_state[padding].any():
        raise RuntimeError("padding was computed after hf_posenc.unpad")


def parity_in_bfloat16(build: Callable[[Size, str], nn.Module], run: Run) -> dict[str, Any]:
    """Errors of packed states, beside those of the padded batch on the same device."""
    exact = exact_model(build, run.small)
    randomise(exact, [n for n in position_parameters(exact) if exact.get_parameter(n).is_floating_point()])
    inputs = make_batch(run.small, 8, 0.25, "cpu")
    expected, gradients = outputs(exact, inputs, trains=True)
    own, errors = build(run.small, "sdpa").eval(), {}
    own.load_state_dict(exact.state_dict())
    own.to(run.device, torch.bfloat16)
    for unpadded in (False, True):
        hf_posenc.unpad(own, unpadded)
        found, own_gradients = outputs(own, moved(inputs, run.device), trains=True)
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        gradient = max(float((own_gradients[name] - gradients[name]).abs().max()) for name in gradients) / largest
        errors[unpadded] = relative_difference(found, expected), gradient
    check_unpadded(own, moved(inputs, run.device))
    within = all(error < 2 * padded for error, padded in zip(errors[True], errors[False]))
    names = "hidden_states", "gradients", "hidden_states_padded", "gradients_padded"
    return {"passed": within, **dict(zip(names, (*errors[True], *errors[False])))}


def parity_cases(run: Run) -> Iterator[Case]:
    """Every backend; after `unpad`; and packed states in bfloat16."""
    yield from backend_cases(run, ("sdpa", UNPADDED, "eager"))
    for scheme in ("absolute", "sinusoidal", "none", "rope", "t5"):
        build = partial(_build_scheme, scheme=scheme)
        yield {"model": scheme, "backend": f"{UNPADDED}, bfloat16"}, partial(parity_in_bfloat16, build, run)


def backend_cases(run: Run, backends: tuple[str, ...]) -> Iterator[Case]:
    """Every scheme, and Transformers' own DeBERTa and MPNet, with backends."""
    for backend in backends:
        name = "sdpa" if backend == UNPADDED else backend
        for scheme in SCHEMES:
            build = partial(_build_scheme, scheme=scheme)
            yield (
                {"model": scheme, "backend": backend},
                partial(parity, build, name, run, unpadded=backend == UNPADDED),
            )
        for family in STOCK_FAMILIES if backend != "eager" else ():
            build = partial(_build_family, family=family)
            yield (
                {"model": family, "backend": backend},
                partial(parity, build, name, run, unpadded=backend == UNPADDED),
            )


def _build_scheme(size: Size, backend: str, scheme: str) -> nn.Module:
    return build_bert(size, scheme, backend)


def _build_family(size: Size, backend: str, family: str) -> nn.Module:
    return stock_attention.build(family, size, backend)


def exported(scheme: str, run: Run) -> dict[str, Any]:
    """How far an exported model on the device, in float32 by Transformers' own attention, is from its origin in float64."""
    exact = exact_model(partial(_build_scheme, scheme=scheme), run.small)
    names = list(position_parameters(exact))
    silent, _ = outputs(exact, inputs := make_batch(run.small, 3, 0.125, "cpu"), trains=False)
    randomise(exact, names)
    expected, _ = outputs(exact, inputs, trains=False)
    made = hf_posenc.to_stock(exact, single_text=True, max_length=run.small.length).eval()
    made.set_attn_implementation("sdpa" if scheme == "rope" else "eager")
    found, _ = outputs(made.to(run.device, torch.float32), moved(inputs, run.device), trains=False)
    difference, matters = relative_difference(found, expected), relative_difference(silent, expected)
    is_right = difference < TOLERANCE and (not names or matters > 100 * TOLERANCE)
    return {"architecture": made.config.model_type, "hidden_states": difference, "passed": is_right}


def export_cases(run: Run) -> Iterator[Case]:
    for scheme in EXPORTS:
        yield {"model": scheme}, partial(exported, scheme, run)


def candidates(size: Size) -> list[torch.Tensor]:
    """Token ids of a query with each candidate: a fifth of the longest length on average, from one twentieth on."""
    generator = torch.Generator().manual_seed(0)
    shares = (0.05 - 0.15 * torch.rand(CANDIDATES, generator=generator).clamp(min=1e-3).log()).clamp(max=1.0)
    lengths = (shares * size.length).long().clamp(min=2).tolist()
    return [torch.randint(1000, size.vocabulary, (length,), generator=generator) for length in lengths]


def reranker(family: str, run: Run, backend: str = "sdpa") -> nn.Module:
    """A model of base size, or a tiny one, that gives one score."""
    sizes = bert_sizes(run.base) | {"num_labels": 1, "max_position_embeddings": run.base.length + 2}
    vocabulary = {"BERT": 30522, "XLM-RoBERTa": 250002, "DeBERTa-v3": 128100}[family]
    sizes["vocab_size"] = run.base.vocabulary if run.quick else vocabulary
    torch.manual_seed(0)
    if family == "DeBERTa-v3":
        own = stock_attention.FAMILIES[family][2]
        config = DebertaV2Config(**sizes | own | {"max_position_embeddings": 512})
        model = DebertaV2ForSequenceClassification(config)
        if backend != "eager":
            hf_posenc.set_attn_implementation(model, backend)
    else:
        config_class, model_class = {
            "BERT": (BertConfig, BertForSequenceClassification),
            "XLM-RoBERTa": (XLMRobertaConfig, XLMRobertaForSequenceClassification),
        }[family]
        model = model_class._from_config(config_class(**sizes), attn_implementation=backend, dtype=run.dtype)
    return model.to(run.device, run.dtype).eval()


@torch.no_grad()
def scores(model: nn.Module, texts: list[torch.Tensor], device: str, batch: int, by_length: bool) -> torch.Tensor:
    """The score of each text, in batches of the texts' order or of their lengths'."""
    order = sorted(range(len(texts)), key=lambda text: -len(texts[text])) if by_length else list(range(len(texts)))
    found, pad = torch.empty(len(texts)), model.config.pad_token_id or 0
    for start in range(0, len(order), batch):
        own = order[start : start + batch]
        ids = nn.utils.rnn.pad_sequence([texts[text] for text in own], batch_first=True, padding_value=pad)
        lengths = torch.tensor([len(texts[text]) for text in own])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        found[own] = logits[:, 0].float().cpu()
    return found


def reranked(family: str, how: str, run: Run) -> dict[str, Any]:
    """Seconds for all candidates; how far padding-free scores are from those of padded batches."""
    backend = {"eager": "eager", "FlashAttention 2": "flash_attention_2"}.get(how, "sdpa")
    model, texts = reranker(family, run, backend), candidates(run.base)
    if how != "padding-free":
        call = partial(scores, model, texts, run.device, BATCH, by_length=how == "sorted, sdpa")
        return {"seconds": run.median(call)}
    padded = scores(model, texts, run.device, BATCH, by_length=False)
    hf_posenc.unpad(model)
    call = partial(scores, model, texts, run.device, CANDIDATES, by_length=False)
    return {"seconds": run.median(call), "difference": relative_difference(call(), padded)}


def reranker_cases(run: Run) -> Iterator[Case]:
    for family in ("BERT", "XLM-RoBERTa", "DeBERTa-v3"):
        hows = ["padded, sdpa", "sorted, sdpa", "padding-free"]
        if family == "DeBERTa-v3":
            hows.insert(0, "eager")
        elif run.device == "cuda" and find_spec("flash_attn"):
            hows.append("FlashAttention 2")
        for how in hows:
            yield {"model": family, "how": how}, partial(reranked, family, how, run)


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


def falling(run: Run) -> dict[str, Any]:
    losses = training_losses(run.small, run.device)
    return {"losses": losses, "passed": statistics.fmean(losses[-5:]) < statistics.fmean(losses[:5])}


def classified(unpadded: bool, dropout: float, run: Run) -> dict[str, Any]:
    """Seconds of a training step of a text classifier on a batch of which half is padding."""
    sizes = bert_sizes(run.base) | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**sizes)).to(run.device).train()
    if unpadded:
        hf_posenc.unpad(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = make_batch(run.base, BATCH, 0.45, run.device)
    inputs["labels"] = torch.arange(BATCH, device=run.device) % 2

    def step() -> None:
        with torch.autocast(run.device, torch.bfloat16, enabled=run.dtype == torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"seconds": run.median(step)}


def training_cases(run: Run) -> Iterator[Case]:
    yield {"model": "absolute+deberta", "what": "twenty steps"}, partial(falling, run)
    for dropout, unpadded in itertools.product((0.1, 0.0), (False, True)):
        setting = {"model": "BERT", "what": f"{'padding-free' if unpadded else 'padded'}, dropout {dropout}"}
        yield setting, partial(classified, unpadded, dropout, run)


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


def cost(build, size: Size, batch: int, mode: str, run: Run) -> dict[str, float]:
    """Median seconds of a pass, and its peak bytes beside what was there."""
    model = whole_models.build(build, size, mode, run.device, run.dtype)
    inputs = make_batch(size, batch, 0.125, run.device)
    taken = run.median(partial(whole_models.step, model, inputs, mode))
    return {"seconds": taken, "bytes": whole_models.measure_memory_of(model, inputs, mode, run.device)}


def speed_cases(run: Run) -> Iterator[Case]:
    for shape, mode in itertools.product(
        ("2x32",) if run.quick else ("32x512", "4x4096"), ("forward", WITHOUT_DROPOUT)
    ):
        batch, length = map(int, shape.split("x"))
        size = run.small if run.quick else Size(layers=6, length=length, dropout=0.0)
        for name, build in speed_builders(mode, run.device).items():
            if not (run.quick and "flex" in name):
                yield {"model": name, "mode": mode, "shape": shape}, partial(cost, build, size, batch, mode, run)


def words_tokenizer(length: int) -> PreTrainedTokenizerFast:
    """A tokenizer of words that are numbers."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *map(str, range(1000))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=length, **names)


def converted(scheme: str, run: Run) -> dict[str, Any]:
    """Seconds of a conversion with some steps."""
    torch.manual_seed(0)
    steps = 2 if run.quick else 50
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 1000, (40 if run.quick else 400, 300), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        write_whole({text: "\n\n".join(" ".join(map(str, row)) for row in numbers)})
        model = BertModel(BertConfig(**bert_sizes(run.base), max_position_embeddings=run.base.length))
        settings = {"text": [str(text)], "max_steps": steps, "tokenizer": words_tokenizer(run.base.length)}
        taken = whole_models.seconds(partial(hf_posenc.convert, model, scheme, **settings), run.device)
    return {"seconds": taken, "steps": steps}


def conversion_cases(run: Run) -> Iterator[Case]:
    yield {"model": "BERT", "what": "t5"}, partial(converted, "t5", run)


def flex_cases(run: Run) -> Iterator[Case]:
    return iter(()) if run.quick else backend_cases(run, ("flex_attention",))


PARTS: dict[str, Callable[[Run], Iterator[Case]]] = {
    "parity": parity_cases,
    "exports": export_cases,
    "rerankers": reranker_cases,
    "training": training_cases,
    "speed": speed_cases,
    "conversion": conversion_cases,
    "flex": flex_cases,
}


def cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(cell, value))
    if isinstance(value, bool) or not isinstance(value, float):
        return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    return f"{value:.0e}" if 0 < value < 1e-3 else f"{value:.4g}"


def tables(results: dict[str, list[dict]], left_out: list[str]) -> str:
    """A table of each part, with a column for all that its cases have."""
    parts = [f"Differences are shares of the largest number; those from float64 have to be below {TOLERANCE}.", ""]
    for part, cases in results.items():
        columns = list(dict.fromkeys(name for case in cases for name in case))
        rows = [["" if case.get(name) is None else cell(case[name]) for name in columns] for case in cases]
        parts += [f"{part}:", "", as_markdown(columns, rows, words=len(columns)), ""] if cases else []
    return "\n".join(parts + [f"No time was left for: {'; '.join(left_out)}."] * bool(left_out))


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def measured(function: Callable[[], dict[str, Any]], is_checked: bool) -> dict[str, Any]:
    """What a case gives, or its error: a failure where it is a check; the others are tried too."""
    try:
        return function()
    except Exception as error:  # out of memory, or what somebody else's package raises
        return {"error": first_line(error), **({"passed": False} if is_checked else {})}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, and no FlexAttention, which takes a compiler minutes on CPUs"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="nothing new is begun after so many")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    run = Run(arguments.device, arguments.quick)
    if run.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: there is no CUDA device here; --device cpu --quick runs the same code with tiny sizes")
    logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = False
    stop = time.monotonic() + 60 * arguments.minutes
    for package in ("flash_attn", *CUDA_PEERS):
        if run.device == "cuda" and not find_spec(package):
            print(f"{package} is not installed", flush=True)
    results: dict[str, list[dict]] = {part: [] for part in arguments.parts}
    left_out: list[str] = []
    cases = [(part, *case) for part in PARTS if part in arguments.parts for case in PARTS[part](run)]
    for part, setting, function in cases:
        if time.monotonic() > stop:
            left_out.append(f"{part} of {', '.join(setting.values())}")
            continue
        results[part].append(setting | measured(function, part in ("parity", "exports", "flex")))
        print(part, results[part][-1], flush=True)
    print(tables(results, left_out))
    if run.device == "cuda":
        name = torch.cuda.get_device_name()
        settings = {"device": name, "varlen_attn": has_kernel(torch.device("cuda")), "minutes": arguments.minutes}
        file = "gpu_" + re.sub(r"\W+", "_", name.lower())
        report.write(file, {"settings": settings, "results": results, "left_out": left_out})
    failed = [
        f"{part}: {', '.join(str(value) for value in list(case.values())[:2])}"
        for part, cases in results.items()
        for case in cases
        if case.get("passed") is False
    ]
    if failed:
        sys.exit(f"error: not passed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
