"""The tables of speed and conversions in docs/, from the files in results/."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import conversion
import exported
import lower_precision
import onnx_runtime
import report
import saved_code
import serving
from contestants import STOCK, STOCK_AGAIN
from report import replace_table

from hf_posenc._utils import as_markdown


# What docs/conversion-results.md has between them is generated.
CONVERSION, BEGIN, END = "docs/conversion-results.md", "<!-- measured -->", "<!-- end of what was measured -->"
# The columns of the tables of speed; see `ratio_table`.
SHORT = [
    ("forward", "model/forward", "forward", "ratio"),
    ("training", "model/training", "training", "ratio"),
    ("training without dropout", "model/training_without_dropout", "training without dropout", "ratio"),
]
LONG = [
    ("time, forward", "model/forward_4096", "forward", "ratio"),
    ("memory, forward", "model/memory_4096", "forward", "memory_ratio"),
    ("memory, training without dropout", "model/memory_4096", "training without dropout", "memory_ratio"),
]
# The schemes that came last, in a separate run.
NEWER = [
    (f"{what}, {mode}", "model/newer", mode, key)
    for what, key in (("time", "ratio"), ("memory", "memory_ratio"))
    for mode in ("forward", "training", "training without dropout")
]
UNPADDED = [
    ("8 × 512: time, forward", "model/forward_unpadded", "forward", "ratio"),
    ("1 × 4,096: time, forward", "model/forward_4096_unpadded", "forward", "ratio"),
    ("memory, forward", "model/memory_4096_unpadded", "forward", "memory_ratio"),
    ("memory, training without dropout", "model/memory_4096_unpadded", "training without dropout", "memory_ratio"),
]


def results_of(name: str) -> list[dict[str, Any]]:
    """The entries of what was measured, by the name that `report.read` takes."""
    return report.read(name)["results"]


def ratio_table(corner: str, columns: list[tuple[str, str, str, str]]) -> str:
    """Multiples of what stock BERT takes, a row per model.

    Args:
        corner: heading of the models.
        columns: of each its heading, the results of model.py that it is from, the mode there, and the name of the number.
    """
    rows: dict[str, list[str]] = {}
    for number, (_, name, mode, key) in enumerate(columns):
        for entry in results_of(name):
            if entry["mode"] == mode and entry["model"] != STOCK:
                cells = rows.setdefault(entry["model"], [""] * len(columns))
                cells[number] = f"{entry[key]:.2f}" if key in entry else entry["memory"]
    return as_markdown(
        [corner, *(heading for heading, *_ in columns)], [[model, *cells] for model, cells in rows.items()]
    )


def fast_attention_table() -> str:
    """Times as fast as transformers' eager attention, a row per shape."""
    columns = {
        "hf_posenc": "hf_posenc",
        "without cached projections": "hf_posenc, nothing cached",
        "torch.compile": "torch.compile",
        "hf_posenc, torch.compile": "hf_posenc, torch.compile",
        "disentangled-flash": "disentangled-flash",
        "ONNX Runtime": "ONNX Runtime",
        "BERT of the same size, sdpa": "BERT of the same size, sdpa",
    }
    entries = results_of("stock_attention")
    # Families and modes as they come, batches from small to large.
    groups = [*dict.fromkeys((entry["family"], entry["mode"]) for entry in entries)]
    entries.sort(key=lambda entry: (groups.index((entry["family"], entry["mode"])), _tokens(entry["shape"])))
    rows = []
    for entry in entries:
        batches = f"{entry['family']}, {entry['mode']}, {entry['shape'].replace('x', ' x ')}"
        found = [entry["speed"].get(name) for name in columns.values()]
        rows.append([batches, *("" if speed is None else f"{speed:.1f}" for speed in found)])
    return as_markdown(["batch x length", *columns], rows)


def _tokens(shape: str) -> tuple[int, int]:
    batch, length = map(int, shape.split("x"))
    return batch > 1, batch * length


def padding(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """By batches and mode: the share of padding, of each model times as fast as stock BERT, and the memory of `absolute` beside it."""
    return {
        (entry["batches"], entry["mode"]): {
            "padding": entry["padding"],
            "memory": entry["models"]["absolute"].get("memory_ratio"),
            **{model: 1 / own["ratio"] for model, own in entry["models"].items()},
        }
        for entry in results_of(name)
    }


def padding_table() -> str:
    """Times as fast as stock BERT, and memory beside it, a row for batches of a kind; at the end the record with 12 layers."""
    columns = [STOCK_AGAIN, "BERT, hf_posenc.unpad", "absolute", "absolute+t5", "deberta", "memory"]
    rows = []
    for name, more in (("padding/2_layers", ""), ("padding/12_layers", ", 12 layers")):
        for (batches, mode), entry in padding(name).items():
            found = [entry.get(column) for column in columns]
            cells = ["" if value is None else f"{value:.2f}" for value in found]
            rows.append([f"{batches}, {mode}{more}", f"{100 * entry['padding']:.0f} %", *cells])
    return as_markdown(["times as fast as BERT", "padding", *columns[:-1], "memory of absolute"], rows)


def tables() -> dict[str, list[str]]:
    """All tables as Markdown, by the page that has them."""
    served = [serving.Row(**row) for row in report.read("serving")["rows"]]
    lower = report.read("lower_precision")
    return {
        "docs/speed.md": [
            ratio_table("time", SHORT),
            ratio_table("newest schemes", NEWER),
            ratio_table("1 × 4,096", LONG),
            ratio_table("no padding", UNPADDED),
            padding_table(),
            serving.table(served),
            fast_attention_table(),
            lower_precision.speed_table(lower["speed"]),
            lower_precision.quality_table(lower["quality"]),
        ],
        CONVERSION: [
            exported.table(results_of("exported")),
            saved_code.table(results_of("saved_code")),
            onnx_runtime.table(results_of("onnx_runtime")),
        ],
    }


def conversions(page: str) -> str:
    """A page with the tables of conversions between its marks."""
    return report.replace_marked(page, BEGIN, END, f"{BEGIN}\n\n{conversion.page(conversion.read_records())}\n\n{END}")


def generated() -> Iterator[tuple[str, Callable[[str], str]]]:
    """File, and what makes its text as it should be of what it is."""
    yield CONVERSION, conversions
    for page, own in tables().items():
        for table in own:
            yield page, partial(replace_table, table=table)
