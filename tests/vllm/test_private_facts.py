"""What kvshm relies on in vLLM beyond its documented interface: one test per fact.

docs/vllm-facts.md lists them by the names of these tests.  One that fails on a later vLLM says
what has to be looked at before that version is called tested (hooks/vllm/identity/refusals.py).
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.attention import kv_transfer_utils
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import RequestStatus
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvshm.hooks.vllm import plugin, shutdown
from kvshm.hooks.vllm.exports.pool_watch import TABLES, by_group

from .played_core import NOTED, Calls
from .scheduling import BLOCK_SIZE, DrivenEngine, Make, prompt


def in_order(function: Any, *pieces: str) -> None:
    """The source of ``function`` has these pieces, in this order."""
    source, place = inspect.getsource(function), 0
    for piece in pieces:
        place = source.find(piece, place)
        assert place != -1, f"{function.__qualname__} has no {piece} there"


def pool(engine: DrivenEngine) -> Any:
    return engine.scheduler.kv_cache_manager.block_pool


# -- blocks and their hashes


def test_a_hash_is_the_requests_and_four_bytes_of_group(engine: Make) -> None:
    e = engine()
    digest = e.add("a", prompt(2)).block_hashes[0]
    e.schedule()
    block = e.scheduler.kv_cache_manager.get_blocks("a").blocks[0][0]
    assert bytes(block.block_hash) == bytes(digest) + bytes(4)  # the number of its group, 0
    assert kv_cache_utils.make_block_hash_with_group_id(digest, 258) == digest + b"\0\0\1\2"
    assert block.block_hash_num_tokens in (None, BLOCK_SIZE)
    assert not block.is_null


def test_what_a_block_says_stands_in_slots_that_nobody_replaces() -> None:
    block = kv_cache_utils.KVCacheBlock
    names = ("block_id", "ref_cnt", "_block_hash", "next_free_block")
    assert all(inspect.ismemberdescriptor(vars(block)[name]) for name in names)
    in_order(block.block_hash.fget, "return self._block_hash\n")
    texts = [path.read_text() for path in Path(vllm.__file__).parent.glob("v1/**/*.py")]
    assert not any(re.search(r"KVCacheBlock\.\w+ = |setattr\(KVCacheBlock\b", t) for t in texts)


def test_blocks_are_hashed_when_they_are_scheduled(engine: Make) -> None:
    e = engine()
    e.add("a", prompt(2))
    e.schedule()
    hashed = [b for b in e.scheduler.kv_cache_manager.get_blocks("a").blocks[0] if b.block_hash]
    assert len(hashed) == 2


def test_a_requests_hashes_are_one_list_that_grows(engine: Make) -> None:
    e = engine()
    request = e.add("a", prompt(1, tail=15), max_tokens=8)
    hashes = request.block_hashes
    assert len(hashes) == 1
    e.step()
    e.step()
    assert request.block_hashes is hashes
    assert len(hashes) == 2


def test_block_tables_are_kept_by_request(engine: Make) -> None:
    e = engine()
    (tables,) = by_group(e.scheduler.kv_cache_manager, TABLES, 1)
    e.add("a", prompt(2), max_tokens=1)
    e.schedule()
    assert [block.block_id for block in tables["a"]] == e.blocks_of("a") != []
    e.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert "a" not in tables


def test_free_blocks_keep_their_hash_until_they_are_handed_out(engine: Make) -> None:
    e = engine()
    e.add("a", prompt(2), max_tokens=1)
    e.step()
    assert sum(b.block_hash is not None for b in pool(e).blocks) == 2
    assert pool(e).get_num_free_blocks() == len(pool(e).blocks) - 1  # one is the null block


def test_every_change_of_a_block_passes_the_wrapped_methods(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called on the instance; hashes are written and dropped by these lines alone."""
    e = engine()
    seen: list[str] = []
    for name in ("get_new_blocks", "_remove_cached_block_hashes", "reset_prefix_cache"):
        method = getattr(pool(e), name)
        monkeypatch.setattr(
            pool(e), name, lambda *a, n=name, m=method, **k: (seen.append(n), m(*a, **k))[1]
        )
    e.add("a", prompt(2), max_tokens=1)
    e.step()
    e.scheduler.kv_cache_manager.evict_blocks({1})
    e.scheduler.reset_prefix_cache()
    assert set(seen) == {"get_new_blocks", "_remove_cached_block_hashes", "reset_prefix_cache"}
    source = inspect.getsource(BlockPool)
    dropped = re.findall(r"def (\w+)|(\.reset_hash\(\))", source)
    methods = {dropped[i - 1][0] for i, (_, drop) in enumerate(dropped) if drop}
    assert methods <= {"_remove_cached_block_hashes", "reset_prefix_cache", "cache_full_blocks", ""}


def test_hashes_are_given_by_one_method_of_the_pool(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine()
    given: set[Any] = set()
    monkeypatch.setattr(pool(e), "cache_full_blocks", lambda request, *_, **__: given.add(request))
    e.add("a", prompt(2), max_tokens=1)
    e.step()
    assert {request.request_id for request in given} == {"a"}
    assert not [block for block in pool(e).blocks if block.block_hash is not None]


def test_the_pool_tells_what_it_has_and_how_much_is_free(engine: Make) -> None:
    e = engine()
    request = e.add("a", prompt(2), max_tokens=1)
    assert pool(e).get_cached_block(request.block_hashes[0], [0]) is None
    before = pool(e).get_num_free_blocks()
    e.schedule()
    assert pool(e).get_cached_block(request.block_hashes[0], [0])
    assert pool(e).get_num_free_blocks() == before - 3


def test_a_reset_needs_all_blocks_free(engine: Make) -> None:
    e = engine()
    e.add("a", prompt(2), max_tokens=9)
    e.step()
    assert pool(e).reset_prefix_cache() is False


def test_the_hash_before_the_first_block_is_chosen_after_the_connectors(core_start: Calls) -> None:
    assert list(core_start) == list(NOTED)
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))
    assert len(bytes(kv_cache_utils.NONE_HASH)) == 32


# -- steps


def test_a_step_is_described_before_its_tokens_are_counted() -> None:
    in_order(Scheduler.schedule, "_build_kv_connector_meta(", "self._update_after_schedule(")


def test_placeholders_count_tokens_on_their_way(engine: Make) -> None:
    e = engine(asynchronous=True)
    request = e.add("a", prompt(1), max_tokens=9)
    first = e.schedule()
    assert (request.num_output_placeholders, request.num_computed_tokens) == (1, BLOCK_SIZE + 3)
    e.run(first)
    assert (request.num_output_placeholders, request.num_tokens) == (0, BLOCK_SIZE + 4)


def test_an_output_is_taken_in_in_this_order() -> None:
    """Deferred blocks, failed loads, tokens, and the connector last."""
    in_order(
        Scheduler.update_from_output,
        "self._drain_deferred_frees()",
        "self._handle_invalid_blocks(",
        "self._update_request_with_output(",
        "self._update_from_kv_xfer_finished(",
    )
    in_order(
        Scheduler._update_from_kv_xfer_finished,
        "self.connector.update_connector_output(",
        "self.finished_recving_kv_req_ids.add(",
    )


def test_the_core_takes_outputs_in_by_the_schedulers_own_method() -> None:
    """Called on the instance, so that what is wrapped there comes first."""
    for step in (EngineCore.step, EngineCore.step_with_batch_queue):
        in_order(step, "self.scheduler.update_from_output(")


def test_a_preempted_requests_output_under_way_can_be_dropped(engine: Make) -> None:
    e = engine(asynchronous=True)
    request = e.add("a", prompt(2), max_tokens=9)
    under_way = [e.schedule(), e.schedule()]
    e.scheduler.running.remove(request)
    e.scheduler._preempt_request(request, 0.0, drop_stale_output=True)
    assert (request.num_preemptions, request.num_computed_tokens) == (1, 0)
    assert e.blocks_of("a") == []
    assert e.scheduler.requests["a"] is request
    for sent in under_way:
        e.run(sent)
    assert request.num_output_tokens == 0


def test_a_request_that_is_preempted_says_so(engine: Make) -> None:
    """Its number of preemptions tells one block table from the next."""
    in_order(Scheduler._preempt_request, "_free_request_blocks(", "num_preemptions += 1")
    in_order(Scheduler._update_request_as_session, "num_prompt_tokens")


def test_pending_work_keeps_an_idle_engine_stepping(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine()
    assert not e.scheduler.has_requests()
    monkeypatch.setattr(e.connector, "has_pending_push_work", lambda: True)
    assert e.scheduler.has_requests()


def test_a_rank_reports_after_the_model_was_launched() -> None:
    for called in (ActiveKVConnector.post_forward, KVConnectorModelRunnerMixin):
        in_order(
            called,
            "start_load_kv(",
            "wait_for_save()",
            "get_transfer_results(",
            "get_block_ids_with_load_errors()",
            "build_connector_worker_meta()",
        )


def test_loads_that_a_step_does_not_need_begin_after_its_forward() -> None:
    in_order(ActiveKVConnector.pre_forward, "bind_connector_metadata(", "has_sync_kv_loads")
    in_order(ActiveKVConnector.post_forward, "_start_load_kv()", "wait_for_save()")


def test_loads_that_a_step_needs_end_before_its_forward() -> None:
    in_order(ActiveKVConnector.pre_forward, "has_sync_kv_loads", "_start_load_kv()")
    in_order(
        KVConnectorModelRunnerMixin,
        "has_sync_kv_loads",
        "start_load_kv(",
        "yield",
        "start_load_kv(",
    )
    in_order(Scheduler.schedule, "has_sync_kv_loads = True", "has_sync_kv_loads=has_sync")


def test_a_drafter_may_write_after_its_steps_report() -> None:
    """So with speculation a step's blocks are shown one step later."""
    in_order(GPUModelRunner.sample_tokens, "propose_draft_token_ids(", "finalize_kv_connector()")


def test_reports_of_all_ranks_become_one() -> None:
    in_order(KVOutputAggregator.aggregate, "kv_connector_worker_meta.aggregate(")


def test_the_layer_hooks_are_left_out_without_metadata() -> None:
    wrapper, asked = kv_transfer_utils.maybe_transfer_kv_layer, "has_connector_metadata()"
    in_order(wrapper, asked, "wait_for_layer_load(", "save_kv_layer(")


# -- blocks that wait for steps in flight, failed loads, resets


def test_an_importer_makes_vllm_hold_freed_blocks_back(engine: Make) -> None:
    e = engine(asynchronous=True)
    assert e.scheduler.defer_block_free
    e.add("a", prompt(2), max_tokens=9)
    e.schedule()
    e.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    ((fence, blocks),) = e.scheduler.deferred_frees
    assert (fence, e.scheduler.processed_step_seq, len(blocks)) == (1, 0, 3)


def test_a_policy_of_recomputing_is_read_once(engine: Make) -> None:
    """By the Scheduler, off the outermost connector's configuration."""
    own = "self.recompute_kv_load_failures = "
    in_order(Scheduler.__init__, "create_connector(", own, "bind_kv_cache_manager(")
    assert engine().scheduler.recompute_kv_load_failures is True


def test_a_load_that_failed_leaves_its_request_as_new(engine: Make) -> None:
    """What hooks/vllm/vllm_scheduler.py does with it, by vLLM's own methods."""
    e = engine()
    e.connector._scheduler.importer.match = lambda *_: 2 * BLOCK_SIZE
    request = e.add("a", prompt(3))
    e.schedule()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert request in e.scheduler.kv_holding_waiting
    e.scheduler._handle_failed_recving({"a"})
    e.scheduler.finished_recving_kv_req_ids.add("a")
    assert e.scheduler._handle_blocked_waiting_request(request)
    assert (request.status, request.num_computed_tokens) == (RequestStatus.WAITING, 0)
    assert e.blocks_of("a") == []
    assert not e.scheduler.finished_recving_kv_req_ids
    assert isinstance(e.scheduler._inflight_prefills, set)


def test_a_load_is_reported_once() -> None:
    in_order(
        Scheduler._update_from_kv_xfer_finished,
        "WAITING_FOR_REMOTE_KVS",
        "assert Request",
        "finished_sending or ()",
        "assert req_id in self.requests",
        "self._free_blocks(",
    )


def test_a_forced_reset_preempts_first(engine: Make) -> None:
    in_order(Scheduler.reset_prefix_cache, "_preempt_request(", "kv_cache_manager.reset_prefix")
    parameters = list(inspect.signature(Scheduler.reset_prefix_cache).parameters)
    assert parameters[1] == "reset_running_requests"
    assert engine().scheduler.reset_prefix_cache(True, False)


# -- who calls, and who is among the callers


def test_connectors_are_derived_by_one_method_before_anything_uses_them() -> None:
    in_order(
        VllmConfig.__post_init__, f"self.{plugin.TOUCHPOINT}()", "KVConnectorFactory.supports_hma"
    )


def test_the_scheduler_binds_its_manager_itself(engine: Make) -> None:
    assert engine().connector._scheduler._vllm is not None


def test_ending_an_engine_kills_it_and_cancels_the_task_of_its_requests() -> None:
    used = ("manager_stopped.set()", "_finalizer.det", "_request_shutdown_timeout", "processes")
    in_order(getattr(engine_utils.CoreEngineProcManager, shutdown.TOUCHPOINT), *used)
    in_order(AsyncLLM.shutdown, "engine_core.shutdown(", f"{shutdown.CANCEL_TOUCHPOINT}(handler)")


def test_the_core_hands_over_what_ranks_said_and_has_the_executor(core_start: Calls) -> None:
    (core,) = core_start["set_xfer_handshake_metadata_pp_aware"]
    assert isinstance(core, EngineCore)
    for executor in (UniProcExecutor, MultiprocExecutor):
        parameters = list(inspect.signature(executor.collective_rpc).parameters)
        assert " ".join(parameters[1:4]) == "method timeout args"
    assert run_method(self_made := object(), lambda *given: given, (1,), {}) == (self_made, 1)
    in_order(WorkerProc._execute_worker_rpc, "cloudpickle.loads(method), self.worker")


def test_the_model_runner_registers_the_caches_itself() -> None:
    in_order(ActiveKVConnector.__init__, "register_kv_caches(")
    assert all(callable(owner.get_model) for owner in (GPUModelRunner, Worker))


def test_weights_are_loaded_by_methods_of_these_names() -> None:
    runner = GPUModelRunner
    assert all(map(callable, (runner.reload_weights, runner.load_model, Worker.update_weights)))


def test_packed_weights_can_be_asked_by_their_kernel() -> None:
    in_order(layer_utils.dispatch_cpu_unquantized_gemm, "layer.cpu_linear = ")


def test_a_multiconnector_gives_one_answer_to_all() -> None:
    in_order(MultiConnector.get_handshake_metadata, "is not None", "return metadata")
    in_order(MultiConnector.set_xfer_handshake_metadata_pp_aware, "for c in self._connectors")
    assert isinstance(MultiConnector.sub_connectors, property)


def test_a_multiconnector_loads_from_the_connector_that_it_has_noted() -> None:
    in_order(
        MultiConnector.get_num_new_matched_tokens,
        "if toks is None:",
        "return (None, False)",
        "self._requests_to_connector[request.request_id] = i",
    )
    in_order(
        MultiConnector.update_state_after_alloc,
        "self._requests_to_connector.get(request.request_id, -1)",
        "c.update_state_after_alloc(request, blocks, num_external_tokens)",
        "c.update_state_after_alloc(request, blocks, 0)",
    )
    in_order(
        Scheduler.schedule,
        "self.connector.get_num_new_matched_tokens(",
        "self.connector.update_state_after_alloc(",
        "if load_kv_async:",
    )


def test_an_offloading_connector_ends_its_copies_of_blocks_that_it_knows_to_be_taken() -> None:
    scheduler = OffloadingConnectorScheduler
    build = getattr(scheduler, "_build_connector_meta", scheduler.build_connector_meta)
    noted = "self._current_batch_allocated_block_ids"
    in_order(build, noted, "self._current_batch_jobs_to_flush.update(", "jobs_to_flush=")
    in_order(OffloadingConnectorWorker.handle_preemptions, ".jobs_to_flush", "self.worker.wait(")
    in_order(OffloadingConnector.__init__, "self.connector_scheduler = OffloadingConnectorSched")


def test_transfer_configurations_have_these_names() -> None:
    made = KVTransferConfig(kv_connector="x", kv_role="kv_both")
    assert (made.is_kv_consumer, made.is_kv_producer) == (True, True)
    assert made.kv_load_failure_policy == "fail"
