"""How soon, and how fast, engines hear of each other's blocks, and what that costs others.

    .venv/bin/python benchmarks/bench_events.py [ROW ...] [--seconds 10] [--subscribers 8]

Each row prints a line of JSON.  Real engines without a model, a real coordinator, no vLLM.

visible      microseconds from the call that sends a batch until the replicas of the other engines,
             which do nothing else, have applied it: of all of them, of the first one to know and of
             the last one; of batches that come a tenth of a second apart, and of those for which
             another engine waits (a receipt); all the same at 100 batches a second
coordinator  what its process ran, in cores, while 16 engines send 10,000 records a second each and
             16 subscribers receive them; ``rates``: the same for fewer and more records
overload     records a second at which the coordinator's core is used up, or anything is lost; then
             for ten seconds twice as many: records that were lost, and how long after the last of
             them until each row of a replica says what the slot table says

The growth of an index is measured by bench_growth.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zmq
from event_traffic import (
    NAP_SECONDS,
    answer,
    end,
    engine,
    num_peers,
    start,
    start_coordinator,
    tell,
)
from measurement import end_what_is_started, percentiles, report

from kvshm._base.ids import HASH_BYTES
from kvshm._base.rundir import event_endpoint
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._node.peer import Peer
from kvshm._replica.index import Replica
from kvshm._shm.layout import RECORD_BYTES, RecordKind, pack_records, unpack_records
from kvshm._shm.statistics import RESYNCS
from kvshm.config import Config

ENGINES = 16
PER_PROCESS = 8
"""Engines that a coordinator accepts of one process."""
RATE = 10_000
RATES = 2_500, RATE, 40_000
"""Records a second of each engine."""
BLOCKS = 4096
OVERLOAD_SECONDS = 10.0
TRIAL_SECONDS = 2.0
FIRST_RATE = 20_000
MOST_RATE = 20_000_000
WHOLE_CORE = 0.97
WRAP = 1 << 32
"""A record's depth holds microseconds modulo this."""


def now_us() -> int:
    return time.monotonic_ns() // 1000 % WRAP


# -- visible


def subscriber(name: str) -> None:
    """An engine that notes when each batch was applied; it prints that when its input ends."""
    cache = engine(name, core=None, peers=1)
    assert cache.epoch_state is not None
    peers = cache.epoch_state.peers
    apply = peers.apply_events
    applied: list[tuple[int, int]] = []

    def noting(batches: Sequence[tuple[int, bytes]]) -> None:
        apply(batches)
        at = now_us()
        for _, records in batches:
            applied.extend((r.depth, (at - r.depth) % WRAP) for r in unpack_records(records))

    peers.apply_events = noting  # type: ignore[method-assign]  # the same, noted
    print("ready", flush=True)
    sys.stdin.read()
    print(json.dumps(applied), flush=True)
    cache.close()


def visible(options: argparse.Namespace, processes: list[subprocess.Popen[Any]]) -> dict[str, Any]:
    processes.append(start_coordinator(core=None))
    cache = engine("publisher", core=None, peers=0)
    others = [start_self("--subscriber", f"s{n}") for n in range(options.subscribers)]
    processes += others
    for other in others:
        answer(other)
    while num_peers(cache) < options.subscribers:
        time.sleep(NAP_SECONDS)
    dice, number = random.Random(0), itertools.count()
    sent: dict[str, list[int]] = {"rare": [], "rare_awaited": [], "busy": []}
    for _ in range(round(options.seconds * 5)):
        for kind in ("rare", "rare_awaited"):
            time.sleep(dice.uniform(0.06, 0.14))  # the traffic itself
            sent[kind].append(_send(cache, next(number), kind == "rare_awaited"))
    for _ in range(round(options.seconds * 100)):
        time.sleep(0.01)  # the traffic itself
        sent["busy"].append(_send(cache, next(number), False))
    time.sleep(0.5)  # what was sent last is on its way
    applied = []
    for other in others:
        assert other.stdin is not None
        other.stdin.close()
        applied.append(dict(json.loads(answer(other))))
    found = {kind: latencies(stamps, applied) for kind, stamps in sent.items()}
    return {"subscribers": options.subscribers, "unit": "us", **found}


def _send(cache: SchedulerHalf, number: int, awaited: bool) -> int:
    """Send one record; returns what it says of the time."""
    if awaited:
        cache._client.send_soon()
    stamp, block = now_us(), number % BLOCKS
    key = number.to_bytes(HASH_BYTES, "little")
    record = (key, block, 1 + number // BLOCKS, stamp, RecordKind.PUBLISH, 0)
    cache._client.send_events(pack_records([record]))
    return stamp


def latencies(stamps: Iterable[int], applied: Sequence[dict[int, int]]) -> dict[str, Any]:
    """Of what was sent at ``stamps``: microseconds until it was applied in all engines, the first
    and the last one; and how many of all were never applied."""
    each = [[one[stamp] for one in applied if stamp in one] for stamp in stamps]
    known = [times for times in each if times]
    return {
        "all": percentiles([time for times in known for time in times]),
        "first": percentiles([min(times) for times in known]),
        "last": percentiles([max(times) for times in known]),
        "never": sum(len(applied) - len(times) for times in each),
    }


# -- coordinator


def sink(topic: str, number: int) -> None:
    """So many subscribers that only receive; prints the bytes when its input ends."""
    os.sched_setaffinity(0, {0})
    config = Config.from_env(os.environ)
    context, poller, received = zmq.Context(), zmq.Poller(), 0
    sockets = [context.socket(zmq.SUB) for _ in range(number)]
    for socket in sockets:
        socket.setsockopt(zmq.SUBSCRIBE, bytes.fromhex(topic))
        socket.connect(event_endpoint(Path(config.run_dir), config.namespace))
        poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin, zmq.POLLIN)
    print("ready", flush=True)
    while True:
        ready = dict(poller.poll())
        if sys.stdin.fileno() in ready:
            print(json.dumps({"bytes": received}), flush=True)
            context.destroy(linger=0)
            return
        for socket in sockets:
            if socket in ready:
                received += len(socket.recv(copy=False))


def coordinator(
    options: argparse.Namespace, processes: list[subprocess.Popen[Any]]
) -> dict[str, Any]:
    topic = os.urandom(32).hex()
    processes.append(serving := start_coordinator(core=1))
    processes.append(sinks := start_self("--sink", topic, "--subscribers", ENGINES))
    answer(sinks)
    relayed = {r: _relayed(topic, r, serving.pid, options.seconds, processes) for r in RATES}
    assert sinks.stdin is not None
    sinks.stdin.close()
    received = json.loads(answer(sinks))["bytes"]
    sent = sum(one.pop("sent") for one in relayed.values())
    return {
        "engines": ENGINES, "subscribers": ENGINES, **relayed[RATE],
        "rates": [{**one, "cores": one["cores"]["p50"]} for one in relayed.values()],
        "received_share": round(received / ENGINES / RECORD_BYTES / sent, 3),
    }  # fmt: skip


def _relayed(
    topic: str, rate: int, serving: int, seconds: float, processes: list[subprocess.Popen[Any]]
) -> dict[str, Any]:
    """Have new engines send so many records a second each; what the coordinator ran for it."""
    senders = Crowd(topic, "--hz", 100, "--records", rate // 100)
    processes += senders.processes
    senders.await_ready()
    shares, sent = [], 0
    for _ in range(max(2, round(seconds))):
        before = ran_seconds(serving)
        said = senders.send(1.0)
        shares.append((ran_seconds(serving) - before) / said["seconds"])
        sent += said["sent"]
    time.sleep(0.5)  # what was sent last is on its way
    senders.kill()
    return {
        "cores": percentiles(shares), "records_per_second": round(sent / len(shares)), "sent": sent
    }  # fmt: skip


class Crowd:
    """ENGINES senders that hear nothing, in as few processes as a coordinator lets them be."""

    def __init__(self, topic: str, *options: object) -> None:
        part = "--engines", PER_PROCESS, "--core", 0
        parts = range(ENGINES // PER_PROCESS)
        self.processes = [start("--deaf", topic, *part, *options) for _ in parts]

    def await_ready(self) -> None:
        for process in self.processes:
            answer(process)

    def send(self, seconds: float) -> dict[str, Any]:
        """Have all send for so long; returns how long that took, and sums of records."""
        for process in self.processes:
            tell(process, seconds)
        said = [json.loads(answer(process)) for process in self.processes]
        sums = {what: sum(each[what] for each in said) for what in ("sent", "dropped")}
        return {"seconds": max(each["seconds"] for each in said), **sums}

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def ran_seconds(pid: int) -> float:
    """Seconds that all threads of a process have run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


# -- overload


class Overload:
    """Engines whose slot tables say what they send, one that hears them, and the coordinator."""

    def __init__(self, processes: list[subprocess.Popen[Any]]) -> None:
        self._processes = processes
        processes.append(serving := start_coordinator(core=1))
        self._serving = serving.pid
        self.cache = engine("replica", core=0, peers=0)
        self._senders: Crowd | None = None

    def send(self, rate: float, seconds: float) -> dict[str, Any]:
        """Have new engines send so many records a second in all; returns what became of it."""
        if self._senders is not None:
            self._senders.kill()
        while num_peers(self.cache):
            time.sleep(NAP_SECONDS)
        assert self.cache.table is not None
        records = 2 * max(1, round(rate / ENGINES / 100 / 2))
        load = "--real", "--hz", 100, "--records", records, "--blocks", BLOCKS
        self._senders = Crowd(self.cache.table.fingerprint.hex(), *load)
        self._processes += self._senders.processes
        self._senders.await_ready()
        while num_peers(self.cache) < ENGINES:
            time.sleep(NAP_SECONDS)
        return self._sent(seconds)

    def _sent(self, seconds: float) -> dict[str, Any]:
        assert self._senders is not None
        assert self.cache.table is not None
        count, heard = self.cache.table.counters, [0]
        assert self.cache.epoch_state is not None
        peers, scans = self.cache.epoch_state.peers, count.read(RESYNCS)
        apply = peers.apply_events

        def counting(batches: Sequence[tuple[int, bytes]]) -> None:
            heard[0] += sum(len(records) for _, records in batches) // RECORD_BYTES
            apply(batches)

        peers.apply_events = counting  # type: ignore[method-assign]  # the same, counted
        ran = ran_seconds(self._serving)
        said: dict[str, Any] = self._senders.send(seconds)
        ended = time.monotonic()
        said["cores"] = (ran_seconds(self._serving) - ran) / said["seconds"]
        said["equal_after_ms"] = round(1000 * (self._await_equal() - ended))
        peers.apply_events = apply  # type: ignore[method-assign]  # as before
        said["heard"], said["scans"] = heard[0], count.read(RESYNCS) - scans
        said["lost"] = said["sent"] + said["dropped"] - heard[0]
        return said

    def _await_equal(self) -> float:
        """When every row of the replica was found to say what its slot table says: not sooner than
        it did, and later by the time of a look at all tables at most."""
        assert self.cache.epoch_state is not None
        peers = self.cache.epoch_state.peers
        unequal = list(peers._view.peers.values())
        while unequal := [peer for peer in unequal if not is_equal(peers.replica, peer)]:
            time.sleep(NAP_SECONDS)
        return time.monotonic()


def is_equal(replica: Replica, peer: Peer) -> bool:
    """Whether the replica has the blocks of a peer's table, and no others of it."""
    scanned: bytes = peer.table.scan()
    hashes = [scanned[at : at + HASH_BYTES] for at in range(0, len(scanned), RECORD_BYTES)]
    runs = replica.lookup(hashes, 0, len(hashes), 1 << peer.row)
    rows = {row.row: row.entries for row in replica.rows()}
    known = b"".join(records for _, records in runs)
    return without_depth(known) == without_depth(scanned) and rows.get(peer.row) == len(hashes)


def without_depth(packed: bytes) -> list[tuple[bytes, int, int]]:
    """Hash, block and generation of packed records: a lookup numbers what it finds."""
    return [(r.block_hash, r.block_id, r.generation) for r in unpack_records(packed)]


def overload(options: argparse.Namespace, processes: list[subprocess.Popen[Any]]) -> dict[str, Any]:
    world = Overload(processes)
    trials, rate, held, best = [], FIRST_RATE, True, FIRST_RATE
    while held and rate < MOST_RATE:
        rate *= 2
        said = world.send(rate, TRIAL_SECONDS)
        trials.append({"offered": rate, **said})
        held = not said["lost"] and said["cores"] < WHOLE_CORE and keeps_pace(rate, said)
        best = rate if held else best
    found = world.send(2 * best, options.seconds)
    world.cache.close()
    return {"engines": ENGINES, "capacity": best, "offered": 2 * best, **found, "trials": trials}


def keeps_pace(rate: float, said: dict[str, Any]) -> bool:
    """Whether the senders could offer what they were told to."""
    return bool((said["sent"] + said["dropped"]) / said["seconds"] > 0.85 * rate)


# -- all rows

ROWS: dict[str, Callable[..., dict[str, Any]]] = {
    "visible": visible,
    "coordinator": coordinator,
    "overload": overload,
}


def start_self(*options: object) -> subprocess.Popen[str]:
    argv = [sys.executable, __file__, *map(str, options)]
    return subprocess.Popen(argv, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def main() -> None:
    """Command line: print a line of JSON for each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--seconds", type=float, default=OVERLOAD_SECONDS, help="of each row")
    parser.add_argument("--subscribers", type=int, default=8)
    parser.add_argument("--subscriber", help="for the parts: the name of an engine")
    parser.add_argument("--sink", help="for the parts: the topic")
    options = parser.parse_args()
    if options.subscriber:
        subscriber(options.subscriber)
        return
    if options.sink:
        sink(options.sink, options.subscribers)
        return
    unknown = set(options.rows) - set(ROWS)
    if unknown or options.subscribers < 1 or not options.seconds >= 1:
        parser.error(f"wanted rows of {', '.join(ROWS)}, a subscriber and a second at least")
    end_what_is_started()
    for row in options.rows or ROWS:
        with ExitStack() as stack:
            run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-"))
            os.environ.update(KVSHM_RUN_DIR=run_dir, KVSHM_NAMESPACE=f"bench-{os.getpid()}")
            processes: list[subprocess.Popen[Any]] = []
            stack.callback(end, processes)
            found = ROWS[row](options, processes)
        report("events", row=row, **found)


if __name__ == "__main__":
    main()
