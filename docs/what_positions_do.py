"""Measure what what-positions-do.md and questions.md say: convert MiniLM twice, report on all three, take numbers and pictures out of the report,
and measure of MiniLM what the report has not (answers.py).

    python docs/what_positions_do.py [--data FOLDER]

What is in outputs/positions already is not made again, so that the same command goes on where it was interrupted; delete
that folder to begin anew. The numbers go to what-positions-do.json, arrays to what-positions-do.npz, the table to the first page, the second
is written whole, and what the first says otherwise is listed where it does not follow from the numbers any more.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import questions
from pictures import FOLDER, pictures, small


ROOT = Path(__file__).parents[1]
PAGE, NUMBERS = ROOT / "docs" / "what-positions-do.md", ROOT / "docs" / "what-positions-do.json"
ARRAYS, QUESTIONS = NUMBERS.with_suffix(".npz"), ROOT / "docs" / "questions.md"
OUTPUTS = Path("outputs", "positions")
ROLES, MUTUAL = "who does it", "met, married, resembled"
NAMED, NAMED_MUTUAL = "who does it, name and article", "met, resembled, name and article"
ORIGINAL, CONVERSIONS = "MiniLM", ("t5", "rope")
STEPS = 300
SHARES = (0.5, 0.8, 0.9, 0.95)
CORNER = "at a glance"
# By model, the figures that the page shows.
SHOWN = {
    "minilm": ("dimensions", "spaces", "terms", "probes", "order", "phase-shift"),
    "t5": ("distance", "probes"),
}

Numbers = dict[str, Any]


def commands(checkpoint: str) -> list[list[str]]:
    """The command lines that make the conversions and the report, as the page gives them."""
    convert = [
        ["hf-posenc", "convert", checkpoint, "--out", f"{OUTPUTS}/{scheme}"]
        + ["--position-scheme", scheme, "--max-steps", str(STEPS), "--resume"]
        for scheme in CONVERSIONS
    ]
    models = [f"{ORIGINAL}={checkpoint}", *(f"{scheme}={OUTPUTS}/{scheme}" for scheme in CONVERSIONS)]
    return [*convert, ["hf-posenc", "report", *models, "--out", f"{OUTPUTS}/report.html"]]


def make(checkpoint: str, data: Path | None) -> None:
    """Run those commands whose results are not there."""
    for command, made in zip(commands(checkpoint), (*CONVERSIONS, "report.html.json")):
        if not (ROOT / OUTPUTS / made).exists():
            print(shlex.join(command), flush=True)
            subprocess.run(
                [sys.executable, "-m", *command[0].replace("-", "_").split(), *command[1:]], cwd=ROOT, check=True
            )
    made = ROOT / OUTPUTS / "answers.json"
    if not made.exists():
        import answers

        numbers, arrays = answers.measure(checkpoint)
        answers.save(arrays, ROOT / OUTPUTS / "answers.npz")
        made.write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    other = ROOT / OUTPUTS / "other_text.json"
    if data is not None and not other.exists():
        import answers

        sys.path.append(str(ROOT / "benchmarks"))
        other.write_text(json.dumps(answers.on_other_text(checkpoint, data), indent=1), encoding="utf-8")


def numbers_of(figures: dict[str, Any], model: str) -> Numbers:
    """What the page says of a model, from the figures of a report's JSON; heads and layers are counted from 1.

    A figure that does not apply to the model has no numbers.
    """
    found: Numbers = {}
    for name, read in READERS.items():
        data = figures[name]["models"][model]["data"]
        if data is not None:
            found[name] = read(data)
    return found


def _similarity(data: dict) -> Numbers:
    median = data["median"]
    below = [distance for distance, value in enumerate(median) if value < 0.5]
    lowest = min(median)
    return {
        "next": median[1],
        "half_at": below[0] if below else None,
        "lowest": lowest,
        "lowest_at": median.index(lowest),
    }


def _distance(data: dict) -> Numbers:
    [curves] = data["curves"]
    swings = [max(mean) - min(mean) for mean in curves["mean"]]
    return {
        "part": curves["part"],
        "smallest": min(swings),
        "largest": max(swings),
        "largest_head": 1 + swings.index(max(swings)),
    }


def _dimensions(data: dict) -> Numbers:
    found = {}
    for name, table in zip(("sinusoids", "own"), data["tables"]):
        spans = [last - first for first, last in table["spans"]]
        whole = spans.index(max(spans))
        found[name] = {
            "moving_over_64": table["moving"][0],
            "moving_over_all": table["moving"][whole],
            "moving_least": min(table["moving"]),
            "directions": table["directions"][whole],
        }
    return found


def _terms(data: dict) -> Numbers:
    first = data["layers"][0]
    of = {term: [shares[column] for shares in first["shares"]] for column, term in enumerate(first["terms"])}
    share = first["position_share"]
    found: Numbers = {
        "heads": len(share),
        "position_heads": [1 + head for head in data["position_heads"]],
        "largest": max(share),
        "largest_head": 1 + share.index(max(share)),
        "terms": {term: sum(shares) / len(shares) for term, shares in of.items()},
    }
    if any(of["word-position"]):
        cross = [max(pair) for pair in zip(of["word-position"], of["position-word"])]
        order = sorted(range(len(cross)), key=cross.__getitem__)
        found |= {
            "cross_largest": cross[order[-1]],
            "cross_largest_head": 1 + order[-1],
            "cross_next": cross[order[-2]],
            "heads_with_more_cross_than_constant": [
                1 + head for head, own in enumerate(of["constant-word"]) if cross[head] >= own
            ],
        }
    return found


def _probes(data: dict) -> Numbers:
    position, distance = data["r2"]["position"], data["r2"]["distance"]
    return {
        "position": position["model"],
        "position_without": max(position["without positions"]),
        "position_shuffled": max(position["shuffled labels"]),
        "error": data["error"]["position"]["model"],
        "error_of_a_constant": data["chance"]["position"],
        "signed": data["r2"]["signed distance"]["model"],
        "distance": distance["model"],
        "intervals": {
            name: data["interval"][target]["model"]
            for name, target in (("position", "position"), ("signed", "signed distance"), ("distance", "distance"))
        },
        "documents": data["documents"]["test"],
        "examples": data["examples"]["test"],
        "length": data["length"],
    }


def _order(data: dict) -> Numbers:
    shuffled = data["reordered"]["words shuffled"]
    return {
        "shuffled": shuffled["text"],
        "shuffled_interval": shuffled["text_interval"],
        "sentences": {
            kind: {
                "count": own["count"],
                "text": own["change"]["text"],
                "interval": own["change"]["text_interval"],
            }
            for kind, own in data["sentences"].items()
        },
        "neighbours": data["swapped"][0],
        "neighbours_interval": data["swapped_interval"][0],
        "far": data["swapped"][-1],
        "far_interval": data["swapped_interval"][-1],
        "far_apart": data["distances"][-1],
        "tokens": data["length"],
        "texts": data["texts"],
    }


def _phase_shift(data: dict) -> Numbers:
    at = {shift: number for number, shift in enumerate(data["shifts"])}
    found: Numbers = {"texts": data["texts"], "largest": max(change["largest"] for change in data["all"])}
    for name, short in (("all", "by"), ("but_first", "but_first_by")):
        for shift in (1, 256):
            change = data[name][at[shift]]
            found[f"{short}_{shift}"] = change["text"]
            found[f"{short}_{shift}_interval"] = change["text_interval"]
    return found


def _table_properties(data: dict) -> Numbers:
    found = {name.replace(" ", "_"): entry["translation_invariance"] for name, entry in data["by_proximity"].items()}
    return found | {"sinusoids": data["sinusoids"]["translation_invariance"]}


def _attention_properties(data: dict) -> Numbers:
    shares = [head["translation_invariance"] for head in data["heads"]]
    best = shares.index(max(shares))
    mean = data["mean"]
    return {
        "translation_invariance": mean["translation_invariance"],
        "local_monotonicity": mean["local_monotonicity"],
        "symmetry": mean["symmetry"],
        "earlier": 1 - mean["later"],
        "best": shares[best],
        "best_head": 1 + best,
        "best_head_earlier": 1 - data["heads"][best]["later"],
    }


def _position_term(data: dict) -> Numbers:
    shares = sorted(data["toeplitz"])
    half = len(shares) // 2
    return {
        "median": (shares[half] + shares[~half]) / 2,
        "largest": shares[-1],
        "largest_head": 1 + data["toeplitz"].index(shares[-1]),
        "by_chance": data["by_chance"],
    }


READERS = {
    "similarity": _similarity,
    "distance": _distance,
    "dimensions": _dimensions,
    "terms": _terms,
    "probes": _probes,
    "order": _order,
    "phase-shift": _phase_shift,
    "table-properties": _table_properties,
    "attention-properties": _attention_properties,
    "position-term": _position_term,
}


def first_row(checkpoint: str) -> Numbers:
    """How the row of [CLS] in a checkpoint's table differs from the others; cosines are of the rows without their mean."""
    import torch

    from hf_posenc.analysis import study

    vectors = study(checkpoint).position_vectors().double()
    norms = vectors.norm(dim=1)
    centred = torch.nn.functional.normalize(vectors - vectors.mean(0), dim=1)
    cosines = centred[1:] @ centred[0]
    return {
        "norm_over_median": float(norms[0] / norms.median()),
        "norm_over_next": float(norms[0] / norms[1:].max()),
        "largest_cosine": float(cosines.abs().max()),
    }


def measured(checkpoint: str) -> Numbers:
    """All numbers of the page, from the report and the conversions in the folder of outputs."""
    report = json.loads((ROOT / OUTPUTS / "report.html.json").read_text(encoding="utf-8"))
    conversions = {}
    for scheme in CONVERSIONS:
        conversion = json.loads((ROOT / OUTPUTS / scheme / "conversion.json").read_text(encoding="utf-8"))
        distilled = [row for row in conversion["rows"] if row["stage"] == "distill"][-1]
        conversions[scheme] = {name: distilled[name] for name in ("length", "token_cosine", "sentence_cosine")}
    models = {
        model: numbers_of(report["figures"], model) | {"longest": facts["longest"]}
        for model, facts in ((facts["name"], facts) for facts in report["models"])
    }
    return {
        "versions": report["versions"],
        "max_steps": STEPS,
        "conversions": conversions,
        "models": models,
        "first_row": first_row(checkpoint),
        "answers": json.loads((ROOT / OUTPUTS / "answers.json").read_text(encoding="utf-8")),
        "other_text": _other_text(),
    }


def _other_text() -> Numbers:
    """What was measured on WikiText-2, now or when the page was last made with it."""
    made = ROOT / OUTPUTS / "other_text.json"
    if made.exists():
        return json.loads(made.read_text(encoding="utf-8"))
    return json.loads(NUMBERS.read_text(encoding="utf-8"))["other_text"]


def percent(share: float, digits: int = 0) -> str:
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"  # + 0.0: nothing is not less than nothing


def of_sentences(order: Numbers, kind: str) -> str:
    return percent(order["sentences"][kind]["text"], 1)


def between(interval: list[float], digits: int = 0) -> str:
    """An interval of shares, as percentages: (3.5 to 4.6 %)."""
    low, high = (percent(end, digits).replace("-", "−") for end in interval)
    return f"({low.removesuffix(' %')} to {high})"


def table(found: Numbers) -> str:
    """The models side by side, as Markdown."""

    def cells(figure: str, write: Callable[[Numbers], str]) -> list[str]:
        return [write(model[figure]) if figure in model else "–" for model in found["models"].values()]

    agreement = ["–", *(f"{conversion['token_cosine']:.3f}" for conversion in found["conversions"].values())]
    rows = [
        (
            "reads at most",
            [f"{model['longest']} tokens" if model["longest"] else "no limit" for model in found["models"].values()],
        ),
        ("cosine of token vectors with MiniLM's", agreement),
        (
            "heads of layer 1 that positions lead",
            cells("terms", lambda n: f"{len(n['position_heads'])} of {n['heads']}"),
        ),
        ("position, R² before layer 1", cells("probes", lambda n: f"{n['position'][0]:.2f}")),
        ("… after the layer that tells it best", cells("probes", lambda n: f"{max(n['position'][1:]):.2f}")),
        ("… after the last layer", cells("probes", lambda n: f"{n['position'][-1]:.2f}")),
        ("text changes, its words shuffled", cells("order", lambda n: percent(n["shuffled"]))),
        ("… from “Tom bit a dog” to “a dog bit Tom”, 60 such", cells("order", lambda n: of_sentences(n, NAMED))),
        (
            "… from “Tom met a dog” to “a dog met Tom”, 60 such",
            cells("order", lambda n: of_sentences(n, NAMED_MUTUAL)),
        ),
        ("two neighbours that swap places", cells("order", lambda n: percent(n["neighbours"]))),
        (
            f"two words {found['models'][ORIGINAL]['order']['far_apart']} apart that do",
            cells("order", lambda n: percent(n["far"])),
        ),
        ("text changes, moved by 1 position", cells("phase-shift", lambda n: percent(n["by_1"], 1))),
        ("… by 256", cells("phase-shift", lambda n: percent(n["by_256"], 1))),
        ("… by 1, all but [CLS]", cells("phase-shift", lambda n: percent(n["but_first_by_1"], 1))),
        (
            "attention on one word repeated: explained by distance",
            cells("attention-properties", lambda n: percent(n["translation_invariance"])),
        ),
        ("… symmetric", cells("attention-properties", lambda n: percent(n["symmetry"]))),
    ]
    lines = [
        [CORNER, *found["models"]],
        ["---", *["---:"] * len(found["models"])],
        *([name, *row] for name, row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replace_table(page: str, table: str) -> str:
    """The page with a table in the place of the one with the same corner."""
    page, count = re.subn(rf"^\| {CORNER} \|.*(\n\|.*)*", lambda _: table, page, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"expected one table that begins with {CORNER!r}, found {count}")
    return page


def statements(found: Numbers) -> list[str]:
    """Everything with a number in it that the page says outside its table, each as it stands there."""
    own, t5, rope = found["models"].values()
    row = found["first_row"]
    similar, swing, moving = own["similarity"], own["distance"], own["dimensions"]
    answers = found["answers"]
    beyond = answers["order"]["beyond"]
    together, left = answers["dimensions"], answers["survival"]
    terms, probes, order, shift = own["terms"], own["probes"], own["order"], own["phase-shift"]
    roles, mutual, named, named_mutual = (order["sentences"][kind] for kind in (ROLES, MUTUAL, NAMED, NAMED_MUTUAL))
    vectors, attention, positions = own["table-properties"], own["attention-properties"], own["position-term"]
    position, distance = probes["position"], probes["distance"]
    return [
        f"have a cosine of {similar['next']:.2f}",
        f"falls below one half at distance {similar['half_at']}",
        f"those about {similar['lowest_at']} apart (−{abs(similar['lowest']):.2f})",
        f"one head ({swing['largest_head']}) swings by {swing['largest']:.0f} with the distance, others by {swing['smallest']:.1f}",
        f"over 64 positions ({percent(moving['sinusoids']['moving_over_64'])}) and less so the further one looks "
        f"({percent(moving['sinusoids']['moving_over_all'])} over 512)",
        f"{percent(moving['own']['directions'], 1)} of the width ({moving['own']['directions'] * 384:.0f} of 384) hold 95 % of the table's variance",
        f"of sinusoids it takes {percent(moving['sinusoids']['directions'], 1)}",
        f"in a model of 512 dimensions, {percent(together['moving_512_over_128'])} over 128",
        f"words use {together['used']} of the {together['width']} dimensions, and {together['both']} of the {together['moved']} that positions move",
        f"{together['word_directions']} directions hold 95 % of the words' variance",
        f"root mean square of {together['word_rms']:.3f} in words and {together['position_rms']:.3f} in positions",
        *subspaces(answers["subspaces"], found["other_text"]["subspaces"]),
        f"{len(terms['position_heads'])} heads of {terms['heads']} ({listed(terms['position_heads'])})",
        f"head {terms['largest_head']} practically all of it ({terms['largest']:.2f})",
        f"are small ({terms['cross_next']:.2f} and less), with one exception: in head {terms['cross_largest_head']} words ask positions "
        f"({terms['cross_largest']:.2f})",
        f"larger than these in all heads but {listed(terms['heads_with_more_cross_than_constant'])}",
        f"within {probes['error'][0]:.0f} tokens before the first layer (R² {position[0]:.2f}), nearly as well up to layer 4 ({position[4]:.2f})",
        f"loses it in the last two ({position[5]:.2f}, {position[6]:.2f}: off by {probes['error'][6]:.0f} tokens, where a constant is off by "
        f"{probes['error_of_a_constant']:.0f})",
        f"The same weights without positions reach {probes['position_without']:.2f}",
        f"from the difference of their vectors with an R² of {probes['signed'][0]:.3f} before the first layer, {probes['signed'][4]:.2f} after the "
        f"fourth and {probes['signed'][6]:.2f} after the last",
        f"{distance[0]:.2f} before the first layer, {distance[2]:.2f} after the second, {distance[5]:.2f} after the fifth",
        f"{probes['examples']:,} tokens and as many pairs, of {probes['documents']} documents",
        f"the interval is {span(probes['intervals']['position'][0], 3)} before the first layer, {span(probes['intervals']['position'][4])} after layer 4 and "
        f"{span(probes['intervals']['position'][6])} after the last",
        f"{percent(left['nearest'][0])} of the tokens at the input, of {percent(left['nearest'][3], 1)} {between(left['interval'][3], 1)} after layer 3, of "
        f"{percent(left['nearest'][4])} {between(left['interval'][4])} after layer 4, and of {percent(left['nearest'][6])} {between(left['interval'][6])} at the end "
        f"({left['tokens']:,} tokens of {left['documents']} documents)",
        f"Positions are {percent(left['position_share'][5])} of what goes into it by variance",
        f"words have {percent(left['word_share'][0])} of the variance of the states at the input and {percent(left['word_share'][6])} at the end, positions "
        f"{percent(left['position_share'][0])} and {percent(left['position_share'][6])}",
        f"a text of {order['tokens']} tokens moves its vector by {percent(order['shuffled'])} of what unrelated texts differ by {between(order['shuffled_interval'])}",
        f"“Tom bit a dog” is {percent(named['text'], 1)} {between(named['interval'], 1)} from “a dog bit Tom”",
        f"“Tom met a dog”, {percent(named_mutual['text'], 1)} {between(named_mutual['interval'], 1)}",
        f"“the pilot thanked the nurse” it is {percent(roles['text'], 1)} {between(roles['interval'], 1)}, and with “met”, {percent(mutual['text'], 1)} "
        f"{between(mutual['interval'], 1)}",
        f"by {percent(beyond['named']['text'], 1)} {between(beyond['named']['interval'], 1)} and {percent(beyond['roles']['text'], 2)} "
        f"{between(beyond['roles']['interval'], 2)}",
        f"change by {percent(order['neighbours'])} {between(order['neighbours_interval'])}, words {order['far_apart']} apart by {percent(order['far'])} "
        f"{between(order['far_interval'])}",
        f"changes its vector by {percent(shift['by_1'], 1)}** {between(shift['by_1_interval'], 1)}, {shift['by_1'] / shift['but_first_by_1']:.0f} times as much as moving all of it but "
        f"[CLS] ({percent(shift['but_first_by_1'], 1)})",
        f"its norm is {row['norm_over_median']:.1f} times the median and {row['norm_over_next']:.1f} times the next largest, and its cosine with "
        f"any other (the mean row taken off) at most {row['largest_cosine']:.2f}",
        f"by {percent(shift['by_256'])} at 256 positions",
        f"of the table's, distance alone explains {percent(vectors['inner_product'])} (of its cosines {percent(vectors['cosine'])})",
        f"distance explains {percent(attention['translation_invariance'])} of the variance of the first layer's mean attention",
        f"It is not symmetric ({percent(attention['symmetry'])}): {percent(attention['earlier'])} of what goes to other places goes to earlier ones",
        f"head {attention['best_head']} (distance explains {percent(attention['best'])}) gives {percent(attention['best_head_earlier'])} of it to "
        "earlier ones",
        f"distance explains {percent(positions['median'])} in the median head and {percent(positions['largest'])} in head "
        f"{positions['largest_head']} (by chance {percent(positions['by_chance'], 1)})",
        f"whose bias swings most, by {t5['distance']['largest']:.1f}, and the others' by {t5['distance']['smallest']:.1f} or more",
        f"swings by {rope['distance']['largest']:.1f} at most, in head {rope['distance']['largest_head']} again",
        f"it leads the heads {listed(t5['terms']['position_heads'])}",
        f"and have {rope['terms']['largest']:.2f} of the variance at most (in head {rope['terms']['largest_head']})",
        f"nothing tells where a token is ({t5['probes']['position'][0]:.2f})",
        f"{t5['probes']['position'][1]:.2f} after the first layer, {t5['probes']['position'][3]:.2f} after the third, and "
        f"{t5['probes']['position'][-1]:.2f} after the last, where the original has {position[-1]:.2f}",
        f"`rope` gets to {max(rope['probes']['position']):.2f} and is left with {rope['probes']['position'][-1]:.2f}",
        f"by more than {max(t5['phase-shift']['largest'], rope['phase-shift']['largest']):.0e}",
        f"as much as to the original ({percent(t5['order']['shuffled'])}, shuffled)",
        f"({percent(rope['order']['shuffled'])}, and {percent(rope['order']['sentences'][NAMED]['text'], 1)} between Tom and the dog)",
        f"by construction ({percent(t5['position-term']['median'])}), and {percent(t5['attention-properties']['translation_invariance'], 1)} of the "
        "mean attention",
        f"Its head {t5['attention-properties']['best_head']} gives {percent(t5['attention-properties']['best_head_earlier'])} to earlier places",
        f"`rope` gives {percent(rope['attention-properties']['earlier'])} to either side",
    ]


def subspaces(found: Numbers, other_text: list[Numbers]) -> list[str]:
    """What section 3 says."""
    rows = {(row["space"], row["layer"], row["share"]): row for row in found["tables"]}
    deep, other = (
        {(row["space"], row["layer"], row["share"]): row for row in part} for part in (found["layers"], other_text)
    )
    measures = ("positions_in_words", "words_in_positions")
    heads = [rows[name, 1, share] for name in ("queries", "keys") for share in SHARES]
    count = sum(row[measures[0]]["heads"] for row in heads)
    below, above = ([sum(row[name][side] for row in heads) for name in measures] for side in ("below", "above"))
    own = [rows["embeddings", 1, share]["positions_in_words"] for share in SHARES]
    angle = rows["embeddings", 1, 0.9]["angle"]
    sixth, sixth_elsewhere = (rows["states", 6, 0.5]["positions_in_words"] for rows in (deep, other))
    elsewhere = [
        sum(other[name, 6, 0.5]["positions_in_words"][side] for name in ("queries", "keys"))
        for side in ("below", "above")
    ]

    def queries_and_keys(layer: int, side: str) -> list[int]:
        return [sum(deep[name, layer, share][measures[0]][side] for name in ("queries", "keys")) for share in SHARES]

    most = found["largest_heads"]
    fewest = [min(queries_and_keys(layer, "below")[index] for layer in range(1, 6)) for index in range(len(SHARES))]
    return [
        f"of the positions' variance {listed([percent(one['median'], 1) for one in own])} lie where 50, 80, 90 and 95 % of the words' does; of positions rotated at "
        f"random it would be {listed([percent(one['chance']) for one in own])}",
        f"(95 % of the rotations: {', '.join(between([one['low'], one['high']])[1:-1] for one in own)})",
        f"At 90 % the smallest angle between the two is {angle['median']:.0f}° (rotated: {angle['chance']:.0f}°)",
        f"of {count} comparisons (queries and keys, {heads[0]['positions_in_words']['heads']} heads, {len(SHARES)} shares) {below[0]} are below what 95 % of "
        f"{found['rotations']:,} rotations give, and {'none' if not above[0] else above[0]} above",
        f"of the words' variance in the positions' subspace, {below[1]} and {'none' if not above[1] else above[1]}",
        f"where head {most['queries']['head']} alone has {percent(most['queries']['share'])} of the positions' variance in queries and "
        f"{percent(most['keys']['share'])} in keys",
        f"at least {listed(fewest)} of 24 heads (of queries and of keys) at 50, 80, 90 and 95 % in each of them, and none is above",
        f"On WikiText-2 it is {percent(sixth_elsewhere['median'], 1)}, by chance {percent(sixth_elsewhere['chance'], 1)}, with {elsewhere[0]} heads below "
        f"and {elsewhere[1]} above",
        f"at half of the variance the states that go into it have {percent(sixth['median'], 1)} of the positions' variance in the words' subspace, by "
        f"chance {percent(sixth['chance'], 1)}, and of its heads {queries_and_keys(6, 'below')[0]} are below and {queries_and_keys(6, 'above')[0]} above",
    ]


def span(interval: list[float], digits: int = 2) -> str:
    return f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"


def listed(numbers: list) -> str:
    """Numbers as they stand in a sentence: 3, 4 and 5."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def missing(page: str, found: Numbers) -> list[str]:
    """Statements that the page does not make, wherever its lines break."""
    flat = " ".join(page.split())
    return [statement for statement in statements(found) if statement not in flat]


def unfounded(page: str, found: Numbers) -> list[str]:
    """Percentages, angles and numbers with a decimal point in the page, outside its table and code, that no statement has."""
    without_code = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    flat = " ".join(re.sub(r"^\|.*$|arXiv:\d+\.\d+", "", without_code, flags=re.MULTILINE).split())
    for statement in sorted(statements(found), key=len, reverse=True):
        flat = flat.replace(statement, "")
    return re.findall(r".{0,30}(?<!\w)\d+(?:\.\d+| %|°).{0,10}", flat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with wikitext2, to measure on that what depends on the text")
    data = parser.parse_args().data
    sys.path.insert(0, str(ROOT / "examples"))
    from minilm import packaged_minilm

    checkpoint = packaged_minilm()
    make(checkpoint, data)
    found = _rounded(measured(checkpoint))
    NUMBERS.write_text(_written(found), encoding="utf-8")
    ARRAYS.write_bytes((ROOT / OUTPUTS / "answers.npz").read_bytes())
    QUESTIONS.write_text(questions.page(found), encoding="utf-8")
    FOLDER.mkdir(exist_ok=True)
    for name, picture in pictures((ROOT / OUTPUTS / "report.html").read_text(encoding="utf-8")).items():
        figure, _, model = name.removesuffix(".png").rpartition("-")
        if figure in SHOWN.get(model, ()):
            (FOLDER / name).write_bytes(small(picture))
    page = replace_table(PAGE.read_text(encoding="utf-8"), table(found))
    PAGE.write_text(page, encoding="utf-8")
    for statement in missing(page, found):
        print(f"the page does not say: {statement}")
    for number in unfounded(page, found):
        print(f"no number stands behind: {number}")


def _written(found: Numbers) -> str:
    """As JSON, with what holds only numbers and words in one line."""
    text = json.dumps(found, indent=1)
    for brackets in (r"\[[^\[\]{}]*\]", r"\{[^{}]*\}"):
        text = re.sub(brackets, lambda inner: re.sub(r"\s*\n\s*", " ", inner[0]), text)
    return text + "\n"


def _rounded(value: Any, digits: int = 5) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry, digits) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry, digits) for entry in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
