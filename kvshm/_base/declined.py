"""Records of engines that share nothing, in the run directory: small files, each locked while its
process lives.  Nothing that goes wrong with one is an error of the engine."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path

import msgspec

from kvshm.errors import KvshmError

from .forks import guard_forks
from .rundir import MAX_FOUND, open_run_directory

MAX_BYTES = 8192
TEXT_CHARACTERS = 500
MAKING_SECONDS = 5.0
"""How long a record may take to be made; until then it may not be locked yet."""
_NAME = re.compile(r"(?P<namespace>[^.]+)\.declined\.[0-9a-f]{16}(\.new)?")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Declined(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that shares nothing, and why."""

    engine: str
    pid: int
    model: str
    reason: str
    on_purpose: bool
    """Whether a setting says so (KVSHM_SHARE=none)."""
    since: float
    pid_namespace: int = 0
    """The engine's, by its number; 0 if that is not known."""

    @property
    def is_here(self) -> bool:
        """Whether the engine runs in this process's container."""
        return self.pid_namespace == _pid_namespace() != 0


# -- the engine's own records


class _Records:
    """The records of this process: at most one for each engine in it.  Any thread."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Path, int]] = {}
        """Path and descriptor of each, by the engine's name."""
        self._drops_at_exit = False
        guard_forks(self)

    def hold(self, engine: str, path: Path, fd: int) -> None:
        self.drop(engine)
        self._held[engine] = path, fd
        if not self._drops_at_exit:  # atexit would not run in children of multiprocessing
            Finalize(None, self._drop_all, exitpriority=0)
            self._drops_at_exit = True

    def _drop_all(self) -> None:
        for engine in list(self._held):
            self.drop(engine)

    def drop(self, engine: str) -> None:
        held = self._held.pop(engine, None)
        if held is not None:
            with suppress(OSError):
                held[0].unlink()
            os.close(held[1])

    def forget_in_child(self) -> None:
        """The parent's locks would outlive the parent in the child."""
        held, self._held, self._drops_at_exit = self._held, {}, False
        for _, fd in held.values():
            os.close(fd)


_records = _Records()


def record_declined(
    run_dir: str, namespace: str, record: Declined, environ: Mapping[str, str] | None = None
) -> None:
    """Leave a record, in place of an earlier one of that engine, until this process ends or
    ``forget_declined``.  ``run_dir``: as the setting says.  Never raises because of files."""
    with suppress(KvshmError, OSError):
        folder = open_run_directory(run_dir, os.environ if environ is None else environ)
        path = folder / f"{namespace}.declined.{secrets.token_hex(8)}"
        fresh = path.with_name(f"{path.name}.new")
        fd = os.open(fresh, _WRITE, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, msgspec.json.encode(_plain(record)))
            fresh.rename(path)  # locked before anybody can see it under this name
        except BaseException:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            raise
        _records.hold(record.engine, path, fd)


def forget_declined(engine: str) -> None:
    """That engine shares now, or has ended.  Idempotent."""
    _records.drop(engine)


def declined_now(engine: str, model: str, reason: str, *, on_purpose: bool) -> Declined:
    return Declined(
        engine=engine,
        pid=os.getpid(),
        model=model,
        reason=reason,
        on_purpose=on_purpose,
        since=time.time(),
        pid_namespace=_pid_namespace(),
    )


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _plain(record: Declined) -> Declined:
    """With texts of one line that any terminal and any encoding can show."""
    texts = {
        name: "".join(
            c if c.isprintable() else " " for c in getattr(record, name)[:TEXT_CHARACTERS]
        )
        for name in ("engine", "model", "reason")
    }
    return msgspec.structs.replace(record, **texts)


# -- reading


def list_declined(run_dir: Path, namespace: str | None) -> list[tuple[str, Declined]]:
    """Return the namespace and record of each engine that lives and shares nothing.  ``namespace``:
    only of this one (None: all).  Raises OSError if there is no such directory."""
    found = []
    for space, path in _files(run_dir, namespace):
        with suppress(OSError, msgspec.DecodeError, ValueError):
            if (record := _read(path)) is not None:
                found.append((space, record))
    return found


def left_declined(run_dir: Path, namespace: str) -> list[Path]:
    left = []
    for _, path in _files(run_dir, namespace):
        with suppress(OSError):
            begun = path.suffix == ".new" and time.time() - path.stat().st_mtime < MAKING_SECONDS
            if not begun and _read_if(path, living=False) is not None:
                left.append(path)
    return left


def _files(run_dir: Path, namespace: str | None) -> Iterator[tuple[str, Path]]:
    matches = filter(None, map(_NAME.fullmatch, sorted(os.listdir(run_dir))))
    ours = (match for match in matches if namespace in (None, match["namespace"]))
    for match in islice(ours, MAX_FOUND):
        yield match["namespace"], run_dir / match.string


def _read(path: Path) -> Declined | None:
    if path.suffix == ".new" or (text := _read_if(path, living=True)) is None:
        return None
    return _plain(msgspec.json.decode(text, type=Declined))


def _read_if(path: Path, *, living: bool) -> bytes | None:
    """The file's contents if its process is ``living``, or not; else None.  Raises OSError."""
    fd = os.open(path, _READ)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return os.read(fd, MAX_BYTES) if _is_held(fd) is living else None
    finally:
        os.close(fd)


def _is_held(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
