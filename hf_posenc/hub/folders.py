"""Folders of checkpoints: where one is, where another may be written, and what goes along to it."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import PreTrainedModel

from ..inspection import check_exists, sentence_folders


SENTENCE_FILES = (sentence_folders.MODULES, sentence_folders.SETTINGS, sentence_folders.TRANSFORMER_SETTINGS)
# What else of a folder is pushed, in addition to its modules.
LICENSES = ("LICENSE*", "NOTICE*")
KEPT = (*SENTENCE_FILES, "README.md", *LICENSES)
CARD = "README.md"
REPORT = "conversion.json"


def folder_of(name: str, revision: str | None = None) -> Path:
    """A folder, or that which a repository on the Hub is downloaded to, without weights in other formats."""
    name = os.path.expanduser(name)
    check_exists(name, revision)
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists():
        raise NotADirectoryError(f"{name} is a file: name the folder that it is in")
    kinds = ["*.safetensors", "*.json", "*.txt", "*.model", "*.md", "*.jinja"]
    return Path(snapshot_download(name, revision=revision, allow_patterns=kinds))


def checked_output(folder: Path) -> Path:
    """The folder to write, links followed, with the home folder for "~".

    Raises:
        OSError: the folder exists and is not empty, it cannot be replaced, or its parent cannot be written to.
    """
    folder = folder.expanduser()
    if folder.is_symlink() and not folder.exists():
        raise FileNotFoundError(
            f"{folder} is a link to {folder.readlink()}, which does not exist: name the folder itself"
        )
    folder = folder.resolve()
    if folder == Path.cwd() or folder.is_mount():
        what = "the current folder" if folder == Path.cwd() else "a mount point"
        raise OSError(f"{folder} is {what}, which cannot be replaced: name a folder in it")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: name another folder, or remove it")
    place = folder.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        writable = os.access(place, os.W_OK)
    except OSError as error:
        raise OSError(f"{folder} cannot be created: {error}") from error
    if not writable:
        raise PermissionError(f"{place} cannot be written to: name another folder")
    return folder


def check_space(folder: Path, model: PreTrainedModel, distilled: bool) -> None:
    """Raise OSError unless there is space for a model and, while it is distilled, for its state: itself and two moments."""
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    needed, free = size * (4 if distilled else 1), shutil.disk_usage(folder.absolute().parent).free
    if free < needed:
        raise OSError(
            f"the disk of {folder} has {free / 1e6:.0f} MB free, and {needed / 1e6:.0f} MB are needed: free some space, or name a folder "
            "on another disk"
        )


def kept_files(source: Path | None) -> dict[str, Path]:
    """What else of a checkpoint's folder goes along, modules of sentence-transformers among it, by path in the folder.

    Raises:
        OSError: a module's files are missing.
        ValueError: a link leads out of the folder, a module could not be loaded from there, or there is a card that cannot be read.
    """
    from .card_files import check_card  # only here: it brings the template engine along

    if source is None:
        return {}
    kept = files_like(source, KEPT)
    check_card(source / CARD)
    return kept | sentence_folders.module_files(source)


def files_like(source: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """Files of a folder by their names. Raises ValueError for a link that leads out of it."""
    found = {file.name: file for pattern in patterns for file in source.glob(pattern) if file.is_file()}
    sentence_folders.check_inside(source, found.values())
    return found


def copy_files(files: dict[str, Path], folder: Path) -> None:
    """Copy files into a folder, by their paths there."""
    for name, file in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """`save_pretrained`; OSError for whatever keeps it from writing."""
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # which is no OSError, whatever its cause
        raise OSError(f"the weights cannot be written: {error}") from error


def cut_at(length: int, tokenizer: Any, folder: Path) -> None:
    """Texts are cut at so many tokens: by the tokenizer, and by sentence-transformers where the folder has its settings."""
    tokenizer.model_max_length = length
    sentence_folders.cut_at(length, folder)
