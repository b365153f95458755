"""Drains in a run of chaos.py: engines are put into drain and, some time later, out of it again."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator

from .chaos_node import ChaosNode, Member
from .chaos_schedule import Fault
from .processes import Managed

NOT_KEPT, UNDONE, NO_ENGINE = 1, 3, 4
"""Exit statuses of ``kvshm drain``, of ``--undo`` also where an engine does not answer."""
HANGS_SECONDS = 60.0
"""A command that takes so much longer than it was given hangs."""
POLL_SECONDS = 0.1
MOST_LINES = 30


def drain(node: ChaosNode, engine: Member, fault: Fault, ends: Counter[str]) -> Iterator[float]:
    """Put an engine, or all of them, into drain; once the command has ended, or was killed, have
    them import again.  Yields the seconds to wait before each next step.  ``ends`` counts how it
    went."""
    whom = (f"toy-{engine.process.pid}", str(engine.process.pid), "--here")[fault.dice % 3]
    command = _begin(node, whom, "--seconds", f"{fault.seconds:.2f}", "--json")
    yield fault.seconds
    if killed := not fault.dice // 4 % 4:
        command.signal(signal.SIGKILL)
    yield from _until_ended(command)
    if _judge(node, command, killed):
        ends.update(each["end"] for each in json.loads(str(command.out) or "[]"))
    else:
        ends["killed"] += 1
    while whom == "--here" or engine.process.status is None:
        undo = _begin(node, whom, "--undo")
        yield from _until_ended(undo)
        _judge(node, undo)
        if undo.status == 0:
            ends["undone"] += 1
            return
        yield POLL_SECONDS


def _begin(node: ChaosNode, *arguments: str) -> Managed:
    python = (sys.executable, "-X", "faulthandler", "-P")
    command = (*python, "-m", "kvshm.tools.cli", "drain", *arguments)
    return node.processes.start("drain", *command, environ=node.environ("drain"))


def _until_ended(command: Managed) -> Iterator[float]:
    """What hangs says where."""
    deadline = time.monotonic() + HANGS_SECONDS
    while command.status is None:
        if time.monotonic() >= deadline:
            command.signal(signal.SIGABRT)
        yield POLL_SECONDS


def _judge(node: ChaosNode, command: Managed, killed: bool = False) -> bool:
    """Let go of a command that has ended.  Whether it ended by itself."""
    status, errors = command.wait(), str(command.err)
    good = status in (0, NOT_KEPT, UNDONE, NO_ENGINE) and "Traceback" not in errors
    if not (good or (killed and status == -signal.SIGKILL)):
        node.bystander("kvshm drain", status, errors.splitlines()[:MOST_LINES])
    node.processes.forget(command)
    return status >= 0
