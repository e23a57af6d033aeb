"""CoLA with a scheme added to the checkpoint's own positions: Matthews correlation, and how far positions moved.

Train each scheme with each position learning rate and seed, here by GLUE's name of the data:

    python examples/run_classification.py --task_name cola --position_scheme absolute+t5 --seed 42 \\
        --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 --do_train --do_eval --num_train_epochs 3 \\
        --per_device_train_batch_size 32 --learning_rate 1e-4 --position_learning_rate 0.01 --warmup_steps 0.1 \\
        --train_sampling_strategy group_by_length --save_strategy no --load_best_model_at_end false \\
        --output_dir outputs/cola/absolute+t5-0.01-seed42

The results here are of files in GLUE's layout, which replace `--task_name cola`: train.tsv has 7,250 of GLUE's 8,551
sentences to train on, and dev.tsv is GLUE's validation split.

        --train_file train.tsv --validation_file dev.tsv --column_names source label mark sentence \\
        --metric matthews_correlation

Then gather what has finished; writes cola.json:

    python research/comparison/cola.py outputs/cola
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging

from hf_posenc import position_parameters
from hf_posenc._utils import as_markdown


sys.path += [str(Path(__file__).parents[2] / name) for name in ("examples", "benchmarks")]

from records import write_json  # noqa: E402
from report import circumstances, mean_and_deviation  # noqa: E402


RESULTS = Path(__file__).with_name("cola.json")
METRIC = "matthews_correlation"
# The settings that a result depends on most.
RECORDED = (
    "train_file",
    "validation_file",
    "num_train_epochs",
    "per_device_train_batch_size",
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "train_sampling_strategy",
)


@dataclass
class Run:
    """One scheme, one position learning rate, one seed.

    Attributes:
        position_learning_rate: None where the scheme adds no parameters.
        position_parameters: those that the scheme added; all start at zero, so that their size is how far they moved.
        largest, rms: their largest absolute value and the root of their mean square; None where there are none.
    """

    scheme: str
    position_learning_rate: float | None
    seed: int
    matthews_correlation: float
    position_parameters: int
    largest: float | None
    rms: float | None


def read_run(folder: Path, settings: dict) -> Run:
    """A finished run, its position parameters read from the model that it saved."""
    metrics = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    values = [parameter.detach().flatten() for parameter in position_parameters(model).values()]
    moved = torch.cat(values) if values else None
    return Run(
        scheme=settings["position_scheme"],
        position_learning_rate=None if moved is None else settings["position_learning_rate"],
        seed=settings["seed"],
        matthews_correlation=metrics[f"eval_{METRIC}"],
        position_parameters=0 if moved is None else moved.numel(),
        largest=None if moved is None else moved.abs().max().item(),
        rms=None if moved is None else moved.square().mean().sqrt().item(),
    )


def cell(values: list[float | None]) -> str:
    """Mean and standard deviation; nothing where nothing was measured."""
    return "" if None in values else mean_and_deviation(values)


def markdown_table(runs: list[Run]) -> str:
    """A row per scheme and position learning rate: mean and standard deviation over the seeds."""
    header = [
        "scheme",
        "position learning rate",
        "Matthews correlation",
        "seeds",
        "position parameters",
        "largest magnitude",
    ]
    rows = []
    for scheme, rate in dict.fromkeys((run.scheme, run.position_learning_rate) for run in runs):
        own = [run for run in runs if (run.scheme, run.position_learning_rate) == (scheme, rate)]
        written_rate = "" if rate is None else f"{rate:g}"
        quality, largest, rms = (cell([getattr(run, name) for run in own]) for name in (METRIC, "largest", "rms"))
        seeds = " ".join(str(run.seed) for run in own)
        size = f"{own[0].position_parameters:,}"
        rows.append([scheme, written_rate, quality, seeds, size, largest, rms])
    return as_markdown([*header, "RMS"], rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="Folder of the output folders.")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    # Written last, so a run that has it is finished.
    folders = sorted(file.parent for file in arguments.runs.glob("*/eval_results.json"))
    if not folders:
        parser.error(f"no finished run in {arguments.runs}")
    read = [json.loads((folder / "run_settings.json").read_text(encoding="utf-8"))["settings"] for folder in folders]
    settings = [{name: own[name] for name in RECORDED} for own in read]
    if any(own != settings[0] for own in settings):
        parser.error(f"the runs in {arguments.runs} differ in more than scheme, position learning rate and seed")
    runs = sorted(
        (read_run(folder, own) for folder, own in zip(folders, read)),
        key=lambda run: (run.scheme, run.position_learning_rate or 0, run.seed),
    )
    print(markdown_table(runs))
    entries = {"checkpoint": "sentence-transformers/all-MiniLM-L6-v2", "settings": settings[0]}
    write_json(RESULTS, {**circumstances(), **entries, "runs": [asdict(run) for run in runs]})


if __name__ == "__main__":
    main()
