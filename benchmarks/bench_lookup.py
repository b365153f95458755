"""What the scheduler's thread pays to look a prefix up among other engines, found or not.

    python benchmarks/bench_lookup.py [--keys 64 512 4096]

No vLLM, no coordinator: one SchedulerHalf and eight engines with a million blocks in all, whose
slot tables this process fills.  A prompt's blocks are those of one engine, from any place on, and
its hashes are the list that vLLM makes: just read, while the index's lines lie in memory.

lookup   of the replica alone
planner  ``LoadPlanner.lookup``: with what it counts, and the reason of a miss
leased   the planner, and the leases on all that it found
cooled   the planner, after all caches of the core have been filled with other data, the
         interpreter's own code and the hashes included
beside_writer  the lookup of another process, while this one applies events all the time; and
         without them
readers  lookups a second of one process, and of two at the same time
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from measurement import percentiles, report

from kvshm._base.ids import BlockHash, BlockId, Epoch, Fingerprint, Generation, LeaseBit, Rank
from kvshm._base.rundir import tables_socket
from kvshm._engine.epoch_state import EngineSpec
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._node.peers import Peers
from kvshm._node.protocol import EngineInfo, RankInfo
from kvshm._node.segment_server import SegmentServer
from kvshm._replica.index_reader import ReplicaReader
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable, TableSpec
from kvshm.config import Config
from kvshm.interfaces import MemoryDescriptor

ENGINES, BLOCKS = 8, 125_000
"""Other engines, and blocks of each."""
KEYS = (64, 512, 4096)
HASHES = 1 << 20
"""Of all prompts of one length: so many that none finds the index's lines in a cache."""
LEAST_CALLS, MOST_CALLS = 250, 3000
COOLED_CALLS = 200
OTHER_DATA = bytearray(64 << 20)
SECONDS = 2.0
"""Of each turn of the readers."""
WRITTEN = 64
"""Records of a batch that is applied beside a reader."""
READ = 512
"""Hashes of a reader's lookups."""


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


def opened(cache: SchedulerHalf) -> Peers:
    """The cache's peers, once its epoch has begun."""
    memory = MemoryDescriptor("none", Epoch(0), 0, [])
    cache.open_epoch([RankInfo(os.getpid(), memory)], lambda: {"weights": "w"})
    while (state := cache.epoch_state) is None:
        time.sleep(0.001)  # another thread begins it
    return state.peers


@contextmanager
def node(engines: int, blocks: int) -> Iterator[tuple[SchedulerHalf, Peers]]:
    """An engine that knows of ``blocks`` blocks of each of ``engines`` other ones."""
    namespace = f"bench{os.getpid()}"
    tables: dict[int, OwnSlotTable] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = Config.from_env({"KVSHM_NAMESPACE": namespace})
        config = replace(config, max_import_blocks=max(KEYS))
        # In place of the coordinator, which hands the tables out.
        server = SegmentServer(
            tables_socket(directory, namespace),
            lambda asked: tables[asked.epoch].descriptor(asked.writable),
        )
        stack.callback(server.close)
        cache = SchedulerHalf(config, EngineSpec("me", "model", 64, 16), directory)
        stack.callback(cache.close)
        peers = opened(cache)
        for number in range(engines):
            table, info = engine(namespace, number, blocks)
            tables[info.epoch] = table
            peers.joined(info)
        if peers.stats().usable != engines:
            raise RuntimeError(f"{peers.stats().usable} of {engines} engines can be used")
        yield cache, peers


class Prompts:
    """Prompts of one length, from anywhere; the next one each time, until all have been asked."""

    def __init__(self, hashes: Sequence[Sequence[bytes]], keys: int) -> None:
        drawn = random.Random(keys)
        self._hashes, self._keys = hashes, keys
        starts = range(len(hashes[0]) - keys)
        self.calls = min(MOST_CALLS, max(LEAST_CALLS, HASHES // keys))
        self._places = [
            (drawn.randrange(len(hashes)), drawn.choice(starts)) for _ in range(self.calls)
        ]
        self._turn = 0

    def __call__(self) -> list[bytes]:
        """A prompt's hashes, each of which has just been read, as vLLM has just made them."""
        of, start = self._places[self._turn % self.calls]
        self._turn += 1
        prompt = list(self._hashes[of][start : start + self._keys])
        b"".join(prompt)
        return prompt


Way = tuple[Callable[[list[bytes]], int], Callable[[], object], Callable[[], object]]
"""What is timed, which returns how many blocks it has found: all; what comes before, and behind."""


def nothing() -> None:
    pass


def in_turns(
    ways: Mapping[str, Way], prompts: Callable[[], list[bytes]], calls: int
) -> dict[str, dict[str, float]]:
    """Microseconds of a call of each way; each round goes through all, back and forth."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(calls):
        for name in [*ways][:: 1 if turn % 2 else -1]:
            call, before, after = ways[name]
            prompt = prompts()
            before()
            begin = time.perf_counter_ns()
            found = call(prompt)
            times[name].append((time.perf_counter_ns() - begin) / 1000)
            after()
            if found != len(prompt):
                raise RuntimeError(f"{found} of {len(prompt)} blocks were found")
    return {name: percentiles(each) for name, each in times.items()}


def cool() -> None:
    OTHER_DATA[::64] = OTHER_DATA[1::64]


class Calls:
    """What is timed."""

    def __init__(self, cache: SchedulerHalf, peers: Peers) -> None:
        self._cache, self._peers = cache, peers
        self._leased: list[tuple[Any, bytes]] = []

    def lookup(self, prompt: list[bytes]) -> int:
        return sum(run.num_blocks for run in self._peers.lookup(prompt, 0, len(prompt)))

    def planner(self, prompt: list[bytes]) -> int:
        plan = self._cache.planner.lookup(prompt, 0, len(prompt))
        return plan.length if plan is not None else 0

    def leased(self, prompt: list[bytes]) -> int:
        plan, found = self._cache.planner.lookup(prompt, 0, len(prompt)), 0
        for peer, records in plan.runs if plan is not None else ():
            found += peer.table.lease(LeaseBit(27), records)[0]
            self._leased.append((peer, records))
        return found

    def give_back(self) -> None:
        while self._leased:
            peer, records = self._leased.pop()
            peer.table.release(LeaseBit(27), records)

    def miss(self, prompt: list[bytes]) -> int:
        return len(prompt) - self.planner(prompt)


def of_length(calls: Calls, hashes: Sequence[Sequence[bytes]], keys: int) -> dict[str, Any]:
    """All ways for prompts of one length; what needs other caches or prompts, by itself."""
    prompts = Prompts(hashes, keys)
    strange = [digest(f"nobody's {n}") for n in range(keys)]
    ways: dict[str, Way] = {
        "lookup": (calls.lookup, nothing, nothing),
        "planner": (calls.planner, nothing, nothing),
        "leased": (calls.leased, nothing, calls.give_back),
    }
    return {
        "keys": keys,
        **in_turns(ways, prompts, prompts.calls),
        **in_turns({"cooled": (calls.planner, cool, nothing)}, prompts, COOLED_CALLS),
        **in_turns({"nobody has it": (calls.miss, nothing, nothing)}, lambda: strange, MOST_CALLS),
    }


# -- readers in processes of their own


def read(core: int, told: Connection, hashes: Sequence[Sequence[bytes]]) -> None:
    """A process that looks up for SECONDS each time it is told to, and says how long each took."""
    with suppress(OSError):
        os.sched_setaffinity(0, {core})
    reader = ReplicaReader.from_fd("index", recv_handle(told))
    prompts = Prompts(hashes[1:], READ)  # the first engine's blocks are those that are written
    mask = (1 << ENGINES) - 1
    while told.recv():
        times, end = [], time.monotonic() + SECONDS
        while time.monotonic() < end:
            prompt = prompts()
            begin = time.perf_counter_ns()
            reader.lookup(prompt, 0, READ, mask)
            times.append((time.perf_counter_ns() - begin) / 1000)
        told.send(times)


class Readers:
    """Two such processes, each on a core of its own.  To be made before any thread."""

    def __init__(self, hashes: Sequence[Sequence[bytes]]) -> None:
        context = multiprocessing.get_context("fork")
        self._processes = []
        self._lines = []
        for core in (0, 1):
            mine, theirs = context.Pipe()
            process = context.Process(target=read, args=(core, theirs, hashes), daemon=True)
            process.start()
            self._processes.append(process)
            self._lines.append(mine)

    def map(self, peers: Peers) -> None:
        """Have them map the index."""
        for process, line in zip(self._processes, self._lines, strict=True):
            descriptor = peers.replica.descriptor()
            send_handle(line, descriptor, process.pid)
            os.close(descriptor)

    def begin(self, *numbers: int) -> None:
        """Have some of them look up at the same time."""
        for number in numbers:
            self._lines[number].send(True)

    def ended(self, number: int) -> bool:
        return self._lines[number].poll()

    def times(self, number: int) -> list[float]:
        """Microseconds of each lookup of one of them, once it has ended."""
        found: list[float] = self._lines[number].recv()
        return found

    def close(self) -> None:
        for line in self._lines:
            line.send(False)


def batches() -> Iterator[bytes]:
    """Batches of one engine without end: each block in turn with other contents, at generations
    so far apart that each is newer than the one before, the first than the last included."""
    packed = [
        pack_records(
            BlockRecord(
                BlockHash(digest(f"new {turn} {block}")), BlockId(block), Generation(turn << 30),
                block,
            )
            for block in range(first, first + WRITTEN)
        )
        for turn in (1, 2, 3, 0)
        for first in range(0, 256 * WRITTEN, WRITTEN)
    ]  # fmt: skip
    return itertools.cycle(packed)


def _rate(times: Sequence[float]) -> float:
    """Lookups in a microsecond of lookups."""
    return len(times) / sum(times)


def beside_others(peers: Peers, readers: Readers) -> dict[str, Any]:
    """What a reader pays beside a second one, and beside the writer, which is this process."""
    readers.map(peers)
    readers.begin(0, 1)  # which touches their own memory
    readers.times(0), readers.times(1)
    alone: list[float] = []
    both: list[list[float]] = [[], []]
    for numbers in ((0,), (0, 1), (0, 1), (0,)):
        readers.begin(*numbers)
        for number in numbers:
            (both[number] if len(numbers) > 1 else alone).extend(readers.times(number))
    row, written, changes = next(iter(peers.replica.rows())).row, 0, batches()
    os.sched_setaffinity(0, {1})
    readers.begin(0)
    while not readers.ended(0):
        applied = peers.replica.apply(row, next(changes))
        written += applied.added
    busy = readers.times(0)
    return {
        "keys": READ,
        "alone": percentiles(alone),
        "beside_writer": percentiles(busy),
        "written_per_second": round(written / SECONDS),
        "p99_over_p50": round(percentiles(busy)["p99"] / percentiles(alone)["p50"], 2),
        "two_over_one": round(sum(map(_rate, both)) / _rate(alone), 2),
    }


def main() -> None:
    """Command line: print a line of JSON for each length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keys", type=int, nargs="+", default=KEYS)
    args = parser.parse_args()
    if any(not 0 < keys < BLOCKS for keys in args.keys):
        parser.error(f"--keys: from 1 to {BLOCKS - 1}")
    hashes = [[digest(f"{e} {n}") for n in range(BLOCKS)] for e in range(ENGINES)]
    readers = Readers(hashes)
    with node(ENGINES, BLOCKS) as (cache, peers):
        calls = Calls(cache, peers)
        for keys in args.keys:
            report("lookup", unit="us", engines=ENGINES, blocks=BLOCKS,
                   **of_length(calls, hashes, keys))  # fmt: skip
        report("lookup", unit="us", engines=ENGINES, blocks=BLOCKS,
               **beside_others(peers, readers))  # fmt: skip
    readers.close()


if __name__ == "__main__":
    main()
