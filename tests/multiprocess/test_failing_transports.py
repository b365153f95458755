"""What a transport of others raises, although no one foresees it: its engine goes on, and so do its
peers, for which its blocks are misses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshm.interfaces import load_transport
from tests import other_package

from .joined import Toy, Toys
from .processes import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.multiprocess

MODULE = """
from other_package_transport import ProcTransport

class FailingTransport(ProcTransport):
    name = "failing"
    fails = dict(memory=None, at="")

    def _at(self, point):
        if self.fails == dict(memory=self.memory, at=point):
            raise RuntimeError(f"cannot {point}")

    def export(self, epoch):
        self._at("open" if epoch else "begin")
        return super().export(epoch)

    def checksum(self, blocks):
        self._at("publish")
        return super().checksum(blocks)

    def close(self):
        self._at("close")
"""
SAYS = {
    "open": "cannot export: cannot open (the engine serves on",
    "publish": "blocks could not be published",
    "close": "the memory's export could not be closed",
}
MISSES = ("miss_no_peer", "miss_no_owner")


@pytest.fixture
def fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    folder = other_package.install(tmp_path, "failing = failing_transport:FailingTransport")
    (folder / "failing_transport.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    transport: Any = load_transport("failing")
    fails: dict[str, Any] = transport.fails
    yield fails
    fails["at"] = ""


def misses(toy: Toy) -> int:
    stats = toy.node.stats()
    return sum(stats[name] for name in MISSES)


@pytest.mark.parametrize("point", SAYS)
def test_what_it_raises_is_a_miss_and_a_traceback(
    toys: Toys, fails: dict[str, Any], point: str, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = toys.pair(settings={"transport": "failing", "verify": True})
    theirs, ours = b.prompt(), a.prompt(salt=b"of the failing one")
    b.compute(theirs, range(6))
    assert a.node.wait_for(theirs, PATIENCE_SECONDS)
    fails |= {"memory": a.memory, "at": point}
    if point == "open":
        a.node.reset()
        wait_until(lambda: "cannot open" in caplog.text, "it fails")
    assert a.compute(ours, range(6)) == (6 if point == "close" else 0)
    if point == "close":
        assert b.node.wait_for(ours, PATIENCE_SECONDS)
        a.node.close()
        wait_until(lambda: b.node.stats()["peers"] == 0, "it has left")
    before = misses(b)
    assert not b.node.lookup(ours)
    assert misses(b) == before + 1
    [record] = [record for record in caplog.records if record.exc_info]
    assert SAYS[point] in record.getMessage()
    if point == "close":
        return
    fails["at"] = ""
    assert a.node.wait_joined(PATIENCE_SECONDS)
    a.compute(a.prompt(salt=b"later"), range(6, 12))
    assert b.node.wait_for(a.prompt(salt=b"later"), PATIENCE_SECONDS)
