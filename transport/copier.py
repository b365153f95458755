"""The one thread of a transport that moves bytes on the host."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvshm import _native
from kvshm.errors import TransportError
from kvshm.interfaces import CopyState
from kvshm.log import logger
from kvshm.terms import BlockId

_log = logger(__name__)

StridedRun = tuple[int, int, int, int]
"""Address of block 0, stride, bytes per block, number of blocks."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Blocks ``source_blocks[i]`` of ``source`` go onto ``target_blocks[i]`` of ``target``."""

    source: list[StridedRun]
    source_blocks: Sequence[BlockId]
    target: list[StridedRun]
    target_blocks: Sequence[BlockId]
    keep: tuple[object, ...]
    """What owns the memory behind the addresses; lives as long as the plan."""


class BlockCopy:
    """A copy queued on a Copier (kvshm.interfaces.Copy)."""

    def __init__(self, plan: CopyPlan) -> None:
        self._plan: CopyPlan | None = plan
        self._stop = bytearray(4)  # read by the native loop before each block
        self._state = CopyState.PENDING

    def poll(self) -> CopyState:
        return self._state

    def cancel(self) -> None:
        self._stop[0] = 1

    def run(self) -> None:
        """Copy, and settle the state when the last byte is written.  On the copy thread."""
        plan, self._plan = self._plan, None
        assert plan is not None, "a copy runs once"
        try:
            done = self._copy(plan)
        except Exception:
            _log.exception("copy of %d blocks failed", len(plan.source_blocks))
            done = False
        self._state = CopyState.DONE if done else CopyState.FAILED

    def _copy(self, plan: CopyPlan) -> bool:
        copied = _native.copy_blocks(
            plan.source, plan.target, plan.source_blocks, plan.target_blocks, self._stop
        )
        return copied == len(plan.source_blocks)


class Copier:
    """Runs copies, and whatever must wait for them, one after the other in the order given.

    The thread starts with the first job and ends with ``close``.  Any thread may submit.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: set[BlockCopy] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` after everything submitted before.  TransportError once closed."""
        with self._lock:
            if self._closed:
                raise TransportError("the transport is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvshm-copy", daemon=True)
                self._thread.start()
            self._jobs.put(job)

    def begin(self, plan: CopyPlan) -> BlockCopy:
        """Queue a copy.  TransportError once closed."""
        copy = BlockCopy(plan)

        def job() -> None:
            copy.run()
            self._waiting.discard(copy)

        self._waiting.add(copy)
        try:
            self.submit(job)
        except TransportError:
            self._waiting.discard(copy)
            raise
        return copy

    def close(self) -> None:
        """Cancel what is queued and return when nothing writes any more.  Idempotent."""
        with self._lock:
            self._closed = True
            for copy in list(self._waiting):
                copy.cancel()
            self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        # A frame of its own: what a job holds must go when it is done, not when the next comes.
        job = self._jobs.get()
        if job is None:
            return False
        try:
            job()
        except Exception:
            _log.exception("a job of the copy thread failed")
        return True
