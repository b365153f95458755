"""What one engine knows of the other engines it may share with.

The coordinator's messages arrive on the client's thread and keep a row of the replica per
engine; the scheduler's thread looks prefixes up and tells how loads went.  A peer whose
table cannot be used is left out, a peer that keeps failing is avoided for a while; nothing
here is an error of the serving path.

Lock order: the lock of ``Peers``, then the replica's.  Scans and events take the replica's
alone, so a lookup never waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from .counters import MISS_FINGERPRINT, MISS_NO_OWNER, MISS_NO_PEER, MISS_QUARANTINED, Counter
from .errors import CorruptSegment, KvshmError, ProtocolError, StaleAttachment
from .index import Replica
from .log import logger
from .protocol import EngineInfo
from .records import NUM_LEASE_BITS, RowState
from .segment import identity_of
from .slots import SlotTable
from .terms import NO_LEASE_BIT, Epoch, LeaseBit

log = logger(__name__)

INITIAL_CAPACITY = 1 << 16
QUARANTINE_FAILURES = 3
QUARANTINE_SECONDS = 30.0


@dataclass(eq=False, slots=True)
class Peer:
    """Another engine in one epoch: an attachment for as long as anybody holds it.

    Its table is unmapped when the last plan that holds the peer is gone, never before.
    Only what is thought of it changes, under the lock of ``Peers``.
    """

    info: EngineInfo
    table: SlotTable
    row: int
    suspected: bool = False
    failures: int = 0
    avoided_until: float = 0.0
    """Reading of the clock up to which the peer is in quarantine."""


class PeerRun(NamedTuple):
    """Consecutive blocks of one prefix that one peer seems to hold."""

    peer: Peer
    records: bytes
    """Packed block records, in the order of the prefix."""


@dataclass(frozen=True)
class PeersStats:
    """What ``Peers`` has seen so far."""

    attached: int
    usable: int
    """Those of them that lookups may name at the moment."""
    skipped: int
    """Engines left out because their table could not be used or no row was free."""
    strange_events: int
    """Batches of epochs that are not attached, or of blocks an engine does not have."""
    refused_entries: int
    """Publishes for which the replica had no room."""


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
        open_table: Callable[[str], SlotTable] = SlotTable.open,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the replica of engine ``engine`` in its own ``epoch``.

        ``clock`` gives seconds.  Raises SegmentExists or SegmentTooSmall.
        """
        self._epoch = epoch
        self._open_table = open_table
        self._clock = clock
        self._replica = Replica.create(namespace, engine, epoch, identity_of(), INITIAL_CAPACITY)
        self._lock = Lock()
        self._closed = False
        self._peers: dict[int, Peer] = {}
        self._complaints: set[tuple[int, str]] = set()
        self._skipped = 0
        self._strange_events = 0
        self.strangers = 0
        """Engines of other fingerprints on this node; set on the client's thread."""

    @property
    def replica_name(self) -> str:
        """Name of the replica's segment at the moment; ``Replica.open`` follows its growth."""
        return self._replica.name

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
            self.rescan(Epoch(info.epoch))

    def suspected(self, epoch: Epoch) -> None:
        """Keep everything of an engine but offer nothing of it."""
        self._suspect(epoch, True, RowState.SUSPECTED)

    def recovered(self, epoch: Epoch) -> None:
        """Offer a suspected engine's blocks again."""
        self._suspect(epoch, False, RowState.LIVE)

    def gone(self, epoch: Epoch) -> None:
        """Drop an engine whose epoch has ended.  Plans that hold it keep its table mapped."""
        self._drop(epoch)
        self._complaints = {c for c in self._complaints if c[0] != epoch}

    def events(self, epoch: Epoch, records: bytes) -> None:
        """Apply events of an engine; those of an epoch that is not attached are dropped."""
        peer = self._find(epoch)
        if peer is None:
            self._strange_events += 1
            return
        try:
            self._replica.apply(peer.row, records)
        except (KvshmError, IndexError, ValueError) as exc:
            self._strange_events += 1
            self._complain(peer.info, f"sent events that make no sense: {exc}")
            self.rescan(epoch)

    def rescan(self, epoch: Epoch) -> None:
        """Bring the replica in line with the engine's table: events were lost."""
        peer = self._find(epoch)
        if peer is None:
            return
        try:
            # The order matters: what is known before the scan begins was READY before.
            before = self._replica.heard(peer.row)
            self._replica.resync(peer.row, before, peer.table.scan())
        except (KvshmError, IndexError, ValueError) as exc:
            self._drop(epoch)
            self._skip(peer.info, exc)

    # -- the scheduler's thread

    def why_missed(self, hashes: Sequence[bytes], start: int) -> Counter:
        """Return the counter of the reason why ``lookup`` found nobody for block ``start``."""
        now = self._clock()
        with self._lock:
            peers = [peer for peer in self._peers.values() if self._offers(peer)]
        avoided = sum(1 << peer.row for peer in peers if peer.avoided_until > now)
        if avoided and self._replica.lookup(hashes, start, start + 1, avoided):
            return MISS_QUARANTINED
        if peers:
            return MISS_NO_OWNER
        return MISS_FINGERPRINT if self.strangers else MISS_NO_PEER

    def lookup(self, hashes: Sequence[bytes], start: int, stop: int) -> list[PeerRun]:
        """Return the longest prefix of ``hashes[start:stop]`` that usable peers seem to hold,
        cut into as few peers as possible.  Does not mutate."""
        with self._lock:
            usable = {peer.row: peer for peer in self._peers.values() if self._usable(peer)}
        if not usable:
            return []
        mask = sum(1 << row for row in usable)
        runs = self._replica.lookup(hashes, start, stop, mask)
        return [PeerRun(usable[run.row], run.records) for run in runs if run.row in usable]

    def forget(self, epoch: Epoch, records: bytes) -> None:
        """Drop packed records that could not be leased or copied: a hint was stale."""
        with self._lock:  # no row changes hands meanwhile
            peer = self._peers.get(epoch)
            if peer is not None:
                self._replica.drop(peer.row, records)

    def fail(self, epoch: Epoch) -> bool:
        """Count a failed load from a peer; the third in a row puts it in quarantine, which
        is what is returned."""
        with self._lock:
            peer = self._peers.get(epoch)
            if peer is None:
                return False
            peer.failures += 1
            if peer.failures < QUARANTINE_FAILURES:
                return False
            peer.failures = 0
            peer.avoided_until = self._clock() + QUARANTINE_SECONDS
        log.warning(
            "engine %s (pid %d) failed %d times, it is avoided for %.0f s",
            peer.info.name, peer.info.pid, QUARANTINE_FAILURES, QUARANTINE_SECONDS,
        )  # fmt: skip
        return True

    def fine(self, epoch: Epoch) -> None:
        """A load from a peer went well: its failures are forgotten."""
        with self._lock:
            peer = self._peers.get(epoch)
            if peer is not None:
                peer.failures = 0

    def tables_by_bit(self) -> dict[int, SlotTable]:
        """The peers' tables by the lease bit with which they import from this engine."""
        with self._lock:
            peers = list(self._peers.values())
        return {peer.info.lease_bit: peer.table for peer in peers if peer.info.lease_bit >= 0}

    def stats(self) -> PeersStats:
        """Any thread."""
        with self._lock:
            attached, usable = len(self._peers), sum(map(self._usable, self._peers.values()))
        refused = self._replica.refused
        return PeersStats(attached, usable, self._skipped, self._strange_events, refused)

    def close(self) -> None:
        """Forget everybody and remove the replica; later calls do nothing.  Idempotent."""
        with self._lock:
            self._closed = True
            self._peers.clear()
            self._replica.unlink()
            self._replica.close()

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<Peers [{stats.attached} attached, {stats.usable} usable]>"

    # -- inside

    def _find(self, epoch: int) -> Peer | None:
        with self._lock:
            return self._peers.get(epoch)

    def _drop(self, epoch: int) -> None:
        with self._lock:
            peer = self._peers.pop(epoch, None)
        if peer is not None:
            self._replica.drop_row(peer.row)

    def _usable(self, peer: Peer) -> bool:
        """Whether lookups may name the peer; a hint like everything here, the lease decides."""
        return self._offers(peer) and peer.avoided_until <= self._clock()

    @staticmethod
    def _offers(peer: Peer) -> bool:
        """Whether the peer itself has something to offer, quarantine aside."""
        return not (peer.suspected or peer.info.imports_only or peer.table.retired)

    def _suspect(self, epoch: Epoch, suspected: bool, state: RowState) -> None:
        with self._lock:
            peer = self._peers.get(epoch)
            if peer is not None:
                peer.suspected = suspected
                self._replica.set_row_state(peer.row, state)

    def _attach(self, info: EngineInfo) -> bool:
        try:
            table = self._open_table(info.table)
            _check_table(table, info)
            with self._lock:
                if self._closed:
                    return False
                epoch, bit = Epoch(info.epoch), LeaseBit(info.lease_bit)
                row = self._replica.add_row(epoch, info.name, info.num_blocks, bit)
                self._peers[info.epoch] = Peer(info, table, row)
        except KvshmError as exc:
            self._skip(info, exc)
            return False
        return True

    def _skip(self, info: EngineInfo, reason: Exception) -> None:
        self._skipped += 1
        self._complain(info, f"is left out: {reason}")

    def _complain(self, info: EngineInfo, what: str) -> None:
        """Log once per engine and kind of complaint, which is the text before the colon."""
        kind = (info.epoch, what.partition(":")[0])
        if kind not in self._complaints:
            self._complaints.add(kind)
            log.warning("engine %s (pid %d) %s", info.name, info.pid, what)


def _check_table(table: SlotTable, info: EngineInfo) -> None:
    """Raise unless the table is the one that the roster speaks of."""
    if table.epoch != info.epoch:
        raise StaleAttachment(
            f"{info.table} is of epoch {table.epoch:016x}, the roster says {info.epoch:016x}"
        )
    said = (info.num_blocks, len(info.ranks), info.fingerprint)
    found = (table.num_blocks, table.num_ranks, table.fingerprint)
    if said != found:
        raise CorruptSegment(
            f"{info.table} (blocks, ranks, fingerprint) is {found}, the roster says {said}"
        )
    if not NO_LEASE_BIT <= info.lease_bit < NUM_LEASE_BITS:
        raise ProtocolError(f"the roster gives it lease bit {info.lease_bit}")
