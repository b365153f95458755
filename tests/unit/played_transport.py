"""A transport that does what a test tells it to: attaches that hang or fail, copies that last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvshm._base.ids import BlockId, Epoch
from kvshm.errors import TransportError
from kvshm.interfaces import CopyState, MemoryDescriptor


class PlayedCopy:
    def __init__(self, state: CopyState) -> None:
        self.state = state
        self.error: Exception | None = None
        self.cancelled, self.fenced, self.fences = False, False, 0

    def poll(self) -> CopyState:
        if self.error is not None:
            raise self.error
        return self.state

    def cancel(self) -> None:
        self.cancelled = True

    def fence(self) -> bool:
        self.fences += 1
        return self.fenced


class PlayedMemory:
    def __init__(self, own: PlayedTransport, epoch: int) -> None:
        self.epoch, self.closed, self._own = Epoch(epoch), False, own
        self.ended = False

    def begin_copy(
        self,
        source: Sequence[BlockId],
        target: Sequence[BlockId],
        keep_going: Callable[[], bool] | None = None,
    ) -> PlayedCopy:
        assert not self.closed
        self._own.copies.append(PlayedCopy(self._own.state))
        return self._own.copies[-1]

    def close(self) -> None:
        self.closed = True


class PlayedTransport:
    name = "played"
    late_writers = True

    def __init__(self) -> None:
        self.state = CopyState.DONE
        self.hung: dict[int, threading.Event] = {}
        self.broken: set[int] = set()
        self.export_error: Exception | None = None
        self.attaches: list[int] = []
        self.memories: dict[int, PlayedMemory] = {}
        self.copies: list[PlayedCopy] = []

    def export(self, epoch: Epoch) -> MemoryDescriptor:
        if self.export_error is not None:
            raise self.export_error
        return memory_of(epoch)

    def attach(self, descriptor: MemoryDescriptor) -> PlayedMemory:
        epoch = descriptor.epoch
        self.attaches.append(epoch)
        if epoch in self.hung:
            assert self.hung[epoch].wait(30)
        if epoch in self.broken:
            raise TransportError("no answer within 5 s")
        self.memories[epoch] = PlayedMemory(self, epoch)
        return self.memories[epoch]

    def checksum(self, blocks: Sequence[BlockId]) -> list[int]:
        return [0] * len(blocks)

    def close(self) -> None: ...


def memory_of(epoch: int) -> MemoryDescriptor:
    return MemoryDescriptor("played", epoch, 0, [])
