"""The run directory: where a user's sockets and lock files lie, and what they are called.

Engines and coordinator find each other through it, and its mode is what keeps other users
out (libzmq creates socket files that everybody may connect to), so it is only used when it
is a real directory of mode 0700 that belongs to this user.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from .errors import RunDirectoryError

SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket (Linux, without the closing zero)."""

MAX_LISTED = 1000
"""Files of one kind that are looked at in one turn; those left over have the next one, when what
was nobody's among these is gone."""

_RANK_SOCKET = r"\.rank\.(?P<pid>[0-9]+)\.[0-9]+\.sock"
_PEERS_FILE = r"\.peers\.(?P<epoch>[0-9a-f]{16})(\.new)?"


def choose_run_directory(given: str, environ: Mapping[str, str]) -> Path:
    """Return where the run directory is; looks at no file.

    ``given`` is KVSHM_RUN_DIR; if empty it is $XDG_RUNTIME_DIR/kvshm, and without that (or
    where it is relative, which its specification calls invalid) /tmp/kvshm-<uid>.
    """
    if given:
        return Path(given)
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) / "kvshm" if runtime.startswith("/") else _per_user()


def open_run_directory(given: str, environ: Mapping[str, str]) -> Path:
    """Return the run directory, created with mode 0700 if it is missing.

    Raises RunDirectoryError, naming path and remedy, if it cannot be trusted or made.
    """
    directory = choose_run_directory(given, environ)
    if not directory.is_absolute():
        raise RunDirectoryError(
            f"run directory {directory} is a relative path, which means another place to each "
            "process; give an absolute one"
        )
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        _check(directory, os.lstat(directory))
    except OSError as exc:
        raise RunDirectoryError(
            f"run directory {directory} cannot be used: {exc.strerror}; create it with mode "
            "0700, or set KVSHM_RUN_DIR to a directory of your own"
        ) from exc
    return directory


def _per_user() -> Path:
    return Path(f"/tmp/kvshm-{os.geteuid()}")


def _check(directory: Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise RunDirectoryError(
            f"run directory {directory} is a link; set KVSHM_RUN_DIR to the place it leads to"
        )
    if found.st_uid != os.geteuid():
        raise RunDirectoryError(
            f"run directory {directory} belongs to uid {found.st_uid}, this process runs as uid "
            f"{os.geteuid()}; set KVSHM_RUN_DIR to a directory of your own"
        )
    mode = stat.S_IMODE(found.st_mode)
    # Set-group-id is inherited from the directory above (Kubernetes: fsGroup) and harmless.
    if mode & ~stat.S_ISGID != 0o700:
        raise RunDirectoryError(
            f"run directory {directory} has mode {mode:04o}, wanted 0700; run chmod 700 {directory}"
        )


def command_endpoint(run_dir: Path, namespace: str) -> str:
    """Address of the coordinator's ROUTER: joins, leaves, events and heartbeats go there."""
    return f"ipc://{_socket(run_dir, f'{namespace}.commands')}"


def event_endpoint(run_dir: Path, namespace: str) -> str:
    """Address of the coordinator's PUB: broadcasts come from there."""
    return f"ipc://{_socket(run_dir, f'{namespace}.events')}"


def lock_path(run_dir: Path, namespace: str) -> Path:
    """File whose flock makes a coordinator the only one of its namespace."""
    return run_dir / f"{namespace}.lock"


def rank_socket(run_dir: Path, namespace: str, pid: int, rank: int) -> Path:
    """Socket at which a worker process hands out the file descriptors of its KV memory, for
    one epoch after another."""
    return _socket(run_dir, f"{namespace}.rank.{pid}.{rank}.sock")


def peers_file(run_dir: Path, namespace: str, epoch: int) -> Path:
    """File in which an engine names its peers to its own ranks (kvshm/peer_list.py)."""
    return run_dir / f"{namespace}.peers.{epoch:016x}"


def list_peers_files(run_dir: Path, namespace: str) -> list[tuple[int, Path]]:
    """Return (epoch, path) of the namespace's lists of peers that lie there, half-written ones
    included; at most MAX_LISTED."""
    found = _find(run_dir, re.compile(re.escape(namespace) + _PEERS_FILE), sockets=False)
    return [(int(match["epoch"], 16), run_dir / match.string) for match in found]


def require_room(run_dir: Path, namespace: str) -> None:
    """Check that every socket of an engine has room below ``run_dir``.  Raises
    RunDirectoryError: better before an engine has begun to share than rank by rank."""
    rank_socket(run_dir, namespace, pid=9_999_999, rank=99)  # the longest name there is


def start_command(run_dir: Path, namespace: str) -> str:
    """The shell command that starts the coordinator of this place."""
    return f"kvshm-coordinator --run-dir {shlex.quote(str(run_dir))} --namespace {namespace}"


def list_rank_sockets(run_dir: Path, namespace: str) -> list[tuple[int, Path]]:
    """Return (pid, path) of the namespace's rank sockets that lie there, alive or not; at most
    MAX_LISTED."""
    found = _find(run_dir, re.compile(re.escape(namespace) + _RANK_SOCKET), sockets=True)
    return [(int(match["pid"]), run_dir / match.string) for match in found]


def _find(run_dir: Path, names: re.Pattern[str], *, sockets: bool) -> list[re.Match[str]]:
    """The sockets, or else the files, whose names fit, in order.  Nothing is opened, and other
    files cost a comparison each: hundreds of thousands are looked through in less than a second."""
    found: list[re.Match[str]] = []
    with os.scandir(run_dir) as entries:
        for entry in entries:  # the kernel has told their kinds with the names
            if entry.is_file(follow_symlinks=False) is not sockets and (
                match := names.fullmatch(entry.name)
            ):
                if not sockets or _is_socket(run_dir / entry.name):
                    found.append(match)
                if len(found) >= MAX_LISTED:
                    break
    return sorted(found, key=lambda match: match.string)


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _socket(run_dir: Path, name: str) -> Path:
    path = run_dir / name
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES:
        raise RunDirectoryError(
            f"socket path {path} has {length} bytes, at most {SOCKET_PATH_BYTES} are possible; "
            "set KVSHM_RUN_DIR to a shorter directory"
        )
    return path
