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
    """Words and positions in the states, by layer: 0 is what goes into the first layer, N what leaves layer N.

    Attributes:
        model: its name.
        word_share, position_share: (layers + 1,), of the variance of the states. What is left is neither's alone.
        nearest: (layers + 1,), share of the tokens whose state is nearest to their own word embedding.
        interval: (layers + 1, 2), where 95 % of the draws of as many documents have that.
        vocabulary: how many words it is told from.
        tokens, texts, documents, length: how many were read, and tokens of each text, special ones counted.
        words: of which the word share is: those that occur often enough.
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
    """What is left of words and of positions in the states of a model.

    Args:
        model: what [`study`] takes.
        texts, length, windows, seed: as of [`averages`].
        named: in how many of the windows words are told.

    Raises:
        ValueError: word embeddings and states have different widths; too little text, or no tokenizer.
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
