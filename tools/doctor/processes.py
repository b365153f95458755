"""Processes of this user in whose environment kvshm is enabled.

Of an environment only the variables of NAMED and PREFIX are kept; it is that of the process's
start.  Processes of other users cannot be read: they are counted, no more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = "KVSHM_"
NAMED = {
    "CUDA_MPS_PIPE_DIRECTORY",
    "HOME",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "VLLM_PLUGINS",
    "VLLM_USE_RUST_FRONTEND",
    "XDG_RUNTIME_DIR",
}
ENABLED = {"1", "true", "yes", "on"}


@dataclass(frozen=True)
class Process:
    """One process in whose environment kvshm is enabled."""

    pid: int
    environ: Mapping[str, str]
    root: Path
    """Its root directory, as this process reaches it."""


@dataclass(frozen=True)
class Processes:
    """What /proc shows."""

    enabled: tuple[Process, ...]
    unread: int
    """Processes of which the environment cannot be read: other users'."""


def find_processes(proc: Path, without: frozenset[int]) -> Processes:
    """Read /proc.  ``without``: pids that are left out, this process and those that started it."""
    enabled, unread = [], 0
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdecimal()):
        if pid in without:
            continue
        try:
            environ = dict(_named((proc / str(pid) / "environ").read_bytes()))
        except PermissionError:
            unread += 1
            continue
        except OSError:  # it has ended
            continue
        if environ.get("KVSHM_ENABLE", "").lower() in ENABLED:
            enabled.append(Process(pid, environ, proc / str(pid) / "root"))
    return Processes(tuple(enabled), unread)


def own_line(proc: Path) -> frozenset[int]:
    """This process and those from which it descends."""
    pid, line = os.getpid(), set[int]()
    while pid > 0 and pid not in line:
        line.add(pid)
        try:
            stat = (proc / str(pid) / "stat").read_text("utf-8", "replace")
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return frozenset(line)


def _named(content: bytes) -> Iterator[tuple[str, str]]:
    for entry in content.decode("utf-8", "replace").split("\0"):
        name, _, value = entry.partition("=")
        if name in NAMED or name.startswith(PREFIX):
            yield name, value
