"""A transport inside one process, with a clock that only its user moves.

Tests of code on top of the transport interface need it.  The ``LoopbackTransport`` s of several
engines share one ``LoopbackNetwork``; their memories are bytearrays, and a copy makes progress only
when ``advance`` is called.  So a test decides when copies overlap, are cancelled or end late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from kvshm._base.copy_path import CopyPath
from kvshm._base.ids import BlockId, Epoch
from kvshm.config import Fault
from kvshm.errors import StaleAttachment, TransportError
from kvshm.interfaces import CopyState, MemoryDescriptor, Region, unpack_details

from .own_cache import OwnCache
from .regions import block_checksum, check_blocks, count_blocks, spans


class LoopbackNetwork:
    """Connects LoopbackTransports: holds their exports and the clock of their copies."""

    def __init__(self) -> None:
        self.exports: dict[int, LoopbackTransport] = {}
        self.copies: list[LoopbackCopy] = []

    def advance(self, ticks: int = 1) -> None:
        """Let every pending copy, in the order begun, copy one block per tick.  A cancelled copy,
        or one without remaining blocks, ends at its next tick."""
        for _ in range(ticks):
            for copy in self.copies:
                copy.advance()
        self.copies = [copy for copy in self.copies if copy.poll() is CopyState.PENDING]

    def run(self) -> None:
        """Advance until no copy is pending."""
        while self.copies:
            self.advance()


class LoopbackCopy:
    """A copy that makes progress with its network's clock, or by its own ``advance``."""

    def __init__(
        self,
        attachment: LoopbackAttachment,
        source: Sequence[BlockId],
        target: Sequence[BlockId],
    ) -> None:
        self.attachment = attachment
        self._left = deque(zip(source, target, strict=True))
        self._cancelled = False
        self._state = CopyState.PENDING

    def poll(self) -> CopyState:
        return self._state

    def cancel(self) -> None:
        self._cancelled = True

    def fence(self) -> bool:
        return False

    def advance(self) -> None:
        """Copy the next block, or end: DONE if no block is left, FAILED if cancelled."""
        if self._state is not CopyState.PENDING:
            return
        if self._left and not self._cancelled:
            self.attachment.copy_block(*self._left.popleft())
        elif self._left:
            self._state = CopyState.FAILED
        else:
            self._state = CopyState.DONE


class LoopbackDetails(msgspec.Struct, frozen=True):
    """``MemoryDescriptor.details`` of this transport."""

    export: int


class LoopbackAttachment:
    """A peer transport's memory (kvshm.interfaces.Attachment).  Like a mapping, it keeps the memory
    after the peer's end."""

    path = CopyPath.OTHER
    ended = False
    """Always False: an export ends only when the test ends it."""

    def __init__(self, own: LoopbackTransport, descriptor: MemoryDescriptor) -> None:
        export = unpack_details(descriptor, own.name, LoopbackDetails).export
        peer = own.network.exports.get(export)
        if peer is None:
            raise TransportError(f"no transport exports {export}")
        if peer.epoch != descriptor.epoch:
            raise StaleAttachment(f"the peer serves epoch {peer.epoch:#x}")
        own.check_peer(descriptor, [len(memory) for memory in peer.memory])
        self.epoch = Epoch(descriptor.epoch)
        self.own = own
        self._memory = [memory.toreadonly() for memory in peer.memory]
        self._regions = descriptor.regions
        self._num_blocks = count_blocks(descriptor.regions)
        self._closed = False

    def begin_copy(
        self,
        source: Sequence[BlockId],
        target: Sequence[BlockId],
        keep_going: Callable[[], bool] | None = None,
    ) -> LoopbackCopy:
        """``keep_going`` is ignored: only the network's clock moves a copy."""
        if self._closed or self.own.closed:
            raise TransportError(f"the attachment to epoch {self.epoch:#x} is closed")
        copy = LoopbackCopy(self, self.own.blocks_to_read(source, self._num_blocks, target), target)
        self.own.network.copies.append(copy)
        return copy

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Copy the bytes of one block in all regions, immediately."""
        here, there = spans(self.own.regions, target), spans(self._regions, source)
        for (own, start, end), (peer, first, last) in zip(here, there, strict=True):
            block = self._memory[peer][first:last]
            zero = self.own.fault == Fault.ZERO
            self.own.memory[own][start:end] = bytes(len(block)) if zero else block

    def close(self) -> None:
        self._closed = True


class LoopbackTransport(OwnCache):
    """One rank's KV cache in bytearrays (kvshm.interfaces.Transport).  One thread only."""

    name = "loopback"
    devices = ()
    late_writers = True

    def __init__(
        self,
        memory: bytearray | Sequence[bytearray],
        regions: Sequence[Region],
        rank: int,
        network: LoopbackNetwork,
        fault: str | None = None,
    ) -> None:
        """Share ``memory`` (``Region.handle`` indexes it) with the others on ``network``."""
        memories = (memory,) if isinstance(memory, bytearray) else memory
        self.memory = [memoryview(m) for m in memories]
        super().__init__([len(m) for m in self.memory], regions, rank, fault)
        self.network = network

    def export(self, epoch: Epoch) -> MemoryDescriptor:
        self.check_open()
        self.epoch = epoch
        self.network.exports[id(self)] = self
        return self.describe(LoopbackDetails(id(self)))

    def attach(self, descriptor: MemoryDescriptor) -> LoopbackAttachment:
        self.check_open()
        return LoopbackAttachment(self, descriptor)

    def checksum(self, blocks: Sequence[BlockId]) -> list[int]:
        check_blocks(blocks, self.num_blocks, "this cache's")
        return [block_checksum(self.memory, self.regions, block) for block in blocks]

    def close(self) -> None:
        """End the export and all pending copies, as if after the block under way."""
        self.closed = True
        self.network.exports.pop(id(self), None)
        for copy in self.network.copies:
            if copy.attachment.own is self:
                copy.cancel()
                copy.advance()
