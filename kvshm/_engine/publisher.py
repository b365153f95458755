"""The exporter's side: publishes blocks in the own slot table and sends the events about them.

The protocol is the order of operations: a slot's word changes before its event is sent; every slot
whose bytes a step may change has left READY, and its leases, before that step is dispatched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvshm._base.ids import BlockId
from kvshm._shm.layout import NUM_LEASE_BITS, RECORD_BYTES
from kvshm._shm.slot_table import PeerSlotTable
from kvshm._shm.statistics import DRAIN_WAIT, DRAIN_WAIT_US, DRAINED, FORCED, PUBLISHED, RETRACTED

from .epoch_state import EpochState, HasEpoch
from .marks import Marks, Run

DRAIN_POLL_SECONDS = 0.00005


class SlowImporters:
    """Importers for which a whole drain budget was spent: their leases are not waited for.  An
    importer stays slow until it has sent a heartbeat and has taken a new lease."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def mask(self, tables_by_bit: Callable[[], Mapping[int, PeerSlotTable]]) -> int:
        if self._seen:
            tables = tables_by_bit()
            self._seen = {
                bit: seen
                for bit, seen in self._seen.items()
                if not _has_recovered(tables.get(bit), seen)
            }
        return sum(1 << bit for bit in self._seen)

    def timed_out(self, bits: int, tables: Mapping[int, PeerSlotTable]) -> None:
        """Add the importers with these lease bits: their leases were just overridden."""
        for bit in range(NUM_LEASE_BITS):
            if bits >> bit & 1:
                table = tables.get(bit)
                self._seen[bit] = (table.heartbeat, table.leases_taken) if table else (-1, -1)


def _has_recovered(table: PeerSlotTable | None, seen: tuple[int, int]) -> bool:
    return table is not None and table.heartbeat != seen[0] and table.leases_taken != seen[1]


class Publisher:
    """Publishes and retracts in the present epoch; without an epoch nothing happens.
    Single-threaded; blocks only in ``drain_before_dispatch``."""

    def __init__(
        self,
        cache: HasEpoch,
        send: Callable[[bytes], None],
        budget_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._send = send
        self._budget = budget_seconds
        self._clock = clock
        self._slow = SlowImporters()

    def publish_marked(self, marks: Marks, pool: Sequence[Any], runs: list[Run]) -> list[Run]:
        """Publish those blocks of the runs that have a hash in ``pool``, every byte of which is
        written on every rank.  Returns the runs of which a block is left: without a hash yet, or
        still draining; all if this engine does not export."""
        epoch = self._cache.epoch_state
        if epoch is None or self._cache.role.no_exports:
            return runs
        published, left = epoch.table.publish_marked(marks.packed, pool, runs)
        if published:
            self.flush()  # earlier retracts are sent first
            self._send(published)
        return left

    def publish(self, records: bytes, parents: bytes) -> int:
        """Publish blocks, every byte of which is written on every rank (``OwnSlotTable.publish``),
        and send their events.  Returns how many are readable now."""
        epoch = self._cache.epoch_state
        if epoch is None or self._cache.role.no_exports:
            return 0
        published = epoch.table.publish(records, parents)
        if published:
            epoch.table.counters.add(PUBLISHED, len(published) // RECORD_BYTES)
            self.flush()  # earlier retracts are sent first
            self._send(published)
        return len(published) // RECORD_BYTES

    def retract(self, blocks: Sequence[BlockId]) -> None:
        """Retract published blocks at once; ``drain_before_dispatch`` waits for their leases."""
        if (epoch := self._cache.epoch_state) is not None:
            records, draining = epoch.table.retract(blocks)
            epoch.outbox.append(records)
            epoch.draining.extend(draining)
            epoch.table.counters.add(RETRACTED, len(records) // RECORD_BYTES)

    def retract_marked(self, marks: Marks, blocks: Sequence[Any]) -> bool:
        """Clear the marks of pool blocks that get new contents; whether some were published."""
        if (epoch := self._cache.epoch_state) is None:
            marks.clear(blocks)
            return False
        records, draining = epoch.table.retract_marked(marks.packed, blocks)
        if not records:
            return False
        epoch.outbox.append(records)
        epoch.draining.extend(draining)
        return True

    def drain_before_dispatch(self) -> None:
        """Wait for the leases on retracted blocks within one budget, then override the rest, and
        send the step's events.  Call it before every dispatch, after the step's last ``retract``:
        no importer's copy of one is accepted afterwards."""
        if (epoch := self._cache.epoch_state) is not None:
            if waiting := epoch.draining:
                epoch.draining = []
                try:
                    self._drain(epoch, waiting)
                except BaseException:  # of a signal's handler: the next drain waits for them
                    epoch.draining[:0] = waiting
                    raise
            self.flush()

    def flush(self) -> None:
        """Send the events of retracted blocks; never blocks."""
        if (epoch := self._cache.epoch_state) is not None and epoch.outbox:
            batch, epoch.outbox = b"".join(epoch.outbox), []
            if batch:
                self._send(batch)

    def _drain(self, epoch: EpochState, waiting: list[BlockId]) -> None:
        started, table = self._clock(), epoch.table
        slow, drained, forced = self._slow.mask(epoch.peers.tables_by_bit), 0, 0
        while True:
            left = table.drain(waiting, 0)
            drained += len(waiting) - len(left)
            # Leases of slow importers are overridden at once, so these blocks count as forced.
            waiting = table.drain(left, slow) if left and slow else left
            forced += len(left) - len(waiting)
            if not waiting or self._clock() - started >= self._budget:
                break
            time.sleep(DRAIN_POLL_SECONDS)
        if waiting:
            overridden, holders = table.force(waiting)
            self._slow.timed_out(holders, epoch.peers.tables_by_bit())
            forced += overridden
        table.counters.add(FORCED, forced)
        table.counters.add(DRAINED, drained)
        waited = self._clock() - started
        table.counters.add(DRAIN_WAIT_US, round(waited * 1e6))
        table.histograms.observe(DRAIN_WAIT, round(waited * 1e9))
