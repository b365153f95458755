"""What kvshm relies on in vLLM where the ranks are called from outside (docs/vllm-facts.md)."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

pytest.importorskip("vllm")

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import FutureWrapper, MultiprocExecutor, WorkerProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.gpu_worker import Worker

from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.rank_calls import HARMLESS, WRITING

from .test_private_facts import in_order


def test_calls_of_the_ranks_pass_the_executor() -> None:
    in_order(LLMEngine.apply_model, 'self.collective_rpc("apply_model"')
    in_order(EngineCore.collective_rpc, "self.model_executor.collective_rpc(")
    for executor in (Executor, UniProcExecutor, MultiprocExecutor):
        calls = re.findall(r"(\w+)\.collective_rpc\(", inspect.getsource(executor))
        assert set(calls) <= {"self"}
    in_order(MultiprocExecutor.collective_rpc, "self.rpc_broadcast_mq.enqueue(", "if non_block")
    in_order(FutureWrapper.result, "self.futures_queue.pop()", "_wait_for_response()")
    in_order(UniProcExecutor.collective_rpc, "run_method(self.driver_worker, method, args, kwargs)")


def test_a_rank_ends_a_call_before_it_takes_the_next() -> None:
    """So ranks run calls in the order in which they were sent."""
    rank, happened = object.__new__(WorkerProc), []
    calls = [
        ("sleep", (1,), {}, None),
        (cloudpickle.dumps(lambda worker: worker.wake_up()), (), {}, None),
    ]

    def dequeue(**_: Any) -> Any:
        happened.append("taken")
        return calls.pop(0)  # an IndexError ends the loop

    rank.rpc_broadcast_mq = SimpleNamespace(dequeue=dequeue)
    rank.worker = SimpleNamespace(
        sleep=lambda level: happened.append(f"slept {level}"),
        wake_up=lambda: happened.append("woke"),
    )
    rank.handle_output = lambda output: happened.append(output)
    with pytest.raises(IndexError):
        rank.worker_busy_loop()
    assert happened == ["taken", "slept 1", None, "taken", "woke", None, "taken"]


STARTING = {
    "adjust_rank", "compile_or_warm_up_model", "determine_available_memory",
    "get_simple_cpu_offload_num_cpu_blocks", "init_device",
    "init_worker", "initialize_from_config", "load_model", "set_kv_cache_layout",
    "update_environment_variables", "update_max_model_len",
}  # fmt: skip


def test_harmless_calls_are_methods_that_vllm_has() -> None:
    root, called = Path(vllm.__file__).parent, set()
    for folder in ("v1", "entrypoints", "engine", "distributed", "snapshot", "model_executor"):
        for file in (root / folder).rglob("*.py"):
            called |= set(re.findall(r'collective_rpc\(\s*"(\w+)"', file.read_text()))
    assert called >= {"execute_model", "sleep", "update_weights"}, "they are called another way"
    assert called <= HARMLESS | WRITING | STARTING
    assert not HARMLESS & (WRITING | STARTING)
    missing = [name for name in HARMLESS if not hasattr(Worker, name)]
    assert missing == []


def test_weights_sleep_and_wake_by_methods_of_these_names() -> None:
    in_order(Worker.sleep, "sleep_mode_backend.suspend(")
    in_order(Worker.discard, "sleep_mode_backend.discard(")
    in_order(Worker.wake_up, "sleep_mode_backend.resume(")


def test_sleep_resets_first_and_only_a_full_wake_up_resumes_steps() -> None:
    in_order(
        EngineCore.sleep, "clear_prefix_cache = level >= 1", "self.pause_scheduler(", "sleep(level)"
    )
    in_order(EngineCore.pause_scheduler, "self._finish_pause(clear_cache)")
    in_order(EngineCore._finish_pause, "if clear_cache:", "self._reset_caches()")
    in_order(EngineCore.release_kv_cache_memory, "self._reset_caches()", "model_executor.discard(")
    resumes = "self.model_executor.is_sleeping", "if fully_awake:", "self.resume_scheduler()"
    in_order(EngineCore.wake_up, "self.model_executor.wake_up(tags)", *resumes)


def test_connectors_are_informed_before_the_kv_cache_is_unmapped() -> None:
    if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return  # vLLM 0.32: test_weights_sleep_and_wake_by_methods_of_these_names
    reported = "get_kv_transfer_group().unregister_kv_caches()"
    in_order(Worker.sleep, reported, "sleep_mode_backend.suspend(")
    in_order(Worker.discard, '"kv_cache" in tags', reported, "sleep_mode_backend.discard(")
    in_order(MultiConnector.unregister_kv_caches, "c.unregister_kv_caches()")
    in_order(MultiConnector.supports_sleep_mode, ".supports_sleep_mode(c)")
    assert KvshmConnector.supports_sleep_mode(None)
    for name in ("unregister_kv_caches", "restore_kv_caches", "supports_sleep_mode"):
        own, theirs = getattr(KvshmConnector, name), getattr(KVConnectorBase_V1, name)
        assert list(inspect.signature(own).parameters) == list(inspect.signature(theirs).parameters)
