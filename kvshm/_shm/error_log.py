"""The error log in a slot table's header: distinct errors, how often and when.

It outlives the process, so tools can show why an engine imported nothing.  Several processes may
write at the same time; two that write to one place then lose at most one of their entries.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from .layout import ERROR_BYTES, ERRORS_OFFSET, NUM_ERRORS
from .segment import Segment

TEXT_BYTES = 104
_ENTRY = struct.Struct(f"<QQQ{TEXT_BYTES}s")
assert _ENTRY.size == ERROR_BYTES


class LoggedError(NamedTuple):
    """One distinct error."""

    times: int
    first_ns: int
    last_ns: int
    """CLOCK_REALTIME, like ``first_ns``."""
    text: str


class ErrorLog:
    """The log of one slot table."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def add(self, text: str, now_ns: int) -> None:
        """Record an error, or count it if it is recorded already.  A full log drops the error whose
        last occurrence is oldest.  The text is cut to TEXT_BYTES."""
        wanted = text.encode("utf-8", "replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        entries = self._entries()
        place = next((i for i, entry in enumerate(entries) if entry[3] == wanted), None)
        if place is None:
            place = min(range(NUM_ERRORS), key=lambda i: entries[i][2])
            entries[place] = (0, now_ns, now_ns, wanted)
        count, first_ns = entries[place][:2]
        offset = ERRORS_OFFSET + place * ERROR_BYTES
        _ENTRY.pack_into(self._segment.buffer, offset, count + 1, first_ns, now_ns, wanted)

    def read(self) -> list[LoggedError]:
        """The recorded errors, most recent last."""
        used = sorted((entry for entry in self._entries() if entry[0]), key=lambda entry: entry[2])
        return [
            LoggedError(count, first, last, text.rstrip(b"\0").decode("utf-8", "replace"))
            for count, first, last, text in used
        ]

    def _entries(self) -> list[tuple[int, int, int, bytes]]:
        end = ERRORS_OFFSET + NUM_ERRORS * ERROR_BYTES
        return list(_ENTRY.iter_unpack(self._segment.buffer[ERRORS_OFFSET:end]))
