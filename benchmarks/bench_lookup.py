"""What the scheduler's thread pays to look a prefix up among other engines, found or not.

    python benchmarks/bench_lookup.py

No vLLM, no coordinator: one SchedulerHalf and a few engines whose slot tables this process fills.
``planner`` is the whole of ``LoadPlanner.lookup``, with counters and the reason of a miss.  Cold
means that the caches of the core have been filled with other data before each call.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measurement import percentiles, report

from kvshm._base.ids import BlockHash, BlockId, Epoch, Fingerprint, Generation, Rank
from kvshm._base.rundir import tables_socket
from kvshm._engine.epoch_state import EngineSpec
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._node.peers import Peers
from kvshm._node.protocol import EngineInfo, RankInfo
from kvshm._node.segment_server import SegmentServer
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable, TableSpec
from kvshm.config import Config
from kvshm.interfaces import MemoryDescriptor

SIZES = (1, 50_000), (27, 20_000)
"""Other engines, and blocks of each."""
PROMPT = 512
"""Hashes of one lookup."""
CALLS = 2000
COLD_CALLS = 400
OTHER_DATA = bytearray(48 << 20)


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def engine(namespace: str, number: int, blocks: int) -> tuple[OwnSlotTable, EngineInfo]:
    """Another engine with all its blocks published; the prompts' come first."""
    spec = TableSpec(namespace, f"e{number}", blocks, 16, 1, Fingerprint(bytes(32)))
    table = OwnSlotTable.create(spec, Epoch(100 + number))
    records = (
        BlockRecord(BlockHash(digest(f"{number} {n}")), BlockId(n), Generation(0), n)
        for n in range(blocks)
    )
    table.publish(pack_records(records), bytes(8 * blocks))
    RankSlotTable.from_fd(table.name, table.descriptor(True)).set_life(Rank(0))
    info = EngineInfo(
        epoch=table.epoch, name=spec.engine, pid=table.pid, fields={},
        fingerprint=bytes(32), num_blocks=blocks, lease_bit=number,
        ranks=[RankInfo(table.pid, MemoryDescriptor("none", table.epoch, 0, []))],
    )  # fmt: skip
    return table, info


def timed(call: Callable[[], object], calls: int, before: Callable[[], object]) -> dict[str, float]:
    """Microseconds of a call."""
    times = []
    for _ in range(calls):
        before()
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1000)
    return percentiles(times)


def warm() -> None:
    """Nothing: what the last call used is still there."""


def cool() -> None:
    OTHER_DATA[::64] = OTHER_DATA[1::64]


def opened(cache: SchedulerHalf) -> Peers:
    """The cache's peers, once its epoch has begun."""
    memory = MemoryDescriptor("none", Epoch(0), 0, [])
    cache.open_epoch([RankInfo(os.getpid(), memory)], lambda: {"weights": "w"})
    while (state := cache.epoch_state) is None:
        time.sleep(0.001)  # another thread begins it
    return state.peers


def measure(cache: SchedulerHalf, peers: Peers, engines: int) -> dict[str, dict[str, float]]:
    strange = [digest(f"nobody's {n}") for n in range(PROMPT)]
    prompts = [[digest(f"{e} {n}") for n in range(PROMPT)] for e in range(engines)]
    turn = iter(range(1 << 62))

    def find() -> object:
        return peers.lookup(prompts[next(turn) % engines], 0, PROMPT)

    return {
        "planner, nobody has it": timed(
            lambda: cache.planner.lookup(strange, 0, PROMPT), CALLS, warm
        ),
        "lookup, nobody has it": timed(lambda: peers.lookup(strange, 0, PROMPT), CALLS, warm),
        f"lookup of {PROMPT}, warm": timed(find, CALLS, warm),
        f"lookup of {PROMPT}, cold": timed(find, COLD_CALLS, cool),
        f"planner of {PROMPT}, cold": timed(
            lambda: cache.planner.lookup(prompts[next(turn) % engines], 0, PROMPT), COLD_CALLS, cool
        ),
    }


def main() -> None:
    """With one engine and with many: how much of an index is touched decides what cold costs."""
    for engines, blocks in SIZES:
        run(engines, blocks)


def run(engines: int, blocks: int) -> None:
    namespace = f"bench{os.getpid()}"
    tables: dict[int, OwnSlotTable] = {}
    with tempfile.TemporaryDirectory() as directory:
        config = Config.from_env({"KVSHM_NAMESPACE": namespace})
        # In place of the coordinator, which hands the tables out.
        server = SegmentServer(
            tables_socket(Path(directory), namespace),
            lambda asked: tables[asked.epoch].descriptor(asked.writable),
        )
        cache = SchedulerHalf(config, EngineSpec("me", "model", 64, 16), Path(directory))
        try:
            peers = opened(cache)
            for number in range(engines):
                table, info = engine(namespace, number, blocks)
                tables[info.epoch] = table
                peers.joined(info)
            measured = measure(cache, peers, engines)
            assert peers.stats().usable == engines
            for table in tables.values():
                peers.gone(table.epoch)
            nobody = timed(lambda: cache.planner.lookup([digest("x")], 0, 1), CALLS, warm)
            report("lookup", unit="us", engines=engines, blocks=blocks,
                   **measured, **{"planner, no peer": nobody})  # fmt: skip
        finally:
            cache.close()
            server.close()


if __name__ == "__main__":
    main()
