"""Transport for KV caches in GPU memory: peers map the cache in place and copy blocks out of it.

    exporter                                        importer
    KV cache (torch's or vLLM's allocation)         attach: open every allocation once,
       | cuIpcGetMemHandle, or a VMM handle                 read the probe, lay out the table
    details in the roster  ------------------->     begin_copy: ids, kernel, event on a stream
       | probe: 4 KiB, begins with the epoch                of its own
                                                    poll: event done?

torch, triton and cuda-bindings are imported when a transport is made, not before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from kvshm._base.copy_path import CopyPath
from kvshm._base.ids import BlockId, Epoch
from kvshm._base.log import logger
from kvshm.config import Fault
from kvshm.errors import StaleAttachment, TransportError
from kvshm.interfaces import MemoryDescriptor, Region, unpack_details

from ..jobs import JobThread
from ..log_lines import TransportLine
from ..memory import KVMemory
from ..own_cache import OwnCache
from ..regions import check_blocks
from .attachment import CudaAttachment
from .checksum import block_checksums
from .copy_stream import CopyStream, LaunchedWork
from .driver import CudaError, Driver, RegionRow, RegionTable, Route, write
from .export import HOST_DEVICE, CudaDetails, DeviceMemory, check_memories, page_locked
from .mappings import PeerMapping, PeerMappings
from .own_export import OwnExport
from .probe import Prober, upload

_log = logger(__name__)


class CudaIpcTransport(OwnCache):
    """One rank's KV cache in GPU memory (kvshm.interfaces.Transport).  ``export`` and the
    constructor must run on the thread that runs the model (copies wait for its current stream); any
    thread may call everything else."""

    name = "cuda_ipc"
    devices = ("cuda",)
    settings = ("staging",)
    late_writers = True
    takes_host_memory = True
    adopt = staticmethod(DeviceMemory)

    def __init__(
        self,
        memory: DeviceMemory | KVMemory | Sequence[DeviceMemory | KVMemory],
        regions: Sequence[Region],
        rank: int,
        socket_path: str | Path = "",
        fault: str | None = None,
        *,
        staging: bool = False,
        programs: int = 0,
        driver: Driver | None = None,
    ) -> None:
        """Share ``memory`` (``Region.handle`` indexes it) as laid out in ``regions``.  Host memory
        is page-locked: GPUs copy into it and out of it.  All of it is one or the other.

        ``socket_path``: the socket that hands out VMM and host memory.  ``staging``: copy through
        host memory between GPUs that cannot reach each other, instead of leaving them unshared.
        ``programs``: of the copy kernel; 0: two per multiprocessor.  ``driver``: by default that of
        torch's current GPU.  The memory stays the caller's.  Raises TransportError.
        """
        given = (memory,) if isinstance(memory, DeviceMemory | KVMemory) else tuple(memory)
        super().__init__([m.nbytes for m in given], regions, rank, fault)
        self.staging = staging
        self.driver = current_driver() if driver is None else driver
        with ExitStack() as undone:
            self.memory = tuple(self._reached(m, undone) for m in given)
            self.copy_stream = CopyStream(self.driver, self.driver.compute_stream(), programs)
            undone.callback(self.copy_stream.close)
            self._prober = Prober(self.driver, programs, spare_model=self._in_host)
            undone.callback(self._prober.close)
            self._fence = self.driver.new_event()
            undone.callback(self.driver.free_event, self._fence)
            self._prepare_copies()
            undone.pop_all()
        self._socket_path = str(socket_path)
        self.mappings = PeerMappings(self.driver, self._socket_path)
        self._lock = threading.Lock()
        self._closer = JobThread("kvshm-unmap", self.driver.enter_thread)
        self._export = OwnExport(self.driver, self.memory, self._socket_path, self._prober.stream)
        self._zeros = 0
        self._attachments: weakref.WeakSet[CudaAttachment] = weakref.WeakSet()

    @property
    def _in_host(self) -> bool:
        return any(memory.host is not None for memory in self.memory)

    def _reached(self, memory: DeviceMemory | KVMemory, undone: ExitStack) -> DeviceMemory:
        """Return a memory where the GPU sees it."""
        if isinstance(memory, DeviceMemory):
            return memory
        reached = page_locked(self.driver, memory)
        undone.callback(self.driver.host_unregister, memory.address)
        return reached

    def _prepare_copies(self) -> None:
        """Before the engine serves: to load a kernel may wait for all that the GPU does.  A peer's
        blocks lie as the own ones do, mostly, so that its copies need the same kernel."""
        rows = tuple(self._row(region, 0, region) for region in self.regions)
        self.copy_stream.prepare(RegionTable(rows, 0))
        self.copy_stream.prepare_buffers()
        self._prober.prepare()

    def _row(self, mine: Region, base: int, theirs: Region) -> RegionRow:
        """The copy of a peer's region, of its memory at ``base``, onto an own one."""
        source = base + theirs.offset
        target = self.memory[mine.handle].address + mine.offset
        return RegionRow(source, target, theirs.stride, mine.stride, mine.block_bytes)

    # -- the exporter's side

    def export(self, epoch: Epoch) -> MemoryDescriptor:
        """See Transport.  Epoch 0 exports the memory anew: its handles may have changed."""
        with self._lock:
            self.check_open()
            self.copy_stream.compute = self.driver.compute_stream()
            details = self._export.begin(epoch)
            self.epoch = epoch
            _exports[details.export_id] = self
            return self.describe(details)

    def withdraw(self) -> Callable[[], int]:
        """See SupportsWithdraw.  Peers that have opened an IPC handle are not known: memory that
        has one cannot sleep."""
        with self._lock:
            self.check_open()
            self.epoch = Epoch(0)
            self._hide()
            return self._export.withdraw()

    def _hide(self) -> None:
        if (details := self._export.details) is not None:
            _exports.pop(details.export_id, None)

    def fence(self) -> Callable[[], bool]:
        """Return a function that tells, without blocking, whether all present work on the compute
        stream has ended.  A later fence replaces this one."""
        self.driver.record(self._fence, self.driver.compute_stream())
        return lambda: self.driver.done(self._fence)

    # -- the importer's side

    def attach(self, descriptor: MemoryDescriptor) -> CudaAttachment:
        details = unpack_details(descriptor, self.name, CudaDetails)
        self.check_peer(descriptor, [m.nbytes for m in details.memories])
        check_memories([*details.memories, details.probe])
        route = self._route(details)
        self.check_open()
        opened: list[PeerMapping] = []
        try:
            addresses, keep = self._open_memories(details, route, opened)
            found = self._prober.read(addresses.pop(), route, details.probe_checksum)
            if found != descriptor.epoch:
                raise StaleAttachment(f"the peer serves epoch {found:016x}")
            table = self._table(descriptor, details, addresses, route)
        except BaseException:
            self.unmap_later(opened, 0)
            raise
        path = self._path(details.device, route)
        attachment = CudaAttachment(self, descriptor, table, opened, keep, path)
        with self._lock:
            if not self.closed:
                self._attachments.add(attachment)
                return attachment
        attachment.close()
        raise TransportError("the transport is closed")

    def _route(self, details: CudaDetails) -> Route:
        """Decide how this GPU reaches the peer's.  Raises TransportError if it cannot."""
        if details.device == HOST_DEVICE:
            return Route.KERNEL
        reachable = self.driver.peer_access(details.device)
        if reachable is not False:
            return Route.KERNEL  # None: the GPU is not visible here; the probe decides
        if self.staging:
            return Route.STAGED
        raise TransportError(
            f"GPU {self.driver.uuid} cannot reach GPU {details.device} "
            "(KVSHM_STAGING=1 would let blocks travel through host memory)"
        )

    def _path(self, device: str, route: Route) -> CopyPath:
        if route is Route.STAGED:
            return CopyPath.STAGED
        if self._in_host or device == HOST_DEVICE:
            return CopyPath.PCIE
        if device == self.driver.uuid:
            return CopyPath.SAME_GPU
        named = {True: CopyPath.NVLINK, False: CopyPath.PCIE, None: CopyPath.OTHER}
        return named[self.driver.native_atomics(device)]

    def _open_memories(
        self, details: CudaDetails, route: Route, opened: list[PeerMapping]
    ) -> tuple[list[int], object]:
        """Addresses of the peer's memories and, last, of its probe; an object that keeps them
        valid."""
        if details.process == self.driver.process:
            return self._memories_in_process(details)
        under = details.device if route is Route.STAGED else ""
        addresses = []
        for memory in (*details.memories, details.probe):
            mapping = self.mappings.open(details, memory, under)
            opened.append(mapping)
            addresses.append(mapping.address + memory.offset)
        return addresses, None

    def _memories_in_process(self, details: CudaDetails) -> tuple[list[int], object]:
        """As ``_open_memories``, of a peer in this process, which cannot open its own handles."""
        peer = _exports.get(details.export_id)
        if peer is None or (probe := peer._export.probe) is None:
            raise TransportError("the peer, in this process, has closed its transport")
        if details.device not in (self.driver.uuid, HOST_DEVICE):
            self.driver.enable_peer(details.device)
        addresses = [memory.address for memory in peer.memory]
        return [*addresses, probe.memory.address], peer.memory

    def _table(
        self, descriptor: MemoryDescriptor, details: CudaDetails, addresses: list[int], route: Route
    ) -> RegionTable:
        """The table of regions for copies from this peer, in device memory and ready for use."""
        pairs = zip(self.regions, descriptor.regions, strict=True)
        rows = [self._row(mine, addresses[theirs.handle], theirs) for mine, theirs in pairs]
        if route is Route.KERNEL and (self._in_host or details.device != self.driver.uuid):
            route = self._prober.choose(rows[0], descriptor.regions[0].num_blocks, details.device)
        if self.fault == Fault.ZERO:
            rows = [row._replace(source=self._zero_memory(), source_stride=0) for row in rows]
        table = upload(self.driver, rows, self._prober.stream, route)
        try:
            self.copy_stream.prepare(table)
        except BaseException:
            self.driver.free(table.address)
            raise
        return table

    def _zero_memory(self) -> int:
        if not self._zeros:
            nbytes = max(region.block_bytes for region in self.regions)
            self._zeros = self.driver.allocate(nbytes)
            write(self.driver, self._zeros, bytes(nbytes), self._prober.stream)
        return self._zeros

    def unmap_later(self, mappings: list[PeerMapping], table: int) -> None:
        """Unmap and free on the closing thread, since both may wait for the GPU."""

        def unmap() -> None:
            for mapping in mappings:
                self.mappings.release(mapping)
            if table:
                with suppress(CudaError):
                    self.driver.free(table)

        try:
            self._closer.submit(unmap)
        except TransportError:
            unmap()  # the transport is closing, so nothing waits for this thread

    # -- both

    def enter_thread(self) -> None:
        self.driver.enter_thread()

    def note_launched(self) -> LaunchedWork | None:
        """See SupportsLaunchedWork.  Raises CudaError."""
        stream = self.copy_stream.compute
        return LaunchedWork(self.driver, stream) if self.late_writers else None

    def checksum(self, blocks: Sequence[BlockId]) -> list[int]:
        """See Transport.  First copies the blocks to the host: for KVSHM_VERIFY only."""
        check_blocks(blocks, self.num_blocks, "this cache's")
        self.check_open()
        compute, addresses = self.copy_stream.compute, [m.address for m in self.memory]
        return block_checksums(self.driver, compute, addresses, self.regions, blocks)

    def close(self) -> None:
        """See Transport.  Waits for kernels that are already running."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._hide()
        self._export.close()
        self.copy_stream.close()
        for attachment in list(self._attachments):
            attachment.close()
        self._closer.close()
        self.mappings.close()
        self._free_memory()

    def _free_memory(self) -> None:
        """Free each part, even if another one cannot be freed."""
        try:
            with ExitStack() as parts:
                parts.callback(self._prober.close)
                parts.callback(self.driver.free_event, self._fence)
                if self._zeros:
                    parts.callback(self.driver.free, self._zeros)
                parts.callback(self._export.free)
                for memory in self.memory:
                    if memory.host is not None:
                        parts.callback(self.driver.host_unregister, memory.host.address)
        except CudaError as exc:
            _log.line(TransportLine.TRANSPORT_NOT_FREED, exc)


_exports: weakref.WeakValueDictionary[int, CudaIpcTransport] = weakref.WeakValueDictionary()


def current_driver() -> Driver:
    """The driver of torch's current GPU.  Raises TransportError if something is missing."""
    try:
        import torch

        from .nvidia import NvidiaDriver

        return NvidiaDriver(torch.cuda.current_device())
    except ImportError as exc:
        raise TransportError(f"CUDA memory cannot be shared: {exc}") from exc
    except (RuntimeError, AssertionError) as exc:  # the latter of a torch without CUDA
        raise TransportError(f"there is no usable GPU: {exc}") from exc
