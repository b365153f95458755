"""Tables of text for people.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

Json = dict[str, Any]
Columns = Mapping[str, str | Callable[[Json], object]]
"""Head of each column -> the key of its values in a row, or a function of the row."""


def table(columns: Columns, rows: list[Json], if_any: Collection[str] = ()) -> Iterator[str]:
    """Yield aligned lines: numbers to the right, text to the left.  No rows, no lines.  The columns
    ``if_any`` are shown if one of their values is neither 0 nor None."""
    if rows:
        cells = [
            _aligned([head, *(_cell(row, of) for row in rows)])
            for head, of in columns.items()
            if head not in if_any or any(_value(row, of) for row in rows)
        ]
        for line in zip(*cells, strict=True):
            yield f"    {'  '.join(line)}".rstrip()


def _value(row: Json, of: str | Callable[[Json], object]) -> object:
    return row[of] if isinstance(of, str) else of(row)


def _cell(row: Json, of: str | Callable[[Json], object]) -> str:
    value = _value(row, of)
    return "-" if value is None else str(value)


def _aligned(column: list[str]) -> list[str]:
    width = max(map(len, column))
    numbers = all(cell.isdecimal() or cell == "-" for cell in column[1:])
    return [cell.rjust(width) if numbers else cell.ljust(width) for cell in column]
