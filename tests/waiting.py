"""Waiting for what another process or thread comes to, and clocks that a test moves."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 100.0
"""Seconds a test waits for what must happen; never a statement about speed."""


def until(holds: Callable[[], object], what: str = "what was waited for") -> None:
    """Wait until ``holds``; fails the test if it does not come about."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"never came about: {what}"
        time.sleep(0.001)


def listens(path: str) -> bool:
    """Whether a process listens at the socket ``path``, whose name is there a little before."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        return peer.connect_ex(path) == 0


def is_running(pid: int) -> bool:
    """Whether there is such a process, which has not ended and only waits for its parent."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


class NanosecondClock:
    """Nanoseconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1_000_000_000

    def __call__(self) -> int:
        return self.now
