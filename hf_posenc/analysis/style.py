"""Colours and sizes of all figures.

Categories have Okabe and Ito's colours (2008), which people with any colour vision tell apart; ordered ones (heads, layers)
shades of viridis; maps viridis where values have an order, and blue to red through white where zero is the middle.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#7F7F7F"
CATEGORIES = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY, YELLOW)
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"

# Inches. A README is about 8.3 inches wide at 100 dots an inch, and letters of 10 points stay readable there.
WIDTH, PANEL_HEIGHT, DPI = 8.3, 3.3, 150
SETTINGS = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "hf_posenc",
}


def check_dependencies() -> None:
    """Raise ImportError where what this package draws and computes with is missing."""
    missing = [name for name in ("matplotlib", "scipy") if find_spec(name) is None]
    if missing:
        raise ImportError(
            f'hf_posenc.analysis needs {" and ".join(missing)}: pip install -c constraints.txt -e ".[analysis]"'
        )


def panels(
    rows: int = 1, columns: int = 1, height: float = PANEL_HEIGHT, width: float = WIDTH, **options
) -> "tuple[Figure, np.ndarray]":
    """A new figure and its axes, (rows, columns); no window opens, and pyplot does not know of it.

    Args:
        height: of a row, in inches.
        width: of the whole, in inches.
        options: of matplotlib's `Figure.subplots`.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        figure = Figure(figsize=(width, height * rows), layout="constrained", dpi=DPI)
        return figure, figure.subplots(rows, columns, squeeze=False, **options)


def shades(count: int) -> np.ndarray:
    """Colours (count, 4) of ordered things, from dark to light, without the yellow that white paper swallows."""
    from matplotlib import colormaps

    return colormaps[SEQUENTIAL](np.linspace(0.0, 0.88, count))


def heatmap(axes: "Axes", values: np.ndarray, diverging: bool = True, label: str | None = None, **options):
    """An image of a matrix with its colour bar; a diverging one has white at zero.

    Args:
        values: (rows, columns).
        label: of the colour bar.
        options: of matplotlib's `imshow`.
    """
    if diverging and "vmin" not in options:
        finite = np.abs(values[np.isfinite(values)])
        limit = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
        options |= {"vmin": -limit, "vmax": limit}
    settings = {"aspect": "auto", "interpolation": "nearest", "cmap": DIVERGING if diverging else SEQUENTIAL}
    image = axes.imshow(values, **settings | options)
    axes.figure.colorbar(image, ax=axes, label=label, fraction=0.046, pad=0.02)
    return image
