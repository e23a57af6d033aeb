"""Make the pictures of README and docs, small.

python research/pictures.py                 # combine.png, every-layer.png, from research/comparison/runs.jsonl; and those of formulas

hf-posenc report MiniLM=path/to/all-MiniLM-L6-v2 --out minilm.html
python research/pictures.py minilm.html spaces terms probes order phase-shift   # those of a report
"""

import argparse
import base64
import io
import re
import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from hf_posenc.analysis import EncodingMaps, clock_hands, plot_clock_hands, plot_encoding_maps
from hf_posenc.analysis.encoding import sinusoid_map
from hf_posenc.analysis.style import BLUE, GREY, VERMILION, panels, styled
from hf_posenc.files import write_whole


FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
sys.path.insert(0, str(Path(__file__).parent / "comparison"))

from comparison import COMBINED, read_part  # noqa: E402


WIDTH, COLOURS = 900, 128
SINUSOIDS = "sinusoidal"
MAPS = ("encoding-sinusoidal.png",)
SECTION = re.compile(r'<section id="([^"]+)".*?</section>', re.DOTALL)
IMAGE = re.compile(r'<img src="data:image/png;base64,([^"]+)" alt="([^".]+)\.')


def pictures(page: str) -> dict[str, bytes]:
    """The images of a page as PNG files, by names of figure and model: "order-minilm.png"."""
    return {
        f"{section[1]}-{model.lower().replace(' ', '-')}.png": base64.b64decode(data)
        for section in SECTION.finditer(page)
        for data, model in IMAGE.findall(section[0])
    }


# The parts of comparison.py -> what ranks them there, and the tokens of their training examples.
PARTS = {"scratch": ("masked_loss", "32"), "punctuation": ("f1", "64")}


def at_training_length(part: str) -> dict[str, list[float]]:
    """What the seeds of each scheme reached in a part of the comparison."""
    metric, length = PARTS[part]
    return {scheme: [run["metrics"][length][metric] for run in runs] for scheme, runs in read_part(part).items()}


@styled
def combinations(flag: str) -> Figure:
    """Quality from scratch and fine-tuned with each value of a flag, each seed as a dot; the line is the mean without positions."""
    ways = [way for way in COMBINED if not way or flag in way]
    rows = [(scheme, way) for scheme in ("sinusoidal", "absolute") for way in reversed(ways)]
    figure, [axes] = panels(columns=2, height=0.9 + 0.28 * len(rows))
    titles = {"scratch": "From scratch: loss of masked words", "punctuation": "Fine-tuned: F1 of punctuation"}
    for axis, (part, title), better in zip(axes, titles.items(), ("lower", "higher")):
        scores = at_training_length(part)
        for place, (scheme, way) in enumerate(rows):
            values = scores[scheme + way]
            colour = BLUE if scheme == "absolute" else VERMILION
            axis.plot(values, [place] * len(values), "o", color=colour, alpha=0.7)
        axis.axvline(statistics.fmean(scores["none"]), color=GREY, linewidth=0.8, linestyle=":")
        axis.set_yticks(range(len(rows)), [f"{scheme}, {COMBINED[way]}" for scheme, way in rows])
        axis.set(title=title, xlabel=f"{better} is better")
    axes[1].set_yticklabels([])
    return figure


@styled  # ticks of logarithmic axes are made here
def as_png(figure: Figure) -> bytes:
    """The content of a PNG file."""
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue()


def small(picture: bytes, method: Image.Quantize = Image.Quantize.MAXCOVERAGE) -> bytes:
    """A PNG of `WIDTH` pixels and as many colours as a drawing needs; a map's colours change by small steps, which `MEDIANCUT` keeps."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    written = io.BytesIO()
    image.quantize(COLOURS, method, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return written.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, help="A page that `hf-posenc report` wrote.")
    parser.add_argument("figures", nargs="*", help="Which of its figures.")
    arguments = parser.parse_args()
    if arguments.page is None:
        drawn = {
            "combine.png": combinations("position_combine"),
            "every-layer.png": combinations("position_every_layer"),
            "clock-hands-sinusoidal.png": plot_clock_hands(clock_hands(SINUSOIDS), count=6),
            "encoding-sinusoidal.png": plot_encoding_maps(
                EncodingMaps(SINUSOIDS, SINUSOIDS, [sinusoid_map(layout="halves")])
            ),
        }
        chosen = {name: as_png(figure) for name, figure in drawn.items()}
    else:
        wanted = tuple(f"{figure}-" for figure in arguments.figures)
        made = pictures(arguments.page.read_text(encoding="utf-8"))
        chosen = {name: picture for name, picture in made.items() if name.startswith(wanted)}
    for name, picture in chosen.items():
        method = Image.Quantize.MEDIANCUT if name in MAPS else Image.Quantize.MAXCOVERAGE
        write_whole({FOLDER / name: small(picture, method)})
        print(FOLDER / name)


if __name__ == "__main__":
    main()
