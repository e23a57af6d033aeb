"""Settings of the tests of examples."""

from scripts import (  # noqa: F401
    data_sets_are_cached_in_a_temporary_folder,
    mistake,
    mistake_in_training,
    run_main,
    transformers_as_talkative_as_before,
)
