"""Settings of the tests of studies, which are scripts as the examples are."""

from scripts import (  # noqa: F401
    data_sets_are_cached_in_a_temporary_folder,
    mistake,
    run_main,
    transformers_as_talkative_as_before,
)
