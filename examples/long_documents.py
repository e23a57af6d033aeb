"""Measuring what is found in long documents is a benchmark now: this address leads to benchmarks/long_documents.py."""

import runpy
import sys
from pathlib import Path


if __name__ == "__main__":
    script = Path(__file__).parents[1] / "benchmarks" / Path(__file__).name
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
