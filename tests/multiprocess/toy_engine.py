"""An engine without a model: real slot table, real memory, real coordinator, toy contents.

The bytes of a block are a function of its hash and rank, so every imported byte can be
judged.  Blocks are few and requests many: blocks are reused all the time, often while
somebody copies them.  Run as a program it works through random requests and prints one JSON
line: what it imported, what was forced, and how many bytes were wrong (which must be 0).
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import random
import secrets
import signal
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvshm._base.fingerprint import TRANSPORT
from kvshm._base.ids import BlockHash, BlockId, Epoch, Rank, block_hash
from kvshm._base.rundir import rank_socket
from kvshm._engine.epoch_state import EngineSpec
from kvshm._engine.load_plan import LoadReport
from kvshm._engine.marks import Marks
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._node.protocol import RankInfo
from kvshm._node.segment_server import SegmentClient
from kvshm._rank.rank_half import RankHalf
from kvshm.config import Config
from kvshm.interfaces import Region, SupportsAllocate, choose_transport

BLOCK_SIZE = 16
REGIONS = 2
POLL_SECONDS = 0.0002
HANGS_SECONDS = 60.0
"""An engine that still works after this time says on stderr what each thread does."""
GROUP = bytes(4)
REST_SECONDS = 0.02
"""Between requests of who waits for imports.  Without a model a request takes 0.2 ms and the
whole cache is overwritten within 2; news of a block take 40, so no one would ever find one."""


def chain_of(family: int, length: int) -> list[BlockHash]:
    """Hashes of a prefix; families share nothing."""
    return [
        block_hash(hashlib.sha256(f"{family}/{depth}".encode()).digest()) for depth in range(length)
    ]


class ToyRank:
    """Memory of one rank and its half of the cache."""

    def __init__(
        self, config: Config, rank: int, num_blocks: int, region_bytes: int, model: str
    ) -> None:
        transport, run_dir = choose_transport(config.transport, "cpu"), Path(config.run_dir)
        self.model = model.encode()
        self.pid = os.getpid()
        self.rank, self.region_bytes = Rank(rank), region_bytes
        self.memory = cast(SupportsAllocate, transport).allocate(
            REGIONS * num_blocks * region_bytes
        )
        self.regions = [
            Region(r * num_blocks * region_bytes, region_bytes, region_bytes, num_blocks)
            for r in range(REGIONS)
        ]
        self.transport = transport(
            memory=self.memory,
            regions=self.regions,
            rank=rank,
            socket_path=rank_socket(run_dir, config.namespace, secrets.token_hex(4), rank),
            fault=config.fault,
        )
        segments = SegmentClient(run_dir, config.namespace)
        self.cache = RankHalf(self.transport, self.rank, segments, verify=config.verify)

    def contents(self, chain_hash: BlockHash, region: int) -> bytes:
        what = chain_hash + bytes([self.rank, region]) + self.model
        seed = hashlib.blake2b(what, digest_size=64).digest()
        return seed * (self.region_bytes // 64)

    def compute(self, block: BlockId, chain_hash: BlockHash) -> None:
        """Write a block in two halves, so that a torn copy is visibly torn."""
        for number, region in enumerate(self.regions):
            begin, data = region.offset + block * region.stride, self.contents(chain_hash, number)
            half = len(data) // 2
            self.memory.buffer[begin : begin + half] = data[:half]
            self.memory.buffer[begin + half : begin + len(data)] = data[half:]

    def wrong_bytes(self, block: BlockId, chain_hash: BlockHash) -> int:
        wrong = 0
        for number, region in enumerate(self.regions):
            begin, want = region.offset + block * region.stride, self.contents(chain_hash, number)
            have = bytes(self.memory.buffer[begin : begin + len(want)])
            wrong += 0 if have == want else sum(a != b for a, b in zip(have, want, strict=True))
        return wrong


@dataclass
class ToyBlock:
    block_id: int
    block_hash: bytes | None = None
    ref_cnt: int = 1


class ToyEngine:
    def __init__(self, num_blocks: int, ranks: int, region_bytes: int, model: str = "toy") -> None:
        self.config, self.model, self.weights = Config.from_env(os.environ), model, model
        spec = EngineSpec(f"toy-{os.getpid()}", model, num_blocks, BLOCK_SIZE, asynchronous=True)
        self.cache = SchedulerHalf(self.config, spec, Path(self.config.run_dir))
        self.ranks = [self.make_rank(r, num_blocks, region_bytes) for r in range(ranks)]
        self.lru: OrderedDict[BlockId, BlockHash | None] = OrderedDict.fromkeys(
            BlockId(b) for b in range(num_blocks)
        )
        self.by_hash: dict[BlockHash, BlockId] = {}
        self.marks, self.pool = Marks(num_blocks), [ToyBlock(b) for b in range(num_blocks)]
        self.wrong = self.imported = self.requests = self.loads = 0

    def make_rank(self, rank: int, num_blocks: int, region_bytes: int) -> ToyRank:
        return ToyRank(self.config, rank, num_blocks, region_bytes, self.model)

    def open(self, *, wait: bool = True) -> None:
        infos = [RankInfo(rank.pid, rank.transport.export(Epoch(0))) for rank in self.ranks]
        fields = {"weights": self.weights, TRANSPORT: infos[0].memory.transport}
        self.cache.open_epoch(infos, lambda: fields)
        if not wait:
            return
        while self.cache.table is None:
            time.sleep(0.01)
        self.open_ranks()

    def open_ranks(self) -> None:
        table = self.cache.table
        assert table is not None
        for rank in self.ranks:
            rank.cache.open_epoch(table.epoch)

    def request(self, chain: list[BlockHash]) -> None:
        """Serve one request: local hits, imports, and the rest computed."""
        self.requests += 1
        self.cache.hook_took("match", time.monotonic_ns(), unfinished=1)
        local = 0
        while local < len(chain) and chain[local] in self.by_hash:
            self.lru.move_to_end(self.by_hash[chain[local]])
            local += 1
        plan = self.cache.planner.lookup(chain, local, len(chain))
        blocks = self._allocate(len(chain) - local)
        good = 0
        if plan is not None:
            good = self._import(plan, blocks[: plan.num_blocks], chain[local:])
        else:
            self.cache.publisher.drain_before_dispatch()
        self._compute(blocks, chain, local, good)
        self.cache.hook_took("finished", time.monotonic_ns(), unfinished=0)

    def _allocate(self, count: int) -> list[BlockId]:
        """Least recently used blocks, withdrawn from the others' view."""
        blocks = list(self.lru)[:count]
        for block in blocks:
            self.lru.move_to_end(block)
            owned, self.lru[block] = self.lru[block], None
            if owned is not None:
                del self.by_hash[owned]
        self.cache.publisher.retract_marked(self.marks, blocks)
        return blocks

    def _import(self, plan: object, targets: list[BlockId], chain: list[BlockHash]) -> int:
        self.loads += 1
        load = self.cache.planner.load(plan, f"r{self.requests}", targets)  # type: ignore[arg-type]
        self.cache.publisher.drain_before_dispatch()
        for rank in self.ranks:
            rank.cache.begin_load(load)
        reports: list[LoadReport] = []
        while len(reports) < len(self.ranks):
            time.sleep(POLL_SECONDS)
            self.cache.hook_took("output", time.monotonic_ns(), unfinished=1)
            for rank in self.ranks:
                reports += rank.cache.poll()
        bad = self.cache.planner.end_load(load, reports)
        good = next((i for i, t in enumerate(targets) if t in bad), len(targets))
        for target, chain_hash in zip(targets[:good], chain, strict=False):
            self.wrong += sum(rank.wrong_bytes(target, chain_hash) for rank in self.ranks)
        self.imported += good
        return good

    def _compute(
        self, blocks: list[BlockId], chain: list[BlockHash], local: int, good: int
    ) -> None:
        for block, chain_hash in list(zip(blocks, chain[local:], strict=True))[good:]:
            for rank in self.ranks:
                rank.compute(block, chain_hash)
        for index, block in enumerate(blocks, start=local):
            if index - local >= good:
                for rank in self.ranks:
                    rank.cache.write_checksums([block])
            self.lru[block], self.by_hash[chain[index]] = chain[index], block
            self.pool[block].block_hash = chain[index] + GROUP
        run = (chain, local, self.marks.with_versions(blocks))
        self.cache.publisher.publish_marked(self.marks, self.pool, [run])
        self.cache.publisher.flush()

    @property
    def num_peers(self) -> int:
        state = self.cache.epoch_state
        return state.peers.stats().usable if state else 0

    def counted(self, counter: str) -> int:
        table = self.cache.table
        return table.counters.snapshot()[counter] if table else 0

    def summary(self) -> dict[str, object]:
        table = self.cache.table
        counters = table.counters.snapshot() if table else {}
        return {
            "pid": os.getpid(),
            "requests": self.requests,
            "loads": self.loads,
            "imported": self.imported,
            "wrong": self.wrong,
            "violations": table.check_integrity() if table else [],
            "counters": {k: v for k, v in counters.items() if v},
        }

    def close(self) -> None:
        for rank in self.ranks:
            rank.cache.close()
        self.cache.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--loads", type=int, default=20, help="go on until so many were begun")
    parser.add_argument("--imported", type=int, default=1, help="... and so many blocks arrived")
    parser.add_argument("--counted", default="", help="... and this counter of its own counted")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--families", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--region-bytes", type=int, default=65536)
    parser.add_argument("--peers", type=int, default=1, help="wait for so many before the start")
    parser.add_argument("--model", default="toy", help="what the contents depend on")
    parser.add_argument("--weights", help="what the fingerprint depends on, beside the contents")
    parser.add_argument("--unshared", action="store_true", help="do not wait for an epoch")
    options = parser.parse_args()
    engine = ToyEngine(options.blocks, options.ranks, options.region_bytes, options.model)
    engine.weights = options.weights or options.model
    engine.open(wait=not options.unshared)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        print("open", flush=True)
        while engine.num_peers < options.peers:
            time.sleep(0.01)
        print("go", flush=True)
        blocks = options.imported if options.loads else 0
        work(engine, options, options.loads, blocks, options.counted)
        while input() == "more":  # stay readable for the others until told to end
            work(engine, options)
    finally:
        engine.close()


def work(
    engine: ToyEngine,
    options: argparse.Namespace,
    loads: int = 0,
    blocks: int = 0,
    counter: str = "",
) -> None:
    """Serve this many requests, and more until this many imports were begun, this many blocks
    imported and the counter is not zero, however long the first events and answers of a peer
    take to arrive; then say how it went."""
    faulthandler.dump_traceback_later(HANGS_SECONDS)
    dice = random.Random(options.seed)
    requests = engine.requests + options.requests
    while (
        engine.requests < requests
        or engine.loads < loads
        or engine.imported < blocks
        or (counter and not engine.counted(counter))
    ):
        if engine.requests >= requests:
            time.sleep(REST_SECONDS)
        family, length = dice.randrange(options.families), dice.randint(2, options.blocks // 2)
        engine.request(chain_of(family, length))
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(engine.summary()), flush=True)


if __name__ == "__main__":
    main()
