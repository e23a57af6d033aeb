"""Python code in a process of its own, with the plugin within reach or without."""

import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]


def run_fresh(code: str, modules_cache: Path, plugin: bool) -> str:
    """Run `code` and return what it printed; fails with its error output.

    Args:
        modules_cache: folder for code that transformers copies from checkpoints.
        plugin: whether `hf_posenc` can be imported there; importing it is up to `code`.
    """
    if not plugin:
        code = "import sys\nsys.modules['hf_posenc'] = None  # importing it raises ImportError\n" + code
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_MODULES_CACHE": str(modules_cache),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout + process.stderr
