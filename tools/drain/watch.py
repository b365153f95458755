"""The engines of a node while some of them are drained, looked at again and again."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from kvshm._base.ids import HASH_BYTES, Epoch
from kvshm._shm.layout import RECORD_BYTES
from kvshm._shm.slot_table import SlotTableView
from kvshm._shm.statistics import PUBLISHED, RETRACTED
from kvshm.errors import CorruptSegment

from ..node.mapped import MappedEngine
from ..node.reader import NodeReader
from .progress import SILENT_SECONDS, Name, Other

GROUP_BYTES = 2
"""At the end of a record."""
Kind = tuple[str, bytes]
"""Namespace and fingerprint."""


class _Seen(NamedTuple):
    epoch: Epoch
    fingerprint: bytes
    other: Other


class Watch:
    """What one look finds serves all drains.  One thread."""

    def __init__(self, reader: NodeReader) -> None:
        self._reader = reader
        self._beats: dict[tuple[str, Epoch], tuple[int, float]] = {}
        """Each engine's heartbeat, and when it was first seen."""
        self._seen: dict[str, list[_Seen]] = {}
        """By namespace."""
        self._copied: dict[str, dict[Epoch, int]] = {}
        self._grew: dict[str, float] = {}

    def look(self, kinds: Collection[Kind], now: float) -> None:
        """See what engines have, for these kinds.  Blocks as ``NodeReader.map_segments`` does."""
        self._seen = {}
        for space in self._reader.map_segments():
            tables = list(_living(space.engines))
            self._seen[space.name] = [
                _Seen(table.epoch, table.fingerprint, self._other(space.name, each, kinds, now))
                for each, table in tables
            ]
            copied = {t.epoch: t.counters.read(PUBLISHED) for _, t in tables if t.keeps}
            if copied != self._copied.get(space.name):
                self._copied[space.name], self._grew[space.name] = copied, now

    def others(self, namespace: str, epoch: Epoch, fingerprint: bytes) -> list[Other]:
        """Return the engines that were there at the last look, but this one."""
        return [
            seen.other._replace(alike=seen.fingerprint == fingerprint)
            for seen in self._seen.get(namespace, ())
            if seen.epoch != epoch
        ]

    def answers(self, namespace: str, epoch: Epoch) -> bool:
        """Whether an engine was there at the last look, and answered."""
        seen = self._seen.get(namespace, ())
        return any(each.epoch == epoch and each.other.answers for each in seen)

    def grew(self, namespace: str) -> float:
        """Return when it was last seen that a keeper had copied more than before."""
        return self._grew.get(namespace, 0.0)

    def _other(
        self, namespace: str, mapped: MappedEngine, kinds: Collection[Kind], now: float
    ) -> Other:
        table = mapped.table
        assert table is not None
        known = self._beats.get((namespace, mapped.epoch))
        if known is None or known[0] != table.heartbeat:
            known = self._beats[namespace, mapped.epoch] = table.heartbeat, now
        shown = table.counters.read(PUBLISHED) - table.counters.read(RETRACTED)
        return Other(
            name=table.engine,
            pid=table.pid,
            alike=False,
            names=names_of(table) if (namespace, table.fingerprint) in kinds else frozenset(),
            keeps=table.keeps,
            in_drain=table.in_drain,
            answers=mapped.answers and now - known[1] < SILENT_SECONDS,
            age=table.age_seconds,
            filled=shown / table.num_blocks,
        )


def names_of(table: SlotTableView) -> set[Name]:
    """The blocks that others can read; none of a table that contradicts itself.  There may be
    hundreds of thousands: so a name is not made of more than two slices."""
    try:
        packed = table.scan()
    except CorruptSegment:
        return set()
    return {
        packed[at : at + HASH_BYTES] + packed[at + RECORD_BYTES - GROUP_BYTES : at + RECORD_BYTES]
        for at in range(0, len(packed), RECORD_BYTES)
    }


def _living(engines: Collection[MappedEngine]) -> Iterator[tuple[MappedEngine, SlotTableView]]:
    for each in engines:
        table = each.table
        if table is not None and table.alive and not (table.died or table.retired):
            yield each, table
