"""The peers one rank has attached: their slot tables and their memory, by epoch.

Attaching asks the peer's process and may hang with it.  So each attach has a thread of its
own: loads from other peers go on meanwhile, and a failure is remembered for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass

from .errors import KvshmError, StaleAttachment, StillAttaching, TransportError
from .interfaces import Attachment, Transport
from .log import logger
from .plans import Piece
from .slots import SlotTable
from .terms import Epoch, Rank

log = logger(__name__)

FAILED_SECONDS = 10.0
"""How long a peer that could not be attached is not asked again."""
ATTACH_PATIENCE_SECONDS = 1.0
"""How long loads wait for an attach; it goes on without them.  A peer that hangs keeps one
request of an engine waiting so long, not each of them until its socket is given up."""


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
        table = SlotTable.open(piece.table)
        try:
            if table.epoch != piece.peer:
                raise StaleAttachment(f"{piece.table} is of epoch {table.epoch:016x}")
            if rank >= min(len(piece.memory), table.num_ranks):
                raise TransportError(f"peer {piece.peer:016x} has no rank {rank}")
            return cls(table, transport.attach(piece.memory[rank]))
        except BaseException:
            table.close()
            raise

    def ended(self, rank: Rank) -> bool:
        """Whether the peer's memory is no longer what its table says."""
        return self.table.retired or self.table.life(rank) != self.table.epoch

    def close(self) -> None:
        """Unmap both: the table now, the memory after the copies from it."""
        try:
            self.memory.close()
        finally:
            self.table.close()


class PeerBook:
    """The peers this rank has attached, by epoch.  Used by the load thread, which it
    never blocks."""

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

    def find(self, piece: Piece) -> PeerMemory | None:
        """The peer of a piece, None while it is being attached, which begins on first use.

        Raises TransportError if it could not be attached, just now or a few seconds ago, and
        StillAttaching if that takes too long to be waited for.
        """
        with self._lock:
            peer = self._peers.get(piece.peer)
            if peer is not None:
                return peer
            self._check_failed(piece.peer)
            since = self._attaching.get(piece.peer)
            if since is None:
                self._begin_attach(piece)
            elif self._clock() - since >= ATTACH_PATIENCE_SECONDS:
                raise StillAttaching(f"no answer within {ATTACH_PATIENCE_SECONDS:g} s")
        return None

    def _check_failed(self, peer: Epoch) -> None:
        until, reason = self._failed.get(peer, (0.0, ""))
        if self._clock() < until:
            raise TransportError(reason)

    def _begin_attach(self, piece: Piece) -> None:
        thread = threading.Thread(
            target=self._attach, args=(piece,), name="kvshm-attach", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as exc:
            raise TransportError(f"no thread to attach with: {exc}") from exc
        self._attaching[piece.peer] = self._clock()

    def _attach(self, piece: Piece) -> None:
        """On a thread of its own."""
        peer, reason = None, ""
        try:
            peer = PeerMemory.attach(piece, self.rank, self.transport)
        except Exception as exc:
            reason = f"{type(exc).__name__}: {exc}"
            if isinstance(exc, KvshmError):
                reason = str(exc)
            else:
                log.exception("engine %016x could not be attached", piece.peer)
        with self._lock:
            self._attaching.pop(piece.peer, None)
            if peer is None:
                self._failed[piece.peer] = (self._clock() + FAILED_SECONDS, reason)
            elif not self._closed:
                self._peers[piece.peer] = peer
                return
        if peer is not None:
            peer.close()  # nobody waits for it any more

    def unmap_ended(self, in_use: Collection[Epoch]) -> None:
        """Unmap peers that have ended, so that their memory can be freed; not those that a
        load under way, of a peer ``in_use``, has yet to check and release."""
        now = self._clock()
        with self._lock:
            self._failed = {e: failed for e, failed in self._failed.items() if now < failed[0]}
            ended = [
                epoch
                for epoch, peer in self._peers.items()
                if epoch not in in_use and peer.ended(self.rank)
            ]
            gone = [self._peers.pop(epoch) for epoch in ended]
        _close_all(gone)

    def close(self) -> None:
        """Unmap all peers, those still being attached once they are.  No load may be under
        way.  Idempotent."""
        with self._lock:
            self._closed = True
            gone, self._peers = list(self._peers.values()), {}
        _close_all(gone)


def _close_all(peers: list[PeerMemory]) -> None:
    """Close each, also if closing another raises."""
    with ExitStack() as closing:
        for peer in peers:
            closing.callback(peer.close)
