"""Ends a command without an error message if the reader of its output has gone (``| head``)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

EXIT_PIPE_CLOSED = 128 + signal.SIGPIPE
"""The exit status in that case, as shells report it for other commands."""


def run_until_pipe_closes(command: Callable[[], int]) -> int:
    """Run a command.  Return its exit status, or EXIT_PIPE_CLOSED."""
    try:
        status = command()
        sys.stdout.flush()
    except BrokenPipeError:
        # Discard the unwritten output: otherwise Python prints an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    return status
