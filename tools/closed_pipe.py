"""Ends a command quietly if whoever reads its output has stopped reading."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

EXIT_PIPE_CLOSED = 128 + signal.SIGPIPE
"""The exit status then: as a shell has it of other commands."""


def run_until_pipe_closes(command: Callable[[], int]) -> int:
    """Run a command, whose exit status is returned, or EXIT_PIPE_CLOSED."""
    try:
        status = command()
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still to be written goes nowhere, or Python would complain when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    return status
