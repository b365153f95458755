"""What a rank shares with its peers: the handles of its memories, its probe and its server."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvshm._base.ids import Epoch

from .driver import Driver, Stream
from .export import (
    FD,
    HOST,
    HOST_DEVICE,
    IPC,
    CudaDetails,
    DeviceMemory,
    Probe,
    SharedMemory,
    share,
)
from .vmm import MemoryServer


class OwnExport:
    def __init__(
        self, driver: Driver, memory: Sequence[DeviceMemory], socket_path: str, stream: Stream
    ) -> None:
        self._driver = driver
        self._memory = memory
        self._socket_path = socket_path
        self._stream = stream
        self._server: MemoryServer | None = None
        self.probe: Probe | None = None
        self.details: CudaDetails | None = None

    def begin(self, epoch: Epoch) -> CudaDetails:
        """Serve ``epoch``; return how peers open the memories.  Epoch 0 exports these anew: their
        handles may have changed.  Raises TransportError."""
        if self.details is None or not epoch:
            self.details = self._describe(self.details)
        assert self.probe is not None
        self.probe.set_epoch(epoch)
        return self.details

    def _describe(self, before: CudaDetails | None) -> CudaDetails:
        memories = tuple(share(self._driver, m, i) for i, m in enumerate(self._memory))
        if self.probe is None:
            self.probe = Probe(self._driver, memories[0].kind, self._stream)
        probe = self.probe.share(len(memories))
        kinds = {memory.kind for memory in memories}
        export_id = secrets.randbits(63) or 1
        # The memory behind a descriptor can change without a visible sign.
        if before is not None and memories == before.memories and kinds == {IPC}:
            export_id = before.export_id
        if kinds != {IPC}:
            if self._server is None:
                own = zip((*self._memory, self.probe.memory), (*memories, probe), strict=True)
                descriptors = [self._descriptors_of(memory, shared) for memory, shared in own]
                self._server = MemoryServer(self._socket_path, descriptors)
            self._server.export_id = export_id
        return CudaDetails(
            self._driver.process,
            export_id,
            HOST_DEVICE if HOST in kinds else self._driver.uuid,
            memories,
            probe,
            self.probe.checksum,
            Path(self._socket_path).name,
        )

    def _descriptors_of(
        self, memory: DeviceMemory, shared: SharedMemory
    ) -> Callable[[], int] | None:
        """Return what makes a descriptor of a memory; None if peers have its handle."""
        if memory.host is not None:
            return memory.host.read_only_fd
        if shared.kind == FD:
            return partial(self._driver.vmm_descriptor, memory.address)
        return None

    def withdraw(self) -> Callable[[], int]:
        """Let no peer attach until the next export.  Returns a function that tells how many
        mappings peers still have.  Raises CudaError."""
        server = self._server
        if server is not None:
            server.export_id = 0
        if self.probe is not None:
            self.probe.set_epoch(0)
        return lambda: 0 if server is None else server.connections

    def close(self) -> None:
        """Stop handing out.  The probe stays, for copies that read it."""
        if self._server is not None:
            self._server.close()

    def free(self) -> None:
        """Free the probe's memory.  Raises CudaError."""
        probe, self.probe = self.probe, None
        if probe is not None:
            probe.withdraw()
