"""Fake engines as tests see them: started, spoken to, listened to."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvshm._shm.own_slot_table import RankSlotTable

from .processes import Managed, Node

_SCRIPT = Path(__file__).parent / "fake_engine.py"
PYTHON = (sys.executable,)


ANSWERS = {"leased", "forked"}


class FakeEngine:
    def __init__(
        self, node: Node, name: str, *options: str, python: Sequence[str] = PYTHON
    ) -> None:
        """``python``: the command that runs Python, perhaps another one or somewhere else."""
        place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace, "--name", name)
        self.process: Managed = node.processes.start(name, *python, str(_SCRIPT), *place, *options)
        self.name = name
        self._segments = node.segments
        self.started = self.heard("started")

    def table(self) -> RankSlotTable:
        """Its slot table in its first epoch, from itself; the caller's to close."""
        return self._segments.rank_table(self.started["epoch"])

    def heard(self, event: str, since: int = 0, **fields: Any) -> dict[str, Any]:
        def wanted(line: str) -> bool:
            said = json.loads(line)
            return said["event"] == event and all(said[k] == v for k, v in fields.items())

        said: dict[str, Any] = json.loads(self.process.wait_out(wanted, since))
        return said

    def knows(self, *blocks: int) -> None:
        """Wait until it has exactly these blocks of somebody, by an event or, if that was
        sent before its subscription was there, by a scan."""
        self.process.wait_out(lambda line: json.loads(line).get("blocks") == list(blocks))

    def all_heard(self, *events: str, since: int = 0) -> list[dict[str, Any]]:
        lines = self.process.out.matching(lambda line: json.loads(line)["event"] in events, since)
        return [json.loads(line) for line in lines]

    def places(self, since: int) -> list[str]:
        """What became of its place in the roster, in order."""
        return [said["event"] for said in self.all_heard("joined", "coordinator_lost", since=since)]

    def joined(self, since: int = 0) -> dict[str, Any]:
        return self.heard("joined", since)

    def do(self, what: str, **how: Any) -> dict[str, Any]:
        """Give an order and wait until it was obeyed; return its answer, or that it was done."""
        since = self.mark()
        self.process.say(json.dumps({"do": what, **how}))
        done = self.heard("done", since, what=what)
        # What other engines do meanwhile is heard in between.
        said = [json.loads(line) for line in self.process.out.matching(lambda _: True, since)]
        return next((line for line in said if line["event"] in ANSWERS), done)

    def mark(self) -> int:
        return len(self.process.out)

    def end(self) -> None:
        self.process.end_input()
        assert self.process.wait() == 0, self.process.account()


def hear_everything(node: Node, *engines: FakeEngine, options: Sequence[str] = ()) -> None:
    """Wait until the subscriptions of these engines are there, so that they hear what comes
    next as it is told: one more engine comes and goes, and each has heard of both.

    An engine's place in the roster says nothing of its subscription, which goes its own way.
    What was told before that is there is not lost: a tick shows it, and the engine joins again
    or scans, but that is said in other words.  ``options``: those of the engines' fingerprint.
    """
    caller = FakeEngine(node, "caller", *options)
    epoch = caller.joined()["epoch"]
    for engine in engines:
        engine.heard("engine_joined", epoch=epoch)
    caller.end()
    for engine in engines:
        engine.heard("engine_gone", epoch=epoch)


def in_turn(node: Node, *names: str) -> list[FakeEngine]:
    """Start engines, each when the one before is in the roster.

    Who hears of a later one does so by a broadcast, or after a tick has shown that one was
    missed: either way its subscription is there, and it hears what comes next as it is told.
    Of engines that start side by side, the last to join knows the others from the roster.
    """
    started = []
    for name in names:
        started.append(FakeEngine(node, name))
        started[-1].joined()
    return started
