"""What a lookup over several KV cache groups costs, beside what its groups cost one by one.

    python benchmarks/bench_groups.py

As bench_lookup.py: no vLLM, no coordinator, one other engine, which holds everything, or of states
only the first.  A lookup of all groups finds what each needs of a prompt.  ``each alone``: for
every group a lookup of as many blocks as it needs, as an engine with one group makes it; the sum of
them, in turns with the other.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from operator import not_
from pathlib import Path

from bench_lookup import digest, opened
from measurement import percentiles, report

from kvshm._base.ids import BlockHash, BlockId, Epoch, Fingerprint, Generation, Rank
from kvshm._base.rundir import tables_socket
from kvshm._engine.epoch_state import EngineSpec
from kvshm._engine.groups import Group, Groups
from kvshm._engine.prefix_search import ONE_FULL_GROUP
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._node.protocol import EngineInfo, RankInfo
from kvshm._node.segment_server import SegmentServer
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable, TableSpec
from kvshm.config import Config
from kvshm.interfaces import MemoryDescriptor

SIZE = 16
STATES = [Group(n, SIZE, state=True) for n in range(1, 4)]
MODELS = {
    "one full group": [Group(0, SIZE)],
    "full and windowed (gpt-oss)": [Group(0, SIZE), Group(1, SIZE, window=128)],
    "full and five windowed (Gemma 3)": [
        Group(0, SIZE),
        *(Group(n, SIZE, window=1024) for n in range(1, 6)),
    ],
    "full and three chunked (Llama 4)": [
        Group(0, SIZE),
        *(Group(n, SIZE, chunk=5000) for n in range(1, 4)),
    ],
    "full and three with states (Qwen 3 Next)": [Group(0, SIZE), *STATES],
}
PROMPT = 512
"""Hashes of one lookup."""
CALLS = 2000
CHAIN = [digest(f"prompt {n}") for n in range(PROMPT)]
OWN: dict[bytes, object] = {}


def get_one_block(key: bytes) -> object:
    return OWN.get(key)


def last_own(hashes: Sequence[bytes], group: int) -> int:
    """As PoolRoom does it: the own cache has nothing, which it is asked."""
    suffix = group.to_bytes(4)
    keys = [block_hash + suffix for block_hash in reversed(hashes)]
    return len(keys) - len(list(takewhile(not_, map(get_one_block, keys))))


def holder(namespace: str, groups: Groups, states: range) -> tuple[OwnSlotTable, EngineInfo]:
    """An engine that has published the prompt's blocks in every group, and these of the states."""
    keys = [
        (group.number, index)
        for group in groups.all
        for index in (states if group.state else range(PROMPT))
    ]
    spec = TableSpec(namespace, "holder", len(keys), SIZE, 1, Fingerprint(bytes(32)))
    table = OwnSlotTable.create(spec, Epoch(100))
    records = (
        BlockRecord(BlockHash(CHAIN[index]), BlockId(n), Generation(0), index, group=group)
        for n, (group, index) in enumerate(keys)
    )
    table.publish(pack_records(records), bytes(8 * len(keys)))
    RankSlotTable.from_fd(table.name, table.descriptor(True)).set_life(Rank(0))
    memory = MemoryDescriptor("none", table.epoch, 0, [])
    info = EngineInfo(
        epoch=table.epoch, name=spec.engine, pid=table.pid, fields={}, lease_bit=1,
        fingerprint=bytes(32), num_blocks=len(keys), ranks=[RankInfo(table.pid, memory)],
    )  # fmt: skip
    return table, info


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1000


def measure(cache: SchedulerHalf, groups: Groups) -> dict[str, object]:
    planner, search = cache.planner, cache.planner.search
    search.last_own = last_own
    needed = [part.num_blocks for part in groups.parts(0, PROMPT)]
    together, alone = [], []
    for _ in range(CALLS):
        search.groups = groups
        together.append(seconds(partial(planner.lookup, CHAIN, 0, PROMPT)))
        search.groups = ONE_FULL_GROUP
        lookups = [partial(planner.lookup, CHAIN, 0, count) for count in needed]
        alone.append(sum(map(seconds, lookups)))
    ratios = percentiles([one / other for one, other in zip(together, alone, strict=True)])
    return {
        "blocks": sum(needed),
        "all groups": percentiles(together),
        "each alone": percentiles(alone),
        "ratio": ratios,
    }


def main() -> None:
    for name, model in MODELS.items():
        run(name, Groups(model), range(PROMPT))
    run("the same, and one state at the begin", Groups([Group(0, SIZE), *STATES]), range(1))


def run(name: str, groups: Groups, states: range) -> None:
    namespace = f"bench{os.getpid()}"
    with tempfile.TemporaryDirectory() as directory:
        table, info = holder(namespace, groups, states)
        server = SegmentServer(
            tables_socket(Path(directory), namespace),
            lambda asked: table.descriptor(asked.writable),
        )
        config = Config.from_env({"KVSHM_NAMESPACE": namespace})
        cache = SchedulerHalf(config, EngineSpec("me", "model", 64, SIZE), Path(directory))
        try:
            opened(cache).joined(info)
            report("groups", unit="us", model=name, **measure(cache, groups))
        finally:
            cache.close()
            server.close()


if __name__ == "__main__":
    main()
