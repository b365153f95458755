"""This process without room for another thread."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STACK_BYTES = 4 << 30
"""More than any stack that the C library has kept of a thread that has ended."""
ROOM_BYTES = 1 << 30
"""For whatever else needs memory meanwhile."""


@contextmanager
def no_threads() -> Iterator[None]:
    """There is no address space for the stack of one.  A limit of processes would not bind root."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = threading.stack_size(STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        threading.stack_size(before)
