"""Models in ONNX Runtime: what `hf-posenc export onnx` writes, beside the usual export of the stock model.

    python benchmarks/onnx_runtime.py                  # the table in results/
    python benchmarks/onnx_runtime.py --models deberta-v3-xsmall --shapes 1x16 1x512

Random weights; sizes of the published models with fewer layers. All sessions of a model take turns in one process, in an order that is
reversed from round to round; what is reported is how many times as fast as the stock export each is, by medians, and a second session
of it shows how far apart equal models come out. Batches of more than one sequence have padding (an eighth). Writes
results/onnx_runtime.json.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnxruntime
import report
import torch
from contestants import Size, make_batch
from stock_attention import Hidden
from transformers import BertConfig, BertModel, DebertaV2Config, DebertaV2Model, PreTrainedModel
from transformers.utils import logging

import hf_posenc  # noqa: F401
from hf_posenc._utils import as_markdown
from hf_posenc.export.onnx.exporting import export_model


SHAPES = ["1x16", "1x64", "1x128", "16x128", "1x512", "8x512"]
STOCK, AGAIN, OWN = "stock export", "stock export, a second session", "hf-posenc export"
DEBERTA = {
    "vocab_size": 1000,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "max_relative_positions": -1,
}
SMALL = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}


def bert(scheme: str | None, layers: int) -> PreTrainedModel:
    config = BertConfig(vocab_size=1000, num_hidden_layers=layers, **BASE)
    if scheme is None:
        return BertModel(config)
    return BertModel(BertConfig(vocab_size=1000, num_hidden_layers=layers, **BASE, position_scheme=scheme))


def deberta(size: dict, layers: int) -> PreTrainedModel:
    return DebertaV2Model(DebertaV2Config(**DEBERTA, **size, num_hidden_layers=layers))


# Name -> the stock model, and what this package exports beside it.
MODELS: dict[str, tuple[Callable, dict[str, Callable]]] = {
    "deberta-v3-xsmall": (partial(deberta, SMALL), {OWN: partial(deberta, SMALL)}),
    "deberta-v3-base": (partial(deberta, BASE), {OWN: partial(deberta, BASE)}),
    "bert-base": (
        partial(bert, None),
        {OWN: partial(bert, None), **{scheme: partial(bert, scheme) for scheme in ("t5", "rope", "alibi", "deberta")}},
    ),
}


def export_stock(model: PreTrainedModel, file: Path) -> None:
    inputs = make_batch(Size(length=96), 2, 0.0, "cpu")
    inputs["input_ids"] %= 1000
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = dict.fromkeys(inputs, sizes)
        torch.onnx.export(
            Hidden(model),
            (),
            file,
            kwargs=inputs,
            dynamic_shapes=names,
            dynamo=True,
            verbose=False,
            external_data=False,
        )


def session(file: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    # Threads that spin after their work would disturb who is next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def sessions(name: str, layers: int, threads: int) -> dict[str, onnxruntime.InferenceSession]:
    stock, own = MODELS[name]
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        export_stock(stock(layers).eval(), Path(folder, "stock.onnx"))
        for contestant in (STOCK, AGAIN):
            made[contestant] = session(Path(folder, "stock.onnx"), threads)
        for number, (contestant, build) in enumerate(own.items()):
            torch.manual_seed(0)
            export_model(build(layers).eval(), Path(folder, f"{number}.onnx"))
            made[contestant] = session(Path(folder, f"{number}.onnx"), threads)
    return made


def measure(made: dict[str, onnxruntime.InferenceSession], shape: str, seconds: float) -> dict:
    """Times as fast as the stock export, by medians of turns."""
    batch, length = map(int, shape.split("x"))
    inputs = make_batch(Size(length=length), batch, 0.125 if batch > 1 else 0.0, "cpu")
    fed = {name: tensor.numpy() % 1000 for name, tensor in inputs.items()}
    feeds = {}
    for name, each in made.items():
        wanted = {entry.name for entry in each.get_inputs()}
        feeds[name] = {key: value for key, value in fed.items() if key in wanted}
        if "token_type_ids" in wanted:
            feeds[name]["token_type_ids"] = fed["input_ids"] * 0
    times: dict[str, list[float]] = {name: [] for name in made}
    end, turn = time.perf_counter() + seconds, 0
    while turn < 6 or time.perf_counter() < end and turn < 200:
        for name in reversed(made) if turn % 2 else made:
            before = time.perf_counter()
            made[name].run(None, feeds[name])
            if turn:
                times[name].append(time.perf_counter() - before)
        turn += 1
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        "shape": shape,
        "stock_seconds": round(medians[STOCK], 5),
        "turns": turn - 1,
        "speed": {name: round(medians[STOCK] / taken, 3) for name, taken in medians.items() if name != STOCK},
    }


def table(results: list[dict]) -> str:
    """Times as fast as the stock model's usual export, a row per shape."""
    names = list(dict.fromkeys(name for result in results for name in result["speed"]))
    header = ["model", "batch x length", "usual export, s", *(name.replace("stock", "usual") for name in names)]
    rows = [
        [
            result["model"],
            result["shape"],
            f"{result['stock_seconds']:.4f}",
            *(f"{result['speed'][name]:.2f}" if name in result["speed"] else "" for name in names),
        ]
        for result in results
    ]
    return as_markdown(header, rows, words=len(header))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="batch x length, such as 8x512")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each shape, more where a turn takes long")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="onnx_runtime", help="of the files in results/")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    settings = {key: getattr(arguments, key) for key in ("layers", "seconds", "threads")}
    settings["onnxruntime"], settings["torch"] = onnxruntime.__version__, torch.__version__
    results: list[dict] = []
    for name in arguments.models:
        made = sessions(name, arguments.layers, arguments.threads)
        for shape in arguments.shapes:
            results.append({"model": name, **measure(made, shape, arguments.seconds)})
            print(json.dumps(results[-1]), flush=True)
            report.write(arguments.name, {"settings": settings, "results": results})
    print(table(results))


if __name__ == "__main__":
    main()
