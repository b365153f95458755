"""kvshm.deaths: real processes that end, and those that nobody can see."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from kvshm.deaths import DeathWatch

from kvshm.segment import Identity, identity_of

from .test_rank import until

SLEEP = [sys.executable, "-c", "input()"]


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(SLEEP, stdin=subprocess.PIPE) for _ in range(2)]
    yield started
    for child in started:
        child.kill()
        child.communicate()


@pytest.fixture
def watch() -> Iterator[DeathWatch]:
    before = len(os.listdir("/proc/self/fd"))
    watch = DeathWatch()
    yield watch
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before, "no descriptor is left"


@pytest.fixture(params=["pidfds", "no descriptors for pidfds"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(24, "Too many open files")

    if request.param != "pidfds":
        monkeypatch.setattr(os, "pidfd_open", refuse)


Children = list[subprocess.Popen[bytes]]


@pytest.mark.usefixtures("way")
def test_a_group_is_dead_with_the_first_of_its_processes(
    children: Children, watch: DeathWatch
) -> None:
    first, second = (identity_of(child.pid) for child in children)
    watch.watch(1, [identity_of()])
    watch.watch(1, [first])
    watch.watch(2, [second, second])
    assert watch.dead() == frozenset()
    assert watch.is_whole(1)
    children[0].send_signal(signal.SIGKILL)
    until(lambda: watch.dead() == {1})
    assert (watch.is_whole(1), watch.is_whole(2)) == (False, True)
    children[0].wait()
    assert watch.dead() == {1}
    watch.forget(1)
    children[1].kill()
    until(lambda: watch.dead() == {2})


@pytest.mark.usefixtures("way")
def test_a_process_of_a_group_that_is_forgotten_is_still_watched_in_another(
    children: Children, watch: DeathWatch
) -> None:
    """An engine that has been reset: the same process, in a new epoch."""
    process = identity_of(children[0].pid)
    watch.watch(1, [process])
    watch.watch(2, [process])
    watch.forget(1)
    children[0].kill()
    until(lambda: watch.dead() == {2})


@pytest.mark.usefixtures("way")
def test_who_had_ended_before_is_found_whoever_has_its_number_now(watch: DeathWatch) -> None:
    here = identity_of()
    watch.watch(1, [here._replace(start_time=here.start_time + 1)])
    watch.watch(2, [here])
    assert watch.dead() == {1}
    assert (watch.is_whole(1), watch.is_whole(2)) == (False, True)


def test_one_whose_number_another_gets_while_it_is_looked_for_is_dead(
    children: Children, watch: DeathWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pidfd_open

    def too_late(pid: int) -> int:
        children[0].kill()
        children[0].wait()
        return real(children[1].pid)

    monkeypatch.setattr(os, "pidfd_open", too_late)
    watch.watch(1, [identity_of(children[0].pid)])
    assert watch.dead() == {1}


def test_who_has_the_number_of_a_process_of_another_pid_namespace_is_not_watched(
    children: Children, watch: DeathWatch
) -> None:
    watch.watch(1, [Identity(bytes(16), children[0].pid, 7)])
    children[0].kill()
    children[0].wait()
    assert watch.dead() == frozenset()


def test_a_process_of_another_pid_namespace_is_taken_for_alive(watch: DeathWatch) -> None:
    watch.watch(1, [Identity(bytes(16), 1 << 22, 7)])
    assert watch.dead() == frozenset()
    assert watch.is_whole(1)
    assert watch.is_whole(99)
