"""The table of all figures: name, question, requirement, and the functions that measure, draw and describe."""

from .dimensions import describe_moving_dimensions, moving_dimensions, plot_moving_dimensions
from .distance import describe_score_by_distance, plot_score_by_distance, score_by_distance
from .encoding import (
    clock_hands,
    describe_clock_hands,
    describe_encoding_maps,
    describe_position_similarity,
    encoding_maps,
    plot_clock_hands,
    plot_encoding_maps,
    plot_position_similarity,
    position_similarity,
)
from .order import (
    describe_order_sensitivity,
    describe_phase_shift,
    order_sensitivity,
    phase_shift,
    plot_order_sensitivity,
    plot_phase_shift,
)
from .probes import describe_probes, plot_probes, probes
from .properties import (
    attention_properties,
    describe_attention_properties,
    describe_position_term,
    describe_table_properties,
    plot_attention_properties,
    plot_position_term,
    plot_table_properties,
    position_term,
    table_properties,
)
from .records import MODEL, SCHEME, TEXT, Figure
from .spaces import describe_shared_space, plot_shared_space, shared_space
from .terms import describe_score_terms, plot_score_terms, score_terms


FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure(
            "encoding",
            "What does the encoding look like?",
            SCHEME,
            encoding_maps,
            plot_encoding_maps,
            describe_encoding_maps,
        ),
        Figure(
            "clock-hands",
            "How do its sines and cosines turn?",
            SCHEME,
            clock_hands,
            plot_clock_hands,
            describe_clock_hands,
        ),
        Figure(
            "similarity",
            "How similar are two positions?",
            SCHEME,
            position_similarity,
            plot_position_similarity,
            describe_position_similarity,
        ),
        Figure(
            "distance",
            "How does the attention score depend on the distance?",
            SCHEME,
            score_by_distance,
            plot_score_by_distance,
            describe_score_by_distance,
        ),
        Figure(
            "dimensions",
            "How many dimensions change with the position?",
            SCHEME,
            moving_dimensions,
            plot_moving_dimensions,
            describe_moving_dimensions,
        ),
        Figure(
            "spaces",
            "Do token embeddings and positions share a space?",
            MODEL,
            shared_space,
            plot_shared_space,
            describe_shared_space,
        ),
        Figure(
            "terms", "Which attention heads use positions?", TEXT, score_terms, plot_score_terms, describe_score_terms
        ),
        Figure("probes", "Is the position still known in deeper layers?", TEXT, probes, plot_probes, describe_probes),
        Figure(
            "order",
            "Does the order of words matter?",
            TEXT,
            order_sensitivity,
            plot_order_sensitivity,
            describe_order_sensitivity,
        ),
        Figure(
            "phase-shift",
            "Does it matter where a text begins?",
            TEXT,
            phase_shift,
            plot_phase_shift,
            describe_phase_shift,
        ),
        Figure(
            "table-properties",
            "Are its vectors monotone and translation-invariant?",
            SCHEME,
            table_properties,
            plot_table_properties,
            describe_table_properties,
        ),
        Figure(
            "attention-properties",
            "Is its attention monotone, translation-invariant and symmetric?",
            MODEL,
            attention_properties,
            plot_attention_properties,
            describe_attention_properties,
        ),
        Figure(
            "position-term",
            "How much of what positions add depends on the distance alone?",
            MODEL,
            position_term,
            plot_position_term,
            describe_position_term,
        ),
    )
}
"""All figures by their names, in the order of the report."""


def figure_named(name: str) -> Figure:
    """Look up a figure in [`FIGURES`] by its name, with hyphens or underscores.

    Raises:
        ValueError: there is no figure of this name.
    """
    name = name.replace("_", "-")
    if name not in FIGURES:
        raise ValueError(f"there is no figure {name!r}; the figures are {', '.join(FIGURES)}")
    return FIGURES[name]
