"""What a look at a node says for each metric.  Pure.

Of two series with the same labels counters are added up, and of other values the first one stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from kvshm._node.protocol import PROTOCOL_VERSION
from kvshm._shm.histograms import Distribution
from kvshm._shm.layout import LAYOUT_VERSION
from kvshm._shm.statistics import Histogram
from kvshm.version import __version__

from ..node.health import EngineHealth, NamespaceHealth, State, judge_node
from ..node.reading import EngineReading, NamespaceReading, NodeReading, PeerReading
from ..output import clean
from .definitions import METRICS, Kind

SECOND_NS = 1e9
TIME_BITS = range(10, 37, 2)
"""Bounds of times: from 1 µs to 69 s, each four times the one before."""
TOKEN_BITS = range(4, 21, 2)
"""Bounds of lengths: from 15 to 1,048,575 tokens."""
LEFT = "left"
_UNITS = {histogram.label: histogram.unit for histogram in Histogram.REGISTRY.values()}


@dataclass(frozen=True)
class Buckets:
    cumulated: tuple[tuple[float, int], ...]
    """Each bound, the last one infinite, with how many values do not exceed it."""
    total: float


Labels = tuple[str, ...]
Samples = Mapping[str, Mapping[Labels, float | Buckets]]


class _Found:
    def __init__(self) -> None:
        self.by_name: dict[str, dict[Labels, float | Buckets]] = {name: {} for name in METRICS}

    def add(self, name: str, labels: Labels, value: float | Buckets) -> None:
        metric = METRICS[f"kvshm_{name}"]
        series, labels = self.by_name[metric.name], tuple(map(_label, labels))
        if metric.kind is Kind.COUNTER:
            value += series.get(labels, 0)  # type: ignore[operator]  # no counter has Buckets
        elif labels in series:
            return
        series[labels] = value


def samples_of(reading: NodeReading) -> Samples:
    found = _Found()
    build = (__version__, str(LAYOUT_VERSION), str(PROTOCOL_VERSION))
    found.add("build_info", build, 1)
    offset_ns = reading.real_ns - reading.at_ns
    for health in judge_node(reading).namespaces:
        space = health.reading
        _add_namespace(found, health)
        if space.coordinator_ns:
            at = (space.coordinator_ns + offset_ns) / SECOND_NS
            found.add("coordinator_last_progress_timestamp_seconds", (space.name,), at)
        for each in health.engines:
            engine = each.engine
            _add_counted(found, engine)
            _add_traffic(found, engine, _names(space))
            _add_health(found, each)
            if not engine.owner_died:
                _add_state_of_memory(found, engine, reading.at_ns)
                _add_progress(found, engine, offset_ns)
                _add_peers(found, engine, space)
    return found.by_name


def cumulate(values: Distribution, unit: str) -> Buckets:
    scale = SECOND_NS if unit == "ns" else 1.0
    up_to = tuple(accumulate(values.counts))
    bounds = tuple(
        (((1 << bits) - 1) / scale, up_to[bits])
        for bits in (TIME_BITS if unit == "ns" else TOKEN_BITS)
    )
    return Buckets((*bounds, (float("inf"), up_to[-1])), values.total / scale)


def _label(text: str) -> str:
    return "\n".join(map(clean, text.split("\n")))


def _labels(engine: EngineReading) -> Labels:
    return engine.namespace, engine.label, engine.model


def _names(space: NamespaceReading) -> Callable[[int, str], str]:
    """Return what names a peer by its epoch, or by the name that is passed if it is not there."""
    labels = {int(engine.epoch): engine.label for engine in space.engines}
    return lambda epoch, name: labels.get(epoch, name or "unknown")


def _add_namespace(found: _Found, health: NamespaceHealth) -> None:
    space, up = health.reading, health.coordinator.state is State.HEALTHY
    distinct = sum(engine.blocks.distinct for engine in space.engines)
    found.add("coordinator_up", (space.name,), int(up))
    found.add("distinct_blocks", (space.name,), distinct)
    found.add("unreadable_engines", (space.name,), len(space.unreadable))
    found.add("ended_engines", (space.name,), len(space.ended))


def _add_counted(found: _Found, engine: EngineReading) -> None:
    for metric in METRICS.values():
        name = metric.name.removeprefix("kvshm_")
        for label, value in metric.shows.items():
            labels = (*_labels(engine), value) if value else _labels(engine)
            if metric.kind is Kind.HISTOGRAM:
                found.add(name, labels, cumulate(engine.histograms[label], _UNITS[label]))
            else:
                found.add(name, labels, engine.counters[label] * metric.scale)


def _add_traffic(found: _Found, engine: EngineReading, name_of: Callable[[int, str], str]) -> None:
    for row in engine.traffic:
        labels = (*_labels(engine), name_of(row.peer_epoch, row.peer), str(row.path))
        found.add("imports_total", (*labels, "ok"), row.loads - row.failed)
        found.add("imports_total", (*labels, "failed"), row.failed)
        found.add("import_bytes_total", labels, row.nbytes)
        found.add("import_blocks_total", labels, row.blocks)
        found.add("import_timed_bytes_total", labels, row.timed_bytes)
        found.add("import_timed_seconds_total", labels, row.timed_ns / SECOND_NS)


def _add_health(found: _Found, health: EngineHealth) -> None:
    engine = health.engine
    state = LEFT if engine.retired and engine.owner_died else str(health.state)
    for each in (*State, LEFT):
        found.add("engine_state", (*_labels(engine), str(each)), int(each == state))
    for check in ("live", "ready", "progress"):
        if (passed := getattr(health, check)) is not None:
            found.add("engine_check", (*_labels(engine), check), int(passed))
    found.add("epoch_start_timestamp_seconds", _labels(engine), engine.created_ns / SECOND_NS)


def _add_state_of_memory(found: _Found, engine: EngineReading, now_ns: int) -> None:
    blocks, labels = engine.blocks, _labels(engine)
    empty = max(blocks.total - blocks.ready - blocks.draining, 0)
    for state, count in (("empty", empty), ("ready", blocks.ready), ("draining", blocks.draining)):
        found.add("blocks", (*labels, state), count)
    found.add("published_blocks", labels, blocks.ready)
    found.add("keeper", labels, int(engine.keeps))
    found.add("in_drain", labels, int(engine.in_drain))
    found.add("last_copy_blocks", labels, blocks.last_copies)
    found.add("leases", labels, blocks.leased)
    if engine.clock_known:
        oldest = min(engine.loads_since, default=now_ns)
        age = max(now_ns - oldest, 0) / SECOND_NS
        found.add("oldest_lease_seconds", (engine.namespace, engine.label), age)


def _add_progress(found: _Found, engine: EngineReading, offset_ns: int) -> None:
    for loop in engine.progress:
        labels = (*_labels(engine), loop.loop)
        found.add("pending", labels, loop.pending)
        if loop.last_ns and engine.clock_known:
            at = (loop.last_ns + offset_ns) / SECOND_NS
            found.add("last_progress_timestamp_seconds", labels, at)


def _add_peers(found: _Found, engine: EngineReading, space: NamespaceReading) -> None:
    name_of, labels = _names(space), _labels(engine)
    for peer in engine.peers:
        name = name_of(peer.epoch, peer.name)
        state = "suspected" if peer.suspected else "usable"
        found.add("peer_state", (*labels, name, state, ""), 1)
        _add_replica(found, (*labels, name), peer)
    for name, differs in _refused(engine, space):
        found.add("peer_state", (*labels, name, "refused", differs), 1)


def _add_replica(found: _Found, labels: Labels, peer: PeerReading) -> None:
    if peer.lacking is not None and peer.lag_seconds is not None:
        found.add("replica_lacking_blocks", labels, peer.lacking)
        found.add("replica_lag_seconds", labels, peer.lag_seconds)


def _refused(engine: EngineReading, space: NamespaceReading) -> Iterator[tuple[str, str]]:
    """Yield engines of the same model that cannot share with this one, and the differing field.  A
    keeper has an engine for each fingerprint, which goes on when others of it have gone."""
    for other in space.engines:
        left_out = other.owner_died or other.retired or other.keeps or engine.keeps
        if not left_out and other.model == engine.model and other.fingerprint != engine.fingerprint:
            field, _ = next(engine.differences(other.name), ("", ""))
            yield other.label, field
