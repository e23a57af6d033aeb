"""A checkpoint that reads longer texts, in the same space of vectors: `convert` and `in_chunks` with what suits that job.

    extend("sentence-transformers/all-MiniLM-L6-v2", 1024, output="outputs/minilm-1024")

Texts up to the old length keep their vectors, which is checked before anything is written. Longer ones are no longer cut off, and have
other vectors than before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..files import whole_folder
from ..hub.folders import LICENSES, checked_output, copy_files, files_like
from ..inspection.configs import longest_sequence
from ..inspection.sentence_folders import model_class
from ..variants import scheme_of
from .checkpoints import (
    Checkpoint,
    check_installed,
    check_max_length,
    check_reads_as_far,
    load_checkpoint,
    stored_length,
)
from .converting import Conversion, ConversionArguments, as_list
from .longer_tables import METHODS, lengthen
from .report import ConversionReport
from .texts import read_documents
from .writing import add_to_card, write_converted


# How texts that are longer than the checkpoint reads are given a vector.
CHUNKS, TRAINED = "chunks", "trained"
WAYS = (CHUNKS, TRAINED, *METHODS)
# Texts that are checked to keep their vectors, and what is taken as kept.
CHECKED = 8
SAME = 1e-6


@dataclass
class Extension:
    """The result of [`extend`].

    Attributes:
        original: name of the checkpoint.
        method: how longer texts are read.
        trained_length: maximum sequence length before, in tokens.
        max_length: maximum sequence length after, in tokens.
        difference: the largest difference between a value before and after, for texts up to the old length. It compares embeddings
            with "chunks", and last hidden states with the other methods.
        lengths: number of tokens of each of your texts, of each source at most the first 20 million characters. Empty if `text` was not given.
        output: the folder that was written.
        report: the report of the conversion. None with "chunks".
    """

    original: str
    method: str
    trained_length: int
    max_length: int
    difference: float
    lengths: list[int]
    output: Path
    report: ConversionReport | None = None

    def __str__(self) -> str:
        parts = [
            f"{self.original}: maximum sequence length {self.max_length}, before {self.trained_length} (method {self.method!r}).",
            f"Texts of up to {self.trained_length} tokens keep their vectors: the largest difference is {self.difference:.1e}.",
        ]
        if self.lengths:
            longer, cut = (
                sum(one > limit for one in self.lengths) for limit in (self.trained_length, self.max_length)
            )
            share = f"{longer:,} of {len(self.lengths):,} texts ({longer / len(self.lengths):.1%})"
            parts.append(f"{share} are longer and have other vectors now: embed them again.")
            if cut:
                parts.append(
                    f"{cut:,} of those are longer than {self.max_length} tokens, and are still cut off there."
                )
        else:
            parts.append("Longer texts have other vectors now: embed them again.")
        if self.method == CHUNKS:
            parts.append(f"Load it with {_loading(str(self.output))}, where hf_posenc is installed.")
        return "\n".join(parts)


def extend(
    model: str | Path,
    max_length: int,
    *,
    output: str | Path,
    method: str = CHUNKS,
    text: Sequence[str | Path] | None = None,
    trained_length: int | None = None,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    seed: int = 0,
    resume: bool = False,
) -> Extension:
    """Write a model that reads longer texts. The embeddings of short texts do not change, which is checked before anything is written.

    Args:
        model: a folder (of sentence-transformers or Transformers) or a name on the Hub. The model must have learned absolute positions.
        max_length: the new maximum sequence length, in tokens.
        output: the folder to write. It is written atomically.
        method: "chunks" reads a long text in chunks of the old length, and takes the mean of their embeddings ([`in_chunks`]). It needs
            sentence-transformers, and `trust_remote_code=True` to load the model. "trained" makes the position embedding matrix longer, and
            trains the new rows. "tile", "mean" and "interpolate" make the matrix longer without training.
        text: your texts: files (one text each; in a .jsonl file, the "text" of each row), folders or names of data sets. They are used to
            count the texts beyond the old length (of each source at most the first 20 million characters), and "trained" learns from them.
            Default: none; "trained" uses the Python language reference.
        trained_length: the old length, in tokens. Default: `max_seq_length` of sentence-transformers, else `model_max_length` of the
            tokenizer, but at most the number of rows.
        max_steps, max_minutes, seed, resume: settings of the training, as for [`convert`].

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the model has no learned absolute positions, a length or the method is wrong, or embeddings of short texts would change.
        ImportError: a library is missing.
    """
    if method not in WAYS:
        raise ValueError(f"method must be one of {', '.join(WAYS)}, got {method!r}")
    if method != TRAINED and (max_steps or max_minutes or resume):
        raise ValueError("max_steps, max_minutes and resume are for method='trained'")
    output, text = checked_output(Path(output)), as_list(text)
    checkpoint = load_checkpoint(model, trained_length=trained_length)
    check_extendable(checkpoint, max_length)
    check_reads_as_far(checkpoint, max_length)
    check_cut_there(checkpoint)
    length = checkpoint.trained_length
    name = Path(str(checkpoint.folder)).absolute().name if Path(model).exists() else str(model)
    documents, report = read_documents(text) if text else [], None
    if method == CHUNKS:
        difference = _in_chunks(checkpoint, name, max_length, output)
    elif method == TRAINED:
        arguments = ConversionArguments(
            output=output,
            text=text,
            max_length=max_length,
            trained_length=length,
            train="beyond",
            max_steps=max_steps,
            max_minutes=max_minutes,
            seed=seed,
            resume=resume,
        )
        conversion = Conversion.of(model, None, scheme_of(checkpoint.config), {}, arguments, documents)
        found: list[float] = []
        conversion.check = lambda student: found.append(_difference_of_states(conversion.original, student, length))
        _, report = conversion.run()
        [difference] = found
    else:
        check_max_length(max_length, length)
        student = lengthen(checkpoint.model, max_length, length, method)
        difference = _difference_of_states(checkpoint.model, student, length)
        report = ConversionReport(name, scheme_of(checkpoint.config), {}, length, max_length)
        report.settings, report.not_measured = {"extend": method}, ["how well longer texts are read"]
        write_converted(output, student.to(checkpoint.dtype), checkpoint, report)
    lengths = [len(ids) for ids in checkpoint.tokenizer(documents, verbose=False)["input_ids"]] if documents else []
    return Extension(name, method, length, max_length, difference, lengths, output, report)


def check_extendable(checkpoint: Checkpoint, max_length: int) -> None:
    """Raise ValueError for a checkpoint without a position embedding matrix, and for a length that it reads already."""
    if longest_sequence(checkpoint.config) is None:
        raise ValueError(
            f"the positions of this checkpoint ({scheme_of(checkpoint.config)}) have no matrix that ends: it reads longer texts as it is. "
            "Raise the tokenizer's model_max_length, or SentenceTransformer's max_seq_length"
        )
    if max_length <= checkpoint.trained_length:
        raise ValueError(
            f"max_length must be greater than {checkpoint.trained_length}, the checkpoint's maximum sequence length, got {max_length}"
        )


def check_cut_there(checkpoint: Checkpoint) -> None:
    """Raise ValueError for an old length beyond that at which sentence-transformers cuts texts off: those in between would change."""
    if checkpoint.folder is None or model_class(checkpoint.folder) is None:
        return
    cut = stored_length(checkpoint.folder, checkpoint.tokenizer)
    if checkpoint.trained_length > cut:
        raise ValueError(
            f"trained_length must be at most {cut}, at which sentence-transformers cuts texts off, got {checkpoint.trained_length}: "
            "longer texts cannot keep their vectors"
        )


def _short_texts(model: PreTrainedModel, length: int) -> list[torch.Tensor]:
    """Tokens at random of texts of up to `length`, the last of exactly that; each is (1, tokens)."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(3, length, CHECKED).round().int().tolist()
    return [torch.randint(model.config.vocab_size, (1, number), generator=generator) for number in lengths]


def _checked(difference: float) -> float:
    if not difference <= SAME:
        raise ValueError(f"the vectors of short texts would change, by up to {difference:.1e}: nothing was written")
    return difference


@torch.no_grad()
def _difference_of_states(original: PreTrainedModel, student: PreTrainedModel, length: int) -> float:
    """The largest difference between last states on short texts.

    Raises:
        ValueError: it is larger than rounding.
    """
    models = [model.base_model.eval() for model in (original, student)]
    differences = []
    for ids in _short_texts(original, length):
        before, after = (model(input_ids=ids)[0] for model in models)
        differences.append(float((after - before).abs().max()))
    return _checked(max(differences))


@torch.no_grad()
def _in_chunks(checkpoint: Checkpoint, name: str, max_length: int, output: Path) -> float:
    """Write a model of sentence-transformers that reads in chunks; the largest difference between vectors of short texts."""
    check_installed("sentence_transformers", "sentence-transformers>=6")
    from sentence_transformers import SentenceTransformer  # only here: no other method needs it

    from ..sentence import in_chunks

    if checkpoint.folder is None or model_class(checkpoint.folder) != "SentenceTransformer":
        raise ValueError("method='chunks' needs a model of sentence-transformers: take 'trained', or 'tile'")
    model = SentenceTransformer(str(checkpoint.folder), device="cpu").eval()
    texts = _short_texts(model[0].model, checkpoint.trained_length)

    def vectors() -> list[torch.Tensor]:
        batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in texts]
        return [model(batch)["sentence_embedding"] for batch in batches]

    before = vectors()
    in_chunks(model, checkpoint.trained_length, overlap=False, max_seq_length=max_length)
    difference = _checked(max(float((new - old).abs().max()) for new, old in zip(vectors(), before)))
    licenses = files_like(checkpoint.folder, LICENSES)
    with whole_folder(output) as place:
        model.save(str(place))
        copy_files(licenses, place)
        add_to_card(
            place,
            f"## Longer than it was\n\nThis is {name}, changed by hf_posenc to read texts of up to {max_length:,} tokens, in chunks of at most "
            f"{checkpoint.trained_length}. The embedding of a longer text is the mean of those of its chunks, and texts of up to "
            f"{checkpoint.trained_length} tokens keep their embeddings. sentence-transformers loads it where hf_posenc is installed, and "
            f"runs no code of this repository:\n\n```python\nfrom sentence_transformers import SentenceTransformer\n\n"
            f"model = {_loading(output.name)}\n```\n\nTransformers' Auto classes load the encoder alone, which reads no chunks.",
        )
    return difference


def _loading(path: str) -> str:
    return f'SentenceTransformer("{path}", trust_remote_code=True)'
