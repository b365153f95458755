"""Processes that have a slot table and show it by their pulse: real ones, to be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .served import AnyTable

SCRIPT = """
import sys
from kvshm._shm.own_slot_table import RankSlotTable
table = RankSlotTable.from_fd("its table", int(sys.argv[1]))
table.begin_pulse(int(sys.argv[2]) if sys.argv[2] else None)
"""
WAIT = "print(flush=True)\ninput()\n"

Child = subprocess.Popen[bytes]


@contextmanager
def pulsing(table: AnyTable, rank: int | None = None, then: str = WAIT) -> Iterator[Child]:
    """A process that has the table, as its owner or one of its ranks, and goes on with ``then``.
    It has printed a line when this begins."""
    fd = table.descriptor(True)
    argv = [sys.executable, "-c", SCRIPT + then, str(fd), "" if rank is None else str(rank)]
    try:
        child = subprocess.Popen(argv, pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    finally:
        os.close(fd)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child
        finally:
            child.kill()
