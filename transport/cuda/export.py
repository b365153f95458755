"""The exporter's side on CUDA: how other processes open memory that stays where it is.

There are four kinds of memory.  The host's is known as such; of the others, trying each tells which
one it is.  Each memory lies in one allocation, at an offset::

    kind      memory                                      handed over as
    ipc       cudaMalloc: torch's caching allocator       64 bytes
    fd        VMM: vLLM's cumem allocator                 a descriptor over a socket (vmm)
    fabric    VMM made for fabric handles                 64 bytes
    host      page-locked memory of a keeper's            a descriptor over a socket, for reading

In addition to the KV cache a *probe* is exported: 4 KiB of random bytes that begin with the epoch
now served.  Peers read it when they attach.  So a handle that opens the wrong memory, a pair of
GPUs that only seem to reach each other, and a stale descriptor are noticed before a block is read.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from kvshm._base.ids import Epoch
from kvshm._shm.fds import close_all
from kvshm.errors import TransportError

from ..memory import KVMemory
from .driver import CudaError, Driver, Stream, write

HANDLE_BYTES = 64
PROBE_BYTES = 4096
PROBE_EPOCH_BYTES = 8
_PROBE_ALLOCATION = 2 << 20
"""Enough for an allocation, and so a handle, of its own."""
IPC, FD, FABRIC, HOST = "ipc", "fd", "fabric", "host"
HOST_DEVICE = "host"
"""``CudaDetails.device`` of a rank whose memory lies on no GPU."""

REMEDY = (
    "share from plain cudaMalloc memory (no PYTORCH_ALLOC_CONF=backend:cudaMallocAsync, no "
    "expandable_segments:True), or have vLLM's allocator make exportable memory "
    "(--enable-cumem-allocator on a driver with POSIX or fabric handles)"
)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    address: int
    nbytes: int
    owner: Any = None
    """An object that keeps the memory valid; held by everything that may still read it."""
    host: KVMemory | None = None
    """The host memory that this is, at the address where the GPU sees it."""


def page_locked(driver: Driver, memory: KVMemory) -> DeviceMemory:
    """Return host memory as the GPU sees it, until ``driver.host_unregister`` of its address.
    Raises CudaError."""
    address = driver.host_register(memory.address, memory.nbytes, read_only=False)
    return DeviceMemory(address, memory.nbytes, memory, memory)


class SharedMemory(msgspec.Struct, frozen=True, array_like=True):
    """How another process opens one memory.  ``handle`` opens an allocation of ``allocation``
    bytes, in which the memory begins at ``offset``."""

    kind: str
    nbytes: int
    offset: int
    allocation: int
    handle: bytes = b""
    """ipc, fabric: 64 bytes; fd, host: empty."""
    number: int = 0
    """fd, fabric, host: the number of the memory in requests to the socket."""


class CudaDetails(msgspec.Struct, frozen=True):
    """``MemoryDescriptor.details`` of this transport.  Independent of the epoch."""

    process: str
    export_id: int
    """Random; changes whenever the memory or its handles change."""
    device: str
    memories: tuple[SharedMemory, ...]
    probe: SharedMemory
    probe_checksum: int
    """xxh3 of the probe without its epoch word."""
    socket: str = ""


def share(driver: Driver, memory: DeviceMemory, number: int) -> SharedMemory:
    """Find out how ``memory`` can be exported.  Raises TransportError if it cannot."""
    if memory.host is not None:
        return share_as(HOST, driver, memory, number)
    refusals = []
    for kind in (IPC, FD, FABRIC):
        try:
            return share_as(kind, driver, memory, number)
        except CudaError as exc:
            refusals.append(f"{kind}: {exc}")
    raise TransportError(f"the KV cache cannot be exported ({'; '.join(refusals)}): {REMEDY}")


def share_as(kind: str, driver: Driver, memory: DeviceMemory, number: int) -> SharedMemory:
    """Export memory as ``kind``.  Raises CudaError if it is of another kind, or lies in several
    allocations, as expandable segments do: vLLM may move these."""
    if kind == HOST:
        return SharedMemory(HOST, memory.nbytes, 0, memory.nbytes, number=number)
    base, nbytes = driver.address_range(memory.address)
    offset = memory.address - base
    if offset + memory.nbytes > nbytes:
        raise CudaError("cuMemGetAddressRange", "several allocations one behind the other")
    if kind == IPC:
        return SharedMemory(IPC, memory.nbytes, offset, nbytes, driver.ipc_handle(base))
    if kind == FABRIC:
        handle = driver.vmm_fabric_handle(base)
        return SharedMemory(FABRIC, memory.nbytes, offset, nbytes, handle, number)
    close_all([driver.vmm_descriptor(base)])  # only shows that a descriptor can be made
    return SharedMemory(FD, memory.nbytes, offset, nbytes, number=number)


class Probe:
    """The exporter's probe: memory of the same kind as its KV cache."""

    def __init__(self, driver: Driver, kind: str, stream: Stream) -> None:
        self._driver = driver
        self._stream = stream
        self._kind = kind
        self.memory = _take_allocation(driver, kind)
        random = secrets.token_bytes(PROBE_BYTES - PROBE_EPOCH_BYTES)
        self.checksum = xxhash.xxh3_64_intdigest(random)
        write(driver, self.memory.address + PROBE_EPOCH_BYTES, random, stream)

    def set_epoch(self, epoch: Epoch | int) -> None:
        """From now on only peers that want ``epoch`` can attach."""
        packed = epoch.to_bytes(PROBE_EPOCH_BYTES, "little")
        write(self._driver, self.memory.address, packed, self._stream)

    def share(self, number: int) -> SharedMemory:
        return share_as(self._kind, self._driver, self.memory, number)

    def withdraw(self) -> None:
        """Let no peer attach any more; the memory is kept for this process's next probe."""
        self.set_epoch(0)
        _unused_probes[(self._driver.process, self._driver.uuid, self._kind)].append(self.memory)


_unused_probes: defaultdict[tuple[str, str, str], list[DeviceMemory]] = defaultdict(list)


def _take_allocation(driver: Driver, kind: str) -> DeviceMemory:
    if unused := _unused_probes[(driver.process, driver.uuid, kind)]:
        return unused.pop()
    if kind == HOST:
        return page_locked(driver, KVMemory.create(PROBE_BYTES))
    if kind == IPC:
        address = driver.allocate_shared(_PROBE_ALLOCATION)
    else:
        address, _ = driver.vmm_allocate(_PROBE_ALLOCATION, fabric=kind == FABRIC)
    return DeviceMemory(address, PROBE_BYTES)


def probe_epoch(packed: bytes, checksum: int) -> int:
    """The epoch in a probe that was read from a peer.  Raises TransportError if the bytes are not
    that peer's probe: then the opened memory is not the peer's."""
    if xxhash.xxh3_64_intdigest(packed[PROBE_EPOCH_BYTES:PROBE_BYTES]) != checksum:
        raise TransportError(
            "the peer's memory was opened, but other bytes than its own are read there: no IPC "
            "between these processes or GPUs (containers need one PID and IPC namespace)"
        )
    return int.from_bytes(packed[:PROBE_EPOCH_BYTES], "little")


def check_memories(memories: Sequence[SharedMemory]) -> None:
    """Raise TransportError for memory outside its allocation, or with a handle of wrong length."""
    for memory in memories:
        if memory.offset < 0 or memory.nbytes < 0:
            raise TransportError(f"impossible memory: {memory}")
        if memory.offset + memory.nbytes > memory.allocation:
            raise TransportError(f"memory ends behind its allocation: {memory}")
        if len(memory.handle) != (0 if memory.kind in (FD, HOST) else HANDLE_BYTES):
            raise TransportError(f"a handle of {len(memory.handle)} bytes: {memory}")
