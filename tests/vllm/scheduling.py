"""A real vLLM scheduler with the real connector, driven step by step without a model.

The workers are played by hand: ``run`` answers a step as the model runner would, in any
order against later ``schedule`` calls, so that asynchronous scheduling's call order can be
replayed on a machine that cannot run it.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvshm._base.ids import Epoch
from kvshm._engine.groups import Part
from kvshm._engine.load_plan import Plan
from kvshm._node.peer import PlannedRun
from kvshm._node.protocol import RankInfo
from kvshm._shm.layout import SlotState
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable
from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.messages import QuietReport, RankDescription, RankReport
from kvshm.interfaces import MemoryDescriptor

BLOCK_SIZE = 16
SHAPE: Any = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}


def full(scale: int = 1) -> FullAttentionSpec:
    """A group of full attention; its blocks are ``scale`` times as large as others."""
    return FullAttentionSpec(BLOCK_SIZE * scale, **SHAPE)


def window(tokens: int, scale: int = 1) -> SlidingWindowSpec:
    """A group with a sliding window of this many tokens."""
    return SlidingWindowSpec(BLOCK_SIZE * scale, sliding_window=tokens, **SHAPE)


def chunk(tokens: int) -> ChunkedLocalAttentionSpec:
    """A group with chunked local attention in chunks of this many tokens."""
    return ChunkedLocalAttentionSpec(BLOCK_SIZE, attention_chunk_size=tokens, **SHAPE)


def states(checkpoints: int = 0, scale: int = 1, drafts: int = 0) -> MambaSpec:
    """A group that keeps states.  With ``checkpoints`` a step also saves one within what it
    computes; each of ``drafts`` drafts has a state of its own until it is accepted."""
    return MambaSpec(
        BLOCK_SIZE * scale, shapes=((4,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align",
        num_speculative_blocks=drafts,
        num_prefill_checkpoint_blocks=checkpoints,
        prefill_checkpoint_alignment=checkpoints or None,
    )  # fmt: skip


def latents(scale: int = 1) -> MLAAttentionSpec:
    """A group of latents, one for every two tokens, as compressed ones of DeepSeek V4."""
    return MLAAttentionSpec(block_size=BLOCK_SIZE * scale, tokens_per_state=2, **SHAPE)


def latent_window(tokens: int, scale: int = 1) -> SlidingWindowMLASpec:
    """A group of latents with a sliding window of this many tokens."""
    return SlidingWindowMLASpec(block_size=BLOCK_SIZE * scale, sliding_window=tokens, **SHAPE)


def vllm_config(
    model: Path, transfer: KVTransferConfig | None = None, **arguments: Any
) -> VllmConfig:
    """Configuration of an engine that shares, with small blocks."""
    transfer = transfer or KVTransferConfig(
        kv_connector="KvshmConnector",
        kv_connector_module_path="kvshm.hooks.connector",
        kv_role="kv_both",
    )
    settings = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256, **arguments}
    return EngineArgs(
        model=str(model), dtype="bfloat16", block_size=32, kv_transfer_config=transfer,
        enforce_eager=True, **settings,
    ).create_engine_config()  # fmt: skip


def as_told(report: RankReport) -> RankReport:
    """The report as a rank says it: a step that there is nothing to tell of by its number."""
    quiet = report.step > 0 and report == RankReport(report.step)
    return QuietReport(report.step) if quiet else report


@dataclass
class Sent:
    """A step that was dispatched: what the scheduler said."""

    output: Any

    @property
    def metadata(self) -> Any:
        return self.output.kv_connector_metadata


class PlayedExecutor:
    """Stands for vLLM's, with one rank that loads adapters; the path of one is its contents."""

    def __init__(self) -> None:
        self.loaded: dict[int, bytes] = {}
        self.fails = False

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: tuple[Any, ...] = (), **_: Any
    ) -> list[Any]:
        if method == "add_lora":
            self.loaded[args[0].lora_int_id] = args[0].lora_path.encode()
        if self.fails:
            raise OSError("a rank could not")
        return [{0: dict(self.loaded)} if "adapters" in args else None]


@dataclass
class DrivenEngine:
    """Scheduler and hand-played workers."""

    config: VllmConfig
    num_blocks: int = 32
    asynchronous: bool = False
    shares: bool = True
    scheduler: Any = field(init=False)
    table: OwnSlotTable = field(init=False)
    cache: KVCacheConfig | None = None
    rank: RankDescription | None = None
    outputs: Any = field(init=False)
    model_executor: PlayedExecutor = field(init=False)
    """Of an engine with LoRA."""
    tokens: Any = field(default_factory=lambda: itertools.count(1000))

    def __post_init__(self) -> None:
        if self.config.lora_config is not None:
            self.model_executor = PlayedExecutor()
        cache = self.cache or imagined_cache(self.num_blocks)
        self.config.cache_config.num_gpu_blocks = self.num_blocks
        kind = AsyncScheduler if self.asynchronous else Scheduler
        sizes = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
        hash_size = math.gcd(*sizes)
        if cache.has_mamba_layers:
            self.config.cache_config.mamba_cache_mode = "align"
            self.config.cache_config.block_size = math.lcm(*sizes)
        self.scheduler = kind(
            vllm_config=self.config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=math.lcm(*sizes),
            hash_block_size=hash_size,
            log_stats=True,
        )
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(hash_size, hash_fn)
        self.connector = own_connector(self.scheduler)
        if self.connector is None:
            return  # plain vLLM
        self.shake_hands()
        if self.shares:
            self.wait_for_epoch()

    def shake_hands(self) -> None:
        """What vLLM's core does last at the start: hand over what the ranks say."""
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.rank or description()})

    def wait_for_epoch(self) -> None:
        """Until the client's thread has begun the epoch; then the one rank opens it."""
        deadline = time.monotonic() + 100
        while (table := self.connector._scheduler.cache.table) is None:
            assert time.monotonic() < deadline, "no epoch was begun"
            time.sleep(0.01)
        self.table = table
        RankSlotTable.from_fd(table.name, table.descriptor(True)).set_life(0)

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 4,
        extra_args: dict[str, Any] | None = None,
        seed: int | None = None,
        **extra: Any,
    ) -> Request:
        """With a ``seed`` no step waits for the request's import (AtOnce.can_undo)."""
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args, seed=seed
        )
        params.update_from_generation_config({}, eos_token_id=0)
        request = Request(
            name, prompt, params, pooling_params=None, block_hasher=self.hasher, **extra
        )
        self.scheduler.add_request(self.preprocess_add_request(request)[0])
        return request

    def preprocess_add_request(self, request: Request) -> tuple[Request, int]:
        """What vLLM's core does with a request before its scheduler gets it; hooks wrap this."""
        return request, 0

    def continue_session(self, name: str, tokens: list[int], **more: Any) -> None:
        """The client of a resumable request sends its next input."""
        self.add(name, tokens, resumable=True, **more)

    def schedule(self, throttled: bool = False) -> Sent:
        """``throttled``: vLLM admits no prefill in this step (--prefill-schedule-interval)."""
        return Sent(self.scheduler.schedule(throttled))

    def run(self, sent: Sent, report: RankReport | None = None, **result: Any) -> None:
        """The output of a step comes back."""
        finished = {load.load_id for load in (report.loads if report else [])}
        meta = report or as_told(RankReport(sent.metadata.step, sent.metadata.fence))
        self.answer(
            sent,
            KVConnectorOutput(
                finished_recving=finished or None, kv_connector_worker_meta=meta, **result
            ),
        )

    def answer(self, sent: Sent, connector_output: KVConnectorOutput | None) -> None:
        """The output of a step comes back, with what a connector's worker put into it."""
        requests = list(sent.output.num_scheduled_tokens)
        sampled = [[next(self.tokens)] if self._samples(r) else [] for r in requests]
        self.outputs = self.scheduler.update_from_output(
            sent.output,
            ModelRunnerOutput(
                req_ids=requests,
                req_id_to_index={r: i for i, r in enumerate(requests)},
                sampled_token_ids=sampled,
                kv_connector_output=connector_output,
            ),
        )

    def stats(self) -> dict[str, int] | None:
        """What the last output has brought for vLLM's metrics of connectors."""
        reported = [o.scheduler_stats for o in self.outputs.values() if o.scheduler_stats]
        return next((one.kv_connector_stats for one in reported), None)

    def _samples(self, name: str) -> bool:
        request = self.scheduler.requests.get(name)
        return request is not None and not request.is_prefill_chunk

    def step(self, report: RankReport | None = None) -> Sent:
        sent = self.schedule()
        self.run(sent, report)
        return sent

    def blocks_of(self, name: str, group: int = 0) -> list[int]:
        tables = self.scheduler.kv_cache_manager.get_blocks(name).blocks
        return [block.block_id for block in tables[group]]

    def tables_of(self, name: str) -> list[list[int]]:
        tables = self.scheduler.kv_cache_manager.get_blocks(name).blocks
        return [[block.block_id for block in table] for table in tables]

    def ready(self) -> set[int]:
        """Blocks that others may read at this moment."""
        return {i for i, slot in enumerate(self.table.slots()) if slot.state is SlotState.READY}

    def close(self) -> None:
        self.connector.shutdown()


def own_connector(scheduler: Any) -> Any:
    """Return kvshm's connector, alone or one of a MultiConnector's; None in plain vLLM."""
    outer = scheduler.get_kv_connector()
    connectors = (outer, *getattr(outer, "sub_connectors", ()))
    return next((one for one in connectors if isinstance(one, KvshmConnector)), None)


def roles_of_epoch(engine: DrivenEngine) -> tuple[bool, bool]:
    """Whether the other engines are told that this one exports, and its ranks that it imports."""
    side = engine.connector._scheduler
    if side is None:
        return False, False
    state = side.cache.epoch_state
    return not state.info.imports_only, state.peers._peer_list is not None


def imagined_cache(
    num_blocks: int, specs: Sequence[KVCacheSpec] = (), drafting: int | None = None
) -> KVCacheConfig:
    """A cache that no worker has, with a group of each of these kinds; by default one of full
    attention.  ``drafting``: the group that draft layers use."""
    specs = specs or [full()]
    names = [["layer"]] if len(specs) == 1 else [[f"layer.{i}"] for i in range(len(specs))]
    groups = [KVCacheGroupSpec(*pair) for pair in zip(names, specs, strict=True)]
    if drafting is not None:
        groups[drafting].is_eagle_group = True
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        hash_block_size=math.gcd(*(spec.block_size for spec in specs)),
    )


def description() -> RankDescription:
    """What the one hand-played rank says of itself."""
    memory = MemoryDescriptor("loopback", 0, 0, [])
    return RankDescription(RankInfo(os.getpid(), memory), {"weights": "w"})


def plan_of(
    epoch: int, start: int, runs: Sequence[PlannedRun], made_at: float = 0.0, nbytes: int = 0
) -> Plan:
    """A plan for the one group of full attention."""
    length = sum(run.num_blocks for run in runs)
    parts = (Part(0, start, length),)
    return Plan(Epoch(epoch), start, length, parts, tuple(runs), made_at, nbytes)


Make = Callable[..., DrivenEngine]


def prompt(blocks: int, tail: int = 3, first: int = 1) -> list[int]:
    """Token ids of this many full blocks and a tail."""
    return [first + i for i in range(blocks * BLOCK_SIZE + tail)]


def described(sent: Sent) -> RankReport:
    """The one rank describes itself, as the step asked it to."""
    asked = sent.metadata.describe
    assert asked
    return RankReport(sent.metadata.step, descriptions={0: description()}, describes=asked)
