"""The matrix who copies from whom: rows import, columns export.  Uses rich."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from rich.text import Text

from kvshm._base.copy_path import slowest

from . import wording
from .copies import Copies
from .grid import GAP, Cell, Column, table

OTHERS = "others"
CELL_WIDTH = 17
""""999 MB/s same_gpu!"""
_LABEL_WIDTH = 20
Name = Callable[[str, str], str]
"""How an engine of a namespace is called on the screen."""


def matrix(copies: Sequence[Copies], name: Name, width: int, rows: int) -> Iterator[Text]:
    """Yield a head and at most ``rows`` rows; engines that do not fit are "others" together.
    Nothing if there are no copies."""
    if not copies or rows < 1:
        return
    to = _shown([(name(p.namespace, p.importer), p) for p in copies], rows)
    room = (width - _LABEL_WIDTH) // (CELL_WIDTH + GAP)
    of = _shown([(name(p.namespace, p.exporter), p) for p in copies], max(room, 1))
    cells: defaultdict[tuple[str, str], list[Copies]] = defaultdict(list)
    for pair in copies:
        row, column = name(pair.namespace, pair.importer), name(pair.namespace, pair.exporter)
        cells[row if row in to else OTHERS, column if column in of else OTHERS].append(pair)
    columns = [
        Column(exporter, [_cell(cells[row, exporter]) for row in to], 0, at_least=CELL_WIDTH)
        for exporter in of
    ]
    labels = [Cell(label) for label in to]
    yield from table([Column("TO \\ FROM", labels, 0, False, _LABEL_WIDTH), *columns], width)


def _shown(pairs: Sequence[tuple[str, Copies]], room: int) -> list[str]:
    """The names that get a row or column of their own, in alphabetical order: those with slow
    paths, then those that copy most."""
    weights: defaultdict[str, tuple[int, float, int]] = defaultdict(lambda: (0, 0.0, 0))
    for label, pair in pairs:
        slow, now, total = weights[label]
        now += pair.bytes_per_second or 0.0
        weights[label] = slow or int(bool(pair.slow)), now, total + pair.total_bytes
    if len(weights) <= room:
        return sorted(weights)
    chosen = sorted(weights, key=lambda label: weights[label], reverse=True)[: room - 1]
    return [*sorted(chosen), OTHERS]


def _cell(pairs: Sequence[Copies]) -> Cell:
    """The rate, and the slowest path of those in use, or of all that were; a slow one is marked
    with ``!``."""
    if not pairs:
        return Cell("")
    using = [pair for pair in pairs if pair.bytes_per_second] or pairs
    speed = sum(pair.bytes_per_second or 0.0 for pair in pairs)
    slow = [pair for pair in pairs if pair.slow]
    path = slowest(pair.path for pair in slow or using)
    text = f"{wording.rate(speed) if speed else '0'} {path}{'!' if slow else ''}"
    return Cell(text, "bold red" if slow else "" if speed else "dim")
