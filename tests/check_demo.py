"""What the quick start prints with its defaults: order is worth having, and more is read than the checkpoint's table has room for.

python examples/quickstart.py > FILE
python tests/check_demo.py FILE
"""

import sys
from pathlib import Path


def main() -> None:
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    # Scheme -> F1 of comma, of full stop, of both, F1 at length or why there is none, seconds.
    scores = {scheme: values for scheme, *values in rows[1:]}
    assert list(scores)[1:] == ["t5", "none"], list(scores)
    [stock, *_] = scores.values()
    assert float(scores["t5"][2]) >= 0.40 and float(scores["none"][2]) <= 0.20 and float(stock[2]) >= 0.45, scores
    assert float(scores["t5"][3]) > float(scores["none"][3]) + 0.1, scores
    print("the quick start shows what it has to show")


if __name__ == "__main__":
    main()
