"""What README and docs say was measured, from the files in results/.

`docs/generate.py` puts the tables into the pages in place of those that are there. Of figures in sentences, it says which of them the
pages do not have as they are in the results; these are mended by hand.
"""

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comparison
import conversion
import long_tables
import lower_precision
import numpy as np
import report
import torch
from comparison import Runs, read_part
from contestants import STOCK, STOCK_AGAIN
from intervals import Interval, equivalence, nested, of_mean, paired, resampled, sign, step_that_leaves, verdict
from minilm import packaged_minilm
from run_files import run_file
from safetensors.torch import load_file
from scheme_labels import flags_of
from torch.nn import functional

from hf_posenc.modeling.packing import FEWEST_PLACES, SMALLEST_SHARE
from hf_posenc.tables import as_markdown


ROOT = Path(__file__).parents[1]
# What docs/conversion.md has between them is the page of the results.
CONVERSION, BEGIN, END = "docs/conversion.md", "<!-- measured -->", "<!-- end of what was measured -->"
CURVE_STEPS = (20, 40, 80, 120, 160, 200, 240)
SCRATCH_STEPS = (100, 200, 300, 400, 500, 600, 700, 800)

# The columns of the tables of speed; see `ratio_table`.
SHORT = [
    ("forward", "model_forward", "forward", "ratio"),
    ("training", "model_training", "training", "ratio"),
    ("training without dropout", "model_training_without_dropout", "training without dropout", "ratio"),
]
LONG = [
    ("time, forward", "model_forward_4096", "forward", "ratio"),
    ("memory, forward", "model_memory_4096", "forward", "memory_ratio"),
    ("memory, training without dropout", "model_memory_4096", "training without dropout", "memory_ratio"),
]
# The schemes that came last, in a run of their own.
NEWER = [
    (f"{what}, {mode}", "model_newer", mode, key)
    for what, key in (("time", "ratio"), ("memory", "memory_ratio"))
    for mode in ("forward", "training", "training without dropout")
]
# Methods of long_vectors.py.
CHUNKS, BEST = "mean of chunks", "best chunk of 64 overlapping"
UNPADDED = [
    ("8 × 512: time, forward", "model_forward_unpadded", "forward", "ratio"),
    ("1 × 4,096: time, forward", "model_forward_4096_unpadded", "forward", "ratio"),
    ("memory, forward", "model_memory_4096_unpadded", "forward", "memory_ratio"),
    ("memory, training without dropout", "model_memory_4096_unpadded", "training without dropout", "memory_ratio"),
]


def results_of(name: str) -> list[dict[str, Any]]:
    """The entries of a file in results/."""
    return json.loads((report.RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"]


def values(runs: list[dict[str, Any]], length: str, metric: str) -> list[float]:
    return [run["metrics"][length][metric] for run in runs]


def less(own: list[dict[str, Any]], other: list[dict[str, Any]], length: str, metric: str) -> Interval:
    """A metric of some runs less that of others, by the seeds that both have: runs of one seed have the same data in the same order."""
    mine, theirs = (
        {run["seed"]: value for run in runs for value in values([run], length, metric)} for runs in (own, other)
    )
    common = sorted(mine.keys() & theirs.keys())
    return paired([mine[seed] for seed in common], [theirs[seed] for seed in common])


def by_seed(runs: list[dict[str, Any]], length: str, metric: str) -> list[float]:
    """Values of a metric at a length in the order of the seeds, of the first three, which all schemes have."""
    return values(sorted(runs, key=lambda run: run["seed"])[:3], length, metric)


def written(numbers: list[float]) -> str:
    """Mean and sample standard deviation over the seeds, with their number where it is not three."""
    if not numbers:
        return ""
    return report.mean_and_deviation(numbers) + f" ({len(numbers)})" * (len(numbers) != 3)


def chosen_rate(runs: list[dict[str, Any]]) -> str:
    """The position learning rate that all seeds have; nothing where none was chosen, as for a single number and for matrices."""
    if runs[0]["position_parameters"] <= 1 or "position_combine" in runs[0]["scheme"]:
        return ""
    [rate] = {run["position_learning_rate"] for run in runs}
    return f"{rate:g}"


def named(scheme: str) -> str:
    """A scheme as tables call it, its flags in words."""
    name, colon, flags = scheme.partition(":")
    return f"{name}, {comparison.NAMED[colon + flags]}" if flags else name


def quality_table(punctuation: Runs, converted: Runs) -> str:
    """A row per scheme, those with flags where they were converted: F1 on punctuation and how far above `none` seed by seed, then the
    same where the checkpoint was converted first."""
    rows = []
    for scheme, runs in punctuation.items():
        if ":" in scheme and scheme not in converted:
            continue
        f1 = values(runs, "64", "f1")
        above = "" if scheme == "none" else less(runs, punctuation["none"], "64", "f1").written()
        distilled = converted.get(scheme, [])
        first = [written(values(distilled, length, "f1")) for length in ("64", "256")]
        own = [written(f1), written(values(runs, "256", "f1")), chosen_rate(runs), above]
        rows.append((statistics.fmean(f1), [named(scheme), *own, *first, chosen_rate(distilled) if distilled else ""]))
    columns = ["scheme", "punctuation: F1 at 64", "at 256", "rate", "above none"]
    columns += ["converted first: F1 at 64", "at 256", "rate"]
    return as_markdown(columns, [row for _, row in sorted(rows, key=lambda row: -row[0])])


def scratch_table(scratch: Runs) -> str:
    """A row per scheme by itself: the chosen rate, the loss at each length, and how far below that of `none` at the first."""
    rows = []
    for scheme, runs in scratch.items():
        if ":" in scheme and scheme != comparison.LEARNED:
            continue
        losses = {length: values(runs, length, "masked_loss") for length in runs[0]["metrics"]}
        below = "" if scheme == "none" else less(scratch["none"], runs, "32", "masked_loss").written()
        cells = [chosen_rate(runs), *map(written, losses.values()), below]
        rows.append((statistics.fmean(losses["32"]), [named(scheme), *cells]))
    return as_markdown(
        ["scheme", "learning rate of positions", *_loss_heads(scratch), "below none"],
        [row for _, row in sorted(rows, key=lambda row: row[0])],
    )


def combined_table(scratch: Runs, punctuation: Runs) -> str:
    """How positions are combined with the words: quality at the training length, from scratch and fine-tuned."""
    measured = [
        (scheme, *part)
        for part in (("loss", scratch, "32", "masked_loss"), ("F1", punctuation, "64", "f1"))
        for scheme in ("absolute", "sinusoidal")
    ]
    rows = [
        [
            how,
            *(written(values(runs[scheme + flag], length, metric)) for scheme, _, runs, length, metric in measured),
        ]
        for flag, how in comparison.COMBINED.items()
    ]
    return as_markdown(["positions are", *(f"{scheme}: {name}" for scheme, name, *_ in measured)], rows)


def counts(runs: list[dict[str, Any]], length: str, seeds: list[int]) -> np.ndarray:
    """Marks found, wrong and missed by seed, conversion if there are several, and document."""
    conversions = sorted({run.get("conversion") or 0 for run in runs})
    found = {(run["seed"], run.get("conversion") or 0): run["documents"][length] for run in runs}
    counted = np.array([[found[seed, number] for number in conversions] for seed in seeds])
    return counted if len(conversions) > 1 else counted[:, 0]


def pair_rows(name: str, own: list[dict[str, Any]], other: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Differences of F1 at each length with their intervals, and what two one-sided tests say.

    Of several conversions the difference is taken to the runs of the same seeds, and the first interval is over conversions. One is said
    to be higher where both intervals leave zero out.
    """
    seeds = sorted({run["seed"] for run in own} & {run["seed"] for run in other})
    conversions = sorted({run.get("conversion") or 0 for run in own})
    for length in ("64", "256"):
        theirs = {run["seed"]: run["metrics"][length]["f1"] for run in other}
        ours = {(run.get("conversion") or 0, run["seed"]): run["metrics"][length]["f1"] for run in own}
        groups = [[ours[number, seed] - theirs[seed] for seed in seeds] for number in conversions]
        mine, others = (counts(runs, length, seeds) for runs in (own, other))
        if len(conversions) > 1:
            others = np.repeat(others[:, None], len(conversions), axis=1)
        resampling = resampled(mine, others)
        if len(groups) > 1:
            over, sample = nested(groups).interval, f"{len(conversions)} x {len(seeds)}"
            tests, said = "", sign(over)
        else:
            over, sample = of_mean(groups[0]), str(len(seeds))
            nothing = [0.0] * len(seeds)
            tested, said = equivalence(groups[0], nothing), verdict(groups[0], nothing)
            tests = f"{tested.interval.written()}, p = {tested.p:.3f}"
        if said in ("higher", "lower") and sign(resampling) != said:
            said = None  # seeds, or conversions, say what other documents might not
        yield [f"{name}, {length} tokens", sample, over.written(), resampling.written(), tests, said or ""]


def pairs_table() -> str:
    """The pairs that the README names: differences with intervals over seeds, and over seeds and documents."""
    pairs, longer, converted = map(read_part, ("pairs", "pairs_longer", "pairs_converted"))
    rows = [
        *pair_rows("`absolute+t5` less `absolute`", pairs["absolute+t5"], pairs["absolute"]),
        *pair_rows("converted `deberta` less `absolute` in 440 steps", converted["deberta"], longer["absolute"]),
    ]
    heads = ["difference of F1", "seeds", "interval", "seeds and documents resampled", "90 %, within ±0.03"]
    return as_markdown([*heads, "so"], rows)


def controls_table() -> str:
    """`absolute` in as many steps as conversion and fine-tuning have, in each way, and how far converted `deberta` is ahead."""
    converted = read_part("converted")["deberta"]
    ways = {
        "windows of 64, 240 steps": read_part("punctuation")["absolute"],
        "windows of 64, 440 steps": read_part("longer")["absolute"],
        "the same, positions moved by up to 192": read_part("offsets")["absolute"],
        "windows of 256, 440 steps": read_part("windows")["absolute"],
    }
    rows = []
    for way, runs in ways.items():
        own = [written(values(runs, length, "f1")) for length in ("64", "256")]
        ahead = [less(converted, runs, length, "f1").written() for length in ("64", "256")]
        rows.append([way, *own, *ahead])
    return as_markdown(["`absolute`", "F1 at 64", "at 256", "converted `deberta` less it, at 64", "at 256"], rows)


def searched_rates() -> dict[float, float]:
    """F1 on the text that is held out from training of `absolute`, by its learning rate in short runs, which chose it."""
    [seed] = comparison.SEEDS[:1]
    runs = {
        rate: run_file(comparison.folder_of("searched") / "rates", f"absolute-learning_rate={rate}", seed)
        for rate in comparison.PARTS["searched"]["learning_rates"]
    }
    return {rate: json.loads(file.read_text(encoding="utf-8"))["metrics"]["64"]["f1"] for rate, file in runs.items()}


def learned_weights(runs: list[dict[str, Any]]) -> str:
    """What the weights of positions before deeper layers are after training, from the smallest to the largest of all runs."""
    found = [scale for run in runs for name, scale in run["scales"].items() if name.startswith("encoder.")]
    return f"{min(found):.2f} to {max(found):.2f}".replace("-", "−") if found else ""


def every_layer_table(runs: Runs) -> str:
    """A row for positions once and with each weight before every layer: loss, how far it is from once, and what is learned."""
    rows = []
    for scheme, label in _with_flags(comparison.EVERY_LAYER):
        weight = flags_of(label).get("position_every_layer_weight")
        how = "once" if weight is None else f"weight {weight:g} at first"
        rows.append([f"{scheme}, {how}", *_losses_and_less(runs, label, scheme), learned_weights(runs[label])])
    return as_markdown(["before four layers", *_loss_heads(runs), "less once", "weights learned"], rows)


def _with_flags(labels: list[str]) -> Iterator[tuple[str, str]]:
    """Each scheme, and the labels that it has flags in, after the scheme by itself."""
    for scheme in ("absolute", "sinusoidal"):
        for label in (scheme, *(label for label in labels if label.startswith(f"{scheme}:"))):
            yield scheme, label


def _losses_and_less(runs: Runs, label: str, base: str) -> list[str]:
    """Losses at all lengths, and how much more than the base's the first is."""
    losses = [written(values(runs[label], length, "masked_loss")) for length in runs[label][0]["metrics"]]
    return [*losses, "" if label == base else less(runs[label], runs[base], "32", "masked_loss").written()]


def _loss_heads(runs: Runs) -> list[str]:
    lengths = next(iter(runs.values()))[0]["metrics"]
    return [f"{'loss ' * (number == 0)}at {int(length):,}" for number, length in enumerate(lengths)]


def beside_table(runs: Runs) -> str:
    """A row for each way of putting words and positions side by side: loss, parameters, and what it costs in a model of bert-base's size."""
    measured = [*results_of("model_combine"), *results_of("model_combine_training")]
    costs = {(entry["model"], entry["mode"]): entry for entry in measured}
    rows = []
    for scheme, label in _with_flags(comparison.BESIDE):
        width = flags_of(label).get("position_width")
        how = f"side by side, {width} of 128" if width else "added" if label == scheme else "concatenated, projected"
        sized = label.replace(f"width={width}", f"width={6 * width}") if width else label
        cost = [f"{costs[sized, mode][key]:.2f}" for mode, key in COSTS]
        parameters = f"{runs[label][0]['parameters']:,}"
        rows.append([f"{scheme}, {how}", *_losses_and_less(runs, label, scheme), parameters, *cost])
    heads = ["words and positions", *_loss_heads(runs), "less added", "parameters"]
    return as_markdown([*heads, "time forward", "time training", "memory forward", "memory training"], rows)


# Of a model that combines positions in another way, multiples of stock BERT's.
COSTS = [(mode, key) for key in ("ratio", "memory_ratio") for mode in ("forward", "training")]


def terms_table(scratch: Runs, added: Runs) -> str:
    """A row for each choice of terms, less the default: loss from scratch, and, where that was run, F1 with them added to a checkpoint's
    positions."""
    default = "deberta"
    heads = ["terms", "loss at 32", "at 1,024", "less c2p, p2c"]
    parts = [(scratch, "", ("32", "1024"), "masked_loss")]
    if added:
        heads += ["added: F1 at 64", "at 256", "less c2p, p2c"]
        parts.append((added, "absolute+", ("64", "256"), "f1"))
    rows = []
    for label in (*comparison.deberta_terms(), "t5", "tupe"):
        row = [terms_in_words(label)]
        for runs, beside, lengths, metric in parts:
            own, base = runs[beside + label], runs[beside + default]
            apart = "" if label == default else less(own, base, lengths[0], metric).written()
            row += [*(written(values(own, length, metric)) for length in lengths), apart]
        rows.append(row)
    return as_markdown(heads, rows)


def terms_in_words(label: str) -> str:
    """Terms of `deberta` and whose projections they take: c2p, p2c, its own."""
    flags = flags_of(label)
    if flags["position_scheme"] != "deberta":
        return label
    terms = ", ".join(flags.get("position_attention_types", ["c2p", "p2c"]))
    return f"{terms}, {'shared' if flags.get('position_share_projections', True) else 'own'} projections"


def curve_table(runs: Runs, schemes: list[str], steps: tuple[int, ...]) -> str:
    """Training loss over the steps, mean of the seeds."""
    rows = []
    for scheme in schemes:
        curves = [dict(run["learning_curve"]) for run in runs[scheme]]
        rows.append([named(scheme), *(f"{statistics.fmean(curve[step] for curve in curves):.3f}" for step in steps)])
    return as_markdown(["training loss at step", *map(str, steps)], rows)


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
        "nothing kept": "hf_posenc, nothing cached",
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


def serving_speeds() -> dict[str, float]:
    """Of each kind of requests, how many times as fast as stock unpadded batches of 32 are, by medians."""
    rows = cells((report.RESULTS / "serving.md").read_text(encoding="utf-8").strip())
    return {row[0]: float(row[4]) for row in rows}


def onnx_table() -> str:
    """Times as fast as the usual export in ONNX Runtime, a row per shape."""
    return (report.RESULTS / "onnx_runtime.md").read_text(encoding="utf-8").split("\n\n", 1)[1].strip()


def _tokens(shape: str) -> tuple[int, int]:
    batch, length = map(int, shape.split("x"))
    return batch > 1, batch * length


def fast_attention(family: str = "DeBERTa-v3") -> dict[str, dict[str, float]]:
    """Of a family, forward: times as fast as eager, by shape, then by contestant."""
    entries = results_of("stock_attention")
    chosen = (entry for entry in entries if (entry["family"], entry["mode"]) == (family, "forward"))
    return {entry["shape"]: entry["speed"] for entry in chosen}


def padding(name: str = "padding") -> dict[tuple[str, str], dict[str, Any]]:
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
    for name, more in (("padding", ""), ("padding_12_layers", ", 12 layers")):
        for (batches, mode), entry in padding(name).items():
            found = [entry.get(column) for column in columns]
            cells = ["" if value is None else f"{value:.2f}" for value in found]
            rows.append([f"{batches}, {mode}{more}", percent(entry["padding"]), *cells])
    return as_markdown(["times as fast as BERT", "padding", *columns[:-1], "memory of absolute"], rows)


def lower_precision_tables() -> Iterator[str]:
    """Speed and scores of lower_precision.py."""
    results = json.loads((report.RESULTS / "lower_precision.json").read_text(encoding="utf-8"))
    yield lower_precision.speed_table(results["speed"])
    yield lower_precision.quality_table(results["quality"])


def lower_precision_in_short() -> str:
    """What the README says of lower_precision.py's results."""
    results = json.loads((report.RESULTS / "lower_precision.json").read_text(encoding="utf-8"))
    padded, ours, theirs = (
        next(iter(lower_precision.WORKLOADS)),
        (lower_precision.UNPADDED, "bfloat16"),
        ("OpenVINO", "int8"),
    )
    fast = {(r["model"], r["precision"]): r["speed"] for r in results["speed"] if r["workload"] == padded}
    changed = {(r["model"], r["precision"]): r["changed"] for r in results["quality"] if r["task"] == "SST-2"}
    return (
        f"SST-2 in batches of 32 in random order: {fast[ours]:.2f} times as fast as stock BERT in float32, {changed[ours]} of 872 answers "
        f"changed; OpenVINO's int8, which computes no position schemes, {fast[theirs]:.2f} times, {changed[theirs]} changed "
    )


def lower_precision_figures() -> list[str]:
    """What docs/lower-precision.md says of lower_precision.py's results."""
    results = json.loads((report.RESULTS / "lower_precision.json").read_text(encoding="utf-8"))
    fast = {(r["workload"], r["model"], r["precision"]): f"{r['speed']:.2f}" for r in results["speed"]}
    sst2 = [entry for entry in results["quality"] if entry["task"] == "SST-2"]
    changed = {(r["model"], r["precision"]): r["changed"] for r in sst2}
    right = {(r["model"], r["precision"]): round(r["score"] * r["sentences"]) for r in sst2}
    padded, single, full = lower_precision.WORKLOADS
    unpadded, ao, best = lower_precision.UNPADDED, "int8 by torch.ao", "int8, compiled"
    gained = right[STOCK, ao] - right[STOCK, "float32"]
    return [
        f"OpenVINO's int8 reads 8 × 512 tokens {fast[full, 'OpenVINO', 'int8']} times as fast as stock BERT in float32, torchao's with "
        f"`torch.compile` {fast[full, STOCK, best]} times, bfloat16 {fast[full, STOCK, 'bfloat16']} times",
        f"`hf_posenc.unpad` with bfloat16 is {fast[padded, unpadded, 'bfloat16']} times as fast and OpenVINO's int8 "
        f"{fast[padded, 'OpenVINO', 'int8']} times; `hf_posenc.unpad` with PyTorch's own int8 {fast[padded, unpadded, ao]} times, but",
        f"Of single sentences, torchao's int8 with `torch.compile` is {fast[single, STOCK, best]} times as fast, ONNX Runtime's int8 "
        f"{fast[single, 'ONNX Runtime', 'int8']} times, OpenVINO's {fast[single, 'OpenVINO', 'int8']} times, and bfloat16 without compiling "
        f"{fast[single, STOCK, 'bfloat16']} times",
        f"of BERT's {changed[STOCK, ao]} with `torch.ao`, {(changed[STOCK, ao] + gained) // 2} became right and "
        f"{(changed[STOCK, ao] - gained) // 2} wrong",
        f"it changed {changed[unpadded, ao]} of 872 answers, where bfloat16 changed {changed[unpadded, 'bfloat16']} and torchao's int8 "
        f"{changed[unpadded, 'int8']}",
    ]


def as_fast(name: str, model: str, mode: str) -> str:
    """How many times as fast as stock BERT a model is."""
    [entry] = [entry for entry in results_of(name) if entry["model"] == model and entry["mode"] == mode]
    return f"{1 / entry['ratio']:.2f}"


def cola_table() -> str:
    page = (report.RESULTS / "cola" / "results.md").read_text(encoding="utf-8")
    return re.search(r"^\|.*(\n\|.*)*", page, flags=re.MULTILINE)[0]


def tables() -> dict[str, list[str]]:
    """All tables as Markdown, by the page that has them."""
    punctuation, converted, scratch = map(read_part, ("punctuation", "converted", "scratch"))
    return {
        "docs/comparison.md": [
            quality_table(punctuation, converted),
            curve_table(punctuation, ["none", comparison.LEARNED, "kerple", "tupe", "t5"], CURVE_STEPS),
            scratch_table(scratch),
            curve_table(scratch, ["none", comparison.LEARNED, "sinusoidal", "absolute", "tupe"], SCRATCH_STEPS),
            terms_table(read_part("terms"), read_part("terms_added")),
            combined_table(scratch, punctuation),
            beside_table(read_part("beside")),
            every_layer_table(read_part("every_layer")),
            controls_table(),
            pairs_table(),
            cola_table(),
        ],
        "docs/speed.md": [
            ratio_table("time", SHORT),
            ratio_table("in a run of their own", NEWER),
            ratio_table("1 × 4,096", LONG),
            ratio_table("no padding", UNPADDED),
        ],
        "docs/fast-attention.md": [fast_attention_table()],
        "docs/onnx.md": [onnx_table()],
        long_tables.PAGE: [long_tables.page_table()],
        "docs/lower-precision.md": [*lower_precision_tables()],
        "docs/padding.md": [padding_table(), (report.RESULTS / "serving.md").read_text(encoding="utf-8").strip()],
    }


def figures() -> dict[str, list[str]]:
    """Pieces of sentences with all that was measured in them, by the page that has them."""
    punctuation, converted, longer, scratch = map(read_part, ("punctuation", "converted", "longer", "scratch"))
    pairs, longer_pairs, converted_pairs = map(read_part, ("pairs", "pairs_longer", "pairs_converted"))
    side, deep, added_terms, windows = map(read_part, ("beside", "every_layer", "terms_added", "windows"))
    cola = {row[0]: row[2] for row in cells(cola_table())}
    speed, fast, mpnet = padding(), fast_attention(), fast_attention("MPNet")
    moved = json.loads((ROOT / "docs" / "what-positions-do.json").read_text(encoding="utf-8"))["models"]["MiniLM"]

    def f1(scheme: str, length: int = 64, runs: Runs = punctuation) -> str:
        return written(values(runs[scheme], str(length), "f1"))

    def ten(scheme: str, length: int = 64, runs: Runs = pairs) -> str:
        return report.mean_and_deviation(values(runs[scheme], str(length), "f1"))

    def ahead(scheme: str) -> str:
        own, baseline = (by_seed(punctuation[name], "256", "f1") for name in (scheme, "absolute"))
        differences = [ours - theirs for ours, theirs in zip(own, baseline)]
        return f"{min(differences):.3f} to {max(differences):.3f}"

    def loss(scheme: str, length: int) -> str:
        return written(values(scratch[scheme], str(length), "masked_loss"))

    def apart(own: Runs, scheme: str, base: Runs, other: str, length: str, metric: str) -> str:
        return less(own[scheme], base[other], length, metric).written()

    def more_f1(scheme: str, length: int = 64, own: Runs = punctuation, base: Runs = punctuation) -> str:
        return apart(own, scheme, base, "absolute", str(length), "f1")

    def more_loss(scheme: str, other: str = "absolute") -> str:
        return apart(scratch, scheme, scratch, other, "32", "masked_loss")

    def chosen_on(part: str, length: str, metric: str) -> list[str]:
        # By amplitude, in the order of the part.
        runs = read_part(part)
        own = [
            [run for run in runs[label] if run["seed"] in comparison.CHOOSING]
            for label in comparison.PARTS[part]["schemes"]
        ]
        return [" and ".join(f"{value:.3f}" for value in by_seed(some, length, metric)) for some in own]

    def behind(scheme: str, length: str) -> str:
        differences = [
            theirs - own
            for own, theirs in zip(*(by_seed(punctuation[name], length, "f1") for name in (scheme, "absolute")))
        ]
        return f"{min(differences):.3f} to {max(differences):.3f}"

    def more_before_layers(scheme: str, weight: str) -> str:
        flags = f"position_every_layer=true,position_every_layer_weight={weight}"
        return apart(deep, f"{scheme}:{flags}", deep, scheme, "32", "masked_loss")

    def added(label: str) -> str:
        return apart(added_terms, f"absolute+{label}", punctuation, "absolute", "256", "f1")

    def beside(scheme: str, width: int) -> str:
        return apart(side, f"{scheme}:{concat},position_width={width}", side, scheme, "32", "masked_loss")

    def cross_fitted(method: str, task: str) -> float:
        return vectors[method]["tasks"][task]["ndcg"]

    float32 = {
        scheme: [run for run in runs if run["seed"] not in comparison.CHOOSING]
        for scheme, runs in read_part("float32").items()
    }

    def of_seed(scheme: str, seed: int) -> str:
        [run] = [run for run in float32[scheme] if run["seed"] == seed]
        return f"{run['metrics']['32']['masked_loss']:.3f}"

    def times(batches: str, mode: str, model: str = "absolute", order: str = "random") -> str:
        return f"{speed[f'{batches}, 32, {order}', mode][model]:.1f}"

    cosine, kept = (converted_to_t5(figure) for figure in ("token_cosine", "neighbours_kept"))
    vectors = long_tables.vectors()["methods"]
    local_time = vectors[long_tables.LOCAL]["milliseconds"]
    texts = ("CoLA", "SST-2", "WikiText-2")
    forward, training = ([times(batches, mode) for batches in texts] for mode in ("forward", "training"))
    shares = [speed[f"{batches}, 32, random", "forward"]["padding"] for batches in texts]
    in_order = [times(batches, "forward", order="sorted") for batches in texts]
    shares_in_order = [speed[f"{batches}, 32, sorted", "forward"]["padding"] for batches in texts]
    mean_row, directions = smoothness_of_the_table()
    one_text = [mpnet[f"1x{length}"]["hf_posenc"] for length in (16, 64, 128, 256, 512)]
    searched = [f"{value:.3f} at `{rate:g}`" for rate, value in searched_rates().items()]
    constant, better = float32["sinusoidal"], float32[comparison.with_amplitude(comparison.BETTER)]
    default, quarter, half, one, other_base = chosen_on("amplitudes", "32", "masked_loss")
    default_tuned, tenth_tuned, quarter_tuned, one_tuned = chosen_on("amplitudes_tuned", "64", "f1")
    [learned] = [run for run in float32[comparison.LEARNED] if run["seed"] == 42]
    fallen = learned["scales"]["embeddings.position_scale"]
    terms, asked = read_part("terms"), 'deberta:position_attention_types=["{}"]'
    own_projections, p2p = "position_share_projections=false", 'c2p","p2c","p2p'
    far, near = (long_tables.f1_of_tags(band) for band in (long_tables.BEYOND, long_tables.NEAR))
    requests = serving_speeds()
    plain, disentangled = (
        [speed for name, speed in requests.items() if name.startswith("deberta") == is_deberta]
        for is_deberta in (False, True)
    )
    exported = [
        entry["speed"]["hf-posenc export"] for entry in results_of("onnx_runtime") if "deberta" in entry["model"]
    ]
    precisions = {name: read_part(name) for name in ("float32", "bfloat16")}
    losses = {name: of_five(runs["sinusoidal"]) for name, runs in precisions.items()}
    leaves = {name: leaving_steps(runs) for name, runs in precisions.items()}
    concat = "position_combine=concat"
    low, high = (pick(entry["eager, a second copy"] for entry in fast.values()) for pick in (min, max))
    return {
        long_tables.PAGE: long_tables.figures(),
        "docs/lower-precision.md": lower_precision_figures(),
        "README.md": [
            f"a cosine of {cosine} with the original's, and texts {kept} of their five nearest neighbours",
            f"one embedding finds the document of 2,048 tokens with a given pass key for {100 * cross_fitted('t5', 'passkey'):.0f} of 100 "
            f"queries (synthetic, and not trained on), the mean of its chunks' embeddings for {100 * cross_fitted(CHUNKS, 'passkey'):.0f};",
            f"nDCG of {cross_fitted('t5', 'articles'):.3f} and {cross_fitted(CHUNKS, 'articles'):.3f}, and the best of "
            f"{vectors[BEST]['vectors']:.0f} chunks is ahead, with {cross_fitted(BEST, 'articles'):.3f} (",
            f"it finds {100 * cross_fitted(long_tables.LOCAL, 'passkey'):.0f}, in {local_time / vectors[BEST]['milliseconds']:.2f} times "
            f"the time of those chunks ({local_time / vectors['best chunk of 64']['milliseconds']:.2f} times that of as "
            f"long ones that do not overlap), and its nDCG is {cross_fitted(long_tables.LOCAL, 'articles'):.3f}.",
            f"MiniLM converted to `t5` has an F1 of {far['t5']}, windows {far['windows']}, and the whole document with a longer table and no "
            f"conversion {far['longer table']} (near what decides the tag, converted {near['t5']}, windows {near['windows']}).",
            f"MiniLM has an F1 of {ten('absolute+t5', 256)} with `absolute+t5` and of {ten('absolute', 256)} with its own positions "
            f"alone; of {ten('deberta', 256, converted_pairs)} converted to `deberta` first, and of "
            f"{ten('absolute', 256, longer_pairs)} with its own positions in as many steps as that takes",
            f"reads 512 tokens {fast['1x512']['hf_posenc']:.1f} times as fast as in transformers, and 16 tokens "
            f"{fast['1x16']['hf_posenc']:.1f} times",
            f"{min(one_text):.1f} to {max(one_text):.1f} times as fast with one text of 16 to 512 tokens, and {mpnet['8x512']['hf_posenc']:.1f} times with 8 of 512",
            "Moving a whole text by a single position moves MiniLM's vector of it by "
            + percent(moved["phase-shift"]["by_1"]),
            f"| the checkpoint's own positions, with `absolute+t5` or without | punctuation: F1 {ten('absolute')}, with `absolute+t5` "
            f"{ten('absolute+t5')}, with no positions {f1('none')}; CoLA (Matthews): {cola['absolute']}, with `absolute+t5` {cola['absolute+t5']}. In more steps, "
            f"punctuation: {ten('absolute', 64, longer_pairs)}; converted to `deberta` first, as many in all: "
            f"{ten('deberta', 64, converted_pairs)} |",
            f"| `hf-posenc convert` to `deberta` first, then a position learning rate of `{chosen_rate(converted['deberta'])}` | F1 at "
            f"four times the length: {ten('deberta', 256, converted_pairs)}; with its own positions in as many steps "
            f"{ten('absolute', 256, longer_pairs)}, and on windows as long as those {f1('absolute', 256, windows)}; not "
            f"converted, in fewer steps, {ten('absolute', 256)}, and with `absolute+t5`, position learning rate "
            f"`{chosen_rate(punctuation['absolute+t5'])}`, {ten('absolute+t5', 256)} |",
            f"documents of 2,048 tokens found by their pass key (synthetic): {100 * cross_fitted('t5', 'passkey'):.0f} of 100, by the mean "
            f"of chunks {100 * cross_fitted(CHUNKS, 'passkey'):.0f}, by the best of {vectors[BEST]['vectors']:.0f} chunks "
            f"{100 * cross_fitted(BEST, 'passkey'):.0f}; articles: level with the mean of chunks, behind the best |",
            f"two layers of width 128, 800 steps: masked-LM loss {loss('transformer_xl', 32)} at the length of training, {loss('transformer_xl', 1024)} at 32 times that; "
            f"`absolute`, with a table for that, {loss('absolute', 32)} and {loss('absolute', 1024)}, `rope` {loss('rope', 32)} and "
            f"{loss('rope', 1024)}",
            f"forward {as_fast('model_forward', 't5', 'forward')} times, training "
            f"{as_fast('model_training', 't5', 'training')} times as fast as stock BERT (`sdpa`)",
            f"forward {as_fast('model_forward', 'rope', 'forward')} times as fast as stock BERT (`sdpa`)",
            lower_precision_in_short(),
            f"forward {min(forward)} to {max(forward)} times as fast as stock BERT, in batches in random order, of which "
            f"{percent(min(shares))} to {percent(max(shares))} is padding; {min(in_order)} to {max(in_order)} times in batches sorted "
            f"by length, of which {percent(min(shares_in_order))} to {percent(max(shares_in_order))} is; a reranker's requests with 100 "
            f"candidates, sorted, {requests['MiniLM-L6, rerank, 100']:.2f} times, of DeBERTa-v3-xsmall's size (`sdpa`) "
            f"{requests['deberta-v3-xsmall, 6 layers, rerank, 100']:.2f} times",
        ],
        "docs/comparison.md": [
            f"ahead of `absolute` with each of the three seeds, by {ahead('absolute+t5')}, and `absolute+relative_key` by "
            f"{ahead('absolute+relative_key')};",
            f"bring `absolute` to {f1('absolute', 64, longer)} at 64 tokens and {f1('absolute', 256, longer)} at 256, and `deberta`, not "
            f"converted, to {f1('deberta', 64, longer)} and {f1('deberta', 256, longer)}",
            f"the loss at 32 tokens is {report.mean_and_deviation(values(scratch['sinusoidal'], '32', 'masked_loss'))} (five seeds)",
            f"{report.mean_and_deviation(values(float32['sinusoidal'], '32', 'masked_loss'))} and "
            f"{report.mean_and_deviation(values(float32['absolute'], '32', 'masked_loss'))} in float32, "
            f"{less(float32['sinusoidal'], float32['absolute'], '32', 'masked_loss').written()} apart in ten seeds",
            f"with seed 45 it is not, and the loss is {of_seed(comparison.LEARNED, 45)}",
            f"by {more_f1('absolute+t5')} with `absolute+t5`, {more_f1('absolute+relative_key')} with `absolute+relative_key` and "
            f"{more_f1('absolute+deberta')} with `absolute+deberta`",
            "Intervals are of 95 %",
            "the interval of 90 % and the larger p are given",
            f"c2p by {added(asked.format('c2p') + ',' + own_projections)}, p2c by {added(asked.format('p2c') + ',' + own_projections)}, both by "
            f"{added('deberta:' + own_projections)} and with p2p by "
            f"{added(asked.format(p2p) + ',' + own_projections)}",
            "(an amplitude of 0.113)",  # initializer_range · √2
            f"with seed 42, from 0.113 to {fallen:.3f}, and the loss is {of_seed(comparison.LEARNED, 42)}, where the constant one reaches "
            f"{of_seed('sinusoidal', 42)}",
            f"concatenated, loss {more_loss(f'sinusoidal:{concat}', 'sinusoidal')}, and by a gate "
            f"{more_loss('sinusoidal:position_combine=gate', 'sinusoidal')} less the sum",
            f"c2p alone is below both together by {apart(terms, 'deberta', terms, asked.format('c2p'), '32', 'masked_loss')}",
            f"p2c alone is behind it by {apart(terms, asked.format('p2c'), terms, asked.format('c2p'), '32', 'masked_loss')}",
            f"Projections of their own help a little, "
            f"{apart(terms, 'deberta', terms, 'deberta:position_share_projections=false', '32', 'masked_loss')}",
            f"`sinusoidal` differs by a loss of {more_loss('sinusoidal:position_every_layer=true', 'sinusoidal')} from scratch",
            f"sinusoids reach {report.mean_and_deviation(losses['float32'])} in float32 and {report.mean_and_deviation(losses['bfloat16'])} in "
            f"bfloat16 autocast, in which the table was trained, a difference of {paired(*losses.values()).written()}, and their training loss "
            f"leaves that of `none`, by more than 0.1 for good, at step {leaves['float32']} and at step {leaves['bfloat16']}",
            f"behind the sum with every seed, by {behind('absolute:position_combine=concat', '256')} "
            f"({more_f1('absolute:position_combine=concat', 256).replace(' (', ', ')}",
            "learns at a rate of 0.003",
            f"At a weight of 1 neither differs by more than seeds do: `absolute` by {more_before_layers('absolute', '1')}, `sinusoidal` by "
            f"{more_before_layers('sinusoidal', '1')}",
            f"{beside('absolute', 64)} for the table and {beside('sinusoidal', 64)} for sinusoids",
            f"behind it, by {beside('absolute', 32)} and {beside('sinusoidal', 32)}",
            f"At 12.5, from which they hardly move, the table learns far less, by {more_before_layers('absolute', '12.5')}",
            f"F1 on held-out text is {', '.join(searched[:-1])} and {searched[-1]}",
            f"with them `absolute` reaches {f1('absolute', 256, windows)} there",
            f"leaves zero out: {more_f1('absolute+t5', 256)}",
            f"`deberta` is ahead of it by {more_f1('deberta', 256, converted)}, `transformer_xl` by "
            f"{more_f1('transformer_xl', 256, converted)} and `relative` by {more_f1('relative', 256, converted)}; `tupe` is behind",
            f"at 256 tokens, `deberta` is ahead by {more_f1('deberta', 256, converted, longer)} and `relative_key` by "
            f"{more_f1('relative_key', 256, converted, longer)}",
            f"below `none` by {apart(scratch, 'none', scratch, 'sinusoidal', '32', 'masked_loss')}, and above `absolute` by "
            f"{more_loss('sinusoidal')}",
            f"{default} at 0.113, {quarter} at 0.25, {half} at 0.5 and {one} at 1",
            f"at 0.2 with a base of 100 {other_base}",
            f"{comparison.BETTER} reaches {report.mean_and_deviation(values(better, '32', 'masked_loss'))} at 32 tokens, below the default by "
            f"{less(constant, better, '32', 'masked_loss').written()} and above the table by "
            f"{less(better, float32['absolute'], '32', 'masked_loss').written()}; at 1,024 tokens it is above the default by "
            f"{less(better, constant, '1024', 'masked_loss').written()}",
            f"an F1 of {default_tuned} at the default, an amplitude of 0.028, {tenth_tuned} at 0.1, and {quarter_tuned} at 0.25 and "
            f"{one_tuned} at 1",
            f"concatenated, loss {more_loss('absolute:position_combine=concat')} and F1 {more_f1('absolute:position_combine=concat')}; "
            f"by a gate, {more_loss('absolute:position_combine=gate')} and {more_f1('absolute:position_combine=gate')}",
            f"above by {more_loss('absolute:position_combine=attention')}; fine-tuned, F1 differs by "
            f"{more_f1('absolute:position_combine=attention')}",
            f"`absolute` differs by a loss of {more_loss('absolute:position_every_layer=true')} from scratch, in two layers, and by an F1 "
            f"of {more_f1('absolute:position_every_layer=true')}",
            f"the mean row makes up {percent(mean_row)} of the squared norm of its layer-normalized rows, and 7 directions hold "
            f"{percent(directions)} of the rest",
        ],
        "docs/onnx.md": [f"ahead in every shape, by {min(exported):.2f} to {max(exported):.2f} times"],
        "docs/fast-attention.md": [f"(a second eager model came out at {low:.2f} to {high:.2f})"],
        "docs/padding.md": [
            f"BERT's and XLM-R's sizes are {min(plain):.2f} to {max(plain):.2f} times as fast as stock in batches of 32, of DeBERTa's "
            f"{min(disentangled):.2f} to {max(disentangled):.2f} times",
            f"where padding is at least {percent(SMALLEST_SHARE)} of a batch and {FEWEST_PLACES} places",
            f"({percent(shares[0])} in CoLA, {percent(shares[1])} in SST-2, {percent(shares[2])} in WikiText lines",
            f"forward {forward[0]} times as fast as stock BERT on CoLA, {forward[1]} on SST-2, {forward[2]} on WikiText lines",
            f"in training with dropout {training[0]}, {training[1]} and {training[2]}",
        ],
    }


def of_five(runs: list[dict[str, Any]]) -> list[float]:
    """Losses at the training length with the five seeds that both precisions have."""
    found = {run["seed"]: run["metrics"]["32"]["masked_loss"] for run in runs}
    return [found[seed] for seed in comparison.FIVE]


def leaving_steps(runs: Runs) -> str:
    """The steps at which the training loss of sinusoids leaves that of `none`, from the first to the last of five seeds."""
    curves = {(run["scheme"], run["seed"]): run["learning_curve"] for own in runs.values() for run in own}
    steps = [step_that_leaves(curves["sinusoidal", seed], curves["none", seed]) for seed in comparison.FIVE]
    return f"{min(steps)} to {max(steps)}"


def cells(table: str) -> list[list[str]]:
    """The rows of a table but for its header."""
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def smoothness_of_the_table() -> tuple[float, float]:
    """Of the first 64 rows of MiniLM's table as `tupe` reads them: shares of their mean, and of 7 directions of the rest."""
    table = load_file(Path(packaged_minilm()) / "model.safetensors")["embeddings.position_embeddings.weight"][:64]
    rows = functional.layer_norm(table, table.shape[1:])
    mean = rows.mean(0)
    directions = torch.linalg.svdvals(rows - mean).square()
    return float(64 * mean.square().sum() / rows.square().sum()), float(directions[:7].sum() / directions.sum())


def converted_to_t5(figure: str) -> str:
    """What MiniLM keeps with `t5`, distilled."""
    [record] = [record for record in conversion.read_records() if record["name"] == "t5"]
    return f"{record['rows'][-1][figure]:.3f}"


def conversions() -> str:
    """The tables of conversions with their sentences, between the marks."""
    return f"{BEGIN}\n\n{conversion.page(conversion.read_records())}\n\n{END}"


def replace_conversions(text: str) -> str:
    """The text with what stands between the marks as it is now.

    Raises:
        ValueError: the marks are not there, or there are several.
    """
    return report.replace_marked(text, BEGIN, END, conversions())


def replace_table(text: str, table: str) -> str:
    """The text with a table in place of the one whose first two columns have the same names.

    Raises:
        ValueError: there is none, or there are several.
    """
    start = " | ".join(table.split(" | ")[:2])
    text, count = re.subn(rf"^{re.escape(start)}.*(\n\|.*)*", lambda _: table, text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"expected one table that starts with {start!r}, found {count}")
    return text


def one_line(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())
