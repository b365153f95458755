"""What the scheduler plans of a prefix, and what it makes of a load's reports."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest

from kvshm._base.copy_path import CopyPath
from kvshm._base.ids import NO_LEASE_BIT, BlockId, Epoch, Generation, Rank, block_hash
from kvshm._base.roles import Decision
from kvshm._engine.costs import REFUSALS_PER_TRIAL, UNMEASURED_TOKENS
from kvshm._engine.epoch_state import EngineSpec
from kvshm._engine.groups import Group, Groups, Part
from kvshm._engine.load_plan import (
    NO_TICKET,
    LoadFailure,
    LoadOrder,
    LoadReport,
    Piece,
    PieceFailure,
    Plan,
)
from kvshm._engine.load_planner import PLAN_SECONDS, LoadResult
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._node.peer import Peer, PlannedRun
from kvshm._node.protocol import RankInfo
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.statistics import (
    COMPUTING_US,
    IMPORTED_BLOCKS,
    MEASURED_US,
    MISS_CHEAPER,
    MISS_TOO_LONG,
    MISS_TOO_SHORT,
    TRIED,
)
from kvshm.config import Config
from kvshm.interfaces import Region

from .exporters import HASHES, Exporter
from .played_transport import memory_of
from .served import ServedNode, set_life

GOOD = [LoadReport("load", ())]
TARGETS = (BlockId(3), BlockId(4))


@pytest.fixture
def cache(served: ServedNode) -> Iterator[SchedulerHalf]:
    config = Config.from_env({"KVSHM_NAMESPACE": served.namespace})
    cache = SchedulerHalf(config, EngineSpec("me", "model", 8, 16), served.run_dir)
    begin_epoch(cache)
    yield cache
    cache.close()


def begin_epoch(cache: SchedulerHalf) -> None:
    rank = RankInfo(pid=os.getpid(), memory=memory_of(0))
    cache.open_epoch([rank], lambda: {"weights": "w"})
    deadline = time.monotonic() + 100
    while cache.table is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def plan_of(epoch: int, runs: tuple[PlannedRun, ...], nbytes: int = 0) -> Plan:
    length = sum(run.num_blocks for run in runs)
    return Plan(Epoch(epoch), 0, length, (Part(0, 0, length),), runs, time.monotonic(), nbytes)


def load_in(cache: SchedulerHalf) -> LoadOrder:
    """A load of two blocks, as it was begun in the present epoch."""
    assert cache.table is not None
    piece = Piece(Epoch(1), (memory_of(1),), bytes(96), b"\0\0", TARGETS, 8)
    return LoadOrder("load", cache.table.epoch, NO_TICKET, NO_LEASE_BIT, (piece,), ())


def test_a_load_that_all_ranks_found_good_may_be_used(cache: SchedulerHalf) -> None:
    assert cache.planner.end_load(load_in(cache), GOOD) == set()


def test_blocks_behind_a_gap_do_not_count_as_imported(cache: SchedulerHalf) -> None:
    """They are copied well, but vLLM computes everything from the gap on."""
    cache.planner.end_load(load_in(cache), GOOD)
    cache.planner.end_load(load_in(cache), [LoadReport("load", TARGETS[1:])])
    cache.planner.end_load(load_in(cache), [LoadReport("load", TARGETS[:1])])
    assert cache.planner.take_results() == [
        LoadResult(2, 2, False, 2 * 8),
        LoadResult(1, 1, True, 8),
        LoadResult(0, 0, True),
    ]
    assert cache.planner.take_results() == []


def test_a_load_takes_as_long_as_its_slowest_rank_and_path(cache: SchedulerHalf) -> None:
    fast = LoadReport("load", (), seconds=0.25, paths=(CopyPath.NVLINK,))
    slow = LoadReport("load", TARGETS, seconds=0.5, paths=(CopyPath.PCIE,))
    cache.planner.end_load(load_in(cache), [slow, fast])
    cache.planner.end_load(load_in(cache), [LoadReport("load", (), seconds=0.5, paths=(None,))])
    taken = [result.taken for result in cache.planner.take_results()]
    assert taken == [(CopyPath.PCIE, 0.5), None]


def test_who_has_left_or_was_ended_plans_no_load(
    cache: SchedulerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks would copy nothing: every match would end in blocks to compute after all."""

    def plan() -> Plan | None:
        return cache.planner.lookup([b"hash"], 0, 1)

    found = plan_of(1, ())
    monkeypatch.setattr(cache.planner, "_make_plan", lambda *_: found)
    assert plan() is found, "its ranks open the epoch with the first step"
    assert cache.table is not None
    set_life(cache.table)
    assert plan() is found
    cache.table.end_life(None)  # as the coordinator does
    assert plan() is None
    cache.end_epoch()
    begin_epoch(cache)
    assert plan() is found
    cache.leave()
    assert plan() is None


def test_an_engine_that_may_not_import_plans_no_load(
    cache: SchedulerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plan_of(1, ())
    monkeypatch.setattr(cache.planner, "_make_plan", lambda *_: found)
    cache.role = Decision("", "found late")
    assert cache.planner.lookup([b"hash"], 0, 1) is None
    cache.role = Decision("found late", "")
    assert cache.planner.lookup([b"hash"], 0, 1) is found


def test_a_plan_says_how_much_each_rank_has_to_copy(
    cache: SchedulerHalf, served: ServedNode
) -> None:
    """Whether importing is worth its time depends on it."""
    regions = [Region(0, 128, block_bytes, 64) for block_bytes in (64, 32)]
    for epoch, contents in ((1, (0, 1, 2)), (2, (3, 4))):
        peer = Exporter(served, epoch, f"e{epoch}", regions=regions)
        peer.publish(*contents)
        cache.epoch_state.peers.joined(peer.info)
    plan = cache.planner.lookup(HASHES, 0, 9)
    assert plan is not None
    assert (len(plan.runs), plan.num_blocks, plan.nbytes) == (2, 5, 5 * 96)


def test_what_a_peer_shows_before_its_ranks_serve_it_is_found_once_they_do(
    cache: SchedulerHalf, served: ServedNode
) -> None:
    """No lease succeeds before that; the blocks are as they were."""
    peers = cache.epoch_state.peers
    peer = Exporter(served, 1, "early")
    peer.table.end_life(None)
    peer.publish(0, 1)
    peers.joined(peer.info)
    plan = cache.planner.lookup(HASHES, 0, 2)
    assert plan is not None
    assert cache.planner.load(plan, "early", TARGETS).lost == TARGETS
    assert cache.planner.lookup(HASHES, 0, 2) is None, "not asked again at once"
    peer.table.set_life(Rank(0))
    peers.ranks_attached([peer.info.epoch])
    plan = cache.planner.lookup(HASHES, 0, 2)
    assert plan is not None
    assert cache.planner.load(plan, "served", TARGETS).lost == ()


def test_a_plan_leases_nothing_once_it_is_old(cache: SchedulerHalf, served: ServedNode) -> None:
    peer = Exporter(served, 1, "e")
    peer.publish(0, 1)
    cache.epoch_state.peers.joined(peer.info)
    for age, lost in ((PLAN_SECONDS - 1, ()), (PLAN_SECONDS + 1, TARGETS)):
        plan = cache.planner.lookup(HASHES, 0, 2)
        assert plan is not None
        aged = plan._replace(made_at=plan.made_at - age)
        assert cache.planner.load(aged, "load", TARGETS).lost == lost


def test_nothing_is_used_of_a_load_whose_own_epoch_ended_after_its_ranks_looked(
    cache: SchedulerHalf,
) -> None:
    """Else the blocks, computed with the old weights, would be shown in the next epoch."""
    load = load_in(cache)
    cache.end_epoch()
    assert cache.planner.end_load(load, GOOD) == set(TARGETS)
    begin_epoch(cache)
    assert cache.planner.end_load(load, GOOD) == set(TARGETS)


@pytest.mark.parametrize("reason", LoadFailure)
def test_a_peer_is_judged_by_what_is_its_fault_alone(
    cache: SchedulerHalf, served: ServedNode, reason: LoadFailure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures in a row mean quarantine: a peer that is slow to be opened has done nothing."""
    judged: list[str] = []
    peers = cache.epoch_state.peers
    peers.joined(Exporter(served, 1, "peer").info)
    monkeypatch.setattr(peers, "load_failed", lambda epoch: judged.append("failed"))
    monkeypatch.setattr(peers, "load_succeeded", lambda epoch: judged.append("fine"))
    failure = PieceFailure(Epoch(1), reason, b"")
    reports = [LoadReport("load", TARGETS, (failure,))]
    assert cache.planner.end_load(load_in(cache), reports) == set(TARGETS)
    avoided = peers._last_pause_end > 0
    assert avoided is (reason is LoadFailure.NOT_ATTACHED)
    own_fault = {
        LoadFailure.UNREACHABLE,
        LoadFailure.COPY_FAILED,
        LoadFailure.MISMATCH,
    }
    assert judged == ["failed" if reason in own_fault else "fine"]


def know_prefills_price(cache: SchedulerHalf) -> None:
    for _ in range(20):
        for tokens in (1, 2000):
            cache.planner.costs.add_step(tokens, 0.005 + 1e-5 * tokens)


def test_what_is_computed_sooner_is_declined_and_now_and_then_tried(cache: SchedulerHalf) -> None:
    """1 ms to compute, or 5 s to copy; or next to nothing."""
    know_prefills_price(cache)
    assert cache.table is not None
    runs = (PlannedRun(cast(Peer, None), bytes(48 * 6)),)
    dear = plan_of(cache.table.epoch, runs, nbytes=10**10)
    cheap = plan_of(cache.table.epoch, runs, nbytes=1000)
    said = [cache.planner.worth(dear, 0.0) for _ in range(REFUSALS_PER_TRIAL)]
    assert said == [False] * (REFUSALS_PER_TRIAL - 1) + [True]
    assert cache.table.counters.read(MISS_CHEAPER) == REFUSALS_PER_TRIAL - 1
    assert cache.table.counters.read(TRIED) == 1
    assert cache.planner.worth(cheap, 0.0)
    assert not cache.planner.worth(cheap, waiting=1.0)


def test_what_loads_took_is_what_the_next_is_expected_to_take(cache: SchedulerHalf) -> None:
    load = load_in(cache)
    load = replace(load, pieces=(replace(load.pieces[0], block_bytes=10_000),))
    assert load.nbytes == 20_000
    for _ in range(100):
        cache.planner.end_load(load, [LoadReport("load", (), seconds=0.01), GOOD[0]])
    assert cache.planner.load_seconds(load) == pytest.approx(0.01, rel=0.2)
    assert cache.table is not None
    assert cache.table.counters.read(MEASURED_US) == 100 * 10_000


@pytest.mark.parametrize("reason", [LoadFailure.TOO_LATE, LoadFailure.COPY_FAILED])
def test_a_load_that_copied_only_a_part_shows_no_more_than_that_it_takes_longer(
    cache: SchedulerHalf, reason: LoadFailure
) -> None:
    load = load_in(cache)
    load = replace(load, pieces=(replace(load.pieces[0], block_bytes=10_000),))
    for _ in range(20):
        cache.planner.end_load(load, [LoadReport("load", (), seconds=0.01)])
    expected = cache.planner.load_seconds(load)
    failures = (PieceFailure(Epoch(1), reason, b""),)
    for _ in range(20):
        cache.planner.end_load(load, [LoadReport("load", TARGETS, failures, seconds=50e-6)])
    assert cache.planner.load_seconds(load) == expected
    assert cache.table is not None
    assert cache.table.counters.read(MEASURED_US) == 20 * 10_000
    cache.planner.end_load(load, [LoadReport("load", TARGETS, failures, seconds=0.02)])
    assert cache.planner.load_seconds(load) > expected


# -- several KV cache groups: prompts are counted in hashes, whatever the groups need of them

SEVERAL = Groups([Group(0, 16), Group(1, 16, window=40), Group(2, 16, window=40)])


def hold_in_groups(cache: SchedulerHalf, served: ServedNode, hashes: int) -> None:
    cache.planner.search.groups = SEVERAL
    peer = Exporter(served, 1, "e", regions=[Region(0, 128, 64, 64)])
    places = [(g.number, i) for g in SEVERAL.all for i in range(hashes)]
    records = [
        BlockRecord(block_hash(HASHES[i]), BlockId(20 * g + i), Generation(0), i, group=g)
        for g, i in places
    ]
    peer.table.publish(pack_records(records), bytes(8 * len(records)))
    cache.epoch_state.peers.joined(peer.info)


def use_setting(cache: SchedulerHalf, name: str, value: int) -> None:
    cache.planner._config = Config.from_env({"KVSHM_" + name: str(value)})


def test_the_most_that_is_imported_counts_blocks_of_one_group_behind_the_local_hit(
    cache: SchedulerHalf, served: ServedNode
) -> None:
    hold_in_groups(cache, served, 12)
    use_setting(cache, "MAX_IMPORT_BLOCKS", 4)
    assert cache.planner.lookup(HASHES, 2, 7) is None
    assert cache.table is not None
    assert cache.table.counters.read(MISS_TOO_LONG) == 1
    plan = cache.planner.lookup(HASHES, 2, 6)
    assert plan is not None
    assert (plan.start, plan.length, plan.num_blocks) == (2, 4, 4 + 3 + 3)
    assert plan.parts == (Part(0, 2, 4), Part(1, 3, 3), Part(2, 3, 3))


def test_the_least_that_is_imported_counts_tokens_behind_the_local_hit(
    cache: SchedulerHalf, served: ServedNode
) -> None:
    """Not the blocks of all groups, and not the tokens of the local hit."""
    hold_in_groups(cache, served, 10)
    use_setting(cache, "MIN_PREFIX_TOKENS", 80)
    assert cache.planner.lookup(HASHES, 6, 12) is None
    assert cache.planner.lookup(HASHES, 5, 12) is not None
    assert cache.table is not None
    assert cache.table.counters.read(MISS_TOO_SHORT) == 1


def test_what_an_import_spares_is_the_tokens_of_its_prefix_once(
    cache: SchedulerHalf, served: ServedNode
) -> None:
    """Its blocks of all groups would be those of a longer prefix."""
    hold_in_groups(cache, served, 16)
    short, long = (cache.planner.lookup(HASHES, 0, hashes) for hashes in (15, 16))
    assert short is not None
    assert long is not None
    assert short.num_blocks * 16 > UNMEASURED_TOKENS == long.length * 16
    assert not cache.planner.worth(short, 0.0)
    assert cache.planner.worth(long, 0.0)


def test_a_load_of_several_groups_counts_its_prefix_once_and_as_a_whole(
    cache: SchedulerHalf, served: ServedNode
) -> None:
    hold_in_groups(cache, served, 10)
    know_prefills_price(cache)
    plan = cache.planner.lookup(HASHES, 0, 10)
    assert plan is not None
    targets = [BlockId(number) for number in range(plan.num_blocks)]
    assert len(targets) == 10 + 3 + 3
    load = cache.planner.load(plan, "load", targets)
    assert cache.planner.end_load(load, [LoadReport("load", (), seconds=0.01)]) == set()
    assert cache.planner.end_load(load, [LoadReport("load", (targets[-1],))]) == set(targets)
    assert cache.planner.take_results() == [
        LoadResult(16, 10, False, load.nbytes),
        LoadResult(0, 0, True),
    ]
    assert cache.table is not None
    seconds = cache.planner.costs.compute_seconds(10 * 16)
    assert cache.table.counters.read(COMPUTING_US) == int(seconds * 1e6)
    assert cache.table.counters.read(IMPORTED_BLOCKS) == 16


def test_what_was_found_for_another_prompt_is_forgotten(
    cache: SchedulerHalf, served: ServedNode
) -> None:
    """The groups of full attention share more with the peer than what can be imported."""
    hold_in_groups(cache, served, 10)
    served.engines[-1].table.retract([BlockId(20 + 9)])
    cache.epoch_state.peers.rescan(Epoch(1))
    plan = cache.planner.lookup(HASHES, 0, 10)
    assert plan is not None
    assert (plan.length, cache.planner.common_prefix) == (9, 10)
    assert cache.planner.lookup(HASHES[50:], 0, 10) is None
    assert cache.planner.common_prefix == 0
    use_setting(cache, "MAX_IMPORT_BLOCKS", 4)
    assert cache.planner.lookup(HASHES, 0, 10) is None
    assert cache.planner.common_prefix == 10
    use_setting(cache, "MAX_IMPORT_BLOCKS", 9)
    assert cache.planner.lookup(HASHES, 0, 10) is not None
    cache.leave()
    assert cache.planner.lookup(HASHES[50:], 0, 10) is None
    assert cache.planner.common_prefix == 0
