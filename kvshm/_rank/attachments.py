"""The peers that one rank has attached: their slot tables and their memory, by epoch.

A peer's process may hang while it is attached, so each attach has a thread of its own.  A rank
attaches a peer when the peer joins (kvshm/_node/peer_list.py), since an attach takes many thread
switches in two busy processes, and for a load only if that has not happened yet.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from kvshm._base.core_lines import CoreLine
from kvshm._base.ids import Epoch, LeaseBit, Rank
from kvshm._base.log import LogLimit, engine_name, logger
from kvshm._base.resources import start_thread
from kvshm._engine.load_plan import Piece
from kvshm._node.peer_list import PeerListReader
from kvshm._node.protocol import EngineInfo
from kvshm._node.segment_server import SegmentClient
from kvshm._shm.slot_table import PeerSlotTable
from kvshm.errors import KvshmError, SegmentNotFound, StillAttaching, TransportError
from kvshm.interfaces import Attachment, MemoryDescriptor, SupportsThreads, Transport

from .optional_calls import call_optional

log = logger(__name__)

FAILED_SECONDS = 10.0
"""Pause before a peer that could not be attached is asked again."""
ATTACH_WAIT_SECONDS = 1.0
"""How long loads wait for an attach, which then goes on without them."""
TIDY_SECONDS = 1.0
"""How often a rank looks for peers that have ended and for new ones."""
MAX_ATTACHING = 2
"""Peers that are attached at the same time ahead of loads."""
MAX_TRIES = 3
"""How often a rank tries to attach a peer ahead of loads."""


@dataclass
class PeerMemory:
    """A peer's slot table and the memory of the same rank, of one epoch: so a generation in the
    table holds for the bytes in the mapping."""

    table: PeerSlotTable
    memory: Attachment

    def ended(self, rank: Rank) -> bool:
        """Whether the peer's life word or its export has ended."""
        return not self.table.is_alive(rank) or self.memory.ended

    def close(self) -> None:
        """Unmap both: the table now, the memory after the copies from it."""
        try:
            self.memory.close()
        finally:
            self.table.close()


class _PeerListState:
    """A list of peers, its entries and what was tried.  Another thread replaces all together."""

    def __init__(self, reader: PeerListReader | None) -> None:
        self.reader = reader
        self.listed: dict[Epoch, EngineInfo] = {}
        self.tries: dict[Epoch, int] = {}
        """Attaches of listed peers, ahead of loads."""


class AttachmentCache:
    """The peers this rank has attached, by epoch.  Used by the load thread, and by the main thread
    for loads at once; methods do not block unless they say so."""

    def __init__(
        self,
        transport: Transport,
        rank: Rank,
        segments: SegmentClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.transport = transport
        self.rank = rank
        self._segments = segments
        self._clock = clock
        self._lock = threading.Lock()
        self._peers: dict[Epoch, PeerMemory] = {}
        self._attaching: dict[Epoch, float] = {}
        """When the attach began."""
        self._failed: dict[Epoch, tuple[float, str]] = {}
        self._closed = False
        self._pinned: list[Collection[Epoch]] = []
        self._peer_list = _PeerListState(None)
        self._early: dict[Epoch, PeerSlotTable] = {}
        """Tables of peers whose rank does not serve its memory yet: an engine joins before its
        ranks open the epoch, with their first step."""
        self.log_limit = LogLimit(clock=clock)
        """Limits log lines: a peer that hangs makes many loads fail, all of which are counted."""
        self.copying: set[object] = set()
        """The loads of both threads whose copies are under way."""
        self.attached: frozenset[Epoch] = frozenset()
        """Peers that can be read at once.  Any thread may read it.  The set is never changed, only
        replaced, and only by a different one."""

    @contextmanager
    def pinned(self, peers: Collection[Epoch]) -> Iterator[None]:
        """Keep these peers mapped while a thread other than the load thread reads from them."""
        with self._lock:
            self._pinned.append(peers)
        try:
            yield
        finally:
            with self._lock:
                self._pinned.remove(peers)

    def find(self, piece: Piece) -> PeerMemory | None:
        """Return a piece's peer, or None while the peer is being attached; the first call begins
        that.  Raises TransportError if the peer has died, or could not be attached within the last
        FAILED_SECONDS, and StillAttaching if the attach takes too long or cannot begin, and if the
        peer's rank serves no memory: not yet, or no more."""
        with self._lock:
            peer = self._peers.get(piece.peer_epoch)
            if peer is not None:
                if peer.memory.ended or peer.table.died:
                    raise TransportError("it has died")
                return peer
            if not piece.memory:
                raise StillAttaching("it was attached, and has been let go")
            until, reason = self._failed.get(piece.peer_epoch, (0.0, ""))
            if self._clock() < until:
                raise TransportError(reason)
            early = self._early.get(piece.peer_epoch)
            if early is not None and early.life(self.rank) != piece.peer_epoch:
                raise StillAttaching("its rank serves no memory")
            since = self._attaching.get(piece.peer_epoch)
            if since is None:
                self._begin_attach(piece.peer_epoch, piece.memory)
            elif self._clock() - since >= ATTACH_WAIT_SECONDS:
                raise StillAttaching(f"no answer within {ATTACH_WAIT_SECONDS:g} s")
        return None

    # -- ahead of loads

    def follow(self, reader: PeerListReader | None) -> None:
        """Attach the peers in this list from now on.  Any thread."""
        self._peer_list = _PeerListState(reader)

    def name_of(self, peer: Epoch) -> str:
        """Return the name of a peer for the log, listed or not.  Any thread."""
        info = self._peer_list.listed.get(peer)
        return info.log_name if info is not None else engine_name(peer)

    def attach_listed(self) -> None:
        """Begin to attach listed peers that serve their memory, MAX_ATTACHING at a time."""
        followed = self._peer_list
        news = followed.reader.read_new() if followed.reader is not None else None
        if news is not None:
            followed.listed = {Epoch(info.epoch): info for info in news}
            followed.tries = {e: n for e, n in followed.tries.items() if e in followed.listed}
            self._close_early(followed.listed)
        if followed is not self._peer_list:
            return  # the list's epoch has ended meanwhile
        for epoch, info in followed.listed.items():
            with self._lock:
                if len(self._attaching) >= MAX_ATTACHING or self._closed:
                    return
                known = epoch in self._peers or epoch in self._attaching or epoch in self._failed
                early, tries = self._early.get(epoch), followed.tries.get(epoch, 0)
                if known or info.imports_only or tries >= MAX_TRIES:
                    continue
                if early is not None and early.life(self.rank) != epoch:
                    continue
                followed.tries[epoch] = tries + 1
                self._begin_attach(epoch, [rank.memory for rank in info.ranks])

    # -- attaching

    def _begin_attach(self, epoch: Epoch, memory: Sequence[MemoryDescriptor]) -> None:
        thread = threading.Thread(
            target=self._attach, args=(epoch, memory), name="kvshm-attach", daemon=True
        )
        start_thread(thread)
        self._attaching[epoch] = self._clock()

    def _attach(self, epoch: Epoch, memory: Sequence[MemoryDescriptor]) -> None:
        """On a thread of its own."""
        peer, reason = None, ""
        call_optional(self.transport, SupportsThreads.enter_thread)
        try:
            peer = self._open(epoch, memory)
        except Exception as exc:  # any: loads that wait for this peer must learn that it failed
            reason = f"{type(exc).__name__}: {exc}"
            if isinstance(exc, KvshmError):
                reason = str(exc)
            elif not isinstance(exc, OSError):  # an OSError: for example, no descriptors left
                log.line(CoreLine.ATTACH_FAILED, self.name_of(epoch), exc_info=True)
        with self._lock:
            self._attaching.pop(epoch, None)
            if reason:
                self._failed[epoch] = (self._clock() + FAILED_SECONDS, reason)
            elif peer is not None and not self._closed:
                self._peers[epoch] = peer
                self.attached = frozenset(self._peers)
                return
        if peer is not None:
            peer.close()  # the cache was closed meanwhile

    def _open(self, epoch: Epoch, memory: Sequence[MemoryDescriptor]) -> PeerMemory | None:
        """Open the peer's table and memory; None if the peer's rank does not serve its memory yet.
        Blocks; raises KvshmError."""
        with self._lock:
            table = self._early.pop(epoch, None)
        if table is None:
            table = self._segments.peer_table(epoch)
        try:
            if self.rank >= min(len(memory), table.num_ranks):
                raise TransportError(f"peer {epoch:016x} has no rank {self.rank}")
            if table.life(self.rank) == epoch:
                return PeerMemory(table, self.transport.attach(memory[self.rank]))
        except BaseException:
            table.close()
            raise
        with self._lock:
            self._early[epoch] = table
            self._peer_list.tries.pop(epoch, None)
        return None

    def _close_early(self, listed: Collection[Epoch]) -> None:
        with self._lock:
            gone = [self._early.pop(epoch) for epoch in list(self._early) if epoch not in listed]
        for table in gone:
            table.close()

    # -- leases

    def release(self, piece: Piece, bit: LeaseBit | int) -> None:
        """Release the leases that a piece took.  The table of a peer that is not attached is
        fetched on a thread of its own; a peer that is gone needs no release.  Raises SegmentError,
        and TransportError if no thread can be started."""
        if bit < 0 or not any(piece.taken):
            return
        with self._lock:
            peer = self._peers.get(piece.peer_epoch)
            if peer is not None:
                peer.table.release(LeaseBit(bit), piece.records, piece.taken)
                return
        who = self.name_of(piece.peer_epoch)
        args = self._segments, piece, LeaseBit(bit), who, self.log_limit
        start_thread(
            threading.Thread(target=_release, args=args, name="kvshm-release", daemon=True)
        )

    def unmap_ended(self, in_use: Collection[Epoch]) -> None:
        """Unmap peers that have ended, so that their memory can be freed, except peers ``in_use``:
        a load under way has yet to check and release their blocks."""
        now = self._clock()
        with self._lock:
            self._failed = {e: failed for e, failed in self._failed.items() if now < failed[0]}
            kept = set(in_use).union(*self._pinned)
            ended = [
                epoch
                for epoch, peer in self._peers.items()
                if epoch not in kept and peer.ended(self.rank)
            ]
            gone = [self._peers.pop(epoch) for epoch in ended]
            if gone:
                self.attached = frozenset(self._peers)
        _close_all(gone)

    def close(self) -> None:
        """Unmap all peers; a peer that is being attached is unmapped afterwards.  No load may be
        under way.  Idempotent."""
        with self._lock:
            self._closed = True
            gone, self._peers = list(self._peers.values()), {}
            self.attached = frozenset()
        _close_all(gone)
        self._close_early(())


class Tidying:
    """Once in TIDY_SECONDS, busy or not: unmap peers that have ended, attach new ones."""

    def __init__(self, attachments: AttachmentCache, clock: Callable[[], float]) -> None:
        self._attachments = attachments
        self._clock = clock
        self._due_at = clock() + TIDY_SECONDS
        self._log_limit = LogLimit(math.inf)

    def go_on(self, in_use: Callable[[], Collection[Epoch]]) -> None:
        """Tidy if it is due; the peers ``in_use`` stay.  On the load thread.  Never raises:
        without this thread every later load would wait for ever."""
        now = self._clock()
        if now < self._due_at:
            return
        self._due_at = now + TIDY_SECONDS
        try:
            self._attachments.unmap_ended(in_use())
            self._attachments.attach_listed()
        except Exception:  # any: the load thread must not end
            if self._log_limit.allows(CoreLine.TIDY_FAILED):
                log.line(CoreLine.TIDY_FAILED, exc_info=True)


def _close_all(peers: list[PeerMemory]) -> None:
    """Close each peer, even if closing another one raises."""
    with ExitStack() as closing:
        for peer in peers:
            closing.callback(peer.close)


def _release(
    segments: SegmentClient, piece: Piece, bit: LeaseBit, who: str, log_limit: LogLimit
) -> None:
    """Runs on a thread of its own.  A failure costs the exporter at most one drain budget."""
    try:
        table = segments.peer_table(piece.peer_epoch)
    except SegmentNotFound:
        return
    except KvshmError as exc:
        if log_limit.allows(CoreLine.LEASES_LEFT, who):
            log.line(CoreLine.LEASES_LEFT, who, exc)
        return
    with closing(table):
        table.release(bit, piece.records, piece.taken)
