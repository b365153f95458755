"""KvshmConnector with a stopwatch around each method of its own; vLLM loads it by its path.

A step runs, on the scheduler's side, from the end of ``build_connector_meta``, when it is
dispatched, to the end of ``update_connector_output``, when its output is taken in; on the worker's
side from ``bind_connector_metadata`` to ``clear_connector_metadata``.  What takes in a step's
output counts for that step: it needs an engine that schedules synchronously.  Both are written,
per step, when the engine shuts down: to BENCH_HOOKS_DIRECTORY/<side>.json.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvshm.hooks.vllm.connector import KvshmConnector

DIRECTORY = "BENCH_HOOKS_DIRECTORY"
STEP_BEGINS = "bind_connector_metadata"
STEP_ENDS = "clear_connector_metadata"
STEP_BUILT = "build_connector_meta"
STEP_ANSWERED = "update_connector_output"
COPIES = "start_load_kv"
"""In a step that waits for imports, this is what waits."""
SCHEDULES = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "blocks_wanted",
    "blocks_handed_out",
    "block_changes",
    STEP_BUILT,
)
"""The scheduler's hooks that belong to the step to be built; all others to the one built last."""
EMPTY = ("save_kv_layer", "wait_for_layer_load", "has_connector_metadata")
"""Called for every layer and empty, or nearly: a stopwatch would measure itself."""


class TimedConnector(KvshmConnector):
    """Counts the nanoseconds spent inside kvshm in every step."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self.role_name = role.name.lower()
        self.depth = 0
        self.began = 0
        self.spent, self.computed = 0, 0
        self.copied = 0
        self.calls = 0
        self.last = 0
        """The step built last; 0: an idle one."""
        self.steps: dict[int, list[int]] = {}
        """Number of the step -> nanoseconds of the step, of them in kvshm; of those computing,
        and copying what the step computes from; how often the stopwatch was used."""
        self.empty: list[int] = []
        """Nanoseconds that the stopwatch shows of a call of nothing."""
        self.methods: dict[str, list[int]] = {}
        """Name of the method -> calls, nanoseconds in all of them, of the longest one."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.spent, self.computed = 0, 0

    def called(self, name: str, spent: int, computed: int) -> None:
        """Note one call of a hook."""
        calls = self.methods.setdefault(name, [0, 0, 0])
        calls[:] = calls[0] + 1, calls[1] + spent, max(calls[2], spent)
        if self.role_name == "scheduler" and name not in SCHEDULES:
            if self.last:
                step = self.steps[self.last]
                step[1:3] = step[1] + spent, step[2] + computed
                step[4] += 1
            return
        self.spent += spent
        self.computed += computed
        self.calls += 1
        if name == COPIES and self._connector_metadata.at_once:
            self.copied += spent

    def step_over(self, step: int, now: int) -> None:
        """Note one step; an idle one has number 0 and does not count."""
        if step:
            taken = now - self.began if self.role_name == "worker" else 0  # known when answered
            self.steps[step] = [taken, self.spent, self.computed, self.copied, self.calls]
        self.last = step
        self.step_begins(now)
        call = functools.partial(_nothing, self)
        begin = time.perf_counter_ns()
        call()
        self.empty.append(time.perf_counter_ns() - begin)

    def step_begins(self, now: int) -> None:
        """Nothing of the next step has been counted."""
        self.began, self.spent, self.computed, self.copied, self.calls = now, 0, 0, 0, 0

    def write(self) -> None:
        """Write what was counted."""
        path = Path(os.environ[DIRECTORY]) / f"{self.role_name}.json"
        found = {"steps": self.steps, "methods": self.methods, "empty": self.empty}
        path.write_text(json.dumps(found))


def _nothing(self: TimedConnector) -> None:
    pass


def _timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(self: TimedConnector, *args: Any, **kwargs: Any) -> Any:
        if self.depth:  # a hook that calls another one is counted once
            return method(self, *args, **kwargs)
        # What the stopwatch itself takes lies outside of what the wall clock sees: binding the
        # arguments, which allocates and may begin a collection of garbage, and asking for the
        # thread's time, which takes a microsecond.
        call = functools.partial(method, self, *args, **kwargs)
        self.depth += 1
        cpu, begin = time.thread_time_ns(), time.perf_counter_ns()
        if name == STEP_BEGINS:
            self.step_begins(begin)
            self.bound_step = args[0].step
        try:
            result = call()
        finally:
            end = time.perf_counter_ns()
            self.depth -= 1
            self.called(name, end - begin, time.thread_time_ns() - cpu)
        if name == STEP_ENDS:
            self.step_over(self.bound_step, end)
        elif name == STEP_BUILT:
            self.step_over(result.step, end)
        elif name == STEP_ANSWERED and self.last:
            self.steps[self.last][0] = end - self.began
        elif name == "shutdown":
            self.write()
        return result

    return timed


def _instrument() -> None:
    """Wrap every method that KvshmConnector itself has, and the two that mark a step."""
    inherited = {STEP_ENDS: KvshmConnector.clear_connector_metadata}
    for name, method in {**inherited, **vars(KvshmConnector)}.items():
        if inspect.isfunction(method) and not name.startswith("_") and name not in EMPTY:
            setattr(TimedConnector, name, _timed(name, method))


_instrument()
