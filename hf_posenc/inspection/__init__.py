"""What a saved model is, told from its config and from the names in its weights.

`configs` reads configs and looks schemes, flags and limits up in them, `sizes` refuses what no model can have, `weights` loads
weights that are whole, and `descriptions` says it to people.
"""

from .configs import (
    NO_LENGTH,
    PIPELINE_TAGS,
    adapter_base,
    auto_class,
    check_exists,
    check_named,
    checked_config,
    flag_rows,
    flags_by_name,
    flags_of,
    load_config,
    longest_sequence,
    name_as_weights,
    parameter_shapes,
    per_layer,
    pipeline_tag,
    read_config,
    read_entries,
    schemes_of,
    unpad_row,
)
from .sizes import check_sizes, config_of


__all__ = [
    "NO_LENGTH",
    "PIPELINE_TAGS",
    "adapter_base",
    "auto_class",
    "check_exists",
    "check_named",
    "check_sizes",
    "checked_config",
    "config_of",
    "flag_rows",
    "flags_by_name",
    "flags_of",
    "load_config",
    "longest_sequence",
    "name_as_weights",
    "parameter_shapes",
    "per_layer",
    "pipeline_tag",
    "read_config",
    "read_entries",
    "schemes_of",
    "unpad_row",
]
