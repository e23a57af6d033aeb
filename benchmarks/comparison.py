"""Which scheme, and how positions should join the words: examples/compare_schemes.py, once for each question.

    python benchmarks/comparison.py --data DATA                         # hours; the same command goes on where it stopped
    python benchmarks/comparison.py --data DATA --only combine_scratch
    python benchmarks/comparison.py --data DATA --only punctuation --schemes t5 rope    # a second process, with its own

DATA holds wikitext2/valid.txt and test.txt. Results go to results/comparison/NAME; settings, versions and every run are in
results.json there. A run that is there is not made again, so processes may share the work by schemes or by seeds.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import report


SCRIPT = Path(__file__).parents[1] / "examples" / "compare_schemes.py"
FOLDER = report.RESULTS / "comparison"
# Positions that join the words: how they do, and whether they do so again before every layer.
HOW = ("", *(f":position_combine={name}" for name in ("concat", "gate", "attention")), ":position_every_layer=true")
COMBINED = tuple(f"{scheme}{how}" for scheme in ("absolute", "sinusoidal") for how in HOW)
RATES = {"position_learning_rates": ["0.003", "0.02", "0.1"]}
PUNCTUATION = {"task": "punctuation", "max_steps": 240, "eval_lengths": [64, 256]}
SCRATCH = {
    "task": "masked_lm",
    "max_steps": 1200,
    "learning_rate": 0.002,
    "position_learning_rate": 0.01,
    "per_device_train_batch_size": 16,
    "length": 64,
    "eval_lengths": [64, 256, 1024],
    "max_eval_tokens": 32768,
    "config_overrides": "hidden_size=128,num_hidden_layers=2,num_attention_heads=4,intermediate_size=512",
}
FILES = {"train_file": "valid", "eval_file": "test"}
# What is compared -> the options of compare_schemes.py that are not its defaults.
PARTS = {
    "combine_scratch": {"schemes": [*COMBINED, "none"], **SCRATCH},
    "combine_punctuation": {"schemes": [*COMBINED, "none"], **PUNCTUATION},
    "punctuation": {**PUNCTUATION, **RATES},
    "converted": {**PUNCTUATION, **RATES, "conversion_steps": 400},
    "scratch": {**SCRATCH, **RATES},
}


def command(name: str, data: Path, schemes: list[str] | None, seeds: list[int] | None) -> list[str]:
    options = {**PARTS[name], "output_dir": FOLDER / name}
    options |= {key: value for key, value in {"schemes": schemes, "seeds": seeds}.items() if value}
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
