"""A thread for jobs whose submitters must not wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from kvshm._base.log import LogLimit, logger
from kvshm._base.resources import start_thread
from kvshm.errors import TransportError

from .log_lines import TransportLine

_log = logger(__name__)


class JobThread:
    """Runs jobs of any thread in order, from the first job to ``close``."""

    def __init__(self, name: str, enter: Callable[[], None] | None = None) -> None:
        self._name = name
        self._enter = enter
        self._log_limit = LogLimit()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` after all jobs submitted before.  TransportError once closed, and if no
        thread can be started."""
        with self._lock:
            self._check_open()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                start_thread(thread)
                self._thread = thread
            self._jobs.put(job)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the transport is closed")

    def close(self) -> None:
        """Return when all submitted jobs are done; at once in a job.  Idempotent."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()

    def _run(self) -> None:
        if self._enter is not None:
            self._try(self._enter)
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        # A separate frame: objects of a job must be freed at its end, not when the next job comes.
        job = self._jobs.get()
        if job is None:
            return False
        self._try(job)
        return True

    def _try(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:  # any: the next jobs must still run
            if self._log_limit.allows(TransportLine.JOB_FAILED):
                _log.line(TransportLine.JOB_FAILED, self._name, exc_info=True)
