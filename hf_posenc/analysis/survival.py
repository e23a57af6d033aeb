"""What is left of tokens and positions in the hidden states, layer by layer: how much of the variance, and whether a token can still be recognized.

A word is told where its own row of the word embeddings has the largest cosine with the state, of all rows of the vocabulary: no probe is
trained, and positions, which were added to it, are not taken off.

Source: variance after [`averages`]; that BERT keeps positions in its lower layers after Lin, Tan and Frank (2019), "Open Sesame: Getting
inside BERT's Linguistic Knowledge", arXiv:1906.01698.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from .access import Subject, study
from .averages import BATCH, averages
from .bootstrap import interval
from .records import Record
from .windows import CutTexts


@dataclass(frozen=True)
class Survival(Record):
    """What tokens and positions explain in the hidden states of each layer. The result of [`survival.survival`].

    Layer 0 is the input of the first layer, and layer N the output of layer N.

    Attributes:
        model: the model's name.
        word_share: (layers + 1,), share of the hidden states' variance that the mean of each token of the vocabulary explains.
        position_share: (layers + 1,), share that the mean of each position explains. The rest depends on the context.
        nearest: (layers + 1,), share of tokens whose hidden state has its largest cosine similarity with their own token embedding.
        interval: (layers + 1, 2), 95 % bootstrap interval of `nearest`, over documents.
        vocabulary: number of token embeddings that `nearest` compares with.
        tokens: number of tokens in `nearest`.
        texts: number of pieces of text.
        documents: number of documents in `nearest`.
        length: tokens of each piece of text, special tokens counted.
        words: number of different tokens in `word_share`: those that occur often enough.
    """

    model: str
    word_share: np.ndarray
    position_share: np.ndarray
    nearest: np.ndarray
    interval: np.ndarray
    vocabulary: int
    tokens: int
    texts: int
    documents: int
    length: int
    words: int


@torch.no_grad()
def survival(
    model: Subject | str,
    texts: Iterable[str] | None = None,
    length: int = 128,
    windows: int = 1024,
    named: int = 100,
    seed: int = 0,
) -> Survival:
    """Measure how much of the token and of the position is left in the hidden states of each layer.

    Args:
        model: what [`study`] takes.
        texts: documents, as strings. Default: the Python language reference.
        length: tokens of each piece of text, special tokens counted.
        windows: largest number of pieces of text.
        named: number of pieces of text whose hidden states are compared with the token embeddings.
        seed: seed of the pieces of text.

    Raises:
        ValueError: token embeddings and hidden states have different widths, there is too little text, or the model has no tokenizer or is
            not a checkpoint.
    """
    subject = study(model)
    subject.check_trained("what is left of words and positions")
    if subject.word_vectors.shape[1] != subject.sizes.hidden_size:
        raise ValueError(
            f"the states of {subject.name} are {subject.sizes.hidden_size} wide and its token embeddings {subject.word_vectors.shape[1]}: "
            "they have no cosine"
        )
    read = averages(subject, texts, length, windows, seed)
    word_share, position_share = read.shares()
    right = told(subject, read.windows, named)
    document = read.windows.document[:named]
    return Survival(
        model=subject.name,
        word_share=word_share,
        position_share=position_share,
        nearest=right.mean((1, 2)),
        interval=np.array([interval(layer.mean(1), group=document) for layer in right]),
        vocabulary=len(subject.word_vectors),
        tokens=right[0].size,
        texts=len(read.windows.input_ids),
        documents=len(document.unique()),
        length=read.windows.input_ids.shape[1],
        words=len(read.token_ids),
    )


def told(subject: Subject, windows: CutTexts, count: int) -> np.ndarray:
    """Whether a token's state is nearest to its own word embedding, (layers + 1, windows, places), in the first windows."""
    rows = torch.nn.functional.normalize(subject.word_vectors, dim=1)
    right = []
    for ids in windows.input_ids[:count].split(BATCH):
        states = subject.observe(ids).hidden_states
        own = ids[:, windows.places]
        right.append(torch.stack([(state[:, windows.places] @ rows.T).argmax(-1) == own for state in states]))
    return torch.cat(right, dim=1).double().numpy()
