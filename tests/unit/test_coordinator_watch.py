"""The coordinator's watch over processes: the kernel tells of their deaths, no one else."""

from __future__ import annotations

import errno
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import zmq
from zmq.constants import Event

from kvshm._base.rundir import command_endpoint, event_endpoint
from kvshm._base.timing import TIMING, Timing
from kvshm._node.protocol import PROTOCOL_VERSION, Join
from kvshm._shm.descriptors import Request
from kvshm._shm.segment import TABLE_KIND
from kvshm.coordinator.actions import (
    BadMessage,
    CheckResult,
    CheckTable,
    Input,
    ProcessDeath,
    ReleaseTable,
    Sender,
    SweepFiles,
    TableUnused,
)
from kvshm.coordinator.actions import ClockTick as Passed
from kvshm.coordinator.server import Server
from kvshm.coordinator.tables import Tables

from .coordinators import engine, new_state, sender_of
from .exporters import Clock
from .served import ServedNode

EPOCH = 0x77
ENGINE = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from tests.unit.served import ServedNode
node = ServedNode(Path(sys.argv[1]), sys.argv[2])
engine = node.serve("e", {EPOCH}, num_blocks=8, num_ranks=2)
engine.table.begin_pulse(None)
print("serves", flush=True)
sys.stdin.read()
"""
MUTE = ENGINE.replace("engine.table.begin_pulse(None)\n", "")
WORKER = f"""
import sys
from pathlib import Path
from kvshm._node.segment_server import SegmentClient
table = SegmentClient(Path(sys.argv[1]), sys.argv[2]).rank_table({EPOCH})
table.begin_pulse(int(sys.argv[3]))
print("has the table", flush=True)
sys.stdin.read()
"""
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(served: ServedNode) -> Iterator[Start]:
    started = []

    def begin(script: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", script, str(served.run_dir), served.namespace, *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


class Watched:
    def __init__(self, served: ServedNode, pid: int) -> None:
        self.tables = Tables(served.run_dir, served.namespace, Clock())
        self._pid = pid
        self.join()

    def join(self) -> None:
        info = engine(EPOCH, pid=1, ranks=(2, 3), fingerprint=bytes(32))
        sender = Sender(b"r", os.geteuid(), self._pid)
        assert self.tables.check(sender, Join(protocol=PROTOCOL_VERSION, engine=info)) is None
        [answer] = self.hear()
        assert isinstance(answer, CheckResult)
        assert answer.refusal is None

    def hear(self) -> list[Input]:
        """What a connection tells, without a look at anything else."""
        numbers = [connection.fileno() for connection in self.tables.connections()]
        readable, _, _ = select.select(numbers, [], [], 100)
        return list(self.tables.read(set(readable)))

    def look(self) -> list[Input]:
        return list(self.tables.look())


@pytest.mark.multiprocess
@pytest.mark.parametrize("script", [ENGINE, MUTE], ids=["with a pulse", "without one"])
def test_an_engines_death_is_heard_at_once(served: ServedNode, start: Start, script: str) -> None:
    owner = start(script)
    watched = Watched(served, owner.pid)
    assert watched.look() == []
    owner.kill()
    assert watched.hear() == [ProcessDeath(EPOCH, owner=True), TableUnused(EPOCH)]
    watched.tables.close()


@pytest.mark.multiprocess
def test_a_workers_death_is_seen_by_looking_and_is_not_the_engines(
    served: ServedNode, start: Start
) -> None:
    owner = start(ENGINE)
    first, second = start(WORKER, "0"), start(WORKER, "1")
    watched = Watched(served, owner.pid)
    assert watched.look() == []
    first.kill()
    first.wait()
    assert watched.look() == [ProcessDeath(EPOCH, owner=False)]
    owner.kill()
    assert watched.hear() == [ProcessDeath(EPOCH, owner=True)]
    assert watched.look() == [], "a worker may still hold leases"
    second.kill()
    second.wait()
    assert watched.look() == [TableUnused(EPOCH)]
    watched.tables.close()


@pytest.mark.multiprocess
def test_a_process_that_stands_still_has_not_died(served: ServedNode, start: Start) -> None:
    owner = start(ENGINE)
    watched = Watched(served, owner.pid)
    os.kill(owner.pid, signal.SIGSTOP)
    assert watched.look() == []
    owner.kill()
    assert watched.hear() == [ProcessDeath(EPOCH, owner=True), TableUnused(EPOCH)]
    watched.tables.close()


@pytest.mark.multiprocess
def test_a_table_that_is_replaced_is_to_be_had_all_the_while(
    served: ServedNode, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(served, start(ENGINE).pid)
    old = watched.tables._members[EPOCH]
    assert old.connection is not None
    old.connection.close()
    old.connection = None
    found = []
    question = Request(TABLE_KIND, EPOCH)
    monkeypatch.setattr(old, "close", lambda: found.append(watched.tables._find(question)))
    watched.join()
    [fd] = found
    os.close(fd)
    old.table.close()
    watched.tables.close()


# -- what the machine refuses


@pytest.fixture
def server(served: ServedNode) -> Iterator[Server]:
    def refused(*args: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    tables = Tables(served.run_dir, served.namespace, Clock())
    tables.check = refused  # type: ignore[method-assign]
    server = Server(new_state(), tables, refused, refused)
    yield server
    server.close()


def test_what_the_machine_refuses_costs_the_action_and_one_line_in_the_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """With every descriptor in use not even a folder can be listed."""
    message = Join(protocol=PROTOCOL_VERSION, engine=engine(1), sequence=0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            server._perform(SweepFiles())
        server._perform(CheckTable(sender_of(engine(1)), message))
        server._perform(ReleaseTable(1))
    assert [r.getMessage().partition(" reason")[0] for r in caplog.records] == [
        "event=failed what=SweepFiles",
        "event=failed what=CheckTable",
    ]
    [result] = server._inputs
    assert isinstance(result, CheckResult)
    assert result.refusal is not None
    assert result.refusal.retry, "its answer is that it shall ask again"


def test_a_bug_costs_what_led_to_it_and_its_traceback_is_said_once(
    served: ServedNode, caplog: pytest.LogCaptureFixture
) -> None:
    def bug() -> None:
        raise RecursionError("nested too deep")

    server = Server(new_state(), Tables(served.run_dir, served.namespace, Clock()), bug, bug)
    for _ in range(3):
        server._handle(Passed())  # the first sweeps files
        server._handle(BadMessage(None, ""))  # type: ignore[arg-type]  # a bug
        server._perform(SweepFiles())
    server.close()
    said = [(r.getMessage().partition(" reason")[0], bool(r.exc_info)) for r in caplog.records]
    assert said == [("event=bug what=SweepFiles", True), ("event=bug what=BadMessage", True)]


def test_connections_count_before_messages_without_end(
    served: ServedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message brings another connection, as of clients that are faster than the coordinator:
    between two checks of the bounds these would use up all descriptors."""
    tables = Tables(served.run_dir, served.namespace, Clock())
    server = Server(new_state(), tables, lambda: None, lambda: None)
    commands = command_endpoint(served.run_dir, "n")
    wake = os.eventfd(0)
    server.open(commands, event_endpoint(served.run_dir, "n"), wake)
    context, clients, handled = zmq.Context(), list[zmq.Socket[bytes]](), list[Input]()

    def connected() -> zmq.Socket[bytes]:
        client = context.socket(zmq.DEALER)
        clients.append(client)
        monitor = client.get_monitor_socket(Event.HANDSHAKE_SUCCEEDED)
        client.connect(commands)
        monitor.recv_multipart()
        client.disable_monitor()
        monitor.close()
        return client

    def handle(item: Input) -> None:
        handled.append(item)
        connected()

    monkeypatch.setattr(server, "_handle", handle)
    sender = connected()
    for _ in range(20):
        sender.send(b"")
    for number in range(1, 6):
        server._sockets.turn()
        server._sockets.router.poll()
        server._receive()
        assert len(handled) == number
    for client in clients:
        client.close(linger=0)
    context.term()
    server.close()
    os.close(wake)


@pytest.mark.parametrize("timing", [TIMING, TIMING.scaled(0.1)], ids=["product", "tenth"])
def test_the_clock_is_looked_at_more_often_while_engines_come_back(
    served: ServedNode, monkeypatch: pytest.MonkeyPatch, timing: Timing
) -> None:
    """Each look sends a tick, from which whoever missed a join of the others learns of it."""
    clock, looks = Clock(), list[float]()
    state, begin = new_state(grace_over=False), clock.now
    state.timing = timing
    tables = Tables(served.run_dir, served.namespace, clock)
    server = Server(state, tables, lambda: None, lambda: looks.append(clock.now - begin), clock)
    wake = os.eventfd(0)
    server.open(command_endpoint(served.run_dir, "n"), event_endpoint(served.run_dir, "n"), wake)

    def wait(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(server, "_wait", wait)
    server.run(lambda: clock.now - begin > timing.grace_seconds + 10 * timing.heartbeat_seconds)
    server.close()
    os.close(wake)
    assert state.schedule.grace_over
    gaps = [b - a for a, b in pairwise(looks)]
    before = [gap for gap, at in zip(gaps, looks, strict=False) if at < 0.99 * timing.grace_seconds]
    assert max(before) == pytest.approx(timing.return_tick_seconds)
    # One gap more: the grace ends with the tick after it, or by rounding with the next.
    assert min(gaps[len(before) + 2 :]) == pytest.approx(timing.heartbeat_seconds)
