"""Checks of engines and coordinators, from their shared memory alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import permutations

from kvshm._shm.error_log import ErrorCode

from ..node.health import Code, State
from ..node.reading import EngineReading
from ..top.copies import find_copies
from ..top.rates import measure
from .checks import Finding, judged, not_applicable, ok, problem, warning
from .evidence import Evidence

LAG_SECONDS = 1.0
NO_ENGINE = "there is no engine"


def coordinator(seen: Evidence) -> Finding:
    if not seen.reading.namespaces:
        return not_applicable("there is no engine and no coordinator")
    found = [
        f"namespace {space.reading.name}: {space.coordinator.text}"
        for space in seen.health.namespaces
        if space.coordinator.state is not State.HEALTHY
    ]
    return judged(found, "it answers", problem)


def health(seen: Evidence) -> Finding:
    found = [
        f"{each.engine.label}: {', '.join(each.texts)}"
        for each in seen.health.engines
        if each.state is not State.HEALTHY
    ]
    found += _cannot_be_read(seen, Code.SILENT)
    if found:
        return problem("; ".join(found))
    return _of_engines(seen, found, "all live, and their loops go round", problem)


def hook_errors(seen: Evidence) -> Finding:
    found = (
        f"{engine.label}: {engine.counters['hook_errors']}"
        for engine in seen.reading.engines
        if engine.counters["hook_errors"]
    )
    return _of_engines(seen, found, "no hook has failed", problem)


def versions(seen: Evidence) -> Finding:
    logged = [
        f"{engine.label}: {error.text}"
        for engine in seen.reading.engines
        for error in engine.errors
        if error.code is ErrorCode.OTHER_VERSION and not engine.joined
    ]
    if not seen.reading.namespaces:
        return not_applicable(NO_ENGINE)
    found = [*_cannot_be_read(seen, Code.UNREADABLE), *logged]
    return judged(found, "every segment is of this version", problem)


def _cannot_be_read(seen: Evidence, code: Code) -> Iterator[str]:
    for space in seen.health.namespaces:
        for epoch, reason in space.unknown.items():
            if reason.code is code:
                yield f"engine {space.reading.name_of(epoch)}: {reason.text}"


def fingerprints(seen: Evidence) -> Finding:
    """Of engines of one model that are here now, each pair once.  Others are not meant to share."""
    found: dict[frozenset[str], str] = {}
    for space in seen.reading.namespaces:
        for engine, other in permutations(space.engines, 2):
            for _, text in engine.differences(other.name) if other.model == engine.model else ():
                pair = frozenset((space.name, engine.name, other.name))
                found.setdefault(pair, f"{engine.label}: {text}")
    good = "no engine differs from another one of its model"
    return _of_engines(seen, list(found.values()), good, warning)


def declined(seen: Evidence) -> Finding:
    every = [one for space in seen.reading.namespaces for one in space.declined]
    if not every:
        return ok("no engine has declined to share")
    texts = "; ".join(f"{one.engine} (pid {one.pid}): {one.reason}" for one in every)
    return ok(texts) if all(one.on_purpose for one in every) else problem(texts)


def replica_lag(seen: Evidence) -> Finding:
    found = (
        f"{engine.label} misses {peer.lacking} blocks of {peer.name}, the oldest for "
        f"{peer.lag_seconds:.1f} s"
        for engine in seen.reading.engines
        for peer in engine.peers
        if (peer.lag_seconds or 0.0) > LAG_SECONDS and not peer.suspected
    )
    return _of_engines(seen, found, f"every engine knows blocks within {LAG_SECONDS:g} s", warning)


def clocks(seen: Evidence) -> Finding:
    if not any(seen.reading.engines):
        return not_applicable(NO_ENGINE)
    found = [e.label for e in seen.reading.engines if e.is_readable and not e.clock_known]
    found += [
        f"the coordinator of namespace {space.name}"
        for space in seen.reading.namespaces
        if space.coordinator_ns is None
    ]
    texts = (f"whether {each} goes on is not known: no offset of a clock" for each in found)
    return judged(texts, "all times can be compared, also across time namespaces", warning)


def pid_namespaces(seen: Evidence) -> Finding:
    """CUDA takes two processes of equal pid for one process, and opens no handle between them."""
    by_pid: dict[int, list[EngineReading]] = defaultdict(list)
    for engine in seen.reading.engines:
        if engine.is_readable:
            by_pid[engine.pid].append(engine)
    equal = [
        f"{' and '.join(engine.label for engine in engines)} are both process {pid} in their "
        "containers"
        for pid, engines in by_pid.items()
        if len({engine.pid_here or engine.epoch for engine in engines}) > 1
    ]
    apart = [e.label for e in seen.reading.engines if e.answers and e.pid_here != e.pid]
    if apart and seen.gpus is not None:
        equal.append(f"in another pid namespace: {', '.join(apart)}")
    if equal:
        return warning("; ".join(equal))
    good = f"in another one, which is fine without GPUs: {', '.join(apart)}" if apart else ""
    return _of_engines(seen, [], good or "all engines are in this one", warning)


def copy_paths(seen: Evidence) -> Finding:
    """Since the epochs began; ``kvshm top`` judges the last minute by the same rule."""
    rates = measure(None, seen.reading)
    pairs = [pair for pair in find_copies(seen.reading, rates, rates) if pair.between_engines]
    if not pairs:
        return not_applicable("no engine has copied from another one")
    slow = [f"{p.importer} from {p.exporter}: {p.slow}" for p in pairs if p.slow]
    if slow:
        return warning("; ".join(slow))
    texts = (
        f"{p.importer} from {p.exporter} by {p.path}"
        + (f" at {p.speed / 1e9:.2g} GB/s" if p.speed else ", too little for a speed")
        for p in pairs
    )
    return ok("; ".join(texts))


def _of_engines(
    seen: Evidence, found: Iterator[str] | list[str], good: str, bad: Callable[[str], Finding]
) -> Finding:
    if not any(seen.reading.engines):
        return not_applicable(NO_ENGINE)
    return judged(found, good, bad)
