"""Removes the files of dead processes from the run directory.

A coordinator removes the files of its engines.  Without one ``clear`` does so, called by the last
engine that ends and by ``kvshm clean``.  A process that serves a socket is alive.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from kvshm._base.declined import left_declined
from kvshm._base.rundir import (
    command_endpoint,
    event_endpoint,
    list_boards,
    list_peers_files,
    list_sockets,
    lock_path,
    tables_socket,
)
from kvshm._shm.fds import is_served
from kvshm.errors import AlreadyRunning

from .board import left_boards
from .locks import CLEANUP_SECONDS, cleanup_lock, release_lock, take_lock


def left_by_engines(run_dir: Path, namespace: str) -> list[Path]:
    """Return the sockets of engines and ranks that no process serves, the lists of peers of engines
    whose own socket no process serves, the records of engines that shared nothing and have ended,
    and boards that no process maps.  An engine has a list only while it serves that socket, and
    makes a lost socket again."""
    sockets = {found: is_served(found.path) for found in list_sockets(run_dir, namespace)}
    living = {found.epoch for found, served in sockets.items() if served}
    lists = list_peers_files(run_dir, namespace)
    return [
        *(found.path for found, served in sockets.items() if not served),
        *(found.path for found in lists if found.epoch not in living),
        *left_declined(run_dir, namespace),
        *left_boards(list_boards(run_dir, namespace)),
    ]


# -- without a coordinator


@dataclass
class CleanupResult:
    """What ``clear`` did in one namespace."""

    removed: list[str] = field(default_factory=list)
    """Paths of the removed files; with ``dry_run`` of the files that it would remove."""
    left: list[str] = field(default_factory=list)
    coordinator: str = ""
    """If not empty: why nothing was done; a coordinator or another process cleans up."""


def clear(
    run_dir: Path, namespace: str, *, dry_run: bool = False, patience: float = CLEANUP_SECONDS
) -> CleanupResult:
    """Remove the files of dead processes in a namespace that no coordinator serves.  Blocks for
    ``patience`` seconds at most while another process cleans up.  The caller has checked
    ``run_dir`` (open_run_directory).  Raises KvshmError or OSError."""
    found = CleanupResult()
    with cleanup_lock(run_dir, patience) as alone:
        if not alone:
            found.coordinator = f"another process cleans up in {run_dir}"
            return found
        lock = lock_path(run_dir, namespace)
        kept = dry_run and lock.exists()
        try:
            fd = take_namespace(run_dir, namespace)
        except AlreadyRunning as exc:
            found.coordinator = str(exc)
            return found
        try:
            left = _left_by_coordinator(run_dir, namespace) + left_by_engines(run_dir, namespace)
            for path in left:
                _remove(path, found, dry_run)
            if not kept:
                lock.unlink(missing_ok=True)
        finally:
            release_lock(fd)
    return found


def take_namespace(run_dir: Path, namespace: str) -> int:
    """Take the lock of a namespace without a coordinator; return its descriptor.  The caller holds
    ``cleanup_lock``.  The lock alone does not prove that no coordinator runs: the lock file may
    have been removed.  Raises AlreadyRunning, RunDirectoryError or OSError."""
    fd = take_lock(lock_path(run_dir, namespace))
    try:
        for path in filter(is_served, _left_by_coordinator(run_dir, namespace)):
            raise AlreadyRunning(
                f"another coordinator serves {path}; its lock file was removed, it makes it again"
            )
    except BaseException:
        release_lock(fd)
        raise
    return fd


def _left_by_coordinator(run_dir: Path, namespace: str) -> list[Path]:
    """Return the coordinator's sockets; no process serves them if ``take_namespace`` succeeds."""
    endpoints = (of(run_dir, namespace) for of in (command_endpoint, event_endpoint))
    sockets = [Path(endpoint.removeprefix("ipc://")) for endpoint in endpoints]
    return [p for p in (*sockets, tables_socket(run_dir, namespace)) if os.path.lexists(p)]


def _remove(path: Path, found: CleanupResult, dry_run: bool) -> None:
    try:
        if not dry_run:
            path.unlink(missing_ok=True)
    except OSError as exc:
        found.left.append(f"{path}: {exc.strerror}")
    else:
        found.removed.append(str(path))
