"""What dead processes have left in the run directory, and removing it.

Memory goes with the processes that have it; names of sockets, and lists of peers, stay.  A
coordinator removes those of its engines.  Where none runs, ``clear`` does it: for the last engine
that ends, and for ``kvshm clean``.  Whoever serves a socket is alive, in whichever container.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from kvshm.errors import AlreadyRunning
from kvshm.rundir import (
    closed_socket,
    command_endpoint,
    event_endpoint,
    list_peers_files,
    list_sockets,
    lock_path,
    tables_socket,
)

from .locks import CLEARING_SECONDS, clearing, take_lock

_UNSERVED = (errno.ECONNREFUSED, errno.ENOENT, errno.ELOOP)


def is_served(path: Path) -> bool:
    """Whether a process has the socket bound.  Connecting with another socket type tells
    without a connection coming about; what is no socket is served by nobody.  Never blocks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(os.fspath(path)) not in _UNSERVED


def left_by_engines(run_dir: Path, namespace: str) -> list[Path]:
    """Sockets of engines and ranks that nobody serves, and the lists of peers of engines whose
    own socket nobody serves.  An engine has a list only while it serves that socket, and who
    finds its own socket gone makes it again."""
    sockets = {found: is_served(found.path) for found in list_sockets(run_dir, namespace)}
    living = {found.epoch for found, served in sockets.items() if served}
    lists = list_peers_files(run_dir, namespace)
    return [found.path for found, served in sockets.items() if not served] + [
        path for epoch, path in lists if epoch not in living
    ]


# -- without a coordinator


@dataclass
class Cleared:
    """What ``clear`` found of one namespace."""

    removed: list[str] = field(default_factory=list)
    """Files by path; with ``dry_run`` those that would have been."""
    left: list[str] = field(default_factory=list)
    """What it could not remove, with the reason."""
    coordinator: str = ""
    """Says that one serves the namespace, which clears up itself: nothing was done."""


def clear(
    run_dir: Path, namespace: str, *, dry_run: bool = False, patience: float = CLEARING_SECONDS
) -> Cleared:
    """Remove what the dead left in a namespace that no coordinator serves.

    Blocks for ``patience`` at most while another process clears up.  ``run_dir`` has to be
    checked (open_run_directory).  Raises KvshmError or OSError.
    """
    found = Cleared()
    with clearing(run_dir, patience) as alone:
        if not alone:
            found.coordinator = f"somebody else clears up in {run_dir}"
            return found
        try:
            fd = take_namespace(run_dir, namespace)
        except AlreadyRunning as exc:
            found.coordinator = str(exc)
            return found
        try:
            left = _left_by_coordinator(run_dir, namespace) + left_by_engines(run_dir, namespace)
            for path in left:
                _remove(path, found, dry_run)
            lock_path(run_dir, namespace).unlink(missing_ok=True)
        finally:
            os.close(fd)
    return found


def take_namespace(run_dir: Path, namespace: str) -> int:
    """Take the lock of a namespace without a coordinator; return its descriptor.  For who is
    ``clearing``.  Somebody may have removed the lock file of a living coordinator, so that the
    lock alone proves nothing.  Raises AlreadyRunning, RunDirectoryError or OSError."""
    fd = take_lock(lock_path(run_dir, namespace))
    try:
        for path in filter(is_served, _left_by_coordinator(run_dir, namespace)):
            raise AlreadyRunning(
                f"another coordinator serves {path}; its lock file was removed, it makes it again"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def _left_by_coordinator(run_dir: Path, namespace: str) -> list[Path]:
    """Its sockets; nobody serves them if ``take_namespace`` succeeds."""
    ends = (end(run_dir, namespace) for end in (command_endpoint, event_endpoint))
    doors = [Path(end.removeprefix("ipc://")) for end in ends]
    paths = (*doors, *map(closed_socket, doors), tables_socket(run_dir, namespace))
    return [path for path in paths if os.path.lexists(path)]


def _remove(path: Path, found: Cleared, dry_run: bool) -> None:
    try:
        if not dry_run:
            path.unlink(missing_ok=True)
    except OSError as exc:
        found.left.append(f"{path}: {exc.strerror}")
    else:
        found.removed.append(str(path))
