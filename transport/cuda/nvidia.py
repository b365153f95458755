"""The real calls, by the driver API: its errors do not stay pending until torch reports them."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import cuda.bindings
import torch
from cuda.bindings import driver as cu

from .calls import call as _call
from .calls import copy_batch
from .driver import CudaError, HostBuffer, RegionTable, Stream
from .launch import Launcher

IPC_HANDLE_BYTES = 64
OLDEST_BINDINGS = (12, 9, 1)
"""Earlier ones keep Python's lock (the GIL) during calls of the driver."""
_PROCESS = uuid.uuid4().hex
_host_lock = threading.Lock()
_host_unused: dict[int, list[int]] = {}
"""Unused page-locked memory by size: freeing it would wait for the device."""
_FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_FABRIC = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
_READ = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
_READ_WRITE = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RANGE_START = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
_RANGE_SIZE = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
_PORTABLE_AND_MAPPED = 3
_READ_ONLY = 8
"""Without it the driver registers no memory that is mapped read-only."""
_register_lock = threading.Lock()
"""Held while gigabytes are page-locked: not the lock that copies take for their buffers."""
_registered: dict[int, int] = {}
"""How often host memory at each address has been registered: the driver refuses a second time."""
_BLOCKING_WITHOUT_TIMING = 3
_NON_BLOCKING = 1
_SHARED_STEP = 2 << 20
_POOL_KEEPS_BYTES = 8 << 20
_INVALID_CONTEXT = cu.CUresult.CUDA_ERROR_INVALID_CONTEXT.name
_EQUAL_PIDS = (
    "CUDA says so where the exporter has the importer's PID ({}) in another PID namespace; give "
    "both engines one PID namespace (docs/gpu.md)"
)
_no_change = nullcontext()
_pools: dict[int, tuple[Any, int]] = {}
"""Memory pools, each with the stream of its allocations, by GPU: one of each for a process."""


class NvidiaDriver:
    """One GPU, given by torch's index."""

    def __init__(self, ordinal: int) -> None:
        """Raises CudaError if there is no such GPU, no driver, or bindings that cannot be used."""
        _check_bindings(cuda.bindings.__version__)
        _call(cu.cuInit, 0)
        self.ordinal = ordinal
        self.process = _PROCESS
        self._device = _call(cu.cuDeviceGet, ordinal)
        self.uuid = self._uuid_of(self._device)
        asked = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.multiprocessors = int(_call(cu.cuDeviceGetAttribute, asked, self._device))
        self._context = _call(cu.cuDevicePrimaryCtxRetain, self._device)
        self._context_number = int(self._context)
        self._launcher = Launcher(self._device)
        if ordinal not in _pools:
            _pools[ordinal] = self._new_pool(), self.new_stream().handle
        self._pool, self._memory_stream = _pools[ordinal]

    @staticmethod
    def _uuid_of(device: Any) -> str:
        # The second version distinguishes MIG instances; newer bindings have only that one.
        function = getattr(cu, "cuDeviceGetUuid_v2", cu.cuDeviceGetUuid)
        return bytes(_call(function, device).bytes).hex()

    def enter_thread(self) -> None:
        _call(cu.cuCtxSetCurrent, self._context)

    def in_context(self, context: Any = None) -> AbstractContextManager[None]:
        """A context manager that makes a GPU's context current (None: this GPU's), unless it is
        already, as on the serving thread and on threads that called ``enter_thread``."""
        wanted = self._context if context is None else context
        if int(_call(cu.cuCtxGetCurrent)) == int(wanted):
            return _no_change
        return self._pushed(wanted)

    @contextmanager
    def _pushed(self, context: Any) -> Iterator[None]:
        _call(cu.cuCtxPushCurrent, context)
        try:
            yield
        finally:
            _call(cu.cuCtxPopCurrent)

    def _call_in_context(self, function: Any, *arguments: Any) -> Any:
        if int(_call(cu.cuCtxGetCurrent)) == self._context_number:  # the common case, and cheap
            return _call(function, *arguments)
        with self._pushed(self._context):
            return _call(function, *arguments)

    def _device_of(self, uuid: str) -> Any | None:
        devices = [_call(cu.cuDeviceGet, i) for i in range(_call(cu.cuDeviceGetCount))]
        return next((d for d in devices if self._uuid_of(d) == uuid), None)

    def _context_of(self, device: str) -> Any:
        if not device or device == self.uuid:
            return self._context
        if (found := self._device_of(device)) is None:
            raise CudaError("cuDeviceGet", f"GPU {device} is not visible here")
        return _call(cu.cuDevicePrimaryCtxRetain, found)

    # -- memory

    def address_range(self, address: int) -> tuple[int, int]:
        try:
            base, nbytes = self._call_in_context(cu.cuMemGetAddressRange, address)
        except CudaError:
            # Documented only for what this process has allocated; the attributes for any pointer.
            base = self._call_in_context(cu.cuPointerGetAttribute, _RANGE_START, address)
            nbytes = self._call_in_context(cu.cuPointerGetAttribute, _RANGE_SIZE, address)
        return int(base), int(nbytes)

    def _new_pool(self) -> Any:
        """A pool of its own: whatever synchronises would trim the device's default pool."""
        properties = cu.CUmemPoolProps()
        properties.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.handleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
        properties.location = self._location()
        try:
            pool = _call(cu.cuMemPoolCreate, properties)
        except CudaError as exc:  # for example on a virtual GPU without unified memory
            raise CudaError(exc.call, f"{exc.code}: this GPU has no memory pools") from exc
        threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        _call(cu.cuMemPoolSetAttribute, pool, threshold, cu.cuuint64_t(_POOL_KEEPS_BYTES))
        return pool

    def allocate(self, nbytes: int) -> int:
        # From a pool: cuMemFree would wait for all work of the device, the model's included.
        stream = self._memory_stream
        take = cu.cuMemAllocFromPoolAsync
        address = int(self._call_in_context(take, nbytes, self._pool, stream))
        self._call_in_context(cu.cuStreamSynchronize, stream)
        return address

    def free(self, address: int) -> None:
        self._call_in_context(cu.cuMemFreeAsync, address, self._memory_stream)

    def allocate_shared(self, nbytes: int) -> int:
        # Smaller allocations share a page of the GPU's, and a handle opens the whole page.
        rounded = -(-nbytes // _SHARED_STEP) * _SHARED_STEP
        return int(self._call_in_context(cu.cuMemAlloc, rounded))

    def host_allocate(self, nbytes: int) -> HostBuffer:
        rounded = 1 << max(12, (nbytes - 1).bit_length())
        with _host_lock:
            kept = _host_unused.get(rounded)
            address = kept.pop() if kept else 0
        if not address:
            address = int(self._call_in_context(cu.cuMemHostAlloc, rounded, _PORTABLE_AND_MAPPED))
        array = (ctypes.c_char * nbytes).from_address(address)
        return HostBuffer(address, memoryview(array).cast("B"), rounded)

    def host_free(self, buffer: HostBuffer) -> None:
        with _host_lock:
            _host_unused.setdefault(buffer.owner, []).append(buffer.address)

    def host_register(self, address: int, nbytes: int, *, read_only: bool) -> int:
        flags = _PORTABLE_AND_MAPPED | (_READ_ONLY if read_only else 0)
        with _register_lock:
            if address not in _registered:
                self._call_in_context(cu.cuMemHostRegister, address, nbytes, flags)
            _registered[address] = _registered.get(address, 0) + 1
        try:
            return int(self._call_in_context(cu.cuMemHostGetDevicePointer, address, 0))
        except CudaError:
            self.host_unregister(address)
            raise

    def host_unregister(self, address: int) -> None:
        with _register_lock:
            _registered[address] -= 1
            if not _registered[address]:
                del _registered[address]
                self._call_in_context(cu.cuMemHostUnregister, address)

    # -- other processes' memory

    def ipc_handle(self, base: int) -> bytes:
        handle = self._call_in_context(cu.cuIpcGetMemHandle, base)
        # Not handle.reserved: the bindings have no such attribute from 13.4 on.
        return ctypes.string_at(int(handle.getPtr()), IPC_HANDLE_BYTES)

    def ipc_open(self, handle: bytes, device: str) -> int:
        opened = cu.CUipcMemHandle()
        ctypes.memmove(int(opened.getPtr()), handle, IPC_HANDLE_BYTES)
        flags = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with self.in_context(self._context_of(device)):
            try:
                return int(_call(cu.cuIpcOpenMemHandle, opened, int(flags)))
            except CudaError as exc:
                if exc.code != _INVALID_CONTEXT:
                    raise
                # The driver takes the handle for one of this process's own, which it opens never.
                raise CudaError(exc.call, f"{exc.code}: {_EQUAL_PIDS.format(os.getpid())}") from exc

    def ipc_close(self, address: int, device: str) -> None:
        with self.in_context(self._context_of(device)):
            _call(cu.cuIpcCloseMemHandle, address)

    def vmm_descriptor(self, address: int) -> int:
        return int(self._exported(address, _FD))

    def vmm_fabric_handle(self, address: int) -> bytes:
        return bytes(self._exported(address, _FABRIC).data)

    def _exported(self, address: int, kind: Any) -> Any:
        with self.in_context():
            handle = _call(cu.cuMemRetainAllocationHandle, address)
            try:
                return _call(cu.cuMemExportToShareableHandle, handle, kind, 0)
            finally:
                _call(cu.cuMemRelease, handle)

    def vmm_allocate(self, nbytes: int, *, fabric: bool) -> tuple[int, int]:
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location()
        properties.requestedHandleTypes = _FABRIC if fabric else _FD
        minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        with self.in_context():
            step = int(_call(cu.cuMemGetAllocationGranularity, properties, minimum))
            rounded = -(-nbytes // step) * step
            handle = _call(cu.cuMemCreate, rounded, properties, 0)
            return self._map(handle, rounded, _READ_WRITE), rounded

    def vmm_map(self, exported: int | bytes, nbytes: int) -> int:
        kind, found = _FD, exported
        if isinstance(exported, bytes):
            fabric = cu.CUmemFabricHandle()
            fabric.data = exported
            kind, found = _FABRIC, fabric.getPtr()
        with self.in_context():
            handle = _call(cu.cuMemImportFromShareableHandle, found, kind)
            return self._map(handle, nbytes, _READ, _READ_WRITE)

    def _map(self, handle: Any, nbytes: int, *rights: Any) -> int:
        """Map physical memory with the first of these rights that the driver gives, and return its
        address.  From then on only the mapping keeps the memory."""
        with ExitStack() as undone:
            undone.callback(_call_quietly, cu.cuMemRelease, handle)
            address = int(_call(cu.cuMemAddressReserve, nbytes, 0, 0, 0))
            undone.callback(_call_quietly, cu.cuMemAddressFree, address, nbytes)
            _call(cu.cuMemMap, address, nbytes, 0, handle, 0)
            undone.callback(_call_quietly, cu.cuMemUnmap, address, nbytes)
            self._give_access(address, nbytes, *rights)
            undone.pop_all()
        _call(cu.cuMemRelease, handle)
        return address

    def _give_access(self, address: int, nbytes: int, wanted: Any, *instead: Any) -> None:
        access = cu.CUmemAccessDesc()
        access.location = self._location()
        access.flags = wanted
        try:
            _call(cu.cuMemSetAccess, address, nbytes, [access], 1)
        except CudaError:
            if not instead:
                raise
            self._give_access(address, nbytes, *instead)

    def _location(self) -> Any:
        location = cu.CUmemLocation()
        location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self.ordinal
        return location

    def vmm_unmap(self, address: int, nbytes: int) -> None:
        # What cannot be unmapped keeps its addresses: the driver frees none that are mapped.
        self._call_in_context(cu.cuMemUnmap, address, nbytes)
        self._call_in_context(cu.cuMemAddressFree, address, nbytes)

    def peer_access(self, device: str) -> bool | None:
        if device == self.uuid:
            return True
        found = self._device_of(device)
        if found is None:
            return None
        return bool(_call(cu.cuDeviceCanAccessPeer, self._device, found))

    def native_atomics(self, device: str) -> bool | None:
        found = self._device_of(device)
        if found is None:
            return None
        attribute = cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        return bool(_call(cu.cuDeviceGetP2PAttribute, attribute, self._device, found))

    def enable_peer(self, device: str) -> None:
        peer = self._context_of(device)
        try:
            self._call_in_context(cu.cuCtxEnablePeerAccess, peer, 0)
        except CudaError as exc:
            if exc.code != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                raise

    # -- work

    def new_stream(self) -> Stream:
        # Not one of torch's streams: torch gives the same stream to several users.
        return Stream(int(self._call_in_context(cu.cuStreamCreate, _NON_BLOCKING)))

    def free_stream(self, stream: Stream) -> None:
        self._call_in_context(cu.cuStreamDestroy, stream.handle)

    def compute_stream(self) -> Stream:
        if not torch.cuda.is_initialized():
            return Stream(0)  # no other stream can have been chosen yet
        return Stream(int(torch.cuda.current_stream(self.ordinal).cuda_stream))

    def wait(self, stream: Stream, earlier: Stream) -> None:
        event = self.new_event()
        try:
            self.record(event, earlier)
            self.wait_event(stream, event)
        finally:
            self.free_event(event)  # the driver keeps it until the stream has waited

    def wait_event(self, stream: Stream, event: Any) -> None:
        self._call_in_context(cu.cuStreamWaitEvent, stream.handle, event, 0)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self._call_in_context(cu.cuMemcpyAsync, target, source, nbytes, stream.handle)

    def copy_batch(
        self, table: RegionTable, sources: memoryview, targets: memoryview, stream: Stream
    ) -> None:
        with self.in_context():
            copy_batch(*_fragments(table, sources, targets), stream.handle)

    def prepare_kernel(self, table: RegionTable) -> None:
        with self.in_context():
            self._launcher.prepare(table.word)

    def copy_kernel(
        self, table: RegionTable, ids: int, stop: int, pairs: int, stream: Stream, programs: int
    ) -> None:
        with self.in_context():
            self._launcher.launch(table, ids, stop, pairs, stream.handle, programs)

    def new_event(self) -> Any:
        return self._call_in_context(cu.cuEventCreate, _BLOCKING_WITHOUT_TIMING)

    def free_event(self, event: Any) -> None:
        self._call_in_context(cu.cuEventDestroy, event)

    def record(self, event: Any, stream: Stream) -> None:
        self._call_in_context(cu.cuEventRecord, event, stream.handle)

    def done(self, event: Any) -> bool:
        try:
            self._call_in_context(cu.cuEventQuery, event)
        except CudaError as exc:
            if exc.code != "CUDA_ERROR_NOT_READY":
                raise
            return False
        return True

    def synchronize(self, stream: Stream) -> None:
        self._call_in_context(cu.cuStreamSynchronize, stream.handle)

    def synchronize_event(self, event: Any) -> None:
        self._call_in_context(cu.cuEventSynchronize, event)  # the bindings let the GIL go


def _check_bindings(version: str) -> None:
    found = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if found < OLDEST_BINDINGS:
        oldest = ".".join(map(str, OLDEST_BINDINGS))
        raise CudaError(
            "cuda-bindings",
            f"{version} would stop all threads of this process whenever one waits for the GPU; "
            f"install {oldest} or newer",
        )


def _call_quietly(function: Any, *arguments: Any) -> None:
    with suppress(CudaError):
        _call(function, *arguments)


def _fragments(
    table: RegionTable, sources: memoryview, targets: memoryview
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = torch.tensor(table.rows, dtype=torch.int64)
    source = torch.frombuffer(sources, dtype=torch.int64)
    target = torch.frombuffer(targets, dtype=torch.int64)
    reads = (rows[:, 0:1] + source * rows[:, 2:3]).reshape(-1)
    writes = (rows[:, 1:2] + target * rows[:, 3:4]).reshape(-1)
    return reads, writes, rows[:, 4].repeat_interleave(len(source))
