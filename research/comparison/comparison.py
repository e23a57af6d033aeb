"""Which scheme, and how positions should be combined with the words: benchmarks/compare_schemes.py, once for each question.

    python research/comparison/comparison.py --data DATA                # days of a core; the same command goes on where it stopped
    python research/comparison/comparison.py --data DATA --remaining    # core hours that each part still needs, and nothing else
    python research/comparison/comparison.py --data DATA --only punctuation
    python research/comparison/comparison.py --data DATA --only punctuation --schemes t5 rope    # a second process, with its own

DATA holds wikitext2/valid.txt and test.txt. All runs are in runs.jsonl, a line each, settings and versions of the parts in parts.json;
compare_schemes.py writes its files to outputs/comparison, which has those of recorded runs, too. A run that is there is not made again,
nor a conversion that only such runs need, so processes may share the
work by schemes, or by seeds where no conversion is still to be made; costs are measured by the whole command alone. The hours that
remain are those that finished runs took.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc.modeling.schemes.table import SCHEMES


ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / name) for name in ("examples", "benchmarks", "research")]

from recorded import Line, change_lines, read_lines  # noqa: E402
from records import write_json  # noqa: E402
from scheme_labels import FREQUENCIES, file_name, run_file  # noqa: E402


SCRIPT = ROOT / "benchmarks" / "compare_schemes.py"
RUNS, SETTINGS = (Path(__file__).with_name(name) for name in ("runs.jsonl", "parts.json"))
# Where the script writes, and looks for what is there.
OUTPUTS = ROOT / "outputs" / "comparison"
# How positions are combined with the words: what the name of a scheme ends in -> what pages and pictures call it.
COMBINED = {
    "": "added once",
    ":position_every_layer=true": "added before every layer",
    ":position_combine=concat": "concatenated",
    ":position_combine=gate": "by a gate",
    ":position_combine=attention": "by attention",
}
COMBINATIONS = [f"{scheme}{how}" for scheme in ("absolute", "sinusoidal") for how in COMBINED if how]
# Sinusoids whose amplitude is trained.
LEARN = "position_learn_amplitude=true"
LEARNED = f"sinusoidal:{LEARN}"
# The other sinusoids that conversion can fit.
CONCATENATED = "sinusoidal:position_combine=concat"
# Rotary frequencies that are learned, beside the positions that the checkpoint has.
ROTARY = [f"absolute+rope{flag}" for flag in FREQUENCIES]
# All flags that tables have a name for.
NAMED = {**COMBINED, f":{LEARN}": "amplitude learned", **FREQUENCIES}
# Beside the positions that the checkpoint has.
ADDED = ("absolute+t5", "absolute+relative_key", "absolute+deberta")
BFLOAT16 = {"bf16": "true"}
RATES = ["0.003", "0.02", "0.1"]
PUNCTUATION = {
    "use_cpu": "true",
    "task": "punctuation",
    "max_steps": 240,
    "rate_steps": 120,
    "eval_lengths": [64, 256],
}
# As many steps of fine-tuning as conversion and fine-tuning together.
LONGER = {**PUNCTUATION, "max_steps": 440, "cost_rounds": 0}
# Weights start as wide as suits the model's width (1 / sqrt(128) is 0.09): BERT's 0.02 leaves small models on a plateau for long.
SIZES = (
    "hidden_size=128,num_hidden_layers={},num_attention_heads=4,intermediate_size=512,"
    "initializer_range=0.08,hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0"
)
FLOAT32 = {
    "use_cpu": "true",
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
    "config_overrides": SIZES.format(2),
}
SCRATCH = {**BFLOAT16, **FLOAT32, "position_learning_rates": RATES}
SINUSOIDS = {**FLOAT32, "folder": "float32", "position_learning_rates": RATES}
FILES = {"train_file": "valid", "eval_file": "test"}
FIVE, TEN = [*range(42, 47)], [*range(42, 52)]
# Seeds on which amplitudes are chosen: no figure is of these.
CHOOSING = [52, 53]


def with_amplitude(value: float) -> str:
    return f"sinusoidal:position_amplitude={value}"


# The default first; the last also has another base.
AMPLITUDES = ["sinusoidal", *map(with_amplitude, (0.25, 0.5, 1.0)), f"{with_amplitude(0.2)},position_base=100"]
BETTER = 0.25
TUNED_AMPLITUDES = ["sinusoidal", *map(with_amplitude, (0.1, 0.25, 1.0))]
# Positions before every layer at first at the weight 1, and at 1 / initializer_range, at which they have the RMS of a layer's input.
WEIGHTS = ("1", "12.5")
EVERY_LAYER = [
    f"{scheme}:position_every_layer=true,position_every_layer_weight={weight}"
    for scheme in ("absolute", "sinusoidal")
    for weight in WEIGHTS
]
WIDTHS = (32, 64)
BESIDE = [
    f"{scheme}:position_combine=concat{width}"
    for scheme in ("absolute", "sinusoidal")
    for width in ("", *(f",position_width={width}" for width in WIDTHS))
]
TYPES = {"c2p": '["c2p"]', "p2c": '["p2c"]', "c2p, p2c": "", "c2p, p2c, p2p": '["c2p","p2c","p2p"]'}


def deberta_terms(beside: str = "") -> list[str]:
    """`deberta` with each choice of terms, with shared projections and with its own."""
    own = ("", "position_share_projections=false")
    flags = [
        ",".join(part for part in (types and f"position_attention_types={types}", projections) if part)
        for types in TYPES.values()
        for projections in own
    ]
    return [f"{beside}deberta{':' * bool(flag)}{flag}" for flag in flags]


# What is compared -> the options of compare_schemes.py that are not its defaults, the folder of the results where it is another, and
# the best first: what pages need most.
PARTS: dict[str, dict[str, Any]] = {
    "amplitudes": {**SINUSOIDS, "schemes": AMPLITUDES, "seeds": CHOOSING},
    # What was best of these, on the seeds that have figures.
    "amplitude": {**SINUSOIDS, "schemes": [with_amplitude(BETTER)], "seeds": TEN},
    # In the place of a checkpoint's table, whose words have an RMS of about 0.05; the default is 0.028 there.
    "amplitudes_tuned": {**PUNCTUATION, "schemes": TUNED_AMPLITUDES, "seeds": CHOOSING, "cost_rounds": 0},
    "float32": {**SINUSOIDS, "schemes": ["none", "sinusoidal", LEARNED], "seeds": FIVE},
    "tables": {**SINUSOIDS, "schemes": ["absolute", "sinusoidal"], "seeds": TEN},
    "bfloat16": {**SCRATCH, "folder": "scratch", "schemes": ["none", "sinusoidal", LEARNED], "seeds": FIVE},
    "punctuation": {
        **PUNCTUATION,
        "schemes": [*SCHEMES, *ADDED, *COMBINATIONS, LEARNED],
        "position_learning_rates": RATES,
    },
    # Frequencies have rates of their own.
    "learned_rotary": {
        **PUNCTUATION,
        "schemes": ROTARY,
        "position_learning_rates": ["0.0001", "0.0003", "0.001"],
    },
    # Here tables do not start at zero. A step takes as long as without conversion.
    "converted": {
        **PUNCTUATION,
        # All but what the checkpoint has, and the sinusoids that conversion can fit.
        "schemes": [
            *(scheme for scheme in SCHEMES if scheme != "absolute"),
            LEARNED,
            CONCATENATED,
        ],
        "conversion_steps": 200,
        "cost_rounds": 0,
        "position_learning_rates": ["0.0005", "0.01"],
    },
    # What as many steps of fine-tuning as conversion and fine-tuning together reach.
    "longer": {**LONGER, "schemes": ["absolute", "deberta"], "position_learning_rate": 0.02},
    "scratch": {
        **SCRATCH,
        "schemes": [*SCHEMES, *COMBINATIONS, LEARNED],
    },
    # At a rate of 0.002 four layers stay on the plateau, with and without positions.
    "every_layer": {
        **FLOAT32,
        "config_overrides": SIZES.format(4),
        "learning_rate": 0.001,
        "max_steps": 1200,
        "cost_rounds": 0,
        "schemes": ["absolute", "sinusoidal", *EVERY_LAYER],
        "position_learning_rate": 0.003,
    },
    "terms": {
        **FLOAT32,
        "schemes": [*deberta_terms(), "t5", "tupe"],
        "cost_rounds": 0,
        "position_learning_rate": 0.1,
    },
    "beside": {**FLOAT32, "schemes": ["absolute", "sinusoidal", *BESIDE], "cost_rounds": 0},
    # The control of conversions that read windows of up to 256 tokens: as many steps, positions up to 256, each in one of two ways.
    "offsets": {**LONGER, "schemes": ["absolute"], "position_offset": 192},
    "windows": {**LONGER, "schemes": ["absolute"], "length": 256},
    "searched": {
        **PUNCTUATION,
        "schemes": ["absolute"],
        "learning_rates": [0.00025, 0.0005, 0.001, 0.002],
        "cost_rounds": 0,
    },
    # Ten seeds for the pairs that the README names, at the rates that were chosen with three.
    "pairs": {
        **PUNCTUATION,
        "schemes": ["absolute", "absolute+t5"],
        "position_learning_rate": 0.1,
        "seeds": TEN,
        "cost_rounds": 0,
    },
    "pairs_longer": {**LONGER, "schemes": ["absolute"], "seeds": TEN},
    # Three conversions, and in each of them the seeds of fine-tuning.
    "pairs_converted": {
        **PUNCTUATION,
        "schemes": ["deberta"],
        "conversion_steps": 200,
        "conversions": 3,
        "cost_rounds": 0,
        "position_learning_rate": 0.01,
        "seeds": TEN,
    },
    "terms_added": {
        **PUNCTUATION,
        "schemes": [*deberta_terms("absolute+"), "absolute+t5", "absolute+tupe"],
        "cost_rounds": 0,
        "position_learning_rate": 0.003,
    },
    # 32 tokens of text, with positions drawn from as many as the longest evaluation has.
    "random_positions": {**SCRATCH, "schemes": [*SCHEMES], "random_positions": 1024, "cost_rounds": 0},
}
SEEDS = [42, 43, 44]
# A step of conversion takes as long as so many of fine-tuning.
CONVERSION_STEP = 3.5
# What has no tables or biases, so that no rate is tried for it.
WITHOUT_RATES = ("none", "absolute", "sinusoidal", "rope", "alibi")

Runs = dict[str, list[dict[str, Any]]]


def folder_of(part: str) -> Path:
    """Where the files of a part are."""
    return OUTPUTS / PARTS[part].get("folder", part)


def read_part(name: str) -> Runs:
    """The runs of a part, or of a folder, by their scheme; nothing where none are recorded."""
    runs: Runs = {}
    folder = folder_of(name).name if name in PARTS else name
    for run in read_lines(RUNS):
        if run["part"] == folder and "tried" not in run:
            runs.setdefault(run["scheme"], []).append(run)
    return runs


def file_of(line: Line) -> Path:
    """The file that compare_schemes.py has for a line."""
    folder = OUTPUTS / line["part"]
    if "tried" in line:
        return run_file(folder / "rates", f"{line['scheme']}-{line['tried']}", line["seed"])
    return run_file(folder, line["scheme"], line["seed"], line.get("conversion"))


def line_of(file: Path, folder: Path) -> Line:
    """The line for a file of compare_schemes.py: which part it is of, and which rate it tried, if that is what it was for."""
    run = json.loads(file.read_text(encoding="utf-8"))
    if not file.is_relative_to(folder / "rates"):
        return {"part": folder.name, **run}
    tried = file.stem.removeprefix(f"{file_name(run['scheme'])}-").removesuffix(f"-seed{run['seed']}")
    return {"part": folder.name, "tried": tried, **run}


def exchange(folder: Path) -> None:
    """Record what is in a folder of compare_schemes.py, and put there what is recorded and it lacks."""
    found = [
        line_of(file, folder) for runs in ("runs", "rates/runs") for file in sorted(folder.glob(f"{runs}/*.json"))
    ]

    def change(lines: list[Line]) -> list[Line]:
        merged = {file_of(line): line for line in [*lines, *found]}
        return [*merged.values()]

    change_lines(RUNS, change)
    for line in read_lines(RUNS):
        if line["part"] == folder.name and not file_of(line).exists():
            write_json(file_of(line), {key: value for key, value in line.items() if key not in ("part", "tried")})
    parts = json.loads(SETTINGS.read_text(encoding="utf-8"))
    if (folder / "results.json").exists():
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        parts[folder.name] = {key: results[key] for key in ("settings", "versions", "relative_cost") if results[key]}
        write_json(SETTINGS, parts)
    for name, key in {"settings.json": "settings", "relative_cost.json": "relative_cost"}.items():
        if not (folder / name).exists() and key in parts.get(folder.name, {}):
            write_json(folder / name, parts[folder.name][key])


@dataclass(frozen=True)
class Planned:
    """A run, or a conversion, that a part consists of.

    Attributes:
        steps: of training, in steps of fine-tuning or pretraining.
        exists: whether it is recorded.
    """

    label: str
    steps: float
    exists: bool


def planned(part: str, schemes: list[str] | None = None, seeds: list[int] | None = None) -> Iterator[Planned]:
    """All that a part consists of: searches for rates, conversions, runs."""
    options, folder = PARTS[part], folder_of(part)
    steps = options["max_steps"]
    for label in schemes or options["schemes"]:
        name = label.partition(":")[0]
        if ":" not in label and not name.startswith("absolute+") and name in WITHOUT_RATES:
            rates = [f"learning_rate={rate}" for rate in options.get("learning_rates", [])]
        else:
            rates = (
                [] if name in WITHOUT_RATES else [float(rate) for rate in options.get("position_learning_rates", [])]
            )
        for rate in rates:
            exists = run_file(folder / "rates", f"{label}-{rate}", SEEDS[0]).exists()
            yield Planned(label, options.get("rate_steps", steps), exists)
        is_converted = "conversion_steps" in options and name != "absolute"
        for number in range(options.get("conversions", 1) if is_converted else 1):
            files = [run_file(folder, label, seed, number) for seed in seeds or options.get("seeds", SEEDS)]
            if is_converted:
                is_there = (folder / "conversions" / (file_name(label) + f"-{number}" * bool(number))).exists()
                needed = not is_there and not all(file.exists() for file in files)
                yield Planned(label, CONVERSION_STEP * options["conversion_steps"], not needed)
            yield from (Planned(label, steps, file.exists()) for file in files)


def work(part: str) -> float:
    """Tokens · layers of a step, by which times of parts are compared where one has none of its own."""
    options = PARTS[part]
    layers = 4 if options.get("config_overrides") == SIZES.format(4) else 2 if options["task"] == "masked_lm" else 6
    return options.get("length", 64) * options.get("per_device_train_batch_size", 8) * layers


def seconds_of_a_step(part: str, label: str) -> float | None:
    """As finished runs took: of the label in this folder, else of any there, else of the same task, scaled by [`work`].

    None where nothing of the task is finished.
    """

    def times(name: str, own: str | None = None) -> list[float]:
        runs = [run for scheme, found in read_part(name).items() for run in found if own in (None, scheme)]
        return [(run.get("seconds") or run["train_seconds"]) / PARTS[name]["max_steps"] for run in runs]

    found = times(part, label) or times(part)
    if not found:
        same = [name for name in PARTS if PARTS[name]["task"] == PARTS[part]["task"]]
        found = [seconds / work(name) * work(part) for name in same for seconds in times(name)]
    return statistics.fmean(found) if found else None


def hours_remaining(
    part: str, schemes: list[str] | None = None, seeds: list[int] | None = None
) -> tuple[int, float | None]:
    """Runs and conversions that a part still needs, and core hours for them; None where nothing tells how long one takes."""
    missing = [one for one in planned(part, schemes, seeds) if not one.exists]
    seconds = [(seconds_of_a_step(part, one.label), one.steps) for one in missing]
    if any(step is None for step, _ in seconds):
        return len(missing), None
    return len(missing), sum(step * steps for step, steps in seconds) / 3600


def say_what_remains(parts: list[str], schemes: list[str] | None, seeds: list[int] | None) -> str:
    """A line for each part that is not finished, and the sum. Parts that share a folder may share runs, which are counted in each."""
    lines, total = [], 0.0
    for part in parts:
        count, hours = hours_remaining(part, schemes, seeds)
        if count:
            lines.append(f"{part}: {count} runs, {'unknown' if hours is None else f'{hours:.1f}'} core hours")
            total += hours or 0.0
    return "\n".join([*lines, f"remaining: {total:.1f} core hours"])


def command(name: str, data: Path, schemes: list[str] | None, seeds: list[int] | None) -> list[str]:
    options = {name: value for name, value in PARTS[name].items() if name != "folder"} | {
        "output_dir": folder_of(name)
    }
    share = {key: value for key, value in {"schemes": schemes, "seeds": seeds}.items() if value}
    # In a folder of several parts no command has all schemes.
    options |= {**share, "cost_rounds": 0} if share or "folder" in PARTS[name] else {}
    if options["task"] == "masked_lm":
        options |= {part: data / "wikitext2" / f"{file}.txt" for part, file in FILES.items()}
    words = [sys.executable, str(SCRIPT), "--disable_tqdm", "true"]
    for option, value in options.items():
        words += [f"--{option}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with wikitext2")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="what to compare")
    parser.add_argument("--schemes", nargs="+", help="of these only")
    parser.add_argument("--seeds", nargs="+", type=int, help="with these only")
    parser.add_argument("--remaining", action="store_true", help="say how many core hours remain, and measure nothing")
    arguments = parser.parse_args()
    for folder in {folder_of(name) for name in PARTS}:
        exchange(folder)
    print(say_what_remains(arguments.only, arguments.schemes, arguments.seeds), flush=True)
    if arguments.remaining:
        return
    if arguments.data is None:
        parser.error("--data is needed to measure")
    for name in arguments.only:
        began = time.time()
        subprocess.run(command(name, arguments.data, arguments.schemes, arguments.seeds), check=True)
        exchange(folder_of(name))
        print(f"{name}: {(time.time() - began) / 60:.0f} minutes", flush=True)


if __name__ == "__main__":
    main()
