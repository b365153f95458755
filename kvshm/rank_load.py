"""One load on one rank, from attaching the peers to the report.

Runs on the rank's background thread only.  A failure of any kind ends in a report with bad
targets, which the engine recomputes; a load never ends without a report.
"""

from __future__ import annotations

from dataclasses import dataclass

from .counters import (
    BLOCKS_COPIED,
    BYTES_COPIED,
    DISCARDED,
    LOADS_STARTED,
    MISMATCHED,
    RECHECK_FAILED,
    VERIFIED,
)
from .errors import KvshmError, StaleAttachment, TransportError
from .interfaces import Attachment, Copy, CopyState, Transport
from .log import logger
from .plans import NO_TICKET, Load, LoadFailure, LoadReport, Piece, PieceFailure
from .records import RECORD_BYTES, unpack_records
from .slots import SlotTable
from .syncpoints import SyncPoint, sync_point
from .terms import BlockId, Epoch, LeaseBit, Rank

log = logger(__name__)


@dataclass(frozen=True)
class PeerMemory:
    """One epoch of a peer as this rank sees it: its slot table and the same rank's memory.

    Table and memory are always of one epoch (``attach`` refuses anything else), so that a
    generation in the table speaks of the bytes in the mapping.
    """

    table: SlotTable
    memory: Attachment

    @classmethod
    def attach(cls, piece: Piece, rank: Rank, transport: Transport) -> PeerMemory:
        """Open both.  Blocks; raises KvshmError."""
        if rank >= len(piece.memory):
            raise TransportError(f"peer {piece.peer:016x} has no rank {rank}")
        table = SlotTable.open(piece.table)
        try:
            if table.epoch != piece.peer:
                raise StaleAttachment(f"{piece.table} is of epoch {table.epoch:016x}")
            return cls(table, transport.attach(piece.memory[rank]))
        except BaseException:
            table.close()
            raise

    def ended(self, rank: Rank) -> bool:
        """Whether the peer's memory is no longer what its table says."""
        return self.table.retired or self.table.life(rank) != self.table.epoch

    def close(self) -> None:
        self.memory.close()
        self.table.close()


class PeerBook:
    """The peers this rank has attached, by epoch."""

    def __init__(self, transport: Transport, rank: Rank) -> None:
        self._transport = transport
        self._rank = rank
        self._peers: dict[Epoch, PeerMemory] = {}

    def of(self, piece: Piece) -> PeerMemory:
        """The peer of a piece, attached on first use.  Blocks then; raises KvshmError."""
        peer = self._peers.get(piece.peer)
        if peer is None:
            peer = self._peers[piece.peer] = PeerMemory.attach(piece, self._rank, self._transport)
        return peer

    def unmap_ended(self) -> None:
        """Unmap peers that have ended, so that their memory can be freed."""
        for epoch in [e for e, peer in self._peers.items() if peer.ended(self._rank)]:
            self._peers.pop(epoch).close()

    def close(self) -> None:
        while self._peers:
            self._peers.popitem()[1].close()


@dataclass
class _Part:
    """A piece under way."""

    piece: Piece
    peer: PeerMemory | None = None
    copy: Copy | None = None
    failure: LoadFailure | None = None


class RankLoad:
    """Carries out one load; ``start`` once, then ``advance`` until it says True."""

    def __init__(
        self, load: Load, rank: Rank, table: SlotTable | None, *, verify: bool = False
    ) -> None:
        self._load = load
        self._rank = rank
        self._table = table
        self._verify = verify
        self._parts = [_Part(piece) for piece in load.pieces]
        self._failures: list[PieceFailure] = []
        self._bad: list[BlockId] = list(load.lost)
        self._transport: Transport | None = None
        self.report = LoadReport(load.load_id, ())

    def start(self, peers: PeerBook, transport: Transport) -> None:
        """Attach the peers and start all copies.  Never raises."""
        self._transport = transport
        if self._rank == 0:
            self._count(LOADS_STARTED, 1)
        for part in self._parts:
            sync_point(SyncPoint.COPY_BEGINS)
            try:
                part.peer = peers.of(part.piece)
                part.copy = part.peer.memory.begin_copy(_sources(part.piece), part.piece.targets)
            except Exception as exc:
                part.failure = LoadFailure.UNREACHABLE
                self._note(f"cannot read from engine {part.piece.peer:016x}: {exc}", exc)

    def advance(self) -> bool:
        """Whether the load has ended; then ``report`` is complete.  Never raises."""
        copies = [part.copy.poll() for part in self._parts if part.copy is not None]
        if CopyState.PENDING in copies:
            return False
        try:
            for part in self._parts:
                self._judge(part)
        except Exception as exc:
            self._bad = [t for piece in self._load.pieces for t in piece.targets]
            self._bad += self._load.lost
            self._note(f"a load could not be checked and is discarded: {exc}", exc)
        self._release()
        self.report = LoadReport(
            self._load.load_id, tuple(dict.fromkeys(self._bad)), tuple(self._failures)
        )
        return True

    def _judge(self, part: _Part) -> None:
        """Decide which of a piece's targets may be used; none of its copies writes any more."""
        piece, count = part.piece, len(part.piece.targets)
        if part.copy is None or part.peer is None:
            self._reject(piece, [False] * count, part.failure or LoadFailure.UNREACHABLE)
            return
        if part.copy.poll() is not CopyState.DONE:
            self._reject(piece, [False] * count, LoadFailure.COPY_FAILED)
            return
        sync_point(SyncPoint.COPIED)
        sources = _sources(piece)
        wanted = [part.peer.table.checksum(self._rank, s) for s in sources] if self._verify else []
        good = part.peer.table.recheck(self._rank, piece.records)
        if self._own_epoch_ended():
            self._reject(piece, [False] * count, LoadFailure.OWN_RESET)
            return
        self._count(BLOCKS_COPIED, count)
        self._count(
            BYTES_COPIED, count * sum(r.block_bytes for r in piece.memory[self._rank].regions)
        )
        if not all(good):
            self._count(RECHECK_FAILED, good.count(False))
            self._reject(piece, good, LoadFailure.RECLAIMED)
        if self._verify:
            self._compare(piece, good, wanted)

    def _compare(self, piece: Piece, good: list[bool], wanted: list[int]) -> None:
        """KVSHM_VERIFY: the bytes that arrived must be the bytes that were published.  Blocks
        whose exporter wrote no checksum are not compared."""
        assert self._transport is not None
        found = self._transport.checksum(piece.targets)
        triples = zip(good, wanted, found, strict=True)
        same = [not ok or not want or want == have for ok, want, have in triples]
        compared = [ok and want != 0 for ok, want in zip(good, wanted, strict=True)]
        self._count(VERIFIED, sum(a and b for a, b in zip(compared, same, strict=True)))
        if not all(same):
            self._count(MISMATCHED, same.count(False))
            self._reject(piece, same, LoadFailure.MISMATCH)
            self._note(f"engine {piece.peer:016x}: copied bytes differ from what it published")
        if self._table is not None:
            for target, checksum in zip(piece.targets, found, strict=True):
                self._table.set_checksum(self._rank, target, checksum)

    def _own_epoch_ended(self) -> bool:
        table = self._table
        return table is None or table.retired or table.epoch != self._load.epoch

    def _reject(self, piece: Piece, good: list[bool], reason: LoadFailure) -> None:
        size = RECORD_BYTES
        bad = [i for i, ok in enumerate(good) if not ok]
        self._bad += [piece.targets[i] for i in bad]
        records = b"".join(piece.records[i * size : (i + 1) * size] for i in bad)
        self._failures.append(PieceFailure(piece.peer, reason, records))
        self._count(DISCARDED, len(bad))

    def _release(self) -> None:
        """Give the leases back: the last rank to finish does it for all of them."""
        if self._table is None or self._load.ticket == NO_TICKET:
            return
        try:
            if not self._table.finish_ticket(self._load.ticket):
                return
            for part in self._parts:
                table = part.peer.table if part.peer is not None else None
                release_piece(part.piece, self._load.lease_bit, table)
        except Exception as exc:
            self._note(f"leases could not be given back, their exporter will: {exc}", exc)
        sync_point(SyncPoint.RELEASED)

    def _count(self, counter: int, amount: int) -> None:
        if self._table is not None and amount:
            self._table.counters.add(counter, amount)

    def _note(self, text: str, exc: Exception | None = None) -> None:
        log.warning("%s", text, exc_info=None if isinstance(exc, KvshmError) else exc)
        if self._table is not None:
            self._table.log_error(text)


def release_piece(piece: Piece, bit: LeaseBit | int, table: SlotTable | None) -> None:
    """Clear the leases a piece took.  Without ``table`` it is opened for the purpose; a peer
    that has gone needs no release.  Raises SegmentError if it cannot be opened."""
    if bit < 0 or not any(piece.taken):
        return
    if table is not None:
        table.release(LeaseBit(bit), piece.records, piece.taken)
        return
    table = SlotTable.open(piece.table)
    try:
        table.release(LeaseBit(bit), piece.records, piece.taken)
    finally:
        table.close()


def _sources(piece: Piece) -> tuple[BlockId, ...]:
    return tuple(record.block_id for record in unpack_records(piece.records))
