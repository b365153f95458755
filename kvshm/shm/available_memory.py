"""How much memory can be had, of the machine and of the container.

The kernel refuses nobody who asks for more than there is: it ends processes, in a container one
of that container, and they hear nothing of the reason.  Hence a look before much memory is taken:
at the start, and when an engine is met or a replica grows.  It reads a handful of small files.
"""

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
    """What a version of cgroups calls its files, and the lines of ``memory.stat``."""

    limit: str
    usage: str
    droppable: tuple[str, str]
    """File pages of which the kernel takes what it needs before it ends anybody."""


_V1 = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes of memory that this process can take without the kernel's ending anybody for them.

    ``cgroups``: where they are mounted.  What cannot be read bounds nothing.
    """
    groups = (_left_of(group, names) for group, names in _groups(proc, cgroups))
    return min([_machine(proc), *groups])


def check_available(
    nbytes: int, taken: int = 0, available: Callable[[], int] = available_bytes
) -> None:
    """Raise OSError, whose ``strerror`` says how much there is, unless ``nbytes`` can be had,
    ``taken`` of which are already."""
    left = available()
    left -= left // 64  # the kernel needs some to keep account of the rest: tables of pages
    if nbytes - taken > left:
        raise OSError(errno.ENOMEM, f"{taken + left} are available")


def reserve(fd: int, nbytes: int, available: Callable[[], int] = available_bytes) -> None:
    """Give a file all its pages now, so that no first touch of one can fail later (SIGBUS).

    Raises OSError; its ``strerror`` says why.  In steps: others may take memory meanwhile.
    """
    for start in range(0, nbytes, _STEP):
        check_available(nbytes, start, available)
        os.posix_fallocate(fd, start, min(_STEP, nbytes - start))


def _machine(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text("ascii").splitlines()
        kib = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines)}
        return 1024 * (int(kib["MemAvailable"]) + int(kib.get("SwapFree", 0)))
    except (OSError, ValueError, LookupError):
        return 1 << 63


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Names]]:
    """The memory cgroups that this process is in, down from the mount's root.  That may be the
    container's own: the path that the kernel states is not below it then."""
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


def _left_of(group: Path, names: _Names) -> int:
    try:
        limit, usage = (int((group / name).read_text()) for name in (names.limit, names.usage))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - usage + sum(int(stat[name]) for name in names.droppable))
    except (OSError, ValueError, KeyError):  # the root has no limit; another's is "max"
        return 1 << 63
