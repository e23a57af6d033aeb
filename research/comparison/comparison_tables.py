"""The tables of docs/comparison.md, from runs.jsonl and cola.json."""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cola
import comparison
import numpy as np
from comparison import Runs, read_part

from hf_posenc._utils import as_markdown


sys.path += [str(Path(__file__).parents[2] / name) for name in ("benchmarks", "research")]

from intervals import Interval, crossed, equivalence, of_mean, paired, resampled, sign, verdict  # noqa: E402
from report import mean_and_deviation, read, replace_table  # noqa: E402
from scheme_labels import flags_of  # noqa: E402


PAGE = "docs/comparison.md"
CURVE_STEPS = (20, 40, 80, 120, 160, 200, 240)
SCRATCH_STEPS = (100, 200, 300, 400, 500, 600, 700, 800)


def values(runs: list[dict[str, Any]], length: str, metric: str) -> list[float]:
    return [run["metrics"][length][metric] for run in runs]


def less(own: list[dict[str, Any]], other: list[dict[str, Any]], length: str, metric: str) -> Interval:
    """A metric of some runs less that of others, by the seeds that both have: runs of one seed have the same data in the same order."""
    mine, theirs = (
        {run["seed"]: value for run in runs for value in values([run], length, metric)} for runs in (own, other)
    )
    common = sorted(mine.keys() & theirs.keys())
    return paired([mine[seed] for seed in common], [theirs[seed] for seed in common])


def written(numbers: list[float]) -> str:
    """Mean and sample standard deviation over the seeds, with their number where it is not three."""
    if not numbers:
        return ""
    return mean_and_deviation(numbers) + f" ({len(numbers)})" * (len(numbers) != 3)


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

    Of several conversions the difference is taken to the runs of the same seeds, and the first interval counts conversions and seeds. One is said
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
            over, sample = crossed(np.array(groups)), f"{len(conversions)} x {len(seeds)}"
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
    measured = [*read("model/combine")["results"], *read("model/combine_training")["results"]]
    costs = {(entry["model"], entry["mode"]): entry for entry in measured}
    rows = []
    for scheme, label in _with_flags(comparison.BESIDE):
        width = flags_of(label).get("position_width")
        how = f"side by side, {width} of 128" if width else "added" if label == scheme else "concatenated, projected"
        sized = label.replace(f"width={width}", f"width={6 * width}") if width else label
        cost = [f"{costs[sized, mode][key]:.2f}" for mode, key in COSTS]
        parameters = f"{runs[label][0]['parameters']:,}"
        rows.append([f"{scheme}, {how}", *_losses_and_less(runs, label, scheme), parameters, *cost])
    heads = ["token embeddings and positions", *_loss_heads(runs), "less added", "parameters"]
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
    """Terms of `deberta`, and whether it shares projections: c2p, p2c, separate projections."""
    flags = flags_of(label)
    if flags["position_scheme"] != "deberta":
        return label
    terms = ", ".join(flags.get("position_attention_types", ["c2p", "p2c"]))
    return f"{terms}, {'shared' if flags.get('position_share_projections', True) else 'separate'} projections"


def curve_table(runs: Runs, schemes: list[str], steps: tuple[int, ...]) -> str:
    """Training loss over the steps, mean of the seeds."""
    rows = []
    for scheme in schemes:
        curves = [dict(run["learning_curve"]) for run in runs[scheme]]
        rows.append([named(scheme), *(f"{statistics.fmean(curve[step] for curve in curves):.3f}" for step in steps)])
    return as_markdown(["training loss at step", *map(str, steps)], rows)


def cola_table() -> str:
    found = json.loads(cola.RESULTS.read_text(encoding="utf-8"))
    return cola.markdown_table([cola.Run(**run) for run in found["runs"]]).strip()


def tables() -> list[str]:
    """All tables as Markdown."""
    punctuation, converted, scratch = map(read_part, ("punctuation", "converted", "scratch"))
    return [
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
    ]


def generated() -> Iterator[tuple[str, Callable[[str], str]]]:
    """File, and what makes its text as it should be of what it is."""
    for table in tables():
        yield PAGE, partial(replace_table, table=table)
