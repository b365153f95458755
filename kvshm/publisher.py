"""What an engine shows the others: its slot table in one epoch, and the events about it.

Runs on the scheduler's thread.  The order is the protocol: a slot's word changes before the
event that tells of it is sent, and every slot whose bytes a step may change has left READY
and given up its leases before that step is dispatched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .counters import DRAIN_WAIT_US, DRAINED, FORCED, PUBLISHED, RETRACTED
from .marks import Marks, Run
from .records import (
    NUM_LEASE_BITS,
    RECORD_BYTES,
    BlockRecord,
    SlotState,
    pack_records,
    unpack_records,
)
from .slots import SlotTable
from .terms import BlockHash, BlockId, Generation

DRAIN_POLL_SECONDS = 0.00005


class Publication(NamedTuple):
    """A block that is known computed, ready to be shown to others."""

    block_id: BlockId
    block_hash: BlockHash
    parent: BlockHash | None
    """Hash of the block before it in its chain; None for a first block."""
    depth: int
    """Blocks before it in its chain."""


class Lame:
    """Importers that let a drain budget lapse: not waited for until they show life again.

    An importer is lame until it has both sent a heartbeat and taken a fresh lease since.
    """

    def __init__(self, tables_by_bit: Callable[[], dict[int, SlotTable]]) -> None:
        self._tables_by_bit = tables_by_bit
        self._seen: dict[int, tuple[int, int]] = {}

    def mask(self) -> int:
        """Lease bits that are not worth waiting for at present."""
        if self._seen:
            tables = self._tables_by_bit()
            for bit in [
                b for b, seen in self._seen.items() if self._recovered(tables.get(b), seen)
            ]:
                del self._seen[bit]
        return sum(1 << bit for bit in self._seen)

    def lapsed(self, bits: int) -> None:
        """These importers' leases were just overridden."""
        tables = self._tables_by_bit()
        for bit in range(NUM_LEASE_BITS):
            if bits >> bit & 1:
                table = tables.get(bit)
                self._seen[bit] = (table.heartbeat, table.leases_taken) if table else (-1, -1)

    @staticmethod
    def _recovered(table: SlotTable | None, seen: tuple[int, int]) -> bool:
        return table is not None and table.heartbeat != seen[0] and table.leases_taken != seen[1]


class Exports:
    """The exporter's side of one epoch.  Single-threaded; blocks only in ``settle``."""

    def __init__(
        self,
        table: SlotTable,
        send: Callable[[bytes], None],
        lame: Lame,
        budget_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = table
        self._send = send
        self._lame = lame
        self._budget = budget_seconds
        self._clock = clock
        self._draining: list[BlockId] = []
        self._outbox: list[bytes] = []

    def publish(self, blocks: Sequence[Publication]) -> set[BlockId]:
        """Make blocks readable by others; the caller vouches that they are computed and
        complete.  Returns those that are now READY (a slot still draining is left out)."""
        if not blocks:
            return set()
        records = pack_records(
            BlockRecord(b.block_hash, b.block_id, Generation(0), b.depth) for b in blocks
        )
        parents = b"".join((b.parent or bytes(8))[:8] for b in blocks)
        published = self.table.publish(records, parents)
        if published:
            self._outbox.append(published)
        ids = {record.block_id for record in unpack_records(published)}
        self.table.counters.add(PUBLISHED, len(ids))
        return ids

    def publish_marked(self, marks: Marks, pool: Sequence[Any], runs: list[Run]) -> list[Run]:
        """Make the runs' blocks readable by others as far as vLLM has hashed them; the caller
        vouches that they are computed.  Sends the events.  Returns the runs that are not
        through."""
        published, left = self.table.publish_marked(marks.packed, pool, runs)
        if published:
            if self._outbox:  # what was withdrawn before is told first
                self.flush()
            self._send(published)
        return left

    def retract(self, blocks: Iterable[BlockId]) -> None:
        """Withdraw blocks at once: no new lease succeeds from here on.  Leases still held
        are waited for in ``settle``."""
        ids = blocks if isinstance(blocks, list) else list(blocks)
        records, draining = self.table.retract(ids)
        if records:
            self._outbox.append(records)
            self._draining.extend(draining)
            self.table.counters.add(RETRACTED, len(records) // RECORD_BYTES)

    def retract_marked(self, marks: Marks, blocks: Sequence[Any]) -> bool:
        """The same for pool blocks that get new contents, as far as they are published: nothing
        is known of them from here on.  Whether some were."""
        records, draining = self.table.retract_marked(marks.packed, blocks)
        if not records:
            return False
        self._outbox.append(records)
        self._draining.extend(draining)
        return True

    def settle(self) -> None:
        """Before every dispatch: wait for leases on retracted blocks within one budget, then
        override the rest, and send the step's events."""
        if self._draining:
            self._drain()
        if self._outbox:
            self.flush()

    def flush(self) -> None:
        """Send the events collected so far; never blocks."""
        batch, self._outbox = b"".join(self._outbox), []
        if batch:
            self._send(batch)

    def _drain(self) -> None:
        started = self._clock()
        waiting, self._draining = self._draining, []
        lame, drained, forced = self._lame.mask(), 0, 0
        while True:
            left = self.table.drain(waiting, 0)
            drained += len(waiting) - len(left)
            # Over the leases of the lame: taken back, not drained.
            waiting = self.table.drain(left, lame) if left and lame else left
            forced += len(left) - len(waiting)
            if not waiting or self._clock() - started >= self._budget:
                break
            time.sleep(DRAIN_POLL_SECONDS)
        if waiting:
            overridden, holders = self.table.force(waiting)
            self._lame.lapsed(holders)
            forced += overridden
        self.table.counters.add(FORCED, forced)
        self.table.counters.add(DRAINED, drained)
        self.table.counters.add(DRAIN_WAIT_US, round((self._clock() - started) * 1e6))

    def end(self) -> None:
        """Withdraw everything for good: every slot EMPTY, every life word 0.  Never waits:
        an importer in the middle of a copy finds out at its re-check."""
        self._draining.clear()
        self._outbox.clear()
        self.table.retire()
        self.table.reset()
        self.table.end_life(None)

    def check_integrity(self) -> list[str]:
        """Conservation law: a slot that drains is one this object waits for."""
        waiting = set(self._draining)
        return self.table.check_integrity() + [
            f"slot {i} drains, but nobody waits for it"
            for i, slot in enumerate(self.table.slots())
            if slot.state is SlotState.DRAINING and i not in waiting
        ]
