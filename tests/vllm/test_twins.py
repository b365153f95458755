"""Requests with a common prefix at the same time on one engine: one imports it, the other one
neither computes nor copies it again, nor waits for what has nothing to do with it.

The scheduler is vLLM's, the peer has a real slot table, the rank is played.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from itertools import product
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from kvshm._engine.load_plan import LoadReport
from kvshm._shm import statistics as c
from kvshm.hooks.vllm.imports.twins import TWIN_WAIT_SECONDS
from kvshm.interfaces import Region

from .scheduling import BLOCK_SIZE, DrivenEngine, Make, Sent, full, prompt, states, window
from .several_groups import KINDS, PeerOf, Played
from .several_groups import peer_of as peer_of

BLOCKS = 8
BLOCK_BYTES = 1000
STEP_TOKENS = 256
LOADS = ("before", "first", "after")
GROUPS: dict[str, list[Any]] = {"one group": [full()], **KINDS}


@dataclass
class Node:
    """An engine beside a peer, and the clock of its imports."""

    e: DrivenEngine
    peer: PeerOf
    now: float = 1000.0
    scheduled: dict[str, list[int]] = field(default_factory=dict)
    """How many tokens of each request were computed, by step."""
    filled: list[tuple[str, int]] = field(default_factory=list)
    """Who has imported how many hashes."""
    loading: list[LoadReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.played, self.importer = Played(self.e), self.e.connector._scheduler.importer
        self.importer.twins._clock = lambda: self.now

    def step(self, ended: bool = True) -> Sent:
        """One step.  ``ended``: the asynchronous copies under way end in it."""
        sent = self.e.schedule()
        for load in (*sent.metadata.loads, *sent.metadata.at_once):
            request_id = self.importer.running.by_id[load.load_id].request_id
            self.filled.append((request_id, load.length))
        self.loading += [LoadReport(load.load_id, load.lost) for load in sent.metadata.loads]
        loads = [LoadReport(load.load_id, load.lost) for load in sent.metadata.at_once]
        if ended:
            loads, self.loading = loads + self.loading, []
        for name, tokens in sent.output.num_scheduled_tokens.items():
            self.scheduled.setdefault(name, []).append(tokens)
        self.played.run(sent, *loads)
        return sent

    def finish(self) -> None:
        for _ in range(60):
            self.step()
            if not self.e.scheduler.requests:
                break
        assert self.played.is_clean()

    def count(self, counter: int) -> int:
        return self.e.table.counters.read(counter)

    def costs(self, per_token: float) -> None:
        """Computing takes so many seconds for each token, a copy a second for each block."""
        costs = self.importer._cache.planner.costs
        costs.compute_seconds = lambda tokens: per_token * tokens
        costs.load_seconds = lambda nbytes: nbytes / BLOCK_BYTES
        costs.worth = lambda tokens, nbytes, waiting: per_token * tokens >= 1.0


@pytest.fixture
def node(engine: Make, peer_of: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Node]:
    def make(
        attached: bool, specs: Any = (), least: str = "0", policy: str = "fcfs", blocks: int = 200
    ) -> Node:
        monkeypatch.setenv("KVSHM_MIN_PREFIX_TOKENS", least)
        e = engine(
            num_blocks=blocks,
            specs=specs,
            max_num_batched_tokens=STEP_TOKENS,
            scheduling_policy=policy,
        )
        n = Node(e, peer_of(e, Region(0, 0, BLOCK_BYTES, e.num_blocks * BLOCK_BYTES)))
        if attached:
            n.peer.attached()
        return n

    return make


BOTH_WAYS = pytest.mark.parametrize("attached", [True, False], ids=["at once", "asynchronous"])


@BOTH_WAYS
@pytest.mark.parametrize(
    ("kind", "policy"), [*product(GROUPS, ["fcfs"]), ("one group", "priority")]
)
def test_of_two_equal_prompts_one_imports_and_the_other_hits(
    node: Callable[..., Node], kind: str, policy: str, attached: bool
) -> None:
    n = node(attached, GROUPS[kind], policy=policy)
    tokens = prompt(BLOCKS)
    n.peer.hold_all(tokens)
    n.e.add("first", tokens, priority=1)
    n.step(ended=False)
    n.e.add("second", tokens)  # and, by priority, in front of the other
    n.e.add("third", tokens)
    n.finish()
    assert n.filled == [("first", BLOCKS)]
    assert {name: steps[0] for name, steps in n.scheduled.items()} == dict.fromkeys(
        ("first", "second", "third"), len(tokens) - BLOCKS * BLOCK_SIZE
    )


def unrelated(n: Node, tokens: int) -> None:
    """Requests that come behind, with so many tokens in all, and are computed."""
    while tokens:
        length = min(tokens, 200)
        other = n.e.add(f"unrelated{tokens}", prompt(0, length, first=1000 + 1000 * tokens))
        n.importer.running.compute_from_now(other)
        tokens -= length


def test_the_other_does_not_wait_behind_unrelated_work_that_fills_steps(
    node: Callable[..., Node],
) -> None:
    """vLLM goes on with the prefills that it has begun before it asks again for who was to wait.
    So the second one copies what the first copies, in the same step."""
    n = node(True)
    tokens = prompt(BLOCKS)
    n.peer.hold_all(tokens)
    for name in ("first", "second", "third"):
        n.e.add(name, tokens)
    unrelated(n, 1200)
    sent = n.step()
    assert [sent.output.num_scheduled_tokens.get(name) for name in ("first", "second")] == [3, 3]
    n.finish()
    assert n.filled == [("first", BLOCKS), ("second", BLOCKS), ("third", BLOCKS)]


@pytest.mark.parametrize(("behind", "blocks"), [(STEP_TOKENS - 1, 200), (1200, 18)])
def test_the_other_waits_where_it_keeps_its_turn_or_has_no_room(
    node: Callable[..., Node], behind: int, blocks: int
) -> None:
    n = node(True, blocks=blocks)
    tokens = prompt(BLOCKS)
    n.peer.hold_all(tokens)
    n.e.add("first", tokens, max_tokens=1)
    n.e.add("second", tokens, max_tokens=1)
    unrelated(n, behind)
    n.step()
    assert n.filled == [("first", BLOCKS)]
    assert n.count(c.MISS_NO_ROOM) == 0
    n.step()
    assert n.scheduled["second"] == [3]
    n.finish()
    assert n.filled == [("first", BLOCKS)]


@BOTH_WAYS
@pytest.mark.parametrize("common", [6, 2])
def test_prompts_that_part_copy_their_common_blocks_once_if_these_are_most(
    node: Callable[..., Node], common: int, attached: bool
) -> None:
    """If they are few, the second one waits for a copy that has to end before its own, but for no
    step."""
    n = node(attached)
    first, second = prompt(BLOCKS), [*prompt(common, 0), *prompt(BLOCKS - common, first=9000)]
    for tokens in (first, second):
        n.peer.hold_all(tokens)
    n.e.add("first", first)
    n.e.add("second", second)
    sent = n.step()
    copied_twice = attached and common == 2
    assert ("second" in sent.output.num_scheduled_tokens) is copied_twice
    n.finish()
    assert n.filled == [("first", BLOCKS), ("second", BLOCKS if copied_twice else BLOCKS - common)]
    assert n.scheduled["second"][0] == 3


@pytest.mark.parametrize("other", [window(40), states()], ids=["window", "states"])
def test_nobody_waits_for_an_import_that_leaves_it_nothing_to_hit(
    node: Callable[..., Node], other: Any
) -> None:
    """The windows and states that an import brings are those at its end."""
    n = node(False, specs=[full(), other])
    first, second = prompt(BLOCKS), [*prompt(6, 0), *prompt(BLOCKS - 6, first=9000)]
    for tokens in (first, second):
        n.peer.hold_all(tokens)
    n.e.add("first", first)
    n.e.add("second", second)
    sent = n.step()
    assert {load.load_id for load in sent.metadata.loads} == {"first", "second"}


@BOTH_WAYS
@pytest.mark.parametrize("shorter_first", [True, False])
def test_of_a_prompt_and_a_longer_one_each_block_is_copied_once(
    node: Callable[..., Node], shorter_first: bool, attached: bool
) -> None:
    n = node(attached)
    tokens = {"short": prompt(BLOCKS - 3), "long": prompt(BLOCKS)}
    n.peer.hold_all(tokens["long"])
    for name in sorted(tokens, reverse=shorter_first):
        n.e.add(name, tokens[name])
    n.finish()
    both = [("short", BLOCKS - 3), ("long", 3)]
    assert n.filled == (both if shorter_first else [("long", BLOCKS)])
    assert {steps[0] for steps in n.scheduled.values()} == {3}


@BOTH_WAYS
def test_where_only_the_second_is_worth_an_import_it_goes_on_from_what_the_first_computes(
    node: Callable[..., Node], attached: bool
) -> None:
    n = node(attached, least="auto")
    n.costs(per_token=0.3 / BLOCK_SIZE)
    n.peer.hold_all(prompt(BLOCKS))
    n.e.add("short", prompt(2))
    n.e.add("long", prompt(BLOCKS))
    n.finish()
    assert n.filled == [("long", BLOCKS - 2)]
    assert {name: steps[0] for name, steps in n.scheduled.items()} == {
        "short": 2 * BLOCK_SIZE + 3,
        "long": 3,
    }


@pytest.mark.parametrize("least", ["auto", "0"])
@pytest.mark.parametrize("longer", [BLOCKS, 20])
def test_a_short_prompt_does_not_wait_for_the_rest_of_a_long_copy(
    node: Callable[..., Node], longer: int, least: str
) -> None:
    """It is computed in 2.4 seconds: sooner than 12 blocks are copied that it does not need, if
    costs decide."""
    n = node(False, least=least)
    n.costs(per_token=0.3 / BLOCK_SIZE)
    n.peer.hold_all(prompt(longer))
    n.e.add("long", prompt(longer))
    n.step(ended=False)
    n.e.add("short", prompt(BLOCKS))
    n.step(ended=False)
    computed = longer > BLOCKS and least == "auto"
    assert ("short" in n.scheduled) is computed
    assert n.count(c.MISS_CHEAPER) == computed
    n.finish()
    assert n.filled == [("long", longer)]


def test_a_copy_is_waited_for_as_long_as_it_may_take(node: Callable[..., Node]) -> None:
    """A copy of many seconds is not made twice; one that does not end is.  A rank makes one copy at
    a time."""
    n = node(False)
    n.costs(per_token=1.0)
    prompts = {name: prompt(BLOCKS, first=2000 * i) for i, name in enumerate(LOADS, 1)}
    for name, tokens in prompts.items():
        n.peer.hold_all(tokens)
        n.e.add(name, tokens)
        n.step(ended=False)
    n.e.add("second", prompts["first"])
    n.step(ended=False)
    n.now += 4 * 2 * BLOCKS + TWIN_WAIT_SECONDS / 2
    n.step(ended=False)
    assert [name for name, _ in n.filled] == [*LOADS]
    n.now += TWIN_WAIT_SECONDS
    n.step(ended=False)
    assert [name for name, _ in n.filled] == [*LOADS, "second"]
    n.finish()


def test_copies_that_hang_are_waited_for_twice_at_most(node: Callable[..., Node]) -> None:
    n = node(False)
    n.costs(per_token=1.0)
    tokens, others = prompt(BLOCKS), [str(i) for i in range(5)]
    n.peer.hold_all(tokens)
    n.e.add("first", tokens)
    n.step(ended=False)
    for name in others:
        n.e.add(name, tokens)
    begun = []
    for copies in range(1, 4):  # so many are under way then, and are counted together
        n.step(ended=False)
        begun.append(len(n.filled))
        n.now += 4 * copies * BLOCKS + 2 * TWIN_WAIT_SECONDS if copies < 3 else 0
    for _ in others:  # a step begins one long copy
        n.step(ended=False)
    assert (begun, {name for name, _ in n.filled}) == ([1, 2, 3], {"first", *others})
    n.finish()


def test_nobody_waits_for_the_import_of_a_request_that_was_aborted(
    node: Callable[..., Node],
) -> None:
    """vLLM gives its blocks no hashes."""
    n = node(False)
    tokens = prompt(BLOCKS)
    n.peer.hold_all(tokens)
    n.e.add("first", tokens)
    n.step(ended=False)
    n.e.add("second", tokens)
    n.e.add("third", tokens)
    n.step(ended=False)
    assert n.filled == [("first", BLOCKS)]
    n.e.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    n.step(ended=False)
    assert n.filled == [("first", BLOCKS), ("second", BLOCKS)]
    n.finish()
    assert len(n.filled) == 2


@BOTH_WAYS
def test_blocks_that_are_not_there_yet_count_nowhere(
    node: Callable[..., Node], attached: bool
) -> None:
    """Neither as another request's hit, whatever vLLM bounds it by, nor as a common prefix of what
    runs (cascade attention, which vLLM has removed)."""
    n = node(attached)
    tokens = prompt(BLOCKS)
    n.peer.hold_all(tokens)
    n.e.add("first", tokens)
    sent = n.e.schedule()
    manager = n.e.scheduler.kv_cache_manager
    bounds = {"max_cache_hit_length": len(tokens) - 1}
    if "max_cache_hit_length" not in signature(manager.get_computed_blocks).parameters:
        bounds = {}  # vLLM 0.32

    def hits() -> set[int]:
        other = n.e.add(f"other{n.now}", tokens)
        n.now += 1
        return {manager.get_computed_blocks(other, **how)[1] for how in ({}, bounds)}

    assert hits() == {0}
    assert manager.get_num_common_prefix_blocks("first") == [0]
    assert sent.output.num_common_prefix_blocks == []
    loads = [*sent.metadata.loads, *sent.metadata.at_once]
    n.played.run(sent, *(LoadReport(load.load_id, load.lost) for load in loads))
    n.step()
    assert hits() == {BLOCKS * BLOCK_SIZE}
    assert getattr(n.e.scheduler, "aux_output_connector", None) is None
