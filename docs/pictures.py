"""Make the pictures of README and docs, small.

python docs/pictures.py                     # schemes.png, combine.png, every-layer.png, from benchmarks/results

hf-posenc report MiniLM=path/to/all-MiniLM-L6-v2 --out minilm.html
python docs/pictures.py minilm.html spaces terms probes order phase-shift   # those of a report
"""

import argparse
import base64
import io
import json
import re
import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from hf_posenc.analysis.style import BLUE, GREY, VERMILION, panels, styled


FOLDER = Path(__file__).parent / "pictures"
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from comparison import COMBINED  # noqa: E402


RESULTS = BENCHMARKS / "results"
WIDTH, COLOURS = 900, 128
SECTION = re.compile(r'<section id="([^"]+)".*?</section>', re.DOTALL)
IMAGE = re.compile(r'<img src="data:image/png;base64,([^"]+)" alt="([^".]+)\.')


def pictures(page: str) -> dict[str, bytes]:
    """The images of a page as PNG files, by names of figure and model: "order-minilm.png"."""
    return {
        f"{section[1]}-{model.lower().replace(' ', '-')}.png": base64.b64decode(data)
        for section in SECTION.finditer(page)
        for data, model in IMAGE.findall(section[0])
    }


def measured(comparison: str, metric: str) -> dict[str, dict[int, list[float]]]:
    """What the seeds of a comparison reached, by scheme and length."""
    found: dict[str, dict[int, list[float]]] = {}
    for file in sorted((RESULTS / comparison / "runs").glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        for length, metrics in run["metrics"].items():
            found.setdefault(run["scheme"], {}).setdefault(int(length), []).append(metrics[metric])
    return found


def losses_from_scratch() -> dict[str, list[float]]:
    """Of each scheme and seed, at the training length."""
    return {scheme: lengths[32] for scheme, lengths in measured("comparison/scratch", "masked_loss").items()}


@styled
def schemes() -> Figure:
    """Loss of masked words from scratch for each scheme, and F1 of punctuation at lengths beyond that of training."""
    figure, [[left, right]] = panels(columns=2, height=3.1)
    losses = {scheme: own for scheme, own in losses_from_scratch().items() if ":" not in scheme}
    ranked = sorted(losses, key=lambda scheme: -statistics.fmean(losses[scheme]))
    nothing = statistics.fmean(losses["none"])
    for row, scheme in enumerate(ranked):
        mean = statistics.fmean(losses[scheme])
        clear = nothing - mean > 2 * max(statistics.stdev(losses[scheme]), statistics.stdev(losses["none"]))
        left.errorbar(mean, row, xerr=statistics.stdev(losses[scheme]), fmt="o", color=BLUE if clear else GREY)
    left.axvline(nothing, color=GREY, linewidth=0.8, linestyle=":")
    left.set_yticks(range(len(ranked)), ranked)
    left.set(title="From scratch: loss of masked words", xlabel="lower is better; three seeds")

    scores = measured("punctuation_lengths", "f1")
    for scheme, colour in (("absolute+relative_key", BLUE), ("absolute+t5", VERMILION), ("absolute", GREY)):
        lengths = sorted(scores[scheme])
        values = [statistics.fmean(scores[scheme][length]) for length in lengths]
        right.plot(lengths, values, "o-", color=colour, label=scheme)
    right.set_xscale("log", base=2)
    right.set_xticks(lengths, map(str, lengths))
    right.set(
        title="Fine-tuned at 64 tokens, read longer: F1", xlabel="tokens; higher is better; one seed", ylim=(0.5, 0.65)
    )
    right.legend(loc="upper right")
    return figure


@styled
def combinations(flag: str) -> Figure:
    """Loss from scratch with each value of a flag, each seed as a dot; the line is the mean without positions."""
    losses, ways = losses_from_scratch(), [way for way in COMBINED if not way or flag in way]
    rows = [(scheme, way) for scheme in ("sinusoidal", "absolute") for way in reversed(ways)]
    figure, [[axis]] = panels(height=0.9 + 0.28 * len(rows))
    for place, (scheme, way) in enumerate(rows):
        values = losses[scheme + way]
        axis.plot(values, [place] * len(values), "o", color=BLUE if scheme == "absolute" else VERMILION, alpha=0.7)
    axis.axvline(statistics.fmean(losses["none"]), color=GREY, linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(rows)), [f"{scheme}, {COMBINED[way]}" for scheme, way in rows])
    axis.set(
        title="From scratch: loss of masked words", xlabel="lower is better; a dot for each seed; dotted: no positions"
    )
    return figure


@styled  # ticks of logarithmic axes are made here
def as_png(figure: Figure) -> bytes:
    """The content of a PNG file."""
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue()


def small(picture: bytes) -> bytes:
    """A PNG of `WIDTH` pixels and as many colours as a drawing needs."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    written = io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return written.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, help="A page that `hf-posenc report` wrote.")
    parser.add_argument("figures", nargs="*", help="Which of its figures.")
    arguments = parser.parse_args()
    if arguments.page is None:
        drawn = {
            "schemes.png": schemes(),
            "combine.png": combinations("position_combine"),
            "every-layer.png": combinations("position_every_layer"),
        }
        chosen = {name: as_png(figure) for name, figure in drawn.items()}
    else:
        wanted = tuple(f"{figure}-" for figure in arguments.figures)
        made = pictures(arguments.page.read_text(encoding="utf-8"))
        chosen = {name: picture for name, picture in made.items() if name.startswith(wanted)}
    for name, picture in chosen.items():
        (FOLDER / name).write_bytes(small(picture))
        print(FOLDER / name)


if __name__ == "__main__":
    main()
