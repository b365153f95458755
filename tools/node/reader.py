"""Looks at a node again and again, and costs its engines next to nothing.

The table of an engine is asked for once and stays mapped, read-only: later looks read memory
without the engine's help, also while it is stopped, and after its death.  Only replicas, which
their owners replace when they grow, are asked for again from time to time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvshm import _native
from kvshm._base.declined import Declined, list_declined
from kvshm._base.ids import Epoch
from kvshm._base.rundir import FoundFile, list_coordinators, list_sockets
from kvshm._base.time_namespace import clock_offset_ns
from kvshm._node.segment_server import SegmentClient
from kvshm._replica.index_reader import ReplicaReader
from kvshm._shm.fds import is_served
from kvshm._shm.slot_table import SlotTableView
from kvshm.errors import KvshmError, SegmentNotFound, TransportError

from ..fetching import coordinator_runs
from .reading import (
    Blocks,
    EngineReading,
    NamespaceReading,
    NodeReading,
    PeerReading,
    ReadersClock,
    read_peer,
    read_table,
)
from .whereabouts import pids_of

REPLICA_SECONDS = 10.0
"""How old the mapping of a replica may be: its owner may have made a larger one meanwhile."""
ASK_AGAIN_SECONDS = 10.0
"""How long an engine that has kept a look waiting is not asked again."""
_LONG_SECONDS = 0.5
ENDED_SECONDS = 60.0
"""For how long an engine is still shown after its end."""
FRESH_SECONDS = 5.0
"""How long ago a coordinator may have gone round that need not be asked whether it answers."""
ASK_SECONDS = 0.5
"""How long it may take to answer."""
PLACE_BYTES = 16
_AT_ONCE = 32


class _Mapped:
    """One engine whose table is mapped, or why it is not."""

    def __init__(self, found: FoundFile) -> None:
        assert found.epoch is not None
        self.namespace, self.epoch, self.path = found.namespace, found.epoch, found.path
        self.table: SlotTableView | None = None
        self.replica: ReplicaReader | None = None
        self.replica_until = 0.0
        self.peers: tuple[PeerReading, ...] | None = None
        """Of the last look at its replica; None: it has not been looked at."""
        self.ask_again = 0.0
        self.answers = False
        self.pid_here = 0
        self.problem = ""
        self.silent = False
        """Whether the problem is that it does not answer."""
        self.gone_since: float | None = None
        """When its socket, or its process, was first seen to be gone."""

    def close(self) -> None:
        for mapped in (self.table, self.replica):
            if mapped is not None:
                mapped.close()
        self.table = self.replica = None


class NodeReader:
    """Reads the engines of a run directory.  A context; one thread.

    ``read`` blocks for some seconds at most if an engine that it has not seen before is stopped,
    or else for milliseconds.
    """

    def __init__(
        self,
        run_dir: Path,
        namespace: str | None = None,
        *,
        replicas: bool = True,
        in_turn: bool = False,
        clock: Callable[[], float] = time.monotonic,
        clock_offset: Callable[[], int | None] = clock_offset_ns,
    ) -> None:
        """``namespace``: only this one (None: all).  ``replicas``: read ``EngineReading.peers``,
        too.  ``in_turn``: do not read all slots at each look, but in turn those of the tables
        (``EngineReading.blocks``) and, against these, one replica (``peers``): with many large
        tables a look then takes a tenth of the time.  What has not been read before is read at
        once.  ``clock``: CLOCK_MONOTONIC in seconds; ``clock_offset``: of this process."""
        self._run_dir, self._namespace = run_dir, namespace
        self._replicas, self._in_turn = replicas, in_turn
        self._clock, self._clock_offset = clock, clock_offset
        self._looks = 0
        self._blocks: dict[str, dict[Epoch, Blocks]] = {}
        self._mapped: dict[tuple[str, Epoch], _Mapped] = {}
        self._labels: dict[str, dict[Epoch, str]] = {}
        """By namespace: those of the last look."""
        self._pool = ThreadPoolExecutor(_AT_ONCE)

    def __enter__(self) -> NodeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap everything.  Idempotent."""
        self._pool.shutdown()
        for mapped in self._mapped.values():
            mapped.close()
        self._mapped.clear()

    def read(self) -> NodeReading:
        """Look at the node now.  No directory is a node without engines."""
        coordinated = self._look_for_engines()
        spaces = coordinated | {mapped.namespace for mapped in self._mapped.values()}
        turn = self._next_turn()
        declined = self._list_declined()
        read = [
            replace(
                self._read_namespace(space, turn),
                coordinated=space in coordinated,
                declined=tuple(told for where, told in declined if where == space),
            )
            for space in sorted(spaces | {where for where, _ in declined})
        ]
        read = list(self._pool.map(self._with_coordinator, read))  # stopped ones take their time
        return NodeReading(round(self._clock() * 1e9), tuple(read), time.time_ns())

    def table(self, engine: EngineReading) -> SlotTableView | None:
        """The mapped table of an engine that the last ``read`` found."""
        mapped = self._mapped.get((engine.namespace, engine.epoch))
        return mapped.table if mapped is not None else None

    # -- finding and mapping

    def _list_declined(self) -> list[tuple[str, Declined]]:
        try:
            return list_declined(self._run_dir, self._namespace)
        except FileNotFoundError:
            return []

    def _look_for_engines(self) -> set[str]:
        """Map what is new and let go of what has been gone for long; return the namespaces that
        have a coordinator."""
        try:
            sockets = list_sockets(self._run_dir, self._namespace)
            coordinators = list_coordinators(self._run_dir, self._namespace)
        except FileNotFoundError:
            sockets, coordinators = [], []
        present = {(s.namespace, s.epoch): s for s in sockets if s.epoch is not None}
        now = self._clock()
        for key, mapped in list(self._mapped.items()):
            gone = key not in present or (mapped.table is not None and mapped.table.owner_died)
            mapped.gone_since = (mapped.gone_since or now) if gone else None
            lost = mapped.table is None and key not in present
            if lost or (gone and now - (mapped.gone_since or now) > ENDED_SECONDS):
                self._mapped.pop(key).close()
        new = [_Mapped(present[key]) for key in sorted(present.keys() - self._mapped.keys())]
        pids = pids_of({mapped.path.name for mapped in new})
        for mapped in new:
            mapped.pid_here = pids.get(mapped.path.name, 0)
            self._mapped[mapped.namespace, mapped.epoch] = mapped
        list(self._pool.map(self._fetch, self._mapped.values()))
        return {name for name in coordinators if coordinator_runs(self._run_dir, name)}

    def _fetch(self, mapped: _Mapped) -> None:
        """Map what is not mapped yet.  On a thread of the pool."""
        handouts = SegmentClient(self._run_dir, mapped.namespace)
        if mapped.gone_since is not None and mapped.table is not None:
            return
        if (mapped.table is None or not mapped.answers) and self._clock() >= mapped.ask_again:
            began = self._clock()
            self._fetch_table(mapped, handouts)
            if not mapped.answers and self._clock() - began > _LONG_SECONDS:
                mapped.ask_again = self._clock() + ASK_AGAIN_SECONDS
        if self._replicas and mapped.answers and self._clock() >= mapped.replica_until:
            with suppress(KvshmError):  # it does not answer now: what is mapped stays
                newer = handouts.replica(mapped.epoch)
                mapped.replica, older = newer, mapped.replica
                if older is not None:
                    older.close()
            mapped.replica_until = self._clock() + REPLICA_SECONDS

    @staticmethod
    def _fetch_table(mapped: _Mapped, handouts: SegmentClient) -> None:
        try:
            table, mapped.answers = handouts.view(mapped.epoch), True
        except KvshmError as exc:
            if mapped.table is not None or not is_served(mapped.path):
                return
            mapped.problem = str(exc)
            mapped.silent = isinstance(exc.__cause__, TransportError)
            if not mapped.silent:
                return
            try:
                table = handouts.table_from_coordinator(mapped.epoch)
            except KvshmError:
                return
        if mapped.table is not None:
            mapped.table.close()
        mapped.table, mapped.problem = table, ""

    # -- reading

    def _next_turn(self) -> _Mapped | None:
        """Whose replica is read at this look; None: it is the turn of the tables."""
        self._looks += 1
        with_replica = [each for each in self._mapped.values() if each.replica is not None]
        if self._looks % 2 or not with_replica:
            return None
        return with_replica[self._looks // 2 % len(with_replica)]

    def _read_namespace(self, space: str, turn: _Mapped | None) -> NamespaceReading:
        """Read the engines of a namespace; nothing of its coordinator."""
        mapped = [each for each in self._mapped.values() if each.namespace == space]
        mapped.sort(key=lambda each: each.table.created_ns if each.table else 0)
        clock = ReadersClock(self._clock, self._clock_offset())
        counted = self._count(space, [each.table for each in mapped if each.table], turn)
        engines, unreadable = [], {m.epoch: m.problem for m in mapped if m.problem}
        for each in mapped:
            if each.table is None:
                continue
            try:
                found = read_table(space, each.table, counted[each.epoch], each.answers, clock)
            except (KvshmError, KeyError) as exc:  # a table that makes no sense is not counted
                unreadable[each.epoch] = f"its slot table makes no sense: {exc}"
                continue
            if each.peers is None or not self._in_turn or each is turn:
                each.peers = tuple(self._peers(space, each)) if each.replica else None
            engines.append(replace(found, pid_here=each.pid_here, peers=each.peers or ()))
        return NamespaceReading(
            name=space,
            coordinated=False,
            coordinator_answers=False,
            engines=self._with_labels(space, list(_latest(engines))),
            ended=tuple(m.epoch for m in mapped if m.table is None and not m.problem),
            unreadable=unreadable,
            silent=frozenset(m.epoch for m in mapped if m.problem and m.silent),
            pids_here={each.epoch: each.pid_here for each in mapped if each.pid_here},
        )

    def _with_labels(
        self, space: str, engines: Sequence[EngineReading]
    ) -> tuple[EngineReading, ...]:
        labels = self._labels[space] = _labels(engines, self._labels.get(space, {}))
        return tuple(replace(engine, label=labels[engine.epoch]) for engine in engines)

    def _with_coordinator(self, space: NamespaceReading) -> NamespaceReading:
        """Add what is known of the coordinator.  On a thread of the pool."""
        if not space.coordinated:
            return space
        answers, joined = self._ask_coordinator(space.name, space.engines)
        present = tuple(replace(e, joined=e.epoch in joined) for e in space.engines)
        shown = {e.coordinator_ns for e in present if e.joined}
        known = [at for at in shown if at]  # 0: it never has; a time may lie before this clock's 0
        last_ns = max(known, default=None if None in shown else 0)
        return replace(space, coordinator_answers=answers, coordinator_ns=last_ns, engines=present)

    def _ask_coordinator(
        self, space: str, engines: Sequence[EngineReading]
    ) -> tuple[bool, set[Epoch]]:
        """Whether the coordinator answers, and who is in its roster.  It is asked only about
        engines in whose tables it has not shown itself lately; about nobody if there are none."""
        now, handouts = self._clock(), SegmentClient(self._run_dir, space, timeout=ASK_SECONDS)
        living = [engine for engine in engines if not (engine.owner_died or engine.retired)]
        seen = [engine for engine in living if engine.coordinator_ns]  # else never, or not told
        fresh = {e.epoch for e in seen if now - (e.coordinator_ns or 0) / 1e9 < FRESH_SECONDS}
        wanted = [e.epoch for e in living if e.epoch not in fresh]
        answers, joined = bool(fresh), set(fresh)
        for epoch in wanted or ([] if fresh else [Epoch(0)]):
            try:
                handouts.table_from_coordinator(epoch).close()
                joined.add(epoch)
            except SegmentNotFound as exc:
                answers = answers or exc.__cause__ is None
                continue
            except KvshmError:  # it does not answer, or has no descriptors left
                joined |= {e.epoch for e in living if e.coordinator_ns != 0}
                break
            answers = True
        return answers, joined

    def _count(
        self, space: str, tables: Sequence[SlotTableView], turn: _Mapped | None
    ) -> dict[Epoch, Blocks]:
        before = self._blocks.get(space, {})
        if not self._in_turn or turn is None or any(t.epoch not in before for t in tables):
            self._blocks[space] = _count(tables)
        return self._blocks[space]

    def _peers(self, space: str, mapped: _Mapped) -> Iterator[PeerReading]:
        if mapped.replica is None:
            return
        for row in mapped.replica.rows():
            peer = self._mapped.get((space, row.epoch))
            missing = None
            if peer is not None and peer.table is not None:
                with suppress(KvshmError):
                    missing = peer.table.missing_in(mapped.replica.buffer, row.row)
            yield read_peer(row, missing)


def _count(tables: Sequence[SlotTableView]) -> dict[Epoch, Blocks]:
    """Count the blocks of one namespace's tables; leaves out tables that cannot be read.  Nobody
    reads the blocks of engines that have ended."""
    ended = [table for table in tables if table.died or table.retired]
    none = {Epoch(table.epoch): Blocks(table.num_blocks) for table in ended}
    return none | _census([table for table in tables if table not in ended])


def _census(tables: Sequence[SlotTableView]) -> dict[Epoch, Blocks]:
    slots = sum(table.num_blocks for table in tables)
    places, used = bytearray(PLACE_BYTES << slots.bit_length()), 0
    counts: dict[int, tuple[SlotTableView, int, int, int]] = {}
    for number, table in enumerate(tables, start=1):
        with suppress(KvshmError, ValueError):
            used, ready, draining, leased = table.count_blocks(places, used, number)
            counts[number] = table, ready, draining, leased
    return {
        Epoch(table.epoch): Blocks(
            table.num_blocks, ready, draining, leased, *_native.census_of(places, number)
        )
        for number, (table, ready, draining, leased) in counts.items()
    }


def _latest(engines: Sequence[EngineReading]) -> Iterator[EngineReading]:
    """Without the ended epochs of engines that have begun another one."""
    begun = {(engine.name, engine.pid): engine.epoch for engine in engines if not engine.retired}
    return (e for e in engines if not e.retired or begun.get((e.name, e.pid), e.epoch) == e.epoch)


def _labels(engines: Sequence[EngineReading], before: Mapping[Epoch, str]) -> dict[Epoch, str]:
    """Names, with the epoch where several engines have one, as in containers.  ``before``: the
    labels of the last look.  A living engine keeps its label, which its time series have; one that
    begins where another of its name has ended takes over that one's."""
    labels: dict[Epoch, str] = {}
    alike = Counter((engine.is_readable, engine.name) for engine in engines)
    for engine in sorted(engines, key=lambda e: (not e.is_readable, e.epoch not in before)):
        unique = f"{engine.name}-{engine.epoch:016x}"
        first = engine.name if alike[engine.is_readable, engine.name] == 1 else unique
        wanted = before.get(engine.epoch, first)
        labels[engine.epoch] = unique if wanted in labels.values() else wanted
    return labels
