"""How an engine comes to leave before it is killed, by vLLM's own functions.

That a stopped server leaves is shown by test_lifecycle.py; here is when nothing may change.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import utils

from kvshm.config import Config
from kvshm.hooks.vllm import shutdown
from kvshm.hooks.vllm.shutdown import (
    LEAVE_SECONDS,
    TOUCHPOINT,
    on_shutdown_signal,
    wait_for_engine_cores,
)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which kvshm has not been asked for yet."""
    monkeypatch.setattr(shutdown, "_started", threading.Event())
    monkeypatch.setattr(shutdown, "_places", set())
    monkeypatch.setattr(utils, TOUCHPOINT, _original())
    monkeypatch.setattr("atexit.register", lambda function: None)


def _original() -> object:
    found = getattr(utils, TOUCHPOINT)
    return getattr(found, "__wrapped__", found)


@pytest.mark.parametrize(
    ("request_timeout", "process_timeout", "wanted"),
    [
        (0, 0, LEAVE_SECONDS),  # the default: told to end, and killed in the same moment
        (0, -1, LEAVE_SECONDS),
        (0, 30, 30),
        (0, None, None),  # vLLM's own five seconds
        (30, 0, 0),  # requests had their time, the user's word counts
        (30, 12.5, 12.5),
    ],
)
def test_only_where_vllm_would_not_wait_it_waits(
    untouched: None, request_timeout: float, process_timeout: float | None, wanted: float | None
) -> None:
    wait_for_engine_cores(Config())
    wait_for_engine_cores(Config())
    assert getattr(utils, TOUCHPOINT)(request_timeout, process_timeout) == wanted


def test_what_engines_leave_is_removed_where_their_settings_say(
    untouched: None, run_dir: Path
) -> None:
    left = [run_dir / f"{namespace}.engine.{1:016x}.sock" for namespace in ("here", "there")]
    for path in left:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    wait_for_engine_cores(Config(run_dir="/no/such/place"))
    wait_for_engine_cores(Config(run_dir=str(run_dir), namespace="there"))
    shutdown.clean_up()
    assert [path.exists() for path in left] == [True, False]


def test_vllms_manager_asks_that_function() -> None:
    assert TOUCHPOINT in utils.CoreEngineProcManager.shutdown.__code__.co_names


def test_a_vllm_without_that_function_is_left_as_it_is(
    untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(utils, TOUCHPOINT)
    wait_for_engine_cores(Config())
    assert not hasattr(utils, TOUCHPOINT)


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


def test_a_child_that_is_told_to_end_is_not_its_parent() -> None:
    """A child has the parent's handlers and descriptors."""
    command = [sys.executable, "-c", FORKING]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == ["False", "True"]


def test_an_engine_core_leaves_while_its_main_thread_handles_the_signal() -> None:
    command = [sys.executable, "-c", CORE]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == ["False", "[True]"]
