"""The peers one rank has attached: their slot tables and their memory, by epoch.

Attaching asks the peer's process and may hang with it.  So each attach has a thread of its
own: loads from other peers go on meanwhile, and a failure is remembered for a while.  It takes
many turns of threads in two busy processes, so it is done when a peer joins (kvshm/peer_list.py),
and for a load only if that has not happened yet.

Who is attached is watched, whether there is a coordinator or not: its processes by pidfds, its
export by the transport, its heartbeat in the slot table.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from .deaths import DeathWatch
from .errors import KvshmError, StaleAttachment, StillAttaching, TransportError
from .interfaces import Attachment, MemoryDescriptor, Transport
from .log import Seldom, logger
from .peer_list import PeerListReader
from .plans import Piece
from .protocol import SUSPECT_AFTER_SECONDS, EngineInfo
from .slots import SlotTable
from .terms import Epoch, Rank

log = logger(__name__)

FAILED_SECONDS = 10.0
"""How long a peer that could not be attached is not asked again."""
ATTACH_PATIENCE_SECONDS = 1.0
"""How long loads wait for an attach; it goes on without them.  A peer that hangs keeps one
request of an engine waiting so long, not each of them until its socket is given up."""
MAX_ATTACHING = 2
"""Peers attached at a time before anybody needs them."""
MAX_TRIES = 3
"""How often a peer is tried before anybody needs it."""


@dataclass(frozen=True)
class Wanted:
    """What is needed to attach a peer."""

    peer: Epoch
    table: str
    memory: Sequence[MemoryDescriptor]
    """By rank."""


@dataclass
class PeerMemory:
    """One epoch of a peer as this rank sees it: its slot table and the same rank's memory.

    Table and memory are always of one epoch (``attach`` refuses anything else), so that a
    generation in the table speaks of the bytes in the mapping.
    """

    table: SlotTable
    memory: Attachment
    _beat: int = -1
    _heard_at: float = 0.0

    @classmethod
    def attach(cls, wanted: Wanted, rank: Rank, transport: Transport) -> PeerMemory:
        """Open both.  Blocks; raises KvshmError."""
        table = SlotTable.open(wanted.table)
        try:
            if table.epoch != wanted.peer:
                raise StaleAttachment(f"{wanted.table} is of epoch {table.epoch:016x}")
            if rank >= min(len(wanted.memory), table.num_ranks):
                raise TransportError(f"peer {wanted.peer:016x} has no rank {rank}")
            return cls(table, transport.attach(wanted.memory[rank]))
        except BaseException:
            table.close()
            raise

    def ended(self, rank: Rank) -> bool:
        """Whether the peer's memory is no longer what its table says, or its export is over."""
        return not self.table.is_alive(rank) or self.memory.ended

    def silence(self, now: float) -> float:
        """Seconds since the peer's heartbeat was last seen to go on; call it now and then."""
        if (beat := self.table.heartbeat) != self._beat:
            self._beat, self._heard_at = beat, now
        return now - self._heard_at

    def close(self) -> None:
        """Unmap both: the table now, the memory after the copies from it."""
        try:
            self.memory.close()
        finally:
            self.table.close()


class _Followed:
    """A list and who it names: another thread replaces both at once."""

    def __init__(self, reader: PeerListReader | None) -> None:
        self.reader = reader
        self.listed: dict[Epoch, EngineInfo] = {}


class PeerBook:
    """The peers this rank has attached, by epoch.  Used by the load thread, and by who loads
    at once; it blocks neither, unless a method says otherwise."""

    def __init__(
        self, transport: Transport, rank: Rank, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.transport = transport
        self.rank = rank
        self._clock = clock
        self._lock = threading.Lock()
        self._peers: dict[Epoch, PeerMemory] = {}
        self._attaching: dict[Epoch, float] = {}
        """Since when, by the clock."""
        self._failed: dict[Epoch, tuple[float, str]] = {}
        self._closed = False
        self._pinned: list[Collection[Epoch]] = []
        self._followed = _Followed(None)
        self._tries: dict[Epoch, int] = {}
        self._deaths = DeathWatch()
        self.seldom = Seldom(clock)
        """A peer that hangs fails many loads; each of them is counted, and few are logged."""
        self.copying: set[object] = set()
        """The loads whose copies have begun and not ended, of both threads."""
        self.attached: frozenset[Epoch] = frozenset()
        """Peers that can be read at once.  Any thread may look; it is replaced, by another one
        only if that differs, and not changed."""

    @contextmanager
    def pinned(self, peers: Collection[Epoch]) -> Iterator[None]:
        """Keep these mapped while another thread than the load thread reads from them."""
        with self._lock:
            self._pinned.append(peers)
        try:
            yield
        finally:
            with self._lock:
                self._pinned.remove(peers)

    def find(self, piece: Piece) -> PeerMemory | None:
        """The peer of a piece, None while it is being attached, which begins on first use.

        Raises TransportError if it has died, or could not be attached, just now or a few seconds
        ago, and StillAttaching if that takes too long to be waited for, or cannot begin.
        """
        with self._lock:
            peer = self._peers.get(piece.peer)
            if peer is not None:
                if peer.memory.ended or piece.peer in self._deaths.dead():
                    raise TransportError("it has died")
                return peer
            if not piece.memory:
                raise StillAttaching("it was attached, and has been let go")
            self._check_failed(piece.peer)
            since = self._attaching.get(piece.peer)
            if since is None:
                self._begin_attach(Wanted(piece.peer, piece.table, piece.memory))
            elif self._clock() - since >= ATTACH_PATIENCE_SECONDS:
                raise StillAttaching(f"no answer within {ATTACH_PATIENCE_SECONDS:g} s")
        return None

    def may_have_died(self, epoch: Epoch, peer: PeerMemory) -> bool:
        """Whether bytes copied from the peer until now may be another's, because its process
        died and its memory with it: after the copy has ended, before it is delivered."""
        if self.transport.memory_outlives_exporter:
            return False
        with self._lock:
            self._watch(epoch, peer)
            silent = peer.silence(self._clock()) >= SUSPECT_AFTER_SECONDS
            return silent or peer.memory.ended or not self._deaths.is_whole(epoch)

    def _watch(self, epoch: Epoch, peer: PeerMemory) -> None:
        """The engine's process and, once the list has named them, those of its ranks."""
        engine = peer.table.identity
        listed = self._followed.listed
        ranks = listed[epoch].ranks if epoch in listed else ()
        of_ranks = (engine._replace(pid=r.pid, start_time=r.start_time) for r in ranks)
        self._deaths.watch(epoch, (engine, *of_ranks))

    # -- ahead of loads

    def follow(self, reader: PeerListReader | None) -> None:
        """Attach who is in this list from now on.  Any thread."""
        self._followed = _Followed(reader)

    def attach_listed(self) -> None:
        """Begin to attach peers of the list that are ready for it, a few at a time."""
        followed = self._followed
        news = followed.reader.news() if followed.reader is not None else None
        if news is not None:
            followed.listed = {Epoch(info.epoch): info for info in news}
            self._tries = {e: n for e, n in self._tries.items() if e in followed.listed}
            with self._lock:  # the list names the processes of ranks
                for epoch, peer in self._peers.items():
                    self._watch(epoch, peer)
        if followed is not self._followed:
            return  # of an epoch that has ended meanwhile
        for epoch, info in followed.listed.items():
            with self._lock:
                if len(self._attaching) >= MAX_ATTACHING or self._closed:
                    return
                known = epoch in self._peers or epoch in self._attaching or epoch in self._failed
            if known or info.imports_only or self._tries.get(epoch, 0) >= MAX_TRIES:
                continue
            if self._is_open(info):
                self._tries[epoch] = self._tries.get(epoch, 0) + 1
                memory = [rank.memory for rank in info.ranks]
                with self._lock:
                    self._begin_attach(Wanted(epoch, info.table, memory))

    def _is_open(self, info: EngineInfo) -> bool:
        """Whether the peer's rank serves its epoch yet: an engine joins before its ranks do."""
        try:
            table = SlotTable.open(info.table, writable=False)
        except (KvshmError, OSError):
            return False
        try:
            return table.life(self.rank) == info.epoch
        except IndexError:
            return False
        finally:
            table.close()

    # -- attaching

    def _check_failed(self, peer: Epoch) -> None:
        until, reason = self._failed.get(peer, (0.0, ""))
        if self._clock() < until:
            raise TransportError(reason)

    def _begin_attach(self, wanted: Wanted) -> None:
        thread = threading.Thread(
            target=self._attach, args=(wanted,), name="kvshm-attach", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as exc:
            raise TransportError(f"no thread to attach with: {exc}") from exc
        self._attaching[wanted.peer] = self._clock()

    def _attach(self, wanted: Wanted) -> None:
        """On a thread of its own."""
        peer, reason = None, ""
        try:
            peer = PeerMemory.attach(wanted, self.rank, self.transport)
        except Exception as exc:
            reason = f"{type(exc).__name__}: {exc}"
            if isinstance(exc, KvshmError):
                reason = str(exc)
            elif not isinstance(exc, OSError):  # no descriptors, for one
                log.exception("engine %016x could not be attached", wanted.peer)
        with self._lock:
            self._attaching.pop(wanted.peer, None)
            if peer is None:
                self._failed[wanted.peer] = (self._clock() + FAILED_SECONDS, reason)
            elif not self._closed:
                self._watch(wanted.peer, peer)
                self._peers[wanted.peer] = peer
                self.attached = frozenset(self._peers)
                return
        if peer is not None:
            peer.close()  # nobody waits for it any more

    def unmap_ended(self, in_use: Collection[Epoch]) -> None:
        """Unmap peers that have ended, so that their memory can be freed; not those that a
        load under way, of a peer ``in_use``, has yet to check and release."""
        now = self._clock()
        with self._lock:
            self._failed = {e: failed for e, failed in self._failed.items() if now < failed[0]}
            for peer in self._peers.values():
                peer.silence(now)
            dead = self._deaths.dead()
            kept = set(in_use).union(*self._pinned)
            ended = [
                epoch
                for epoch, peer in self._peers.items()
                if epoch not in kept and (epoch in dead or peer.ended(self.rank))
            ]
            for epoch in ended:
                self._deaths.forget(epoch)
            gone = [self._peers.pop(epoch) for epoch in ended]
            if gone:
                self.attached = frozenset(self._peers)
        _close_all(gone)

    def close(self) -> None:
        """Unmap all peers, those still being attached once they are.  No load may be under
        way.  Idempotent."""
        with self._lock:
            self._closed = True
            self._deaths.close()
            gone, self._peers = list(self._peers.values()), {}
            self.attached = frozenset()
        _close_all(gone)


def _close_all(peers: list[PeerMemory]) -> None:
    """Close each, also if closing another raises."""
    with ExitStack() as closing:
        for peer in peers:
            closing.callback(peer.close)
