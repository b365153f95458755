"""What has gone wrong on a node, the newest first.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvshm._shm.error_log import LoggedError

from ..node.health import Code, EngineHealth, NodeHealth, State
from .copies import Copies


@dataclass(frozen=True)
class Fault:
    kind: str
    """"log": recorded by an engine; "state", "declined", "alone" or "slow": so now."""
    engines: tuple[str, ...]
    text: str
    times: int = 1
    age_seconds: float | None = None
    """Since it was last recorded; None: it is so now."""
    code: str = ""
    """Of the reason or the recorded error; empty if it has none."""


def find_faults(
    health: NodeHealth, shown: Sequence[EngineHealth], copies: Sequence[Copies]
) -> list[Fault]:
    """Return the faults of the engines ``shown``: those of now, then the recorded ones."""
    now = [
        *_of_namespaces(health),
        *_of_states(shown),
        *_of_loners(health, shown),
        *_of_paths(copies),
    ]
    logged = [
        Fault("log", (each.engine.label,), error.text, error.times, _age(error, health), error.code)
        for each in shown
        for error in each.engine.errors
    ]
    return [*fold(now), *sorted(fold(logged), key=lambda fault: fault.age_seconds or 0.0)]


def fold(faults: Sequence[Fault]) -> Iterator[Fault]:
    same: dict[tuple[str, str, str], list[Fault]] = {}
    for fault in faults:
        same.setdefault((fault.kind, fault.text, fault.code), []).append(fault)
    for (kind, text, code), group in same.items():
        engines = tuple(dict.fromkeys(label for fault in group for label in fault.engines))
        ages = [fault.age_seconds for fault in group if fault.age_seconds is not None]
        times = sum(fault.times for fault in group)
        yield Fault(kind, engines, text, times, min(ages, default=None), code)


def _of_namespaces(health: NodeHealth) -> Iterator[Fault]:
    for space in health.namespaces:
        reading, coordinator = space.reading, space.coordinator
        if coordinator.state is not State.HEALTHY:
            text, reason = f"namespace {reading.name}: {coordinator.text}", coordinator.reason
            yield Fault("state", (), text, code=reason.code if reason else "")
        for epoch, reason in space.unknown.items():
            yield Fault("state", (reading.label_of(epoch),), reason.text, code=reason.code)
        for declined in space.declined:
            if declined.state is not State.HEALTHY:
                engines, (code, text) = (declined.record.engine,), declined.reason
                yield Fault("declined", engines, text, code=code)


def _of_states(shown: Sequence[EngineHealth]) -> Iterator[Fault]:
    for each in shown:
        for code, text in each.reasons if each.state is not State.HEALTHY else ():
            yield Fault("state", (each.engine.label,), text, code=code)


def _of_loners(health: NodeHealth, shown: Sequence[EngineHealth]) -> Iterator[Fault]:
    """Engines that share nothing, because the others of their namespace differ from them.  Not
    keepers: what one keeps waits for engines that come again."""
    alike = Counter((e.namespace, e.fingerprint) for e in health.reading.engines)
    together = Counter(engine.namespace for engine in health.reading.engines)
    for each in shown:
        engine = each.engine
        alone = alike[engine.namespace, engine.fingerprint] == 1 and not engine.keeps
        has_reason = any(reason.code is Code.ALONE for reason in each.reasons)
        if alone and each.live and not has_reason and together[engine.namespace] > 1:
            text = "shares with no engine: no other engine here has its fingerprint"
            yield Fault("alone", (engine.label,), text, code=Code.ALONE)


def _of_paths(copies: Sequence[Copies]) -> Iterator[Fault]:
    for pair in copies:
        if pair.slow:
            yield Fault("slow", (pair.importer,), f"copies from {pair.exporter}: {pair.slow}")


def _age(error: LoggedError, health: NodeHealth) -> float:
    return max(health.reading.real_ns - error.last_ns, 0) / 1e9
