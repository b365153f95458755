"""kvshm-coordinator: arguments, signals, exit codes."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvshm._base.resources import require_descriptors
from kvshm._base.rundir import open_run_directory
from kvshm.config import Config
from kvshm.errors import AlreadyRunning, ConfigError, KvshmError, RunDirectoryError
from kvshm.version import __version__

from . import logfmt
from .bounds import Bounds, Exhausted
from .log_lines import Event
from .notify import READY, STOPPING, VARIABLE, notify
from .service import DESCRIPTORS, Service

EXIT_CLEAN, EXIT_UNEXPECTED, EXIT_USAGE, EXIT_RUNNING, EXIT_RUN_DIRECTORY = range(5)
EXIT_EXHAUSTED = 5
_EXIT_STATUS: dict[type[Exception], int] = {
    ConfigError: EXIT_USAGE,
    AlreadyRunning: EXIT_RUNNING,
    RunDirectoryError: EXIT_RUN_DIRECTORY,
}
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}
"""Errors of the machine that pass by themselves: a service manager shall try again."""

_EPILOG = """\
exit status:
  0  ended by SIGTERM or SIGINT; engines go on serving
  1  unexpected error
  2  bad usage or setting
  3  another coordinator serves this run directory and namespace
  4  the run directory cannot be used
  5  clients have used up its descriptors or memory; start it again, nothing is lost
A signal that arrives while Python is still loading ends the process (143, 130 in a shell);
no file has been made by then.
"""


def _config(argv: Sequence[str] | None) -> Config:
    """Return the settings; options override variables and file.  Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="kvshm-coordinator",
        description="Knows the vLLM engines of this machine that share their prefix caches.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--run-dir",
        help="directory of the sockets (default: $KVSHM_RUN_DIR, else run_dir of the file "
        "$KVSHM_CONFIG, else $XDG_RUNTIME_DIR/kvshm, else /tmp/kvshm-<uid> or one in $HOME)",
    )
    parser.add_argument(
        "--namespace", help="serve the engines of this namespace (default: $KVSHM_NAMESPACE)"
    )
    parser.add_argument(
        "--log-level", help="debug, info, warning or error (default: $KVSHM_LOG_LEVEL)"
    )
    parser.add_argument("--log-format", help="text or json (default: $KVSHM_LOG_FORMAT)")
    parser.add_argument(
        "--log-file",
        help="append lines to this file instead of stderr (default: $KVSHM_LOG_FILE)",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    asked = parser.parse_args(argv)
    options = {
        "--run-dir": asked.run_dir,
        "--namespace": asked.namespace,
        "--log-level": asked.log_level,
        "--log-format": asked.log_format,
        "--log-file": asked.log_file,
    }
    return Config.from_env(os.environ, options)


class _Signals:
    def __init__(self) -> None:
        self.received = False
        self.wake, self._write = socket.socketpair()
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    @staticmethod
    def ignore() -> None:
        """Ignore signals once the server has ended: at its shutdown the interpreter restores the
        default effect of those it handles, and another one would decide the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: object) -> None:
        self.received = True


def _end_exhausted(exc: Exhausted) -> NoReturn:
    """End the process at once: the kernel closes everything without a descriptor."""
    next_step = "once it has been restarted" if os.environ.get(VARIABLE) else "if it is restarted"
    try:
        logfmt.end(f"kvshm-coordinator: {exc}; engines serve on, and join {next_step}")
    finally:
        os._exit(EXIT_EXHAUSTED)


def _serve(run_dir: Path, namespace: str, signals: _Signals, bounds: Bounds) -> None:
    service = Service(run_dir, namespace, signals.wake.fileno(), bounds)
    notify(READY, os.environ)
    try:
        service.run(lambda: signals.received)
    except Exhausted as exc:
        _end_exhausted(exc)
    finally:
        notify(STOPPING, os.environ)
        service.close()
    signals.ignore()
    service.clean_up()


def _exit_status(exc: Exception) -> int:
    cause = exc if isinstance(exc, OSError) else exc.__cause__
    if isinstance(cause, OSError) and cause.errno in _PASSING:
        return EXIT_UNEXPECTED
    return _EXIT_STATUS.get(type(exc), EXIT_UNEXPECTED)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the coordinator until SIGTERM or SIGINT; return the exit status."""
    try:
        config = _config(argv)
        logfmt.start(config.log_level, config.log_format, config.log_file)
        for warning in config.warnings:
            logfmt.write(Event.UNKNOWN_SETTING, reason=warning)
        bounds = Bounds.of_a_program()
        require_descriptors(DESCRIPTORS)
        signals = _Signals()  # before any file is made that has to be removed
        os.umask(0o077)
        run_dir = open_run_directory(config.run_dir, os.environ)
        _serve(run_dir, config.namespace, signals, bounds)
    except (KvshmError, OSError) as exc:
        logfmt.end(f"kvshm-coordinator: {exc}")
        return _exit_status(exc)
    logfmt.end()
    return EXIT_CLEAN


if __name__ == "__main__":
    sys.exit(main())
