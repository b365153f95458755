"""Checks of the machine: memory, descriptors, /dev/shm, logind."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from kvshm._shm.available_memory import available_bytes

from .checks import Finding, not_applicable, ok, problem, warning
from .evidence import Evidence

MIB = 1 << 20
VLLM_SHM_BYTES = 160 * MIB
"""What vLLM's message queues of one engine take in /dev/shm."""
LEAST_MEMORY = 256 * MIB
LEAST_DESCRIPTORS = 4096


def shm(seen: Evidence) -> Finding:
    """vLLM's own need: kvshm has no files there."""
    if not seen.shm.is_dir():
        return problem(f"{seen.shm} is not there: vLLM cannot start")
    if file_system(seen.shm, seen.proc) != "tmpfs":
        return warning(f"{seen.shm} is not a tmpfs, but {file_system(seen.shm, seen.proc)}")
    found = os.statvfs(seen.shm)
    free = found.f_bavail * found.f_frsize
    text = f"{free // MIB} MiB of {seen.shm} are free"
    if free < VLLM_SHM_BYTES:
        return problem(f"{text}; vLLM needs {VLLM_SHM_BYTES // MIB} for each engine to start")
    return ok(text)


def memory(_: Evidence) -> Finding:
    free = available_bytes()
    text = f"{free // MIB} MiB are available on the machine and in this container"
    return ok(text) if free >= LEAST_MEMORY else problem(text)


def sealed_memory(_: Evidence) -> Finding:
    fd = os.memfd_create("kvshm-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, wanted)
        held = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted
    finally:
        os.close(fd)
    return ok("memory files can be made and sealed") if held else problem("seals do not hold")


def descriptors(_: Evidence) -> Finding:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} file descriptors are permitted to a process that is started from here"
    return ok(text) if soft == -1 or soft >= LEAST_DESCRIPTORS else warning(text)


def file_system(path: Path, proc: Path) -> str:
    """The kind of file system that a path lies on, as the kernel calls it; "unknown" without it."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kinds = [
        line.partition(" - ")[2].split()[0]
        for line in (proc / "self/mountinfo").read_text("utf-8", "replace").splitlines()
        if line.split()[2] == wanted
    ]
    return kinds[0] if kinds else "unknown"


def remove_ipc(seen: Evidence) -> Finding:
    """logind removes an ordinary user's files in /dev/shm at the end of the last session."""
    values = [line for file in seen.logind for line in _settings(file)]
    if not values and not seen.logind[0].exists():
        return not_applicable("no logind.conf here")
    value = values[-1] if values else "yes, the default"
    if value.lower().split(",")[0] in {"no", "false", "off", "0"}:
        return ok(f"RemoveIPC={value}")
    if os.geteuid() == 0:
        return ok(f"RemoveIPC={value}, which spares root")
    return warning(
        f"RemoveIPC={value}: vLLM's files in /dev/shm go when this user's last login session "
        "ends, unless it is a system user; kvshm has none there"
    )


def _settings(place: Path) -> Iterator[str]:
    files = sorted(place.glob("*.conf")) if place.is_dir() else [place]
    for file in files:
        if file.is_file():
            for line in file.read_text("utf-8", "replace").splitlines():
                name, _, value = line.partition("=")
                if name.strip() == "RemoveIPC":
                    yield value.strip()
