"""Engines whose memory sleeps, without a model and a GPU.

Real are vLLM's Scheduler, EngineCore's and Worker's sleep and wake_up, the executor, Model Runner
V2's calls of the connector, both sides of the connector, ``posix_shm`` and the coordinator.  Played
are the allocator, which protects memory that sleeps against every access, and the forward pass.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import allocate_kv_cache

from kvshm.hooks.vllm.connector import KvshmConnector

from .scheduling import BLOCK_SIZE, DrivenEngine, vllm_config
from .tiny_config import cache_config, spec

BLOCKS = 64
LAYERS = {f"layer.{i}": spec(block_size=BLOCK_SIZE) for i in range(2)}


class ProtectingBackend(SleepModeBackend):
    def __init__(self) -> None:
        super().__init__()
        self.areas: dict[str, tuple[int, int]] = {}
        self.saved: dict[str, bytes] = {}
        self.asleep: set[str] = set()
        self.before: Callable[[], None] = lambda: None
        """Called before memory is protected."""

    def suspend(self, level: int = 1) -> None:
        self.before()
        address, nbytes = self.areas["weights"]
        if level == 1:
            self.saved["weights"] = ctypes.string_at(address, nbytes)
        for tag in self.areas:
            self._protect(tag, 0)

    def discard(self, tags: tuple[str, ...]) -> None:
        self.before()
        for tag in tags:
            self._protect(tag, 0)

    def resume(self, tags: list[str] | None = None) -> None:
        for tag in sorted(self.asleep & set(tags or self.areas)):
            self._protect(tag, mmap.PROT_READ | mmap.PROT_WRITE)
            address, nbytes = self.areas[tag]
            ctypes.memmove(address, self.saved.pop(tag, b"\x55" * nbytes), nbytes)

    def _protect(self, tag: str, protection: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address, nbytes = self.areas[tag]
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), protection):
            raise OSError(ctypes.get_errno(), "mprotect")
        (self.asleep.discard if protection else self.asleep.add)(tag)


class Runner:
    def __init__(self) -> None:
        self.area = mmap.mmap(-1, 1 << 16)
        self.weight = torch.frombuffer(self.area, dtype=torch.float32).view(128, 128)
        self.model = torch.nn.Linear(128, 128, bias=False)
        self.model.weight = torch.nn.Parameter(self.weight, requires_grad=False)
        self.reload_weights()

    def reload_weights(self) -> None:
        self.weight.copy_(torch.arange(128 * 128).view(128, 128))

    def get_model(self) -> torch.nn.Module:
        return self.model

    def get_draft_model(self) -> None:
        return None

    def initialize_kv_cache(self, config: Any, caches: dict[str, torch.Tensor]) -> None:
        self.kv_connector = ActiveKVConnector(config, caches)

    def reset_mm_cache(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...


class SleepingWorker(Worker):
    """vLLM's own worker, put together without a GPU."""

    def __init__(self, config: Any) -> None:
        self.vllm_config, self.model_config = config, config.model_config
        self.parallel_config = config.parallel_config
        self.model_runner: Any = Runner()
        self._sleep_mode_backend = ProtectingBackend()
        self._sleep_saved_buffers = {}
        self._sleep_saved_parameters = {}
        self._sleep_saved_draft_buffers = {}

    def initialize(self, caches: dict[str, torch.Tensor]) -> None:
        self.model_runner.initialize_kv_cache(self.vllm_config, caches)


class InProcessExecutor(UniProcExecutor):
    """vLLM's own executor around a worker that exists; only one engine of a process is called at a
    time, and finds its own connector."""

    def __init__(self, worker: SleepingWorker, connector: KvshmConnector) -> None:
        self.driver_worker: Any = worker
        self.connector = connector
        self.sleeping_tags: set[str] = set()

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        return super().collective_rpc(*args, **kwargs)


class Core(EngineCore):
    def __init__(self, executor: InProcessExecutor) -> None:
        self.model_executor: Any = executor
        self.mm_receiver_cache = self.batch_queue = None

    def shake_hands(self, connector: Any) -> None:
        """What ``EngineCore.__init__`` does last in vLLM 0.32."""
        reported = self.model_executor.get_kv_connector_handshake_metadata()
        content = {key: value for each in reported for key, value in (each or {}).items()}
        connector.set_xfer_handshake_metadata_pp_aware(content)


class Scheduling(DrivenEngine):
    """The scheduler's half of such an engine."""

    core: Core

    def shake_hands(self) -> None:
        self.core.scheduler = self.scheduler
        self.core.shake_hands(self.connector)


class Engine:
    def __init__(self, model: Path) -> None:
        config = vllm_config(model)
        config.scheduler_config.async_scheduling = False
        planned = cache_config(config, "LBNHC", BLOCKS, LAYERS)
        planned.hash_block_size = BLOCK_SIZE
        self.connector = KvshmConnector(config, KVConnectorRole.WORKER, planned)
        memory = self.connector.get_mem_pool_context()
        assert memory is not None
        with memory:
            layout = KVCacheLayout.LBNHC
            self.caches = allocate_kv_cache(planned, torch.device("cpu"), layout, [BLOCK_SIZE])
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self.rank = SleepingWorker(config)
        self.rank.initialize(self.caches)
        runner, shared = self.rank.model_runner, memory.memory  # type: ignore[attr-defined]
        self.backend = self.rank._sleep_mode_backend
        self.backend.areas = {
            "weights": (runner.weight.data_ptr(), len(runner.area)),
            "kv_cache": (shared.address, shared.nbytes),
        }
        self.core = Core(InProcessExecutor(self.rank, self.connector))
        Scheduling.core = self.core
        self.driven = Scheduling(config, BLOCKS, shares=False, cache=planned)
        self.names = itertools.count()
        self.computed_from: dict[str, int] = {}

    @property
    def cache(self) -> Any:
        return self.driven.connector._scheduler.cache

    @property
    def side(self) -> Any:
        return self.connector._worker

    def step(self) -> None:
        """One round of the core's loop, with or without a forward pass."""
        sent = self.driven.schedule()
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        runner = self.rank.model_runner
        if sent.output.total_num_scheduled_tokens:
            runner.kv_connector.pre_forward(sent.output)
            assert float(runner.weight[0, 1]) == 1.0, "the model has its weights"
            self._forward(sent.output)
            runner.kv_connector.finish_forward()
            output = runner.kv_connector.post_forward(sent.output.finished_req_ids)
        else:
            output = runner.kv_connector.no_forward(sent.output).kv_connector_output
        self.driven.answer(sent, output)

    def _forward(self, output: Any) -> None:
        """Every block of a prompt that the step computes is filled with a byte that follows from
        its tokens."""
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for name, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                starts[name] = start
        for name, start in starts.items():
            self.computed_from[name] = start
            tokens = self.driven.scheduler.requests[name].prompt_token_ids
            for index, block in enumerate(self.driven.blocks_of(name)):
                if index * BLOCK_SIZE >= start and (index + 1) * BLOCK_SIZE <= len(tokens):
                    for each in self.caches.values():
                        each[block].view(torch.uint8).fill_(value_of(tokens, index))

    def until(self, holds: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, f"never came about: {what}"
            self.step()
            time.sleep(0.001)

    def ask(self, tokens: list[int], **more: Any) -> str:
        name = f"request-{next(self.names)}"
        self.driven.add(name, tokens, max_tokens=2, **more)
        return name

    def compute(self, tokens: list[int]) -> int:
        """Answer a prompt; returns how many of its tokens the engine had or imported.  All blocks
        hold what belongs there."""
        name = self.ask(tokens)
        self.until(lambda: name in self.computed_from, "the request is computed")
        full = len(tokens) // BLOCK_SIZE
        packed = [each.view(torch.uint8).flatten(1) for each in self.caches.values()]
        for index, block in enumerate(self.driven.blocks_of(name)[:full]):
            assert all(bool((e[block] == value_of(tokens, index)).all()) for e in packed), index
        self.until(lambda: name not in self.driven.scheduler.requests, "the request ends")
        return self.computed_from[name]

    def knows(self, tokens: list[int]) -> bool:
        """Whether a peer is known to have this prompt, and is attached."""
        request = self.driven.add("imagined", tokens, max_tokens=1)
        self.driven.scheduler.finish_requests("imagined", RequestStatus.FINISHED_ABORTED)
        full = len(tokens) // BLOCK_SIZE
        if self.cache.table is None or not self.side._cache.attached():
            return False
        plan = self.cache.planner.lookup(request.block_hashes, 0, full)
        return plan is not None and plan.num_blocks == full

    def close(self) -> None:
        self.connector.shutdown()
        self.driven.close()


def value_of(tokens: list[int], index: int) -> int:
    return 1 + tokens[index * BLOCK_SIZE] % 250


def prompt(first: int, blocks: int = 3) -> list[int]:
    return [first + 7 * i % 997 for i in range(blocks * BLOCK_SIZE + 5)]
