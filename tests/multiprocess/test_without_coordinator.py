"""What engines do for themselves: attach who has joined, and notice who has died."""

from __future__ import annotations

from pathlib import Path

import pytest

from .processes import Managed, Node, wait_until
from .toys import result, start

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

EXPORTER = ("--peers", "0", "--loads", "0", "--imported", "0")


def mapped_from_others(engine: Managed) -> int:
    maps = Path(f"/proc/{engine.pid}/maps").read_text().splitlines()
    return sum("memfd:kvshm-kv" in line and " r--s " in line for line in maps)


def test_who_has_joined_is_attached_before_anybody_asks_for_it(node: Node) -> None:
    """Also by an engine that is idle: it has served no request yet, and runs no step."""
    node.coordinator()
    exporter = start(node, 1, *EXPORTER)
    result(exporter)
    idle = start(node, 2, "--requests", "0", "--loads", "0")
    idle.wait_out(lambda line: line == "go")
    wait_until(lambda: mapped_from_others(idle) == 1, "the idle engine has attached its peer")
    exporter.say("")
    assert exporter.wait() == 0
    wait_until(lambda: mapped_from_others(idle) == 0, "it has let go of who has gone")
    assert len(list(node.run_dir.glob("*.peers.*"))) == 1, "its own, no longer the other's"
