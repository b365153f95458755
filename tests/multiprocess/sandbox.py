"""Namespaces of the kernel for tests, as containers have them: of mounts, of pids and of time."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable

import pytest

Command = tuple[str, ...]

OWN_PIDS: Command = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def fresh_tmpfs(*mounts: tuple[str, str]) -> Command:
    """Run a command where each of the (path, size) is an empty tmpfs of that size."""
    script = "".join(
        f"mount -t tmpfs -o size={size},mode=1777 tmpfs {path} && " for path, size in mounts
    )
    return ("unshare", "--mount", "sh", "-c", f'{script} exec "$@"', "sh")


def beside(pid: int) -> Command:
    """Run a command among the mounts of another process."""
    return ("nsenter", f"--target={pid}", "--mount", "--")


def own_clock(ahead: int) -> Command:
    """Run a command in a time namespace of its own, whose CLOCK_MONOTONIC runs
    ``ahead`` seconds ahead of the machine's.  That clock must not become negative."""
    # The second program is in the namespace where the first one only prepares it for its children.
    enter = ("unshare", "--time", f"--monotonic={ahead}", f"--boottime={ahead}")
    check = 'test "$(readlink /proc/$$/ns/time)" = "$(readlink /proc/$$/ns/time_for_children)"'
    return (*enter, "sh", "-c", f'{check} && exec "$@"', "sh")


def skip_unless_permitted(commands: Iterable[Command]) -> None:
    """Skip the test, with the reason, where one of these is not there or the kernel does not permit
    it."""
    for command in commands:
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed")
        tried = subprocess.run([*command, "true"], capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"{command[0]} is not permitted here: {tried.stderr.strip()}")
