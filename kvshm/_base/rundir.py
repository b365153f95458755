"""The run directory: where a user's sockets and lock files lie, and their names.  It must be a real
directory of mode 0700 that belongs to this user."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvshm.errors import RunDirectoryError

from .ids import Epoch

SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket (Linux, without the closing zero)."""

MAX_FOUND = 4096
"""Sockets or lists of peers that a search returns at most: more than any node has."""

_SOCKET = re.compile(
    r"(?P<namespace>[^.]+)\.(engine\.(?P<epoch>[0-9a-f]{16})|rank\.[0-9a-z]+\.[0-9]+|store)\.sock"
)
_TABLES_SOCKET = re.compile(r"(?P<namespace>[^.]+)\.tables\.sock")
_PEERS_FILE = re.compile(r"(?P<namespace>[^.]+)\.peers\.(?P<epoch>[0-9a-f]{16})(\.new)?")

_BOARD = re.compile(r"(?P<namespace>[^.]+)\.board\.[0-9a-f]+")


def choose_run_directory(given: str, environ: Mapping[str, str]) -> Path:
    """Return where the run directory is, creating nothing: ``given`` (KVSHM_RUN_DIR), else
    $XDG_RUNTIME_DIR/kvshm, else /tmp/kvshm-<uid>, or one in $HOME if that name is another
    user's."""
    if given:
        return Path(given)
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) / "kvshm" if runtime.startswith("/") else _per_user(environ)


def open_run_directory(given: str, environ: Mapping[str, str]) -> Path:
    """Return the run directory, created with mode 0700 if missing.  Raises RunDirectoryError."""
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
            "0700 where this user may write, or set KVSHM_RUN_DIR to a directory of your own"
        ) from exc
    return directory


def _per_user(environ: Mapping[str, str]) -> Path:
    """Return a name that is the same for all of this user's processes, one in $HOME first."""
    in_tmp, home = Path(f"/tmp/kvshm-{os.geteuid()}"), environ.get("HOME", "")
    if not home.startswith("/"):
        return in_tmp
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]  # machines may share a home
    at_home = Path(home) / f".kvshm-{boot}"
    return at_home if _is_own(at_home) or _is_own(in_tmp) is False else in_tmp


def _is_own(path: Path) -> bool | None:
    """Whether ``path`` belongs to this user; None if it does not exist or cannot be read."""
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return None


def _check(directory: Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise RunDirectoryError(
            f"run directory {directory} is a link; set KVSHM_RUN_DIR to the place it leads to"
        )
    if found.st_uid != os.geteuid():
        raise RunDirectoryError(
            f"run directory {directory} belongs to uid {found.st_uid}, this process runs as uid "
            f"{os.geteuid()}; run engines, coordinator and commands as one user, or set "
            "KVSHM_RUN_DIR to a directory of your own"
        )
    mode = stat.S_IMODE(found.st_mode)
    # Set-group-id is inherited from the directory above (Kubernetes: fsGroup) and harmless.
    if mode & ~stat.S_ISGID != 0o700:
        raise RunDirectoryError(
            f"run directory {directory} has mode {mode:04o}, wanted 0700; run chmod 700 {directory}"
        )


def command_endpoint(run_dir: Path, namespace: str) -> str:
    return f"ipc://{_socket(run_dir, f'{namespace}.commands')}"


def event_endpoint(run_dir: Path, namespace: str) -> str:
    return f"ipc://{_socket(run_dir, f'{namespace}.events')}"


def lock_path(run_dir: Path, namespace: str) -> Path:
    return run_dir / f"{namespace}.lock"


def tables_socket(run_dir: Path, namespace: str) -> Path:
    """Socket at which the coordinator hands out the slot tables of its roster."""
    return _socket(run_dir, f"{namespace}.tables.sock")


def engine_socket(run_dir: Path, namespace: str, epoch: int) -> Path:
    """Socket at which an engine hands out its slot table and replica, in one epoch."""
    return _socket(run_dir, f"{namespace}.engine.{epoch:016x}.sock")


def store_socket(run_dir: Path, namespace: str) -> Path:
    """Socket of the keeper that is the node's client of a store (kvshm/_engine/store_asks.py)."""
    return _socket(run_dir, f"{namespace}.store.sock")


def rank_socket(run_dir: Path, namespace: str, process: str, rank: int) -> Path:
    """Where a worker process hands out its KV memory.  ``process``: unique, as a pid is not."""
    return _socket(run_dir, f"{namespace}.rank.{process}.{rank}.sock")


def peers_file(run_dir: Path, namespace: str, epoch: int) -> Path:
    """File in which an engine lists its peers for its own ranks (kvshm/_node/peer_list.py)."""
    return run_dir / f"{namespace}.peers.{epoch:016x}"


def board_file(run_dir: Path, namespace: str, name: str) -> Path:
    """File in which ranks of several engines show digests (kvshm/_node/board.py).  ``name``: hex
    digits."""
    return run_dir / f"{namespace}.board.{name}"


def require_room(run_dir: Path, namespace: str) -> None:
    """Check that the paths of all sockets of an engine fit.  Raises RunDirectoryError."""
    engine_socket(run_dir, namespace, epoch=0)  # the longest name


def start_command(run_dir: Path, namespace: str) -> str:
    return f"kvshm-coordinator --run-dir {shlex.quote(str(run_dir))} --namespace {namespace}"


def list_coordinators(run_dir: Path, namespace: str | None) -> list[str]:
    """Return the namespaces with a coordinator's socket; only ``namespace`` unless None."""
    return [found.namespace for found in _find(run_dir, _TABLES_SOCKET, namespace)]


class FoundFile(NamedTuple):
    """A socket or a list of peers in the run directory; its process may have ended."""

    namespace: str
    epoch: Epoch | None
    """The engine's epoch; None if the name has none, as that of a rank's socket."""
    path: Path


def list_sockets(run_dir: Path, namespace: str | None) -> list[FoundFile]:
    return _find(run_dir, _SOCKET, namespace)


def list_peers_files(run_dir: Path, namespace: str) -> list[FoundFile]:
    """Return the namespace's lists of peers, half-written ones included."""
    return _find(run_dir, _PEERS_FILE, namespace)


def list_boards(run_dir: Path, namespace: str) -> list[Path]:
    return [found.path for found in _find(run_dir, _BOARD, namespace)]


def _find(run_dir: Path, pattern: re.Pattern[str], namespace: str | None) -> list[FoundFile]:
    """The entries whose names match, sorted, at most MAX_FOUND.  Reads only the names."""
    matches = filter(None, map(pattern.fullmatch, os.listdir(run_dir)))
    ours = (match for match in matches if namespace in (None, match["namespace"]))
    found = []
    for match in sorted(islice(ours, MAX_FOUND), key=lambda match: match.string):
        epoch = match.groupdict().get("epoch")
        number = None if epoch is None else Epoch(int(epoch, 16))
        found.append(FoundFile(match["namespace"], number, run_dir / match.string))
    return found


def path_too_long(path: str | Path) -> str:
    """The error message, with a remedy, if ``path`` is too long for a socket; otherwise ""."""
    if (length := len(os.fsencode(path))) <= SOCKET_PATH_BYTES:
        return ""
    return (
        f"socket path {path} has {length} bytes, at most {SOCKET_PATH_BYTES} are possible; "
        "set KVSHM_RUN_DIR to a shorter directory"
    )


def _socket(run_dir: Path, name: str) -> Path:
    path = run_dir / name
    if error := path_too_long(path):
        raise RunDirectoryError(error)
    return path
