"""How an engine comes to leave before it is killed, by vLLM's own functions.

That a stopped server leaves is shown by test_lifecycle.py; here is when nothing may change.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.utils import async_utils
from vllm.v1.engine.utils import CoreEngineProcManager

from kvshm.config import Config
from kvshm.hooks.vllm import shutdown
from kvshm.hooks.vllm.shutdown import (
    CANCEL_TOUCHPOINT,
    LEAVE_SECONDS,
    TOUCHPOINT,
    let_leave,
    on_shutdown_signal,
    prepare_shutdown,
)

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which kvshm has not been asked for yet."""
    monkeypatch.setattr(shutdown, "_started", threading.Event())
    monkeypatch.setattr(shutdown, "_places", set())
    for owner, name in (CoreEngineProcManager, TOUCHPOINT), (async_utils, CANCEL_TOUCHPOINT):
        found = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(found, "__wrapped__", found))
    monkeypatch.setattr("atexit.register", lambda function: None)


class Manager:
    """What vLLM's manager of EngineCores has."""

    def __init__(self, request_timeout: float | None, alive: bool = True) -> None:
        self.manager_stopped = threading.Event()
        self._finalizer = SimpleNamespace(alive=alive, detach=lambda: None)
        self._request_shutdown_timeout = request_timeout
        self.processes: list[Any] = []

    def shutdown(self, timeout: float | None) -> None:
        getattr(CoreEngineProcManager, TOUCHPOINT)(self, timeout)


@pytest.mark.parametrize(
    ("request_timeout", "process_timeout", "alive", "waits"),
    [
        (0, 0, True, True),  # the default: told to end, and killed in the same moment
        (0, -1, True, True),
        (None, 0, True, True),
        (0, 0, False, False),  # has ended them before
        (0, 30, True, False),
        (0, None, True, False),  # vLLM's own five seconds
        (30, 0, True, False),  # requests had their time, the user's word counts
        (30, 12.5, True, False),
    ],
)
def test_only_where_vllm_would_not_wait_it_waits(
    untouched: None,
    monkeypatch: pytest.MonkeyPatch,
    request_timeout: float | None,
    process_timeout: float | None,
    alive: bool,
    waits: bool,
) -> None:
    """vLLM's monitor, which ends EngineCores that no one else ends, must not begin meanwhile."""
    waited: list[tuple[object, bool]] = []
    manager = Manager(request_timeout, alive)
    reported = manager.manager_stopped.is_set
    monkeypatch.setattr(shutdown, "let_leave", lambda cores: waited.append((cores, reported())))
    prepare_shutdown(Config())
    prepare_shutdown(Config())
    manager.shutdown(process_timeout)
    assert waited == ([(manager.processes, False)] if waits else [])
    assert reported()


def _core(name: str, ready: Event, reported: Event, left: Event) -> None:
    """An EngineCore whose main thread is busy with something that no signal ends."""
    multiprocessing.current_process().name = name
    signal.signal(signal.SIGTERM, lambda *_: reported.set())

    def leave() -> None:
        time.sleep(0.2)
        left.set()

    on_shutdown_signal(leave)
    ready.set()
    while True:
        time.sleep(60)


@pytest.mark.parametrize(("name", "member"), [("EngineCore_DP0", True), ("Alone", False)])
def test_a_core_is_waited_for_until_it_has_left_and_only_if_it_shares(
    name: str, member: bool
) -> None:
    ready, reported, left = (SPAWN.Event() for _ in range(3))
    core = SPAWN.Process(target=_core, args=(name, ready, reported, left))
    core.start()
    try:
        assert ready.wait(100)
        let_leave([core])
        assert (reported.is_set(), left.is_set(), core.is_alive()) == (member, member, True)
    finally:
        core.kill()
        core.join()


def test_a_core_that_cannot_leave_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of this test stands for one: ``_is_member`` sees it so for ever."""
    monkeypatch.setattr(shutdown, "_is_member", lambda pid: True)
    core = SimpleNamespace(pid=1, is_alive=lambda: True, terminate=lambda: None)
    begun = time.monotonic()
    let_leave([core])
    assert time.monotonic() - begun >= LEAVE_SECONDS


@pytest.mark.parametrize("from_loop", [True, False])
def test_who_tells_the_requests_is_cancelled_after_it_has_reached_them(
    untouched: None, from_loop: bool
) -> None:
    """vLLM hands the output handler its last message, and cancels it in the same moment."""
    reported: list[str] = []

    async def tell(ends: asyncio.Queue[str]) -> None:
        reported.append(await ends.get())

    async def end() -> None:
        ends: asyncio.Queue[str] = asyncio.Queue()
        handler = asyncio.create_task(tell(ends))
        await asyncio.sleep(0)  # it waits
        ends.put_nowait("dead")
        cancel = getattr(async_utils, CANCEL_TOUCHPOINT)
        if from_loop:
            cancel(handler)
        else:
            thread = threading.Thread(target=cancel, args=(handler,))
            thread.start()
            thread.join()
        await asyncio.wait([handler])

    prepare_shutdown(Config())
    asyncio.run(end())
    assert reported == ["dead"]


def test_who_never_ends_is_cancelled_nevertheless(untouched: None) -> None:
    async def end() -> bool:
        handler = asyncio.create_task(asyncio.sleep(1000))
        await asyncio.sleep(0)
        getattr(async_utils, CANCEL_TOUCHPOINT)(handler)
        await asyncio.wait([handler])
        return handler.cancelled()

    prepare_shutdown(Config())
    assert asyncio.run(end())


def test_what_engines_leave_is_removed_where_their_settings_say(
    untouched: None, run_dir: Path
) -> None:
    left = [run_dir / f"{namespace}.engine.{1:016x}.sock" for namespace in ("here", "there")]
    for path in left:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    prepare_shutdown(Config(run_dir="/no/such/place"))
    prepare_shutdown(Config(run_dir=str(run_dir), namespace="there"))
    shutdown.clean_up()
    assert [path.exists() for path in left] == [True, False]


def test_a_vllm_without_those_functions_is_left_as_it_is(
    untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(CoreEngineProcManager, TOUCHPOINT)
    monkeypatch.delattr(async_utils, CANCEL_TOUCHPOINT)
    prepare_shutdown(Config())
    assert not hasattr(CoreEngineProcManager, TOUCHPOINT)
    assert not hasattr(async_utils, CANCEL_TOUCHPOINT)


def test_signals_of_another_process_are_not_watched() -> None:
    """In a script with ``LLM()`` they may mean anything."""
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    on_shutdown_signal(lambda: pytest.fail("left"))
    assert signal.set_wakeup_fd(before) == before


CORE = """
import multiprocessing, os, signal, sys, threading, time
from kvshm.hooks.vllm.shutdown import on_shutdown_signal
multiprocessing.current_process().name = "EngineCore_DP1"
left, handled = threading.Event(), []
signal.signal(signal.SIGTERM, lambda *_: handled.append(left.wait(100)))
signal.signal(signal.SIGUSR1, lambda *_: None)
on_shutdown_signal(left.set)
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.1)
print(left.is_set())
os.kill(os.getpid(), signal.SIGTERM)
print(handled)
"""


FORKING = """
import multiprocessing, os, signal, sys, threading
from kvshm.hooks.vllm.shutdown import on_shutdown_signal
multiprocessing.current_process().name = "EngineCore_DP1"
left = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: None)
on_shutdown_signal(left.set)

def fork():
    if not (pid := os.fork()):
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    os.waitpid(pid, 0)

fork()
thread = threading.Thread(target=fork)
thread.start()
thread.join()
print(left.wait(0.5))
os.kill(os.getpid(), signal.SIGTERM)
print(left.wait(100))
"""


def test_a_child_that_is_asked_to_end_is_not_its_parent() -> None:
    """A child has the parent's handlers and descriptors."""
    command = [sys.executable, "-c", FORKING]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == ["False", "True"]


def test_an_engine_core_leaves_while_its_main_thread_handles_the_signal() -> None:
    command = [sys.executable, "-c", CORE]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == ["False", "[True]"]
