"""Which engines a command line means.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from kvshm._base.ids import Epoch
from kvshm.errors import KvshmError

from ..node.reading import EngineReading, NamespaceReading, NodeReading
from ..options import select

Ancestors = Callable[[int], Iterable[int]]
"""The pid of a process, that of its parent, and so on."""


class Unreachable(NamedTuple):
    """An engine that is meant, and cannot be drained."""

    label: str
    epoch: Epoch
    pid: int
    why: str


class Chosen(NamedTuple):
    engines: list[EngineReading]
    unreachable: list[Unreachable]


def choose(reading: NodeReading, engine: str | None, here: bool, ancestors: Ancestors) -> Chosen:
    """Return the engines that are meant.  A name or an epoch comes before a pid, and the pid of a
    process that has started engines before that of one engine.  Raises KvshmError if there is none,
    or if it is not clear which."""
    is_server = False
    if engine is None:
        part = select(reading, None, here=here)
    elif named := _named(reading, engine):
        part = _part(reading, named)
    elif started := _started_by(reading, engine, ancestors):
        part, is_server = _part(reading, started), True
    else:
        part = select(reading, engine)
    found = [each for each in part.engines if _may_be_drained(each)]
    lost = [each for space in part.namespaces for each in _unreachable(space)]
    if not found and not lost:
        raise KvshmError(_why_none(part, here))
    if engine is not None and not is_server and len(found) > 1:
        names = ", ".join(f"{each.epoch:016x} in {each.namespace}" for each in found)
        raise KvshmError(f"several engines are called {engine!r}: {names}; name one by its epoch")
    return Chosen(found, lost)


def _named(reading: NodeReading, name: str) -> set[Epoch]:
    found = {
        each.epoch
        for each in reading.engines
        if name in (each.label, each.name) or _is_epoch(name, each.epoch)
    }
    for space in reading.namespaces:
        for epoch in space.unreadable:
            peer = space.peer(epoch)
            if (peer is not None and peer.name == name) or _is_epoch(name, epoch):
                found.add(epoch)
    return found


def _is_epoch(name: str, epoch: Epoch) -> bool:
    return name in (f"{epoch:016x}", f"0x{epoch:016x}")


def _started_by(reading: NodeReading, pid: str, ancestors: Ancestors) -> set[Epoch]:
    """The engines that a process has started: the pid that people know is that of a server."""
    if not pid.isdecimal():
        return set()
    here = {each.epoch: each.pid_here for each in reading.engines if _may_be_drained(each)}
    for space in reading.namespaces:
        here |= {epoch: space.pids_here.get(epoch, 0) for epoch in space.unreadable}
    return {epoch for epoch, own in here.items() if own and int(pid) in ancestors(own)}


def _may_be_drained(engine: EngineReading) -> bool:
    return engine.is_readable and not engine.keeps


def _part(reading: NodeReading, epochs: Collection[Epoch]) -> NodeReading:
    wanted = {f"{epoch:016x}" for epoch in epochs}
    spaces = [s.only(lambda names, _: not wanted.isdisjoint(names)) for s in reading.namespaces]
    return replace(reading, namespaces=tuple(spaces))


def _unreachable(space: NamespaceReading) -> list[Unreachable]:
    return [
        Unreachable(space.label_of(epoch), epoch, space.pids_here.get(epoch, 0), why)
        for epoch, why in space.unreadable.items()
    ]


def _why_none(part: NodeReading, here: bool) -> str:
    reasons = [record.reason for space in part.namespaces for record in space.declined]
    if not here and any(each.is_readable and each.keeps for each in part.engines):
        reasons.append("it is a keeper: what it keeps goes with it")
    where = "in this container" if here else "that could be drained"
    return "; ".join(reasons) or f"there is no engine {where}"
