"""Progress of drains, on one line of a terminal.  Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

BAR_CELLS = 24


class Part(NamedTuple):
    """One engine's."""

    label: str
    done: int
    """Blocks."""
    whole: int
    nbytes: int
    """Of the blocks that are done."""


def line(parts: Sequence[Part], width: int) -> str:
    """Return a bar for each engine or, if that is wider than the terminal, one for all."""
    each = ", ".join(_one(part) for part in parts)
    if _columns(each) < width:
        return each
    done, whole, nbytes = (sum(values) for values in zip(*(p[1:] for p in parts), strict=True))
    label = parts[0].label if len(parts) == 1 else f"{len(parts)} engines"
    text = _one(Part(label, done, whole, nbytes))
    while _columns(text) >= width and text:
        text = text[1:]
    return text


def _one(part: Part) -> str:
    return f"{part.label} {bar(part.done, part.whole)} {size(part.nbytes)}"


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def bar(done: int, whole: int) -> str:
    """Return a progress bar: ``[######......]``."""
    cells = BAR_CELLS * done // whole if whole else BAR_CELLS
    return f"[{'#' * cells}{'.' * (BAR_CELLS - cells)}]"


def size(nbytes: int) -> str:
    """Return a size for people."""
    amount = nbytes / 1e6
    return f"{amount / 1e3:.1f} GB" if amount >= 1e3 else f"{amount:.1f} MB"
