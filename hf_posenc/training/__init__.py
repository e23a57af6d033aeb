"""Training: a learning rate of its own for position parameters, and what any Trainer does by hooks.

`trainer` has `PositionTrainer`, `learning_rates` what it is made of, and `hooks` those on Transformers' Trainer.
"""

from typing import TYPE_CHECKING, Any

from .learning_rates import (
    check_rate,
    frequencies,
    move_to_own_groups,
    tables_and_biases,
    warn_of_tables_that_stay,
)


if TYPE_CHECKING:
    from .trainer import PositionTrainer


__all__ = [
    "PositionTrainer",
    "check_rate",
    "frequencies",
    "move_to_own_groups",
    "tables_and_biases",
    "warn_of_tables_that_stay",
]


def __getattr__(name: str) -> Any:
    """The Trainer takes seconds to import, and `hooks` is imported with hf_posenc."""
    if name != "PositionTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .trainer import PositionTrainer

    return PositionTrainer
