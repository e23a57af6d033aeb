"""Tiny checkpoints on disk, with a tokenizer of their family, and text that has to be read in order."""

import random
from pathlib import Path

import tiny
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


# By family, the ids of its special tokens: padding, [CLS], [SEP]; [UNK] and [MASK] are 3 and 4 everywhere.
SPECIAL = {True: {"pad": 1, "cls": 0, "sep": 2}, False: {"pad": 0, "cls": 1, "sep": 2}}
WORDS = [f"w{number}" for number in range(5, tiny.SIZES["vocab_size"])]


def tokenizer(family: str = "bert", length: int = 32, unused: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, with special tokens where the family has them; with `unused`, id 1 is "[unused0]" as in English BERTs."""
    follows = tiny.FAMILIES[family].family.positions_follow_padding
    ids = SPECIAL[follows] | ({"cls": tiny.SIZES["vocab_size"] - 1} if unused else {})
    vocabulary = {f"[{name.upper()}]": number for name, number in ids.items()} | {"[UNK]": 3, "[MASK]": 4}
    vocabulary |= {word: 5 + index for index, word in enumerate(WORDS[: -1 if unused else None])}
    vocabulary |= {"[unused0]": 1} if unused else {}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", ids["cls"]), ("[SEP]", ids["sep"])]
    )
    names = {name: f"[{name[:-6].upper()}]" for name in ("pad_token", "cls_token", "sep_token", "unk_token")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", model_max_length=length, **names)


def text(lines: int = 200, seed: int = 0) -> str:
    """Lines of words, each of which mostly follows from the one before."""
    chosen = random.Random(seed)
    made = []
    for _ in range(lines):
        word, line = chosen.randrange(len(WORDS)), []
        for _ in range(chosen.randrange(12, 40)):
            line.append(WORDS[word])
            word = (word * 7 + chosen.choice([1, 1, 1, 5])) % len(WORDS)
        made.append(" ".join(line))
    return "\n".join(made) + "\n"


def stock(family: str = "bert", head: str = "Model", seed: int = 0, **overrides):
    """A stock model of a family with random weights, biases and positions that matter."""
    torch.manual_seed(seed)
    follows = tiny.FAMILIES[family].family.positions_follow_padding
    overrides = {"pad_token_id": SPECIAL[follows]["pad"], **overrides}
    [stock_class] = [c for c in tiny.heads(family) if c.__name__ == tiny._stock_prefix(family) + head]
    model = stock_class(tiny.stock_config(family, **overrides)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("position_embeddings.weight"):
                parameter.normal_(std=0.3)
    return model


def save(folder: Path, family: str = "bert", head: str = "Model", length: int = 32, **overrides) -> Path:
    """A stock checkpoint with its tokenizer, and a text file beside it: `folder.txt`."""
    stock(family, head, **overrides).save_pretrained(folder)
    tokenizer(family, length).save_pretrained(folder)
    folder.with_name(folder.name + ".txt").write_text(text(), encoding="utf-8")
    return folder
