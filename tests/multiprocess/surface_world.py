"""Who else is there while a machine drives one node: a coordinator and two engines, in processes
that are killed, stopped and started again."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvshm._base.rundir import list_sockets
from kvshm._shm.fds import is_served
from kvshm._shm.slot_table import SlotTableView
from kvshm.errors import SegmentError

from .processes import Managed, Node, Processes, wait_until

ROOT = Path(__file__).parents[2]
MODULE = "tests.multiprocess.surface_engine"


class Peer:
    def __init__(self, place: Node, name: str) -> None:
        self._place, self.name = place, name
        self._process: Managed | None = None
        self.kind = ""
        """Engines of one kind share; empty while it has not joined."""
        self.is_stopped = False
        self.was_hindered = False
        """Whether it was stopped or killed since it joined: others may avoid it for a while."""

    @property
    def is_there(self) -> bool:
        return bool(self.kind) and not self.is_stopped

    def join(self, kind: str) -> None:
        self.go_on()
        if self._process is None:
            environ = {
                "KVSHM_RUN_DIR": str(self._place.run_dir),
                "KVSHM_NAMESPACE": self._place.namespace,
                "PYTHONPATH": str(ROOT),
            }
            argv = (sys.executable, "-m", MODULE)
            self._process = self._place.processes.start(self.name, *argv, environ=environ)
        assert self.do("join", kind=kind, name=self.name)["refusal"] == ""
        self.kind, self.was_hindered = kind, False

    def do(self, what: str, **how: Any) -> dict[str, Any]:
        assert self._process is not None
        since = len(self._process.out)
        self._process.say(json.dumps({"do": what, **how}))
        reported = self._process.wait_out(lambda line: f'"did": "{what}"' in line, since)
        answer: dict[str, Any] = json.loads(reported)
        assert answer.get("wrong", 0) == 0, f"{self.name} imported wrong bytes: {answer}"
        return answer

    def stop(self) -> None:
        if self._process is not None and not self.is_stopped:
            self._process.signal(signal.SIGSTOP)
            wait_until(lambda: self._process.is_stopped, "it stops")
            self.is_stopped = self.was_hindered = True

    def go_on(self) -> None:
        if self._process is not None and self.is_stopped:
            self._process.signal(signal.SIGCONT)
            self.is_stopped = False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._process, self.kind, self.is_stopped = None, "", False

    def leave(self) -> None:
        self.go_on()
        if self._process is not None and self.kind:
            self.do("leave")
        self.kind = ""


class World:
    def __init__(self) -> None:
        self.processes = Processes()
        self.place = Node(self.processes)
        self.coordinator: Managed | None = None
        self.peers = (Peer(self.place, "left"), Peer(self.place, "right"))

    def begin(self, kind: str) -> None:
        self.start_coordinator()
        for peer in self.peers:
            peer.join(kind)

    def start_coordinator(self) -> None:
        if self.coordinator is None:
            self.coordinator = self.place.coordinator()

    def kill_coordinator(self) -> None:
        if self.coordinator is not None:
            self.coordinator.kill()
        self.coordinator = None

    def tables(self) -> list[SlotTableView]:
        found = []
        for epoch in self.place.sockets():
            with suppress(SegmentError):  # of an engine that was killed
                found.append(self.place.segments.view(epoch))
        return found

    def check_no_leases(self) -> None:
        """No lease is left in any living table, and all are sound."""
        for table in self.tables():
            try:
                wait_until(lambda t=table: not any(s.leases for s in t.slots()), "no leases")
                assert table.check_integrity() == []
            finally:
                table.close()

    def check_nothing_served(self) -> None:
        """All engines have left: what is in the run directory, engines have left that were killed.
        A coordinator that has known them, or the last engine, removes that."""
        found = list_sockets(self.place.run_dir, self.place.namespace)
        assert [one.path for one in found if is_served(one.path)] == []

    def end(self) -> None:
        self.peers[0].join("last")
        assert self.coordinator is not None
        assert self.coordinator.terminate() == 0
        for peer in self.peers:
            peer.leave()
        self.processes.reap()
        left = [path.name for path in self.place.run_dir.iterdir()]
        self.place.remove()
        assert left == []
