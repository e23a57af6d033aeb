"""Measure what docs/what-positions-do.md and docs/questions.md say: convert MiniLM twice, report on all three, take numbers and pictures out of
the report, and measure what the report has not: of MiniLM (answers.py, pretrained.py), of all-mpnet-base-v2 (pretrained.py), and of small models
(small_models.py).

    python research/what_positions_do/what_positions_do.py [--data FOLDER] [--mpnet FOLDER] [--only PART ...]

What is in outputs/positions already is not made again, so that the same command goes on where it was interrupted; delete
that folder to begin anew. The numbers go to numbers.json, arrays to arrays.npz, the table and the pictures to the first page.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_posenc.files import write_whole


ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / name) for name in ("examples", "benchmarks", "research", "research/long_documents")]

from pictures import FOLDER, pictures, small  # noqa: E402
from report import replace_table  # noqa: E402


PAGE = ROOT / "docs" / "what-positions-do.md"
NUMBERS, ARRAYS = (Path(__file__).with_name(name) for name in ("numbers.json", "arrays.npz"))
OUTPUTS = Path("outputs", "positions")
NAMED, NAMED_MUTUAL = "who does it, name and article", "met, resembled, name and article"
ORIGINAL, CONVERSIONS = "MiniLM", ("t5", "rope")
STEPS = 300
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


@dataclass(frozen=True)
class Part:
    """What is measured without a report, and kept in a file of its own: the same key of numbers.json.

    Attributes:
        measure: what is made of the checkpoint and of the folders of the command line.
        needs: names of these folders; without them, figures stay as they are.
    """

    measure: Callable[[str, dict[str, Path | None]], Numbers]
    needs: tuple[str, ...] = ()


def _answers(checkpoint: str, folders: dict[str, Path | None]) -> Numbers:
    import answers

    numbers, arrays = answers.measure(checkpoint)
    answers.save(arrays, ROOT / OUTPUTS / "answers.npz")
    return numbers


def _other_text(checkpoint: str, folders: dict[str, Path | None]) -> Numbers:
    import answers

    return answers.on_other_text(checkpoint, folders["data"])


def _pretrained(checkpoint: str, folders: dict[str, Path | None]) -> Numbers:
    import pretrained

    conversion = str(ROOT / OUTPUTS / "t5")
    return {
        name: pretrained.measure(own, name, pretrained.LARGE)
        for name, own in ((ORIGINAL, checkpoint), ("t5", conversion))
    }


def _mpnet(checkpoint: str, folders: dict[str, Path | None]) -> Numbers:
    import pretrained

    return pretrained.measure(str(folders["mpnet"]), "mpnet", pretrained.SMALL)


def _small_models(checkpoint: str, folders: dict[str, Path | None]) -> Numbers:
    import small_models

    small_models.make(folders["data"], [*small_models.PARTS])
    return small_models.summary()


PARTS = {
    "answers": Part(_answers),
    "pretrained": Part(_pretrained),
    "other_text": Part(_other_text, ("data",)),
    "small_models": Part(_small_models, ("data",)),
    "mpnet": Part(_mpnet, ("mpnet",)),
}


def measure_parts(checkpoint: str, folders: dict[str, Path | None], names: list[str]) -> None:
    """Measure those parts whose results are not there."""
    for name in names:
        part, made = PARTS[name], ROOT / OUTPUTS / f"{name}.json"
        if not made.exists() and all(folders[need] is not None for need in part.needs):
            write_whole({made: json.dumps(part.measure(checkpoint, folders), indent=1)})


def kept_parts() -> Numbers:
    """What was measured of each part, now or when the page was last made with it."""
    before = json.loads(NUMBERS.read_text(encoding="utf-8"))
    files = {name: ROOT / OUTPUTS / f"{name}.json" for name in PARTS}
    now = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}
    return {name: now.get(name, before.get(name)) for name in PARTS}


def make(checkpoint: str) -> None:
    """Run those commands whose results are not there."""
    for command, made in zip(commands(checkpoint), (*CONVERSIONS, "report.html.json")):
        if not (ROOT / OUTPUTS / made).exists():
            print(shlex.join(command), flush=True)
            subprocess.run(
                [sys.executable, "-m", *command[0].replace("-", "_").split(), *command[1:]], cwd=ROOT, check=True
            )


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
        **kept_parts(),
    }


def percent(share: float, digits: int = 0) -> str:
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"  # + 0.0: nothing is not less than nothing


def of_sentences(order: Numbers, kind: str) -> str:
    return percent(order["sentences"][kind]["text"], 1)


def table(found: Numbers) -> str:
    """The models side by side, as Markdown."""

    def cells(figure: str, write: Callable[[Numbers], str]) -> list[str]:
        return [write(model[figure]) if figure in model else "–" for model in found["models"].values()]

    agreement = ["–", *(f"{conversion['token_cosine']:.3f}" for conversion in found["conversions"].values())]
    rows = [
        (
            "maximum sequence length",
            [f"{model['longest']} tokens" if model["longest"] else "no limit" for model in found["models"].values()],
        ),
        ("cosine of token vectors with MiniLM's", agreement),
        (
            "attention heads of layer 1 in which positions explain most of the score",
            cells("terms", lambda n: f"{len(n['position_heads'])} of {n['heads']}"),
        ),
        ("R² of a probe of the position: before layer 1", cells("probes", lambda n: f"{n['position'][0]:.2f}")),
        ("… after the best layer", cells("probes", lambda n: f"{max(n['position'][1:]):.2f}")),
        ("… after the last layer", cells("probes", lambda n: f"{n['position'][-1]:.2f}")),
        ("change of a text whose words are shuffled", cells("order", lambda n: percent(n["shuffled"]))),
        ("… from “Tom bit a dog” to “a dog bit Tom”, 60 pairs", cells("order", lambda n: of_sentences(n, NAMED))),
        (
            "… from “Tom met a dog” to “a dog met Tom”, 60 pairs",
            cells("order", lambda n: of_sentences(n, NAMED_MUTUAL)),
        ),
        ("change of two neighboring words that are swapped", cells("order", lambda n: percent(n["neighbours"]))),
        (
            f"… of two words {found['models'][ORIGINAL]['order']['far_apart']} apart",
            cells("order", lambda n: percent(n["far"])),
        ),
        ("change of a text that is moved by 1 position", cells("phase-shift", lambda n: percent(n["by_1"], 1))),
        ("… by 256 positions", cells("phase-shift", lambda n: percent(n["by_256"], 1))),
        ("… by 1 position, but [CLS] stays", cells("phase-shift", lambda n: percent(n["but_first_by_1"], 1))),
        (
            "attention in a text of one repeated word: explained by distance",
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


def generated() -> Iterator[tuple[str, Callable[[str], str]]]:
    """File, and what makes its text as it should be of what it is."""
    found = json.loads(NUMBERS.read_text(encoding="utf-8"))
    yield str(PAGE.relative_to(ROOT)), partial(replace_table, table=table(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, help="folder with wikitext2: another text, and what small models are trained on"
    )
    parser.add_argument("--mpnet", type=Path, help="folder with all-mpnet-base-v2, to measure that, too")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, help="measure these parts, and leave all other numbers as they are"
    )
    options = parser.parse_args()
    from minilm import packaged_minilm

    checkpoint = packaged_minilm()
    folders = {"data": options.data, "mpnet": options.mpnet}
    if options.only:
        measure_parts(checkpoint, folders, options.only)
        before = json.loads(NUMBERS.read_text(encoding="utf-8"))
        write_whole({NUMBERS: _written(_rounded(before | kept_parts()))})
        return
    make(checkpoint)
    measure_parts(checkpoint, folders, [*PARTS])
    found = _rounded(measured(checkpoint))
    write_whole({NUMBERS: _written(found), ARRAYS: (ROOT / OUTPUTS / "answers.npz").read_bytes()})
    FOLDER.mkdir(exist_ok=True)
    for name, picture in pictures((ROOT / OUTPUTS / "report.html").read_text(encoding="utf-8")).items():
        figure, _, model = name.removesuffix(".png").rpartition("-")
        if figure in SHOWN.get(model, ()):
            write_whole({FOLDER / name: small(picture)})
    page = replace_table(PAGE.read_text(encoding="utf-8"), table(found))
    write_whole({PAGE: page})


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
