"""Training: a separate learning rate for position parameters, and the hooks of any `Trainer`.

`trainer` has `PositionTrainer`, `learning_rates` its parts, `collators` batches with random positions, and `token_batches` batches by a limit of
tokens.
"""

from typing import TYPE_CHECKING, Any

from .collators import RandomizedPositions
from .learning_rates import (
    check_rate,
    frequencies,
    move_to_own_groups,
    tables_and_biases,
    warn_of_tables_that_stay,
)
from .token_batches import TokenBatchSampler


if TYPE_CHECKING:
    from .trainer import PositionTrainer


__all__ = [
    "PositionTrainer",
    "RandomizedPositions",
    "TokenBatchSampler",
    "check_rate",
    "frequencies",
    "move_to_own_groups",
    "tables_and_biases",
    "warn_of_tables_that_stay",
]


def __getattr__(name: str) -> Any:
    """Imported on first use: the Trainer takes seconds to import."""
    if name != "PositionTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .trainer import PositionTrainer

    return PositionTrainer
