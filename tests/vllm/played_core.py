"""vLLM's real EngineCore without workers: what it calls, and when, while it starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.config import VllmConfig
from vllm.v1.engine import core as core_module
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from kvshm.hooks.vllm.call_stack import callers_with
from kvshm.hooks.vllm.connector import KvshmConnector

from .scheduling import description, full

NOTED = {
    "__init__": KvshmConnector,
    "set_xfer_handshake_metadata_pp_aware": KvshmConnector,
    "init_none_hash": core_module,
}

Calls = dict[str, list[Any]]
"""Those of NOTED that a start has called, in their order, each with its callers that have an
executor."""

ANSWERS: dict[str, Any] = {
    "get_kv_cache_spec": {"layer": full()},
    "get_supported_kv_cache_layouts": ["LBNHC", "LBHNC"],
    "determine_available_memory": 1 << 22,
    "get_kv_connector_handshake_metadata": {(0, 0): description()},
    "compile_or_warm_up_model": SimpleNamespace(language_model=0.0, encoder=0.0),
    "supported_tasks": ("generate",),
}
"""What the one worker answers; None to everything else."""

FOR_THE_PROCESS = ("enable_envs_cache", "freeze_gc_heap", "maybe_attach_gc_debug_callback")
"""What an EngineCore changes in its process, which here goes on with other tests."""


class WithoutWorkers(UniProcExecutor):
    """vLLM's executor; the worker is played."""

    def _init_executor(self) -> None:
        pass

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> list[Any]:
        return [ANSWERS.get(method)]

    def shutdown(self) -> None:
        pass


def calls_of_a_start(config: VllmConfig) -> Calls:
    """Start an EngineCore and end it."""
    calls: Calls = {}

    def noting(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def note(*args: Any, **kwargs: Any) -> Any:
            calls[name] = callers_with("model_executor")
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, note)

    with ExitStack() as patched:
        for name, owner in NOTED.items():
            patched.enter_context(noting(owner, name))
        patched.enter_context(started_core(config))
    return calls


@contextmanager
def started_core(config: VllmConfig) -> Iterator[EngineCore]:
    """An EngineCore that has started; it ends with the context."""
    same_process = dict.fromkeys(FOR_THE_PROCESS, lambda: None)
    with mock.patch.multiple(core_module, **same_process):
        core = EngineCore(config, WithoutWorkers, log_stats=False)
    try:
        yield core
    finally:
        core.shutdown()
