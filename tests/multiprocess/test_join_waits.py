"""``join`` returns when the engines that the roster named then are known, so that no first lookup
comes too early; and it returns although one of them never answers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvshm._node.segment_server import SegmentClient
from kvshm._shm.slot_table import PeerSlotTable
from kvshm.errors import MisuseError, SegmentNotFound, SegmentNotReady

from .joined import Toy, Toys
from .processes import PATIENCE_SECONDS, fresh_node

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(100)]

FOR_EVER = float("inf")
A_MOMENT = 0.3


class Tables:
    def __init__(self) -> None:
        self._really = SegmentClient.roster_table
        self.asked = threading.Event()
        self.before: Callable[[], object] = lambda: None

    def fetch(self, segments: SegmentClient, *about: Any) -> PeerSlotTable:
        self.asked.set()
        self.before()
        return self._really(segments, *about)


@pytest.fixture
def tables(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> Tables:
    a = toys.join("a")
    assert a.compute(a.prompt(), range(6)) == 6
    tables = Tables()
    monkeypatch.setattr(SegmentClient, "roster_table", lambda *asked: tables.fetch(*asked))
    return tables


def never() -> None:
    raise SegmentNotReady("not now")


def found_at_once(toys: Toys, **how: Any) -> int:
    b = toys.begin("b", **how)
    return b.node.lookup(b.prompt()).length


class Joining:
    def __init__(self, toys: Toys, **how: Any) -> None:
        self.found = -1
        self.done = threading.Event()
        self._thread = threading.Thread(target=self._join, args=(toys, how))
        self._thread.start()

    def _join(self, toys: Toys, how: dict[str, Any]) -> None:
        self.found = found_at_once(toys, **how)
        self.done.set()

    def result(self) -> int:
        self._thread.join(PATIENCE_SECONDS)
        return self.found


@pytest.mark.parametrize("how", [{"wait": FOR_EVER}, {"settings": {"join_wait_ms": 90_000}}])
def test_the_first_lookup_finds_a_peer_whose_table_arrives_late(
    toys: Toys, tables: Tables, how: dict[str, Any]
) -> None:
    go_on = threading.Event()
    tables.before = lambda: go_on.wait(PATIENCE_SECONDS)
    how = {"wait": None} | how
    joining = Joining(toys, **how)
    assert tables.asked.wait(PATIENCE_SECONDS)
    assert not joining.done.wait(A_MOMENT), "it has looked up, and knows no peer"
    go_on.set()
    assert joining.result() == 6


def test_a_peer_that_can_be_attached_only_later_is_waited_for(toys: Toys, tables: Tables) -> None:
    failures = iter([SegmentNotReady("not now")])

    def fails_once() -> None:
        for failure in failures:
            raise failure

    tables.before = fails_once
    assert found_at_once(toys, wait=FOR_EVER) == 6


def test_a_peer_that_has_gone_is_not_waited_for(toys: Toys, tables: Tables) -> None:
    def gone() -> None:
        raise SegmentNotFound("it has left")

    tables.before = gone
    assert found_at_once(toys, wait=FOR_EVER) == 0


def test_a_peer_that_never_answers_is_waited_for_a_while(toys: Toys, tables: Tables) -> None:
    tables.before = never
    b = toys.begin("b", wait=A_MOMENT)
    assert not b.node.lookup(b.prompt())
    tables.before = lambda: None
    assert b.node.wait_for(b.prompt(), PATIENCE_SECONDS).length == 6, "it is attached later"


@pytest.mark.parametrize("settings", [{"role": "producer"}, {"share": "none"}])
def test_who_gains_nothing_does_not_wait(
    toys: Toys, tables: Tables, settings: dict[str, Any]
) -> None:
    tables.before = never
    toys.begin("b", wait=FOR_EVER, settings=settings)


def test_who_is_refused_does_not_wait(toys: Toys) -> None:
    for number in range(8):
        toys.join(f"{number}")
    assert "has 8 engines here already" in toys.begin("one more", wait=FOR_EVER).node.refusal


def test_without_a_coordinator_no_one_waits() -> None:
    with fresh_node() as place:
        Toy(place, "alone", "kind", wait=FOR_EVER).close()


def test_a_wait_ends_with_the_coordinator() -> None:
    """It answers no one when the engine joins, and dies then."""
    with fresh_node() as place:
        coordinator = place.coordinator()
        os.kill(coordinator.pid, signal.SIGSTOP)
        waiting = threading.Thread(target=lambda: Toy(place, "b", "kind", wait=FOR_EVER).close())
        waiting.start()
        waiting.join(A_MOMENT)
        assert waiting.is_alive(), "it does not wait for a coordinator that is there"
        coordinator.kill()
        waiting.join(PATIENCE_SECONDS)
        assert not waiting.is_alive()


def test_a_wait_that_is_no_number_is_refused(toys: Toys) -> None:
    with pytest.raises(MisuseError, match="wait is 'soon'; give seconds"):
        toys.begin("b", wait="soon")
    with pytest.raises(MisuseError, match="wait is 1000"):
        toys.begin("b", wait=10**400)
