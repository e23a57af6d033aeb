"""Do the tests notice mistakes? Makes each mistake of mutations.toml in a copy of the repository and runs the tests there.

    python tests/mutations/run.py --tier core --output core.json
    python tests/mutations/run.py --sample 12
    python tests/mutations/run.py --tests ../another_checkout --output before.json
    python tests/mutations/run.py --table before.json all.json core.json

A mutation is caught where a test fails, and survives where all pass. What says neither (no test was left to run, the time was
over, its text is not in the file) is counted as neither. The exit status is 1 unless all were caught. Tests are assumed to pass without a mutation; `--check` looks.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MINUTES = 10
# Beside the package, whatever a test may read; used where git does not tell.
CLASSES = (
    "hf_posenc",
    "hf_posenc_cli",
    "examples",
    "tests",
    "docs",
    "benchmarks",
    "research",
    "tools",
    "model_cards",
    ".ci",
)


def read_mutations(path: Path = HERE / "mutations.toml") -> list[dict]:
    """All mutations: name, area, file, old, new, and the tests that cover the file, the likeliest first."""
    with path.open("rb") as file:
        return tomllib.load(file)["mutation"]


def files_of(checkout: Path) -> list[Path]:
    """What is copied of a checkout, relative to it."""
    listed = subprocess.run(
        ["git", "-C", checkout, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."],
        capture_output=True,
    )
    if listed.returncode == 0:
        names = [Path(name) for name in listed.stdout.decode().split("\0") if name]
    else:
        found = [path for part in CLASSES for path in (checkout / part).rglob("*") if "__pycache__" not in path.parts]
        names = [path.relative_to(checkout) for path in (*checkout.iterdir(), *found)]
    return [name for name in names if (checkout / name).is_file()]


def copy_of(checkout: Path, folder: Path) -> Path:
    for name in files_of(checkout):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(checkout / name, folder / name)
    return folder


def run_pytest(folder: Path, arguments: list[str]) -> tuple[int | None, str]:
    """Exit status, None where the time was over, and output."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(MINUTES * 60)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return status, output.read()


def flags_of(folder: Path, tier: str) -> list[str]:
    """`--all`, where it is asked for and the tests know it: without, all of them run anyway."""
    return ["--all"] if tier == "all" and '"--all"' in (folder / "conftest.py").read_text() else []


def failed_tests(output: str) -> list[str]:
    """Ids in the summary of pytest; a file alone is one that could not be collected."""
    lines = [line.split(" ", 1) for line in output.splitlines()]
    return [rest[0].split(" - ")[0] for word, *rest in lines if word in ("FAILED", "ERROR") and rest]


def tests_in(folder: Path, mutation: dict) -> list[str]:
    """Files, or ids of slow tests, which run in the core too if they are named."""
    return [name for name in mutation["tests"] if (folder / name.split("::")[0]).is_file()]


def outcome_of(folder: Path, mutation: dict, tier: str) -> dict:
    """Make a mutation in a copy, run its tests, and take it back."""
    path, tests = folder / mutation["file"], tests_in(folder, mutation)
    if not tests:
        return {"outcome": "none of its tests is there"}
    source = path.read_text() if path.is_file() else ""
    if source.count(mutation["old"]) != 1:
        return {"outcome": "its text is not in the file, or more than once"}
    start = time.monotonic()
    path.write_text(source.replace(mutation["old"], mutation["new"]))
    try:
        status, output = run_pytest(folder, ["-x", *flags_of(folder, tier), *tests])
    finally:
        path.write_text(source)
    found = {"outcome": "", "test": None, "seconds": round(time.monotonic() - start, 1)}
    failed = failed_tests(output)
    if failed and "::" not in failed[0]:
        # A file that cannot be collected tells of the mutation where it can be without.
        collected, _ = run_pytest(folder, ["--collect-only", failed[0]])
        status = 1 if collected == 0 else "not collected"
    if status == 0:
        found["outcome"] = "survived"
    elif status == 1 and failed:
        found |= {"outcome": "caught", "test": failed[0]}
    else:
        found |= {"outcome": f"status {status}", "output": output[-2000:]}
    return found


def run(mutations: list[dict], checkout: Path, tier: str, jobs: int, output: Path | None) -> dict[str, dict]:
    """The outcome of each mutation by its name; `output` is written after each, and keeps what it has of others."""
    results = json.loads(output.read_text()) if output is not None and output.is_file() else {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary, ThreadPoolExecutor(jobs) as pool:
        copies: Queue[Path] = Queue()
        for job in range(jobs):
            copies.put(copy_of(checkout, Path(temporary) / str(job)))

        def one(mutation: dict) -> None:
            folder = copies.get()
            try:
                found = outcome_of(folder, mutation, tier)
            finally:
                copies.put(folder)
            results[mutation["name"]] = {"area": mutation["area"], **found}
            print(f"{mutation['name']}: {found['outcome']} {found.get('test') or ''}", flush=True)
            if output is not None:
                output.write_text(json.dumps(dict(results), indent=1) + "\n")

        list(pool.map(one, mutations))
    return {mutation["name"]: results[mutation["name"]] for mutation in mutations}


def check(mutations: list[dict], checkout: Path, tier: str, outcomes: Path | None) -> int:
    """Run the tests that mutations name without any, or only those that caught one: 1 if some fail, else 0."""
    names = {mutation["name"] for mutation in mutations}
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        folder = copy_of(checkout, Path(temporary))
        if outcomes is not None:
            known = json.loads(outcomes.read_text())
            runs = [sorted({one["test"] for name, one in known.items() if name in names and one.get("test")})]
        else:
            runs = [[test] for test in sorted({test for mutation in mutations for test in tests_in(folder, mutation)})]
        failures = []
        for tests in runs:
            start = time.monotonic()
            status, output = run_pytest(folder, [*flags_of(folder, tier), *tests])
            what = tests[0] if len(tests) == 1 else f"{len(tests)} tests"
            print(f"{what}: status {status}, {time.monotonic() - start:.0f} s", flush=True)
            # A file may have nothing in the core.
            if status not in (0, 5):
                failures += failed_tests(output) or tests
    print(*(failures or ["all pass"]), sep="\n")
    return min(len(failures), 1)


def table(paths: list[Path]) -> str:
    """Caught mutations by area, in Markdown: before, all, core."""
    mutations, columns = read_mutations(), [json.loads(path.read_text()) for path in paths]
    rows = Counter(mutation["area"] for mutation in mutations)
    caught = [
        Counter(one["area"] for one in mutations if found.get(one["name"], {}).get("outcome") == "caught")
        for found in columns
    ]
    lines = ["| area | mutations | caught by the old suite | by `--all` | by the core |", "|---|--:|--:|--:|--:|"]
    cells = [(area, number, *(column[area] for column in caught)) for area, number in rows.items()]
    cells.append(("all", rows.total(), *(column.total() for column in caught)))
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in cells)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, default=ROOT, metavar="FOLDER", help="checkout whose tests and code run")
    parser.add_argument(
        "--tier", choices=("core", "all"), default="core", help="the core of the tests, or all of them"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutations")
    parser.add_argument("--sample", type=int, metavar="NUMBER", help="so many of them, evenly from all areas")
    parser.add_argument("--skip-known", action="store_true", help="leave out what `--output` has an outcome of")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time")
    parser.add_argument("--output", type=Path, help="JSON of outcomes; those of other mutations in it stay")
    parser.add_argument("--list", action="store_true", help="list mutations")
    parser.add_argument(
        "--check", action="store_true", help="run the tests without any mutation; with --output, those that caught one"
    )
    parser.add_argument(
        "--table", type=Path, nargs=3, metavar="JSON", help="a table of three outcomes: before, all, core"
    )
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.table))
        return 0
    mutations = read_mutations()
    if arguments.only:
        unknown = {*arguments.only} - {mutation["name"] for mutation in mutations}
        if unknown:
            parser.error(f"no mutation is named {', '.join(sorted(unknown))}")
        mutations = [mutation for mutation in mutations if mutation["name"] in arguments.only]
    if arguments.sample:
        mutations = mutations[:: max(1, len(mutations) // arguments.sample)][: arguments.sample]
    if arguments.list:
        print(*(f"{mutation['area']}: {mutation['name']} ({mutation['file']})" for mutation in mutations), sep="\n")
        return 0
    if arguments.check:
        return check(mutations, arguments.tests.resolve(), arguments.tier, arguments.output)
    if arguments.skip_known and arguments.output and arguments.output.is_file():
        known = json.loads(arguments.output.read_text())
        mutations = [mutation for mutation in mutations if mutation["name"] not in known]
    results = run(mutations, arguments.tests.resolve(), arguments.tier, arguments.jobs, arguments.output)
    print(
        *(f"{number} {outcome}" for outcome, number in Counter(r["outcome"] for r in results.values()).items()),
        sep=", ",
    )
    print(f"{sum(result.get('seconds', 0) for result in results.values()):.0f} s")
    return int(any(result["outcome"] != "caught" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
