"""An engine that is stopped leaves: it tells so at once, has the time to, and leaves nothing.

vLLM ends its workers before it shuts its connectors down, a second SIGTERM ends an EngineCore
that is shutting down on the spot, and with ``--shutdown-timeout 0``, the default, its server
sends SIGKILL right after SIGTERM.  To all others that looks like a crash.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import wraps

from kvshm.config import Config
from kvshm.errors import KvshmError
from kvshm.forks import guard_forks
from kvshm.log import logger
from kvshm.node.leftovers import clear
from kvshm.resources import start_thread
from kvshm.rundir import choose_run_directory, open_run_directory

log = logger(__name__)

LEAVE_SECONDS = 1.0
"""Far more than it takes an EngineCore to tell that it leaves; what it does not come to then is
cleared up by the coordinator, or by ``clean_up``."""

TOUCHPOINT = "get_engine_process_shutdown_timeout"
_ENDING = {signal.SIGTERM, signal.SIGINT}
_started = threading.Event()


# -- in the process that starts the EngineCores


def wait_for_engine_cores() -> None:
    """Have vLLM wait for its EngineCores for up to LEAVE_SECONDS where it would not wait at all,
    and clear up at this process's end if one of them could not, and no coordinator runs.

    Any process, any number of times; nothing happens in those that vLLM has started.  Requests
    are aborted as without it.  A vLLM without the function that decides this is left as it is.
    """
    if multiprocessing.parent_process() is not None or _started.is_set():
        return
    _started.set()
    atexit.register(clean_up)
    try:
        from vllm.v1.engine import utils
    except ImportError:
        return
    original = getattr(utils, TOUCHPOINT, None)
    if original is None:
        return

    @wraps(original)
    def timeout(request_timeout: float | None, process_timeout: float | None) -> float | None:
        chosen: float | None = original(request_timeout, process_timeout)
        # With a time to drain, what is left of it is the user's word.
        drains = request_timeout is None or request_timeout > 0
        return chosen if drains or chosen is None else max(chosen, LEAVE_SECONDS)

    setattr(utils, TOUCHPOINT, timeout)


def clean_up() -> None:
    """Remove what dead processes left, where no coordinator does it."""
    try:
        config = Config.from_env(os.environ)
        if choose_run_directory(config.run_dir, os.environ).is_dir():  # else nothing ever ran
            run_dir = open_run_directory(config.run_dir, os.environ)
            clear(run_dir, config.namespace, patience=1.0)
    except (KvshmError, OSError) as exc:
        log.debug("nothing cleared up: %s", exc)


# -- in the EngineCore


def on_shutdown_signal(leave: Callable[[], None]) -> None:
    """Have ``leave`` called, once and on a thread of its own, in the moment in which a signal
    tells this EngineCore to end: before its workers end, and whatever its main thread does.

    Main thread.  Nothing happens in a process that is no EngineCore, where a signal may mean
    anything, or if somebody else watches its signals in this way.  Without descriptors or threads
    it is not watched: that it ends looks like a crash then.
    """
    is_core = multiprocessing.current_process().name.startswith("EngineCore")
    if not is_core or threading.current_thread() is not threading.main_thread():
        return
    try:
        _watch_signals(leave)
    except (KvshmError, OSError) as exc:
        log.warning("the others will take the end of this engine for a crash: %s", exc)


def _watch_signals(leave: Callable[[], None]) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    previous = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if previous != -1:
        signal.set_wakeup_fd(previous)
        os.close(read)
        os.close(write)
        return

    def watch() -> None:
        while not _ENDING.intersection(os.read(read, 64)):
            pass
        leave()

    try:
        start_thread(threading.Thread(target=watch, name="kvshm-leaving", daemon=True))
    except KvshmError:
        signal.set_wakeup_fd(-1)
        os.close(read)
        os.close(write)
        raise
    _watched.append(_Wakeup(write))


class _Wakeup:
    """Where signals of this process are told of.  A forked child's are its own: it writes them
    nowhere, until somebody there asks for them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        guard_forks(self)

    def forget_in_child(self) -> None:
        if (current := signal.set_wakeup_fd(-1)) != self._fd:
            signal.set_wakeup_fd(current)  # somebody else's by now


_watched: list[_Wakeup] = []
