"""Tables of cells that fit a width: columns are left out rather than wrapped.  Uses rich."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

GAP = 2
ELLIPSIS = "…"


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table: plain text, no markup."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    head: str
    cells: Sequence[Cell]
    rank: int
    """Columns with the highest rank are left out first; 0: never."""
    right: bool = True
    """Numbers stand to the right."""
    at_least: int | None = None
    """If given, the column takes no more than what the others leave, but at least so many
    characters; longer texts are cut."""

    @property
    def width(self) -> int:
        """The width of its widest cell."""
        return max(int(cell_len(text)) for text in (self.head, *(cell.text for cell in self.cells)))

    @property
    def least(self) -> int:
        """The width below which it is left out."""
        return self.width if self.at_least is None else min(self.width, self.at_least)


def table(columns: Sequence[Column], width: int) -> Iterator[Text]:
    """Yield the head and the rows of a table, none wider than ``width``."""
    kept = list(columns)
    while sum(column.least + GAP for column in kept) - GAP > width and len(kept) > 1:
        last = max(kept, key=lambda column: column.rank)
        if last.rank == 0:
            break
        kept.remove(last)
    spare = width - sum(column.least + GAP for column in kept) + GAP
    widths = []
    for column in kept:
        grown = min(column.width - column.least, max(spare, 0))
        spare -= grown
        widths.append(column.least + grown)
    heads = [Cell(column.head, "bold") for column in kept]
    for row in (heads, *zip(*(column.cells for column in kept), strict=True)):
        line = Text(no_wrap=True)
        for column, cell, size in zip(kept, row, widths, strict=True):
            line.append(" " * GAP if line.plain else "")
            line.append(fitted(cell.text, size, right=column.right), cell.style)
        yield cut(line, width)


def fitted(text: str, width: int, *, right: bool = False) -> str:
    """Return a text in exactly ``width`` places of the terminal, cut if it is longer."""
    size = int(cell_len(text))
    if size > width:
        return str(set_cell_size(text, max(width - 1, 0))) + ELLIPSIS[: max(width, 0)]
    return " " * (width - size) + text if right else text + " " * (width - size)


def cut(line: Text, width: int) -> Text:
    """Return the line, cut to the width."""
    line.truncate(width, overflow="ellipsis")
    return line


def flow(segments: Sequence[Cell], width: int) -> Iterator[Text]:
    """Yield lines of segments with gaps between them; a segment that does not fit begins another
    line."""
    line = Text(no_wrap=True)
    for segment in segments:
        if line.plain and line.cell_len + 2 * GAP + cell_len(segment.text) > width:
            yield cut(line, width)
            line = Text(no_wrap=True)
        line.append(" " * (2 * GAP) if line.plain else " ")
        line.append(segment.text, segment.style)
    yield cut(line, width)
