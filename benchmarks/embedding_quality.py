"""What an embedding model keeps when its positions are changed, where token cosines do not look: people's judgements of short texts,
neighbours of long ones, and the order of words."""

import csv
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch.nn.functional import normalize

from hf_posenc.conversion.measuring import neighbours_kept
from hf_posenc.conversion.texts import read_documents


# Texts that are longer than what the models here were trained on, and that their position embedding matrices have room for.
LEAST, MOST = 300, 500
# Sentences of which two words change places.
SENTENCES = 1000
SHORTEST_SENTENCE = 6


@torch.no_grad()
def mean_vectors(model: torch.nn.Module, tokenizer: Any, texts: list[str], longest: int) -> torch.Tensor:
    """The mean of each text's token vectors, special tokens counted in: (texts, features)."""
    vectors: list[torch.Tensor] = [torch.empty(0)] * len(texts)
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    for start in range(0, len(texts), 32):
        chosen = by_length[start : start + 32]
        batch = tokenizer(
            [texts[index] for index in chosen], padding=True, truncation=True, max_length=longest, return_tensors="pt"
        )
        mask = batch["attention_mask"][..., None]
        for index, vector in zip(chosen, (model(**batch)[0] * mask).sum(1) / mask.sum(1)):
            vectors[index] = vector
    return torch.stack(vectors).double()


def read_pairs(file: Path) -> tuple[list[str], list[float]]:
    """Sentences of the STS benchmark, those of a pair one after the other, and people's scores of the pairs."""
    with file.open(encoding="utf-8", newline="") as opened:
        rows = [*csv.reader(opened)]
    return [text for row in rows for text in row[:2]], [float(row[2]) for row in rows]


def sts_spearman(model: torch.nn.Module, tokenizer: Any, file: Path, longest: int = 128) -> float:
    """Spearman's correlation of the cosines of mean vectors with people's scores, over the pairs of a file.

    Args:
        longest: tokens of a sentence that are read.
    """
    texts, scores = read_pairs(file)
    vectors = mean_vectors(model, tokenizer, texts, longest)
    return float(spearmanr(torch.cosine_similarity(vectors[::2], vectors[1::2]).numpy(), scores).statistic)


def long_texts(tokenizer: Any, file: Path) -> list[str]:
    """Texts of LEAST to MOST tokens: paragraphs of a file, one after the other until there are enough; longer ones are left out."""
    texts, gathered, length = [], [], 0
    for paragraph in "\n".join(read_documents([file])).splitlines():
        added = len(tokenizer(paragraph, add_special_tokens=False)["input_ids"])
        if length + added > MOST - 2:
            gathered, length = [], 0
        if added <= MOST - 2:
            gathered, length = [*gathered, paragraph], length + added
        if length + 2 >= LEAST:
            texts.append("\n".join(gathered))
            gathered, length = [], 0
    return texts


def exchanged(sentences: list[str]) -> tuple[list[str], list[str]]:
    """Sentences, and the same with two words in each other's place: words that differ, drawn at random."""
    generator = torch.Generator().manual_seed(0)
    usual, other = [], []
    for sentence in dict.fromkeys(sentences):
        words = sentence.rstrip(" .!?").split()
        if len(words) < SHORTEST_SENTENCE:
            continue
        first, second = sorted(torch.randperm(len(words), generator=generator)[:2].tolist())
        if words[first].lower() == words[second].lower():
            continue
        changed = [*words]
        changed[first], changed[second] = words[second], words[first]
        usual.append(" ".join(words))
        other.append(" ".join(changed))
    return usual[:SENTENCES], other[:SENTENCES]


class Embeddings:
    """The embeddings of an original, which those of converted models are compared with.

    Args:
        original: an encoder.
        tokenizer: the model's.
        data: folder with stsb/stsb-en-test.csv and wikitext2/test.txt.
        longest: tokens of a sentence of STS-B that are read.
    """

    def __init__(self, original: torch.nn.Module, tokenizer: Any, data: Path, longest: int = 128):
        self.tokenizer, self.longest, self.pairs = tokenizer, longest, data / "stsb" / "stsb-en-test.csv"
        self.texts = long_texts(self.tokenizer, data / "wikitext2" / "test.txt")
        self.sentences = exchanged(read_pairs(self.pairs)[0])
        self.long, self.moved, self.sts = self._of(original)

    def _of(self, model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Vectors of long texts, how far each sentence moves when two of its words change places, and the correlation on STS-B."""
        usual, other = (mean_vectors(model, self.tokenizer, part, self.longest) for part in self.sentences)
        return (
            mean_vectors(model, self.tokenizer, self.texts, MOST),
            1 - torch.cosine_similarity(usual, other),
            sts_spearman(model, self.tokenizer, self.pairs, self.longest),
        )

    def kept(self, model: torch.nn.Module) -> dict[str, Any]:
        """What a converted model keeps.

        Returns:
            sts: Spearman's correlation with people's scores, before and after.
            long_texts, long_neighbours: the number of texts of 300 to 500 tokens, and the share of their five nearest neighbours that stay.
            order: when two words of a sentence change places, how far its vector moves (1 − cosine): mean before and after, and
                Spearman's correlation of the two over sentences, which is missing where nothing moves.
        """
        long, moved, sts = self._of(model)
        order = {"original": float(self.moved.mean()), "converted": float(moved.mean())}
        if moved.max() > 1e-6:
            order["spearman"] = float(spearmanr(self.moved, moved).statistic)
        return {
            "sts": {"original": self.sts, "converted": sts},
            "long_texts": len(self.texts),
            "long_neighbours": neighbours_kept(*(unit @ unit.T for unit in map(normalize, (long, self.long)))),
            "order": order,
        }
