"""Long texts with sentence-transformers: a model reads a text in chunks, and still returns one embedding for it.

    model = in_chunks(SentenceTransformer("sentence-transformers/all-MiniLM-L6-v2"))
    model.save("in_chunks")
    model = SentenceTransformer("in_chunks", trust_remote_code=True)

Nothing is trained. This needs sentence-transformers 6, which nothing else in hf_posenc imports. sentence-transformers requires `trust_remote_code` for
modules of other packages, also in local folders; the code that runs is the installed hf_posenc. To convert a model, use the original one.
"""

import math
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..inspection import longest_sequence


# Tokens of chunks in one pass of the encoder.
PASS_TOKENS = 16384
# A length that no text has.
UNCUT = 1_000_000


class ChunkedTransformer(Transformer):
    """A `Transformer` module that reads a text in chunks, and returns the means of the chunks instead of token embeddings.

    A text is split into as few chunks of at most `chunk_size` tokens as possible, of nearly equal length. [CLS] and [SEP] are put around each
    chunk, and are part of its mean. A text that fits is one chunk, and keeps its embedding.

    Args:
        chunk_size: tokens of a chunk, including special tokens.
        overlap: let each chunk begin in the middle of the previous one.
        max_seq_length: number of tokens at which texts are truncated.
    """

    # The address in a saved `modules.json`, the public one: this file may move.
    __module__ = "hf_posenc.sentence"
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
        self.max_seq_length = max_seq_length

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """`token_embeddings` (batch, chunks, width) and `attention_mask` (batch, chunks), which is 0 after a text's last chunk."""
        texts = [row[kept.bool()] for row, kept in zip(features["input_ids"], features["attention_mask"])]
        special = {*self.tokenizer.all_special_ids}
        pieces = [split(text, self.chunk_size, self.overlap, special) for text in texts]
        means = self.means([piece for own in pieces for piece in own], **kwargs).split([*map(len, pieces)])
        features["token_embeddings"] = pad_sequence(means, batch_first=True)
        features["attention_mask"] = pad_sequence(
            [torch.ones(len(own), dtype=torch.long, device=own.device) for own in means], batch_first=True
        )
        return features

    def means(self, pieces: list[torch.Tensor], **kwargs: Any) -> torch.Tensor:
        """The mean of the last states of each chunk, (chunks, width); chunks of about one length are in a pass together."""
        found: dict[int, torch.Tensor] = {}
        left = sorted(range(len(pieces)), key=lambda place: -len(pieces[place]))
        while left:
            number = max(1, PASS_TOKENS // len(pieces[left[0]]))
            batch, left = left[:number], left[number:]
            rows = [pieces[place] for place in batch]
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            given = {"input_ids": pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_token_id or 0)}
            states = super().forward({**given, "attention_mask": mask}, **kwargs)["token_embeddings"]
            weights = mask[..., None].to(states.dtype)
            found |= dict(zip(batch, (states * weights).sum(dim=1) / weights.sum(dim=1)))
        return torch.stack([found[place] for place in range(len(pieces))])


def split(text: torch.Tensor, size: int, overlap: bool, special: set[int]) -> list[torch.Tensor]:
    """Token ids (tokens,) in chunks; special tokens at the ends are put around each."""
    first, last = text[:1], text[-1:]
    first = first if int(first) in special else first[:0]
    last = last if int(last) in special and len(text) > 1 else last[:0]
    inner = text[len(first) : len(text) - len(last)]
    joined = 2 if overlap else 1  # parts of a chunk
    room = size - len(first) - len(last)
    if len(inner) <= room:
        return [text]
    parts = max(math.ceil(joined * len(inner) / room), joined)
    edges = [len(inner) * part // parts for part in range(parts + 1)]
    return [torch.cat([first, inner[start:end], last]) for start, end in zip(edges, edges[joined:])]


def checked_size(chunk_size: int, model: PreTrainedModel) -> int:
    """Raise ValueError for chunks with hardly any room next to their special tokens, and for longer ones than a model reads."""
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 8:
        raise ValueError(f"chunk_size must be a number of at least 8 tokens, got {chunk_size!r}")
    if (longest := longest_sequence(model.config)) and chunk_size > longest:
        raise ValueError(
            f"chunk_size must be at most {longest}, the model's maximum sequence length, got {chunk_size}"
        )
    return chunk_size


def in_chunks(
    model: SentenceTransformer, chunk_size: int = 64, overlap: bool = True, max_seq_length: int = UNCUT
) -> SentenceTransformer:
    """Let a SentenceTransformer read long texts in chunks, in place, and return it. The embedding of a text is the mean of its chunks.

    The mean is taken before the modules after the pooling (Dense, Normalize). Texts that fit in a chunk keep their embeddings.
    The mean of chunks is the default of DICE (Lyu et al. 2026, arXiv:2606.18781), which has chunks of 1,024 tokens.

    Args:
        model: a model with mean pooling.
        chunk_size, overlap, max_seq_length: see [`ChunkedTransformer`].

    Raises:
        TypeError: `model` is not a `SentenceTransformer`.
        ValueError: a size is wrong, or the model does not begin with a transformer and mean pooling that includes prompts.
    """
    if not isinstance(model, SentenceTransformer):
        raise TypeError(f"model must be a SentenceTransformer, got {type(model).__name__}")
    transformer, pooling = ([*model.children()] + [None, None])[:2]
    known = type(transformer) is Transformer and type(pooling) is Pooling
    if not known or pooling.pooling_mode != "mean" or not pooling.include_prompt:
        raise ValueError("the model must begin with a Transformer and mean Pooling that includes prompts")
    size = checked_size(chunk_size, transformer.model)
    transformer.__class__ = ChunkedTransformer
    transformer.chunk_size, transformer.overlap, transformer.unpad_inputs = size, overlap, False
    transformer.max_seq_length = max_seq_length
    return model
