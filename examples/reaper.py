"""Ends what this process has started, however this process ends: by SIGKILL, too.

``start`` starts a small process, the reaper, which learns of the end of this process from the
kernel (by a pidfd).  Every program that is started from then on has this run's mark in its
environment, and so have all that those start, whatever their parent, group or session is.  Others
see the environment of a process's last exec, so one that is only forked sends the reaper its pid.
The reaper kills them all, and removes the temporary directories that this process has made, the
paths given to ``remove_afterwards``, and the shared memory that they alone have mapped.

Not PR_SET_PDEATHSIG: it knows only children, ends them with the *thread* that started them, and is
lost when another user id or a file with capabilities is taken on.

Runs with the standard library alone.  Linux.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
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
called KVSHM_...: engines are started without the settings of the process that starts them."""
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
    own, ended = uuid.uuid4().hex, os.pidfd_open(os.getpid())
    read, _pipe = os.pipe()  # exec closes it
    os.register_at_fork(after_in_child=_note_fork)
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, own, str(ended)],
        stdin=read,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},  # without any mark: no reaper kills another
        cwd="/",
        start_new_session=True,  # Ctrl-C is for this process
        pass_fds=[ended],
    ).returncode = 0  # nobody waits for it
    os.close(read)
    os.close(ended)
    os.environ[MARK] = ",".join(filter(None, (os.environ.get(MARK), own)))
    tempfile.mkdtemp = _noting(tempfile.mkdtemp)


def remove_afterwards(path: Path) -> None:
    """Have the reaper remove a path, if it is still there.  After ``start``, before it is made."""
    _note(os.path.abspath(path))


def _note(what: str) -> None:
    assert _pipe is not None
    with contextlib.suppress(OSError):  # the reaper was killed
        os.write(_pipe, os.fsencode(what) + b"\0")


def _note_fork() -> None:
    """In a forked process: have the reaper hear of it, and when it was started."""
    with contextlib.suppress(OSError, ValueError):  # no /proc
        _note(f"{os.getpid()} {_started(os.getpid())}")


def _noting(make: Any) -> Any:
    """Have the reaper hear of each temporary directory."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        path = make(*args, **kwargs)
        _note(os.path.abspath(path))
        return path

    return made


# -- in the reaper


class Notes:
    """What the processes of a run write to the reaper's standard input: paths and, of those that
    were forked, ``pid start``."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.forked: set[str] = set()
        self._rest = b""

    def read(self) -> bool:
        """Take what is there; whether somebody may write more.  Does not block."""
        try:
            while got := os.read(0, 1 << 16):
                *whole, self._rest = (self._rest + got).split(b"\0")
                for note in map(os.fsdecode, whole):
                    (self.paths if note.startswith("/") else self.forked).add(note)
        except BlockingIOError:
            return True
        return False


def main(run: str, ended: int) -> None:
    """Wait until the pidfd ``ended`` says that the process has ended, then kill and remove."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.set_blocking(0, False)
    notes, waits = Notes(), select.poll()
    waits.register(ended, select.POLLIN)
    waits.register(0, select.POLLIN)
    while ended not in dict(waits.poll()):
        if not notes.read():
            waits.unregister(0)
    mapped = kill_all(run, notes)
    for path in notes.paths | mapped - set().union(*map(_shared_memory, _pids())):
        remove(path)


def remove(path: str) -> None:
    """Remove a directory with all that is in it, or what else is there; an error leaves it."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        os.unlink(path)


def kill_all(run: str, notes: Notes) -> set[str]:
    """Kill every process that has the mark or was noted; return the files of shared memory they had
    mapped."""
    mapped: set[str] = set()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        notes.read()
        found = [pid for pid in _pids() if _kill(pid, run, notes, mapped)]
        if not found:
            break  # who is being started while another is killed is found by the next look
        time.sleep(0.02)
    return mapped


def _kill(pid: int, run: str, notes: Notes, mapped: set[str]) -> bool:
    """Kill a process if it is one of the run and lives; whether it was."""
    try:
        pidfd = os.pidfd_open(pid)  # first: the pid may be used again
    except OSError:
        return False
    try:
        if run not in _runs(pid) and f"{pid} {_started(pid)}" not in notes.forked:
            return False
        mapped |= _shared_memory(pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except (OSError, ValueError):
        return False  # it has ended, or is another user's
    finally:
        os.close(pidfd)
    return True


def _started(pid: int) -> str:
    """When a process was started, in ticks of the kernel: tells it from another one with the same
    pid.  Raises OSError if there is none, ValueError if it has ended."""
    state, *fields = (
        Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    )
    if state in "ZX":
        raise ValueError("it has ended")
    return fields[18]


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
    main(sys.argv[1], int(sys.argv[2]))
