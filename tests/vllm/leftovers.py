"""What kvshm still remembers when no request is left: nothing, in whatever table."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from .scheduling import DrivenEngine

HOOKS = "kvshm.hooks.vllm."
CONTAINERS = (dict, set, list, deque)
KEPT = {
    "BlockTracker._cached": "vLLM's numbers of cached blocks, by group",
    "BlockTracker._tables": "vLLM's block tables, by group",
    "RankDescriptions._given": "by rank",
    "ReadyPeers.attached": "attached peers, by rank",
    "StepTimes._seen": "how long steps took, by their sizes",
}
"""What is not of requests, loads or steps."""


def leftovers(side: Any) -> dict[str, Any]:
    """Return every container that is not empty, by class and name, of the objects of the hooks that
    the scheduler's half consists of: a table that a later change adds is among them."""
    return {place: found for place, found in _containers(side) if found and place not in KEPT}


def _containers(side: Any) -> Iterator[tuple[str, Any]]:
    waiting, seen = [side], {id(side)}
    while waiting:
        one = waiting.pop()
        for name, value in _attributes(one):
            if isinstance(value, CONTAINERS):
                yield f"{type(one).__name__}.{name}", value
            elif type(value).__module__.startswith(HOOKS) and id(value) not in seen:
                seen.add(id(value))
                waiting.append(value)


def _attributes(one: Any) -> Iterator[tuple[str, Any]]:
    slots = (name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ()))
    for name in {*getattr(one, "__dict__", ()), *slots}:
        yield name, getattr(one, name, None)


def assert_nothing_left(e: DrivenEngine) -> None:
    """No request is left, all blocks are free, and no table has an entry."""
    assert not e.scheduler.requests
    pool = e.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == len(pool.blocks) - 1
    left = leftovers(e.connector._scheduler)
    assert not left, sorted(left)
