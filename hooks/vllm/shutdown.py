"""Shutdown: a stopped engine leaves its peers at once, cleans up, and ends whatever it is doing.

Without this, peers would take a shutdown for a crash: vLLM ends its workers before its connectors,
or kills the engine.  And a busy server of vLLM 0.32 would not end at all after Ctrl-C: AsyncLLM
cancels the task that would end its requests (https://github.com/vllm-project/vllm/issues/48745).
"""

from __future__ import annotations

import atexit
import glob
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from kvshm._base.core_lines import CoreLine
from kvshm._base.log import logger
from kvshm._base.resources import start_thread
from kvshm._base.rundir import choose_run_directory, open_run_directory
from kvshm.config import Config
from kvshm.errors import KvshmError
from kvshm.halves import clear

from ..log_lines import HookLine

log = logger(__name__)

LEAVE_SECONDS = 1.0
"""Far more than the milliseconds in which an EngineCore announces that it leaves."""
TELL_SECONDS = 1.0
"""Far more than the server needs to end its requests when their engine has ended."""

TOUCHPOINT = "shutdown"
"""Of vllm.v1.engine.utils.CoreEngineProcManager."""
CANCEL_TOUCHPOINT = "cancel_task_threadsafe"
"""Of vllm.utils.async_utils; AsyncLLM imports it by its name."""
MEMBER = "kvshm-member"
"""Name of a thread of an EngineCore until the engine has left the node, at most 15 bytes: the
server sees it in /proc."""
_POLL_SECONDS = 0.005
_ENDING = {signal.SIGTERM, signal.SIGINT}
_started = threading.Event()
_cores: list[Any] = []
"""EngineCores that vLLM has ended, and perhaps killed without waiting for their deaths."""
_places: set[tuple[str, str]] = set()
"""Run directories (empty: the default one) and namespaces of this process's engines."""


# -- in the processes that serve requests


def prepare_shutdown(config: Config) -> None:
    """Make vLLM let its EngineCores leave before it kills them, have its server end the requests of
    an engine that has ended, and call ``clean_up`` at the end of this process.  ``config``: of one
    of its engines.

    Any process, any number of times; in processes that vLLM has started only requests are ended.
    A function that is missing in this vLLM is not wrapped.
    """
    _end_requests()
    if multiprocessing.parent_process() is not None:
        return
    _places.add((config.run_dir, config.namespace))
    if _started.is_set():
        return
    _started.set()
    atexit.register(clean_up)
    _let_cores_leave()


def _end_requests() -> None:
    """Have vLLM cancel a task only after it has had the time to end by itself: AsyncLLM cancels the
    one that ends all requests once its EngineCore has ended."""
    try:
        from vllm.utils import async_utils

        original = getattr(async_utils, CANCEL_TOUCHPOINT)
    except (ImportError, AttributeError):
        return
    if getattr(original, "kvshm", False):
        return

    @wraps(original)
    def cancel(task: Any) -> None:
        if not task or task.done():
            return
        loop = task.get_loop()
        if not loop.is_closed():
            # Not ``original``, which cancels now; from this loop or from any other thread.
            loop.call_soon_threadsafe(loop.call_later, TELL_SECONDS, task.cancel)

    cancel.kvshm = True  # type: ignore[attr-defined]  # marks kvshm's wrapper
    setattr(async_utils, CANCEL_TOUCHPOINT, cancel)
    if user := sys.modules.get("vllm.v1.engine.async_llm"):  # has the original by its name
        setattr(user, CANCEL_TOUCHPOINT, cancel)


def _let_cores_leave() -> None:
    try:
        from vllm.v1.engine.utils import CoreEngineProcManager

        original = getattr(CoreEngineProcManager, TOUCHPOINT)
    except (ImportError, AttributeError):
        return

    @wraps(original)
    def shutdown(self: Any, timeout: float | None = None) -> None:
        try:
            # ``manager_stopped`` stays as it is: set, it has vLLM's monitor end these EngineCores
            # in its own way, which takes five seconds, and ``original`` do nothing.
            if _kills_at_once(self, timeout):
                let_leave(self.processes)
            _cores.extend(self.processes)
        except Exception:  # any: vLLM must still end its EngineCores
            log.line(HookLine.PEERS_MAY_REPORT_CRASH, exc_info=True)
        original(self, timeout)

    setattr(CoreEngineProcManager, TOUCHPOINT, shutdown)


def _kills_at_once(manager: Any, timeout: float | None) -> bool:
    """Whether vLLM is about to kill this manager's EngineCores sooner than they can leave, although
    the user has set no time to drain."""
    drains = (manager._request_shutdown_timeout or 0) > 0
    waits = timeout is None or timeout >= LEAVE_SECONDS
    return bool(manager._finalizer.alive) and not drains and not waits


def let_leave(processes: Iterable[Any]) -> None:
    """End EngineCores (multiprocessing's processes), and wait until each has left the node or has
    ended, for LEAVE_SECONDS at most.  One that shares nothing is not waited for."""
    members = [p for p in processes if p.is_alive() and _is_member(p.pid)]
    for process in members:
        process.terminate()
    deadline = time.monotonic() + LEAVE_SECONDS
    while any(_is_member(p.pid) for p in members) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _is_member(pid: int) -> bool:
    """Whether a process is an EngineCore that has joined a node and not left it; it may be dead."""
    for thread in glob.iglob(f"/proc/{pid}/task/*/comm"):
        try:
            if Path(thread).read_text().rstrip("\n") == MEMBER:
                return True
        except OSError:
            continue  # the thread has ended
    return False


def clean_up() -> None:
    """Remove what dead processes left behind, unless a coordinator runs.  Waits for the deaths of
    EngineCores that vLLM has killed, for LEAVE_SECONDS at most."""
    deadline = time.monotonic() + LEAVE_SECONDS
    for process in _cores:
        with suppress(AssertionError, ValueError):  # of a process that forked; closed by vLLM
            process.join(max(0.0, deadline - time.monotonic()))
    for directory, namespace in _places:
        try:
            if choose_run_directory(directory, os.environ).is_dir():  # else no engine ever ran
                run_dir = open_run_directory(directory, os.environ)
                clear(run_dir, namespace, patience=1.0)
        except (KvshmError, OSError) as exc:
            log.line(CoreLine.NOT_CLEANED, exc)


# -- in the EngineCore


def on_shutdown_signal(leave: Callable[[], None]) -> None:
    """Call ``leave``, once and on a thread of its own, as soon as a signal is to end this
    EngineCore, whatever its main thread is doing.  Until ``leave`` returns the server does not kill
    this process (``let_leave``).

    Main thread.  Does nothing outside an EngineCore, or if other code uses Python's wakeup
    descriptor for signals.  Without a free descriptor or thread nothing is watched.
    """
    is_core = multiprocessing.current_process().name.startswith("EngineCore")
    if not is_core or threading.current_thread() is not threading.main_thread():
        return
    try:
        _watch_signals(leave)
    except (KvshmError, OSError) as exc:
        log.line(HookLine.SIGNAL_NOT_WATCHED, exc)


def _watch_signals(leave: Callable[[], None]) -> None:
    if (others := signal.set_wakeup_fd(-1)) != -1:
        signal.set_wakeup_fd(others)
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    called = threading.Event()

    def watch() -> None:
        _call_thread(MEMBER)
        called.set()
        while not _ENDING.intersection(os.read(read, 64)):
            pass
        leave()

    try:
        start_thread(threading.Thread(target=watch, name="kvshm-leaving", daemon=True))
    except KvshmError:
        os.close(read)
        os.close(write)
        raise
    called.wait()  # a signal may come from now on, and ``let_leave`` look for this thread
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def forget_in_child() -> None:  # a forked child's signals do not concern this process
        if (current := signal.set_wakeup_fd(-1)) != write:
            signal.set_wakeup_fd(current)  # other code has replaced the descriptor

    os.register_at_fork(after_in_child=forget_in_child)


def _call_thread(name: str) -> None:
    """Give the calling thread a name that other processes see."""
    try:
        Path("/proc/thread-self/comm").write_text(name)
    except OSError as exc:
        log.line(HookLine.LEAVING_NOT_SEEN, exc)
