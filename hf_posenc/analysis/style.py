"""Colours and sizes of all figures.

Categories have Okabe and Ito's colours (2008), which people with any colour vision tell apart; ordered ones (heads, layers)
shades of viridis; maps viridis where values have an order, and blue to red through white where zero is the middle.
"""

import numpy as np


try:
    from matplotlib import colormaps, rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(
        'hf_posenc.analysis needs matplotlib: pip install -c constraints.txt -e ".[analysis]"'
    ) from error

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


# Decorates what draws: letters and lines take their sizes when they are made.
styled = rc_context(SETTINGS)


def sheet(height: float) -> Figure:
    """A new figure of a height in inches; no window opens, and pyplot does not know of it."""
    return Figure(figsize=(WIDTH, height), layout="constrained", dpi=DPI)


def panels(rows: int = 1, columns: int = 1, height: float = PANEL_HEIGHT, **options) -> tuple[Figure, np.ndarray]:
    """A new figure and its axes, (rows, columns).

    Args:
        height: of a row, in inches.
        options: of matplotlib's `Figure.subplots`.
    """
    figure = sheet(height * rows)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def title(figure: Figure, text: str) -> None:
    """A title of the whole figure, on the left as those of its panels."""
    figure.suptitle(text, fontsize=SETTINGS["axes.titlesize"], x=0.01, ha="left")


def shades(count: int) -> np.ndarray:
    """Colours (count, 4) of ordered things, from dark to light, without the yellow that white paper swallows."""
    return colormaps[SEQUENTIAL](np.linspace(0.0, 0.88, count))


def whiskers(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Lengths (2, number) of whiskers from values to the ends of their intervals, as matplotlib's error bars take them."""
    return np.stack([values - low, high - values]).clip(min=0)


def heatmap(
    axes: Axes,
    values: np.ndarray,
    diverging: bool = True,
    label: str | None = None,
    extend: str = "neither",
    **options,
):
    """An image of a matrix with its colour bar; a diverging one has white at zero, and colours for all but a thousandth.

    Args:
        values: (rows, columns).
        label: of the colour bar.
        extend: on which side of the bar entries lie beyond it, as matplotlib has it.
        options: of matplotlib's `imshow`.
    """
    if diverging and "vmin" not in options:
        # A few entries far out would leave the rest white.
        magnitudes = np.abs(values)
        limit = float(np.quantile(magnitudes, 0.999)) or 1.0
        options |= {"vmin": -limit, "vmax": limit}
        extend = "both" if magnitudes.max() > limit else "neither"
    settings = {"aspect": "auto", "interpolation": "nearest", "cmap": DIVERGING if diverging else SEQUENTIAL}
    image = axes.imshow(values, **settings | options)
    axes.figure.colorbar(image, ax=axes, label=label, fraction=0.046, pad=0.02, extend=extend)
    return image
