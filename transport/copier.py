"""The one thread of a transport that moves bytes on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvshm import _native
from kvshm.errors import TransportError
from kvshm.ids import BlockId
from kvshm.interfaces import CopyState
from kvshm.log import logger

from .jobs import JobThread

_log = logger(__name__)

PART_BYTES = 4 << 20
"""What who waits copies between two looks at the clock: about a millisecond."""

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
        self._lock = threading.Lock()  # who takes the plan, runs it
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

    def run(self, go_on: Callable[[], bool] | None = None) -> None:
        """Copy, and settle the state when the last byte is written; nothing if somebody has
        begun to.  On the copy thread, or on that of who waits, as long as ``go_on`` says so."""
        if (plan := self._take()) is None:
            return
        try:
            done = self._copy(plan, go_on)
        except Exception:
            _log.exception("copy of %d blocks failed", len(plan.source_blocks))
            done = False
        self._state = CopyState.DONE if done else CopyState.FAILED

    def _copy(self, plan: CopyPlan, go_on: Callable[[], bool] | None) -> bool:
        total = len(plan.source_blocks)
        block_bytes = sum(nbytes for _, _, nbytes, _ in plan.source)
        part = max(1, total if go_on is None else PART_BYTES // max(1, block_bytes))
        for start in range(0, total, part):
            if go_on is not None and not go_on():
                return False
            source = plan.source_blocks[start : start + part]
            target = plan.target_blocks[start : start + part]
            copied = _native.copy_blocks(plan.source, plan.target, source, target, self._stop)
            if copied < len(source):
                return False
        return True


class Copier(JobThread):
    """Runs copies, and whatever must wait for them, one after the other in the order given."""

    def __init__(self) -> None:
        super().__init__("kvshm-copy")
        self._waiting: set[BlockCopy] = set()

    def carry_out(self, plan: CopyPlan, go_on: Callable[[], bool]) -> BlockCopy:
        """Copy on the calling thread, past the queue, as long as ``go_on`` says so: handing it
        to the other one costs half as much again.  TransportError once closed."""
        copy = BlockCopy(plan)
        with self._lock:
            self._check_open()
        copy.run(go_on)
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
        """Cancel what is queued and return when nothing writes any more.  Idempotent."""
        with self._lock:
            self._closed = True
            for copy in list(self._waiting):
                copy.cancel()
        super().close()
