"""News as tests compare them: a name, and what is said under it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvshm.node.news import Coordinator, EventBatches, EventsLost, News
from kvshm.node.protocol import (
    EngineGone,
    EngineJoined,
    EngineRecovered,
    EngineSuspected,
    Joined,
    Refused,
    StrangerJoined,
    Tick,
)

_NAMES: dict[type, tuple[str, tuple[str, ...]]] = {
    Joined: ("joined", ()),
    Refused: ("refused", ()),
    EngineJoined: ("engine_joined", ("engine",)),
    EngineSuspected: ("engine_suspected", ("epoch",)),
    EngineRecovered: ("engine_recovered", ("epoch",)),
    EngineGone: ("engine_gone", ("epoch", "reason")),
    EventBatches: ("engine_events", ("batches",)),
    EventsLost: ("rescan", ("epoch",)),
    StrangerJoined: ("stranger_joined", ("stranger",)),
    Tick: ("strangers_counted", ("strangers",)),
}


def told(news: News) -> tuple[Any, ...]:
    """Return the name of what is told, and what of it counts for an engine."""
    if isinstance(news, Coordinator):
        return (f"coordinator_{news.value}",)
    name, fields = _NAMES[type(news)]
    return (name, *(getattr(news, field) for field in fields)) if fields else (name, news)


def all_told(news: Iterable[News]) -> list[tuple[Any, ...]]:
    """Return the same for several, without Joined and Tick, which come with each join and each
    second."""
    return [told(item) for item in news if not isinstance(item, Joined | Tick)]
