"""Requests whose prompt no engine of the node has, while a keeper has a store: they ask for it, and
wait for what is coming, not longer than that is worth, while others are scheduled.

The scheduler is vLLM's, the sockets are real, and the test sits at the keeper's desk.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from kvshm._engine.load_plan import LoadReport
from kvshm._engine.store_asks import AGAIN_SECONDS, Coming, Wanted
from kvshm._shm import statistics as c
from kvshm.hooks.vllm.imports.store_fetches import ANSWER_SECONDS, LATE_SECONDS, MOST_SECONDS
from kvshm.interfaces import Region
from kvshm.tools.keeper.desk import Desk
from kvshm.tools.keeper.wanted import Prompt

from .scheduling import BLOCK_SIZE, DrivenEngine, Make, Sent, prompt
from .several_groups import ALL_KINDS, PeerOf, Played
from .several_groups import peer_of as peer_of

BLOCKS = 8
PATIENCE = 30.0


class Node:
    """An engine beside a peer, the keeper's desk, and the clock of the engine's imports."""

    def __init__(self, e: DrivenEngine, peer: PeerOf, desk: Desk) -> None:
        self.e, self.peer, self.desk = e, peer, desk
        self.now = 1000.0
        self.played, self.importer = Played(e), e.connector._scheduler.importer
        self.asks, fetches = (
            e.connector._scheduler.cache.planner.store,
            self.importer.lookups.fetches,
        )
        fetches._clock = self.asks._clock = lambda: self.now

    def step(self) -> Sent:
        sent = self.e.schedule()
        loads = (*sent.metadata.loads, *sent.metadata.at_once)
        self.played.run(sent, *(LoadReport(load.load_id, load.lost) for load in loads))
        return sent

    def asked(self) -> tuple[bytes, Wanted]:
        """The next ask."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for found in self.desk.asks():
                return found
            time.sleep(0.001)
        raise AssertionError("nothing was asked")

    def answer(self, to: tuple[bytes, Wanted], length: int, seconds: float = 1.0) -> None:
        """The keeper answers, and the engine has its answer."""
        route, wanted = to
        self.desk.answer(route, Coming(wanted.number, length, seconds))
        deadline = time.monotonic() + PATIENCE
        while self.asks.answer(wanted.number) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def waits(self, name: str = "r") -> bool:
        """Whether a step schedules nothing of a request."""
        return name not in self.step().output.num_scheduled_tokens

    def count(self, counter: int) -> int:
        return self.e.table.counters.read(counter)

    @property
    def counted(self) -> tuple[int, int]:
        return self.count(c.STORE_ASKED), self.count(c.STORE_CAME)


@pytest.fixture
def node(
    engine: Make, peer_of: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Node]]:
    desks = list[Desk]()

    def make(specs: Any = (), least: str = "0", desk: bool = True) -> Node:
        monkeypatch.setenv("KVSHM_MIN_PREFIX_TOKENS", least)
        e = engine(num_blocks=200, specs=specs, max_num_batched_tokens=1024)
        peer = peer_of(e, Region(0, 0, 1000, e.num_blocks * 1000))
        run_dir, namespace = Path(os.environ["KVSHM_RUN_DIR"]), os.environ["KVSHM_NAMESPACE"]
        if desk:
            desks.append(Desk(run_dir, namespace))
        return Node(e, peer, desks[-1] if desk else None)  # type: ignore[arg-type]

    yield make
    for one in desks:
        one.close()


@pytest.mark.parametrize("kind", ["one group", *ALL_KINDS])
def test_a_request_waits_for_what_is_coming_and_imports_it(
    node: Callable[..., Node], kind: str
) -> None:
    n = node(ALL_KINDS.get(kind, ()))
    tokens = prompt(BLOCKS)
    request = n.e.add("r", tokens)
    assert n.waits()
    to = n.asked()
    assert to[1].hashes == request.block_hashes
    assert to[1].lacking == (0, 0, BLOCKS)
    assert to[1].fingerprint == n.e.table.fingerprint
    everything = Prompt(to[1]).longest(lambda _: True)
    assert everything > 0
    n.answer(to, everything)
    assert n.waits()
    n.e.add("another", prompt(0, first=500), max_tokens=1)
    assert not n.waits("another")
    n.peer.hold_all(tokens)
    n.now += 0.1
    for _ in range(4):
        sent = n.step()
        if "r" in sent.output.num_scheduled_tokens:
            break
    computed = sent.output.num_scheduled_tokens["r"]
    assert computed == len(tokens) - everything * BLOCK_SIZE
    assert n.counted == (1, 1)
    assert n.count(c.STORE_WAITED_US) >= 100_000


def test_without_a_keeper_with_a_store_nothing_is_asked(node: Callable[..., Node]) -> None:
    n = node(desk=False)
    n.e.add("r", prompt(BLOCKS))
    assert not n.waits()
    assert n.counted == (0, 0)


def test_what_the_store_has_not_is_computed_at_once_and_not_asked_for_again(
    node: Callable[..., Node],
) -> None:
    n = node()
    n.e.add("r", prompt(BLOCKS))
    assert n.waits()
    n.answer(n.asked(), 0)
    assert not n.waits()
    assert n.counted == (1, 0)


def test_who_does_not_answer_is_waited_for_once(node: Callable[..., Node]) -> None:
    n = node()
    n.e.add("r", prompt(BLOCKS))
    assert n.waits()
    n.now += ANSWER_SECONDS / 2
    assert n.waits()
    n.now += ANSWER_SECONDS
    assert not n.waits()
    n.e.add("next", prompt(BLOCKS, first=500))
    assert not n.waits("next")
    n.now += AGAIN_SECONDS
    n.e.add("later", prompt(BLOCKS, first=900))
    assert n.waits("later")
    assert n.counted == (2, 0)


def test_what_comes_too_late_is_computed(node: Callable[..., Node]) -> None:
    n = node()
    n.e.add("r", prompt(BLOCKS))
    assert n.waits()
    n.answer(n.asked(), BLOCKS, seconds=0.5)
    assert n.waits()
    n.now += 4 * 0.5 + LATE_SECONDS / 2
    assert n.waits()
    n.now += LATE_SECONDS
    assert not n.waits()
    assert n.counted == (1, 0)


def test_no_request_waits_longer_than_computing_takes(node: Callable[..., Node]) -> None:
    n = node(least="auto")
    costs = n.importer._cache.planner.costs
    costs.compute_seconds = lambda tokens: 0.01 * tokens
    n.e.add("r", prompt(BLOCKS))
    assert n.waits()
    to = n.asked()
    assert to[1].seconds == pytest.approx(0.01 * BLOCKS * BLOCK_SIZE)
    n.answer(to, BLOCKS, seconds=1.0)
    assert n.waits()
    n.now += to[1].seconds + LATE_SECONDS * 1.1
    assert not n.waits()


def test_whatever_a_keeper_says_the_wait_ends(node: Callable[..., Node]) -> None:
    n = node()
    n.e.add("r", prompt(BLOCKS))
    assert n.waits()
    n.answer(n.asked(), BLOCKS, seconds=math.inf)
    assert n.waits()
    n.now += MOST_SECONDS + LATE_SECONDS * 1.1
    assert not n.waits()


def test_what_computes_within_milliseconds_is_not_asked_for(node: Callable[..., Node]) -> None:
    n = node(least="auto")
    n.importer._cache.planner.costs.compute_seconds = lambda tokens: 0.009
    n.e.add("r", prompt(BLOCKS))
    assert not n.waits()
    assert n.counted == (0, 0)


def test_what_does_not_come_after_all_is_computed(node: Callable[..., Node]) -> None:
    n = node()
    n.e.add("r", prompt(BLOCKS))
    assert n.waits()
    to = n.asked()
    n.answer(to, BLOCKS)
    assert n.waits()
    n.desk.answer(to[0], Coming(to[1].number, 0, 0.0))
    deadline = time.monotonic() + PATIENCE
    while n.waits():
        assert time.monotonic() < deadline
    assert n.counted == (1, 0)


def test_it_says_what_the_node_has(node: Callable[..., Node]) -> None:
    """And imports that if nothing more comes."""
    n = node()
    tokens = prompt(BLOCKS)
    n.peer.attached()
    n.peer.hold_all(tokens[: 3 * BLOCK_SIZE + 1])
    n.e.add("r", tokens)
    assert n.waits()
    to = n.asked()
    assert to[1].lacking == (0, 3, BLOCKS)
    n.answer(to, 0)
    assert n.step().output.num_scheduled_tokens["r"] == len(tokens) - 3 * BLOCK_SIZE


def test_a_request_that_ends_while_it_waits_is_forgotten(node: Callable[..., Node]) -> None:
    n = node()
    n.e.add("r", prompt(BLOCKS))
    assert n.waits()
    to = n.asked()
    n.e.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    n.desk.answer(to[0], Coming(to[1].number, BLOCKS, 1.0))
    n.step()
    assert not n.asks._answers
    assert not n.importer.imports


@pytest.mark.parametrize("leaves", [False, True])
def test_a_keeper_is_to_hear_of_what_an_engine_withdraws(
    node: Callable[..., Node], leaves: bool
) -> None:
    n = node()
    withdrawn = n.e.table.fingerprint, n.e.table.epoch
    n.e.connector._scheduler.cache.end_epoch(leaves=leaves)
    assert n.asks.withdrew == ((b"", 0) if leaves else withdrawn)


def test_a_request_that_must_not_share_asks_nobody(node: Callable[..., Node]) -> None:
    n = node()
    n.e.add("r", prompt(BLOCKS), extra_args={"kv_transfer_params": {"kvshm": {"share": False}}})
    assert not n.waits()
    assert n.counted == (0, 0)
