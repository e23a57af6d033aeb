"""What a saved model is, from its config and the parameter names in its weights.

`configs` reads schemes, config options and limits from configs, `sizes` refuses impossible values, `weights` loads
complete weights, `descriptions` describes models in words and tables, and `sentence_folders` knows what sentence-transformers saves.
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
