"""What every command of ``kvshm`` puts out: JSON, tables, harmless texts, exit statuses."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO, cast

EXIT_FAILED, EXIT_USAGE = 1, 2
EXIT_NO_ENGINE = 4
"""Of every command with --engine, but probes: no engine has that name."""
EXIT_PIPE_CLOSED = 128 + signal.SIGPIPE
EXIT_TERMINATED = 128 + signal.SIGTERM

Json = dict[str, Any]
Columns = Mapping[str, str | Callable[[Json], object]]
"""Head of each column -> the key of its values in a row, or a function of the row."""


# -- texts of other processes


def clean(text: str) -> str:
    """Return a text of another process with ``?`` for control and format characters, which a
    terminal could obey."""
    return text if text.isprintable() else "".join(map(_clean, text))


def _clean(char: str) -> str:
    kind = unicodedata.category(char)
    return "?" if kind[0] == "C" or kind in ("Zl", "Zp") else char


def cleaned(value: Any) -> Any:
    """Return plain data with every text in it clean, keys too."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {cleaned(key): cleaned(each) for key, each in value.items()}
    return [cleaned(each) for each in value] if isinstance(value, list | tuple) else value


# -- what is printed


def show(data: Any, lines: Callable[[], Iterable[str]], *, as_json: bool) -> None:
    """Print plain data as JSON, or else the lines for people, which are clean already."""
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        for line in lines():
            print(line)


def note(*lines: str) -> None:
    """Print lines for people on stderr."""
    for line in lines:
        print(clean(line), file=sys.stderr, flush=True)


def say(command: str, text: str) -> None:
    note(f"kvshm {command}: {' '.join(text.split())}")


def table(columns: Columns, rows: list[Json], if_any: Collection[str] = ()) -> Iterator[str]:
    """Yield aligned lines, numbers to the right.  No rows, no lines.  The columns ``if_any`` are
    shown if one of their values is neither 0 nor None."""
    if rows:
        cells = [
            [head, *(_cell(row, of) for row in rows)]
            for head, of in columns.items()
            if head not in if_any or any(_value(row, of) for row in rows)
        ]
        for line in aligned(zip(*cells, strict=True), _are_numbers):
            yield f"    {line}"


def aligned(
    rows: Iterable[Sequence[str]], to_the_right: Callable[[Sequence[str]], bool] = lambda _: False
) -> Iterator[str]:
    """Return each row as a line; ``to_the_right``: whether a column's cells are right-aligned."""
    columns = []
    for column in zip(*rows, strict=True):
        justify = str.rjust if to_the_right(column) else str.ljust
        columns.append([justify(cell, max(map(len, column))) for cell in column])
    return ("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def _value(row: Json, of: str | Callable[[Json], object]) -> object:
    return row[of] if isinstance(of, str) else of(row)


def _cell(row: Json, of: str | Callable[[Json], object]) -> str:
    value = _value(row, of)
    return "-" if value is None else str(value)


def _are_numbers(column: Sequence[str]) -> bool:
    return all(cell.isdecimal() or cell == "-" for cell in column[1:])


# -- streams


def run_until_pipe_closes(command: Callable[[], int]) -> int:
    """Run a command; return its exit status, or EXIT_PIPE_CLOSED after ``| head``.  Streams that
    are closed, full or of a narrow encoding are no error."""
    _prepare_streams()
    try:
        status = command()
        sys.stdout.flush()
    except BrokenPipeError:
        # Discard the unwritten output: otherwise Python prints an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    return status


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stderr = cast(TextIO, _Forgiving(sys.stderr))


class _Forgiving:
    """A stderr that cannot be written, for instance on a full disk, changes no exit status."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
