"""A GpuPeer in namespaces of its own, as a container would have them.

Started as the program of a GpuPeer with the environment GPU_INSIDE, JSON of a ``Place``.  Makes the
namespaces by system calls, since the command unshare(1) may be missing, and takes the process
number that was asked for by forking until it comes.  Then it starts itself again, inside, to answer
calls.  With the argument --try it only says whether this can be done here.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NEW_MOUNT, NEW_USER, NEW_PID = 0x20000, 0x10000000, 0x20000000
OTHERS = {"cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "net": 0x40000000}
"""Namespaces that this process itself enters when it makes them."""
PRIVATE_BELOW = 0x4000 | 0x40000
DEATH_SIGNAL = 1
MOST_FORKS = 5000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Place:
    """Where a process runs.  ``own``: "pid", "shm" or of ``OTHERS``; what is not named is its
    starter's.  Users and files are always its starter's, except /dev/shm and /proc."""

    own: tuple[str, ...] = ()
    pid: int = 0
    """Its number in its PID namespace; 0: whatever comes."""
    join: int = 0
    """Use the PID namespace that this process has made; its number as the starter sees it."""

    def variables(self) -> dict[str, str]:
        return {"GPU_INSIDE": json.dumps(asdict(self))}


def main() -> None:
    place = Place(**json.loads(os.environ["GPU_INSIDE"]))
    try:
        _enter(place)
        if "pid" in place.own or place.join:
            _be_starter(place)
        _run()
    except OSError as exc:
        sys.exit(f"{exc}")


def _enter(place: Place) -> None:
    changes_pid = "pid" in place.own or bool(place.join)
    flags = NEW_PID if "pid" in place.own else 0
    for kind in OTHERS.keys() & place.own:
        flags |= OTHERS[kind]
    flags |= NEW_MOUNT if changes_pid or "shm" in place.own else 0
    if place.join:
        descriptor = os.open(f"/proc/{place.join}/ns/pid_for_children", os.O_RDONLY)
        _checked("setns", _libc.setns(descriptor, NEW_PID))
        os.close(descriptor)
    if flags and os.geteuid() != 0:
        _become_root_of_own_user_namespace()
    if flags:
        _checked("unshare", _libc.unshare(flags))
    if flags & NEW_MOUNT:
        _mount(None, "/", None, PRIVATE_BELOW)
    if "shm" in place.own:
        _mount("tmpfs", "/dev/shm", "tmpfs")


def _become_root_of_own_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    _checked("unshare (user)", _libc.unshare(NEW_USER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _be_starter(place: Place) -> None:
    """Stay outside until what runs inside has ended; returns only inside, with the number asked
    for."""
    if child := os.fork():
        sys.exit(_status_of(child))
    _libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
    _mount("proc", "/proc", "proc")
    for _ in range(MOST_FORKS):
        # What this namespace's first process leaves behind ends with it.
        child = os.fork()
        if not child:
            if place.pid in (0, os.getpid()):
                _libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
                return
            os._exit(123)
        if (status := _status_of(child)) != 123:
            sys.exit(status)
    sys.exit(f"no process got the number {place.pid}")


def _status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _mount(source: str | None, target: str, kind: str | None, flags: int = 0) -> None:
    packed = [text.encode() if text else None for text in (source, target, kind)]
    _checked(f"mount {target}", _libc.mount(*packed, ctypes.c_ulong(flags), None))


def _checked(call: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _run() -> None:
    if "--try" in sys.argv:
        return
    variables = {**os.environ, "GPU_INSIDE": ""}
    os.execve(sys.executable, [sys.executable, __file__, *sys.argv[1:]], variables)


def inside() -> Any:
    """The class whose methods are called inside; imports come after the namespaces."""
    from gpu_peer import Cache

    class Inside(Cache):
        def where(self) -> dict[str, Any]:
            """Its number, and what tells its namespaces from others."""
            spaces = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", *OTHERS)}
            return {"number": os.getpid(), **spaces, "shm": os.stat("/dev/shm").st_dev}

    return Inside


if __name__ == "__main__":
    if os.environ.get("GPU_INSIDE"):
        main()
    else:
        from gpu_peer import answer_calls

        answer_calls(inside())
