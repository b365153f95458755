"""Another engine in one epoch, as the scheduler's process of this one sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvshm._base.ids import NO_LEASE_BIT
from kvshm._shm.layout import NUM_LEASE_BITS, RECORD_BYTES
from kvshm._shm.slot_table import PeerSlotTable, SlotTableView
from kvshm.errors import CorruptSegment, ProtocolError, StaleAttachment

from .protocol import EngineInfo


@dataclass(eq=False, slots=True)
class Peer:
    """Another engine in one epoch, its table mapped as long as a plan holds the peer.  The client's
    thread changes ``dead``, the scheduler's thread the fields after it."""

    info: EngineInfo
    table: PeerSlotTable
    row: int
    dead: bool = False
    failures: int = 0
    paused_until: float = 0.0
    """Reading of the clock until which nothing is planned from the peer."""
    quarantined: bool = False
    block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.block_bytes = self.info.ranks[0].memory.block_bytes if self.info.ranks else 0


class PlannedRun(NamedTuple):
    """Consecutive blocks of one prefix that one peer seems to hold.  Refers to the peer itself, not
    to its row: another peer may get the row."""

    peer: Peer
    records: bytes

    @property
    def num_blocks(self) -> int:
        return len(self.records) // RECORD_BYTES


def differs(table: SlotTableView, info: EngineInfo) -> str:
    described = (info.epoch, info.num_blocks, len(info.ranks), info.fingerprint)
    found = (table.epoch, table.num_blocks, table.num_ranks, table.fingerprint)
    if described == found:
        return ""
    what = "its slot table (epoch, blocks, ranks, fingerprint)"
    return f"{what} is {_in_hex(*found)}, it says {_in_hex(*described)}"


def _in_hex(epoch: int, *others: object) -> str:
    return f"({epoch:016x}, {', '.join(map(str, others))})"


def check_table(table: PeerSlotTable, info: EngineInfo) -> None:
    if difference := differs(table, info):
        stale = table.epoch != info.epoch
        raise (StaleAttachment if stale else CorruptSegment)(difference)
    if not NO_LEASE_BIT <= info.lease_bit < NUM_LEASE_BITS:
        raise ProtocolError(f"the roster gives it lease bit {info.lease_bit}")
