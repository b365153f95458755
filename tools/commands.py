"""What a command of ``kvshm`` is, and how it is run: errors become one line and an exit status.

A command is a module with three names: ``HELP``, one line for ``kvshm --help``;
``add_arguments(parser)``, which adds options and may set ``parser.description`` and
``parser.epilog``; and ``run(asked)``, which does the work and returns the exit status.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Protocol

from kvshm._base.interrupts import EXIT_INTERRUPTED
from kvshm.errors import ConfigError, KvshmError, RunDirectoryError

from .options import NoSuchEngine
from .output import (
    EXIT_FAILED,
    EXIT_NO_ENGINE,
    EXIT_USAGE,
    note,
    run_until_pipe_closes,
)

EXTRAS = {
    "numpy": "kv",
    "safetensors": "kv",
    "prometheus_client": "ops",
    "rich": "ops",
    "shtab": "ops",
    "h11": "ops",
    "starlette": "ops",
    "uvicorn": "ops",
}
"""Packages that may be missing, and the extra of kvshm that brings each."""


class Command(Protocol):
    """A module that is a command.  ``run`` raises KvshmError, OSError or ImportError."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, asked: argparse.Namespace) -> int: ...


def run_command(name: str, work: Callable[[], int]) -> int:
    """Do a command's work; an error that a user can mend becomes a line and an exit status."""
    try:
        return run_until_pipe_closes(work)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ImportError as exc:
        package = (exc.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        note(f"kvshm {name} needs {package}: pip install 'kvshm[{EXTRAS[package]}]'")
        return EXIT_USAGE
    except (KvshmError, OSError, MemoryError) as exc:
        note(f"kvshm {name}: {str(exc) or 'not enough memory'}")
        if isinstance(exc, NoSuchEngine):
            return EXIT_NO_ENGINE
        mistake = isinstance(exc, ConfigError | RunDirectoryError)
        return EXIT_USAGE if mistake else EXIT_FAILED
