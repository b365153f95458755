"""The driver calls played in host memory: several processes and GPUs inside one test.

A transport is given one as its ``driver``.  Memory is real (memfds, mapped once per fake
process, so the same allocation has another address in each), what is put on a stream runs
only when somebody looks, and what a real driver would forbid or crash on raises CudaError:
opening a handle in the process that made it, touching memory that is not mapped, exporting
memory that has no handle.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from kvshm import _native
from kvshm.transport.cuda.driver import CudaError, HostBuffer, RegionTable, Stream

VMM_STEP = 1 << 16
_INVALID = "CUDA_ERROR_INVALID_VALUE"
_INVALID_CONTEXT = "CUDA_ERROR_INVALID_CONTEXT"


@dataclass
class _Allocation:
    fd: int
    nbytes: int
    owner: FakeDriver
    kind: str
    handle: bytes

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass
class _Mapping:
    allocation: _Allocation | None
    pages: mmap.mmap | memoryview
    nbytes: int
    opened: int = 1
    read_only: bool = False


@dataclass
class FakeMachine:
    """GPUs and who reaches whom; what all fake processes share."""

    unreachable: set[frozenset[str]] = field(default_factory=set)
    handles: dict[bytes, _Allocation] = field(default_factory=dict)
    opens: int = 0

    def process(self, gpu: str = "gpu-0", visible: tuple[str, ...] = ()) -> FakeDriver:
        """Another process, computing on ``gpu``."""
        return FakeDriver(self, gpu, {gpu, *visible})


class FakeStream:
    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()
        self.held = False

    def run(self) -> None:
        while self.work and not self.held:
            self.work.popleft()()


@dataclass
class FakeEvent:
    stream: FakeStream | None = None
    turn: int = 0
    reached: int = 0


class FakeDriver:
    """One fake process's view of one fake GPU (driver.Driver)."""

    def __init__(self, machine: FakeMachine, gpu: str, visible: set[str]) -> None:
        self.machine = machine
        self.process = secrets.token_hex(8)
        self.uuid = gpu
        self.multiprocessors = 4
        self.visible = visible
        self.mapped: dict[int, _Mapping] = {}
        self.compute = FakeStream()
        self.failing = False
        self._streams: dict[int, FakeStream] = {0: self.compute}
        self._lock = threading.RLock()
        self.entered: set[str] = set()
        self.events = self.streams = 0

    def enter_thread(self) -> None:
        self.entered.add(threading.current_thread().name)

    def in_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    # -- memory

    def _map(self, allocation: _Allocation | None, nbytes: int, fd: int) -> int:
        pages = mmap.mmap(fd, nbytes)
        address = _native.address(pages)
        self.mapped[address] = _Mapping(allocation, pages, nbytes)
        return address

    def make(self, nbytes: int, kind: str = "ipc") -> int:
        """Memory of a kind: "ipc", "fd", "fabric", or "async", which no one can export."""
        allocation = _Allocation(
            os.memfd_create("fake-gpu"), nbytes, self, kind, secrets.token_bytes(64)
        )
        os.ftruncate(allocation.fd, nbytes)
        self.machine.handles[allocation.handle] = allocation
        return self._map(allocation, nbytes, allocation.fd)

    def _at(self, address: int, nbytes: int = 1) -> tuple[int, _Mapping]:
        with self._lock:
            for base, mapping in self.mapped.items():
                if base <= address and address + nbytes <= base + mapping.nbytes:
                    return base, mapping
        raise CudaError("access", f"CUDA_ERROR_ILLEGAL_ADDRESS {address:#x}")

    def bytes_at(self, address: int, nbytes: int) -> memoryview:
        """The memory itself, for tests."""
        base, mapping = self._at(address, nbytes)
        return memoryview(mapping.pages)[address - base : address - base + nbytes]

    def address_range(self, address: int) -> tuple[int, int]:
        base, mapping = self._at(address)
        return base, mapping.nbytes

    def allocate(self, nbytes: int) -> int:
        return self.make(nbytes, "async")

    def allocate_shared(self, nbytes: int) -> int:
        return self.make(nbytes)

    def free(self, address: int) -> None:
        with self._lock:
            mapping = self.mapped.pop(address)
            if mapping.allocation is not None:
                self.machine.handles.pop(mapping.allocation.handle, None)

    def host_allocate(self, nbytes: int) -> HostBuffer:
        fd = os.memfd_create("fake-host")
        os.ftruncate(fd, nbytes)
        address = self._map(None, nbytes, fd)
        os.close(fd)
        return HostBuffer(address, memoryview(self.mapped[address].pages)[:nbytes])

    def host_free(self, buffer: HostBuffer) -> None:
        del self.mapped[buffer.address]

    def host_register(self, address: int, nbytes: int, *, read_only: bool) -> int:
        with self._lock:
            if (known := self.mapped.get(address)) is not None:
                known.opened += 1
                return address
            pages = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            self.mapped[address] = _Mapping(None, pages, nbytes, read_only=read_only)
        return address

    def host_unregister(self, address: int) -> None:
        self.ipc_close(address, "")

    # -- other processes' memory

    def _exported(self, base: int, kind: str, call: str) -> _Allocation:
        allocation = self._at(base)[1].allocation
        if allocation is None or allocation.kind != kind:
            raise CudaError(call, _INVALID)
        return allocation

    def ipc_handle(self, base: int) -> bytes:
        return self._exported(base, "ipc", "cuIpcGetMemHandle").handle

    def ipc_open(self, handle: bytes, device: str) -> int:
        allocation = self.machine.handles.get(handle)
        if allocation is None:
            raise CudaError("cuIpcOpenMemHandle", _INVALID)
        if allocation.owner is self:
            raise CudaError("cuIpcOpenMemHandle", _INVALID_CONTEXT)
        if device and device not in self.visible:
            raise CudaError("cuDeviceGet", f"GPU {device} is not visible here")
        if not self._reaches(allocation.owner.uuid) and device != allocation.owner.uuid:
            raise CudaError("cuIpcOpenMemHandle", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        with self._lock:
            for base, mapping in self.mapped.items():
                if mapping.allocation is allocation:
                    mapping.opened += 1
                    return base
            self.machine.opens += 1
            return self._map(allocation, allocation.nbytes, allocation.fd)

    def ipc_close(self, address: int, device: str) -> None:
        with self._lock:
            if address not in self.mapped:
                raise CudaError("cuIpcCloseMemHandle", _INVALID)
            self.mapped[address].opened -= 1
            if not self.mapped[address].opened:
                del self.mapped[address]

    def vmm_allocate(self, nbytes: int, *, fabric: bool) -> tuple[int, int]:
        rounded = -(-nbytes // VMM_STEP) * VMM_STEP
        return self.make(rounded, "fabric" if fabric else "fd"), rounded

    def vmm_descriptor(self, address: int) -> int:
        return os.dup(self._exported(address, "fd", "cuMemExportToShareableHandle").fd)

    def vmm_fabric_handle(self, address: int) -> bytes:
        return self._exported(address, "fabric", "cuMemExportToShareableHandle").handle

    def vmm_map(self, exported: int | bytes, nbytes: int) -> int:
        allocation = self.machine.handles.get(exported) if isinstance(exported, bytes) else None
        fd = allocation.fd if allocation else exported
        if isinstance(fd, bytes):
            raise CudaError("cuMemImportFromShareableHandle", _INVALID)
        if os.fstat(fd).st_size != nbytes:
            raise CudaError("cuMemMap", _INVALID)
        with self._lock:
            self.machine.opens += 1
            return self._map(allocation, nbytes, fd)

    def vmm_unmap(self, address: int, nbytes: int) -> None:
        with self._lock:
            del self.mapped[address]

    def _reaches(self, device: str) -> bool:
        return frozenset((self.uuid, device)) not in self.machine.unreachable

    def peer_access(self, device: str) -> bool | None:
        if device != self.uuid and device not in self.visible:
            return None
        return self._reaches(device)

    def native_atomics(self, device: str) -> bool | None:
        return self._reaches(device) if device in self.visible else None

    def enable_peer(self, device: str) -> None:
        if not self._reaches(device):
            raise CudaError("cuCtxEnablePeerAccess", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")

    # -- work

    def new_stream(self) -> Stream:
        with self._lock:
            self.streams += 1
            handle = len(self._streams)
            self._streams[handle] = FakeStream()
        return Stream(handle, self._streams[handle])

    def free_stream(self, stream: Stream) -> None:
        self.streams -= 1

    def compute_stream(self) -> Stream:
        return Stream(0, self.compute)

    @contextmanager
    def hold(self, stream: Stream) -> Iterator[None]:
        """Nothing on ``stream`` runs inside."""
        stream.owner.held = True
        try:
            yield
        finally:
            stream.owner.held = False

    def _put(self, stream: Stream, work: Callable[[], None]) -> None:
        with self._lock:
            stream.owner.work.append(work)

    def wait(self, stream: Stream, earlier: Stream) -> None:
        event = FakeEvent()
        self.record(event, earlier)
        self.wait_event(stream, event)

    def wait_event(self, stream: Stream, event: FakeEvent) -> None:
        self._check("cuStreamWaitEvent")
        recorded, owner, turn = event, event.stream, event.turn

        def wait_here() -> None:
            # As on a GPU, for the record that was the last one when the wait was enqueued.
            if owner is not None and recorded.reached < turn:
                self._run(owner)
            if recorded.reached < turn:
                stream.owner.work.appendleft(wait_here)
                raise NotYet

        self._put(stream, wait_here)

    def _move(self, target: int, source: int, nbytes: int) -> None:
        if self._at(target, nbytes)[1].read_only:
            raise CudaError("copy", "CUDA_ERROR_ILLEGAL_ADDRESS, registered for reading")
        self._at(source, nbytes)
        run = [(source, nbytes, nbytes, 1)], [(target, nbytes, nbytes, 1)]
        _native.copy_blocks(*run, [0], [0], None)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self._put(stream, lambda: self._move(target, source, nbytes))

    def copy_batch(
        self, table: RegionTable, sources: memoryview, targets: memoryview, stream: Stream
    ) -> None:
        ids = array("q", bytes(sources)), array("q", bytes(targets))
        rows = [number for row in table.rows for number in row]
        self._put(stream, lambda: self._fragments(rows, *ids))

    def prepare_kernel(self, table: RegionTable) -> None: ...

    def copy_kernel(
        self, table: RegionTable, ids: int, stop: int, pairs: int, stream: Stream, programs: int
    ) -> None:
        def run() -> None:
            # Everything is read from "device" memory when it runs, as the kernel does.
            if self.bytes_at(stop, 4)[0]:
                return
            rows = array("q", bytes(self.bytes_at(table.address, len(table.rows) * 40)))
            both = array("q", bytes(self.bytes_at(ids, pairs * 16)))
            self._fragments(list(rows), both[:pairs], both[pairs:])

        self._put(stream, run)

    def _fragments(self, rows: list[int], sources: array[int], targets: array[int]) -> None:
        for at in range(0, len(rows), 5):
            source, target, source_stride, target_stride, nbytes = rows[at : at + 5]
            for one, other in zip(sources, targets, strict=True):
                self._move(target + other * target_stride, source + one * source_stride, nbytes)

    def new_event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent()

    def free_event(self, event: FakeEvent) -> None:
        self._check("cuEventDestroy")
        self.events -= 1

    def record(self, event: FakeEvent, stream: Stream) -> None:
        self._check("cuEventRecord")
        event.stream, event.turn = stream.owner, event.turn + 1
        turn = event.turn

        def reached() -> None:
            event.reached = max(event.reached, turn)

        self._put(stream, reached)

    def done(self, event: FakeEvent) -> bool:
        self._check("cuEventQuery")
        with self._lock:
            if event.stream is not None and event.reached < event.turn:
                self._run(event.stream)
        return event.reached >= event.turn

    def synchronize_event(self, event: FakeEvent) -> None:
        while not self.done(event):
            time.sleep(0.0002)

    @staticmethod
    def _run(stream: FakeStream) -> None:
        try:
            stream.run()
        except NotYet:
            return

    def _check(self, call: str) -> None:
        if self.failing:
            raise CudaError(call, "CUDA_ERROR_ILLEGAL_ADDRESS")

    def synchronize(self, stream: Stream) -> None:
        self._check("cuStreamSynchronize")
        with self._lock:
            stream.owner.held = False
            self._run(stream.owner)


class NotYet(Exception):
    """A stream has to wait for another."""
