"""The caches of a replayed trace: vLLM's own pools of blocks, alone, as one, or shared by kvshm.

A pool is vLLM's ``BlockPool``, with its queue of free blocks and its hashes.  With kvshm each
engine has a real slot table, marks, replica, planner and order of its free blocks, by the replay's
clock.  Not real are the copies: their time is the model's, and their leases end at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from trace_node import Costs, Node, engine_epoch
from trace_replay import Clock, Found, Service
from trace_requests import Hashes, Request
from vllm.v1.core.block_pool import BlockPool

from kvshm._base.ids import Fingerprint, Rank
from kvshm._base.roles import Decision
from kvshm._base.timing import TIMING
from kvshm._engine.epoch_state import EpochState
from kvshm._engine.load_plan import LoadReport, Plan
from kvshm._engine.load_planner import LoadPlanner
from kvshm._engine.marks import Marks, Run
from kvshm._engine.publisher import Publisher
from kvshm._node.peers import Peers
from kvshm._node.protocol import EngineInfo, RankInfo
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable, TableSpec
from kvshm.config import Config
from kvshm.hooks.vllm.exports.free_order import FreeOrder
from kvshm.interfaces import MemoryDescriptor, Region

FINGERPRINT = Fingerprint(bytes(32))
T = TypeVar("T")


class Pool:
    """The blocks of one engine, or of all together."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.vllm = BlockPool(num_blocks + 1, True, block_tokens)  # one is its null block
        self._block_tokens = block_tokens
        self._held: dict[int, list[Any]] = {}
        self.wanted: Callable[[int], None] = _nothing
        """Called before so many blocks are taken from the queue."""
        self.handed_out: Callable[[list[Any]], None] = _nothing
        """Called with these."""

    def hits(self, hashes: Sequence[bytes], most: int) -> list[Any]:
        """The blocks of the longest prefix that is cached."""
        found = list[Any]()
        for one in hashes[:most]:
            if (cached := self.vllm.get_cached_block(cast(Any, one), [0])) is None:
                break
            found += cached
        return found

    def missing(self, request: Request, hits: Sequence[Any]) -> int | None:
        """How many blocks a request needs besides these; None without room for it."""
        wanted = -(-(request.tokens + request.answer) // self._block_tokens) - len(hits)
        free = self.vllm.get_num_free_blocks() - sum(not block.ref_cnt for block in hits)
        return wanted if wanted <= free else None

    def take(
        self, request: Request, hits: Sequence[Any], missing: int, hashes: list[bytes]
    ) -> list[Any]:
        """Give a request these blocks, and new ones, which get its hashes."""
        self.vllm.touch(hits)
        self.wanted(missing)
        taken = self.vllm.get_new_blocks(missing)
        self.handed_out(taken)
        blocks = [*hits, *taken]
        chain: Any = SimpleNamespace(block_hashes=hashes)
        self.vllm.cache_full_blocks(chain, blocks, len(hits), len(hashes), self._block_tokens, 0)
        self._held[request.number] = blocks
        return blocks

    def end(self, request: Request) -> None:
        self.vllm.free_blocks(reversed(self._held.pop(request.number)))


def _nothing(_: object) -> None:
    """What a pool tells somebody that nobody listens to."""


class Apart:
    """Engines that do not share, or (``together``) one cache of their size for all of them: what
    one engine begins to compute another one has at once, and copying takes no time."""

    def __init__(
        self, engines: int, num_blocks: int, hashes: Hashes, *, together: bool = False
    ) -> None:
        """``num_blocks``: of each engine."""
        size, count = (engines * num_blocks, 1) if together else (num_blocks, engines)
        self._pools = [Pool(size, hashes.block_tokens) for _ in range(count)]
        self._hashes = hashes

    def cached(self, engine: int, request: Request) -> int:
        return len(self._hits(engine, request))

    def begin(self, engine: int, request: Request) -> Found | None:
        pool, hits = self._pool(engine), self._hits(engine, request)
        if (missing := pool.missing(request, hits)) is None:
            return None
        pool.take(request, hits, missing, self._hashes.of(request))
        return Found(len(hits), 0)

    def computed(self, engine: int, request: Request) -> None:
        """Nothing: vLLM gives blocks their hashes before they are computed."""

    def end(self, engine: int, request: Request) -> None:
        self._pool(engine).end(request)

    def next_due(self) -> None:
        return None

    def deliver(self) -> None:
        """Nothing: nobody tells anybody."""

    def _pool(self, engine: int) -> Pool:
        return self._pools[engine % len(self._pools)]

    def _hits(self, engine: int, request: Request) -> list[Any]:
        most = request.cacheable(self._hashes.block_tokens)
        return self._pool(engine).hits(self._hashes.of(request), most)


@dataclass(frozen=True)
class Sharing:
    """How engines share."""

    duplicates_first: bool = True
    at_once: bool = False
    """Whether events are known everywhere at the moment of their step."""
    block_bytes: int = 0


class Place:
    """What belongs to one engine: as ``SchedulerHalf``, without its thread."""

    def __init__(self, number: int, node: Node, clock: Clock, sharing: Sharing, pool: Pool) -> None:
        settings = {"KVSHM_MIN_PREFIX_TOKENS": "0", "KVSHM_MAX_IMPORT_BLOCKS": str(1 << 20)}
        config, self.role = Config.from_env(settings), Decision("", "")
        self.epoch_state: EpochState | None = _epoch(number, node, clock, sharing, pool)
        table = self.epoch_state.table
        self.rank = RankSlotTable.from_fd(table.name, table.descriptor(True))
        self.rank.set_life(Rank(0))
        self.planner = LoadPlanner(config, self, clock.seconds)
        self.marks = Marks(pool.vllm.num_gpu_blocks, clock=clock.seconds)
        self.publisher = Publisher(self, node.join(self.epoch_state), 0.0, clock.seconds)
        cache: Any = self
        first = sharing.duplicates_first
        self.order = FreeOrder(cache, pool.vllm, self.marks, duplicates_first=first)
        if self.order._duplicates is not None:
            self.order._duplicates._clock = clock.seconds

    @property
    def epoch(self) -> EpochState:
        assert self.epoch_state is not None
        return self.epoch_state


def _epoch(number: int, node: Node, clock: Clock, sharing: Sharing, pool: Pool) -> EpochState:
    epoch, blocks = engine_epoch(number), pool.vllm.num_gpu_blocks
    spec = TableSpec(f"trace{os.getpid()}", f"e{number}", blocks, 1, 1, FINGERPRINT)
    spec = replace(spec, block_size=pool.vllm.hash_block_size)
    table = OwnSlotTable.create(spec, epoch, clock=clock.whole_ns)
    segments: Any = node.tables
    peers = Peers(spec.namespace, spec.engine, epoch, segments, clock.seconds)
    pid = (1 << 22) + number  # as if each had a process: one may have eight engines only
    memory = MemoryDescriptor("none", epoch, 0, [Region(0, 1, sharing.block_bytes, blocks)])
    info = EngineInfo(
        epoch=epoch, name=spec.engine, pid=pid, fingerprint=FINGERPRINT, fields={},
        num_blocks=blocks, ranks=[RankInfo(pid, memory)],
    )  # fmt: skip
    return EpochState(table, peers, cast(Any, SimpleNamespace(close=lambda: None)), info)


class Shared:
    """Engines that share by kvshm."""

    def __init__(
        self,
        engines: int,
        num_blocks: int,
        hashes: Hashes,
        service: Service,
        clock: Clock,
        sharing: Sharing,
    ) -> None:
        """``num_blocks``: of each engine."""
        now = replace(TIMING, send_delay_seconds=0.0, relay_delay_seconds=0.0)
        self.node = Node(clock, now if sharing.at_once else TIMING)
        self._pools = [Pool(num_blocks, hashes.block_tokens) for _ in range(engines)]
        self.places = [
            Place(number, self.node, clock, sharing, pool)
            for number, pool in enumerate(self._pools)
        ]
        for place, pool in zip(self.places, self._pools, strict=True):
            self._watch(place, pool)
        self.node.forget_joins()
        self._hashes, self._service = hashes, service
        self._runs: dict[int, tuple[list[Run], int]] = {}
        """Of each request that is computed: what is published then, and the tokens computed."""

    @property
    def costs(self) -> Costs:
        return self.node.costs

    def _watch(self, place: Place, pool: Pool) -> None:
        """As the hooks of vLLM's pool: change the order of its free blocks before some are taken,
        and withdraw those that had other contents."""

        def wanted(count: int) -> None:
            if place.order.may_change():
                self._timed("free order", lambda: place.order.change(count))

        def withdraw(blocks: list[Any]) -> None:
            place.publisher.retract_marked(place.marks, blocks)
            place.order.changed()
            place.publisher.drain_before_dispatch()

        pool.wanted = wanted
        pool.handed_out = lambda blocks: self._timed("retract", lambda: withdraw(blocks))

    def cached(self, engine: int, request: Request) -> int:
        return len(self._hits(engine, request))

    def begin(self, engine: int, request: Request) -> Found | None:
        place, pool = self.places[engine], self._pools[engine]
        hashes, hits = self._hashes.of(request), self._hits(engine, request)
        if (missing := pool.missing(request, hits)) is None:
            return None
        most, local = request.cacheable(self._hashes.block_tokens), len(hits)
        plan = self._timed("lookup", lambda: place.planner.lookup(hashes, local, most))
        blocks = pool.take(request, hits, missing, hashes)
        imported = self._timed("load", lambda: self._import(place, plan, request, blocks[local:]))
        self._timed("mark", lambda: self._mark(place, request, blocks, local, imported))
        return Found(local, imported, (plan.num_blocks if plan else 0) - imported)

    def _import(
        self, place: Place, plan: Plan | None, request: Request, blocks: Sequence[Any]
    ) -> int:
        """Lease, check again and give back what a copy would read; returns how many blocks it
        would have brought."""
        if plan is None:
            return 0
        load_id, table = str(request.number), place.epoch.table
        targets = [block.block_id for block in blocks[: plan.num_blocks]]
        order = place.planner.load(plan, load_id, targets, attached=True)
        peers = {run.peer.info.epoch: run.peer.table for run in plan.runs}
        for piece in order.pieces:
            of_peer = peers[piece.peer_epoch]
            assert all(of_peer.recheck(Rank(0), piece.records))
            of_peer.release(table.lease_bit, piece.records, piece.taken)
        if order.pieces:
            place.rank.finish_ticket(order.ticket)
        seconds = len(order.targets) * self._service.block_ns / 1e9
        report = LoadReport(load_id, (), seconds=seconds, paths=(None,) * len(order.pieces))
        place.planner.end_load(order, [report])
        place.planner.take_results()
        return len(order.targets)

    def _mark(
        self, place: Place, request: Request, blocks: list[Any], local: int, imported: int
    ) -> None:
        """Note what is imported now, and what is sound once the prompt is computed."""
        marks, hashes = place.marks, self._hashes.of(request)
        known, full = local + imported, len(hashes)
        loaded = [block.block_id for block in blocks[local:known]]
        marks.make_sound(loaded)
        marks.touch(blocks, known)
        packed, published = marks.write(blocks, known, full, full)
        assert not published, "a block that is published got new contents"
        runs = [(local, marks.with_versions(loaded)), (known, packed)]
        chained = [Run(hashes, first, part) for first, part in runs if part]
        self._runs[request.number] = chained, request.tokens - known * self._hashes.block_tokens

    def computed(self, engine: int, request: Request) -> None:
        place = self.places[engine]
        runs, tokens = self._runs.pop(request.number)
        place.planner.costs.add_step(tokens, self._service.prompt(tokens, 0) / 1e9)
        pool = self._pools[engine].vllm.blocks
        left = self._timed(
            "publish", lambda: place.publisher.publish_marked(place.marks, pool, runs)
        )
        assert not left, "a block that is in use was not published"

    def end(self, engine: int, request: Request) -> None:
        self._pools[engine].end(request)

    def next_due(self) -> int | None:
        return self.node.next_due()

    def deliver(self) -> None:
        self.node.deliver()

    def _hits(self, engine: int, request: Request) -> list[Any]:
        most = request.cacheable(self._hashes.block_tokens)
        return self._pools[engine].hits(self._hashes.of(request), most)

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        begun = time.thread_time_ns()
        result = call()
        self.costs.add(name, begun)
        return result

    def entries(self) -> list[int]:
        """How many blocks of others each engine knows."""
        return [sum(row.entries for row in p.epoch.peers.replica.rows()) for p in self.places]

    def close(self) -> None:
        """Free the shared memory."""
        for place in self.places:
            place.epoch.peers.close()
            place.rank.close()
            place.epoch.table.close()
