"""A coordinator on a thread: a node within one process, for tests and for programs with several
engines.  Engines of other processes find it as they find the program.

Nothing of the process is changed: no signal, no umask, no limit and no handler of logging.  The
lines go to the logger ``kvshm.coordinator``.  What clients make it keep in memory is not bounded.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvshm._base.forks import guard_forks
from kvshm._base.resources import start_thread
from kvshm._base.rundir import open_run_directory
from kvshm._base.timing import TIMING
from kvshm.config import Config
from kvshm.errors import KvshmError

from . import logfmt
from .bounds import Bounds, Exhausted
from .log_lines import Event
from .service import Service


@contextmanager
def serve(config: Config | None = None) -> Iterator[CoordinatorThread]:
    """Serve a namespace, on a thread of this process, until the end of the ``with`` block.

    ``config``: its ``run_dir`` and ``namespace`` count (None: those of the environment).  Raises
    ConfigError, AlreadyRunning, RunDirectoryError or another KvshmError, leaving nothing open.
    At the end all connections are closed and the files in the run directory are removed; engines
    serve on, unshared.  Blocks for as long as that takes, a few milliseconds.

        with in_process.serve(config):
            ...

    A process may serve several namespaces.  A forked child has no part of it.  While
    the process has too few descriptors engines are not served, and the log says why.  If the thread
    fails, it logs why and ends; the process goes on.
    """
    config = Config.from_env(os.environ) if config is None else config
    thread = CoordinatorThread(open_run_directory(config.run_dir, os.environ), config.namespace)
    try:
        yield thread
    finally:
        thread.close()


class CoordinatorThread:
    """The thread that serves; any thread may call its methods."""

    def __init__(self, run_dir: Path, namespace: str) -> None:
        """Serve.  Raises KvshmError or OSError, leaving nothing open."""
        self._place = run_dir, namespace
        self._stopping = False
        self._is_serving = True
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._service = Service(run_dir, namespace, self._wake, Bounds.within_a_program())
        except BaseException:
            os.close(self._wake)
            raise
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="kvshm-coordinator", daemon=True
        )
        guard_forks(self)
        try:
            start_thread(self._thread)
        except KvshmError:
            self._service.close()
            os.close(self._wake)
            raise

    @property
    def running(self) -> bool:
        """Whether engines are served: not after ``close``, a failure, or in a forked child, nor
        while descriptors are short."""
        return self._is_serving and self._thread is not None and self._thread.is_alive()

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
        if self._thread is None:
            return
        self._thread = None
        with suppress(OSError):  # if the fork came while the thread closed them
            os.close(self._wake)

    def _run(self) -> None:
        try:
            self._serve_again_and_again()
            self._service.clean_up()
        except (KvshmError, OSError) as exc:
            logfmt.write(Event.STOPPED, reason=exc)
        except Exception as exc:  # any: a bug here must not end the program
            logfmt.write_bug("serve", exc)

    def _serve_again_and_again(self) -> None:
        """Serve until ``close``; with pauses while clients or the program leave no descriptors."""
        first, longest = TIMING.retry_seconds
        pause = first
        while not self._stopping:
            since = time.monotonic()
            try:
                self._service.run(lambda: self._stopping)
            except Exhausted as exc:
                logfmt.write(Event.EXHAUSTED, reason=exc)
            finally:
                self._is_serving = False
                self._service.close()
            if time.monotonic() - since > longest:
                pause = first
            pause = self._reopen(pause, longest)

    def _reopen(self, pause: float, longest: float) -> float:
        """Try again until engines are served; return the next pause."""
        has_complained = False
        while not self._is_serving and not self._is_stopped_within(pause):
            pause = min(2 * pause, longest)
            bounds = Bounds.within_a_program()
            if not bounds.has_room:
                continue
            try:
                self._service = Service(*self._place, self._wake, bounds)
            except Exception as exc:  # any: the next try may succeed
                if not has_complained:
                    logfmt.write(Event.FAILED, what="serve again", reason=exc)
                has_complained = True
            else:
                self._is_serving = True
        return pause

    def _is_stopped_within(self, seconds: float) -> bool:
        """Wait for ``close``, ``seconds`` at most; return whether it was called."""
        wake = select.poll()
        wake.register(self._wake, select.POLLIN)
        wake.poll(1000 * seconds)
        return self._stopping
