"""Sentences whose words stand in another order: it changes what some of them say, and others say the same as before.

Where the two nouns of "the nurse thanked the pilot" change places, who did it changes. "the nurse met the pilot" is the control: the same
two places, as far apart, and one met the other either way; so with two nouns that "and" joins, and with an adverb that moves to the
other end. "Tom bit a dog" and its control "Tom met a dog" move an article too.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reordering:
    """A sentence and its words in another order.

    Attributes:
        text: words with a space between two.
        order: the numbers of its words, in their new order.
    """

    text: str
    order: tuple[int, ...]

    @property
    def reordered(self) -> str:
        words = self.text.split()
        return " ".join(words[index] for index in self.order)


_NOUNS = """
nurse pilot, lawyer farmer, king soldier, teacher student, doctor sailor, actor singer, boy girl, man woman, dog cat, wolf bear,
judge clerk, baker butcher, mayor priest, artist writer, queen knight, guard prisoner, waiter guest, tailor banker, monk bishop,
driver cyclist, mother uncle, father aunt, sister cousin, brother friend, lion tiger, horse cow, monkey parrot, eagle snake,
fox rabbit, sheep goat, manager worker, engineer architect, chemist biologist, poet painter, dancer drummer, general captain,
president minister, senator governor, reporter editor, author publisher, coach player, runner swimmer, hunter fisherman,
witch wizard, prince princess, thief policeman, surgeon patient, dentist plumber, carpenter mason, gardener cook,
tourist guide, barber customer, landlord tenant, buyer seller, neighbor stranger, boss secretary, professor librarian,
robot alien, giant dwarf, clown magician
"""
_PAIRS = [tuple(pair.split()) for pair in _NOUNS.replace("\n", " ").split(",")]
_NAMES = """
Tom Anna Peter Mary John Lucy Paul Jane Mark Emma Jack Susan Henry Alice George Helen Frank Laura Simon Julia Robert Sarah
David Karen James Linda Brian Nancy Kevin Diana
""".split()
_ANIMALS = "dog cat horse goat snake parrot monkey rabbit fox bear goose cow".split()
_DONE = ("thanked", "blamed", "chased", "hired", "called", "pushed", "praised", "followed", "saved", "warned")
_DONE_TO_ANIMALS = ("bit", "chased", "saved", "fed", "caught", "pushed", "followed")
_MUTUAL = ("met", "married", "resembled", "divorced")
_MUTUAL_WITH_ANIMALS = ("met", "resembled", "encountered")
_ALONE = ("slept", "laughed", "left", "waited", "arrived", "smiled")

ROLES, MUTUAL, JOINED, ADVERB = "who does it", "met, married, resembled", "joined by and", "adverb moved"
NAMED, NAMED_MUTUAL = "who does it, name and article", "met, resembled, name and article"
SWAPPED, TURNED = (0, 4, 2, 3, 1), (2, 3, 1, 0)


def _verb(verbs: tuple[str, ...], number: int) -> str:
    return verbs[number % len(verbs)]


def _named(verbs: tuple[str, ...]) -> list[Reordering]:
    """As many as there are pairs of nouns."""
    return [
        Reordering(
            f"{_NAMES[i % len(_NAMES)]} {_verb(verbs, i)} a {_ANIMALS[(i + i // len(_NAMES)) % len(_ANIMALS)]}", TURNED
        )
        for i in range(len(_PAIRS))
    ]


# By kind, sixty each; where two kinds have nouns in common, those of one number have the same.
SENTENCES = {
    ROLES: [Reordering(f"the {a} {_verb(_DONE, i)} the {b}", SWAPPED) for i, (a, b) in enumerate(_PAIRS)],
    MUTUAL: [Reordering(f"the {a} {_verb(_MUTUAL, i)} the {b}", SWAPPED) for i, (a, b) in enumerate(_PAIRS)],
    JOINED: [Reordering(f"the {a} and the {b} {_verb(_ALONE, i)}", (*SWAPPED, 5)) for i, (a, b) in enumerate(_PAIRS)],
    ADVERB: [
        Reordering(f"yesterday the {a} {_verb(_DONE, i)} the {b}", (1, 2, 3, 4, 5, 0))
        for i, (a, b) in enumerate(_PAIRS)
    ],
    NAMED: _named(_DONE_TO_ANIMALS),
    NAMED_MUTUAL: _named(_MUTUAL_WITH_ANIMALS),
}
