"""The table of the fit by least squares, from runs.jsonl: a row for each budget, means over its seeds."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from recorded import Line, read_lines
from report import replace_table

from hf_posenc._utils import as_markdown


PAGE = "research/conversion_fit/README.md"
HERE = Path(__file__).parent
NAMES = {
    "inputs": "queries, keys, values",
    "scores": "scores",
    "attention_output": "attention output",
    "intermediate": "first feed-forward projection",
    "output": "second feed-forward projection",
    "norms": "LayerNorm biases",
}


def fitted_name(fitted: Line | None) -> str:
    if fitted is None:
        return "nothing"
    parts = [name for key, name in NAMES.items() if fitted[key]]
    return f"{', '.join(parts)}; {fitted['tokens']:,} tokens"


def table(file: Path = HERE / "runs.jsonl") -> str:
    groups: dict[tuple[str, int], list[Line]] = {}
    for run in read_lines(file)[1:]:
        groups.setdefault((fitted_name(run["fitted"]), run["steps"]), []).append(run)
    header = ["fitted by least squares", "steps after it", "seeds", "core seconds", "fitted", "token cosine", "STS-B"]
    return as_markdown(header, [row(*group, runs) for group, runs in groups.items()])


def row(name: str, steps: int, runs: list[Line]) -> list[str]:
    def mean(value: Callable[[Line], float]) -> float:
        return sum(map(value, runs)) / len(runs)

    seconds = mean(lambda run: sum(run["core_seconds"].values()))
    fitted = "" if name == "nothing" else f"{mean(lambda run: run['cosine_fitted']):.4f}"
    cosines = ", ".join(f"{run['token_cosine']:.4f}" for run in sorted(runs, key=lambda run: run["seed"]))
    sts = f"{mean(lambda run: run['sts']):.3f}"
    return [name, str(steps) if steps else "none", str(len(runs)), f"{seconds:.0f}", fitted, cosines, sts]


def generated() -> Iterator[tuple[str, Callable[[str], str]]]:
    """File, and what makes its text as it should be of what it is."""
    yield PAGE, partial(replace_table, table=table())
