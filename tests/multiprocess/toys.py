"""Toy engines as tests see them: started, asked for their results, ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvshm._shm.slot_table import SlotTableView
from kvshm.errors import SegmentNotFound

from .processes import Managed, Node

TOY = str(Path(__file__).with_name("toy_engine.py"))


def start(
    node: Node,
    seed: int,
    *options: str,
    python: Sequence[str] = (sys.executable,),
    **settings: str,
) -> Managed:
    environ = {
        "KVSHM_RUN_DIR": str(node.run_dir),
        "KVSHM_NAMESPACE": node.namespace,
        "KVSHM_VERIFY": "1",
        **settings,
    }
    argv = (*python, TOY, "--seed", str(seed), *options)
    return node.processes.start(f"toy-{seed}", *argv, environ=environ)


def result(engine: Managed, since: int = 0) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads(engine.wait_out(lambda line: line.startswith("{"), since))
    return outcome


def more(engine: Managed) -> dict[str, Any]:
    """Have it serve as many requests again, imports or not, and return what it then prints."""
    since = len(engine.out)
    engine.say("more")
    return result(engine, since)


def all_more(engines: list[Managed]) -> list[dict[str, Any]]:
    marks = [len(engine.out) for engine in engines]
    for engine in engines:
        engine.say("more")
    return [result(engine, since) for engine, since in zip(engines, marks, strict=True)]


def finish(engines: list[Managed]) -> list[dict[str, Any]]:
    results = [result(engine) for engine in engines]
    for engine in engines:
        engine.say("")
        assert engine.wait() == 0
    return results


def table_of(node: Node, engine: Managed) -> SlotTableView:
    engine.wait_out(lambda line: line == "open")
    for epoch in node.sockets():
        with suppress(SegmentNotFound):
            table = node.segments.view(epoch)
            if table.pid == engine.pid:
                return table
            table.close()
    raise AssertionError(f"{engine.name} hands out no table")
