"""The tables of docs/comparison.md and of the README here, from runs.jsonl and cola.json."""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cola
import comparison
import numpy as np
from comparison import Runs, read_part

from hf_posenc._utils import as_markdown


sys.path += [str(Path(__file__).parents[2] / name) for name in ("benchmarks", "research")]

from intervals import Interval, crossed, equivalence, of_mean, paired, resampled, sign, verdict  # noqa: E402
from report import mean_and_deviation, read, with_tables_of  # noqa: E402
from scheme_labels import flags_of  # noqa: E402


PAGE, DETAILS = "docs/comparison.md", "research/comparison/README.md"
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


def by_itself(label: str) -> bool:
    """Whether tables of schemes have it; the others are ways to combine positions with token embeddings."""
    return by_default(label) or label in (comparison.CONCATENATED, *comparison.ROTARY)


def by_default(label: str) -> bool:
    return ":" not in label or label == comparison.LEARNED


def punctuation_table(corner: str, runs: Runs, punctuation: Runs) -> str:
    """A row per scheme: F1 at each length, and how far above that of `absolute` that was fine-tuned only, seed by seed."""
    rows = [
        [
            named(scheme),
            *(written(values(own, length, "f1")) for length in ("64", "256")),
            *above_absolute(own, punctuation),
        ]
        for scheme, own in best_first(runs)
        if by_itself(scheme)
    ]
    columns = ["F1 at 64 tokens", "F1 at 256 tokens", "minus `absolute`, at 64", "minus `absolute`, at 256"]
    return as_markdown([corner, *columns], rows)


def rates_table(punctuation: Runs, converted: Runs, scratch: Runs) -> str:
    """A row per scheme: the position learning rates that were chosen, and how far ahead of `none` it is at the training length."""
    rows = []
    for scheme, runs in best_first(punctuation):
        if not by_itself(scheme):
            continue
        rates = [chosen_rate(part[scheme]) if scheme in part else "" for part in (punctuation, converted, scratch)]
        above = less(runs, punctuation["none"], "64", "f1").written()
        below = between = ""
        if scheme in scratch and by_default(scheme):
            below = less(scratch["none"], scratch[scheme], "32", "masked_loss").written()
            between = written(values(scratch[scheme], "128", "masked_loss"))
        ahead = ["", ""] if scheme == "none" else [above, below]
        rows.append([named(scheme), *rates, *ahead, between])
    columns = ["rate, fine-tuned", "rate, converted first", "rate, from scratch", "F1 minus that of `none`"]
    return as_markdown(["scheme", *columns, "loss below that of `none`", "loss at 128 tokens"], rows)


def best_first(runs: Runs) -> list[tuple[str, list[dict[str, Any]]]]:
    """Schemes and their runs, by the mean F1 at the training length."""
    return sorted(runs.items(), key=lambda entry: -statistics.fmean(values(entry[1], "64", "f1")))


def above_absolute(runs: list[dict[str, Any]], punctuation: Runs) -> list[str]:
    """How far F1 is above that of the checkpoint's positions at each length; nothing of these themselves."""
    if runs is punctuation["absolute"]:
        return ["", ""]
    return [less(runs, punctuation["absolute"], length, "f1").written() for length in ("64", "256")]


def scratch_table(scratch: Runs) -> str:
    """A row per scheme by itself: the loss at the shortest and the longest length, and how far below that of `absolute` it is at the first."""
    rows = []
    for scheme, runs in scratch.items():
        if not by_default(scheme):
            continue
        losses = [values(runs, length, "masked_loss") for length in ("32", "1024")]
        below = "" if scheme == "absolute" else less(scratch["absolute"], runs, "32", "masked_loss").written()
        rows.append((statistics.fmean(losses[0]), [named(scheme), *map(written, losses), below]))
    heads = ["scheme", "loss at 32 tokens", "loss at 1,024 tokens", "below `absolute`, at 32"]
    return as_markdown(heads, [row for _, row in sorted(rows, key=lambda row: row[0])])


def random_table(runs: Runs, scratch: Runs) -> str:
    """A row per scheme that was trained with random positions: losses at the shortest and the longest length, and less those without them."""
    rows = []
    for scheme, own in runs.items():
        cells = []
        for length in ("32", "1024"):
            cells += [written(values(own, length, "masked_loss"))]
            cells += [less(own, scratch[scheme], length, "masked_loss").written()]
        rows.append((statistics.fmean(values(own, "1024", "masked_loss")), [named(scheme), *cells]))
    heads = ["random positions", "loss at 32 tokens", "minus usual", "loss at 1,024", "minus usual"]
    return as_markdown(heads, [row for _, row in sorted(rows, key=lambda row: row[0])])


def combined_table(quality: str, runs: Runs, length: str, metric: str) -> str:
    """How positions are combined with the token embeddings: quality at the training length, and less that of the sum."""
    rows = []
    for flag, how in comparison.COMBINED.items():
        cells = []
        for scheme in ("absolute", "sinusoidal"):
            own, added = runs[scheme + flag], runs[scheme]
            cells += [written(values(own, length, metric)), less(own, added, length, metric).written() if flag else ""]
        rows.append([how, *cells])
    heads = [f"`absolute`: {quality}", "minus added once", f"`sinusoidal`: {quality}", "minus added once"]
    return as_markdown(["positions are", *heads], rows)


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
            tests, said = ["", ""], sign(over)
        else:
            over, sample = of_mean(groups[0]), str(len(seeds))
            nothing = [0.0] * len(seeds)
            tested, said = equivalence(groups[0], nothing), verdict(groups[0], nothing)
            tests = [tested.interval.written(), f"{tested.p:.3f}"]
        if said in ("higher", "lower") and sign(resampling) != said:
            said = None  # seeds, or conversions, say what other documents might not
        yield [f"{name}, {length} tokens", sample, over.written(), resampling.written(), said or "", *tests]


def pairs_tables() -> tuple[str, str]:
    """The pairs that the README names: differences with intervals over seeds, and over seeds and documents; and tests within a margin."""
    pairs, longer, converted = map(read_part, ("pairs", "pairs_longer", "pairs_converted"))
    rows = [
        *pair_rows("`absolute+t5` minus `absolute`", pairs["absolute+t5"], pairs["absolute"]),
        *pair_rows("converted `deberta` minus `absolute` in 440 steps", converted["deberta"], longer["absolute"]),
    ]
    heads = ["difference of F1", "seeds", "t interval", "bootstrap interval", "conclusion"]
    differences = as_markdown(heads, [row[:5] for row in rows])
    tests = [[row[0], *row[5:]] for row in rows if row[5]]
    return differences, as_markdown(["difference of F1", "90 % interval", "p for ±0.03"], tests)


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
        apart = [less(converted, runs, length, "f1").written() for length in ("64", "256")]
        rows.append([way, *own, *apart])
    ahead = [f"converted `deberta` minus it, at {length}" for length in (64, 256)]
    return as_markdown(["`absolute`", "F1 at 64 tokens", "F1 at 256 tokens", *ahead], rows)


def learned_weights(runs: list[dict[str, Any]]) -> str:
    """What the weights of positions before deeper layers are after training, from the smallest to the largest of all runs."""
    found = [scale for run in runs for name, scale in run["scales"].items() if name.startswith("encoder.")]
    return f"{min(found):.2f} to {max(found):.2f}".replace("-", "−") if found else ""


def every_layer_tables(runs: Runs) -> tuple[str, str]:
    """A row for positions once and with each weight before every layer: the loss at the training length, and how far it is from once; the loss
    at other lengths, and what is learned."""
    first, *others = _loss_heads(runs)
    losses, details = [], []
    for scheme, label in _with_flags(comparison.EVERY_LAYER):
        weight = flags_of(label).get("position_every_layer_weight")
        how = f"{scheme}, " + ("once" if weight is None else f"initial weight {weight:g}")
        [trained, *longer], apart = _losses_and_less(runs, label, scheme)
        losses.append([how, trained, apart])
        details.append([how, *longer, learned_weights(runs[label])])
    return (
        as_markdown(["before four layers", first, "minus once"], losses),
        as_markdown(["before four layers", *others, "weights after training"], details),
    )


def _with_flags(labels: list[str]) -> Iterator[tuple[str, str]]:
    """Each scheme, and the labels that it has flags in, after the scheme by itself."""
    for scheme in ("absolute", "sinusoidal"):
        for label in (scheme, *(label for label in labels if label.startswith(f"{scheme}:"))):
            yield scheme, label


def _losses_and_less(runs: Runs, label: str, base: str) -> tuple[list[str], str]:
    """Losses at all lengths, and how much more than the base's the first is."""
    losses = [written(values(runs[label], length, "masked_loss")) for length in runs[label][0]["metrics"]]
    return losses, "" if label == base else less(runs[label], runs[base], "32", "masked_loss").written()


def _loss_heads(runs: Runs) -> list[str]:
    return [f"loss at {int(length):,} tokens" for length in next(iter(runs.values()))[0]["metrics"]]


def beside_table(runs: Runs) -> str:
    """A row for each way of putting token embeddings and positions side by side: losses, parameters, and costs in a model of bert-base's size."""
    measured = [*read("model/combine")["results"], *read("model/combine_training")["results"]]
    costs = {(entry["model"], entry["mode"]): entry for entry in measured}
    rows = []
    for scheme, label in _with_flags(comparison.BESIDE):
        width = flags_of(label).get("position_width")
        how = f"side by side, {width} of 128" if width else "added" if label == scheme else "concatenated, projected"
        sized = label.replace(f"width={width}", f"width={6 * width}") if width else label
        cost = [f"{costs[sized, mode][key]:.2f}" for mode, key in COSTS]
        losses, apart = _losses_and_less(runs, label, scheme)
        rows.append([f"{scheme}, {how}", *losses, apart, f"{runs[label][0]['parameters']:,}", *cost])
    heads = ["token embeddings and positions", *_loss_heads(runs), "minus added, at 32", "parameters"]
    return as_markdown([*heads, "time forward", "time training", "memory forward", "memory training"], rows)


# Of a model that combines positions in another way, multiples of the original BERT's.
COSTS = [(mode, key) for key in ("ratio", "memory_ratio") for mode in ("forward", "training")]


def amplitude_table(runs: Runs) -> str:
    """Sinusoids of two constant amplitudes and `absolute`, in float32 and ten seeds: losses, and less those of the default."""
    labels = {
        "absolute": "absolute",
        comparison.with_amplitude(comparison.BETTER): "sinusoidal, amplitude 0.25",
        "sinusoidal": "sinusoidal, amplitude 0.113 (default)",
    }
    own = {label: [run for run in runs[label] if run["seed"] in comparison.TEN] for label in labels}
    rows = []
    for label, name in labels.items():
        cells = []
        for length in ("32", "1024"):
            mean = mean_and_deviation(values(own[label], length, "masked_loss"))
            apart = less(own[label], own["sinusoidal"], length, "masked_loss").written()
            cells += [mean, "" if label == "sinusoidal" else apart]
        rows.append([name, *cells])
    return as_markdown(["positions", "loss at 32 tokens", "minus default", "loss at 1,024", "minus default"], rows)


def terms_tables(scratch: Runs, added: Runs) -> tuple[str, str]:
    """A row for each choice of terms: the loss from scratch, and less that of the default; the loss of longer texts, and F1 with the terms added to a
    checkpoint's positions."""
    losses, details = [], []
    for label in (*comparison.deberta_terms(), "t5", "tupe"):
        terms, runs, beside = terms_in_words(label), scratch[label], added[f"absolute+{label}"]
        apart = [
            less(runs, scratch["deberta"], "32", "masked_loss").written(),
            less(beside, added["absolute+deberta"], "64", "f1").written(),
        ]
        if label == "deberta":
            apart = ["", ""]
        losses.append([terms, written(values(runs, "32", "masked_loss")), apart[0]])
        scores = (written(values(beside, length, "f1")) for length in ("64", "256"))
        details.append([terms, written(values(runs, "1024", "masked_loss")), *scores, apart[1]])
    heads = ["loss at 1,024 tokens", "added: F1 at 64", "added: F1 at 256", "minus default, at 64"]
    return (
        as_markdown(["terms", "loss at 32 tokens", "minus default"], losses),
        as_markdown(["terms", *heads], details),
    )


def terms_in_words(label: str) -> str:
    """Terms of `deberta`, and whether it shares projections: c2p, p2c, separate projections."""
    flags = flags_of(label)
    if flags["position_scheme"] != "deberta":
        return label
    terms = ", ".join(flags.get("position_attention_types", ["c2p", "p2c"]))
    return f"{terms}, {'shared' if flags.get('position_share_projections', True) else 'separate'} projections"


def curve_table(corner: str, runs: Runs, schemes: list[str], steps: tuple[int, ...]) -> str:
    """Training loss over the steps, mean of the seeds."""
    rows = []
    for scheme in schemes:
        curves = [dict(run["learning_curve"]) for run in runs[scheme]]
        rows.append([named(scheme), *(f"{statistics.fmean(curve[step] for curve in curves):.3f}" for step in steps)])
    return as_markdown([corner, *map(str, steps)], rows)


def cola_table() -> str:
    found = json.loads(cola.RESULTS.read_text(encoding="utf-8"))
    return cola.markdown_table([cola.Run(**run) for run in found["runs"]]).strip()


def tables() -> dict[str, list[str]]:
    """All tables as Markdown, by the page that has them."""
    punctuation, converted, scratch = map(read_part, ("punctuation", "converted", "scratch"))
    punctuation |= read_part("learned_rotary")
    pairs, every_layer = pairs_tables(), every_layer_tables(read_part("every_layer"))
    terms = terms_tables(read_part("terms"), read_part("terms_added"))
    return {
        PAGE: [
            punctuation_table("scheme", punctuation, punctuation),
            punctuation_table("converted to", converted, punctuation),
            controls_table(),
            scratch_table(scratch),
            random_table(read_part("random_positions"), scratch),
            amplitude_table(read_part("float32")),
            combined_table("loss", scratch, "32", "masked_loss"),
            *(main for main, _ in (pairs, every_layer, terms)),
        ],
        DETAILS: [
            rates_table(punctuation, converted, scratch),
            curve_table(
                "fine-tuned, step", punctuation, ["none", comparison.LEARNED, "kerple", "tupe", "t5"], CURVE_STEPS
            ),
            curve_table(
                "from scratch, step",
                scratch,
                ["none", comparison.LEARNED, "sinusoidal", "absolute", "tupe"],
                SCRATCH_STEPS,
            ),
            combined_table("F1", punctuation, "64", "f1"),
            *(details for _, details in (pairs, every_layer, terms)),
            beside_table(read_part("beside")),
            cola_table(),
        ],
    }


def generated() -> Iterator[tuple[str, Callable[[str], str]]]:
    """File, and what makes its text as it should be of what it is."""
    return with_tables_of(tables())
