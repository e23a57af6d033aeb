"""Model cards of variants that a comparison trained: config.json, results.json and README.md in model_cards/<name>/.

    python examples/compare_schemes.py --eval_lengths 64 128 256 --seeds 42 --cost_rounds 0 \\
        --output_dir benchmarks/results/punctuation_lengths \\
        --schemes absolute absolute+t5 absolute+deberta t5 rope absolute+relative_key deberta
    python benchmarks/model_cards.py

Every scheme of the comparison but `absolute`, which is the checkpoint itself, trained alike, gets a card. The comparison is
one of examples/compare_schemes.py on punctuation with the packaged MiniLM; `--schemes` leaves out others of its folder.
"""

import argparse
import contextlib
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import report

from hf_posenc.cards import write_card


ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from compare_schemes import Candidate  # noqa: E402
from minilm import packaged_minilm  # noqa: E402
from quickstart import load_config  # noqa: E402
from records import write_json  # noqa: E402


BASE_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
CHECKPOINT = "absolute"
# The settings that a reader of a card needs.
TRAINING = (
    "max_steps",
    "per_device_train_batch_size",
    "learning_rate",
    "position_learning_rate",
    "warmup_steps",
    "length",
)


def card_name(scheme: str) -> str:
    """The name of a variant's repository: `absolute+relative_key` is `minilm-absolute-relative-key`."""
    return "minilm-" + re.sub(r"[\W_]+", "-", scheme)


def variant_config(candidate: Candidate) -> dict[str, Any]:
    """What is in config.json of the trained variant, and where it came from."""
    config = load_config(packaged_minilm(), **candidate.flags)
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


def card_results(candidate: Candidate, comparison: dict[str, Any]) -> dict[str, Any]:
    """The results file of a variant's card."""
    settings = comparison["settings"]
    own, checkpoint = (
        sorted((run for run in comparison["runs"] if run["scheme"] == scheme), key=lambda run: run["seed"])
        for scheme in (candidate.label, CHECKPOINT)
    )
    seeds = [run["seed"] for run in own]
    if [run["seed"] for run in checkpoint] != seeds:
        raise ValueError(f"{candidate.label!r} was trained with the seeds {seeds}, {CHECKPOINT!r} with others")
    training = {name: settings[name] for name in TRAINING}
    flags = [f"--{name}={json.dumps(value)}" for name, value in candidate.flags.items() if name != "position_scheme"]
    if candidate.position_learning_rate is not None:
        training["position_learning_rate"] = candidate.position_learning_rate
        flags.append(f"--position_learning_rate={candidate.position_learning_rate}")
    one = ["python", "examples/quickstart.py", "--position_scheme", candidate.flags["position_scheme"], *flags]
    both = ["python", "examples/compare_schemes.py", "--schemes", CHECKPOINT, candidate.label, "--seeds"]
    both += [*map(str, seeds), "--eval_lengths", *own[0]["metrics"]]
    limits = [
        f"It is an example: {settings['max_steps']} steps on a single technical text, to show what the scheme does.",
        f"It was trained on windows of {settings['length']} tokens only; what is longer shows how far that carries.",
        "Words are read in lower case, and only commas and full stops are restored.",
    ]
    if len(seeds) == 1:
        limits.append("One seed: differences of a few hundredths in F1 say nothing.")
    return {
        "base_model": BASE_MODEL,
        "license": "apache-2.0",
        "language": "en",
        "data": "the language reference of the CPython named below, without its commas and full stops; the label of a word "
        f"says which followed it; {1 - settings['held_out_share']:.0%} of the text, by topics, to train on",
        "command": f"# the weights, then the figures\n{shlex.join(one)}\n{shlex.join(both)}",
        "training": training,
        "seeds": seeds,
        "versions": comparison["versions"],
        "machine": report.circumstances()["machine"],
        "limits": limits,
        "results": measurements(own, "variant") + measurements(checkpoint, "checkpoint"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path, nargs="?", default=report.RESULTS / "punctuation_lengths")
    parser.add_argument("--schemes", nargs="+", help="Default: all but absolute.")
    arguments = parser.parse_args()
    comparison = json.loads((arguments.comparison / "results.json").read_text(encoding="utf-8"))
    if comparison["settings"]["task"] != "punctuation" or comparison["settings"]["model_name_or_path"]:
        parser.error(f"{arguments.comparison} is no comparison on punctuation with the packaged MiniLM")
    labels = arguments.schemes or sorted({run["scheme"] for run in comparison["runs"]} - {CHECKPOINT})

    # The command in a card names its files from the repository's root.
    with contextlib.chdir(ROOT):
        for candidate in map(Candidate.parse, labels):
            folder = Path("model_cards") / card_name(candidate.label)
            write_json(folder / "config.json", variant_config(candidate))
            write_json(folder / "results.json", card_results(candidate, comparison))
            print(write_card(folder, folder / "results.json", f"me/{folder.name}"))


if __name__ == "__main__":
    main()
