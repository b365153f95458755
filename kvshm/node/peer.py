"""Another engine in one epoch, as the scheduler's process of this one sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvshm.errors import CorruptSegment, ProtocolError, StaleAttachment
from kvshm.ids import NO_LEASE_BIT
from kvshm.shm.layout import NUM_LEASE_BITS
from kvshm.shm.slot_table import PeerSlotTable

from .protocol import EngineInfo


@dataclass(eq=False, slots=True)
class Peer:
    """Another engine in one epoch: an attachment for as long as anybody holds it.

    Its table is unmapped when the last plan that holds the peer is gone, never before.
    Only what is thought of it changes: ``suspected`` and ``dead`` on the client's thread, the
    rest on the scheduler's.
    """

    info: EngineInfo
    table: PeerSlotTable
    row: int
    suspected: bool = False
    dead: bool = False
    """One of its processes has ended; the coordinator says so, too, if there is one."""
    failures: int = 0
    avoided_until: float = 0.0
    """Reading of the clock up to which nothing is planned from the peer."""
    quarantined: bool = False
    """Whether that is because it failed."""
    block_bytes: int = field(init=False)
    """Bytes of a block in the memory of each of its ranks."""

    def __post_init__(self) -> None:
        self.block_bytes = self.info.ranks[0].memory.block_bytes if self.info.ranks else 0

    @property
    def offers(self) -> bool:
        """Whether it has something to offer, as far as is known of it."""
        return not (self.suspected or self.dead or self.info.imports_only)


class PlannedRun(NamedTuple):
    """Consecutive blocks of one prefix that one peer seems to hold.  Holds the peer itself, never
    its number: a number may be handed on, an attachment stays what it is."""

    peer: Peer
    records: bytes
    """Packed block records, in the order of the prefix."""


def check_table(table: PeerSlotTable, info: EngineInfo) -> None:
    """Raise unless the table is the one that the roster speaks of."""
    if table.epoch != info.epoch:
        raise StaleAttachment(
            f"its table is of epoch {table.epoch:016x}, the roster says {info.epoch:016x}"
        )
    said = (info.num_blocks, len(info.ranks), info.fingerprint)
    found = (table.num_blocks, table.num_ranks, table.fingerprint)
    if said != found:
        raise CorruptSegment(
            f"its table (blocks, ranks, fingerprint) is {found}, the roster says {said}"
        )
    if not NO_LEASE_BIT <= info.lease_bit < NUM_LEASE_BITS:
        raise ProtocolError(f"the roster gives it lease bit {info.lease_bit}")
