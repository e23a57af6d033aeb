"""Which scheme, and how positions should be combined with the words: benchmarks/compare_schemes.py, once for each question.

    python benchmarks/comparison.py --data DATA                         # hours; the same command goes on where it stopped
    python benchmarks/comparison.py --data DATA --only punctuation
    python benchmarks/comparison.py --data DATA --only punctuation --schemes t5 rope    # a second process, with its own

DATA holds wikitext2/valid.txt and test.txt. Results go to results/comparison/NAME; settings, versions and every run are in
results.json there. A run that is there is not made again, nor a conversion that only such runs need, so processes may share the
work by schemes or by seeds; costs are measured by the whole command alone.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import report

from hf_posenc.modeling.schemes import SCHEMES


SCRIPT = Path(__file__).parents[1] / "benchmarks" / "compare_schemes.py"
FOLDER = report.RESULTS / "comparison"
# How positions are combined with the words: what the name of a scheme ends in -> what pages and pictures call it.
COMBINED = {
    "": "added once",
    ":position_every_layer=true": "added before every layer",
    ":position_combine=concat": "concatenated",
    ":position_combine=gate": "by a gate",
    ":position_combine=attention": "by attention",
}
COMBINATIONS = [f"{scheme}{how}" for scheme in ("absolute", "sinusoidal") for how in COMBINED if how]
# Sinusoids whose amplitude is left as it starts.
CONSTANT = "sinusoidal:position_learning_rate=0"
# Beside the positions that the checkpoint has.
ADDED = ("absolute+t5", "absolute+relative_key", "absolute+deberta")
BFLOAT16 = {"bf16": "true", "use_cpu": "true"}
RATES = ["0.003", "0.02", "0.1"]
PUNCTUATION = {
    "use_cpu": "true",
    "task": "punctuation",
    "max_steps": 240,
    "rate_steps": 120,
    "eval_lengths": [64, 256],
}
# Weights start as wide as suits the model's width (1 / sqrt(128) is 0.09): BERT's 0.02 leaves small models on a plateau for long.
SCRATCH = {
    **BFLOAT16,
    "task": "masked_lm",
    "max_steps": 800,
    "rate_steps": 400,
    "learning_rate": 0.002,
    "adam_beta2": 0.98,
    "per_device_train_batch_size": 32,
    "length": 32,
    "eval_lengths": [32, 128, 1024],
    "max_eval_tokens": 32768,
    "mask_share": 0.3,
    "config_overrides": "hidden_size=128,num_hidden_layers=2,num_attention_heads=4,intermediate_size=512,"
    "initializer_range=0.08,hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0",
}
FILES = {"train_file": "valid", "eval_file": "test"}
# What is compared -> the options of compare_schemes.py that are not its defaults.
PARTS = {
    "punctuation": {**PUNCTUATION, "schemes": [*SCHEMES, *ADDED, *COMBINATIONS], "position_learning_rates": RATES},
    # Here tables do not start at zero. A step takes as long as without conversion.
    "converted": {
        **PUNCTUATION,
        # All but what the checkpoint has, and the sinusoids that conversion can fit.
        "schemes": [*(scheme for scheme in SCHEMES if scheme != "absolute"), "sinusoidal:position_combine=concat"],
        "conversion_steps": 200,
        "cost_rounds": 0,
        "position_learning_rates": ["0.0005", "0.01"],
    },
    # What as many steps of fine-tuning as conversion and fine-tuning together reach.
    "longer": {
        **PUNCTUATION,
        "schemes": ["absolute", "deberta"],
        "max_steps": 440,
        "cost_rounds": 0,
        "position_learning_rate": 0.02,
    },
    "scratch": {**SCRATCH, "schemes": [*SCHEMES, *COMBINATIONS, CONSTANT], "position_learning_rates": RATES},
}

Runs = dict[str, list[dict[str, Any]]]


def read_part(name: str) -> Runs:
    """The runs of a part by their scheme; nothing where none are recorded."""
    runs: Runs = {}
    for file in sorted((FOLDER / name / "runs").glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        runs.setdefault(run["scheme"], []).append(run)
    return runs


def command(name: str, data: Path, schemes: list[str] | None, seeds: list[int] | None) -> list[str]:
    options = {**PARTS[name], "output_dir": FOLDER / name}
    share = {key: value for key, value in {"schemes": schemes, "seeds": seeds}.items() if value}
    options |= {**share, "cost_rounds": 0} if share else {}
    if options["task"] == "masked_lm":
        options |= {part: data / "wikitext2" / f"{file}.txt" for part, file in FILES.items()}
    words = [sys.executable, str(SCRIPT), "--disable_tqdm", "true"]
    for option, value in options.items():
        words += [f"--{option}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with wikitext2")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="what to compare")
    parser.add_argument("--schemes", nargs="+", help="of these only")
    parser.add_argument("--seeds", nargs="+", type=int, help="with these only")
    arguments = parser.parse_args()
    for name in arguments.only:
        began = time.time()
        subprocess.run(command(name, arguments.data, arguments.schemes, arguments.seeds), check=True)
        print(f"{name}: {(time.time() - began) / 60:.0f} minutes", flush=True)


if __name__ == "__main__":
    main()
