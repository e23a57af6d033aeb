"""Windows of a text that overlap, none of which divides a word, and which of them answers for a word."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


Window = tuple[int, int]


def word_starts(word_ids: Sequence[int | None]) -> list[int]:
    """Index of each word's first token; a token without a word is one by itself."""
    before: object = object()
    found = []
    for index, word in enumerate(word_ids):
        if word is None or word != before:
            found.append(index)
        before = word
    return found


def windows_of(word_ids: Sequence[int | None], size: int, overlap: int) -> list[Window]:
    """First token and end of each window of a text's tokens, special tokens not counted.

    Windows begin and end where words do; a word that is longer than a window is divided after all. Each has at most `size` tokens, and
    at least `overlap` tokens of the one before, as far as words allow. The last one is as long as it can be.

    Args:
        word_ids: the word of each token, as a fast tokenizer says; None for a token without one.
    """
    number = len(word_ids)
    if number <= size:
        return [(0, number)]
    edges = _divided([*word_starts(word_ids), number], size)
    found = [(0, edges[bisect_right(edges, size) - 1])]
    while found[-1][1] < number:
        end = found[-1][1]
        # The last edge that leaves enough of an overlap, and a later one where the next word would not fit.
        following = edges[bisect_right(edges, end)]
        begin = max(edges[bisect_right(edges, max(end - overlap, 0)) - 1], edges[bisect_left(edges, following - size)])
        last = edges[bisect_left(edges, number - size)]
        if begin >= last:
            found.append((last, number))
        else:
            found.append((begin, edges[bisect_right(edges, begin + size) - 1]))
    return found


def _divided(edges: list[int], size: int) -> list[int]:
    """Edges of words, with more of them in words that are longer than a window."""
    found = edges[:1]
    for edge in edges[1:]:
        found += range(found[-1] + size, edge, size)
        found.append(edge)
    return found


def most_central(word_ids: Sequence[int | None], windows: Sequence[Window]) -> list[int]:
    """For each token, the window in which its word has most context on the side that has less; of two alike, the first.

    All tokens of a word have the same window, where one holds the whole word.
    """
    number = len(word_ids)
    edges = _divided([*word_starts(word_ids), number], max(end - start for start, end in windows))
    owners, first = [], 0
    for start, end in zip(edges, edges[1:]):
        while windows[first][1] < end:
            first += 1
        best, most = first, -1
        for index in range(first, len(windows)):
            begin, stop = windows[index]
            if begin > start:
                break
            context = min(start - begin, stop - end)
            if context > most:
                best, most = index, context
        owners += [best] * (end - start)
    return owners
