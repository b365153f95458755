"""What a process has open."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from contextlib import suppress


def names_open(pid: int | str = "self") -> list[str]:
    """The names of what a process has open, whose threads may open and close files meanwhile."""
    names = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # it was that of the listing, or has just been closed
            names.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return names


def open_files() -> Counter[tuple[str, int]]:
    """What this process has open, by name and inode, and how often."""
    gc.collect()  # what no one holds is not counted as open
    return _open_now()


def left_open(before: Counter[tuple[str, int]], patience: float = 5.0) -> Counter[tuple[str, int]]:
    """What is open all the time and was not before: a leak stays, whereas threads, also those of
    earlier tests, open and close what is their own meanwhile, of which they report nothing to wait
    for."""
    deadline = time.monotonic() + patience
    left = open_files() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
        # Threads that wait for the collection to end go on when the listing lets them, and so
        # would be found in the middle of what they do each time, if looked at only once.
        for _ in range(10):
            time.sleep(0.001)  # they go on meanwhile
            left &= _open_now() - before
    return left


def _open_now() -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # as above
            found[os.readlink(f"/proc/self/fd/{number}"), os.fstat(number).st_ino] += 1
    return found
