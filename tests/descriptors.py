"""What this process has open."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from contextlib import suppress


def open_files() -> Counter[tuple[str, int]]:
    """What this process has open, by name and inode, and how often."""
    gc.collect()  # what no one holds is not counted as open
    found: Counter[tuple[str, int]] = Counter()
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # it was that of the listing, or has just been closed
            found[os.readlink(f"/proc/self/fd/{number}"), os.fstat(number).st_ino] += 1
    return found


def left_open(before: Counter[tuple[str, int]], patience: float = 5.0) -> Counter[tuple[str, int]]:
    """What is open and was not before: a leak stays, whereas threads, also those of earlier tests,
    open and close what is their own meanwhile, of which they report nothing to wait for."""
    deadline = time.monotonic() + patience
    while (left := open_files() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left
