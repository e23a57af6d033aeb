"""What positions do inside a model, in numbers and pictures; one file a question.

Each function returns a record (`to_dict` makes it JSON) and has a `plot_...` that draws it and a `describe_...` that says in a
sentence what it shows. [`FIGURES`] lists them all. Models are what [`study`] takes: a folder, a name on the Hub, a model.
Figures need the extra `analysis`.
"""

from . import style


style.check_dependencies()

from .access import Subject, of_scheme, study  # noqa: E402
from .encoding import Encoding, describe_encoding, encoding, plot_encoding  # noqa: E402
from .files import drawn, plot_to_file  # noqa: E402
from .order import (  # noqa: E402
    OrderSensitivity,
    PhaseShift,
    describe_order_sensitivity,
    describe_phase_shift,
    order_sensitivity,
    phase_shift,
    plot_order_sensitivity,
    plot_phase_shift,
)
from .probes import Probes, describe_probes, plot_probes, probes  # noqa: E402
from .records import MODEL, SCHEME, TEXT, Figure, Record  # noqa: E402
from .report import Report, check_page, read_texts, report  # noqa: E402


# Every figure, by the name that it is asked for by; the order is that of the report.
FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure("encoding", "What does the encoding look like?", SCHEME, encoding, plot_encoding, describe_encoding),
        Figure("probes", "Does the position survive the layers?", TEXT, probes, plot_probes, describe_probes),
        Figure(
            "order",
            "Does the order of words matter?",
            TEXT,
            order_sensitivity,
            plot_order_sensitivity,
            describe_order_sensitivity,
        ),
        Figure(
            "phase_shift",
            "Does it matter where a text begins?",
            TEXT,
            phase_shift,
            plot_phase_shift,
            describe_phase_shift,
        ),
    )
}


def figure_named(name: str) -> Figure:
    """A figure by its name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in FIGURES:
        raise ValueError(f"there is no figure {name!r}; there are {', '.join(FIGURES)}")
    return FIGURES[name]


__all__ = [
    "FIGURES",
    "MODEL",
    "SCHEME",
    "TEXT",
    "Encoding",
    "Figure",
    "OrderSensitivity",
    "PhaseShift",
    "Probes",
    "Record",
    "Report",
    "Subject",
    "check_page",
    "describe_encoding",
    "describe_order_sensitivity",
    "describe_phase_shift",
    "describe_probes",
    "drawn",
    "encoding",
    "figure_named",
    "of_scheme",
    "order_sensitivity",
    "phase_shift",
    "plot_encoding",
    "plot_order_sensitivity",
    "plot_phase_shift",
    "plot_probes",
    "plot_to_file",
    "probes",
    "read_texts",
    "report",
    "study",
]
