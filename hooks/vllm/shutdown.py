"""Shutdown: a stopped engine tells its peers at once, gets the time to do so, and cleans up.

Without this, peers would take a shutdown for a crash: vLLM ends its workers before it shuts its
connectors down, a second SIGTERM ends an EngineCore in the middle of its shutdown, and with
``--shutdown-timeout 0``, the default, vLLM's server sends SIGKILL right after SIGTERM.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import wraps

from kvshm._ground.forks import guard_forks
from kvshm._ground.log import logger
from kvshm._ground.resources import start_thread
from kvshm._ground.rundir import choose_run_directory, open_run_directory
from kvshm.config import Config
from kvshm.errors import KvshmError
from kvshm.halves import clear

log = logger(__name__)

LEAVE_SECONDS = 1.0
"""Far more than an EngineCore needs to announce that it leaves; the coordinator or ``clean_up``
removes what the EngineCore leaves behind."""

TOUCHPOINT = "get_engine_process_shutdown_timeout"
_ENDING = {signal.SIGTERM, signal.SIGINT}
_started = threading.Event()
_places: set[tuple[str, str]] = set()
"""Run directories (empty: the default one) and namespaces of this process's engines."""


# -- in the process that starts the EngineCores


def wait_for_engine_cores(config: Config) -> None:
    """Make vLLM wait up to LEAVE_SECONDS for its EngineCores where it would not wait at all, and
    call ``clean_up`` at the end of this process.  ``config``: of one of its engines.

    Any process, any number of times; does nothing in processes that vLLM has started.  vLLM
    aborts requests as before.  If this vLLM lacks the wrapped function, nothing is wrapped.
    """
    if multiprocessing.parent_process() is not None:
        return
    _places.add((config.run_dir, config.namespace))
    if _started.is_set():
        return
    _started.set()
    atexit.register(clean_up)
    try:
        from vllm.v1.engine import utils

        original = getattr(utils, TOUCHPOINT)
    except (ImportError, AttributeError):
        return

    @wraps(original)
    def timeout(request_timeout: float | None, process_timeout: float | None) -> float | None:
        chosen: float | None = original(request_timeout, process_timeout)
        # With a time to drain, the user has decided how long to wait.
        drains = request_timeout is None or request_timeout > 0
        return chosen if drains or chosen is None else max(chosen, LEAVE_SECONDS)

    setattr(utils, TOUCHPOINT, timeout)


def clean_up() -> None:
    """Remove what dead processes left behind, unless a coordinator runs and does so."""
    for given, namespace in _places:
        try:
            if choose_run_directory(given, os.environ).is_dir():  # else no engine ever ran
                run_dir = open_run_directory(given, os.environ)
                clear(run_dir, namespace, patience=1.0)
        except (KvshmError, OSError) as exc:
            log.debug("nothing cleaned up: %s", exc)


# -- in the EngineCore


def on_shutdown_signal(leave: Callable[[], None]) -> None:
    """Call ``leave``, once and on a thread of its own, as soon as a signal tells this EngineCore
    to end: before its workers end, and whatever its main thread is doing.

    Main thread.  Does nothing outside an EngineCore, where a signal may mean anything, or if other
    code uses Python's wakeup descriptor for signals.  If no descriptor or thread can be had,
    nothing is watched: peers then take the end of this engine for a crash.
    """
    is_core = multiprocessing.current_process().name.startswith("EngineCore")
    if not is_core or threading.current_thread() is not threading.main_thread():
        return
    try:
        _watch_signals(leave)
    except (KvshmError, OSError) as exc:
        log.warning("the peers will take the end of this engine for a crash: %s", exc)


def _watch_signals(leave: Callable[[], None]) -> None:
    if (others := signal.set_wakeup_fd(-1)) != -1:
        signal.set_wakeup_fd(others)
        return
    read, write = os.pipe()
    os.set_blocking(write, False)

    def watch() -> None:
        while not _ENDING.intersection(os.read(read, 64)):
            pass
        leave()

    try:
        start_thread(threading.Thread(target=watch, name="kvshm-leaving", daemon=True))
    except KvshmError:
        os.close(read)
        os.close(write)
        raise
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    _watched.append(_Wakeup(write))


class _Wakeup:
    """The descriptor that this process's signals are written to.  A forked child stops writing to
    it: the child's signals are not the engine's."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        guard_forks(self)

    def forget_in_child(self) -> None:
        if (current := signal.set_wakeup_fd(-1)) != self._fd:
            signal.set_wakeup_fd(current)  # other code has replaced the descriptor


_watched: list[_Wakeup] = []
