"""The one thread of a transport that moves bytes on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvshm import _native
from kvshm._base.ids import BlockId
from kvshm._base.log import LogLimit, logger
from kvshm.errors import TransportError
from kvshm.interfaces import CopyState

from .jobs import JobThread
from .log_lines import TransportLine

_log = logger(__name__)
_log_limit = LogLimit()

PART_BYTES = 4 << 20
"""Bytes between two calls of ``keep_going``: about a millisecond."""

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
    """Owners of the memory, kept as long as the plan."""


class BlockCopy:
    def __init__(self, plan: CopyPlan) -> None:
        self._plan: CopyPlan | None = plan
        self._lock = threading.Lock()  # the thread that takes the plan runs the copy
        self._stop = bytearray(4)  # read by the native loop before each block
        self._state = CopyState.PENDING

    def poll(self) -> CopyState:
        return self._state

    def cancel(self) -> None:
        self._stop[0] = 1
        if self._take() is not None:
            self._state = CopyState.FAILED

    def fence(self) -> bool:
        return False

    def _take(self) -> CopyPlan | None:
        with self._lock:
            plan, self._plan = self._plan, None
        return plan

    def run(self, keep_going: Callable[[], bool] | None = None) -> None:
        """Copy, and set the state after the last byte.  Does nothing if the copy was begun or
        cancelled before.  On the copy thread, or on a caller's thread while ``keep_going()``."""
        if (plan := self._take()) is None:
            return
        try:
            done = self._copy(plan, keep_going)
        except Exception:  # any: the importer waits for the copy's end
            if _log_limit.allows(TransportLine.COPY_FAILED):
                _log.line(TransportLine.COPY_FAILED, len(plan.source_blocks), exc_info=True)
            done = False
        self._state = CopyState.DONE if done else CopyState.FAILED

    def _copy(self, plan: CopyPlan, keep_going: Callable[[], bool] | None) -> bool:
        total = len(plan.source_blocks)
        block_bytes = sum(nbytes for _, _, nbytes, _ in plan.source)
        part = max(1, total if keep_going is None else PART_BYTES // max(1, block_bytes))
        for start in range(0, total, part):
            if keep_going is not None and not keep_going():
                return False
            source = plan.source_blocks[start : start + part]
            target = plan.target_blocks[start : start + part]
            copied = _native.copy_blocks(plan.source, plan.target, source, target, self._stop)
            if copied < len(source):
                return False
        return True


class Copier(JobThread):
    """Runs copies, and jobs that must wait for copies, in the order given."""

    def __init__(self) -> None:
        super().__init__("kvshm-copy")
        self._waiting: set[BlockCopy] = set()

    def copy_now(self, plan: CopyPlan, keep_going: Callable[[], bool]) -> BlockCopy:
        """Copy on the calling thread, past the queue, while ``keep_going()``: the copy thread would
        take half as long again.  TransportError once closed."""
        copy = BlockCopy(plan)
        with self._lock:
            self._check_open()
        copy.run(keep_going)
        return copy

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
        """Cancel queued copies; return when nothing writes any more.  Idempotent."""
        with self._lock:
            self._closed = True
            for copy in list(self._waiting):
                copy.cancel()
        super().close()
