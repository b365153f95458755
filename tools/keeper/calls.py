"""Calls that may block for long, made one after the other on a thread of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from kvshm._base.resources import start_thread

T = TypeVar("T")


class Calls:
    """Used by one thread, but for the calls themselves.  The process may end while one is made."""

    def __init__(self, name: str, clock: Callable[[], float], ended: Callable[[], None]) -> None:
        """``ended``: called on the other thread when a call has ended.  Raises TransportError if
        there can be no thread."""
        self._clock, self._ended = clock, ended
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]]]
        self._waiting = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Callable[[Any], None], Any]] = queue.SimpleQueue()
        self._begun: float | None = None
        self._failed = 0
        self.error: Exception | None = None
        """Of the last call; None if it has ended well."""
        start_thread(threading.Thread(target=self._run, name=name, daemon=True))

    def make(self, call: Callable[[], T], then: Callable[[T | None], None]) -> None:
        """Have a call made; ``finish`` gives ``then`` what it returned, None if it raised."""
        self._waiting.put((call, then))

    def finish(self) -> None:
        """Handle the calls that have ended."""
        while not self._results.empty():
            then, result = self._results.get()
            then(result)

    def take_failures(self) -> int:
        """Return how many calls have raised an exception since this was asked last."""
        failed, self._failed = self._failed, 0
        return failed

    def takes(self) -> float:
        """Return for how many seconds the present call has been made; 0 if there is none."""
        begun = self._begun
        return 0.0 if begun is None else self._clock() - begun

    def _run(self) -> None:
        while True:
            call, then = self._waiting.get()
            self._begun, result = self._clock(), None
            try:
                result, self.error = call(), None
            except Exception as exc:  # any, of a library: the keeper goes on without a store
                self.error = exc
                self._failed += 1
            self._begun = None
            self._results.put((then, result))
            self._ended()
