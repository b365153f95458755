"""Looks for the blocks of a prefix: in the other engines, and in the engine's own cache.

The engine's own blocks count as well, behind its own hit: one group may have lost a block there
that the others still have.  The engine allocates new blocks for all of them, so its own ones are
copied like those of a peer.  Only published ones are, because the cache has a block from the moment
that the block is scheduled, and the slot table only once the block is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from kvshm._base.ids import BlockId
from kvshm._node.peer import PlannedRun
from kvshm._shm.layout import RECORD_BYTES, RecordKind, pack_records
from kvshm.errors import KvshmError

from .epoch_state import EpochState
from .groups import Find, Group, Groups, Part, Restorable

ONE_FULL_GROUP = Groups([Group(0, 1)])
NOTHING = Restorable(0, 0, (), ())
_PUBLISH = int(RecordKind.PUBLISH)


class PrefixSearch:
    """Finds what the groups of one engine can restore.  Scheduler's thread; nothing blocks."""

    def __init__(self) -> None:
        self.groups = ONE_FULL_GROUP
        self.own_blocks: Callable[[Iterable[bytes], int], list[BlockId]] = lambda digests, group: []
        """``(hashes, group)``: the blocks of these keys in the engine's own cache, before the first
        that it has not."""
        self.last_own: Callable[[Sequence[bytes], int], int] = self._last_own
        """``(hashes, group)``: how many of these keys there are up to the last one that the own
        cache has."""

    def _last_own(self, hashes: Sequence[bytes], group: int) -> int:
        places = range(len(hashes), 0, -1)
        return next((i for i in places if self.own_blocks(hashes[i - 1 : i], group)), 0)

    def longest(
        self, epoch: EpochState, hashes: Sequence[bytes], start: int, stop: int, most: int
    ) -> Restorable:
        """Find the longest prefix of at most ``stop`` hashes that can be restored behind a local
        hit of ``start`` hashes.  Changes nothing.  Without ``runs`` there is none.  ``most``:
        blocks to which one group of full attention is cut; a part of anything else is of no use."""
        if not self.groups.is_single_full_attention:
            find = _Finder(self, epoch, hashes)
            return self.groups.longest(start, stop, len(hashes), find)
        if not (runs := epoch.peers.lookup(hashes, start, min(stop, start + most))):
            return NOTHING
        found = sum(map(len, [run.records for run in runs])) // RECORD_BYTES
        return Restorable(start + found, 0, (Part(0, start, found),), tuple(runs))

    def finder(self, epoch: EpochState, hashes: Sequence[bytes]) -> Find:
        """Return what finds the blocks of one prompt."""
        return _Finder(self, epoch, hashes)

    def hold(self, epoch: EpochState, hashes: Sequence[bytes], seconds: float, number: int) -> int:
        """Hold the blocks of group ``number`` in one place each: in the own cache where it has
        published them, else at the peers that a lookup names.  Returns how many were found.
        IndexError if there is no such group."""
        group, find = self.groups.all[number], _Finder(self, epoch, hashes)
        own, held, index, stop = list[bytes](), 0, 0, len(hashes) // group.scale
        while index < stop:
            runs = find.own(group, index, index + 1)
            own += [run.records for run in runs]
            if not runs:
                runs = find.remote(group, index, stop)
                for run in runs:
                    with suppress(KvshmError):  # a table that somebody spoilt
                        held += run.peer.table.hold(run.records, seconds)
            index += sum(run.num_blocks for run in runs) or 1
        return held + epoch.table.hold(b"".join(own), seconds)


class _Finder:
    """Finds runs of blocks of one prompt."""

    def __init__(self, search: PrefixSearch, epoch: EpochState, hashes: Sequence[bytes]) -> None:
        self._search = search
        self._epoch = epoch
        self._hashes = hashes

    def __call__(self, group: Group, first: int, stop: int) -> tuple[list[PlannedRun], int]:
        runs = list[PlannedRun]()
        while first < stop:
            if not (found := self.remote(group, first, stop) or self.own(group, first, stop)):
                break
            runs += found
            for run in found:
                first += len(run.records) // RECORD_BYTES
        return runs, first

    def last(self, group: Group, start: int, stop: int) -> int:
        """The index behind the last of these blocks that somebody seems to hold; or ``start``."""
        hashes, scale, number = self._hashes, group.scale, group.number
        reached = self._epoch.peers.last(hashes, start, stop, group=number, scale=scale)
        own = hashes[(reached + 1) * scale - 1 : stop * scale : scale]
        return reached + self._search.last_own(own, number)

    def remote(self, group: Group, first: int, stop: int) -> list[PlannedRun]:
        """The longest run of blocks that peers seem to hold, cut where the peer changes."""
        lookup = self._epoch.peers.lookup
        return lookup(self._hashes, first, stop, group=group.number, scale=group.scale)

    def own(self, group: Group, first: int, stop: int) -> list[PlannedRun]:
        """The longest run of published blocks in the engine's own cache."""
        digests = (self._hashes[(i + 1) * group.scale - 1] for i in range(first, stop))
        blocks = self._search.own_blocks(digests, group.number)
        generations = self._epoch.table.generations(blocks)
        records = [
            (self._hashes[(i + 1) * group.scale - 1], block, generation, i, _PUBLISH, group.number)
            for i, (block, generation) in enumerate(zip(blocks, generations, strict=False), first)
        ]
        return [PlannedRun(self._epoch.own_peer, pack_records(records))] if records else []
