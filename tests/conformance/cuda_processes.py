"""Ranks of the CUDA transport in processes of their own, seen as a transport of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from gpu_peer import GpuPeer, PeerError

from kvshm import errors
from kvshm._base.ids import BlockId, Epoch
from kvshm.interfaces import CopyState, MemoryDescriptor, Region
from kvshm.transport.cuda.driver import Route

PROGRAM = str(Path(__file__).with_name("cuda_rank.py"))
_idle: list[tuple[tuple[str, str], GpuPeer]] = []


class RankProcess:
    def __init__(self, library: str, kind: str) -> None:
        """``library``: the directory of a libcuda.so.1 to use instead of the installed one.
        ``kind``: of the memory that it shares, as export.py names it."""
        self.kind = kind
        self._kind = (library, kind)
        for number, (found, peer) in enumerate(_idle):
            if found == self._kind:
                self._peer = peer
                del _idle[number]
                return
        path = os.pathsep.join(filter(None, (library, os.environ.get("LD_LIBRARY_PATH"))))
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if path:
            environment["LD_LIBRARY_PATH"] = path
        self._peer = GpuPeer(program=PROGRAM, environment=environment)

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of its Rank; what it raises is raised here, if it is kvshm's."""
        try:
            return self._peer.call(method, **arguments)
        except PeerError as exc:
            name, _, text = str(exc).partition(": ")
            # A CudaError is a TransportError that only its driver's module knows.
            kind = getattr(errors, "TransportError" if name == "CudaError" else name, None)
            if kind is None:
                raise
            raise kind(text) from exc

    def give_back(self) -> None:
        self.call("put_back")
        _idle.append((self._kind, self._peer))


def end_all() -> None:
    while _idle:
        _idle.pop()[1].__exit__()


@dataclass
class RemoteCopy:
    process: RankProcess
    number: int

    def poll(self) -> CopyState:
        return CopyState(self.process.call("poll", copy=self.number))

    def cancel(self) -> None:
        self.process.call("cancel", copy=self.number)


@dataclass
class RemoteAttachment:
    process: RankProcess
    number: int
    epoch: Epoch
    route: Route
    ended = False

    def begin_copy(
        self,
        source: Sequence[BlockId],
        target: Sequence[BlockId],
        keep_going: Callable[[], bool] | None = None,
    ) -> RemoteCopy:
        lists = {"source": list(source), "target": list(target)}
        number = self.process.call("begin_copy", attachment=self.number, **lists)
        return RemoteCopy(self.process, number)

    def close(self) -> None:
        self.process.call("detach", attachment=self.number)


class RemoteTransport:
    name = "cuda_ipc"

    def __init__(
        self,
        process: RankProcess,
        sizes: Sequence[int],
        regions: Sequence[Region],
        fault: str | None,
    ) -> None:
        self.process = process
        packed = msgspec.msgpack.encode(list(regions)).hex()
        build = {"sizes": list(sizes), "regions": packed, "fault": fault}
        process.call("build", kind=process.kind, **build)

    def export(self, epoch: Epoch) -> MemoryDescriptor:
        packed = bytes.fromhex(self.process.call("export", epoch=epoch))
        return msgspec.msgpack.decode(packed, type=MemoryDescriptor)

    def attach(self, descriptor: MemoryDescriptor) -> RemoteAttachment:
        packed = msgspec.msgpack.encode(descriptor).hex()
        number, route = self.process.call("attach", descriptor=packed)
        return RemoteAttachment(self.process, number, Epoch(descriptor.epoch), Route(route))

    def checksum(self, blocks: Sequence[BlockId]) -> list[int]:
        return list(self.process.call("checksum", blocks=list(blocks)))

    def close(self) -> None:
        self.process.call("close")


@dataclass
class RemoteMemory:
    """Reads and writes like the memory of a peer in this process."""

    process: RankProcess
    number: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes

    def __iter__(self) -> Any:
        return iter(bytes.fromhex(self.process.call("read", number=self.number)))

    def __setitem__(self, span: slice, packed: bytes) -> None:
        assert span == slice(None)
        self.process.call("write", number=self.number, packed=packed.hex())
