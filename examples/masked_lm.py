"""Masked language modelling on a stream of text, evaluated at several lengths on the very same masked tokens."""

import random
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import EvalPrediction, PreTrainedTokenizerBase, PreTrainedTokenizerFast


IGNORED = -100  # the label that the loss leaves out


def read_lines(file: str | Path) -> list[str]:
    """The lines of a UTF-8 text file that are not blank.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8, or has no text.
    """
    try:
        lines = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error
    if not lines:
        raise ValueError(f"{file} has no text")
    return lines


def train_tokenizer(lines: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """An uncased WordPiece tokenizer with BERT's special tokens, trained on the lines."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        lines, trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    )
    ends = ((token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]"))
    tokenizer.post_processor = processors.BertProcessing(*ends)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, special)))


def token_stream(lines: list[str], tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> list[int]:
    """The ids of all lines one after the other, without special tokens; at most `limit` of them."""
    # Not verbose: no warning of lines longer than a model reads, as they are cut later.
    lines_of_ids = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]
    return [token for line in lines_of_ids for token in line][:limit]


def mask_stream(
    stream: list[int], tokenizer: PreTrainedTokenizerBase, share: float, seed: int
) -> tuple[list[int], list[int]]:
    """A stream in which about `share` of the tokens are replaced by [MASK], always the same, and its labels.

    All are masked, none is kept or replaced by another: what is measured is prediction, not training.
    """
    chosen = random.Random(seed)
    masked, labels = [], []
    for token in stream:
        hide = chosen.random() < share
        masked.append(tokenizer.mask_token_id if hide else token)
        labels.append(token if hide else IGNORED)
    return masked, labels


def cut(
    stream: list[int], tokenizer: PreTrainedTokenizerBase, length: int, labels: list[int] | None = None
) -> list[dict[str, list[int]]]:
    """Windows of exactly `length` tokens, [CLS] and [SEP] counted; what is left at the end is dropped.

    Raises:
        ValueError: the stream is shorter than one window.
    """
    size = length - 2
    starts = range(0, len(stream) - size + 1, size)
    if not starts:
        raise ValueError(f"the text has {len(stream)} tokens, fewer than one window of {length} takes ({size})")
    windows = []
    for start in starts:
        ids = [tokenizer.cls_token_id, *stream[start : start + size], tokenizer.sep_token_id]
        window = {"input_ids": ids, "attention_mask": [1] * length}
        if labels is not None:
            window["labels"] = [IGNORED, *labels[start : start + size], IGNORED]
        windows.append(window)
    return windows


def losses_and_hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """For `Trainer(preprocess_logits_for_metrics=...)`: each token's negative log-likelihood, and whether the guess is right.

    Args:
        logits: (batch, length, vocabulary).
        labels: (batch, length); both values are 0 where a label is ignored.

    Returns:
        float32 (batch, length, 2): all that is kept of the logits, which would not fit into memory.
    """
    loss = torch.nn.functional.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
    )
    return torch.stack((loss, (logits.argmax(-1) == labels).float()), dim=-1)


def loss_and_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Mean negative log-likelihood (nats) and accuracy over all masked tokens; for `Trainer(compute_metrics=...)`."""
    masked = prediction.label_ids != IGNORED
    loss, hits = prediction.predictions[masked].mean(axis=0, dtype="float64")
    return {"masked_loss": float(loss), "masked_accuracy": float(hits)}
