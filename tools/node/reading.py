"""What one look at a node found, as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from kvshm._base.declined import Declined
from kvshm._base.ids import Epoch
from kvshm._base.log import engine_name
from kvshm._base.time_namespace import on_own_clock
from kvshm._node.incompatible import differing_field
from kvshm._replica.index_layout import Row
from kvshm._shm.error_log import ErrorCode, LoggedError
from kvshm._shm.histograms import Distribution
from kvshm._shm.layout import RowState
from kvshm._shm.progress import COORDINATOR_LOOP, SCHEDULER_LOOP, LoopProgress
from kvshm._shm.slot_table import SlotTableView
from kvshm._shm.traffic import Traffic

AHEAD_NS = 1_000_000_000
"""Loops go round while the node is read, but not for as long."""


@dataclass(frozen=True)
class Blocks:
    total: int
    ready: int = 0
    draining: int = 0
    leased: int = 0
    distinct: int = 0
    """READY blocks that no engine before this one in the reading has; 0 if it has ended."""
    last_copies: int = 0
    """READY blocks that no other engine of the namespace has; 0 if it has ended."""

    @property
    def duplicates(self) -> int:
        """READY blocks that another engine has, too, or the engine itself in a second block."""
        return max(self.ready - self.last_copies, 0)


@dataclass(frozen=True)
class PeerReading:
    name: str
    epoch: Epoch
    suspected: bool
    entries: int
    lacking: int | None
    """READY blocks that the replica misses; None if the peer's table is not known."""
    lag_seconds: float | None
    """How long the oldest of these has been published."""
    lease_bit: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineHeader:
    """An engine in one epoch, as the header of its slot table shows it."""

    namespace: str
    epoch: Epoch
    name: str
    pid: int
    model: str
    fingerprint: str
    block_size: int
    owner_died: bool
    died: bool
    """Whether the process of the scheduler or of a rank has ended."""
    retired: bool
    """Whether the engine has left or begun another epoch."""
    life: tuple[bool, ...]
    """For each rank whether others may read its KV memory."""
    heartbeat: int
    lease_bit: int | None
    created_ns: int
    """CLOCK_REALTIME."""
    counters: Mapping[str, int]
    keeps: bool = False
    """Whether it is a keeper, which computes nothing."""
    in_drain: bool = False
    """Whether it imports nothing, because it is about to be stopped."""


def read_header(namespace: str, table: SlotTableView) -> EngineHeader:
    """Raises KvshmError."""
    return EngineHeader(
        namespace=namespace,
        epoch=Epoch(table.epoch),
        name=table.engine,
        pid=table.pid,
        model=table.model,
        fingerprint=table.fingerprint.hex(),
        block_size=table.block_size,
        owner_died=table.owner_died,
        died=table.died,
        retired=table.retired,
        life=tuple(table.life(rank) == table.epoch for rank in range(table.num_ranks)),
        heartbeat=table.heartbeat,
        lease_bit=table.lease_bit if table.lease_bit >= 0 else None,
        created_ns=table.created_ns,
        counters=table.counters.snapshot(),
        keeps=table.keeps,
        in_drain=table.in_drain,
    )


@dataclass(frozen=True, kw_only=True)
class EngineReading(EngineHeader):
    answers: bool
    """Whether it has handed out its table itself; otherwise the coordinator has."""
    blocks: Blocks
    histograms: Mapping[str, Distribution]
    traffic: tuple[Traffic, ...]
    progress: tuple[LoopProgress, ...]
    """On the reader's clock."""
    coordinator_ns: int | None
    """When its coordinator last went round, on the reader's clock; 0: never; None: not known."""
    loads_since: tuple[int, ...]
    """When its loads under way began, on the reader's clock."""
    errors: tuple[LoggedError, ...]
    clock_known: bool = True
    """Otherwise ``progress`` and ``loads_since`` are on its own clock."""
    joined: bool = False
    """Whether it is known to be in the coordinator's roster."""
    pid_here: int = 0
    """Its pid in this process's container; 0: the engine is in another one."""
    peers: tuple[PeerReading, ...] = ()
    """Empty if its replica cannot be read."""
    label: str = ""
    """Its name, made unique among the engines of the reading."""

    @property
    def is_readable(self) -> bool:
        """Whether other engines may still read its blocks."""
        return not (self.owner_died or self.died or self.retired)

    @property
    def log_name(self) -> str:
        return engine_name(self.epoch, self.name, self.pid)

    @property
    def names(self) -> tuple[str, ...]:
        """By what a user may call it."""
        epoch = f"{self.epoch:016x}"
        return self.label, self.name, str(self.pid), epoch, f"0x{epoch}"

    def last_error(self, *codes: ErrorCode) -> str:
        """The text of the latest error with one of these codes, or an empty one."""
        return next((error.text for error in reversed(self.errors) if error.code in codes), "")

    def differences(self, *names: str) -> Iterator[tuple[str, str]]:
        """Yield the differing field and text of errors about these engines, the latest first."""
        for error in reversed(self.errors):
            for name in names:
                if (field := differing_field(error, name)) is not None:
                    yield field, error.text


@dataclass(frozen=True)
class NamespaceReading:
    name: str
    coordinated: bool
    """Whether a process serves the coordinator's sockets; it may be stopped."""
    coordinator_answers: bool
    coordinator_ns: int | None = 0
    """When it last went round, as the engines in its roster show; 0: never; None: not known."""
    engines: tuple[EngineReading, ...] = ()
    ended: tuple[Epoch, ...] = ()
    """Engines that have ended and left a socket."""
    unreadable: Mapping[Epoch, str] = field(default_factory=dict)
    silent: frozenset[Epoch] = frozenset()
    """Those of them that do not answer."""
    pids_here: Mapping[Epoch, int] = field(default_factory=dict)
    """Of engines in this process's container, also of those that cannot be read."""
    declined: tuple[Declined, ...] = ()
    beside: NamespaceReading | None = None
    """The whole namespace, if this is a part of it."""

    @property
    def whole(self) -> NamespaceReading:
        return self.beside or self

    @cached_property
    def known_to_peers(self) -> Mapping[Epoch, PeerReading]:
        if self.beside is not None:
            return self.beside.known_to_peers
        shown = {engine.epoch for engine in self.engines}
        rows = (peer for engine in self.engines for peer in engine.peers)
        return {peer.epoch: peer for peer in rows if peer.epoch not in shown}

    def peer(self, epoch: Epoch) -> PeerReading | None:
        return self.known_to_peers.get(epoch)

    def label_of(self, epoch: Epoch) -> str:
        """The unique name of an engine whose table is not known."""
        if (peer := self.peer(epoch)) is None:
            return f"{epoch:016x}"
        return peer.name if self._times_used[peer.name] == 1 else f"{peer.name}-{epoch:016x}"

    @cached_property
    def _times_used(self) -> Counter[str]:
        unknown = (peer.name for peer in self.known_to_peers.values())
        return Counter([*(engine.label for engine in self.whole.engines), *unknown])

    def name_of(self, epoch: Epoch) -> str:
        peer = self.peer(epoch)
        return engine_name(epoch, peer.name if peer else "", self.pids_here.get(epoch, 0))

    def only(self, is_meant: Callable[[tuple[str, ...], bool], bool]) -> NamespaceReading:
        """Return a part.  ``is_meant``: of an engine's names and whether it is here."""
        unreadable = {
            epoch: why
            for epoch, why in self.unreadable.items()
            if is_meant(self.names_of(epoch), epoch in self.pids_here)
        }
        return replace(
            self,
            engines=tuple(e for e in self.engines if is_meant(e.names, bool(e.pid_here))),
            declined=tuple(d for d in self.declined if is_meant((d.engine, str(d.pid)), d.is_here)),
            ended=tuple(epoch for epoch in self.ended if is_meant(self.names_of(epoch), False)),
            unreadable=unreadable,
            beside=self.whole,
        )

    def names_of(self, epoch: Epoch) -> tuple[str, ...]:
        pid, peer = self.pids_here.get(epoch), self.peer(epoch)
        known = ([str(pid)] if pid else []) + ([peer.name] if peer else [])
        return (*known, f"{epoch:016x}", f"0x{epoch:016x}")


@dataclass(frozen=True)
class NodeReading:
    at_ns: int
    namespaces: tuple[NamespaceReading, ...]
    real_ns: int = 0
    """The same moment in CLOCK_REALTIME."""

    @property
    def engines(self) -> Iterator[EngineReading]:
        return (engine for space in self.namespaces for engine in space.engines)


@dataclass(frozen=True)
class ReadersClock:
    """The clock of this process, to which the times of all others are converted."""

    clock: Callable[[], float]
    """CLOCK_MONOTONIC in seconds, read after the times that are judged: this process may be stopped
    between two of its reads."""
    offset_ns: int | None

    def converted(self, time_ns: int, offset_ns: int | None) -> int | None:
        """Convert a time of a process with this offset; None: not known, as if yet to come."""
        here = on_own_clock(time_ns, offset_ns, self.offset_ns)
        return None if here is None or here > self.clock() * 1e9 + AHEAD_NS else here


def read_table(
    namespace: str, table: SlotTableView, blocks: Blocks, answers: bool, clock: ReadersClock
) -> EngineReading:
    """Read everything of a table but its blocks.  Raises KvshmError."""
    times = _read_times(table, clock)
    return EngineReading(
        **vars(read_header(namespace, table)),
        answers=answers,
        blocks=blocks,
        histograms=table.histograms.snapshot(),
        traffic=tuple(table.traffic.read()),
        progress=times.progress,
        coordinator_ns=times.coordinator_ns,
        loads_since=times.loads_since,
        clock_known=times.known,
        errors=tuple(table.errors()),
    )


class _Times(NamedTuple):
    progress: tuple[LoopProgress, ...]
    loads_since: tuple[int, ...]
    known: bool
    coordinator_ns: int | None


def _read_times(table: SlotTableView, clock: ReadersClock) -> _Times:
    *loops, last = sorted(table.progress(), key=lambda loop: loop.loop == COORDINATOR_LOOP)
    coordinator = clock.converted(last.last_ns, last.clock_offset_ns) if last.last_ns else 0
    since = table.loads_since()
    of_scheduler = next(loop.clock_offset_ns for loop in loops if loop.loop == SCHEDULER_LOOP)
    begun = [clock.converted(at, of_scheduler) for at in since]
    went = [clock.converted(e.last_ns, e.clock_offset_ns) if e.last_ns else 0 for e in loops]
    if None in begun or None in went:
        return _Times(tuple(loops), tuple(since), False, coordinator)
    here = (e._replace(last_ns=at or 0) for e, at in zip(loops, went, strict=True))
    return _Times(tuple(here), tuple(at or 0 for at in begun), True, coordinator)


def read_peer(row: Row, missing: tuple[int, float] | None) -> PeerReading:
    """``missing``: how many blocks the replica misses, and since when."""
    lacking, lag = missing or (None, None)
    suspected = row.state is RowState.SUSPECTED
    bit = row.lease_bit if row.lease_bit >= 0 else None
    return PeerReading(row.name, row.epoch, suspected, row.entries, lacking, lag, bit)
