"""Classifiers in bfloat16 and with int8 linear layers on CPUs: how fast they are, and what they get right, beside ONNX Runtime and OpenVINO.

    python benchmarks/lower_precision.py MODELS --data DATA --onnxruntime ort/bin/python --openvino ov/bin/python

MODELS holds a folder for each task and scheme, such as `sst2-absolute+t5`, as examples/run_classification.py saves it (`absolute` is what stock
BERT computes, and is loaded as stock BERT):

    python examples/run_classification.py --train_file sst2/train.tsv --max_train_samples 2500 --position_scheme absolute+t5 \\
        --position_learning_rate 0.01 --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 --do_train --num_train_epochs 2 \\
        --per_device_train_batch_size 32 --learning_rate 1e-4 --warmup_steps 0.1 --train_sampling_strategy group_by_length --seed 42 \\
        --save_strategy no --load_best_model_at_end false --output_dir MODELS/sst2-absolute+t5

and MODELS/cola-absolute by every third sentence of cola/train.tsv (`awk 'NR % 3 == 0'`, `--column_names source label mark sentence`) with
`--num_train_epochs 4 --learning_rate 3e-4`. DATA has cola and sst2 in GLUE's layout.

int8 is `quantize_` of torchao with `Int8DynamicActivationInt8WeightConfig()`; "torch.ao" is PyTorch's `quantize_dynamic`, which is deprecated. The peers
run in processes of environments of their own (benchmarks/lower_precision_peers.py), whose Python is named: optimum-onnx, and
optimum-intel with nncf. Each contestant answers the whole development set; what is timed is part of it, batches of 32 in random order, single
sentences, and 8 random sequences of 512 tokens without padding, in turns as in benchmarks/model.py: stock BERT in float32 before and after each, and a second
copy of it. Writes results/lower_precision.json.
"""

import argparse
import csv
import json
import random
import subprocess
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import report
import torch
from contestants import STOCK, STOCK_AGAIN
from lower_precision_peers import KINDS
from model import take_turns
from sklearn.metrics import accuracy_score, matthews_corrcoef
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

import hf_posenc
from hf_posenc._utils import as_markdown
from hf_posenc.files import write_whole


# Of each task: folder, whether its files have a header, columns of label and text, and what it is measured by.
TASKS = {
    "CoLA": ("cola", False, 1, 3, matthews_corrcoef),
    "SST-2": ("sst2", True, 0, 1, accuracy_score),
}
UNPADDED = f"{STOCK}, hf_posenc.unpad"
SCHEMES = ("absolute+t5", "absolute+deberta")
MODELS = (STOCK, UNPADDED, *SCHEMES)
FLOAT, INT8 = "float32", "int8"
PRECISIONS = (FLOAT, "bfloat16", INT8, "int8 by torch.ao", "float32, compiled", "bfloat16, compiled", "int8, compiled")
FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8")
WORKLOADS = ("batches of 32", "single sentences", "8 × 512")
BATCH, CALIBRATION, LONGEST = 32, 300, 128

Batch = dict[str, torch.Tensor]
Answer = Callable[[list[Batch]], list[torch.Tensor]]


def processor() -> dict[str, Any]:
    """The processor's name, and which of the instructions for narrow numbers it has."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    found = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    told = {name.strip(): value.strip() for name, value in found.items()}
    flags = told["flags"].split()
    return {"name": told["model name"], **{flag: flag in flags for flag in FLAGS}}


def sentences(data: Path, task: str, split: str) -> tuple[list[str], list[int]]:
    """Texts and labels of a split."""
    folder, has_header, label, text, _ = TASKS[task]
    with (data / folder / f"{split}.tsv").open(encoding="utf-8", newline="") as opened:
        rows = [*csv.reader(opened, delimiter="\t", quoting=csv.QUOTE_NONE)][has_header:]
    return [row[text] for row in rows], [int(row[label]) for row in rows]


def encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str], size: int) -> list[Batch]:
    parts = [texts[start : start + size] for start in range(0, len(texts), size)]
    options = {"truncation": True, "max_length": LONGEST, "padding": True, "return_tensors": "pt"}
    return [dict(tokenizer(part, return_token_type_ids=False, **options)) for part in parts]


def batches(workload: str, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Batch]:
    """What is timed, the same with every call."""
    if workload == WORKLOADS[2]:
        ids = torch.randint(1000, 30522, (8, 512), generator=torch.Generator().manual_seed(0))
        return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    size, count = (BATCH, 2) if workload == WORKLOADS[0] else (1, 16)
    return encoded(tokenizer, random.Random(0).sample(texts, size * count), size)


def load_stock(folder: Path) -> BertForSequenceClassification:
    """Stock BERT with the weights of an `absolute` variant."""
    variant = AutoModelForSequenceClassification.from_pretrained(folder)
    told = {name: value for name, value in variant.config.to_dict().items() if name in BertConfig().to_dict()}
    model = BertForSequenceClassification(BertConfig(**{**told, "model_type": "bert", "architectures": None}))
    model.load_state_dict(variant.state_dict())
    return model.eval()


def load(models: Path, task: str, name: str, precision: str) -> nn.Module:
    """A contestant of PyTorch."""
    folder = TASKS[task][0]
    if name in (STOCK, UNPADDED):
        model = load_stock(models / f"{folder}-absolute")
    else:
        model = AutoModelForSequenceClassification.from_pretrained(models / f"{folder}-{name}").eval()
    if name == UNPADDED:
        hf_posenc.unpad(model)
    kind, _, how = precision.partition(", ")
    if kind == "bfloat16":
        model.bfloat16()
    elif kind == INT8:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        quantize_(model, Int8DynamicActivationInt8WeightConfig())
    elif kind == "int8 by torch.ao":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return torch.compile(model) if how else model


@torch.no_grad()
def answer(model: nn.Module, given: list[Batch]) -> list[torch.Tensor]:
    return [model(**batch).logits.float() for batch in given]


class Peer:
    """A contestant in a process of an environment of its own."""

    def __init__(self, python: str, kind: str, folder: Path, calibration: Path):
        script = Path(__file__).with_name("lower_precision_peers.py")
        command = [python, str(script), kind, str(folder), str(calibration), "--threads", str(torch.get_num_threads())]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.given: list[Batch] | None = None
        self.told = self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")
        return json.loads(line)

    def __call__(self, given: list[Batch]) -> list[torch.Tensor]:
        """Logits where the batches are other ones than last time; nothing else, in as little time as can be."""
        is_new, self.given = given is not self.given, given
        asked = [{name: tensor.tolist() for name, tensor in batch.items()} for batch in given] if is_new else None
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        found = self._answer()
        return [torch.tensor(logits) for logits in found["logits"]] if is_new else []

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class Field:
    """All contestants of a task.

    Attributes:
        answers: by name and precision; None is the second copy of stock BERT.
        peers: those of them that are in other processes.
    """

    def __init__(self, arguments: argparse.Namespace, task: str):
        self.answers: dict[tuple[str, str], Answer] = {}
        for name in arguments.models_of:
            for precision in arguments.precisions:
                # What is compiled computes padding, with `unpad` as without.
                if not (name == UNPADDED and "compiled" in precision):
                    model = load(arguments.models, task, name, precision)
                    self.answers[name, precision] = partial(answer, model)
        self.answers[STOCK_AGAIN, FLOAT] = partial(answer, load(arguments.models, task, STOCK, FLOAT))
        stock, calibration = (arguments.models / f"{TASKS[task][0]}-{end}" for end in ("stock", "calibration.json"))
        load(arguments.models, task, STOCK, FLOAT).save_pretrained(stock)
        self.tokenizer = AutoTokenizer.from_pretrained(arguments.models / f"{TASKS[task][0]}-absolute")
        texts, _ = sentences(arguments.data, task, "train")
        seen = encoded(self.tokenizer, random.Random(0).sample(texts, CALIBRATION), 1)
        write_whole({calibration: json.dumps([{name: value.tolist() for name, value in one.items()} for one in seen])})
        self.peers: dict[tuple[str, str], Peer] = {}
        for kind in KINDS:
            library = kind.removesuffix(f" {INT8}")
            python = {"ONNX Runtime": arguments.onnxruntime, "OpenVINO": arguments.openvino}[library]
            if python:
                peer = Peer(python, kind, stock, calibration)
                chosen = "bfloat16" if "bfloat16" in peer.told.get("inference_precision", "") else FLOAT
                self.peers[library, chosen if kind == library else INT8] = peer
        self.answers |= self.peers

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()


def measure_quality(field: Field, data: Path, task: str) -> list[dict]:
    """What each contestant gets right of the development set, and how often it says something else than its own float32."""
    texts, labels = sentences(data, task, "dev")
    given, found, score = encoded(field.tokenizer, texts, BATCH), {}, TASKS[task][-1]
    results = []
    for (name, precision), call in field.answers.items():
        if name == STOCK_AGAIN:
            continue
        found[name, precision] = torch.cat(call(given)).argmax(-1)
        predicted, base = found[name, precision], found.get((name, FLOAT), found[STOCK, FLOAT])
        entry = {"task": task, "model": name, "precision": precision, "sentences": len(texts)}
        entry |= {
            "score": round(float(score(labels, predicted.tolist())), 4),
            "changed": int((predicted != base).sum()),
        }
        print(json.dumps(entry), flush=True)
        results.append(entry)
    return results


def measure_speed(field: Field, data: Path, task: str, workload: str, rounds: int) -> list[dict]:
    """How many times as fast as stock BERT in float32 each contestant is."""
    parts, results = batches(workload, field.tokenizer, sentences(data, task, "dev")[0]), []
    calls, names = {}, {}
    for (name, precision), call in field.answers.items():
        label = STOCK if (name, precision) == (STOCK, FLOAT) else f"{name}, {precision}"
        calls[label], names[label] = partial(call, parts), (name, precision)
        call(parts)  # compiles, and a peer keeps these now
    for label, entry in take_turns(calls, rounds, "cpu", dropped=1).items():
        name, precision = names[label]
        own = {"task": task, "workload": workload, "model": name, "precision": precision}
        own |= {"seconds": entry["seconds"], "speed": round(1 / entry["ratio"], 3)}
        if "quartiles" in entry:
            own["quartiles"] = [round(1 / ratio, 3) for ratio in reversed(entry["quartiles"])]
        print(json.dumps(own), flush=True)
        results.append(own)
    return results


def _precisions_of(results: list[dict]) -> list[str]:
    """The precisions that results have, in the order of PRECISIONS."""
    present = {result["precision"] for result in results}
    return [precision for precision in PRECISIONS if precision in present]


def speed_table(results: list[dict]) -> str:
    """Times as fast as stock BERT in float32: a row for what is timed and each model."""
    found = {(r["task"], r["workload"], r["model"], r["precision"]): r["speed"] for r in results}
    precisions = _precisions_of(results)
    rows = [
        [f"{task}, {workload}", name, *(_cell(found.get((task, workload, name, p)), 2) for p in precisions)]
        for task, workload, name in sorted({key[:3] for key in found}, key=_place)
    ]
    return as_markdown(["times as fast", "model", *precisions], rows, words=2)


def quality_table(results: list[dict]) -> str:
    """Scores, and in brackets how many answers are others than in float32."""
    found = {(r["task"], r["model"], r["precision"]): r for r in results}
    precisions = _precisions_of(results)
    rows = []
    for task, name in sorted({key[:2] for key in found}, key=_place):
        cells = []
        for precision in precisions:
            entry = found.get((task, name, precision))
            changed = "" if entry is None or (precision == FLOAT and name in MODELS) else f" ({entry['changed']})"
            cells.append("" if entry is None else _cell(entry["score"], 3) + changed)
        rows.append([task, name, *cells])
    return as_markdown(["score", "model", *precisions], rows, words=2)


def _place(row: tuple[str, ...]) -> list[int]:
    """Where a row of a table stands: by task, workload and model."""
    order = [*TASKS, *WORKLOADS, *MODELS, STOCK_AGAIN, *KINDS]
    return [order.index(name) for name in row]


def _what(entry: dict) -> tuple:
    """What was measured, of an entry."""
    return tuple(entry.get(name) for name in ("task", "workload", "model", "precision"))


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def page(results: dict) -> str:
    has = results["processor"]
    parts = [f"{has['name']}: " + ", ".join(f"{flag} {'yes' if has[flag] else 'no'}" for flag in FLAGS)]
    parts += [speed_table(results["speed"])] if results["speed"] else []
    parts += [quality_table(results["quality"])] if results["quality"] else []
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="folder of the fine-tuned models")
    parser.add_argument("--data", type=Path, required=True, help="folder with cola and sst2")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--models_of", nargs="+", default=list(MODELS), choices=MODELS, help="which models")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--measure", nargs="+", default=["speed", "quality"], choices=["speed", "quality"])
    parser.add_argument("--onnxruntime", help="Python of an environment with optimum-onnx and onnxruntime")
    parser.add_argument("--openvino", help="Python of an environment with optimum-intel, openvino and nncf")
    parser.add_argument("--rounds", type=int, default=8, help="rounds beside the first; half of them count")
    parser.add_argument("--resume", action="store_true", help="keep what was measured before of others")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="lower_precision", help="of the files in results/")
    arguments = parser.parse_args()
    if FLOAT not in arguments.precisions or STOCK not in arguments.models_of:
        parser.error(f"{STOCK} in {FLOAT} is what all is compared with: leave it among the models and precisions")
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # As PyTorch recommends for quantized models on CPUs: parameters are constants of the compiled code.
    torch._inductor.config.freezing = True
    settings = {"rounds": arguments.rounds, "torchao": version("torchao")}
    before = report.stopped_at(arguments.name, settings) if arguments.resume else {}
    results = {"settings": settings, "processor": processor(), "peers": before.get("peers", {})}
    results |= {kind: before.get(kind, []) for kind in ("speed", "quality")}
    for task in arguments.tasks:
        field = Field(arguments, task)
        results["peers"] |= {", ".join(name): peer.told for name, peer in field.peers.items()}
        parts = [("speed", workload) for workload in arguments.workloads] + [("quality", None)]
        for kind, workload in parts:
            if kind not in arguments.measure:
                continue
            if kind == "speed":
                found = measure_speed(field, arguments.data, task, workload, arguments.rounds)
            else:
                found = measure_quality(field, arguments.data, task)
            measured = {_what(entry) for entry in found}
            results[kind] = [entry for entry in results[kind] if _what(entry) not in measured] + found
            report.write(arguments.name, results)
        field.close()
    print(page(results))


if __name__ == "__main__":
    main()
