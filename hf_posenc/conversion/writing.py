"""Writing a converted model: a folder that is whole, or none."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from ..export.onnx.exporting import export_model
from ..files import whole_folder
from ..hub.folders import CARD, REPORT, copy_files, cut_at, kept_files, save_model
from ..inspection import sentence_folders
from ..modeling.models.configuration_posenc import PositionConfigMixin
from .checkpoints import Checkpoint, check_finite, stored_length
from .report import ConversionReport


if TYPE_CHECKING:
    from ..export.stock.folder import Exported

AGREEMENT = "agreement with the original on held-out text"
ONNX = Path("onnx") / "model.onnx"


def write_converted(
    folder: Path,
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    report: ConversionReport,
    onnx: bool = False,
    exported: "Exported | None" = None,
) -> None:
    """Write a converted model with all that belongs to it, atomically.

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
    # The training length that was given may be beyond the length that texts were cut at.
    lengthened = report.max_length > min(report.trained_length, stored_length(checkpoint.folder, checkpoint.tokenizer))
    with whole_folder(folder) as place:
        copy_files(kept_files(checkpoint.folder), place)
        report.save(place)
        if lengthened:
            cut_at(report.max_length, checkpoint.tokenizer, place)
        if exported is not None:
            agreement = f"\n## Conversion\n\nOf {report.original}. Agreement with it on held-out text, all of which is in `{REPORT}`:\n\n"
            card = exported.card(
                report.original, sentence_folders.model_class(place), further=f"{agreement}{report.table()}\n"
            )
            exported.save(place, checkpoint.tokenizer, card)
        else:
            save_model(model, place)
            checkpoint.tokenizer.save_pretrained(place)
            _write_card(place, model, report)
        if onnx:
            export_onnx(model, place / ONNX)


def _write_card(folder: Path, model: PreTrainedModel, report: ConversionReport) -> None:
    """The card: complete for a model with a position scheme; for an original one, what the conversion adds."""
    from ..hub.card_files import save_card  # only here: they bring the template engine along
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
        card = make_card(model.config, results, report.name, sentence_class=sentence_folders.model_class(folder))
        save_card(card, folder / CARD)
    else:
        add_to_card(
            folder,
            f"## Longer than it was\n\nThe position embedding matrix of {report.original}, trained up to {report.trained_length} tokens, "
            f"was lengthened to {report.max_length} by hf_posenc, which is not needed to load it. "
            f"{_agreement(report)}",
        )


def add_to_card(folder: Path, text: str) -> None:
    """Add a section to the card of a folder, or write a card of it."""
    from huggingface_hub import ModelCard, ModelCardData  # only here: they bring the template engine along

    from ..hub.card_files import END, begin_mark, save_card

    data = ModelCardData(tags=["hf_posenc"])
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{begin_mark(data.to_dict())}\n{text}\n{END}\n")
    save_card(card, folder / CARD)


def _agreement(report: ConversionReport) -> str:
    if not report.rows:
        return report.said_not_measured()
    return f"Agreement with the original on held-out text, all of which is in `{REPORT}`:\n\n{report.table()}"


def export_onnx(model: PreTrainedModel, file: Path) -> None:
    """Write the base model, in float32, as `hf-posenc export onnx` does."""
    base = model.base_model
    if base.dtype != torch.float32:
        base = copy.deepcopy(base).float()
    file.parent.mkdir(parents=True, exist_ok=True)
    export_model(base, file)
