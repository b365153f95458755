"""The error log in a slot table's header: distinct errors, how often and when.

It outlives the process.  Of two processes that write to one place at once, one loses its entry.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import NamedTuple

from .layout import ERROR_BYTES, ERRORS_OFFSET, NUM_ERRORS
from .segment import Segment

TEXT_BYTES = 104
_ENTRY = struct.Struct(f"<IIQQ{TEXT_BYTES}s")
assert _ENTRY.size == ERROR_BYTES
_MOST_TIMES = 2**32 - 1


class ErrorCode(StrEnum):
    """What an error is about.  Numbers are written to shared memory: never reuse or change them."""

    OTHER = "other", 0, "{}"
    CANNOT_SHARE = "cannot-share", 1, "cannot share with {}: {} {}"
    """With an engine of this name; the first field that differs; its values and other fields."""
    REFUSED = "refused", 2, "refused: {}; {}"
    """By the coordinator: the remedy, and the reason.  Like OTHER_VERSION."""
    NO_LEASE_BIT = (
        "no-lease-bit",
        3,
        "no lease bit is free, so more of its copies are discarded: use several namespaces",
    )
    LOAD_FAILED = "load-failed", 4, "{}"
    HOOK_FAILED = "hook-failed", 5, "{}"
    WEIGHTS_WRITTEN = "weights-written", 6, "{}"
    OTHER_VERSION = "other-version", 7, "refused: {}; {}"
    UNKNOWN = "unknown", -1, "{}"
    """A number that only another version knows, or a damaged entry.  Never written."""

    number: int
    template: str

    def __new__(cls, name: str, number: int, template: str) -> ErrorCode:
        code = str.__new__(cls, name)
        code._value_, code.number, code.template = name, number, template
        return code

    @classmethod
    def of(cls, number: int) -> ErrorCode:
        return next((code for code in cls if code.number == number), cls.UNKNOWN)

    def text(self, *about: str) -> str:
        """Return the error as a line; a damaged entry may have any number of parts."""
        places = self.template.count("{}")
        parts, more = about[:places], about[places:]
        parts += ("",) * (places - len(parts))
        return " ".join([self.template.format(*parts), *more])


class LoggedError(NamedTuple):
    """One distinct error."""

    times: int
    first_ns: int
    last_ns: int
    """CLOCK_REALTIME, like ``first_ns``."""
    text: str
    code: ErrorCode = ErrorCode.OTHER
    about: tuple[str, ...] = ()
    """What the places of the code's text stand for."""


class ErrorLog:
    """The log of one slot table."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def add(self, code: ErrorCode, about: tuple[str, ...], now_ns: int) -> None:
        """Record or count an error, with ``about`` cut.  A full log drops the oldest."""
        parts = (part.replace("\0", " ").encode("utf-8", "replace") for part in about)
        wanted = code.number, b"\0".join(parts)[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        entries = self._entries()
        place = next((i for i, (_, n, *_, text) in enumerate(entries) if (n, text) == wanted), None)
        if place is None:
            place = min(range(NUM_ERRORS), key=lambda i: entries[i][3])
            entries[place] = (0, code.number, now_ns, now_ns, b"")
        times, first_ns = min(entries[place][0] + 1, _MOST_TIMES), entries[place][2]
        offset = ERRORS_OFFSET + place * ERROR_BYTES
        number, text = wanted
        _ENTRY.pack_into(self._segment.buffer, offset, times, number, first_ns, now_ns, text)

    def read(self) -> list[LoggedError]:
        used = sorted((entry for entry in self._entries() if entry[0]), key=lambda entry: entry[3])
        return [_logged(*entry) for entry in used]

    def _entries(self) -> list[tuple[int, int, int, int, bytes]]:
        end = ERRORS_OFFSET + NUM_ERRORS * ERROR_BYTES
        return list(_ENTRY.iter_unpack(self._segment.buffer[ERRORS_OFFSET:end]))


def _logged(times: int, number: int, first_ns: int, last_ns: int, stored: bytes) -> LoggedError:
    code = ErrorCode.of(number)
    stored = stored.rstrip(b"\0")
    parts = stored.split(b"\0") if stored else []
    about = tuple(part.decode("utf-8", "replace") for part in parts)
    return LoggedError(times, first_ns, last_ns, code.text(*about).rstrip(), code, about)
