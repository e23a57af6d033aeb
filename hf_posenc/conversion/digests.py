"""What a conversion starts from, told apart by content: names of files and shapes of tensors say too little."""

import hashlib
import json
from collections.abc import Iterable

import torch
from transformers import PreTrainedConfig

from .texts import Windows


# Entries of a config that say where it is from, and nothing of the model.
OF_NO_CONTENT = {"_name_or_path", "transformers_version"}


def of_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 of tensors, their names, types and shapes among them."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def of_config(config: PreTrainedConfig) -> str:
    """SHA-256 of what a config says of a model."""
    entries = {name: value for name, value in config.to_dict().items() if name not in OF_NO_CONTENT}
    return hashlib.sha256(json.dumps(entries, sort_keys=True, default=str).encode()).hexdigest()


def of_code(text: str) -> str:
    """SHA-256 of the source of a custom scheme."""
    return hashlib.sha256(text.encode()).hexdigest()


def of_text(windows: Windows) -> str:
    """SHA-256 of a text as the tokenizer reads it, where its lines begin and what frames it."""
    frame = torch.tensor([windows.first, windows.last, windows.padding])
    return of_tensors({"tokens": windows.tokens, "starts": windows.line_starts, "frame": frame}.items())
