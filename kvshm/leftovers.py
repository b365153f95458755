"""What dead processes have left in shared memory and in the run directory, and removing it.

A coordinator does this for the engines it knows.  Where none runs, ``clear`` does it: for the
last engine that ends, and for ``kvshm clean``.  Only what certainly belongs to nobody alive is
removed; a process of another pid namespace may well live.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from .errors import (
    AlreadyRunning,
    KvshmError,
    SegmentNotFound,
    SegmentNotReady,
    VersionMismatch,
)
from .locks import CLEARING_SECONDS, clearing, lock_segment, take_lock
from .rundir import (
    command_endpoint,
    event_endpoint,
    list_peers_files,
    list_rank_sockets,
    lock_path,
)
from .segment import (
    LEASES_KIND,
    SHM_DIRECTORY,
    TABLE_KIND,
    Identity,
    SegmentName,
    is_alive,
    is_dead,
    list_segments,
    owner_of,
    unlink,
)
from .slots import SlotTable

ABANDONED_SECONDS = 60.0
"""A segment that nobody has filled for so long was left by a process that died on it."""

NOBODY = Identity(bytes(16), 0, 0)
"""Owner of a segment whose birth was abandoned."""

Unreadable = Callable[[SegmentName, Exception], None]


def owned_segments(
    namespace: str, unreadable: Unreadable
) -> Iterator[tuple[SegmentName, Identity]]:
    """Yield the engines' segments and their owners; those that cannot be read are told."""
    for name in list_segments(namespace):
        if name.kind == LEASES_KIND:
            continue
        try:
            yield name, owner_of(str(name))
        except SegmentNotReady:
            if _is_abandoned(str(name)):
                yield name, NOBODY
        except SegmentNotFound:
            continue
        except (KvshmError, OSError) as exc:
            unreadable(name, exc)


def nobodys(owner: Identity) -> bool:
    """Whether certainly no living process owns what ``owner`` made."""
    return owner == NOBODY or is_dead(owner)


def end_life(table: str) -> None:
    """Zero the life words of a slot table; one that is gone, nobody's yet or of another version,
    which no engine of ours ever met, is left alone.  Raises KvshmError."""
    try:
        opened = SlotTable.open(table)
    except (SegmentNotFound, SegmentNotReady, VersionMismatch):
        return
    opened.end_life(None)
    opened.close()


def is_served(path: Path) -> bool:
    """Whether a process has the socket bound.  Connecting with another socket type tells
    without a connection coming about."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(os.fspath(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def _is_abandoned(name: str) -> bool:
    try:
        age = time.time() - os.stat(SHM_DIRECTORY / name).st_mtime
    except FileNotFoundError:
        return False
    return age > ABANDONED_SECONDS


# -- without a coordinator


@dataclass
class Cleared:
    """What ``clear`` found of one namespace."""

    removed: list[str] = field(default_factory=list)
    """Segments by name, files by path; with ``dry_run`` those that would have been."""
    left: list[str] = field(default_factory=list)
    """What it could not tell whose it is, or not remove, with the reason."""
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
    with clearing(run_dir, patience) as alone, ExitStack() as held:
        if not alone:
            found.coordinator = f"somebody else clears up in {run_dir}"
            return found
        lock = lock_path(run_dir, namespace)
        try:
            held.callback(os.close, take_lock(lock))
            locked = _lock_lease_tables(namespace, held)
        except AlreadyRunning as exc:
            found.coordinator = str(exc)
            return found
        _Clearing(namespace, dry_run, found).run(run_dir, locked)
        lock.unlink(missing_ok=True)
    return found


class _Clearing:
    """One ``clear``, while it holds the locks."""

    def __init__(self, namespace: str, dry_run: bool, found: Cleared) -> None:
        self._namespace = namespace
        self._dry_run = dry_run
        self._found = found

    def run(self, run_dir: Path, lease_tables: list[SegmentName]) -> None:
        """``lease_tables`` are those whose locks are held.  Any other is that of a coordinator
        which has started since, with another run directory."""
        going = set()
        for name, owner in owned_segments(self._namespace, self._leave):
            if nobodys(owner):
                going.add(str(name))
                self._remove_segment(name)
            elif not is_alive(owner):
                reason = f"pid {owner.pid} of another pid namespace, which may live, has made it"
                self._found.left.append(f"{name}: {reason}")
        for path in self._sockets(run_dir):
            if path.exists() and not is_served(path):
                self._remove(str(path), path.unlink)
        segments = list_segments(self._namespace)
        tables = {n.epoch for n in segments if n.kind == TABLE_KIND and str(n) not in going}
        for epoch, path in list_peers_files(run_dir, self._namespace):
            if epoch not in tables:  # an engine lists its peers while its table is there
                self._remove(str(path), path.unlink)
        # A lease lies in a slot table: without any there is nothing to keep its holder for.
        if not tables:
            for name in lease_tables:
                self._remove_segment(name)

    def _sockets(self, run_dir: Path) -> list[Path]:
        ends = command_endpoint, event_endpoint
        coordinators = [Path(end(run_dir, self._namespace).removeprefix("ipc://")) for end in ends]
        return coordinators + [path for _, path in list_rank_sockets(run_dir, self._namespace)]

    def _remove_segment(self, name: SegmentName) -> None:
        def remove() -> None:
            if name.kind == TABLE_KIND:
                end_life(str(name))
            unlink(str(name))

        self._remove(str(name), remove)

    def _remove(self, what: str, remove: Callable[[], None]) -> None:
        try:
            if not self._dry_run:
                remove()
        except (KvshmError, OSError) as exc:
            self._found.left.append(f"{what}: {exc}")
        else:
            self._found.removed.append(what)

    def _leave(self, name: SegmentName, exc: Exception) -> None:
        self._found.left.append(f"{name}: {exc}")


def _lock_lease_tables(namespace: str, held: ExitStack) -> list[SegmentName]:
    """Lock the lease tables that there are until ``held`` ends.  Raises AlreadyRunning."""
    locked = []
    for name in list_segments(namespace):
        if name.kind != LEASES_KIND:
            continue
        if (fd := lock_segment(SHM_DIRECTORY / str(name), namespace)) is not None:
            held.callback(os.close, fd)
            locked.append(name)
    return locked
