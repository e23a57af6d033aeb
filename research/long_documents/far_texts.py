"""Documents in which what has to be said of one place is written in another, hundreds of tokens before.

Articles of WikiText with sentences between theirs: a sentence says what a name stands for ("Becker is a frigate."), and later ones have the
name and no hint of that. A name stands for something else in every document, so that nothing can be known but by reading. Training and
test have other articles and other wordings.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from long_texts import FACTS, SURNAMES, ids_of, read_articles, sentences
from transformers import PreTrainedTokenizerBase


# What a name can stand for: the nouns of each class.
KINDS = {
    "person": ("painter", "lawyer", "farmer", "nurse"),
    "ship": ("frigate", "steamer", "schooner", "ferry"),
    "river": ("river", "stream", "creek", "canal"),
    "company": ("company", "bank", "firm", "factory"),
    "disease": ("disease", "infection", "fever", "plague"),
}
PLACES = tuple(pair.split(": ")[1] for pair in FACTS[0][2].split("; "))


@dataclass(frozen=True)
class Wording:
    """How sentences are put: definitions, mentions that say nothing of the kind, and mentions with a place to ask for."""

    definitions: tuple[str, ...]
    mentions: tuple[str, ...]
    places: tuple[str, ...]


LEARNED = Wording(
    ("{name} is a {noun}.", "There is a {noun} called {name}.", "{name} was the name of a {noun}."),
    (
        "Nothing more is known about {name}.",
        "Much has been written about {name} since then.",
        "Some of this was said of {name} too.",
        "At that time nobody had heard of {name}.",
    ),
    ("{name} was last seen in {place}.", "The story of {name} came to its end in {place}."),
)
TESTED = Wording(
    ("{name} was a {noun} of some renown.", "They told them of {name}, a {noun}."),
    ("Little was said about {name} that year.", "It was not the last time that {name} was mentioned."),
    ("Nobody saw {name} again after {place}.", "In {place} all trace of {name} was lost."),
)
# Of a name, and of what a name stands for.
QUESTIONS = ("Where was {name} last seen?", "Where was the {noun} last seen?")


@dataclass(frozen=True)
class Passage:
    """A sentence of a document: of its article, or one that has a name.

    Attributes:
        ids: its tokens.
        name: the name, or nothing.
        noun: what the name stands for.
        place: the place that it tells, or nothing.
        defines: whether it says what the name stands for.
    """

    text: str
    ids: list[int]
    name: str = ""
    noun: str = ""
    place: str = ""
    defines: bool = False


KIND_OF = {noun: kind for kind, (_, nouns) in enumerate(KINDS.items()) for noun in nouns}


class Articles:
    """The sentences of a WikiText file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no two articles of `longest` tokens.
    """

    def __init__(self, file: str | Path, tokenizer: PreTrainedTokenizerBase, longest: int):
        self.tokenizer = tokenizer
        self.names = {name: ids[0] for name in SURNAMES if len(ids := ids_of(tokenizer, name)) == 1}
        found = [
            [Passage(text, ids_of(tokenizer, text)) for paragraph in article for text in sentences(paragraph)]
            for article in read_articles(file, tokenizer.unk_token)
        ]
        self.found = [article for article in found if sum(len(one.ids) for one in article) >= longest]
        if len(self.found) < 2:
            raise ValueError(f"{file} has {len(self.found)} articles of {longest} tokens, and it takes two")

    def __len__(self) -> int:
        return len(self.found)

    def anywhere(self, length: int, drawn: random.Random) -> list[Passage]:
        """Sentences of `length` tokens or a little more, of an article from any of its sentences on."""
        article = drawn.choice(self.found)
        ends, before = [], 0
        for one in reversed(article):
            before += len(one.ids)
            ends.append(before)
        starts = [len(article) - 1 - index for index, tokens in enumerate(ends) if tokens >= length]
        return taken(article[drawn.choice(starts) :], length)

    def beginning(self, number: int, length: int) -> list[Passage]:
        """The first sentences of an article, `length` tokens or a little more."""
        return taken(self.found[number], length)

    def told(
        self,
        article: list[Passage],
        length: int,
        names: int,
        mentions: int,
        wording: Wording,
        drawn: random.Random,
        places: bool = False,
    ) -> list[Passage]:
        """A document of at most `length` tokens, special tokens not counted.

        Args:
            article: its real sentences, as many tokens as it may have; what there is no room for is left out at the end.
            names: how many are defined, anywhere in the first half.
            mentions: sentences with each of them, anywhere behind its definition, and nearer ones more often.
            places: whether these tell a place; names then stand for something of a kind each.
        """
        present = {token for one in article for token in one.ids}
        free = [name for name, token in self.names.items() if token not in present]
        chosen = drawn.sample(free, names)
        kinds = drawn.sample([*KINDS], names) if places else drawn.choices([*KINDS], k=names)
        where = drawn.sample(PLACES, names * mentions) if places else [""] * (names * mentions)
        put: list[tuple[float, Passage]] = []
        for name, kind in zip(chosen, kinds):
            noun, at = drawn.choice(KINDS[kind]), drawn.random() / 2
            put.append((at, self.worded(drawn.choice(wording.definitions), name, noun, defines=True)))
            for _ in range(mentions):
                later = at + (1 - at) * drawn.random() ** 2
                said = drawn.choice(wording.places if places else wording.mentions)
                put.append((later, self.worded(said, name, noun, place=where.pop())))
        put.sort(key=lambda one: one[0])
        room = length - sum(len(passage.ids) for _, passage in put)
        found: list[Passage] = []
        done = 0
        for one in article:
            if done + len(one.ids) > room:
                break
            while put and put[0][0] * room <= done:
                found.append(put.pop(0)[1])
            found.append(one)
            done += len(one.ids)
        return found + [passage for _, passage in put]

    def worded(self, wording: str, name: str, noun: str, place: str = "", defines: bool = False) -> Passage:
        text = wording.format(name=name, noun=noun, place=place)
        return Passage(text, ids_of(self.tokenizer, text), name, noun, place, defines)


def taken(article: list[Passage], length: int) -> list[Passage]:
    """As many sentences as have `length` tokens."""
    tokens = 0
    for number, one in enumerate(article):
        tokens += len(one.ids)
        if tokens >= length:
            return article[: number + 1]
    return article


def places_of(told: list[Passage], names: dict[str, int]) -> Iterator[tuple[Passage, int, int]]:
    """Each sentence with a name, the token of the document ([CLS] is the first) that is the name, and how far it is from the definition's."""
    defined: dict[str, int] = {}
    before = 1
    for one in told:
        if one.name:
            at = before + one.ids.index(names[one.name])
            if one.defines:
                defined[one.name] = at
            yield one, at, at - defined[one.name]
        before += len(one.ids)


@dataclass
class Tagged:
    """A document to tag.

    Attributes:
        ids: its tokens, [CLS] and [SEP] at the ends.
        kinds: by place of a name, the class of what it stands for.
        distances: by place of a name, how many tokens before its definition is; 0 in the definition itself.
    """

    ids: list[int]
    kinds: dict[int, int]
    distances: dict[int, int]


def tagged(told: list[Passage], articles: Articles) -> Tagged:
    tokenizer = articles.tokenizer
    inner = [token for one in told for token in one.ids]
    found = Tagged([tokenizer.cls_token_id, *inner, tokenizer.sep_token_id], {}, {})
    for one, at, distance in places_of(told, articles.names):
        found.kinds[at], found.distances[at] = KIND_OF[one.noun], distance
    return found


def asked(told: list[Passage], articles: Articles, identifier: str) -> list[dict]:
    """The questions of a document in the columns of run_qa.py, and in `places` how many places an answer needs, in `distance`
    how far apart what is needed is: 0 for a single place.
    """
    context, starts = "", []
    for one in told:
        starts.append(len(context))
        context += f"{one.text} "
    begins = dict(zip(map(id, told), starts))
    found = []
    for number, (one, _, distance) in enumerate(places_of(told, articles.names)):
        if not one.place:
            continue
        start = begins[id(one)] + one.text.index(one.place)
        answer = {"text": [one.place], "answer_start": [start]}
        for places, wording in enumerate(QUESTIONS, start=1):
            found.append(
                {
                    "id": f"{identifier}-{number}-{places}",
                    "question": wording.format(name=one.name, noun=one.noun),
                    "context": context,
                    "answers": answer,
                    "places": places,
                    "distance": distance if places == 2 else 0,
                }
            )
    return found
