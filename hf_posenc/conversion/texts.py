"""Text to convert with: documents, and the windows of tokens that are cut from them."""

import glob
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch


# What a folder's text files are called.
TEXT_FILES = {".txt", ".text", ".md", ".rst"}
# And a file that has a text in each line.
ROWS = ".jsonl"
# Of each source, how many characters are in memory at once; a conversion of minutes sees no more.
BLOCK_CHARACTERS = 20_000_000
# A file that is longer is cut into documents of this length, at the end of a line.
PART_CHARACTERS = 1_000_000
# The part of a text that may be words unknown to the tokenizer. In text of a model's own language they are less than one in a hundred,
# emoji and code counted in; of text in a script that it does not know, nearly all.
MOST_UNKNOWN = 0.1
# Of documents, one in so many is held out. Fewer documents than this are cut into as many pieces.
HELD_OUT_EVERY = 10
# Where a line is cut: behind a space. What is longer than any word, without one, is text of a language that has none.
SPACE = re.compile(r"\s")
LONGEST_WORD = 100
# Characters of a held-out part of a line that is looked for in other lines; shorter ones are words that any text has.
LEAST_PART = 50
# The shortest windows, special tokens among them.
SHORTEST = 16


def read_documents(sources: Sequence[str | Path] | None = None) -> list[str]:
    """The documents of some sources: of each its first block, of `BLOCK_CHARACTERS`.

    Args:
        sources: files (a document each; of a .jsonl file, each row's "text"), folders (their text files), or names of data sets for
            `datasets`, as "Salesforce/wikitext:wikitext-2-raw-v1" (a document per row of the column "text"). Default: the reference of the
            Python language, which comes with Python.

    Raises:
        OSError: a file cannot be read.
        ValueError: a source holds no text.
    """
    if not sources:
        from pydoc_data.topics import topics  # only here: half a megabyte

        return [*topics.values()]
    documents = []
    for source in map(str, sources):
        if not source:
            raise ValueError("the name of a text is empty: name a file, a folder or a data set")
        found = next(blocks_of(source), [])
        if not any(document.strip() for document in found):
            raise ValueError(f"there is no text in {source}")
        documents += found
    return documents


def blocks_of(source: str | Path) -> Iterator[list[str]]:
    """The documents of a source in blocks of `BLOCK_CHARACTERS`, again and again.

    A block ends where a line does, so that no line is divided. The rest of its last document is in the next. A source that is shorter is one block. What is left at the end of a longer one
    is a block if it has at least half of the characters; else it goes on with the beginning. A source without text has no blocks.
    """
    block: list[str] = []
    left, has_text = BLOCK_CHARACTERS, True
    while has_text:
        is_short, has_text = True, False
        for document in _documents_of(str(source)):
            has_text = has_text or bool(document.strip())
            while len(document) >= left:
                end = document.find("\n", left - 1) + 1 or len(document)
                yield [*block, document[:end]]
                block, document, left = [], document[end:], BLOCK_CHARACTERS
                is_short = False
            block.append(document)
            left -= len(document)
        if has_text and (is_short or 2 * left <= BLOCK_CHARACTERS):
            yield block
            block, left = [], BLOCK_CHARACTERS


class Blocks:
    """The text to learn from, block by block, for sources that do not fit into memory.

    Each block has the next documents of every source. A source that has ended begins again, so that sources keep their shares of the
    text. While a block is used, a thread reads and tokenizes the next.

    Args:
        first: windows of the first block.
        sources: as for [`read_documents`].
        make: makes windows of the documents of a later block.
        left_out: documents whose lines are left out of later blocks: those that are measured on.
        process, processes: each process gets every so many-th document of a later block, if there are as many.
    """

    def __init__(
        self,
        first: "Windows",
        sources: Sequence[str | Path],
        make: Callable[[list[str]], "Windows"],
        left_out: Iterable[str] = (),
        process: int = 0,
        processes: int = 1,
    ):
        self.first = first
        self._make = make
        lines = [document.splitlines() for document in left_out]
        self._left_out = {line for own in lines for line in own}
        # Of a few documents, pieces are left out, which may begin and end within a line.
        edges = (line for own in lines[: 2 * HELD_OUT_EVERY] for line in (*own[:1], *own[-1:]))
        self._parts_of_lines = [line for line in edges if len(line) >= LEAST_PART]
        self._process, self._processes = process, processes
        self._blocks = zip(*map(blocks_of, sources))
        next(self._blocks)
        self._reader = ThreadPoolExecutor(1, "text")
        self._number, self._windows = 0, first
        self._coming: Future[Windows] | None = None

    def __call__(self, number: int) -> "Windows":
        """The windows of a block, 0 for the first. Numbers only rise; blocks that are skipped are read, and not tokenized."""
        while self._number < number:
            self._number += 1
            coming = self._coming or self._reader.submit(self._next, self._number == number)
            self._windows, self._coming = coming.result(), None
        if self._coming is None:
            self._coming = self._reader.submit(self._next)
        return self._windows

    def _next(self, is_wanted: bool = True) -> "Windows":
        documents = [document for block in next(self._blocks) for document in block]
        if not is_wanted:
            return self.first
        if len(documents) >= self._processes:
            documents = documents[self._process :: self._processes]
        return self._make([*map(self._without_left_out, documents)])

    def _without_left_out(self, document: str) -> str:
        lines = (line for line in document.splitlines() if line not in self._left_out)
        return "\n".join(map(self._without_parts, lines))

    def _without_parts(self, line: str) -> str:
        for part in self._parts_of_lines:
            line = line.replace(part, "\n")
        return line


def _documents_of(source: str) -> Iterator[str]:
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_FILES and file.is_file())
        if not files:
            raise ValueError(f"the folder {source} has no files that end in {', '.join(sorted(TEXT_FILES))}")
        yield from itertools.chain.from_iterable(map(_parts_of_file, files))
    elif path.exists() and path.suffix == ROWS:
        if path.stat().st_size:  # of an empty file, datasets raises a RuntimeError
            yield from _texts_of(source, _loaded(source, "json", data_files=glob.escape(str(path))))
    elif path.exists():
        yield from _parts_of_file(path)
    elif path.suffix in TEXT_FILES or path.is_absolute() or source.startswith(".") or source.endswith(("/", "\\")):
        raise FileNotFoundError(f"there is no file or folder {source}")
    else:
        yield from _rows_of(source)


def _parts_of_file(file: Path) -> Iterator[str]:
    """A file as one document, or, where it is longer than a block, in parts."""
    is_long = file.stat().st_size > BLOCK_CHARACTERS
    try:
        with file.open(encoding="utf-8-sig") as opened:
            while part := "".join(opened.readlines(PART_CHARACTERS)) if is_long else opened.read():
                yield part
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8: {error}") from error


def _rows_of(source: str) -> Iterator[str]:
    name, _, config = source.partition(":")
    try:
        rows = _loaded(source, name, config or None)
    except OSError as error:
        raise FileNotFoundError(
            f"there is no file or folder {source}, and no data set of this name can be loaded: {error}"
        ) from error
    yield from _texts_of(source, rows)


def _loaded(source: str, *names: str | None, **options: str) -> Iterable[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"to load {source} as a data set, pip install datasets") from error
    return load_dataset(*names, split="train", streaming=True, **options)


def _texts_of(source: str, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    for number, row in enumerate(rows, start=1):
        if "text" not in row:
            raise ValueError(f"{source} has no column 'text' of strings; it has {', '.join(row)}")
        if not isinstance(row["text"], str):
            raise ValueError(f"{source} has no text in row {number}: 'text' is {row['text']!r}")
        yield row["text"]


def held_out_apart(documents: list[str]) -> tuple[list[str], list[str]]:
    """Documents to train on, and every tenth to measure on.

    Fewer than ten documents are cut into pieces first, between lines or, where a line is long, between words: then two pieces of one
    document may be on both sides.
    """
    if len(documents) < HELD_OUT_EVERY:
        documents = [piece for document in documents for piece in _pieces(document, 2 * HELD_OUT_EVERY)]
    middle = HELD_OUT_EVERY // 2
    train = [document for index, document in enumerate(documents) if index % HELD_OUT_EVERY != middle]
    return train, documents[middle::HELD_OUT_EVERY]


def _pieces(document: str, number: int) -> list[str]:
    """A document in pieces of about the same length that begin where a line begins or, in a line that is longer than that, a word."""
    size, pieces = len(document) / number, [""]
    for line in document.splitlines(keepends=True):
        for part in _parts(line, math.ceil(size)):
            if len(pieces[-1]) >= size:
                pieces.append("")
            pieces[-1] += part
    return pieces


def _parts(line: str, size: int) -> Iterator[str]:
    """A line in parts of `size` characters and the rest of a word; where nothing separates words, of `size` characters."""
    begin = 0
    while len(line) - begin > size:
        space = SPACE.search(line, begin + size, begin + size + LONGEST_WORD)
        end = begin + size if space is None else space.end()
        if space is None and len(line) <= end + LONGEST_WORD:
            break
        yield line[begin:end]
        begin = end
    if begin < len(line):
        yield line[begin:]


class Windows:
    """Windows of tokens, each between the tokenizer's [CLS] and [SEP].

    Args:
        documents: text.
        tokenizer: of the checkpoint; what it cuts or pads by itself does not matter.

    Attributes:
        tokens: (number,) ids of all documents, one after the other, without special tokens.
        line_starts: (lines,) where a line that has tokens begins.
        lengths: (lines,) how many tokens it has.
    """

    def __init__(self, documents: Sequence[str], tokenizer):
        lines = [line for document in documents for line in document.splitlines() if line.strip()]
        ids = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"] if lines else []
        ids = [line for line in ids if line]
        self.tokens = torch.tensor([*itertools.chain.from_iterable(ids)], dtype=torch.long)
        lengths = torch.tensor([0, *map(len, ids)])
        self.line_starts = lengths.cumsum(0)[:-1]
        self.lengths = lengths[1:]
        self.unknown = tokenizer.unk_token_id
        self.first, self.last, self.padding = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id

    @property
    def starts(self) -> torch.Tensor:
        """(number,) where the shortest windows begin."""
        return self.pieces(SHORTEST - 2)[0]

    def pieces(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Lines cut into pieces of at most `size` tokens: where each begins, and how many tokens it has."""
        numbers = -(-self.lengths // size)  # of pieces, by line
        before = (numbers.cumsum(0) - numbers).repeat_interleave(numbers)
        within = (torch.arange(int(numbers.sum())) - before) * size
        rest = self.lengths.repeat_interleave(numbers) - within
        return self.line_starts.repeat_interleave(numbers) + within, rest.clamp(max=size)

    def check_enough(self, tokens: int, what: str) -> None:
        """Raise ValueError for fewer tokens than are needed."""
        if len(self.tokens) < tokens:
            raise ValueError(
                f"the {what} text has {len(self.tokens)} tokens, and {tokens} are needed: name more text with --text"
            )

    def check_known(self, vocab_size: int, what: str) -> None:
        """Raise ValueError for tokens that the model has no rows for, or that too often stand for unknown words."""
        highest = int(self.tokens.max()) if len(self.tokens) else 0
        if highest >= vocab_size:
            raise ValueError(
                f"the {what} text has tokens up to id {highest}, and the model's vocabulary has {vocab_size}: "
                "the tokenizer is another model's"
            )
        unknown = int((self.tokens == self.unknown).sum()) if self.unknown is not None else 0
        if unknown > MOST_UNKNOWN * len(self.tokens):
            raise ValueError(
                f"{100 * unknown / len(self.tokens):.0f} % of the {what} text are words that the tokenizer does not know: name text in "
                "the model's own language with --text, or put the model's own tokenizer into its folder"
            )

    def draw(self, length: int, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Windows of `length` tokens, special tokens among them, at random: every token is in one of those that may be drawn.

        They begin where lines do and, in a line that is longer than a window, where one before it ends; the last ends with the text.
        """
        inner = length - 2
        starts, last = self.pieces(inner)[0], len(self.tokens) - inner
        starts = torch.cat([starts[starts < last], torch.tensor([last])])
        chosen = starts[torch.randint(len(starts), (rows,), generator=generator)]
        return self._batch([self.tokens[start : start + inner] for start in chosen.tolist()])

    def evenly_spaced(self, length: int, rows: int) -> dict[str, torch.Tensor]:
        """At most `rows` windows of `length` tokens that do not overlap, evenly spread."""
        inner = length - 2
        rows = min(rows, len(self.tokens) // inner)
        starts = torch.linspace(0, len(self.tokens) - inner, rows).long().tolist() if rows else []
        return self._batch([self.tokens[start : start + inner] for start in starts])

    def lines(self, length: int, rows: int, least: int = 8) -> dict[str, torch.Tensor]:
        """At most `rows` lines of at least `least` tokens, evenly spread and cut to `length`, with padding on the right.

        Where there are fewer, what is cut off are separate lines. Where hardly any line is that long, as in subtitles, all lines count.
        """
        starts, lengths = self.pieces(length - 2)
        if (lengths >= least).sum() < 2:
            least = 1
        long_enough = lengths >= least
        whole = long_enough & torch.isin(starts, self.line_starts)
        found = (whole if whole.sum() >= rows else long_enough).nonzero().flatten()
        rows = min(rows, len(found))
        chosen = found[torch.linspace(0, len(found) - 1, rows).long()] if rows else found
        return self._batch([self.tokens[start : start + n] for start, n in zip(starts[chosen], lengths[chosen])])

    def _batch(self, windows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        longest = max(map(len, windows), default=0) + 2
        input_ids = torch.full((len(windows), longest), self.padding)
        attention_mask = torch.zeros_like(input_ids)
        for row, window in enumerate(windows):
            input_ids[row, : len(window) + 2] = torch.cat(
                [torch.tensor([self.first]), window, torch.tensor([self.last])]
            )
            attention_mask[row, : len(window) + 2] = 1
        return {"input_ids": input_ids, "attention_mask": attention_mask}
