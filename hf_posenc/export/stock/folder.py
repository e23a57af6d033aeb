"""Folders: a saved model with a position scheme, written as an architecture of Transformers, with all that belongs to it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoTokenizer, PreTrainedModel

from ... import inspection
from ...change_scheme import EXPORTED
from ...files import whole_folder
from ...hub.card_files import END, begin_mark, save_card
from ...hub.folders import CARD, REPORT, checked_output, copy_files, cut_at, folder_of, kept_files, save_model
from ...inspection.sentence_folders import (
    PIPELINE_TAGS,
    TRANSFORMER_SETTINGS,
    chunk_size,
    model_class,
    module_settings,
    task_lengths,
    text_length,
)
from ...inspection.weights import load_whole
from ...modeling.models.configuration_posenc import PositionConfigMixin
from ...variants import VARIANT_MODELS, family_of, saved_class
from .architectures import Architecture
from .making import (
    NO_LENGTH,
    OF_PAIRS,
    architecture_of,
    check_head,
    check_length,
    check_padding,
    head_of,
    length_of,
    to_stock,
    types_differ,
)
from .proof import LONGEST, Agreement, check_agreement


RESULTS = "results.json"
TYPE_IDS = "token_type_ids"
# Of a loaded model, in the code on a card.
AUTO_CLASSES = {
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForMultipleChoice": "AutoModelForMultipleChoice",
}


@dataclass(frozen=True)
class Exported:
    """A model as an architecture of Transformers, compared with what it was.

    Attributes:
        model: of a class of Transformers.
        agreement: of the two.
        has_types: whether it has token types.
        length: the maximum sequence length of its config, in tokens; None where that is the original's.
    """

    model: PreTrainedModel
    agreement: Agreement
    has_types: bool
    length: int | None

    def save(self, folder: Path, tokenizer: Any, card: ModelCard) -> None:
        """Write model, tokenizer and card into a folder, with what is there already.

        Raises:
            OSError: they cannot be written.
        """
        save_model(self.model, folder)
        if not self.has_types:
            names = [name for name in tokenizer.model_input_names if name != TYPE_IDS]
            tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
        if self.length is not None and tokenizer.model_max_length > NO_LENGTH:
            tokenizer.model_max_length = (
                self.length
            )  # nothing else tells of MPNet's rows, two of which are no positions
        tokenizer.save_pretrained(folder)
        _name_for_all(folder / "tokenizer_config.json")
        save_card(card, folder / CARD)

    def card(
        self, name: str, sentence_class: str | None, base_model: str | None = None, further: str = ""
    ) -> ModelCard:
        """What a card has to say of it.

        Args:
            name: of the model that it was made of.
            sentence_class: the class of sentence-transformers that loads the folder, if one does.
            base_model: what the metadata name as such; default: `name`, where that is a repository.
            further: a text to end with.
        """
        end = next((end for end in inspection.PIPELINE_TAGS if type(self.model).__name__.endswith(end)), "Model")
        tag, library, maker = inspection.PIPELINE_TAGS[end], "transformers", AUTO_CLASSES.get(end, "AutoModel")
        if sentence_class is not None:
            tag, library, maker = PIPELINE_TAGS.get(sentence_class, tag), "sentence-transformers", sentence_class
        is_repository = name.count("/") == 1 and not Path(name).exists()
        data = ModelCardData(
            library_name=library,
            pipeline_tag=tag,
            tags=["hf_posenc", self.model.config.model_type],
            base_model=base_model or (name if is_repository else None),
        )
        config, package = self.model.config, library.replace("-", "_")
        source = getattr(config, EXPORTED, None)  # of the family's own architecture there is none
        scheme = source["position_scheme"] if source else family_of(config).native_scheme
        back = " To continue training with its position scheme, call `hf_posenc.from_stock(model)`." if source else ""
        text = (
            f'## Architecture\n\nA model with `position_scheme="{scheme}"` of hf_posenc, converted to `{config.model_type}`. It loads '
            f"without hf_posenc and without custom code.\n\n```python\nfrom {package} import {maker}\n\n"
            f'model = {maker}{"" if sentence_class else ".from_pretrained"}("path/to/this")\n```\n\nIts outputs were compared with '
            f"those of the original model on the same padded batches: {self.agreement}.{back}\n"
        )
        return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{begin_mark(data.to_dict())}\n{text}{further}\n{END}\n")


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    max_length: int | None = None,
    single_text: bool = False,
    revision: str | None = None,
) -> str:
    """Write a saved model with a position scheme as an architecture of Transformers, which loads without hf_posenc and custom code.

    The folder is complete: weights, config, tokenizer, the modules of sentence-transformers, card and reports. It is written atomically, and only
    if both models give the same outputs on padded batches of several lengths.

    Args:
        checkpoint: a folder or a name on the Hub.
        out: the folder to write, new or empty.
        max_length: maximum sequence length of the new model, in tokens, if its positions are relative. The tokenizer and sentence-transformers
            then truncate there. Default: the tokenizer's `model_max_length`, or that of the config; sentence-transformers' `max_seq_length`
            if it is larger.
        single_text: as for [`to_stock`].
        revision: branch, tag or commit on the Hub.

    Returns:
        A sentence with the folder, the architecture and the largest difference between the two models.

    Raises:
        OSError: a file is missing, or the folder cannot be written.
        ValueError: no architecture of Transformers represents the model. The message says why, and what would fit. All reasons except token types
            are checked before weights are read.
    """
    inspection.check_named(out, "the output")
    out = checked_output(Path(out))
    folder = folder_of(str(checkpoint), revision)
    config = inspection.load_config(str(folder))
    if not isinstance(config, PositionConfigMixin):
        raise ValueError(f"{checkpoint} is already a {config.model_type} model of Transformers: it needs no export")
    cls, tokenizer, files = saved_class(config), AutoTokenizer.from_pretrained(folder), kept_files(folder)
    files |= {name: folder / name for name in (REPORT, RESULTS) if (folder / name).is_file()}
    check_length(max_length, config)
    if max_length is not None:
        _check_cuts_no_later(folder, max_length)
    architecture = check_fits(config, cls, folder, tokenizer, max_length)
    dtype = config.dtype or torch.float32
    model = load_whole(cls, folder, dtype=torch.promote_types(dtype, torch.float32))
    length = _length_for(architecture, tokenizer, folder) if max_length is None else max_length
    exported = make(model, tokenizer, length, single_text, dtype)
    with whole_folder(out) as place:
        copy_files(files, place)
        if max_length is not None:
            cut_at(max_length, tokenizer, place)
        card = exported.card(str(checkpoint), model_class(place), _base_model(folder / CARD))
        exported.save(place, tokenizer, card)
    made = exported.model
    return f"wrote {out}: {config.position_scheme} as {made.config.model_type} ({type(made).__name__}); {exported.agreement}"


def check_fits(
    config: PositionConfigMixin,
    cls: type[PreTrainedModel],
    folder: Path | None,
    tokenizer: Any,
    max_length: int | None,
) -> Architecture | None:
    """Raise ValueError where no architecture of Transformers computes a model, as far as can be told without its weights.

    Args:
        cls: the model's class, one with a position scheme.
        folder: that of sentence-transformers which it is part of, if it is.

    Returns:
        The architecture; None for the family's own.
    """
    architecture = architecture_of(config)
    if folder is not None:
        _check_reads_whole(folder)
    if architecture is not None:
        check_length(max_length, config)
        check_head(architecture, cls, head_of(cls, config), config)
        check_padding(architecture, tokenizer)
        if folder is not None:
            _check_pooling(architecture, folder)
    return architecture


def check_conversion(
    config: PositionConfigMixin, cls: type[PreTrainedModel], folder: Path | None, tokenizer: Any, max_length: int
) -> None:
    """[`check_fits`] for what a conversion is to make of a model of class `cls`; here heads that may read pairs need token types.

    Raises:
        ValueError: it does not fit.
    """
    cls = VARIANT_MODELS.get(cls, cls)
    architecture = check_fits(config, cls, folder, tokenizer, max_length)
    types = config.family.setting(config, "type_vocab_size") if config.family.token_types else 0
    if architecture is not None and not architecture.has_types and types > 1 and head_of(cls, config) in OF_PAIRS:
        raise ValueError(
            f"{config.position_scheme} would become {architecture.model_type!r}, which has no token types, but {cls.__name__} may read pairs of "
            "texts: deberta and rope fit. If it only reads single texts, convert without --stock, and then run "
            "hf-posenc export stock --single-text"
        )


def make(
    model: PreTrainedModel, tokenizer: Any, max_length: int | None, single_text: bool, dtype: torch.dtype
) -> Exported:
    """A model as an architecture of Transformers, compared as far as that reads, and then in another dtype.

    Raises:
        ValueError: none computes it, or they differ.
    """
    architecture = architecture_of(model.config)
    stock = to_stock(model, max_length=max_length, single_text=single_text, tokenizer=tokenizer)
    if architecture is None:
        lengths = (LONGEST, tokenizer.model_max_length, inspection.longest_sequence(model.config))
        own, length, has_types, sides = None, min(each for each in lengths if each), True, ("right", "left")
    else:
        own = length = length_of(architecture, max_length, tokenizer)
        has_types = architecture.has_types
        sides = ("right",) if architecture.counts_from_left else ("right", "left")
    agreement = check_agreement(model, stock, int(length), has_types and types_differ(model), sides)
    return Exported(stock.to(dtype), agreement, has_types, own)


def _name_for_all(file: Path) -> None:
    """Name the class of a tokenizer that has no other than `tokenizer.json` as Transformers 4 knows it; 5 does, too."""
    entries = json.loads(file.read_text(encoding="utf-8"))
    if entries.get("tokenizer_class") == "TokenizersBackend":
        file.write_text(
            json.dumps(entries | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2), encoding="utf-8"
        )


def _base_model(card: Path) -> str | None:
    """What the card of the model names as its base."""
    base = ModelCard.load(card).data.base_model if card.is_file() else None
    return base if isinstance(base, str) else None


def _length_for(architecture: Architecture | None, tokenizer: Any, folder: Path) -> int | None:
    """The maximum sequence length of a new model if none is given: that of sentence-transformers, if its texts are longer than the tokenizer's."""
    texts = max([text_length(folder) or 0, *task_lengths(folder).values()])
    if architecture is None or architecture.reads_table or not texts or texts > NO_LENGTH:
        return None
    return max(texts, length_of(architecture, None, tokenizer))


def _check_cuts_no_later(folder: Path, max_length: int) -> None:
    """Raise ValueError where sentence-transformers cuts the texts of a task later than the new model is to read."""
    for name, length in task_lengths(folder).items():
        if length > max_length:
            raise ValueError(
                f"{folder} cuts texts off at {length} tokens by {name}, which is more than max_length={max_length}: change this setting of "
                "its Transformer module, and save the model again"
            )


def _check_reads_whole(folder: Path) -> None:
    """Raise ValueError for a folder of sentence-transformers whose first module reads texts in chunks, which is code of hf_posenc."""
    if chunk_size(folder) is not None:
        raise ValueError(
            f"{folder} reads texts in chunks by hf_posenc, which its export would need too: export the model before hf_posenc.sentence.in_chunks"
        )


def _check_pooling(architecture: Architecture, folder: Path) -> None:
    """Raise ValueError for a folder of sentence-transformers that reads an output which the architecture does not have."""
    if architecture.has_pooler:
        return
    for file in (*folder.glob(TRANSFORMER_SETTINGS), *module_settings(folder)):
        if "pooler_output" in json.dumps(json.loads(file.read_text(encoding="utf-8"))):
            raise ValueError(
                f"{file} reads pooler_output, which the base model of {architecture.model_type!r} does not have; t5 and rope keep it"
            )
