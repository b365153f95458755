"""A run of two engines ends when it must, and nothing that it started outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Self

from local_node import Node

GRACE_S = 30.0
"""After a run was told to end, for ending; then it ends at once."""
ENDED_BY = (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP)
WATCHER = """
import contextlib, os, signal, sys
lines = sys.stdin.read().split()
for group in lines if "done" not in lines else ():
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int(group), signal.SIGKILL)
"""


def end_in_time(limit_s: float, nodes: Sequence[Node]) -> None:
    """Let the time limit (0: none), SIGTERM and SIGHUP end this process, and at once all engines of
    these nodes, which would keep the GPU's memory: whoever waits for an answer of theirs gets none.
    The exit status is 124 for the limit, else 128 + the signal's number; 1 if ending fails."""

    def ended(number: int, _: object) -> None:
        for other in ENDED_BY:
            signal.signal(other, signal.SIG_IGN)
        at_limit = number == signal.SIGALRM
        status = 124 if at_limit else 128 + number
        hard = threading.Timer(GRACE_S, os._exit, [status])
        hard.daemon = True
        hard.start()
        for node in nodes:
            for engine in node.engines:
                engine.signal(signal.SIGKILL)
        why = f"the time limit of {limit_s:g} s" if at_limit else signal.Signals(number).name
        print(f"FAILED: ended by {why}", file=sys.stderr, flush=True)
        sys.exit(status)

    for number in ENDED_BY:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, ended)
    signal.setitimer(signal.ITIMER_REAL, limit_s)


class Watcher:
    """A process that ends process groups at once if this process ends without having said so, as
    by SIGKILL.  The kernel's PR_SET_PDEATHSIG would not do: vLLM's own children do not inherit it.
    """

    def __init__(self) -> None:
        """Start it, in a group of its own."""
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", WATCHER], stdin=subprocess.PIPE, process_group=0, text=True
        )

    def add(self, group: int) -> None:
        """Have a process group end with this process."""
        self._say(str(group))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Everything has ended in order."""
        self._say("done")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
