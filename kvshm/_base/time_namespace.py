"""The clock of this process's time namespace, and how times of another one are converted.

CLOCK_MONOTONIC differs between them, so a time for other processes has its offset beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc/self")
UNKNOWN = -(1 << 63)
"""What shared memory holds where the offset is not known."""
_MONOTONIC = ("monotonic", "1")
"""How the kernel calls this clock; the first kernels wrote its number."""


def clock_offset_ns(proc: Path = PROC) -> int | None:
    """Return by how many nanoseconds CLOCK_MONOTONIC is ahead of the machine's; None: not known."""
    try:
        offsets = (proc / "timens_offsets").read_text("ascii")
        # The file tells that of children.  It differs only after unshare(2), until an exec.
        if os.readlink(proc / "ns/time") != os.readlink(proc / "ns/time_for_children"):
            return None
        return _offset_in(offsets)
    except FileNotFoundError:  # the kernel has no time namespaces, or /proc is not mounted
        return 0 if proc.exists() and not os.path.lexists(proc / "ns/time") else None
    except (OSError, ValueError):
        return None


def _offset_in(offsets: str) -> int | None:
    for clock, seconds, nanoseconds in (line.split() for line in offsets.splitlines()):
        if clock in _MONOTONIC:
            return int(seconds) * 1_000_000_000 + int(nanoseconds)
    return None


def on_own_clock(time_ns: int, theirs: int | None, own: int | None) -> int | None:
    """A time that a process with the offset ``theirs`` wrote, on the clock of one with the offset
    ``own``; None if that is not known."""
    return None if theirs is None or own is None else time_ns - theirs + own
