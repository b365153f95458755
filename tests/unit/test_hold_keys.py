"""Which blocks a hold by keys reaches: own ones, and those that a lookup finds at peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from kvshm._base.ids import BlockId, Generation
from kvshm._engine.epoch_state import EngineSpec
from kvshm._engine.groups import Group, Groups
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._shm.layout import BlockRecord, pack_records, unpack_records
from kvshm._shm.slot_table import SlotTableView
from kvshm.config import Config

from .exporters import HASHES, Exporter, break_version
from .served import ServedNode, set_life
from .test_load_planner import begin_epoch

Peer = Callable[..., Exporter]


@pytest.fixture
def cache(served: ServedNode) -> Iterator[SchedulerHalf]:
    config = Config.from_env({"KVSHM_NAMESPACE": served.namespace})
    cache = SchedulerHalf(config, EngineSpec("me", "model", 32, 16), served.run_dir)
    begin_epoch(cache)
    set_life(cache.table)
    yield cache
    cache.close()


@pytest.fixture
def peer(cache: SchedulerHalf, served: ServedNode) -> Peer:
    made: list[Exporter] = []

    def make(*contents: int, shift: int = 0) -> Exporter:
        one = Exporter(served, len(made) + 1, f"e{len(made)}")
        one.publish(*contents, shift=shift)
        cache.epoch_state.peers.joined(one.info)
        made.append(one)
        return one

    return make


def own(cache: SchedulerHalf, *contents: int) -> None:
    records = [BlockRecord(HASHES[n], n, 0, n) for n in contents]
    cache.table.publish(pack_records(records), bytes(8 * len(contents)))
    cached = {HASHES[n]: BlockId(n) for n in range(32)}

    def own_blocks(hashes: Iterable[bytes], group: int) -> list[BlockId]:
        return [cached[digest] for digest in hashes if not group]

    cache.planner.search.own_blocks = own_blocks


def held(table: SlotTableView) -> set[int]:
    return {block for block, s in enumerate(table.slots()) if table.seconds_left(s.held_until)}


def test_blocks_are_held_by_whoever_has_them(cache: SchedulerHalf, peer: Peer) -> None:
    a, b = peer(0, 1, 2, shift=10), peer(5, 6, shift=20)
    own(cache, 3)
    assert cache.planner.hold(HASHES[:8], 60) == 6
    assert (held(a.table), held(b.table), held(cache.table)) == ({10, 11, 12}, {25, 26}, {3})
    assert cache.planner.hold(HASHES[6:9], 60) == 1
    assert cache.planner.hold([], 60) == 0


def test_one_block_is_held_in_one_place_and_first_in_the_own_cache(
    cache: SchedulerHalf, peer: Peer
) -> None:
    a, b = peer(0, 1, 2), peer(0, 1, 2)
    own(cache, 0)
    assert cache.planner.hold(HASHES[:3], 60) == 3
    assert held(cache.table) == {0}
    assert sorted(map(len, (held(a.table), held(b.table)))) == [0, 2]


def test_what_was_reused_or_ended_is_not_found(cache: SchedulerHalf, peer: Peer) -> None:
    a, b = peer(0, 1, 2), peer(4, 5)
    a.reuse(1)
    b.table.retire()
    own(cache, 7)
    cache.table.retract([BlockId(7)])
    assert cache.planner.hold(HASHES[:8], 60) == 2
    assert held(a.table) == {0, 2}


def test_a_spoilt_table_hides_no_other(cache: SchedulerHalf, peer: Peer) -> None:
    a, b = peer(0), peer(1)
    break_version(a)
    assert cache.planner.hold(HASHES[:2], 60) == 1
    assert held(b.table) == {1}


def test_a_hold_is_for_one_group(cache: SchedulerHalf, peer: Peer) -> None:
    cache.planner.search.groups = Groups([Group(0, 16), Group(1, 32, scale=2)])
    a = peer()
    records = [
        BlockRecord(HASHES[1], BlockId(3), Generation(0), 0, group=1),
        BlockRecord(HASHES[3], BlockId(4), Generation(0), 1, group=1),
        BlockRecord(HASHES[1], BlockId(5), Generation(0), 1),
    ]
    events = a.table.publish(pack_records(records), bytes(24))
    cache.epoch_state.peers.apply_events([(1, events)])
    assert len(list(unpack_records(events))) == 3
    assert cache.planner.hold(HASHES[:5], 60, group=1) == 2
    assert held(a.table) == {3, 4}
    assert cache.planner.hold(HASHES[:5], 60) == 1
    with pytest.raises(IndexError):
        cache.planner.hold(HASHES[:5], 60, group=2)


def test_without_an_epoch_nothing_is_held(cache: SchedulerHalf, peer: Peer) -> None:
    a = peer(0)
    cache.leave()
    assert cache.planner.hold(HASHES[:1], 60) == 0
    cache.end_epoch()
    assert cache.planner.hold(HASHES[:1], 60) == 0
    assert held(a.table) == set()
