"""Copies between GPU caches: enqueued on a stream of their own, polled by an event.

    own compute stream ──┐ (only if what it had may still write to the destination)
    copy stream          └─ ids ─ copy ─ event ─►  poll: event done?  DONE, or FAILED
                                            └───►  a thread waits for it and tells of the end

Nothing here waits for a peer.  After the event, the re-check of the slots decides whether the
peer's bytes still count.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvshm._base.ids import BlockId
from kvshm._base.log import LogLimit, logger
from kvshm.errors import TransportError
from kvshm.interfaces import CopyState

from ..jobs import JobThread
from ..log_lines import TransportLine
from .driver import CudaError, Driver, HostBuffer, RegionTable, Route, Stream

_log = logger(__name__)

PROGRAMS_EACH = 2
"""Programs of the kernel per multiprocessor of the GPU: measured on an H100 (docs/gpu.md)."""
ID_BYTES = 8
MAX_TILES = 1 << 31
_IDS_AT = 64
"""Offset of the ids in a copy's memory; its stop word stands before them."""
_PREPARED = 3
_PREPARED_PAIRS = 8192
"""Copies that may be under way at a time, and pairs of each, before a copy has to allocate."""


def copy_each(
    driver: Driver,
    table: RegionTable,
    source: Sequence[BlockId],
    target: Sequence[BlockId],
    stream: Stream,
) -> None:
    """Enqueue a copy for each fragment."""
    for row in table.rows:
        for here, there in zip(source, target, strict=True):
            read = row.source + here * row.source_stride
            written = row.target + there * row.target_stride
            driver.copy(written, read, row.block_bytes, stream)


class _CopyBuffers:
    """The resources of one copy: its event, its stop word and its block ids."""

    def __init__(self, driver: Driver, pairs: int) -> None:
        self.pairs = pairs
        with ExitStack() as undone:
            self.event = driver.new_event()
            undone.callback(driver.free_event, self.event)
            self.host: HostBuffer = driver.host_allocate(_IDS_AT + 2 * pairs * ID_BYTES)
            undone.callback(driver.host_free, self.host)
            self.device = driver.allocate(_IDS_AT + 2 * pairs * ID_BYTES)
            """The same as ``host``, from the moment when the copy begins on the GPU."""
            undone.pop_all()

    def fill(self, source: Sequence[BlockId], target: Sequence[BlockId]) -> None:
        """Write the ids and clear the stop word."""
        packed = array("q", source)
        packed.extend(target)
        self.host.view[0:4] = bytes(4)
        self.host.view[_IDS_AT : _IDS_AT + len(packed) * ID_BYTES] = packed.tobytes()

    def stop(self) -> None:
        self.host.view[0] = 1

    @property
    def stopped(self) -> bool:
        return bool(self.host.view[0])

    def free(self, driver: Driver) -> None:
        """Each of them, even if another one cannot be freed."""
        with ExitStack() as parts:
            parts.callback(driver.host_free, self.host)
            parts.callback(driver.free, self.device)
            parts.callback(driver.free_event, self.event)


class LaunchedWork:
    """What a stream had been given when this was made.  Any thread."""

    def __init__(self, driver: Driver, stream: Stream) -> None:
        """Raises CudaError."""
        self.event = driver.new_event()
        # When this object is no longer held; not at the interpreter's end, which needs no order.
        weakref.finalize(self, _free_event, driver, self.event).atexit = False
        driver.record(self.event, stream)


def _free_event(driver: Driver, event: Any) -> None:
    with suppress(CudaError):  # the context has ended
        driver.free_event(event)


@dataclass(eq=False, slots=True)
class CudaCopy:
    """A copy on the stream (kvshm.interfaces.Copy)."""

    copies: CopyStream
    buffers: _CopyBuffers
    ended: Callable[[], None]
    state: CopyState = CopyState.PENDING
    awaited: bool = False
    """Whether a thread waits for the event, which must not be used for another copy then."""

    def poll(self) -> CopyState:
        if self.state is CopyState.PENDING:
            self.copies.finish_ended()
        return self.state

    def when_ended(self, call: Callable[[], None]) -> None:
        self.copies.when_ended(self, call)

    def cancel(self) -> None:
        self.copies.cancel(self)

    def fence(self) -> bool:
        self.copies.fence()
        return True


class CopyStream:
    """The copy stream of one cache.  Any thread.  Waits for the GPU with its lock held only where a
    copy could not be begun."""

    def __init__(self, driver: Driver, compute: Stream, programs: int = 0) -> None:
        """``programs`` of the kernel; 0: as many as the GPU is meant to have."""
        self._driver = driver
        self.compute = compute
        """The model's stream; the owner changes it when the model runs on another one."""
        self._waiter = JobThread("kvshm-copies", driver.enter_thread)
        """Waits for one event after the other: copies on one stream end in order."""
        self._programs = programs or PROGRAMS_EACH * driver.multiprocessors
        self._log_limit = LogLimit()
        self._lock = threading.Lock()
        self._free: list[_CopyBuffers] = []
        self._pending: list[CudaCopy] = []
        self._closed = False
        self.stream = driver.new_stream()

    def prepare(self, table: RegionTable) -> None:
        """Compile and load the kernel for such a table (its address is not used), so that a copy
        need not.  May block for seconds: never while the model is served."""
        if table.route is Route.KERNEL:
            self._driver.prepare_kernel(table)

    def prepare_buffers(self, copies: int = _PREPARED) -> None:
        """Allocate what this number of copies needs, before there are copies.  Blocks."""
        for _ in range(copies):
            self._free.append(_CopyBuffers(self._driver, _PREPARED_PAIRS))

    def begin(
        self,
        table: RegionTable,
        source: Sequence[BlockId],
        target: Sequence[BlockId],
        ended: Callable[[], None],
        late_writers: bool = True,
        after: LaunchedWork | None = None,
    ) -> CudaCopy:
        """Enqueue a copy; ``ended`` is called once, when the copy reads and writes nothing any
        more.  ``late_writers``: see Transport; with ``after`` the copy waits for that work, without
        it for all that the model has launched.  Raises TransportError (also CudaError); nothing of
        the copy runs then, or will."""
        if len(source) * len(table.rows) * table.chunks >= MAX_TILES:
            raise TransportError(f"{len(source)} blocks are too many for one copy")
        buffers = self._take_buffers(len(source))
        with self._lock:
            try:
                self._check_open()
            except TransportError:
                buffers.free(self._driver)
                raise
            copy = CudaCopy(self, buffers, ended)
            try:
                buffers.fill(source, target)
                if source:
                    if late_writers:
                        self._wait_for_model(after)
                    self._enqueue(table, buffers, source, target)
                self._driver.record(buffers.event, self.stream)
            except BaseException:
                self._end_begun(buffers)
                raise
            self._pending.append(copy)
        return copy

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the transport is closed")

    def _wait_for_model(self, after: LaunchedWork | None) -> None:
        if after is None:
            self._driver.wait(self.stream, self.compute)
        else:
            self._driver.wait_event(self.stream, after.event)

    def _end_begun(self, buffers: _CopyBuffers) -> None:
        """A copy could not be begun: wait for the part of it that was enqueued, since the caller
        gives its blocks away."""
        buffers.stop()
        with suppress(CudaError):  # after which nothing runs here any more, and no buffers are used
            self._driver.synchronize(self.stream)
            self._free.append(buffers)

    def _enqueue(
        self,
        table: RegionTable,
        buffers: _CopyBuffers,
        source: Sequence[BlockId],
        target: Sequence[BlockId],
    ) -> None:
        driver, stream, host = self._driver, self.stream, buffers.host
        half = len(source) * ID_BYTES
        if table.route is Route.STAGED:
            copy_each(driver, table, source, target, stream)
        elif table.route is Route.BATCH:
            ids = host.view[_IDS_AT:]
            driver.copy_batch(table, ids[:half], ids[half : 2 * half], stream)
        else:
            stop = buffers.device
            # With the stop word: each program would wait for host memory, one after the other.
            driver.copy(stop, host.address, _IDS_AT + 2 * half, stream)
            driver.copy_kernel(table, stop + _IDS_AT, stop, len(source), stream, self._programs)

    def _take_buffers(self, pairs: int) -> _CopyBuffers:
        with self._lock:
            self._check_open()
            for index, buffers in enumerate(self._free):
                if buffers.pairs >= pairs:
                    return self._free.pop(index)
        return _CopyBuffers(self._driver, max(_PREPARED_PAIRS, 1 << (pairs - 1).bit_length()))

    def finish_ended(self) -> None:
        """Set the state of the copies that have ended, and call their ``ended``."""
        with self._lock:
            ended = [copy for copy in self._pending if self._finish(copy)]
            self._pending = [copy for copy in self._pending if copy.state is CopyState.PENDING]
        for copy in ended:
            copy.ended()

    def _finish(self, copy: CudaCopy) -> bool:
        try:
            if not self._driver.done(copy.buffers.event):
                return False
            copy.state = CopyState.FAILED if copy.buffers.stopped else CopyState.DONE
            if not copy.awaited:
                self._free.append(copy.buffers)
        except CudaError as exc:
            # Such an error ends the whole context: nothing runs in it any more.
            if self._log_limit.allows(TransportLine.GPU_COPY_FAILED):
                _log.line(TransportLine.GPU_COPY_FAILED, exc)
            copy.state = CopyState.FAILED
        return True

    def when_ended(self, copy: CudaCopy, call: Callable[[], None]) -> None:
        """Have ``call`` called on another thread once a copy has ended, or here if it has.  Once
        for each copy.  Raises TransportError if no thread can be started."""
        with self._lock:
            pending = copy.state is CopyState.PENDING
            if pending:
                self._waiter.submit(partial(self._wait, copy, call))
                copy.awaited = True
        if not pending:
            call()

    def _wait(self, copy: CudaCopy, call: Callable[[], None]) -> None:
        waited = False
        with suppress(CudaError):  # a poll finds out
            self._driver.synchronize_event(copy.buffers.event)
            waited = True
        with self._lock:
            copy.awaited = False
            if waited and copy.state is not CopyState.PENDING:
                self._free.append(copy.buffers)
        call()

    def cancel(self, copy: CudaCopy) -> None:
        """A copy that has not begun on the GPU will copy nothing; one that has continues."""
        self.finish_ended()
        with self._lock:
            if copy.state is CopyState.PENDING:
                copy.buffers.stop()

    def fence(self) -> None:
        """Make the model's stream wait for all copies begun so far.  If the driver refuses, block
        until the copies have ended; if that fails too, the context has ended and nothing runs in
        it any more."""
        try:
            self._driver.wait(self.compute, self.stream)
        except CudaError as exc:
            if self._log_limit.allows(TransportLine.FENCE_FAILED):
                _log.line(TransportLine.FENCE_FAILED, exc)
            self._finish_all()

    def close(self) -> None:
        """Cancel all copies and wait for the stream: then nothing writes any more.  Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending = list(self._pending)
        for copy in pending:
            self.cancel(copy)
        self._finish_all()
        self._waiter.close()  # then no thread waits for an event that is freed
        with self._lock:
            unused, self._free = self._free, []
        try:
            with ExitStack() as parts:
                parts.callback(self._driver.free_stream, self.stream)
                for buffers in unused:
                    parts.callback(buffers.free, self._driver)
        except CudaError as exc:
            _log.line(TransportLine.STREAM_NOT_FREED, exc)

    def _finish_all(self) -> None:
        try:
            self._driver.synchronize(self.stream)
        except CudaError as exc:
            if self._log_limit.allows(TransportLine.STREAM_FAILED):
                _log.line(TransportLine.STREAM_FAILED, exc)
        self.finish_ended()
