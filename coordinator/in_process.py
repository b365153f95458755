"""A coordinator on a thread: a node within one process, for tests and for programs with several
engines.  Engines of other processes find it as they find the program.

Nothing of the process is changed: no signal, no umask, no limit and no handler of logging.  The
lines go to the logger ``kvshm.coordinator``.  Other than the program it does not look at memory,
which it cannot tell from the rest of the process: a sender in the run directory that never stops
may fill it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvshm._base.forks import guard_forks
from kvshm._base.resources import start_thread
from kvshm._base.rundir import open_run_directory
from kvshm.config import Config
from kvshm.errors import KvshmError

from . import logfmt
from .service import Service
from .sockets import Bounds


@contextmanager
def serve(config: Config | None = None) -> Iterator[CoordinatorThread]:
    """Serve a namespace, on a thread of this process, until the end of the ``with`` block.

    ``config``: its ``run_dir`` and ``namespace`` count (None: those of the environment).  Raises
    ConfigError, AlreadyRunning, RunDirectoryError or another KvshmError, leaving nothing open.
    At the end all connections are closed and the files in the run directory are removed; engines
    serve on, unshared.  Blocks for as long as that takes, a few milliseconds.

        with in_process.serve(config):
            ...

    A process may serve several namespaces.  A forked child has no part of it.  If the thread fails,
    it logs why and ends; the process goes on.
    """
    config = Config.from_env(os.environ) if config is None else config
    thread = CoordinatorThread(open_run_directory(config.run_dir, os.environ), config.namespace)
    try:
        yield thread
    finally:
        thread.close()


class CoordinatorThread:
    """The thread.  All methods: any thread."""

    def __init__(self, run_dir: Path, namespace: str) -> None:
        """Serve.  Raises KvshmError or OSError, leaving nothing open."""
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            service = Service(run_dir, namespace, self._wake, Bounds.within_a_program())
        except BaseException:
            os.close(self._wake)
            raise
        self._service = service
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, args=(service,), name="kvshm-coordinator", daemon=True
        )
        guard_forks(self)
        try:
            start_thread(self._thread)
        except KvshmError:
            service.close()
            os.close(self._wake)
            raise

    @property
    def running(self) -> bool:
        """Whether engines are served: not after ``close``, a failure, or in a forked child."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Stop serving, and wait for the end of it.  Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        thread.join()
        os.close(self._wake)

    def forget_in_child(self) -> None:
        """See kvshm/_base/forks.py."""
        if self._thread is None:
            return
        self._thread = None
        with suppress(OSError):  # if the fork came while the thread closed them
            os.close(self._wake)
            self._service.forget_in_child()

    def _run(self, service: Service) -> None:
        try:
            try:
                service.run(lambda: self._stopping)
            finally:
                service.close()
            service.clean_up()
        except (KvshmError, OSError) as exc:
            logfmt.write(logging.ERROR, "stopped", reason=exc)
        except Exception as exc:  # any: a bug here must not end the program
            logfmt.write_bug("serve", exc)
