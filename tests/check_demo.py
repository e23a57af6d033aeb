"""What the quick start prints with its defaults: with T5's bias, more of what was learned is left in longer texts.

python examples/quickstart.py > FILE
python tests/check_demo.py FILE
"""

import sys
from pathlib import Path


def main() -> None:
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    # Scheme -> F1, F1 in texts four times as long, by distance from the start, seconds.
    scores = {scheme: values for scheme, *values in rows[1:]}
    assert list(scores) == ["original", "absolute+t5"], list(scores)
    (original, original_long), (added, added_long) = (map(float, row[:2]) for row in scores.values())
    assert original >= 0.45 and added >= 0.45, scores
    assert added_long > original_long, scores
    print("the quick start shows what it has to show")


if __name__ == "__main__":
    main()
