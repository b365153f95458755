"""One engine's segments, mapped read-only.

A stopped engine cannot answer: the coordinator is then asked for its table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from kvshm._base.log import engine_name
from kvshm._base.rundir import FoundFile
from kvshm._node.segment_server import SegmentClient
from kvshm._replica.index_reader import ReplicaReader
from kvshm._shm.fds import is_served
from kvshm._shm.layout import SlotState
from kvshm._shm.segment import INDEX_KIND, TABLE_KIND, SegmentName
from kvshm._shm.slot_table import Slot, SlotTableView
from kvshm.errors import CorruptSegment, KvshmError, TransportError

from .reading import PeerReading

REPLICA_SECONDS = 10.0
"""After this the replica is mapped anew: its owner may have made a larger one."""
ASK_AGAIN_SECONDS = 10.0
"""For how long an engine that has kept a look waiting is not asked again."""
_LONG_SECONDS = 0.5


@dataclass(frozen=True)
class Problem:
    segment: str
    error: KvshmError
    silent: bool = False
    """Whether the engine did not answer.  Otherwise its answer cannot be used."""
    shown: str = ""

    @property
    def text(self) -> str:
        if self.silent:
            return f"it does not answer: {self.error}; {self.shown}"
        return f"{type(self.error).__name__}: {self.error}"


class MappedEngine:
    """The segments of an engine in one epoch, or why they are not mapped.  One thread at a time."""

    def __init__(self, found: FoundFile) -> None:
        assert found.epoch is not None
        self.namespace, self.epoch, self.path = found.namespace, found.epoch, found.path
        self.table: SlotTableView | None = None
        self.replica: ReplicaReader | None = None
        self.problems: dict[str, Problem] = {}
        self.answers = False
        self.gone_since: float | None = None
        """When its socket, or its process, was first seen to be gone."""
        self.pid_here: int | None = None
        self.peers: tuple[PeerReading, ...] | None = None
        self._replica_until = self._ask_again = 0.0

    @property
    def ended(self) -> bool:
        """Whether no process serves the socket, and nothing was mapped before."""
        return self.table is None and TABLE_KIND not in self.problems

    def name(self, kind: str) -> SegmentName:
        engine = "unnamed" if self.table is None else self.table.engine
        return SegmentName(self.namespace, kind, engine, self.epoch)

    @contextmanager
    def recording_problems(self, kind: str) -> Iterator[None]:
        """Record a KvshmError within this context as the problem of that segment."""
        try:
            yield
        except KvshmError as exc:
            self._record(kind, exc)

    def _record(self, kind: str, exc: KvshmError) -> None:
        segment = f"kvshm.{self.namespace}.{kind}.{self.epoch:016x}"
        self.problems[kind] = Problem(segment, exc)

    def fetch(self, clock: Callable[[], float]) -> None:
        """Map what is missing or old.  Blocks for some seconds at most if the engine is stopped."""
        if self.gone_since is not None and self.table is not None:
            return
        segments = SegmentClient(self.path.parent, self.namespace)
        if (self.table is None or not self.answers) and clock() >= self._ask_again:
            began = clock()
            self._fetch_table(segments)
            if not self.answers and clock() - began > _LONG_SECONDS:
                self._ask_again = clock() + ASK_AGAIN_SECONDS
        problem = self.problems.get(TABLE_KIND)
        answers = self.answers or (problem is not None and not problem.silent)
        if answers and clock() >= self._replica_until:
            self._fetch_replica(segments)
            self._replica_until = clock() + REPLICA_SECONDS

    def _fetch_table(self, segments: SegmentClient) -> None:
        try:
            self._map_table(segments.view(self.epoch))
            self.answers = True
        except KvshmError as exc:
            if self.table is not None or not is_served(self.path):
                return
            if isinstance(exc.__cause__, TransportError):
                self._ask_coordinator(segments, exc)
            else:
                self._record(TABLE_KIND, exc)

    def _ask_coordinator(self, segments: SegmentClient, silence: KvshmError) -> None:
        try:
            self._map_table(segments.table_from_coordinator(self.epoch))
            shown = "its table is shown by the coordinator, its replica is not"
        except KvshmError as exc:
            shown = f"nothing of it is shown, since the coordinator has no table of it: {exc}"
        who = f"engine {engine_name(self.epoch)}"
        self.problems[TABLE_KIND] = Problem(who, silence, True, shown)

    def _map_table(self, table: SlotTableView) -> None:
        if self.table is not None:
            self.table.close()
        self.table = table
        self.problems.pop(TABLE_KIND, None)

    def _fetch_replica(self, segments: SegmentClient) -> None:
        with self.recording_problems(INDEX_KIND):  # what is mapped stays
            newer = segments.replica(self.epoch)
            if self.replica is not None:
                self.replica.close()
            self.replica = newer
            self.problems.pop(INDEX_KIND, None)

    def close(self) -> None:
        """Unmap everything.  Idempotent."""
        for mapped in (self.table, self.replica):
            if mapped is not None:
                mapped.close()
        self.table = self.replica = None


class MappedNamespace(NamedTuple):
    name: str
    coordinated: bool
    engines: list[MappedEngine]


def still_there(engine: MappedEngine) -> bool:
    return not engine.ended or os.path.lexists(engine.path)


def lease_bits(slot: Slot) -> list[int]:
    """Return the lease bits that are set."""
    return [bit for bit in range(slot.leases.bit_length()) if slot.leases >> bit & 1]


def slots_in_use(table: SlotTableView) -> Iterator[tuple[int, Slot]]:
    """Yield the block ids and slots that are not EMPTY, without those in an unknown state."""
    for block in range(table.num_blocks):
        try:
            slot = table.slot(block)
        except CorruptSegment:
            continue
        if slot.state is not SlotState.EMPTY:
            yield block, slot
