"""Ends of the coordinator and of engines, again and again, under load: does anybody else end?

    .venv/bin/python -m tests.multiprocess.ends node --rounds 500      a quarter of an hour
    .venv/bin/python -m tests.multiprocess.ends client --rounds 500    minutes
    .venv/bin/python -m tests.multiprocess.ends bare --rounds 100      has to find something

``node``: a real coordinator and toy engines that publish all the time.  In each round two of them
stand still for a moment, so that messages pile up for them; the coordinator ends meanwhile, and so
does an engine, by SIGTERM and by SIGKILL in turn; others take their places.

``client``: an engine's client alone, and in place of a coordinator one that floods it and is
killed.

``bare``: the same with two frames each and ZMQ_IMMEDIATE, as protocol 1 had it.  libzmq 4.3.5
aborts who receives that way, so this shows what would be seen.

Prints one line of JSON; ends with 1 if anybody has ended whom nobody has told to, or, for ``bare``,
if nobody has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from kvshm._base.rundir import command_endpoint, event_endpoint
from kvshm._node.coordinator_client import CoordinatorClient
from kvshm._node.protocol import (
    PROTOCOL_VERSION,
    EngineEvents,
    Join,
    Joined,
    broadcast_frame,
    decode_command,
    encode,
)
from kvshm._node.updates import EventBatches, Update
from kvshm._shm.layout import RECORD_BYTES

from . import toys
from .processes import Managed, Node, Processes, fresh_node, real_processes
from .scripted import engine_info

PROGRAM = "tests.multiprocess.ends"
ENGINES = 4
STOPPED = 2
TOPIC = b"f" * 32
BURST = 200
SLOWLY = 1000
"""So much work for each message keeps a receiver behind its sender."""
SIGNALS = (signal.SIGTERM, signal.SIGKILL)


# -- a whole node


class Company:
    """A coordinator and engines, replaced as they end."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._seeds = itertools.count()
        self.coordinator = node.coordinator()
        self.engines = [self._engine() for _ in range(ENGINES)]
        self.ended: list[str] = []
        """Who has ended whom nobody has told to, and how."""

    def _engine(self) -> Managed:
        endless = ("--requests", "1000000000", "--peers", "0", "--loads", "0")
        return toys.start(self._node, next(self._seeds), *endless)

    def round(self, dice: random.Random, number: signal.Signals) -> None:
        """One end of each kind, by this signal."""
        for engine in self.engines:
            engine.wait_out(lambda line: line == "go")
        standing = dice.sample(self.engines, STOPPED)
        leaving = dice.choice(self.engines)
        for engine in standing:
            engine.signal(signal.SIGSTOP)
        time.sleep(dice.uniform(0.1, 0.5))  # it is published meanwhile
        first, second = dice.sample([self.coordinator, leaving], 2)
        for one in (first, second):
            one.signal(number)
            time.sleep(dice.choice([0.0, 0.02]))
        for engine in standing:
            engine.signal(signal.SIGCONT)
        self._take_leave(self.coordinator, number)
        self._take_leave(leaving, number)
        self.engines[self.engines.index(leaving)] = self._engine()
        self.coordinator = self._node.coordinator()
        self.look()

    def look(self) -> None:
        """Take note of who has ended, and replace them."""
        for engine in [e for e in self.engines if e.status is not None]:
            self.ended.append(f"{engine.name}: {engine.status}")
            self.engines[self.engines.index(engine)] = self._engine()
        if self.coordinator.status is not None:
            self.ended.append(f"coordinator: {self.coordinator.status}")
            self.coordinator = self._node.coordinator()

    def _take_leave(self, told: Managed, number: signal.Signals) -> None:
        wanted = -number if number == signal.SIGKILL else 0
        if (status := told.wait()) != wanted:
            self.ended.append(f"{told.name}: {status} when told to by {number.name}")


def node_rounds(rounds: int, seed: int) -> dict[str, Any]:
    told: Counter[str] = Counter()
    dice = random.Random(seed)
    with fresh_node() as node:
        company = Company(node)
        for number in itertools.islice(itertools.cycle(SIGNALS), rounds):
            company.round(dice, number)
            told[number.name] += 1
            node.processes.forget_ended()
            if sum(told.values()) % 50 == 0:
                print(f"{dict(told)} {company.ended}", file=sys.stderr, flush=True)
        company.look()
    return {"ends_of_coordinator": told, "ends_of_engines": told, "ended": company.ended}


# -- a client, or a bare socket, under a flood


class Slow:
    """An engine that is behind with what it hears."""

    def describe(self) -> Any:
        return engine_info(100, "own")

    def apply(self, update: Update) -> None:
        if isinstance(update, EventBatches):
            for _ in update.batches:
                sum(range(SLOWLY))

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def flood(run_dir: Path, old: bool) -> None:
    """Answer joins, and broadcast as fast as it goes, in bursts."""
    context = zmq.Context()
    router, publisher = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
    router.bind(command_endpoint(run_dir, "n"))
    publisher.bind(event_endpoint(run_dir, "n"))
    epoch, sequence = time.time_ns(), 0
    print("floods", flush=True)
    while True:
        if router.poll(1):
            route, frame = router.recv_multipart()
            if isinstance(decode_command(frame), Join):
                router.send_multipart([route, encode(joined(epoch, sequence))])
                print("heard", flush=True)
        for _ in range(BURST):
            sequence += 1
            events = EngineEvents(
                coordinator_epoch=epoch, sequence=sequence, epoch=7, engine_sequence=sequence,
                records=bytes(2 * RECORD_BYTES),
            )  # fmt: skip
            if old:
                publisher.send_multipart([TOPIC, encode(events)])
            else:
                publisher.send(broadcast_frame(TOPIC, [encode(events)]))


def joined(coordinator: int, sequence: int) -> Joined:
    return Joined(
        protocol=PROTOCOL_VERSION, coordinator_epoch=coordinator, engine_epoch=100, lease_bit=5,
        sequence=sequence, roster=[engine_info(7)], sequences={7: 0}, suspected=[], incompatible=[],
    )  # fmt: skip


def listen(run_dir: Path) -> None:
    client = CoordinatorClient(run_dir, "n", Slow())
    print("listens", flush=True)
    sys.stdin.read()
    client.close()


def listen_as_before(run_dir: Path) -> None:
    socket = zmq.Context().socket(zmq.SUB)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)  # sooner than kvshm, so that each end is one
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 50)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RCVHWM, 10_000)
    socket.connect(event_endpoint(run_dir, "n"))
    socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
    print("listens", flush=True)
    while True:
        socket.poll()
        with suppress(zmq.Again):
            while True:
                socket.recv_multipart(zmq.NOBLOCK)
                sum(range(SLOWLY))


def flood_rounds(rounds: int, seed: int, old: bool, enough: int = sys.maxsize) -> dict[str, Any]:
    """``enough``: ends that end it early."""
    dice, ended, told = random.Random(seed), [], 0
    with tempfile.TemporaryDirectory(prefix="kv-") as folder, real_processes() as processes:
        listener = start_listener(processes, folder, old)
        while told < rounds and len(ended) < enough:
            sender = part(processes, "flood", folder, old)
            sender.wait_out(lambda line: line == ("floods" if old else "heard"))
            time.sleep(dice.uniform(0.1, 0.3))  # the time to fall behind
            sender.kill()
            told += 1
            if listener.status is not None:
                ended.append(f"{listener.name}: {listener.status}")
                listener = start_listener(processes, folder, old)
            processes.forget_ended()
    return {"ends_of_coordinator": {"SIGKILL": told}, "ended": ended}


def start_listener(processes: Processes, folder: str, old: bool) -> Managed:
    listener = part(processes, "listen", folder, old)
    listener.wait_out(lambda line: line == "listens")
    return listener


def part(processes: Processes, role: str, folder: str, old: bool) -> Managed:
    before = ("--old",) if old else ()
    return processes.python(role, "-m", PROGRAM, role, "--run-dir", folder, *before)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["node", "client", "bare", "flood", "listen"])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, help="for the parts: flood and listen")
    parser.add_argument("--old", action="store_true", help="... as before protocol 2")
    options = parser.parse_args()
    match options.what:
        case "flood":
            return flood(options.run_dir, options.old)
        case "listen":
            return (listen_as_before if options.old else listen)(options.run_dir)
        case "node":
            found = node_rounds(options.rounds, options.seed)
        case what:
            found = flood_rounds(options.rounds, options.seed, what == "bare")
    print(json.dumps({"what": options.what, "seed": options.seed, **found}))
    sys.exit(bool(found["ended"]) != (options.what == "bare"))


if __name__ == "__main__":
    main()
