"""Ends what this process has started, however this process ends: by SIGKILL, too.

``start`` starts a small process, the reaper, which waits for the end of its standard input: only
this process holds the other end of that pipe, so the kernel tells the reaper.  Every process that
is started from then on has this run's mark in its environment, and with it all that those start,
whoever their parent, group or session is.  The reaper kills them all, and removes the temporary
directories that this process has made and the shared memory that they alone have mapped.

Not PR_SET_PDEATHSIG: it knows only children, ends them with the *thread* that started them, and is
lost when another user id or a file with capabilities is taken on.

Runs with the standard library alone.  Linux.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

MARK = "STARTED_BY_RUNS"
"""Environment variable: the runs that a process belongs to, one inside the other, by commas.  Not
called KVSHM_...: engines are started without the settings of whoever starts them."""
PATIENCE_SECONDS = 10.0
"""How long the reaper looks for processes that start others faster than it kills them."""
SHARED_MEMORY = "/dev/shm"

_pipe: int | None = None


# -- in the process whose end counts


def start() -> None:
    """Have all that this process starts from now on end with it.  Any number of times."""
    global _pipe
    if _pipe is not None:
        return
    own = uuid.uuid4().hex
    read, _pipe = os.pipe()  # closed by exec
    os.register_at_fork(after_in_child=_forget)
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, own],
        stdin=read,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},  # without any mark: no reaper kills another
        cwd="/",
        start_new_session=True,  # Ctrl-C is for this process
    ).returncode = 0  # nobody waits for it
    os.close(read)
    os.environ[MARK] = ",".join(filter(None, (os.environ.get(MARK), own)))
    tempfile.mkdtemp = _noting(tempfile.mkdtemp)


def _forget() -> None:
    """A child that is forked and runs on must not keep the pipe open."""
    global _pipe
    if _pipe is not None:
        os.close(_pipe)
        _pipe = -1


def _noting(make: Any) -> Any:
    """Have the reaper hear of each temporary directory."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        path = make(*args, **kwargs)
        if _pipe is not None and _pipe != -1:
            with contextlib.suppress(OSError):  # the reaper was killed
                os.write(_pipe, os.fsencode(os.path.abspath(path)) + b"\0")
        return path

    return made


# -- in the reaper


def main(run: str) -> None:
    """Wait for the end of standard input, then kill and remove."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    noted = sys.stdin.buffer.read().split(b"\0")
    mapped = kill_all(run)
    for directory in filter(None, noted):
        shutil.rmtree(directory, ignore_errors=True)
    for path in mapped - set().union(*map(_shared_memory, _pids())):
        with contextlib.suppress(OSError):
            os.unlink(path)


def kill_all(run: str) -> set[str]:
    """Kill every process that has the mark; return the files of shared memory they had mapped."""
    mapped: set[str] = set()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        found = [pid for pid in _pids() if _kill(pid, run, mapped)]
        if not found:
            break  # who is being started while another is killed is found by the next look
        time.sleep(0.02)
    return mapped


def _kill(pid: int, run: str, mapped: set[str]) -> bool:
    """Kill a process if it has the mark and lives; whether it had."""
    try:
        pidfd = os.pidfd_open(pid)  # first: the pid may be used again
    except OSError:
        return False
    try:
        if run not in _runs(pid):
            return False
        mapped |= _shared_memory(pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False  # it has ended, or is another user's
    finally:
        os.close(pidfd)
    return True


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _runs(pid: int) -> list[str]:
    """The runs that a process belongs to; a zombie has no environment any more."""
    for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, _, value = line.partition(b"=")
        if name == MARK.encode():
            return value.decode().split(",")
    return []


def _shared_memory(pid: int) -> set[str]:
    """The files in /dev/shm that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    return set(re.findall(rf"{SHARED_MEMORY}/\S+", maps))


if __name__ == "__main__":
    main(sys.argv[1])
