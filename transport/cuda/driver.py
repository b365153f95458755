"""The few CUDA driver calls that the transport makes, behind one interface.

``NvidiaDriver`` (nvidia) makes them.  Tests give the transport a driver of their own that
simulates the calls in host memory; the tests of the driver's contract run with both.

Every method may be called by any thread and sets the device's context itself, which is cheapest
on a thread that has called ``enter_thread``.  Addresses are plain integers, as the driver sees
them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from kvshm.errors import TransportError

WORDS = (16, 4, 1)
"""Access widths of the kernel, in bytes, widest first."""
TILE_BYTES = 16384
"""Bytes that a program of the kernel moves in one step: 8 warps, 16 bytes per access, four
accesses in flight per thread."""


class CudaError(TransportError):
    """A driver call failed.  ``code`` is CUDA's name for the error."""

    def __init__(self, call: str, code: str) -> None:
        super().__init__(f"{call}: {code}")
        self.call = call
        self.code = code


class RegionRow(NamedTuple):
    """One region of a copy: block ``i`` goes from ``source + i * source_stride`` to
    ``target + j * target_stride``."""

    source: int
    target: int
    source_stride: int
    target_stride: int
    block_bytes: int


class Route(Enum):
    """How the bytes get from a peer's cache to the own one."""

    KERNEL = "kernel"
    BATCH = "batch"
    """By the copy engines; for large fragments between GPUs."""
    STAGED = "staged"
    """One by one, through host memory; for GPUs that cannot reach each other."""


@dataclass(frozen=True, slots=True)
class RegionTable:
    """The regions of a copy, here and in device memory (``address``: int64[len(rows)][5])."""

    rows: tuple[RegionRow, ...]
    address: int
    route: Route = Route.KERNEL
    word: int = field(init=False)
    """The widest access in bytes that every fragment allows."""
    chunks: int = field(init=False)
    """Tiles of the largest fragment."""

    def __post_init__(self) -> None:
        numbers = [number for row in self.rows for number in row]
        word = next(w for w in WORDS if all(number % w == 0 for number in numbers))
        object.__setattr__(self, "word", word)
        largest = max(row.block_bytes for row in self.rows)
        object.__setattr__(self, "chunks", -(-largest // TILE_BYTES))


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Page-locked host memory that the GPU can read and write too."""

    address: int
    view: memoryview = field(repr=False)
    owner: Any = field(default=None, repr=False)


class Stream(NamedTuple):
    """A queue of the device's work."""

    handle: int
    owner: Any = None


class Driver(Protocol):
    """One GPU as one process sees it.  Methods raise CudaError unless they say otherwise."""

    uuid: str
    """Name of the device, equal in all processes of the machine, whichever devices they see."""
    process: str
    """A unique name of this process."""
    multiprocessors: int

    def enter_thread(self) -> None:
        """Make the device's context current on the calling thread, for good: for threads of
        kvshm's own."""

    def in_context(self) -> AbstractContextManager[None]:
        """Context manager: the device's context is current inside, for calls of others."""

    # -- memory

    def address_range(self, address: int) -> tuple[int, int]:
        """Base and length of the allocation that holds ``address``.  A driver may refuse to tell it
        of memory that another process has allocated."""

    def allocate(self, nbytes: int) -> int:
        """Memory for this process only: no other process can open it."""

    def free(self, address: int) -> None:
        """Free what ``allocate`` returned, once nothing uses it; does not wait for the device."""

    def allocate_shared(self, nbytes: int) -> int:
        """Memory, at least ``nbytes``, that other processes can open by ``ipc_handle``.  Never
        freed: freeing it while a peer has it open is undefined behaviour."""

    def host_allocate(self, nbytes: int) -> HostBuffer: ...

    def host_free(self, buffer: HostBuffer) -> None:
        """Does not wait for the device: the memory is kept for a later ``host_allocate``."""

    def host_register(self, address: int, nbytes: int, *, read_only: bool) -> int:
        """Page-lock mapped host memory and return the address at which the GPU reads it, and writes
        it unless ``read_only``.  May be called again for the same memory.  Blocks, about a second
        for some GB."""

    def host_unregister(self, address: int) -> None:
        """Undo one ``host_register`` of that address.  May wait for the device."""

    # -- other processes' memory

    def ipc_handle(self, base: int) -> bytes:
        """64 bytes by which other processes can open the allocation at ``base``."""

    def ipc_open(self, handle: bytes, device: str) -> int:
        """Map another process's allocation and return its address here.  ``device``: the visible
        GPU in whose context it is opened (``""``: this one)."""

    def ipc_close(self, address: int, device: str) -> None:
        """May wait for the device."""

    def vmm_descriptor(self, address: int) -> int:
        """A new descriptor, the caller's to close, of the VMM memory that holds ``address``."""

    def vmm_fabric_handle(self, address: int) -> bytes:
        """64 bytes by which other processes can map the VMM memory that holds ``address``."""

    def vmm_allocate(self, nbytes: int, *, fabric: bool) -> tuple[int, int]:
        """VMM memory that can be exported: address, and bytes after rounding up.  Never
        freed, as for ``allocate_shared``."""

    def vmm_map(self, exported: int | bytes, nbytes: int) -> int:
        """Map all of another process's VMM memory, read-only if the driver knows that, and return
        its address here.  A descriptor stays the caller's to close."""

    def vmm_unmap(self, address: int, nbytes: int) -> None: ...

    def peer_access(self, device: str) -> bool | None:
        """Whether this GPU can reach the memory of ``device``; None if this process cannot see
        ``device``."""

    def native_atomics(self, device: str) -> bool | None:
        """Whether atomics on the memory of ``device`` are native: they are over NVLink, and not
        over PCIe.  None if this process cannot see ``device``."""

    def enable_peer(self, device: str) -> None:
        """Let this GPU reach the memory that *this process* allocates on ``device``."""

    # -- work

    def new_stream(self) -> Stream:
        """A stream that does not wait for other streams implicitly."""

    def free_stream(self, stream: Stream) -> None:
        """Enqueued work still completes."""

    def compute_stream(self) -> Stream:
        """The calling thread's current stream: where its model runs."""

    def wait(self, stream: Stream, earlier: Stream) -> None:
        """Later work on ``stream`` runs after the present work on ``earlier``."""

    def wait_event(self, stream: Stream, event: Any) -> None:
        """Later work on ``stream`` runs after what was before the last ``record``."""

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy between any two addresses, host memory included; the driver stages the copy if the
        GPUs need that."""

    def copy_batch(
        self, table: RegionTable, sources: memoryview, targets: memoryview, stream: Stream
    ) -> None:
        """Copy all fragments by the copy engines.  Block ids are int64."""

    def copy_kernel(
        self, table: RegionTable, ids: int, stop: int, pairs: int, stream: Stream, programs: int
    ) -> None:
        """Copy all fragments by one launch of the kernel (kernel.py).  ``ids`` and
        ``stop`` lie in device memory."""

    def prepare_kernel(self, table: RegionTable) -> None:
        """Compile and load the kernel for this table.  May take a second."""

    def new_event(self) -> Any: ...

    def free_event(self, event: Any) -> None: ...

    def record(self, event: Any, stream: Stream) -> None: ...

    def done(self, event: Any) -> bool:
        """Whether all work before ``record`` has ended; does not block.  Raises an error of that
        work."""

    def synchronize(self, stream: Stream) -> None: ...

    def synchronize_event(self, event: Any) -> None:
        """Block until all work before ``record`` has ended; other threads run meanwhile.  Raises
        an error of that work."""


def write(driver: Driver, address: int, packed: bytes, stream: Stream) -> None:
    """Write device memory and wait until the write is complete."""
    buffer = driver.host_allocate(len(packed))
    try:
        buffer.view[:] = packed
        driver.copy(address, buffer.address, len(packed), stream)
        driver.synchronize(stream)
    finally:
        driver.host_free(buffer)
