"""Checks of the place where engines meet: the run directory, and processes that use another."""

from __future__ import annotations

import os
from collections import defaultdict

from kvshm._base.rundir import (
    choose_run_directory,
    list_coordinators,
    list_sockets,
    require_room,
    tables_socket,
)
from kvshm._node.leftovers import left_by_engines
from kvshm._shm.fds import is_served
from kvshm.config import Config
from kvshm.errors import ConfigError

from .checks import Finding, judged, not_applicable, ok, problem, warning
from .evidence import Evidence
from .machine import file_system
from .processes import Process

NO_PROCESS = "no engine process of this user is seen"

NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "gpfs", "afs", "beegfs"}
NETWORK |= {"glusterfs", "fuse.glusterfs", "fuse.sshfs"}


def run_directory(seen: Evidence) -> Finding:
    if seen.refused:
        return problem(seen.refused)
    if not seen.run_dir.exists():
        return warning(f"{seen.run_dir} is not there: no engine of this user has started here")
    require_room(seen.run_dir, seen.namespace or "default")
    return ok(f"{seen.run_dir} is this user's, of mode 0700")


def run_file_system(seen: Evidence) -> Finding:
    if not seen.run_dir.exists():
        return not_applicable(f"{seen.run_dir} is not there")
    kind = file_system(seen.run_dir, seen.proc)
    if kind in NETWORK:
        return problem(f"{seen.run_dir} lies on a network file system ({kind})")
    return ok(f"{seen.run_dir} lies on {kind}")


def elsewhere(seen: Evidence) -> Finding:
    """Engines that could share with those of this run directory and do not look here."""
    if not seen.processes.enabled:
        return not_applicable(NO_PROCESS)
    pids_by_place = defaultdict(list)
    for process in seen.processes.enabled:
        if place := _other_place(process, seen):
            pids_by_place[place].append(str(process.pid))
    found = (
        f"engine process {', '.join(pids)} uses {place}" for place, pids in pids_by_place.items()
    )
    return judged(found, "no engine process of this user uses another place", warning)


def using_this(seen: Evidence) -> list[Process]:
    return [process for process in seen.processes.enabled if not _other_place(process, seen)]


def _other_place(process: Process, seen: Evidence) -> str:
    """Where it looks for others, if not here; empty as well if its settings do not say."""
    try:
        config = Config.of_place(process.environ)
    except ConfigError:
        return ""
    theirs = choose_run_directory(config.run_dir, process.environ)
    try:  # in a container it may have another name
        same = os.path.samefile(process.root / str(theirs).lstrip("/"), seen.run_dir)
    except OSError:
        same = theirs == seen.run_dir
    if not same:
        return f"run directory {theirs}"
    other = seen.namespace is not None and config.namespace != seen.namespace
    return f"namespace {config.namespace}" if other else ""


def users(seen: Evidence) -> Finding:
    """Other users' engines cannot be read; their run directories in /tmp have their uid."""
    others = [path for path in seen.tmp.glob("kvshm-*") if path.stat().st_uid != os.geteuid()]
    unread = seen.processes.unread
    rest = f"{unread} processes could not be looked at" if unread else "it could look at all others"
    text = f"this command runs as uid {os.geteuid()}, and sees engines of that user only; {rest}"
    names = (f"{path} belongs to uid {path.stat().st_uid}: {text}" for path in others)
    return judged(names, text, warning)


def leftovers(seen: Evidence) -> Finding:
    if seen.refused or not seen.run_dir.exists():
        return not_applicable("no run directory to look into")
    sockets = list_sockets(seen.run_dir, seen.namespace)
    coordinators = list_coordinators(seen.run_dir, seen.namespace)
    spaces = {s.name for s in seen.reading.namespaces} | {s.namespace for s in sockets}
    left = [path for space in sorted(spaces) for path in left_by_engines(seen.run_dir, space)]
    tables = [tables_socket(seen.run_dir, space) for space in coordinators]
    left += [path for path in tables if not is_served(path)]
    found = [f"{len(left)} left by dead processes, for example {left[0].name}"] if left else []
    return judged(found, "nothing is left of dead processes", warning)
