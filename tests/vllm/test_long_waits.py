"""A request that waits for many steps is imported; one that vLLM has no room for is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from kvshm._shm import statistics as c

from .scheduling import BLOCK_SIZE, Sent, prompt
from .test_decisions import BLOCKS, Node, node

__all__ = ["node"]

STEPS = 300


def waits_throttled(n: Node) -> Sent:
    """vLLM lets no prefill in, asks for it in each step all the same, and then schedules it."""
    for _ in range(STEPS):
        held_up = n.e.schedule(throttled=True)
        assert not held_up.metadata.at_once
        n.answer(held_up)
    return n.e.schedule()


def waits_paused(n: Node) -> Sent:
    n.e.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(STEPS):
        n.answer(n.e.schedule())
    n.e.scheduler.set_pause_state(PauseState.UNPAUSED)
    return n.e.schedule()


def waits_for_a_place(n: Node) -> Sent:
    """As many requests run as may."""
    n.e.scheduler.max_num_active_reqs = 1
    for _ in range(STEPS):
        n.answer(n.e.schedule())
    n.e.scheduler.max_num_active_reqs = 8
    return n.e.schedule()


@pytest.mark.parametrize("wait", [waits_throttled, waits_paused, waits_for_a_place])
def test_however_long_a_request_waits_it_imports_what_a_local_hit_would_give(
    node: Callable[..., Node], wait: Callable[[Node], Sent]
) -> None:
    n = node("auto")
    n.attach()
    n.measure(per_token=0.001)
    n.e.add("decodes too", prompt(0), max_tokens=400)
    n.e.step()
    n.e.add("wants", prompt(BLOCKS))
    (load,) = wait(n).metadata.at_once
    assert len(load.targets) == BLOCKS
    assert n.count(c.MISS_CHEAPER) + n.count(c.MISS_NO_ROOM) == 0


def test_what_vllm_finds_no_room_for_is_computed_until_more_blocks_are_free(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM schedules no request behind one that it does not admit."""
    n = node()
    n.attach()
    manager = n.e.scheduler.kv_cache_manager
    plain, asked = manager.allocate_slots, []

    def refuses(request: Request, *args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("num_external_computed_tokens"))
        return None if asked[-1] else plain(request, *args, **kwargs)

    monkeypatch.setattr(manager, "allocate_slots", refuses)
    n.e.add("wants", prompt(BLOCKS), max_tokens=4)
    n.answer(n.e.schedule())
    assert n.count(c.MISS_NO_ROOM) == 1
    computing = n.e.schedule()
    assert computing.output.num_scheduled_tokens["wants"] == len(prompt(BLOCKS))
    assert asked == [BLOCKS * BLOCK_SIZE, 0]
