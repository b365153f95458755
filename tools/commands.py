"""What a command of ``kvshm`` is, and how it is run: errors become one line and an exit status.

A command is a module with three names: ``HELP``, one line for ``kvshm --help``;
``add_arguments(parser)``, which adds options and may set ``parser.description`` and
``parser.epilog``; and ``run(asked)``, which does the work and returns the exit status.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TextIO, cast

from kvshm.errors import ConfigError, KvshmError, RunDirectoryError

from .closed_pipe import run_until_pipe_closes
from .options import NoSuchEngine
from .plain_text import clean

EXIT_FAILED, EXIT_USAGE = 1, 2
"""Of every command: it could not do its work; a wrong command line or a bad setting."""
EXIT_NO_ENGINE = 4
"""Of every command with --engine, but probes: no engine is called so."""
EXIT_INTERRUPTED = 130
EXTRAS = {
    "numpy": "kv",
    "safetensors": "kv",
    "prometheus_client": "ops",
    "rich": "ops",
    "shtab": "ops",
}
"""Packages that a command may lack, and the extra of kvshm that brings each."""


class Command(Protocol):
    """A module that is a command."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, asked: argparse.Namespace) -> int: ...


def run_command(name: str, work: Callable[[], int]) -> int:
    """Do a command's work and return its exit status; an error that a user can mend becomes a line
    on stderr, without a traceback.  Neither a closed stdout nor its encoding is an error."""
    _prepare_output()
    try:
        return run_until_pipe_closes(work)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ImportError as exc:
        package = (exc.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        extra = EXTRAS[package]
        print(f"kvshm {name} needs {package}: pip install 'kvshm[{extra}]'", file=sys.stderr)
        return EXIT_USAGE
    except (KvshmError, OSError, MemoryError) as exc:
        print(f"kvshm {name}: {clean(str(exc)) or 'not enough memory'}", file=sys.stderr)
        if isinstance(exc, NoSuchEngine):
            return EXIT_NO_ENGINE
        mistake = isinstance(exc, ConfigError | RunDirectoryError)
        return EXIT_USAGE if mistake else EXIT_FAILED


def _prepare_output() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stderr = cast(TextIO, _Forgiving(sys.stderr))


class _Forgiving:
    """A stderr that cannot be written, for instance on a full disk, changes no exit status."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run_alone(
    name: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run one command as a program of its own; return the exit status."""
    parser = argparse.ArgumentParser(prog=f"kvshm {name}")
    add_arguments(parser)
    asked = parser.parse_args(arguments)
    return run_command(name, lambda: run(asked))
