"""Writing a converted model: a folder that is whole, or none."""

import copy
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from ..export.onnx.exporting import export_model
from ..files import whole_folder
from ..modeling.models.configuration_posenc import PositionConfigMixin
from ..sentence import folders
from .checkpoints import Checkpoint, check_finite
from .report import REPORT, ConversionReport


if TYPE_CHECKING:
    from ..export.stock.folder import Exported

# What else of a folder goes along, beside its modules.
KEPT = (folders.MODULES, folders.SETTINGS, folders.TRANSFORMER_SETTINGS, "README.md", "LICENSE*", "NOTICE*")
CARD = "README.md"
AGREEMENT = "agreement with the original on held-out text"
ONNX = Path("onnx") / "model.onnx"


def checked_output(folder: Path) -> Path:
    """The folder to write, links followed.

    Raises:
        OSError: no folder can be made here: there is one that is not empty or cannot be replaced, or its place cannot be written to.
    """
    if folder.is_symlink() and not folder.exists():
        raise FileNotFoundError(
            f"{folder} is a link to {folder.readlink()}, which is not there: name the folder itself"
        )
    folder = folder.resolve()
    if folder == Path.cwd() or folder.is_mount():
        what = "the folder that you are in" if folder == Path.cwd() else "a mount point"
        raise OSError(f"{folder} is {what}, which cannot be replaced by a new one: name a folder in it")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there already, and not empty: name another folder, or remove it")
    place = folder.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        writable = os.access(place, os.W_OK)
    except OSError as error:
        raise OSError(f"{folder} cannot be made: {error}") from error
    if not writable:
        raise PermissionError(f"{place} cannot be written to: name another folder")
    return folder


def check_space(folder: Path, model: PreTrainedModel, distilled: bool) -> None:
    """Raise OSError unless there is space for a model and, while it is distilled, for its state: itself and two moments."""
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    needed, free = size * (4 if distilled else 1), shutil.disk_usage(folder.absolute().parent).free
    if free < needed:
        raise OSError(
            f"the disk of {folder} has {free / 1e6:.0f} MB left and {needed / 1e6:.0f} MB are needed: make space, or name a folder "
            "on another disk"
        )


def kept_files(source: Path | None) -> dict[str, Path]:
    """What else of a checkpoint's folder goes along, modules of sentence-transformers among it, by path in the folder.

    Raises:
        OSError: a module's files are missing.
        ValueError: a link leads out of the folder, a module could not be loaded from there, or there is a card that cannot be read.
    """
    from ..hub.card_files import check_card  # only here: it brings the template engine along

    if source is None:
        return {}
    kept = {file.name: file for pattern in KEPT for file in source.glob(pattern) if file.is_file()}
    folders.check_inside(source, kept.values())
    check_card(source / CARD)
    return kept | folders.module_files(source)


def write_converted(
    folder: Path,
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    report: ConversionReport,
    onnx: bool = False,
    exported: "Exported | None" = None,
) -> None:
    """Write a converted model with all that belongs to it, whole or not at all.

    Tokenizer, and of a folder of sentence-transformers its modules, settings and card; the lengths that they cut at follow.
    The report is `conversion.json`, and part of the card.

    Args:
        onnx: write `onnx/model.onnx` too.
        exported: the model as an architecture of Transformers, which is then what is written.

    Raises:
        OSError: it cannot be written.
        ValueError: a module of sentence-transformers could not be loaded from there, or the model has numbers that are not finite.
    """
    check_finite(model, f"the converted model, in {model.dtype},")
    lengthened = report.max_length > report.trained_length
    with whole_folder(folder) as place:
        copy_files(kept_files(checkpoint.folder), place)
        report.save(place)
        if lengthened:
            cut_at(report.max_length, checkpoint.tokenizer, place)
        if exported is not None:
            agreement = f"\n## Conversion\n\nOf {report.original}. Agreement with it on held-out text, all of which is in `{REPORT}`:\n\n"
            card = exported.card(report.original, folders.model_class(place), further=f"{agreement}{report.table()}\n")
            exported.save(place, checkpoint.tokenizer, card)
        else:
            save_model(model, place)
            checkpoint.tokenizer.save_pretrained(place)
            _write_card(place, model, report)
        if onnx:
            export_onnx(model, place / ONNX)


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
    folders.cut_at(length, folder)


def _write_card(folder: Path, model: PreTrainedModel, report: ConversionReport) -> None:
    """The card: of a variant the whole of it, of a stock model what the conversion has to say."""
    from huggingface_hub import ModelCard, ModelCardData  # only here: they bring the template engine along

    from ..hub.card_files import END, begin_mark, save_card
    from ..hub.cards import Measurement, Results, make_card

    if isinstance(model.config, PositionConfigMixin):
        results = Results(
            data=report.settings.get("text"),
            training={name: value for name, value in report.settings.items() if name != "text" and value is not None},
            versions=report.versions,
            limits=[*([report.conclusion] if report.conclusion else []), report.said_not_measured()],
            results=[
                Measurement("variant", report.metrics(row), AGREEMENT, length=row["length"]) for row in report.final()
            ],
        )
        model.config.architectures = [type(model).__name__]  # as saving does
        card = make_card(model.config, results, report.name, sentence_class=folders.model_class(folder))
    else:
        data = ModelCardData(tags=["hf_posenc"])
        text = (
            f"## Longer than it was\n\nThe table of positions of {report.original}, trained up to {report.trained_length} tokens, "
            f"was lengthened to {report.max_length} by hf_posenc, which is not needed to load it. Agreement with the original on "
            f"held-out text, all of which is in `{REPORT}`:\n\n{report.table()}"
        )
        card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{begin_mark(data.to_dict())}\n{text}\n{END}\n")
    save_card(card, folder / CARD)


def export_onnx(model: PreTrainedModel, file: Path) -> None:
    """Write the base model, in float32, as `hf-posenc export onnx` does."""
    base = model.base_model
    if base.dtype != torch.float32:
        base = copy.deepcopy(base).float()
    file.parent.mkdir(parents=True, exist_ok=True)
    export_model(base, file)
