"""Engines with several KV cache groups: a peer that has blocks of them, and a played rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvshm._base.ids import Epoch, LeaseBit, block_hash
from kvshm._engine.groups import Part
from kvshm._engine.load_plan import LoadOrder, LoadReport
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm.hooks.vllm.messages import RankReport
from kvshm.interfaces import Region

from ..unit.exporters import Exporter
from ..unit.served import ServedNode
from .scheduling import (
    BLOCK_SIZE,
    DrivenEngine,
    Sent,
    chunk,
    full,
    latent_window,
    latents,
    states,
    window,
)

KINDS: dict[str, list[Any]] = {
    "full and window": [full(), window(40)],
    "several windows": [window(20), full(), window(70)],
    "full and chunks": [full(), chunk(48)],
    "one window": [window(40)],
    "larger full blocks": [full(2), window(40)],
    "larger windowed blocks": [full(), window(40, 2)],
    "latents": [latent_window(40, 2), latents(2), latent_window(20)],
}
WITH_STATES: dict[str, list[Any]] = {
    "full and states": [full(), states()],
    "several states": [states(), states(), full()],
    "states and a window": [full(), window(40), states()],
    "states with checkpoints": [states(1), full()],
}
"""For these no step waits for a load."""
ALL_KINDS = {**KINDS, **WITH_STATES}
PEER = 77
OWN_BIT = LeaseBit(5)


class PeerOf:
    """Another engine, of which this one knows: a slot table in which a test publishes."""

    def __init__(self, e: DrivenEngine, *regions: Region) -> None:
        namespace = os.environ["KVSHM_NAMESPACE"]
        self.node = ServedNode(Path(os.environ["KVSHM_RUN_DIR"]), namespace)
        self.exporter, self.used = Exporter(self.node, PEER, regions=regions), 0
        self.e = e
        e.table.set_lease_bit(OWN_BIT)
        self.side = e.connector._scheduler
        self.groups = self.side.importer.lookups.groups
        self.side.cache.epoch_state.peers.joined(self.exporter.info)

    def hold(self, request: Request, *parts: Part) -> None:
        """It computes these blocks of a request's prompt."""
        records = []
        for number, first, count in parts:
            scale = self.groups.all[number].scale
            for index in range(first, first + count):
                digest = request.block_hashes[(index + 1) * scale - 1]
                self.used += 1
                record = BlockRecord(block_hash(digest), self.used, 0, index, group=number)
                records.append(record)
        event = self.exporter.table.publish(pack_records(records), bytes(8 * len(records)))
        self.side.cache.epoch_state.peers.apply_events([(PEER, event)])

    def hold_all(self, tokens: list[int], **asked: Any) -> Request:
        """It computes a whole prompt; returns a request that was never scheduled."""
        self.e.add("imagined", tokens, max_tokens=1, **asked)
        request = self.e.scheduler.requests["imagined"]
        self.e.scheduler.finish_requests("imagined", RequestStatus.FINISHED_ABORTED)
        length = len(request.block_hashes)
        self.hold(request, *(Part(g.number, 0, length // g.scale) for g in self.groups.all))
        return request

    def attached(self) -> None:
        """The rank has attached it, so that a step may wait for a load."""
        self.side.importer.peers.attached[0] = frozenset({Epoch(PEER)})

    @property
    def leased(self) -> int:
        """How many of its blocks are leased."""
        return sum(slot.leases == 1 << OWN_BIT for slot in self.exporter.table.slots())


@pytest.fixture
def peer_of() -> Iterator[Callable[..., PeerOf]]:
    made: list[PeerOf] = []

    def make(e: DrivenEngine, *regions: Region) -> PeerOf:
        made.append(PeerOf(e, *regions))
        return made[-1]

    yield make
    for one in made:
        one.node.close()


@dataclass
class Played:
    """The one rank of an engine with several groups, or with one of a window."""

    e: DrivenEngine

    def run(self, sent: Sent, *reports: LoadReport, **more: Any) -> None:
        """A step has run; these asynchronous loads, or those of the step, have ended by then.
        ``more``: what else the rank reports."""
        asynchronous = [one for one in reports if isinstance(one.load_id, str)]
        self.e.answer(
            sent,
            KVConnectorOutput(
                finished_recving={one.load_id for one in asynchronous} or None,
                failed_recving={one.load_id for one in asynchronous if one.bad},
                kv_connector_worker_meta=RankReport(
                    sent.metadata.step, loads=list(reports), **more
                ),
            ),
        )

    def compute(self, tokens: list[int]) -> None:
        """A request comes and goes."""
        self.e.add("gone", tokens, max_tokens=1)
        while "gone" in self.e.scheduler.requests:
            self.run(self.e.schedule())

    def finish(self) -> list[LoadOrder]:
        begun: list[LoadOrder] = []
        for _ in range(60):
            sent = self.e.schedule()
            loads = [*sent.metadata.loads, *sent.metadata.at_once]
            begun += loads
            self.run(sent, *(LoadReport(load.load_id, load.lost) for load in loads))
            if not self.e.scheduler.requests:
                break
        assert not self.e.scheduler.requests
        return begun

    def is_clean(self) -> bool:
        side = self.e.connector._scheduler
        importer, tracker = side.importer, side.tracker
        pool = self.e.scheduler.kv_cache_manager.block_pool
        kept = (importer.imports, importer.running.by_id, importer.running._by_first_hash)
        free = pool.get_num_free_blocks() == len(pool.blocks) - 1
        return free and not any((*kept, tracker._pending.promised, tracker._pending._held))


def first_step(e: DrivenEngine, begin: int, tokens: int) -> int:
    """How many tokens of a prompt vLLM computes first behind ``begin``: with states a step ends at
    the last boundary, unless it can save the state there within a step."""
    splits = e.scheduler.need_mamba_block_aligned_split
    if splits and not e.scheduler.mamba_has_prefill_checkpoint_blocks:
        tokens = (tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    return tokens - begin


def blocks_to_fill(e: DrivenEngine, name: str, hashes: range) -> tuple[int, ...]:
    """The blocks that vLLM has allocated for these hashes of a request, by group."""
    groups, tables = e.connector._scheduler.importer.lookups.groups.all, e.tables_of(name)
    ends = ((g, hashes.start // g.scale, hashes.stop // g.scale) for g in groups)
    return tuple(b for g, first, end in ends for b in tables[g.number][first:end] if b)


def read_by(e: DrivenEngine, name: str) -> set[int]:
    """The full blocks of a request that is being computed, in all groups.  Without those to which
    vLLM gives no hash, because no hit could need them."""
    groups, tables = e.connector._scheduler.importer.lookups.groups.all, e.tables_of(name)
    tokens = e.scheduler.requests[name].num_computed_tokens
    pool = e.scheduler.kv_cache_manager.block_pool.blocks
    read = {b for g in groups for b in tables[g.number][: tokens // g.block_size] if b}
    return {block for block in read if pool[block].block_hash}
