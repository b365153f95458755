"""Copies between GPU caches: enqueued on a stream of their own, polled by an event.

    own compute stream ──┐ (what may still write to the destination, where anything may)
    copy stream          └─ ids ─ copy ─ event ─►  poll: event done?  DONE, or FAILED

Nothing here ever waits for a peer: whether its bytes still count is decided by the slots,
after the event.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvshm.errors import TransportError
from kvshm.interfaces import CopyState
from kvshm.log import logger
from kvshm.terms import BlockId

from .driver import CudaError, Driver, HostBuffer, RegionTable, Stream

_log = logger(__name__)

PROGRAMS = 64
"""How many programs the kernel has unless told otherwise."""
ID_BYTES = 8
MAX_TILES = 1 << 31
_IDS_AT = 64
"""In the host memory of a copy: the stop word, then the ids on a cache line of their own."""
_FEWEST_PAIRS = 1024


class Route(Enum):
    """How the bytes of a pair of caches travel."""

    KERNEL = "kernel"
    BATCH = "batch"
    """By the copy engines; for large fragments between GPUs."""
    STAGED = "staged"
    """One by one, through host memory: GPUs that cannot reach each other."""


@dataclass(frozen=True, slots=True)
class Way:
    """Where blocks are copied from and to, and by which route."""

    table: RegionTable
    route: Route


class _CopyBuffers:
    """What one copy occupies: its event, its stop word and its block ids."""

    def __init__(self, driver: Driver, pairs: int) -> None:
        self.pairs = pairs
        self.event = driver.new_event()
        self.host: HostBuffer = driver.host_allocate(_IDS_AT + 2 * pairs * ID_BYTES)
        self.ids = driver.allocate(2 * pairs * ID_BYTES)

    def fill(self, source: Sequence[BlockId], target: Sequence[BlockId]) -> int:
        """Write the ids and clear the stop word; return the ids' bytes."""
        packed = array("q", source)
        packed.extend(target)
        nbytes = len(packed) * ID_BYTES
        self.host.view[0:4] = bytes(4)
        self.host.view[_IDS_AT : _IDS_AT + nbytes] = packed.tobytes()
        return nbytes

    def stop(self) -> None:
        self.host.view[0] = 1

    def free(self, driver: Driver) -> None:
        driver.free_event(self.event)
        driver.host_free(self.host)
        driver.free(self.ids)


class CudaCopy:
    """A copy on the stream (kvshm.interfaces.Copy)."""

    def __init__(
        self, copies: CopyStream, buffers: _CopyBuffers, ended: Callable[[], None]
    ) -> None:
        self.buffers = buffers
        self.state = CopyState.PENDING
        self.cancelled = False
        self.ended = ended
        self._copies = copies

    def poll(self) -> CopyState:
        if self.state is CopyState.PENDING:
            self._copies.reap()
        return self.state

    def cancel(self) -> None:
        self._copies.cancel(self)

    def fence(self) -> bool:
        self._copies.fence()
        return True


class CopyStream:
    """The copy stream of one cache.  Any thread; its lock is never held while waiting for the
    GPU, except in ``close``."""

    def __init__(self, driver: Driver, compute: Stream, programs: int = PROGRAMS) -> None:
        self._driver = driver
        self.compute = compute
        """Where the model runs; its owner changes it when the model runs elsewhere."""
        self._programs = programs
        self._lock = threading.Lock()
        self._free: list[_CopyBuffers] = []
        self._pending: list[CudaCopy] = []
        self._closed = False
        self.late_writers = True
        """See Transport."""
        self.stream = driver.new_stream()

    def prepare(self, way: Way) -> None:
        """Do now what the first copy would otherwise do: compile the kernel, allocate buffers.
        Blocks; on the thread that attaches, never the serving one."""
        if way.route is Route.KERNEL:
            self._driver.prepare_kernel(way.table)
        if self._free or self._pending:
            return
        buffers = _CopyBuffers(self._driver, _FEWEST_PAIRS)
        with self._lock:
            if not self._closed:
                self._free.append(buffers)
                return
        buffers.free(self._driver)

    def begin(
        self, way: Way, source: Sequence[BlockId], target: Sequence[BlockId],
        ended: Callable[[], None],
    ) -> CudaCopy:  # fmt: skip
        """Enqueue a copy; ``ended`` is called once when nothing of it reads or writes any
        more.  Raises TransportError (also CudaError) with nothing enqueued that writes."""
        if len(source) * len(way.table.rows) * way.table.chunks >= MAX_TILES:
            raise TransportError(f"{len(source)} blocks are too many for one copy")
        with self._lock:
            if self._closed:
                raise TransportError("the transport is closed")
            buffers = self._take_buffers(len(source))
            copy = CudaCopy(self, buffers, ended)
            try:
                if source:
                    self._enqueue(way, buffers, source, target)
                self._driver.record(buffers.event, self.stream)
            except BaseException:
                # What was enqueued may be running: the buffers are not used again before close.
                buffers.stop()
                raise
            self._pending.append(copy)
        return copy

    def _enqueue(
        self, way: Way, buffers: _CopyBuffers, source: Sequence[BlockId], target: Sequence[BlockId]
    ) -> None:
        driver, pairs = self._driver, len(source)
        nbytes = buffers.fill(source, target)
        if self.late_writers:
            driver.wait(self.stream, self.compute)
        ids = buffers.host.view[_IDS_AT : _IDS_AT + nbytes]
        if way.route is Route.KERNEL:
            driver.copy(buffers.ids, buffers.host.address + _IDS_AT, nbytes, self.stream)
            driver.copy_kernel(
                way.table, buffers.ids, buffers.host.address, pairs, self.stream, self._programs
            )
        else:
            copy = driver.copy_batch if way.route is Route.BATCH else driver.copy_loop
            half = pairs * ID_BYTES
            copy(way.table, ids[:half], ids[half:], self.stream)

    def _take_buffers(self, pairs: int) -> _CopyBuffers:
        for index, buffers in enumerate(self._free):
            if buffers.pairs >= pairs:
                return self._free.pop(index)
        size = _FEWEST_PAIRS
        while size < pairs:
            size *= 2
        return _CopyBuffers(self._driver, size)

    def reap(self) -> None:
        """Settle the copies that have ended."""
        with self._lock:
            ended = [copy for copy in self._pending if self._settle(copy)]
            self._pending = [copy for copy in self._pending if copy.state is CopyState.PENDING]
        for copy in ended:
            copy.ended()

    def _settle(self, copy: CudaCopy) -> bool:
        try:
            if not self._driver.done(copy.buffers.event):
                return False
            copy.state = CopyState.FAILED if copy.cancelled else CopyState.DONE
            self._free.append(copy.buffers)
        except CudaError as exc:
            # Such an error ends the whole context: nothing runs there any more.
            _log.error("a copy failed on the GPU: %s", exc)
            copy.state = CopyState.FAILED
        return True

    def cancel(self, copy: CudaCopy) -> None:
        """A kernel that has not begun will do nothing; what runs, runs on."""
        self.reap()
        with self._lock:
            if copy.state is CopyState.PENDING:
                copy.cancelled = True
                copy.buffers.stop()

    def fence(self) -> None:
        """Have the model's stream wait for all copies begun so far.  Blocks until they have
        ended where the driver refuses that; if it refuses that as well, the context is at its end,
        and nothing runs there any more."""
        try:
            self._driver.wait(self.compute, self.stream)
        except CudaError as exc:
            _log.error("the model's stream cannot wait for the copies: %s", exc)
            self._settle_all()

    def close(self) -> None:
        """Cancel and wait for the stream: then nothing writes any more.  Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.reap()
        with self._lock:
            for copy in self._pending:
                copy.cancelled = True
                copy.buffers.stop()
        self._settle_all()
        with self._lock:
            free, self._free = self._free, []
        try:
            for buffers in free:
                buffers.free(self._driver)
            self._driver.free_stream(self.stream)
        except CudaError as exc:
            _log.warning("memory of the copy stream is not freed: %s", exc)

    def _settle_all(self) -> None:
        try:
            self._driver.synchronize(self.stream)
        except CudaError as exc:
            _log.error("the copy stream ended with an error: %s", exc)
        self.reap()
