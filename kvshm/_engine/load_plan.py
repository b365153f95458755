"""What the scheduler's half of a cache sends to its ranks, and what the ranks reply: pickled
between processes of one engine, never between engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Self

from kvshm._base.copy_path import CopyPath
from kvshm._base.ids import NO_LEASE_BIT, BlockId, Epoch, LoadId
from kvshm._node.peer import PlannedRun
from kvshm._shm.layout import block_ids
from kvshm.interfaces import MemoryDescriptor

from .groups import Part

NO_TICKET = -1


class Plan(NamedTuple):
    """A prefix that can be restored: a hint until its blocks are leased.  A plan stays in the
    scheduler's process."""

    epoch: Epoch
    """The importer's own epoch; in another epoch the plan leases nothing."""
    start: int
    """Hashes of the local hit, behind which the blocks are needed."""
    length: int
    """Hashes by which the prefix becomes longer."""
    parts: tuple[Part, ...]
    runs: tuple[PlannedRun, ...]
    """Who seems to hold these blocks, in their order."""
    made_at: float
    """Monotonic seconds; a plan older than PLAN_SECONDS leases nothing."""
    nbytes: int = 0

    @property
    def own_runs(self) -> list[PlannedRun]:
        """The runs of blocks that are copied within the engine's own cache."""
        return [run for run in self.runs if run.peer.info.epoch == self.epoch]

    def own_blocks(self) -> list[BlockId]:
        """The blocks of these runs."""
        return [block for run in self.own_runs for block in block_ids(run.records)]

    @property
    def num_blocks(self) -> int:
        """How many blocks are copied."""
        return sum(run.num_blocks for run in self.runs)


@dataclass(frozen=True)
class Piece:
    """Consecutive blocks of a load that come from one peer."""

    peer_epoch: Epoch
    memory: tuple[MemoryDescriptor, ...]
    """The peer's KV memory, by rank; empty if all own ranks have attached it."""
    records: bytes
    taken: bytes
    """One byte per record: 1 if this load holds the lease and has to release it."""
    targets: tuple[BlockId, ...]
    block_bytes: int


@dataclass(frozen=True)
class LoadOrder:
    """One request's import, as every rank of the importing engine carries it out."""

    load_id: LoadId
    epoch: Epoch
    """The importer's own epoch when the leases were taken; the load ends with that epoch."""
    ticket: int
    """Ticket in the own slot table that counts the ranks still at work; NO_TICKET if empty."""
    lease_bit: int
    pieces: tuple[Piece, ...]
    lost: tuple[BlockId, ...]
    """Targets whose source blocks could not be leased: load errors from the start."""
    length: int = 0
    """Hashes by which the prefix becomes longer if all targets but ``lost`` are filled."""
    apart: bool = False
    """Whether each block is of use without the others, instead of a prefix."""

    @classmethod
    def of_nothing(cls, load_id: LoadId, targets: Sequence[BlockId]) -> Self:
        """A load that fills none of its targets, and only makes the ranks report it."""
        return cls(load_id, Epoch(0), NO_TICKET, NO_LEASE_BIT, (), tuple(targets))

    @property
    def targets(self) -> tuple[BlockId, ...]:
        """Own blocks that receive copies: those whose source blocks were leased."""
        return tuple(target for piece in self.pieces for target in piece.targets)

    @property
    def nbytes(self) -> int:
        """Bytes that each rank has to copy."""
        return sum(piece.block_bytes * len(piece.targets) for piece in self.pieces)

    def bytes_of(self, blocks: int) -> int:
        """Bytes of the first ``blocks`` blocks on each rank."""
        nbytes = 0
        for piece in self.pieces:
            of_piece = min(blocks, len(piece.targets))
            nbytes, blocks = nbytes + of_piece * piece.block_bytes, blocks - of_piece
        return nbytes


class LoadFailure(StrEnum):
    """Why blocks of a load were not delivered."""

    UNREACHABLE = "unreachable"
    NOT_ATTACHED = "not-attached"
    """The peer was not attached in time; it may be for the next load."""
    COPY_FAILED = "copy-failed"
    RECLAIMED = "reclaimed"
    """The exporter reused the block, or its memory ended, while it was being copied."""
    TOO_LATE = "too-late"
    """The copy had not ended when the step could not wait any longer."""
    MISMATCH = "mismatch"
    """KVSHM_VERIFY: the copied bytes are not those that were published."""
    CANCELLED = "cancelled"
    OWN_RESET = "own-reset"


@dataclass(frozen=True)
class PieceFailure:
    """The blocks of one piece that one rank could not deliver, and why."""

    peer_epoch: Epoch
    reason: LoadFailure
    records: bytes


class CopyTimes(NamedTuple):
    """When a load copied, in seconds of the wall clock, because time namespaces may differ."""

    begun: float
    copied: float
    checked: float


@dataclass(frozen=True)
class LoadReport:
    """One rank's final report on a load, all of whose copies have ended."""

    load_id: LoadId
    bad: tuple[BlockId, ...]
    failures: tuple[PieceFailure, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    """From the first copy to the end of the checks, or of the step's patience; 0 without copies."""
    paths: tuple[CopyPath | None, ...] = field(default=(), compare=False)
    """For each piece the way that its bytes took, None if they were not copied."""
    times: CopyTimes | None = field(default=None, compare=False)
    """None if no copy began, or if nothing is known of when it ended."""
