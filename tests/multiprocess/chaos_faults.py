"""The faults of chaos.py: what each kind of the schedule does to the node, and undoing it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import re
import resource
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvshm.coordinator.__main__ import EXIT_EXHAUSTED

from .chaos_drains import drain
from .chaos_node import (
    ENGINE,
    ENGINE_POINTS,
    KEEPER_POINTS,
    RANK_POINTS,
    ChaosNode,
    Member,
    Worker,
)
from .chaos_schedule import Fault
from .processes import is_stopped, remove_afterwards

SHM = Path("/dev/shm")
GREEDY = str(Path(__file__).with_name("chaos_greedy.py"))
NOBODY = 65534
"""The uid of another local user, in the eyes of root."""
CONNECTIONS = 1200
MANY_FILES = 500
FOREIGN_TIMES = 13
"""How much longer than other faults strange files last: a sweep comes every 30 seconds."""
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
POINTS = ENGINE_POINTS + RANK_POINTS
VISITS = (1, 2, 5, 20)
POINT_SECONDS = 1.0
"""How long who has stopped at a sync point stands still."""
RECOVERY_SECONDS = 5.0
"""How long after a fault a process need not be heard."""


class Faults:
    """Does what a schedule says.  ``undo`` is called often: it ends what has lasted long enough."""

    def __init__(self, node: ChaosNode) -> None:
        self._node = node
        self.done: Counter[str] = Counter()
        """How often each kind was done; with ``: refused`` what the kernel did not permit, with
        ``: no one`` what found no victim."""
        self._limits: dict[int, tuple[int, int]] = {}
        self._pending: list[tuple[float, Callable[[], None]]] = []
        self.spoilt: list[str] = []
        self.not_undone: list[str] = []
        self.drains: Counter[str] = Counter()
        """How drains have ended (chaos_drains.py)."""
        self._held: Counter[int] = Counter()
        """Processes that the schedule has stopped; others have stopped at a sync point."""

    def do(self, fault: Fault) -> None:
        method = getattr(self, "_" + fault.kind.replace("-", "_"))
        how = method(fault)
        self.done[f"{fault.kind}: {how}" if how else fault.kind] += 1

    def missing(self, kinds: Collection[str]) -> set[str]:
        """Which of these kinds no one has met yet.  What the kernel has refused was tried;
        ``engine-point`` wants somebody who has stopped and somebody who has died there,
        ``keeper-point`` one of the two, and ``drain`` an engine that imports again."""
        met = {kind.split(":")[0] for kind in self.done if not kind.endswith(": nobody")}
        for who, wanted in (("engine", 2), ("keeper", 1)):
            reached = [point for point in self._node.reached if point.startswith(who)]
            if len({point.split(":")[1] for point in reached}) < wanted:
                met.discard(f"{who}-point")
        if not self.drains["undone"]:
            met.discard("drain")
        return set(kinds) - met

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        self._pending.append((time.monotonic() + seconds, undo))

    def undo(self, *, everything: bool = False) -> bool:
        """Whether something is left to undo.  An error in one does not keep the others."""
        self._let_go_on_at_points()
        now = time.monotonic()
        due = [undo for at, undo in self._pending if everything or at <= now]
        self._pending = [(at, undo) for at, undo in self._pending if undo not in due]
        for undo in due:
            try:
                undo()
            except Exception as exc:
                self.not_undone.append(repr(exc))
        return bool(self._pending)

    def _let_go_on_at_points(self) -> None:
        """Let who has stopped at a sync point go on some seconds later: an importer that stops in
        a copy is a slow reader, an exporter a slow writer."""
        for kind, members in (("engine", self._node.engines), ("keeper", self._node.keepers)):
            for member in members:
                self._note_stop(kind, member, member.process.pid, member.process.signal)
        for rank in self._node.everybody:
            self._note_stop("engine", rank, rank.pid, rank.signal)

    def _note_stop(
        self, kind: str, who: Member | Worker, pid: int, send: Callable[[signal.Signals], None]
    ) -> None:
        if ":stop" not in who.point or self._held[pid]:
            return
        try:
            if not is_stopped(pid):
                return
        except OSError:  # it has ended
            return
        self._node.reached[f"{kind} {who.point}"] += 1
        who.point = ""
        for member in self._members():
            if pid in member.pids():
                member.excuse(POINT_SECONDS + RECOVERY_SECONDS)
        self._later(POINT_SECONDS, partial(send, signal.SIGCONT))

    # -- victims

    def _engine(self, fault: Fault) -> Member:
        engines = self._node.engines
        return engines[int(fault.victim * len(engines))]

    def _rank(self, fault: Fault) -> tuple[Member, Worker] | None:
        engine = self._engine(fault)
        running = [rank for rank in engine.ranks if rank.runs]
        return (engine, running[fault.dice % len(running)]) if running else None

    def _keeper(self, fault: Fault) -> Member | None:
        running = [keeper for keeper in self._node.keepers if keeper.process.status is None]
        return running[int(fault.victim * len(running))] if running else None

    # -- ends and stops

    def _engine_kill(self, fault: Fault) -> None:
        self._node.kill(self._engine(fault))

    def _engine_term(self, fault: Fault) -> None:
        self._node.kill(self._engine(fault), signal.SIGTERM)

    def _engine_point(self, fault: Fault) -> str | None:
        """Have another engine take an engine's place, which stops or dies at a sync point, or a
        rank of which does."""
        return self._point(self._node.engines, POINTS, fault)

    def _keeper_point(self, fault: Fault) -> str | None:
        return self._point(self._node.keepers, KEEPER_POINTS, fault)

    def _point(self, members: Sequence[Member], points: Sequence[str], fault: Fault) -> str | None:
        waiting = [m for m in members if not (m.point or m.successor_point)]
        if not waiting:
            return "nobody"  # all are on their way to one
        member, dice = waiting[int(fault.victim * len(waiting))], random.Random(fault.dice)
        action = dice.choice(("kill", "kill", "stop"))
        member.successor_point = f"{dice.choice(points)}:{action}:{dice.choice(VISITS)}"
        self._node.kill(member)
        return None

    def _engine_stop(self, fault: Fault) -> None:
        self._stop(self._engine(fault), fault)

    def _stop(self, member: Member, fault: Fault) -> None:
        member.excuse(fault.seconds + RECOVERY_SECONDS)
        self._hold(member.process.pid, member.process.signal, fault.seconds)

    def _hold(self, pid: int, send: Callable[[signal.Signals], None], seconds: float) -> None:
        self._held[pid] += 1
        send(signal.SIGSTOP)

        def go_on() -> None:
            self._held[pid] -= 1
            send(signal.SIGCONT)

        self._later(seconds, go_on)

    def _rank_kill(self, fault: Fault) -> str | None:
        if (found := self._rank(fault)) is None:
            return "nobody"
        engine, rank = found
        rank.doomed = True
        engine.excuse(RECOVERY_SECONDS)
        rank.signal(signal.SIGKILL)
        return None

    def _rank_stop(self, fault: Fault) -> str | None:
        if (found := self._rank(fault)) is None:
            return "nobody"
        engine, rank = found
        engine.excuse(fault.seconds + RECOVERY_SECONDS)
        self._hold(rank.pid, rank.signal, fault.seconds)
        return None

    def _coordinator_kill(
        self, fault: Fault, number: signal.Signals = signal.SIGKILL
    ) -> str | None:
        if (coordinator := self._node.coordinator) is None:
            return "nobody"
        self._node.coordinator_due = time.monotonic() + fault.seconds
        self._node.kill(coordinator, number)
        coordinator.process.signal(signal.SIGCONT)
        return None

    def _coordinator_term(self, fault: Fault) -> str | None:
        return self._coordinator_kill(fault, signal.SIGTERM)

    def _coordinator_stop(self, fault: Fault) -> str | None:
        if (coordinator := self._node.coordinator) is None:
            return "nobody"
        self._stop(coordinator, fault)
        return None

    def _keeper_kill(self, fault: Fault, number: signal.Signals = signal.SIGKILL) -> str | None:
        if (keeper := self._keeper(fault)) is None:
            return "nobody"
        keeper.successor_at = time.monotonic() + fault.seconds
        self._node.kill(keeper, number)
        return None

    def _keeper_term(self, fault: Fault) -> str | None:
        return self._keeper_kill(fault, signal.SIGTERM)

    def _keeper_stop(self, fault: Fault) -> str | None:
        if (keeper := self._keeper(fault)) is None:
            return "nobody"
        self._stop(keeper, fault)
        return None

    def _drain(self, fault: Fault) -> None:
        self._take_steps(drain(self._node, self._engine(fault), fault, self.drains))

    def _take_steps(self, steps: Iterator[float]) -> None:
        """Take the next step of something, and the others after the pauses that they yield."""
        if (pause := next(steps, None)) is not None:
            self._later(pause, partial(self._take_steps, steps))

    # -- memory

    def _files(self) -> Iterator[Path]:
        """Everything with bytes of kvshm that this user can name: segments, files of the run
        directory, descriptors of the processes."""
        node = self._node.node
        yield from sorted(SHM.glob(f"kvshm.*{node.namespace}*"))
        yield from sorted(node.run_dir.iterdir())
        for pid in (pid for member in self._members() for pid in member.pids()):
            for fd in _descriptors(pid):
                if re.search(r"/memfd:|/dev/shm/kvshm", _link(fd)):
                    yield fd

    def _owners(self, path: Path) -> list[Member]:
        """Whose memory it is, by its name; where that says nothing, perhaps everybody's."""
        name = _link(path) or path.name  # a peer's table is among one's own descriptors
        named = [m for m in self._members() if f"-{m.process.pid}." in name]
        return named or self._members()

    def _members(self) -> list[Member]:
        node = self._node
        coordinator = [node.coordinator] if node.coordinator else []
        return [*node.engines, *node.keepers, *coordinator]

    def _truncate(self, fault: Fault) -> str | None:
        return self._spoil(fault, _cut)

    def _punch(self, fault: Fault) -> str | None:
        return self._spoil(fault, _empty)

    def _spoil(self, fault: Fault, how: Callable[[int, int], None]) -> str | None:
        files = [path for path in self._files() if _is_regular(path)]
        if not files:
            return "nobody"
        path = files[int(fault.victim * len(files))]
        owners = self._owners(path)
        try:
            follow = 0 if path.parts[1] == "proc" else os.O_NOFOLLOW
            fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | follow)
        except OSError:
            return "refused"
        try:
            how(fd, fault.dice)
        except OSError:
            return "refused"
        finally:
            os.close(fd)
        self.spoilt.append(f"{path} of {', '.join(owner.name for owner in owners)}")
        for owner in owners:
            owner.damaged = True
        return None

    def _sparse(self, fault: Fault) -> None:
        node, processes = self._node.node, self._node.processes
        environ = {"KVSHM_RUN_DIR": str(node.run_dir), "KVSHM_NAMESPACE": node.namespace}
        joiner = processes.start("confused", sys.executable, ENGINE, "--confused", environ=environ)

        def finish() -> None:
            """Not before it has joined: what is killed while it makes a segment leaves that for
            a minute."""
            if joiner.status is None and not joiner.out.matching(lambda line: "sparse" in line):
                return self._later(1.0, finish)
            return processes.forget(joiner)

        self._later(fault.seconds, finish)

    # -- descriptors

    def _connections(self, fault: Fault) -> None:
        node, processes = self._node.node, self._node.processes
        argv = (GREEDY, str(node.run_dir), str(CONNECTIONS), str(fault.seconds))
        greedy = processes.start("greedy", sys.executable, *argv)
        for member in self._members():
            member.excuse(fault.seconds + RECOVERY_SECONDS)
        if self._node.coordinator is not None:
            self._node.coordinator.doomed.add(EXIT_EXHAUSTED)
        self._later(fault.seconds + RECOVERY_SECONDS, lambda: processes.forget(greedy))

    def _descriptors(self, fault: Fault) -> str | None:
        """Leave a process of an engine or keeper a few descriptors more than it has in use.
        Not the coordinator: libzmq aborts it if a connection comes before it has noticed."""
        engines_and_keepers = [*self._node.engines, *self._node.keepers]
        members = [member for member in engines_and_keepers if member.has_begun]
        if not members:
            return "nobody"
        member = members[int(fault.victim * len(members))]
        pids = member.pids()
        pid = pids[fault.dice % len(pids)]
        try:
            limit = max(int(fd.name) for fd in _descriptors(pid)) + 1 + fault.dice // 8 % 6
            before = self._limits.setdefault(pid, resource.prlimit(pid, resource.RLIMIT_NOFILE))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(limit, before[1]), before[1]))
        except (OSError, ValueError):
            return "nobody"
        member.excuse(fault.seconds + RECOVERY_SECONDS)
        self._later(fault.seconds, partial(_set_limit, pid, before))
        return None

    # -- names

    def _foreign(self, fault: Fault) -> str:
        """Put something strange where names of kvshm are looked for."""
        dice = fault.dice
        where = self._place(dice)
        kinds = ("fifo", "empty", "garbage", "directory", "link", "dangling", "leased", "many")
        kind = kinds[dice // 64 % len(kinds)]
        other = os.geteuid() == 0 and where.parent == SHM and bool(dice // 1024 % 2)
        made = [where.with_name(f"{where.name[:-4]}{i:04x}") for i in range(MANY_FILES)]
        for path in made if kind == "many" else [where]:
            self._later(FOREIGN_TIMES * fault.seconds, partial(_remove, path))
            self._make(path, kind, NOBODY if other else None)
        return f"{kind} of {'another' if other else 'the own'} uid"

    def _place(self, dice: int) -> Path:
        namespace, run_dir = self._node.node.namespace, self._node.node.run_dir
        number = f"{dice:016x}"
        names = [SHM / f"kvshm.{namespace}.{kind}.x.{number}" for kind in ("slots", "index")]
        names += [SHM / f"kvshm.{namespace}.leases.x.{number}", SHM / f"kvshm.{namespace}.{number}"]
        names += [run_dir / f"{namespace}.peers.{number}", run_dir / f"{namespace}.x.{number}"]
        names += [run_dir / f"{namespace}.rank.{4_000_000 + dice % 100_000}.0.sock"]
        return names[dice % 64 % len(names)]

    def _make(self, path: Path, kind: str, owner: int | None) -> None:
        remove_afterwards(path)
        if kind == "fifo":
            os.mkfifo(path, 0o666)
        elif kind == "directory":
            path.mkdir()
        elif kind in ("link", "dangling"):
            path.symlink_to("/dev/null" if kind == "link" else "/nowhere")
        else:
            path.write_bytes(os.urandom(10_000) if kind == "garbage" else b"")
        if owner is not None:
            os.chown(path, owner, owner, follow_symlinks=False)
        if kind == "leased":
            self._lease(path)

    def _lease(self, path: Path) -> None:
        """Whoever opens the file waits until the lease is given back, or 45 seconds."""
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        self._later(3.0, partial(os.close, fd))


def _descriptors(pid: int) -> list[Path]:
    try:
        return sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda path: int(path.name))
    except OSError:
        return []


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _is_regular(path: Path) -> bool:
    """Whether there is a file of bytes; a link of the file system leads out of the node."""
    try:
        found = path.stat() if path.parts[1] == "proc" else path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode)


def _cut(fd: int, dice: int) -> None:
    size = os.fstat(fd).st_size
    os.ftruncate(fd, (0, 4096, 8192, size // 2, size + 4096, 2 * size)[dice % 6])


def _empty(fd: int, dice: int) -> None:
    size = os.fstat(fd).st_size
    begin = (0, 4096, 8192)[dice % 3]
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(fd, _PUNCH_HOLE, begin, max(4096, size - begin)):
        raise OSError(ctypes.get_errno(), "fallocate")


def _set_limit(pid: int, limit: tuple[int, int]) -> None:
    with suppress(OSError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
