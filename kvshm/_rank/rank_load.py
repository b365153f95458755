"""One load on one rank, from attaching the peers to the report.

Every failure ends in a report with bad targets, which the engine recomputes.  A load never ends
without a report, and reports only after the last of its copies has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from kvshm._base.copy_path import CopyPath
from kvshm._base.core_lines import CoreLine
from kvshm._base.ids import BlockId, Epoch
from kvshm._base.log import logger
from kvshm._base.syncpoints import SyncPoint, sync_point
from kvshm._engine.load_plan import (
    NO_TICKET,
    LoadFailure,
    LoadOrder,
    LoadReport,
    Piece,
    PieceFailure,
)
from kvshm._shm.error_log import ErrorCode
from kvshm._shm.layout import RECORD_BYTES, block_ids
from kvshm._shm.own_slot_table import RankSlotTable
from kvshm._shm.statistics import (
    BLOCKS_COPIED,
    BYTES_COPIED,
    DISCARDED,
    MISMATCHED,
    RECHECK_FAILED,
    VERIFIED,
)
from kvshm.errors import KvshmError, StillAttaching
from kvshm.interfaces import Attachment, Copy, CopyState, SupportsAfter, SupportsWhenEnded

from .attachments import AttachmentCache, PeerMemory
from .copy_timer import CopyTimer
from .optional_calls import call_optional

log = logger(__name__)


@dataclass
class _Part:
    """A piece of the load, and how far it is."""

    piece: Piece
    peer: PeerMemory | None = None
    copy: Copy | None = None
    failure: LoadFailure | None = None
    tells: bool = False


@dataclass
class _Rejected:
    """What of a load may not be used."""

    targets: list[BlockId]
    failures: list[PieceFailure] = field(default_factory=list)


class RankLoad:
    """Carries out one load: call ``advance`` until it returns True."""

    def __init__(
        self,
        load: LoadOrder,
        attachments: AttachmentCache,
        table: RankSlotTable | None,
        *,
        verify: bool = False,
        until: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        launched: object = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """``table``: None outside an epoch.  ``until``: when the step stops waiting for this load
        at once, None if no step waits.  ``launched``: what ``note_launched`` returned.  ``wake``:
        called by any thread when a copy has ended, if the transport can tell."""
        self._load = load
        self._attachments = attachments
        self._table = table
        self._verify = verify
        self._timer = CopyTimer(clock, wall_clock, until)
        self._launched = launched
        self._wake = wake
        self.abandoned = False
        """Whether the load was reported as lost before its copies had ended."""
        self._parts = [_Part(piece) for piece in load.pieces]
        self._rejected = _Rejected([*load.lost])
        self._discarded = False
        self._released = False
        self._cancelled = False
        self._taken = threading.Lock()
        self.report = LoadReport(load.load_id, ())

    @property
    def peers(self) -> frozenset[Epoch]:
        """Epochs whose attachments this load needs until it has ended."""
        return frozenset(piece.peer_epoch for piece in self._load.pieces)

    def advance(self) -> bool:
        """Go on as far as possible without waiting.  Whether the load has ended.  Never raises."""
        try:
            if self._pending():
                return False
            self._attachments.copying.discard(self)
            self._timer.copied()
            if not self._discarded:
                for part in self._parts:
                    self._decide(part)
            self._release()
        except Exception as exc:  # any: the load must end with a report
            self._discard_all(exc)
            return False  # its copies may still write: the next call polls them again
        if self._discarded:
            self.report = self.failed_report(LoadFailure.COPY_FAILED)
        elif any(failure.reason is LoadFailure.TOO_LATE for failure in self._rejected.failures):
            self.report = self.failed_report(LoadFailure.TOO_LATE)
        else:
            timer = self._timer
            self.report = LoadReport(
                self._load.load_id,
                tuple(dict.fromkeys(self._rejected.targets)),
                tuple(self._rejected.failures),
                timer.elapsed,
                tuple(_path(part) for part in self._parts),
                timer.times,
            )
        return True

    @property
    def polled(self) -> bool:
        """Whether no call announces when the load can go on: while a peer is being attached, or
        by a copy whose transport announces no end."""
        unreported = [part for part in self._parts if not part.tells]
        return self._discarded or any(p.copy is not None or p.failure is None for p in unreported)

    def take(self) -> bool:
        """Whether the caller is the first that is to call ``advance``.  Any thread."""
        return self._taken.acquire(blocking=False)

    def cancel(self) -> None:
        """Have the load end early and deliver nothing.  Any thread."""
        self._cancelled = True

    def abandon(self) -> bool:
        """Deliver nothing, because the step can wait no longer.  Whether no copy of this load can
        still overwrite what the model computes; if not, call it again.  Never raises."""
        if not self.abandoned:
            self.abandoned = True
            for part in self._parts:
                part.failure = part.failure or LoadFailure.TOO_LATE
        try:
            stopped = [self._stop_copy(part) for part in self._parts]  # a list: cancels each copy
            return all(stopped)
        except Exception as exc:  # any, of a transport: then the copy may still write
            self._discard_all(exc)
            return False

    @staticmethod
    def _stop_copy(part: _Part) -> bool:
        """Cancel the copy.  Whether the model's next work comes after its last write."""
        if part.copy is None or part.copy.poll() is not CopyState.PENDING:
            return True
        part.copy.cancel()
        return part.copy.fence() or part.copy.poll() is not CopyState.PENDING

    def failed_report(self, reason: LoadFailure) -> LoadReport:
        """Return the report of a load of which no block may be used.  If its time is up, the report
        has the time the load has taken so far, so that the estimate for the next load grows."""
        failures = tuple(PieceFailure(piece.peer_epoch, reason, b"") for piece in self._load.pieces)
        bad = self._load.targets + self._load.lost
        elapsed, times = self._timer.elapsed, self._timer.times
        return LoadReport(self._load.load_id, bad, failures, elapsed, times=times)

    def _pending(self) -> bool:
        if self._cancelled:
            self._cancel_copies()
        begun = [self._begin(part) for part in self._parts] if not self._discarded else []
        states = [part.copy.poll() for part in self._parts if part.copy is not None]
        return not all(begun) or CopyState.PENDING in states

    def _cancel_copies(self) -> None:
        for part in self._parts:
            part.failure = part.failure or LoadFailure.CANCELLED
            if part.copy is not None and part.copy.poll() is CopyState.PENDING:
                part.copy.cancel()

    def _begin(self, part: _Part) -> bool:
        """Begin a piece's copy once its peer is attached.  Whether it has begun or never will."""
        if part.copy is not None or part.failure is not None:
            return True
        if self._own_epoch_ended():
            part.failure = LoadFailure.OWN_RESET
            return True
        try:
            part.peer = self._attachments.find(part.piece)
            if part.peer is None:
                at_once = self._timer.until is not None
                part.failure = LoadFailure.NOT_ATTACHED if at_once else None
                return at_once
            if not self._timer.in_time():  # nothing was copied, so the report has no time of a copy
                part.failure = LoadFailure.TOO_LATE
                return True
            if not self._timer.begun_at:
                self._timer.begin(queued=bool(self._attachments.copying))
                self._attachments.copying.add(self)
            sync_point(SyncPoint.COPY_BEGINS)
            part.copy = self._begin_copy(part.peer.memory, part.piece)
            self._ask_for_end(part, part.copy)
        except Exception as exc:  # any: the piece is a miss
            late = isinstance(exc, StillAttaching)
            part.failure = LoadFailure.NOT_ATTACHED if late else LoadFailure.UNREACHABLE
            self._log_problem(CoreLine.READ_FAILED, exc, of=part.piece.peer_epoch)
        return True

    def _begin_copy(self, memory: Attachment, piece: Piece) -> Copy:
        source, keep_going = (
            block_ids(piece.records),
            None if self._timer.until is None else self._timer.in_time,
        )
        if self._launched is None:
            return memory.begin_copy(source, piece.targets, keep_going)
        later = cast(SupportsAfter, memory)
        return later.begin_copy(source, piece.targets, keep_going, after=self._launched)

    def _ask_for_end(self, part: _Part, copy: Copy) -> None:
        """Have the load's thread woken when the copy has ended, if the transport can tell."""
        if (wake := self._wake) is None:
            return

        def ended() -> None:
            part.tells = False  # a copy that has not ended is polled from now on
            wake()

        part.tells = True
        if not call_optional(copy, SupportsWhenEnded.when_ended, ended).worked:
            part.tells = False

    def _discard_all(self, exc: Exception) -> None:
        if not self._discarded:
            self._discarded = True
            self._log_problem(CoreLine.LOAD_DISCARDED, exc)

    def _decide(self, part: _Part) -> None:
        """Decide which of a piece's targets may be used.  Its copy has ended."""
        piece, places = part.piece, range(len(part.piece.targets))
        if part.copy is None or part.peer is None:
            self._reject(piece, places, part.failure or LoadFailure.UNREACHABLE)
            return
        if self._cancelled or self.abandoned or part.copy.poll() is not CopyState.DONE:
            reason = LoadFailure.COPY_FAILED if self._timer.in_time() else LoadFailure.TOO_LATE
            self._reject(piece, places, LoadFailure.CANCELLED if self._cancelled else reason)
            return
        sync_point(SyncPoint.COPIED)
        wanted = []
        if self._verify:  # before the re-check, so that it covers the checksums too
            wanted = [
                part.peer.table.checksum(self._attachments.rank, s)
                for s in block_ids(piece.records)
            ]
        good = part.peer.table.recheck(self._attachments.rank, piece.records)
        if self._own_epoch_ended():
            self._reject(piece, places, LoadFailure.OWN_RESET)
            return
        self._count(BLOCKS_COPIED, len(places))
        self._count(BYTES_COPIED, len(places) * piece.block_bytes)
        if reused := [place for place in places if not good[place]]:
            self._count(RECHECK_FAILED, len(reused))
            self._reject(piece, reused, LoadFailure.RECLAIMED)
        if self._verify:
            self._compare(piece, good, wanted)

    def _compare(self, piece: Piece, good: list[bool], wanted: list[int]) -> None:
        """KVSHM_VERIFY: compare with the exporter's checksums, if any, and store them."""
        found = self._attachments.transport.checksum(piece.targets)
        compared = [place for place, want in enumerate(wanted) if want and good[place]]
        differ = [place for place in compared if found[place] != wanted[place]]
        self._count(VERIFIED, len(compared) - len(differ))
        if differ:
            self._count(MISMATCHED, len(differ))
            self._reject(piece, differ, LoadFailure.MISMATCH)
            first = piece.records[differ[0] * RECORD_BYTES :]
            key, block = first[:8].hex(), block_ids(first[:RECORD_BYTES])[0]
            self._log_problem(CoreLine.MISMATCH, block, key, of=piece.peer_epoch)
        if self._table is not None:
            for target, checksum in zip(piece.targets, found, strict=True):
                self._table.set_checksum(self._attachments.rank, target, checksum)

    def _own_epoch_ended(self) -> bool:
        table = self._table
        return (
            table is None
            or table.epoch != self._load.epoch
            or not table.is_alive(self._attachments.rank)
        )

    def _reject(self, piece: Piece, bad: Sequence[int], reason: LoadFailure) -> None:
        """``bad``: places of blocks in the piece."""
        size = RECORD_BYTES
        self._rejected.targets += [piece.targets[i] for i in bad]
        records = b"".join(piece.records[i * size : (i + 1) * size] for i in bad)
        self._rejected.failures.append(PieceFailure(piece.peer_epoch, reason, records))
        self._count(DISCARDED, len(bad))

    def _release(self) -> None:
        """Release the leases, once: the last rank to finish does it for all ranks."""
        if self._released or self._load.ticket == NO_TICKET:
            return
        self._released = True
        if not self._is_last():
            return
        for part in self._parts:
            try:
                self._attachments.release(part.piece, self._load.lease_bit)
            except Exception as exc:  # any: the other pieces' leases are returned too
                self._log_problem(CoreLine.LEASES_NOT_RELEASED, exc)
        sync_point(SyncPoint.RELEASED)

    def _is_last(self) -> bool:
        """Whether no other rank needs the leases.  True without a table of the load's epoch, since
        that rank cannot count itself, so none would ever be last; early release is safe."""
        if self._table is None or self._table.epoch != self._load.epoch:
            return True
        try:
            return self._table.finish_ticket(self._load.ticket)
        except Exception as exc:  # any: leases that are held too long cost the exporter time
            self._log_problem(CoreLine.TICKET_FAILED, exc)
            return True

    def _count(self, counter: int, amount: int) -> None:
        if self._table is not None and amount:
            self._table.counters.add(counter, amount)

    def _log_problem(self, line: CoreLine, *about: object, of: Epoch | None = None) -> None:
        """Log a problem with the engine ``of``, if it is with one, and record it in the own table.
        The table has room for few characters: there the engine is its epoch."""
        full = () if of is None else (self._attachments.name_of(of),)
        short = () if of is None else (f"{of:016x}",)
        if self._attachments.log_limit.allows(line, *full):
            log.line(line, *full, *about, exc_info=_unforeseen(about))
        with suppress(Exception):  # it is logged already; an error here must not lose the load
            if self._table is not None:
                text = str(line.fill(*short, *about))
                self._table.log_error(text, code=ErrorCode.LOAD_FAILED)


def _unforeseen(about: Iterable[object]) -> Exception | None:
    """Return an error among ``about`` whose traceback says more than its text."""
    errors = (each for each in about if isinstance(each, Exception))
    return next((exc for exc in errors if not isinstance(exc, KvshmError)), None)


def _path(part: _Part) -> CopyPath | None:
    if part.copy is None or part.peer is None or part.copy.poll() is not CopyState.DONE:
        return None
    path = getattr(part.peer.memory, "path", None)  # SupportsPath
    return path if isinstance(path, CopyPath) else CopyPath.OTHER
