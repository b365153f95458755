"""Which process of this container serves a socket, found without connecting to it.

The queue of a stopped process would fill.  The kernel lists the sockets of this network namespace,
and /proc shows which process of this pid namespace has each open.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
_LISTENING = 0x10000
"""__SO_ACCEPTCON, a flag in /proc/net/unix."""


def pids_of(names: Collection[str], proc: Path = PROC) -> dict[str, int]:
    """Return, by socket's file name, the pids of this user's processes that serve these.  Missing:
    the process is in another container, or has ended."""
    if not names:
        return {}
    links = {f"socket:[{inode}]": name for inode, name in _listening(names, proc).items()}
    found: dict[str, int] = {}
    for folder in proc.iterdir() if links else ():
        if folder.name.isdecimal() and len(found) < len(links):
            found |= {links[link]: int(folder.name) for link in _open_in(folder) & links.keys()}
    return found


def _listening(names: Collection[str], proc: Path) -> dict[int, str]:
    """Inode of the socket -> its name."""
    found = {}
    with suppress(OSError):  # a sandbox may hide it
        for line in (proc / "net/unix").read_text("utf-8", "replace").splitlines()[1:]:
            _, _, _, flags, _, _, inode, *path = line.split(maxsplit=7)
            name = path[0].rpartition("/")[2] if path else ""
            if name in names and int(flags, 16) & _LISTENING:
                found[int(inode)] = name
    return found


def _open_in(process: Path) -> set[str]:
    links = set()
    with suppress(OSError):  # it has ended, or belongs to another user
        for entry in os.scandir(process / "fd"):
            with suppress(OSError):
                links.add(os.readlink(entry.path))
    return links


def ancestors(pid: int, proc: Path = PROC) -> Iterator[int]:
    """Yield the pid of a process of this pid namespace, that of its parent, and so on."""
    while pid > 0:
        yield pid
        try:
            status = (proc / str(pid) / "stat").read_text("utf-8", "replace")
        except OSError:  # it has ended
            return
        pid = int(status.rpartition(")")[2].split()[1])
