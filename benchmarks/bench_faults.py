"""How long it takes, after a process has ended or stands still, until the others do without it.

    python benchmarks/bench_faults.py [ROW ...] [--trials N]

Each row prints a line of JSON, milliseconds.  ``jitter_ms`` is how late a process that sleeps a
millisecond woke up in the same minutes: no figure means more than that.  No vLLM, no KV memory:
real caches, a real coordinator, real signals.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from fault_engine import NAP_SECONDS, Engine, Handle
from measurement import end_what_is_started, percentiles, report

from kvshm._base.ids import BlockId
from kvshm._base.rundir import command_endpoint
from kvshm._shm.layout import RECORD_BYTES
from kvshm.coordinator.__main__ import EXIT_EXHAUSTED

SOME = 64
LEASES = 100_000
ENTRIES = 1_000_000
STOP_SECONDS = 0.5
"""How long a stopped process stands still: a length of the experiment, not a wait for something."""
RESTART_SECONDS = 0.25
"""RestartSec of the unit in deploy/systemd."""
STEP = 16
"""Blocks that one step withdraws."""
JITTER = """
import json, statistics, sys, threading, time
late, over = [], threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
while not over.is_set():
    begin = time.monotonic(); time.sleep(0.001); late.append(1000 * (time.monotonic() - begin) - 1)
cuts = statistics.quantiles(late, n=100)
found = {"p50": cuts[49], "p99": cuts[98], "max": max(late)}
print(json.dumps({name: round(value, 3) for name, value in found.items()}))
"""

Times = dict[str, list[float]]


class Place:
    """A run directory and a namespace with a coordinator."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir, self.namespace = run_dir, f"bench{os.getpid()}"
        self.handles: list[Handle] = []
        self.coordinator = self.start_coordinator()

    def start_coordinator(self) -> subprocess.Popen[bytes]:
        """Returns when it serves."""
        place = ("--run-dir", self.run_dir, "--namespace", self.namespace)
        argv = (sys.executable, "-P", "-m", "kvshm.coordinator", *place)
        log = Path(self.run_dir, "coordinator.log")
        with log.open("w") as stderr:
            started = subprocess.Popen(argv, stderr=stderr)
        while "event=serving" not in log.read_text():
            assert started.poll() is None, log.read_text()
            time.sleep(NAP_SECONDS)
        return started

    def engine(self, blocks: int = SOME, resident: float = 0) -> Handle:
        self.handles.append(Handle(self.run_dir, self.namespace, blocks, resident))
        return self.handles[-1]

    def close(self) -> None:
        for handle in self.handles:
            handle.end()
        self.coordinator.terminate()
        self.coordinator.wait()


@contextmanager
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="kv-") as run_dir:
        found = Place(run_dir)
        try:
            yield found
        finally:
            found.close()


@contextmanager
def jitter(into: dict[str, Any]) -> Iterator[None]:
    """Measure how late a sleeping process wakes up meanwhile."""
    argv = (sys.executable, "-c", JITTER)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
        yield
        into["jitter_ms"] = json.loads(probe.communicate()[0])


# -- rows: each returns seconds by what was awaited


def exporter_killed(trials: int, resident: float) -> Times:
    """Until no lease on a dead engine succeeds, and until lookups name it no more."""
    leases, lookups = [], []
    with place() as at:
        me = Engine(at.run_dir, at.namespace, SOME)
        for _ in range(trials):
            exporter = at.engine(SOME, resident)
            exporter.ask("publish", SOME)
            me.await_found(exporter.pid, 0, SOME)
            table = me.peer(exporter.epoch)
            records = table.scan()[: 8 * RECORD_BYTES]
            begin = exporter.kill()
            while (taken := table.lease(me.bit, records))[0]:
                table.release(me.bit, records, taken[1])
            leases.append(time.monotonic() - begin)
            while me.found(exporter.pid, 0, SOME):
                time.sleep(NAP_SECONDS)
            lookups.append(time.monotonic() - begin)
            at.handles.remove(exporter)
            exporter.end()
        me.cache.close()
    return {"no lease succeeds": leases, "no lookup names it": lookups}


def importer_killed(trials: int) -> Times:
    """Until all leases that a dead engine held are free."""
    times = []
    with place() as at:
        me = Engine(at.run_dir, at.namespace, LEASES)
        me.publish(LEASES)
        last = LEASES - 1
        for _ in range(trials):
            importer = at.engine()
            count = importer.ask("lease", me.table.epoch, 0, LEASES)
            assert count == LEASES, f"{count} of {LEASES} could be leased"
            begin = importer.kill()
            while me.table.slot(last).leases:  # freed in their order
                pass
            times.append(time.monotonic() - begin)
            left = sum(slot.leases != 0 for slot in me.table.slots())
            assert not left, f"{left} leases were left"
            at.handles.remove(importer)
            importer.end()
        me.cache.close()
    return {f"{LEASES} leases are free": times}


def engine_joins(trials: int) -> Times:
    """Until the replica of a new engine has the million blocks that two others hold together."""
    begun, started = [], []
    with place() as at:
        engines = [at.engine(ENTRIES // 2) for _ in range(2)]
        for engine in engines:
            engine.tell("publish", ENTRIES // 2)
        for engine in engines:
            engine.answer()
        _await_all(engines, ENTRIES // 2)
        for _ in range(trials):
            begin = time.monotonic()
            joins = at.engine()
            whole = _await_all([joins], ENTRIES)
            begun.append(whole - joins.began)
            started.append(whole - begin)
            at.handles.remove(joins)
            joins.end()
    return {
        "it begins to join, its replica is whole": begun,
        "its process starts, its replica is whole": started,
    }


def coordinator_killed(trials: int) -> Times:
    """Until every replica is whole again, after blocks were published while there was none."""
    serving, since_start, since_serving = [], [], []
    with place() as at:
        count = ENTRIES // 2
        engines = [at.engine(count + SOME * (trials + 1)) for _ in range(3)]
        for engine in engines:
            engine.tell("publish", count)
        for engine in engines:
            engine.answer()
        _await_all(engines, 2 * count)
        for _ in range(trials):
            at.coordinator.kill()
            at.coordinator.wait()
            for engine in engines:
                engine.ask("publish", SOME)
            count += SOME
            begin = time.monotonic()
            at.coordinator = at.start_coordinator()
            served = time.monotonic()
            whole = _await_all(engines, 2 * count)
            serving.append(served - begin)
            since_start.append(whole - begin)
            since_serving.append(whole - served)
    return {
        "started, it serves": serving,
        "serving, all replicas are whole": since_serving,
        "started, all replicas are whole": since_start,
    }


def _await_all(engines: list[Handle], entries: int) -> float:
    for engine in engines:
        engine.tell("await_entries", entries)
    return max(float(engine.answer()) for engine in engines)


def coordinator_exhausted(trials: int) -> Times:
    """Until the successor of a coordinator without descriptors serves, as the service manager
    starts it, and until every replica is whole again."""
    serving, whole = [], []
    with place() as at:
        engines = [at.engine(SOME * (trials + 1)) for _ in range(3)]
        for engine in engines:
            engine.ask("publish", SOME)
        count = SOME
        _await_all(engines, 2 * count)
        for _ in range(trials):
            _exhaust(at)
            ended = time.monotonic()
            for engine in engines:
                engine.ask("publish", SOME)
            count += SOME
            time.sleep(max(0.0, ended + RESTART_SECONDS - time.monotonic()))
            at.coordinator = at.start_coordinator()
            serving.append(time.monotonic() - ended)
            whole.append(_await_all(engines, 2 * count) - ended)
    return {"ended, its successor serves": serving, "ended, all replicas are whole": whole}


def _exhaust(at: Place) -> None:
    """Connect until the coordinator has ended."""
    resource.prlimit(at.coordinator.pid, resource.RLIMIT_NOFILE, (4096, 4096))
    commands = command_endpoint(Path(at.run_dir), at.namespace).removeprefix("ipc://")
    with ExitStack() as held, suppress(OSError):  # it does not listen any more
        while at.coordinator.poll() is None:
            held.enter_context(socket.socket(socket.AF_UNIX)).connect(commands)
    assert at.coordinator.wait() == EXIT_EXHAUSTED


def exporter_stopped(trials: int) -> Times:
    """Until lookups name a stopped engine no more, and until they name it again."""
    avoided: list[float] = []
    back: list[float] = []
    together = 4
    with place() as at:
        me = Engine(at.run_dir, at.namespace, SOME)
        exporters = [at.engine() for _ in range(together)]
        for exporter in exporters:
            exporter.ask("publish", SOME)
        for _ in range(-(-trials // together)):
            for number, found, times in (
                (signal.SIGSTOP, 0, avoided),
                (signal.SIGCONT, SOME, back),
            ):
                for exporter in exporters:
                    me.await_found(exporter.pid, 0, SOME - found)
                begin = time.monotonic()
                for exporter in exporters:
                    exporter.process.send_signal(number)
                times += _each_found(me, exporters, found, begin)
            time.sleep(0.05 + 0.95 * len(back) / trials)  # another place between two heartbeats
        me.cache.close()
    return {"stopped, lookups do not name it": avoided, "going on, lookups name it": back}


def _each_found(me: Engine, exporters: list[Handle], count: int, begin: float) -> list[float]:
    """How long each took until lookups named so many of its blocks."""
    times, waiting = [], list(exporters)
    while waiting:
        for exporter in list(waiting):
            if me.found(exporter.pid, 0, SOME) == count:
                times.append(time.monotonic() - begin)
                waiting.remove(exporter)
        time.sleep(NAP_SECONDS)
    return times


def importer_stopped(trials: int) -> Times:
    """What an exporter's steps wait for a stopped importer that holds leases on what they reuse,
    and how long it takes until that knows, going on, what was published meanwhile."""
    first: list[float] = []
    second: list[float] = []
    knows: list[float] = []
    with place() as at:
        me = Engine(at.run_dir, at.namespace, (2 * STEP + 1) * trials + SOME)
        importer = at.engine()
        table = me.peer(importer.epoch)
        for _ in range(trials):
            beat, begin = table.heartbeat, me.published
            me.publish(2 * STEP)
            importer.ask("await_found", os.getpid(), begin, 2 * STEP)
            importer.ask("lease", me.table.epoch, 0, 1 << 30)
            while table.heartbeat == beat:  # else it is not waited for: it has been slow before
                time.sleep(NAP_SECONDS)
            importer.process.send_signal(signal.SIGSTOP)
            for times, block in ((first, begin), (second, begin + STEP)):
                me.cache.publisher.retract([BlockId(block + i) for i in range(STEP)])
                at_ = time.monotonic()
                me.cache.publisher.drain_before_dispatch()
                times.append(time.monotonic() - at_)
            me.publish(1)
            at_ = time.monotonic()
            importer.process.send_signal(signal.SIGCONT)
            knows.append(importer.ask("await_found", os.getpid(), me.published - 1, 1) - at_)
        me.cache.close()
    return {"first step waits": first, "second step waits": second, "going on, it knows": knows}


def coordinator_stopped(trials: int) -> Times:
    """What lookups take while it stands still, beside what they take else, and how long it takes
    until, going on, what was published meanwhile is known."""
    before, meanwhile, knows = [], [], []
    with place() as at:
        me, exporter = Engine(at.run_dir, at.namespace, SOME), at.engine(SOME * (trials + 1))
        exporter.ask("publish", SOME)
        me.await_found(exporter.pid, 0, SOME)
        for trial in range(1, trials + 1):
            before += _lookups(me, exporter)
            at.coordinator.send_signal(signal.SIGSTOP)
            exporter.ask("publish", SOME)
            meanwhile += _lookups(me, exporter)
            time.sleep(STOP_SECONDS)
            begin = time.monotonic()
            at.coordinator.send_signal(signal.SIGCONT)
            knows.append(me.await_found(exporter.pid, SOME * trial, SOME) - begin)
        me.cache.close()
    return {"lookup before": before, "lookup meanwhile": meanwhile, "going on, it is known": knows}


def _lookups(me: Engine, exporter: Handle) -> list[float]:
    times = []
    for _ in range(20):
        begin = time.monotonic()
        found = me.found(exporter.pid, 0, SOME)
        times.append(time.monotonic() - begin)
        assert found == SOME
    return times


ROWS: dict[str, tuple[Callable[..., Times], tuple[float, ...], int]] = {
    "exporter-killed-0-gib": (exporter_killed, (0,), 200),
    "exporter-killed-1-gib": (exporter_killed, (1,), 200),
    "exporter-killed-4-gib": (exporter_killed, (4,), 60),
    "importer-killed": (importer_killed, (), 200),
    "engine-joins": (engine_joins, (), 50),
    "coordinator-killed": (coordinator_killed, (), 200),
    "coordinator-exhausted": (coordinator_exhausted, (), 100),
    "exporter-stopped": (exporter_stopped, (), 200),
    "importer-stopped": (importer_stopped, (), 200),
    "coordinator-stopped": (coordinator_stopped, (), 200),
}
"""What is measured, with its arguments and trials."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--trials", type=int, help="of each row")
    options = parser.parse_args()
    end_what_is_started()
    for row in options.rows or ROWS:
        measure, arguments, trials = ROWS[row]
        probe: dict[str, Any] = {}
        with jitter(probe):
            times = measure(options.trials or trials, *arguments)
        milliseconds = {k: percentiles([1000 * t for t in v]) for k, v in times.items()}
        report("faults", row=row, unit="ms", entries=ENTRIES, **milliseconds, **probe)


if __name__ == "__main__":
    main()
