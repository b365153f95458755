"""An engine that waits for a coordinator that never was there says so, once, and how to start
one; ``kvshm dump --check`` says it of a node."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvshm._base.rundir import command_endpoint, start_command
from kvshm._base.timing import TIMING, Timing
from kvshm._engine.roster_handler import RosterHandler
from kvshm._node.coordinator_client import CoordinatorClient
from kvshm._node.coordinator_session import CoordinatorSession as Session
from kvshm._node.protocol import EngineInfo, Join, Refused, decode_command, encode
from kvshm._node.updates import Coordinator, Update
from kvshm.tools import cli
from kvshm.tools.check import check

from .dumps import coordinator_of
from .exporters import Clock
from .served import ServedNode

INFO = EngineInfo(
    epoch=7,
    name="own",
    pid=1,
    fingerprint=b"f" * 32,
    fields={},
    num_blocks=1,
    ranks=[],
)


class Engine:
    def __init__(self) -> None:
        self.heard: list[Update] = []
        self.info: EngineInfo | None = INFO

    def describe(self) -> EngineInfo | None:
        return self.info

    def apply(self, update: Update) -> None:
        self.heard.append(update)

    def scan_again(self, enough: object) -> None: ...

    def beat(self) -> None: ...

    def count(self, counter: int, amount: int = 1) -> None: ...


@pytest.fixture(params=[1.0, 0.5], ids=["product", "half"])
def timing(request: pytest.FixtureRequest) -> Timing:
    return TIMING.scaled(request.param)


@pytest.fixture
def session(run_dir: Path, clock: Clock, timing: Timing) -> Iterator[Session]:
    session = Session(run_dir, "n", Engine(), clock, lambda: 1.0, timing)
    wake = os.eventfd(0)
    session.open([wake], lambda: None)
    yield session
    session.close()
    os.close(wake)


def times_heard(session: Session) -> int:
    assert isinstance(session._handler, Engine)
    return session._handler.heard.count(Coordinator.MISSING)


def work_for(session: Session, clock: Clock, seconds: float) -> None:
    for _ in range(round(seconds * 10)):
        clock.now += 0.1
        session.work()


def test_a_coordinator_that_never_was_there_is_reported_once(
    session: Session, clock: Clock, timing: Timing
) -> None:
    work_for(session, clock, timing.absence_seconds - 1)
    assert times_heard(session) == 0
    work_for(session, clock, 2)
    assert times_heard(session) == 1
    work_for(session, clock, 10 * timing.absence_seconds)
    assert times_heard(session) == 1


def test_the_time_begins_when_the_engine_is_ready(
    session: Session, clock: Clock, timing: Timing
) -> None:
    engine = session._handler
    assert isinstance(engine, Engine)
    engine.info = None  # a model takes minutes to load
    work_for(session, clock, 3 * timing.absence_seconds)
    engine.info = INFO
    work_for(session, clock, timing.absence_seconds - 1)
    assert times_heard(session) == 0
    work_for(session, clock, 2)
    assert times_heard(session) == 1


def test_one_that_refuses_is_there(
    session: Session, run_dir: Path, clock: Clock, timing: Timing
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(command_endpoint(run_dir, "n"))
        clock.now += 0.1
        for _ in range(100):  # until libzmq has connected
            clock.now += 0.01
            session.work()
            if router.poll(100):
                break
        route, _ = router.recv_multipart()
        refusal = Refused(engine_epoch=7, reason="r", remedy="do", retry=False)
        router.send_multipart([route, encode(refusal)])
        session._sockets._commands.poll(10_000)
        session.wait()
        session.work()
    work_for(session, clock, 3 * timing.absence_seconds)
    assert times_heard(session) == 0


def test_who_found_none_joins_as_soon_as_there_is_one(
    session: Session, run_dir: Path, clock: Clock
) -> None:
    """The clock stands still: no pause between two tries is over."""
    for _ in range(5):
        clock.now = max(clock.now, session._due.next_try)
        session.work()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(command_endpoint(run_dir, "n"))
        while not router.poll(0):
            session.wait()
            session.work()
        _, join = router.recv_multipart()
    assert isinstance(decode_command(join), Join)


def test_the_line_names_the_command(caplog: pytest.LogCaptureFixture) -> None:
    start = start_command(Path("/a b/c"), "n")
    RosterHandler(lambda: None, lambda: None, start).apply(Coordinator.MISSING)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(": kvshm-coordinator --run-dir '/a b/c' --namespace n")


# -- kvshm dump --check


def test_check_warns_of_engines_without_a_coordinator(
    served: ServedNode, capsys: pytest.CaptureFixture[str]
) -> None:
    table = served.serve("e", 1).table
    sound = ["--check", "--run-dir", str(served.run_dir)]
    assert cli.main(["dump", *sound]) == 0  # nothing is wrong
    said = capsys.readouterr()
    assert said.out.startswith("sound: ")
    assert "no coordinator runs; engines that wait for one: 1" in said.err
    with coordinator_of(served):
        assert check(served.run_dir, None).warnings == []
    assert len(check(served.run_dir, None).warnings) == 1
    table.retire()
    assert check(served.run_dir, None).warnings == []


def test_waiting_for_a_coordinator_draws_no_number_that_the_program_would_have_drawn(
    run_dir: Path,
) -> None:
    """A program that seeds Python's generator gets the same numbers with kvshm as without."""
    tried = threading.Event()

    class Tried(Engine):
        def describe(self) -> EngineInfo | None:
            if asked:
                tried.set()
            asked.append(1)
            return INFO

    asked: list[int] = []
    before = random.getstate()
    client = CoordinatorClient(run_dir, "n", Tried(), timing=TIMING.scaled(0.01))
    assert tried.wait(60), "it has backed off between two tries"
    client.close()
    assert random.getstate() == before
