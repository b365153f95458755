"""Updates as tests compare them: a name, and what comes under it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvshm._node.protocol import (
    EngineGone,
    EngineJoined,
    EngineRecovered,
    EngineSuspected,
    IncompatibleJoined,
    Joined,
    Refused,
    Tick,
)
from kvshm._node.updates import Coordinator, EventBatches, EventsLost, Update

_NAMES: dict[type, tuple[str, tuple[str, ...]]] = {
    Joined: ("joined", ()),
    Refused: ("refused", ()),
    EngineJoined: ("engine_joined", ("engine",)),
    EngineSuspected: ("engine_suspected", ("epoch",)),
    EngineRecovered: ("engine_recovered", ("epoch",)),
    EngineGone: ("engine_gone", ("epoch", "reason")),
    EventBatches: ("engine_events", ("batches",)),
    EventsLost: ("rescan", ("epoch",)),
    IncompatibleJoined: ("incompatible_joined", ("engine",)),
    Tick: ("incompatible_counted", ("num_incompatible",)),
}


def named(update: Update) -> tuple[Any, ...]:
    """Return the name of an update, and what of it counts for an engine."""
    if isinstance(update, Coordinator):
        return (f"coordinator_{update.value}",)
    name, fields = _NAMES[type(update)]
    return (name, *(getattr(update, field) for field in fields)) if fields else (name, update)


def all_named(updates: Iterable[Update]) -> list[tuple[Any, ...]]:
    """Return the same for several, without Joined and Tick, which come with each join and each
    second."""
    return [named(item) for item in updates if not isinstance(item, Joined | Tick)]
