"""Which checkpoint folders of a `Trainer` are whole: a process that is killed leaves its last one half written."""

import json
import logging
import re
import shutil
import struct
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile


logger = logging.getLogger(__name__)

STATE = "trainer_state.json"  # what Trainer writes last
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "pytorch_model_fsdp*")
# The parts that training cannot go on without, each under any of the names that it may have.
PARTS = (WEIGHTS, ("optimizer.pt", "optimizer.bin", "optimizer_*"), ("scheduler.pt",), (STATE,))


def newest_whole_checkpoint(folder: Path, processes: int = 1) -> Path | None:
    """The checkpoint of a run's folder to go on from, if any.

    Newer ones that are broken are renamed to `broken-checkpoint-...`, with a warning: `Trainer` would count them among
    those that `save_total_limit` keeps, and delete whole ones instead.
    """
    numbered = {int(path.name.rpartition("-")[2]): path for path in folder.glob("checkpoint-*") if is_checkpoint(path)}
    for _, checkpoint in sorted(numbered.items(), reverse=True):
        try:
            check_checkpoint(checkpoint, processes)
        except (OSError, ValueError) as error:
            aside = checkpoint.with_name(f"broken-{checkpoint.name}")
            logger.warning(f"warning: {checkpoint} is passed over, and renamed to {aside.name}: {error}")
            shutil.rmtree(aside, ignore_errors=True)
            checkpoint.rename(aside)
        else:
            return checkpoint
    return None


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a folder with the name of a checkpoint."""
    return path.is_dir() and re.fullmatch(r"checkpoint-\d+", path.name) is not None


def check_checkpoint(checkpoint: Path, processes: int = 1) -> None:
    """Check that training can go on from a checkpoint folder: every part is there, and as long as it was meant to be.

    Args:
        checkpoint: the folder.
        processes: number of processes that train; each has its own random numbers.

    Raises:
        OSError: a file cannot be read.
        ValueError: a part is missing or cut off, or that holds for the best checkpoint so far, which lies next to it.
    """
    random = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]
    for names in (*PARTS, *((name,) for name in random)):
        check_part(checkpoint, names)
    best = read_json(checkpoint / STATE).get("best_model_checkpoint")
    if best is not None and Path(best).name != checkpoint.name:
        check_part(checkpoint.with_name(Path(best).name), WEIGHTS)


def check_part(folder: Path, names: tuple[str, ...]) -> None:
    """Raise ValueError unless a folder has one of the files or folders, and what it has of them is whole."""
    found = [path for name in names for path in folder.glob(name)]
    if not found:
        raise ValueError(f"{folder.name}/{names[0]} is missing")
    for path in found:
        for file in path.rglob("*") if path.is_dir() else [path]:
            check_whole(file)


def check_whole(file: Path) -> None:
    """Raise ValueError if a file was cut off: by what JSON, safetensors and torch's zip files say of their own end."""
    match file.suffix:
        case ".json":
            content = read_json(file)
            if "weight_map" in content:
                for shard in sorted({*content["weight_map"].values()}):
                    check_part(file.parent, (shard,))
        case ".safetensors":
            check_safetensors(file)
        case ".pt" | ".pth" | ".bin":
            try:
                ZipFile(file).close()
            except BadZipFile as error:
                raise ValueError(f"{file.parent.name}/{file.name} is cut off") from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError if it is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file.parent.name}/{file.name} is cut off or no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file.parent.name}/{file.name} holds no JSON object")
    return content


def check_safetensors(file: Path) -> None:
    """Raise ValueError unless a safetensors file ends where its header says that the last tensor ends.

    The format: eight bytes with the header's length, the header as JSON with the offsets of every tensor, the tensors.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length)) if length < size else {}
        expected = 8 + length + max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
    except (struct.error, ValueError) as error:
        raise ValueError(f"{file.parent.name}/{file.name} is cut off within its header") from error
    if size != expected:
        raise ValueError(f"{file.parent.name}/{file.name} has {size:,} bytes instead of {expected:,}")
