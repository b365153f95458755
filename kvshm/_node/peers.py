"""What one engine knows of the other engines it may share with.

The coordinator's messages arrive on the client's thread and keep a row of the replica for each
engine; the scheduler's thread looks prefixes up and records the results of loads.  A peer whose
table cannot be used is left out, a peer that keeps failing is not used for a while; nothing here
is an error of the serving path.

The scheduler's thread never waits: it reads a view that the client's thread replaces as a whole,
and passes its changes of the replica to the replica's writer (kvshm/_replica/index.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from kvshm._base.core_lines import CoreLine
from kvshm._base.ids import Epoch, LeaseBit
from kvshm._base.log import LogLimit, engine_name, logger
from kvshm._base.timing import TIMING, Timing
from kvshm._replica.index import Replica, StaleRecords
from kvshm._shm.layout import RECORD_BYTES, RowState
from kvshm._shm.slot_table import PeerSlotTable
from kvshm._shm.statistics import (
    MISS_FINGERPRINT,
    MISS_NO_OWNER,
    MISS_NO_PEER,
    MISS_QUARANTINED,
    Counter,
)
from kvshm.errors import KvshmError, SegmentNotFound, SegmentNotReady

from .attach_queue import AttachQueue
from .peer import Peer, PlannedRun, check_table
from .peer_list import PeerList
from .protocol import EngineInfo
from .receipt import Receipt
from .scan_queue import ScanQueue
from .segment_server import SegmentClient

log = logger(__name__)

INITIAL_CAPACITY = 1 << 16
MAX_WITHDRAWN = 1024
"""Epochs that are remembered because their blocks were withdrawn."""
QUARANTINE_FAILURES = 3
SCANNED_AT_ONCE = 1 << 15
"""Slots of a table that are scanned together.  What is copied of them holds the GIL, for less than
a millisecond: a scheduler must not stand still for a whole table."""


class _PeerView(NamedTuple):
    """The peers as the scheduler's thread sees them: replaced as a whole, never changed."""

    peers: dict[int, Peer]
    """All attached peers, by epoch."""
    rows: dict[int, Peer]
    """The peers that offer blocks according to the roster, by row."""
    mask: int
    """The keys of ``rows`` as bits."""
    tables: dict[int, memoryview]
    """The slot tables of ``rows``."""
    withdrawn: tuple[Epoch, ...] = ()
    """Of the peers that have gone: those whose blocks were withdrawn while their engine went on."""


_NO_PEERS = _PeerView({}, {}, 0, {})


class PeersStats(NamedTuple):
    """Numbers of peers."""

    attached: int
    usable: int
    """Attached peers that lookups may name now."""


class Peers:
    """The other engines of one fingerprint, and the replica of their blocks.  The sections below
    name the thread of each method.  Only methods of the client's thread open or read tables, and
    none raises because of a peer or the network."""

    def __init__(
        self,
        namespace: str,
        engine: str,
        epoch: Epoch,
        segments: SegmentClient,
        clock: Callable[[], float] = time.monotonic,
        listed: PeerList | None = None,
        timing: Timing = TIMING,
    ) -> None:
        """Create the replica of engine ``engine`` in its own ``epoch``.  ``segments``: fetches the
        peers' tables.  ``clock`` gives seconds.  ``listed``: the list that names the peers to the
        own ranks.  Raises SegmentTooSmall."""
        self._epoch = epoch
        self._segments = segments
        self._clock = clock
        self._timing = timing
        self.replica = Replica.create(namespace, engine, epoch, INITIAL_CAPACITY)
        self._closed = False
        self._peers: dict[int, Peer] = {}  # the client's thread only
        self._suspected: set[int] = set()
        """Engines that the coordinator suspects, attached or not.  The client's thread only."""
        self._view = _NO_PEERS
        self._peer_list = listed
        self._attach_queue = AttachQueue(clock, timing)  # the client's thread only
        self.scan_queue = ScanQueue(clock, timing)  # the client's thread only
        self._last_pause_end = 0.0
        """When the last pause of any peer ends.  The scheduler's thread only."""
        self._log_limit = LogLimit(math.inf, clock)
        self.num_incompatible = 0
        """Engines of other fingerprints on this node; set on the client's thread."""

    # -- the client's thread

    def joined(self, info: EngineInfo) -> None:
        """Attach an engine and read its table into the replica.  The own epoch is skipped."""
        if info.epoch == self._epoch:
            return
        known = self._find(info.epoch)
        if known is not None and known.info != info:
            self._drop(info.epoch)
            known = None
        if known is not None or self._attach(info):
            self.recovered(Epoch(info.epoch))
            (self.rescan if known is None else self.scan_queue.add)(Epoch(info.epoch))

    def suspected(self, epoch: Epoch) -> None:
        """Keep everything of an engine, but offer none of its blocks."""
        self._suspected.add(epoch)
        self._set_row_state(epoch, RowState.SUSPECTED)

    def recovered(self, epoch: Epoch) -> None:
        """Offer a suspected engine's blocks again."""
        self._suspected.discard(epoch)
        self._set_row_state(epoch, RowState.LIVE)

    def gone(self, epoch: Epoch) -> str:
        """Drop an engine that is gone; return its name for the log.  Plans keep its table."""
        who = peer.info.log_name if (peer := self._find(epoch)) else engine_name(epoch)
        self._drop(epoch)
        self._attach_queue.remove(epoch)
        self._suspected.discard(epoch)
        return who

    def apply_events(self, batches: Sequence[tuple[int, bytes]]) -> None:
        """Apply events, each with its engine's epoch, in order; those of an epoch that is not
        attached are dropped."""
        find = self._view.peers.get
        known = [(peer, records) for epoch, records in batches if (peer := find(epoch))]
        try:
            self.replica.apply_all([(peer.row, records) for peer, records in known])
        except (KvshmError, IndexError, ValueError):  # apply one by one, to find the sender
            for peer, records in known:
                self._apply_events_of(peer, records)

    def _apply_events_of(self, peer: Peer, records: bytes) -> None:
        try:
            self.replica.apply(peer.row, records)
        except (KvshmError, IndexError, ValueError) as exc:
            self._warn_once(CoreLine.BAD_EVENTS, peer.info, exc)
            self.scan_queue.add(Epoch(peer.info.epoch))

    def rescan(self, epoch: Epoch) -> None:
        """Scan the engine's table now and correct the replica (``scan_queue`` does so when due)."""
        if (peer := self._find(epoch)) is None:
            return
        try:
            for first in range(0, peer.info.num_blocks, SCANNED_AT_ONCE):
                stop = first + SCANNED_AT_ONCE
                # The order matters: entries that are known before the scan were READY before.
                before = self.replica.tombstones(peer.row, first, stop)
                self.replica.resync(peer.row, before, peer.table.scan(first, stop), first)
        except (KvshmError, IndexError, ValueError, OSError) as exc:
            self._drop(epoch)
            self._leave_out(peer.info, exc)

    def try_again(self) -> None:
        """Try again what has failed: to write the list for the own ranks, and to attach engines
        that are not suspected.  About once a second."""
        if self._peer_list is not None:
            self._peer_list.write_again()
        for info in self._attach_queue.due():
            if info.epoch not in self._suspected and self._attach(info):
                self.rescan(Epoch(info.epoch))

    def will_try_again(self, epoch: int) -> bool:
        """Whether an engine could not be attached, and may be later."""
        return epoch in self._attach_queue and epoch not in self._suspected

    def look_for_deaths(self) -> None:
        """Offer no blocks of dead engines any more.  About once a second, with or without a
        coordinator; a coordinator sees the death too, and cleans up."""
        for peer in self._peers.values():
            if not peer.dead and peer.table.died:
                peer.dead = True
                self._update_view()
                self.replica.set_row_state(peer.row, RowState.SUSPECTED)
                if not peer.table.retired:  # else it has ended its epoch in order
                    log.line(CoreLine.PEER_DIED, peer.info.log_name)

    # -- the scheduler's thread: nothing here waits for the client's thread

    def why_no_peer(self) -> Counter | None:
        """Return the counter of the reason why no peer offers blocks; None if a peer does."""
        if self._view.mask:
            return None
        return MISS_FINGERPRINT if self.num_incompatible else MISS_NO_PEER

    def why_missed(
        self, hashes: Sequence[bytes], start: int, *, group: int = 0, scale: int = 1
    ) -> Counter:
        """Return the counter of the reason why ``lookup`` found no peer for block ``start``."""
        if (reason := self.why_no_peer()) is not None:
            return reason
        if (now := self._clock()) < self._last_pause_end:
            rows = self._view.rows.items()
            mask = sum(1 << row for row, peer in rows if peer.paused_until > now)
            if mask and self.replica.lookup(hashes, start, start + 1, mask, group, scale):
                return MISS_QUARANTINED
        return MISS_NO_OWNER

    def lookup(
        self, hashes: Sequence[bytes], start: int, stop: int, *, group: int = 0, scale: int = 1
    ) -> list[PlannedRun]:
        """Return the longest prefix of the blocks from ``start`` to ``stop`` of a KV cache group
        that usable peers seem to hold, from as few peers as possible.  ``scale``: hashes
        for each block, the last of which is the block's.  Changes nothing."""
        view = self._view
        mask = view.mask
        while mask:
            # Read before the lookup: the lookup sees what the writer does in between.
            forgotten = list(self.replica.stale_records) if self.replica.stale_records else ()
            runs = self.replica.lookup(hashes, start, stop, mask, group, scale)
            if not runs:
                break
            planned = []
            for row, records in runs:  # an unusable peer is left out of the next lookup
                peer = view.rows.get(row)
                if (
                    peer is None
                    or not self._usable(peer)
                    or (forgotten and _is_stale(peer, records, forgotten))
                ):
                    mask &= ~(1 << row)
                else:
                    planned.append(PlannedRun(peer, records))
            if len(planned) == len(runs):
                return planned
        return []

    def last(
        self, hashes: Sequence[bytes], start: int, stop: int, *, group: int, scale: int
    ) -> int:
        """Return the index behind the last of these blocks that a peer seems to hold, which a
        ``lookup`` may find unusable; ``start`` if none does."""
        mask = self._view.mask
        found = self.replica.last(list(hashes), start, stop, mask, group, scale) if mask else 0
        return max(found, start)

    def offer_blocks(self) -> bool:
        """Whether a peer offers blocks.  Fast."""
        return self._view.mask != 0

    def usable_tables(self) -> Mapping[int, memoryview]:
        """The slot tables of the peers that ``lookup`` may name, by row of the replica; of none
        that is about to be stopped."""
        view, now = self._view, self._clock()
        ready = {
            row
            for row, peer in view.rows.items()
            if not (peer.table.in_drain or peer.paused_until > now)
        }
        if len(ready) == len(view.rows):
            return view.tables
        return {row: table for row, table in view.tables.items() if row in ready}

    def is_to_hear(self, receipt: Receipt) -> bool:
        """Whether the receipt is of a peer that ``lookup`` may name, and its event has yet to be
        applied."""
        peer = self._find(receipt.epoch)
        if peer is None or not self.may_use(peer) or receipt.block >= peer.info.num_blocks:
            return False
        return not self.replica.has_heard(peer.row, receipt.block, receipt.generation)

    def name_of(self, epoch: int) -> str:
        """The name of an engine, empty if it is not a peer (any more)."""
        return peer.info.name if (peer := self._find(epoch)) is not None else ""

    def keepers(self) -> frozenset[Epoch]:
        """The peers that compute nothing, and keep what others have computed."""
        return frozenset(Epoch(e) for e, peer in self._view.peers.items() if peer.table.keeps)

    def withdrawn(self) -> frozenset[Epoch]:
        """The epochs whose blocks were withdrawn while their engines went on: of peers, and of
        those that were peers before."""
        now = (Epoch(e) for e, peer in self._view.peers.items() if peer.table.withdrawn)
        return frozenset((*self._view.withdrawn, *now))

    def giving_away(self) -> frozenset[Epoch]:
        """The peers in drain of which keepers are to copy what they alone have."""
        return frozenset(Epoch(e) for e, peer in self._view.peers.items() if peer.table.gives_away)

    def in_drain(self) -> frozenset[Epoch]:
        """The peers that are about to be stopped."""
        return frozenset(Epoch(e) for e, peer in self._view.peers.items() if peer.table.in_drain)

    def may_use(self, peer: Peer) -> bool:
        """Whether ``lookup`` may still name a peer that it named before."""
        return self._view.rows.get(peer.row) is peer and self._usable(peer)

    def forget(self, epoch: Epoch, records: bytes) -> None:
        """Drop packed records that could not be leased or copied: a stale hint.  From now on no
        lookup names them."""
        if (peer := self._find(epoch)) is not None:
            self.replica.forget(peer.row, epoch, records)

    def load_failed(self, epoch: Epoch) -> bool:
        """Record a failed load from a peer.  The third in a row puts the peer into quarantine;
        returns whether it did."""
        if (peer := self._find(epoch)) is None:
            return False
        peer.failures += 1
        if peer.failures < QUARANTINE_FAILURES:
            return False
        peer.failures = 0
        peer.quarantined, seconds = True, self._timing.quarantine_seconds
        self._pause_peer(peer, seconds)
        who, times = peer.info.log_name, QUARANTINE_FAILURES
        log.line(CoreLine.PEER_FAILED, who, times, seconds)
        return True

    def rank_not_attached(self, epoch: Epoch) -> None:
        """Record that a rank could not attach a peer in time: plan nothing from it for a while."""
        if (peer := self._find(epoch)) is not None:
            self._pause_peer(peer, self._timing.attach_pause_seconds)

    def _pause_peer(self, peer: Peer, seconds: float) -> None:
        peer.paused_until = max(peer.paused_until, self._clock() + seconds)
        self._last_pause_end = max(peer.paused_until, self._last_pause_end)

    def ranks_attached(self, epochs: Collection[int]) -> None:
        """Record that all own ranks have attached these peers: end pauses for that reason."""
        for peer in map(self._view.peers.get, epochs):
            if peer is not None and not peer.quarantined:
                peer.paused_until = 0.0

    def load_succeeded(self, epoch: Epoch) -> None:
        """Record a load from a peer without failure: forget the peer's failures."""
        if (peer := self._find(epoch)) is not None:
            peer.failures, peer.quarantined = 0, False

    def tables_by_bit(self) -> dict[int, PeerSlotTable]:
        """The peers' tables, by the lease bit that the peer sets in this engine's slots."""
        peers = self._view.peers.values()
        return {peer.info.lease_bit: peer.table for peer in peers if peer.info.lease_bit >= 0}

    def stats(self) -> PeersStats:
        """Any thread."""
        view = self._view
        return PeersStats(len(view.peers), sum(map(self._usable, view.rows.values())))

    def close(self) -> None:
        """Forget all peers and end the replica; later calls do nothing.  Idempotent."""
        self._closed = True
        self._view = _NO_PEERS
        self.replica.close()
        if self._peer_list is not None:
            self._peer_list.end()

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<Peers [{stats.attached} attached, {stats.usable} usable]>"

    # -- inside

    def _find(self, epoch: int) -> Peer | None:
        return self._view.peers.get(epoch)

    def _update_view(self, withdrawn: tuple[Epoch, ...] = ()) -> None:
        """Show changes to the scheduler's thread.  ``withdrawn``: of peers that have gone."""
        heard = [peer for epoch, peer in self._peers.items() if epoch not in self._suspected]
        rows = {p.row: p for p in heard if not (p.dead or p.info.imports_only)}
        tables = {row: peer.table.buffer for row, peer in rows.items()}
        mask, known = sum(1 << row for row in rows), (*self._view.withdrawn, *withdrawn)
        self._view = _PeerView(dict(self._peers), rows, mask, tables, known[-MAX_WITHDRAWN:])
        if self._closed:  # possibly since the line above
            self._view = _NO_PEERS

    def _drop(self, epoch: int) -> None:
        if (peer := self._peers.pop(epoch, None)) is not None:
            withdrawn = (Epoch(epoch),) if peer.table.withdrawn else ()
            self._update_view(withdrawn)  # before another peer can get the row
            self.scan_queue.remove(Epoch(epoch))
            self.replica.drop_row(peer.row)
            self._write_list()

    def _usable(self, peer: Peer) -> bool:
        """Whether lookups may name the peer.  Only a hint: the lease decides."""
        table = peer.table
        return not (table.retired or table.owner_died) and peer.paused_until <= self._clock()

    def _set_row_state(self, epoch: Epoch, state: RowState) -> None:
        if (peer := self._find(epoch)) is not None:
            self._update_view()
            self.replica.set_row_state(peer.row, state)

    def _attach(self, info: EngineInfo) -> bool:
        if self._closed:
            return False
        if self._attach_queue.is_closed:
            self._attach_queue.add(info)
            return False
        try:
            table = self._segments.roster_table(info.epoch, info.num_blocks, len(info.ranks))
            check_table(table, info)
            epoch, bit = Epoch(info.epoch), LeaseBit(info.lease_bit)
            row = self.replica.add_row(epoch, info.name, info.num_blocks, bit)
        except (KvshmError, OSError) as exc:
            if isinstance(exc, SegmentNotReady):
                self._attach_queue.close_for_a_while()
            self._leave_out(info, exc)
            return False
        self._attach_queue.remove(info.epoch)
        self._peers[info.epoch] = Peer(info, table, row)
        self._update_view()
        self._write_list()
        return True

    def _write_list(self) -> None:
        if self._peer_list is not None:
            self._peer_list.write(peer.info for peer in self._peers.values())

    def _leave_out(self, info: EngineInfo, reason: Exception) -> None:
        if isinstance(reason, SegmentNotFound):  # it has left, or has begun another epoch
            self._attach_queue.remove(info.epoch)
            log.line(CoreLine.PEER_EPOCH_ENDED, info.log_name, reason)
            return
        self._attach_queue.add(info)
        self._warn_once(CoreLine.PEER_LEFT_OUT, info, reason)

    def _warn_once(self, line: CoreLine, info: EngineInfo, reason: Exception) -> None:
        if self._log_limit.allows(line, info.epoch):
            log.line(line, info.log_name, reason)


def _is_stale(peer: Peer, records: bytes, forgotten: Collection[StaleRecords]) -> bool:
    """Whether one of the peer's packed records is forgotten, and must not be offered."""
    size = RECORD_BYTES
    stale = [those.records for those in forgotten if those.epoch == peer.info.epoch]
    unwanted = {part[i : i + size] for part in stale for i in range(0, len(part), size)}
    return any(records[i : i + size] in unwanted for i in range(0, len(records), size))
