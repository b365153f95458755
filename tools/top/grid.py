"""Tables that fit a width: columns are left out rather than wrapped.  Uses rich."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2


@dataclass(frozen=True)
class Column:
    head: str
    cells: Sequence[Text]
    rank: int
    """Columns with the highest rank are left out first; 0: never."""
    right: bool = True
    at_least: int | None = None
    """Width below which the column is left out and to which its texts may be cut; None: the widest
    cell's."""

    @property
    def width(self) -> int:
        return int(max(Text(self.head).cell_len, *(cell.cell_len for cell in self.cells), 1))

    @property
    def least(self) -> int:
        return self.width if self.at_least is None else min(self.width, self.at_least)


def table(columns: Sequence[Column], width: int) -> Iterator[Text]:
    """Yield the head and the rows of a table, none wider than ``width``."""
    kept = list(columns)
    while sum(column.least + GAP for column in kept) - GAP > width and len(kept) > 1:
        last = max(kept, key=lambda column: column.rank)
        if last.rank == 0:
            break
        kept.remove(last)
    spare = max(width - sum(column.least + GAP for column in kept) + GAP, 0)
    shown = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column in kept:
        size = column.least + min(column.width - column.least, spare)
        spare -= size - column.least
        justify = "right" if column.right else "left"
        shown.add_column(Text(column.head), justify=justify, width=size, no_wrap=True)
    for row in zip(*(column.cells for column in kept), strict=True):
        shown.add_row(*row)
    least = sum(column.least + GAP for column in kept)  # what does not fit is cut below, not here
    console = Console(width=max(width, least), color_system=None)
    for segments in console.render_lines(shown, pad=False):
        line = Text.assemble(*((each.text, each.style or "") for each in segments), no_wrap=True)
        line.rstrip()
        yield cut(line, width)


def cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line


def flow(segments: Sequence[Text], width: int) -> Iterator[Text]:
    """Yield lines of whole segments with gaps between them."""
    line = Text(no_wrap=True)
    for segment in segments:
        if line.plain and line.cell_len + 2 * GAP + segment.cell_len > width:
            yield cut(line, width)
            line = Text(no_wrap=True)
        line.append(" " * (2 * GAP) if line.plain else " ").append_text(segment)
    yield cut(line, width)
