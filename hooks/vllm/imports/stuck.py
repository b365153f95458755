"""Imported blocks that keep all requests of an engine waiting, and how they are given back.

A request whose asynchronous load has ended holds blocks while it waits, as a session does between
its inputs.  vLLM schedules nobody behind one of these for whose rest there is no room, and it
preempts running requests only.  Before an asynchronous load vLLM and kvshm make sure of that room;
but a session may take it meanwhile, and then wait behind the request, for ever.
"""

from __future__ import annotations

from kvshm.halves import MISS_NO_ROOM, SchedulerHalf

from ..vllm_scheduler import VllmScheduler
from .importer import RequestImporter


def free_stuck(vllm: VllmScheduler | None, importer: RequestImporter, cache: SchedulerHalf) -> None:
    """A step without tokens was built, while requests wait whose load has ended: if no request can
    run before these do, and there is no room, give their blocks back.  They are computed then."""
    if vllm is None or (room := importer.room) is None:
        return
    scheduler = vllm.scheduler
    holding = list(scheduler.kv_holding_waiting)
    if scheduler.running or scheduler.deferred_frees or all(map(room.has_room, holding)):
        return
    if stuck := {request.request_id for request in holding} & importer.unscheduled:
        vllm.give_back(stuck)
        cache.count(MISS_NO_ROOM, len(stuck))
