"""Threads and descriptors that are asked for."""

from __future__ import annotations

import signal
import threading

from kvshm._base.resources import start_thread


def blocked() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_a_thread_takes_no_signal_from_the_one_that_waits_for_it() -> None:
    before, seen = blocked(), list[set[int]]()
    thread = threading.Thread(target=lambda: seen.append(blocked()))
    start_thread(thread)
    thread.join()
    assert seen[0] >= {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}
    assert not seen[0] & {signal.SIGSEGV, signal.SIGBUS}  # of the thread that caused them
    assert blocked() == before
