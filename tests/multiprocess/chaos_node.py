"""Who runs in a run of chaos.py, and who of them has ended by itself."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from kvshm._base.rundir import command_endpoint
from kvshm._base.syncpoints import VARIABLE
from kvshm._node.protocol import Heartbeat, encode
from kvshm.errors import SegmentNotFound

from .processes import Managed, Node, Processes, has_ended

ENGINE = str(Path(__file__).with_name("chaos_engine.py"))
ENGINE_POINTS = (
    "PUBLISH_FILLED",
    "PUBLISHED",
    "LEASE_LOADED",
    "LEASED",
    "RETRACTED",
    "FORCED",
    "LOAD_PLANNED",
    "BEAT",
)
RANK_POINTS = ("COPY_BEGINS", "COPIED", "RELEASED")
"""The sync points that an engine's own process reaches, and those that a rank's reaches."""
KEEPER_POINTS = (
    "PUBLISH_FILLED",
    "PUBLISHED",
    "RETRACTED",
    "LOAD_PLANNED",
    "BEAT",
    *RANK_POINTS,
)
"""Those that a keeper reaches, which takes no leases, and whose ranks are threads."""
KEEPER_BLOCKS = (200, 24, 6)
"""For how many blocks keepers have memory: for more than there are, for some, and for so few that
one block drives another out all the time."""
BLOCK_BYTES = 2 * 65536
"""Of one rank (chaos_engine.py)."""
RANK_ENDED = 3
"""Exit status of an engine whose rank has ended (chaos_engine.py)."""
NOT_SERVING = 1
"""Exit status of a keeper that cannot go on, and says why."""
SILENT_SECONDS = 30.0
"""A process that runs, and of which nothing has been heard for so long, hangs."""
UNANSWERED_SECONDS = 10.0
"""The same for the coordinator, which is asked each second."""
SAID_SECONDS = 0.3
LAST_LINES = 6
COUNTED = ("requests", "loads", "imported", "from_keepers", "wrong", "unshared", "contained")
"""What is added up over all engines (chaos_engine.py)."""
_PR_SET_CHILD_SUBREAPER = 36


class Quiet(Processes):
    """Processes whose lines no one wants to see at the end: there are thousands."""

    def __init__(self) -> None:
        super().__init__()
        self._before = _children()  # the reaper

    def children(self) -> list[str]:
        """The pids of all children of this process that have come since."""
        return [pid for pid in _children() if pid not in self._before]

    def forget(self, process: Managed) -> None:
        """Let go of what is kept of one, which has ended or is to end now.  Its last lines are
        not waited for: a child of it that stands still keeps its pipes open."""
        if process.status is None:
            process.signal(signal.SIGKILL)
        with suppress(OSError):
            process.end_input()
        while process.status is None:
            time.sleep(0.01)
        self._all.remove(process)

    def reap(self) -> None:
        for process in list(self._all):
            self.forget(process)


def _children() -> list[str]:
    lists = Path("/proc/self/task").glob("*/children")
    return [pid for children in lists for pid in children.read_text().split()]


def dies_at(point: str, points: tuple[str, ...]) -> bool:
    """Whether a process dies at ``point``, which is one of these."""
    return point.split(":")[0] in points and ":kill" in point


@dataclass
class Worker:
    """A rank's process, a child of an engine.  It is held by a pidfd, which stays true."""

    pid: int
    pidfd: int
    doomed: bool = False
    point: str = ""

    def signal(self, number: signal.Signals) -> None:
        with suppress(OSError):  # it has ended, and may be buried
            signal.pidfd_send_signal(self.pidfd, number)

    @property
    def runs(self) -> bool:
        return self.pidfd >= 0 and not has_ended(self.pidfd)

    @property
    def is_waited_for(self) -> bool:
        """Whether its parent has yet to take its status."""
        try:
            signal.pidfd_send_signal(self.pidfd, 0)
        except ProcessLookupError:
            return False
        return True


@dataclass
class Member:
    """The coordinator, a keeper, or an engine with its ranks."""

    process: Managed
    name: str
    doomed: set[int] = field(default_factory=set)
    ranks: list[Worker] = field(default_factory=list)
    point: str = ""
    successor_point: str = ""
    successor_at: float = 0.0
    """Another one takes a keeper's place no sooner."""
    was_ended: bool = False
    """Whether the run has ended it: then it has not come to its sync point, or no one can tell."""
    damaged: bool = False
    """Whether memory of it has been cut or emptied: its invariants say nothing any more."""
    excused_until: float = 0.0
    """It cannot be heard before: stopped, or out of descriptors."""
    heard_at: float = field(default_factory=time.monotonic)
    said: dict[str, Any] = field(default_factory=dict)
    lines: int = 0
    ended_at: float = 0.0
    pauses: str = ""

    def excuse(self, seconds: float) -> None:
        self.excused_until = max(self.excused_until, time.monotonic() + seconds)

    @property
    def silence(self) -> float:
        """Seconds for which nothing was heard of it without an excuse."""
        return time.monotonic() - max(self.heard_at, self.excused_until)

    @property
    def has_said_all(self) -> bool:
        self.ended_at = self.ended_at or time.monotonic()
        return time.monotonic() - self.ended_at > SAID_SECONDS

    @property
    def has_begun(self) -> bool:
        begun = "event=serving" in str(self.process.err) or "for blocks of" in str(self.process.out)
        return begun or "requests" in self.said

    def pids(self) -> list[int]:
        return [self.process.pid, *(rank.pid for rank in self.ranks if rank.runs)]

    def last_lines(self) -> list[str]:
        return str(self.process.err).splitlines()[-LAST_LINES:]

    def listen(self) -> None:
        """Take in what it has said since."""
        for line in self.process.out.matching(lambda _: True, self.lines):
            self.lines += 1
            self.heard_at = time.monotonic()
            with suppress(ValueError):
                self.said.update(json.loads(line))
        if not self.ranks:
            for pid in self.said.get("ranks", ()):
                with suppress(ProcessLookupError):
                    doomed = dies_at(self.point, RANK_POINTS)
                    self.ranks.append(Worker(pid, os.pidfd_open(pid), doomed, self.point))

    def watch_pauses(self) -> None:
        """Hear a keeper, which says nothing: its main thread pauses often, if it is not to end."""
        with suppress(OSError):  # it has ended
            pid = self.process.pid
            status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
            pauses = re.findall(r"^voluntary_ctxt_switches.*", status, re.M)[0]
            if pauses != self.pauses and not self.was_ended:
                self.pauses, self.heard_at = pauses, time.monotonic()

    def order(self, what: str) -> None:
        with suppress(OSError):
            self.process.say(what)


class Pinger:
    """Asks the coordinator each second, by a connection of its own, whether it answers."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._socket = self._connect()
        self._asked: Member | None = None
        self._asked_at = 0.0

    def _connect(self) -> zmq.Socket[bytes]:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        return socket

    def ping(self, coordinator: Member) -> None:
        """Note its answers, whenever they come, and ask again once a second."""
        now = time.monotonic()
        if self._asked is not coordinator:
            self._socket.close()
            self._socket = self._connect()
            self._asked, self._asked_at = coordinator, 0.0
        if now >= self._asked_at + 1.0:
            self._asked_at = now
            self._socket.send(encode(Heartbeat(epoch=77, sequence=0)))
        while self._socket.poll(0):
            self._socket.recv()
            coordinator.heard_at = now


class ChaosNode:
    """Engines, keepers and the coordinator of one namespace, kept running from ``start`` on."""

    def __init__(self, ranks: int, seed: int, **settings: dict[str, str]) -> None:
        """``settings``: of each ``engine``, of each ``keeper``."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # ranks whose engine is gone come to us
        self.processes = Quiet()
        self.node = Node(self.processes)
        self.settings, self._num_ranks = settings, ranks
        self.started = seed * 10_000
        self.bystanders: list[dict[str, Any]] = []
        self.totals: dict[str, int] = dict.fromkeys(COUNTED, 0)
        self.violations: list[str] = []
        self.everybody: list[Worker] = []
        self.coordinator: Member | None = None
        self.coordinator_due = 0.0
        self._pinger = Pinger(command_endpoint(self.node.run_dir, self.node.namespace))
        self.engines: list[Member] = []
        self.keepers: list[Member] = []
        self.reached: Counter[str] = Counter()
        """How often processes have stopped or died at each sync point."""

    # -- start

    def start(self, engines: int, keepers: int) -> None:
        self.start_coordinator()
        self.engines += [self.start_engine() for _ in range(engines)]
        self.keepers += [self.start_keeper() for _ in range(keepers)]

    def start_engine(self, point: str = "") -> Member:
        """``point``: the sync point at which it stops or dies."""
        self.started += 1
        argv = (ENGINE, "--seed", str(self.started), "--ranks", str(self._num_ranks))
        name, environ = f"engine-{self.started}", self.environ("engine", point)
        process = self.processes.start(name, sys.executable, *argv, environ=environ)
        doomed = {-signal.SIGKILL} if dies_at(point, ENGINE_POINTS) else set()
        return Member(process, name, doomed, point=point)

    def start_keeper(self, point: str = "") -> Member:
        """``point``: as for an engine."""
        self.started += 1
        blocks = KEEPER_BLOCKS[self.started // 2 % len(KEEPER_BLOCKS)]
        memory = str(blocks * BLOCK_BYTES * self._num_ranks)
        argv = ("-P", "-m", "kvshm.tools.cli", "keeper", "--memory", memory)
        name, environ = f"keeper-{self.started}", self.environ("keeper", point)
        process = self.processes.start(name, sys.executable, *argv, environ=environ)
        doomed = {-signal.SIGKILL} if dies_at(point, KEEPER_POINTS) else set()
        return Member(process, name, doomed, point=point)

    def environ(self, kind: str, point: str = "") -> dict[str, str]:
        """The settings of a process that is started next."""
        return {
            "KVSHM_RUN_DIR": str(self.node.run_dir),
            "KVSHM_NAMESPACE": self.node.namespace,
            "KVSHM_VERIFY": str(self.started % 2),
            **({VARIABLE: point} if point else {}),
            **self.settings.get(kind, {}),
        }

    def start_coordinator(self) -> None:
        self.started += 1
        self.coordinator = Member(self.node.start_coordinator(), f"coordinator-{self.started}")

    # -- the fate of each

    def look(self) -> None:
        """Take in what all have said, note who has ended by itself, and replace who has ended."""
        for index, engine in enumerate(self.engines):
            self.take_in(engine)
            if engine.process.status is not None:
                if not engine.has_said_all:
                    continue
                self._judge_engine(engine)
                self.processes.forget(engine.process)
                self.engines[index] = self.start_engine(engine.successor_point)
            elif engine.silence > SILENT_SECONDS:
                self._hang(engine)
        self._look_at_keepers()
        self._look_at_coordinator()
        self.look_at_orphans()

    def take_in(self, engine: Member) -> None:
        before = {name: engine.said.get(name, 0) for name in self.totals}
        engine.listen()
        for name, value in before.items():
            self.totals[name] += engine.said.get(name, 0) - value
        contained = engine.said.get("contained", 0)
        if contained > before["contained"] and not engine.damaged:
            lines = engine.last_lines()
            self.bystander(f"{engine.name}, which serves on", "a failure in the cache", lines)
        for violation in engine.said.pop("violations", ()):
            if not engine.damaged:
                self.violations.append(f"{engine.name}: {violation}")
        self.everybody += [rank for rank in engine.ranks if rank not in self.everybody]

    def _judge_engine(self, engine: Member) -> None:
        status = engine.process.status
        if dies_at(engine.point, ENGINE_POINTS + RANK_POINTS) and not engine.was_ended:
            self.reached[f"engine {engine.point}"] += 1
        lost = engine.said.get("rank_ended")
        if lost is not None and status == RANK_ENDED:
            if not (lost == -signal.SIGKILL and any(rank.doomed for rank in engine.ranks)):
                self.bystander(f"a rank of {engine.name}", lost, engine.last_lines())
        elif status not in engine.doomed:
            self.bystander(engine.name, status, engine.last_lines())

    def bystander(self, who: str, status: int | str | None, lines: list[str]) -> None:
        how = signal.Signals(-status).name if isinstance(status, int) and status < 0 else status
        self.bystanders.append({"who": who, "ended": how, "lines": lines})
        print(f"BYSTANDER {who}: {how}", *lines, sep="\n    ", file=sys.stderr, flush=True)

    def _hang(self, member: Member) -> None:
        self._tell_hang(member)
        member.excuse(SILENT_SECONDS)
        self.kill(member)

    def _tell_hang(self, member: Member) -> None:
        with suppress(OSError):
            place = Path(f"/proc/{member.process.pid}/wchan").read_text()
            self.bystander(member.name, f"hangs ({place})", member.last_lines())

    def kill(self, member: Member, number: signal.Signals = signal.SIGKILL) -> None:
        """End one as the schedule wants it: which must not hide that it hung."""
        member.listen()  # perhaps no one has for a while
        if member is self.coordinator and member.silence > self._longest_silence(member) / 2:
            self._tell_hang(member)
        in_order = number != signal.SIGKILL and member.has_begun
        member.doomed |= {0} if in_order else {0, -number}
        member.was_ended = True
        member.process.signal(number)

    def _look_at_keepers(self) -> None:
        for index, keeper in enumerate(self.keepers):
            keeper.watch_pauses()
            if keeper.process.status is not None:
                if keeper.has_said_all and time.monotonic() >= keeper.successor_at:
                    self.judge_keeper(keeper)
                    self.processes.forget(keeper.process)
                    self.keepers[index] = self.start_keeper(keeper.successor_point)
            elif keeper.silence > SILENT_SECONDS:
                self._hang(keeper)

    def judge_keeper(self, keeper: Member) -> None:
        """Note how it has ended, and what it has gone on after that no one has foreseen."""
        status, lines = keeper.process.status, keeper.last_lines()
        if dies_at(keeper.point, KEEPER_POINTS) and not keeper.was_ended:
            self.reached[f"keeper {keeper.point}"] += 1
        if status not in keeper.doomed and not (keeper.damaged and status == NOT_SERVING):
            self.bystander(keeper.name, status, lines)
        elif "Traceback" in str(keeper.process.err) and not keeper.damaged:
            self.bystander(f"{keeper.name}, before", "a failure in the keeper", lines)

    def _look_at_coordinator(self) -> None:
        coordinator = self.coordinator
        if coordinator is None:
            if time.monotonic() >= self.coordinator_due:
                self.start_coordinator()
            return
        coordinator.listen()
        if coordinator.process.status is not None:
            if not coordinator.has_said_all:
                return
            if coordinator.process.status not in coordinator.doomed:
                lines = coordinator.last_lines()
                self.bystander(coordinator.name, coordinator.process.status, lines)
            self.processes.forget(coordinator.process)
            self.coordinator = None
        elif coordinator.silence > self._longest_silence(coordinator):
            self._hang(coordinator)

    @staticmethod
    def _longest_silence(coordinator: Member) -> float:
        """On a busy machine loading Python alone may take longer than any answer."""
        return UNANSWERED_SECONDS if coordinator.has_begun else SILENT_SECONDS

    def look_at_orphans(self) -> None:
        """Ranks that have outlived their engine: they must end in good order."""
        for rank in self.everybody:
            if rank.pidfd >= 0 and not rank.runs:
                self._bury(rank)
        self.everybody = [rank for rank in self.everybody if rank.pidfd >= 0]

    def _bury(self, rank: Worker) -> None:
        try:
            _, status = os.waitpid(rank.pid, os.WNOHANG)
        except ChildProcessError:  # its engine runs, or has waited for it and told
            if rank.is_waited_for:  # perhaps by us, if its engine ends before that
                return
            status = 0
        ended = os.waitstatus_to_exitcode(status)
        if ended and not (ended == -signal.SIGKILL and rank.doomed):
            self.bystander(f"rank {rank.pid}, an orphan", ended, [])
        os.close(rank.pidfd)
        rank.pidfd = -1

    def strays(self) -> list[str]:
        """Children that no one knew of: ranks of engines that ended before they had named them.
        Notes those that have ended otherwise than in good order; returns those that run."""
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if status := os.waitstatus_to_exitcode(found[1]):
                    self.bystander(f"process {found[0]}, a stray", status, [])
        return self.processes.children()

    def leases(self) -> Counter[str]:
        """How many blocks of each engine and keeper somebody holds a lease on.  Raises SegmentError
        where an engine that runs hands out no table."""
        found, epochs = Counter[str](), {int(e.said["epoch"], 16): e.name for e in self.engines}
        for epoch in epochs.keys() | self.node.sockets():
            try:
                with closing(self.node.segments.view(epoch)) as table:
                    leased = sum(bool(slot.leases) for slot in table.slots())
                    found[epochs.get(epoch, table.engine)] = leased
            except SegmentNotFound:
                if epoch in epochs:
                    raise
        return +found

    def ping(self) -> None:
        if self.coordinator is not None:
            self._pinger.ping(self.coordinator)
