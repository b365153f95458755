"""What has gone wrong on a node, the newest first.  Pure.

The sources: the states of engines and coordinators as ``tools/node/health.py`` judges them, slow
paths, and the error log of each engine's table.  Equal texts of several engines are one fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..node.health import ALONE, Health, Limits, State, judge_coordinator
from ..node.reading import EngineReading, NodeReading
from .copies import Copies


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, or was."""

    kind: str
    """"state" (as it is now), "alone" (an engine that nobody can share with, now), "slow" (a path,
    now), or "log" (an engine has recorded it)."""
    engines: tuple[str, ...]
    """Labels of those concerned; empty: a coordinator."""
    text: str
    times: int = 1
    """How often it was recorded, by all of them together."""
    age_seconds: float | None = None
    """How long ago it was last recorded; None: it is so now."""


def find_faults(
    reading: NodeReading,
    judged: Sequence[tuple[EngineReading, Health]],
    copies: Sequence[Copies],
    limits: Limits,
) -> list[Fault]:
    """Return the faults of the engines ``judged``: those of now, then the recorded ones."""
    now = [
        *_of_spaces(reading, limits),
        *_of_states(judged),
        *_of_loners(reading, judged),
        *_of_paths(copies),
    ]
    logged = [
        Fault("log", (engine.label,), error.text, error.times, _age(error.last_ns, reading))
        for engine, _ in judged
        for error in engine.errors
    ]
    return [*fold(now), *sorted(fold(logged), key=lambda fault: fault.age_seconds or 0.0)]


def fold(faults: Sequence[Fault]) -> Iterator[Fault]:
    """Make one fault of those with one kind and text."""
    same: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        same.setdefault((fault.kind, fault.text), []).append(fault)
    for (kind, text), group in same.items():
        engines = tuple(dict.fromkeys(label for fault in group for label in fault.engines))
        ages = [fault.age_seconds for fault in group if fault.age_seconds is not None]
        times = sum(fault.times for fault in group)
        yield Fault(kind, engines, text, times, min(ages, default=None))


def _of_spaces(reading: NodeReading, limits: Limits) -> Iterator[Fault]:
    for space in reading.namespaces:
        state, reason = judge_coordinator(space, reading.at_ns, limits)
        if state is not State.HEALTHY:
            yield Fault("state", (), f"namespace {space.name}: {reason}")
        for epoch in space.ended:
            yield Fault("state", (space.label_of(epoch),), "its process has ended")
        for epoch, problem in space.unreadable.items():
            yield Fault("state", (space.label_of(epoch),), problem)
        for told in space.declined:
            if not told.on_purpose:
                yield Fault("declined", (told.engine,), f"not sharing: {told.reason}")


def _of_states(judged: Sequence[tuple[EngineReading, Health]]) -> Iterator[Fault]:
    for engine, health in judged:
        for reason in health.reasons if health.state is not State.HEALTHY else ():
            yield Fault("state", (engine.label,), reason)


def _of_loners(
    reading: NodeReading, judged: Sequence[tuple[EngineReading, Health]]
) -> Iterator[Fault]:
    """Engines that share nothing, because the others of their namespace differ from them."""
    alike = Counter((engine.namespace, engine.fingerprint) for engine in reading.engines)
    together = Counter(engine.namespace for engine in reading.engines)
    for engine, health in judged:
        alone = alike[engine.namespace, engine.fingerprint] == 1
        told = any(reason.startswith(ALONE) for reason in health.reasons)
        if alone and health.live and not told and together[engine.namespace] > 1:
            text = f"{ALONE}: no other engine here has its fingerprint"
            yield Fault("alone", (engine.label,), text)


def _of_paths(copies: Sequence[Copies]) -> Iterator[Fault]:
    for pair in copies:
        if pair.slow:
            yield Fault("slow", (pair.importer,), f"copies from {pair.exporter}: {pair.slow}")


def _age(last_ns: int, reading: NodeReading) -> float:
    return max(reading.real_ns - last_ns, 0) / 1e9
