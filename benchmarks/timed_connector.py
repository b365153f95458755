"""KvshmConnector with a stopwatch around each method of its own; vLLM loads it by its path.

A step runs, on the scheduler's side, from one ``build_connector_meta`` to the next, and on
the worker's side from ``bind_connector_metadata`` to ``clear_connector_metadata``.  Both are
written, per step, when the engine shuts down: to BENCH_HOOKS_DIRECTORY/<side>.json.
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

from kvshm.hooks.connector import KvshmConnector

DIRECTORY = "BENCH_HOOKS_DIRECTORY"
STEP_BEGINS = "bind_connector_metadata"
STEP_ENDS = "clear_connector_metadata"
STEP_BUILT = "build_connector_meta"
EMPTY = ("save_kv_layer", "wait_for_layer_load")
"""Called for every layer and empty: a stopwatch would measure itself."""


class TimedConnector(KvshmConnector):
    """Counts the nanoseconds spent inside kvshm in every step."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self.role_name = role.name.lower()
        self.depth = 0
        self.began = 0
        self.spent, self.computed = 0, 0
        self.steps: dict[int, tuple[int, int, int]] = {}
        """Number of the step -> nanoseconds of the step, of them in kvshm, of those computing."""
        self.methods: dict[str, list[int]] = {}
        """Name of the method -> calls, nanoseconds in all of them, of the longest one."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.spent, self.computed = 0, 0

    def called(self, name: str, spent: int, computed: int) -> None:
        """Note one call of a hook."""
        self.spent += spent
        self.computed += computed
        calls = self.methods.setdefault(name, [0, 0, 0])
        calls[:] = calls[0] + 1, calls[1] + spent, max(calls[2], spent)

    def step_over(self, step: int, now: int) -> None:
        """Note one step; an idle one has number 0 and does not count."""
        if step:
            self.steps[step] = (now - self.began, self.spent, self.computed)
        self.began, self.spent, self.computed = now, 0, 0

    def write(self) -> None:
        """Write what was counted."""
        path = Path(os.environ[DIRECTORY]) / f"{self.role_name}.json"
        path.write_text(json.dumps({"steps": self.steps, "methods": self.methods}))


def _timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(self: TimedConnector, *args: Any, **kwargs: Any) -> Any:
        if self.depth:  # a hook that calls another one is counted once
            return method(self, *args, **kwargs)
        # Asking for the thread's time takes a microsecond: outside of what the wall clock sees.
        cpu, begin = time.thread_time_ns(), time.perf_counter_ns()
        if name == STEP_BEGINS:
            self.began, self.spent, self.computed = begin, 0, 0
            self.bound_step = args[0].step
        self.depth += 1
        try:
            result = method(self, *args, **kwargs)
        finally:
            self.depth -= 1
            end = time.perf_counter_ns()
            self.called(name, end - begin, time.thread_time_ns() - cpu)
        if name == STEP_ENDS:
            self.step_over(self.bound_step, end)
        elif name == STEP_BUILT:
            self.step_over(result.step, end)
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
