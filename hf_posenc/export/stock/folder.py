"""Folders: a saved model with a position scheme, written as an architecture of Transformers, with all that belongs to it."""

import json
import shutil
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoTokenizer, PreTrainedModel

from ... import inspection
from ...conversion.checkpoints import folder_of
from ...conversion.report import REPORT
from ...conversion.writing import checked_output, kept_files, set_sentence_length
from ...files import whole_folder
from ...hub.card_files import END, begin_mark, save_card
from ...integrations.sentence_transformers import model_class, module_paths
from ...modeling.configuration_posenc import PositionConfigMixin
from ...registry import saved_class
from .architectures import Architecture
from .making import NO_LENGTH, architecture_of, check_head, check_padding, head_of, length_of, to_stock, types_differ
from .proof import Agreement, check_agreement


CARD, RESULTS = "README.md", "results.json"


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    max_length: int | None = None,
    single_text: bool = False,
    revision: str | None = None,
) -> str:
    """Write a saved model with a position scheme as an architecture of Transformers, which loads without hf_posenc and custom code.

    The folder is complete: weights, config, tokenizer, the modules of sentence-transformers, card and reports. It is written as a whole or not
    at all, and only once both models gave the same outputs on padded batches of several lengths.

    Args:
        checkpoint: a folder or a name on the Hub.
        out: the folder to write, new or empty.
        max_length, single_text: as for [`to_stock`].
        revision: branch, tag or commit on the Hub.

    Returns:
        What was written, and how far the two models agree, in a sentence.

    Raises:
        OSError: something is missing, or cannot be written.
        ValueError: no architecture of Transformers computes the model; says why, and what would fit. Nearly all of that is told before weights
            are read.
    """
    out = checked_output(Path(out))
    folder = folder_of(str(checkpoint), revision)
    config = inspection.load_config(str(folder))
    if not isinstance(config, PositionConfigMixin):
        raise ValueError(f"{checkpoint} is a {config.model_type} model of Transformers already: it needs no export")
    architecture, cls = architecture_of(config), saved_class(config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    files = kept_files(folder)
    if architecture is not None:
        head = head_of(cls, config)
        check_head(architecture, cls, head, config)
        check_padding(architecture, tokenizer)
        _check_pooling(architecture, folder)
        length_of(architecture, max_length, tokenizer)
    model = cls.from_pretrained(folder)
    stock = to_stock(model, max_length=max_length, single_text=single_text, tokenizer=tokenizer)
    agreement = _agreement(model, stock, architecture, tokenizer, max_length)
    if architecture is not None and not architecture.has_types:
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
    write(out, folder, stock, tokenizer, agreement, files, max_length, name=str(checkpoint))
    return f"wrote {out}: {config.position_scheme} as {stock.config.model_type} ({type(stock).__name__}); {agreement}"


def write(
    out: Path,
    source: Path | None,
    stock: PreTrainedModel,
    tokenizer: Any,
    agreement: Agreement,
    files: dict[str, Path],
    max_length: int | None,
    name: str,
) -> None:
    """Write the folder of an exported model, whole or not at all.

    Args:
        source: the folder of the model that it was.
        files: what else of that goes along, by path in the folder.
        name: what the model was called.

    Raises:
        OSError: it cannot be written.
    """
    with whole_folder(out) as place:
        for path, file in files.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place / path)
        for path in (REPORT, RESULTS):
            if source is not None and (source / path).is_file():
                shutil.copyfile(source / path, place / path)
        stock.save_pretrained(place)
        if max_length is not None:
            tokenizer.model_max_length = max_length
            set_sentence_length(place, max_length)
        tokenizer.save_pretrained(place)
        save_card(card(stock, agreement, name, model_class(place)), place / CARD)


def card(stock: PreTrainedModel, agreement: Agreement, name: str, sentence_class: str | None) -> ModelCard:
    """What a card has to say of an exported model; what others wrote into the source's own stays."""
    head = type(stock).__name__
    tag = next((tag for end, tag in inspection.PIPELINE_TAGS.items() if head.endswith(end)), None)
    library = "transformers" if sentence_class is None else "sentence-transformers"
    data = ModelCardData(
        library_name=library,
        pipeline_tag="sentence-similarity" if sentence_class == "SentenceTransformer" else tag,
        tags=["hf_posenc", stock.config.model_type],
        base_model=name if _is_repository(name) else None,
    )
    source = getattr(stock.config, "hf_posenc", None) or {}
    scheme = source.get("position_scheme", "absolute")
    if sentence_class is None:
        auto = next((auto for auto in AUTO_CLASSES if _serves(auto, stock)), "AutoModel")
        code = f"from transformers import {auto}\n\nmodel = {auto}.from_pretrained(...)"
    else:
        code = f"from sentence_transformers import {sentence_class}\n\nmodel = {sentence_class}(...)"
    text = (
        f'## Architecture\n\nA model with `position_scheme="{scheme}"` of hf_posenc, written as `{stock.config.model_type}`: Transformers runs '
        f"it without hf_posenc and without custom code.\n\n```python\n{code}\n```\n\nBoth were run on the same padded batches before this was "
        f"written: {agreement}. `hf_posenc.from_stock(model)` makes it the model that it was.\n"
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{begin_mark(data.to_dict())}\n{text}{END}\n")


AUTO_CLASSES = (
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForMultipleChoice",
)


def _serves(auto: str, model: PreTrainedModel) -> bool:
    """Whether an Auto class makes models of this class."""
    return type(model).__name__.endswith(auto.removeprefix("AutoModel"))


def _is_repository(name: str) -> bool:
    return name.count("/") == 1 and not Path(name).exists()


def _agreement(
    model: PreTrainedModel,
    stock: PreTrainedModel,
    architecture: Architecture | None,
    tokenizer: Any,
    max_length: int | None,
) -> Agreement:
    """What both compute, compared as far as the new model reads."""
    if architecture is None:
        table = inspection.longest_sequence(model.config)
        told = min(length for length in (tokenizer.model_max_length, table or NO_LENGTH) if length)
        return check_agreement(model, stock, int(min(told, 2048)), types_differ(model), ("right", "left"))
    length = length_of(architecture, max_length, tokenizer)
    sides = ("right",) if architecture.counts_from_left else ("right", "left")
    return check_agreement(model, stock, length, architecture.has_types and types_differ(model), sides)


def _check_pooling(architecture: Architecture, folder: Path) -> None:
    """Raise ValueError for a folder of sentence-transformers that reads an output which the architecture does not have."""
    if architecture.has_pooler:
        return
    files = [*folder.glob("sentence_*_config.json")]
    if (folder / "modules.json").is_file():
        files += [folder / path / "config.json" for path in module_paths(folder / "modules.json")]
    for file in files:
        if file.is_file() and "pooler_output" in json.dumps(json.loads(file.read_text(encoding="utf-8"))):
            raise ValueError(
                f"{file} reads pooler_output, which a base model of {architecture.model_type!r} does not have; t5 and rope keep it"
            )
