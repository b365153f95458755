"""Engines without a model that send events, for bench_client.py and bench_events.py.

As a program: one of them (``--sender NAME``), or many that hear nothing (``--deaf FINGERPRINT``).
For each line on standard input, a number of seconds, it sends for so long and then says "done".
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from kvshm._base.ids import BlockHash, BlockId, Epoch, Fingerprint, Rank
from kvshm._base.rundir import command_endpoint, engine_socket
from kvshm._base.timing import TIMING
from kvshm._engine.epoch_state import EngineSpec
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._node.coordinator_client import MAX_JOINED_BYTES
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
from kvshm._shm.layout import RECORD_BYTES, RecordKind, pack_records
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable, TableSpec
from kvshm.config import Config
from kvshm.interfaces import MemoryDescriptor

ENGINES = 8
BLOCKS = 20_000
MARK_EVERY = 16
"""One batch of so many has a block that is looked for."""
NAP_SECONDS = 0.01
"""Between two looks at what nobody tells, before or after anything is measured."""


# -- whole engines


def num_peers(cache: SchedulerHalf) -> int:
    """Engines whose blocks may be used at present."""
    state = cache.epoch_state
    return state.peers.stats().usable if state else 0


def engine(
    name: str, core: int | None, peers: int = ENGINES, blocks: int = BLOCKS
) -> SchedulerHalf:
    """An engine in the roster, in this process, which knows so many others."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    config = Config.from_env(os.environ)
    spec = EngineSpec(name, "none", blocks, 16, asynchronous=True)
    cache = SchedulerHalf(config, spec, Path(config.run_dir))

    rank = RankInfo(os.getpid(), MemoryDescriptor("none", 0, 0, []))
    cache.open_epoch([rank], lambda: {"weights": "none"})
    while (table := cache.table) is None or num_peers(cache) < peers:
        time.sleep(NAP_SECONDS)
        if table is not None:
            RankSlotTable.from_fd(table.name, table.descriptor(True)).set_life(Rank(0))
    return cache


def mark(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(b"%d" % number).digest())


def batches(name: str, records: int, blocks: int = BLOCKS) -> Iterator[bytes]:
    """Batches of one engine without end: its blocks but the last in turn, each time with other
    contents.  One of MARK_EVERY batches has a record more, a mark in the last block: its generation
    says when it was sent, in milliseconds.

    Made beforehand, for four generations so far apart that each is newer than the one before,
    the first than the last included.
    """
    dice = random.Random(name)
    made = [
        _published(dice, range(first, first + records), turn << 30)
        for turn in range(4)
        for first in range(0, blocks - records, records)
    ]
    return _with_marks(made, blocks - 1)


def _published(dice: random.Random, blocks: range, generation: int) -> bytes:
    return pack_records(
        (dice.randbytes(32), block, generation, 0, RecordKind.PUBLISH, 0) for block in blocks
    )


def _with_marks(made: list[bytes], block: int) -> Iterator[bytes]:
    for number, batch in enumerate(itertools.cycle(made)):
        if number % MARK_EVERY:
            yield batch
            continue
        sent_at = int(time.monotonic() * 1000) % 2**32
        head = (mark(number // MARK_EVERY), block, sent_at, 0, RecordKind.PUBLISH, 0)
        yield pack_records([head]) + batch


def churn(table: OwnSlotTable, name: str, records: int) -> Iterator[bytes]:
    """Batches as a real table makes them, all blocks of which are published first: blocks in turn
    are retracted, and published with other contents; two records for each block."""
    dice, size = random.Random(name), max(1, records // 2)
    some = [range(at, at + size) for at in range(0, table.num_blocks - size + 1, size)]
    contents = [_published(dice, part, 0) for part in some * 2]
    for content in contents[len(some) :]:
        table.publish(content, bytes(8 * size))
    return _churn(table, [[BlockId(block) for block in part] for part in some], contents, size)


def _churn(
    table: OwnSlotTable, some: list[list[BlockId]], contents: list[bytes], size: int
) -> Iterator[bytes]:
    parents = bytes(8 * size)
    for part, content in zip(itertools.cycle(some), itertools.cycle(contents), strict=False):
        withdrawn, _ = table.retract(part)
        yield withdrawn + table.publish(content, parents)


def send(options: argparse.Namespace) -> None:
    """A sender: for each line on standard input, so many seconds of traffic."""
    source = batches(options.sender, options.records, options.blocks)
    cache = engine(options.sender, core=1, blocks=options.blocks)
    print("ready", flush=True)
    for line in sys.stdin:
        traffic(float(line), options.hz, lambda: cache._client.send_events(next(source)))
    cache.close()


def traffic(seconds: float, hz: float, step: Callable[[], None], **found: object) -> None:
    begin = time.monotonic()
    for number in range(round(seconds * hz)):
        step()
        # The pace of the traffic itself, kept by the clock and not by the steps.
        time.sleep(max(0.0, begin + (number + 1) / hz - time.monotonic()))
    print(json.dumps({"seconds": time.monotonic() - begin, **found}), flush=True)


# -- engines that hear nothing, many in one process


class Deaf:
    """An engine that says much and listens to nobody but the answer to its Join."""

    def __init__(self, name: str, fingerprint: bytes, options: argparse.Namespace) -> None:
        config = Config.from_env(os.environ)
        run_dir, space = Path(config.run_dir), config.namespace
        spec = TableSpec(space, name, options.blocks, 16, 1, Fingerprint(fingerprint))
        self._epoch, self._sequence = Epoch(random.getrandbits(62)), 0
        self._table = OwnSlotTable.create(spec, self._epoch)
        self._table.begin_pulse(None)
        RankSlotTable.from_fd(self._table.name, self._table.descriptor(True)).set_life(Rank(0))
        self._replica = Replica.create(space, name, self._epoch, 8)
        path = engine_socket(run_dir, space, self._epoch)
        self._server = serve_epoch(path, self._table, self._replica)
        self._source = (
            churn(self._table, name, options.records)
            if options.real
            else batches(name, options.records, options.blocks)
        )
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(command_endpoint(run_dir, space))
        memory = MemoryDescriptor("none", self._epoch, 0, [])
        self._info = EngineInfo(
            epoch=self._epoch, name=name, pid=os.getpid(), fingerprint=fingerprint, fields={},
            num_blocks=options.blocks, ranks=[RankInfo(os.getpid(), memory)],
        )  # fmt: skip
        self._lost = False
        self.sent = self.dropped = 0
        """Records."""
        self._join()
        self._socket.recv()

    def step(self, batches: int) -> None:
        """As many batches as an engine's client sends together, in as few messages; as there, one
        is dropped if the socket takes no more, and then the engine joins again."""
        records = b"".join(itertools.islice(self._source, batches))
        for start in range(0, len(records), MAX_JOINED_BYTES):
            self._send(records[start : start + MAX_JOINED_BYTES])

    def _send(self, records: bytes) -> None:
        self._sequence += 1
        number = len(records) // RECORD_BYTES
        events = Events(epoch=self._epoch, sequence=self._sequence, records=records)
        try:
            self._socket.send(encode(events), zmq.NOBLOCK)
            self.sent += number
        except zmq.Again:
            self._lost = True
            self.dropped += number

    def beat(self) -> None:
        """Say that it is alive, and join again if events were dropped; read answers."""
        try:
            if self._lost:
                self._join()
                self._lost = False
            heartbeat = Heartbeat(epoch=self._epoch, sequence=self._sequence)
            self._socket.send(encode(heartbeat), zmq.NOBLOCK)
            while True:
                self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return

    def _join(self) -> None:
        join = Join(protocol=PROTOCOL_VERSION, engine=self._info, sequence=self._sequence)
        self._socket.send(encode(join), zmq.NOBLOCK)


def send_for_all(options: argparse.Namespace) -> None:
    """The same as ``send`` for many engines in one process, which costs little."""
    os.sched_setaffinity(0, {options.core})
    fingerprint = bytes.fromhex(options.deaf)
    crowd = [Deaf(f"e{number}", fingerprint, options) for number in range(options.engines)]
    turns = itertools.cycle(crowd)
    together = max(1, round(options.hz * TIMING.send_delay_seconds))
    print("ready", flush=True)
    due = time.monotonic()

    def step() -> None:
        nonlocal due
        next(turns).step(together)
        if time.monotonic() >= due:
            due = time.monotonic() + TIMING.heartbeat_seconds / 2
            for one in crowd:
                one.beat()

    while True:
        if select.select([sys.stdin], [], [], 0.5)[0]:
            if not (line := sys.stdin.readline()):
                return
            before = sum(one.sent for one in crowd), sum(one.dropped for one in crowd)
            _crowd_traffic(float(line), options.hz * len(crowd) / together, step, crowd, before)
        for one in crowd:
            one.beat()


def _crowd_traffic(
    seconds: float, hz: float, step: Callable[[], None], crowd: list[Deaf], before: tuple[int, int]
) -> None:
    begin, messages = time.monotonic(), 0
    while (now := time.monotonic()) < begin + seconds:
        if messages < (now - begin) * hz:
            step()
            messages += 1
        else:
            time.sleep(max(0.0, begin + messages / hz - now))
    found = {
        "seconds": time.monotonic() - begin,
        "sent": sum(one.sent for one in crowd) - before[0],
        "dropped": sum(one.dropped for one in crowd) - before[1],
    }
    print(json.dumps(found), flush=True)


# -- as processes


def start(*options: object) -> subprocess.Popen[str]:
    """Start this program; ``answer`` tells when it is ready, and what it has sent."""
    argv = [sys.executable, __file__, *map(str, options)]
    return subprocess.Popen(argv, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def tell(sender: subprocess.Popen[str], seconds: float) -> None:
    """Have it send for so long."""
    assert sender.stdin is not None
    print(seconds, file=sender.stdin, flush=True)


def answer(sender: subprocess.Popen[str]) -> str:
    """The next line that it says.  Raises SystemExit if it has ended."""
    assert sender.stdout is not None
    if not (line := sender.stdout.readline()):
        raise SystemExit(f"{sender.args!r} has ended")
    return line


def start_coordinator(core: int | None) -> subprocess.Popen[Any]:
    """A coordinator of the namespace in the environment, on a core of its own if one is named."""
    bound = [] if core is None else ["taskset", "-c", str(core)]
    command = [*bound, sys.executable, "-P", "-m", "kvshm.coordinator"]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def end(processes: list[subprocess.Popen[Any]]) -> None:
    """Senders before the coordinator, which cleans up after them."""
    for process in reversed(processes):
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sender", help="the name of an engine")
    parser.add_argument("--deaf", help="the fingerprint of engines that hear nothing")
    parser.add_argument("--engines", type=int, default=ENGINES, help="of those; 8 at most")
    parser.add_argument("--real", action="store_true", help="their slot tables say the same")
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--hz", type=float, default=100)
    parser.add_argument("--records", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    options = parser.parse_args()
    (send if options.sender else send_for_all)(options)


if __name__ == "__main__":
    main()
