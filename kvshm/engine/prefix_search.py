"""Looks for the blocks of a prefix: in the other engines, and in the engine's own cache.

The engine's own blocks count as well, behind its own hit: one group may have lost a block there
that the others still have.  The engine allocates new blocks for all of them, so its own ones are
copied like those of a peer.  Only published ones are, because the cache has a block from the moment
that the block is scheduled, and the slot table only once the block is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvshm.ids import BlockId, block_hash
from kvshm.node.peer import PlannedRun
from kvshm.shm.layout import RECORD_BYTES, BlockRecord, pack_records

from .epoch_state import EpochState
from .groups import Group, Groups, Part, Restorable

ONE_FULL_GROUP = Groups([Group(0, 1)])
NOTHING = Restorable(0, 0, (), ())


class PrefixSearch:
    """Finds what the groups of one engine can restore.  Scheduler's thread; nothing blocks."""

    def __init__(self) -> None:
        self.groups = ONE_FULL_GROUP
        self.own_block: Callable[[bytes, int], BlockId | None] = lambda digest, group: None
        """``(hash, group)``: the block of that key in the engine's own cache."""

    def longest(
        self, epoch: EpochState, hashes: Sequence[bytes], start: int, stop: int
    ) -> Restorable:
        """Find the longest prefix of at most ``stop`` hashes that can be restored behind a local
        hit of ``start`` hashes.  Changes nothing.  Without ``runs`` there is none."""
        if not self.groups.one_full:
            find = _Finder(self, epoch, hashes)
            return self.groups.longest(start, stop, len(hashes), find)
        if not (runs := epoch.peers.lookup(hashes, start, stop)):
            return NOTHING
        found = sum(run.num_blocks for run in runs)
        return Restorable(start + found, 0, (Part(0, start, found),), tuple(runs))


class _Finder:
    """Finds runs of blocks of one prompt."""

    def __init__(self, search: PrefixSearch, epoch: EpochState, hashes: Sequence[bytes]) -> None:
        self._search = search
        self._epoch = epoch
        self._hashes = hashes

    def __call__(self, group: Group, first: int, stop: int) -> tuple[list[PlannedRun], int]:
        lookup, runs = self._epoch.peers.lookup, list[PlannedRun]()
        while first < stop:
            found = lookup(self._hashes, first, stop, group=group.number, scale=group.scale)
            found = found or self._own(group, first, stop)
            if not found:
                break
            runs += found
            for run in found:
                first += len(run.records) // RECORD_BYTES
        return runs, first

    def _own(self, group: Group, first: int, stop: int) -> list[PlannedRun]:
        """The longest run of published blocks in the engine's own cache."""
        records = []
        for index in range(first, stop):
            record = self._own_record(group, index)
            if record is None:
                break
            records.append(record)
        return [PlannedRun(self._epoch.own_peer, pack_records(records))] if records else []

    def _own_record(self, group: Group, index: int) -> BlockRecord | None:
        digest = self._hashes[(index + 1) * group.scale - 1]
        block = self._search.own_block(digest, group.number)
        if block is None:
            return None
        generation = self._epoch.table.generation_if_ready(block)
        if generation is None:
            return None
        return BlockRecord(block_hash(digest), block, generation, index, group=group.number)
