"""Which engine copies from which, on which path and how fast; which of these pairs are slow.  Pure.

A pair is slow if

    it copies through host memory (``staged``), whatever the speed;
    it copies by ``pcie`` while the same engine copies from another one by ``nvlink``;
    its copies ran at less than a quarter of the speed of the node's fastest pair on the same path.

Speeds are compared only where they say something about the path: of at least ENOUGH_BYTES within a
minute, so that no single load decides, in loads of at least LARGE_LOAD_BYTES on average, since the
start of a copy dominates smaller ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvshm._base.copy_path import CopyPath
from kvshm._base.ids import Epoch
from kvshm._shm.traffic import Traffic

from ..node.reading import EngineReading, NodeReading
from .rates import Rates

ENOUGH_BYTES = 128 << 20
LARGE_LOAD_BYTES = 4 << 20
SLOWER_TIMES = 4


@dataclass(frozen=True)
class Copies:
    namespace: str
    importer: str
    exporter: str
    """The engine whose blocks they are; with "(ended)" or "(unreadable)" if it has no label."""
    importer_epoch: str
    exporter_epoch: str
    path: CopyPath
    bytes_per_second: float | None
    blocks_per_second: float | None
    failed: int
    total_bytes: int
    """Since the importer's epoch began."""
    window_bytes: int
    """In the last minute."""
    speed: float | None = None
    """Bytes a second while a copy runs, in the last minute; None: too few to say."""
    slow: str = ""

    @property
    def between_engines(self) -> bool:
        return self.importer_epoch != self.exporter_epoch


def find_copies(reading: NodeReading, last: Rates, minute: Rates) -> list[Copies]:
    """Return all pairs and paths on which anything was copied; from exporters that have ended, in
    the last minute."""
    labels = {(engine.namespace, engine.epoch): engine.label for engine in reading.engines}
    found: list[Copies] = []
    for space in reading.namespaces:
        for engine in space.engines:
            found += _of(engine, labels, last, minute, space.unreadable)
    return list(_judged(found))


def _of(
    engine: EngineReading,
    labels: Mapping[tuple[str, Epoch], str],
    last: Rates,
    minute: Rates,
    unreadable: Collection[Epoch],
) -> Iterator[Copies]:
    in_last, in_minute = (
        {(row.peer_epoch, row.path): row for row in rates.of(engine).traffic}
        for rates in (last, minute)
    )
    for row in engine.traffic:
        place = row.peer_epoch, row.path
        recent, longer = in_last.get(place), in_minute.get(place)
        label = labels.get((engine.namespace, Epoch(row.peer_epoch)))
        if not row.nbytes or (label is None and not (longer and longer.nbytes)):
            continue
        yield Copies(
            namespace=engine.namespace,
            importer=engine.label,
            exporter=label or _unlabelled(row, unreadable),
            importer_epoch=f"{engine.epoch:016x}",
            exporter_epoch=f"{row.peer_epoch:016x}",
            path=row.path,
            bytes_per_second=last.a_second(recent.nbytes) if recent else None,
            blocks_per_second=last.a_second(recent.blocks) if recent else None,
            failed=longer.failed if longer else 0,
            total_bytes=row.nbytes,
            window_bytes=longer.nbytes if longer else 0,
            speed=_speed(longer) if longer else None,
        )


def _unlabelled(row: Traffic, unreadable: Collection[Epoch]) -> str:
    known = row.peer or f"{row.peer_epoch:016x}"
    return f"{known} ({'unreadable' if row.peer_epoch in unreadable else 'ended'})"


def _speed(row: Traffic) -> float | None:
    enough = row.timed_bytes >= max(ENOUGH_BYTES, LARGE_LOAD_BYTES * row.loads)
    return row.timed_bytes * 1e9 / row.timed_ns if enough and row.timed_ns else None


def _judged(found: Sequence[Copies]) -> Iterator[Copies]:
    fastest: dict[CopyPath, Copies] = {}
    for pair in found:
        if pair.speed and pair.speed > _speed_of(fastest.get(pair.path)):
            fastest[pair.path] = pair
    by_nvlink = {(p.namespace, p.importer) for p in found if p.path is CopyPath.NVLINK}
    for pair in found:
        yield replace(pair, slow=_why_slow(pair, fastest.get(pair.path), by_nvlink))


def _speed_of(pair: Copies | None) -> float:
    return pair.speed or 0.0 if pair is not None else 0.0


def _why_slow(pair: Copies, fastest: Copies | None, by_nvlink: set[tuple[str, str]]) -> str:
    if pair.path is CopyPath.STAGED:
        return "staged: through host memory, because the GPUs cannot reach each other"
    if pair.path is CopyPath.PCIE and (pair.namespace, pair.importer) in by_nvlink:
        return "pcie, while it copies from others by nvlink"
    if fastest is None or not pair.speed or pair.speed * SLOWER_TIMES >= _speed_of(fastest):
        return ""
    times = _speed_of(fastest) / pair.speed
    return (
        f"{pair.path} at {pair.speed / 1e9:.2g} GB/s, {times:.0f} times slower than "
        f"{fastest.importer} from {fastest.exporter}"
    )
