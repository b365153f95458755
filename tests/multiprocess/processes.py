"""Real processes for tests: started, listened to, killed and always reaped."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import IO

from kvshm._base.ids import Epoch
from kvshm._base.rundir import list_sockets
from kvshm._node.segment_server import SegmentClient
from kvshm._shm.slot_table import SlotTableView

from ..sessions import new_namespace

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # pytest knows it
import reaper

start_reaper, remove_afterwards = reaper.start, reaper.remove_afterwards

PATIENCE_SECONDS = 100.0
"""How long a test waits for what must happen; never a statement about speed.  Longer than a
quarantine (30 s), and enough on a machine with a tenth of its cores."""


class Lines:
    def __init__(self, stream: IO[str]) -> None:
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self._lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._lines)

    def __str__(self) -> str:
        with self._changed:
            return "\n".join(self._lines)

    def matching(self, wanted: Callable[[str], bool], since: int = 0) -> list[str]:
        """Return the lines said so far for which ``wanted`` holds."""
        with self._changed:
            return [line for line in self._lines[since:] if wanted(line)]

    def wait(self, wanted: Callable[[str], bool], since: int = 0) -> str | None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        with self._changed:
            while True:
                for line in self._lines[since:]:
                    if wanted(line):
                        return line
                since = max(since, len(self._lines))
                left = deadline - time.monotonic()
                if self._ended or left <= 0:
                    return None
                self._changed.wait(left)

    def join(self) -> None:
        self._thread.join(PATIENCE_SECONDS)


class Managed:
    def __init__(self, name: str, argv: Sequence[str], environ: dict[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **environ},
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.out = Lines(self._process.stdout)
        self.err = Lines(self._process.stderr)

    @property
    def pid(self) -> int:
        return self._process.pid

    def end_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def wait_out(self, wanted: Callable[[str], bool], since: int = 0) -> str:
        line = self.out.wait(wanted, since)
        assert line is not None, f"{self.name}: line never came\n{self.account()}"
        return line

    def wait_err(self, pattern: str, since: int = 0) -> str:
        """Wait for a line on stderr in which the regular expression is found."""
        line = self.err.wait(lambda text: re.search(pattern, text) is not None, since)
        assert line is not None, f"{self.name}: no line has {pattern!r}\n{self.account()}"
        return line

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def status(self) -> int | None:
        return self._process.poll()

    @property
    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def terminate(self) -> int:
        self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        status = self._process.wait(PATIENCE_SECONDS)
        self.out.join()
        self.err.join()
        return status

    def reap(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.end_input()
        self.wait()

    def account(self) -> str:
        return f"--- {self.name} (pid {self.pid}) stdout\n{self.out}\n--- stderr\n{self.err}"


class Processes:
    def __init__(self) -> None:
        self._all: list[Managed] = []

    def start(self, name: str, *argv: str, environ: dict[str, str] | None = None) -> Managed:
        command = [sys.executable, *argv] if argv[0].endswith(".py") else list(argv)
        process = Managed(name, command, environ or {})
        self._all.append(process)
        return process

    def python(self, name: str, *arguments: str) -> Managed:
        return self.start(name, sys.executable, *arguments)

    def forget_ended(self) -> None:
        """Let go of those that have ended, with what they wrote."""
        for process in [p for p in self._all if p.status is not None]:
            process.reap()
            self._all.remove(process)

    def reap(self) -> None:
        for process in reversed(self._all):
            process.reap()
            print(process.account())


class Node:
    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.run_dir = Path(tempfile.mkdtemp(prefix="kv-"))
        self.namespace = new_namespace()

    def with_other_namespace(self) -> Node:
        other = copy(self)
        other.namespace = new_namespace()
        return other

    def with_other_run_dir(self) -> Node:
        other = copy(self)
        other.run_dir = self.run_dir / "other"
        return other

    def start_coordinator(
        self, *arguments: str, python: Sequence[str] = (sys.executable,)
    ) -> Managed:
        """Start a coordinator, whether or not it will come up.  ``python``: the command that
        runs Python, perhaps another one or somewhere else."""
        place = ("--run-dir", str(self.run_dir), "--namespace", self.namespace)
        module = (*python, "-P", "-m", "kvshm.coordinator")
        return self.processes.start("coordinator", *module, *place, *arguments)

    def coordinator(self, *arguments: str, python: Sequence[str] = (sys.executable,)) -> Managed:
        process = self.start_coordinator(*arguments, python=python)
        process.wait_err("event=serving")
        return process

    @property
    def segments(self) -> SegmentClient:
        return SegmentClient(self.run_dir, self.namespace)

    def sockets(self) -> list[Epoch]:
        found = list_sockets(self.run_dir, self.namespace)
        return [socket.epoch for socket in found if socket.epoch is not None]

    def remove(self) -> None:
        shutil.rmtree(self.run_dir)


@contextmanager
def real_processes() -> Iterator[Processes]:
    reaper.start()  # a program has no conftest.py
    processes = Processes()
    try:
        yield processes
    finally:
        processes.reap()


@contextmanager
def fresh_node() -> Iterator[Node]:
    with real_processes() as processes:
        node = Node(processes)
        try:
            yield node
        finally:
            processes.reap()
            node.remove()


def wait_until(holds: Callable[[], bool], what: str, patience: float = PATIENCE_SECONDS) -> None:
    """Wait for a state of shared memory that no one announces; fails the test if it does
    not come about within ``patience`` seconds."""
    deadline = time.monotonic() + patience
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, f"never came about: {what}"
        pause.wait(0.02)


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process.  Raises OSError if there is none."""
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return stat.rpartition(")")[2].split()[0] == "T"


def has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def lease_bits(table: SlotTableView) -> int:
    """The lease bits that are set anywhere in a table, as a mask."""
    found = 0
    for slot in table.slots():
        found |= slot.leases
    return found


def leave_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
