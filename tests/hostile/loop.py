"""The loop that the attacks share: areas of random cases, each made again by its area, seed and number."""

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import logging as transformers_logging


COUNTS: dict[str, int] = {}
# Area -> the attack, which gets the case's random numbers, and its share of the cases.
Areas = dict[str, tuple[Callable[[random.Random], None], float]]


def note(what: str) -> None:
    """Count what a case came upon, to see that the attacks arrive."""
    COUNTS[what] = COUNTS.get(what, 0) + 1


def run_case(areas: Areas, area: str, seed: int, case: int) -> Exception | None:
    """The failure of a case, if it has one."""
    torch.manual_seed(hash((seed, case)) & 0x7FFFFFFF)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            areas[area][0](random.Random(f"{area} {seed} {case}"))
    except Exception as error:  # noqa: BLE001
        return error
    return None


def with_folders(areas: dict[str, tuple[Callable[[random.Random, Path], None], float]]) -> Areas:
    """Attacks that get a folder of their own beside the random numbers, as those that get these alone."""
    return {area: (partial(_in_a_folder, attack), share) for area, (attack, share) in areas.items()}


def _in_a_folder(attack: Callable[[random.Random, Path], None], rng: random.Random) -> None:
    folder = Path(tempfile.mkdtemp(prefix="hostile"))
    try:
        attack(rng, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(description: str, areas: Areas, cases: int) -> None:
    """Run what the command line asks for, `cases` by default, and exit with 1 if any fails."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--area", choices=[*areas])
    parser.add_argument("--case", type=int, help="this case of the area alone, with its traceback")
    parser.add_argument("--notes", action="store_true", help="what the attacks came upon")
    arguments = parser.parse_args()
    if arguments.case is not None and arguments.area is None:
        parser.error("--case needs --area")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    if arguments.case is not None:
        error = run_case(areas, arguments.area, arguments.seed, arguments.case)
        print("".join(traceback.format_exception(error)) if error else "no failure")
        sys.exit(error is not None)
    areas = {arguments.area: areas[arguments.area]} if arguments.area else areas
    whole = sum(share for _, share in areas.values())
    failed = 0
    for area, (_, share) in areas.items():
        number, start, failures = max(1, round(arguments.cases * share / whole)), time.perf_counter(), []
        for case in range(number):
            error = run_case(areas, area, arguments.seed, case)
            if error is not None:
                failures.append((case, error))
        print(f"{area}: {number} cases, {len(failures)} failures, {time.perf_counter() - start:.0f} s", flush=True)
        for case, error in failures:
            text = " ".join(str(error).split())[:260]
            print(f"  --area {area} --seed {arguments.seed} --case {case}: {type(error).__name__}: {text}", flush=True)
        failed += len(failures)
    if arguments.notes:
        for what in sorted(COUNTS):
            print(f"  {COUNTS[what]:5} {what}")
    sys.exit(bool(failed))
