"""Engines of two ranks each: what one rank of an import lacks, the engine lacks, and computes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshm._engine.load_plan import LoadReport, Plan
from kvshm._shm.statistics import LOADS_DONE, LOADS_FAILED, RECHECK_FAILED

from .chaos_node import ENGINE, RANK_ENDED
from .joined import Toy
from .processes import (
    PATIENCE_SECONDS,
    Managed,
    Node,
    fresh_node,
    has_ended,
    is_stopped,
    wait_until,
)
from .toy_engine import ToyEngine, ToyRank, chain_of

sys.path.append(str(Path(__file__).parent))  # as for chaos_engine, which is a program
from chaos_engine import RemoteRank

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

RANKS, BLOCKS, REGION_BYTES = 2, 24, 4096
CHAIN = chain_of(0, BLOCKS // 2)
REUSED = 3
"""The place in the chain of a block that is reused under its copy."""


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with fresh_node() as node:
        node.coordinator()
        monkeypatch.setenv("KVSHM_RUN_DIR", str(node.run_dir))
        monkeypatch.setenv("KVSHM_NAMESPACE", node.namespace)
        yield node


@pytest.fixture
def engine(node: Node) -> Iterator[Callable[..., ToyEngine]]:
    """Makes engines in this process."""
    made: list[ToyEngine] = []

    def make(kind: type[ToyEngine] = ToyEngine) -> ToyEngine:
        made.append(kind(BLOCKS, RANKS, REGION_BYTES))
        made[-1].open()
        return made[-1]

    yield make
    for each in made:
        each.close()


def leases(exporter: ToyEngine) -> int:
    table = exporter.cache.table
    assert table is not None
    return sum(bool(slot.leases) for slot in table.slots())


def find(engine: ToyEngine, blocks: int = len(CHAIN)) -> Plan:
    """The chain's beginning as another engine has it; waits until the engine knows of it."""
    found: list[Plan | None] = []

    def is_found() -> bool:
        found.append(engine.cache.planner.lookup(CHAIN, 0, blocks))
        return found[-1] is not None

    wait_until(is_found, "it is found")
    assert found[-1] is not None
    return found[-1]


def attach(engine: ToyEngine) -> None:
    """Have both ranks attach the chain's owner, by imports of its first block: an attach that
    fails is tried again by the next load."""
    (owner,) = (run.peer.info.epoch for run in find(engine, 1).runs)
    while not all(owner in rank.cache.attached() for rank in engine.ranks):
        first = Import(engine, find(engine, 1))
        first.begin()
        reports = [first.report_of(rank) for rank in engine.ranks]
        engine.cache.planner.end_load(first.load, reports)


class Import:
    """An import; the test tells the ranks."""

    def __init__(self, engine: ToyEngine, plan: Plan, at_once: bool = False) -> None:
        self.engine, self.released = engine, list[int]()
        for rank in engine.ranks:
            self.count_releases(rank)
        self.targets = engine._allocate(plan.num_blocks)
        self.load = engine.cache.planner.load(plan, "r", self.targets, attached=at_once)
        assert self.load.lost == ()

    def count_releases(self, rank: ToyRank) -> None:
        attachments = rank.cache._attachments
        release = attachments.release

        def released(*args) -> None:  # type: ignore[no-untyped-def]  # as that method has it
            self.released.append(rank.rank)
            release(*args)

        attachments.release = released  # type: ignore[method-assign]

    def begin(self) -> None:
        for rank in self.engine.ranks:
            rank.cache.begin_load(self.load)

    def report_of(self, rank: ToyRank) -> LoadReport:
        (report,) = rank.cache.poll(PATIENCE_SECONDS)
        return report

    def end(self, reports: list[LoadReport]) -> int:
        """End the load, and compute what must not be used of it.  Returns how many blocks need
        not be computed.  All bytes are right then."""
        engine = self.engine
        bad = engine.cache.planner.end_load(self.load, reports)
        good = next(
            (n for n, target in enumerate(self.targets) if target in bad), len(self.targets)
        )
        engine._compute(self.targets, CHAIN[: len(self.targets)], 0, good)
        for target, chain_hash in zip(self.targets, CHAIN, strict=False):
            assert [rank.wrong_bytes(target, chain_hash) for rank in engine.ranks] == [0] * RANKS
        return good


def copier_of(rank: ToyRank) -> Any:
    transport: Any = rank.transport
    return transport.copier


Way = Callable[[ToyEngine, Import], list[LoadReport]]


def copy_fails(exporter: ToyEngine, import_: Import) -> list[LoadReport]:
    first, second = import_.engine.ranks
    with Toy.held_up(second.transport):
        import_.begin()
        good = import_.report_of(first)
        copier = copier_of(second)
        wait_until(lambda: bool(copier._waiting), "the copy begins")
        for copy in list(copier._waiting):
            copy.cancel()
    return [good, import_.report_of(second)]


def is_late(exporter: ToyEngine, import_: Import) -> list[LoadReport]:
    """A step waits for the load, and for no longer than it has patience."""
    first, second = import_.engine.ranks
    (good,) = first.cache.load_at_once([import_.load], PATIENCE_SECONDS)
    copier = copier_of(second)
    copier.copy_now = lambda plan, _: copier.begin(plan)  # by the thread, which is held up
    with Toy.held_up(second.transport):
        (late,) = second.cache.load_at_once([import_.load], 0.05)
    return [good, late]


def is_reused(exporter: ToyEngine, import_: Import) -> list[LoadReport]:
    """After the first rank's re-check, and before the second one's."""
    first, second = import_.engine.ranks
    with Toy.held_up(second.transport):
        import_.begin()
        good = import_.report_of(first)
        block = exporter.by_hash[CHAIN[REUSED]]
        exporter.cache.publisher.retract_marked(exporter.marks, [block])
        exporter.cache.publisher.drain_before_dispatch()
        for rank in exporter.ranks:
            rank.compute(block, chain_of(1, 1)[0])
    return [good, import_.report_of(second)]


@pytest.mark.parametrize(
    ("happens", "usable"), [(copy_fails, 0), (is_late, 0), (is_reused, REUSED)], ids=lambda of: ""
)
def test_what_one_rank_lacks_is_computed_and_the_leases_come_back_once(
    engine: Callable[..., ToyEngine], happens: Way, usable: int
) -> None:
    """Whatever the other rank has: its report is good."""
    a, b = engine(), engine()
    a.request(CHAIN)
    attach(b)
    done, failed = (b.counted(each.label) for each in (LOADS_DONE, LOADS_FAILED))
    import_ = Import(b, find(b), at_once=happens is is_late)
    assert leases(a) == len(CHAIN)
    good, bad = happens(a, import_)
    assert good.bad == ()
    assert bad.bad == (import_.targets[REUSED],) if usable else tuple(import_.targets)
    assert import_.end([good, bad]) == usable
    wait_until(lambda: not leases(a), "leases come back")
    assert import_.released == [1]
    assert b.counted(LOADS_DONE.label) == done
    assert b.counted(LOADS_FAILED.label) == failed + 1
    assert b.counted(RECHECK_FAILED.label) == int(happens is is_reused)


# -- ranks in processes of their own


def ranks_of(engine: Managed) -> list[int]:
    said: dict[str, list[int]] = json.loads(engine.wait_out(lambda line: "ranks" in line))
    return said["ranks"]


def end(rank: int) -> None:
    process = os.pidfd_open(rank)
    signal.pidfd_send_signal(process, signal.SIGKILL)
    wait_until(lambda: has_ended(process), "it ends")
    os.close(process)


class Apart(ToyEngine):
    """Each of its ranks is a process."""

    def make_rank(self, rank: int, num_blocks: int, region_bytes: int) -> Any:
        return RemoteRank(rank, num_blocks, region_bytes, self.model)

    def close(self) -> None:
        self.cache.close()
        for rank in self.ranks:
            rank.end()  # type: ignore[attr-defined]  # all are remote


def test_what_was_copied_from_a_rank_that_died_counts_for_no_rank(
    engine: Callable[..., ToyEngine],
) -> None:
    a, b = engine(Apart), engine()
    a.request(CHAIN)
    attach(b)
    import_ = Import(b, find(b))
    first, second = b.ranks
    with Toy.held_up(second.transport):
        import_.begin()
        good = import_.report_of(first)
        end(a.ranks[1].pid)
    bad = import_.report_of(second)
    assert (good.bad, bad.bad) == ((), tuple(import_.targets))
    assert import_.end([good, bad]) == 0
    assert import_.released == [1]
    assert not leases(a)


def test_a_rank_that_is_killed_in_its_copy_takes_its_engine_and_all_its_leases_along(
    node: Node, engine: Callable[..., ToyEngine]
) -> None:
    """The other rank's copy ends well, and gives nothing back: it is not the last."""
    a = engine()
    a.request(CHAIN)
    options = ("--ranks", str(RANKS), "--region-bytes", str(REGION_BYTES), "--families", "1")
    stops = {"KVSHM_TEST_SYNC_POINT": "COPY_BEGINS:stop"}
    importer = node.processes.start("importer", ENGINE, *options, environ=stops)
    ranks = ranks_of(importer)
    for rank in ranks:
        wait_until(lambda rank=rank: is_stopped(rank), "it stops in its copy")
    assert leases(a) > 0
    end(ranks[1])
    os.kill(ranks[0], signal.SIGCONT)
    assert importer.wait() == RANK_ENDED
    wait_until(lambda: not leases(a), "the coordinator clears them")
    assert a.counted("forced") == 0
