"""What this process has open."""

from __future__ import annotations

import gc
import os
from collections import Counter
from contextlib import suppress


def open_files() -> Counter[tuple[str, int]]:
    """What this process has open, by name and inode, and how often.  A leak is what is there later
    and was not before (``open_files() - before``): a thread of an earlier test may close what is
    its own meanwhile."""
    gc.collect()  # what nobody holds is not counted as open
    found: Counter[tuple[str, int]] = Counter()
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # it was that of the listing, or has just been closed
            found[os.readlink(f"/proc/self/fd/{number}"), os.fstat(number).st_ino] += 1
    return found
