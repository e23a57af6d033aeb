"""Does word order matter to a model? How its vectors change when words swap places, or all positions are shifted.

Tokens are compared with themselves: the vector of a word's token before, and of the same token where it has gone. The change is
1 - cosine, as a share of that between unrelated tokens (or texts), which is 1: how far apart vectors of a model lie on average
differs from model to model. Intervals are where 95 % of the draws are when texts are drawn again (see `bootstrap`), documents as a whole.

Source: phase shift after Sinha, Kazemnejad, Reddy, Pineau, Hupkes and Williams (2022), "The Curious Case of Absolute Position
Embeddings".
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure

from . import style
from .access import Subject, study
from .bootstrap import interval
from .progress import steps
from .records import Record
from .sentences import MUTUAL, ROLES, SENTENCES, Reordering
from .windows import CutTexts, cut


# 1 - cosine below which vectors are the same but for rounding.
SAME = 1e-6
REVERSED, SHUFFLED = "words reversed", "words shuffled"


@dataclass(frozen=True)
class Change(Record):
    """How much hidden states of the last layer change. 0 is no change, and 1 the difference between unrelated tokens or texts.

    The change is 1 - cosine similarity, divided by its mean between unrelated tokens or texts.

    Attributes:
        tokens: mean change of tokens, without special tokens.
        text: mean change of the vector of a text, which is the mean of all its hidden states.
        largest: the largest absolute change of a number in a hidden state.
        tokens_interval: 95 % bootstrap interval of `tokens`, (low, high).
        text_interval: 95 % bootstrap interval of `text`, (low, high).
    """

    tokens: float
    text: float
    largest: float
    tokens_interval: tuple[float, float]
    text_interval: tuple[float, float]


@dataclass(frozen=True)
class SentenceChange(Record):
    """How much sentences of one kind change if their words are in another order.

    Attributes:
        example: the first sentence, and the same words in the other order.
        count: number of sentences.
        change: the mean [`Change`].
        texts: (count,), the change of the vector of each sentence.
        unrelated: the change between two different sentences of this kind.
    """

    example: tuple[str, str]
    count: int
    change: Change
    texts: np.ndarray
    unrelated: float


@dataclass(frozen=True)
class OrderSensitivity(Record):
    """How much hidden states of the last layer change if words are reordered. The result of [`order_sensitivity`].

    Changes are those of [`Change`]: 1 is the difference between unrelated tokens or texts.

    Attributes:
        model: the model's name.
        reordered: a [`Change`] for "words reversed" and one for "words shuffled".
        distances: distances, in words, between two words that are swapped.
        swapped: (distances,), change of the tokens of the two words.
        others: (distances,), change of the other tokens.
        text: (distances,), change of the vector of the text.
        swapped_interval: (distances, 2), 95 % bootstrap interval of `swapped`.
        sentences: a [`SentenceChange`] for each kind of sentence.
        unrelated_tokens: mean 1 - cosine similarity of tokens of different texts, which counts as a change of 1.
        unrelated_texts: mean 1 - cosine similarity of different texts, which counts as a change of 1.
        texts: number of texts.
        length: tokens of each text, special tokens counted.
    """

    model: str
    reordered: dict[str, Change]
    distances: list[int]
    swapped: np.ndarray
    others: np.ndarray
    text: np.ndarray
    swapped_interval: np.ndarray
    sentences: dict[str, SentenceChange]
    unrelated_tokens: float
    unrelated_texts: float
    texts: int
    length: int


@dataclass(frozen=True)
class PhaseShift(Record):
    """How much hidden states of the last layer change if all positions are shifted. The result of [`phase_shift`].

    Attributes:
        model: the model's name.
        shifts: numbers of positions.
        all: a [`Change`] for each shift of all tokens. It is 0 if a model depends on distances only.
        but_first: a [`Change`] for each shift of all tokens but the first.
        unrelated_tokens: mean 1 - cosine similarity of tokens of different texts, which counts as a change of 1.
        unrelated_texts: mean 1 - cosine similarity of different texts, which counts as a change of 1.
        texts: number of texts.
        length: tokens of each text, special tokens counted.
        first: the first token in the tokenizer, such as "[CLS]", or "the first token" if it is not a special token.
    """

    model: str
    shifts: list[int]
    all: list[Change]
    but_first: list[Change]
    unrelated_tokens: float
    unrelated_texts: float
    texts: int
    length: int
    first: str


def reorder(words: Sequence[int | None], order: Sequence[int]) -> torch.Tensor:
    """Where each token of a text comes from when its words stand in another order; special tokens stay.

    Args:
        words: by token, the number of its word, None for special tokens.
        order: the words' numbers, from 0 as they occur, in their new order.
    """
    numbers = [*dict.fromkeys(word for word in words if word is not None)]
    tokens = {number: [place for place, word in enumerate(words) if word == number] for number in numbers}
    moved = iter([place for index in order for place in tokens[numbers[index]]])
    return torch.tensor([place if word is None else next(moved) for place, word in enumerate(words)])


class _Texts:
    """Pieces of text with the last vectors of a model for them as they stand, which others are compared with.

    Attributes:
        states: (windows, length, width).
        between_tokens, between_texts: (windows,), 1 - cosine of tokens (means over tokens) of a window and the one before it.
        unrelated_tokens, unrelated_texts: their means.
    """

    def __init__(self, subject: Subject, windows: CutTexts):
        if len(windows.input_ids) < 2:
            raise ValueError(
                "changes are compared with differences between texts, but only one text is long enough: pass more texts"
            )
        self.subject, self.windows = subject, windows
        self.states = self.last(windows.input_ids)
        others, places = self.states.roll(1, dims=0), windows.places
        self.between_tokens = _distance(self.states[:, places], others[:, places.roll(1)]).mean(1)
        self.between_texts = _distance(self.states.mean(1), others.mean(1))
        self.unrelated_tokens, self.unrelated_texts = (
            between.mean().item() for between in (self.between_tokens, self.between_texts)
        )
        if min(self.unrelated_tokens, self.unrelated_texts) < SAME:
            raise ValueError(
                "changes are compared with differences between texts, but all texts have the same vectors: are all words unknown to the tokenizer?"
            )

    def last(self, input_ids: torch.Tensor, **inputs) -> torch.Tensor:
        """Vectors (windows, length, width) of the last layer."""
        return self.subject.observe(input_ids, **inputs).hidden_states[-1]

    def reordered(self, input_ids: torch.Tensor, origin: torch.Tensor) -> torch.Tensor:
        """Vectors of texts whose tokens stand in another order, each where its token stands in `input_ids`.

        Args:
            origin: (windows, length), where the token of each place comes from.
        """
        return self.last(input_ids.gather(1, origin)).take_along_dim(origin.argsort(1)[..., None], dim=1)

    def token_change(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """(windows, length), change of each token."""
        return _distance(before, after) / self.unrelated_tokens

    def text_change(self, before: torch.Tensor, after: torch.Tensor) -> float:
        """Mean change of the means over tokens."""
        return _distance(before.mean(1), after.mean(1)).mean().item() / self.unrelated_texts

    def change(self, before: torch.Tensor, after: torch.Tensor, places: torch.Tensor) -> Change:
        """Between vectors (windows, length, width) of the same tokens of these windows, in the same order, `places` those of words."""
        tokens, texts = _distance(before, after)[:, places].mean(1), _distance(before.mean(1), after.mean(1))
        document = self.windows.document
        return Change(
            tokens=tokens.mean().item() / self.unrelated_tokens,
            text=texts.mean().item() / self.unrelated_texts,
            largest=(after - before).abs().max().item(),
            tokens_interval=interval(tokens, self.between_tokens, document),
            text_interval=interval(texts, self.between_texts, document),
        )


def _distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """1 - cosine, which rounding takes no lower than 0."""
    return (1 - torch.cosine_similarity(first.double(), second.double(), dim=-1)).clamp(min=0)


def _read(model: Subject | str, texts: Iterable[str] | None, length: int, count: int, seed: int) -> _Texts:
    """Pieces of texts, of at most half the tokens that the model reads."""
    subject = study(model)
    generator = torch.Generator().manual_seed(seed)
    length = min(length, (subject.longest or 2 * length) // 2)
    return _Texts(subject, cut(subject, texts, length, count, generator))


def _number_of_words(words: Sequence[int | None]) -> int:
    return len({*words} - {None})


def _swaps(read: _Texts, distance: int, generator: torch.Generator) -> tuple[float, float, float, tuple[float, float]]:
    """When two words that are `distance` apart change places: change of these, of all others and of texts, and the first's interval."""
    origins, moved = [], []
    for words in read.windows.words:
        count = _number_of_words(words)
        first = int(torch.randint(0, count - distance, (1,), generator=generator))
        order = [*range(count)]
        order[first], order[first + distance] = order[first + distance], order[first]
        origins.append(reorder(words, order))
        numbers = [*dict.fromkeys(word for word in words if word is not None)]
        pair = {numbers[first], numbers[first + distance]}
        moved.append([word in pair for word in words])
    after = read.reordered(read.windows.input_ids, torch.stack(origins))
    changes, is_moved = read.token_change(read.states, after), torch.tensor(moved)
    is_word = torch.tensor([[word is not None for word in words] for words in read.windows.words])
    values = changes[is_moved].mean().item(), changes[is_word & ~is_moved].mean().item()
    own = interval((changes * is_moved).sum(1), is_moved.sum(1), read.windows.document)
    return *values, read.text_change(read.states, after), own


def _sentence(read: _Texts, sentence: Reordering) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Vectors (1, length, width) before and after, each token's where it stands before, and the places of words."""
    encoded = read.subject.tokenizer([sentence.text])
    # A tokenizer that splits one of its words has more of them to say so, and all move together.
    by_character = [encoded.token_to_chars(0, place) for place in range(len(encoded["input_ids"][0]))]
    words = [None if span is None else len(sentence.text[: max(span.end, 1)].split()) - 1 for span in by_character]
    ids, origin = torch.tensor(encoded["input_ids"]), reorder(words, sentence.order)[None]
    places = torch.tensor([place for place, word in enumerate(words) if word is not None])
    return read.last(ids), read.reordered(ids, origin), places


def _sentences(read: _Texts, sentences: Iterable[Reordering]) -> SentenceChange:
    tokens, texts, vectors, examples, largest = [], [], [], [], 0.0
    for sentence in sentences:
        examples.append((sentence.text, sentence.reordered))
        before, after, places = _sentence(read, sentence)
        tokens.append(_distance(before, after)[0, places].mean().item() / read.unrelated_tokens)
        texts.append(_distance(before.mean(1), after.mean(1)).item() / read.unrelated_texts)
        vectors.append(before.mean(1))
        largest = max(largest, (after - before).abs().max().item())
    change = Change(float(np.mean(tokens)), float(np.mean(texts)), largest, interval(tokens), interval(texts))
    means = torch.cat(vectors)
    unrelated = _distance(means, means.roll(1, dims=0)).mean().item() / read.unrelated_texts
    return SentenceChange(examples[0], len(examples), change, np.array(texts), unrelated)


def order_sensitivity(
    model: Subject | str, texts: Iterable[str] | None = None, length: int = 48, count: int = 100, seed: int = 0
) -> OrderSensitivity:
    """Measure how much hidden states of the last layer change if words of a text are swapped, reversed or shuffled.

    It also measures short sentences whose meaning does, or does not, change with the order of words.

    Args:
        model: what [`study`] takes.
        texts: documents, as strings. Default: the Python language reference.
        length: tokens of a text, special tokens counted. At most half of the model's maximum sequence length is used.
        count: number of texts.
        seed: seed of the texts and orders.

    Raises:
        ValueError: there is too little text, or the model has no tokenizer.
    """
    read, generator = _read(model, texts, length, count, seed), torch.Generator().manual_seed(seed)
    words, ids, places = read.windows.words, read.windows.input_ids, read.windows.places
    counts = [_number_of_words(row) for row in words]
    orders = {
        REVERSED: [[*reversed(range(number))] for number in counts],
        SHUFFLED: [torch.randperm(number, generator=generator).tolist() for number in counts],
    }
    reordered, parts = {}, 2 + len(SENTENCES)
    for name, rows in steps(orders.items(), "order", 0, parts):
        origin = torch.stack([reorder(row, order) for row, order in zip(words, rows)])
        reordered[name] = read.change(read.states, read.reordered(ids, origin), places)
    distances = [2**power for power in range(10) if 2**power < min(counts)]
    swaps = [_swaps(read, distance, generator) for distance in steps(distances, "distance", 1, parts)]
    swapped, others, text, intervals = zip(*swaps)
    return OrderSensitivity(
        model=read.subject.name,
        reordered=reordered,
        distances=distances,
        swapped=np.array(swapped),
        others=np.array(others),
        text=np.array(text),
        swapped_interval=np.array(intervals),
        sentences={
            kind: _sentences(read, steps(sentences, "sentence", part, parts))
            for part, (kind, sentences) in enumerate(SENTENCES.items(), start=2)
        },
        unrelated_tokens=read.unrelated_tokens,
        unrelated_texts=read.unrelated_texts,
        texts=len(ids),
        length=ids.shape[1],
    )


def phase_shift(
    model: Subject | str,
    texts: Iterable[str] | None = None,
    shifts: Sequence[int] | None = None,
    length: int = 48,
    count: int = 100,
    seed: int = 0,
) -> PhaseShift:
    """Measure how much hidden states of the last layer change if all positions are shifted, with the first token and without it.

    Args:
        model: what [`study`] takes.
        texts: documents, as strings. Default: the Python language reference.
        shifts: numbers of positions. Default: powers of 4, and the largest shift that the position embedding matrix allows. Without such a
            matrix, the last token is shifted to at most the 512th position.
        length: tokens of a text, special tokens counted. At most half of the model's maximum sequence length is used.
        count: number of texts.
        seed: seed of the texts.

    Raises:
        ValueError: a shift is too large for the position embedding matrix, there is too little text, or the model has no tokenizer.

    Source: Sinha et al. 2022 (https://arxiv.org/abs/2210.12574).
    """
    read = _read(model, texts, length, count, seed)
    subject, ids, places = read.subject, read.windows.input_ids, read.windows.places
    room = (subject.longest or 512) - ids.shape[1]
    if shifts is None:
        shifts = sorted({*(4**power for power in range(10) if 4**power <= room), room})
    beyond = [shift for shift in shifts if subject.longest and not 0 <= shift <= room]
    if beyond:
        raise ValueError(
            f"a shift of {beyond[0]} leads beyond the {subject.longest} positions of {subject.name}: with texts of "
            f"{ids.shape[1]} tokens it can be 0 to {room}"
        )
    start = torch.arange(ids.shape[1])[None] + subject.sizes.first_position
    changes: dict[int, list[Change]] = {0: [], 1: []}
    for shift, stay in steps([(shift, stay) for shift in shifts for stay in changes], "shift"):
        position_ids = torch.cat([start[:, :stay], start[:, stay:] + shift], dim=1)
        changes[stay].append(read.change(read.states, read.last(ids, position_ids=position_ids), places))
    return PhaseShift(
        model=subject.name,
        shifts=[*shifts],
        all=changes[0],
        but_first=changes[1],
        unrelated_tokens=read.unrelated_tokens,
        unrelated_texts=read.unrelated_texts,
        texts=len(ids),
        length=ids.shape[1],
        first=_first_token(read),
    )


def _first_token(read: _Texts) -> str:
    """What the tokenizer calls the token that all texts begin with."""
    if read.windows.words[0][0] is not None:
        return "the first token"
    return read.subject.tokenizer.convert_ids_to_tokens(int(read.windows.input_ids[0, 0]))


def _with_whiskers(changes: Iterable[Change], part: str) -> tuple[np.ndarray, np.ndarray]:
    """A part of some changes, (number,), and the whiskers of its interval, (2, number)."""
    rows = np.array([(getattr(change, part), *getattr(change, f"{part}_interval")) for change in changes])
    return rows[:, 0], style.whiskers(*rows.T)


@style.styled
def plot_order_sensitivity(data: OrderSensitivity) -> Figure:
    """The change for each distance of two swapped words, for reordered sentences, and for reversed and shuffled texts."""
    figure, [[left], [right]] = style.panels(2, 1, height=2.9)
    lines = {"the two words": data.swapped, "the other words": data.others, "the text": data.text}
    # The last two may lie on each other.
    for (label, values), colour, dashes in zip(lines.items(), style.CATEGORIES, ("-", "-", "--")):
        left.plot(data.distances, values, marker="o", markersize=4, color=colour, linestyle=dashes, label=label)
    left.set_xscale("log", base=2)
    left.set_xticks(data.distances, [str(distance) for distance in data.distances])
    left.set(title="two words swap places", xlabel="words apart", ylabel="change (1: unrelated)")
    left.set_ylim(bottom=0)
    left.legend()
    bars = {kind: found.change for kind, found in data.sentences.items()} | data.reordered
    names = [textwrap.fill(name.removeprefix("words "), 11) for name in bars]
    for shift, (part, colour) in enumerate((("tokens", style.VERMILION), ("text", style.GREEN))):
        heights, whiskers = _with_whiskers(bars.values(), part)
        places = np.arange(len(bars)) + 0.4 * shift - 0.2
        right.bar(places, heights, 0.38, color=colour, label=part, yerr=whiskers, error_kw={"linewidth": 0.8})
    right.set_xticks(range(len(bars)), names)
    right.set(title="sentences and whole texts", ylabel="change (1: unrelated)")
    right.legend()
    return figure


@style.styled
def plot_phase_shift(data: PhaseShift) -> Figure:
    """The change of tokens and texts for each shift, with the first token and without it; whiskers are 95 % intervals."""
    figure, axes = style.panels(1, 2, sharey=True)
    for axis, part in zip(axes[0], ("tokens", "text")):
        for changes, label, colour in (
            (data.all, f"{data.first} is shifted too", style.BLUE),
            (data.but_first, f"{data.first} stays", style.VERMILION),
        ):
            values, whiskers = _with_whiskers(changes, part)
            axis.errorbar(data.shifts, values, whiskers, marker="o", markersize=4, color=colour, label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(data.shifts, [str(shift) for shift in data.shifts])
        axis.minorticks_off()
        axis.set(
            title={"tokens": "vectors of tokens", "text": "vector of the text"}[part],
            xlabel="all positions shifted by",
        )
    axes[0, 0].set_ylabel("change (1: unrelated)")
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].legend(loc="upper left")
    return figure


def describe_order_sensitivity(data: OrderSensitivity) -> str:
    """Say in some sentences how much texts and sentences change if their words are reordered."""
    roles, mutual = data.sentences[ROLES], data.sentences[MUTUAL]
    shuffled = data.reordered[SHUFFLED]
    if shuffled.largest < 1e-4:
        return f"{data.model} does not know the order of words: if they are shuffled, no word's vector changes by more than {shuffled.largest:.0e}."
    return (
        f"In {data.model}, 100% is the difference between unrelated texts or tokens. Shuffling the words of a text changes its vector by "
        f"{_said(shuffled)}, and those of its words by {_said(shuffled, 'tokens')}. Sentences such as “{roles.example[0]}” change by "
        f"{_said(roles.change)} if they become “{roles.example[1]}”. Sentences such as “{mutual.example[0]}”, whose meaning stays the same in "
        f"“{mutual.example[1]}”, change by {_said(mutual.change)}. Two neighbours that swap places change by {data.swapped[0]:.0%}, and two words "
        f"{data.distances[-1]} apart by {data.swapped[-1]:.0%} ({data.texts} texts of {data.length} tokens, {roles.count} sentences of each kind; "
        "95% intervals)."
    )


def _said(change: Change, part: str = "text") -> str:
    low, high = getattr(change, f"{part}_interval")
    own = f"{getattr(change, part):.1%}"
    return f"{own} ({low:.1%} to {high:.1%})" if np.isfinite(low) else own


def describe_phase_shift(data: PhaseShift) -> str:
    """Say in some sentences how much tokens and texts change if positions are shifted."""
    largest = max(change.largest for change in data.all)
    worst = max(data.all, key=lambda change: change.tokens)
    where = data.shifts[data.all.index(worst)]
    stays = max(data.but_first, key=lambda change: change.tokens)
    far = data.shifts[data.but_first.index(stays)]
    if largest < 1e-4:
        start = f"{data.model} reads a text in the same way wherever it begins: no value in any vector changes by more than {largest:.0e}"
    else:
        start = (
            f"Where a text begins matters to {data.model}: shifted by {where} positions, its tokens change by {_said(worst, 'tokens')} and "
            f"the text by {_said(worst)} of the difference between unrelated ones"
        )
    sample = "; 95% intervals over documents" if np.isfinite(worst.tokens_interval).all() else " of one document"
    return (
        f"{start}. If {data.first} stays and the rest is shifted by {far}, tokens change by {_said(stays, 'tokens')} ({data.texts} texts of "
        f"{data.length} tokens{sample})."
    )
