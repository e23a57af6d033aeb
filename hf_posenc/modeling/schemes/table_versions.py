"""How the table of `deberta` with buckets is read: as in models of before, or as in new ones."""

import torch
from torch import nn

from .parameters import Initial, PositionTable


# Entry of a config that says so, and what new ones have. What was saved before there was such an entry has version 1.
TABLE_VERSION = "position_table_version"
NEWEST_TABLE = 2


class DistanceTable(PositionTable):
    """A table whose state dict says, in its metadata, how its rows are read.

    Files of tensors keep no metadata: what they hold is read as the model that it is loaded into reads its own.

    Attributes:
        version: how; see `Deberta`.
        reached: the first and the last row that version 1 reads.
    """

    def __init__(self, rows: int, width: int, initial: Initial, version: int, reached: tuple[int, int]):
        super().__init__(rows, width, initial)
        self.version, self.reached = version, reached

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][TABLE_VERSION] = self.version

    def _load_from_state_dict(
        self, state_dict, prefix: str, local_metadata, strict, missing, unexpected, errors
    ) -> None:
        name, version = f"{prefix}weight", local_metadata.get(TABLE_VERSION, self.version)
        if name in state_dict and version < self.version:
            # Rows that were not read get what was read in their place.
            rows = torch.arange(self.num_embeddings, device=state_dict[name].device).clamp(*self.reached)
            state_dict[name] = state_dict[name][rows]
        if name in state_dict and version > self.version:
            errors.append(
                f"{name} is of a model with {TABLE_VERSION}={version}, and this one, with {TABLE_VERSION}={self.version}, reads the "
                "rows of great distances in another way: load it into a model from the config that belongs to it"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)


def read_table_as(model: nn.Module, version: int) -> None:
    """Read the table of a model, if it has one with buckets, as the model does that its weights are from.

    Args:
        model: a base model with positions, or a head of one.
        version: as `position_table_version` has it.
    """
    if version == (model.config.position_table_version or NEWEST_TABLE):
        return
    model.config.position_table_version = version
    for module in model.modules():
        if isinstance(module, DistanceTable):
            module.version = version
        for scheme in vars(module).get("position_schemes", ()):
            if getattr(scheme, "table_version", None) is not None:
                scheme.table_version = version
