"""Commands that serve until a signal ends them."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_signals() -> Iterator[socket.socket]:
    """Yield a socket that can be read once SIGTERM or SIGINT has arrived.  Main thread only.

    C code writes to it: a handler in Python runs too late if the main thread is about to wait.
    """
    heard, wake = socket.socketpair()
    with heard, wake:
        wake.setblocking(False)
        descriptor = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            signal.signal(number, lambda *_: None)
        try:
            yield heard
        finally:
            for number in numbers:  # another one would decide the exit status
                signal.signal(number, signal.SIG_IGN)
            signal.set_wakeup_fd(descriptor)
