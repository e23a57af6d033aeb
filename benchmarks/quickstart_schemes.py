"""What each scheme reaches in the quick start's budget: every scheme on its own, beside a model without positions.

    python benchmarks/quickstart_schemes.py
    python benchmarks/quickstart_schemes.py --schemes none rope alibi --max_steps 200

Arguments other than `--schemes` go to examples/quickstart.py as they are. Writes results/punctuation_quickstart.json
and .md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import report


QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.py"
SCHEMES = ["absolute+t5", "none", "t5", "rope", "sinusoidal", "absolute"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    arguments, passed_on = parser.parse_known_args()
    first, *others = arguments.schemes
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, QUICKSTART, "--position_scheme", first, "--compare_with", *(others or [first])]
        subprocess.run([*command, *passed_on, "--output_dir", folder], check=True)
        results = json.loads(Path(folder, "results.json").read_text(encoding="utf-8"))
        table = Path(folder, "results.md").read_text(encoding="utf-8")
    settings = results["training"]
    markdown = f"""# Punctuation restoration with the quick start's budget

all-MiniLM-L6-v2 fine-tuned for {settings["max_steps"]} steps (batch {settings["per_device_train_batch_size"]}, learning \
rate {settings["learning_rate"]:g}, that of position parameters {settings["position_learning_rate"]:g}, seed \
{settings["seed"]}) to put commas and full stops back into CPython's language \
reference; F1 on held-out topics. All schemes saw the same data in the same order. One seed: differences of a few hundredths \
between schemes mean nothing; what counts is whether a scheme beats `none`, which cannot see order.

{table}
Seconds are those of training, on {report.circumstances()["machine"]}; other work ran beside, so they are no comparison of \
speed. Made by `{report.circumstances()["command"]}`.
"""
    report.write("punctuation_quickstart", results, markdown)


if __name__ == "__main__":
    main()
