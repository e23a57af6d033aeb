"""What positions do inside a model, in numbers and figures. There is one file for each question.

Each function returns a record (`to_dict` makes it JSON). A `plot_...` function draws it, and a `describe_...` function says in a
sentence what it shows. [`FIGURES`] lists them all. A model is what [`study`] takes: a folder, a name on the Hub, or a model.
Install the extra `analysis` for the dependencies.
"""

from .access import LayerScores, Observation, Subject, of_scheme, study
from .addressing import Addressing, addressing, addressing_of_all
from .dimensions import (
    MovingDimensions,
    WordsBesidePositions,
    describe_moving_dimensions,
    moving_dimensions,
    plot_moving_dimensions,
    words_beside_positions,
)
from .distance import ScoreByDistance, describe_score_by_distance, plot_score_by_distance, score_by_distance
from .encoding import (
    ClockHands,
    EncodingMaps,
    PositionSimilarity,
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
from .figures import FIGURES, figure_named
from .files import drawn, plot_to_file
from .order import (
    OrderSensitivity,
    PhaseShift,
    describe_order_sensitivity,
    describe_phase_shift,
    order_sensitivity,
    phase_shift,
    plot_order_sensitivity,
    plot_phase_shift,
)
from .probes import Probes, describe_probes, plot_probes, probes
from .properties import (
    AttentionProperties,
    PositionTerm,
    Properties,
    TableProperties,
    attention_properties,
    describe_attention_properties,
    describe_position_term,
    describe_table_properties,
    plot_attention_properties,
    plot_position_term,
    plot_table_properties,
    position_term,
    properties_of,
    table_properties,
    toeplitz_share,
)
from .records import MODEL, SCHEME, TEXT, Figure, Record
from .report import Report, check_page, read_texts, report
from .spaces import SharedSpace, describe_shared_space, plot_shared_space, shared_space, shared_space_by_layer
from .survival import Survival, survival
from .terms import ScoreTerms, describe_score_terms, plot_score_terms, score_terms


__all__ = [
    "FIGURES",
    "MODEL",
    "SCHEME",
    "TEXT",
    "Addressing",
    "AttentionProperties",
    "ClockHands",
    "EncodingMaps",
    "Figure",
    "LayerScores",
    "MovingDimensions",
    "Observation",
    "OrderSensitivity",
    "PhaseShift",
    "PositionSimilarity",
    "PositionTerm",
    "Probes",
    "Properties",
    "Record",
    "Report",
    "ScoreByDistance",
    "ScoreTerms",
    "SharedSpace",
    "Subject",
    "Survival",
    "TableProperties",
    "WordsBesidePositions",
    "addressing",
    "addressing_of_all",
    "attention_properties",
    "check_page",
    "clock_hands",
    "describe_attention_properties",
    "describe_clock_hands",
    "describe_encoding_maps",
    "describe_moving_dimensions",
    "describe_order_sensitivity",
    "describe_phase_shift",
    "describe_position_similarity",
    "describe_position_term",
    "describe_probes",
    "describe_score_by_distance",
    "describe_score_terms",
    "describe_shared_space",
    "describe_table_properties",
    "drawn",
    "encoding_maps",
    "figure_named",
    "moving_dimensions",
    "of_scheme",
    "order_sensitivity",
    "phase_shift",
    "plot_attention_properties",
    "plot_clock_hands",
    "plot_encoding_maps",
    "plot_moving_dimensions",
    "plot_order_sensitivity",
    "plot_phase_shift",
    "plot_position_similarity",
    "plot_position_term",
    "plot_probes",
    "plot_score_by_distance",
    "plot_score_terms",
    "plot_shared_space",
    "plot_table_properties",
    "plot_to_file",
    "position_similarity",
    "position_term",
    "probes",
    "properties_of",
    "read_texts",
    "report",
    "score_by_distance",
    "score_terms",
    "shared_space",
    "shared_space_by_layer",
    "study",
    "survival",
    "table_properties",
    "toeplitz_share",
    "words_beside_positions",
]
