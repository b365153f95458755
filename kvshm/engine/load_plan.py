"""What the scheduler's half of a cache hands to its ranks, and what they answer.

All of these travel between processes of one engine (vLLM pickles them into its step
metadata), never between engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvshm.ids import BlockId, Epoch
from kvshm.interfaces import MemoryDescriptor
from kvshm.node.peer import PlannedRun
from kvshm.shm.layout import RECORD_BYTES

NO_TICKET = -1


class Plan(NamedTuple):
    """A prefix that other engines seem to hold: a hint, until its blocks are leased.

    ``runs`` cover consecutive blocks from block index ``start`` of the request on.  Stays in
    the scheduler's process.
    """

    epoch: Epoch
    """The importer's own epoch; in another one the plan leases nothing."""
    start: int
    runs: tuple[PlannedRun, ...]
    made_at: float
    """Monotonic seconds; a plan older than PLAN_SECONDS leases nothing."""
    nbytes: int = 0
    """Bytes that each rank has to copy."""

    @property
    def num_blocks(self) -> int:
        return sum(len(run.records) for run in self.runs) // RECORD_BYTES


@dataclass(frozen=True)
class Piece:
    """Consecutive blocks of a load that come from one peer."""

    peer: Epoch
    memory: tuple[MemoryDescriptor, ...]
    """The peer's KV memory, by rank; empty if all ranks are known to have it open."""
    records: bytes
    taken: bytes
    """One byte per record: 1 if this load holds the lease and has to give it back."""
    targets: tuple[BlockId, ...]
    """Own blocks that receive the copies."""
    block_bytes: int
    """Bytes of one block in the memory of one rank."""


@dataclass(frozen=True)
class Load:
    """One request's import, as every rank of the importing engine carries it out."""

    load_id: str
    epoch: Epoch
    """The importer's own epoch when the leases were taken; a load does not outlive it."""
    ticket: int
    """Own table's ticket that counts the ranks still at work; NO_TICKET for an empty load."""
    lease_bit: int
    pieces: tuple[Piece, ...]
    lost: tuple[BlockId, ...]
    """Targets that were matched but could not be leased: load errors from the start."""

    @property
    def targets(self) -> tuple[BlockId, ...]:
        """Own blocks that are to receive copies: those that could be leased."""
        return tuple(target for piece in self.pieces for target in piece.targets)

    @property
    def nbytes(self) -> int:
        """Bytes that each rank has to copy."""
        return sum(piece.block_bytes * len(piece.targets) for piece in self.pieces)


class LoadFailure(StrEnum):
    """Why blocks of a load are not delivered."""

    UNREACHABLE = "unreachable"
    NOT_ATTACHED = "not-attached"
    """The peer's memory was not open in time; it may be for the next load."""
    COPY_FAILED = "copy-failed"
    RECLAIMED = "reclaimed"
    """The exporter reused the block, or its memory ended, while it was being copied."""
    TOO_LATE = "too-late"
    """The copy had not ended when the step that needs it could not wait any longer."""
    MISMATCH = "mismatch"
    """KVSHM_VERIFY: the copied bytes are not those that were published."""
    OWN_RESET = "own-reset"
    """The importer's own cache began another epoch meanwhile."""


@dataclass(frozen=True)
class PieceFailure:
    """The records of one piece that one rank could not deliver."""

    peer: Epoch
    reason: LoadFailure
    records: bytes


@dataclass(frozen=True)
class LoadReport:
    """One rank's last word on a load: nothing of it can write any more."""

    load_id: str
    bad: tuple[BlockId, ...]
    """Targets whose contents must not be used."""
    failures: tuple[PieceFailure, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    """From the begin of its first copy to the end of its checks, or to where a step could wait
    no longer; 0 if none began."""
