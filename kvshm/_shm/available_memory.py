"""How much memory is available, on the machine and in the container: the kernel does not refuse a
request for more than there is, it kills processes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

_STEP = 1 << 30


class _Names(NamedTuple):
    """Names of files and of ``memory.stat`` lines in one version of cgroups."""

    limit: str
    usage: str
    droppable: tuple[str, str]
    """Pages of files, which the kernel reclaims before it kills a process."""


_V1 = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that this process can take.  ``cgroups``: where they are mounted."""
    groups = (_available_in(group, names) for group, names in _groups(proc, cgroups))
    return min([_available_on_machine(proc), *groups])


def check_available(
    nbytes: int, taken: int = 0, available: Callable[[], int] = available_bytes
) -> None:
    """Raise OSError unless ``nbytes``, of which ``taken`` are allocated already, are available."""
    left = available()
    left -= left // 64  # the kernel's page tables for the rest
    if nbytes - taken > left:
        raise OSError(errno.ENOMEM, f"{taken + left} are available")


def fallocate(fd: int, start: int, nbytes: int) -> None:
    """Allocate pages of a file.  Raises OSError."""
    os.posix_fallocate(fd, start, nbytes)


def reserve(
    fd: int,
    nbytes: int,
    available: Callable[[], int] = available_bytes,
    allocate: Callable[[int, int, int], None] = fallocate,
) -> None:
    """Allocate all pages of a file now, so that no later access can fail (SIGBUS).  Raises OSError;
    its ``strerror`` says why.  In steps: other processes may take memory meanwhile."""
    for start in range(0, nbytes, _STEP):
        check_available(nbytes, start, available)
        allocate(fd, start, min(_STEP, nbytes - start))


def _available_on_machine(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text("ascii").splitlines()
        kib = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines)}
        return 1024 * (int(kib["MemAvailable"]) + int(kib.get("SwapFree", 0)))
    except (OSError, ValueError, LookupError):
        return 1 << 63


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Names]]:
    """The memory cgroups of this process, from the root of the mount down.  The root may be the
    container's own cgroup: then the path that the kernel reports is not below it."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not path or (controllers and "memory" not in controllers.split(",")):
            continue
        group, names = (cgroups / "memory", _V1) if controllers else (cgroups, _V2)
        yield group, names
        below = [part for part in path.split("/") if part]
        for part in below if ".." not in below else ():
            group /= part
            yield group, names


def _available_in(group: Path, names: _Names) -> int:
    try:
        limit, usage = (int((group / name).read_text()) for name in (names.limit, names.usage))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - usage + sum(int(stat[name]) for name in names.droppable))
    except (OSError, ValueError, KeyError):  # the root has no limit; others may have "max"
        return 1 << 63
