"""Model cards of variants that comparison.py trained: config.json, results.json and README.md in model_cards/<name>/.

    python benchmarks/comparison.py --data DATA --only punctuation converted
    python benchmarks/model_cards.py

Beside each variant stands the checkpoint with its own positions, fine-tuned alike with the same seeds.
"""

import argparse
import contextlib
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import comparison
import report

from hf_posenc.hub.cards import write_card


ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from minilm import packaged_minilm  # noqa: E402
from quickstart import load_config  # noqa: E402
from records import write_json  # noqa: E402


BASE_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
CHECKPOINT = "absolute"
# The parts of comparison.py -> of which of its variants there are cards.
CARDS = {
    "punctuation": ("absolute+t5", "absolute+relative_key", "absolute+deberta", "t5", "relative_key", "deberta"),
    "converted": ("deberta",),
}
# The settings that a reader of a card needs.
TRAINING = (
    "max_steps",
    "per_device_train_batch_size",
    "learning_rate",
    "position_learning_rate",
    "warmup_steps",
    "length",
)


def card_name(scheme: str, is_converted: bool) -> str:
    """The name of a variant's repository: `absolute+relative_key` is `minilm-absolute-relative-key`."""
    return "minilm-" + re.sub(r"[\W_]+", "-", scheme) + "-converted" * is_converted


def variant_config(scheme: str) -> dict[str, Any]:
    """What is in config.json of the trained variant, and where it came from."""
    config = load_config(packaged_minilm(), position_scheme=scheme)
    config.architectures = [config.auto_classes["AutoModelForTokenClassification"]]
    return {"_name_or_path": BASE_MODEL, **json.loads(config.to_json_string())}


def measurements(runs: list[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """What the runs of one scheme reached: an entry per length, a figure per seed."""
    rows = []
    for length, metrics in runs[0]["metrics"].items():
        figures = {name: [run["metrics"][length][name] for run in runs] for name in metrics}
        rows.append(
            {
                "model": model,
                "dataset": "CPython's language reference (punctuation)",
                "split": "held-out topics",
                "length": int(length),
                "metrics": figures,
            }
        )
    return rows


def commands(scheme: str, rate: float, seeds: list[int], settings: dict[str, Any]) -> str:
    """What trains and saves the weights, and what measures them and the checkpoint beside them."""
    steps, conversion_steps = ["--max_steps", str(settings["max_steps"])], settings["conversion_steps"]
    folder = f"outputs/{card_name(scheme, is_converted=bool(conversion_steps))}"
    rates = ["--position_learning_rate", f"{rate:g}"]
    all_seeds = [
        "python",
        "benchmarks/compare_schemes.py",
        "--schemes",
        CHECKPOINT,
        scheme,
        "--seeds",
        *map(str, seeds),
    ]
    all_seeds += [*steps, "--eval_lengths", *map(str, settings["eval_lengths"]), *rates]
    one = ["python", "examples/quickstart.py", "--position_scheme", scheme, *steps, *rates]
    if not conversion_steps:
        comment = "# the weights, then the figures"
        both = [one, [*all_seeds, "--output_dir", folder]]
    else:
        comment = "# the conversion and the figures, then the weights"
        both = [[*all_seeds, "--conversion_steps", str(conversion_steps), "--output_dir", folder]]
        both += [[*one, "--model_name_or_path", f"{folder}/conversions/{scheme}", "--compare_with", scheme]]
    return "\n".join([comment, *map(shlex.join, both)])


def card_results(scheme: str, part: str, measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The results file of a variant's card.

    Args:
        measured: what the results file of each part says.

    Raises:
        ValueError: the variant and what it is compared with have not the same seeds.
    """
    settings = measured[part]["settings"]
    compared = {"variant": (part, scheme), "checkpoint": ("punctuation", CHECKPOINT)}
    runs = {
        model: sorted((run for run in measured[name]["runs"] if run["scheme"] == own), key=lambda run: run["seed"])
        for model, (name, own) in compared.items()
    }
    seeds = [run["seed"] for run in runs["variant"]]
    for model, own in runs.items():
        if [run["seed"] for run in own] != seeds:
            raise ValueError(f"{scheme!r} was trained with the seeds {seeds}, {model} with others")
    rate = runs["variant"][0]["position_learning_rate"]
    data = (
        "the language reference of the CPython named below, without its commas and full stops; the label of a word "
        f"says which followed it; {1 - settings['held_out_share']:.0%} of the text, by topics, to train on"
    )
    if settings["conversion_steps"]:
        data += f", first {settings['conversion_steps']} steps of `hf_posenc.convert` on the plain text"
    return {
        "base_model": BASE_MODEL,
        "license": "apache-2.0",
        "language": "en",
        "data": data,
        "command": commands(scheme, rate, seeds, settings),
        "training": {**{name: settings[name] for name in TRAINING}, "position_learning_rate": rate},
        "seeds": seeds,
        "versions": measured[part]["versions"],
        "machine": report.circumstances()["machine"],
        "limits": [
            f"It is an example: {settings['max_steps']} steps on a single technical text, to show what the scheme does.",
            f"It was trained on windows of {settings['length']} tokens only; what is longer shows how far that carries.",
            "Words are read in lower case, and only commas and full stops are restored.",
        ],
        "results": [row for model, own in runs.items() for row in measurements(own, model)],
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    measured = {
        name: json.loads((comparison.FOLDER / name / "results.json").read_text(encoding="utf-8")) for name in CARDS
    }
    # The command in a card names its files from the repository's root.
    with contextlib.chdir(ROOT):
        for part, schemes in CARDS.items():
            for scheme in schemes:
                name = card_name(scheme, is_converted=part == "converted")
                folder = Path("model_cards") / name
                write_json(folder / "config.json", variant_config(scheme))
                write_json(folder / "results.json", card_results(scheme, part, measured))
                print(write_card(folder, folder / "results.json", f"me/{name}"))


if __name__ == "__main__":
    main()
