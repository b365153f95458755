"""How the conformance suite drives each transport: memory, holding copies, finishing them.

A new transport adds a rig here and its name to ``RIGS``; the tests do not change.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from gpu_memory import no_gpu

from kvshm.interfaces import Attachment, Copy, CopyState, Region, Transport
from kvshm.transport.cuda.driver import Route
from kvshm.transport.cuda.export import HOST, DeviceMemory, _unused_probes
from kvshm.transport.cuda.transport import CudaIpcTransport
from kvshm.transport.loopback import LoopbackNetwork, LoopbackTransport
from kvshm.transport.memory import KVMemory
from kvshm.transport.posix_shm import PosixShmTransport
from tests.doubles.cuda_fake import FakeDriver, FakeMachine

from .cuda_processes import RankProcess, RemoteMemory, RemoteTransport

PATIENCE = 100.0


@dataclass(frozen=True)
class Layout:
    """A cache's memories, by size in bytes, and its regions."""

    sizes: tuple[int, ...]
    regions: tuple[Region, ...]

    @property
    def num_blocks(self) -> int:
        return min(region.num_blocks for region in self.regions)


@dataclass
class Peer:
    layout: Layout
    transport: Transport
    memories: Sequence[memoryview]

    def read(self) -> list[bytearray]:
        return [bytearray(memory) for memory in self.memories]

    def fill(self, seed: int) -> None:
        for memory in self.memories:
            memory[:] = random.Random(seed).randbytes(len(memory))


class Rig(ABC):
    fixtures: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.peers: list[Peer] = []

    def peer(self, layout: Layout, fault: str | None = None) -> Peer:
        peer = self._build(layout, fault)
        self.peers.append(peer)
        peer.fill(seed=len(self.peers))
        return peer

    @abstractmethod
    def _build(self, layout: Layout, fault: str | None) -> Peer: ...

    @abstractmethod
    def hold(self, importer: Peer) -> Any:
        """Context: copies the importer begins in it make no progress before its end."""

    @abstractmethod
    def finish(self, *copies: Copy) -> list[CopyState]:
        """Let the copies end; return how each did."""

    def skips(self, attachment: Attachment) -> bool:
        """Whether a copy that is cancelled before it begins writes nothing.  The copy engines take
        none back."""
        return getattr(attachment, "route", None) is not Route.BATCH

    def end(self, peer: Peer) -> None:
        peer.transport.close()

    def close(self) -> None:
        for peer in self.peers:
            peer.transport.close()


class LoopbackRig(Rig):
    def __init__(self) -> None:
        super().__init__()
        self.network = LoopbackNetwork()

    def _build(self, layout: Layout, fault: str | None) -> Peer:
        memories = [bytearray(size) for size in layout.sizes]
        transport = LoopbackTransport(memories, layout.regions, 0, self.network, fault)
        return Peer(layout, transport, [memoryview(memory) for memory in memories])

    @contextmanager
    def hold(self, importer: Peer) -> Iterator[None]:
        yield  # nothing moves unless the clock is advanced

    def finish(self, *copies: Copy) -> list[CopyState]:
        self.network.run()
        return [copy.poll() for copy in copies]


class PosixShmRig(Rig):
    def __init__(self) -> None:
        super().__init__()
        self.run_dir = tempfile.TemporaryDirectory(prefix="kv-")
        self.memories: list[KVMemory] = []

    def _build(self, layout: Layout, fault: str | None) -> Peer:
        memories = [KVMemory.create(size) for size in layout.sizes]
        self.memories += memories
        path = f"{self.run_dir.name}/{len(self.peers)}"
        transport = PosixShmTransport(memories, layout.regions, 0, path, fault)
        return Peer(layout, transport, [memory.buffer for memory in memories])

    @contextmanager
    def hold(self, importer: Peer) -> Iterator[None]:
        assert isinstance(importer.transport, PosixShmTransport)
        gate = threading.Event()
        importer.transport.copier.submit(lambda: assert_waited(gate))
        try:
            yield
        finally:
            gate.set()

    def finish(self, *copies: Copy) -> list[CopyState]:
        deadline = time.monotonic() + PATIENCE
        while any(copy.poll() is CopyState.PENDING for copy in copies):
            assert time.monotonic() < deadline, "copies do not end"
            time.sleep(0.0005)
        return [copy.poll() for copy in copies]

    def end(self, peer: Peer) -> None:
        super().end(peer)
        assert isinstance(peer.transport, PosixShmTransport)
        for memory in peer.transport.memory:
            memory.close()

    def close(self) -> None:
        super().close()
        for memory in self.memories:
            memory.close()
        self.run_dir.cleanup()


def assert_waited(gate: threading.Event) -> None:
    assert gate.wait(PATIENCE)


class FakeCudaRig(Rig):
    """Every peer a process of its own, on a driver played in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = FakeMachine()

    def socket_path(self) -> str:
        return ""

    def _build(self, layout: Layout, fault: str | None) -> Peer:
        driver = self.machine.process()
        addresses = [driver.make(size) for size in layout.sizes]
        spans = list(zip(addresses, layout.sizes, strict=True))
        memories = [DeviceMemory(address, size) for address, size in spans]
        path = self.socket_path()
        transport = CudaIpcTransport(memories, layout.regions, 0, path, fault, driver=driver)
        return Peer(layout, transport, [driver.bytes_at(*span) for span in spans])

    @contextmanager
    def hold(self, importer: Peer) -> Iterator[None]:
        assert isinstance(importer.transport, CudaIpcTransport)
        driver = cast(FakeDriver, importer.transport.driver)
        with driver.hold(importer.transport.copy_stream.stream):
            yield

    finish = PosixShmRig.finish


class FakeFromHostRig(FakeCudaRig):
    """Every other peer has its memory on the host, as a keeper has."""

    first = 0

    def __init__(self) -> None:
        super().__init__()
        self.run_dir = tempfile.TemporaryDirectory(prefix="kv-")

    def _build(self, layout: Layout, fault: str | None) -> Peer:
        if len(self.peers) % 2 != self.first:
            return super()._build(layout, fault)
        driver, path = self.machine.process(), self.socket_path()
        memories = [KVMemory.create(size) for size in layout.sizes]
        transport = CudaIpcTransport(memories, layout.regions, 0, path, fault, driver=driver)
        return Peer(layout, transport, [memory.buffer for memory in memories])

    def socket_path(self) -> str:
        return f"{self.run_dir.name}/{len(self.peers)}"

    def close(self) -> None:
        super().close()
        self.run_dir.cleanup()
        for peer in self.peers:
            # A process keeps it for its next transport: a fake one has no next, and it holds
            # descriptors of this one.
            driver = cast(CudaIpcTransport, peer.transport).driver
            _unused_probes.pop((driver.process, driver.uuid, HOST), None)


class FakeToHostRig(FakeFromHostRig):
    first = 1


class RealCudaRig(Rig):
    """The machine's GPU; every peer a real process."""

    library = ""
    kinds: tuple[str, ...] = ("ipc",)
    """Of the peers' memory, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[RankProcess] = []
        if (reason := self.missing()) is not None:
            pytest.skip(reason)

    def missing(self) -> str | None:
        return no_gpu()

    def _build(self, layout: Layout, fault: str | None) -> Peer:
        kind = self.kinds[len(self.peers) % len(self.kinds)]
        process = RankProcess(self.library, kind)
        self.processes.append(process)
        transport = RemoteTransport(process, layout.sizes, layout.regions, fault)
        memories: Any = [RemoteMemory(process, *one) for one in enumerate(layout.sizes)]
        return Peer(layout, transport, memories)

    @contextmanager
    def hold(self, importer: Peer) -> Iterator[None]:
        assert isinstance(importer.transport, RemoteTransport)
        process = importer.transport.process
        process.call("hold")
        try:
            yield
        finally:
            process.call("release")

    finish = PosixShmRig.finish

    def close(self) -> None:
        super().close()
        for process in self.processes:
            process.give_back()


class PlayedCudaRig(RealCudaRig):
    """As on a GPU, through the real bindings, but the driver's library is played."""

    fixtures = ("played_cuda",)

    def __init__(self, played_cuda: Path) -> None:
        self.library = str(played_cuda.parent)
        super().__init__()

    def missing(self) -> str | None:
        return "the real driver is here" if no_gpu() is None else None


class RealVmmRig(RealCudaRig):
    kinds = ("fd",)


class PlayedVmmRig(PlayedCudaRig):
    kinds = ("fd",)


class RealFromHostRig(RealCudaRig):
    kinds = ("host", "ipc")


class PlayedFromHostRig(PlayedCudaRig):
    kinds = ("host", "ipc")


class RealToHostRig(RealCudaRig):
    kinds = ("fd", "host")


class PlayedToHostRig(PlayedCudaRig):
    kinds = ("fd", "host")


RIGS: dict[str, type[Rig]] = {
    "cuda_ipc": RealCudaRig,
    "cuda_ipc_fake": FakeCudaRig,
    "cuda_ipc_fake_from_host": FakeFromHostRig,
    "cuda_ipc_fake_to_host": FakeToHostRig,
    "cuda_ipc_from_host": RealFromHostRig,
    "cuda_ipc_played": PlayedCudaRig,
    "cuda_ipc_played_from_host": PlayedFromHostRig,
    "cuda_ipc_played_to_host": PlayedToHostRig,
    "cuda_ipc_played_vmm": PlayedVmmRig,
    "cuda_ipc_to_host": RealToHostRig,
    "cuda_ipc_vmm": RealVmmRig,
    "loopback": LoopbackRig,
    "posix_shm": PosixShmRig,
}
