"""A saved classifier in ONNX Runtime or OpenVINO, for lower_precision.py, which starts this in an environment that has them.

    python benchmarks/lower_precision_peers.py "OpenVINO int8" FOLDER calibration.json

int8 is what sentence-transformers' `export_dynamic_quantized_onnx_model(model, "avx512_vnni", ...)` and
`export_static_quantized_openvino_model(model, None, ...)` make: the same quantizers of optimum-onnx and optimum-intel with the same
configurations; what is calibrated sees sentences of the task's own training data, one by one, as many as is usual there (128). Quantized models are
kept in folders beside the classifier's, and taken from there where they are.

It answers lines of JSON on its standard input with lines of JSON: a list of batches, which it keeps, with the seconds of one pass over
them and their logits; `null` with the seconds of another pass over the batches that it has. The first line that it writes says what it runs.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np


Batch = dict[str, np.ndarray]


def onnxruntime_model(folder: Path, quantized: Path | None, threads: int, calibration: Path) -> tuple[Callable, dict]:
    """A function from a batch to logits, and what it runs."""
    import onnxruntime
    from optimum.onnxruntime import ORTModelForSequenceClassification, ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    options = onnxruntime.SessionOptions()
    # Threads that spin after their work would disturb who is next.
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    load = ORTModelForSequenceClassification.from_pretrained
    if quantized and not quantized.is_dir():
        settings = AutoQuantizationConfig.avx512_vnni(is_static=False)
        model = load(folder, export=True)
        ORTQuantizer.from_pretrained(model).quantize(save_dir=quantized, quantization_config=settings)
        model.config.save_pretrained(quantized)
    if quantized:
        model = load(quantized, file_name="model_quantized.onnx", session_options=options)
    else:
        model = load(folder, export=True, session_options=options)
    packages = ("onnxruntime", "optimum-onnx", "transformers")
    return lambda batch: model(**batch, return_dict=True).logits, {"versions": versions(packages)}


def openvino_model(folder: Path, quantized: Path | None, threads: int, calibration: Path) -> tuple[Callable, dict]:
    """The same; the precision that OpenVINO chooses for what is not int8 is in what it tells."""
    import nncf
    from optimum.intel.openvino import OVConfig, OVModelForSequenceClassification, OVQuantizationConfig, OVQuantizer

    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
    load = OVModelForSequenceClassification.from_pretrained
    if quantized and not quantized.is_dir():
        model = load(folder, export=True)
        seen = nncf.Dataset(arrays(json.loads(calibration.read_text(encoding="utf-8"))))
        configuration = OVConfig(quantization_config=OVQuantizationConfig())
        OVQuantizer.from_pretrained(model).quantize(seen, save_directory=quantized, ov_config=configuration)
        model.config.save_pretrained(quantized)
    model = load(quantized, ov_config=settings) if quantized else load(folder, export=True, ov_config=settings)
    model.compile()
    compiled = model.compiled_model if hasattr(model, "compiled_model") else model.request
    told = {"inference_precision": str(compiled.get_property("INFERENCE_PRECISION_HINT"))}
    packages = ("openvino", "nncf", "optimum-intel", "transformers")
    return lambda batch: model(**batch).logits, {"versions": versions(packages), **told}


LIBRARIES = {"ONNX Runtime": onnxruntime_model, "OpenVINO": openvino_model}
KINDS = [f"{library}{precision}" for library in LIBRARIES for precision in ("", " int8")]


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    return {package: version(package) for package in packages}


def arrays(batches: list[dict[str, list]]) -> list[Batch]:
    """Batches as models of these libraries take them."""
    found = [{name: np.array(values, dtype=np.int64) for name, values in batch.items()} for batch in batches]
    return [{**batch, "token_type_ids": np.zeros_like(batch["input_ids"])} for batch in found]


def timed(call: Callable, batches: list[Batch]) -> tuple[float, list[np.ndarray]]:
    start = time.perf_counter()
    logits = [call(batch) for batch in batches]
    return time.perf_counter() - start, logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path, help="of a classifier with BERT's classes")
    parser.add_argument("calibration", type=Path, help="batches of training sentences as JSON")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    # Libraries may print; the answers go where standard output was.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(found: dict) -> None:
        print(json.dumps(found), file=answers, flush=True)

    library = arguments.kind.removesuffix(" int8")
    name = f"{arguments.folder.name}-{arguments.kind.lower().replace(' ', '-')}"
    quantized = arguments.folder.with_name(name) if arguments.kind != library else None
    call, told = LIBRARIES[library](arguments.folder, quantized, arguments.threads, arguments.calibration)
    answer(told)
    batches: list[Batch] = []
    for line in sys.stdin:
        given = json.loads(line)
        if given is not None:
            batches = arrays(given)
        seconds, logits = timed(call, batches)
        answer({"seconds": seconds} if given is None else {"seconds": seconds, "logits": [x.tolist() for x in logits]})


if __name__ == "__main__":
    main()
