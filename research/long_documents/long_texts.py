"""Long documents with something to find in them, made of real text without a download.

`passkey` and `needle` have LongEmbed's form (Zhu et al. 2024): all documents of a length are the same but for one place, where
the first hides a person's pass key among sentences that repeat, and the second a fact of general knowledge in real prose. In
`articles`, sentences of Wikipedia's articles are taken out of them, and ask for the document that each is from, an article or a part
of one: that measures the topic as well as how far a model reads.
"""

import itertools
import random
import re
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hf_posenc.files import write_whole


@dataclass
class Retrieval:
    """Documents, and what to find in them.

    Attributes:
        documents: token ids of each, [CLS] and [SEP] at the ends.
        queries: the text of each.
        relevant: the one document that each query asks for.
        depths: where in it the answer lies or lay, by query: 0 at the beginning, 1 at the end.
        groups: what queries have in common that the score depends on, by query: the article that they are from.
        cut_off: the rank at which nDCG ends.
    """

    documents: list[list[int]]
    queries: list[str]
    relevant: list[int]
    depths: list[float]
    groups: list[int]
    cut_off: int


FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
FIRST_NAMES = (
    "Alice Bruno Clara David Elena Felix Greta Hassan Irene Jakob Keiko Louis Maria Nadia Oscar Paula Quentin Rosa Samuel Tanya "
    "Umberto Vera Walter Ximena Yusuf Zoe Anders Bridget Cesar Daphne Edgar Fiona Gustavo Hannah Igor Julia Kevin Lydia Marcus "
    "Nora Olaf Priya Ramon Sofia Theo Ursula Victor Wendy Xavier Yvonne Albert Beatrix Conrad Dolores Emil Flora George Heidi "
    "Isaac Joanna Karim Laura Miguel Naomi Otto Petra Rafael Sarah Thomas Ulrike Vincent Wilma Aisha Boris Camille Dmitri Esther "
    "Francis Gloria Henrik Ingrid Javier Kirsten Leon Monica Nikolai Odette Patrick Regina Stefan Tamara Ulysses Viola Winston "
    "Agnes Bernard Carmen Dennis Eva Fabian"
).split()
SURNAMES = (
    "Abbott Becker Castillo Dubois Eriksen Fischer Greene Hoffman Ivanov Jensen Kowalski Lindgren Moreau Novak Okafor Petrov Quinn "
    "Rossi Schneider Tanaka Underwood Vargas Walker Xu Yamamoto Zimmer Andrade Bauer Carlsen Drummond Engel Farrell Gallagher "
    "Hughes Iqbal Jacobs Kaplan Larsson McLean Nguyen Olsen Palmer Ramirez Sorensen Thornton Ueda Vogel Whitfield Yilmaz Zhang "
    "Archer Bennett Chandra Delgado Espinoza Fournier Gupta Haddad Ibarra Johansson Keller Lombardi Marsh Nakamura Ortega Pereira "
    "Reyes Santoro Takahashi Ulrich Volkov Weber Young Zapata Aldridge Barnes Coleman Dawson Ellison Foster Griffith Harlow Irwin "
    "Joyner Kemp Lambert Morrow Norton Osborne Parsons Radcliffe Shelby Tucker Upton Vaughn Wexler Yates Zeller Ashby Blackwood"
).split()


# Of each kind a question, the sentence that answers it, and what fills them.
FACTS = (
    (
        "What is the capital of {0}?",
        "The capital of {0} is {1}.",
        "Peru: Lima; Kenya: Nairobi; Norway: Oslo; Vietnam: Hanoi; Portugal: Lisbon; Chile: Santiago; Egypt: Cairo; Finland: "
        "Helsinki; Thailand: Bangkok; Cuba: Havana; Iceland: Reykjavik; Nepal: Kathmandu; Austria: Vienna; Ghana: Accra; Canada: "
        "Ottawa; Mongolia: Ulaanbaatar; Hungary: Budapest; Ecuador: Quito; Jordan: Amman; Ireland: Dublin",
    ),
    (
        "Who wrote {0}?",
        "{0} was written by {1}.",
        "Moby Dick: Herman Melville; War and Peace: Leo Tolstoy; Don Quixote: Miguel de Cervantes; Jane Eyre: Charlotte Bronte; "
        "Frankenstein: Mary Shelley; Dracula: Bram Stoker; The Trial: Franz Kafka; Ulysses: James Joyce; Hamlet: William "
        "Shakespeare; Faust: Johann Wolfgang von Goethe; The Divine Comedy: Dante Alighieri; Candide: Voltaire; The Stranger: "
        "Albert Camus; Emma: Jane Austen; The Odyssey: Homer; Les Miserables: Victor Hugo; Oliver Twist: Charles Dickens; Walden: "
        "Henry David Thoreau; The Jungle Book: Rudyard Kipling; Crime and Punishment: Fyodor Dostoevsky",
    ),
    (
        "What is the chemical symbol of {0}?",
        "The chemical symbol of {0} is {1}.",
        "gold: Au; silver: Ag; iron: Fe; lead: Pb; tin: Sn; copper: Cu; sodium: Na; potassium: K; mercury: Hg; tungsten: W; "
        "helium: He; neon: Ne; zinc: Zn; nickel: Ni; uranium: U",
    ),
    (
        "Who painted {0}?",
        "{0} was painted by {1}.",
        "the Mona Lisa: Leonardo da Vinci; The Starry Night: Vincent van Gogh; Guernica: Pablo Picasso; The Scream: Edvard Munch; "
        "The Night Watch: Rembrandt; The Kiss: Gustav Klimt; The Birth of Venus: Sandro Botticelli; Las Meninas: Diego Velazquez; "
        "American Gothic: Grant Wood; Water Lilies: Claude Monet; The Persistence of Memory: Salvador Dali; Girl with a Pearl "
        "Earring: Johannes Vermeer; Nighthawks: Edward Hopper; The School of Athens: Raphael; The Hay Wain: John Constable",
    ),
    (
        "Who invented {0}?",
        "{1} invented {0}.",
        "the telephone: Alexander Graham Bell; dynamite: Alfred Nobel; the printing press: Johannes Gutenberg; the battery: "
        "Alessandro Volta; the lightning rod: Benjamin Franklin; the steamboat: Robert Fulton; the sewing machine: Elias Howe; "
        "the phonograph: Thomas Edison; the cotton gin: Eli Whitney; the diesel engine: Rudolf Diesel; the saxophone: Adolphe Sax; "
        "the mercury thermometer: Daniel Fahrenheit; the World Wide Web: Tim Berners-Lee; logarithms: John Napier; the "
        "revolver: Samuel Colt",
    ),
    (
        "Where is {0}?",
        "{0} is in {1}.",
        "the Eiffel Tower: Paris; the Colosseum: Rome; the Kremlin: Moscow; the Taj Mahal: Agra; the Acropolis: Athens; the "
        "Brandenburg Gate: Berlin; the Golden Gate Bridge: San Francisco; the Alhambra: Granada; the Blue Mosque: Istanbul; the "
        "Space Needle: Seattle; the Little Mermaid: Copenhagen; the Forbidden City: Beijing; Table Mountain: Cape Town; the Sagrada "
        "Familia: Barcelona; the Atomium: Brussels",
    ),
)


def facts() -> list[tuple[str, str]]:
    """Questions, each with the sentence that answers it."""
    found = []
    for question, sentence, pairs in FACTS:
        for pair in pairs.split("; "):
            thing, answer = pair.split(": ")
            stated = sentence.format(thing, answer)
            found.append((question.format(thing), stated[0].upper() + stated[1:]))
    return found


def passkey(tokenizer: PreTrainedTokenizerBase, length: int, candidates: int, queries: int, seed: int) -> Retrieval:
    """Persons' pass keys in sentences that repeat.

    Args:
        length: tokens of each document, special tokens counted.
        candidates: number of documents, each with a person of its own.
        queries: how many of the persons are asked for.
        seed: of names, keys, depths and questions.

    Raises:
        ValueError: more documents are asked for than there are names.
    """
    drawn = random.Random(seed)
    first, last = (_some(names, candidates, "names", drawn) for names in (FIRST_NAMES, SURNAMES))
    needles, asked = [], []
    for name in map(" ".join, zip(first, last)):
        key = drawn.randint(10000, 99999)
        needles.append(f"{name}'s pass key is {key}. Remember it. {key} is the pass key for {name}.")
        asked.append(f"What is the pass key for {name}?")
    return _hidden(tokenizer, length, itertools.cycle(sentences(FILLER)), needles, asked, queries, drawn)


def needle(
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    candidates: int,
    queries: int,
    seed: int,
    haystack: list[str],
) -> Retrieval:
    """Facts of general knowledge in real prose, the same around each.

    Args:
        haystack: sentences, at least `length` tokens of them.

    Raises:
        ValueError: there are fewer facts than documents, or too few sentences.
    """
    drawn = random.Random(seed)
    asked, needles = zip(*_some(facts(), candidates, "facts", drawn))
    return _hidden(tokenizer, length, iter(haystack), list(needles), list(asked), queries, drawn)


def _some(things: list, number: int, what: str, drawn: random.Random) -> list:
    if number > len(things):
        raise ValueError(f"there are {len(things)} {what}, too few for {number} documents")
    return drawn.sample(things, number)


def _hidden(tokenizer, length, around, needles, asked, queries, drawn) -> Retrieval:
    """A document for each needle, which lies between two sentences of what is around it, at depths spread evenly."""
    if queries > len(needles):
        raise ValueError(f"{queries} queries are more than the {len(needles)} documents that they ask for")
    room = length - 2
    inner: list[list[int]] = []
    ends = [0]
    while ends[-1] < room:
        sentence = next(around, None)
        if sentence is None:
            raise ValueError(f"the text has {ends[-1]} tokens, too few for documents of {length}")
        if ids := ids_of(tokenizer, sentence):
            inner.append(ids)
            ends.append(ends[-1] + len(ids))
    tokens = [*itertools.chain.from_iterable(inner)]
    depths = [(place + 0.5) / len(needles) for place in range(len(needles))]
    drawn.shuffle(depths)
    documents, found_at = [], []
    for text, depth in zip(needles, depths):
        hidden = ids_of(tokenizer, text)
        free = room - len(hidden)
        if free < 0:
            raise ValueError(f"documents of {length} tokens have no room for {text!r}")
        start = min((end for end in ends if end <= free), key=lambda end: abs(end - depth * free))
        documents.append(
            [tokenizer.cls_token_id, *tokens[:start], *hidden, *tokens[start:free], tokenizer.sep_token_id]
        )
        found_at.append(start / free if free else 0.0)
    chosen = sorted(drawn.sample(range(len(needles)), queries))
    return Retrieval(
        documents, [asked[one] for one in chosen], chosen, [found_at[one] for one in chosen], chosen, cut_off=1
    )


def articles(
    tokenizer: PreTrainedTokenizerBase,
    texts: list[list[str]],
    length: int,
    queries: int,
    seed: int,
    least_words: int = 8,
    most_parts: int = 3,
    joined: bool = False,
) -> Retrieval:
    """Sentences taken out of articles, each asking for the document that it is from.

    An article is as many documents as it has text for, one after the other, so that its topic alone does not tell them apart.

    Args:
        texts: paragraphs of each article.
        length: tokens of a document, special tokens counted; shorter articles, and what is left at the end, are left out.
        queries: sentences that are taken out of each document, one out of each of as many parts of the same length.
        seed: of the choice of sentences.
        least_words: words that a sentence has at least.
        most_parts: documents that an article is at most, where they are not joined.
        joined: what is left of an article, or all of a short one, begins a document that goes on with the next article, so that
            every article is used.

    Raises:
        ValueError: there are fewer than two documents.
    """
    drawn = random.Random(seed)
    found = Retrieval([], [], [], [], [], cut_off=10)
    by_article = [
        [(article, sentence) for paragraph in paragraphs for sentence in sentences(paragraph)]
        for article, paragraphs in enumerate(texts)
    ]
    for told in [[*itertools.chain.from_iterable(by_article)]] if joined else by_article:
        owners, left = [article for article, _ in told], [sentence for _, sentence in told]
        ids = [ids_of(tokenizer, sentence) for sentence in left]
        for _ in itertools.count() if joined else range(most_parts):
            chosen = _spread_sentences(left, ids, length - 2, queries, least_words, drawn)
            kept: list[int] = []
            used = 0
            while used < len(left) and len(kept) < length - 2:
                kept += ids[used] if used not in chosen else []
                used += 1
            if len(chosen) < queries or len(kept) < length - 2:
                break
            before = 0
            for number, own in enumerate(ids[:used]):
                if number in chosen:
                    found.queries.append(left[number])
                    found.relevant.append(len(found.documents))
                    found.depths.append(before / (length - 2))
                    found.groups.append(owners[number])
                else:
                    before += len(own)
            found.documents.append([tokenizer.cls_token_id, *kept[: length - 2], tokenizer.sep_token_id])
            owners, left, ids = owners[used:], left[used:], ids[used:]
    if len(found.documents) < 2:
        raise ValueError(
            f"{len(texts)} articles give {len(found.documents)} documents of {length} tokens; it takes two"
        )
    return found


def _spread_sentences(
    texts: list[str], ids: list[list[int]], room: int, number: int, least_words: int, drawn: random.Random
) -> set[int]:
    """A sentence out of each of `number` parts of the first `room` tokens, fewer where a part has none that is long enough.

    What is taken out makes room for more text behind, which is not chosen from.
    """
    parts: list[list[int]] = [[] for _ in range(number)]
    before = 0
    for index, (text, own) in enumerate(zip(texts, ids)):
        part = before * number // room
        if part < number and before + len(own) <= room and len(text.split()) >= least_words:
            parts[part].append(index)
        before += len(own)
    return {drawn.choice(part) for part in parts if part}


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text, without special tokens, however many."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def sentences(text: str) -> list[str]:
    """The sentences of a text: it is cut behind full stops, question and exclamation marks before a capital letter or number."""
    return [part for part in re.split(r"(?<=[.!?])[\"”']?\s+(?=[\"“'A-Z0-9])", text) if part.strip()]


TITLE = re.compile(r"= [^= ](.*[^= ])? =")
HEADING = re.compile(r"(= ?){2,}.*")


def write_articles(folder: Path, articles: list[list[str]]) -> Path:
    """Write the paragraphs of each article to a file of its own; the folder."""
    write_whole({folder / f"{number:04}.txt": "\n".join(one) + "\n" for number, one in enumerate(articles)})
    return folder


def wikitext_files(data: Path, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """The articles of WikiText-2's validation text in `data`, as [`write_articles`] writes them; the folder."""
    return write_articles(folder, read_articles(data / "wikitext2" / "valid.txt", tokenizer.unk_token))


def read_articles(file: str | Path, unknown: str = "[UNK]") -> list[list[str]]:
    """The paragraphs of each article of a WikiText file, without titles and headings, spaced as in ordinary text.

    Args:
        unknown: what stands for words that WikiText left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8, or has fewer than two articles.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error
    found: list[list[str]] = []
    for number, line in enumerate(map(str.strip, lines)):
        around = [lines[near].strip() for near in (number - 1, number + 1) if 0 <= near < len(lines)]
        if TITLE.fullmatch(line) and not any(around):
            found.append([])
        elif found and line and not HEADING.fullmatch(line):
            found[-1].append(ordinary_spacing(line.replace("<unk>", unknown)))
    found = [article for article in found if article]
    if len(found) < 2:
        raise ValueError(
            f"{file} has {len(found)} articles, and it takes two: a line '= Title =' begins one, as in WikiText"
        )
    return found


def ordinary_spacing(line: str) -> str:
    """WikiText's tokens as they are printed: no spaces before punctuation, none in numbers and hyphenated words."""
    line = re.sub(r" @(.)@ ", r"\1", line)
    line = re.sub(r" ([,.;:?!%)\]]|'s\b|n't\b|'\w+\b)", r"\1", line)
    return re.sub(r"([(\[]) ", r"\1", line)
