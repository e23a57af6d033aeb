"""Tables in Markdown."""

from collections.abc import Sequence


def as_markdown(
    header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1, for_terminals: bool = False
) -> str:
    """A table in Markdown.

    Args:
        header: of the columns.
        rows: of as many cells.
        words: how many columns, the first ones, hold words; the others are numbers, set to the right.
        for_terminals: cells are padded to the width of their column, so that it reads well as it is.
    """
    rules = ["---"] * words + ["---:"] * (len(header) - words)
    if for_terminals:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        rules = ["-" * (width + 2) for width in widths]
        header, *rows = (
            [cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (header, *rows)
        )
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(rules)}|", *lines[1:]])
