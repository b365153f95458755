"""kvshm-coordinator: arguments, signals, exit codes."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvshm._ground.resources import require_descriptors
from kvshm._ground.rundir import command_endpoint, event_endpoint, lock_path, open_run_directory
from kvshm._node.leftovers import clear, left_by_engines, take_namespace
from kvshm._node.locks import cleanup_lock, has_name, take_lock
from kvshm.config import Config
from kvshm.errors import AlreadyRunning, ConfigError, KvshmError, RunDirectoryError
from kvshm.version import __version__

from . import logfmt
from .notify import READY, STOPPING, notify
from .roster import State
from .server import Server
from .sockets import raise_descriptor_limit
from .tables import Tables

EXIT_CLEAN, EXIT_UNEXPECTED, EXIT_USAGE, EXIT_RUNNING, EXIT_RUN_DIRECTORY = range(5)
_EXIT_STATUS: dict[type[Exception], int] = {
    ConfigError: EXIT_USAGE,
    AlreadyRunning: EXIT_RUNNING,
    RunDirectoryError: EXIT_RUN_DIRECTORY,
}

DESCRIPTORS = 34
"""Descriptors that the coordinator needs to serve one engine."""
MOST_NAMED = 20
"""Removed files of one sweep that the log names; further files are counted."""
_EPILOG = """\
exit status:
  0  ended by SIGTERM or SIGINT; engines go on serving
  1  unexpected error
  2  bad usage or setting
  3  another coordinator serves this run directory and namespace
  4  the run directory cannot be used
A signal that arrives while Python is still loading ends the process (143, 130 in a shell);
no file has been made by then.
"""


def _config(argv: Sequence[str] | None) -> Config:
    """The settings.  Options override the environment variables, and are checked in the same way.
    Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="kvshm-coordinator",
        description="Knows the vLLM engines of this machine that share their prefix caches.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--run-dir",
        help="directory of the sockets (default: $KVSHM_RUN_DIR, else $XDG_RUNTIME_DIR/kvshm, "
        "else /tmp/kvshm-<uid> or one in $HOME)",
    )
    parser.add_argument(
        "--namespace", help="serve the engines of this namespace (default: $KVSHM_NAMESPACE)"
    )
    parser.add_argument(
        "--log-level", help="debug, info, warning or error (default: $KVSHM_LOG_LEVEL)"
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    asked = parser.parse_args(argv)
    options = {
        "--run-dir": asked.run_dir,
        "--namespace": asked.namespace,
        "--log-level": asked.log_level,
    }
    return Config.from_env(os.environ, options)


class _Signals:
    """SIGTERM and SIGINT end the server at its next turn."""

    def __init__(self) -> None:
        self.received = False
        self.wake, self._write = socket.socketpair()
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    @staticmethod
    def ignore() -> None:
        """Call it once the server has ended: at its shutdown the interpreter restores the default
        effect of signals that it handles, and another signal would decide the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: object) -> None:
        self.received = True


class _Lock:
    """The lock of the namespace, held until ``close``."""

    def __init__(self, run_dir: Path, namespace: str) -> None:
        """Raises AlreadyRunning, RunDirectoryError or OSError."""
        self._run_dir = run_dir
        self._path = lock_path(run_dir, namespace)
        with cleanup_lock(run_dir):
            self._fd = take_namespace(run_dir, namespace)

    def keep(self) -> None:
        """Take the lock again if its file was removed.  Raises KvshmError or OSError.  If two
        coordinators begin at the same moment, one of them finds that its socket was replaced."""
        if has_name(self._fd, self._path):
            return
        with cleanup_lock(self._run_dir, patience=0.0) as alone:
            if not alone:
                return  # a process that cleans up holds it: try again later
            fd = take_lock(self._path)
        self.close()
        self._fd = fd
        logfmt.write(logging.WARNING, "restored", path=self._path)

    def close(self) -> None:
        os.close(self._fd)


def _run(run_dir: Path, namespace: str, signals: _Signals) -> None:
    """Serve as the only coordinator of the namespace; remove files without an owner at the end."""
    endpoints = command_endpoint(run_dir, namespace), event_endpoint(run_dir, namespace)
    lock = _Lock(run_dir, namespace)
    reports = _serve(run_dir, namespace, endpoints, lock, signals)
    signals.ignore()
    lock.close()
    cleared = clear(run_dir, namespace)
    for removed in cleared.removed:
        logfmt.write(logging.INFO, "removed", name=removed)
    for left in cleared.left:
        logfmt.write(logging.DEBUG, "left-alone", reason=left)
    logfmt.write(logging.INFO, "ended", pid=os.getpid(), complaints=reports)


def _serve(
    run_dir: Path, namespace: str, endpoints: tuple[str, str], lock: _Lock, signals: _Signals
) -> int:
    """Serve until a signal arrives; return the number of messages dropped or refused."""
    state = State(epoch=secrets.randbits(63) + 1, namespace=namespace, uid=os.geteuid())
    tables = Tables(run_dir, namespace, time.monotonic)
    server = Server(state, tables, lambda: _sweep_files(run_dir, namespace), lock.keep)
    tables.serve()
    server.open(*endpoints, signals.wake.fileno())
    about = {"run_dir": run_dir, "namespace": namespace, "version": __version__}
    logfmt.write(logging.INFO, "serving", pid=os.getpid(), **about)
    notify(READY, os.environ)
    try:
        server.run(lambda: signals.received)
    finally:
        notify(STOPPING, os.environ)
        server.close()
    return state.num_reports


def _sweep_files(run_dir: Path, namespace: str) -> None:
    """Remove the files of dead engines from the run directory."""
    left = left_by_engines(run_dir, namespace)
    for number, path in enumerate(left):
        with suppress(OSError):
            path.unlink(missing_ok=True)
            if number < MOST_NAMED:
                logfmt.write(logging.INFO, "removed", path=path)
    if len(left) > MOST_NAMED:
        logfmt.write(logging.INFO, "removed", more=len(left) - MOST_NAMED)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the coordinator until SIGTERM or SIGINT; return the exit status."""
    try:
        config = _config(argv)
        logfmt.start(config.log_level)
        for warning in config.warnings:
            logfmt.write(logging.WARNING, "unknown-setting", reason=warning)
        raise_descriptor_limit()
        require_descriptors(DESCRIPTORS)
        signals = _Signals()  # before any file is made that has to be removed
        os.umask(0o077)
        run_dir = open_run_directory(config.run_dir, os.environ)
        _run(run_dir, config.namespace, signals)
    except (KvshmError, OSError) as exc:
        logfmt.end(f"kvshm-coordinator: {exc}")
        return _EXIT_STATUS.get(type(exc), EXIT_UNEXPECTED)
    logfmt.end()
    return EXIT_CLEAN


if __name__ == "__main__":
    sys.exit(main())
