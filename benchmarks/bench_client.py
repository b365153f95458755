"""What a busy scheduler loses to the thread that hears of other engines' blocks, and how soon they
are known.

    .venv/bin/python benchmarks/bench_client.py [--rounds 30] [--hz 100] [--records 8]
    .venv/bin/python benchmarks/bench_client.py --crowd --hz 1000 --records 64

Eight engines without a model (a real slot table, replica and client each, and a real coordinator)
send ``--hz`` times a second a batch of ``--records`` records.  A ninth one's main thread runs a
loop in Python that never rests, as no scheduler is worse; it sends as much itself.  In turns of a
second the others send, or are silent.  It stands on core 0 and everybody else on core 1.
With ``--crowd`` the eight are one process, which listens to nobody and so can send more than eight
whole engines on one core.

lost_percent     of the wall's time, what that thread stood still for want of the GIL, or what the
                 client's thread ran if that was longer, and what libzmq's threads ran: by /proc's
                 schedstat, which tells waiting for a core from waiting for the GIL, so that other
                 programs on the machine hardly count
threads_percent  of the wall's time, what all other threads of the engine ran
records_heard_per_second  what was applied to its replica
known_ms         from a batch's sending until a lookup of the busy thread names it, in whole ms;
                 up to 25 ms of it a batch waits at its sender
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from measurement import end_what_is_started, percentiles, report

from kvshm._base.ids import BlockHash, BlockId, Epoch, Fingerprint, Generation, Rank
from kvshm._base.rundir import command_endpoint, engine_socket
from kvshm._base.timing import TIMING
from kvshm._engine.epoch_state import EngineSpec
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._node.protocol import (
    PROTOCOL_VERSION,
    EngineInfo,
    Events,
    Heartbeat,
    Join,
    RankInfo,
    encode,
)
from kvshm._node.segment_server import serve_epoch
from kvshm._replica.index import Replica
from kvshm._shm.layout import RECORD_BYTES, BlockRecord, pack_records, unpack_records
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable, TableSpec
from kvshm._shm.statistics import BAD_MESSAGES, EVENTS_DROPPED, RESYNCS
from kvshm.config import Config
from kvshm.interfaces import MemoryDescriptor

ENGINES = 8
BLOCKS = 20_000
TURN_SECONDS = 1.0
SETTLE_SECONDS = 0.3
MARK_EVERY = 16
"""One batch of so many of the first sender has a block that is looked for."""
LOOKED_FOR = 64
"""Marks that are looked for in turn: one may be overwritten before it is seen."""
CHUNK = 200
"""Loop turns between two looks at the clock, about 10 us."""


def num_peers(cache: SchedulerHalf) -> int:
    """Engines whose blocks may be used at present."""
    state = cache.epoch_state
    return state.peers.stats().usable if state else 0


def engine(name: str, core: int, peers: int = ENGINES) -> SchedulerHalf:
    """An engine in the roster, in this process."""
    os.sched_setaffinity(0, {core})
    config = Config.from_env(os.environ)
    spec = EngineSpec(name, "none", BLOCKS, 16, asynchronous=True)
    cache = SchedulerHalf(config, spec, Path(config.run_dir))

    rank = RankInfo(os.getpid(), MemoryDescriptor("none", 0, 0, []))
    cache.open_epoch([rank], lambda: {"weights": "none"})
    while (table := cache.table) is None or num_peers(cache) < peers:
        time.sleep(0.01)  # before anything is measured; the client's thread tells nobody
        if table is not None:
            RankSlotTable.from_fd(table.name, table.descriptor(True)).set_life(Rank(0))
    return cache


class Turn(NamedTuple):
    """Of the busy engine: in percent of the time on the wall, and per second."""

    lost: float
    threads: float
    heard: float


@dataclass(frozen=True)
class Ran:
    """Nanoseconds that this process's threads ran, and that the main one waited for a core."""

    wall: int
    main: int
    queued: int
    libzmq: int
    client: int

    @classmethod
    def now(cls) -> Ran:
        ran = {"main": 0, "libzmq": 0, "client": 0}
        queued = 0
        for task in Path("/proc/self/task").iterdir():
            running, waiting, _ = map(int, (task / "schedstat").read_text().split())
            name = (task / "comm").read_text()
            if int(task.name) == os.getpid():
                ran["main"], queued = running, waiting
            else:
                ran["libzmq" if name.startswith("ZMQ") else "client"] += running
        return cls(wall=time.monotonic_ns(), queued=queued, **ran)

    def since(self, before: Ran) -> tuple[float, float]:
        wall, client = self.wall - before.wall, self.client - before.client
        libzmq = self.libzmq - before.libzmq
        stood = wall - (self.main - before.main) - (self.queued - before.queued)
        return (max(stood, client) + libzmq) / wall * 100, (client + libzmq) / wall * 100


def mark(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(b"%d" % number).digest())


def batches(name: str, records: int) -> Iterator[bytes]:
    """Batches of one engine without end: its blocks in turn, each time with other contents, the
    first record of every MARK_EVERY batches a mark that says when it was sent.

    Made beforehand, for four generations so far apart that each is newer than the one before,
    the first than the last included.
    """
    dice = random.Random(name)
    made = [
        pack_records(
            BlockRecord(BlockHash(dice.randbytes(32)), BlockId(block), Generation(turn << 30), 0)
            for block in range(first, first + records)
        )
        for turn in range(4)
        for first in range(0, BLOCKS - records + 1, records)
    ]
    for number, batch in enumerate(itertools.cycle(made)):
        if number % MARK_EVERY:
            yield batch
            continue
        (first,) = unpack_records(batch[:RECORD_BYTES])
        sent_at = int(time.monotonic() * 1000) % 2**32
        head = first._replace(block_hash=mark(number // MARK_EVERY), depth=sent_at)
        yield pack_records([head]) + batch[RECORD_BYTES:]


def send(name: str, hz: float, records: int) -> None:
    """A sender: for each line on standard input, so many seconds of traffic."""
    cache = engine(name, core=1)
    print("ready", flush=True)
    source = batches(name, records)
    for line in sys.stdin:
        traffic(float(line), hz, lambda: cache._client.send_events(next(source)))
    cache.close()


def traffic(seconds: float, hz: float, step: Callable[[], None]) -> None:
    begin = time.monotonic()
    for number in range(round(seconds * hz)):
        step()
        # The pace of the traffic itself, kept by the clock and not by the steps.
        time.sleep(max(0.0, begin + (number + 1) / hz - time.monotonic()))
    print("done", flush=True)


class Deaf:
    """An engine that says much and listens to nobody, one of many in this process."""

    def __init__(self, name: str, fingerprint: bytes, records: int) -> None:
        config = Config.from_env(os.environ)
        run_dir, space = Path(config.run_dir), config.namespace
        spec = TableSpec(space, name, BLOCKS, 16, 1, Fingerprint(fingerprint))
        self._epoch, self._sequence = Epoch(random.getrandbits(62)), 0
        self._table = OwnSlotTable.create(spec, self._epoch)
        self._replica = Replica.create(space, name, self._epoch, 8)
        path = engine_socket(run_dir, space, self._epoch)
        self._server = serve_epoch(path, self._table, self._replica)
        self._source = batches(name, records)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(command_endpoint(run_dir, space))
        memory = MemoryDescriptor("none", self._epoch, 0, [])
        info = EngineInfo(
            epoch=self._epoch, name=name, pid=os.getpid(), fingerprint=fingerprint, fields={},
            num_blocks=BLOCKS, ranks=[RankInfo(os.getpid(), memory)],
        )  # fmt: skip
        self._socket.send(encode(Join(protocol=PROTOCOL_VERSION, engine=info)))
        self._socket.recv()

    def step(self, batches: int) -> None:
        """One message, of as many batches as an engine's client sends together."""
        self._sequence += 1
        records = b"".join(itertools.islice(self._source, batches))
        events = Events(epoch=self._epoch, sequence=self._sequence, records=records)
        self._socket.send(encode(events))

    def beat(self) -> None:
        self._socket.send(encode(Heartbeat(epoch=self._epoch, sequence=self._sequence)))


def send_for_all(fingerprint: bytes, hz: float, records: int) -> None:
    """The same as ``send`` for all engines in one process, which costs little."""
    os.sched_setaffinity(0, {1})
    crowd = [Deaf(f"e{number}", fingerprint, records) for number in range(ENGINES)]
    turns, together = itertools.cycle(crowd), max(1, round(hz * TIMING.send_delay_seconds))
    print("ready", flush=True)
    while True:
        if select.select([sys.stdin], [], [], 0.5)[0]:
            if not (line := sys.stdin.readline()):
                return
            messages = hz * ENGINES / together
            traffic(float(line), messages, lambda: next(turns).step(together))
        for one in crowd:
            one.beat()


class Busy:
    """The engine whose scheduler never rests."""

    def __init__(self, cache: SchedulerHalf, hz: float, records: int) -> None:
        self._cache, self._hz = cache, hz
        self._own = batches("busy", records)
        self._next_mark = self._heard = self._looks = 0
        self.known_ms: list[float] = []

        assert cache.epoch_state is not None
        self._peers = cache.epoch_state.peers
        self._apply = self._peers.apply_events
        self._peers.apply_events = self._count  # type: ignore[method-assign]  # the same, counted

    def _count(self, batches: Sequence[tuple[int, bytes]]) -> None:
        self._heard += sum(len(records) for _, records in batches) // RECORD_BYTES
        self._apply(batches)

    def turn(self, seconds: float, sending: bool) -> Turn:
        begin = due = time.monotonic()
        before, heard = Ran.now(), self._heard
        while (now := time.monotonic()) < begin + seconds:
            for _ in range(CHUNK):
                pass
            self._look(now)
            if sending and now >= due:
                due += 1 / self._hz
                self._cache._client.send_events(next(self._own))
        lost, threads = Ran.now().since(before)
        return Turn(lost, threads, (self._heard - heard) / (time.monotonic() - begin))

    def _look(self, now: float) -> None:
        self._looks += 1
        number = self._next_mark + self._looks % LOOKED_FOR
        for run in self._peers.lookup([mark(number)], 0, 1):
            (record,) = unpack_records(run.records)
            self.known_ms.append(now * 1000 % 2**32 - record.depth)
            self._next_mark = number + 1


def start_senders(cache: SchedulerHalf, options: argparse.Namespace) -> list[subprocess.Popen[str]]:
    load = ["--hz", str(options.hz), "--records", str(options.records)]
    parts = [["--sender", f"e{number}"] for number in range(ENGINES)]
    if options.crowd:
        assert cache.table is not None
        parts = [["--deaf", cache.table.fingerprint.hex()]]
    return [
        subprocess.Popen(
            [sys.executable, __file__, *load, *part], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for part in parts
    ]  # fmt: skip


def measure(
    processes: list[subprocess.Popen[Any]], options: argparse.Namespace
) -> dict[str, object]:
    cache = engine("busy", core=0, peers=0)
    senders = start_senders(cache, options)
    processes += senders
    for sender in senders:
        assert sender.stdout is not None
        sender.stdout.readline()
    while num_peers(cache) < ENGINES:
        time.sleep(0.01)  # before anything is measured
    busy = Busy(cache, options.hz, options.records)
    quiet: list[Turn] = []
    loud: list[Turn] = []
    for _ in range(options.rounds):
        quiet.append(busy.turn(TURN_SECONDS, sending=False))
        for sender in senders:
            assert sender.stdin is not None
            print(TURN_SECONDS + 2 * SETTLE_SECONDS, file=sender.stdin, flush=True)
        busy.turn(SETTLE_SECONDS, sending=True)
        loud.append(busy.turn(TURN_SECONDS, sending=True))
        busy.turn(2 * SETTLE_SECONDS, sending=False)
        for sender in senders:
            assert sender.stdout is not None
            sender.stdout.readline()
    counted = cache.table.counters if cache.table is not None else None
    assert counted is not None
    found = {
        "engines": ENGINES, "hz": options.hz, "records": options.records,
        "records_per_second": ENGINES * options.hz * options.records,
        "lost_percent": percentiles([turn.lost for turn in loud]),
        "lost_percent_quiet": percentiles([turn.lost for turn in quiet]),
        "threads_percent": percentiles([turn.threads for turn in loud]),
        "records_heard_per_second": percentiles([turn.heard for turn in loud]),
        "known_ms": percentiles(busy.known_ms),
        "resyncs": counted.read(RESYNCS), "bad_messages": counted.read(BAD_MESSAGES),
        "dropped": counted.read(EVENTS_DROPPED),
    }  # fmt: skip
    cache.close()
    return found


def end(processes: list[subprocess.Popen[Any]]) -> None:
    """Senders before the coordinator, which cleans up after them."""
    for process in reversed(processes):
        process.terminate()
        process.wait()


def main() -> None:
    """Command line: print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--hz", type=float, default=100, help="batches a second of each engine")
    parser.add_argument("--records", type=int, default=8, help="records in each batch")
    parser.add_argument(
        "--crowd", action="store_true", help="all senders in one process, which hear nothing"
    )
    parser.add_argument("--sender", help="for the parts: the name of an engine")
    parser.add_argument("--deaf", help="for the parts: the fingerprint of the busy engine")
    options = parser.parse_args()
    if options.sender:
        send(options.sender, options.hz, options.records)
        return
    if options.deaf:
        send_for_all(bytes.fromhex(options.deaf), options.hz, options.records)
        return
    with ExitStack() as stack:
        run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-"))
        os.environ.update(KVSHM_RUN_DIR=run_dir, KVSHM_NAMESPACE=f"bench-{os.getpid()}")
        command = [sys.executable, "-P", "-m", "kvshm.coordinator"]
        end_what_is_started()
        processes: list[subprocess.Popen[Any]] = [
            subprocess.Popen(["taskset", "-c", "1", *command], stderr=subprocess.DEVNULL)
        ]
        stack.callback(end, processes)
        found = measure(processes, options)
    report("client", **found)


if __name__ == "__main__":
    main()
