"""What this process has open."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress


def open_files() -> Counter[str]:
    """What this process has open, and how often.  A leak is what is there later and was not before
    (``open_files() - before``): what earlier tests left may be closed meanwhile."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # it was that of the listing, or has just been closed
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
    return found
