"""Looks at a node again and again, and costs its engines next to nothing.

A table is asked for once and stays mapped: later looks need no help of the engine, which may be
stopped or dead.  Replicas, which their owners replace, are asked for again from time to time.
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
from kvshm._base.rundir import list_coordinators, list_sockets, tables_socket
from kvshm._base.time_namespace import clock_offset_ns
from kvshm._node.segment_server import SegmentClient
from kvshm._shm.fds import is_served
from kvshm._shm.segment import TABLE_KIND
from kvshm._shm.slot_table import SlotTableView
from kvshm.errors import KvshmError, SegmentNotFound

from .mapped import MappedEngine, MappedNamespace, still_there
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

ENDED_SECONDS = 60.0
FRESH_SECONDS = 5.0
"""How long ago a coordinator may have gone round that need not be asked whether it answers."""
ASK_SECONDS = 0.5
PLACE_BYTES = 16
_AT_ONCE = 32


class NodeReader:
    """Reads the engines of a run directory.  A context; one thread.

    Blocks for some seconds at most if a new engine is stopped, or else for milliseconds.
    """

    def __init__(
        self,
        run_dir: Path,
        namespace: str | None = None,
        *,
        in_turn: bool = False,
        clock: Callable[[], float] = time.monotonic,
        clock_offset: Callable[[], int | None] = clock_offset_ns,
    ) -> None:
        """``namespace``: only this one (None: all).  ``in_turn``: read at each look either all
        tables' slots or, against these, one replica, which takes a tenth of the time; what has not
        been read before is read at once.  ``clock``: CLOCK_MONOTONIC in seconds; ``clock_offset``:
        of this process."""
        self._run_dir, self._namespace = run_dir, namespace
        self._in_turn = in_turn
        self._clock, self._clock_offset = clock, clock_offset
        self._looks = 0
        self._blocks: dict[str, dict[Epoch, Blocks]] = {}
        self._mapped: dict[tuple[str, Epoch], MappedEngine] = {}
        self._labels: dict[str, dict[Epoch, str]] = {}
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
        mapped = {space.name: space for space in self.map_segments()}
        self._find_pids()
        turn = self._next_turn()
        declined = self._list_declined()
        read = [
            replace(
                self._read_namespace(name, mapped[name].engines if name in mapped else [], turn),
                coordinated=name in mapped and mapped[name].coordinated,
                declined=tuple(record for where, record in declined if where == name),
            )
            for name in sorted(mapped.keys() | {where for where, _ in declined})
        ]
        read = list(self._pool.map(self._with_coordinator, read))  # stopped ones take their time
        return NodeReading(round(self._clock() * 1e9), tuple(read), time.time_ns())

    def table(self, engine: EngineReading) -> SlotTableView | None:
        """Return the mapped table of an engine of the last ``read``."""
        mapped = self._mapped.get((engine.namespace, engine.epoch))
        return mapped.table if mapped is not None else None

    # -- finding and mapping

    def map_segments(self) -> list[MappedNamespace]:
        """Map what is new, unmap what has long been gone, and return what is mapped until the next
        call.  Blocks as ``read`` does."""
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
        for key in sorted(present.keys() - self._mapped.keys()):
            new = MappedEngine(present[key])
            self._mapped[new.namespace, new.epoch] = new
        list(self._pool.map(lambda each: each.fetch(self._clock), self._mapped.values()))
        there = [mapped for mapped in self._mapped.values() if still_there(mapped)]
        coordinated = {n for n in coordinators if is_served(tables_socket(self._run_dir, n))}
        return [
            MappedNamespace(name, name in coordinated, [m for m in there if m.namespace == name])
            for name in sorted(coordinated | {mapped.namespace for mapped in there})
        ]

    def _find_pids(self) -> None:
        new = [mapped for mapped in self._mapped.values() if mapped.pid_here is None]
        pids = pids_of({mapped.path.name for mapped in new})
        for mapped in new:
            mapped.pid_here = pids.get(mapped.path.name, 0)

    def _list_declined(self) -> list[tuple[str, Declined]]:
        try:
            return list_declined(self._run_dir, self._namespace)
        except FileNotFoundError:
            return []

    # -- reading

    def _next_turn(self) -> MappedEngine | None:
        """Whose replica is read at this look; None: it is the turn of the tables."""
        self._looks += 1
        with_replica = [
            m for m in self._mapped.values() if m.table is not None and m.replica is not None
        ]
        if self._looks % 2 or not with_replica:
            return None
        return with_replica[self._looks // 2 % len(with_replica)]

    def _read_namespace(
        self, space: str, mapped: list[MappedEngine], turn: MappedEngine | None
    ) -> NamespaceReading:
        mapped.sort(key=lambda each: each.table.created_ns if each.table else 0)
        clock = ReadersClock(self._clock, self._clock_offset())
        counted = self._count(space, [each.table for each in mapped if each.table], turn)
        problems = {
            each.epoch: each.problems[TABLE_KIND]
            for each in mapped
            if each.table is None and not each.ended
        }
        engines, unreadable = [], {epoch: str(each.error) for epoch, each in problems.items()}
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
            engines.append(replace(found, pid_here=each.pid_here or 0, peers=each.peers or ()))
        return NamespaceReading(
            name=space,
            coordinated=False,
            coordinator_answers=False,
            engines=self._with_labels(space, list(_latest(engines))),
            ended=tuple(each.epoch for each in mapped if each.ended),
            unreadable=unreadable,
            silent=frozenset(epoch for epoch, problem in problems.items() if problem.silent),
            pids_here={each.epoch: each.pid_here for each in mapped if each.pid_here},
        )

    def _with_labels(
        self, space: str, engines: Sequence[EngineReading]
    ) -> tuple[EngineReading, ...]:
        labels = self._labels[space] = _labels(engines, self._labels.get(space, {}))
        return tuple(replace(engine, label=labels[engine.epoch]) for engine in engines)

    def _with_coordinator(self, space: NamespaceReading) -> NamespaceReading:
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
        """Whether the coordinator answers, and the engines in its roster.  It is asked only about
        those in whose tables it has not shown itself lately."""
        now, segments = self._clock(), SegmentClient(self._run_dir, space, timeout=ASK_SECONDS)
        living = [engine for engine in engines if not (engine.owner_died or engine.retired)]
        seen = [engine for engine in living if engine.coordinator_ns]  # else never, or not known
        fresh = {e.epoch for e in seen if now - (e.coordinator_ns or 0) / 1e9 < FRESH_SECONDS}
        wanted = [e.epoch for e in living if e.epoch not in fresh]
        answers, joined = bool(fresh), set(fresh)
        for epoch in wanted or ([] if fresh else [Epoch(0)]):
            try:
                segments.table_from_coordinator(epoch).close()
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
        self, space: str, tables: Sequence[SlotTableView], turn: MappedEngine | None
    ) -> dict[Epoch, Blocks]:
        before = self._blocks.get(space, {})
        if not self._in_turn or turn is None or any(t.epoch not in before for t in tables):
            self._blocks[space] = _count(tables)
        return self._blocks[space]

    def _peers(self, space: str, mapped: MappedEngine) -> Iterator[PeerReading]:
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
    """Count blocks; leave out tables that cannot be read, and blocks of ended engines."""
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
    """Return unique names.  ``before``: of the last look; a living engine keeps its own, which its
    time series have, and one that follows an ended one of its name takes over that one's."""
    labels: dict[Epoch, str] = {}
    alike = Counter((engine.is_readable, engine.name) for engine in engines)
    for engine in sorted(engines, key=lambda e: (not e.is_readable, e.epoch not in before)):
        unique = f"{engine.name}-{engine.epoch:016x}"
        first = engine.name if alike[engine.is_readable, engine.name] == 1 else unique
        wanted = before.get(engine.epoch, first)
        labels[engine.epoch] = unique if wanted in labels.values() else wanted
    return labels
