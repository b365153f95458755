"""The coordinator's watch over processes: without a pidfd nobody is taken for dead."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvshm.coordinator.lease_table import LeaseTable
from kvshm.coordinator.reaper import Reaper

from kvshm.coordinator.actions import Died, Examine, Examined, Process, SweepLeftovers, Watch
from kvshm.coordinator.server import Server
from kvshm.protocol import PROTOCOL_VERSION, Join
from kvshm.segment import LEASES_KIND, identity_of, segment_name, unlink

from .coordinators import engine, new_state, peer_of


@pytest.fixture
def server(namespace: str) -> Iterator[Server]:
    leases = LeaseTable.open(namespace, identity_of())
    with tempfile.TemporaryDirectory(prefix="kv-") as run_dir:
        server = Server(new_state(), leases, Reaper(Path(run_dir), namespace))
        yield server
        server.close()
    leases.close()
    unlink(segment_name(namespace, LEASES_KIND, "coordinator", 0))


def handled(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    events: list[object] = []
    monkeypatch.setattr(server, "_handle", events.append)
    return events


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EPERM, errno.ENOSYS])
def test_without_a_pidfd_a_death_is_seen_by_looking(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    def refused(pid: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refused)
    events = handled(server, monkeypatch)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = Process(child.pid, identity_of(child.pid).start_time)
        with caplog.at_level(logging.WARNING):
            server._perform(Watch(process))
            server._perform(Watch(Process(os.getpid(), identity_of().start_time)))
        server._look_at_unwatchable()
        assert not server._events
        assert events == []
        child.kill()
        child.wait()
        server._look_at_unwatchable()
        server._look_at_unwatchable()
    assert events == [Died(process)]
    assert len([r for r in caplog.records if "looks-for-deaths" in r.getMessage()]) == 1


@pytest.mark.parametrize("start_time", [1, None])
def test_a_process_that_is_gone_or_has_a_successor_has_died(
    server: Server, start_time: int | None
) -> None:
    pid = os.getpid() if start_time else 2**22 + 7  # above every pid_max
    process = Process(pid, start_time or 1)
    server._perform(Watch(process))
    assert list(server._events) == [Died(process)]


def test_what_the_machine_refuses_costs_the_action_and_one_line_in_the_log(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With every descriptor in use not even a folder can be listed."""

    def refused(*args: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    for sweep in ("sweep_leftovers", "examine"):
        monkeypatch.setattr(Reaper, sweep, refused)
    message = Join(protocol=PROTOCOL_VERSION, engine=engine(1), sequence=0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            server._perform(SweepLeftovers(frozenset()))
        server._perform(Examine(peer_of(engine(1)), message))
    assert [r.getMessage().partition(" reason")[0] for r in caplog.records] == [
        "event=failed what=SweepLeftovers",
        "event=failed what=Examine",
    ]
    [examined] = server._events
    assert isinstance(examined, Examined)
    assert examined.refusal is not None
    assert examined.refusal.retry, "its answer is that it shall ask again"
