"""KvshmConnector with a stopwatch around each of its methods; vLLM loads it by its path.

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


class TimedConnector(KvshmConnector):
    """Counts the nanoseconds spent inside kvshm in every step."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self.role_name = role.name.lower()
        self.spent = 0
        self.depth = 0
        self.began = 0
        self.steps: dict[int, tuple[int, int]] = {}
        """Number of the step -> (nanoseconds of the step, nanoseconds of them in kvshm)."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.spent = 0

    def step_over(self, step: int, now: int) -> None:
        """Note one step; an idle one has number 0 and does not count."""
        if step:
            self.steps[step] = (now - self.began, self.spent)
        self.spent = 0

    def write(self) -> None:
        """Write what was counted."""
        path = Path(os.environ[DIRECTORY]) / f"{self.role_name}.json"
        path.write_text(json.dumps(self.steps))


def _timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(self: TimedConnector, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter_ns()
        if name == STEP_BEGINS:
            self.began, self.spent = begin, 0
            self.bound_step = args[0].step
        self.depth += 1
        try:
            result = method(self, *args, **kwargs)
        finally:
            self.depth -= 1
            end = time.perf_counter_ns()
            if not self.depth:  # a hook that calls another one is counted once
                self.spent += end - begin
        if name == STEP_ENDS:
            self.step_over(self.bound_step, end)
        elif name == STEP_BUILT:
            self.step_over(result.step, end)
            self.began = end
        elif name == "shutdown":
            self.write()
        return result

    return timed


def _instrument() -> None:
    """Wrap every public method of the connector, inherited ones as well."""
    for name in dir(KvshmConnector):
        method = inspect.getattr_static(KvshmConnector, name)
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(TimedConnector, name, _timed(name, method))


_instrument()
