"""Long texts with sentence-transformers: a model reads a text in chunks, and still returns one embedding for it.

    model = in_chunks(SentenceTransformer("sentence-transformers/all-MiniLM-L6-v2"))
    model.save("in_chunks")
    model = SentenceTransformer("in_chunks", trust_remote_code=True)

Or, with an index of embeddings of texts that were cut off, read only what was cut off:

    embeddings = complete_embeddings(model, texts, embeddings)

Nothing is trained. This needs sentence-transformers 6, which nothing else in hf_posenc imports. sentence-transformers requires `trust_remote_code` for
modules of other packages, also in local folders; the code that runs is the installed hf_posenc. To convert a model, use the original one.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from .inspection import longest_sequence
from .inspection.sentence_folders import OTHER_LIMITS, check_only_limit


__all__ = ["ChunkedTransformer", "complete_embeddings", "in_chunks"]

# Tokens of chunks in one pass of the encoder.
PASS_TOKENS = 16384
# A length that no text has.
UNCUT = 1_000_000
# By how much the norm of a normalized embedding may be off: that of bfloat16 is by 0.002.
UNIT = 0.01


class ChunkedTransformer(Transformer):
    """A `Transformer` module that reads a text in chunks, and returns the means of the chunks instead of token embeddings.

    A text is split into as few chunks of at most `chunk_size` tokens as possible, of nearly equal length. [CLS] and [SEP] are put around each
    chunk, and are part of its mean. A text that fits in one chunk keeps its embedding.

    Args:
        chunk_size: tokens of a chunk, including special tokens.
        overlap: let each chunk begin in the middle of the previous one.
        max_seq_length: number of tokens at which texts are truncated.
    """

    # The length that texts are cut at is no longer the tokenizer's or the table's, which a Transformer finds by itself.
    config_keys = [*Transformer.config_keys, "chunk_size", "overlap", "max_seq_length"]

    def __init__(
        self,
        model_name_or_path: str,
        *,
        chunk_size: int = 64,
        overlap: bool = True,
        max_seq_length: int = UNCUT,
        **kwargs: Any,
    ):
        super().__init__(model_name_or_path, **kwargs)
        self.chunk_size, self.overlap = checked_size(chunk_size, self.model), overlap
        self.max_seq_length = checked_tokens("max_seq_length", max_seq_length)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return `token_embeddings` (batch, chunks, width) and `attention_mask` (batch, chunks), which is 0 after the last chunk of a text.

        Raises:
            ValueError: there are pairs of texts.
        """
        if "token_type_ids" in features and features["token_type_ids"].any():
            raise ValueError("a model that reads in chunks reads single texts, not pairs")
        texts = [row[kept.bool()] for row, kept in zip(features["input_ids"], features["attention_mask"])]
        frame = frame_of(self.tokenizer)
        pieces = [split(text, self.chunk_size, self.overlap, frame) for text in texts]
        means = self.means([piece for own in pieces for piece in own], **kwargs).split([*map(len, pieces)])
        mask = [torch.ones(len(own), dtype=torch.long, device=own.device) for own in means]
        # A dictionary of its own: the caller's mask is of tokens, as its input_ids are.
        return {
            **features,
            "token_embeddings": pad_sequence(means, batch_first=True),
            "attention_mask": pad_sequence(mask, batch_first=True),
        }

    def means(self, pieces: list[torch.Tensor], **kwargs: Any) -> torch.Tensor:
        """Return the mean of the last hidden states of each chunk, (chunks, width). Chunks of similar length are computed together."""
        found: dict[int, torch.Tensor] = {}
        left = sorted(range(len(pieces)), key=lambda place: -len(pieces[place]))
        while left:
            number = max(1, PASS_TOKENS // max(1, len(pieces[left[0]])))
            batch, left = left[:number], left[number:]
            rows = [pieces[place] for place in batch]
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            given = {"input_ids": pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_token_id or 0)}
            states = super().forward({**given, "attention_mask": mask}, **kwargs)["token_embeddings"]
            # In half precision, sums are float32, as in Pooling.
            weights = mask[..., None].to(torch.promote_types(states.dtype, torch.float32))
            # An empty text has no tokens where the tokenizer adds none; its embedding is 0, as that of Pooling.
            means = (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
            found |= dict(zip(batch, means.to(states.dtype)))
        return torch.stack([found[place] for place in range(len(pieces))])


# The ids of the special tokens that a tokenizer puts before and behind a text; None where it puts none.
Frame = tuple[int | None, int | None]


def frame_of(tokenizer: Any) -> Frame:
    probe = tokenizer("a", return_special_tokens_mask=True)
    ids, special = probe["input_ids"], probe["special_tokens_mask"]
    return ids[0] if ids and special[0] else None, ids[-1] if ids and special[-1] else None


def without_ends(text: torch.Tensor, frame: Frame) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The special token before a text, if there is one, its other tokens, and the special token behind."""
    first, last = text[:1], text[-1:]
    first = first if len(first) and int(first) == frame[0] else first[:0]
    last = last if len(text) > 1 and int(last) == frame[1] else last[:0]
    return first, text[len(first) : len(text) - len(last)], last


def split(text: torch.Tensor, size: int, overlap: bool, frame: Frame) -> list[torch.Tensor]:
    """Token ids (tokens,) in chunks; special tokens at the ends are put around each."""
    first, inner, last = without_ends(text, frame)
    joined = 2 if overlap else 1  # parts of a chunk
    room = size - len(first) - len(last)
    if len(inner) <= room:
        return [text]
    parts = max(math.ceil(joined * len(inner) / room), joined)
    edges = [len(inner) * part // parts for part in range(parts + 1)]
    return [torch.cat([first, inner[start:end], last]) for start, end in zip(edges, edges[joined:])]


def checked_size(chunk_size: int, model: PreTrainedModel) -> int:
    """Raise ValueError for chunks with hardly any room next to their special tokens, and for longer ones than a model reads."""
    checked_tokens("chunk_size", chunk_size)
    if (longest := longest_sequence(model.config)) and chunk_size > longest:
        raise ValueError(
            f"chunk_size must be at most {longest}, the model's maximum sequence length, got {chunk_size}"
        )
    return chunk_size


def checked_tokens(name: str, tokens: int) -> int:
    """Raise ValueError for what is no number of tokens, or hardly more than special tokens."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 8:
        raise ValueError(f"{name} must be a number of at least 8 tokens, got {tokens!r}")
    return tokens


def in_chunks(
    model: SentenceTransformer, chunk_size: int = 64, overlap: bool = True, max_seq_length: int = UNCUT
) -> SentenceTransformer:
    """Make a SentenceTransformer read long texts in chunks. The embedding of a text is the mean of its chunks.

    The model is changed in place, and returned.

    The mean is taken before the modules after the pooling (Dense, Normalize). Texts that fit in a chunk keep their embeddings.
    The mean of chunks is the default of DICE (Lyu et al. 2026, arXiv:2606.18781), which has chunks of 1,024 tokens.

    Args:
        model: a model with mean pooling.
        chunk_size, overlap, max_seq_length: see [`ChunkedTransformer`].

    Raises:
        TypeError: `model` is not a `SentenceTransformer`.
        ValueError: a size is wrong, the model does not begin with a transformer and mean pooling that includes prompts, or it cuts texts off by
            another setting than `max_seq_length` (`query_length`, `document_length`, or a `max_length` in `processing_kwargs`).
    """
    let_read_chunks(checked_transformer(model), chunk_size, overlap, max_seq_length)
    return model


def checked_transformer(model: SentenceTransformer) -> Transformer:
    """The first module. Raises as [`in_chunks`] for another model than one with mean pooling."""
    if not isinstance(model, SentenceTransformer):
        raise TypeError(f"model must be a SentenceTransformer, got {type(model).__name__}")
    transformer, pooling = ([*model.children()] + [None, None])[:2]
    known = type(transformer) is Transformer and type(pooling) is Pooling
    if not known or pooling.pooling_mode != "mean" or not pooling.include_prompt:
        size = getattr(transformer, "chunk_size", None)
        so_far = (
            f"; this one reads texts in chunks of {size} tokens: load the model that it was made from" if size else ""
        )
        raise ValueError(f"the model must begin with a Transformer and mean Pooling that includes prompts{so_far}")
    check_only_limit({name: getattr(transformer, name, None) for name in OTHER_LIMITS})
    return transformer


def let_read_chunks(transformer: Transformer, chunk_size: int, overlap: bool, max_seq_length: int) -> None:
    """Make a `Transformer` a [`ChunkedTransformer`], in place."""
    size, length = checked_size(chunk_size, transformer.model), checked_tokens("max_seq_length", max_seq_length)
    transformer.__class__ = ChunkedTransformer
    transformer.chunk_size, transformer.overlap, transformer.unpad_inputs = size, overlap, False
    transformer.max_seq_length = length


@torch.no_grad()
def complete_embeddings(
    model: SentenceTransformer,
    texts: Sequence[str],
    embeddings: np.ndarray | torch.Tensor | Sequence[torch.Tensor],
    *,
    prompt: str | None = None,
    batch_size: int = 32,
) -> np.ndarray | torch.Tensor:
    """Make embeddings of whole texts from stored embeddings of their beginnings. Only what was cut off is read.

    What follows the first `model.max_seq_length` tokens (with `truncation_side="left"`: what precedes the last ones) is read in chunks of at
    most as many. The result is the mean of the stored embedding and of the mean of these chunks, each weighted by its number of tokens, and
    normalized if the stored embeddings are. Texts that were not cut off keep their embeddings. The model still cuts off afterwards; it is in
    evaluation mode, as after `encode`.

    Args:
        model: the model that made the embeddings, with mean pooling, and with the same `max_seq_length` and `truncate_dim` as then.
        texts: the whole texts.
        embeddings: what `model.encode(texts)` returned, (texts, width), in any floating dtype; or a list of (width,).
        prompt: what stood before each text, as in `model.encode`. Default: the model's default prompt.
        batch_size: number of texts that are read at once.

    Returns:
        (texts, width), an array if `embeddings` is one, else a tensor, in its dtype.

    Raises:
        TypeError: `model` is not a `SentenceTransformer`, or `texts` is a single string.
        ValueError: there are more or fewer embeddings than texts, or of another width than the model's, or the model is none that [`in_chunks`] takes.
    """
    transformer = checked_transformer(model)
    if isinstance(texts, str):
        raise TypeError("texts must be a list of strings, got a string")
    stored = (
        torch.as_tensor(embeddings)
        if hasattr(embeddings, "shape")
        else torch.stack([*map(torch.as_tensor, embeddings)])
    )
    if stored.shape != (len(texts), model.get_embedding_dimension()) or not stored.is_floating_point():
        raise ValueError(
            f"embeddings must be numbers of ({len(texts)}, {model.get_embedding_dimension()}), got {tuple(stored.shape)} of {stored.dtype}"
        )
    reader = copy.copy(transformer)  # with the same weights, and a tokenizer that does not cut off
    reader.processor = copy.deepcopy(transformer.processor)
    model.eval()
    length, frame = model.max_seq_length, frame_of(transformer.tokenizer)
    cuts_beginnings = transformer.tokenizer.truncation_side == "left"
    let_read_chunks(reader, length, overlap=False, max_seq_length=UNCUT)
    if prompt is None:
        prompt = model.prompts.get(model.default_prompt_name) or ""
    modules = [reader, *[*model.children()][1:]]
    # By Normalize, by `encode(..., normalize_embeddings=True)`, or not; with `truncate_dim`, Normalize alone does not make them so.
    normalized = bool(((stored.float().norm(dim=-1) - 1).abs() < UNIT).all())
    completed = stored.clone()
    for start in range(0, len(texts), batch_size):
        features = reader.preprocess([prompt + text for text in texts[start : start + batch_size]])
        rests, shares = {}, {}
        for number, (ids, mask) in enumerate(zip(features["input_ids"], features["attention_mask"]), start):
            first, inner, last = without_ends(ids[mask.bool()], frame)
            begun = length - len(first) - len(last)
            if len(inner) > begun:
                rest = inner[:-begun] if cuts_beginnings else inner[begun:]
                rests[number], shares[number] = torch.cat([first, rest, last]), begun / len(inner)
        if rests:
            found = embedded(modules, [*rests.values()], model.device)[:, : stored.shape[1]].to(stored.device)
            found = normalize(found, dim=-1) if normalized else found
            for number, own in zip(rests, found):
                merged = shares[number] * stored[number].to(own.dtype) + (1 - shares[number]) * own
                completed[number] = normalize(merged, dim=-1) if normalized else merged
    return completed.numpy() if isinstance(embeddings, np.ndarray) else completed


def embedded(modules: Sequence[torch.nn.Module], texts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """What modules of a model make of the tokens of texts, (texts, width)."""
    features = {
        "input_ids": pad_sequence(texts, batch_first=True).to(device),
        "attention_mask": pad_sequence([torch.ones_like(ids) for ids in texts], batch_first=True).to(device),
    }
    for module in modules:
        features = module(features)
    return features["sentence_embedding"]
