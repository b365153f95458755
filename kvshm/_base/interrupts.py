"""How a program ends that is interrupted (SIGINT, Ctrl-C) while it is still being imported."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

EXIT_INTERRUPTED = 128 + signal.SIGINT


def run_program(load: Callable[[], Callable[[], int]]) -> int:
    """Run what ``load`` imports; from now on SIGINT ends the process with EXIT_INTERRUPTED, without
    a traceback, unless the program has an end of its own for it.  One that arrives earlier, while
    Python starts, cannot be helped.  Main thread only.
    """
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored
    if heeded:  # at once: modules that are being imported may catch an exception, or print it
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    main = load()
    try:
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return main()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
