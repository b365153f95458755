from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvshm._base.ids import BlockId, Epoch
from kvshm.errors import TransportError
from kvshm.interfaces import MemoryDescriptor, Region

from .faults import check_fault, misdirect
from .regions import check_bounds, check_layouts, check_pairs, count_blocks


class OwnCache:
    """The regions of one rank's cache, and what every transport checks against them."""

    name: str

    def __init__(
        self, sizes: Sequence[int], regions: Sequence[Region], rank: int, fault: str | None
    ) -> None:
        """``sizes``: bytes of each memory.  Raises TransportError if regions or fault are wrong."""
        check_fault(fault)
        check_bounds(regions, sizes)
        self.regions = list(regions)
        self.rank = rank
        self.fault = fault
        self.num_blocks = count_blocks(regions)
        self.epoch = Epoch(0)
        self.closed = False

    def check_open(self) -> None:
        if self.closed:
            raise TransportError("the transport is closed")

    def describe(self, details: msgspec.Struct) -> MemoryDescriptor:
        """The cache in its present epoch, with the ``details`` by which peers open it."""
        packed = msgspec.msgpack.encode(details)
        return MemoryDescriptor(self.name, self.epoch, self.rank, self.regions, packed)

    def check_peer(self, descriptor: MemoryDescriptor, sizes: Sequence[int]) -> None:
        """Raise TransportError unless a peer's regions match the own ones and lie within its
        memories, of ``sizes`` bytes."""
        check_layouts(self.regions, descriptor.regions)
        check_bounds(descriptor.regions, sizes)

    def blocks_to_read(
        self, source: Sequence[BlockId], peer_blocks: int, target: Sequence[BlockId]
    ) -> Sequence[BlockId]:
        """The peer's blocks to copy onto ``target``: ``source``, unless a fault misdirects the
        copy.  Raises TransportError unless both pair up and all blocks exist."""
        check_pairs(source, peer_blocks, target, self.num_blocks)
        return misdirect(source, peer_blocks, self.fault)
