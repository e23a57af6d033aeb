"""The tables of speed and conversions in docs/ and in the README here, from the files in results/."""

from collections.abc import Callable, Iterator
from typing import Any

import conversion
import exported
import lower_precision
import onnx_runtime
import report
import saved_code
import serving
import step_sizes
from contestants import STOCK, STOCK_AGAIN
from report import with_tables_of
from scheme_labels import FREQUENCIES

from hf_posenc._utils import as_markdown


DETAILS = "benchmarks/README.md"
# The columns of the tables of speed; see `ratio_table`.
SCHEMES = [
    ("8 × 512: forward", "model/forward", "forward", "ratio"),
    ("8 × 512: training", "model/training", "training", "ratio"),
    ("1 × 4,096: forward", "model/forward_4096", "forward", "ratio"),
    ("1 × 4,096: memory, forward", "model/memory_4096", "forward", "memory_ratio"),
    ("no padding, 8 × 512: forward", "model/forward_unpadded", "forward", "ratio"),
    ("no padding, 1 × 4,096: forward", "model/forward_4096_unpadded", "forward", "ratio"),
]
WITHOUT_DROPOUT = "training without dropout"
SCHEMES_DETAILS = [
    (f"8 × 512: {WITHOUT_DROPOUT}", "model/training_without_dropout", WITHOUT_DROPOUT, "ratio"),
    (f"1 × 4,096: memory, {WITHOUT_DROPOUT}", "model/memory_4096", WITHOUT_DROPOUT, "memory_ratio"),
    ("no padding, 1 × 4,096: memory, forward", "model/memory_4096_unpadded", "forward", "memory_ratio"),
    (
        f"no padding, 1 × 4,096: memory, {WITHOUT_DROPOUT}",
        "model/memory_4096_unpadded",
        WITHOUT_DROPOUT,
        "memory_ratio",
    ),
]
# The schemes that came last, in a separate run.
NEWER = [(mode, "model/newer", mode, "ratio") for mode in ("forward", "training")]
NEWER_DETAILS = [
    (WITHOUT_DROPOUT, "model/newer", WITHOUT_DROPOUT, "ratio"),
    *((f"memory, {mode}", "model/newer", mode, "memory_ratio") for mode in ("forward", "training", WITHOUT_DROPOUT)),
]
LEARNED_ROTARY = [(mode, "model/learned_rotary", mode, "ratio") for mode in ("forward", "training")]
# What tables call a scheme that has flags.
NAMED = {f"rope{flag}": f"rope, {how}" for flag, how in FREQUENCIES.items()}
# The columns of the attention of DeBERTa and MPNet, and what they are called in the results.
PEERS = ["hf_posenc", "torch.compile", "disentangled-flash", "ONNX Runtime", "BERT of the same size, sdpa"]
PEERS_DETAILS = ["hf_posenc, nothing cached", "hf_posenc, torch.compile"]
REQUESTS = ["padded", serving.ORIGINAL_AGAIN, serving.SAME]


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
        [corner, *(heading for heading, *_ in columns)],
        [[NAMED.get(model, model), *cells] for model, cells in rows.items()],
    )


def fast_attention_table(corner: str, columns: list[str]) -> str:
    """Times as fast as transformers' eager attention, a row per shape that has any of these columns."""
    entries = results_of("stock_attention")
    # Families and modes as they come, batches from small to large.
    groups = [*dict.fromkeys((entry["family"], entry["mode"]) for entry in entries)]
    entries.sort(key=lambda entry: (groups.index((entry["family"], entry["mode"])), _tokens(entry["shape"])))
    rows = []
    for entry in entries:
        batches = f"{entry['family']}, {entry['mode']}, {entry['shape'].replace('x', ' × ')}"
        found = [entry["speed"].get(name) for name in columns]
        if any(found):
            rows.append([batches, *("" if speed is None else f"{speed:.1f}" for speed in found)])
    return as_markdown([corner, *columns], rows)


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


def padding_tables() -> tuple[str, str]:
    """Times as fast as stock BERT, and memory beside it, a row for batches of a kind: batches of 32 of texts; all others, at the end the record with
    12 layers."""
    columns = [STOCK_AGAIN, "BERT, hf_posenc.unpad", "absolute", "absolute+t5", "memory", "deberta"]
    batches_of_32, others = [], []
    for name, more in (("padding/2_layers", ""), ("padding/12_layers", ", 12 layers")):
        for (batches, mode), entry in padding(name).items():
            found = [entry.get(column) for column in columns]
            cells = ["" if value is None else f"{value:.2f}" for value in found]
            rows = batches_of_32 if ", 32," in batches and not more else others
            rows.append([f"{batches}, {mode}{more}", f"{100 * entry['padding']:.0f} %", *cells])
    header = ["times as fast as BERT", "padding", *columns[:-2], "memory of absolute", "deberta"]
    # `deberta` read none of the batches of 32.
    first = as_markdown(header[:-1], [row[:-1] for row in batches_of_32])
    return first, as_markdown(header, others)


def tables() -> dict[str, list[str]]:
    """All tables as Markdown, by the page that has them."""
    served = [serving.Row(**row) for row in report.read("serving")["rows"]]
    lower = report.read("lower_precision")
    quality = {task: [row for row in lower["quality"] if row["task"] == task] for task in lower_precision.TASKS}
    padded, padded_details = padding_tables()
    return {
        "docs/speed.md": [
            ratio_table("multiple of BERT's time or memory", SCHEMES),
            ratio_table("newest schemes", NEWER),
            ratio_table("rotary positions", LEARNED_ROTARY),
            padded,
            serving.table(served, REQUESTS),
            fast_attention_table("times as fast as eager", PEERS),
            lower_precision.speed_table(lower["speed"]),
            lower_precision.quality_table(quality["SST-2"]),
        ],
        "docs/conversion-results.md": [
            *conversion.tables(report.records_of(conversion.NAME)),
            exported.table(results_of("exported")),
            saved_code.table(results_of("saved_code")),
            onnx_runtime.table(results_of("onnx_runtime")),
        ],
        DETAILS: [
            ratio_table("multiple of BERT's", SCHEMES_DETAILS),
            ratio_table("newest schemes", NEWER_DETAILS),
            padded_details,
            serving.table(served, [column for column in serving.COLUMNS if column not in REQUESTS]),
            fast_attention_table("times as fast as eager", PEERS_DETAILS),
            lower_precision.quality_table(quality["CoLA"]),
            step_sizes.table(report.records_of(step_sizes.NAME)),
        ],
    }


def generated() -> Iterator[tuple[str, Callable[[str], str]]]:
    """File, and what makes its text as it should be of what it is."""
    return with_tables_of(tables())
