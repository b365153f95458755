"""Processes of this user that were started with kvshm enabled and have loaded vLLM or kvshm.

Of an environment, which is that of the process's start, only the variables of NAMED and PREFIX are
kept.  Other users' processes cannot be read: they are counted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvshm._base import setting_sources
from kvshm.errors import ConfigError

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
CONNECTOR = b"KvshmConnector"
"""As a --kv-transfer-config names it."""
_COMMANDS = {
    b"kvshm",
    b"kvshm-coordinator",
    b"kvshm.coordinator",
    b"kvshm.coordinator.program",
    b"kvshm.tools.cli",
    b"kvshm.tools.program",
}
"""Programs and modules of kvshm's own, which are no engines."""
_SERVER = re.compile(rb"(^|/)vllm\0serve\0|\0vllm\.entrypoints\.[\w.]+\0")
_LOADED = re.compile(rb"/(vllm|kvshm)/_\w*\.[\w.]*so")
_FIRST_ARGUMENTS = 5
"""An interpreter, its options, -m and a module."""


@dataclass(frozen=True)
class Process:
    pid: int
    environ: Mapping[str, str]
    root: Path


@dataclass(frozen=True)
class Processes:
    enabled: tuple[Process, ...]
    unread: int
    """Processes of which the environment cannot be read: other users'."""
    plain: tuple[int, ...] = ()
    """Pids of this user's vLLM servers for which nobody has said whether kvshm is enabled."""


def find_processes(proc: Path, without: frozenset[int]) -> Processes:
    """Read /proc.  ``without``: pids that are left out, this process and those that started it."""
    enabled, plain, unread = [], [], 0
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdecimal()):
        if pid in without:
            continue
        try:
            environ = dict(_named((proc / str(pid) / "environ").read_bytes()))
            argv = (proc / str(pid) / "cmdline").read_bytes()
        except PermissionError:
            unread += 1
            continue
        except OSError:  # it has ended
            continue
        means_to = not _is_command(argv) and (_is_enabled(environ) or CONNECTOR in argv)
        if means_to and _has_loaded(proc / str(pid) / "maps"):
            enabled.append(Process(pid, environ, proc / str(pid) / "root"))
        elif not means_to and _is_left_plain(proc / str(pid), argv, environ):
            plain.append(pid)
    return Processes(tuple(enabled), unread, tuple(plain))


def _is_left_plain(folder: Path, argv: bytes, environ: Mapping[str, str]) -> bool:
    """Whether it is a server of vLLM of this user, and nothing says that it should not share."""
    if not _SERVER.search(argv) or environ.get("KVSHM_ENABLE") or "KVSHM_CONFIG" in environ:
        return False
    if b"\0--config" in argv:  # a file of vLLM's, which may name the connector
        return False
    try:
        return folder.stat().st_uid == os.geteuid()
    except OSError:  # it has ended
        return False


def _is_command(argv: bytes) -> bool:
    first = argv.split(b"\0")[:_FIRST_ARGUMENTS]
    return any(os.path.basename(argument) in _COMMANDS for argument in first)


def _has_loaded(maps: Path) -> bool:
    """Whether the process is one of vLLM's; where that cannot be seen it counts as one."""
    try:
        return _LOADED.search(maps.read_bytes()) is not None
    except OSError:
        return True


def _is_enabled(environ: Mapping[str, str]) -> bool:
    """The variable counts more than the file.  With a file that cannot be used no engine starts."""
    if enabled := environ.get("KVSHM_ENABLE", ""):
        return enabled.lower() in ENABLED
    try:
        keys = setting_sources.read_file(environ).keys
    except ConfigError:
        return False
    return keys.get("enable") is True


def own_line(proc: Path) -> frozenset[int]:
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
