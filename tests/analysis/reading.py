"""Tiny models that read words, and documents of random words to read."""

import random
import tempfile
from pathlib import Path

from tiny import SIZES, build
from transformers import BertTokenizerFast, PreTrainedTokenizerBase

from hf_posenc.analysis import Subject, study


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# "Tom bit a dog" among them, and words that have no other word in them.
WORDS = ("tom", "bit", "a", "dog", *(f"{first}{second}q" for first in "bcdfghjklm" for second in "nprstvwxz"))
WORDS = WORDS[: SIZES["vocab_size"] - len(SPECIAL)]


def tokenizer(**names: str) -> PreTrainedTokenizerBase:
    """BERT's, with a token for each of the words; `names` are other ones for special tokens, such as `cls_token="<s>"`."""
    special = {"[CLS]": names.get("cls_token"), "[SEP]": names.get("sep_token")}
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder) / "vocab.txt"
        vocabulary.write_text("\n".join((*(special.get(token) or token for token in SPECIAL), *WORDS)))
        return BertTokenizerFast(vocab=str(vocabulary), **names)


def documents(count: int = 20, length: int = 200, seed: int = 0) -> list[str]:
    """Documents of words drawn at random: where a word stands has nothing to do with which word it is."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=length)) for _ in range(count)]


def subject(position_scheme: str, family: str = "bert", **settings) -> Subject:
    """A tiny model with its position parameters filled, and a tokenizer."""
    return study(build(position_scheme, family, **settings), tokenizer(), name=position_scheme)
