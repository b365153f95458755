"""What one engine knows of the other engines it may share with.

The coordinator's messages arrive on the client's thread and keep a row of the replica per
engine; the scheduler's thread looks prefixes up and tells how loads went.  A peer whose
table cannot be used is left out, a peer that keeps failing is avoided for a while; nothing
here is an error of the serving path.

The scheduler's thread waits for nobody: it reads a view that the client's thread replaces as a
whole, and what it has to say to the replica the replica's writer does (kvshm/replica/index.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvshm.errors import KvshmError, SegmentNotFound, SegmentNotReady
from kvshm.ids import Epoch, LeaseBit
from kvshm.log import engine_name, logger
from kvshm.replica.index import Replica, StaleRecords
from kvshm.shm.counters import (
    MISS_FINGERPRINT,
    MISS_NO_OWNER,
    MISS_NO_PEER,
    MISS_QUARANTINED,
    Counter,
)
from kvshm.shm.layout import RECORD_BYTES, RowState
from kvshm.shm.slot_table import PeerSlotTable
from kvshm.timing import TIMING, Timing

from .handout import Handouts
from .peer import Peer, PlannedRun, check_table
from .peer_list import PeerList
from .protocol import EngineInfo
from .rescans import Rescans
from .retries import Later

log = logger(__name__)

INITIAL_CAPACITY = 1 << 16
QUARANTINE_FAILURES = 3


class _View(NamedTuple):
    """What the scheduler's thread goes by: replaced as a whole, never changed."""

    peers: dict[int, Peer]
    """All that are attached, by epoch."""
    rows: dict[int, Peer]
    """Those that have something to offer, as far as the roster says."""
    mask: int
    """Their rows as bits."""


_NOBODY = _View({}, {}, 0)


class PeersStats(NamedTuple):
    """How many peers there are."""

    attached: int
    usable: int
    """Those of them that lookups may name at the moment."""


class Peers:
    """The other engines of one fingerprint, and the replica of what they hold.

    ``joined`` to ``rescan`` run on the client's thread, the rest on the scheduler's;
    only the former open or read tables, and none raises for what a peer or the network did.
    """

    def __init__(
        self,
        namespace: str,
        engine: str,
        epoch: Epoch,
        handouts: Handouts,
        clock: Callable[[], float] = time.monotonic,
        listed: PeerList | None = None,
        timing: Timing = TIMING,
    ) -> None:
        """Create the replica of engine ``engine`` in its own ``epoch``.

        ``handouts``: where the others' tables are to be had.  ``clock`` gives seconds.
        ``listed``: where the peers are named to the own ranks.  Raises SegmentTooSmall.
        """
        self._epoch = epoch
        self._handouts = handouts
        self._clock = clock
        self._timing = timing
        self.replica = Replica.create(namespace, engine, epoch, INITIAL_CAPACITY)
        self._closed = False
        self._peers: dict[int, Peer] = {}  # the client's thread only
        self._view = _NOBODY
        self._listed = listed
        self._later = Later(clock, timing)  # the client's thread only
        self.rescans = Rescans(clock, timing)  # likewise
        self._silent_until = 0.0
        """The coordinator has just not answered: nobody is attached before, since who waits for it
        sends no heartbeats meanwhile."""
        self._avoided_until = 0.0
        """When the last peer that is avoided will be used again.  The scheduler's thread only."""
        self._complaints: set[tuple[int, str]] = set()
        self.num_incompatible = 0
        """Engines of other fingerprints on this node; set on the client's thread."""

    # -- the client's thread

    def joined(self, info: EngineInfo) -> None:
        """Attach an engine and take over what its table holds.  The own epoch is skipped."""
        if info.epoch == self._epoch:
            return
        known = self._find(info.epoch)
        if known is not None and known.info != info:
            self._drop(info.epoch)
            known = None
        if known is not None or self._attach(info):
            self.recovered(Epoch(info.epoch))
            (self.rescan if known is None else self.rescans.ask)(Epoch(info.epoch))

    def suspected(self, epoch: Epoch) -> None:
        """Keep everything of an engine but offer nothing of it."""
        self._suspect(epoch, True, RowState.SUSPECTED)

    def recovered(self, epoch: Epoch) -> None:
        """Offer a suspected engine's blocks again."""
        self._suspect(epoch, False, RowState.LIVE)

    def gone(self, epoch: Epoch) -> str:
        """Drop an engine that is gone; returns its name for the log.  Plans keep its table."""
        who = peer.info.who if (peer := self._find(epoch)) else engine_name(epoch)
        self._drop(epoch)
        self._later.forget(epoch)
        self._complaints = {c for c in self._complaints if c[0] != epoch}
        return who

    def apply_events(self, batches: Sequence[tuple[int, bytes]]) -> None:
        """Apply events, each with its engine's epoch, in order; those of an epoch that is not
        attached are dropped."""
        find = self._view.peers.get
        known = [(peer, records) for epoch, records in batches if (peer := find(epoch))]
        try:
            self.replica.apply_all([(peer.row, records) for peer, records in known])
        except (KvshmError, IndexError, ValueError):  # one of them: who sent it is found out
            for peer, records in known:
                self._apply_events_of(peer, records)

    def _apply_events_of(self, peer: Peer, records: bytes) -> None:
        try:
            self.replica.apply(peer.row, records)
        except (KvshmError, IndexError, ValueError) as exc:
            self._complain(peer.info, f"sent events that make no sense: {exc}")
            self.rescans.ask(Epoch(peer.info.epoch))

    def rescan(self, epoch: Epoch) -> None:
        """Bring the replica in line with the engine's table, now (``rescans`` when it is due)."""
        if (peer := self._find(epoch)) is None:
            return
        try:
            # The order matters: what is known before the scan begins was READY before.
            before = self.replica.tombstones(peer.row)
            self.replica.resync(peer.row, before, peer.table.scan())
        except (KvshmError, IndexError, ValueError, OSError) as exc:
            self._drop(epoch)
            self._skip(peer.info, exc)

    def attach_again(self) -> None:
        """Try engines again that could not be attached.  About once a second."""
        for info in self._later.due():
            if self._attach(info):
                self.rescan(Epoch(info.epoch))

    def look_for_deaths(self) -> None:
        """Offer nothing any more of engines of which a process has ended.  About once a second,
        with a coordinator or without; one that is there sees the death too, and cleans up."""
        for peer in self._peers.values():
            if not peer.dead and peer.table.died:
                peer.dead = True
                self._show()
                self.replica.set_row_state(peer.row, RowState.SUSPECTED)
                if not peer.table.retired:  # else it has ended its epoch in order
                    log.warning("engine %s has died", peer.info.who)

    def write_again(self) -> None:
        """Name the peers to the own ranks if that has failed.  About once a second."""
        if self._listed is not None:
            self._listed.write_again()

    # -- the scheduler's thread: nothing here waits for the client's

    def why_nobody(self) -> Counter | None:
        """Return the counter of the reason why there is nobody to look for blocks at; None if
        there is somebody."""
        if self._view.mask:
            return None
        return MISS_FINGERPRINT if self.num_incompatible else MISS_NO_PEER

    def why_missed(self, hashes: Sequence[bytes], start: int) -> Counter:
        """Return the counter of the reason why ``lookup`` found nobody for block ``start``."""
        if (reason := self.why_nobody()) is not None:
            return reason
        if (now := self._clock()) < self._avoided_until:
            rows = self._view.rows.items()
            mask = sum(1 << row for row, peer in rows if peer.avoided_until > now)
            if mask and self.replica.lookup(hashes, start, start + 1, mask):
                return MISS_QUARANTINED
        return MISS_NO_OWNER

    def lookup(self, hashes: Sequence[bytes], start: int, stop: int) -> list[PlannedRun]:
        """Return the longest prefix of ``hashes[start:stop]`` that usable peers seem to hold,
        cut into as few peers as possible.  Does not mutate."""
        view = self._view
        mask = view.mask
        while mask:
            # Before the lookup: what the writer has done since, the lookup sees.
            forgotten = list(self.replica.stale_records) if self.replica.stale_records else ()
            runs = self.replica.lookup(hashes, start, stop, mask)
            if not runs:
                break
            planned = []
            for row, records in runs:  # only who was found is looked at; then others are asked
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

    def forget(self, epoch: Epoch, records: bytes) -> None:
        """Drop packed records that could not be leased or copied: a hint was stale.  From here
        on no lookup names them."""
        if (peer := self._find(epoch)) is not None:
            self.replica.forget(peer.row, epoch, records)

    def fail(self, epoch: Epoch) -> bool:
        """Count a failed load from a peer; the third in a row puts it in quarantine, which
        is what is returned."""
        if (peer := self._find(epoch)) is None:
            return False
        peer.failures += 1
        if peer.failures < QUARANTINE_FAILURES:
            return False
        peer.failures = 0
        peer.quarantined, seconds = True, self._timing.quarantine_seconds
        self._avoid(peer, seconds)
        who, times = peer.info.who, QUARANTINE_FAILURES
        log.warning("engine %s failed %d times, avoided for %.0f s", who, times, seconds)
        return True

    def not_attached(self, epoch: Epoch) -> None:
        """A rank could not attach a peer in time: plan nothing from it until that has ended."""
        if (peer := self._find(epoch)) is not None:
            self._avoid(peer, self._timing.attach_pause_seconds)

    def _avoid(self, peer: Peer, seconds: float) -> None:
        peer.avoided_until = max(peer.avoided_until, self._clock() + seconds)
        self._avoided_until = max(peer.avoided_until, self._avoided_until)

    def attached(self, epochs: Collection[int]) -> None:
        """All own ranks have attached these peers: whoever was avoided for that is not."""
        for peer in map(self._view.peers.get, epochs):
            if peer is not None and not peer.quarantined:
                peer.avoided_until = 0.0

    def fine(self, epoch: Epoch) -> None:
        """A load from a peer went well: its failures are forgotten."""
        if (peer := self._find(epoch)) is not None:
            peer.failures, peer.quarantined = 0, False

    def tables_by_bit(self) -> dict[int, PeerSlotTable]:
        """The peers' tables by the lease bit with which they import from this engine."""
        peers = self._view.peers.values()
        return {peer.info.lease_bit: peer.table for peer in peers if peer.info.lease_bit >= 0}

    def stats(self) -> PeersStats:
        """Any thread."""
        view = self._view
        return PeersStats(len(view.peers), sum(map(self._usable, view.rows.values())))

    def close(self) -> None:
        """Forget everybody and the replica; later calls do nothing.  Idempotent."""
        self._closed = True
        self._view = _NOBODY
        self.replica.close_soon()
        if self._listed is not None:
            self._listed.end()

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<Peers [{stats.attached} attached, {stats.usable} usable]>"

    # -- inside

    def _find(self, epoch: int) -> Peer | None:
        return self._view.peers.get(epoch)

    def _show(self) -> None:
        """Let the scheduler's thread see what has changed."""
        rows = {peer.row: peer for peer in self._peers.values() if peer.offers}
        self._view = _View(dict(self._peers), rows, sum(1 << row for row in rows))
        if self._closed:  # perhaps since the line before
            self._view = _NOBODY

    def _drop(self, epoch: int) -> None:
        if (peer := self._peers.pop(epoch, None)) is not None:
            self._show()  # before its row is another's
            self.rescans.forget(Epoch(epoch))
            self.replica.drop_row(peer.row)
            self._write_list()

    def _usable(self, peer: Peer) -> bool:
        """Whether lookups may name the peer; a hint like everything here, the lease decides."""
        table = peer.table
        return not (table.retired or table.owner_died) and peer.avoided_until <= self._clock()

    def _suspect(self, epoch: Epoch, suspected: bool, state: RowState) -> None:
        self._later.suspect(epoch, suspected)
        if (peer := self._find(epoch)) is not None:
            peer.suspected = suspected
            self._show()
            self.replica.set_row_state(peer.row, state)

    def _attach(self, info: EngineInfo) -> bool:
        if self._closed:
            return False
        if self._clock() < self._silent_until:
            self._later.put(info)
            return False
        try:
            table = self._handouts.table_of_member(info.epoch, info.num_blocks, len(info.ranks))
            check_table(table, info)
            epoch, bit = Epoch(info.epoch), LeaseBit(info.lease_bit)
            row = self.replica.add_row(epoch, info.name, info.num_blocks, bit)
        except (KvshmError, OSError) as exc:
            if isinstance(exc, SegmentNotReady):
                self._silent_until = self._clock() + self._timing.handout_pause_seconds
            self._skip(info, exc)
            return False
        self._later.forget(info.epoch)
        self._peers[info.epoch] = Peer(info, table, row)
        self._show()
        self._write_list()
        return True

    def _write_list(self) -> None:
        if self._listed is not None:
            self._listed.write(peer.info for peer in self._peers.values())

    def _skip(self, info: EngineInfo, reason: Exception) -> None:
        if isinstance(reason, SegmentNotFound):  # it has left meanwhile, or begun anew
            self._later.forget(info.epoch)
            log.info("engine %s has ended its epoch: %s", info.who, reason)
            return
        self._later.put(info)
        self._complain(info, f"is left out: {reason}")

    def _complain(self, info: EngineInfo, what: str) -> None:
        """Log once per engine and kind of complaint, which is the text before the colon."""
        kind = (info.epoch, what.partition(":")[0])
        if kind not in self._complaints:
            self._complaints.add(kind)
            log.warning("engine %s %s", info.who, what)


def _is_stale(peer: Peer, records: bytes, forgotten: Collection[StaleRecords]) -> bool:
    """Whether one of the peer's packed records is among what shall not be offered any more."""
    size = RECORD_BYTES
    stale = [those.records for those in forgotten if those.epoch == peer.info.epoch]
    unwanted = {part[i : i + size] for part in stale for i in range(0, len(part), size)}
    return any(records[i : i + size] in unwanted for i in range(0, len(records), size))
