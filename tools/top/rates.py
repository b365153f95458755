"""What has changed on a node between two looks.  Pure.

before           now              its change
epoch e          epoch e          the difference
-                epoch e          all that e has counted, if e began after the first look;
                                  else nothing: e was there, but could not be read
epoch e          -                none: it has ended, and nothing of it can be read
(no look)        epoch e          all that e has counted, since it began
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvshm._base.ids import Epoch
from kvshm._shm.histograms import NO_VALUES, Distribution
from kvshm._shm.traffic import Traffic

from ..node.reading import EngineReading, NodeReading

Key = tuple[str, Epoch]
"""Namespace and epoch: names of engines, and epochs of several namespaces, may be equal."""


@dataclass(frozen=True)
class Change:
    counters: Mapping[str, int]
    histograms: Mapping[str, Distribution]
    traffic: tuple[Traffic, ...]
    """One for each peer and path, also those on which nothing was copied meanwhile."""

    def counted(self, counter: str) -> int:
        return self.counters.get(counter, 0)

    def observed(self, histogram: str) -> Distribution:
        return self.histograms.get(histogram, NO_VALUES)


@dataclass(frozen=True)
class Rates:
    seconds: float | None
    """Between the looks; None: since the epochs began."""
    engines: Mapping[Key, Change]

    def a_second(self, count: int) -> float | None:
        return count / self.seconds if self.seconds else None

    def of(self, engine: EngineReading) -> Change:
        return self.engines.get((engine.namespace, engine.epoch), NOTHING)


NOTHING = Change({}, {}, ())


def measure(before: NodeReading | None, now: NodeReading) -> Rates:
    """Return what has changed since ``before``; None: since the epochs of ``now`` began."""
    if before is None:
        return Rates(None, {_key(engine): _whole(engine) for engine in now.engines})
    earlier = {_key(engine): engine for engine in before.engines}
    changes = {}
    for engine in now.engines:
        if (old := earlier.get(_key(engine))) is not None:
            changes[_key(engine)] = _difference(old, engine)
        elif engine.created_ns >= before.real_ns:
            changes[_key(engine)] = _whole(engine)
    return Rates(max(now.at_ns - before.at_ns, 0) / 1e9, changes)


def _key(engine: EngineReading) -> Key:
    return engine.namespace, engine.epoch


def _whole(engine: EngineReading) -> Change:
    return Change(engine.counters, engine.histograms, engine.traffic)


def _difference(old: EngineReading, new: EngineReading) -> Change:
    rows = {(row.peer_epoch, row.path): row for row in old.traffic}
    return Change(
        {label: max(n - old.counters.get(label, 0), 0) for label, n in new.counters.items()},
        {
            label: values.since(old.histograms.get(label, NO_VALUES))
            for label, values in new.histograms.items()
        },
        tuple(_since(row, rows.get((row.peer_epoch, row.path))) for row in new.traffic),
    )


def _since(new: Traffic, old: Traffic | None) -> Traffic:
    """A row that was given up and begun again counts from 0."""
    if old is None or new.loads < old.loads:
        return new
    return new._replace(
        loads=new.loads - old.loads,
        failed=max(new.failed - old.failed, 0),
        blocks=max(new.blocks - old.blocks, 0),
        nbytes=max(new.nbytes - old.nbytes, 0),
        timed_bytes=max(new.timed_bytes - old.timed_bytes, 0),
        timed_ns=max(new.timed_ns - old.timed_ns, 0),
    )
